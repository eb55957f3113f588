"""Which probe comes next: a pure function of the problem and the records so far.

So a search that was killed goes on where it stopped, and the same records lead to the same plan.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from oomguard._core.errors import MisuseError
from oomguard._predict.calibration import kind_of
from oomguard._predict.fit import Floats
from oomguard._predict.memory import FLOOR_BYTES
from oomguard._probe.record import Record
from oomguard._search.approach import PROBE_SECONDS, Probe, State, again, confirm, halfway, short, small
from oomguard._search.lengths import longest_that_fits
from oomguard._search.screen import SETTING, CandidateTable, Ints, Mask, least, may_repeat_bytes, screen
from oomguard._search.space import Problem, lossy, microbatches
from oomguard._spec.candidate import Candidate, make_candidate

WORTH = 0.02
"""Gain below which nothing further is looked for."""
DETOUR = 0.02
"""Gain that a new setting must promise for each doubling that it is away from the best known candidate."""
FINALISTS, TURNS, CLOSE = 3, 3, 0.1
"""The three fastest candidates, if within a tenth of the fastest, run three times each: a single time is half luck."""
MUCH = 0.15
"""Share by which another candidate must be faster to be confirmed after one has been confirmed."""
OPTIMISM, CURIOSITY = 0.3, 1.5
"""Standard deviations by which an untimed candidate is assumed faster than predicted; more where probes are quick."""
PATIENCE = 8
"""After so many candidates tried in vain, the assumed gain is half as large."""
MOST_STEPS, BOLD = 3, 0.6
"""Probes near the largest, at most; and the share of the margin that those after the first keep to."""
BORDERS, BORDER_SECONDS, NEARER = 2, 5.0, (1 / 2, 3 / 4, 7 / 8)
"""How many of the fastest candidates may go into their margin, the seconds that a pass of theirs may take, and the
shares of their sequence length that are run before."""


def propose(state: State) -> Probe | None:
    """The next probe; None if no further one could improve the plan by more than 2 %, or if nothing fits."""
    for aim in state.problem.maximize:
        probe = _fastest(state) if aim == "throughput" else _largest(state, aim)
        if probe is not None:
            # results of other workers may change what is to be confirmed: wait for them
            return None if probe.role == "confirm" and state.pending else probe
    return None


def _fastest(state: State) -> Probe | None:
    """Time what may be fastest, then confirm what is."""
    table = screen(state.problem, state.records)
    if not table.eligible.any():
        return _try_smallest(state, table)
    longer = table.shortest < table.longest  # run at a length beyond the one that timed it
    confirmed = _confirmed(state, table) & longer & (table.pass_seconds > 2 * PROBE_SECONDS)
    if confirmed.any():
        return _second(state, table, confirmed)
    turn = _turn(state, table, finalists=1, turns=2)  # a lucky first time would keep others from being tried
    for row in _promising(state, table) if state.explore and turn is None else ():
        probe = short(state, table, row, "explore")
        if probe is not None and probe.spec == table.spec:
            probe = halfway(state.alone, table, row) or probe
        if probe is not None and not state.awaits(probe):  # nor is anything run whole while another runs half of it
            return probe
    further = turn or (_into_the_margin(state, table) if state.explore else None) or _turn(state, table)
    if further is not None:
        return further
    return confirm(state, table, least(table.expected.seconds_per_step, table.eligible))


def _second(state: State, table: CandidateTable, confirmed: Mask) -> Probe | None:
    """Confirm another kind of candidate, once, if it should be far faster than the confirmed one."""
    best = least(table.seconds, confirmed)
    alike = table.like(table.candidates[best], *SETTING, "threads", "microbatch", "recompute")
    # candidates that keep all activations: their memory grows with the sequence and may be in no cache
    keeps = np.equal(table.candidates.segments, 1) | np.logical_not(table.candidates.recompute)
    keeps = np.broadcast_to(keeps, len(table))
    alike |= keeps & keeps[best]  # if short sequences did not tell its time, they do not tell that of others either
    others = table.eligible & ~alike
    row = least(table.expected.seconds_per_step, others)
    faster = others[row] and table.expected.seconds_per_step[row] < (1 - MUCH) * table.seconds[best]
    return confirm(state, table, row) if faster and state.explore and confirmed.sum() == 1 else None


def _into_the_margin(state: State, table: CandidateTable) -> Probe | None:
    """Approach a candidate that only its margin excludes, if short sequences of it are faster than all that fit.

    It is run longer and longer, then whole once most of the margin fits, and chosen only if it fits by its own record.
    """
    best = np.min(table.expected.seconds_per_step[table.eligible])
    reach = _within_reach(state, table) & (table.seconds < (1 - WORTH) * best)
    nearer = (_nearer(state, table, row) for row in _lowest(table.seconds, reach, BORDERS))
    return next((probe for probe in nearer if probe is not None and not state.awaits(probe)), None)


def _nearer(state: State, table: CandidateTable, row: int) -> Probe | None:
    """The next probe of a candidate at the border: longer than before or, if most of its margin fits, whole."""
    expected, steps = table.prediction[row], table.spec.steps
    if expected.peak_bytes + BOLD * expected.margin_bytes <= state.problem.budget_bytes:
        return short(state, table, row, "confirm", steps=steps)
    nearer = (short(state, table, row, "calibrate", steps=int(share * steps)) for share in NEARER)
    return next((probe for probe in nearer if probe is not None), None)


def _within_reach(state: State, table: CandidateTable) -> Mask:
    """CPU: quick candidates that may fit but not surely, not yet run whole, of kinds of which no probe has failed."""
    kinds = state.measured - {kind_of(record) for record in state.records if not record.verdict.ran}
    reach = table.runs & ~table.fits & ~lossy(table.candidates) & (table.longest < table.spec.steps)
    reach &= table.of_kinds(kinds) & (not state.problem.target.cuda)
    reach &= may_repeat_bytes(table) - table.prediction.margin_bytes <= state.problem.budget_bytes
    return reach & (table.pass_seconds <= BORDER_SECONDS)


def _turn(state: State, table: CandidateTable, finalists: int = FINALISTS, turns: int = TURNS) -> Probe | None:
    """Another turn of one of the fastest, so that none is chosen for its luck; None if all have had theirs.

    The fewest turns come first, then the kind of the last probe: its child need not be started anew.
    """
    seconds, timed = table.seconds, _lowest(table.seconds, _quick(table) & ~np.isnan(table.seconds), FINALISTS)
    if len(timed) < 2:
        return None
    last, waiting = kind_of(state.records[-1]), []
    for row in timed[:finalists]:
        probe, close = again(state, table, row), seconds[row] <= (1 + CLOSE) * seconds[timed[0]]
        if close and (count := state.turns(probe)) < turns:
            waiting.append((count, table.kind_at(row) != last, seconds[row], probe))
    return min(waiting, key=lambda turn: turn[:3])[3] if waiting else None


def _quick(table: CandidateTable) -> Mask:
    """Candidates that have been run whole, in a second or two."""
    return table.eligible & np.equal(table.longest, table.spec.steps) & (table.pass_seconds <= 2 * PROBE_SECONDS)


def _lowest(values: Floats, rows: Mask, most: int) -> list[int]:
    """The rows with the lowest values, at most so many, the lowest first."""
    return [int(row) for row in np.argsort(np.where(rows, values, np.inf), kind="stable")[:most] if rows[row]]


def _promising(state: State, table: CandidateTable) -> list[int]:
    """Candidates that have not been timed and may beat the best that has, the most promising first."""
    predicted, problem = table.prediction.seconds_per_step, state.problem
    floor_bytes = FLOOR_BYTES["cuda" if problem.target.cuda else "cpu"]
    # candidates that only the margin of an unmeasured kind excludes may be timed too: that shrinks the margin
    new = ~table.of_kinds(state.measured) & (table.prediction.peak_bytes + floor_bytes <= problem.budget_bytes)
    pool = table.eligible | (new & ~lossy(table.candidates)) | _within_reach(state, table)
    # where every size is a candidate (to find the largest), neighbours are equally fast
    sizes, fixed = table.microbatches, np.ptp(table.microbatches) == 0
    pool = pool & table.runs & table.timeable & (np.isin(sizes, microbatches(table.spec.batch)) | fixed)
    timed = np.where(table.eligible, table.seconds, np.nan)
    if np.isnan(timed).all():
        return [least(predicted, table.eligible & table.timeable)]
    distance = _distance(table, int(np.nanargmin(timed)))
    curiosity = CURIOSITY * PATIENCE / (PATIENCE + tried_in_vain(state.records))
    optimism = max(OPTIMISM, curiosity) if _quick(table).any() else OPTIMISM
    optimistic = predicted * np.exp(-optimism * table.prediction.doubt) * (1 + DETOUR * distance)
    pool &= np.isnan(table.seconds) & (optimistic < np.nanmin(timed) * (1 - WORTH))
    return _lowest(optimistic, pool, 3)


def tried_in_vain(records: Sequence[Record]) -> int:
    """Candidates that were tried since one was last faster, by more than 2 %, than all before it."""
    best, since = float("inf"), set[Candidate]()
    for record in sorted(records, key=lambda record: record.started):
        if record.seconds_per_pass is not None:
            each = record.seconds_per_pass / (record.spec.steps * record.candidate.microbatch)
            if each < (1 - WORTH) * best:
                best, since = each, set()
            else:
                since.add(record.candidate)
    return len(since)


def _distance(table: CandidateTable, row: int) -> Floats:
    """Doublings of microbatch and segments from a candidate to others, two more for another mode of segments.

    It is infinite where two settings differ: the search changes one at a time, to learn which of them mattered.
    """
    chosen = table.candidates[row]
    changed = sum(~table.like(chosen, name) * 1 for name in (*SETTING, "threads"))
    doublings = np.abs(np.log2(table.microbatches / chosen.microbatch))
    doublings = doublings + np.abs(np.log2(table.candidates.segments / chosen.segments))
    mode = table.like(chosen, "recompute", "levels", "window")
    return np.where(changed == 0, 0.0, np.where(changed == 1, doublings + 2 * ~mode, np.inf))


def _confirmed(state: State, table: CandidateTable) -> Mask:
    """Candidates that have run within the budget at full length, or with the longest sequences there is time for."""
    each = table.prediction.seconds_per_step / table.passes / table.spec.steps
    affordable = np.minimum(table.spec.steps, 0.5 * state.confirm_seconds / each)
    return table.eligible & (table.longest > 0) & (table.longest >= affordable)


def choose(table: CandidateTable) -> int | None:
    """The row to take: the fastest of those that ran at (nearly) full length or, if none did, the fastest expected."""
    if not table.eligible.any():
        return None
    long = table.eligible & (2 * table.longest >= table.spec.steps)
    # if nothing has run, all predictions are equally uncertain, and caution would only favour the usual
    ran = (table.longest > 0).any()
    seconds = table.expected.seconds_per_step if ran else table.prediction.seconds_per_step
    return least(seconds, long if long.any() else table.eligible)


def _largest(state: State, aim: str) -> Probe | None:
    """Calibrate small, then go to the predicted border, until that moves by no more than 2 %."""
    sizes = [record.candidate.microbatch if aim == "microbatch" else record.spec.steps for record in state.records]
    near = sum(2 * size > max(sizes) for size in sizes if size > min(sizes))
    # once the border has been seen, a probe may go into its margin: what is taken must fit by its own record
    bold = near > 0 and not state.problem.target.cuda
    table, row = largest(state.problem, state.records, aim, BOLD if bold else 1.0)
    if row is None:
        return _try_smallest(state, table)
    if table.kind_at(row) not in state.measured:
        return small(state, table, row)
    sized, ran = sizes_of(table, aim), _confirmed(state, table)
    best = int(sized[ran].max()) if ran.any() else 0
    if sized[row] <= (1 + WORTH) * best or (best and near >= MOST_STEPS):
        return None
    if state.problem.target.cuda:  # what the allocator reserves is less regular than what a process touches
        return confirm(state, table, row)
    return short(state, table, row, "confirm", state.confirm_seconds)


def sizes_of(table: CandidateTable, aim: str) -> Ints:
    """What is to be as large as possible: the microbatch of each candidate, or the steps."""
    return table.microbatches if aim == "microbatch" else np.full(len(table), table.spec.steps)


def largest(
    problem: Problem, records: Sequence[Record], aim: str, caution: float = 1.0
) -> tuple[CandidateTable, int | None]:
    """The table, at the longest sequences that fit if that is the aim, and the row of the largest and fastest."""
    table = screen(problem, records, caution=caution)
    if aim == "seq" and table.eligible.any():
        table = _longest(problem, records, table)
    if not table.eligible.any():
        return table, None
    seconds = np.where(np.isnan(table.seconds), table.prediction.seconds_per_step, table.seconds)
    return table, int(np.lexsort((seconds, -sizes_of(table, aim), ~table.eligible))[0])


def _longest(problem: Problem, records: Sequence[Record], table: CandidateTable) -> CandidateTable:
    """The table at the longest sequences of which some candidate fits, to a part in 200."""
    tables = {problem.spec.steps: table}

    def fits(steps: int) -> bool:
        try:
            spec = msgspec.structs.replace(problem.spec, seq=steps, lengths=None)
            make_candidate(spec, microbatch=1, segments=problem.space.choices.fixed.get("segments"))
            tables[steps] = screen(problem, records, spec)
        except MisuseError:  # a length that no spec can have, or fewer steps than fixed segments
            return False
        return bool(tables[steps].eligible.any())

    return tables[longest_that_fits(fits, problem.spec.steps, parts=200)]


def _try_smallest(state: State, table: CandidateTable) -> Probe | None:
    """Measure the smallest candidate if nothing fits by prediction, unless that has been done."""
    row = table.smallest
    kind, segmented = table.kind_at(row), table.candidates[row].segments > 1
    seen = {(kind_of(record), record.candidate.segments > 1) for record in state.own_records}
    return short(state, table, row, "calibrate") if table.runs[row] and (kind, segmented) not in seen else None
