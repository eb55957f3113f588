"""Shorter versions of a candidate: the same pieces, fewer of them."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import up_to

from oomguard._spec.candidate import Candidate, check_candidate, make_candidate
from oomguard._spec.lengths import longest_that_fits, shorten, with_steps
from oomguard._spec.spec import Spec

LSTM = Spec(cell="lstm", seq=10_000)
SPECS = st.builds(Spec, cell=st.just("gru"), seq=up_to(10**6), batch=up_to(64), bidirectional=st.booleans())


@st.composite
def shortened(draw: st.DrawFn) -> tuple[Spec, Candidate, int]:
    """A spec, a candidate for it, and how long its sequences are to be."""
    spec = draw(SPECS)
    knobs: dict[str, Any] = {"microbatch": draw(st.integers(1, spec.batch))}
    kinds = ["plain", "segments"] if spec.bidirectional else ["plain", "segments", "levels", "chunks", "window"]
    kind = draw(st.sampled_from(kinds))
    if kind in ("segments", "levels", "chunks"):
        knobs["segments"] = draw(st.integers(1, spec.steps))
    knobs |= {"levels": draw(st.integers(2, 3))} if kind == "levels" else {}
    knobs |= {"recompute": False} if kind == "chunks" else {}
    knobs |= {"window": draw(st.integers(1, spec.steps))} if kind == "window" else {}
    return spec, make_candidate(spec, **knobs), draw(up_to(spec.steps))


def piece(spec: Spec, candidate: Candidate) -> int:
    """Steps of a piece."""
    return -(-spec.steps // candidate.segments)


@settings(max_examples=150)
@given(case=shortened(), fewer=st.booleans())
def test_the_shorter_candidate_serves_the_shorter_spec(case: tuple[Spec, Candidate, int], fewer: bool) -> None:
    spec, candidate, steps = case
    check_candidate(*shorten(spec, candidate, steps, fewer=fewer))


@settings(max_examples=150)
@given(case=shortened())
def test_it_is_no_longer_than_asked_unless_pieces_of_one_step_are(case: tuple[Spec, Candidate, int]) -> None:
    spec, candidate, steps = case
    short, _ = shorten(spec, candidate, steps)
    assert short.steps <= max(steps, 2 * candidate.levels)


@settings(max_examples=150)
@given(case=shortened())
def test_pieces_stay_as_long_as_they_are_where_two_of_them_fit(case: tuple[Spec, Candidate, int]) -> None:
    spec, candidate, steps = case
    short, cut = shorten(spec, candidate, steps)
    least = min(candidate.segments, 2 * candidate.levels)
    if candidate.segments > 1 and steps >= least * piece(spec, candidate):
        assert piece(short, cut) == piece(spec, candidate)
        assert cut.segments >= least


@settings(max_examples=50)
@given(case=shortened())
def test_nothing_but_pieces_and_window_changes(case: tuple[Spec, Candidate, int]) -> None:
    spec, candidate, steps = case
    _, cut = shorten(spec, candidate, steps)
    pieces = {"segments": candidate.segments, "window": candidate.window}
    assert msgspec.structs.replace(cut, **pieces) == candidate


@settings(max_examples=50)
@given(case=shortened())
def test_asked_for_the_whole_length_it_is_the_same(case: tuple[Spec, Candidate, int]) -> None:
    spec, candidate, _ = case
    assert shorten(spec, candidate, spec.steps) == (spec, candidate)
    assert shorten(spec, candidate, spec.steps + 1) == (spec, candidate)


@pytest.mark.parametrize("segments", [2, 7, 11, 91, 99, 128, 9999])
def test_what_is_shortened_runs_in_pieces_of_the_very_length(segments: int) -> None:
    candidate = make_candidate(LSTM, segments=segments)
    steps = 3 * piece(LSTM, candidate)
    short, cut = shorten(LSTM, candidate, steps)
    assert piece(short, cut) == piece(LSTM, candidate)


def test_chunks_keep_their_number_if_they_are_asked_to() -> None:
    candidate = make_candidate(LSTM, segments=64, recompute=False)
    short, cut = shorten(LSTM, candidate, 1000, fewer=False)
    assert (short.steps, cut.segments) == (1000, 64)


def test_two_pieces_that_are_too_long_are_cut() -> None:
    short, cut = shorten(LSTM, make_candidate(LSTM, segments=4), 1000)
    assert (short.steps, cut.segments) == (1000, 2)


def test_a_window_is_no_longer_than_the_sequence() -> None:
    short, cut = shorten(LSTM, make_candidate(LSTM, window=2048), 500)
    assert (short.steps, cut.window) == (500, 500)


def test_lengths_are_cut_and_none_is_lost() -> None:
    spec = Spec(cell="gru", lengths={10: 5, 100: 7, 1000: 2, 5000: 1})
    short = with_steps(spec, 500)
    assert short.lengths == {10: 5, 100: 7, 500: 3}
    assert short.steps == 500


def test_a_spec_without_lengths_stays_without() -> None:
    assert with_steps(LSTM, 7) == msgspec.structs.replace(LSTM, seq=7)


@pytest.mark.parametrize(("segments", "steps"), [(100, 400), (99, 405)])
def test_a_first_segment_that_is_shorter_stays_so(segments: int, steps: int) -> None:
    """99 segments of 10,000 steps are a first one of 99 and others of 102."""
    short, cut = shorten(LSTM, make_candidate(LSTM, segments=segments), 450)
    assert (short.seq, cut.segments) == (steps, 4)


def test_the_longest_that_fits_is_found_by_doubling_and_halving() -> None:
    assert longest_that_fits(lambda steps: steps <= 7, 1, parts=100) == 7
    assert longest_that_fits(lambda steps: False, 0, 9, parts=9) == 0
