"""The plan's file: written whole, read strictly, and checked against itself and against the device at hand."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from oomguard.errors import MisuseError
from oomguard.files import write_file
from oomguard.plan.agree import contradictions
from oomguard.plan.value import VERSION, Plan
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
