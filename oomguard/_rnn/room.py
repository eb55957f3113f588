"""The bytes that one recurrent call needs, plain or in segments, and the segments with which it fits into a budget.

The arithmetic is that of `Call -> Footprint`. Whatever else the process holds, such as what earlier calls keep for
their backward passes, is in the bytes that it uses when the call begins.
"""

import math
import os
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
import torch

from oomguard._device.cpu import trim_heap
from oomguard._device.cuda import Cuda
from oomguard._device.find import find_target
from oomguard._device.proc import read_resident
from oomguard._estimate.call import GATES, Call, Count, Footprint, Ints, maximum
from oomguard._estimate.engines import cudnn, native, onednn
from oomguard._estimate.malloc import ENVIRONMENT, reserved_bytes
from oomguard._estimate.margins import bare
from oomguard._estimate.moments import HEAP_PERCENT
from oomguard._estimate.target import Target
from oomguard._rnn.calls import CELLS, RecurrentCall

COUNTS = 200  # numbers of segments that are compared, from 2 to the number of steps, each about 1.05 of the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything about a call that its memory depends on."""

    call: Call  # all layers and directions
    device: str
    engine: str  # the engine of dense sequences
    heap: str
    half: bool  # whether it computes in fp16
    batch_first: bool
    dropout: bool

    @property
    def cuda(self) -> bool:
        """Whether it runs on a card."""
        return self.device != "cpu"

    @property
    def output_bytes(self) -> Count:
        """The outputs of one layer, in all directions."""
        return self.call.element_bytes * self.call.tokens * (self.call.output * self.call.directions)

    def with_margin(self, busy: Count, *, segments: bool) -> Count:
        """Add what heaps keep beside the bytes in use, and the margin of estimates."""
        cell, system = self.call.cell, not self.cuda and self.heap == "system"
        percent = HEAP_PERCENT[cell] if system and self.engine == "native" else 100
        percent += HEAP_PERCENT["segments"] if system and segments else 0
        device, allocator = ("cuda", "system") if self.cuda else ("cpu", self.heap.split()[0])
        margin = bare(device, self.engine, allocator, "fp32", cell == "rnn" and not self.cuda)
        return busy // 1000 * math.ceil(10 * percent * (1 + margin))


def read_request(call: RecurrentCall) -> Request:
    """Describe a call by numbers."""
    inputs, cell, device = call.inputs, CELLS[call.kernel], call.inputs.device
    hidden, width = call.weights[0].shape[0] // GATES[cell], call.states[0].shape[-1]
    cast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if cast else inputs.dtype
    fast = cell == "lstm" and width == hidden and dtype != torch.float64 and torch.backends.mkldnn.enabled
    described = Call(
        cell=cell,
        steps=len(call.sizes),
        rows=call.sizes[0],
        tokens=sum(call.sizes),
        inputs=inputs.shape[-1],
        hidden=hidden,
        projection=None if width == hidden else width,
        layers=call.layers,
        directions=call.directions,
        element_bytes=dtype.itemsize if device.type == "cuda" else max(4, dtype.itemsize),
        packed=call.sizes[0] != call.sizes[-1],
        input_gradient=inputs.requires_grad,
    )
    return Request(
        call=described,
        device=str(device),
        engine="cudnn" if device.type == "cuda" else "onednn" if fast else "native",
        heap=_heap(),
        half=dtype == torch.float16,
        batch_first=call.batch_first,
        dropout=call.dropout > 0,
    )


@cache
def _heap() -> str:
    """The heap of this process, by the environment that it was started with."""
    for heap, variables in ENVIRONMENT.items():
        if variables and all(os.environ.get(name) == value for name, value in variables.items()):
            return heap
    return "system"


def choose_segments(request: Request, budget_bytes: int) -> int:
    """Return 1 if the plain call fits into the budget beside what is in use now, else the least segments that fit.

    If none fits, those that need least.
    """
    if _peak(request.device, plain_bytes(request)) <= budget_bytes:
        return 1
    if not request.cuda:
        trim_heap()  # what is free in the heap counts as used until it is given back
        if _peak(request.device, plain_bytes(request)) <= budget_bytes:
            return 1
    counts: Ints = np.unique(np.geomspace(min(2, request.call.steps), request.call.steps, COUNTS).astype(np.int64))
    needs = segmented_bytes(request, counts)
    fits = np.flatnonzero(_peak(request.device, needs) <= budget_bytes)
    best = int(counts[fits[0] if len(fits) else needs.argmin()])
    return best if needs.min() < plain_bytes(request) else 1


def _peak(device: str, need: Count) -> Count:
    """The bytes that this process will use if it needs so many more than now."""
    if device == "cpu":
        return read_resident() + need
    return context_bytes(device) + reserved_bytes(torch.cuda.memory_allocated(device) + need)


@cache
def _target(device: str) -> Target:
    return find_target(device)


@cache
def context_bytes(device: str) -> int:
    """The bytes of a card that this process holds beside those of PyTorch's allocator."""
    return Cuda(torch.device(device).index or 0).reading().runtime_bytes


@lru_cache(4096)
def plain_bytes(request: Request) -> int:
    """The bytes that the plain call adds at its peak: in its forward pass, or in its backward pass."""
    between = 2 * request.output_bytes * (request.call.layers - 1) if request.dropout else 0
    return int(request.with_margin(_busy_bytes(request, request.call) + between, segments=False))


def segmented_bytes(request: Request, counts: Ints) -> Ints:
    """The bytes that the call adds at its peak with each number of segments, which is in its backward pass."""
    call, both = request.call, request.call.directions == 2
    piece = replace(
        call,
        steps=-(-call.steps // counts),
        tokens=-(-call.tokens // counts),
        packed=call.packed and request.cuda,
        layers=1 if both else call.layers,
        directions=1,
        input_gradient=True,
    )
    outputs, width = request.output_bytes, call.output + (call.hidden if call.cell == "lstm" else 0)
    whole = outputs * (call.layers + 1 if both else 1) + outputs  # the outputs that stay, and their gradient
    whole = whole + (call.element_bytes * call.tokens * call.inputs if call.input_gradient else 0)
    masks = call.tokens * call.output * call.directions * (call.layers - 1) if request.dropout else 0
    borders = counts * (call.element_bytes * call.rows * width * call.layers * call.directions)
    return np.asarray(request.with_margin(_busy_bytes(request, piece) + borders, segments=True) + whole + masks)


def _busy_bytes(request: Request, call: Call) -> Count:
    """What a call keeps, and the larger of what its forward and its backward pass need beside that."""
    layers = _footprints(request, call)
    output = call.element_bytes * call.tokens * (call.output * call.directions)
    total = maximum(*(maximum(layer.forward, output + layer.backward) for layer in layers), 0)
    for layer in layers:
        total = total + layer.kept + layer.heap + layer.weight_gradients + (0 if layer.keeps_output else output)
    return total


def _footprints(request: Request, call: Call) -> list[Footprint]:
    """The footprint of each kernel call: all layers at once on a card, one layer after the other on the CPU."""
    if request.cuda:
        target = _target(request.device)
        return [cudnn.footprint(call, target, half=request.half, batch_first=request.batch_first)]
    fast = request.engine == "onednn" and not call.packed
    footprint = onednn.footprint if fast else native.footprint
    calls = [replace(call, layers=1)]
    if call.layers > 1:
        above = replace(call, layers=1, inputs=call.output * call.directions, input_gradient=True)
        calls += [above] * (call.layers - 1)
    return [footprint(each, heap=request.heap) for each in calls]
