"""Length buckets: short sequences run in larger microbatches under the same peak, and are padded less."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oomguard.candidate import Candidate, is_none
from oomguard.probe.record import Record
from oomguard.search.problem import Problem
from oomguard.search.screen import SETTING, Screened, rows_like, screen
from oomguard.search.shorten import with_steps

MOST_BUCKETS = 8
MOST_LENGTHS = 256
"""Distinct lengths that borders are looked for among."""
WORTH = 0.01
"""A further bucket must save this share of all tokens."""
ALIKE = 0.02
"""Times that differ by no more than this are taken for equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The sequences of one bucket."""

    longest: int
    """Steps of its longest."""
    lengths: dict[int, int]
    """Its histogram."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketed:
    """How a bucket is run."""

    part: Part
    candidate: Candidate
    peak_bytes: int
    margin_bytes: int
    seconds_per_sequence: float


def cut(lengths: dict[int, int], most: int = MOST_BUCKETS) -> list[Part]:
    """The histogram in so many parts at most that padding each sequence to the longest of its part costs least.

    Exact, by dynamic programming; a part that saves less than 1 % of the tokens is not made.

    >>> [part.longest for part in cut({10: 100, 11: 100, 100: 10, 101: 1})]
    [11, 101]
    """
    values = _thin(lengths)
    counts = np.array([sum(n for length, n in lengths.items() if low < length <= high) for low, high in _pairs(values)])
    before = np.concatenate([[0], np.cumsum(counts)])
    size = len(values)
    # cost[j]: least padded tokens of the first j lengths in k parts; came[k][j]: where the last of them begins
    cost = np.array([np.inf if j else 0.0 for j in range(size + 1)])
    ends_at = np.concatenate([[0], values])
    last = np.where(np.tri(size + 1, k=-1, dtype=bool), ends_at[:, None] * (before[:, None] - before[None, :]), np.inf)
    came: list[list[int]] = []
    best: list[float] = []
    for _ in range(min(most, size)):
        totals = cost[None, :] + last
        came.append(totals.argmin(axis=1).tolist())
        cost = totals.min(axis=1)
        best.append(float(cost[size]))
    parts = next((k for k in range(1, len(best)) if best[k - 1] - best[k] < WORTH * best[0]), len(best))
    ends, end = [], size
    for k in reversed(range(parts)):
        ends.append(values[end - 1])
        end = came[k][end]
    borders = [0, *reversed(ends)]
    return [
        Part(longest=high, lengths={one: n for one, n in sorted(lengths.items()) if low < one <= high})
        for low, high in itertools.pairwise(borders)
    ]


def _pairs(values: list[int]) -> list[tuple[int, int]]:
    return list(zip([0, *values], values, strict=False))


def _thin(lengths: dict[int, int]) -> list[int]:
    """The lengths, or some of them, that borders may lie at; always the longest."""
    values = sorted(lengths)
    if len(values) <= MOST_LENGTHS:
        return values
    picked = np.unique(np.linspace(0, len(values) - 1, MOST_LENGTHS).astype(int))
    return [values[index] for index in picked]


def padded_tokens(part: Part, microbatch: int) -> float:
    """Expected tokens of a part's sequences, each padded to the longest of so many that were drawn at random."""
    total, longest, below = sum(part.lengths.values()), 0.0, 0
    for length, count in sorted(part.lengths.items()):
        longest += length * (((below + count) / total) ** microbatch - (below / total) ** microbatch)
        below += count
    return longest * total


def bucket(problem: Problem, records: Sequence[Record], chosen: Candidate) -> list[Bucketed]:
    """Each bucket's fastest candidate that fits, in the setting of the chosen one (it cannot change while training)."""
    found: list[Bucketed] = []
    for part in cut(problem.spec.lengths or {problem.spec.steps: 1}):
        view = screen(problem, records, with_steps(problem.spec, part.longest))
        found.append(_bucketed(view, _row(view, chosen, whole=part.longest == problem.spec.steps), part))
    return found


def _row(view: Screened, chosen: Candidate, *, whole: bool) -> int:
    """The fastest that fits, exact if there is one, and of those that are as fast the one with the largest microbatch;
    if only the chosen candidate's own record lets it fit, the smallest. The longest sequences are run as the chosen
    candidate says."""
    alike = rows_like(view.candidates, chosen, [*SETTING, "threads"])
    if whole:
        alike &= rows_like(view.candidates, chosen, ["microbatch", "segments", "levels", "recompute", "window"])
    fits = view.fits & alike
    exact = fits & is_none(view.candidates.window)
    if not fits.any():
        return int(np.argmin(np.where(alike, view.safe_bytes, np.inf)))
    seconds = np.where(exact if exact.any() else fits, view.expected, np.inf)
    sizes = np.broadcast_to(view.candidates.microbatch, len(seconds))
    return int(np.lexsort((seconds, -sizes, seconds > (1 + ALIKE) * seconds.min()))[0])


def _bucketed(view: Screened, row: int, part: Part) -> Bucketed:
    return Bucketed(
        part=part,
        candidate=view.candidates[row],
        peak_bytes=int(view.peak_bytes[row]),
        margin_bytes=int(view.safe_bytes[row] - view.peak_bytes[row]),
        seconds_per_sequence=float(view.expected[row]) / view.spec.batch,
    )
