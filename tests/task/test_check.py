"""Checks of knobs: which are exact on a task, and why others are not."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from task import models
from torch import Tensor, nn

from oomguard import Task
from oomguard._estimate.target import CPU
from oomguard._task.ask import Asker
from oomguard._task.batches import Batches
from oomguard._task.check import CHECKS, Finding, Trial, finding
from oomguard._task.child import batches_of, begin
from oomguard._task.task import packed
from oomguard._task.trace import copied


def checked(name: str) -> Finding:
    """What a child would find, without a child."""
    begin(f"task.models:{name}", 5, 1 << 40)
    return finding("microbatch")


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


def test_a_loss_that_counts_its_calls_is_told_so() -> None:
    """As a weight that is annealed from step to step does."""
    calls = iter(range(1, 1000))

    def annealed(model: nn.Module, batch: Any) -> Any:
        return model(batch)[0].square().mean() + next(calls) / 2500 * model(batch)[0].abs().mean()

    task = Task(model=nn.GRU(3, 4), loss=annealed, batch=lambda rows, steps: torch.randn(steps, rows, 3))
    for check in CHECKS.values():
        assert "it counts its calls" in check(Trial(task, nn.GRU(3, 4), Batches(task), torch.float32)).reason


def test_flat_targets_are_exact_in_microbatches() -> None:
    with Asker(models.speech, CPU) as asker:
        found = asker.check("microbatch")
    assert found.exact, found.reason


def test_a_flat_part_whose_rows_are_in_another_order_than_guessed_is_not_split_unnoticed() -> None:
    def interleaved(rows: int, steps: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(models.WORDS, (steps + 1, rows))
        return words[:-1].T.contiguous(), words[1:].flatten()  # rows first, but the targets step by step

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0].T)[0].flatten(0, 1), batch[1])

    with Asker(Task(model=models.WordModel, loss=loss, batch=interleaved), CPU) as asker:
        assert not asker.check("microbatch").exact


def test_dropout_between_layers_does_not_make_segments_lossy() -> None:
    task = Task(model=lambda: nn.LSTM(3, 4, 2, dropout=0.5), loss=mean, batch=lambda rows, steps: waves(steps, rows))
    begin(packed(task), 5, 1 << 40)
    found = finding("segments")
    assert found.exact, found.reason


class Own(nn.Module):
    """A model that makes tensors in a precision of its own."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.rnn, self.form, self.norm = nn.GRU(3, 4, batch_first=True), form, nn.BatchNorm1d(4)
        self.plain = torch.ones(4, 4)  # not a buffer, so that double() does not reach it

    def forward(self, x: Tensor) -> Any:
        types = {"default": None, "named": torch.float32}
        if self.form in types:
            return self.rnn(x, torch.zeros(1, len(x), 4, dtype=types[self.form]))[0]
        hidden = self.rnn(x)[0]
        if self.form == "sampled":
            return hidden + hidden * torch.randn_like(hidden) + torch.rand(hidden.shape)
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2) if self.form == "normed" else hidden
        return hidden.float() if self.form == "cast" else hidden @ self.plain


@pytest.mark.parametrize("form", ["default", "named", "cast", "plain", "sampled"])
@pytest.mark.parametrize("knob", ["microbatch", "segments"])
def test_a_model_may_make_tensors_in_a_precision_of_its_own(form: str, knob: str) -> None:
    begin(packed(Task(model=lambda: Own(form), loss=squared, batch=waves)), 5, 1 << 40)
    found = finding(knob)
    assert found.exact, found.reason
    assert torch.get_default_dtype() is torch.float32


class Keeping(nn.Module):
    """A model that keeps its last outputs, with their graph."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.seen = [self.rnn(x)[0]] * 2
        return self.seen[0]


def test_a_model_that_keeps_results_of_its_last_step_is_copied_without_their_graph() -> None:
    model = Keeping()
    model(torch.ones(2, 5, 3))
    other = copied(model)
    assert isinstance(other, Keeping)
    assert other.seen[0] is other.seen[1]
    assert not other.seen[0].requires_grad
    other(torch.ones(2, 5, 3)).sum().backward()
    assert all(weight.grad is not None for weight in other.parameters())
    assert all(weight.grad is None for weight in model.parameters())


def test_a_model_that_runs_in_single_precision_alone_is_checked_in_it() -> None:
    begin(packed(Task(model=lambda: Own("normed"), loss=squared, batch=waves)), 5, 1 << 40)
    assert "BatchNorm" in finding("microbatch").reason


def test_rows_of_a_check_are_short_and_of_unequal_length_where_there_are_any() -> None:
    samples = batches_of("task.models:tagger").samples
    assert samples is not None
    assert [samples.lengths[index] for index in samples.unequal(4)] == [4, 5, 6, 7]
    assert replace(samples, lengths={0: 9, 1: 9, 2: 9, 3: 20, 4: 20}).unequal(4) == [0, 1, 2, 3]
    assert replace(samples, lengths={0: 9, 1: 9, 2: 5000, 3: 9, 4: 9}).unequal(4) == [0, 1, 3, 4]
    assert replace(samples, lengths={0: 9, 1: 20}).unequal(4) == [0, 0, 1, 1]


def waves(rows: int, steps: int) -> Tensor:
    return torch.randn(rows, steps, 3)


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def mean(model: nn.Module, batch: Tensor) -> Any:
    return model(batch)[0].square().mean()


def endless(model: nn.Module, batch: Tensor) -> Any:
    time.sleep(600)


def test_a_knob_whose_check_takes_too_long_counts_as_lossy() -> None:
    task = Task(model=lambda: nn.GRU(3, 4), loss=endless, batch=waves)
    with Asker(task, CPU, until=time.monotonic()) as asker:
        found = asker.check("microbatch")
    assert not found.exact
    assert found.late
    assert "takes too long" in found.reason
