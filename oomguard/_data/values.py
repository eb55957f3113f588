"""The values of sequences: which columns are inputs and targets, their checks, with the place of a wrong one, and their
normalisation to mean 0 and standard deviation 1, by one streaming pass over the training part.
"""

from collections.abc import Callable, Collection, Iterable
from math import isfinite
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from oomguard._core.errors import MisuseError, nearest
from oomguard._data.options import DataOptions, Nan
from oomguard._data.source import Array, Ints, Pair
from oomguard._spec.spec import Spec

MISSING = np.iinfo(np.int64).min  # what stands for NaN among tokens and classes, which are whole numbers

Where = Callable[[int, int], str]  # the place of a value, from its row in the block and its column
Columns = tuple[list[str], list[str], int]  # inputs, targets, and the steps that a target lies ahead


def choose_columns(names: list[str], spec: Spec, options: DataOptions, path: object) -> Columns:
    """The columns that are inputs and those that are targets. With targets in another file, both are the inputs."""
    width = 1 if spec.vocab is not None else spec.inputs
    inputs_alone = options.inputs_only or options.targets is not None
    inputs = list(options.columns or _usual_inputs(names, width, spec, options))
    known = dict.fromkeys(names)  # there may be a million
    for name in (*inputs, *(() if inputs_alone else options.target or ())):
        check_column(name, known, path)
    if len(inputs) != width:
        raise MisuseError(
            rule=f"There must be as many input columns as the spec has features ({width})",
            got=f"{path} has {len(inputs)}: {_listed(inputs)}",
            advice=f"Set --features {len(inputs)}, or name the inputs as --columns.",
        )
    if inputs_alone:
        return inputs, inputs, options.ahead or 0
    targets = list(options.target or _usual_targets(names, inputs, spec, path))
    if len(targets) != target_width(spec):
        raise MisuseError(
            rule=f"There must be as many target columns as the head gives ({target_width(spec)})",
            got=f"{path} has {len(targets)}: {_listed(targets)}",
            advice="Change --target or --outputs.",
        )
    return inputs, targets, int(not {*inputs}.isdisjoint(targets)) if options.ahead is None else options.ahead


def _usual_inputs(names: list[str], width: int, spec: Spec, options: DataOptions) -> list[str]:
    """The inputs if they are not named: the columns that are not targets, or all if only those are enough."""
    targets = {*(options.target or ())}
    rest = [name for name in names if name not in targets]
    if options.inputs_only:
        return (rest if len(rest) >= width else names)[:width]
    if targets:
        return names if len(rest) != width and len(names) == width else rest
    has_targets = options.targets is None and len(names) == width + target_width(spec)
    return names[:width] if has_targets else names


def _usual_targets(names: list[str], inputs: list[str], spec: Spec, path: object) -> list[str]:
    """The targets if they are not named: the columns that are not inputs, or the inputs of the next step."""
    taken = {*inputs}
    rest = [name for name in names if name not in taken]
    if len(rest) == target_width(spec):
        return rest
    if forecasts(spec):
        return inputs
    raise MisuseError(
        rule="Without --target the head must give as much as there is in the input, to predict the next step",
        got=f"{path} has {len(inputs)} input columns, and the head gives {spec.classes}",
        advice=f"Name a column as --target, or set --outputs {spec.vocab or spec.inputs}.",
    )


def forecasts(spec: Spec) -> bool:
    """Whether the head gives what the input holds, so that the targets can be the next inputs."""
    if spec.vocab is not None:
        return spec.loss == "cross-entropy" and spec.classes == spec.vocab
    return spec.loss == "mse" and spec.classes == spec.inputs


def target_width(spec: Spec) -> int:
    """Numbers of one target: one class, or all that the head gives."""
    return 1 if spec.loss == "cross-entropy" else spec.classes


def check_column(name: str, names: Collection[str], path: object) -> None:
    if name not in names:
        raise MisuseError(
            rule="A column that is named must be in the file",
            got=f"{path} has no column {name!r}",
            advice=nearest(name, [*names][:50]),
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


class Index(NamedTuple):
    """Values that are whole numbers from 0 to `below` - 1: tokens or classes."""

    below: int
    noun: str
    flag: str


def input_index(spec: Spec) -> Index | None:
    """The range of the spec's tokens; None: its inputs are numbers."""
    return None if spec.vocab is None else Index(spec.vocab, "A token", "--vocab")


def target_index(spec: Spec) -> Index | None:
    """The range of the spec's classes; None: its targets are numbers."""
    return Index(spec.classes, "A target", "--outputs") if spec.loss == "cross-entropy" else None


def as_values(block: Array, index: Index | None, nan: Nan, where: Where) -> Array:
    """Rows x columns in float32, or tokens or classes in int64; always a copy."""
    if index is not None:
        return _as_indices(np.asarray(block).reshape(len(block)), index, nan, where)
    with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite
        numbers = np.array(block, dtype=np.float32, order="C").reshape(len(block), -1)
    # the fastest test, without a mask; squares may overflow as well
    if nan != "drop" and not isfinite(np.vdot(numbers, numbers)):
        bad = ~np.isfinite(numbers)
        if nan == "error" and bad.any():
            row, column = (int(place) for place in np.argwhere(bad)[0])
            raise wrong_value(where(row, column), numbers[row, column], None)
        numbers[bad] = 0
    return numbers


def _as_indices(values: Array, index: Index, nan: Nan, where: Where) -> Ints:
    """Int64, all within the range. NaN is an error, or `MISSING` for "drop"; never 0, which is a token too."""
    with np.errstate(invalid="ignore"):  # NaN has no whole number; it is found below
        numbers = values.astype(np.int64)
    if values.dtype.kind in "iub" and (not len(values) or (values.min() >= 0 and values.max() < index.below)):
        return numbers
    bad = (numbers != values) | (numbers < 0) | (numbers >= index.below)
    if nan == "drop":
        gone = ~np.isfinite(values)
        numbers[gone], bad = MISSING, bad & ~gone
    if bad.any():
        row = int(bad.argmax())
        raise wrong_value(where(row, 0), values[row], index)
    return numbers


def wrong_value(place: str, value: Any, index: Index | None) -> MisuseError:
    """The error for a number that is not finite (index None), or for what is not a token or a class."""
    if index is None:
        rule, change = "Numbers in the data must be finite", "use --nan drop (leave such sequences out) or --nan zero"
    else:
        rule = f"{index.noun} must be a whole number from 0 to {index.below - 1:,}"
        change = "use --nan drop (leave such sequences out); --nan zero is for numbers only"
        if isfinite(float(value)):
            change = f"change {index.flag}"
    return MisuseError(rule=rule, got=f"{place} is {value}", advice=f"Correct the data, or {change}.")


class Normaliser(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mean and standard deviation of every feature, as plain numbers for JSON."""

    mean: tuple[float, ...]
    std: tuple[float, ...]  # standard deviation of each feature; 1 for a constant one, which becomes 0
    target_mean: tuple[float, ...] | None = None  # mean of each target; None: targets are not normalised
    target_std: tuple[float, ...] | None = None
    steps: int  # time steps that they were computed from

    def applied(self, pair: Pair) -> Pair:
        inputs, targets = pair
        inputs = ((inputs - np.array(self.mean)) / np.array(self.std)).astype(np.float32)
        if self.target_mean is not None and self.target_std is not None:
            targets = ((targets - np.array(self.target_mean)) / np.array(self.target_std)).astype(np.float32)
        return inputs, targets

    def restored(self, outputs: Array) -> Array:
        """Outputs of the model in the units of the data."""
        if self.target_mean is None or self.target_std is None:
            return outputs
        return outputs * np.array(self.target_std, np.float32) + np.array(self.target_mean, np.float32)


class Moments:
    """Count, mean and sum of squared deviations of numbers that come in blocks, in float64.

    Blocks are merged as in Chan, Golub and LeVeque (1979), which stays exact for a mean far from 0.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: NDArray[np.float64] = np.zeros(1)
        self.squares: NDArray[np.float64] = np.zeros(1)

    def add(self, block: Array) -> None:
        rows = block.reshape(len(block), -1).astype(np.float64)
        mean = rows.mean(axis=0)
        total, shift = self.count + len(rows), mean - self.mean
        self.squares = self.squares + ((rows - mean) ** 2).sum(axis=0) + shift**2 * (self.count * len(rows) / total)
        self.mean = self.mean + shift * (len(rows) / total)
        self.count = total

    def result(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each column."""
        std = np.sqrt(self.squares / self.count)
        std = np.where(std > np.abs(self.mean) * 1e-12, std, 1.0)  # constant, but for rounding
        return tuple(self.mean.tolist()), tuple(std.tolist())


def fit_normaliser(pairs: Iterable[Pair], *, targets: bool) -> Normaliser:
    """The normaliser of sequences that come one at a time. Steps of overlapping windows count as often as they come."""
    of_inputs, of_targets = Moments(), Moments()
    for sequence, target in pairs:
        of_inputs.add(sequence)
        if targets:
            of_targets.add(target if target.ndim > 1 else target[None])
    mean, std = of_inputs.result()
    target_mean, target_std = of_targets.result() if targets else (None, None)
    return Normaliser(mean=mean, std=std, target_mean=target_mean, target_std=target_std, steps=of_inputs.count)
