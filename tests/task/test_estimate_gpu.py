"""The estimate of a task on a card: a step there allocates what the trace without the card has counted."""

from typing import Any

import pytest
import torch
from task.models import carried, likelihood, text
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from oomguard import Task
from oomguard._device.find import find_target
from oomguard._estimate.target import CUBLAS_HANDLES
from oomguard._task.batches import Batches
from oomguard._task.layout import mapped
from oomguard._task.trace import build, evaluate, make_optimizer, mean_of, trace

pytestmark = pytest.mark.gpu
ROWS, STEPS = 24, 120


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(2000, 256), nn.LSTM(256, 256, 2), nn.Linear(256, 2000)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        y, state = self.rnn(self.encoder(x), state)
        return self.decoder(y), state


class Series(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 256, 2, batch_first=True), nn.Linear(256, 2)

    def forward(self, x: Tensor) -> Any:
        mean, scale = self.head(self.rnn(x)[0]).unbind(2)
        return mean, F.softplus(scale) + 1e-3


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(64, 256, bidirectional=True), nn.Linear(512, 40)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.rnn(packed)[0])[0])


def unequal(rows: int, steps: int) -> tuple[Tensor, list[int]]:
    return torch.randn(steps, rows, 64), [steps - row * steps // (2 * rows) for row in range(rows)]


def packed_loss(model: nn.Module, batch: tuple[Tensor, list[int]]) -> Any:
    return model(batch[0], torch.tensor(batch[1])).square().mean()


TASKS = {
    "words": Task(model=Words, loss=carried, batch=text),
    "series": Task(model=Series, loss=likelihood, batch=lambda rows, steps: torch.randn(rows, steps + 1, 2)),
    "packed": Task(model=Packed, loss=packed_loss, batch=unequal, optimizer=torch.optim.RMSprop),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_step_on_the_card_allocates_what_was_estimated(name: str) -> None:
    task, target = TASKS[name], find_target("cuda")
    batch = Batches(task).make(ROWS, STEPS)
    traced = trace(task, build(task), batch, target, heap="cuda")
    expected, workspaces = traced.moments[traced.peak][0], CUBLAS_HANDLES * target.cublas_bytes
    model = build(task).cuda().train()
    optimizer = make_optimizer(task, model)
    there = mapped(lambda one: one.cuda(), batch)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        torch.autograd.backward(mean_of(*evaluate(task, model, there)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert 0.95 * expected <= torch.cuda.max_memory_allocated() <= 1.05 * (expected + workspaces)
