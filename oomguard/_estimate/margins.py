"""Margins: the errors of estimates that were measured (residuals.csv), and the quantiles of such errors.

`python benchmarks/measure_peaks.py` measures the peaks, `python benchmarks/residuals.py` writes the file.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from statistics import fmean, median
from typing import NamedTuple

from oomguard._core.units import MIB

RISK = 0.01  # accepted probability that a peak exceeds its prediction and margin
FEWEST = 12  # rows of a kind that are enough to judge it by them alone
OFFSET_BYTES = 64 * MIB
"""Added to measured and estimated bytes before they are compared, because errors do not shrink with small sizes. (Rows
of 20 to 600 MiB then have errors of similar size.)"""
MACHINE = 0.05  # standard deviation between machines (assumed): all rows are of one machine and one version of torch
REPEAT = 0.007  # standard deviation of repeated runs, at least


class Residual(NamedTuple):
    """The error of one estimate."""

    device: str
    engine: str
    allocator: str
    precision: str
    fragile: bool  # whether peaks of its kind vary (`is_fragile`, breakdown.py)
    model: int
    candidate: int  # a number for the candidate: its shorter versions and its repetitions have the same
    turn: int  # 0 for the first measurement, 1 for a repetition in a new process, with more steps
    steps: float  # logarithm to base 2 of the sequence length
    error: float  # logarithm of the measured rest over the estimated one, with `OFFSET_BYTES`

    @property
    def kind(self) -> tuple[str | bool, ...]:
        """What rows must have in common to be judged together."""
        return self[:5]


@cache
def residuals() -> tuple[Residual, ...]:
    """All stored rows."""
    types = Residual.__annotations__
    with (files("oomguard._estimate") / "residuals.csv").open() as file:
        return tuple(
            Residual(**{name: types[name](int(text) if types[name] is bool else text) for name, text in row.items()})
            for row in csv.DictReader(file)
        )


def allocator_on(device: str, name: str | None) -> str:
    """The allocator setting that a candidate has on a device, whatever it names."""
    usual, others = ("system", ("expandable",)) if device == "cuda" else ("tight", ("fast", "system"))
    return name if name is not None and name in others else usual


@cache
def group(*kind: str | bool) -> tuple[Residual, ...]:
    """The rows of a kind or, if there are few, of kinds that share less and less with it.

    What a card's allocator reserves does not depend on the precision.
    """
    for same in ((0, 1, 2, 3, 4), (0, 1, 2, 4), (0, 2, 4), (0, 2), (0,))[kind[0] == "cuda" :]:
        rows = tuple(row for row in residuals() if all(row[index] == kind[index] for index in same))
        if len(rows) >= FEWEST:
            break
    return rows


def quantile(errors: Iterable[float], risk: float) -> float:
    """The bound that a further error exceeds with that probability (split conformal); the largest if there are few."""
    ordered = sorted(errors)
    return ordered[min(len(ordered), math.ceil((len(ordered) + 1) * (1 - risk))) - 1]


class Spread(NamedTuple):
    """The median of errors (logarithms), and standard deviations, from differences between stored rows."""

    middle: float
    level: float  # between models and machines
    shape: float  # between candidates of one model
    length: float  # between a candidate and its shorter versions
    near: float  # between runs of nearly the same length; of repeated runs, where there are any
    repeat: float  # between repeated runs


@cache
def spread(*kind: str | bool) -> Spread:
    """The standard deviations of a kind."""
    candidates, models = defaultdict[int, list[Residual]](list), defaultdict[int, list[float]](list)
    lengths, nearest, repeats, shapes = list[float](), list[float](), list[float](), list[float]()
    for row in sorted(group(*kind), key=lambda row: (row.steps, -row.turn)):
        candidates[row.candidate].append(row)
    for *others, whole in candidates.values():  # the whole candidate, run for the first time, comes last
        models[whole.model].append(whole.error)
        repeats += [row.error - whole.error for row in others if row.turn]
        shorter = [whole.error - row.error for row in others if not row.turn]
        lengths += shorter
        nearest += shorter[-1:]
    for errors in models.values():
        bias = math.sqrt(len(errors) / max(1, len(errors) - 1))
        shapes += [bias * (error - fmean(errors)) for error in errors if len(errors) > 1]
    levels = [fmean(errors) for errors in models.values()]
    middle = median(levels)
    level = math.hypot(_deviation(level - middle for level in levels), MACHINE)
    near, repeat = (max(_deviation(values) / math.sqrt(2), REPEAT) for values in (repeats or nearest, repeats))
    return Spread(middle, level, _deviation(shapes), _deviation(lengths), near, repeat)


def _deviation(values: Iterable[float]) -> float:
    """The standard deviation around 0 by the values above it alone: a peak that is lower than expected does no harm."""
    return math.sqrt(2 * fmean([max(0.0, value) ** 2 for value in values] or [0.0]))


@cache
def _surprises(device: str) -> tuple[float, ...]:
    """How far each stored error is from the middle of its kind, in standard deviations."""
    rows = [(row.error, spread(*row.kind)) for row in residuals() if row.device == device]
    return tuple((error - kind.middle) / math.hypot(*kind[1:-1]) for error, kind in rows)


def sigmas(device: str, own: Iterable[float] = ()) -> float:
    """The margin of a prediction in its standard deviations: a quantile of surprises, stored and own."""
    return quantile((*_surprises(device), *own), RISK)


@cache
def bare(*kind: str | bool) -> float:
    """The margin of an estimate that no record has corrected, as a share of what it estimates."""
    errors = spread(*kind)
    return max(0.0, math.expm1(errors.middle + sigmas(str(kind[0])) * math.hypot(*errors[1:-1])))


@cache
def creep(*kind: str | bool) -> float:
    """By what share a candidate that has run may peak higher when it runs again, for longer."""
    return math.expm1(sigmas(str(kind[0])) * spread(*kind).repeat)
