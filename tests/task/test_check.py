"""Checks of knobs: which are exact on a task, and why others are not."""

import pytest
from task import models

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
