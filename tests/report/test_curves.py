"""What the curves say: every figure is one that an estimate (or a record) has."""

import math
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from report.subjects import BUDGET_BYTES, EVERY, on_a_card, plan, planned, subject

import oomguard
from oomguard._cli.flags import CURVES
from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB, format_seconds
from oomguard._estimate.breakdown import estimate_step
from oomguard._plan.make import pareto_front
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
from oomguard._report.subject import subject_of
from oomguard._report.words import pieces_phrase
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec

each_subject = pytest.mark.parametrize("about", EVERY)
each_curve = pytest.mark.parametrize("name", MAKERS)


def line(curve: Curve, name: str, panel: int = 0) -> Series:
    (matching,) = [
        series for series in curve.series if series.name == name and series.panel == panel and series.kind != "band"
    ]
    return matching


def mark(curve: Curve, text: str) -> Mark:
    (matching,) = [each_mark for each_mark in curve.marks if text in each_mark.text]
    return matching


@cache
def made(about: str) -> dict[str, Curve]:
    return {curve.name: curve for curve in curves_of(EVERY[about]())}


@each_subject
@each_curve
def test_every_curve_of_every_subject_is_whole(about: str, name: str) -> None:
    curve = made(about)[name]
    assert curve.name == name
    assert curve.question.endswith("?")
    assert curve.answer.endswith(".")
    assert curve.title
    assert not {"nan", "inf", "None"} & {*f"{curve.title} {curve.answer}".replace(",", " ").split()}
    assert any(series.x for series in curve.series)
    for axis in filter(None, (curve.x, curve.y, curve.below)):
        assert math.isfinite(axis.low)
        assert axis.low < axis.high < math.inf
        assert not axis.base or axis.low > 0
    for series in curve.series:
        assert np.isfinite([*series.x, *series.y, *series.low]).all()
        assert not curve.x.base or all(x > 0 for x in series.x)


@each_subject
def test_every_line_is_in_sight(about: str) -> None:
    for curve in made(about).values():
        for series in curve.series:
            axis = curve.below if series.panel and curve.below else curve.y
            if series.kind in ("line", "points") and series.x:
                shares = [
                    axis.share(y) for x, y in zip(series.x, series.y, strict=True) if 0 <= curve.x.share(x) <= 1.001
                ]
                assert all(-0.001 <= share <= 1.001 for share in shares), (curve.name, series.name)


@each_subject
def test_every_point_of_every_curve_has_words(about: str) -> None:
    bare = [
        (curve.name, series.name)
        for curve in made(about).values()
        for series in curve.series
        if series.kind != "band" and len(series.tips) != len(series.x)
    ]
    assert bare == []


def test_words_of_a_point_are_its_figures() -> None:
    border = [series for series in region(subject(batch=8)).series if series.kind == "line"][1]
    assert border.tips[0] == f"microbatch 1: up to {rounded_down(int(border.y[1]))} steps with segments"
    none = [series for series in region(subject(budget=1)).series if series.kind == "line"][1]
    assert {tip.partition(": ")[2] for tip in none.tips} == {"not even one step with segments"}
    guessed, timed = (line(segments(each), "segments", panel=1) for each in (subject(), planned()))
    assert guessed.tips[0] == "1 segment: 1.00 times as long as in one piece"
    assert timed.tips[3] == f"{timed.x[3]:.0f} segments: {format_seconds(timed.y[3])}"


def test_titles_and_questions_of_a_small_model_on_a_card() -> None:
    made = {curve.name: curve for curve in curves_of(subject(seq=1000, budget="1GiB", device="t4"))}
    assert {name: made[name].title for name in ("region", "microbatch", "terms")} == {
        "region": "1,000 steps fit with segments and the whole batch in one pass",
        "microbatch": "Microbatches of up to 17 fit",
        "terms": "Activations take 39% of the peak",
    }
    assert made["front"].question == "How much memory does speed need?"
    assert made["segments"].question == "How much memory do segments save, and how much time do they cost?"
    assert made["timeline"].x.names == ("before", "forward", "loss", "head", "layers", "optimizer")
    about = subject(seq=1000, budget="1GiB", device="t4")
    sweep = segments_sweep(about)
    assert sweep.segments[:5].tolist() == [1, 2, 3, 4, 5]
    assert sweep.segments[knee_row(sweep)] == 13
    assert largest_microbatch(about, "fp32") == 17
    assert not predict_ways(about, about.spec, 32, segments=False).fits.any()
    assert predict_ways(about, about.spec, 32, segments=True).fits.any()


def test_the_flag_names_every_curve() -> None:
    assert tuple(MAKERS) == CURVES


def test_a_plan_has_all_curves_and_a_spec_too() -> None:
    assert [curve.name for curve in oomguard.curves(plan())] == [*MAKERS]
    assert {curve.name: curve for curve in oomguard.curves(plan())} == made("planned")
    spec = Spec(cell="gru", seq=100, hidden=16)
    assert [curve.name for curve in oomguard.curves(spec, device="t4")] == [*MAKERS]


@pytest.mark.parametrize("name", ["microbatch", "segments", "front", "terms"])
def test_the_budget_line_is_where_the_budget_is(name: str) -> None:
    budget_line = mark(MAKERS[name](subject()), "budget")
    assert budget_line.role == "budget"
    assert (budget_line.x if name == "front" else budget_line.y) == BUDGET_BYTES / GIB


@pytest.mark.parametrize("device", ["cpu", "a100-80gb", "t4"])
def test_the_peaks_over_the_microbatch_are_those_of_estimates(device: str) -> None:
    curve = MAKERS["microbatch"](subject(device=device, batch=20))
    first_line = next(line for line in curve.series if line.kind == "line" and line.name.startswith("fp32"))
    for rows, peak in zip(first_line.x, first_line.y, strict=True):
        estimate = oomguard.estimate(cell="lstm", seq=10_000, batch=20, microbatch=int(rows), device=device)
        assert peak == estimate.total_bytes / GIB


@pytest.mark.parametrize("budget_bytes", [BUDGET_BYTES, GIB, 1, 20 * GIB])
def test_the_largest_microbatch_that_is_named_is_the_largest_that_fits(budget_bytes: int) -> None:
    curve = MAKERS["microbatch"](subject(budget=budget_bytes))
    fits = [
        rows
        for rows in range(1, 33)
        if oomguard.estimate(cell="lstm", seq=10_000, microbatch=rows, budget_bytes=budget_bytes).fits
    ]
    expected = f"up to {max(fits)}" if fits else "not even one"
    assert expected in curve.answer
    assert ("whole batch" in curve.title) == (len(fits) == 32)


def test_precisions_that_come_out_alike_are_one_line() -> None:
    lines = [series.name for series in MAKERS["microbatch"](subject(over={"precision": ["fp32", "bf16"]})).series]
    assert lines.count("fp32") + lines.count("fp32 and bf16") == 1


def test_the_knee_is_the_fewest_segments_that_save_enough() -> None:
    about = subject()
    sweep = segments_sweep(about)
    knee = int(sweep.segments[knee_row(sweep)])
    peaks = {
        int(count): oomguard.estimate(cell="lstm", seq=10_000, segments=int(count)).total_bytes
        for count in sweep.segments
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
    plain, pieces = (series for series in curve.series if series.kind == "line")
    for rows, steps in [*zip(plain.x, plain.y, strict=True)][1:-1]:
        for length, fits in ((steps, True), (round(steps * 1.0015) + 1, False)):
            estimate = oomguard.estimate(
                cell="lstm", seq=int(length), batch=8, microbatch=int(rows), budget_bytes=BUDGET_BYTES
            )
            assert estimate.fits == fits
    assert all(many >= piece for many, piece in zip(pieces.y, plain.y, strict=True))


def test_what_cudnn_refuses_is_not_in_the_region() -> None:
    curve = region(subject(device="h100", budget=None))
    assert max(next(series for series in curve.series if series.kind == "line").y) <= 65_535


def test_the_plan_is_in_the_region_of_what_fits() -> None:
    curve = region(planned())
    star = mark(curve, "the plan")
    pieces = [series for series in curve.series if series.kind == "line"][1]
    assert (star.x, star.y, star.role) == (plan().candidate.microbatch, plan().spec.seq, "chosen")
    assert plan().spec.steps <= pieces.y[-1]


def test_the_front_is_that_of_its_dots() -> None:
    curve = front(subject(seq=2000))
    dots = line(curve, "fits")
    front_rows = np.flatnonzero(pareto_front(dots.x, -np.asarray(dots.y)))
    rows = sorted(front_rows.tolist(), key=lambda row: dots.x[row])
    front_line = line(curve, "front: nothing is faster with less memory")
    assert front_line.x == tuple(dots.x[row] for row in rows)
    assert front_line.y == tuple(dots.y[row] for row in rows)
    assert list(front_line.y) == sorted(front_line.y)


def test_dots_that_do_not_fit_are_those_whose_margin_does_not() -> None:
    about = subject(seq=2000, budget="500MiB")
    curve = front(about)
    assert min(line(curve, "does not fit").x) > 0.8 * about.budget_bytes / GIB
    assert max(line(curve, "fits").x) < about.budget_bytes / GIB


def test_measured_peaks_are_points_beside_the_predicted_line() -> None:
    record = plan().record
    assert record is not None
    for name in ("segments", "microbatch"):
        curve = MAKERS[name](planned())
        assert "measured" not in [series.name for series in curve.series]  # the plan has a star
        other = msgspec.structs.replace(record.candidate, **{name: getattr(record.candidate, name) * 2})
        records = (*plan().records, msgspec.structs.replace(record, candidate=other))
        points = line(MAKERS[name](subject_of(msgspec.structs.replace(plan(), records=records))), "measured")
        assert [*zip(points.x, points.y, strict=True)] == [(getattr(other, name), plan().peak_bytes / GIB)]


def test_without_records_a_speed_is_called_a_guess() -> None:
    assert "guessed" in front(subject()).y.unit
    assert "Nothing has been measured" in front(subject()).answer
    assert "guess" not in front(planned()).y.unit


@each_subject
def test_the_stacked_terms_add_up_to_the_estimate(about: str) -> None:
    shown, curve = EVERY[about](), made(about)["terms"]
    totals = [sum(stack) for stack in zip(*(area.y for area in curve.series), strict=True)]
    for steps, total in [*zip(curve.series[0].x, totals, strict=True)][::9]:
        spec = shown.with_seq(int(steps))
        knobs = {"segments": min(shown.candidate.segments, int(steps))}
        if shown.candidate.window is not None:
            knobs["window"] = min(shown.candidate.window, int(steps))
        prediction = shown.predict(shown.vary(spec, **knobs), spec)
        assert total == pytest.approx(float(prediction.total_bytes[0]) / GIB)


@each_subject
def test_the_highest_moment_of_the_timeline_is_the_estimate(about: str) -> None:
    shown = EVERY[about]()
    estimate = estimate_step(shown.spec, shown.candidate, shown.target)
    moments, _ = moments_in_order(shown)
    totals = {name: sum(parts.values()) for name, parts in moments.items()}
    assert max(totals.values()) == estimate.total_bytes
    assert {name: totals[name] for name in estimate.moments} == estimate.moments
    curve = made(about)["timeline"]
    assert mark(curve, "the peak").y == pytest.approx(estimate.total_bytes / GIB)


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
    drawn = {curve.name: curve for curve in oomguard.curves(cell="gru", seq=50, over=over, batch=16, device="t4")}
    assert line(drawn["segments"], "segments").x == (1.0, 7.0)
    assert next(series for series in drawn["microbatch"].series if series.kind == "line").x == (4.0, 12.0, 16.0)


@pytest.mark.parametrize("over", [{"hidden": [8, 16]}, {"batch": [1, 2]}, {"window": [None, 10]}])
def test_what_no_curve_would_show_is_refused(over: dict[str, Any]) -> None:
    with pytest.raises(MisuseError, match=f"Charts show one model, .* but got --over {next(iter(over))}"):
        oomguard.curves(cell="gru", seq=50, over=over, device="t4")


def test_of_lengths_the_longest_is_drawn() -> None:
    drawn = {curve.name: curve for curve in oomguard.curves(measured=plan(), over={"seq": [10, 2000, 50]})}
    assert mark(drawn["region"], "asked for").y == 2000
    assert mark(drawn["terms"], "steps").x == 2000


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
