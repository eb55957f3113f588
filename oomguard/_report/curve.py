"""Curve: a question about memory or speed and its answer as a picture, described before anything draws it."""

import base64
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from oomguard._core.units import GIB, format_bytes
from oomguard._report.subject import Subject

if TYPE_CHECKING:  # imported only where a curve is drawn: describing one must not wait for Matplotlib
    from matplotlib.figure import Figure


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """One axis of a curve, from `low` to `high`."""

    label: str
    unit: str = ""
    low: float
    high: float
    base: Literal[0, 2, 10] = 0  # base of a logarithmic axis, whose powers are labelled; 0 for a linear one
    names: tuple[str, ...] = ()  # Labels of 0, 1, 2 and so on. Without names, the axis has labels at round numbers.

    @property
    def text(self) -> str:
        """Label and unit, as written along the axis."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    def share(self, value: float) -> float:
        """Position of a value along the axis, from 0 (low) to 1 (high)."""
        low, high, here = (math.log(number) if self.base else number for number in (self.low, self.high, value))
        return (here - low) / (high - low)


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Points that belong together."""

    name: str  # name in the legend; without one it is not there
    kind: Literal["line", "points", "dots", "band", "area"] = "line"
    """A line, large points, faint dots, a band between `low` and `y`, or an area stacked on the areas before it."""
    x: tuple[float, ...]
    y: tuple[float, ...]  # Heights. For an area: its thickness.
    low: tuple[float, ...] = ()  # lower edge of a band
    tips: tuple[str, ...] = ()  # Text shown when the pointer is at each point. Empty for bands.
    slot: int = 0  # index of the colour, dash, marker and hatch
    panel: int = 0  # 0 for the main panel, 1 for the panel below it

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.y) == len(self.low if self.kind == "band" else self.x), self.name
        assert len(self.tips) in (0, len(self.x)), self.name


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A labelled point, a horizontal line (only `y` is given) or a vertical line (only `x` is given)."""

    text: str  # label beside it; for the chosen candidate, its name in the legend
    x: float | None = None
    y: float | None = None
    role: Literal["budget", "chosen", "note", "label", "words"] = "note"
    """A label has no symbol and is beside its point, words are in the middle of it."""
    panel: int = 0


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """A question and its answer as a picture. A notebook shows it, `figure()` returns Matplotlib's figure."""

    name: str  # as `--curve` takes it
    title: str  # the finding in a few words
    question: str
    answer: str  # the answer in one to three sentences, with numbers
    x: Axis  # x axis of all panels
    y: Axis  # y axis of the main panel
    below: Axis | None = None  # y axis of a second panel below the main one
    series: tuple[Series, ...]  # from back to front
    marks: tuple[Mark, ...] = ()  # marked points and lines

    def y_axis(self, panel: int) -> Axis:
        return self.below if panel and self.below is not None else self.y

    def figure(self, *, dark: bool = False) -> "Figure":
        """The curve as a Matplotlib figure."""
        from oomguard._report.draw import DARK, LIGHT, draw

        return draw(self, palette=DARK if dark else LIGHT)

    def save(self, path: str) -> Path:
        """Write the curve to a .png or .html file."""
        from oomguard._report.page import save_curves

        return save_curves([self], path)

    def _repr_mimebundle_(self, **_: object) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        """The picture that a notebook shows, its size on the screen in pixels, and text for other viewers."""
        from oomguard._report.draw import DPI, FILE, to_png

        size = {"width": round(FILE.width * DPI / 2), "height": round(FILE.height * DPI / 2)}
        picture = base64.b64encode(to_png(self)).decode()
        return {"image/png": picture, "text/plain": f"{self.title}. {self.answer}"}, {"image/png": size}


def make_series(
    name: str, x: Iterable[float], y: Iterable[float], low: Iterable[float] = (), tips: Iterable[str] = (), **look: Any
) -> Series:
    """A series from any numbers. `look` has its kind, slot and panel."""
    places, heights, edge = (tuple(map(float, numbers)) for numbers in (x, y, low))
    return Series(name=name, x=places, y=heights, low=edge, tips=tuple(tips), **look)


def linear_axis(label: str, unit: str, values: Iterable[float]) -> Axis:
    """An axis from 0 to a little above the largest value."""
    return Axis(label=label, unit=unit, low=0.0, high=max(1.12 * max(values), 1e-9))


def log_axis(label: str, unit: str, values: Iterable[float], *, base: Literal[2, 10] = 10, pad: float = 1.08) -> Axis:
    """A logarithmic axis around the values."""
    numbers = [*values]
    return Axis(label=label, unit=unit, low=min(numbers) / pad, high=max(numbers) * pad, base=base)


def budget_mark(subject: Subject, *, vertical: bool = False) -> Mark:
    """The budget as a line: horizontal, or vertical where memory is along the x axis."""
    budget, text = subject.budget_bytes / GIB, f"budget {format_bytes(subject.budget_bytes)}"
    return Mark(text=text, x=budget, role="budget") if vertical else Mark(text=text, y=budget, role="budget")
