"""One optimizer step: accumulation, segments, clipping and offload change nothing but memory."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from oomguard._rnn import Microbatch, count_targets
from oomguard._rnn.model import build
from oomguard._spec.candidate import make_candidate
from oomguard._spec.spec import Optimizer, Spec
from oomguard._step import Training, make_optimizer, prepare, step

STEPS, ROWS = 6, 64
SPEC = Spec(cell="lstm", seq=STEPS, features=3, hidden=8, batch=ROWS)
SPLITS: dict[str, list[int]] = {
    "1 piece": [64],
    "2 unequal": [63, 1],
    "7 unequal": [1, 2, 4, 8, 16, 32, 1],
    "64": [1] * 64,
}


def batch_of(spec: Spec, seed: int = 3) -> Microbatch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, STEPS + 1, (ROWS,), generator=generator)
    lengths[0] = STEPS
    inputs = torch.randn(STEPS, ROWS, 3, generator=generator)
    wanted = (STEPS, ROWS, 1) if spec.head == "per-step" else (ROWS, 1)
    return Microbatch(inputs, torch.randn(*wanted, generator=generator), lengths)


def pieces(batch: Microbatch, rows: list[int], dtype: torch.dtype) -> Iterator[Microbatch]:
    assert batch.lengths is not None
    cut = zip(
        torch.split(batch.inputs.to(dtype), rows, dim=1),
        torch.split(batch.targets.to(dtype), rows, dim=batch.targets.dim() - 2),
        torch.split(batch.lengths, rows),
        strict=True,
    )
    yield from (Microbatch(*parts) for parts in cut)


def weights_after(
    spec: Spec, split: str, dtype: torch.dtype = torch.float64, clip: float | None = None, **knobs: Any
) -> list[Tensor]:
    """The weights after 5 optimizer steps."""
    torch.manual_seed(0)
    candidate = make_candidate(spec, microbatch=max(SPLITS[split]), **knobs)
    model = build(spec).to(dtype)
    training = Training(model=model, candidate=candidate, optimizer=make_optimizer(model, candidate, 1e-2))
    for seed in range(5):
        batch = batch_of(spec, seed)
        step(training, pieces(batch, SPLITS[split], dtype), count_targets(spec, batch), clip)
    return [parameter.detach() for parameter in model.parameters()]


def spec_of(cell: Any, head: Any) -> Spec:
    return Spec(cell=cell, seq=STEPS, features=3, hidden=8, batch=ROWS, head=head)


@cache
def whole_after(cell: str, head: str, dtype: torch.dtype) -> list[Tensor]:
    """What all others are compared with."""
    return weights_after(spec_of(cell, head), "1 piece", dtype)


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


KNOBS = pytest.mark.parametrize("knobs", [{}, {"segments": 4}, {"segments": 4, "recompute": False}], ids=str)


@KNOBS
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("head", ["per-step", "last-step"])
@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_the_batch_in_pieces_gives_the_weights_of_the_whole(
    cell: str, head: str, split: str, knobs: dict[str, Any]
) -> None:
    """Sequences of all lengths, in unequal microbatches, whole or in segments: the weights after 5 steps are the same.

    Adam divides by the gradient's own size, so that what differs by rounding may differ more in the weights.
    """
    weights = weights_after(spec_of(cell, head), split, **knobs)
    assert furthest(weights, whole_after(cell, head, torch.float64)) < 1e-9


@KNOBS
@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_in_single_precision_the_weights_agree_to_rounding(cell: str, knobs: dict[str, Any]) -> None:
    weights = weights_after(spec_of(cell, "per-step"), "7 unequal", torch.float32, **knobs)
    assert furthest(weights, whole_after(cell, "per-step", torch.float32)) < 1e-4


@pytest.mark.parametrize("name", get_args(Optimizer))
@pytest.mark.parametrize("update", ["foreach", "fused", "loop"])
def test_an_offloaded_state_gives_the_same_weights(name: Any, update: str) -> None:
    spec = Spec(cell="gru", seq=STEPS, features=3, hidden=8, batch=ROWS, optimizer=name)
    here = weights_after(spec, "1 piece", torch.float32, update=update)
    assert furthest(weights_after(spec, "1 piece", torch.float32, update=update, offload=True), here) < 1e-6


@pytest.mark.parametrize("split", ["2 unequal", "7 unequal"])
def test_clipping_sees_the_gradient_of_the_whole_batch(split: str) -> None:
    spec = Spec(cell="gru", seq=STEPS, features=3, hidden=8, batch=ROWS, optimizer="sgd")
    whole = weights_after(spec, "1 piece", clip=0.01)
    assert furthest(weights_after(spec, split, clip=0.01), whole) < 1e-10
    assert furthest(whole, weights_after(spec, "1 piece")) > 1e-4


def test_the_norm_is_that_before_clipping() -> None:
    training = prepare(SPEC, make_candidate(SPEC))
    batch = batch_of(SPEC)
    targets = count_targets(SPEC, batch)
    free = step(prepare_like(training), [batch], targets, clip=math.inf).norm
    clipped = step(training, [batch], targets, clip=1e-3).norm
    assert free is not None
    assert clipped is not None
    assert float(clipped) == pytest.approx(float(free), rel=1e-5)
    assert float(free) > 1e-3


def prepare_like(training: Training) -> Training:
    """A training with the same weights, and an optimizer of its own."""
    other = prepare(training.model.spec, training.candidate)
    other.model.load_state_dict(training.model.state_dict())
    return other


def test_the_loss_is_the_mean_over_all_real_targets() -> None:
    training = prepare(SPEC, make_candidate(SPEC, microbatch=16))
    batch = batch_of(SPEC)
    assert batch.lengths is not None
    outputs = training.model(batch.inputs, None)[0].detach()
    real = torch.arange(STEPS)[:, None] < batch.lengths
    wanted = (outputs - batch.targets)[real].square().mean()
    outcome = step(training, pieces(batch, [16] * 4, torch.float32), count_targets(SPEC, batch))
    assert float(outcome.loss) == pytest.approx(float(wanted), rel=1e-5)
    assert not outcome.skipped


def test_gradients_are_gone_after_the_step() -> None:
    training = prepare(SPEC, make_candidate(SPEC))
    step(training, [batch_of(SPEC)], 96)
    assert all(parameter.grad is None for parameter in training.model.parameters())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "knobs", [{}, {"segments": 3}, {"segments": 3, "recompute": False}, {"microbatch": 20}], ids=str
)
def test_half_precision_trains_close_to_single(precision: str, knobs: dict[str, Any]) -> None:
    """GRU runs in half precision on any CPU. Weights stay in fp32, and the loss goes where it goes in fp32."""
    spec = Spec(cell="gru", seq=STEPS, features=3, hidden=16, batch=ROWS, optimizer="sgd")
    losses = {}
    for name in ("fp32", precision):
        torch.manual_seed(0)
        training = prepare(spec, make_candidate(spec, precision=name, **knobs), lr=0.1)
        rows = torch.split(torch.arange(ROWS), knobs.get("microbatch", ROWS))
        for _ in range(5):
            batch = batch_of(spec)
            outcome = step(
                training, pieces(batch, [len(row) for row in rows], torch.float32), count_targets(spec, batch)
            )
            assert not outcome.skipped
        losses[name] = float(outcome.loss)
        assert all(parameter.dtype == torch.float32 for parameter in training.model.parameters())
    assert losses[precision] == pytest.approx(losses["fp32"], rel=0.02)
    assert losses[precision] != losses["fp32"]


def test_a_step_that_overflows_is_skipped_and_said_so() -> None:
    spec = Spec(cell="rnn", seq=STEPS, features=3, hidden=8, batch=ROWS)
    training = prepare(spec, make_candidate(spec, precision="fp16"))
    before = [parameter.clone() for parameter in training.model.parameters()]
    batch = batch_of(spec)
    large = batch._replace(targets=batch.targets * 1e6)
    outcome = step(training, [large], count_targets(spec, batch))
    assert outcome.skipped
    assert training.scaler is not None
    assert training.scaler.get_scale() == 2**15
    assert all(torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))
    assert not step(training, [batch], count_targets(spec, batch)).skipped


def test_a_batch_without_a_microbatch_is_refused() -> None:
    with pytest.raises(AssertionError, match="at least one microbatch"):
        step(prepare(SPEC, make_candidate(SPEC)), [], 1)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_that_fails_leaves_nothing_to_the_next_one(precision: str) -> None:
    """Two microbatches, of which the second is never made: then the same batch again."""
    spec = Spec(cell="gru", seq=STEPS, features=3, hidden=8, batch=ROWS)
    batch = batch_of(spec)
    targets = count_targets(spec, batch)

    def failing() -> Iterator[Microbatch]:
        yield from pieces(batch, [32, 32], torch.float32)
        raise MemoryError

    weights = []
    for fails in (False, True):
        torch.manual_seed(0)
        training = prepare(spec, make_candidate(spec, precision=precision, microbatch=32))
        if fails:
            with pytest.raises(MemoryError):
                step(training, failing(), targets)
            assert all(parameter.grad is None for parameter in training.model.parameters())
        assert not step(training, pieces(batch, [32, 32], torch.float32), targets).skipped
        weights.append([parameter.detach() for parameter in training.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_an_update_that_fails_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16: gradients were unscaled already."""
    spec = Spec(cell="gru", seq=STEPS, features=3, hidden=8, batch=ROWS)
    training, batch = prepare(spec, make_candidate(spec, precision="fp16")), batch_of(spec)
    with monkeypatch.context() as broken:
        broken.setattr(type(training.optimizer), "step", lambda *_, **__: [].pop())
        with pytest.raises(IndexError):
            step(training, [batch], count_targets(spec, batch), clip=1.0)
    assert not step(training, [batch], count_targets(spec, batch), clip=1.0).skipped


def test_a_sparse_gradient_is_clipped_with_the_others() -> None:
    norms, weights = [], []
    for sparse in (False, True):
        torch.manual_seed(0)
        spec = Spec(cell="gru", seq=STEPS, vocab=7, hidden=8, batch=4, optimizer="sgd", sparse_embedding=sparse)
        training = prepare(spec, make_candidate(spec), lr=1.0)
        tokens = torch.randint(7, (STEPS, 4), generator=torch.Generator().manual_seed(1))
        outcome = step(training, [Microbatch(tokens, tokens)], tokens.numel(), clip=0.01)
        assert outcome.norm is not None
        norms.append(float(outcome.norm))
        weights.append([parameter.detach() for parameter in training.model.parameters()])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] > 0.01
    assert furthest(*weights) < 1e-6
