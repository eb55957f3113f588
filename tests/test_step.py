"""One optimizer step: accumulation changes nothing but memory."""

from typing import Any

import pytest
import torch

from oomguard.candidate import make_candidate
from oomguard.errors import MisuseError
from oomguard.model import build
from oomguard.spec import Spec
from oomguard.step import make_optimizer, step

SPEC = Spec(cell="lstm", seq=12, features=3, hidden=8, batch=8)


def weights_after_steps(pieces: list[int], **knobs: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = build(SPEC).double()
    candidate = make_candidate(SPEC, **knobs)
    optimizer = make_optimizer(model, candidate)
    inputs, targets = torch.randn(12, 8, 3).double(), torch.randn(12, 8, 1).double()
    for _ in range(5):
        microbatches = zip(torch.split(inputs, pieces, dim=1), torch.split(targets, pieces, dim=1), strict=True)
        step(model, optimizer, microbatches, candidate, targets.numel())
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("pieces", [[4, 4], [1, 7], [3, 3, 2], [1] * 8])
def test_unequal_microbatches_give_the_weights_of_the_whole_batch(pieces: list[int]) -> None:
    whole = weights_after_steps([8])
    for ours, theirs in zip(weights_after_steps(pieces, microbatch=max(pieces)), whole, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_the_loss_is_the_mean_over_all_targets() -> None:
    model = build(SPEC)
    candidate = make_candidate(SPEC, microbatch=4)
    inputs, targets = torch.randn(12, 8, 3), torch.randn(12, 8, 1)
    whole = torch.nn.functional.mse_loss(model(inputs, None)[0], targets).detach()
    halves = zip(torch.split(inputs, 4, dim=1), torch.split(targets, 4, dim=1), strict=True)
    loss = step(model, make_optimizer(model, candidate), halves, candidate, targets.numel())
    assert float(loss) == pytest.approx(float(whole), rel=1e-5)


def test_gradients_are_gone_after_the_step() -> None:
    model = build(SPEC)
    candidate = make_candidate(SPEC)
    batch = [(torch.randn(12, 8, 3), torch.randn(12, 8, 1))]
    step(model, make_optimizer(model, candidate), batch, candidate, 96)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("knobs", [{"precision": "bf16"}, {"offload": True}, {"state_8bit": True}])
def test_what_can_only_be_estimated_is_refused_rather_than_ignored(knobs: dict[str, Any]) -> None:
    model = build(SPEC)
    candidate = make_candidate(SPEC, **knobs)
    optimizer = make_optimizer(model, candidate)
    with pytest.raises(MisuseError, match="can only be estimated"):
        step(model, optimizer, [(torch.randn(12, 8, 3), torch.randn(12, 8, 1))], candidate, 96)


def test_an_optimizer_that_pytorch_lacks_is_named() -> None:
    spec = Spec(cell="gru", seq=5, optimizer="adam8bit")
    with pytest.raises(MisuseError, match="adam8bit"):
        make_optimizer(build(spec), make_candidate(spec))
