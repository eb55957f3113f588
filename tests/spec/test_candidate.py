"""Candidate: one value for every knob."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import UNPRINTABLE, attempt, candidates, garbage_for, has_three_beats, specs

from oomguard._core.errors import MisuseError
from oomguard._spec.candidate import KNOBS, OLD_NAMES, Candidate, Candidates, is_none, make_candidate, serve
from oomguard._spec.spec import Spec

FIELDS = Candidate.__struct_fields__
SPEC = Spec(cell="gru", seq=100, batch=32)


@given(candidates())
def test_a_candidate_goes_through_json_and_back(candidate: Candidate) -> None:
    assert msgspec.json.decode(msgspec.json.encode(candidate), type=Candidate) == candidate


@given(garbage_for(FIELDS))
def test_any_values_make_a_candidate_or_misuse(fields: dict[str, Any]) -> None:
    made = attempt(Candidate, **({"microbatch": 1} | fields))
    assert isinstance(made, Candidate) or has_three_beats(made)


@given(garbage_for(FIELDS))
def test_what_was_taken_comes_back_from_json(fields: dict[str, Any]) -> None:
    made = attempt(Candidate, **({"microbatch": 1} | fields))
    assert has_three_beats(made) or msgspec.json.decode(msgspec.json.encode(made), type=Candidate) == made


@pytest.mark.parametrize("value", UNPRINTABLE.values(), ids=UNPRINTABLE)
@pytest.mark.parametrize("name", FIELDS)
def test_a_value_that_cannot_be_shown_is_refused_with_three_beats(name: str, value: Any) -> None:
    assert has_three_beats(attempt(Candidate, **({"microbatch": 1} | {name: value})))


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in ("window", "engine", "threads", "allocator")])
def test_a_knob_that_must_have_a_value_does_not_take_none(name: str) -> None:
    fields: dict[str, Any] = {"microbatch": 1, name: None}
    with pytest.raises(MisuseError):
        Candidate(**fields)


@pytest.mark.parametrize("name", ["recompute", "offload", "state_8bit"])
def test_a_switch_takes_no_number_for_true(name: str) -> None:
    fields: dict[str, Any] = {"microbatch": 1, name: 1}
    with pytest.raises(MisuseError, match="true or false"):
        Candidate(**fields)


def test_a_mistyped_choice_is_answered_by_the_nearest() -> None:
    with pytest.raises(MisuseError, match=r"Did you mean .*bf16"):
        Candidate(microbatch=1, precision="bfp16")  # type: ignore[arg-type]


def test_segments_and_a_window_exclude_each_other() -> None:
    with pytest.raises(MisuseError, match="either segments or a window"):
        Candidate(microbatch=1, segments=2, window=10)


def test_a_candidate_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Candidate(microbatch=1).microbatch = 2  # type: ignore[misc]


def test_every_field_is_a_knob_that_is_exact_or_lossy() -> None:
    assert list(KNOBS) == list(FIELDS)


def test_only_precision_window_and_8_bit_state_are_lossy() -> None:
    assert {name for name, knob in KNOBS.items() if knob.role.lossy} == {"precision", "window", "state_8bit"}


@given(candidates())
def test_a_candidate_names_exactly_the_lossy_knobs_that_it_turns(candidate: Candidate) -> None:
    plain = Candidate(microbatch=1)
    turned = {
        name for name in ("precision", "window", "state_8bit") if getattr(candidate, name) != getattr(plain, name)
    }
    assert set(candidate.lossy) == turned


@given(specs(), st.data())
def test_any_microbatch_within_the_batch_finds_its_accumulation(spec: Spec, data: st.DataObject) -> None:
    microbatch = data.draw(st.integers(1, spec.batch))
    accumulation = make_candidate(spec, microbatch=microbatch).accumulation
    assert (accumulation - 1) * microbatch < spec.batch <= accumulation * microbatch


@given(specs())
def test_without_knobs_the_whole_batch_goes_in_one_pass(spec: Spec) -> None:
    assert make_candidate(spec) == Candidate(microbatch=spec.batch)


@given(specs(), st.data())
def test_an_accumulation_gives_the_batch_or_is_refused(spec: Spec, data: st.DataObject) -> None:
    accumulation = data.draw(st.integers(1, spec.batch))
    made = attempt(make_candidate, spec=spec, accumulation=accumulation)
    assert has_three_beats(made) or (isinstance(made, Candidate) and made.accumulation == accumulation)


@given(specs(), garbage_for(FIELDS))
def test_any_knobs_make_a_candidate_for_the_spec_or_misuse(spec: Spec, knobs: dict[str, Any]) -> None:
    made = attempt(make_candidate, spec=spec, **knobs)
    assert isinstance(made, Candidate) or has_three_beats(made)


@pytest.mark.parametrize(
    "knobs",
    [
        {"microbatch": 0},
        {"microbatch": -1},
        {"microbatch": 33},
        {"microbatch": 8, "accumulation": 3},
        {"microbatch": 8, "accumulation": 5},
        {"accumulation": 33},
        {"segments": 0},
        {"segments": 101},
        {"window": 101},
        {"window": 0},
        {"threads": 0},
        {"threads": 10**30},
        {"workers": -1},
        {"prefetch": 0},
        {"microbatch": True},
        {"microbatch": 8.0},
        {"microbatch": float("nan")},
        {"engine": "cuda"},
        {"precision": "fp8"},
    ],
    ids=str,
)
def test_a_candidate_that_cannot_serve_the_spec_is_refused_with_three_beats(knobs: dict[str, Any]) -> None:
    with pytest.raises(MisuseError) as caught:
        make_candidate(SPEC, **knobs)
    assert has_three_beats(caught.value)


def test_the_advice_for_a_wrong_accumulation_is_the_right_one() -> None:
    with pytest.raises(MisuseError, match=r"With --microbatch 8 use --accumulation 4"):
        make_candidate(SPEC, microbatch=8, accumulation=3)


def test_as_many_segments_as_steps_are_allowed() -> None:
    assert make_candidate(SPEC, segments=100).segments == 100


@pytest.mark.parametrize(("old", "new"), OLD_NAMES.items())
def test_an_allocator_of_version_0_1_is_read_and_has_its_present_name(old: Any, new: str) -> None:
    assert Candidate(microbatch=1, allocator=old).allocator == new
    assert msgspec.json.decode(f'{{"microbatch": 1, "allocator": "{old}"}}', type=Candidate).allocator == new
    assert Candidates(microbatch=1, allocator=old).allocator == new
    assert Candidates(microbatch=[1, 2], allocator=[old, None]).allocator.tolist() == [new, None]
    assert Candidates(microbatch=[1, 2], allocator=np.array([old, "expandable"])).allocator.tolist() == [
        new,
        "expandable",
    ]


def test_old_names_of_allocators_are_not_offered() -> None:
    assert KNOBS["allocator"].field.choices == ("system", "tight", "fast", "expandable")


def test_candidates_get_the_accumulation_that_each_microbatch_needs() -> None:
    spec = Spec(cell="gru", seq=100, batch=32)
    assert make_candidate(spec, microbatch=7).accumulation == 5
    assert serve(spec, Candidates(microbatch=[7, 32])).accumulation.tolist() == [5, 1]


@pytest.mark.parametrize(("knob", "none"), [(None, True), (np.array([1, None]), [False, True])])
def test_a_knob_that_is_none_is_found(knob: Any, none: Any) -> None:
    assert is_none(knob).tolist() == none
