"""Curve: what is to be seen, before anybody decides what draws it."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from oomguard.errors import MisuseError

if TYPE_CHECKING:  # imported where it is used: a curve does not wait for the library that draws it
    from plotly.graph_objects import Figure

Kind = Literal["line", "points", "dots", "band", "area"]
Side = Literal["left", "right", "above left", "above right", "below left", "below right"]
Role = Literal["budget", "chosen", "note", "words"]


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """One axis."""

    label: str
    """What is along it."""
    unit: str = ""
    """In what it is counted: GiB, tokens/s."""
    low: float
    """Where it begins."""
    high: float
    """Where it ends."""
    log: bool = False
    """Whether each step multiplies."""
    ticks: tuple[tuple[float, str], ...] = ()
    """Where a word is written, and which; none: as the library does it."""

    @property
    def text(self) -> str:
        """Label and unit, as it is written along the axis."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    def share(self, value: float) -> float:
        """How far along the axis a value is, from 0 to 1.

        >>> Axis(label="Peak", low=1, high=100, log=True).share(10)
        0.5
        """
        low, high, here = (math.log(one) if self.log else one for one in (self.low, self.high, value))
        return (here - low) / (high - low)


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Figures that belong together. Checked at birth."""

    name: str
    """For the legend; empty: not in it."""
    kind: Kind = "line"
    """A line; points; faint dots; a band between `low` and `y`; an area that stands on the areas before it."""
    x: tuple[float, ...]
    """Along the x axis."""
    y: tuple[float, ...]
    """Along the y axis; of an area, how thick it is."""
    low: tuple[float, ...] = ()
    """Of a band: its lower edge."""
    words: tuple[str, ...] = ()
    """What is said of each point when one points at it."""
    slot: int = 0
    """Its place among colours, dashes and markers: the same number always looks the same."""
    panel: int = 0
    """0: the curve's panel, 1: the one below it, with an axis of its own."""

    def __post_init__(self) -> None:
        lengths = {len(self.x), len(self.y), *([len(self.low)] if self.kind == "band" else [])}
        lengths |= {len(self.words)} if self.words else set()
        if len(lengths) > 1:
            raise MisuseError(
                rule="A series has as many figures along one axis as along the other",
                got=f"got {sorted(lengths)}",
                advice="Give every point all of its figures.",
            )


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Something to be seen beside the figures: a horizontal line (only `y`), a vertical one (only `x`), or a point."""

    text: str
    """What is written beside it; of the chosen candidate, in the legend."""
    x: float | None = None
    """Where along the x axis."""
    y: float | None = None
    """Where along the y axis."""
    role: Role = "note"
    """The budget, the chosen candidate, something found, or words alone."""
    side: Side | None = None
    """Where its words go, if something else is where they would be (a vertical line has them above the panel)."""
    panel: int = 0
    """As that of a series."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """A question, and its answer as a picture. A notebook shows it; `figure()` is Plotly's, `save()` writes a file."""

    name: str
    """As `--curve` takes it."""
    title: str
    """The finding, in a few words."""
    question: str
    """What it answers."""
    answer: str
    """The answer in a sentence or two, with figures."""
    x: Axis
    """The axis that all panels share."""
    y: Axis
    """The axis of the panel."""
    below: Axis | None = None
    """The axis of a second panel below it."""
    series: tuple[Series, ...]
    """What is drawn, the first at the back."""
    marks: tuple[Mark, ...] = ()
    """What is marked."""

    def figure(self, *, dark: bool = False) -> "Figure":
        """The curve as a figure of Plotly's."""
        from oomguard.curves.draw_plotly import figure

        return figure(self, dark=dark)

    def save(self, path: str) -> Path:
        """Write it to a .png or .html file."""
        from oomguard.curves.save import save_curves

        return save_curves([self], path)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """As a notebook shows it: by Plotly or, where a viewer has none, as a picture."""
        from oomguard.curves.save import to_mimebundle

        return to_mimebundle(self)
