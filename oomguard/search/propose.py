"""Which probe comes next: a pure function of the problem and the records so far.

So a search that was killed goes on where it stopped, and the same records lead to the same plan.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from oomguard.calibrate import kind_of
from oomguard.calibrate.memory import FLOOR_BYTES
from oomguard.candidate import Candidate, check_candidate
from oomguard.errors import MisuseError
from oomguard.probe.record import Record
from oomguard.search.approach import PROBE_SECONDS, Known, again, confirm, halfway, kind_at, of_kinds, short, small
from oomguard.search.problem import Probe, Problem
from oomguard.search.screen import SETTING, Screened, may_repeat_bytes, rows_like, screen
from oomguard.search.space import lossy, microbatches
from oomguard.spec import MAX_SEQ

WORTH = 0.02
"""What could be better by no more than this is not looked for."""
DETOUR = 0.02
"""What a new setting must promise more for each doubling that it is away from the best known candidate."""
FINALISTS, TURNS, CLOSE = 3, 3, 0.1
"""So many of the fastest are run so often, if they are as close as this to the fastest: one time alone is half luck."""
MUCH = 0.15
"""By so much something else must be faster to be confirmed after another candidate has been."""
OPTIMISM, CURIOSITY = 0.3, 1.5
"""How many standard deviations faster than expected something unknown may be; and where it takes a second to try."""
PATIENCE = 8
"""After so many that were tried in vain, it may be faster by half as much."""
MOST_STEPS, BOLD = 3, 0.6
"""Probes near the largest; and the part of the margin that those after the first keep to."""
BORDERS, BORDER_SECONDS, NEARER = 2, 5.0, (1 / 2, 3 / 4, 7 / 8)
"""How many of the fastest may go into their margin, what a pass of theirs may take, and which parts of their sequences
are run before."""


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
    longer = view.shortest < view.longest  # or it was to be timed, and only turned out to be slow
    confirmed = _confirmed(known, view) & longer & (_pass_seconds(view) > 2 * PROBE_SECONDS)
    if confirmed.any():  # at a length that was not needed to time it: after that, only what is far better counts
        return _second(known, view, confirmed)
    turn = _turn(known, view, finalists=1, turns=2)  # what luck made the best would keep others from being tried
    for row in _promising(known, view) if known.explore and turn is None else ():
        probe = short(known, view, row, "explore")
        if probe is not None and probe.spec == view.spec:
            probe = halfway(known.alone, view, row) or probe
        if probe is not None and not known.awaits(probe):  # nor is anything run whole while others run half of it
            return probe
    further = turn or (_into_the_margin(known, view) if known.explore else None) or _turn(known, view)
    if further is not None:
        return further
    return confirm(known, view, int(np.argmin(np.where(view.eligible, view.expected, np.inf))))


def _second(known: Known, view: Screened, confirmed: Any) -> Probe | None:
    """If what was confirmed is far slower than another kind of candidate should be, that is confirmed too, once."""
    best = int(np.argmin(np.where(confirmed, view.seconds, np.inf)))
    alike = rows_like(view.candidates, view.candidates[best], [*SETTING, "threads", "microbatch", "recompute"])
    keeps = _keeps_all(view)
    alike |= keeps & keeps[best]  # if short sequences did not tell its time, they do not tell that of others either
    others = np.where(view.eligible & ~alike, view.expected, np.inf)
    row = int(np.argmin(others))
    slow = others[row] < (1 - MUCH) * view.seconds[best]
    return confirm(known, view, row) if slow and known.explore and confirmed.sum() == 1 else None


def _keeps_all(view: Screened) -> Any:
    """What keeps all that it computed, so that its memory grows with the sequence: it may be new to every cache."""
    whole = np.broadcast_to(np.equal(view.candidates.segments, 1), len(view.fits))
    return whole | ~np.broadcast_to(np.asarray(view.candidates.recompute, dtype=bool), len(view.fits))


def _into_the_margin(known: Known, view: Screened) -> Probe | None:
    """What only its margin keeps out, if short sequences of it are faster than all that fit: more and more of it, and
    the whole once most of the margin fits. It is chosen only if it fits by its own record."""
    best = np.min(np.where(view.eligible, view.expected, np.inf))
    seconds = np.where(_within_reach(known, view) & ~np.isnan(view.seconds), view.seconds, np.inf)
    for row in map(int, np.argsort(seconds, kind="stable")[:BORDERS]):
        if seconds[row] < (1 - WORTH) * best:
            probe = _nearer(known, view, row)
            if probe is not None and not known.awaits(probe):
                return probe
    return None


def _nearer(known: Known, view: Screened, row: int) -> Probe | None:
    """The next step towards a candidate at the border: more than before or, if most of its margin fits, the whole."""
    expected, steps = view.prediction[row], view.spec.steps
    if expected.peak_bytes + BOLD * expected.margin_bytes <= known.problem.budget_bytes:
        return short(known, view, row, "confirm", steps=steps)
    nearer = (short(known, view, row, "calibrate", steps=int(share * steps)) for share in NEARER)
    return next((probe for probe in nearer if probe is not None), None)


def _within_reach(known: Known, view: Screened) -> Any:
    """CPU: what is not known to fit but may do so, has not been run whole, and would not take long. Not of a kind of
    which something has failed."""
    kinds = {kind_of(one) for one in known.measured} - {kind_of(one) for one in known.records if not one.verdict.ran}
    reach = view.estimate.runs & ~view.fits & ~lossy(view.candidates) & (view.longest < view.spec.steps)
    reach &= of_kinds(view, kinds) & (not known.problem.place.cuda)
    reach &= may_repeat_bytes(view) - view.prediction.margin_bytes <= known.problem.budget_bytes
    return reach & (_pass_seconds(view) <= BORDER_SECONDS)


def _turn(known: Known, view: Screened, finalists: int = FINALISTS, turns: int = TURNS) -> Probe | None:
    """Another turn of one of the fastest, so that none is chosen for its luck: the one that has had the fewest, of the
    same kind as the last probe if there is one (the child need not be started anew). None if it would take long."""
    seconds = np.where(_quick(view) & ~np.isnan(view.seconds), view.seconds, np.inf)
    timed = [int(row) for row in np.argsort(seconds, kind="stable")[: FINALISTS + 1] if np.isfinite(seconds[row])]
    if len(timed) < 2:
        return None
    last, waiting = kind_of(known.records[-1]), []
    for row in timed[:finalists]:
        probe, close = again(known, view, row), seconds[row] <= (1 + CLOSE) * seconds[timed[0]]
        if close and (had := known.turns(probe)) < turns:
            waiting.append((had, kind_at(view, row) != last, seconds[row], probe))
    return min(waiting, key=lambda one: one[:3])[3] if waiting else None


def _quick(view: Screened) -> Any:
    """What can be run whole in a second or two, and has been."""
    return view.eligible & (view.longest == view.spec.steps) & (_pass_seconds(view) <= 2 * PROBE_SECONDS)


def _promising(known: Known, view: Screened) -> list[int]:
    """Candidates that have not been timed and may beat the best that has, the most promising first."""
    expected = view.prediction.seconds_per_step
    measured = {kind_of(one) for one in known.measured}
    # what only the margin of an unmeasured kind keeps out may be timed too: its margin shrinks by that
    new = ~of_kinds(view, measured) & (view.prediction.peak_bytes + _floor(known) <= known.problem.budget_bytes)
    pool = view.eligible | (new & ~lossy(view.candidates)) | _within_reach(known, view)
    pool = pool & view.estimate.runs & view.timeable & _apart(view)
    timed = np.where(view.eligible, view.seconds, np.nan)
    if np.isnan(timed).all():
        first = np.where(view.eligible & view.timeable, expected, np.inf)
        return [int(np.argmin(first))]
    away = _away(view, int(np.nanargmin(timed)))
    curiosity = CURIOSITY * PATIENCE / (PATIENCE + in_vain(known.records))
    optimism = max(OPTIMISM, curiosity) if _quick(view).any() else OPTIMISM
    hope = expected * np.exp(-optimism * view.prediction.doubt) * (1 + DETOUR * away)
    hope = np.where(pool & np.isnan(view.seconds) & np.isfinite(away), hope, np.inf)
    rows = np.argsort(hope, kind="stable")[:3]
    return [int(row) for row in rows if hope[row] < np.nanmin(timed) * (1 - WORTH)]


def _apart(view: Screened) -> Any:
    """Microbatches that are worth timing: where every one of them counts (to find the largest), one more row does not
    make a difference in speed."""
    sizes = np.broadcast_to(view.candidates.microbatch, len(view.fits))
    return np.isin(sizes, microbatches(view.spec.batch)) | (sizes.min() == sizes.max())  # or it is a fixed one


def in_vain(records: Sequence[Record]) -> int:
    """Candidates that were tried since one was last faster, by more than 2 %, than all before it."""
    best, since = float("inf"), set[Candidate]()
    for record in sorted(records, key=lambda one: one.started):
        if record.seconds_per_pass is not None:
            each = record.seconds_per_pass / (record.spec.steps * record.candidate.microbatch)
            if each < (1 - WORTH) * best:
                best, since = each, set()
            else:
                since.add(record.candidate)
    return len(since)


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
    # where nothing has run, nothing is better known than anything else: caution would only favour what is usual
    seconds = view.expected if (view.longest > 0).any() else view.prediction.seconds_per_step
    return int(np.argmin(np.where(long if long.any() else view.eligible, seconds, np.inf)))


def _largest(known: Known, aim: str) -> Probe | None:
    """Calibrate small, then go to the predicted border, until that moves by no more than 2 %."""
    sizes = [one.candidate.microbatch if aim == "microbatch" else one.spec.steps for one in known.records]
    near = sum(2 * one > max(sizes) for one in sizes if one > min(sizes))
    # once the border has been seen, a probe may go into its margin: what is taken must fit by its own record
    bold = near > 0 and not known.problem.place.cuda
    view, row = largest(known.problem, known.records, aim, BOLD if bold else 1.0)
    if row is None:
        return _try_smallest(known, view)
    if not of_kinds(view, {kind_of(one) for one in known.measured})[row]:
        return small(known, view, row)
    best = _largest_run(known, view, aim)
    if _size(view, row, aim) <= (1 + WORTH) * best or (best and near >= MOST_STEPS):
        return None
    if known.problem.place.cuda:  # what the allocator reserves is less regular than what a process touches
        return confirm(known, view, row)
    return short(known, view, row, "confirm", known.confirm_seconds)


def _size(view: Screened, row: int, aim: str) -> int:
    """What is to be as large as possible."""
    return view.spec.steps if aim == "seq" else view.candidates[row].microbatch


def largest(problem: Problem, records: Sequence[Record], aim: str, caution: float = 1.0) -> tuple[Screened, int | None]:
    """The screened space, at the longest sequences that fit if that is the aim, and the row to take there."""
    view = screen(problem, records, caution=caution)
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
    kind, pieces = kind_at(view, row), view.candidates[row].segments > 1
    seen = [one for one in known.measured if kind_of(one) == kind]
    if not runs[row] or any((one.candidate.segments > 1) == pieces for one in seen):
        return None
    return short(known, view, row, "calibrate")


def _floor(known: Known) -> int:
    return FLOOR_BYTES["cuda" if known.problem.place.cuda else "cpu"]
