"""Specs, candidates and figures in words."""

from typing import Any

import pytest

from oomguard import Candidate, Spec
from oomguard._report.words import (
    candidate_words,
    chosen_words,
    figure,
    peak_words,
    pieces_words,
    rows_words,
    sentence,
    setting_words,
    spec_words,
    speed_words,
    task_words,
    times,
)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cell": "lstm", "bidirectional": True}, "lstm 64 → 256 × 2 layers × 2 directions"),
        ({"cell": "gru", "vocab": 5000}, "gru 5,000 → 256 → 256 × 2 layers"),
        ({"cell": "lstm", "projection": 32, "layers": 1}, "lstm 64 → 256 → 32 × 1 layer"),
    ],
)
def test_a_model_is_told_layer_by_layer(fields: dict[str, Any], words: str) -> None:
    assert spec_words(Spec(seq=10, **fields)) == words


def test_a_task_is_a_model_a_length_a_batch_and_a_device() -> None:
    assert task_words(Spec(cell="gru", seq=1000), "cpu") == "gru 64 → 256 × 2 layers, T = 1,000, batch 32 on cpu"


def test_a_sentence_has_a_capital_and_a_full_stop() -> None:
    assert sentence("microbatch 8") == "Microbatch 8."


@pytest.mark.parametrize(("count", "words"), [(0, "0 passes"), (1, "1 pass"), (2000, "2,000 passes")])
def test_a_noun_agrees_with_its_count(count: int, words: str) -> None:
    assert times(count, "pass", "es") == words


def test_a_microbatch_is_told_with_its_passes() -> None:
    assert rows_words(Candidate(microbatch=8, accumulation=4)) == "8 × 4"


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"segments": 512, "levels": 2}, "512 in 2 levels"),
        ({"segments": 4, "recompute": False}, "4 without recomputation"),
        ({"window": 50}, "window 50"),
    ],
)
def test_segments_or_the_window_are_told(knobs: dict[str, Any], words: str) -> None:
    assert pieces_words(Candidate(microbatch=8, **knobs)) == words


def test_only_the_precision_and_settings_off_their_default_are_told() -> None:
    candidate = Candidate(microbatch=8, engine="onednn", threads=2, allocator="expandable")
    assert [*setting_words(candidate).values()] == ["fp32", "engine onednn", "2 threads", "allocator expandable"]


def test_a_candidate_is_told_with_every_knob_that_says_something() -> None:
    candidate = Candidate(microbatch=8, accumulation=4, segments=45, engine="onednn")
    assert candidate_words(candidate) == "microbatch 8 × 4 passes, 45 segments, fp32, engine onednn"


@pytest.mark.parametrize(
    ("per_second", "word", "words"),
    [
        (1.4912, "sequences", "1.49 sequences/s"),
        (14870.3, "tokens", "14,870 tokens/s"),
        (0.002, "sequences", "7.20 sequences/h"),
    ],
)
def test_a_speed_is_per_a_unit_of_time_that_suits_it(per_second: float, word: str, words: str) -> None:
    assert speed_words(per_second, word) == words


@pytest.mark.parametrize(
    ("value", "text"), [(0.08766, "0.0877"), (12.345, "12.3"), (99.96, "100"), (14870.3, "14,870")]
)
def test_a_figure_has_three_digits_or_all_before_the_point(value: float, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        ("forward", "Memory peaks at the end of the forward pass."),
        ("backward of layer 2", "Memory peaks in the backward pass of layer 2."),
    ],
)
def test_the_moment_of_the_peak_is_told_in_a_sentence(moment: str, words: str) -> None:
    assert peak_words(moment) == words


def test_the_candidate_of_a_plan_says_what_its_allocator_does() -> None:
    words = chosen_words(Candidate(microbatch=8, allocator="fast"))
    assert words == "Microbatch 8 × 1 pass, fp32, allocator fast (keeps freed memory)."
    assert chosen_words(Candidate(microbatch=8)) == "Microbatch 8 × 1 pass, fp32."
