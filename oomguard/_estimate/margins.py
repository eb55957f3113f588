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
ALIKE = 0.25
"""Doublings by which the lengths of versions may differ that count as repeated runs: a card reserves in leaps."""
KIND = 5  # fields of a residual that say of which kind it is: the first ones


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
    segmented: bool
    chunks: bool
    rest: float  # logarithm to base 2 of the estimated rest in bytes (`split`, breakdown.py)
    rows: float  # logarithm to base 2 of the microbatch
    steps: float  # logarithm to base 2 of the sequence length
    error: float  # logarithm of the measured rest over the estimated one, with `OFFSET_BYTES`


@cache
def residuals() -> tuple[Residual, ...]:
    """All stored rows."""
    kinds = Residual.__annotations__
    with (files("oomguard._estimate") / "residuals.csv").open() as file:
        return tuple(
            Residual(**{n: kinds[n](int(text) if kinds[n] is bool else text) for n, text in row.items()})
            for row in csv.DictReader(file)
        )


def allocator_on(device: str, name: str | None) -> str:
    """The allocator setting that a candidate has on a device, whatever it names."""
    usual, others = ("system", ("expandable",)) if device == "cuda" else ("tight", ("fast", "system"))
    return name if name is not None and name in others else usual


@cache
def group(*kind: str | bool) -> tuple[Residual, ...]:
    """The rows of a kind (the first five fields), or, if there are few, of kinds that share less and less with it.

    What a card's allocator reserves does not depend on the precision.
    """
    for same in ((0, 1, 2, 3, 4), (0, 1, 2, 4), (0, 2, 4), (0, 2), (0,))[kind[0] == "cuda" :]:
        rows = tuple(row for row in residuals() if all(row[index] == kind[index] for index in same))
        if len(rows) >= FEWEST:
            break
    return rows


def quantile(errors: Iterable[float], risk: float) -> float:
    """The bound that a further error exceeds with that probability (split conformal); the largest if there are few.

    >>> quantile(range(100), 0.05), quantile([3, 1], 0.05)
    (95, 3)
    """
    ordered = sorted(errors)
    return ordered[min(len(ordered), math.ceil((len(ordered) + 1) * (1 - risk))) - 1]


class Spread(NamedTuple):
    """The median of errors (logarithms), and standard deviations, from differences between stored rows."""

    middle: float
    level: float  # between models and machines
    shape: float  # between candidates of one model
    length: float  # between a candidate and its shorter versions
    repeat: float  # between repeated runs, or runs of nearly the same length


@cache
def spread(*kind: str | bool) -> Spread:
    """The standard deviations of a kind."""
    levels, shapes, lengths, repeats = _differences(group(*kind))
    middle = median(levels)
    level = math.hypot(_deviation(level - middle for level in levels), MACHINE)
    repeat = max(_deviation(repeats) / math.sqrt(2), REPEAT)
    return Spread(middle, level, _deviation(shapes), _deviation(lengths), repeat)


def _deviation(values: Iterable[float]) -> float:
    """The standard deviation around 0 by the values above it alone: a peak that is lower than expected does no harm."""
    return math.sqrt(2 * fmean([max(0.0, value) ** 2 for value in values] or [0.0]))


def _differences(rows: Iterable[Residual]) -> tuple[list[float], ...]:
    """Differences between errors: of models, of a model's candidates, of a candidate's lengths, of repeated runs."""
    models: dict[int, dict[int, list[Residual]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        models[row.model][row.candidate].append(row)
    levels, shapes, lengths, repeats = list[float](), list[float](), list[float](), list[float]()
    for candidates in models.values():
        wholes = [max(versions, key=lambda row: (row.steps, -row.turn)) for versions in candidates.values()]
        for whole, versions in zip(wholes, candidates.values(), strict=True):
            for row in versions:
                if row.turn:
                    repeats.append(row.error - whole.error)
                elif row.steps < whole.steps:
                    alike = whole.steps - row.steps < ALIKE
                    (repeats if alike else lengths).append(whole.error - row.error)
        levels.append(fmean(row.error for row in wholes))
        bias = math.sqrt(len(wholes) / max(1, len(wholes) - 1))
        shapes += [bias * (row.error - levels[-1]) for row in wholes if len(wholes) > 1]
    return levels, shapes, lengths, repeats


@cache
def _surprises(device: str) -> tuple[float, ...]:
    """How far each stored error is from the middle of its kind, in standard deviations."""
    rows = [(row.error, *spread(*row[:KIND])) for row in residuals() if row.device == device]
    return tuple((error - middle) / math.hypot(*deviations) for error, middle, *deviations in rows)


def sigmas(device: str, own: Iterable[float] = ()) -> float:
    """The margin of a prediction in its standard deviations: a quantile of surprises, stored and own."""
    return quantile((*_surprises(device), *own), RISK)


@cache
def bare(*kind: str | bool) -> float:
    """The margin of an estimate that no record has corrected, as a share of what it estimates."""
    middle, *deviations = spread(*kind)
    return max(0.0, math.expm1(middle + sigmas(str(kind[0])) * math.hypot(*deviations)))


@cache
def creep(*kind: str | bool, chunks: bool) -> float:
    """By what share a candidate that has run may peak higher when it runs again, for longer."""
    rows = [row for row in group(*kind) if row.chunks == chunks]
    first = {(row.candidate, row.steps): row.error for row in rows if not row.turn}
    repeats = [row.error - first[row.candidate, row.steps] for row in rows if row.turn]
    return math.expm1(max(REPEAT, quantile(repeats or [REPEAT], RISK)))
