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

import numpy as np
from numpy.typing import NDArray

from oomguard._core.units import MIB

RISK = 0.01  # accepted probability that a peak exceeds its prediction and margin
FEWEST = 12  # rows of a kind that are enough to judge it by them alone
OFFSET_BYTES = 64 * MIB
"""Added to measured and estimated bytes before they are compared, because errors do not shrink with small sizes. (Rows
of 20 to 600 MiB then have errors of similar size.)"""
MACHINE = 0.05  # standard deviation between machines (assumed): all rows are of one machine and one version of torch
WIDER = (0, 1, 2, 3, 4), (0, 1, 2, 4), (0, 2, 4), (0, 4), (0,)  # fields that rows share with a kind, ever fewer
CARD_CREEP = 0.012  # share by which a card may peak higher when it runs again (assumed: no repetition is stored)
SETTLED = 8
"""Passes after which a peak hardly grows. (MiB after 1, 3, 8 and 30 passes in the heap `tight`, without the runtime:
LSTM 128: 193, 193, 193, 193; GRU 48, 3 layers: 81, 81, 86, 87; vanilla RNN 96, 2 layers: 99, 99, 99, 102.)"""


class Residual(NamedTuple):
    """The error of one estimate."""

    device: str
    engine: str
    allocator: str
    precision: str
    fragile: bool  # whether peaks of its kind vary (`is_fragile`, breakdown.py)
    model: int
    candidate: int  # a number for the candidate: its shorter versions and its repetitions have the same
    turn: int  # 0 for the first measurement, 1 for a repetition in a new process, with more passes
    passes: int  # passes that were measured
    steps: float  # logarithm to base 2 of the sequence length
    mib: float  # the measured rest: the peak without the sizes of tensors that are known
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
def groups(*kind: str | bool) -> tuple[tuple[Residual, ...], ...]:
    """The rows of a kind, and of kinds that share less and less with it.

    What a card's allocator reserves does not depend on the precision.
    """
    wider = WIDER[kind[0] == "cuda" :]
    return tuple(tuple(row for row in residuals() if all(row[i] == kind[i] for i in same)) for same in wider)


def quantile(errors: Iterable[float], risk: float) -> float:
    """The bound that a further error exceeds with that probability (split conformal); the largest if there are few."""
    ordered = sorted(errors)
    return ordered[min(len(ordered), math.ceil((len(ordered) + 1) * (1 - risk))) - 1]


@cache
def differences(rows: tuple[Residual, ...]) -> dict[str, list[float]]:
    """Compare the errors of some rows with each other.

    `model`: the mean error of each model. `shape`: each candidate, against the mean of its model. `length`: a whole
    candidate, against its shorter versions; `nearest`: against the longest of them. `few` and `settled`: the share by
    which a repeated, longer run peaked higher than a first run of few passes or of `SETTLED`; `few_mib` and
    `settled_mib`: the same in MiB.
    """
    candidates, models = defaultdict[int, list[Residual]](list), defaultdict[int, list[float]](list)
    found = defaultdict[str, list[float]](list)
    for row in sorted(rows, key=lambda row: (row.steps, -row.turn)):
        candidates[row.candidate].append(row)
    for *others, whole in candidates.values():  # the whole candidate, run for the first time, comes last
        models[whole.model].append(whole.error)
        again = "settled" if whole.passes >= SETTLED else "few"
        found[again] += [math.expm1(row.error - whole.error) for row in others if row.turn]
        found[f"{again}_mib"] += [row.mib - whole.mib for row in others if row.turn]
        shorter = [whole.error - row.error for row in others if not row.turn]
        found["length"] += shorter
        found["nearest"] += shorter[-1:]
    for errors in models.values():
        found["model"].append(fmean(errors))
        bias = math.sqrt(len(errors) / max(1, len(errors) - 1))
        found["shape"] += [bias * (error - fmean(errors)) for error in errors if len(errors) > 1]
    return found


@cache
def enough(name: str, *kind: str | bool) -> tuple[float, ...]:
    """The differences of a name among the rows of a kind or, if there are few, of similar kinds."""
    found = [tuple(differences(rows)[name]) for rows in groups(*kind)]
    return next((some for some in found if len(some) >= FEWEST), found[-1])


class Spread(NamedTuple):
    """The median of errors (logarithms), and their standard deviations."""

    middle: float
    level: float  # between models and machines
    shape: float  # between candidates of one model
    length: float  # between a candidate and its shorter versions


@cache
def spread(*kind: str | bool) -> Spread:
    """The standard deviations of a kind."""
    rows = next((rows for rows in groups(*kind) if len(rows) >= FEWEST), groups(*kind)[-1])
    levels = differences(rows)["model"]
    middle = median(levels)
    level = math.hypot(_deviation(level - middle for level in levels), MACHINE)
    return Spread(middle, level, *(_deviation(enough(name, *kind)) for name in ("shape", "length")))


def _deviation(values: Iterable[float]) -> float:
    """The standard deviation around 0 by the values above it alone: a peak that is lower than expected does no harm."""
    return math.sqrt(2 * fmean([max(0.0, value) ** 2 for value in values] or [0.0]))


@cache
def _surprises(device: str) -> tuple[float, ...]:
    """How far the error of each whole candidate is from the middle of its kind, in standard deviations.

    Shorter versions and repetitions do not count: their errors are similar.
    """
    rows = sorted((row for row in residuals() if row.device == device), key=lambda row: (row.steps, -row.turn))
    wholes = [(row.error, spread(*row.kind)) for row in {row.candidate: row for row in rows}.values()]
    return tuple((error - kind.middle) / math.hypot(*kind[1:]) for error, kind in wholes)


def sigmas(device: str, own: Iterable[float] = ()) -> float:
    """The margin of a prediction in its standard deviations: a quantile of surprises, stored and own."""
    return quantile((*_surprises(device), *own), RISK)


def is_low(error: float, *kind: str | bool) -> bool:
    """Whether a peak is so far below its estimate as happens by chance with a probability of `RISK`."""
    errors = spread(*kind)
    least = -quantile((-surprise for surprise in _surprises(str(kind[0]))), RISK)
    return (error - errors.middle) / math.hypot(*errors[1:]) < least


@cache
def bare(*kind: str | bool) -> float:
    """The margin of an estimate that no record has corrected, as a share of what it estimates."""
    errors = spread(*kind)
    return max(0.0, math.expm1(errors.middle + sigmas(str(kind[0])) * math.hypot(*errors[1:])))


class Repeats(NamedTuple):
    """By how much a candidate that has run may peak higher when it runs again, for longer.

    Where its blocks live in the heap (the last field of the kind), and on a card, by a share of the peak; elsewhere by
    some bytes, whatever the peak.
    """

    deviation: float  # the standard deviation of one run
    most: float  # exceeded with a probability of `RISK`
    by_share: bool

    def bytes_of(self, figure: float, rest: NDArray[np.float64]) -> NDArray[np.float64]:
        """One of the figures in bytes, for candidates with such rests of their peaks."""
        return np.asarray(figure * (rest + OFFSET_BYTES if self.by_share else np.full_like(rest, MIB)))


@cache
def repeats(*kind: str | bool, settled: bool) -> Repeats:
    """How the peaks of a kind repeat after a first run of few passes or (`settled`) of many."""
    by_share = bool(kind[-1]) or kind[0] == "cuda"
    if kind[0] == "cuda":  # its allocator reserves in leaps: those of both candidates of a difference count
        return Repeats(_deviation(enough("nearest", *kind)), CARD_CREEP, by_share)
    grown = enough(("settled" if settled else "few") + ("" if by_share else "_mib"), *kind)
    return Repeats(_deviation(grown) / math.sqrt(2), max(0.0, quantile(grown, RISK)), by_share)
