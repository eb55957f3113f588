"""Whether a plan agrees with itself: its file may have been changed by hand, and what is found late costs a run.

The types of value.py refuse what no plan can have; here is what cannot be true beside the rest of a plan.
"""

import re
from collections.abc import Iterator
from importlib import import_module

import msgspec

from oomguard.calibrate import same_model
from oomguard.candidate import KNOBS, Candidate, check_candidate
from oomguard.device.cuda import SETTINGS
from oomguard.errors import MisuseError
from oomguard.estimate.breakdown import estimate_step
from oomguard.plan.value import Figures, Plan, Rung, figures, plain_candidate
from oomguard.probe.verdict import Verdict
from oomguard.search.screen import SETTING
from oomguard.search.shorten import with_steps
from oomguard.units import format_bytes

BUCKETS_KEEP = (*SETTING, "threads")
"""Knobs that a running process cannot change: of all buckets they are the chosen candidate's."""
RUNGS_KEEP = (*BUCKETS_KEEP, "window")
"""The same of all fallbacks, which have its gradient too."""
_ALLOWED = {"precision": "precision", "window": "window", "state_8bit": "8bit"}
_VARIABLE = re.compile("|".join([*SETTINGS, "MALLOC_[A-Z0-9_]{1,64}"]))
_VALUE = re.compile("[ -~]{0,4096}")
"""What a process can be started with: a variable's value ends at a NUL, and the system refuses long ones."""


def contradictions(plan: Plan) -> Iterator[str]:
    """What in a plan cannot be true beside the rest of it, each with its field."""
    for check in (_asked, _rungs, _sizes, _buckets, _evidence, _exports):
        yield from check(plan)


def differing(one: Candidate, other: Candidate, knobs: tuple[str, ...]) -> list[str]:
    """The knobs that two candidates do not have in common.

    >>> differing(Candidate(microbatch=8), Candidate(microbatch=8, threads=2), BUCKETS_KEEP)
    ['threads']
    """
    return [name for name in knobs if getattr(one, name) != getattr(other, name)]


def _asked(plan: Plan) -> Iterator[str]:
    """Where, and what was fixed and allowed."""
    if plan.where.device != plan.environment.device:
        yield "where.device is not environment.device"
    if plan.where.cuda == (plan.where.device == "cpu"):
        yield f"where.cuda is {str(plan.where.cuda).lower()}, and where.device is {plan.where.device}"
    for name, value in plan.fixed.items():
        if name not in KNOBS or getattr(plan.candidate, name) != value:
            yield f"fixed.{name} is not what the candidate has"
    yield from _lossy(plan, "candidate", plan.candidate)


def _lossy(plan: Plan, field: str, candidate: Candidate) -> Iterator[str]:
    for knob in candidate.lossy:
        if _ALLOWED[knob] not in plan.allow:
            yield f"{field}.{knob} is lossy, and allow does not have it"


def _rungs(plan: Plan) -> Iterator[str]:
    """The chosen candidate and its fallbacks: each can be run, and has the estimate that its knobs give."""
    chosen = Rung(candidate=plan.candidate, estimate=plan.estimate, expected=plan.expected)
    for place, rung in enumerate((chosen, *plan.fallbacks)):
        field = f"fallbacks[{place - 1}]." if place else ""
        try:
            check_candidate(plan.spec, rung.candidate)
            found = _estimate(plan, rung.candidate) if _is_ours(plan) else rung.estimate
        except MisuseError as error:
            yield f"{field}candidate cannot be run: {error.rule}, but {error.got}"
            continue
        if found != rung.estimate:
            yield f"{field}estimate is not what the knobs give"
        for name in differing(rung.candidate, plan.candidate, RUNGS_KEEP):
            yield f"{field}candidate.{name} is not that of the chosen candidate"


def _is_ours(plan: Plan) -> bool:
    """Whether this version made it: another one may estimate otherwise."""
    return bool(plan.environment.oomguard == import_module("oomguard").__version__)


def _estimate(plan: Plan, candidate: Candidate) -> Figures:
    return figures(estimate_step(plan.spec, candidate, plan.where.place))


def _sizes(plan: Plan) -> Iterator[str]:
    """Peaks within the budget, and fallbacks that are ever smaller."""
    budget, before = format_bytes(plan.budget_bytes), None
    if plan.peak_bytes > plan.budget_bytes:
        yield f"the peak of {format_bytes(plan.peak_bytes)} is over budget_bytes, {budget}"
    for place, rung in enumerate(plan.fallbacks):
        field, peak_bytes = f"fallbacks[{place}].expected.peak_bytes", rung.expected.peak_bytes
        if peak_bytes > plan.budget_bytes:
            yield f"{field}, {format_bytes(peak_bytes)}, is over budget_bytes, {budget}"
        if before is not None and peak_bytes >= before:
            yield f"{field} is not below that of the fallback before"
        before = peak_bytes
    expected = plan.plain.expected
    fits = expected.peak_bytes + expected.margin_bytes <= plan.budget_bytes
    if _is_ours(plan):
        plain = plain_candidate(plan.spec, cuda=plan.where.cuda, cores=plan.environment.cores)
        fits = fits and bool(estimate_step(plan.spec, plain, plan.where.place).runs)
    if plan.plain.fits != fits and (_is_ours(plan) or plan.plain.fits):
        yield f"plain.fits is {str(plan.plain.fits).lower()}, and its peak and margin say otherwise"


def _buckets(plan: Plan) -> Iterator[str]:
    """From the shortest to the longest sequences, all of them, in the setting of the chosen candidate."""
    lengths, below = plan.spec.lengths or {}, 0
    for place, bucket in enumerate(plan.buckets):
        field, own = f"buckets[{place}]", bucket.candidate
        if bucket.longest <= below:
            yield f"{field}.longest is not above that of the bucket before"
        if bucket.sequences != sum(n for length, n in lengths.items() if below < length <= bucket.longest):
            yield f"{field}.sequences is not what spec.lengths has of such lengths"
        try:
            check_candidate(with_steps(plan.spec, bucket.longest), own)
        except MisuseError as error:
            yield f"{field}.candidate cannot be run: {error.rule}, but {error.got}"
        for name in differing(own, plan.candidate, BUCKETS_KEEP):
            yield f"{field}.candidate.{name} is not that of the chosen candidate"
        yield from _lossy(plan, f"{field}.candidate", own)
        if bucket.expected.peak_bytes + bucket.expected.margin_bytes > plan.budget_bytes:
            yield f"{field}.expected, peak and margin, is over budget_bytes"
        below = bucket.longest
    if plan.buckets and below != max(lengths, default=0):
        yield "buckets does not end with the longest of spec.lengths"


def _evidence(plan: Plan) -> Iterator[str]:
    """What was run."""
    ooms = sum(one.verdict in (Verdict.OOM, Verdict.KILLED) for one in plan.records)
    if plan.probes != len(plan.records) or plan.ooms != ooms:
        yield "probes or ooms is not what the records say"
    if plan.record is not None and (plan.record not in plan.records or not _is_of_the_chosen(plan)):
        yield "record is not one of the chosen candidate"


def _is_of_the_chosen(plan: Plan) -> bool:
    """Whether the record has the candidate's knobs and a time; a shorter one has fewer pieces."""
    record = plan.record
    assert record is not None
    if not record.verdict.ran or not same_model(record.spec, plan.spec) or not (record.seconds_per_step or 0) > 0:
        return False
    ours, theirs = (msgspec.structs.asdict(one) for one in (plan.candidate, record.candidate))
    return all(ours[name] == theirs[name] for name in ours if name not in ("segments", "window"))


def _exports(plan: Plan) -> Iterator[str]:
    """Settings of an allocator, and nothing else: a training is started with them."""
    for name, value in plan.exports.items():
        if _VARIABLE.fullmatch(name) is None:
            yield f"exports has {name!r}, which is no setting of an allocator"
        elif _VALUE.fullmatch(value) is None:
            yield f"exports.{name} is no value that a process can be started with"
