"""Segments give the gradient of the plain pass: in double precision to the last digits, dropout included."""

from typing import Any

import pytest
import torch
from torch import Tensor

from oomguard.bptt import backward
from oomguard.candidate import make_candidate
from oomguard.model import Recurrent, build, grads
from oomguard.spec import Spec

STEPS, ROWS = 37, 3
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deep": {"layers": 3},
    "dropout": {"dropout": 0.3},
    "normalised": {"layer_norm": True},
    "last step": {"head": "last-step"},
    "batch first": {"batch_first": True},
    "tokens": {"vocab": 11, "features": None},
    "tied": {"vocab": 11, "features": None, "tied": True},
    "frozen": {"frozen": ("layer0",)},
    "head alone": {"frozen": ("layer0", "layer1")},
    "head alone at the end": {"frozen": ("layer0", "layer1"), "head": "last-step"},
}


def example(cell: str, variant: str) -> tuple[Recurrent, Tensor, Tensor]:
    fields: dict[str, Any] = {"cell": cell, "seq": STEPS, "features": 5, "hidden": 8, "layers": 2, "batch": ROWS}
    spec = Spec(**(fields | VARIANTS[variant]))
    torch.manual_seed(0)
    shape = (ROWS, STEPS) if spec.batch_first else (STEPS, ROWS)
    inputs = torch.randn(*shape, spec.inputs).double() if spec.vocab is None else torch.randint(spec.vocab, shape)
    targets = shape if spec.head == "per-step" else (ROWS,)
    if spec.loss == "mse":
        return build(spec).double(), inputs, torch.randn(*targets, spec.classes).double()
    return build(spec).double(), inputs, torch.randint(spec.classes, targets)


def gradients(model: Recurrent, inputs: Tensor, targets: Tensor, **knobs: int) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = backward(model, inputs, targets, make_candidate(model.spec, **knobs), scale=0.1)
    return loss, [gradient.clone() for gradient in grads(model)]


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("segments", [2, 5, STEPS])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_segments_give_the_gradient_of_the_plain_pass(cell: str, variant: str, segments: int) -> None:
    example_ = example(cell, variant)
    plain_loss, plain = gradients(*example_)
    loss, segmented = gradients(*example_, segments=segments)
    assert furthest(segmented, plain) < 1e-10
    assert float(loss) == pytest.approx(float(plain_loss), rel=1e-12)


def test_segments_leave_the_random_numbers_where_a_plain_pass_leaves_them() -> None:
    """Otherwise the next microbatch would drop out what this one has already dropped out."""
    example_ = example("gru", "dropout")
    gradients(*example_)
    plain = torch.get_rng_state()
    gradients(*example_, segments=5)
    assert torch.equal(torch.get_rng_state(), plain)


def test_a_window_as_long_as_the_sequence_cuts_nothing() -> None:
    example_ = example("lstm", "plain")
    assert furthest(gradients(*example_, window=STEPS)[1], gradients(*example_)[1]) < 1e-10


def test_a_shorter_window_changes_the_gradient_but_not_the_loss() -> None:
    example_ = example("gru", "plain")
    loss, windowed = gradients(*example_, window=5)
    plain_loss, plain = gradients(*example_)
    assert furthest(windowed, plain) > 1e-3
    assert float(loss) == pytest.approx(float(plain_loss), rel=1e-12)


def test_segments_without_recomputation_are_refused_rather_than_recomputed() -> None:
    model, inputs, targets = example("gru", "plain")
    with pytest.raises(ValueError, match="can only be estimated"):
        backward(model, inputs, targets, make_candidate(model.spec, segments=2, recompute=False))


def test_segments_of_a_bidirectional_model_are_refused_rather_than_wrong() -> None:
    spec = Spec(cell="gru", seq=10, features=3, hidden=4, bidirectional=True, batch=2)
    with pytest.raises(ValueError, match="must see the whole sequence"):
        backward(build(spec), torch.randn(10, 2, 3), torch.randn(10, 2, 1), make_candidate(spec, segments=2))
