"""The plan's file: written whole, read strictly, and checked against itself and against the device at hand."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from oomguard.calibrate import same_model
from oomguard.candidate import check_candidate
from oomguard.device.cuda import SETTINGS
from oomguard.errors import MisuseError
from oomguard.estimate.breakdown import estimate_step
from oomguard.files import write_file
from oomguard.plan.value import VERSION, Plan, Rung, figures
from oomguard.probe.verdict import Verdict
from oomguard.search.shorten import with_steps
from oomguard.units import format_bytes

MAX_FILE_BYTES = 256 << 20
"""A plan is some hundred KiB; what is larger is something else."""
SCHEMA = Path(__file__).with_name("schema.json")
"""The JSON Schema that is shipped."""


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> Path:
    """Write the plan: the file is there whole, or as it was before.

    >>> import oomguard, tempfile
    >>> plan = oomguard.find_feasible_config(cell="gru", seq=1000, device="t4")
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save_plan(plan, f"{directory}/gru/plan.json").name
    'plan.json'
    """
    return write_file(path, msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n", "A plan")


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan, and check that nothing in it contradicts anything else.

    >>> import oomguard, tempfile
    >>> plan = oomguard.find_feasible_config(cell="gru", seq=1000, device="t4")
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     load_plan(save_plan(plan, f"{directory}/plan.json")) == plan
    True
    """
    source = Path(path)
    try:
        if source.stat().st_size > MAX_FILE_BYTES:
            raise OSError(0, f"it is larger than {format_bytes(MAX_FILE_BYTES)}")
        content = source.read_bytes()
    except OSError as error:
        raise MisuseError(
            rule="A plan is a file that oomguard plan has written",
            got=f"{source} cannot be read ({error.strerror})",
            advice="Give the path of a plan.json.",
        ) from None
    return decode_plan(content, str(source))


def decode_plan(content: bytes, name: str = "The plan") -> Plan:
    """A plan from its JSON."""
    try:
        version = msgspec.json.decode(content, type=_Versioned).version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _misuse(name, f"is not one ({error})") from None
    if version != VERSION:
        raise MisuseError(
            rule=f"This oomguard reads plans of version {VERSION}",
            got=f"{name} has version {version}",
            advice="Make the plan again, or take the oomguard that wrote it.",
        )
    try:
        plan = msgspec.json.decode(content, type=Plan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _misuse(name, f"does not have the right form ({error})") from None
    for wrong in contradictions(plan):
        raise MisuseError(
            rule="A plan must agree with itself",
            got=f"in {name}, {wrong}",
            advice="It was changed by hand, or by another version: make the plan again.",
        )
    return plan


class _Versioned(msgspec.Struct):
    version: Any


def _misuse(name: str, got: str) -> MisuseError:
    return MisuseError(
        rule="A plan is a file that oomguard plan has written",
        got=f"{name} {got}",
        advice="Give the path of a plan.json.",
    )


def contradictions(plan: Plan) -> Iterator[str]:
    """What in a plan cannot be true beside the rest of it."""
    try:
        for candidate in (plan.candidate, *(rung.candidate for rung in plan.fallbacks)):
            check_candidate(plan.spec, candidate)
        for bucket in plan.buckets:
            check_candidate(with_steps(plan.spec, bucket.longest), bucket.candidate)
    except MisuseError as error:
        yield str(error)
        return
    chosen = Rung(candidate=plan.candidate, estimate=plan.estimate, expected=plan.expected)
    for place, rung in enumerate((chosen, *plan.fallbacks)):
        name = "the chosen candidate" if not place else f"fallback {place}"
        if plan.environment.oomguard == _version() and figures(_estimate(plan, rung)) != rung.estimate:
            yield f"the estimate of {name} is not what its knobs give"
        if rung.candidate.lossy != plan.candidate.lossy:
            yield f"{name} does not have the gradient of the chosen one"
    peaks = [rung.expected.peak_bytes for rung in plan.fallbacks]
    if peaks != sorted(peaks, reverse=True):
        yield "the peaks of the fallbacks do not fall"
    if plan.peak_bytes > plan.budget_bytes:
        yield f"the peak of {format_bytes(plan.peak_bytes)} is over the budget of {format_bytes(plan.budget_bytes)}"
    if plan.probes != len(plan.records) or plan.ooms != sum(_ran_out(one.verdict) for one in plan.records):
        yield "the numbers of probes and of those that ran out of memory are not those of the records"
    if plan.record is not None and (plan.record not in plan.records or not _is_of(plan)):
        yield "the record is not one of the chosen candidate"
    if not all(name in SETTINGS or name.startswith("MALLOC_") for name in plan.exports):
        yield "it exports more than the settings of an allocator"
    if {*plan.candidate.lossy} - {"precision", "window", "state_8bit"} or not _allowed(plan):
        yield "a lossy knob is turned that is not allowed"


def _version() -> str:
    from importlib import import_module

    return str(import_module("oomguard").__version__)


def _estimate(plan: Plan, rung: Rung) -> Any:
    return estimate_step(plan.spec, rung.candidate, plan.where.place)


def _ran_out(verdict: Verdict) -> bool:
    return verdict in (Verdict.OOM, Verdict.KILLED)


def _is_of(plan: Plan) -> bool:
    """Whether the record has the candidate's knobs; a shorter one has fewer pieces."""
    assert plan.record is not None
    if not plan.record.verdict.ran or not same_model(plan.record.spec, plan.spec):
        return False
    ours, theirs = (msgspec.structs.asdict(one) for one in (plan.candidate, plan.record.candidate))
    return all(ours[name] == theirs[name] for name in ours if name not in ("segments", "window"))


def _allowed(plan: Plan) -> bool:
    words = {"precision": "precision", "window": "window", "state_8bit": "8bit"}
    return all(words[knob] in plan.allow for knob in plan.candidate.lossy)


def check_device(plan: Plan, title: str, free_bytes: int) -> None:
    """Raise unless the plan is for such a device, and what it needs is free there now."""
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


def schema() -> dict[str, Any]:
    """The JSON Schema of a plan."""
    return msgspec.json.schema(Plan)


def schema_text() -> str:
    """The file that is shipped."""
    return json.dumps(schema(), indent=1, sort_keys=True) + "\n"
