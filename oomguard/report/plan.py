"""`oomguard plan` and `oomguard show`: sections on a terminal, and the plan's JSON."""

import json
import textwrap
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from oomguard.plan.section import Section, Table
from oomguard.plan.shortfall import Shortfall
from oomguard.plan.value import Plan
from oomguard.plan.words import explain, explain_shortfall, summarize
from oomguard.report.common import printer, safe
from oomguard.spec import Spec

if TYPE_CHECKING:
    from rich.console import Console

GAP = "  "
NARROWEST = 12
"""Columns that a column of words keeps, however narrow the terminal is."""


def plan_json(plan: Plan) -> str:
    """The plan as its file has it (in ASCII, so that no terminal can spoil it)."""
    text = msgspec.json.format(msgspec.json.encode(plan), indent=2).decode() + "\n"
    return text if text.isascii() else json.dumps(plan.to_dict(), indent=2) + "\n"


def shortfall_json(shortfall: Shortfall) -> dict[str, Any]:
    """Why there is no plan, as one JSON object."""
    found: dict[str, Any] = msgspec.to_builtins(shortfall)
    return {"fits": False, "message": shortfall.message} | found


def show_result(plan: Plan, path: Path | None, console: "Console") -> None:
    """Print the result in a few lines, where the plan is, and how to go on."""
    say = printer(console)
    result, evidence = summarize(plan)
    show_sections([result], console)
    for sentence in evidence.sentences:
        say(sentence)
    if path is not None:
        say("")
        say(f"Written to {path}. Everything about it: oomguard show {path}")


def show_plan(plan: Plan, sequences: int | None, console: "Console") -> None:
    """Print everything that a plan says."""
    show_sections(explain(plan, sequences), console)


def show_shortfall(shortfall: Shortfall, spec: Spec, device: str, console: "Console") -> None:
    """Print why there is no plan, and what would help."""
    show_sections(explain_shortfall(shortfall, spec, device), console, first="bold red")


def show_sections(sections: Iterable[Section], console: "Console", first: str = "bold green") -> None:
    """Print sections: the first is the answer."""
    say = printer(console)
    for place, section in enumerate(sections):
        if place:
            say("")
        say(section.title, "bold" if place else first)
        indent = GAP if place else ""
        for sentence in section.sentences:
            say(sentence, indent=indent)
        if section.table is not None:
            named = any(section.table.header)
            for number, line in enumerate(table_lines(section.table, console.width - len(indent))):
                if number or named:
                    _print(indent + line, "" if number else "dim", console)
        for line in section.lines:
            _print(indent + line, "cyan", console)


def _print(line: str, style: str, console: "Console") -> None:
    """A line as it is: a table's columns and what is to be copied are not filled anew."""
    from rich.text import Text

    console.print(Text(safe(line, console), style=style), no_wrap=True, overflow="ignore", crop=False)


def table_lines(table: Table, width: int) -> list[str]:
    """A table in columns, its head first. What does not fit goes on in the next line of its cell.

    >>> table_lines(Table(header=("term", "size"), rows=(("weights", "1 KiB"),), align="lr"), 80)
    ['term      size', 'weights  1 KiB']
    """
    rows = (table.header, *table.rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = [place for place, side in enumerate(table.align) if side == "l"]
    while sum(widths) + len(GAP) * (len(widths) - 1) > width and words:
        longest = max(words, key=lambda place: widths[place])
        if widths[longest] <= NARROWEST:
            break
        widths[longest] -= 1
    return [line for row in rows for line in _row_lines(row, widths, table.align)]


def _row_lines(row: tuple[str, ...], widths: list[int], align: str) -> list[str]:
    cells = [textwrap.wrap(cell, size, break_on_hyphens=False) or [""] for cell, size in zip(row, widths, strict=True)]
    lines = []
    for parts in zip_longest(*cells, fillvalue=""):
        padded = [
            part.rjust(size) if side == "r" else part.ljust(size)
            for part, size, side in zip(parts, widths, align, strict=True)
        ]
        lines.append(GAP.join(padded).rstrip())
    return lines
