"""Making a plan of what a search found."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np

from oomguard.calibrate import Calibration
from oomguard.candidate import Candidate
from oomguard.device.budget import Budget
from oomguard.estimate.breakdown import Estimate, estimate_step
from oomguard.plan.agree import BUCKETS_KEEP, differing
from oomguard.plan.ladder import make_ladder
from oomguard.plan.value import (
    Aim,
    Allowed,
    Bought,
    Bucket,
    Calibrated,
    Ended,
    Environment,
    Expected,
    Padding,
    Plain,
    Plan,
    Point,
    Rung,
    Where,
    figures,
    plain_candidate,
)
from oomguard.probe.record import Record, torch_version
from oomguard.search.buckets import Part, bucket, padded_tokens
from oomguard.search.problem import Problem
from oomguard.search.propose import choose, largest
from oomguard.search.run import Found, count_ooms
from oomguard.search.screen import SETTING, Screened, record_of, rows_like, screen
from oomguard.spec import Spec

ENOUGH = 0.98
"""Of the largest speed: what is as good as all of it."""
FRONT_POINTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a plan says of where it was made."""

    version: str
    """Of oomguard."""
    title: str
    """The device's name."""
    driver: str | None
    """The card's driver."""
    cores: int
    """Processors that this process may use."""
    budget: Budget
    """All limits."""
    asked_budget_bytes: int | None
    """What the user said."""
    allow: tuple[str, ...]
    """The lossy knobs that were allowed."""
    fixed: dict[str, Any]
    """Knobs that were not searched."""


def make_plan(found: Found, facts: Facts, exports: "Exports") -> Plan | None:
    """The best plan that the records allow; None if nothing fits."""
    problem, records = found.problem, found.records
    view, row = best(problem, records)
    if row is None:
        return None
    spec, candidate = view.spec, view.candidates[row]
    record = record_of(records, view, row)
    before = Calibration(spec, [one for one in records if one is not record], problem.place, problem.cached)
    estimate = estimate_step(spec, candidate, problem.place)
    own = [one for one in records if one.steps]
    plan = Plan(
        spec=spec,
        candidate=candidate,
        where=Where.of(problem.place),
        budget_bytes=problem.budget_bytes,
        asked_budget_bytes=facts.asked_budget_bytes,
        maximize=cast("tuple[Aim, ...]", problem.maximize),
        allow=cast("tuple[Allowed, ...]", facts.allow),
        fixed=facts.fixed,
        estimate=figures(estimate),
        expected=_expected(before, estimate, timed=bool(own)),
        record=record,
        calibration=Calibrated(
            records=len(own), cached=len(problem.cached), stale=found.stale, ratio=_ratio(estimate, before)
        ),
        fallbacks=_fallbacks(problem, view, row, timed=bool(own)),
        plain=_plain(problem, spec, records, facts.cores, timed=bool(own)),
        bought=_bought(view, row, timed=bool(own)),
        enough_rows=_enough_rows(view, row) if own else None,
        **_by_length(problem, records, candidate, timed=bool(own)),
        front=_front(problem, records, timed=bool(own)) if len(problem.maximize) > 1 else (),
        probes=len(records),
        ooms=count_ooms(records),
        records=tuple(records),
        ended=cast("Ended", found.ended),
        seconds=round(found.seconds, 3),
        environment=_environment(facts, problem, records),
        exports=exports(candidate),
    )
    return msgspec.structs.replace(plan, front=_as_told(plan))


Exports = Any
"""From a candidate to the environment variables that its process needs (`Device.environment`)."""


def best(problem: Problem, records: Sequence[Record]) -> tuple[Screened, int | None]:
    """The space, and the row to take: for the first aim."""
    aim = problem.maximize[0]
    if aim == "throughput":
        view = screen(problem, records)
        return view, choose(view)
    view, row = largest(problem, records, aim)
    if row is None:
        return view, None
    sizes = np.broadcast_to(view.candidates.microbatch if aim == "microbatch" else view.spec.steps, len(view.fits))
    # of what is as large to within 2 %, something that ran; of that the largest, then the fastest
    near = view.eligible & (sizes >= ENOUGH * sizes[row])
    ran = near & (view.longest == view.longest[near].max())
    return view, int(np.lexsort((view.expected, -sizes, ~ran))[0])


def _expected(calibration: Calibration, estimate: Estimate, *, timed: bool) -> Expected:
    found = calibration.predict(estimate)
    return Expected(
        peak_bytes=int(found.peak_bytes),
        margin_bytes=int(found.margin_bytes),
        seconds_per_step=float(found.seconds_per_step) if timed else None,
    )


def _ratio(estimate: Estimate, calibration: Calibration) -> float:
    peak_bytes = calibration.predict_memory(estimate)[0]
    runtime_bytes = int(estimate.terms["runtime"])
    return round(float(peak_bytes - runtime_bytes) / max(1, int(estimate.total_bytes) - runtime_bytes), 4)


def _fallbacks(problem: Problem, view: Screened, row: int, *, timed: bool) -> tuple[Rung, ...]:
    """The ladder; what ran may need less than is expected of it, and what is expected over the budget helps nobody."""
    ladder = make_ladder(view, row, problem.place, timed=timed)
    return tuple(rung for rung in ladder if rung.expected.peak_bytes <= problem.budget_bytes)


def _plain(problem: Problem, spec: Spec, records: Sequence[Record], cores: int, *, timed: bool) -> Plain:
    """The whole batch in one pass, with what PyTorch does by itself."""
    candidate = plain_candidate(spec, cuda=problem.place.cuda, cores=cores)
    calibration = Calibration(spec, records, problem.place, problem.cached)
    seconds = _expected(calibration, estimate_step(spec, candidate, problem.place), timed=timed).seconds_per_step
    if not problem.place.cuda:  # the C heap as it comes errs by far more: its peak is told as that of a steady one
        candidate = msgspec.structs.replace(candidate, allocator="steady")
    estimate = estimate_step(spec, candidate, problem.place)
    expected = msgspec.structs.replace(_expected(calibration, estimate, timed=False), seconds_per_step=seconds)
    fits = bool(estimate.runs) and expected.peak_bytes + expected.margin_bytes <= problem.budget_bytes
    return Plain(estimate=figures(estimate), expected=expected, fits=fits)


def _bought(view: Screened, row: int, *, timed: bool) -> tuple[Bought, ...]:
    """For each lossy knob that is turned: the best candidate without it."""
    chosen, found = view.candidates[row], []
    for knob in chosen.lossy:
        usual = Candidate(microbatch=1)
        others = view.fits & rows_like(view.candidates, usual, [knob])
        kept = [name for name in chosen.lossy if name != knob]
        others &= rows_like(view.candidates, chosen, kept)
        other = int(np.argmin(np.where(others, view.expected, np.inf))) if others.any() else None
        speedup = None if other is None or not timed else float(view.expected[other] / view.expected[row])
        found.append(
            Bought(
                knob=knob,
                value=str(getattr(chosen, knob)),
                exact=None if other is None else view.candidates[other],
                speedup=speedup,
                saved_bytes=None if other is None else int(view.peak_bytes[other] - view.peak_bytes[row]),
            )
        )
    return tuple(found)


def _enough_rows(view: Screened, row: int) -> int:
    """The smallest microbatch in the chosen setting, in any pieces, that is as fast as any that fits."""
    alike = view.eligible & rows_like(view.candidates, view.candidates[row], [*SETTING, "threads"])
    sizes = np.broadcast_to(view.candidates.microbatch, len(alike))
    seconds = view.prediction.seconds_per_step
    enough = alike & (ENOUGH * seconds <= seconds[alike].min())
    return int(sizes[enough].min())


def _by_length(problem: Problem, records: Sequence[Record], chosen: Candidate, *, timed: bool) -> dict[str, Any]:
    """Buckets and padding, if the spec has a histogram of lengths."""
    lengths = problem.spec.lengths
    if lengths is None or len(lengths) < 2 or "seq" in problem.maximize:
        return {}
    found = bucket(problem, records, chosen)
    # if the records leave nothing in this setting for some lengths, all are run as the longest
    if any(
        differing(one.candidate, chosen, BUCKETS_KEEP) or one.peak_bytes + one.margin_bytes > problem.budget_bytes
        for one in found
    ):
        return {}
    buckets = tuple(
        Bucket(
            longest=one.part.longest,
            sequences=sum(one.part.lengths.values()),
            candidate=one.candidate,
            expected=Expected(
                peak_bytes=one.peak_bytes,
                margin_bytes=one.margin_bytes,
                seconds_per_step=one.seconds_per_sequence * problem.spec.batch if timed else None,
            ),
        )
        for one in found
    )
    real = sum(length * count for length, count in lengths.items())
    whole = Part(longest=max(lengths), lengths=lengths)
    after = sum(padded_tokens(one.part, one.candidate.microbatch) for one in found)
    before = padded_tokens(whole, chosen.microbatch)
    # sums of powers round: where there is no padding, it may come out a little below
    padding = Padding(before=max(0.0, 1 - real / before), after=max(0.0, 1 - real / after))
    return {"buckets": buckets, "padding": padding}


def _front(problem: Problem, records: Sequence[Record], *, timed: bool) -> tuple[Point, ...]:
    """Points from the asked length to the largest that fits, of which none beats another in all aims."""
    points: list[tuple[tuple[float, ...], Point]] = []
    for view in _views(problem, records):
        for row in _rows(view, problem.maximize):
            seconds = float(view.expected[row])
            throughput = view.spec.batch / seconds
            point = Point(
                seq=view.spec.steps,
                candidate=view.candidates[row],
                expected=Expected(
                    peak_bytes=int(view.peak_bytes[row]),
                    margin_bytes=int(view.safe_bytes[row] - view.peak_bytes[row]),
                    seconds_per_step=seconds if timed else None,
                ),
                throughput=throughput,
                tokens_per_second=throughput * view.spec.steps,
            )
            worth = {"throughput": throughput, "seq": point.seq, "microbatch": point.candidate.microbatch}
            points.append((tuple(float(worth[aim]) for aim in problem.maximize), point))
    return tuple(
        point
        for worth, point in points
        if not any(other != worth and all(a >= b for a, b in zip(other, worth, strict=True)) for other, _ in points)
    )


def _as_told(plan: Plan) -> tuple[Point, ...]:
    """The front, in the time that the plan tells of its own candidate.

    The search takes a moment's luck out of times, and a plan tells what steps took: one candidate would have two times.
    """
    own = [one for one in plan.front if (one.seq, one.candidate) == (plan.spec.steps, plan.candidate)]
    if plan.seconds_per_step is None or not own or own[0].expected.seconds_per_step is None:
        return plan.front
    longer = plan.seconds_per_step / own[0].expected.seconds_per_step
    return tuple(_slowed(one, longer) for one in plan.front)


def _slowed(point: Point, times: float) -> Point:
    seconds = point.expected.seconds_per_step
    return msgspec.structs.replace(
        point,
        expected=msgspec.structs.replace(point.expected, seconds_per_step=None if seconds is None else seconds * times),
        throughput=point.throughput / times,
        tokens_per_second=point.tokens_per_second / times,
    )


def _views(problem: Problem, records: Sequence[Record]) -> list[Screened]:
    """The space at the asked length and, if length is an aim, at some up to the longest that fits."""
    if "seq" not in problem.maximize:
        return [screen(problem, records)]
    longest = largest(problem, records, "seq")[0].spec.steps
    steps = np.unique(np.round(np.geomspace(problem.spec.steps, longest, FRONT_POINTS)).astype(int)).tolist()
    specs = [msgspec.structs.replace(problem.spec, seq=one, lengths=None) for one in steps]
    return [view for view in (screen(problem, records, spec) for spec in specs) if view.eligible.any()]


def _rows(view: Screened, maximize: tuple[str, ...]) -> list[int]:
    """What a plan takes, and the fastest of every other microbatch if that is an aim."""
    chosen = choose(view)
    if chosen is None or "microbatch" not in maximize:
        return [] if chosen is None else [chosen]
    seconds = np.where(view.eligible, view.expected, np.inf)
    sizes = np.broadcast_to(view.candidates.microbatch, len(seconds))
    seconds[chosen] = 0.0
    return [int(np.argmin(np.where(sizes == size, seconds, np.inf))) for size in np.unique(sizes[view.eligible])]


def _environment(facts: Facts, problem: Problem, records: Sequence[Record]) -> Environment:
    libraries = [one.library for one in records if one.library is not None]
    return Environment(
        oomguard=facts.version,
        torch=torch_version(),
        library=libraries[-1] if libraries else None,
        driver=facts.driver,
        python=platform.python_version(),
        system=" ".join((platform.system(), platform.machine(), *platform.libc_ver())).strip(),
        device=problem.place.device,
        title=facts.title,
        cores=facts.cores,
        limits=facts.budget.limits,
    )
