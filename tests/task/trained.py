"""A task whose training draws random numbers of every kind, to be trained and resumed."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader, Dataset

from oomguard import Task

torch.set_num_threads(1)
ROWS, SAMPLES, TAGS = 6, 27, 5


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Sentences of unequal length in which `noisy` replaces words at random."""

    def __init__(self, *, noisy: bool = False) -> None:
        self.noisy = noisy

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rng = torch.Generator().manual_seed(index)
        words = torch.randint(40, (4 + index % 9,), generator=rng)
        tags = torch.randint(TAGS, words.shape, generator=rng)
        if self.noisy:
            words[int(np.random.randint(len(words)))] = random.randrange(40)
            words[int(torch.randint(len(words), ()))] = 0
        return words, tags


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    words, tags = zip(*samples, strict=True)
    return pad_sequence(list(words), True), pad_sequence(list(tags), True, -100)


class Tagger(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(40, 6), nn.GRU(6, 8, batch_first=True)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(8, TAGS)

    def forward(self, words: Tensor) -> Any:
        return self.head(self.dropout(self.rnn(self.words(words))[0]))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    words, tags = batch
    total = F.cross_entropy(model(words).flatten(0, 1), tags.flatten(), reduction="sum")
    return total, (tags >= 0).sum()


def noisy_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    total, weight = loss(model, batch)
    return total * (1 + random.random() / 10 + float(np.random.rand()) / 10), weight


def loader(*, noisy: bool = False, **options: Any) -> DataLoader[tuple[Tensor, Tensor]]:
    return DataLoader(Sentences(noisy=noisy), ROWS, collate_fn=collate, **options)


def optimizer(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=1e-2)


def schedule(made: torch.optim.Optimizer) -> MultiStepLR:
    return MultiStepLR(made, [3, 3, 9, 14], gamma=0.5)


def noisy(**options: Any) -> Task:
    """Everything that a resumed run must repeat."""
    return Task(
        model=lambda: Tagger(0.3),
        loss=noisy_loss,
        data=loader(noisy=True, shuffle=True, **options),
        optimizer=optimizer,
        scheduler=schedule,
        validation=loader(),
        predict=lambda model, batch: model(batch[0]),
    )


calm = Task(model=Tagger, loss=loss, data=loader(), optimizer=optimizer)
task = noisy()


def waves(rows: int, steps: int) -> Tensor:
    return torch.randn(rows, steps, 3)


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.rnn(x)[0][:, -1])


def squares(model: nn.Module, batch: Tensor) -> Any:
    return (model(batch)[:, 0] - batch.sum((1, 2))).square().mean()


wave = Task(model=Wave, loss=squares, batch=waves, validation=waves)


class Dying(Sentences):
    """Its reader is killed once, as the kernel does when memory is short."""

    def __init__(self, mark: Path) -> None:
        super().__init__(noisy=True)
        self.mark = mark

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if torch.utils.data.get_worker_info() is not None and not self.mark.exists() and index == 11:
            self.mark.touch()
            os._exit(9)
        return super().__getitem__(index)
