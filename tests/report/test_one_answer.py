"""The same question has one answer, in the JSON, the words, the page and the curves of a plan."""

import html
import io
import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from plan.making import reckoned
from plan.searched import make as make_plan
from plan.searched import searched
from report.subjects import on_a_card, plan
from rich.console import Console

from oomguard._core.units import GIB, format_bytes, format_seconds
from oomguard._plan.value import Plan
from oomguard._predict.speed import NOISY
from oomguard._report.curve import Curve, Mark
from oomguard._report.curves import redrawn_curves
from oomguard._report.page import plan_page
from oomguard._report.plan import explain, plan_json, show_result
from oomguard._report.subject import subject_of
from oomguard._report.tables import show_sections
from oomguard._report.words import chosen_words, pieces_words, rows_words, speed_words

PLAIN = re.compile(r"[Pp]lain\sPyTorch\s(?:would\sneed\s|needs\s)?([\d.,]+\s[KMGT]?i?B)")
each_plan = pytest.mark.parametrize("make", [plan, on_a_card])


@cache
def curves(make: Callable[[], Plan]) -> list[Curve]:
    return [curve for versions in redrawn_curves(make()) for curve in versions.values()]


def page_text(made: Plan) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", plan_page(made)))


@cache
def page_of(make: Callable[[], Plan]) -> str:
    return page_text(make())


def screen(made: Plan) -> str:
    buffer = io.StringIO()
    show_sections(explain(made), Console(file=buffer, width=200))
    return buffer.getvalue()


@each_plan
def test_plain_pytorch_has_one_figure_everywhere(make: Callable[[], Plan]) -> None:
    found = make()
    plain = format_bytes(found.plain.expected.peak_bytes)
    words = " ".join(f"{c.title}. {c.answer} {' '.join(mark.text for mark in c.marks)}" for c in curves(make))
    for text in (words, page_of(make), screen(found)):
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


# ---- every figure of every kind of plan


@cache
def unconfirmed() -> Plan:
    """A plan that was run only with shorter sequences."""
    problem, records, whole = searched("lstm in 600 MiB")
    found = make_plan(problem, [record for record in records if record.spec.steps < whole.spec.steps])
    assert found is not None
    return found


@cache
def unmeasured() -> Plan:
    """A plan of the same model for a card that is not here."""
    return reckoned(device="t4", budget="2GiB")


every_plan = pytest.mark.parametrize("make", [plan, on_a_card, unconfirmed, unmeasured])
SIZE = r"[\d.,]+ [KMGT]?i?B"


@cache
def texts(make: Callable[[], Plan]) -> dict[str, str]:
    """Everything that people read about a plan, in one line each."""
    found, written = make(), io.StringIO()
    show_result(found, None, Console(file=written, width=200))
    curve_words = " ".join(f"{c.title}. {c.answer}" for c in curves(make))
    read = {"summary": written.getvalue(), "show": screen(found), "page": page_of(make), "curves": curve_words}
    return {place: " ".join(text.split()) for place, text in read.items()}


def stars(make: Callable[[], Plan]) -> dict[str, Mark]:
    """The plan in each chart that is drawn for it, of a page too: both show the same curves."""
    return {c.name: mark for c in curves(make) for mark in c.marks if "the plan" in mark.text}


def document(found: Plan) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(plan_json(found))
    return decoded


@every_plan
def test_the_peak_is_the_same_and_known_in_the_same_way(make: Callable[[], Plan]) -> None:
    found, read, file = make(), texts(make), document(make())
    peak, record = format_bytes(found.peak_bytes), file["record"]
    whole = record is not None and (record["spec"]["seq"] or 0) == found.spec.steps
    assert found.peak_bytes == (record["peak_bytes"] if whole else file["expected"]["peak_bytes"])
    for place in ("summary", "show"):
        assert f"Peak {peak} of {format_bytes(found.budget_bytes)} ({found.known}" in read[place]
    assert f"{found.known}" in read["page"]
    assert peak in read["page"]
    assert found.known == ("measured" if whole else "predicted" if found.records else "by arithmetic")
    for name, mark in stars(make).items():
        assert mark.text == f"the plan, {found.known}", name
        height = mark.x if name == "front" else mark.y
        assert name == "region" or height == found.peak_bytes / GIB
    for place, text in read.items():  # nothing else is measured unless the plan is
        assert place == "curves" or ("measured," in text or "measured " in text) >= whole


@every_plan
def test_the_time_of_a_step_is_the_same_everywhere(make: Callable[[], Plan]) -> None:
    found, read = make(), texts(make)
    if found.seconds_per_step is None or found.throughput is None:
        assert "no time is known" in read["show"]
        assert "nothing was timed" in read["page"]
        assert all("per step" not in read[place] for place in ("summary", "show"))
        return
    seconds = format_seconds(found.seconds_per_step)
    spread = "" if (found.time_spread or 0) < NOISY else f" ±{100 * (found.time_spread or 0):.0f} %"
    for place in ("summary", "show"):
        assert f"{seconds}{spread} per step, {speed_words(found.throughput, 'sequences')}" in read[place]
    assert f"takes {'' if found.confirmed and not spread else 'about '}{seconds}{spread}:" in read["show"]
    assert f"{seconds}{spread}" in read["page"]
    assert stars(make)["front"].y == pytest.approx(found.throughput * found.spec.steps)
    levels = " in 2 levels" if found.candidate.levels == 2 else ""
    way = (levels if found.candidate.recompute else " without recomputation").strip() or "segments"
    drawn = [line for c in curves(make) if c.name == "segments" for line in c.series if line.panel == 1]
    below = next(line for line in drawn if line.name == way)
    at = dict(zip(below.x, below.y, strict=True))[found.candidate.segments]
    assert at == pytest.approx(found.seconds_per_step)


@every_plan
def test_batch_segments_and_budget_are_the_same_everywhere(make: Callable[[], Plan]) -> None:
    found, read, file = make(), texts(make), document(make())
    rows, budget = found.candidate.microbatch, format_bytes(found.budget_bytes)
    assert (file["spec"]["batch"], file["candidate"]["microbatch"]) == (found.spec.batch, rows)
    assert (file["candidate"]["segments"], file["budget_bytes"]) == (found.candidate.segments, found.budget_bytes)
    for place in ("summary", "show"):
        assert chosen_words(found.candidate) in read[place]
        assert f"T = {found.spec.steps:,}, batch {found.spec.batch:,} on" in read[place]
    assert f"Microbatch {rows_words(found.candidate)} batch {found.spec.batch:,}" in read["page"]
    assert f"Segments {pieces_words(found.candidate)} T = {found.spec.steps:,}" in read["page"]
    assert stars(make)["microbatch"].x == stars(make)["region"].x == rows
    assert stars(make)["segments"].x == found.candidate.segments
    assert stars(make)["region"].y == found.spec.steps
    for place in ("summary", "show", "page", "curves"):
        assert budget in read[place], place
    budgets = {mark.x or mark.y for c in curves(make) for mark in c.marks if mark.role == "budget"}
    assert budgets == {found.budget_bytes / GIB}


@every_plan
def test_prediction_and_margin_are_the_same_everywhere(make: Callable[[], Plan]) -> None:
    found, read, file = make(), texts(make), document(make())
    expected = found.expected
    assert (file["expected"]["peak_bytes"], file["expected"]["margin_bytes"]) == (
        expected.peak_bytes,
        expected.margin_bytes,
    )
    words = f"predicted {format_bytes(expected.peak_bytes)} (margin {format_bytes(expected.margin_bytes)})"
    estimate = f"Estimate {format_bytes(found.estimate.total_bytes)} by arithmetic"
    for place in ("summary", "show", "page"):
        assert words in read[place], place
        assert estimate in read[place], place
    for text in (read["show"], read["page"]):
        margin = re.search(rf"margin ({SIZE}) ({SIZE})", text)
        assert margin is not None
        assert margin[2] == format_bytes(expected.margin_bytes)
    terms = next(c for c in curves(make) if c.name == "terms").answer
    assert "by arithmetic: " in terms
    assert f"{format_bytes(found.estimate.total_bytes)} in all" in terms


@every_plan
def test_what_is_fastest_is_the_plan(make: Callable[[], Plan]) -> None:
    found = make()
    front = next(c for c in curves(make) if c.name == "front")
    knobs = f"{rows_words(found.candidate)}"
    if found.candidate.levels == 1 and found.candidate.recompute:
        fastest = re.search(r"microbatch of (\S+ × \S+)", front.answer.replace("\u00a0", " "))
        assert fastest is not None
        assert fastest[1].rstrip(",;") == knobs
        assert format_bytes(found.peak_bytes) in front.title


@every_plan
def test_an_inexact_gradient_is_told_first(make: Callable[[], Plan]) -> None:
    found, read = make(), texts(make)
    words = "The gradient is not exact: "
    for place in ("summary", "show", "page"):
        assert (words in read[place]) == bool(found.candidate.lossy), place
    assert explain(found)[0].sentences[0].startswith(words) == bool(found.candidate.lossy)
