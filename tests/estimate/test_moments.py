"""The moments of a step: what counts when, and that the peak is the largest of them."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import specs

from oomguard._core.errors import MisuseError
from oomguard._estimate import terms
from oomguard._estimate.breakdown import Estimate, estimate_step
from oomguard._estimate.cards import card
from oomguard._estimate.passes import borders_kept
from oomguard._estimate.target import CPU, Target, on_card, resident_within
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.spec import Spec

A100 = on_card(card("a100-80gb"))
PUBLISHED = [
    row
    for row in csv.DictReader((Path(__file__).parents[1] / "facts" / "cudnn_published.csv").read_text().splitlines())
    if row["kind"] == "peak_allocated"
]
PLACES = st.sampled_from([CPU, A100])


def peak(target: Target = CPU, training: bool = True, knobs: dict[str, Any] | None = None, **fields: Any) -> Estimate:
    defaults: dict[str, Any] = {"cell": "lstm", "seq": 1000, "batch": 8}
    spec = Spec(**(defaults | fields))
    return estimate_step(spec, make_candidate(spec, **(knobs or {})), target, training=training)


@st.composite
def asked(draw: st.DrawFn) -> tuple[Spec, Candidate]:
    """Any spec with any knobs that it can have."""
    spec = draw(specs())
    knobs: dict[str, Any] = {
        "microbatch": draw(st.integers(1, spec.batch)),
        "precision": draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        "engine": draw(st.sampled_from([None, "native"])),
        "update": draw(st.sampled_from(["foreach", "fused", "loop"])),
        "allocator": draw(st.sampled_from([None, "system"])),
        "recompute": draw(st.booleans()),
        "offload": draw(st.booleans()),
        "workers": draw(st.integers(0, 128)),
        draw(st.sampled_from(["segments"] if spec.bidirectional else ["segments", "window"])): draw(
            st.integers(1, spec.steps)
        ),
        "keep": draw(st.sampled_from(["device", "host"])),
    }
    knobs["recompute"] |= spec.bidirectional
    knobs["levels"] = draw(st.integers(1, 3)) if knobs["recompute"] and not spec.bidirectional else 1
    return spec, make_candidate(spec, **knobs)


@given(asked(), PLACES)
def test_the_terms_add_up_to_the_total(what: tuple[Spec, Candidate], target: Target) -> None:
    estimate = estimate_step(*what, target)
    assert sum(estimate.terms.values()) == estimate.total_bytes


@given(asked(), PLACES)
def test_the_peak_is_the_largest_moment(what: tuple[Spec, Candidate], target: Target) -> None:
    estimate = estimate_step(*what, target)
    assert estimate.total_bytes == estimate.moments[str(estimate.moment)] == max(estimate.moments.values())


@given(asked(), PLACES)
def test_no_term_is_negative_and_none_is_a_fraction(what: tuple[Spec, Candidate], target: Target) -> None:
    estimate = estimate_step(*what, target)
    assert all(isinstance(value, int) and value >= 0 for value in estimate.terms.values())


@given(specs(), PLACES)
def test_evaluation_never_needs_more_than_training(spec: Spec, target: Target) -> None:
    candidate = make_candidate(spec)
    evaluation = estimate_step(spec, candidate, target, training=False)
    assert evaluation.total_bytes <= estimate_step(spec, candidate, target).total_bytes


@pytest.mark.parametrize("target", [CPU, A100], ids=lambda target: target.device)
def test_the_largest_specs_stay_inside_an_int64(target: Target) -> None:
    """Arrays have 64 bits: what a single candidate needs at the bounds of everything must fit them."""
    spec = Spec(cell="lstm", seq=1 << 10, features=1 << 15, batch=1 << 20, hidden=1 << 10, layers=32)
    estimate = estimate_step(spec, make_candidate(spec, workers=128, prefetch=32), target)
    assert max(estimate.total_bytes, estimate.host_bytes) < 1 << 62


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row['cell']}-{row['hidden']}")
def test_published_a100_peaks_are_met_within_one_percent(row: dict[str, str]) -> None:
    """The study had 32 batches resident on the card: 31 more than the one that a step needs."""
    seq, batch, hidden, layers = (int(row[key]) for key in ("seq", "microbatch", "hidden", "layers"))
    shape: dict[str, Any] = {"cell": row["cell"], "features": int(row["input"]), "hidden": hidden, "layers": layers}
    spec = Spec(**shape, seq=seq, batch=batch, batch_first=True, optimizer="adamw")
    candidate = make_candidate(spec)
    estimate = estimate_step(spec, candidate, A100)
    assert estimate.allocated_bytes is not None
    resident = estimate.allocated_bytes + 31 * terms.input_bytes(spec, candidate)
    assert resident == pytest.approx(int(row["bytes"]), rel=0.01)


def test_memory_on_a_card_is_not_monotonic_in_the_hidden_size() -> None:
    small: dict[str, Any] = {"cell": "gru", "features": 9, "layers": 4, "seq": 8000, "batch": 16}
    assert peak(A100, hidden=256, **small).total_bytes < peak(A100, hidden=192, **small).total_bytes


def test_gradients_live_across_passes() -> None:
    single, double = peak(knobs={"microbatch": 8}), peak(knobs={"microbatch": 8}, batch=16)
    gradients = sum(terms.gradients_bytes(Spec(cell="lstm", seq=1000)).values())
    assert double.moments["forward"] - single.moments["forward"] == gradients


def test_segments_leave_the_activations_of_one_segment_and_the_border_states() -> None:
    plain, ten = peak(seq=10_000), peak(seq=10_000, knobs={"segments": 10})
    borders = 9 * 8 * 2 * 4 * (256 + 256)  # borders, rows, layers, bytes, hidden and cell
    activations = ten.terms["activations"] - borders
    assert activations == pytest.approx(plain.terms["activations"] / 10, rel=1e-6)


def test_segments_never_hold_the_logits_of_the_whole_sequence() -> None:
    whole = peak(vocab=5000, seq=1000)
    assert peak(vocab=5000, seq=1000, knobs={"segments": 10}).terms["logits"] <= whole.terms["logits"] // 10


def test_on_a_card_each_chunk_keeps_the_weights_that_were_cast_for_it() -> None:
    more = {}
    for precision in ("fp32", "bf16"):
        fewer, chunks = (
            peak(
                A100,
                cell="lstm",
                hidden=512,
                seq=6400,
                knobs={"segments": n, "recompute": False, "precision": precision},
            )
            for n in (32, 64)
        )
        more[precision] = chunks.terms["activations"] - fewer.terms["activations"]
    weights = 4 * 512 * (64 + 3 * 512) + 2 * 2 * 4 * 512
    assert more["bf16"] - more["fp32"] / 2 == pytest.approx(32 * 2 * weights, rel=1e-3)


def test_chunks_without_recomputation_save_workspace_only() -> None:
    plain = peak(A100, cell="gru", hidden=128, seq=8000)
    chunks = peak(A100, cell="gru", hidden=128, seq=8000, knobs={"segments": 8, "recompute": False})
    assert chunks.terms["workspace"] < plain.terms["workspace"] / 3
    assert chunks.terms["activations"] >= 0.9 * plain.terms["activations"]


def test_a_window_costs_what_a_segment_does_without_the_borders() -> None:
    window, segments = peak(knobs={"window": 100}), peak(knobs={"segments": 10})
    assert 0 < segments.total_bytes - window.total_bytes == 9 * 8 * 2 * 4 * (256 + 256)


def test_frozen_lower_layers_keep_no_activations() -> None:
    fields: dict[str, Any] = {"layers": 3, "vocab": 100}
    frozen = peak(**fields, frozen=("embedding", "layer0", "layer1"))
    free = peak(**fields, frozen=("head",))
    assert frozen.terms["activations"] < 0.6 * free.terms["activations"]


def test_a_frozen_layer_above_a_trained_one_keeps_its_activations() -> None:
    lower, upper = peak(layers=2, frozen=("layer0",)), peak(layers=2, frozen=("layer1",))
    assert upper.terms["activations"] > lower.terms["activations"]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_optimizer_is_the_peak_of_a_large_model_on_short_sequences(optimizer: str) -> None:
    estimate = peak(
        cell="gru", vocab=50_000, hidden=512, seq=5, batch=1, head="last-step", outputs=2, optimizer=optimizer
    )
    assert (estimate.moment == "optimizer") == (optimizer == "adam")


def test_gradient_scaling_costs_three_small_blocks_and_no_copy() -> None:
    scaled, unscaled = peak(A100, knobs={"precision": "fp16"}), peak(A100, knobs={"precision": "bf16"})
    assert scaled.total_bytes == unscaled.total_bytes + 3 * 512 + 3 * 512 // 8


def test_half_precision_does_not_cast_an_embedding_unless_it_is_the_head() -> None:
    fields: dict[str, Any] = {"vocab": 1000, "hidden": 64, "embedding": 64}
    untied, tied = (peak(A100, knobs={"precision": "bf16"}, tied=tied, **fields) for tied in (False, True))
    assert untied.terms["weights"] - tied.terms["weights"] == 4 * 1000 * 64


def test_expandable_segments_reserve_less() -> None:
    plain, expandable = peak(A100, seq=10_000), peak(A100, seq=10_000, knobs={"allocator": "expandable"})
    assert expandable.allocated_bytes == plain.allocated_bytes
    assert expandable.total_bytes < plain.total_bytes


def test_what_cudnn_refuses_does_not_fit_however_large_the_card() -> None:
    spec = Spec(cell="gru", seq=65_536, hidden=8, layers=1, batch=1)
    estimate = [
        replace(estimate_step(spec, make_candidate(spec, segments=segments), A100), budget_bytes=1 << 40)
        for segments in (1, 2)
    ]
    assert [each.fits for each in estimate] == [False, True]


def test_half_precision_halves_activations_and_adds_cast_weights() -> None:
    full, half = peak(A100, hidden=256), peak(A100, hidden=256, knobs={"precision": "bf16"})
    assert half.terms["activations"] == pytest.approx(full.terms["activations"] / 2, rel=0.1)
    assert half.terms["weights"] > full.terms["weights"]


def test_an_offloaded_state_leaves_the_card_for_the_host() -> None:
    kept, offloaded = peak(A100), peak(A100, knobs={"offload": True})
    assert kept.terms["optimizer"] == offloaded.host_bytes
    assert offloaded.terms["optimizer"] == 0


def test_the_input_pipeline_is_the_hosts_on_a_card_and_the_processs_on_the_cpu() -> None:
    on_host, here = peak(A100, knobs={"workers": 2}), peak(knobs={"workers": 2})
    assert on_host.terms["loader"] == 0 < on_host.host_bytes
    assert here.terms["loader"] > 0


def test_packed_sequences_cost_their_own_tokens_only() -> None:
    fields: dict[str, Any] = {"cell": "gru", "lengths": {1000: 2, 10: 1000}, "hidden": 512}
    packed, padded = peak(A100, packed=True, **fields), peak(A100, **fields)
    assert packed.terms["activations"] < 0.3 * padded.terms["activations"]


def test_the_cpu_computes_the_padding_of_packed_sequences_too() -> None:
    fields: dict[str, Any] = {"cell": "gru", "lengths": {1000: 2, 10: 1000}, "hidden": 512}
    assert peak(CPU, packed=True, **fields).total_bytes == peak(CPU, **fields).total_bytes


def test_an_engine_that_cannot_run_the_cell_is_misuse() -> None:
    spec = Spec(cell="gru", seq=10)
    with pytest.raises(MisuseError, match="gru runs on native"):
        estimate_step(spec, Candidate(microbatch=1, engine="onednn"))


@pytest.mark.parametrize(("levels", "borders"), [(1, 99), (2, 18), (3, 12)])
def test_more_levels_keep_fewer_border_states_of_100_segments(levels: int, borders: int) -> None:
    assert borders_kept(100, levels) == borders


def test_each_resident_byte_of_growth_needs_up_to_2_8_committed_ones() -> None:
    assert resident_within(CPU.runtime_bytes + 280, CPU) == CPU.runtime_bytes + 100
