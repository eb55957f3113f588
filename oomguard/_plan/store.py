"""The plan's file: written whole, read strictly, and checked against itself and against the device at hand.

A file may have been changed by hand, and a mistake that is found late costs a run. The types of value.py refuse values
that no plan can have; `contradictions` finds values that cannot be true beside the rest of the plan.
"""

import os
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from oomguard._core.errors import MisuseError
from oomguard._core.system import file_errors, read_file, write_file
from oomguard._core.units import format_bytes
from oomguard._device.cuda import SETTINGS
from oomguard._estimate.breakdown import estimate_step
from oomguard._plan.make import BUCKETS_KEEP, RUNGS_KEEP, differing, plain_candidate
from oomguard._plan.task_value import TaskPlan
from oomguard._plan.value import VERSION, Plan, Rung, figures
from oomguard._search.run import count_ooms
from oomguard._spec.candidate import ALLOW_WORDS, KNOBS, Candidate, check_candidate
from oomguard._spec.lengths import same_model, with_steps
from oomguard._spec.spec import Spec

_RULE, _ADVICE = "A plan is a file that oomguard plan has written", "Give the path of a plan.json."
_VARIABLE = re.compile("|".join([*SETTINGS, "MALLOC_[A-Z0-9_]{1,64}"]))
_VALUE = re.compile("[ -~]{0,4096}")
"""A value that a process can be started with: it ends at a NUL, and the system refuses long ones."""


def save_plan(plan: Plan | TaskPlan, path: str | os.PathLike[str]) -> Path:
    """Write the plan. If that fails, the file stays as it was.

    >>> import oomguard, tempfile
    >>> plan = oomguard.find_feasible_config(cell="gru", seq=1000, device="t4")
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save_plan(plan, f"{directory}/gru/plan.json").name
    'plan.json'
    """
    return write_file(path, msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n", "A plan")


def load_plan(path: str | os.PathLike[str]) -> Plan | TaskPlan:
    """Read a plan, or that of a run, and check that nothing in it contradicts anything else. It imports nothing.

    >>> import oomguard, tempfile
    >>> plan = oomguard.find_feasible_config(cell="gru", seq=1000, device="t4")
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     load_plan(save_plan(plan, f"{directory}/plan.json")) == plan
    True
    """
    source = Path(path) / "plan.json" if Path(path).is_dir() else Path(path)
    with file_errors(_RULE, source, _ADVICE, use="read"):
        return decode_plan(read_file(source), str(source))


def load_spec_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan of a spec; raise if it is one of a task."""
    plan = load_plan(path)
    if isinstance(plan, TaskPlan):
        raise MisuseError(
            rule="This takes the plan of a spec",
            got=f"{path} is the plan of the task {plan.task}",
            advice="Give the plan of a spec, which oomguard plan makes without a task.",
        )
    return plan


def decode_plan(content: bytes, name: str = "The plan") -> Plan | TaskPlan:
    try:
        head = msgspec.json.decode(content, type=_Versioned)
        version = head.version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MisuseError(rule=_RULE, got=f"{name} is not one ({error})", advice=_ADVICE) from None
    if version != VERSION:
        raise MisuseError(
            rule=f"This oomguard reads plans of version {VERSION}",
            got=f"{name} has version {version}",
            advice="Make the plan again, or take the oomguard that wrote it.",
        )
    try:
        plan: Plan | TaskPlan
        if head.task is None:
            plan = msgspec.json.decode(content, type=Plan)
        else:
            plan = msgspec.json.decode(content, type=TaskPlan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        got = f"{name} does not have the right form ({error})"
        raise MisuseError(rule=_RULE, got=got, advice=_ADVICE) from None
    for wrong in contradictions(plan):
        raise MisuseError(
            rule="A plan must agree with itself",
            got=f"in {name}, {wrong}",
            advice="It was changed by hand, or by another version: make the plan again.",
        )
    return plan


class _Versioned(msgspec.Struct):
    version: Any
    task: Any = None


def contradictions(plan: Plan | TaskPlan) -> Iterator[str]:
    """Facts of a plan that contradict the rest of it, each with the name of its field."""
    if isinstance(plan, TaskPlan):
        yield from _exports(plan)
        yield from _task(plan)
        return
    for check in (_device_and_fixed, _rungs, _sizes, _buckets, _evidence, _exports):
        yield from check(plan)


def _device_and_fixed(plan: Plan) -> Iterator[str]:
    if plan.where.device != plan.environment.device:
        yield "where.device is not environment.device"
    if plan.where.cuda == (plan.where.device == "cpu"):
        yield f"where.cuda is {str(plan.where.cuda).lower()}, and where.device is {plan.where.device}"
    if plan.where.cuda and None in (plan.where.capability, plan.where.multiprocessors):
        yield "where.cuda is true, and where does not have the card's capability and multiprocessors"
    for name, value in plan.fixed.items():
        if name not in KNOBS or getattr(plan.candidate, name) != value:
            yield f"fixed.{name} is not what the candidate has"


def _candidate(plan: Plan, field: str, spec: Spec, candidate: Candidate, kept: tuple[str, ...]) -> Iterator[str]:
    """Check that a candidate can run the spec, shares some knobs with the chosen one, and is lossy only if allowed."""
    try:
        check_candidate(spec, candidate)
    except MisuseError as error:
        yield f"{field}candidate cannot be run: {error.rule}, but {error.got}"
    for name in differing(candidate, plan.candidate, kept):
        yield f"{field}candidate.{name} is not that of the chosen candidate"
    for knob in candidate.lossy:
        if ALLOW_WORDS[knob] not in plan.allow:
            yield f"{field}candidate.{knob} is lossy, and allow does not have it"


def _rungs(plan: Plan) -> Iterator[str]:
    """Check that the chosen candidate and each fallback can be run and has the estimate that its knobs give."""
    chosen = Rung(candidate=plan.candidate, estimate=plan.estimate, expected=plan.expected)
    for number, rung in enumerate((chosen, *plan.fallbacks)):
        field = f"fallbacks[{number - 1}]." if number else ""
        yield from _candidate(plan, field, plan.spec, rung.candidate, RUNGS_KEEP)
        try:
            if _same_version(plan) and rung.estimate != figures(estimate_step(plan.spec, rung.candidate, plan.where)):
                yield f"{field}estimate is not what the knobs give"
        except MisuseError as error:
            yield f"{field}candidate cannot be run: {error.rule}, but {error.got}"


def _same_version(plan: Plan) -> bool:
    """Whether this version of oomguard made the plan: another one may estimate differently."""
    return bool(plan.environment.oomguard == import_module("oomguard").__version__)


def _sizes(plan: Plan) -> Iterator[str]:
    """Check that peaks are within the budget, and that each fallback is smaller than the one before."""
    budget, before = format_bytes(plan.budget_bytes), None
    if plan.peak_bytes > plan.budget_bytes:
        yield f"the peak of {format_bytes(plan.peak_bytes)} is over budget_bytes, {budget}"
    for number, rung in enumerate(plan.fallbacks):
        field, peak_bytes = f"fallbacks[{number}].expected.peak_bytes", rung.expected.peak_bytes
        if peak_bytes > plan.budget_bytes:
            yield f"{field}, {format_bytes(peak_bytes)}, is over budget_bytes, {budget}"
        if before is not None and peak_bytes >= before:
            yield f"{field} is not below that of the fallback before"
        before = peak_bytes
    fits = plan.plain.expected.safe_bytes <= plan.budget_bytes
    if _same_version(plan):
        plain = plain_candidate(plan.spec, cuda=plan.where.cuda, cores=plan.environment.cores)
        fits = fits and bool(estimate_step(plan.spec, plain, plan.where).runs)
    if plan.plain.fits != fits and (_same_version(plan) or plan.plain.fits):
        yield f"plain.fits is {str(plan.plain.fits).lower()}, and its peak and margin say otherwise"


def _buckets(plan: Plan) -> Iterator[str]:
    """Check that the buckets cover all lengths in order, in the setting of the chosen candidate."""
    lengths, below = plan.spec.lengths or {}, 0
    for number, bucket in enumerate(plan.buckets):
        field = f"buckets[{number}]."
        if bucket.longest <= below:
            yield f"{field}longest is not above that of the bucket before"
        if bucket.sequences != sum(n for length, n in lengths.items() if below < length <= bucket.longest):
            yield f"{field}sequences is not what spec.lengths has of such lengths"
        yield from _candidate(plan, field, with_steps(plan.spec, bucket.longest), bucket.candidate, BUCKETS_KEEP)
        if bucket.expected.safe_bytes > plan.budget_bytes:
            yield f"{field}expected, peak and margin, is over budget_bytes"
        below = bucket.longest
    if plan.buckets and below != max(lengths, default=0):
        yield "buckets does not end with the longest of spec.lengths"


def _evidence(plan: Plan) -> Iterator[str]:
    """Check the numbers of probes, and that the record is one of the chosen candidate."""
    if plan.probes != len(plan.records) or plan.ooms != count_ooms(plan.records):
        yield "probes or ooms is not what the records say"
    record, kept = plan.record, tuple(KNOBS.keys() - {"segments", "window"})  # shorter sequences have fewer segments
    if record is not None and not (
        record in plan.records
        and record.verdict.ran
        and (record.seconds_per_step or 0) > 0
        and same_model(record.spec, plan.spec)
        and not differing(plan.candidate, record.candidate, kept)
    ):
        yield "record is not one of the chosen candidate"


def _task(plan: TaskPlan) -> Iterator[str]:
    """Check that the rows of a task's candidates give its batch, and that what was measured is within the budget."""
    for field, candidate in (("", plan.candidate), *(("fallbacks ", rung.candidate) for rung in plan.fallbacks)):
        if -(-plan.batch // candidate.microbatch) != candidate.accumulation:
            yield f"{field}candidate does not give the batch"
    if plan.record is not None and plan.record not in plan.records:
        yield "record is not one of records"
    if plan.record is not None and plan.peak_bytes > plan.budget_bytes:
        yield "the peak is over budget_bytes"


def _exports(plan: Plan | TaskPlan) -> Iterator[str]:
    """Check that the exports are settings of an allocator and nothing else: a training is started with them."""
    for name, value in plan.exports.items():
        if _VARIABLE.fullmatch(name) is None:
            yield f"exports has {name!r}, which is no setting of an allocator"
        elif _VALUE.fullmatch(value) is None:
            yield f"exports.{name} is no value that a process can be started with"


def check_device(plan: Plan | TaskPlan, title: str, free_bytes: int) -> None:
    """Raise unless the plan is for such a device and its peak is free there now."""
    if plan.environment.title != title:
        raise MisuseError(
            rule="A plan is for the device that it was made on",
            got=f"it was made on {plan.environment.title}, and this is {title}",
            advice="Make a plan here: oomguard plan.",
        )
    if plan.peak_bytes > free_bytes:
        raise MisuseError(
            rule=f"The plan needs {format_bytes(plan.peak_bytes)} of {plan.where.device}",
            got=f"{format_bytes(free_bytes)} are free",
            advice=f"Free memory, or make a plan with --budget {format_bytes(free_bytes).replace(' ', '')}.",
        )
