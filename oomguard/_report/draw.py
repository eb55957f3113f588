"""Draws a curve with Matplotlib: as a figure, as a PNG file, and as an SVG that follows the theme of its page."""

import io
import math
import re
import textwrap
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from oomguard._report.curve import Axis, Curve, Mark, Series
from oomguard._report.draw_labels import place_labels

DPI = 160
"""Dots per inch of a PNG file."""
POINTS = 72
"""Points per inch: the unit of an SVG."""
CHARACTER = 0.077
"""Width of a character of an axis or a legend, in inches. Above the average, so that estimated widths suffice."""
LINE = 0.2
"""Height of a line of text, in inches."""
DASHES: tuple[Any, ...] = ("-", (0, (6, 3)), (0, (1.5, 2)), (0, (7, 2, 1.5, 2)), (0, (10, 3)))
MARKERS = ("o", "s", "D", "^", "P")
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "||", "++", "")
"""Dashes, markers and hatches by slot, so that colour is never the only difference between two series."""
BAND = 0.2
"""Opacity of a band."""


class Palette(NamedTuple):
    """Colours of a light or a dark picture: of slots, background, text, text of less weight, and grid lines."""

    colors: tuple[str, ...]
    paper: str
    ink: str
    soft: str
    line: str


# The colours of slots are those of Okabe and Ito ("Color Universal Design", 2008), made lighter for dark paper.
LIGHT = Palette(
    colors=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#f0e442", "#8c6d31"),
    paper="#ffffff",
    ink="#1b1f24",
    soft="#59636e",
    line="#e3e6ea",
)
DARK = Palette(
    colors=("#56b4e9", "#ff9a4d", "#33c99c", "#e3a3c6", "#f0b83a", "#2f8fd0", "#a3a3a3", "#f0e442", "#c7a76c"),
    paper="#14181d",
    ink="#e8ebef",
    soft="#a3adb8",
    line="#2b323a",
)
VARIABLES = {color: f"var(--slot{slot})" for slot, color in enumerate(LIGHT.colors)}
VARIABLES |= {getattr(LIGHT, name): f"var(--{name})" for name in ("paper", "ink", "soft", "line")}
"""The light colours, and the CSS variables of a page that take their place in an SVG."""


class Size(NamedTuple):
    """Width and height of a picture in inches, and whether it has title and answer. A page says them itself."""

    width: float
    height: float
    titled: bool = False


FILE = Size(width=8.0, height=5.4, titled=True)
"""A PNG file: half a printed page."""
WIDE = Size(width=8.0, height=4.6)
"""A picture on a page."""
NARROW = Size(width=3.9, height=4.6)
"""A picture on a phone."""


def draw(curve: Curve, *, palette: Palette = LIGHT, size: Size = FILE, dpi: int = DPI) -> Figure:
    """The curve as a Matplotlib figure."""
    settings: Any = {
        "font.family": ["DejaVu Sans"],  # comes with Matplotlib, and is so wide that other fonts fit its place
        "font.size": 9.5,
        "text.parse_math": False,
        "text.color": palette.ink,
        "axes.labelcolor": palette.ink,
        "axes.edgecolor": palette.soft,
        "axes.facecolor": palette.paper,
        "xtick.labelcolor": palette.ink,
        "ytick.labelcolor": palette.ink,
        "xtick.color": palette.soft,
        "ytick.color": palette.soft,
    }
    with rc_context(settings):
        figure = Figure(figsize=(size.width, size.height), dpi=dpi, facecolor=palette.paper)
        top = _write_title(figure, curve, size, palette) if size.titled else 0.08
        legend = _legend_entries(curve, palette)
        columns = _legend_columns([*legend], size)
        legend_height = LINE * math.ceil(len(legend) / columns) if legend else 0.0
        top += 0.22 if any(mark.y is None for mark in curve.marks) else 0.04  # labels above the panel
        panels = _make_panels(figure, curve, top, legend_height, palette)
        for number, panel in enumerate(panels):
            _draw_series(panel, [one for one in curve.series if one.panel == number], palette)
        _draw_marks(panels, curve, palette)
        if legend:
            corner = (0.1 / size.width, 0.05 / size.height)
            figure.legend(
                [*legend.values()], [*legend], loc="lower left", bbox_to_anchor=corner, ncols=columns, frameon=False,
                fontsize=9, borderpad=0, borderaxespad=0, handletextpad=0.5, columnspacing=1.3, labelspacing=0.4,
            )  # fmt: skip
    return figure


def to_png(curve: Curve) -> bytes:
    """The curve as the content of a PNG file."""
    buffer = io.BytesIO()
    draw(curve).savefig(buffer, format="png")
    return buffer.getvalue()


def to_svg(curve: Curve, size: Size, name: str) -> tuple[str, list[tuple[float, ...]]]:
    """The curve as an SVG element for a page, and the place of each panel: left, top, width and height as shares.

    Colours are CSS variables. The name must be unique on the page: the ids of shared shapes are made from it.
    """
    tall = size if curve.below is None else size._replace(height=1.3 * size.height)
    figure, buffer = draw(curve, size=tall, dpi=POINTS), io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True)
    boxes = [panel.get_position() for panel in figure.axes]
    return _for_page(buffer.getvalue()), [(box.x0, 1 - box.y1, box.width, box.height) for box in boxes]


def _for_page(svg: str) -> str:
    """An SVG file as an element: without what only a file needs, numbered ids as classes, colours as variables."""
    svg = svg[svg.index("<svg ") :].replace("xlink:href", "href")
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:xmlns(?::\w+)?|version|width|height)="[^"]*"', "", svg, count=5)
    svg = re.sub(r' id="([\w.]+)_\d+"', r' class="\1"', svg)
    svg = re.sub(r' (?:d|x|y)="[^"]*"', lambda found: re.sub(r"\d+\.\d{3,}", _rounded, found[0]), svg)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, variable)
    return svg.strip()


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def hover_points(curve: Curve) -> list[tuple[int, float, float, str]]:
    """Every point that has a text: its panel, its place in the panel (shares from the left and the top), the text.

    Of the marks, these are the chosen ones: others have a label beside them.
    """
    points = [(mark.panel, mark.x, mark.y, mark.text) for mark in curve.marks if mark.role == "chosen"]
    floor = np.zeros(len(curve.series[0].x))
    for one in curve.series:
        y = np.asarray(one.y)
        if one.kind == "area":  # its text is in the middle of it
            y, floor = floor + y / 2, floor + y
        points += [(one.panel, *point) for point in zip(one.x, y.tolist(), one.tips, strict=False)]
    places = [
        (panel, round(curve.x.share(x), 4), round(1 - curve.y_axis(panel).share(y), 4), text)
        for panel, x, y, text in points
        if x is not None and y is not None
    ]
    return [place for place in places if -0.01 <= place[1] <= 1.01 and -0.01 <= place[2] <= 1.01]


def _write_title(figure: Figure, curve: Curve, size: Size, palette: Palette) -> float:
    """Write title and answer at the top. Returns their height in inches."""
    title, answer = textwrap.wrap(curve.title, 68), textwrap.wrap(curve.answer, 104)
    left, below = 0.1 / size.width, 0.12 + 0.24 * len(title)
    style: dict[str, Any] = {"ha": "left", "va": "top"}
    figure.text(left, 1 - 0.1 / size.height, "\n".join(title), fontsize=14, fontweight="bold", **style)
    figure.text(left, 1 - below / size.height, "\n".join(answer), color=palette.soft, linespacing=1.35, **style)
    return below + 0.19 * len(answer) + 0.1


def _legend_columns(names: list[str], size: Size) -> int:
    """As many columns as fit beside one another."""
    widest = max(map(len, names), default=0) * 0.9 * CHARACTER + 0.45
    return max(1, min(len(names), int((size.width - 0.1) / widest)))


def _make_panels(figure: Figure, curve: Curve, top: float, legend_height: float, palette: Palette) -> list[Axes]:
    """One panel, or two above one another, between a top margin and the legend, both in inches."""
    width, height = figure.get_size_inches()
    axes = [curve.y] if curve.below is None else [curve.y, curve.below]
    left = 0.42 + CHARACTER * max(len(text) for axis in axes for _, text in axis.ticks)
    room = width - left - 0.08 - CHARACTER * max(map(len, curve.x.ticks[-1][1].split())) / 2
    labels, ticks_height, style = _tick_labels(curve.x, room)
    bottom = legend_height + ticks_height + 0.36
    whole = height - top - bottom
    heights = [whole] if len(axes) == 1 else [0.58 * whole, 0.36 * whole]
    panels = []
    for axis, floor, tall in zip(axes, (bottom + whole - heights[0], bottom), heights, strict=False):
        panel = figure.add_axes((left / width, floor / height, room / width, tall / height))
        _set_axis(panel, "x", curve.x, labels if axis is axes[-1] else [""] * len(labels), **style)
        _set_axis(panel, "y", axis, [text for _, text in axis.ticks])
        panel.set_ylabel(axis.text)
        panel.grid(color=palette.line, linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panels.append(panel)
    panels[-1].set_xlabel(curve.x.text)
    figure.align_ylabels(panels)
    return panels


def _tick_labels(axis: Axis, room: float) -> tuple[list[str], float, dict[str, Any]]:
    """The labels along the x axis, their height in inches, and their style: slanted if they would touch."""
    labels = [text for _, text in axis.ticks]
    widest = CHARACTER * max(len(word) for text in labels for word in text.split())
    if widest > 0.95 * room / len(labels):
        slant: dict[str, Any] = {"rotation": 45, "rotation_mode": "anchor", "ha": "right", "va": "center"}
        return labels, 0.12 + 0.75 * CHARACTER * max(map(len, labels)), slant
    lines = [text.replace(" ", "\n") for text in labels]
    return lines, 0.05 + 0.17 * max(text.count("\n") + 1 for text in lines), {}


def _set_axis(panel: Axes, name: str, axis: Axis, labels: list[str], **style: Any) -> None:
    side = panel.xaxis if name == "x" else panel.yaxis
    if axis.log:
        getattr(panel, f"set_{name}scale")("log")
        side.set_ticks([], minor=True)
    side.set_ticks([value for value, _ in axis.ticks], labels=labels, **style)
    getattr(panel, f"set_{name}lim")(axis.low, axis.high)


def _legend_entries(curve: Curve, palette: Palette) -> dict[str, Artist]:
    """What the legend shows, by name: every named series and the plan."""
    entries: dict[str, Artist] = {}
    for one in curve.series:
        color, hatch = palette.colors[one.slot], HATCHES[one.slot]
        if not one.name or one.name in entries:
            continue
        if one.kind == "band":
            entries[one.name] = Patch(facecolor=color, alpha=BAND, linewidth=0)
        elif one.kind == "area":
            entries[one.name] = Patch(facecolor=color, edgecolor=palette.paper, hatch=hatch, linewidth=0)
        else:
            larger = {"markersize": 7, "alpha": 0.8} if one.kind == "dots" else {}  # dots are hardly visible
            entries[one.name] = Line2D([], [], **_line_style(one, palette) | larger)
    for mark in curve.marks:
        if mark.role == "chosen" and mark.y is not None:
            entries[mark.text] = Line2D([], [], **_mark_style(mark, palette))
    return entries


def _line_style(series: Series, palette: Palette) -> dict[str, Any]:
    """The look of a line, of points or of dots, in Matplotlib's words."""
    style: dict[str, Any] = {"color": palette.colors[series.slot], "linestyle": "none", "zorder": 3}
    marker = MARKERS[series.slot % len(MARKERS)]
    if series.kind == "dots":
        return style | {"marker": marker, "markersize": 2.5, "markeredgewidth": 0, "alpha": 0.5}
    if series.kind == "points":
        return style | {"marker": marker, "markersize": 7, "markeredgecolor": palette.paper, "zorder": 4}
    return style | {"linestyle": DASHES[series.slot % len(DASHES)], "linewidth": 2.2}


def _mark_style(mark: Mark, palette: Palette) -> dict[str, Any]:
    """The look of a marked point: a star for the chosen candidate, a ring for a note."""
    style: dict[str, Any] = {"color": palette.ink, "linestyle": "none", "zorder": 5}
    if mark.role == "chosen":
        return style | {"marker": "*", "markersize": 15, "markeredgecolor": palette.paper}
    return style | {"marker": "o", "markersize": 10, "markerfacecolor": "none", "markeredgewidth": 2.0}


def _draw_series(panel: Axes, series: list[Series], palette: Palette) -> None:
    floor: NDArray[np.float64] | None = None
    for one in series:
        color = palette.colors[one.slot]
        if one.kind == "band":
            panel.fill_between(one.x, one.low, one.y, color=color, alpha=BAND, linewidth=0)
        elif one.kind == "area":
            low = np.zeros(len(one.x)) if floor is None else floor
            floor = low + one.y
            style: dict[str, Any] = {"facecolor": color, "edgecolor": palette.paper, "linewidth": 0.4}
            panel.fill_between(one.x, low, floor, hatch=HATCHES[one.slot], **style)
        else:
            panel.plot(one.x, one.y, **_line_style(one, palette))


def _draw_marks(panels: list[Axes], curve: Curve, palette: Palette) -> None:
    """Draw marked points and lines, then put each label where it covers the least."""
    for mark in curve.marks:
        panel, dash = panels[mark.panel], (0, (5, 3)) if mark.role == "budget" else (0, (1, 2))
        if mark.x is None and mark.y is not None:
            panel.axhline(mark.y, color=palette.ink, linewidth=1.4, linestyle=dash)
        elif mark.y is None and mark.x is not None:
            for each in panels:
                each.axvline(mark.x, color=palette.ink, linewidth=1.4, linestyle=dash)
        elif mark.x is not None and mark.y is not None and mark.role != "words":
            panel.plot([mark.x], [mark.y], **_mark_style(mark, palette))
    place_labels(panels, curve.marks, palette.paper)
