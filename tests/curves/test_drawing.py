"""Both libraries draw the same numbers, and what is written can be read back."""

import base64
import io
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image
from tradeoffs.subjects import planned, subject

from oomguard.curves import draw_matplotlib, draw_plotly
from oomguard.curves.look import DARK, LIGHT
from oomguard.curves.make import MAKERS
from oomguard.curves.page import page
from oomguard.curves.save import to_png
from oomguard.curves.value import Curve
from oomguard.errors import MisuseError

each_curve = pytest.mark.parametrize("name", MAKERS)
ABOUT: dict[str, Any] = {"spec": subject, "plan": planned}
each_about = pytest.mark.parametrize("about", ABOUT)


@cache
def made(name: str, about: str = "spec") -> Curve:
    return MAKERS[name](ABOUT[about]())


def plotly_numbers(curve: Curve) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """What each trace that is a series has, bands as their upper edge, without those that only the legend shows."""
    drawn = [one for one in draw_plotly.figure(curve).data if one.x != (None,)]
    traces = [one for one in drawn if not (one.line.width == 0 and one.fill is None)]
    return [(tuple(map(float, one.x)), tuple(map(float, one.y))) for one in traces[: len(curve.series)]]


def matplotlib_numbers(curve: Curve) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """The same of Matplotlib's artists, areas as what they add to those below."""
    found = draw_matplotlib.figure(curve)
    artists = {number: [*panel.lines] for number, panel in enumerate(found.axes)}
    fills = {number: [*panel.collections] for number, panel in enumerate(found.axes)}
    numbers = []
    for one in curve.series:
        if one.kind in ("band", "area"):
            corners = np.asarray(fills[one.panel].pop(0).get_paths()[0].vertices)
            lower = corners[1 : len(one.x) + 1, 1]
            upper = corners[len(one.x) + 2 : -1, 1][::-1]
            numbers.append((one.x, tuple(upper if one.kind == "band" else upper - lower)))
        else:
            drawn = artists[one.panel].pop(0)
            numbers.append((tuple(np.asarray(drawn.get_xdata())), tuple(np.asarray(drawn.get_ydata()))))
    return numbers


@each_curve
@each_about
def test_both_drawings_hold_the_same_numbers(name: str, about: str) -> None:
    curve = made(name, about)
    ours = [(one.x, one.y) for one in curve.series]
    for drawn in (plotly_numbers(curve), matplotlib_numbers(curve)):
        assert len(drawn) == len(ours)
        for (x, y), (own_x, own_y) in zip(drawn, ours, strict=True):
            assert x == pytest.approx(own_x)
            assert y == pytest.approx(own_y)


@each_curve
def test_both_drawings_have_the_same_axes_and_the_same_budget(name: str) -> None:
    curve = made(name)
    plotly, panel = draw_plotly.figure(curve), draw_matplotlib.figure(curve).axes
    assert panel[-1].get_xlabel() == plotly.layout.xaxis.title.text == curve.x.text
    assert panel[0].get_ylabel() == plotly.layout.yaxis.title.text == curve.y.text
    assert (plotly.layout.yaxis.type == "log") == curve.y.log == (panel[0].get_yscale() == "log")
    assert panel[0].get_ylim() == pytest.approx((curve.y.low, curve.y.high))
    lines = [(np.asarray(one.get_xdata()), np.asarray(one.get_ydata())) for one in panel[0].lines]
    drawn = {round(float(y[0]), 9) for x, y in lines if x.tolist() == [0, 1]}
    levels = {round(one.y, 9) for one in curve.marks if one.x is None and one.y is not None}
    assert levels <= drawn
    assert levels == {round(one.y0, 9) for one in plotly.layout.shapes if one.xref == "x domain"}


@each_curve
def test_words_of_both_drawings_are_those_of_the_curve(name: str) -> None:
    curve = made(name, "plan")
    found = draw_matplotlib.figure(curve)
    assert found.get_suptitle().replace("\n", " ") == curve.title
    assert curve.title in draw_plotly.figure(curve).layout.title.text.replace("<br>", " ")
    assert draw_plotly.figure(curve, titled=False).layout.title.text is None


@each_curve
def test_dark_and_light_differ_in_colours_alone(name: str) -> None:
    curve = made(name)
    light, dark = (json.loads(draw_plotly.figure(curve, dark=one).to_json()) for one in (False, True))
    assert light["layout"]["paper_bgcolor"] == LIGHT.paper
    assert dark["layout"]["paper_bgcolor"] == DARK.paper
    for one, other in zip(light["data"], dark["data"], strict=True):
        assert (one["x"], one["y"]) == (other["x"], other["y"])


@each_curve
@each_about
def test_the_title_of_a_picture_begins_where_its_answer_does(name: str, about: str) -> None:
    found = draw_matplotlib.figure(made(name, about))
    found.draw_without_rendering()
    words = [
        one for one in found.findobj(Text) if one.get_text() in (found.get_suptitle(), found.axes[0].get_title("left"))
    ]
    boxes = [one.get_window_extent() for one in words]
    assert len(boxes) == 2
    assert boxes[0].x0 == pytest.approx(boxes[1].x0, abs=3)  # letters of two sizes
    assert max(box.x1 for box in boxes) <= found.bbox.width


def test_dots_are_larger_in_the_legend() -> None:
    traces = draw_plotly.figure(made("front")).data
    (faint,) = [one for one in traces if one.name == "fits" and not one.showlegend]
    (shown,) = [one for one in traces if one.name == "fits" and one.showlegend]
    assert shown.marker.size >= 2 * faint.marker.size
    assert (shown.marker.color, shown.legendgroup) == (faint.marker.color, faint.legendgroup)


def test_a_mark_without_words_says_nothing() -> None:
    bare = [one for one in draw_plotly.figure(made("segments")).data if one.name == ""]
    assert [(one.hoverinfo, one.hovertemplate) for one in bare] == [("skip", None)]


def test_lines_differ_in_more_than_colour() -> None:
    lines = [one for one in draw_plotly.figure(made("longest")).data if one.mode == "lines"]
    assert len({one.line.dash for one in lines}) == len(lines)
    grey = [_grey(one) for one in LIGHT.colours[:3]]
    assert min(abs(one - other) for one in grey for other in grey if one is not other) > 0


def _grey(ink: str) -> float:
    red, green, blue = (int(ink[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


@each_curve
def test_a_picture_has_the_size_of_half_a_page(name: str) -> None:
    picture = Image.open(io.BytesIO(to_png(made(name))))
    assert (picture.format, picture.size) == ("PNG", (1280, 864))


def test_a_curve_saves_itself(tmp_path: Path) -> None:
    curve = made("front")
    assert Image.open(io.BytesIO(curve.save(str(tmp_path / "new" / "front.png")).read_bytes())).format == "PNG"
    assert curve.title in curve.save(str(tmp_path / "front.html")).read_text()
    with pytest.raises(MisuseError, match=r"\.png or \.html"):
        curve.save(str(tmp_path / "front.svg"))
    with pytest.raises(MisuseError, match="cannot be written"):
        curve.save(str(tmp_path / "front.html" / "front.png"))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["front.html", "new"]


def test_a_notebook_gets_plotlys_figure_and_a_picture_for_others() -> None:
    bundle = made("segments")._repr_mimebundle_()
    assert {*bundle["application/vnd.plotly.v1+json"]} >= {"data", "layout"}
    assert Image.open(io.BytesIO(base64.b64decode(bundle["image/png"]))).format == "PNG"
    assert bundle["text/plain"].startswith(made("segments").title)


def test_a_page_is_complete_in_itself() -> None:
    text = page([made("front"), made("terms")], "Trade-offs of <lstm>")
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "&lt;lstm&gt;" in outside
    assert not re.search(r"(?:src|href|url|@import)\s*[=(]", outside)
    assert "https:" not in outside
    assert not re.search(r"<script[^>]+src", text)
    assert re.findall(r'data-curve="(\w+)"', text) == ["front", "terms"]
    own = re.findall(r'<script type="application/json" id="drawings">(.*?)</script>', text, flags=re.DOTALL)
    drawn = json.loads(own[0])["curves"]
    assert [len(one) for one in drawn] == [1, 1]
    assert {*drawn[0][0]} == {"words", "light", "dark"}
    assert "http" not in own[0]


def test_what_a_curve_says_cannot_end_the_script() -> None:
    curve = made("front")
    mean = msgspec.structs.replace(curve, series=(msgspec.structs.replace(curve.series[0], name="</script><b>"),))
    assert "</script><b>" not in page([mean], "x")
