"""How curves look: colours that colour-blind people tell apart, and dashes and markers for those who print in grey."""

from dataclasses import dataclass
from typing import Literal

from oomguard.curves.value import Axis, Curve, Mark, Side

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""As Plotly names them; by slot."""
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross")
"""The same."""
HATCHES = ("", "/", ".", "\\", "x", "-", "|", "+", "")
"""What areas are filled with, as both libraries name it; by slot."""
MIDDLE = 0.45
"""The share of the x axis beyond which words go to the left: on a phone 25 letters have room on either side of it."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The colours of a light or a dark page."""

    colours: tuple[str, ...]
    """By slot: those of Okabe and Ito ("Color Universal Design", 2008), made lighter for dark pages."""
    paper: str
    """Behind all."""
    ink: str
    """Words, and the budget."""
    soft: str
    """Words of less weight."""
    grid: str
    """The lines behind the figures."""
    band: float
    """How opaque a band is."""


LIGHT = Look(
    colours=(
        *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
        *("#e69f00", "#56b4e9", "#7f7f7f", "#f0e442", "#8c6d31"),
    ),
    paper="#ffffff",
    ink="#1b1f24",
    soft="#59636e",
    grid="#e3e6ea",
    band=0.16,
)
DARK = Look(
    colours=(
        *("#56b4e9", "#ff9a4d", "#33c99c", "#e3a3c6"),
        *("#f0b83a", "#2f8fd0", "#a3a3a3", "#f0e442", "#c7a76c"),
    ),
    paper="#14181d",
    ink="#e8ebef",
    soft="#a3adb8",
    grid="#2b323a",
    band=0.28,
)


def across(curve: Curve, x: float) -> Literal["left", "center", "right"]:
    """Which part of the words of a vertical line is at the line: at the ends of the axis they go inwards."""
    share = curve.x.share(x)
    return "left" if share < 0.15 else "right" if share > 0.8 else "center"


def along(axis: Axis, x: float) -> Side:
    """Where the words of a point on a rising line go: away from the line, and to where there is room."""
    return "above left" if axis.share(x) > MIDDLE else "below right"


def side_of(curve: Curve, mark: Mark) -> tuple[bool, bool]:
    """Where the words of a point go: to its left rather than its right, above rather than below."""
    if mark.side is not None:
        return "left" in mark.side, "above" in mark.side
    assert mark.x is not None  # it is a point
    assert mark.y is not None
    axis = curve.below if mark.panel and curve.below is not None else curve.y
    return curve.x.share(mark.x) > MIDDLE, axis.share(mark.y) < 0.9


def colour(look: Look, slot: int) -> str:
    """The colour of a slot."""
    return look.colours[slot % len(look.colours)]
