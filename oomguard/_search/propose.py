"""The rule: which probe comes next, a pure function of the problem and of the records so far.

So a search that was killed goes on where it stopped, and the same records lead to the same plan.

The rule: of the candidates that stay within the budget with a probability of 99 %, and of their shorter versions, run
the one with the largest expected improvement per expected second. Stop when no probe is expected to improve the plan by
2 %, and confirm the best candidate at full length.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np

from oomguard._estimate.breakdown import estimate_step, split
from oomguard._estimate.margins import SETTLED
from oomguard._predict.belief import believed, doubted
from oomguard._predict.calibration import Kind, kind_of
from oomguard._predict.fit import Floats
from oomguard._probe.record import Record
from oomguard._search.largest import largest, longest_run, sizes_of
from oomguard._search.screen import SETTING, SHAPE, CandidateTable, Ints, Mask, least, rows_of, screen
from oomguard._search.space import WORTH, Problem
from oomguard._spec.candidate import Candidate
from oomguard._spec.lengths import same_model, shorten
from oomguard._spec.spec import Spec

PROBE_SECONDS = 0.4  # seconds of a pass of a short version: several go into a second, and their median counts
CHILD_SECONDS = 3.0
"""Seconds of starting a child: a new one is needed if the kind of candidate changes (2.5 to 3.5 s on 2 cores). A pass
that takes no longer is measured twice, since a first pass is slower and peaks lower."""
MEASURE_SECONDS = 1.5  # a probe begins no further optimizer step after so many seconds
SAFE_SHARE = 4
"""A kind that has not been measured is first run in a quarter of the spare budget: stored errors are those of other
machines."""
Role = Literal["calibrate", "explore", "confirm"]


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A probe to run, and why."""

    spec: Spec  # the spec, perhaps with shorter sequences
    candidate: Candidate  # the candidate, with as many segments as such sequences have
    role: Role
    """Calibrate: correct the estimates. Explore: time a candidate. Confirm: run the chosen candidate."""
    passes: int  # passes to measure, at least
    rival: Candidate | None = None  # a candidate that runs by turns with this one, to compare their times
    peak_bytes: int  # the expected peak
    seconds_per_pass: float  # the expected seconds of a pass
    fresh: bool = False  # whether it runs in a new child process

    def is_of(self, other: "Record | Probe") -> bool:
        """Whether a record, or another probe, has the same spec and candidate."""
        return other.candidate == self.candidate and other.spec == self.spec


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is known when a probe is chosen."""

    problem: Problem
    records: Sequence[Record]
    pending: Sequence[Probe] = ()  # probes that other workers are running
    explore: bool = True  # whether there is time to explore; if not, the best known candidate is confirmed
    left: float = math.inf  # seconds until the search ends
    draw: Callable[[CandidateTable], int] | None = None  # explores instead of the rule: gives the row to run

    @property
    def confirm_seconds(self) -> float:
        """Seconds that a pass of a confirming probe may take: half of the time left, since it may be slow."""
        return max(1.0, self.left / 2)

    @property
    def known(self) -> list[Record | Probe]:
        """What has been run, and what is running."""
        return [*self.records, *self.pending]

    @property
    def child_seconds(self) -> float:
        """Seconds of starting a child: the most that a record took beside its passes, on a machine that may be busy."""
        ran = [record for record in self.records if record.seconds_per_pass is not None]
        return max(
            [CHILD_SECONDS, *(record.seconds - record.passes * (record.seconds_per_pass or 0) for record in ran)]
        )

    @property
    def own_records(self) -> list[Record]:
        """All records of this model, by earlier searches too."""
        records = (*self.problem.cached, *self.records)
        return [record for record in records if same_model(record.spec, self.problem.spec)]


def propose(state: State) -> Probe | None:
    """The next probe; None if no further one is expected to improve the plan, or if nothing fits."""
    if again := _measure_again(state):
        return again
    state = replace(state, records=believed(state.records, state.problem.target))
    for aim in state.problem.maximize:
        probe = _fastest(state) if aim == "throughput" else _largest(state, aim)
        if probe is not None:
            # results of other workers may change what is to be confirmed: wait for them
            return None if probe.role == "confirm" and state.pending else probe
    return None


def _measure_again(state: State) -> Probe | None:
    """The probe of a record whose peak is far below its estimate, in a new child process, if there is time."""
    doubts = doubted(state.records, state.problem.target)
    for record in doubts:
        probe = Probe(
            spec=record.spec,
            candidate=record.candidate,
            role="calibrate",
            passes=record.passes,
            peak_bytes=int(estimate_step(record.spec, record.candidate, state.problem.target).total_bytes),
            seconds_per_pass=record.seconds_per_pass or 0.0,
            fresh=True,
        )
        alone = sum(map(probe.is_of, state.known)) == 1
        if alone and state.child_seconds + record.seconds <= state.left:
            return probe
    return None


def _fastest(state: State) -> Probe | None:
    """Time what may be fastest, then confirm what is."""
    table = screen(state.problem, state.records)
    if not table.eligible.any():
        return _try_smallest(state, table)
    if state.explore and (row := _promising(state, table)) is not None:
        probe = make_probe(state, table, row, "explore", int(short_steps(table)[row]))
        if not any(map(probe.is_of, state.pending)):
            return probe
    best = least(table.costs, table.eligible)
    return _confirm(state, table, best) or _compare(state, table, best)


def _promising(state: State, table: CandidateTable) -> int | None:
    """The candidate whose short version has the largest expected gain per second; None if none is worth a probe."""
    (times, noise), whole = table.calibration.times, table.spec.steps
    mean, places = np.log(table.costs), table.calibration.time_places(table.estimate)
    best, short = least(mean, table.eligible), short_steps(table)
    confirm = _confirm(state, table, best)
    confirming = 0.0 if confirm is None else min(state.confirm_seconds, confirm.seconds_per_pass)
    left = state.left - 2 * confirming - state.child_seconds
    last = {kind_of(state.records[-1])} if state.records else set[Kind]()
    start = state.child_seconds * ~table.of_kinds(last)
    if state.draw is not None:
        row = state.draw(table)
        return row if start[row] + MEASURE_SECONDS <= left else None
    open_yet = table.eligible
    for probe in state.pending:  # what others are running is not run twice, nor longer at the same time
        same = rows_of(probe, table) | table.like(probe.candidate, *SETTING, *SHAPE)  # as many pieces, or as long ones
        open_yet = open_yet & ~same
    shorter = table.calibration.time_places(table.estimate, short)
    moves = times.between(shorter, places) / np.hypot(times.at(shorter)[1], noise)
    seconds = start + np.maximum(MEASURE_SECONDS, 2 * table.pass_seconds / whole * short)
    improvement = _improvement(mean[best] - mean, np.abs(moves))
    worth = open_yet & (improvement >= WORTH) & (seconds <= left)
    return least(-improvement / seconds, worth) if worth.any() else None


def short_steps(table: CandidateTable) -> Ints:
    """The steps of a short version of each candidate."""
    whole = table.spec.steps
    steps = PROBE_SECONDS / table.pass_seconds * whole
    return np.clip(steps, 1, whole).astype(np.int64)


def _improvement(ahead: Floats, deviation: Floats) -> Floats:
    """The expected value of a normal variable where it is positive."""
    deviation = np.maximum(deviation, 1e-9)
    density = np.exp(-np.square(ahead / deviation) / 2) / math.sqrt(2 * math.pi)
    return ahead * _below(ahead / deviation) + deviation * density


def _below(values: Floats) -> Floats:
    """The probability that a standard normal variable is below."""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in values.tolist()])


def _confirm(state: State, table: CandidateTable, row: int) -> Probe | None:
    """A probe of a candidate at full length, or as long as there is time for; None if something as fast ran so."""
    confirmed, seconds = _confirmed(state, table), table.costs
    if confirmed.any() and seconds[row] >= (1 - WORTH) * seconds[confirmed].min():
        return None
    return make_probe(state, table, row, "confirm", _confirm_steps(state, table, row))


def _confirm_steps(state: State, table: CandidateTable, row: int) -> int:
    """The steps of a confirming probe: all of them, or as many as there is time for."""
    steps = state.confirm_seconds / table.pass_seconds[row] * table.spec.steps
    return int(min(table.spec.steps, max(1, steps)))


def _confirmed(state: State, table: CandidateTable) -> Mask:
    """Candidates that have run within the budget at full length, or nearly as long as there is time for."""
    long = np.minimum(1.0, 0.5 * state.confirm_seconds / table.pass_seconds) * table.spec.steps
    return table.eligible & (table.longest > 0) & (table.longest >= long)


def _compare(state: State, table: CandidateTable, best: int) -> Probe | None:
    """A probe that runs two finalists by turns, the best candidate and the next one; None if that would gain nothing.

    Both run in one child, so that a change of the machine's load slows both down. The first pair is run whatever the
    times are, if its turns take seconds: the fastest of many single times is fast by luck too.
    """
    seconds, noise = table.costs, table.calibration.times[1]
    pairs = [{record.candidate, record.rival} for record in state.own_records if record.rival is not None]
    rivals = table.eligible & table.of_kinds({table.kind_at(best)}) & (np.arange(len(table)) != best)
    if not state.explore or not rivals.any() or 2 * table.pass_seconds[best] > MEASURE_SECONDS:
        return None
    rival = least(seconds, rivals)
    chosen, other = table.candidates[best], table.candidates[rival]
    ahead = np.log(seconds[[best]] / seconds[[rival]])
    gain = _improvement(ahead, np.array([noise * math.sqrt(2)]))[0]
    if {chosen, other} in pairs or (pairs and gain < WORTH):
        return None
    if table.longest[rival] < table.spec.steps:  # it runs alone first, so that its own record says that it fits
        return make_probe(state, table, rival, "confirm", table.spec.steps)
    return msgspec.structs.replace(make_probe(state, table, best, "confirm", table.spec.steps), rival=other)


def make_probe(state: State, table: CandidateTable, row: int, role: Role, steps: int) -> Probe:
    """A probe of a candidate with sequences of so many steps, or half of them, and so on, until it surely fits.

    If it is to be confirmed, it runs until its peak has settled, if that makes its margin smaller and there is time.
    """
    problem, chosen, kind = state.problem, table.candidates[row], table.kind_at(row)
    whole = problem.spec_of(chosen.microbatch, table.spec)
    measured = any(kind_of(record) == kind for record in state.own_records)
    # two leading digits: a slightly different predicted time gives the same probe
    steps = whole.steps if steps >= whole.steps else steps - steps % 10 ** max(0, len(str(steps)) - 2)
    while True:
        # what chunks reserve on a card depends on their number, their time on their length
        spec, candidate = shorten(whole, chosen, steps, fewer=chosen.recompute or role != "calibrate")
        estimate = estimate_step(spec, candidate, problem.target)
        expected = table.calibration.of(spec).predict(estimate)[0]
        spare_bytes = max(0, problem.budget_bytes - int(estimate.terms["runtime"]))
        modest = measured or float(split(estimate)[1][0]) <= spare_bytes / SAFE_SHARE
        fits = expected.safe_bytes <= problem.budget_bytes or (spec == whole and table.eligible[row])
        if (fits and modest) or steps <= 1:
            break
        steps //= 2
    pass_seconds = float(table.pass_seconds[row]) * spec.steps / whole.steps
    passes = 2 if problem.timed and pass_seconds <= CHILD_SECONDS else 1
    narrower = table.calibration.of(spec).settling_bytes(estimate) > WORTH / 2 * problem.budget_bytes
    if role == "confirm" and narrower:  # the peak needs some passes to show
        passes = int(np.clip(state.confirm_seconds / pass_seconds, passes, SETTLED))
    return Probe(
        spec=spec,
        candidate=candidate,
        role=role,
        passes=passes,
        peak_bytes=expected.peak_bytes,
        seconds_per_pass=pass_seconds,
    )


def _try_smallest(state: State, table: CandidateTable) -> Probe | None:
    """Measure the smallest candidate if nothing fits by prediction, unless that has been done."""
    row = table.smallest
    kind, segmented = table.kind_at(row), table.candidates[row].segments > 1
    seen = {(kind_of(record), record.candidate.segments > 1) for record in state.own_records}
    if not table.runs[row] or (kind, segmented) in seen:
        return None
    return make_probe(state, table, row, "calibrate", int(short_steps(table)[row]))


def choose(table: CandidateTable) -> int | None:
    """The row to take: the fastest of those that ran with (nearly) the longest sequences; of all, if none ran.

    Of those that are about equally fast, it is one that ran at full length.
    """
    if not table.eligible.any():
        return None
    long = table.eligible & (2 * table.longest >= table.longest[table.eligible].max())
    whole, row = long & (table.longest >= table.spec.steps), least(table.costs, long)
    if whole.any() and table.costs[row] >= (1 - WORTH) * table.costs[whole].min():
        return least(table.costs, whole)
    return row


def _largest(state: State, aim: str) -> Probe | None:
    """Go to the predicted border until that moves by no more than 1 %."""
    pass_seconds = state.confirm_seconds if aim == "seq" else math.inf
    table, row = largest(state.problem, state.records, aim, pass_seconds)
    if row is None:
        return _try_smallest(state, table)
    if aim == "seq":
        return _go_further(state, table, row)
    sizes, confirmed = sizes_of(table, aim), _confirmed(state, table)
    if confirmed.any() and sizes[row] <= (1 + WORTH / 2) * sizes[confirmed].max():
        return None
    probe = make_probe(state, table, row, "confirm", _confirm_steps(state, table, row))
    return None if any(map(probe.is_of, state.known)) else probe


def _go_further(state: State, table: CandidateTable, row: int) -> Probe | None:
    """Run the longest sequences for which there is time, after a short probe that tells how much time they take."""
    timed = any(record.verdict.ran for record in state.own_records)
    if timed and table.spec.steps <= (1 + WORTH / 2) * longest_run(state.problem, state.records):
        return None
    role: Role = "confirm" if timed else "calibrate"
    probe = make_probe(state, table, row, role, table.spec.steps if timed else int(short_steps(table)[row]))
    return None if any(map(probe.is_of, state.known)) else probe
