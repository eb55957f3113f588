"""Puts the labels of a picture where they cover the least: neither one another nor the lines, if there is room."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from oomguard._report.curve import Mark

Place = tuple[tuple[float, float], tuple[str, str], tuple[float, float], str, str]
"""Where a label is: its anchor, the coordinates of the anchor, its offset in points, and its two alignments."""
FORBIDDEN = 1000.0
"""Cost of covering another label or leaving the picture. Each pixel of a line that is covered costs about a quarter."""


def place_labels(panels: list[Axes], marks: Sequence[Mark], paper: str) -> None:
    """Write the labels of all marks, names of areas first, then from the top. The legend names a chosen point."""
    labelled = [mark for mark in marks if mark.text and not (mark.role == "chosen" and mark.y is not None)]
    lines = [_line_pixels(line) for panel in panels for line in panel.lines]
    covered = np.concatenate([np.zeros((0, 2)), *lines])
    taken: list[Bbox] = []
    for mark in sorted(labelled, key=lambda mark: (mark.role != "words", -(mark.y or 0))):
        panel = panels[mark.panel]
        style: dict[str, Any] = {"textcoords": "offset points", "zorder": 6, "gid": f"label_{len(taken)}"}
        if mark.role != "words":
            style["bbox"] = {"facecolor": paper, "alpha": 0.7, "linewidth": 0, "pad": 1}
        label = panel.annotate(mark.text, (0, 0), (0, 0), **style)
        costs = [(_cost(_move(label, place), panel, mark, covered, taken), place) for place in _places(mark)]
        taken.append(_move(label, min(costs, key=lambda pair: pair[0])[1]))


def _line_pixels(line: Line2D) -> NDArray[np.float64]:
    """Pixels that a line or its markers cover, four pixels apart."""
    corners = np.asarray(line.get_transform().transform(line.get_xydata()), dtype=float)
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
