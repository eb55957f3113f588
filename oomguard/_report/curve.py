"""Curve: a question about memory or speed and its answer as a picture, described before anything draws it."""

import base64
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import pandas as pd

from oomguard._core.units import GIB, format_bytes
from oomguard._predict.calibration import same_model
from oomguard._probe.record import Record
from oomguard._report.subject import Subject
from oomguard._spec.candidate import Candidate

if TYPE_CHECKING:  # imported only where a curve is drawn: describing one must not wait for Matplotlib
    from matplotlib.figure import Figure

Kind = Literal["line", "points", "dots", "band", "area"]
Role = Literal["budget", "chosen", "note", "words"]
MOST_TICKS = 9
"""Labels along one axis, at most. More would touch on a phone."""
FAR = 5
"""Memory has a logarithmic axis if the budget is this many times the largest peak, or the reverse."""
MEASURED = 8
"""Slot of measured points. No line has it."""
ALIKE = 0.01
"""Precisions whose predictions differ by at most this share are drawn as one line."""


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """One axis of a curve."""

    label: str
    """Name of the quantity."""
    unit: str = ""
    """Unit of the quantity, such as GiB."""
    low: float
    """First value."""
    high: float
    """Last value."""
    log: bool = False
    """Whether the axis is logarithmic."""
    ticks: tuple[tuple[float, str], ...]
    """Labelled values, each with its label."""

    @property
    def text(self) -> str:
        """Label and unit, as written along the axis."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    def share(self, value: float) -> float:
        """Position of a value along the axis, from 0 (low) to 1 (high)."""
        low, high, here = (math.log(number) if self.log else number for number in (self.low, self.high, value))
        return (here - low) / (high - low)


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Points that belong together."""

    name: str
    """Name in the legend. A series without a name is not in the legend."""
    kind: Kind = "line"
    """A line, large points, faint dots, a band between `low` and `y`, or an area stacked on the areas before it."""
    x: tuple[float, ...]
    """Positions along the x axis."""
    y: tuple[float, ...]
    """Positions along the y axis. For an area: its thickness."""
    low: tuple[float, ...] = ()
    """Lower edge of a band."""
    tips: tuple[str, ...] = ()
    """Text shown when the pointer is at each point. Empty for bands."""
    slot: int = 0
    """Index of the colour, dash, marker and hatch."""
    panel: int = 0
    """0 for the main panel, 1 for the panel below it."""

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.y) == len(self.low if self.kind == "band" else self.x), self.name
        assert len(self.tips) in (0, len(self.x)), self.name


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A labelled point, a horizontal line (only `y` is given) or a vertical line (only `x` is given)."""

    text: str
    """Label beside it; for the chosen candidate, its name in the legend."""
    x: float | None = None
    """Position along the x axis."""
    y: float | None = None
    """Position along the y axis."""
    role: Role = "note"
    """The budget, the chosen candidate, a note, or words without a symbol."""
    panel: int = 0
    """Panel, as in a series."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """A question and its answer as a picture. A notebook shows it, `figure()` returns Matplotlib's figure."""

    name: str
    """Name, as `--curve` takes it."""
    title: str
    """The finding in a few words."""
    question: str
    """The question that the curve answers."""
    answer: str
    """The answer in one to three sentences, with numbers."""
    x: Axis
    """x axis of all panels."""
    y: Axis
    """y axis of the main panel."""
    below: Axis | None = None
    """y axis of a second panel below the main one."""
    series: tuple[Series, ...]
    """What is drawn, from back to front."""
    marks: tuple[Mark, ...] = ()
    """Marked points and lines."""

    def y_axis(self, panel: int) -> Axis:
        """The y axis of a panel."""
        return self.below if panel and self.below is not None else self.y

    def figure(self, *, dark: bool = False) -> "Figure":
        """The curve as a Matplotlib figure."""
        from oomguard._report.draw import DARK, LIGHT, draw

        return draw(self, palette=DARK if dark else LIGHT)

    def save(self, path: str) -> Path:
        """Write the curve to a .png or .html file."""
        from oomguard._report.page import save_curves

        return save_curves([self], path)

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        """The picture that a notebook shows, its size on the screen in pixels, and text for other viewers."""
        from oomguard._report.draw import DPI, FILE, to_png

        size = {"width": round(FILE.width * DPI / 2), "height": round(FILE.height * DPI / 2)}
        picture = base64.b64encode(to_png(self)).decode()
        return {"image/png": picture, "text/plain": f"{self.title}. {self.answer}"}, {"image/png": size}


def make_series(
    name: str,
    x: Iterable[float],
    y: Iterable[float],
    *,
    kind: Kind = "line",
    low: Iterable[float] = (),
    tips: Iterable[str] = (),
    slot: int = 0,
    panel: int = 0,
) -> Series:
    """A series from any numbers."""
    places, heights, edge = (tuple(map(float, numbers)) for numbers in (x, y, low))
    return Series(name=name, kind=kind, x=places, y=heights, low=edge, tips=tuple(tips), slot=slot, panel=panel)


def linear_axis(label: str, unit: str, values: Iterable[float]) -> Axis:
    """An axis from 0 to a little above the largest value, with labels at round numbers.

    >>> [text for _, text in linear_axis("Throughput", "tokens/s", [7000]).ticks]
    ['0', '2,000', '4,000', '6,000']
    """
    high = max(1.12 * max(values), 1e-9)
    step = _round_step(high)
    ticks = tuple((count * step, f"{count * step:,.6g}") for count in range(int(high / step) + 1))
    return Axis(label=label, unit=unit, low=0.0, high=high, ticks=ticks)


def _round_step(span: float) -> float:
    """A round number that divides the span into four to six parts."""
    power = 10.0 ** math.floor(math.log10(span / 4))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if span / (factor * power) <= 6)


def log_axis(label: str, unit: str, values: Iterable[float], *, base: int = 10, pad: float = 1.08) -> Axis:
    """A logarithmic axis around the values, with labels at powers of two (base 2) or at 1, 2 and 5 (base 10).

    >>> [text for _, text in log_axis("Microbatch", "", [1, 32], base=2).ticks]
    ['1', '2', '4', '8', '16', '32']
    >>> [text for _, text in log_axis("Sequence length", "steps", [1000, 20_000]).ticks]
    ['1k', '2k', '5k', '10k', '20k']
    >>> [text for _, text in log_axis("Peak", "GiB", [0.33, 0.46]).ticks]
    ['0.35', '0.4', '0.45']
    """
    numbers = [*values]
    low, high = min(numbers) / pad, max(numbers) * pad
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    ticks = [factor * float(base) ** power for power in powers for factor in ((1,) if base == 2 else (1, 2, 5))]
    ticks = [tick for tick in ticks if low <= tick <= high]
    if len(ticks) > MOST_TICKS and base == 10:
        ticks = [tick for tick in ticks if math.isclose(math.log10(tick) % 1, 0, abs_tol=1e-9)]
    if len(ticks) < 2 and base == 10:  # so narrow a range is nearly linear
        step = _round_step(high - low)
        ticks = [count * step for count in range(math.ceil(low / step), math.floor(high / step) + 1)]
    ticks = ticks[:: math.ceil(len(ticks) / MOST_TICKS) or 1]
    labels = tuple((tick, f"{tick:,.0f}" if base == 2 and tick >= 1 else short(tick)) for tick in ticks)
    return Axis(label=label, unit=unit, low=low, high=high, log=True, ticks=labels)


def memory_axis(label: str, values: Iterable[float], budget: float) -> Axis:
    """An axis in GiB that includes the budget: logarithmic if the budget is far from all values.

    >>> memory_axis("Peak", [1, 7], 6).log, memory_axis("Peak", [1, 7], 80).log
    (False, True)
    """
    sizes = [value for value in values if value > 0]
    if max(sizes) * FAR < budget or max(sizes) > FAR * budget:
        return log_axis(label, "GiB", [*sizes, budget], pad=1.25)
    return linear_axis(label, "GiB", [*sizes, budget])


def short(value: float) -> str:
    """A number in a few characters.

    >>> short(0.25), short(64), short(10_000), short(2_500_000)
    ('0.25', '64', '10k', '2.5M')
    """
    unit, letter = next((pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= pair[0]), (1, ""))
    return f"{value / unit:.3g}{letter}"


def precision_sweeps(subject: Subject, compared: Literal["peak_bytes", "seconds_per_step"]) -> dict[str, pd.DataFrame]:
    """Predictions for every microbatch, by precision. Precisions that come out alike are one entry: `fp32 and bf16`."""
    sweeps: dict[str, pd.DataFrame] = {}
    for precision in subject.precisions:
        sweep = subject.predict(subject.vary(microbatch=subject.microbatches, precision=precision))
        twins = [name for name in sweeps if np.allclose(sweeps[name][compared], sweep[compared], rtol=ALIKE, atol=0)]
        if twins:
            sweeps = {f"{name} and {precision}" if name in twins[:1] else name: sweeps[name] for name in sweeps}
        else:
            sweeps[precision] = sweep
    return sweeps


def budget_mark(subject: Subject, *, vertical: bool = False) -> Mark:
    """The budget as a line: horizontal, or vertical where memory is along the x axis."""
    budget, text = subject.budget_bytes / GIB, f"budget {format_bytes(subject.budget_bytes)}"
    return Mark(text=text, x=budget, role="budget") if vertical else Mark(text=text, y=budget, role="budget")


def pieces_phrase(candidate: Candidate) -> str:
    """How the candidate divides the sequence, as the end of a phrase.

    >>> pieces_phrase(Candidate(microbatch=1)), pieces_phrase(Candidate(microbatch=1, segments=1024))
    ('', ' with 1,024 segments')
    >>> pieces_phrase(Candidate(microbatch=1, segments=4, recompute=False))
    ' with 4 segments without recomputation'
    """
    if candidate.window is not None:
        return f" with a window of {candidate.window:,} steps"
    kept = "" if candidate.recompute else " without recomputation"
    return f" with {candidate.segments:,} segments{kept}" if candidate.segments > 1 else ""


def completed(subject: Subject) -> list[Record]:
    """Records of this model that ran to the end, at any sequence length."""
    return [record for record in subject.records if record.verdict.ran and same_model(record.spec, subject.spec)]


def share_knobs(first: Candidate, second: Candidate, knobs: Iterable[str]) -> bool:
    """Whether two candidates have the same values of some knobs."""
    return all(getattr(first, name) == getattr(second, name) for name in knobs)
