"""A curve as a figure of Matplotlib's, for PNG files and print."""

import textwrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, NullLocator

from oomguard.curves.look import HATCHES, LIGHT, across, colour, side_of
from oomguard.curves.value import Axis, Curve, Mark, Series

SIZE_INCHES, DPI = (8.0, 5.4), 160
"""Of a picture: half a page of print."""
TITLE, ANSWER, LEGEND = 70, 104, 105
"""Letters of a line of the title, of the answer, and of the legend."""
EDGE = 0.01
"""Where title and answer begin, as a share of the width."""
DASHES: tuple[Any, ...] = ("-", (0, (6, 3)), (0, (1.5, 2)), (0, (7, 2, 1.5, 2)), (0, (10, 3)))
MARKERS = ("o", "s", "D", "^", "P")
"""As in look.py, in Matplotlib's words."""
HALO = [withStroke(linewidth=3, foreground=LIGHT.paper)]
"""Words stay readable where they cross a line."""


def figure(curve: Curve) -> Figure:
    """The curve as a figure: light, with title and answer above it.

    >>> from oomguard.curves.axes import linear
    >>> x, y = linear("Microbatch", "", [8]), linear("Peak", "GiB", [2])
    >>> line = Series(name="fp32", x=(1.0, 8.0), y=(1.0, 2.0))
    >>> curve = Curve(name="peak", title="It grows", question="Does it?", answer="Yes.", x=x, y=y, series=(line,))
    >>> figure(curve).axes[0].get_ylabel()
    'Peak (GiB)'
    """
    found = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained", facecolor=LIGHT.paper)
    if curve.below is None:
        panels = [found.subplots()]
    else:
        panels = [*found.subplots(2, 1, sharex=True, height_ratios=(3, 2))]
    for panel, axis in zip(panels, (curve.y, curve.below), strict=False):
        assert axis is not None  # there are as many panels as axes
        _scale(panel, "x", curve.x)
        _scale(panel, "y", axis)
        panel.set_ylabel(axis.text)
        _frame(panel)
    panels[-1].set_xlabel(curve.x.text)
    for number, panel in enumerate(panels):
        _series(panel, [one for one in curve.series if one.panel == number])
    for mark in curve.marks:
        _mark(panels[mark.panel], mark, curve)
    _words(found, curve, panels)
    return found


def _scale(panel: Axes, name: str, axis: Axis) -> None:
    side = panel.xaxis if name == "x" else panel.yaxis
    if axis.log:
        getattr(panel, f"set_{name}scale")("log")
        side.set_minor_locator(NullLocator())
    getattr(panel, f"set_{name}lim")(axis.low, axis.high)
    if axis.ticks:
        side.set_major_locator(FixedLocator([where for where, _ in axis.ticks]))
        side.set_ticklabels([word.replace(" ", "\n") for _, word in axis.ticks])


def _frame(panel: Axes) -> None:
    panel.grid(color=LIGHT.grid, linewidth=0.8)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        panel.spines[side].set_color(LIGHT.soft)


def _series(panel: Axes, series: list[Series]) -> None:
    floor: Any = None
    for one in series:
        ink = colour(LIGHT, one.slot)
        if one.kind == "band":
            panel.fill_between(one.x, one.low, one.y, color=ink, alpha=LIGHT.band, linewidth=0, label=one.name or None)
        elif one.kind == "area":
            lower = floor or (0.0,) * len(one.x)
            floor = tuple(low + high for low, high in zip(lower, one.y, strict=True))
            hatch = HATCHES[one.slot % len(HATCHES)] * 2
            panel.fill_between(
                one.x,
                lower,
                floor,
                facecolor=ink,
                edgecolor=LIGHT.paper,
                hatch=hatch,
                linewidth=0.4,
                label=one.name or None,
            )
        elif one.kind == "dots":
            panel.plot(one.x, one.y, ".", color=ink, markersize=4, alpha=0.45, label=one.name or None, zorder=2)
        elif one.kind == "points":
            shape = MARKERS[one.slot % len(MARKERS)]
            panel.plot(
                one.x,
                one.y,
                shape,
                color=ink,
                markersize=7,
                markeredgecolor=LIGHT.paper,
                label=one.name or None,
                zorder=4,
            )
        else:
            dash = DASHES[one.slot % len(DASHES)]
            panel.plot(one.x, one.y, color=ink, linestyle=dash, linewidth=2.2, label=one.name or None, zorder=3)


def _mark(panel: Axes, mark: Mark, curve: Curve) -> None:
    line: dict[str, Any] = {"color": LIGHT.ink, "linewidth": 1.4}
    line["linestyle"] = (0, (5, 3)) if mark.role == "budget" else (0, (1, 2))
    if mark.x is not None and mark.y is not None:
        _point(panel, mark, curve)
    elif mark.y is not None:
        right = mark.side == "right"
        panel.axhline(mark.y, **line)
        where = (0.994 if right else 0.006, mark.y)
        _write(panel, mark.text, where, (0, 3), xycoords=("axes fraction", "data"), ha="right" if right else "left")
    elif mark.x is not None:
        panel.axvline(mark.x, **line)
        where = (mark.x, 1.0)
        _write(panel, mark.text, where, (0, 2), xycoords=("data", "axes fraction"), ha=across(curve, mark.x))


def _point(panel: Axes, mark: Mark, curve: Curve) -> None:
    assert mark.x is not None  # it is a point
    assert mark.y is not None
    if mark.role == "words":
        _write(panel, mark.text, (mark.x, mark.y), (0, 0), ha="center", va="center", fontsize=11, path_effects=[])
        return
    star = {"marker": "*", "markersize": 16, "markeredgecolor": LIGHT.paper}
    ring = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgewidth": 2.0}
    look: dict[str, Any] = star if mark.role == "chosen" else ring
    legend = mark.text if mark.role == "chosen" else None
    panel.plot([mark.x], [mark.y], color=LIGHT.ink, linestyle="none", zorder=5, label=legend, **look)
    if legend is not None:
        return
    left, up = side_of(curve, mark)
    shift, sides = (-11 if left else 11, 7 if up else -7), {"ha": "right" if left else "left"}
    _write(panel, mark.text, (mark.x, mark.y), shift, **sides, va="bottom" if up else "top")


def _write(panel: Axes, text: str, where: tuple[float, float], shift: tuple[int, int], **look: Any) -> None:
    usual: dict[str, Any] = {"va": "bottom", "path_effects": HALO, "zorder": 6, "textcoords": "offset points"}
    panel.annotate(text, where, xytext=shift, **usual | look)


def _columns(names: list[str]) -> int:
    """As many entries of the legend as fit beside one another."""
    return max(1, min(len(names), LEGEND // (6 + max(map(len, names)))))


def _words(found: Figure, curve: Curve, panels: list[Axes]) -> None:
    upright = any(mark.y is None for mark in curve.marks)
    title, answer = textwrap.fill(curve.title, TITLE), textwrap.fill(curve.answer, ANSWER)
    look: dict[str, Any] = {"fontsize": 9.5, "color": LIGHT.soft, "linespacing": 1.35}
    below = panels[0].set_title(answer, loc="left", pad=20 if upright else 8, **look)
    found.suptitle(title, x=EDGE, ha="left", fontsize=14, fontweight="bold", color=LIGHT.ink)
    drawn = [panel.get_legend_handles_labels() for panel in panels]
    handles = [handle for some, _ in drawn for handle in some]
    names = [name for _, some in drawn for name in some]
    once = {name: handles[names.index(name)] for name in names}
    if len(once) > 1 or curve.marks:
        found.legend(
            [*once.values()], [*once], loc="outside lower left", ncols=_columns([*once]), frameon=False, fontsize=9.5
        )
    found.draw_without_rendering()  # the layout, which gives the answer its height; it would move what goes to the edge
    found.set_layout_engine("none")
    edge = found.transFigure.transform((EDGE, 0))
    below.set_x(panels[0].transAxes.inverted().transform(edge)[0])
