"""Advice: what would lower the peak, with figures that are the estimator's own."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import specs

import oomguard
from oomguard._core.units import GIB, MIB, format_bytes
from oomguard._device.find import find_target
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.engines.cudnn import MAX_STEPS
from oomguard._plan.advice import CLIFF, advise, in_flags
from oomguard._plan.buckets import padded_share, padded_tokens
from oomguard._spec.candidate import KNOBS, Candidate
from oomguard._spec.spec import Spec

CARD = "a100-80gb"


def advice(device: str = "cpu", budget_bytes: int = 10**6 * GIB, **asked: Any) -> list[str]:
    """What is said of a spec and knobs by name."""
    spec = Spec(**{name: value for name, value in asked.items() if name not in KNOBS})
    knobs = {name: value for name, value in asked.items() if name in KNOBS}
    estimate = oomguard.estimate(spec, device=device, budget_bytes=budget_bytes, **knobs)
    return advise(spec, estimate, find_target(device))


def flags(line: str) -> dict[str, Any]:
    """The flags that a line names, as fields and knobs."""
    pairs = re.findall(r"--([a-z-]+) ([a-z0-9-]+)", line)
    return {name.replace("-", "_"): int(value) if value.isdecimal() else value for name, value in pairs}


def about(topic: str, lines: list[str]) -> list[str]:
    return [line for line in lines if topic in line]


def padding(lengths: dict[int, int], microbatch: int) -> float:
    """The share of padding in microbatches that are drawn at random."""
    return padded_share(lengths, padded_tokens(lengths, microbatch))


def test_a_fifth_of_two_sequences_that_are_drawn_at_random_is_padding() -> None:
    assert padding({100: 1, 300: 1}, 2) == pytest.approx(0.2)


@settings(max_examples=50)
@given(specs(), st.sampled_from(["cpu", CARD]), st.integers(1, 1 << 50))
def test_there_are_never_more_than_three_lines(spec: Spec, device: str, budget_bytes: int) -> None:
    estimate = oomguard.estimate(spec, device=device, budget_bytes=budget_bytes)
    assert len(advise(spec, estimate, find_target(device))) <= 3


@pytest.mark.parametrize(
    "asked",
    [
        {"cell": "lstm", "seq": 10_000, "budget_bytes": 4 * GIB},
        {"cell": "gru", "seq": 10_000, "budget_bytes": 3 * GIB},
        {"cell": "gru", "seq": 100_000, "hidden": 1000, "budget_bytes": 2 * GIB},
        {"cell": "lstm", "seq": 20_000, "hidden": 512, "budget_bytes": 8 * GIB, "device": CARD},
        {"cell": "rnn", "seq": 100_000, "budget_bytes": 8 * GIB, "device": CARD},
    ],
    ids=str,
)
def test_what_is_said_to_help_makes_it_fit(asked: dict[str, Any]) -> None:
    lines = [line for line in advice(**asked) if line.startswith("--")]
    changed = [asked | flags(line) for line in lines]
    assert [oomguard.estimate(**each).fits for each in changed] == [True] * len(lines) != []


@pytest.mark.parametrize("device", ["cpu", CARD])
def test_the_figures_of_a_line_are_the_estimates_before_and_after(device: str) -> None:
    asked: dict[str, Any] = {"cell": "lstm", "seq": 10_000, "device": device}
    line = about("--segments", advice(budget_bytes=4 * GIB, **asked))[0]
    before, after = oomguard.estimate(**asked), oomguard.estimate(**asked, **flags(line))
    assert line.endswith(f"{format_bytes(int(after.total_bytes))} instead of {format_bytes(int(before.total_bytes))}.")


def test_segments_are_offered_for_two_directions_too() -> None:
    assert about("--segments", advice(cell="gru", seq=100_000, bidirectional=True, budget_bytes=GIB, device=CARD))


def test_a_small_part_of_the_budget_needs_no_advice() -> None:
    assert advice(cell="lstm", seq=100) == []


def test_microbatch_and_segments_go_together_where_neither_is_enough() -> None:
    lines = advice(cell="gru", seq=100_000, hidden=1000, budget_bytes=GIB)
    assert {"microbatch", "segments"} <= flags(lines[0]).keys()


def test_a_sequence_too_long_for_cudnn_comes_first_with_the_segments_it_needs() -> None:
    lines = advice(cell="gru", seq=3 * MAX_STEPS + 1, device=CARD)
    assert "--segments 4 or more" in lines[0]


def test_a_sequence_in_enough_segments_is_not_too_long_for_cudnn() -> None:
    assert not about("at most", advice(cell="gru", seq=3 * MAX_STEPS + 1, segments=4, device=CARD))


def test_the_cpu_takes_sequences_of_any_length() -> None:
    assert not about("at most", advice(cell="gru", seq=3 * MAX_STEPS + 1))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_hidden_size_just_above_the_cliff_is_told_what_it_costs(cell: str) -> None:
    lines = about("--hidden 128", advice(cell=cell, seq=1000, hidden=130, device=CARD))
    assert f"{CLIFF[cell]} times" in lines[0]


@pytest.mark.parametrize("hidden", [64, 128, 160, 256])
def test_a_hidden_size_not_just_above_the_cliff_hears_nothing_of_it(hidden: int) -> None:
    assert not about("times slower", advice(cell="gru", seq=1000, hidden=hidden, device=CARD))


def test_a_packed_sequence_has_no_cliff() -> None:
    assert not about("times slower", advice(cell="gru", seq=1000, hidden=130, packed=True, device=CARD))


def test_a_larger_hidden_size_that_needs_less_is_named() -> None:
    asked: dict[str, Any] = {"cell": "gru", "seq": 8000, "layers": 4, "device": CARD}
    wider = flags(about("would need less", advice(hidden=192, **asked))[0])["hidden"]
    sizes = [oomguard.estimate(hidden=size, **asked).total_bytes for size in (wider, 192)]
    assert wider > 192
    assert sizes == sorted(sizes)


def test_padding_is_told_with_its_share() -> None:
    lengths = {100: 5000, 2000: 40}
    line = about("padding", advice(cell="gru", lengths=lengths, device=CARD))[0]
    assert line.startswith(f"{padding(lengths, 32):.0%} of the tokens")


def test_packed_sequences_have_no_padding() -> None:
    assert not about("padding", advice(cell="gru", lengths={100: 5000, 2000: 40}, packed=True))


@given(st.dictionaries(st.integers(1, 10**9), st.integers(1, 1 << 40), min_size=1, max_size=5), st.integers(1, 1 << 20))
def test_the_share_of_padding_is_a_share(lengths: dict[int, int], microbatch: int) -> None:
    assert 0 <= padding(lengths, microbatch) < 1


@given(st.integers(1, 10**9), st.integers(1, 1 << 20))
def test_sequences_of_one_length_have_no_padding(length: int, microbatch: int) -> None:
    assert padding({length: 7}, microbatch) == pytest.approx(0)


@pytest.mark.parametrize("allocator", ["system", "fast"])
def test_an_allocator_that_keeps_what_is_freed_hears_of_the_steady_one(allocator: str) -> None:
    assert about("--allocator tight", advice(cell="gru", seq=10_000, allocator=allocator))


def test_batch_first_hears_what_its_copies_cost() -> None:
    lines = advice(cell="rnn", seq=10_000, features=512, hidden=256, batch_first=True, device=CARD)
    assert about("no --batch-first, since time-first tensors", lines)


def test_another_optimizer_is_named_where_its_state_is_most_of_the_peak() -> None:
    asked: dict[str, Any] = {"cell": "lstm", "seq": 10, "vocab": 100_000, "hidden": 1024, "batch": 1}
    assert about("--optimizer adafactor", advice(**asked, update="fused", budget_bytes=2 * GIB))


def test_no_eight_bit_optimizer_is_advised_on_the_cpu() -> None:
    asked: dict[str, Any] = {"cell": "lstm", "seq": 10, "vocab": 100_000, "hidden": 1024, "batch": 1}
    assert not about("adam8bit", advice(**asked, budget_bytes=100 * MIB))


def test_an_evaluation_pass_is_not_told_of_segments() -> None:
    spec = Spec(cell="gru", seq=10_000)
    estimate = oomguard.estimate(spec, training=False, budget_bytes=100 * MIB)
    assert not about("--segments", advise(spec, estimate, find_target("cpu")))


def test_several_candidates_at_once_get_no_advice() -> None:
    spec = Spec(cell="gru", seq=100)
    estimate = oomguard.estimate(spec, microbatch=[1, 2])
    with pytest.raises(AssertionError):
        advise(spec, estimate, find_target("cpu"))


def test_a_line_does_not_change_what_was_asked() -> None:
    spec = Spec(cell="lstm", seq=10_000)
    estimate = oomguard.estimate(spec, budget_bytes=GIB)
    advise(spec, estimate, find_target("cpu"))
    assert estimate.candidate == Candidate(microbatch=32)


def test_settings_are_told_as_the_command_line_takes_them() -> None:
    assert in_flags(microbatch=8, layer_norm=True, batch_first=False) == "--microbatch 8 --layer-norm no --batch-first"


def test_without_a_budget_segments_come_first() -> None:
    spec = Spec(cell="lstm", seq=10_000)
    first = advise(spec, estimate_step(spec, Candidate(microbatch=32)), find_target("cpu"))[0]
    assert first.startswith("--segments 108, the same gradient for one more forward pass:")
