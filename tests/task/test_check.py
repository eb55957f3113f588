"""Checks of knobs: which are exact on a task, and why others are not."""

import pytest
import torch
from task import models
from torch import Tensor, nn

from oomguard import Task
from oomguard._estimate.target import CPU
from oomguard._task.ask import Asker
from oomguard._task.check import Finding, findings
from oomguard._task.child import begin


def checked(name: str) -> Finding:
    """What a child would find, without a child."""
    begin(f"task.models:{name}", 5, 1 << 40)
    return findings()["microbatch"]


@pytest.mark.parametrize("name", ["word_model", "dropped_out", "tagger", "translator", "forecast", "weight_drop"])
def test_microbatches_are_exact(name: str) -> None:
    found = checked(name)
    assert found.exact, found.reason
    assert found.error < 1e-12


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("normed", r"BatchNorm uses the statistics of the whole batch (norm)."),
        ("summed_tagger", "The loss is a sum over the batch, not a mean"),
        ("token_mean_tagger", "The mean is over time steps, and rows have unequal lengths"),
        ("contrast_tagger", "uses statistics of the whole batch"),
    ],
)
def test_lossy_microbatches_are_recognised_with_their_reason(name: str, reason: str) -> None:
    found = checked(name)
    assert not found.exact
    assert reason in found.reason
    assert found.error > 1e-4


def test_flat_targets_are_exact_in_microbatches() -> None:
    with Asker(models.speech, CPU) as asker:
        found = asker.check()["microbatch"]
    assert found.exact, found.reason


def test_a_flat_part_whose_rows_are_in_another_order_than_guessed_is_not_split_unnoticed() -> None:
    def interleaved(rows: int, steps: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(models.WORDS, (steps + 1, rows))
        return words[:-1].T.contiguous(), words[1:].flatten()  # rows first, but the targets step by step

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0].T)[0].flatten(0, 1), batch[1])

    with Asker(Task(model=models.WordModel, loss=loss, batch=interleaved), CPU) as asker:
        assert not asker.check()["microbatch"].exact


def test_a_task_that_is_too_slow_to_check_keeps_its_knobs_unused() -> None:
    with Asker("task.models:forecast", CPU, seconds=0.01) as asker:
        found = asker.check()
    assert not any(finding.exact for finding in found.values())
    assert "takes too long" in found["microbatch"].reason
