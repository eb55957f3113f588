"""Making a plan of the result of a search."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from oomguard._core.units import MIB
from oomguard._estimate.breakdown import estimate_step
from oomguard._plan.buckets import cut, make_buckets, padded_share, padded_tokens
from oomguard._plan.value import Calibrated, Environment, LossyGain, Padding, Plain, Plan, Point, Reach, Rung, figures
from oomguard._predict.calibration import Calibration
from oomguard._probe.record import Record
from oomguard._search.largest import largest, longest_run, sizes_of, with_length
from oomguard._search.propose import choose
from oomguard._search.run import SearchResult, count_ooms
from oomguard._search.screen import SETTING, CandidateTable, least, record_of, screen, turns_of
from oomguard._search.space import Problem
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.spec import MAX_SEQ, Spec

ENOUGH = 0.98  # a speed or size of at least this share of the largest counts as equal to it
FRONT_POINTS = 8  # sequence lengths of a front, at most
SMALLER, LEAST_BYTES = 0.75, 4 * MIB
"""Growth of a fallback over the runtime, as a share of that of the fallback before it; and the least difference."""
BUCKETS_KEEP = (*SETTING, "threads")
"""Knobs that a running process cannot change: all buckets have those of the chosen candidate."""
RUNGS_KEEP = (*BUCKETS_KEEP, "window")
"""Knobs that all fallbacks share with the chosen candidate: these, and what decides on the gradient."""


def make_plan(
    result: SearchResult,
    environment: Environment,
    exports: Callable[[Candidate, str], dict[str, str]] | None,
    asked_budget_bytes: int | None = None,
) -> Plan | None:
    """The best plan that the records allow; None if nothing fits.

    `exports` gives the environment variables that a candidate with its engine needs (`Device.environment`); None if the
    device is not here.
    """
    problem, records = result.problem, result.evidence
    table, row = best(problem, records)
    if row is None:
        return None
    spec, candidate, timed = table.spec, table.candidates[row], any(record.steps for record in records)
    record = record_of(records, table, row)
    turns = [] if record is None else turns_of(record, records)
    before = Calibration(spec, [other for other in records if other not in turns], problem.target, problem.cached)
    estimated = estimate_step(spec, candidate, problem.target)
    estimate, expected = figures(estimated), before.predict(estimated)[0]
    runtime_bytes = estimate.terms["runtime"]  # assumed: a tiny model on a smaller runtime peaks below it
    ratio = max(0, expected.peak_bytes - runtime_bytes) / max(1, estimate.total_bytes - runtime_bytes)
    choices, reach = problem.space.choices, _reach(problem, records, spec)
    short = record is None or record.spec.steps < spec.steps
    late = timed and (short or (reach is not None and reach.steps > spec.steps / ENOUGH))
    ended = "timeout" if late and result.ended == "done" else result.ended  # no time was left for what was to be run
    words: dict[str, Any] = {"maximize": problem.maximize, "allow": choices.allow, "ended": ended}
    plan = Plan(
        **words,
        spec=spec,
        candidate=candidate,
        where=problem.target,
        budget_bytes=problem.budget_bytes,
        asked_budget_bytes=asked_budget_bytes,
        fixed=choices.fixed,
        estimate=estimate,
        expected=expected.for_plan(timed=timed),
        record=record,
        calibration=Calibrated(
            records=sum(record.steps > 0 for record in records),
            cached=len(problem.cached),
            stale=result.stale,
            ratio=round(ratio, 4),
        ),
        time_spread=round(float(table.prediction.doubt[row]), 4) if timed else None,
        fallbacks=make_fallbacks(problem, table, row, timed=timed),
        plain=_plain(problem, spec, records, environment.cores, timed=timed),
        bought=tuple(_lossy_gain(table, row, knob, timed=timed) for knob in candidate.lossy),
        enough_rows=_enough_rows(table, row) if timed else None,
        **_by_length(problem, records, candidate, timed=timed),
        reach=reach,
        probes=len(result.records),
        ooms=count_ooms(result.records),
        records=result.records,
        seconds=round(result.seconds, 3),
        environment=environment,
        exports={} if exports is None else exports(candidate, estimate.engine),
    )
    if len(problem.maximize) > 1:
        plan = msgspec.structs.replace(plan, front=_front(problem, records, plan, timed=timed))
    return plan


def best(problem: Problem, records: Sequence[Record]) -> tuple[CandidateTable, int | None]:
    """The table, and the row to take for the first aim."""
    aim = problem.maximize[0]
    if aim == "throughput":
        table = screen(problem, records)
        return table, choose(table)
    if aim == "seq" and (steps := longest_run(problem, records)):  # what ran, not what may run
        table = screen(problem, records, with_length(problem.spec, steps))
        return table, least(table.costs, table.eligible & (table.longest >= steps))
    table, row = largest(problem, records, aim)
    if row is None or aim == "seq":
        return table, row
    sizes = sizes_of(table, aim)
    # among rows within 2 % of the largest: those that ran, then the largest, then the fastest
    near = table.eligible & (sizes >= ENOUGH * sizes[row]) & (table.exact | (not table.exact[row]))
    ran = near & (table.longest == table.longest[near].max())
    return table, int(np.lexsort((table.costs, -sizes, ~ran))[0])


def _reach(problem: Problem, records: Sequence[Record], spec: Spec) -> Reach | None:
    """How far sequences can grow, if they are to be as long as possible."""
    if problem.maximize[0] != "seq":
        return None
    steps = max(spec.steps, largest(problem, records, "seq")[0].spec.steps)
    longer = with_length(problem.spec, min(MAX_SEQ, steps + 1 + steps // 100))
    room = bool(screen(problem, records, longer).eligible.any())
    return Reach(steps=steps, bound="step-time" if room else "memory", step_seconds=problem.step_seconds)


def make_fallbacks(problem: Problem, table: CandidateTable, row: int, *, timed: bool) -> tuple[Rung, ...]:
    """The fallbacks of a candidate: each the fastest that grows by a quarter less, the last the smallest there is.

    Only microbatch and segments change: they can, in a running process. A fallback that is expected over the budget is
    left out (the chosen candidate may have run below its prediction).
    """
    alike = table.like(table.candidates[row], *RUNGS_KEEP) & table.runs
    peaks, seconds = table.prediction.peak_bytes, table.prediction.seconds_per_step
    runtime_bytes = min(int(np.min(table.estimate.terms["runtime"])), int(peaks[alike].min()))
    rows: list[int] = []
    smallest, peak = int(np.lexsort((seconds, peaks, ~alike))[0]), int(peaks[row])
    while True:
        smaller = alike & (peaks <= peak - max(LEAST_BYTES, (1 - SMALLER) * (peak - runtime_bytes)))
        if not smaller.any():
            break
        rows.append(int(np.argmin(np.where(smaller, seconds, np.inf))))
        peak = int(peaks[rows[-1]])
    if peaks[smallest] < peak and smallest != row:
        rows.append(smallest)
    return tuple(
        Rung(
            candidate=table.candidates[lower],
            estimate=figures(estimate_step(table.spec, table.candidates[lower], problem.target)),
            expected=table.prediction[lower].for_plan(timed=timed),
        )
        for lower in rows
        if peaks[lower] <= problem.budget_bytes
    )


def _plain(problem: Problem, spec: Spec, records: Sequence[Record], cores: int, *, timed: bool) -> Plain:
    """PyTorch without oomguard: the whole batch in one pass."""
    candidate = plain_candidate(spec, cuda=problem.target.cuda, cores=cores)
    calibration = Calibration(spec, records, problem.target, problem.cached)
    estimate = estimate_step(spec, candidate, problem.target)
    expected = calibration.predict(estimate)[0]
    fits = bool(estimate.runs) and expected.safe_bytes <= problem.budget_bytes
    return Plain(estimate=figures(estimate), expected=expected.for_plan(timed=timed), fits=fits)


def plain_candidate(spec: Spec, *, cuda: bool, cores: int) -> Candidate:
    """The candidate of PyTorch without oomguard: all cores, the default allocator."""
    return make_candidate(spec, allocator="system", threads=None if cuda else cores)


def _lossy_gain(table: CandidateTable, row: int, knob: str, *, timed: bool) -> LossyGain:
    """The gain by a lossy knob over the best candidate without it."""
    chosen, seconds, peaks = table.candidates[row], table.expected.seconds_per_step, table.expected.peak_bytes
    kept = [name for name in chosen.lossy if name != knob]
    others = table.fits & table.like(Candidate(microbatch=1), knob) & table.like(chosen, *kept)
    other = int(np.argmin(np.where(others, seconds, np.inf))) if others.any() else None
    return LossyGain(
        knob=knob,
        value=str(getattr(chosen, knob)),
        exact=None if other is None else table.candidates[other],
        speedup=None if other is None or not timed else float(seconds[other] / seconds[row]),
        saved_bytes=None if other is None else int(peaks[other] - peaks[row]),
    )


def _enough_rows(table: CandidateTable, row: int) -> int:
    """The smallest microbatch in the chosen setting, with any segments, that is as fast as any that fits."""
    alike = table.eligible & table.like(table.candidates[row], *BUCKETS_KEEP)
    seconds = table.prediction.seconds_per_step
    enough = alike & (ENOUGH * seconds <= seconds[alike].min())
    return int(table.microbatches[enough].min())


def _by_length(problem: Problem, records: Sequence[Record], chosen: Candidate, *, timed: bool) -> dict[str, Any]:
    """Buckets and padding, if the spec has a histogram of lengths."""
    lengths = problem.spec.lengths
    if lengths is None or len(lengths) < 2 or "seq" in problem.maximize:
        return {}
    buckets = make_buckets(problem, records, chosen, timed=timed)
    # if the records leave nothing in this setting for some lengths, all sequences are run like the longest
    if any(
        differing(bucket.candidate, chosen, BUCKETS_KEEP) or bucket.expected.safe_bytes > problem.budget_bytes
        for bucket in buckets
    ):
        return {}
    sizes = [bucket.candidate.microbatch for bucket in buckets]
    before = padded_share(lengths, padded_tokens(lengths, chosen.microbatch))
    after = padded_share(lengths, sum(map(padded_tokens, cut(lengths), sizes)))
    return {"buckets": tuple(buckets), "padding": Padding(before=before, after=after)}


def differing(candidate: Candidate, other: Candidate, knobs: tuple[str, ...]) -> list[str]:
    """The knobs in which two candidates differ."""
    return [name for name in knobs if getattr(candidate, name) != getattr(other, name)]


def _front(problem: Problem, records: Sequence[Record], plan: Plan, *, timed: bool) -> tuple[Point, ...]:
    """Points from the asked length to the largest that fits, of which none beats another in all aims.

    Times are scaled so that the chosen candidate has the same time in the front as in the plan: the search damps a
    measured time by its noise, and the plan states the measured time itself.
    """
    rows = [(table, row) for table in _tables(problem, records) for row in _front_rows(table, problem.maximize)]
    seconds = np.array([table.expected.seconds_per_step[row] for table, row in rows])
    aims = {
        "throughput": [-table.spec.batch / each for (table, _), each in zip(rows, seconds.tolist(), strict=True)],
        "seq": [-table.spec.steps for table, _ in rows],
        "microbatch": [-int(table.microbatches[row]) for table, row in rows],
    }
    keep = pareto_front(*(aims[aim] for aim in problem.maximize))
    rows, seconds = [*itertools.compress(rows, keep)], seconds[keep]
    points = [(table.spec.steps, table.candidates[row]) for table, row in rows]
    chosen = (plan.spec.steps, plan.candidate)
    if chosen in points and plan.seconds_per_step is not None:
        seconds = seconds * (plan.seconds_per_step / seconds[points.index(chosen)])
    return tuple(
        Point(
            seq=table.spec.steps,
            candidate=table.candidates[row],
            expected=msgspec.structs.replace(table.expected[row], seconds_per_step=each).for_plan(timed=timed),
            throughput=table.spec.batch / each,
            tokens_per_second=table.spec.batch / each * table.spec.steps,
        )
        for (table, row), each in zip(rows, seconds.tolist(), strict=True)
    )


def _tables(problem: Problem, records: Sequence[Record]) -> list[CandidateTable]:
    """The table at the asked length and, if length is an aim, at some lengths up to the longest that fits."""
    if "seq" not in problem.maximize:
        return [screen(problem, records)]
    longest = largest(problem, records, "seq")[0].spec.steps
    steps = np.unique(np.round(np.geomspace(problem.spec.steps, longest, FRONT_POINTS)).astype(int)).tolist()
    specs = [msgspec.structs.replace(problem.spec, seq=length, lengths=None) for length in steps]
    return [table for table in (screen(problem, records, spec) for spec in specs) if table.eligible.any()]


def _front_rows(table: CandidateTable, maximize: tuple[str, ...]) -> list[int]:
    """The row that a plan takes, and the fastest of every other microbatch if that is an aim."""
    chosen = choose(table)
    if chosen is None or "microbatch" not in maximize:
        return [] if chosen is None else [chosen]
    seconds = np.where(table.eligible, table.expected.seconds_per_step, np.inf)
    sizes = table.microbatches
    seconds[chosen] = 0.0
    return [int(np.argmin(np.where(sizes == size, seconds, np.inf))) for size in np.unique(sizes[table.eligible])]


def pareto_front(*columns: ArrayLike) -> NDArray[np.bool_]:
    """Where the points of the Pareto front are; every column is to be as small as possible.

    A point is on the front unless another one is at most as large in all columns and smaller in one. Two columns take
    the time of sorting them, more columns that time times the length of the front.
    """
    points = np.column_stack([np.asarray(column, dtype=float) for column in columns])
    points, inverse = np.unique(points, axis=0, return_inverse=True)  # sorted: no point is beaten by a later one
    front, left = np.zeros(len(points), dtype=bool), np.arange(len(points))
    if len(columns) == 2:
        lowest = np.minimum.accumulate(points[:, 1])
        front, left = np.r_[True, lowest[1:] < lowest[:-1]][: len(points)], left[:0]
    while left.size:
        front[left[0]] = True
        left = left[np.less(points[left], points[left[0]]).any(axis=1)]
    return front[inverse.ravel()]
