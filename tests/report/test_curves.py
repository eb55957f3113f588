"""What the curves say: every figure is one that an estimate (or a record) has."""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from report.subjects import BUDGET_BYTES, EVERY, on_a_card, plan, planned, subject

import oomguard
from oomguard._cli.flags import CURVES
from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB, format_seconds
from oomguard._estimate.breakdown import estimate_step
from oomguard._plan.front import pareto_front
from oomguard._report.curve import Curve, Mark, Series
from oomguard._report.curves import MAKERS, curves_of, front, longest_steps, predict_ways, region, rounded_down
from oomguard._report.curves_memory import (
    ENOUGH,
    knee_row,
    largest_microbatch,
    memory_axis,
    moments_in_order,
    segments,
    segments_sweep,
    timeline,
)
from oomguard._report.words import pieces_phrase
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec

each_subject = pytest.mark.parametrize("about", EVERY)
each_curve = pytest.mark.parametrize("name", MAKERS)


def line(curve: Curve, name: str, panel: int = 0) -> Series:
    (found,) = [one for one in curve.series if one.name == name and one.panel == panel and one.kind != "band"]
    return found


def mark(curve: Curve, text: str) -> Mark:
    (found,) = [one for one in curve.marks if text in one.text]
    return found


@cache
def made(about: str) -> dict[str, Curve]:
    return {one.name: one for one in curves_of(EVERY[about]())}


@each_subject
@each_curve
def test_every_curve_of_every_subject_is_whole(about: str, name: str) -> None:
    curve = made(about)[name]
    assert curve.name == name
    assert curve.question.endswith("?")
    assert curve.answer.endswith(".")
    assert curve.title
    assert not {"nan", "inf", "None"} & {*f"{curve.title} {curve.answer}".replace(",", " ").split()}
    assert any(one.x for one in curve.series)
    for axis in filter(None, (curve.x, curve.y, curve.below)):
        assert math.isfinite(axis.low)
        assert axis.low < axis.high < math.inf
        assert not axis.base or axis.low > 0
    for one in curve.series:
        assert np.isfinite([*one.x, *one.y, *one.low]).all()
        assert not curve.x.base or all(x > 0 for x in one.x)


@each_subject
def test_every_line_is_in_sight(about: str) -> None:
    for curve in made(about).values():
        for one in curve.series:
            axis = curve.below if one.panel and curve.below else curve.y
            if one.kind in ("line", "points") and one.x:
                shares = [axis.share(y) for x, y in zip(one.x, one.y, strict=True) if 0 <= curve.x.share(x) <= 1.001]
                assert all(-0.001 <= share <= 1.001 for share in shares), (curve.name, one.name)


@each_subject
def test_every_point_of_every_curve_has_words(about: str) -> None:
    bare = [
        (curve.name, one.name)
        for curve in made(about).values()
        for one in curve.series
        if one.kind != "band" and len(one.tips) != len(one.x)
    ]
    assert bare == []


def test_words_of_a_point_are_its_figures() -> None:
    border = [one for one in region(subject(batch=8)).series if one.kind == "line"][1]
    assert border.tips[0] == f"microbatch 1: up to {rounded_down(int(border.y[1]))} steps with segments"
    none = [one for one in region(subject(budget=1)).series if one.kind == "line"][1]
    assert {one.partition(": ")[2] for one in none.tips} == {"not even one step with segments"}
    guessed, timed = (line(segments(one), "segments", panel=1) for one in (subject(), planned()))
    assert guessed.tips[0] == "1 segment: 1.00 times as long as plain"
    assert timed.tips[3] == f"{timed.x[3]:.0f} segments: {format_seconds(timed.y[3])}"


def test_titles_and_questions_of_a_small_model_on_a_card() -> None:
    made = {one.name: one for one in curves_of(subject(seq=1000, budget="1GiB", device="t4"))}
    assert {name: made[name].title for name in ("region", "microbatch", "terms")} == {
        "region": "1,000 steps fit with segments and the whole batch in one pass",
        "microbatch": "Microbatches of up to 18 fit",
        "terms": "Activations take 39% of the peak",
    }
    assert made["front"].question == "How much memory does speed need?"
    assert made["segments"].question == "How much memory do segments save, and how much time do they cost?"
    assert made["timeline"].x.names == ("before", "forward", "loss", "head", "layers", "optimizer")
    about = subject(seq=1000, budget="1GiB", device="t4")
    found = segments_sweep(about)
    assert found.segments[:5].tolist() == [1, 2, 3, 4, 5]
    assert found.segments[knee_row(found)] == 13
    assert largest_microbatch(about, "fp32") == 18
    assert predict_ways(about, about.spec, 32, segments=False).fits.tolist() == [False]
    assert predict_ways(about, about.spec, 32, segments=True).fits.any()


def test_the_flag_names_every_curve() -> None:
    assert tuple(MAKERS) == CURVES


def test_a_plan_has_all_curves_and_a_spec_too() -> None:
    assert [one.name for one in oomguard.curves(plan())] == [*MAKERS]
    assert {one.name: one for one in oomguard.curves(plan())} == made("planned")
    spec = Spec(cell="gru", seq=100, hidden=16)
    assert [one.name for one in oomguard.curves(spec, device="t4")] == [*MAKERS]


@pytest.mark.parametrize("name", ["microbatch", "segments", "front", "terms"])
def test_the_budget_line_is_where_the_budget_is(name: str) -> None:
    found = mark(MAKERS[name](subject()), "budget")
    assert found.role == "budget"
    assert (found.x if name == "front" else found.y) == BUDGET_BYTES / GIB


@pytest.mark.parametrize("device", ["cpu", "a100-80gb", "t4"])
def test_the_peaks_over_the_microbatch_are_those_of_estimates(device: str) -> None:
    curve = MAKERS["microbatch"](subject(device=device, batch=20))
    found = next(one for one in curve.series if one.kind == "line" and one.name.startswith("fp32"))
    for rows, peak in zip(found.x, found.y, strict=True):
        one = oomguard.estimate(cell="lstm", seq=10_000, batch=20, microbatch=int(rows), device=device)
        assert peak == one.total_bytes / GIB


@pytest.mark.parametrize("budget_bytes", [BUDGET_BYTES, GIB, 1, 20 * GIB])
def test_the_largest_microbatch_that_is_named_is_the_largest_that_fits(budget_bytes: int) -> None:
    curve = MAKERS["microbatch"](subject(budget=budget_bytes))
    fits = [
        rows
        for rows in range(1, 33)
        if oomguard.estimate(cell="lstm", seq=10_000, microbatch=rows, budget_bytes=budget_bytes).fits
    ]
    said = f"up to {max(fits)}" if fits else "not even one"
    assert said in curve.answer
    assert ("whole batch" in curve.title) == (len(fits) == 32)


def test_precisions_that_come_out_alike_are_one_line() -> None:
    lines = [one.name for one in MAKERS["microbatch"](subject(over={"precision": ["fp32", "bf16"]})).series]
    assert lines.count("fp32") + lines.count("fp32 and bf16") == 1


def test_the_knee_is_the_fewest_segments_that_save_enough() -> None:
    about = subject()
    found = segments_sweep(about)
    knee = int(found.segments[knee_row(found)])
    peaks = {
        int(count): oomguard.estimate(cell="lstm", seq=10_000, segments=int(count)).total_bytes
        for count in found.segments
    }
    most = peaks[1] - min(peaks.values())
    assert peaks[1] - peaks[knee] >= ENOUGH * most
    assert all(peaks[1] - peak < ENOUGH * most for count, peak in peaks.items() if count < knee)
    ring = mark(segments(about), "knee")
    assert (ring.x, ring.y) == (knee, peaks[knee] / GIB)


def test_where_segments_save_nothing_that_is_said() -> None:
    assert segments(subject(seq=1, batch=1)).title == "Segments save nothing here"


@pytest.mark.parametrize("device", ["cpu", "t4"])
@pytest.mark.parametrize("segments", [False, True])
def test_the_longest_sequence_fits_and_a_slightly_longer_one_does_not(device: str, segments: bool) -> None:
    about = subject(device=device, batch=8)
    steps = longest_steps(about, 8, segments)
    assert predict_ways(about, about.with_seq(steps), 8, segments).fits.any()
    assert not predict_ways(about, about.with_seq(round(steps * 1.0015) + 1), 8, segments).fits.any()


def test_the_border_of_the_region_agrees_with_estimates() -> None:
    curve = region(subject(batch=8))
    plain, pieces = (one for one in curve.series if one.kind == "line")
    for rows, steps in [*zip(plain.x, plain.y, strict=True)][1:-1]:
        for length, fits in ((steps, True), (round(steps * 1.0015) + 1, False)):
            found = oomguard.estimate(
                cell="lstm", seq=int(length), batch=8, microbatch=int(rows), budget_bytes=BUDGET_BYTES
            )
            assert found.fits == fits
    assert all(many >= one for many, one in zip(pieces.y, plain.y, strict=True))


def test_what_cudnn_refuses_is_not_in_the_region() -> None:
    curve = region(subject(device="h100", budget=None))
    assert max(next(one for one in curve.series if one.kind == "line").y) <= 65_535


def test_the_plan_is_in_the_region_of_what_fits() -> None:
    curve = region(planned())
    star = mark(curve, "the plan")
    pieces = [one for one in curve.series if one.kind == "line"][1]
    assert (star.x, star.y, star.role) == (plan().candidate.microbatch, plan().spec.seq, "chosen")
    assert plan().spec.steps <= pieces.y[-1]


def test_the_front_is_that_of_its_dots() -> None:
    curve = front(subject(seq=2000))
    dots = line(curve, "fits")
    front_rows = np.flatnonzero(pareto_front(dots.x, -np.asarray(dots.y)))
    rows = sorted(front_rows.tolist(), key=lambda row: dots.x[row])
    found = line(curve, "front: nothing is faster with less memory")
    assert found.x == tuple(dots.x[row] for row in rows)
    assert found.y == tuple(dots.y[row] for row in rows)
    assert list(found.y) == sorted(found.y)


def test_dots_that_do_not_fit_are_those_whose_margin_does_not() -> None:
    about = subject(seq=2000, budget="500MiB")
    curve = front(about)
    assert min(line(curve, "does not fit").x) > 0.8 * about.budget_bytes / GIB
    assert max(line(curve, "fits").x) < about.budget_bytes / GIB


def test_measured_peaks_are_points_beside_the_predicted_line() -> None:
    record = plan().record
    assert record is not None
    for name in ("segments", "microbatch"):
        points = line(MAKERS[name](planned()), "measured")
        assert (getattr(record.candidate, name), plan().peak_bytes / GIB) in [*zip(points.x, points.y, strict=True)]


def test_without_records_a_speed_is_called_a_guess() -> None:
    assert "guessed" in front(subject()).y.unit
    assert "Nothing has been measured" in front(subject()).answer
    assert "guess" not in front(planned()).y.unit


@each_subject
def test_the_stacked_terms_add_up_to_the_estimate(about: str) -> None:
    one, curve = EVERY[about](), made(about)["terms"]
    totals = [sum(stack) for stack in zip(*(area.y for area in curve.series), strict=True)]
    for steps, total in [*zip(curve.series[0].x, totals, strict=True)][::9]:
        spec = one.with_seq(int(steps))
        knobs = {"segments": min(one.candidate.segments, int(steps))}
        if one.candidate.window is not None:
            knobs["window"] = min(one.candidate.window, int(steps))
        found = one.predict(one.vary(spec, **knobs), spec)
        assert total == pytest.approx(float(found.total_bytes[0]) / GIB)


@each_subject
def test_the_highest_moment_of_the_timeline_is_the_estimate(about: str) -> None:
    one = EVERY[about]()
    found = estimate_step(one.spec, one.candidate, one.target)
    moments, _ = moments_in_order(one)
    totals = {name: sum(parts.values()) for name, parts in moments.items()}
    assert max(totals.values()) == found.total_bytes
    assert {name: totals[name] for name in found.moments} == found.moments
    curve = made(about)["timeline"]
    assert mark(curve, "the peak").y == pytest.approx(found.total_bytes / GIB)


def test_the_layers_come_from_the_last_to_the_first() -> None:
    moments, repeated = moments_in_order(subject(layers=3))
    names = [name for name in moments if "layer" in name]
    assert names == ["backward of layer 3", "backward of layer 2", "backward of layer 1"]
    assert (next(iter(moments)), [*moments][-1], repeated) == ("before", "optimizer", None)


def test_segments_repeat_what_is_between_the_borders() -> None:
    moments, repeated = moments_in_order(subject(segments=50))
    assert repeated is not None
    names = [*moments]
    assert names[1] == "forward of all segments"
    assert (names[repeated[0]], names[repeated[1]]) == ("forward", "backward of layer 1")
    assert "50 segments" in timeline(subject(segments=50)).answer


def test_values_that_are_asked_for_are_those_that_are_drawn() -> None:
    over = {"microbatch": [4, 12], "segments": [1, 7]}
    found = {one.name: one for one in oomguard.curves(cell="gru", seq=50, over=over, batch=16, device="t4")}
    assert line(found["segments"], "segments").x == (1.0, 7.0)
    assert next(one for one in found["microbatch"].series if one.kind == "line").x == (4.0, 12.0, 16.0)


@pytest.mark.parametrize("over", [{"hidden": [8, 16]}, {"batch": [1, 2]}, {"window": [None, 10]}])
def test_what_no_curve_would_show_is_refused(over: dict[str, Any]) -> None:
    with pytest.raises(MisuseError, match=f"Charts show one model, .* but got --over {next(iter(over))}"):
        oomguard.curves(cell="gru", seq=50, over=over, device="t4")


def test_of_lengths_the_longest_is_drawn() -> None:
    found = {one.name: one for one in oomguard.curves(measured=plan(), over={"seq": [10, 2000, 50]})}
    assert mark(found["region"], "asked for").y == 2000
    assert mark(found["terms"], "steps").x == 2000


def test_segments_that_are_asked_for_are_those_that_sequences_are_cut_into() -> None:
    few, many = (subject(batch=8, over=over) for over in ({"segments": [1, 4]}, {}))
    assert {*predict_ways(few, few.spec, 8, segments=True).segments} == {1, 4}
    whole, in_few = (longest_steps(few, 8, segments) for segments in (False, True))
    assert whole < in_few < longest_steps(many, 8, segments=True) / 2
    assert region(few).answer != region(many).answer


def test_a_card_and_its_plan_can_be_drawn() -> None:
    assert mark(made("planned on a card")["front"], "the plan").x == on_a_card().peak_bytes / GIB


def test_a_series_has_a_figure_for_every_point() -> None:
    with pytest.raises(AssertionError, match="odd"):
        Series(name="odd", x=(1.0, 2.0), y=(1.0,))
    with pytest.raises(AssertionError, match="odd"):
        Series(name="odd", x=(1.0, 2.0), y=(1.0, 2.0), tips=("one",))


@pytest.mark.parametrize(("budget", "base"), [(6, 0), (80, 10), (1, 10)])
def test_the_axis_of_memory_is_logarithmic_if_the_budget_is_far_away(budget: float, base: int) -> None:
    assert memory_axis("Peak", [1, 7], budget).base == base


@pytest.mark.parametrize(
    ("knobs", "phrase"),
    [
        ({}, ""),
        ({"segments": 1024}, " with 1,024 segments"),
        ({"segments": 4, "recompute": False}, " with 4 segments without recomputation"),
        ({"window": 50}, " with a window of 50 steps"),
    ],
)
def test_a_question_says_how_the_sequence_is_cut(knobs: dict[str, Any], phrase: str) -> None:
    assert pieces_phrase(Candidate(microbatch=1, **knobs)) == phrase


@pytest.mark.parametrize(("steps", "text"), [(661_852, "661,000"), (42, "42")])
def test_a_length_is_told_to_three_digits_and_rounded_down(steps: int, text: str) -> None:
    assert rounded_down(steps) == text
