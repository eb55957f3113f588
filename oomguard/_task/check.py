"""Check whether a knob keeps the gradient of a task: a child compares it with the plain step's, in float64."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from oomguard._core.errors import MisuseError
from oomguard._core.units import format_seconds
from oomguard._rnn.segmented import segmented
from oomguard._task.batches import TINY_STEPS, Batches
from oomguard._task.child import seed, subject
from oomguard._task.layout import count_rows, mapped
from oomguard._task.task import Task
from oomguard._task.times import in_segments, time_of
from oomguard._task.trace import build, copied, evaluate

ROWS, MICROBATCH = 4, 2  # rows of the tiny batch, and of the microbatches that it is split into
SEGMENTS = 3  # segments of the recurrent calls
UNSTEADY = "The loss is another one when it is computed again: it counts its calls, or draws numbers without a seed."
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}
"""The largest difference of gradients, relative to the largest entry, that counts as rounding. Single precision is for
models that do not run in double precision."""
LOWER = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether a knob is exact on a task, or lossy and why."""

    knob: str
    exact: bool
    error: float  # the largest difference of the gradients, relative to their largest entry
    reason: str = ""  # why it is lossy, as a sentence; empty if it is exact
    late: bool = False  # whether the check took too long, so that the knob only counts as lossy


class Trial(NamedTuple):
    """A task with its model, and batches to try it on, in a precision."""

    task: Task
    model: nn.Module
    batches: Batches
    dtype: torch.dtype
    expected: bool = False  # whether random numbers are equal ones instead, since pieces draw others than the whole

    @property
    def tolerance(self) -> float:
        """The largest difference that counts as rounding."""
        return TOLERANCES[self.dtype]

    def gradient(self, pieces: list[Any], rows: list[int]) -> Tensor:
        """The gradient of the mean loss over pieces of a batch. The random state is the same for every piece."""
        model, weights = copied(self.model), list[Any]()
        for piece, count in zip(pieces, rows, strict=True):
            seed()
            with _Expected() if self.expected else nullcontext():  # type: ignore[no-untyped-call]
                total, weight = evaluate(self.task, model, mapped(self._cast, piece))
                (total * count if weight is None else total).backward()  # type: ignore[no-untyped-call]
            weights.append(count if weight is None else weight)
        given = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        return torch.cat([one.to_dense().flatten() for one in given]) / float(sum(weights))

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def rows(self, pieces: list[Any]) -> list[int]:
        """The rows of every piece."""
        return [count_rows(piece, self.batches.layout) for piece in pieces]


def unchecked(knob: str, seconds: float) -> Finding:
    """Count a knob as lossy, because its check takes too long, as it may for a loop over many cells."""
    reason = f"It was not checked: a tiny step takes too long for a check of {format_seconds(seconds)}."
    return Finding(knob, exact=False, error=float("inf"), reason=reason, late=True)


def finding(knob: str) -> Finding:
    """Check a knob on the task of this process, by a tiny batch."""
    batches, failure = subject().batches, ""
    for dtype in TOLERANCES:
        try:
            with _computing_in(dtype):
                model = copied(build(batches.task)).train()
                model = model.double() if dtype is torch.float64 else model.float()
                return CHECKS[knob](Trial(batches.task, model, batches, dtype))
        except MisuseError as error:  # a plain tensor of a model may have its own precision
            failure = error.got
    return Finding(knob, False, float("inf"), f"The tiny step of its check does not run: {failure}.")


@contextmanager
def _computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Let code that makes tensors by itself make them in a precision."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _InDouble() if dtype is torch.float64 else nullcontext():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(usual)


def check_microbatch(trial: Trial) -> Finding:
    """Compare the gradient of microbatches with that of the whole batch."""
    trial = trial._replace(expected=True)
    try:
        whole, pieces = _batches(trial)
    except MisuseError as error:
        return Finding("microbatch", False, float("inf"), str(error))
    plain = trial.gradient([whole], [ROWS])
    try:
        difference = _difference(plain, trial.gradient(pieces, trial.rows(pieces)))
    except MisuseError as error:  # a model may trim its outputs to the longest row of a piece
        return Finding("microbatch", False, float("inf"), f"The loss does not run on a piece of a batch: {error.got}.")
    reason = "" if difference <= trial.tolerance else _reason(trial, whole, pieces, plain)
    return Finding("microbatch", not reason, difference, reason)


def check_segments(trial: Trial) -> Finding:
    """Compare the gradient in segments with that of the whole batch: of recurrent calls or, with a state, of a loss.

    Segments of recurrent calls have the dropout masks of the whole calls. Pieces of a loss draw their own.
    """
    trial = trial._replace(expected=trial.task.piecewise)
    whole = _whole(trial)[0]
    plain = trial.gradient([whole], [ROWS])
    try:
        task, segments = in_segments(trial.task, SEGMENTS, time_of(trial.batches))
        with segmented(segments):
            difference = _difference(plain, trial._replace(task=task).gradient([whole], [ROWS]))
    except MisuseError as error:
        return Finding("segments", False, float("inf"), str(error))
    again = difference > trial.tolerance and _difference(plain, trial.gradient([whole], [ROWS])) > trial.tolerance
    reason = UNSTEADY if again else "Segments change the gradient."
    return Finding("segments", difference <= trial.tolerance, difference, reason * (difference > trial.tolerance))


CHECKS: dict[str, Callable[[Trial], Finding]] = {"microbatch": check_microbatch, "segments": check_segments}
"""The check of every knob that can change the gradient of a task."""


def _batches(trial: Trial) -> tuple[Any, list[Any]]:
    """A batch of short samples of unequal length, and its microbatches."""
    whole, chosen = _whole(trial)
    return whole, [trial.batches.beginning(piece) for piece in trial.batches.split(whole, MICROBATCH, chosen=chosen)]


def _whole(trial: Trial) -> tuple[Any, list[int]]:
    """A batch of short samples of unequal length, and their indices."""
    seed()
    samples = trial.batches.samples
    if samples is None:
        return trial.batches.make(ROWS, TINY_STEPS), []
    chosen = samples.unequal(ROWS)
    return trial.batches.beginning(samples.make(chosen)), chosen


def _reason(trial: Trial, whole: Any, pieces: list[Any], plain: Tensor) -> str:
    """Find out why microbatches give another gradient, by trying what would explain it."""
    rows = trial.rows(pieces)
    if _difference(plain, trial.gradient([whole], [ROWS])) > trial.tolerance:
        return UNSTEADY
    with _frozen_statistics(trial.model) as frozen:
        if frozen and _equal(trial, whole, pieces):
            return f"BatchNorm uses the statistics of the whole batch ({', '.join(frozen)})."
    if _difference(plain, trial.gradient(pieces, [1] * len(pieces)) * len(pieces)) <= trial.tolerance:
        return "The loss is a sum over the batch, not a mean: return (sum, number of rows)."
    samples = trial.batches.samples
    if samples is not None:
        same = samples.nearest(1, None)
        even = [trial.batches.beginning(samples.make(same * count)) for count in (ROWS, *rows)]
        vanishes = float(trial.gradient(even[:1], [ROWS]).abs().max()) <= trial.tolerance * float(plain.abs().max())
        if not vanishes and _equal(trial, even[0], even[1:]):  # equal rows may have no gradient at all
            return "The mean is over time steps, and rows have unequal lengths: return (sum, weight)."
    return "The loss or the model uses statistics of the whole batch."


def _equal(trial: Trial, whole: Any, pieces: list[Any]) -> bool:
    found = trial.gradient(pieces, trial.rows(pieces))
    return _difference(trial.gradient([whole], [ROWS]), found) <= trial.tolerance


def _difference(plain: Tensor, other: Tensor) -> float:
    return float((plain - other).abs().max() / plain.abs().max().clamp(min=1e-300))


@contextmanager
def _frozen_statistics(model: nn.Module) -> Iterator[list[str]]:
    """Let BatchNorm use its running statistics; the names of these layers."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm) and layer.training}
    for layer in layers.values():
        layer.eval()
    yield [*layers]
    for layer in layers.values():
        layer.train()


class _InDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Double precision wherever code asks for a lower one, as with `x.float()` or `dtype=torch.float32`."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") in LOWER:
            kwargs = kwargs | {"dtype": torch.float64}
        return function(*args, **kwargs)


class _Expected(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Equal numbers in the place of random ones: microbatches draw others than the whole batch, by chance.

    Dropout masks become their expected value.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags and isinstance(result, Tensor):
            chance = args[1] if function is torch.ops.aten.bernoulli_.float and len(args) > 1 else 0.5
            return result.fill_(chance) if result.is_floating_point() else result
        return result
