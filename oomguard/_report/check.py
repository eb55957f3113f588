"""What `oomguard check` prints: what the plan was made for beside this machine, and the candidate that still fits."""

from typing import TYPE_CHECKING, Any

import msgspec

from oomguard._core.units import format_bytes
from oomguard._plan.check import Check, Compared
from oomguard._report.tables import Section, from_columns, show_sections
from oomguard._report.words import NONE, candidate_words, sentence

if TYPE_CHECKING:
    from rich.console import Console


def check_json(found: Check, plan: str) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(found)
    return {"plan": plan, "ok": found.ok} | document


def show_check(found: Check, plan: str, console: "Console") -> None:
    """Print whether all is as planned, the facts side by side, and what fits."""
    differs = [one.name for one in found.compared if one.same is False]
    title = f"This machine is not what {plan} was made for: {', '.join(differs)}."
    columns = {
        "": [one.name for one in found.compared],
        "plan": [one.planned or NONE for one in found.compared],
        "here": [one.here or NONE for one in found.compared],
        " ": [_mark(one) for one in found.compared],
    }
    table = from_columns(columns, ["", "plan", "here", " "], "What the plan was made for, and this machine")
    section = Section(
        title=f"This machine is what {plan} was made for." if found.ok else title,
        sentences=_words(found),
        table=table,
    )
    show_sections([section], console, first_style="bold green" if found.ok else "bold red")


def _mark(one: Compared) -> str:
    return {True: "ok", False: "differs", None: "not known"}[one.same]


def _words(found: Check) -> tuple[str, ...]:
    """What fits here, and what to do if a plan of this machine is needed."""
    command = f"oomguard plan --device {found.device}."
    if found.free_bytes is None:
        return (f"There is no {found.device} here, so nothing of the plan can run.",)
    fits = _fitting_words(found, format_bytes(found.free_bytes))
    if found.rung is not None and found.named:
        return *fits, f"It is a plan by arithmetic for a card that was only named. To train, make one here: {command}"
    return fits if found.rung is not None else (*fits, f"Make a plan here: {command}")


def _fitting_words(found: Check, free: str) -> tuple[str, ...]:
    rung = found.rung
    if rung is None:
        what = "Neither the plan's candidate nor a fallback fits" if found.fallbacks else "The candidate does not fit"
        return (f"{what} {free}, margin included.",)
    needed = f"{format_bytes(rung.needed_bytes)} of {free}, margin included"
    if rung.number == 0:
        return (f"The plan's candidate fits: it needs {needed}.",)
    which = f"Fallback {rung.number} of {found.fallbacks} would still fit: it needs {needed}."
    return which, sentence(candidate_words(rung.candidate))
