"""Check whether a knob keeps the gradient of a task: a child compares it with the plain step's, in float64."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from oomguard._task.trace import build, evaluate

ROWS, MICROBATCH = 4, 2  # rows of the tiny batch, and of the microbatches that it is split into
SEGMENTS = 3  # segments of the recurrent calls
TOLERANCE = 1e-8
"""The largest difference of gradients, relative to the largest entry, that counts as rounding in double precision."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether a knob is exact on a task, or lossy and why."""

    knob: str
    exact: bool
    error: float  # the largest difference of the gradients, relative to their largest entry
    reason: str = ""  # why it is lossy, as a sentence; empty if it is exact
    late: bool = False  # whether the check took too long, so that the knob only counts as lossy


class Trial(NamedTuple):
    """A task with a model in double precision, and batches to try it on."""

    task: Task
    model: nn.Module
    batches: Batches

    def gradient(self, pieces: list[Any], rows: list[int]) -> Tensor:
        """The gradient of the mean loss over pieces of a batch. The random state is the same for every piece."""
        model, weights = copy.deepcopy(self.model), list[Any]()
        for piece, count in zip(pieces, rows, strict=True):
            seed()
            total, weight = evaluate(self.task, model, mapped(_as_double, piece))
            (total * count if weight is None else total).backward()  # type: ignore[no-untyped-call]
            weights.append(count if weight is None else weight)
        given = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        return torch.cat([one.to_dense().flatten() for one in given]) / float(sum(weights))

    def rows(self, pieces: list[Any]) -> list[int]:
        """The rows of every piece."""
        return [count_rows(piece, self.batches.layout) for piece in pieces]


def unchecked(knob: str, seconds: float) -> Finding:
    """Count a knob as lossy, because its check takes too long, as it may for a loop over many cells."""
    reason = f"It was not checked: a tiny step takes too long for a check of {format_seconds(seconds)}."
    return Finding(knob, exact=False, error=float("inf"), reason=reason, late=True)


def finding(knob: str) -> Finding:
    """Check a knob on the task of this process, by a tiny batch."""
    batches = subject().batches
    model = copy.deepcopy(build(batches.task)).double().train()
    return CHECKS[knob](Trial(batches.task, model, batches))


def check_microbatch(trial: Trial) -> Finding:
    """Compare the gradient of microbatches with that of the whole batch. Their dropout masks are others, by chance."""
    with _Expected():  # type: ignore[no-untyped-call]
        return _check_microbatch(trial)


def _check_microbatch(trial: Trial) -> Finding:
    try:
        whole, pieces = _batches(trial)
    except MisuseError as error:
        return Finding("microbatch", False, float("inf"), str(error))
    plain = trial.gradient([whole], [ROWS])
    try:
        difference = _difference(plain, trial.gradient(pieces, trial.rows(pieces)))
    except MisuseError as error:  # a model may trim its outputs to the longest row of a piece
        return Finding("microbatch", False, float("inf"), f"The loss does not run on a piece of a batch: {error.got}.")
    reason = "" if difference <= TOLERANCE else _reason(trial, whole, pieces, plain)
    return Finding("microbatch", not reason, difference, reason)


def check_segments(trial: Trial) -> Finding:
    """Compare the gradient in segments with that of the whole batch: of recurrent calls or, with a state, of a loss.

    Segments of recurrent calls have the dropout masks of the whole calls. Pieces of a loss draw their own.
    """
    if not trial.task.piecewise:
        return _check_segments(trial)
    with _Expected():  # type: ignore[no-untyped-call]
        return _check_segments(trial)


def _check_segments(trial: Trial) -> Finding:
    whole = _whole(trial)[0]
    plain = trial.gradient([whole], [ROWS])
    try:
        task, segments = in_segments(trial.task, SEGMENTS, time_of(trial.batches))
        with segmented(segments):
            difference = _difference(plain, trial._replace(task=task).gradient([whole], [ROWS]))
    except MisuseError as error:
        return Finding("segments", False, float("inf"), str(error))
    again = difference > TOLERANCE and _difference(plain, trial.gradient([whole], [ROWS])) > TOLERANCE
    reason = "The loss is random in a way that seeds do not govern." if again else "Segments change the gradient."
    return Finding("segments", difference <= TOLERANCE, difference, reason * (difference > TOLERANCE))


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
    if _difference(plain, trial.gradient([whole], [ROWS])) > TOLERANCE:
        return "The loss is random in a way that seeds do not govern."
    with _frozen_statistics(trial.model) as frozen:
        if frozen and _equal(trial, whole, pieces):
            return f"BatchNorm uses the statistics of the whole batch ({', '.join(frozen)})."
    if _difference(plain, trial.gradient(pieces, [1] * len(pieces)) * len(pieces)) <= TOLERANCE:
        return "The loss is a sum over the batch, not a mean: return (sum, number of rows)."
    samples = trial.batches.samples
    if samples is not None:
        same = samples.nearest(1, None)
        even = [trial.batches.beginning(samples.make(same * count)) for count in (ROWS, *rows)]
        vanishes = float(trial.gradient(even[:1], [ROWS]).abs().max()) <= TOLERANCE * float(plain.abs().max())
        if not vanishes and _equal(trial, even[0], even[1:]):  # equal rows may have no gradient at all
            return "The mean is over time steps, and rows have unequal lengths: return (sum, weight)."
    return "The loss or the model uses statistics of the whole batch."


def _equal(trial: Trial, whole: Any, pieces: list[Any]) -> bool:
    found = trial.gradient(pieces, trial.rows(pieces))
    return _difference(trial.gradient([whole], [ROWS]), found) <= TOLERANCE


def _difference(plain: Tensor, other: Tensor) -> float:
    return float((plain - other).abs().max() / plain.abs().max().clamp(min=1e-300))


def _as_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def _frozen_statistics(model: nn.Module) -> Iterator[list[str]]:
    """Let BatchNorm use its running statistics; the names of these layers."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm) and layer.training}
    for layer in layers.values():
        layer.eval()
    yield [*layers]
    for layer in layers.values():
        layer.train()


class _Expected(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dropout as its expected value: the masks of microbatches are others than those of the whole batch, by chance."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        return function(*args, **(kwargs or {}))
