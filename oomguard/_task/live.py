"""Live: counts the bytes of all tensors that are alive while code runs, on real or on fake tensors."""

import math
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from oomguard._estimate.malloc import block_bytes, in_heap, mapped_bytes

REAL_NUMBERS = 1 << 20  # whole numbers in a tensor up to which it stays real, so that code may look into it
REAL_FRACTIONS = 1 << 12  # the same for other numbers, such as relative lengths
_FALSE = ("isnan", "isinf", "any", "ne", "bitwise_not", "logical_not")
"""Operations whose unknown result is taken to be false: nobody trains on NaN. Others are taken to be true."""
_WHOLE = (torch.int64, torch.int32, torch.bool)
_aten = torch.ops.aten
_COUNTING = (_aten.arange, _aten.randint, _aten.randperm)

Label = tuple[str, str]  # the term that bytes count to, and the part of the model
Moment = tuple[str, str]  # the phase of the step (forward, backward, optimizer), and the part that runs


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live storages by term and part. The peak and its terms are kept for every moment of a step.

    On the CPU, small blocks live in the C heap. What that once held stays resident, so its largest size counts. Without
    fixed thresholds (`system`) all blocks count as they are.
    """

    def __init__(self, heap: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heap = heap  # the heap of the process as `malloc` names it; "cuda" for a card
        self.term, self.part, self.phase = "activations", "", "forward"
        self.small = False  # whether blocks count as small ones, whatever their size
        self.logits = "", 0  # the linear layer that ran last, and its number of outputs
        self.sizes: dict[Label, int] = defaultdict(int)
        self.blocks: dict[int, tuple[Label, int, bool]] = {}
        self.mapped_bytes = self.heap_bytes = self.high_bytes = 0
        self.moments: dict[Moment, tuple[int, dict[Label, int]]] = {}  # the largest total, and its bytes by label
        self._last_truth = ""

    @contextmanager
    def counting(self, term: str, *, small: bool = False) -> Iterator[None]:
        """Count new storages to a term for a while."""
        before = self.term, self.small
        self.term, self.small = term, small
        try:
            yield
        finally:
            self.term, self.small = before

    def track(self, tensor: Tensor) -> None:
        """Count the storage of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.blocks or tensor.layout is not torch.strided:
            return
        size, label = int(storage.nbytes()), (self.term, self.part)
        if self.part == "loss" and self.term == "activations" and tensor.shape[-1:] == (self.logits[1],):
            label = "logits", self.logits[0]
        fixed = self.heap not in ("cuda", "system")  # whether thresholds tell small blocks from large ones
        small = fixed and (self.small or bool(in_heap(size, self.heap)))
        if self.heap == "cuda":
            size = int(block_bytes(size))
        elif fixed and not small:
            size = int(mapped_bytes(size))
        self.blocks[storage._cdata] = label, size, small
        weakref.finalize(storage, self._free, storage._cdata)
        self._add(label, size, small)

    def _add(self, label: Label, size: int, small: bool) -> None:
        self.sizes[label] += size
        if small:
            self.heap_bytes += size
            self.high_bytes = max(self.high_bytes, self.heap_bytes)
        else:
            self.mapped_bytes += size
        total = self.mapped_bytes + self.high_bytes
        moment = self.phase, self.part
        if moment not in self.moments or total > self.moments[moment][0]:
            self.moments[moment] = total, dict(self.sizes)

    def _free(self, key: int) -> None:
        label, size, small = self.blocks.pop(key)
        self.sizes[label] -= size
        if small:
            self.heap_bytes -= size
        else:
            self.mapped_bytes -= size

    def label(self, tensor: Tensor, term: str) -> None:
        """Count a storage that is already alive to another term."""
        key = tensor.untyped_storage()._cdata
        if key in self.blocks:
            (before, part), size, small = self.blocks[key]
            self.sizes[before, part] -= size
            self.sizes[term, part] += size
            self.blocks[key] = (term, part), size, small

    def begin(self, phase: str) -> None:
        """Begin a phase of the step. Each step begins with the heap that the one before has left in use."""
        self.phase = phase
        if phase == "forward":
            self.high_bytes = self.heap_bytes

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.phase == "backward" and function is _aten.add.Tensor and _alike(args):
            return args[0]  # the engine sums gradients in place, except those of tensor subclasses
        try:
            out = self._run(function, args, kwargs)
        except DataDependentOutputException:
            return self._guess(function, args)
        if isinstance(out, Tensor) and out.dtype == torch.bool:
            self._last_truth = function.overloadpacket.__name__
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.track(tensor)
        return out

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
            return function(*args, **kwargs)
        if function is _aten.index.Tensor or function is _aten.index_put_.default:
            args = args[0], _without_masks(args[1]), *args[2:]
        elif function is _aten.masked_select.default:
            chosen = _positions(args[1].expand(args[0].shape))
            return args[0].new_empty(len(chosen[0]))
        elif function is _aten.nonzero.default and isinstance(args[0], FakeTensor):
            return torch.stack(_positions(args[0]), 1)
        if _stays_real(function, args, kwargs):
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    def _guess(self, function: Any, args: Any) -> bool | float:
        """A value that is not known without computing: a truth by the operation it comes from, a number as 1.

        Two tensors that are compared as wholes are taken to be equal.
        """
        if function in (_aten.allclose.default, _aten.equal.default):
            return True
        if function is _aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return self._last_truth not in _FALSE
        if function is _aten._local_scalar_dense.default and args[0].is_floating_point():
            return 1.0
        raise


def _alike(args: Any) -> bool:
    first, second = args[:2]
    return isinstance(first, FakeTensor) and isinstance(second, Tensor) and first.shape == second.shape


def _without_masks(indices: Any) -> list[Tensor | None]:
    """Indices with masks replaced by the positions that they choose."""
    found: list[Tensor | None] = []
    for index in indices:
        masks = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
        found += _positions(index) if masks else [index]
    return found


def _positions(mask: Tensor) -> tuple[Tensor, ...]:
    """The positions that a mask chooses: all of them if its values are not known."""
    with unset_fake_temporarily():
        real = torch.ones((), dtype=torch.bool).expand(mask.shape) if isinstance(mask, FakeTensor) else mask
        return real.nonzero(as_tuple=True)


def _stays_real(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation is computed: on small real tensors, or if it makes a small tensor of whole numbers."""
    tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    if not tensors:
        numbers = [one for one in pytree.tree_leaves(args) if not isinstance(one, bool)]
        counts = function.overloadpacket in _COUNTING and all(isinstance(one, int) for one in numbers)
        whole = kwargs.get("dtype") in _WHOLE or (kwargs.get("dtype") is None and counts)
        return whole and math.prod(max(1, abs(int(one))) for one in numbers) <= REAL_NUMBERS
    real = [not isinstance(one, FakeTensor) for one in tensors]
    if real[0] and not all(real) and function._schema.is_mutable and tensors[0].dtype in _WHOLE:
        raise TypeError(f"{function} writes values that are not known into a tensor of whole numbers")
    return all(real) and all(
        not one.requires_grad and one.numel() <= (REAL_FRACTIONS if one.is_floating_point() else REAL_NUMBERS)
        for one in tensors
    )
