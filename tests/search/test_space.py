"""What may be tried: every row of the grid is a candidate that serves the spec, and turns only what may be turned."""

import importlib.util
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import attempt, has_three_beats, specs, up_to

from oomguard._core.units import GIB
from oomguard._estimate import cards
from oomguard._estimate.target import CPU, Target, on_card
from oomguard._search.space import (
    FINE,
    SHORTEST_PIECE,
    Choices,
    Space,
    grid,
    lossy,
    make_space,
    microbatches,
    segment_counts,
    shapes,
)
from oomguard._spec.candidate import ALLOWED, Candidates, check_allow, check_candidate, check_fixed, is_none
from oomguard._spec.spec import Spec

CARD = on_card(cards.card("a100-80gb"))
PRECISIONS = ("fp32", "fp16", "bf16")
LSTM = Spec(cell="lstm", seq=10_000)
BOTH_WAYS = Spec(cell="gru", seq=10_000, bidirectional=True)
any_space = given(spec=specs(), target=st.sampled_from([CPU, CARD]), allow=st.sets(st.sampled_from(ALLOWED)))
few = settings(max_examples=12)


def make_grid(spec: Spec, target: Target = CPU, allow: tuple[str, ...] = (), **fixed: Any) -> Candidates:
    return grid(spec, space_of(spec, target, allow, **fixed))


def space_of(spec: Spec, target: Target = CPU, allow: tuple[str, ...] = (), **fixed: Any) -> Space:
    choices = Choices(precisions=PRECISIONS, cores=2, expandable=True, allow=allow, fixed=fixed)
    return make_space(spec, target, 8 * GIB, choices)


def column(found: Candidates, name: str) -> Any:
    """A knob of every row."""
    return np.broadcast_to(np.asarray(getattr(found, name), dtype=object), len(found))


def values(found: Candidates, name: str) -> set[Any]:
    return {*column(found, name).tolist()}


@few
@any_space
def test_microbatch_and_accumulation_cover_the_batch_and_no_pass_is_empty(
    spec: Spec, target: Target, allow: set[str]
) -> None:
    found = make_grid(spec, target, tuple(allow))
    rows, passes = np.asarray(found.microbatch), np.asarray(found.accumulation)
    assert (rows * passes >= spec.batch).all()
    assert (rows * (passes - 1) < spec.batch).all()


@few
@any_space
def test_every_row_is_a_candidate_that_serves_the_spec(spec: Spec, target: Target, allow: set[str]) -> None:
    found = make_grid(spec, target, tuple(allow))
    for row in {*np.linspace(0, len(found) - 1, 40).astype(int).tolist()}:
        check_candidate(spec, found[row])


@few
@any_space
def test_no_segment_is_shorter_than_a_step_and_no_window_as_long_as_the_sequence(
    spec: Spec, target: Target, allow: set[str]
) -> None:
    found = make_grid(spec, target, tuple(allow))
    assert (np.asarray(found.segments) <= spec.steps).all()
    assert all(one is None or one < spec.steps for one in values(found, "window"))


@few
@any_space
def test_only_lossy_knobs_that_are_allowed_are_turned(spec: Spec, target: Target, allow: set[str]) -> None:
    found = make_grid(spec, target, tuple(allow))
    words = {"precision": "precision", "window": "window", "state_8bit": "8bit"}
    usual = {"precision": "fp32", "window": None, "state_8bit": False}
    turned = {words[name] for name, value in usual.items() if values(found, name) != {value}}
    assert turned <= allow


@few
@any_space
def test_what_pytorch_would_do_is_always_there(spec: Spec, target: Target, allow: set[str]) -> None:
    found = make_grid(spec, target, tuple(allow))
    plain = (column(found, "segments") == 1) & is_none(column(found, "window"))
    plain &= (column(found, "microbatch") == spec.batch) & (column(found, "precision") == "fp32")
    assert plain.any()


def test_a_grid_has_every_combination_of_setting_shape_and_microbatch_once() -> None:
    space = space_of(LSTM, allow=("precision",))
    found = grid(LSTM, space)
    assert len(found) == len(space.settings) * len(shapes(LSTM, space)) * len(microbatches(LSTM.batch))
    assert len({found[row] for row in range(len(found))}) == len(found)


# the gradient


def test_a_bidirectional_model_has_segments_and_neither_window_nor_chunks_nor_levels() -> None:
    found = make_grid(BOTH_WAYS, CARD, ALLOWED)
    assert values(found, "window") == {None}
    assert values(found, "recompute") == {True}
    assert values(found, "levels") == {1}
    assert max(values(found, "segments")) > 100


def test_windows_are_there_if_they_are_allowed() -> None:
    assert values(make_grid(LSTM, CARD, ("window",)), "window") > {None, 64, 4096}


def test_of_half_precisions_the_one_without_scaling_is_taken() -> None:
    assert values(make_grid(LSTM, CARD, ("precision",)), "precision") == {"fp32", "bf16"}


def test_8_bits_are_offered_only_where_somebody_can_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for there in (False, True):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, there=there: object() if there else None)
        found[there] = values(make_grid(LSTM, CARD, ("8bit",)), "state_8bit")
    assert found == {False: {False}, True: {False, True}}


def test_what_is_lossy_is_marked_row_by_row() -> None:
    found = make_grid(LSTM, CARD, ALLOWED)
    marked = lossy(found)
    for row in range(0, len(found), 97):
        assert marked[row] == bool({*found[row].lossy} - {"precision"})


# the settings


@pytest.mark.parametrize(
    ("spec", "target", "engines"),
    [
        (LSTM, CPU, {"onednn", "native"}),
        (Spec(cell="lstm", seq=10, projection=4), CPU, {"native"}),
        (BOTH_WAYS, CPU, {"native"}),
        (LSTM, CARD, {"cudnn"}),
    ],
)
def test_the_engines_are_those_that_the_device_has(spec: Spec, target: Target, engines: set[str]) -> None:
    assert values(make_grid(spec, target), "engine") == engines


def test_a_card_needs_no_threads() -> None:
    assert values(make_grid(LSTM, CARD), "threads") == {None}


@pytest.mark.parametrize(("cores", "threads"), [(1, {1}), (2, {1, 2}), (4, {1, 4}), (16, {1, 8, 16})])
def test_threads_are_all_cores_or_one_or_a_half_of_many(cores: int, threads: set[int]) -> None:
    space = make_space(LSTM, CPU, GIB, Choices(cores=cores))
    assert {one["threads"] for one in space.settings} == threads


def test_what_weighs_little_has_no_knob_of_its_own() -> None:
    small, large = Spec(cell="gru", seq=10, hidden=8), Spec(cell="gru", seq=10, vocab=500_000, hidden=512)
    assert values(make_grid(small, CARD), "offload") == {False}
    assert values(make_grid(small, CARD), "keep") == {"device"}
    assert values(make_grid(large, CARD), "offload") == {False, True}
    assert values(make_grid(large, CARD), "update") == {"foreach", "fused"}


# knobs that are fixed


@pytest.mark.parametrize(
    "fixed",
    [
        {"microbatch": 7},
        {"segments": 1},
        {"segments": 77},
        {"segments": 16, "recompute": False},
        {"recompute": False},
        {"levels": 3},
        {"segments": 9, "levels": 2},
        {"precision": "fp16"},
        {"threads": 5},
        {"engine": "native"},
        {"allocator": "system"},
        {"allocator": "fast"},
        {"update": "loop"},
        {"keep": "host", "offload": True},
        {"window": 100},
        {"window": None},
        {"state_8bit": True},
        {"workers": 3, "prefetch": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("target", [CPU, CARD], ids=["cpu", "card"])
def test_a_knob_that_is_fixed_has_one_value_and_every_row_is_valid(target: Target, fixed: dict[str, Any]) -> None:
    found = make_grid(LSTM, target, ALLOWED, **fixed)
    assert {name: values(found, name) for name in fixed} == {name: {value} for name, value in fixed.items()}
    for row in range(0, len(found), 53):
        check_candidate(LSTM, found[row])


def test_what_is_not_fixed_is_still_searched() -> None:
    found = make_grid(LSTM, CPU, (), segments=16)
    assert len(values(found, "microbatch")) > 5
    assert values(found, "recompute") == {True, False}


# ladders


def test_of_sizes_that_take_equally_many_passes_the_smallest_is_tried() -> None:
    assert microbatches(32) == [1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 32]


def test_segments_are_about_a_fifth_apart() -> None:
    assert segment_counts(80) == [2, 3, 4, 5, 6, 7, 8, 10]


@given(batch=up_to(1 << 17))
@settings(max_examples=25)
def test_microbatches_go_from_one_to_the_batch_and_waste_nothing(batch: int) -> None:
    sizes = microbatches(batch)
    assert (sizes[0], sizes[-1]) == (1, batch)
    assert sizes == sorted({*sizes})
    assert len(sizes) <= 256
    assert all(size == -(-batch // -(-batch // size)) for size in sizes)


@given(batch=up_to(1 << 17))
@settings(max_examples=25)
def test_if_the_largest_is_wanted_no_microbatch_is_far_from_the_next(batch: int) -> None:
    sizes = microbatches(batch, finest=True)
    assert (sizes[0], sizes[-1]) == (1, batch)
    assert all(after <= max(before + 1, FINE**2 * before) for before, after in itertools.pairwise(sizes))


@given(steps=up_to(10**9))
def test_segments_go_up_to_pieces_of_a_few_steps_by_no_more_than_half(steps: int) -> None:
    counts = segment_counts(steps)
    assert all(2 <= one <= steps for one in counts)
    assert all(after <= max(before + 1, 1.5 * before) for before, after in itertools.pairwise(counts))
    assert steps < 2 * SHORTEST_PIECE or counts[-1] == steps // SHORTEST_PIECE


# messages


def test_what_cannot_be_allowed_is_refused_with_what_can() -> None:
    error = attempt(lambda: check_allow(("precision", "windows")))
    assert has_three_beats(error)
    assert str(error) == "--allow takes precision, window, 8bit, or none, but got 'windows'. Did you mean window?"


def test_what_can_be_allowed_is_taken() -> None:
    check_allow(())
    check_allow(ALLOWED)


@pytest.mark.parametrize(
    ("fixed", "word"),
    [({"precision": "bf16"}, "precision"), ({"window": 10}, "window"), ({"state_8bit": True}, "8bit")],
)
def test_a_lossy_knob_that_is_fixed_must_be_allowed(fixed: dict[str, Any], word: str) -> None:
    error = attempt(lambda: check_fixed(fixed, tuple({*ALLOWED} - {word})))
    assert has_three_beats(error)
    assert f"and not --allow {word}. Add {word} to --allow, or leave it out." in str(error)
    check_fixed(fixed, (word,))


@pytest.mark.parametrize("fixed", [{"precision": "fp32"}, {"window": None}, {"state_8bit": False}, {"segments": 4}])
def test_what_loses_nothing_needs_no_permission(fixed: dict[str, Any]) -> None:
    check_fixed(fixed, ())


def test_each_engine_has_the_tight_and_the_fast_heap() -> None:
    found = make_grid(LSTM)
    pairs = {*zip(column(found, "engine").tolist(), column(found, "allocator").tolist(), strict=True)}
    assert pairs == {("onednn", "tight"), ("onednn", "fast"), ("native", "tight"), ("native", "fast")}
