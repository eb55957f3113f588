"""A curve as a figure of Plotly's, for pages and notebooks."""

import math
import textwrap
from typing import Any

from plotly import graph_objects as go

from oomguard.curves.look import DARK, DASHES, FONT, HATCHES, LIGHT, MARKERS, Look, across, colour, side_of
from oomguard.curves.value import Axis, Curve, Mark, Series

WIDTH = 68
"""Letters of a line of the title."""
Words = dict[str, Any]
"""An annotation, as Plotly takes it."""
LOWER, UPPER = (0.0, 0.36), (0.46, 1.0)
"""The shares of the height that two panels take."""


def figure(curve: Curve, *, dark: bool = False, titled: bool = True) -> go.Figure:
    """The curve as a figure. A page that says title and answer itself draws it without (`titled=False`).

    >>> from oomguard.curves.axes import linear
    >>> x, y = linear("Microbatch", "", [8]), linear("Peak", "GiB", [2])
    >>> line = Series(name="fp32", x=(1.0, 8.0), y=(1.0, 2.0))
    >>> curve = Curve(name="peak", title="It grows", question="Does it?", answer="Yes.", x=x, y=y, series=(line,))
    >>> figure(curve).data[0].y
    (1.0, 2.0)
    """
    look = DARK if dark else LIGHT
    found = go.Figure(
        data=[trace for one in curve.series for trace in _traces(one, curve, look)],
        layout=_layout(curve, look, titled=titled),
    )
    for mark in curve.marks:
        _mark(found, mark, curve, look)
    return found


def _layout(curve: Curve, look: Look, *, titled: bool) -> dict[str, Any]:
    two = curve.below is not None
    layout: dict[str, Any] = {
        "paper_bgcolor": look.paper,
        "plot_bgcolor": look.paper,
        "font": {"family": FONT, "size": 13, "color": look.ink},
        "hoverlabel": {"bgcolor": look.paper, "bordercolor": look.grid, "font": {"family": FONT, "color": look.ink}},
        "hovermode": "closest",
        "modebar": {"orientation": "v", "bgcolor": "rgba(0,0,0,0)"},  # beside the title, not on it
        "margin": {"l": 62, "r": 20, "t": _title_height(curve) if titled else 26, "b": 56},
        "legend": {
            "orientation": "h",
            "x": 0,
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
            "bgcolor": "rgba(0,0,0,0)",
        },
        "xaxis": _axis(curve.x, look) | {"anchor": "y2" if two else "y"},
        "yaxis": _axis(curve.y, look) | {"domain": UPPER if two else (0, 1), "anchor": "x"},
    }
    if curve.below is not None:
        layout["yaxis2"] = _axis(curve.below, look) | {"domain": LOWER, "anchor": "x"}
    if titled:
        layout["title"] = {"text": _title(curve, look), "x": 0.01, "xanchor": "left", "y": 0.97, "yanchor": "top"}
    return layout


def _title(curve: Curve, look: Look) -> str:
    title = "<br>".join(textwrap.wrap(curve.title, WIDTH))
    answer = "<br>".join(textwrap.wrap(curve.answer, WIDTH + 22))
    return f"<b>{title}</b><br><span style='font-size:12px;color:{look.soft}'>{answer}</span>"


def _title_height(curve: Curve) -> int:
    return 30 + 20 * len(textwrap.wrap(curve.title, WIDTH)) + 16 * len(textwrap.wrap(curve.answer, WIDTH + 22))


def _axis(axis: Axis, look: Look) -> dict[str, Any]:
    ends = [math.log10(axis.low), math.log10(axis.high)] if axis.log else [axis.low, axis.high]
    found: dict[str, Any] = {
        "title": {"text": axis.text, "standoff": 8, "font": {"size": 13}},
        "type": "log" if axis.log else "linear",
        "range": ends,
        "gridcolor": look.grid,
        "linecolor": look.soft,
        "zeroline": False,
        "showline": True,
        "ticks": "outside",
        "tickcolor": look.grid,
    }
    if axis.ticks:
        words = [word.replace(" ", "<br>") for _, word in axis.ticks]
        found |= {
            "tickvals": [where for where, _ in axis.ticks],
            "ticktext": words,
            "tickangle": 0,
            "ticklabeloverflow": "allow",
        }
    return found


def _traces(one: Series, curve: Curve, look: Look) -> list[Any]:
    ink = colour(look, one.slot)
    common: dict[str, Any] = {"x": one.x, "name": one.name, "yaxis": "y2" if one.panel else "y"}
    common |= {"showlegend": _first(one, curve), "legendgroup": one.name}
    if one.words:
        common |= {"text": one.words, "hovertemplate": "%{text}<extra></extra>"}
    if one.kind == "band":
        edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
        lower = go.Scatter(common | edge | {"y": one.low, "showlegend": False})
        return [lower, go.Scatter(common | edge | {"y": one.y, "fill": "tonexty", "fillcolor": _faint(ink, look.band)})]
    if one.kind == "area":
        filled = {"stackgroup": "all", "line": {"width": 0.8, "color": ink}, "fillcolor": ink, "mode": "lines"}
        pattern = {"shape": HATCHES[one.slot % len(HATCHES)], "fgcolor": look.paper, "fgopacity": 0.35, "size": 6}
        return [go.Scatter(common | filled | {"y": one.y, "fillpattern": pattern})]
    marker = {
        "symbol": MARKERS[one.slot % len(MARKERS)],
        "color": ink,
        "size": 9,
        "line": {"color": look.paper, "width": 1},
    }
    if one.kind == "dots":
        dot = {"symbol": MARKERS[one.slot % len(MARKERS)], "color": ink, "size": 4, "opacity": 0.45}
        dots = go.Scatter(common | {"y": one.y, "mode": "markers", "marker": dot, "showlegend": False})
        larger = {"x": [None], "y": [None], "mode": "markers", "marker": dot | {"size": 9, "opacity": 0.8}}
        return [dots, go.Scatter(common | larger)]  # by which the legend shows them: dots are hardly seen there
    if one.kind == "points":
        return [go.Scatter(common | {"y": one.y, "mode": "markers", "marker": marker})]
    line = {"color": ink, "width": 2.4, "dash": DASHES[one.slot % len(DASHES)]}
    return [go.Scatter(common | {"y": one.y, "mode": "lines", "line": line})]


def _mark(found: go.Figure, mark: Mark, curve: Curve, look: Look) -> None:
    line = {"color": look.ink, "width": 1.6, "dash": "dash" if mark.role == "budget" else "dot"}
    panel: Words = {"yref": "y2" if mark.panel else "y"}
    axis = curve.below if mark.panel and curve.below is not None else curve.y
    words: Words = {"text": mark.text, "showarrow": False, "bgcolor": _faint(look.paper, 0.7), "borderpad": 1}
    if mark.x is not None and mark.y is not None:
        words |= panel | {"x": _place(curve.x, mark.x), "y": _place(axis, mark.y)}
        if mark.role == "words":
            words |= {"bgcolor": "rgba(0,0,0,0)", "font": {"size": 14}}
        else:
            found.add_trace(_point(mark, look))
            words |= _beside(curve, mark)
            words["text"] = "" if mark.role == "chosen" else mark.text  # that is in the legend
    elif mark.y is not None:
        found.add_shape(type="line", xref="x domain", x0=0, x1=1, y0=mark.y, y1=mark.y, line=line, **panel)
        end = {"x": 1, "xanchor": "right"} if mark.side == "right" else {"x": 0, "xanchor": "left"}
        words |= panel | end | {"xref": "x domain", "y": _place(axis, mark.y), "yanchor": "bottom"}
    elif mark.x is not None:
        found.add_shape(type="line", xref="x", yref="paper", x0=mark.x, x1=mark.x, y0=0, y1=1, line=line)
        words |= {"x": _place(curve.x, mark.x), "xanchor": across(curve, mark.x)}
        words |= {"y": 1, "yref": "paper", "yanchor": "bottom"}
    if words["text"]:
        found.add_annotation(words)


def _beside(curve: Curve, mark: Mark) -> Words:
    left, up = side_of(curve, mark)
    return {
        "xanchor": "right" if left else "left",
        "yanchor": "bottom" if up else "top",
        "xshift": -9 if left else 9,
        "yshift": 5 if up else -5,
    }


def _point(mark: Mark, look: Look) -> go.Scatter:
    star = {"symbol": "star", "size": 15, "color": look.ink, "line": {"color": look.paper, "width": 1.2}}
    ring = {"symbol": "circle-open", "size": 13, "color": look.ink, "line": {"width": 2.2}}
    return go.Scatter(
        x=[mark.x],
        y=[mark.y],
        name=mark.text,
        mode="markers",
        marker=star if mark.role == "chosen" else ring,
        yaxis="y2" if mark.panel else "y",
        hovertemplate=f"{mark.text}<extra></extra>" if mark.text else None,
        hoverinfo=None if mark.text else "skip",
        showlegend=mark.role == "chosen",
    )


def _place(axis: Axis, value: float) -> float:
    """Where an annotation goes: on logarithmic axes, Plotly counts in powers of ten."""
    return math.log10(value) if axis.log else value


def _first(one: Series, curve: Curve) -> bool:
    """Whether it is the first of its name: what comes again, in another panel or colour, is not in the legend again."""
    return bool(one.name) and one is next(other for other in curve.series if other.name == one.name)


def _faint(ink: str, opacity: float) -> str:
    red, green, blue = (int(ink[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
