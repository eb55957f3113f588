"""Tasks that need tens of MiB, so that budgets limit them, and take a fraction of a second per step."""

import time
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

import oomguard
from oomguard import Task

torch.set_num_threads(1)
WORDS = 1500


# ---- a language model: its logits need the most


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(WORDS, 16), nn.GRU(16, 24), nn.Linear(24, WORDS)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.rnn(self.embedding(x))[0])


def next_word(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    logits = model(batch[0]).flatten(0, 1)
    return F.cross_entropy(logits, batch[1].flatten(), reduction="sum"), batch[1].numel()


def text(rows: int, steps: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, WORDS, (steps + 1, rows))
    return words[:-1], words[1:]


words = Task(model=Words, loss=next_word, batch=text)

# ---- a regression: its LSTM needs the most


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 48, batch_first=True), nn.Linear(48, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.rnn(x)[0][:, -1])


def squares(model: nn.Module, batch: Tensor) -> Any:
    return model(batch).square().mean()


def waves(rows: int, steps: int) -> Tensor:
    return torch.randn(rows, steps, 4)


regression = Task(model=Regression, loss=squares, batch=waves)

# ---- a tagger: packed sequences of unequal length from a loader


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        length = 20 + index % 13 * 5
        return torch.randn(length, 12), torch.randint(0, 9, (length,))


def padded(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    inputs, tags = ([*parts] for parts in zip(*samples, strict=True))
    lengths = torch.tensor([len(one) for one in inputs])
    return {"x": pad_sequence(inputs), "tags": pad_sequence(tags, padding_value=-100), "lengths": lengths}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(12, 96)
        self.rnn, self.head = nn.LSTM(96, 32, bidirectional=True), nn.Linear(64, 9)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(torch.relu(self.enter(x)), lengths, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.rnn(packed)[0], total_length=self.total_length(x))[0])

    def total_length(self, x: Tensor) -> int | None:
        return len(x)


def tag(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    scores = model(batch["x"], batch["lengths"]).flatten(0, 1)
    return F.cross_entropy(scores, batch["tags"].flatten(), reduction="sum"), (batch["tags"] >= 0).sum()


tagger = Task(model=Tagger, loss=tag, data=DataLoader(Sentences(), 16, collate_fn=padded))


class Trimmed(Tagger):
    """A tagger whose output is as long as the longest row of a piece, while its tags are as long as the whole batch."""

    def total_length(self, x: Tensor) -> int | None:
        return None


trimmed = Task(model=Trimmed, loss=tag, data=DataLoader(Sentences(), 16, collate_fn=padded))

# ---- one long sample, statistics of the batch, and mistakes


class OneLong(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(20_000 if index == 5 else 50, 4)


def summed(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch).square().sum(), len(batch)


long_sample = Task(
    model=Regression, loss=summed, data=DataLoader(OneLong(), 2, collate_fn=lambda some: pad_sequence(some, True))
)


class Normed(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2))


normed = Task(model=Normed, loss=squares, batch=waves)


def wrong(model: nn.Module, batch: Tensor) -> Tensor:
    raise KeyError("targets")


mistaken = Task(model=Regression, loss=wrong, batch=waves)


def fails_when_large(model: nn.Module, batch: Tensor) -> Any:
    assert len(batch) < 20, "too many"
    return squares(model, batch)


def in_fp32(model: nn.Module, batch: Tensor) -> Any:
    assert not torch.is_autocast_enabled("cpu")
    return squares(model, batch)


def hangs(model: nn.Module, batch: Tensor) -> Any:
    if len(batch) > 2 and type(batch) is Tensor and batch.dtype is torch.float32:  # not in a trace, nor in a check
        time.sleep(600)
    return squares(model, batch)


def hangs_in_double(model: nn.Module, batch: Tensor) -> Any:
    if batch.dtype is torch.float64:
        time.sleep(600)
    return squares(model, batch)


hanging = Task(model=Regression, loss=hangs, batch=waves)
unchecked = Task(model=Regression, loss=hangs_in_double, batch=waves)
exacting = Task(model=Regression, loss=in_fp32, batch=waves)
fussy = Task(model=Regression, loss=fails_when_large, batch=waves)


@cache
def runtime_bytes() -> int:
    """Resident bytes of a child that has imported these tasks and run a tiny step."""
    record = oomguard.probe(regression, microbatch=1, steps=2, threads=1, allocator="tight")
    assert record.runtime_bytes is not None
    return record.runtime_bytes


def next_words(model: Words, batch: tuple[Tensor, Tensor], state: Any) -> tuple[Tensor, int, Tensor]:
    hidden, state = model.rnn(model.embedding(batch[0]), state)
    logits = model.head(hidden).flatten(0, 1)
    return F.cross_entropy(logits, batch[1].flatten(), reduction="sum"), batch[1].numel(), state


piecewise = Task(model=Words, loss=next_words, batch=text)


def forgets(model: Words, batch: tuple[Tensor, Tensor], state: Any) -> tuple[Tensor, int, None]:
    return *next_words(model, batch, None)[:2], None


forgetful = Task(model=Words, loss=forgets, batch=text)


def fixed_text(rows: int, steps: int) -> tuple[Tensor, Tensor]:
    return text(rows, 8)


uncut = Task(model=Words, loss=next_words, batch=fixed_text)


def time_first(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*rows, strict=True)
    return torch.stack(inputs, 1), torch.stack(targets, 1)


windows: Any = [(torch.arange(first, first + 24), torch.arange(first + 1, first + 25)) for first in range(8)]
windowed = Task(model=Words, loss=next_words, data=DataLoader(windows, 4, collate_fn=time_first))
