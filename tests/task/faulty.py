"""Tasks with one fault each, as users make them."""

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from oomguard import Task

torch.set_num_threads(1)
SAMPLES = [torch.ones(4 + index % 5, 3) * index for index in range(24)]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.rnn(x)[0])


def collate(chosen: list[Tensor]) -> Tensor:
    return pad_sequence(chosen, batch_first=True)


def mean(model: nn.Module, batch: Tensor) -> Any:
    return model(batch).square().mean()


def loader(data: Any = SAMPLES, made: Any = collate, **options: Any) -> Any:
    return DataLoader(data, 4, collate_fn=made, **options)


def faulty(**parts: Any) -> Task:
    usual: dict[str, Any] = {"model": Tagger, "loss": mean}
    return Task(**usual | ({} if "batch" in parts else {"data": loader()}) | parts)


# ---- losses


def of_rows(model: nn.Module, batch: Tensor) -> Any:
    return model(batch).square().mean((1, 2))


def as_float(model: nn.Module, batch: Tensor) -> Any:
    return model(batch).square().mean().item()


def as_numpy(model: nn.Module, batch: Tensor) -> Any:
    return model(batch).square().mean().detach().numpy()


def as_dict(model: nn.Module, batch: Tensor) -> Any:
    return {"loss": mean(model, batch)}


def nothing(model: nn.Module, batch: Tensor) -> Any:
    mean(model, batch)


def detached(model: nn.Module, batch: Tensor) -> Any:
    return mean(model, batch).detach()


def not_a_number(model: nn.Module, batch: Tensor) -> Any:
    return mean(model, batch) * float("nan")


def with_output(model: nn.Module, batch: Tensor) -> Any:
    output = model(batch)
    return output.square().mean(), output


def with_text(model: nn.Module, batch: Tensor) -> Any:
    return mean(model, batch), "a note"


def with_number(model: nn.Module, batch: Tensor) -> Any:
    return model(batch).square().sum(), np.float64(batch.numel())


def changing(model: nn.Module, batch: Tensor) -> Any:
    output = model(batch).exp()
    loss = output * output
    output.add_(1)
    return loss.sum()


# ---- models


class Elsewhere(Tagger):
    """It moves its input to a device that is not here, or is not the one of its weights."""

    def forward(self, x: Tensor) -> Any:
        return self.head(self.rnn(x.to("cuda"))[0])


class Valueless(Tagger):
    def forward(self, x: Tensor) -> Any:
        return self.head(self.rnn(x)[0].to("meta"))


class Frozen(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Dense(nn.Module):
    """It has no recurrent calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 2048), nn.Tanh(), nn.Linear(2048, 1))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


def cannot_build() -> Any:
    raise KeyError("no vocabulary")


# ---- data


def fails_on_long_samples(chosen: list[Tensor]) -> Tensor:
    if max(map(len, chosen)) > 7:
        raise ValueError("too long")
    return collate(chosen)


class Damaged(Dataset[Tensor]):
    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: int) -> Tensor:
        if index == 7:
            raise OSError("file 7 is damaged")
        return SAMPLES[index]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(SAMPLES)


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(SAMPLES)


class Locked:
    """A function to collate with that holds a lock, which no other process can have."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, chosen: list[Tensor]) -> Tensor:
        with self.lock:
            return collate(chosen)


scalar = faulty(loss=of_rows)
