"""Stand-ins for recurrent calls: they allocate what the kernel would, by its footprint, and compute nothing."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from oomguard._estimate.call import Call, Count, Footprint, maximum
from oomguard._estimate.engines import cudnn, native, onednn
from oomguard._estimate.target import Target
from oomguard._task.live import Live

_functions: Any = torch._C._VariableFunctions
CELLS = {_functions.lstm: "lstm", _functions.gru: "gru", _functions.rnn_tanh: "rnn", _functions.rnn_relu: "rnn"}


class Sequence(NamedTuple):
    """One recurrent call of PyTorch, its input time-first."""

    cell: str
    inputs: Tensor  # steps x rows x features, or the packed rows x features
    sizes: Tensor | None  # rows of every step, if it is packed
    states: tuple[Tensor, ...]
    weights: list[Tensor]
    layers: int
    dropout: float
    directions: int
    batch_first: bool

    @property
    def steps(self) -> int:
        """Time steps."""
        return self.inputs.shape[0] if self.sizes is None else self.sizes.shape[0]

    @property
    def tokens(self) -> int:
        """Time steps of all rows."""
        return math.prod(self.inputs.shape[:-1])

    def cast(self, dtype: torch.dtype) -> "Sequence":
        """The call as autocast runs it."""
        states, weights = (tuple(one.to(dtype) for one in some) for some in (self.states, self.weights))
        return self._replace(inputs=self.inputs.to(dtype), states=states, weights=[*weights])


class Kernels(TorchFunctionMode):
    """Replaces recurrent calls, packing and CTC by stand-ins."""

    def __init__(self, live: Live, target: Target, segments: int = 1) -> None:
        super().__init__()
        self.live, self.target, self.segments = live, target, segments
        self.engines: dict[str, int] = {}  # bytes that calls of each engine keep
        self.cells: set[str] = set()
        self.steps = 0  # time steps of the longest call

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _functions._pack_padded_sequence:
            return self._pack(*args)
        if function is _functions._pad_packed_sequence:
            return self._pad(*args)
        if function in (torch.ctc_loss, torch.nn.functional.ctc_loss):
            return self._ctc(*args, **(kwargs or {}))
        if function in CELLS:
            return self._call(read_call(CELLS[function], args))
        return function(*args, **(kwargs or {}))

    def _call(self, call: Sequence) -> tuple[Tensor, ...]:
        self.cells.add(call.cell)
        self.steps = max(self.steps, call.steps)
        pieces = min(self.segments, call.steps) if torch.is_grad_enabled() else 1
        # cuDNN runs all layers in one call; segments go through all layers of one direction together
        blocks = 1 if (self.target.cuda and pieces == 1) or (pieces > 1 and call.directions == 1) else call.layers
        if self.target.cuda and torch.is_autocast_enabled("cpu"):  # fake tensors of a card live on the CPU
            call = call.cast(torch.get_autocast_dtype("cpu"))  # on the CPU, as `_estimate` does, it counts like fp32
        x, ends = call.inputs, list[tuple[Tensor, ...]]()
        if call.batch_first and not self.target.cuda and x.shape[1] > 1:
            x = x.contiguous()
        each, slots = len(call.weights) // blocks, len(call.states[0]) // blocks
        for block in range(blocks):
            if block and call.dropout:
                x = torch.nn.functional.dropout(x, call.dropout)
            states = tuple(one[block * slots : (block + 1) * slots] for one in call.states)
            weights = call.weights[block * each : (block + 1) * each]
            own = sum(one.numel() * one.element_size() for one in weights)
            footprint = self._footprint(call, x, call.layers // blocks, pieces, own)
            output = (*x.shape[:-1], states[0].shape[-1] * call.directions)
            apply: Any = _Kernel.apply
            x, *end = apply(self.live, footprint, output, len(states), x, *states, *weights)
            ends.append(tuple(end))
        final = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*ends, strict=True)]
        return x.transpose(0, 1) if call.batch_first else x, *final

    def _footprint(self, sequence: Sequence, x: Tensor, layers: int, pieces: int, weights_bytes: int) -> Footprint:
        """The footprint of a block of layers, whole or in segments."""
        hidden, output = sequence.states[-1].shape[-1], sequence.states[0].shape[-1]
        call = Call(
            cell=sequence.cell,
            steps=-(-sequence.steps // pieces),
            rows=sequence.states[0].shape[1],
            tokens=-(-sequence.tokens // pieces),
            inputs=x.shape[-1],
            hidden=hidden,
            projection=output if output != hidden else None,
            layers=layers if self.target.cuda else 1,
            directions=sequence.directions if pieces == 1 else 1,
            element_bytes=x.element_size(),
            packed=sequence.sizes is not None and (self.target.cuda or pieces == 1),  # segments of the CPU are dense
            input_gradient=x.requires_grad,
        )
        calls = [call, *[replace(call, inputs=output, input_gradient=True)] * (layers - call.layers)]
        footprints = [self._by_engine(one, sequence) for one in calls]
        if pieces == 1:
            return footprints[0]
        masks = sequence.tokens * output * (layers - 1) if sequence.dropout else 0
        new = weights_bytes // sequence.directions
        gradients = weights_bytes + new + maximum(*(one.weight_gradients for one in footprints)) - new // layers
        return _in_segments(footprints, call, pieces, (pieces - 1) * layers, masks, gradients)

    def _by_engine(self, call: Call, sequence: Sequence) -> Footprint:
        """The footprint of a call by the engine that PyTorch takes."""
        even = not call.packed or sequence.sizes is None or int(sequence.sizes[0]) == int(sequence.sizes[-1])
        fast = call.cell == "lstm" and call.projection is None and even and sequence.inputs.dtype == torch.float32
        if self.target.cuda:
            engine, half = "cudnn", sequence.inputs.dtype == torch.float16
            found = cudnn.footprint(call, self.target, half=half, batch_first=sequence.batch_first)
        elif fast and torch._C._get_mkldnn_enabled():
            engine, found = "onednn", onednn.footprint(call, heap=self.live.heap)
        else:
            engine, found = "native", native.footprint(call, heap=self.live.heap)
        self.engines[engine] = self.engines.get(engine, 0) + int(found.kept) + int(found.heap)
        return found

    def _pack(self, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        rows = lengths.tolist()
        sizes = torch.tensor([sum(length > step for length in rows) for step in range(max(rows))])
        features = x.shape[2:]
        return _Copy.apply(self.live, (sum(rows), *features), 1, x), sizes  # type: ignore[no-untyped-call]

    def _pad(self, x: Tensor, sizes: Tensor, batch_first: bool, value: float, total: int) -> tuple[Tensor, Tensor]:
        steps, rows = max(len(sizes), total), int(sizes[0])
        y = _Copy.apply(self.live, (steps, rows, *x.shape[1:]), 2, x)  # type: ignore[no-untyped-call]
        lengths = (sizes[None, :] > torch.arange(rows)[:, None]).sum(1)
        return y.transpose(0, 1) if batch_first else y, lengths

    def _ctc(
        self, log_probs: Tensor, targets: Tensor, inputs: Any, lengths: Any, *options: Any, **named: Any
    ) -> Tensor:
        longest = int(lengths.max()) if isinstance(lengths, Tensor) else max(lengths)
        rows = log_probs.shape[1] if log_probs.dim() == 3 else 1
        table = rows * log_probs.shape[0] * (2 * longest + 1) * log_probs.element_size()
        reduction = named.get("reduction", options[1] if len(options) > 1 else 1)
        loss: Tensor = _Ctc.apply(self.live, table, rows, log_probs)  # type: ignore[no-untyped-call]
        return loss if reduction in (0, "none") else loss.sum()


def read_call(cell: str, args: Any) -> Sequence:
    """Read the arguments of a recurrent function of PyTorch: padded (`x, h, weights`) or packed (`x, sizes, h`)."""
    packed = isinstance(args[3], list | tuple) and isinstance(args[1], Tensor)
    if packed:
        x, sizes, h, weights, _, layers, dropout, training, both = args[:9]
        batch_first = False
    else:
        (x, h, weights, _, layers, dropout, training, both, batch_first), sizes = args[:9], None
        x = x.transpose(0, 1) if batch_first else x
    return Sequence(
        cell=cell,
        inputs=x,
        sizes=sizes,
        states=(h,) if isinstance(h, Tensor) else tuple(h),
        weights=list(weights),
        layers=layers,
        dropout=dropout if training else 0.0,
        directions=2 if both else 1,
        batch_first=batch_first,
    )


def _in_segments(
    footprints: list[Footprint], call: Call, pieces: int, borders: int, masks: int, gradients: Count
) -> Footprint:
    """Layers in segments keep states at the borders and dropout masks; backward runs a segment again and differentiates
    it. The gradients of its weights come beside those of the segments before it."""
    states = call.output + (call.hidden if call.cell == "lstm" else 0)
    element: Any = call.element_bytes
    output, entry = (element * call.tokens * width for width in (call.output, call.inputs * pieces))
    kept: Any = sum(one.kept + one.heap for one in footprints)
    return Footprint(
        kept=borders * element * call.rows * states + masks,
        keeps_output=False,
        forward=maximum(*(one.inference for one in footprints)) + output,
        backward=kept + maximum(*(one.backward for one in footprints)) + output + entry,
        weight_gradients=gradients,
        inference=footprints[0].inference,
    )


class _Kernel(torch.autograd.Function):
    """One call of a kernel: allocates its output and what it keeps, and in backward the gradients and its workspace."""

    @staticmethod
    def forward(ctx: Any, live: Live, footprint: Footprint, shape: Any, states: int, x: Tensor, *others: Tensor) -> Any:
        y = x.new_zeros(shape)
        ends = [torch.zeros_like(state) for state in others[:states]]
        own = y.numel() * y.element_size() if footprint.keeps_output else 0
        ctx.kept = [_block(x, int(footprint.kept) - own)]
        with live.counting("activations", small=True):
            ctx.kept.append(_block(x, int(footprint.heap)))
        with live.counting("workspace"):
            _block(x, int(footprint.forward))
        ctx.save_for_backward(x, *others, *([y] if footprint.keeps_output else []))
        ctx.live, ctx.footprint, ctx.count = live, footprint, 1 + len(others)
        ctx.set_materialize_grads(False)
        return (y, *ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        live, footprint = ctx.live, ctx.footprint
        tensors = ctx.saved_tensors[: ctx.count]
        wanted = ctx.needs_input_grad[4:]
        found = [torch.empty_like(one) if want else None for one, want in zip(tensors, wanted, strict=True)]
        made = [one.numel() * one.element_size() if one is not None else 0 for one in found]
        spare = max(0, int(footprint.backward) - made[0]) + max(0, int(footprint.weight_gradients) - sum(made[1:]))
        with live.counting("workspace"):
            _block(tensors[0], spare)
        ctx.kept = None
        return (None, None, None, None, *found)


class _Copy(torch.autograd.Function):
    """A copy into another shape, as packing and padding make it, with so many more copies on the way."""

    @staticmethod
    def forward(ctx: Any, live: Live, shape: Any, copies: int, x: Tensor) -> Tensor:
        y = x.new_zeros(shape)
        ctx.live, ctx.copies, ctx.shape = live, copies, x.shape
        with live.counting("workspace"):
            _block(x, (copies == 1) * y.numel() * y.element_size())
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with ctx.live.counting("workspace"):
            _block(gradient, (ctx.copies - 1) * 2 * gradient.numel() * gradient.element_size())
        return None, None, None, gradient.new_zeros(ctx.shape)


class _Ctc(torch.autograd.Function):
    """CTC keeps a table of 2 x targets + 1 numbers for every step and row, and makes another one in backward."""

    @staticmethod
    def forward(ctx: Any, live: Live, table: int, rows: int, x: Tensor) -> Tensor:
        ctx.kept, ctx.live = _block(x, table), live
        ctx.save_for_backward(x)
        return x.new_zeros(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        found = torch.empty_like(x)
        with ctx.live.counting("workspace"):
            _block(x, ctx.kept.numel())
        ctx.kept = None
        return None, None, None, found


def _block(like: Tensor, size: int) -> Tensor:
    """A tensor of so many bytes."""
    return like.new_empty(max(0, size), dtype=torch.uint8)
