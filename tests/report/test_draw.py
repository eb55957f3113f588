"""Pictures hold the numbers and the words of their curves, and what is written can be read back."""

import base64
import io
import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox
from PIL import Image
from report.subjects import EVERY, planned, subject

from oomguard._core.errors import MisuseError
from oomguard._plan.store import load_spec_plan
from oomguard._report.curve import Axis, Curve, Mark, Series, linear_axis, log_axis
from oomguard._report.curves import MAKERS
from oomguard._report.draw import DARK, FILE, LIGHT, NARROW, POINTS, WIDE, Size, draw, hover_points, to_png, to_svg
from oomguard._report.page import curves_page
from oomguard._report.subject import for_charts, subject_of

PICTURED = Path(__file__).parents[2] / "docs" / "screens" / "plan.json"
each_curve = pytest.mark.parametrize("name", MAKERS)
ABOUT: dict[str, Any] = {"spec": subject, "plan": planned}
each_about = pytest.mark.parametrize("about", ABOUT)


@cache
def made(name: str, about: str = "spec") -> Curve:
    return MAKERS[name](ABOUT[about]() if about in ABOUT else EVERY[about]())


def drawn_numbers(curve: Curve, figure: Figure) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """The numbers that Matplotlib draws for each series: of bands the upper edge, of areas the thickness."""
    artists = {number: [*panel.lines] for number, panel in enumerate(figure.axes)}
    fills = {number: [*panel.collections] for number, panel in enumerate(figure.axes)}
    numbers = []
    for series in curve.series:
        if series.kind in ("band", "area"):
            corners = np.asarray(fills[series.panel].pop(0).get_paths()[0].vertices)
            lower = corners[1 : len(series.x) + 1, 1]
            upper = corners[len(series.x) + 2 : -1, 1][::-1]
            numbers.append((series.x, tuple(upper if series.kind == "band" else upper - lower)))
        else:
            drawn = artists[series.panel].pop(0)
            numbers.append((tuple(np.asarray(drawn.get_xdata())), tuple(np.asarray(drawn.get_ydata()))))
    return numbers


@each_curve
@each_about
def test_a_picture_holds_the_numbers_of_its_curve(name: str, about: str) -> None:
    curve = made(name, about)
    drawn = drawn_numbers(curve, draw(curve))
    assert len(drawn) == len(curve.series)
    for (x, y), series in zip(drawn, curve.series, strict=True):
        assert x == pytest.approx(series.x)
        assert y == pytest.approx(series.y)


@pytest.mark.parametrize(
    ("axis", "labels"),
    [
        (linear_axis("Throughput", "tokens/s", [7000]), ["0", "2,000", "4,000", "6,000"]),
        (log_axis("Microbatch", "", [1, 32], base=2), ["1", "2", "4", "8", "16", "32"]),
        (log_axis("Sequence length", "steps", [1000, 20_000]), ["1k", "2k", "5k", "10k", "20k"]),
        (log_axis("Sequence length", "steps", [8, 9e6]), ["10", "100", "1k", "10k", "100k", "1M"]),
        (log_axis("Peak", "GiB", [0.33, 0.46]), ["0.325", "0.35", "0.375", "0.4", "0.425", "0.45", "0.475"]),
    ],
    ids=lambda value: f"{value.low:.3g} to {value.high:.3g}" if isinstance(value, Axis) else "",
)
def test_an_axis_has_labels_at_round_numbers(axis: Axis, labels: list[str]) -> None:
    panel = draw(msgspec.structs.replace(made("front"), y=axis, marks=())).axes[0]
    assert [text.get_text() for text in panel.get_yticklabels()] == labels


@each_curve
def test_a_picture_has_the_axes_and_the_levels_of_its_curve(name: str) -> None:
    curve = made(name)
    panels = draw(curve).axes
    assert panels[-1].get_xlabel() == curve.x.text
    assert len(panels) == (1 if curve.below is None else 2)
    for number, panel in enumerate(panels):
        axis = curve.y_axis(number)
        assert panel.get_ylabel() == axis.text
        assert (panel.get_yscale() == "log") == bool(axis.base)
        assert panel.get_ylim() == pytest.approx((axis.low, axis.high))
        assert panel.get_xlim() == pytest.approx((curve.x.low, curve.x.high))
        assert len(panel.get_yticklabels()) >= 2
    lines = [(np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in panels[0].lines]
    drawn = {round(float(y[0]), 9) for x, y in lines if x.tolist() == [0, 1]}
    assert drawn == {round(mark.y, 9) for mark in curve.marks if mark.x is None and mark.y is not None}


@each_curve
@each_about
def test_title_and_answer_of_a_file_begin_at_the_same_edge(name: str, about: str) -> None:
    curve = made(name, about)
    figure = draw(curve)
    title, answer = figure.texts
    assert title.get_text().replace("\n", " ") == curve.title
    assert answer.get_text().replace("\n", " ") == curve.answer
    boxes = [each.get_window_extent() for each in (title, answer)]
    assert boxes[0].x0 == pytest.approx(boxes[1].x0, abs=3)  # letters of two sizes
    assert boxes[0].y0 > boxes[1].y1 - 3
    assert boxes[1].y0 > figure.axes[0].get_window_extent().y1
    assert draw(curve, size=WIDE).texts == []


def visible_texts(figure: Figure) -> list[Text]:
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text() and text.get_visible()]
    hidden = {id(label) for panel in figure.axes[:-1] for label in panel.get_xticklabels(which="both")}
    return [text for text in texts if id(text) not in hidden]


def touching(figure: Figure) -> list[tuple[str, str]]:
    """Labels that run into other words, and labels of the x axis that run into the next one."""
    words = visible_texts(figure)
    labels = [text for panel in figure.axes for text in panel.texts]
    assert all(isinstance(text, Annotation) for text in labels)
    straight = [text for text in figure.axes[-1].get_xticklabels() if text.get_rotation() == 0]
    pairs = [(label, other) for label in labels for other in words if other is not label] + [*pairwise(straight)]
    boxes = {id(text): text.get_window_extent().padded(-1) for text in words}
    return [
        (each.get_text(), other.get_text())
        for each, other in pairs
        if each.get_text() and other.get_text() and boxes[id(each)].overlaps(boxes[id(other)])
    ]


PICTURES = [(about, NARROW) for about in EVERY] + [(about, FILE) for about in ("cpu", "planned", "tokens", "one step")]


@pytest.mark.parametrize(
    ("about", "size"), PICTURES, ids=lambda value: value if isinstance(value, str) else f"{value.width}"
)
@each_curve
def test_no_word_is_cut_off_or_runs_into_another(name: str, about: str, size: Size) -> None:
    figure = draw(made(name, about), size=size)
    boxes = {text.get_text(): text.get_window_extent() for text in visible_texts(figure) if text.get_rotation() != 45}
    edge = figure.bbox
    assert [text for text, box in boxes.items() if box.x0 < -1 or box.x1 > edge.x1 + 1 or box.y0 < -1] == []
    assert touching(figure) == []


@each_curve
def test_dark_and_light_differ_in_colours_alone(name: str) -> None:
    curve = made(name)
    light, dark = (draw(curve, palette=palette) for palette in (LIGHT, DARK))
    assert to_hex(light.get_facecolor()) == LIGHT.paper
    assert to_hex(dark.get_facecolor()) == DARK.paper
    narrow = draw(curve, size=NARROW)
    assert drawn_numbers(curve, light) == drawn_numbers(curve, dark) == drawn_numbers(curve, narrow)
    assert to_hex(curve.figure(dark=True).get_facecolor()) == DARK.paper


def legend_of(figure: Figure) -> dict[str, Any]:
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    return dict(zip(names, legend.legend_handles, strict=True))


def test_dots_are_larger_in_the_legend() -> None:
    figure = draw(made("front"))
    shown = legend_of(figure)["fits"]
    faint = next(line for line in figure.axes[0].lines if line.get_marker() == shown.get_marker())
    assert shown.get_markersize() >= 2 * faint.get_markersize()
    assert shown.get_color() == faint.get_color()


@each_curve
@each_about
def test_the_legend_names_every_series_once_and_the_plan(name: str, about: str) -> None:
    curve = made(name, about)
    chosen = [mark.text for mark in curve.marks if mark.role == "chosen" and mark.y is not None]
    named = [*dict.fromkeys(series.name for series in curve.series if series.name), *chosen]
    assert [*legend_of(draw(curve))] == named


def test_lines_differ_in_more_than_colour() -> None:
    lines = [line for line in draw(made("segments")).axes[0].lines[:2] if isinstance(line, Line2D)]
    assert len({str(line._dash_pattern) for line in lines}) == len(lines) == 2  # type: ignore[attr-defined]
    grey = [_grey(colour) for colour in LIGHT.colors[:3]]
    assert min(abs(colour - other) for colour in grey for other in grey if colour is not other) > 0


def _grey(ink: str) -> float:
    red, green, blue = (int(ink[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


@each_curve
@each_about
def test_points_to_hover_over_are_those_that_are_drawn(name: str, about: str) -> None:
    curve = made(name, about)
    _, panels = to_svg(curve, WIDE, name)
    size = WIDE if curve.below is None else WIDE._replace(height=1.3 * WIDE.height)
    figure = draw(curve, size=size, dpi=POINTS)
    width, height = figure.bbox.width, figure.bbox.height
    places: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for panel, x, y, text in hover_points(curve):
        left, top, wide, tall = panels[panel]
        places.setdefault((panel, text), []).append(((left + x * wide) * width, (1 - top - y * tall) * height))
    checked = 0
    for series in curve.series:
        if series.kind in ("line", "points", "dots"):
            pixels = figure.axes[series.panel].transData.transform(np.column_stack([series.x, series.y]))
            for pixel, text in zip(pixels, series.tips, strict=True):
                spots = np.array(places.get((series.panel, text), np.zeros((0, 2))))
                assert not len(spots) or np.abs(spots - pixel).max(axis=1).min() < 0.5, text
                checked += len(spots) > 0
    areas = [series for series in curve.series if series.kind == "area"]
    assert checked > 3 or areas
    tips = {text for _, _, _, text in hover_points(curve)}
    assert all({*area.tips} <= tips for area in areas)


def test_the_tip_of_an_area_is_in_the_middle_of_it() -> None:
    curve = made("terms")
    first, second = curve.series[:2]
    place = {text: y for _, _, y, text in hover_points(curve)}
    middle = first.y[-1] + second.y[-1] / 2
    assert place[second.tips[-1]] == pytest.approx(1 - curve.y.share(middle), abs=1e-3)


def test_a_mark_without_words_says_nothing() -> None:
    bare = [mark for mark in made("segments").marks if not mark.text]
    assert len(bare) == 1
    assert "" not in {text for _, _, _, text in hover_points(made("segments"))}


@pytest.mark.parametrize("name", ["front", "region", "segments", "microbatch"])
def test_no_label_hides_the_star_of_the_plan(name: str) -> None:
    """With the plan of the pictures in docs/, whose star is where a label would be written first."""
    curve = MAKERS[name](for_charts(subject_of(load_spec_plan(PICTURED))))
    figure = draw(curve)
    figure.draw_without_rendering()
    (star,) = [mark for mark in curve.marks if mark.role == "chosen"]
    panel, reach = figure.axes[star.panel], 4 * figure.dpi / POINTS  # a star has a radius of 7 points
    assert star.x is not None
    assert star.y is not None
    x, y = panel.transData.transform((star.x or 0.0, star.y or 0.0))
    drawn = Bbox.from_extents(x - reach, y - reach, x + reach, y + reach)
    assert not [label.get_text() for label in panel.texts if label.get_window_extent().overlaps(drawn)]


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["front.html", "new"]


def test_a_notebook_gets_a_picture_and_words_for_others() -> None:
    bundle, metadata = made("segments")._repr_mimebundle_()
    picture = Image.open(io.BytesIO(base64.b64decode(bundle["image/png"])))
    assert (picture.format, picture.size) == ("PNG", (1280, 864))
    assert metadata == {"image/png": {"width": 640, "height": 432}}
    assert bundle["text/plain"].startswith(made("segments").title)


def test_a_page_is_complete_in_itself() -> None:
    text = curves_page([made("front"), made("terms")], "Trade-offs of <lstm>")
    assert "&lt;lstm&gt;" in text
    assert not re.search(r"(?:src|@import)\s*[=(]|(?:href=\"|url\()(?!#)|https?:", text)
    assert not re.search(r"<script[^>]", text)
    assert re.findall(r'data-curve="(\w+)"', text) == ["front", "terms"]
    points = [json.loads(point) for point in re.findall(r"data-points='(.*?)'", text)]
    assert [len(point) for point in points] == [len(hover_points(made(name))) for name in ("front", "terms")]


def test_the_same_curves_give_the_same_page() -> None:
    assert curves_page([made("front")], "x") == curves_page([made("front")], "x")


def test_what_a_curve_says_is_never_a_tag() -> None:
    mean, curve = "</script></svg>'\"<b>$x^2$", made("front")
    line = msgspec.structs.replace(curve.series[0], name=mean, tips=(mean,) * len(curve.series[0].x))
    mark = Mark(text=mean, x=line.x[0], y=line.y[0])
    spoiled = msgspec.structs.replace(curve, title=mean, answer=mean, series=(line,), marks=(mark,))
    text = curves_page([spoiled], mean, mean)
    assert "<b>" not in text
    assert "$x^2$" in text  # no formula is made of it
    assert text.count("</script>") == 1


def test_a_series_without_tips_is_drawn() -> None:
    curve = msgspec.structs.replace(made("front"), series=(Series(name="bare", x=(0.5, 1.0), y=(1.0, 2.0)),), marks=())
    assert hover_points(curve) == []
    assert to_png(curve)[1:4] == b"PNG"
