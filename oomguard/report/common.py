"""Printing: text in lines that fit the terminal, figures in columns, letters that the terminal has."""

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

from oomguard.checks import visible
from oomguard.units import format_bytes

if TYPE_CHECKING:  # imported where it is used: with --json nobody waits for it
    from rich.console import Console

ASCII = str.maketrans({"→": "->", "×": "x", "█": "#", "▌": "#", "–": "-", "…": "..."})
"""For encodings that have no more."""


def printer(console: "Console") -> Callable[..., None]:
    """Prints text in lines that fit the terminal and letters that it has, without reading markup into it."""
    from rich.text import Text

    def say(text: str, style: str = "", *, indent: str = "", hanging: str | None = None) -> None:
        fill = textwrap.TextWrapper(
            width=max(20, console.width),
            initial_indent=indent,
            subsequent_indent=indent if hanging is None else hanging,
            break_on_hyphens=False,  # a flag stays whole
        )
        for line in fill.wrap(safe(text, console)) or [""]:
            console.print(Text(line, style=style), no_wrap=True, overflow="ignore", crop=False)

    return say


def safe(text: str, console: "Console") -> str:
    """The text in letters that the terminal has, and that it shows."""
    return visible(text if console.encoding.startswith("utf") else text.translate(ASCII))


def row(name: str, size_bytes: int) -> str:
    """A name and a size in columns."""
    return f"{name:<11}  {format_bytes(size_bytes):>11}"
