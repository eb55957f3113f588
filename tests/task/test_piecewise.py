"""Tasks whose loss takes a state: segments are pieces of the batch along time, with their logits."""

from typing import Any

import msgspec
import pytest
import torch
from task import sized

import oomguard
from oomguard._core.units import GIB, MIB
from oomguard._task.check import Finding, finding
from oomguard._task.child import begin

pytestmark = pytest.mark.timeout(300)
FIXED: dict[str, Any] = {"threads": 1, "allocator": "tight"}


def checked(name: str) -> Finding:
    """What a child would find, without a child."""
    begin(f"task.sized:{name}", 40, 1 << 40)
    return finding("segments")


@pytest.mark.parametrize("name", ["piecewise", "windowed"])
def test_segments_of_a_piecewise_loss_keep_the_gradient(name: str) -> None:
    assert checked(name).exact


def test_a_piecewise_loss_that_forgets_its_state_is_not_exact_in_segments() -> None:
    found = checked("forgetful")
    assert not found.exact
    assert found.reason == "Segments change the gradient."


def test_a_batch_that_cannot_be_cut_along_time_is_told() -> None:
    assert "no part of the batch grows with time" in checked("uncut").reason


def test_logits_of_one_piece_are_estimated_and_measured() -> None:
    whole, pieces = (oomguard.estimate(sized.piecewise, microbatch=4, steps=400, segments=n) for n in (1, 8))
    assert pieces.terms["logits"] < 0.2 * whole.terms["logits"]
    record = oomguard.probe(sized.piecewise, microbatch=4, steps=400, segments=8, **FIXED)
    assert record.peak_bytes is not None
    assert record.runtime_bytes is not None
    growth = record.peak_bytes - record.runtime_bytes
    assert growth < 0.4 * (whole.total_bytes - whole.terms["runtime"])
    assert growth == pytest.approx(pieces.total_bytes - pieces.terms["runtime"], rel=0.25, abs=2 * MIB)


def test_a_plan_with_pieces_runs_in_a_stepper_and_keeps_the_loss() -> None:
    budget = sized.runtime_bytes() + 12 * MIB
    how: dict[str, Any] = FIXED | {"budget": budget, "allow": "none", "batch": 4, "steps": 400, "timeout": 300}
    plan = oomguard.find_feasible_config(sized.piecewise, microbatch=4, **how)
    assert plan.candidate.segments > 1
    assert plan.peak_bytes <= budget < plan.plain_bytes
    assert plan == msgspec.json.decode(msgspec.json.encode(plan), type=oomguard.TaskPlan)
    here = msgspec.structs.replace(plan, budget_bytes=60 * GIB)  # this process holds more than a training does
    torch.manual_seed(0)
    batch, losses = sized.text(4, 400), []
    for first in (here, "60GiB"):
        torch.manual_seed(1)
        model = sized.Words()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with oomguard.stepper(first, model, sized.next_words, optimizer) as step:
            losses.append([step(batch).item() for _ in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
