"""Sections and tables of text, and how a terminal and HTML show them.

HTML comes from one template, which escapes every text: a plan is a file that anybody may have written.
"""

import os
import textwrap
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from oomguard._core.errors import MisuseError, visible

if TYPE_CHECKING:  # rich is imported where it is used: --json does not need it
    from rich.console import Console, JustifyMethod
    from rich.table import Table as RichTable
    from rich.text import Text

ASCII = str.maketrans({"→": "->", "×": "x", "█": "#", "▌": "#", "–": "-", "…": "..."})
"""Replacements for terminals whose encoding is not Unicode."""
FOLDER = Path(__file__).parent
NARROWEST = 8  # characters that a column of words keeps, however narrow the terminal is


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table of text."""

    header: tuple[str, ...]  # The title of each column. All are empty if the first column says what each row is.
    rows: tuple[tuple[str, ...], ...]  # the cells, row by row
    align: str  # for each column, `l` (words, left-aligned) or `r` (figures, right-aligned)
    sums: int = 0  # the number of last rows that are totals of the rows above, or are compared with them
    caption: str = ""  # for pages and screen readers; in a terminal the section's title is enough
    drops: tuple[str, ...] = ()  # titles of columns that a terminal leaves out if it is too narrow, the first one first
    styles: tuple[str, ...] = ()  # Rich's style of each column in a terminal; empty if no column has one

    def __post_init__(self) -> None:
        widths = {len(self.header), len(self.align), *map(len, self.rows)}
        assert len(widths) == 1, f"every row needs as many cells as the header, but there are rows of {sorted(widths)}"


def from_columns(
    columns: dict[str, list[str]], words: Iterable[str], caption: str = "", drops: tuple[str, ...] = ()
) -> Table:
    """A table from its columns by title. `words` names those that are left-aligned."""
    align = "".join("l" if name in words else "r" for name in columns)
    rows = tuple(zip(*columns.values(), strict=True))
    return Table(header=tuple(columns), rows=rows, align=align, caption=caption, drops=drops)


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a report: a title, sentences, and perhaps a table or lines for the shell."""

    title: str
    sentences: tuple[str, ...] = ()  # the text, sentence by sentence
    table: Table | None = None
    lines: tuple[str, ...] = ()  # commands that can be copied as they are


def printer(console: "Console") -> Callable[..., None]:
    """A function that prints text in lines that fit the terminal, in characters it has, without reading markup."""
    from rich.text import Text

    def say(text: str, style: str = "", *, indent: str = "", hanging: str | None = None) -> None:
        wrapper = textwrap.TextWrapper(
            width=max(20, console.width),
            initial_indent=indent,
            subsequent_indent=indent if hanging is None else hanging,
            break_on_hyphens=False,  # flags stay whole
            break_long_words=False,  # a path can be copied: the terminal itself wraps it
        )
        for line in wrapper.wrap(safe(text, console)) or [""]:
            _print_line(Text(line, style), console)

    return say


def safe(text: str, console: "Console") -> str:
    """The text in characters that the terminal has, with control characters written out."""
    return visible(text if console.encoding.startswith("utf") else text.translate(ASCII))


def show_sections(sections: Iterable[Section], console: "Console", first_style: str = "bold green") -> None:
    """Print sections. The first one is the answer: its title has a style of its own, and it is not indented."""
    from rich.text import Text

    say = printer(console)
    for number, section in enumerate(sections):
        if number:
            say("")
        indent = "  " if number else ""
        say(section.title, "bold" if number else first_style)
        for sentence in section.sentences:
            say(sentence, indent=indent)
        if section.table is not None:
            show_table(section.table, console, indent)
        for line in section.lines:
            _print_line(Text(indent + safe(line, console), "cyan"), console)


def show_table(table: Table, console: "Console", indent: str = "") -> None:
    """Print a table. In a narrow terminal, some columns are left out, and cells continue on their next line."""
    from rich.text import Text

    table = _narrowed(table, console.width - len(indent))
    widths, gap = _fit(table, console.width - len(indent))
    grid, width = _rich_table(table, widths, gap, console), sum(widths) + gap * (len(widths) - 1)
    for segments in console.render_lines(grid, console.options.update(width=width), pad=False):
        _print_line(Text.assemble(indent, *((segment.text, segment.style or "") for segment in segments)), console)


def _narrowed(table: Table, width: int) -> Table:
    """The table without those columns that it can do without, as far as figures would not stay on one line."""
    for title in table.drops:
        columns = [*zip(table.header, *table.rows, strict=True)]
        least = [
            max(map(len, cells)) if side == "r" else min(max(map(len, cells)), max(NARROWEST, len(cells[0])))
            for side, cells in zip(table.align, columns, strict=True)
        ]
        if sum(least) + len(least) - 1 <= width or title not in table.header:
            continue
        kept = [number for number, head in enumerate(table.header) if head != title]
        table = msgspec.structs.replace(
            table,
            header=tuple(table.header[number] for number in kept),
            rows=tuple(tuple(row[number] for number in kept) for row in table.rows),
            align="".join(table.align[number] for number in kept),
            styles=tuple(table.styles[number] for number in kept) if table.styles else (),
        )
    return table


def _fit(table: Table, width: int) -> tuple[list[int], int]:
    """The width of each column, and the gap between two, so that the table is no wider than the terminal."""
    columns = [*zip(table.header, *table.rows, strict=True)]
    longest = [max(map(len, cells)) for cells in columns]
    words = [max((len(word) for cell in cells for word in cell.split()), default=0) for cells in columns]
    heads = [max(map(len, head.split()), default=0) for head in table.header]
    for gap, figures in ((2, longest), (1, longest), (2, words), (1, words)):
        wraps = zip(table.align, figures, longest, heads, strict=True)
        widths = [most if side == "r" else min(full, max(NARROWEST, head)) for side, most, full, head in wraps]
        spare = width - sum(widths) - gap * (len(widths) - 1)
        if spare >= 0:
            break
    for column in sorted(range(len(widths)), key=lambda column: longest[column] - widths[column]):
        more = min(longest[column] - widths[column], max(0, spare))
        widths[column], spare = widths[column] + more, spare - more
    while spare < 0 and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
        spare += 1
    return widths, gap


def _rich_table(table: Table, widths: list[int], gap: int, console: "Console") -> "RichTable":
    from rich.table import Table as RichTable
    from rich.text import Text

    headed = any(table.header)
    grid = RichTable(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim", show_header=headed)
    styles = table.styles or ("",) * len(widths)
    justify: dict[str, JustifyMethod] = {"l": "left", "r": "right"}
    for head, side, width, style in zip(table.header, table.align, widths, styles, strict=True):
        grid.add_column(Text(safe(head, console)), justify=justify[side], width=width, style=style, overflow="fold")
    for number, row in enumerate(table.rows):
        total = number == len(table.rows) - table.sums
        grid.add_row(*(Text(safe(cell, console)) for cell in row), style="bold" if total else "")
    return grid


def _print_line(line: "Text", console: "Console") -> None:
    """Print a line as it is, even if it is wider than the terminal."""
    line.rstrip()
    console.print(line, no_wrap=True, overflow="ignore", crop=False)


@cache
def macros() -> Any:
    """The macros of the template: `notebook` and `page`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(FOLDER)
    rules = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return rules.get_template("page.html.j2").module


def check_ending(path: str | os.PathLike[str], what: str, suffixes: tuple[str, ...], example: str) -> Path:
    """The path, which must have one of the suffixes: by it, a browser or a viewer knows what the file is."""
    target = Path(path)
    if target.suffix.lower() not in suffixes:
        raise MisuseError(
            rule=f"{what} is written as {' or '.join(suffixes)}",
            got=f"got {target.name!r}",
            advice=f"Give the file one of these endings, such as {example}.",
        )
    return target
