"""Which probe comes next: a pure function of the problem and the records so far.

So a search that was killed goes on where it stopped, and the same records lead to the same plan. Probes go from what
is surely safe towards the predicted border: a kind of which nothing has been measured is measured small first, and
nothing is run whose peak and margin exceed the budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from oomguard.calibrate import Calibration, Kind, kind_of, same_model
from oomguard.calibrate.memory import FLOOR_BYTES
from oomguard.candidate import Candidate, check_candidate
from oomguard.errors import MisuseError
from oomguard.estimate.breakdown import estimate_step
from oomguard.probe.record import Record
from oomguard.search.problem import Probe, Problem, Role
from oomguard.search.screen import SETTING, Screened, rows_like, screen
from oomguard.search.shorten import shorten
from oomguard.search.space import lossy
from oomguard.spec import MAX_SEQ
from oomguard.units import MIB

WORTH = 0.02
"""What could be better by no more than this is not looked for."""
DETOUR = 0.02
"""What a new setting must promise more for each doubling that it is away from the best known candidate."""
MUCH = 0.15
"""By so much something else must be faster to be confirmed after another candidate has been."""
OPTIMISM = 0.6
"""How many standard deviations faster than expected something unknown may be."""
PROBE_SECONDS = 0.4
"""What a pass of a short probe should take: several of them go into a second, and the fastest counts."""
CONFIRM_SECONDS = 40.0
"""What a pass at full length may take; a longer one is confirmed with shorter sequences."""
TWO_PASSES_SECONDS = 5.0
"""Up to so long a pass is measured twice."""
SMALL_BYTES = 64 * MIB
"""What a first probe should grow by, to tell something about memory."""
FEWEST_STEPS = 48
"""Of a short probe: fewer would tell more about calls than about steps."""
MOST_STEPS = 3
"""Near the largest."""
SAFE_SHARE = 4
"""A kind of which nothing has been measured is first run with this part of what the budget leaves to it."""
NEAR, CLOSE = 0.8, 0.05
"""The border is near from this share of the budget on; a peak is known well if its margin is this share of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known when a probe is chosen."""

    problem: Problem
    records: Sequence[Record]
    """All so far."""
    pending: Sequence[Probe] = ()
    """What others are running."""
    explore: bool = True
    """Whether there is time to look further; if not, the best known is confirmed."""
    confirm_seconds: float = CONFIRM_SECONDS
    """What confirming may take."""

    def done(self, probe: Probe) -> bool:
        """Whether this very probe has been run, or is being run."""
        others: list[Record | Probe] = [*self.records, *self.pending]
        return any(probe.is_of(one) for one in others)

    @property
    def measured(self) -> list[Record]:
        """All records of the very model, those of earlier searches included."""
        return [one for one in (*self.problem.cached, *self.records) if same_model(one.spec, self.problem.spec)]


def propose(known: Known) -> Probe | None:
    """The next probe; None if no further one could improve the plan by more than 2 %, or if nothing fits."""
    for aim in known.problem.maximize:
        probe = _fastest(known) if aim == "throughput" else _largest(known, aim)
        if probe is not None:
            # what others are finding out may change what is to be confirmed: wait for them
            return None if probe.role == "confirm" and known.pending else probe
    return None


def _fastest(known: Known) -> Probe | None:
    """Time what may be fastest, then confirm what is."""
    view = screen(known.problem, known.records)
    if not view.eligible.any():
        return _try_smallest(known, view)
    confirmed = _confirmed(known, view) & (_pass_seconds(view) > 2 * PROBE_SECONDS)
    if confirmed.any():  # at a length that was not needed to time it: after that, only what is far better counts
        return _second(known, view, confirmed)
    if known.explore:
        for row in _promising(known, view):
            probe = _short(known, view, row, "explore")
            if probe is not None:
                return (_halfway(known, view, row) or probe) if probe.spec == view.spec else probe
    best = choose(view)
    return None if best is None else _confirm(known, view, best)


def _second(known: Known, view: Screened, confirmed: Any) -> Probe | None:
    """If what was confirmed is far slower than another kind of candidate should be, that is confirmed too, once."""
    best = int(np.argmin(np.where(confirmed, view.seconds, np.inf)))
    alike = rows_like(view.candidates, view.candidates[best], [*SETTING, "threads", "microbatch", "recompute"])
    others = np.where(view.eligible & ~alike, view.expected, np.inf)
    row = int(np.argmin(others))
    slow = others[row] < (1 - MUCH) * view.seconds[best]
    return _confirm(known, view, row) if slow and known.explore and confirmed.sum() == 1 else None


def _promising(known: Known, view: Screened) -> list[int]:
    """Candidates that have not been timed and may beat the best that has, the most promising first."""
    expected = view.prediction.seconds_per_step
    measured = {kind_of(one) for one in known.measured}
    # what only the margin of an unmeasured kind keeps out may be timed too: its margin shrinks by that
    new = ~_of_kinds(view, measured) & (view.prediction.peak_bytes + _floor(known) <= known.problem.budget_bytes)
    pool = (view.eligible | (new & ~lossy(view.candidates))) & view.estimate.runs & view.timeable
    timed = np.where(view.eligible, view.seconds, np.nan)
    if np.isnan(timed).all():
        first = np.where(view.eligible & view.timeable, expected, np.inf)
        return [int(np.argmin(first))]
    away = _away(view, int(np.nanargmin(timed)))
    hope = expected * np.exp(-OPTIMISM * view.prediction.doubt) * (1 + DETOUR * away)
    hope = np.where(pool & np.isnan(view.seconds) & np.isfinite(away), hope, np.inf)
    rows = np.argsort(hope, kind="stable")[:3]
    return [int(row) for row in rows if hope[row] < np.nanmin(timed) * (1 - WORTH)]


def _away(view: Screened, row: int) -> Any:
    """How far others are from a candidate: doublings of microbatch and segments, two more for another way of going
    through the pieces; infinitely if two settings differ.

    One thing at a time: otherwise nobody could tell which of them it was.
    """
    chosen, length = view.candidates[row], len(view.fits)
    others = sum(
        np.broadcast_to(np.asarray(getattr(view.candidates, name) != getattr(chosen, name)), length) * 1
        for name in (*SETTING, "threads")
    )
    steps = sum(
        np.abs(np.log2(np.asarray(getattr(view.candidates, name)) / getattr(chosen, name)))
        for name in ("microbatch", "segments")
    )
    mode = rows_like(view.candidates, chosen, ["recompute", "levels", "window"])
    return np.where(others == 0, 0.0, np.where(others == 1, steps + 2 * ~mode, np.inf))


def _confirmed(known: Known, view: Screened) -> Any:
    """What has run within the budget at full length, or with as long sequences as can be afforded."""
    return view.eligible & (view.longest > 0) & (view.longest >= _affordable(known, view))


def choose(view: Screened) -> int | None:
    """The candidate to take: the fastest of those that ran at (nearly) full length or, if none did, that should be."""
    if not view.eligible.any():
        return None
    long = view.eligible & (2 * view.longest >= view.spec.steps)
    return int(np.argmin(np.where(long if long.any() else view.eligible, view.expected, np.inf)))


def _largest(known: Known, aim: str) -> Probe | None:
    """Calibrate small, then go to the predicted border, until that moves by no more than 1 %."""
    view, row = largest(known.problem, known.records, aim)
    if row is None:
        return _try_smallest(known, view)
    if not _of_kinds(view, {kind_of(one) for one in known.measured})[row]:
        return _small(known, view, row)
    size = view.spec.steps if aim == "seq" else int(np.broadcast_to(view.candidates.microbatch, len(view.fits))[row])
    best = _largest_run(known, view, aim)
    sizes = [one.candidate.microbatch if aim == "microbatch" else one.spec.steps for one in known.records]
    near = sum(2 * one > best for one in sizes)
    if size <= (1 + WORTH / 2) * best or (best and near >= MOST_STEPS):
        return None
    if known.problem.place.cuda:  # what the allocator reserves is less regular than what a process touches
        return _confirm(known, view, row)
    return _short(known, view, row, "confirm", known.confirm_seconds)


def largest(problem: Problem, records: Sequence[Record], aim: str) -> tuple[Screened, int | None]:
    """The screened space, at the longest sequences that fit if that is the aim, and the row to take there."""
    view = screen(problem, records)
    if aim == "seq" and view.eligible.any():
        view = _longest(problem, records, view)
    if not view.eligible.any():
        return view, None
    seconds = np.where(np.isnan(view.seconds), view.prediction.seconds_per_step, view.seconds)
    rows = np.broadcast_to(view.candidates.microbatch, len(seconds)) if aim == "microbatch" else np.zeros(len(seconds))
    order = np.lexsort((seconds, -rows, ~view.eligible))  # the largest and, of equal ones, the fastest
    return view, int(order[0])


def _longest(problem: Problem, records: Sequence[Record], view: Screened) -> Screened:
    """The space at the longest sequences of which some candidate fits, by bisection to a part in 200."""
    low, high = problem.spec.steps, None
    while high is None or high - low > max(1, low // 200):
        middle = min(2 * low, MAX_SEQ) if high is None else (low + high) // 2
        found = _at(problem, records, middle)
        if found is None or not found.eligible.any():
            high = middle
        elif middle == low:
            break
        else:
            low, view = middle, found
    return view


def _at(problem: Problem, records: Sequence[Record], steps: int) -> Screened | None:
    """The space with other sequence lengths; None if there is no such spec."""
    try:
        spec = msgspec.structs.replace(problem.spec, seq=steps, lengths=None)
        check_fixed = Candidate(**{"microbatch": 1} | {k: v for k, v in problem.space.fixed.items() if k == "segments"})
        check_candidate(spec, msgspec.structs.replace(check_fixed, accumulation=spec.batch))
        return screen(problem, records, spec)
    except MisuseError:
        return None


def _largest_run(known: Known, view: Screened, aim: str) -> int:
    """The largest that has been confirmed."""
    ran = _confirmed(known, view)
    sizes = np.broadcast_to(view.candidates.microbatch if aim == "microbatch" else view.spec.steps, len(ran))
    return int(sizes[ran].max()) if ran.any() else 0


def _pass_seconds(view: Screened) -> Any:
    """Of one full microbatch, measured or expected."""
    passes = -(-view.spec.batch // np.broadcast_to(view.candidates.microbatch, len(view.fits)))
    return view.expected / passes


def _affordable(known: Known, view: Screened) -> Any:
    """Steps of the longest sequences that can be confirmed."""
    passes = -(-view.spec.batch // np.broadcast_to(view.candidates.microbatch, len(view.fits)))
    each = view.prediction.seconds_per_step / passes / view.spec.steps
    return np.minimum(view.spec.steps, 0.5 * known.confirm_seconds / each)


def _try_smallest(known: Known, view: Screened) -> Probe | None:
    """Nothing fits by estimate and margin: measure the smallest, unless that has been done."""
    runs = np.broadcast_to(view.estimate.runs, len(view.fits))
    row = int(np.argmin(np.where(runs, view.safe_bytes, np.iinfo(np.int64).max)))
    kind, pieces = _kind(view, row), view.candidates[row].segments > 1
    seen = [one for one in known.measured if kind_of(one) == kind]
    if not runs[row] or any((one.candidate.segments > 1) == pieces for one in seen):
        return None
    return _short(known, view, row, "calibrate")


def _confirm(known: Known, view: Screened, row: int) -> Probe | None:
    """The candidate itself, at full length if that can be afforded; before that half of it, if much is uncertain."""
    return _halfway(known, view, row) or _short(known, view, row, "confirm", known.confirm_seconds)


def _halfway(known: Known, view: Screened, row: int) -> Probe | None:
    """The candidate with half as long sequences, on the way to the border; None if that is far, or known well."""
    problem, expected = known.problem, view.prediction[row]
    growth_bytes = expected.peak_bytes - int(np.max(view.estimate.terms["runtime"]))
    near = problem.place.cuda or expected.safe_bytes > NEAR * problem.budget_bytes
    passes = -(-view.spec.batch // view.candidates[row].microbatch)
    if (
        not near
        or expected.margin_bytes <= CLOSE * growth_bytes
        or 3 * view.longest[row] >= view.spec.steps
        or float(view.expected[row]) / passes / 2 > known.confirm_seconds / 4
    ):
        return None
    return _short(known, view, row, "calibrate", steps=view.spec.steps // 2)


def _small(known: Known, view: Screened, row: int) -> Probe | None:
    """The same setting and pieces with a smaller microbatch, or if that is not enough, with shorter sequences."""
    chosen, rows = view.candidates[row], np.arange(len(view.fits))
    alike = np.ones(len(rows), dtype=bool)
    for name, values in view.candidates.arrays.items():
        if name not in ("microbatch", "accumulation"):
            alike &= np.asarray(values == getattr(chosen, name))
    runtime_bytes = int(np.max(view.estimate.terms["runtime"]))
    most = max(SMALL_BYTES, (known.problem.budget_bytes - runtime_bytes) // 6)
    enough = alike & (view.prediction.peak_bytes - runtime_bytes <= most)
    sizes = np.broadcast_to(view.candidates.microbatch, len(rows))
    row = int(rows[enough][np.argmax(sizes[enough])]) if enough.any() else row
    return _short(known, view, row, "calibrate", 2 * PROBE_SECONDS)


def _short(
    known: Known, view: Screened, row: int, role: Role, seconds: float = PROBE_SECONDS, steps: int | None = None
) -> Probe | None:
    """A probe of a candidate in which a pass takes about so long, and which surely fits. None if it has been run."""
    problem, candidate = known.problem, view.candidates[row]
    passes = -(-view.spec.batch // candidate.microbatch)
    each = float(view.prediction.seconds_per_step[row]) / passes / view.spec.steps
    if role == "confirm" and not np.isnan(view.seconds[row]):
        each = float(view.seconds[row]) / passes / view.spec.steps
    steps = steps or max(FEWEST_STEPS, int(seconds / each))
    steps = view.spec.steps if steps >= view.spec.steps else _round(steps)
    calibration = Calibration(view.spec, known.records, problem.place, problem.cached)
    while True:
        # what chunks reserve on a card depends on their number, what they take on their length
        fewer = candidate.recompute or role != "calibrate"
        short, cut = shorten(view.spec, candidate, steps, fewer=fewer)
        expected = calibration.predict(estimate_step(short, cut, problem.place))
        whole = short == view.spec and role == "confirm"
        if whole or expected.safe_bytes <= _within(known, view, row) or steps <= 1:
            break
        steps //= 2
    pass_seconds = each * short.steps
    probe = Probe(
        spec=short,
        candidate=cut,
        role=role,
        passes=2 if pass_seconds <= TWO_PASSES_SECONDS else 1,
        peak_bytes=int(expected.peak_bytes),
        seconds_per_pass=pass_seconds,
    )
    return None if known.done(probe) else probe


def _within(known: Known, view: Screened, row: int) -> int:
    """What a probe of a candidate may be expected to need: the budget, or a part of it if its kind is new."""
    if _kind(view, row) in {kind_of(one) for one in known.measured}:
        return known.problem.budget_bytes
    runtime_bytes = int(np.max(view.estimate.terms["runtime"]))
    spare_bytes = max(0, known.problem.budget_bytes - runtime_bytes) // SAFE_SHARE
    return min(known.problem.budget_bytes, runtime_bytes + max(SMALL_BYTES, spare_bytes))


def _round(steps: int) -> int:
    """Two leading digits: a slightly other prediction of the time gives the same probe."""
    unit = int(10 ** max(0, len(str(steps)) - 2))
    return max(1, steps // unit * unit)


def _floor(known: Known) -> int:
    return FLOOR_BYTES["cuda" if known.problem.place.cuda else "cpu"]


def _kind(view: Screened, row: int) -> Kind:
    knobs = view.candidates[row]
    engine = np.broadcast_to(view.estimate.engine, len(view.fits))[row]
    return Kind(str(engine), knobs.precision, knobs.allocator or "plain")


def _of_kinds(view: Screened, kinds: set[Kind]) -> Any:
    """Where candidates are of one of these kinds."""
    found, length = np.zeros(len(view.fits), dtype=bool), len(view.fits)
    knobs = view.candidates
    for kind in kinds:
        columns = zip((view.estimate.engine, knobs.precision, knobs.allocator), kind, strict=True)
        rows = np.ones(length, dtype=bool)
        for values, value in columns:
            rows &= np.broadcast_to(np.asarray(values) == value, length)
        found |= rows
    return found
