"""The same question has one answer, in the JSON, the words, the page and the curves of a plan."""

import html
import io
import re
from collections.abc import Callable
from functools import cache

import pytest
from report.subjects import on_a_card, plan
from rich.console import Console

from oomguard._core.units import GIB, format_bytes
from oomguard._plan.value import Plan
from oomguard._report.curve import Curve
from oomguard._report.curves import redrawn_curves
from oomguard._report.page import plan_page
from oomguard._report.plan import explain, plan_json
from oomguard._report.subject import subject_of
from oomguard._report.tables import show_sections

PLAIN = re.compile(r"[Pp]lain\sPyTorch\s(?:would\sneed\s|needs\s)?([\d.,]+\s[KMGT]?i?B)")
each_plan = pytest.mark.parametrize("make", [plan, on_a_card])


@cache
def curves(make: Callable[[], Plan]) -> list[Curve]:
    return [curve for versions in redrawn_curves(make()) for curve in versions.values()]


def page_text(made: Plan) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", plan_page(made)))


def screen(made: Plan) -> str:
    buffer = io.StringIO()
    show_sections(explain(made), Console(file=buffer, width=200))
    return buffer.getvalue()


@each_plan
def test_plain_pytorch_has_one_figure_everywhere(make: Callable[[], Plan]) -> None:
    found = make()
    plain = format_bytes(found.plain.expected.peak_bytes)
    words = " ".join(f"{c.title}. {c.answer} {' '.join(mark.text for mark in c.marks)}" for c in curves(make))
    for text in (words, page_text(found), screen(found)):
        sizes = {" ".join(size.split()) for size in PLAIN.findall(text)}
        assert sizes <= {plain}
    assert plain in screen(found)
    assert subject_of(found).plain_bytes == found.plain.expected.peak_bytes
    assert f'"peak_bytes": {found.plain.expected.peak_bytes}' in plan_json(found)


@each_plan
def test_the_star_of_a_plan_lies_on_the_line_that_it_belongs_to(make: Callable[[], Plan]) -> None:
    for curve in curves(make):
        for mark in curve.marks:
            if mark.role == "chosen" and curve.name in ("front", "segments", "microbatch"):
                assert mark.y is not None
                lines = [line for line in curve.series if line.kind != "band"]
                places = [point for line in lines for point in zip(line.x, line.y, strict=True)]
                assert any(point == pytest.approx((mark.x, mark.y)) for point in places), curve.name


@each_plan
def test_the_peak_and_the_speed_of_a_plan_are_the_same_in_every_curve(make: Callable[[], Plan]) -> None:
    found = make()
    stars = {c.name: mark for c in curves(make) for mark in c.marks if mark.role == "chosen"}
    assert stars["segments"].y == stars["microbatch"].y == stars["front"].x == found.peak_bytes / GIB
    assert found.throughput is not None
    assert stars["front"].y == pytest.approx(found.throughput * found.spec.steps)
