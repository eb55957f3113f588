"""Length buckets: sequences of similar length are padded together, each bucket with its own microbatch and segments."""

import itertools
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from oomguard._predict.calibration import Prediction
from oomguard._probe.record import Record
from oomguard._search.screen import SETTING, CandidateTable, least, screen
from oomguard._search.space import Problem
from oomguard._spec.candidate import Candidate, is_none
from oomguard._spec.lengths import with_steps

MOST_BUCKETS = 8  # length buckets of a plan, at most
MOST_LENGTHS = 256  # distinct lengths among which borders are looked for
WORTH = 0.01  # a further bucket must save this share of all tokens
ALIKE = 0.02  # times that differ by no more than this share are taken for equal

Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 60)]


def cut(lengths: dict[int, int], most: int = MOST_BUCKETS) -> list[dict[int, int]]:
    """The histogram in at most `most` parts, so that padding each sequence to the longest of its part costs least.

    Exact, by dynamic programming; a part that saves less than 1 % of the tokens is not made.
    """
    values = sorted(lengths)
    if len(values) > MOST_LENGTHS:  # borders may lie at some of them, and at the longest
        values = [values[index] for index in np.unique(np.linspace(0, len(values) - 1, MOST_LENGTHS).astype(int))]
    size, ends_at = len(values), np.array([0, *values])
    upto = np.array([sum(n for length, n in lengths.items() if length <= end) for end in ends_at])
    # cost[j]: least padded tokens of the first j lengths in k parts; starts[k][j]: where the last of those parts begins
    cost = np.where(ends_at, np.inf, 0.0)
    last = np.where(np.tri(size + 1, k=-1, dtype=bool), ends_at[:, None] * np.subtract.outer(upto, upto), np.inf)
    starts: list[list[int]] = []
    best: list[float] = []
    for _ in range(min(most, size)):
        totals = cost + last
        starts.append(totals.argmin(axis=1).tolist())
        cost = totals.min(axis=1)
        best.append(float(cost[size]))
    parts = next((k for k in range(1, len(best)) if best[k - 1] - best[k] < WORTH * best[0]), len(best))
    borders, end = [0], size
    for k in reversed(range(parts)):
        borders.insert(1, values[end - 1])
        end = starts[k][end]
    return [
        {length: n for length, n in sorted(lengths.items()) if low < length <= high}
        for low, high in itertools.pairwise(borders)
    ]


def padded_tokens(lengths: dict[int, int], microbatch: int) -> float:
    """Expected tokens of all sequences, each padded to the longest of its microbatch, which is drawn at random."""
    total, longest, below = sum(lengths.values()), 0.0, 0
    for length, count in sorted(lengths.items()):
        longest += length * (((below + count) / total) ** microbatch - (below / total) ** microbatch)
        below += count
    return longest * total


def padded_share(lengths: dict[int, int], padded: float) -> float:
    """The share of padding, if these sequences have `padded` tokens after padding."""
    real = sum(length * count for length, count in lengths.items())
    return max(0.0, 1 - real / padded)  # sums of powers round: without padding it may come out a little below 0


class Bucket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The candidate for sequences of similar length."""

    longest: Positive
    """Steps of the longest sequence in the bucket."""
    sequences: Positive
    """Sequences of the data in the bucket."""
    candidate: Candidate
    """Its microbatch and segments, in the setting of the plan's candidate."""
    expected: Prediction
    """The prediction for the bucket. Its time is that of a step whose whole batch is from this bucket."""


def make_buckets(problem: Problem, records: Sequence[Record], chosen: Candidate, *, timed: bool = True) -> list[Bucket]:
    """The buckets of the spec's lengths, each with its fastest candidate that fits in the setting of the chosen one."""
    buckets: list[Bucket] = []
    for part in cut(problem.spec.lengths or {problem.spec.steps: 1}):
        longest = max(part)
        table = screen(problem, records, with_steps(problem.spec, longest))
        row = _row(table, chosen, whole=longest == problem.spec.steps)
        candidate, expected = table.candidates[row], table.expected[row].for_plan(timed=timed)
        buckets.append(Bucket(longest=longest, sequences=sum(part.values()), candidate=candidate, expected=expected))
    return buckets


def _row(table: CandidateTable, chosen: Candidate, *, whole: bool) -> int:
    """The fastest candidate that fits, exact if there is one; of equally fast ones that with the largest microbatch.

    The longest sequences are run as the chosen candidate says. If nothing fits (the chosen candidate fits only by its
    own record), it is the smallest.
    """
    alike = table.like(chosen, *SETTING, "threads")
    if whole:
        alike &= table.like(chosen, "microbatch", "segments", "levels", "recompute", "window")
    fits = table.fits & alike
    exact = fits & is_none(table.candidates.window)
    if not fits.any():
        return least(table.expected.safe_bytes, alike)
    seconds = np.where(exact if exact.any() else fits, table.expected.seconds_per_step, np.inf)
    return int(np.lexsort((seconds, -table.microbatches, seconds > (1 + ALIKE) * seconds.min()))[0])
