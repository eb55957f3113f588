"""Draws a curve with Matplotlib: as a figure, as a PNG file, and as an SVG that follows the theme of its page."""

import io
import re
import textwrap
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis as Side
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.ticker import Locator, LogLocator, MaxNLocator
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from oomguard._report.curve import Axis, Curve, Mark, Series

DPI = 160  # dots per inch of a PNG file
LARGE_MARKER = 7  # points across: those of measured candidates, of notes and of the plan
POINTS = 72  # points per inch: the unit of an SVG
CHARACTER = 0.077  # Width of a character in inches. Above the average, so that estimated widths suffice.
MOST_TICKS = 9  # Labels along one logarithmic axis, at most. More would touch on a phone.
DASHES: tuple[Any, ...] = ("-", (0, (6, 3)), (0, (1.5, 2)), (0, (7, 2, 1.5, 2)), (0, (10, 3)))
MARKERS = ("o", "s", "D", "^", "P")
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "||", "++", "")
"""Dashes, markers and hatches by slot, so that colour is never the only difference between two series."""
Place = tuple[tuple[float, float], tuple[str, str], tuple[float, float], str, str]
"""Where a label is: its anchor, the coordinates of the anchor, its offset in points, and its two alignments."""
FORBIDDEN = 1000.0
"""Cost of covering another label or leaving the picture. Each pixel of a line that is covered costs about a quarter."""


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


FILE = Size(width=8.0, height=5.4, titled=True)  # a PNG file: half a printed page
WIDE = Size(width=8.0, height=4.6)  # a picture on a page
NARROW = Size(width=3.9, height=4.6)  # a picture on a phone


def draw(curve: Curve, *, palette: Palette = LIGHT, size: Size = FILE, dpi: int = DPI) -> Figure:
    with rc_context(_settings(palette)):
        figure = Figure(figsize=(size.width, size.height), dpi=dpi, layout="constrained")
        top = _write_title(figure, curve, size, palette) if size.titled else 0.04
        top += 0.18 if any(mark.y is None for mark in curve.marks) else 0  # labels above the panel
        panels = _make_panels(figure, curve, size)
        legend = _draw_series(panels, curve, palette) | _draw_marks(panels, curve, palette)
        _write_legend(figure, legend, size)
        layout: Any = figure.get_layout_engine()
        layout.set(rect=(0, 0, 1, 1 - top / size.height), w_pad=0.1, h_pad=0.05)
        layout.execute(figure)
        figure.set_layout_engine("none")  # what follows stays inside the panels
        _place_labels(panels, curve.marks, palette.paper)
    return figure


def _settings(palette: Palette) -> Any:
    return {
        "font.family": ["DejaVu Sans"],  # comes with Matplotlib, and is so wide that other fonts fit its place
        "font.size": 9.5,
        "text.parse_math": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), palette.ink),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), palette.soft),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), palette.paper),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": palette.line,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "legend.borderpad": 0,
        "legend.handletextpad": 0.5,
        "legend.columnspacing": 1.3,
        "legend.labelspacing": 0.4,
    }


def to_png(curve: Curve) -> bytes:
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
    shorter = partial(re.sub, r"\d+\.\d{3,}", lambda number: f"{round(float(number[0]), 2):g}")
    svg = re.sub(r' (?:d|x|y)="[^"]*"', lambda match: shorter(match[0]), svg)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, variable)
    return svg.strip()


def hover_points(curve: Curve) -> list[tuple[int, float, float, str]]:
    """The panel, the place (shares from the left and the top) and the text of all points that have no label."""
    points = [(mark.panel, mark.x, mark.y, mark.text) for mark in curve.marks if mark.role == "chosen"]
    floor = np.zeros(len(curve.series[0].x))
    for series in curve.series:
        y = np.asarray(series.y)
        if series.kind == "area":  # its text is in the middle of it
            y, floor = floor + y / 2, floor + y
        points += [(series.panel, *point) for point in zip(series.x, y.tolist(), series.tips, strict=False)]
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


def _make_panels(figure: Figure, curve: Curve, size: Size) -> list[Axes]:
    """One panel, or two above one another, with their axes."""
    axes = [curve.y] if curve.below is None else [curve.y, curve.below]
    grid = figure.subplots(len(axes), squeeze=False, sharex=True, height_ratios=(58, 36)[: len(axes)])
    panels: list[Axes] = [*grid[:, 0]]
    for panel, axis in zip(panels, axes, strict=True):
        panel.set(ylabel=axis.text, yscale="log" if axis.base else "linear", ylim=(axis.low, axis.high))
        _set_ticks(panel.yaxis, axis)
    panels[-1].set(xlabel=curve.x.text, xscale="log" if curve.x.base else "linear", xlim=(curve.x.low, curve.x.high))
    _set_ticks(panels[-1].xaxis, curve.x)
    labels = panels[-1].get_xticklabels()
    widest = CHARACTER * max(len(word) for label in labels for word in label.get_text().split())
    for label in labels if widest * len(labels) > size.width - 1 else ():  # straight ones would touch
        label.set(rotation=45, rotation_mode="anchor", ha="right", va="center")
    figure.align_ylabels(panels)
    return panels


def _set_ticks(side: Side, axis: Axis) -> None:
    """Label an axis: with its names, at powers (of ten, also at 2 and 5 times powers), or at round numbers."""
    few = axis.base == 10 and axis.high < 1000 * axis.low
    locator: Locator = MaxNLocator(6, steps=(1, 2, 2.5, 5, 10))
    if axis.base:
        locator = LogLocator(axis.base, (1, 2, 5) if few else (1,), numticks=MOST_TICKS)
    values = [value for value in locator.tick_values(axis.low, axis.high) if axis.low <= value <= axis.high]
    labels = [short(value) if axis.base == 10 else f"{value:,.6g}" for value in values]
    if axis.names:
        values, labels = [*range(len(axis.names))], [name.replace(" ", "\n") for name in axis.names]
    side.set_ticks([], minor=True)
    side.set_ticks(values, labels=labels)


def short(value: float) -> str:
    unit, letter = next((pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= pair[0]), (1, ""))
    return f"{value / unit:.3g}{letter}"


def _draw_series(panels: list[Axes], curve: Curve, palette: Palette) -> dict[str, Artist]:
    """Draw all series. Returns what the legend shows: one of each name."""
    legend: dict[str, Artist] = {}
    floor = np.zeros(len(curve.series[0].x))
    for series in curve.series:
        panel, color = panels[series.panel], palette.colors[series.slot]
        artist: Artist
        if series.kind == "band":
            artist = panel.fill_between(series.x, series.low, series.y, color=color, alpha=0.2, linewidth=0)
        elif series.kind == "area":
            style: dict[str, Any] = {"facecolor": color, "edgecolor": palette.paper, "linewidth": 0.4}
            artist = panel.fill_between(series.x, floor, floor + series.y, hatch=HATCHES[series.slot], **style)
            floor = floor + series.y
        else:
            (artist,) = panel.plot(series.x, series.y, **_line_style(series, palette))
        legend.setdefault(series.name, artist)
    legend.pop("", None)
    return legend


def _line_style(series: Series, palette: Palette) -> dict[str, Any]:
    style: dict[str, Any] = {"color": palette.colors[series.slot], "linestyle": "none", "zorder": 3}
    marker = MARKERS[series.slot % len(MARKERS)]
    if series.kind == "dots":
        return style | {"marker": marker, "markersize": 2.5, "markeredgewidth": 0, "alpha": 0.5}
    if series.kind == "points":
        return style | {"marker": marker, "markersize": 7, "markeredgecolor": palette.paper, "zorder": 4}
    return style | {"linestyle": DASHES[series.slot % len(DASHES)], "linewidth": 2.2}


def _draw_marks(panels: list[Axes], curve: Curve, palette: Palette) -> dict[str, Artist]:
    """Draw marked points and lines without their labels. Returns the chosen candidate, which the legend names."""
    legend: dict[str, Artist] = {}
    for mark in curve.marks:
        dashes = (5, 3) if mark.role == "budget" else (1, 2)
        line: dict[str, Any] = {"color": palette.ink, "linewidth": 1.4, "linestyle": (0, dashes)}
        if mark.x is None and mark.y is not None:
            panels[mark.panel].axhline(mark.y, **line)
        elif mark.y is None and mark.x is not None:
            for panel in panels:
                panel.axvline(mark.x, **line)
        elif mark.x is not None and mark.y is not None and mark.role not in ("words", "label"):
            (artist,) = panels[mark.panel].plot([mark.x], [mark.y], **_mark_style(mark, palette))
            legend |= {mark.text: artist} if mark.role == "chosen" else {}
    return legend


def _mark_style(mark: Mark, palette: Palette) -> dict[str, Any]:
    """The look of a marked point: a star for the chosen candidate, a ring for a note."""
    style: dict[str, Any] = {"color": palette.ink, "linestyle": "none", "zorder": 5}
    if mark.role == "chosen":
        return style | {"marker": "*", "markersize": 15, "markeredgecolor": palette.paper}
    return style | {"marker": "o", "markersize": 10, "markerfacecolor": "none", "markeredgewidth": 2.0}


def _write_legend(figure: Figure, entries: dict[str, Artist], size: Size) -> None:
    """Write the legend below the panels, in as many columns as fit beside one another."""
    widest = max(map(len, entries), default=0) * 0.9 * CHARACTER + 0.45
    columns = max(1, min(len(entries), int((size.width - 0.1) / widest)))
    legend = figure.legend([*entries.values()], [*entries], loc="outside lower left", ncols=columns)
    for handle in legend.legend_handles:
        if isinstance(handle, Line2D) and handle.get_markersize() < 6 and handle.get_marker() != "None":
            handle.set(markersize=7, alpha=0.8)  # dots are hardly visible


def _place_labels(panels: list[Axes], marks: tuple[Mark, ...], paper: str) -> None:
    """Write the labels of all marks, names of areas first, then from the top. The legend names a chosen point."""
    labelled = [mark for mark in marks if mark.text and not (mark.role == "chosen" and mark.y is not None)]
    lines = [_line_pixels(line) for panel in panels for line in panel.lines]
    covered = np.concatenate([np.zeros((0, 2)), *lines])
    taken: list[Bbox] = []
    for mark in sorted(labelled, key=lambda mark: (mark.role != "words", -(mark.y or 0))):
        panel = panels[mark.panel]
        style: dict[str, Any] = {"textcoords": "offset points", "zorder": 6, "gid": f"label_{len(taken)}"}
        if mark.role != "words":
            style["bbox"] = {"facecolor": paper, "alpha": 0.9, "linewidth": 0, "pad": 1}
        label = panel.annotate(mark.text, (0, 0), (0, 0), **style)
        costs = [(_cost(_move(label, place), panel, mark, covered, taken), place) for place in _places(mark)]
        taken.append(_move(label, min(costs, key=lambda pair: pair[0])[1]))


def _line_pixels(line: Line2D) -> NDArray[np.float64]:
    """Pixels that a line or its markers cover, four pixels apart; of a large marker, which no label may hide, more."""
    corners = np.asarray(line.get_transform().transform(line.get_xydata()), dtype=float)
    if line.get_linestyle() == "None" and line.get_markersize() >= LARGE_MARKER:
        reach = np.linspace(-0.4, 0.4, 9) * line.get_markersize() * line.figure.dpi / POINTS
        around = np.stack(np.meshgrid(reach, reach), axis=-1).reshape(-1, 2)
        return np.asarray((corners[:, None] + around).reshape(-1, 2))
    if line.get_linestyle() == "None" or len(corners) < 2:
        return corners
    along = np.r_[0, np.cumsum(np.hypot(*np.diff(corners, axis=0).T))]
    places = np.linspace(0, along[-1], min(2000, int(along[-1] / 4) + 2))
    return np.column_stack([np.interp(places, along, axis) for axis in corners.T])


def _places(mark: Mark) -> list[Place]:
    """Where the label of a mark may be, the best place first."""
    x, y = mark.x, mark.y
    if y is None:  # a vertical line: above the panel
        assert x is not None
        return [((x, 1.0), ("data", "axes fraction"), (0, 2), side, "bottom") for side in ("center", "left", "right")]
    if x is None:  # a horizontal line: above or below it, at either end or in the middle
        ends, levels = ((0.006, "left"), (0.994, "right"), (0.5, "center")), ((3, "bottom"), (-4, "top"))
        return [((at, y), ("axes fraction", "data"), (0, up), side, level) for up, level in levels for at, side in ends]
    if mark.role == "words":
        return [((x, y), ("data", "data"), (0, 0), "center", "center")]
    offsets = ((9, 6), (-9, 6), (9, -6), (-9, -6), (0, 10), (0, -10))
    sides = {9: "left", -9: "right", 0: "center"}
    return [((x, y), ("data", "data"), (dx, dy), sides[dx], "bottom" if dy > 0 else "top") for dx, dy in offsets]


def _move(label: Annotation, place: Place) -> Bbox:
    """Move a label to a place. Returns the box that it takes there, in pixels."""
    label.xy, label.xycoords, offset, across, up = place
    label.set(position=offset, ha=across, va=up)
    return label.get_window_extent().padded(1)


def _cost(box: Bbox, panel: Axes, mark: Mark, covered: NDArray[np.float64], taken: list[Bbox]) -> float:
    """The cost of a label at a place: covered lines, other labels, and how far it leaves its panel."""
    picture, frame = panel.figure.bbox, panel.get_window_extent()
    outside = box.x0 < picture.x0 or box.x1 > picture.x1
    if mark.y is not None:
        outside |= box.y0 < frame.y0 or box.y1 > frame.y1
    beyond = max(frame.x0 - box.x0, box.x1 - frame.x1, 0)
    lines = np.all((covered > box.min) & (covered < box.max), axis=1).sum()
    return float(lines + beyond + FORBIDDEN * (outside + sum(box.overlaps(other) for other in taken)))
