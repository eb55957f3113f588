"""The terms against the real thing: PyTorch's own parameters, gradients and optimizer states."""

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oomguard._estimate import terms
from oomguard._estimate.breakdown import estimate_batch, estimate_step
from oomguard._estimate.target import CPU
from oomguard._rnn.model import build, trainable
from oomguard._spec.candidate import Candidate, Candidates, make_candidate
from oomguard._spec.spec import Optimizer, Spec
from oomguard._step import make_optimizer, prepare, update

SPECS = [
    Spec(cell="lstm", seq=5, features=3, hidden=8, layers=2),
    Spec(cell="lstm", seq=5, features=3, hidden=8, layers=2, projection=4, bidirectional=True),
    Spec(cell="gru", seq=5, vocab=11, embedding=6, hidden=8, layers=3, layer_norm=True),
    Spec(cell="rnn", seq=5, vocab=11, embedding=16, hidden=8, bidirectional=True, tied=True),
    Spec(cell="gru", seq=5, vocab=11, hidden=8, layers=3, frozen=("embedding", "layer0")),
    Spec(cell="rnn", seq=5, hidden=8, outputs=7, head="last-step"),
]
TORCH_OPTIMIZERS = [name for name in get_args(Optimizer) if name != "adam8bit"]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_shapes_are_those_of_the_model(spec: Spec) -> None:
    ours = [shape for shapes in terms.parameters(spec).values() for shape in shapes]
    assert sorted(ours) == sorted(tuple(p.shape) for p in build(spec).parameters())


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_gradients_are_those_that_a_backward_pass_leaves(spec: Spec) -> None:
    model = build(spec)
    inputs = torch.randn(5, 2, spec.inputs) if spec.vocab is None else torch.randint(spec.vocab, (5, 2))
    model(inputs, None)[0].sum().backward()
    held = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert sum(terms.gradients_bytes(spec).values()) == held


@pytest.mark.parametrize("optimizer", TORCH_OPTIMIZERS)
def test_the_optimizers_state_is_as_large_as_pytorchs_after_a_step(optimizer: Optimizer) -> None:
    spec = Spec(cell="lstm", seq=5, features=30, hidden=40, optimizer=optimizer, frozen=("layer0",))
    candidate = make_candidate(spec)
    model = build(spec)
    running = make_optimizer(model, candidate)
    for parameter in trainable(model):
        parameter.grad = torch.randn_like(parameter)
    running.step()
    states = [value for state in running.state.values() for value in state.values()]
    counted = sum(value.nbytes for value in states if isinstance(value, torch.Tensor) and value.numel() > 1)
    assert terms.optimizer_bytes(spec, candidate) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("fields", [{"optimizer": name} for name in TORCH_OPTIMIZERS] + [{"state_8bit": True}], ids=str)
def test_the_largest_share_of_the_optimizers_state_is_that_of_the_first_process(fields: dict[str, Any]) -> None:
    spec = Spec(cell="lstm", seq=5, features=64, hidden=64, optimizer=fields.get("optimizer", "adam"))
    candidate, counted = make_candidate(spec, shards=3, state_8bit=fields.get("state_8bit")), list[int]()
    for rank in range(3):
        training = prepare(spec, candidate, rank=rank)
        for parameter in trainable(training.model):
            parameter.grad = torch.randn_like(parameter)
        update(training, torch.zeros(()))
        states = [value for state in training.optimizer.state.values() for value in state.values()]
        counted.append(sum(value.nbytes for value in states if isinstance(value, torch.Tensor) and value.numel() > 1))
    whole_bytes = terms.optimizer_bytes(spec, make_candidate(spec, state_8bit=fields.get("state_8bit")))
    assert sum(counted) == pytest.approx(whole_bytes, rel=0.01)
    assert terms.optimizer_bytes(spec, candidate) == pytest.approx(max(counted), rel=0.01)
    if spec.optimizer != "adafactor":  # a share has the most elements, not the most rows and columns
        assert counted[0] == max(counted)


def test_shares_are_estimated_for_many_candidates_as_for_one() -> None:
    spec = Spec(cell="gru", seq=50, features=8, hidden=96, layers=3, batch=8)
    together = estimate_batch(spec, Candidates(microbatch=8, accumulation=1, shards=[1, 2, 3, 40]), CPU)
    alone = [estimate_step(spec, make_candidate(spec, shards=shards), CPU) for shards in (1, 2, 3, 40)]
    assert np.asarray(together.terms["optimizer"]).tolist() == [one.terms["optimizer"] for one in alone]
    totals = np.asarray(together.total_bytes).tolist()
    assert totals == [one.total_bytes for one in alone]
    assert totals == sorted(totals, reverse=True)


def test_eight_bit_states_take_about_a_quarter() -> None:
    spec = Spec(cell="lstm", seq=5, hidden=512)
    full = terms.optimizer_bytes(spec, Candidate(microbatch=1))
    assert 0.25 < terms.optimizer_bytes(spec, Candidate(microbatch=1, state_8bit=True)) / full < 0.27


def test_a_loop_over_tensors_needs_room_for_neighbours_only() -> None:
    spec = Spec(cell="gru", seq=5, features=64, hidden=64, layers=1)
    assert terms.update_bytes(spec, Candidate(microbatch=1, update="loop")) == 4 * 3 * (3 * 64 * 64)


def test_a_fused_update_makes_no_copies() -> None:
    assert terms.update_bytes(Spec(cell="gru", seq=5), Candidate(microbatch=1, update="fused")) == 0


def test_tied_weights_count_once() -> None:
    tied = Spec(cell="gru", seq=5, vocab=1000, hidden=64, tied=True)
    untied = Spec(cell="gru", seq=5, vocab=1000, hidden=64)
    assert terms.weights_bytes(untied) - terms.weights_bytes(tied) == 4 * 1000 * 64


def test_a_sparse_gradient_has_a_row_for_every_token_of_the_batch() -> None:
    spec = Spec(cell="gru", seq=10, batch=4, vocab=1000, hidden=64, sparse_embedding=True, optimizer="sgd")
    assert terms.gradients_bytes(spec)["embedding"] == 0
    assert terms.sparse_gradient_bytes(spec) == 10 * 4 * (8 + 4 * 64)


def test_packed_tokens_are_those_of_the_longest_sequences() -> None:
    spec = Spec(cell="gru", lengths={5: 10, 50: 2, 20: 3}, packed=True)
    assert [terms.longest_tokens(spec, rows) for rows in (1, 2, 4, 6)] == [50, 100, 140, 165]


def test_padded_tokens_are_all_of_the_longest_length() -> None:
    assert terms.longest_tokens(Spec(cell="gru", lengths={5: 10, 50: 2}), 4) == 200


@given(st.lists(st.integers(1, 1 << 50), min_size=1, max_size=20))
def test_pinned_sizes_are_the_next_power_of_two(sizes: list[int]) -> None:
    rounded = np.asarray(terms.power_of_two(np.array(sizes)))
    assert list(rounded) == [terms.power_of_two(size) for size in sizes]
    assert all(size <= power < 2 * size for size, power in zip(sizes, rounded, strict=True))
    assert all(math.log2(power).is_integer() for power in rounded)


def test_the_loader_holds_prefetched_microbatches_and_one_in_the_making_per_worker() -> None:
    spec = Spec(cell="gru", seq=100, features=16, batch=8)
    candidate = make_candidate(spec, workers=3, prefetch=2)
    microbatch = terms.input_bytes(spec, candidate)
    assert terms.loader_bytes(spec, candidate, pinned=False) == 9 * microbatch
    assert terms.loader_bytes(spec, candidate, pinned=True) == 9 * terms.power_of_two(microbatch)
