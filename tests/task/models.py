"""Small models of the kinds that people train, as tasks by name."""

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

from oomguard import Task

torch.set_num_threads(1)
WORDS = 11


class Series(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of 3 features whose length differs, with a target for each step."""

    def __init__(self, count: int = 12, shortest: int = 4) -> None:
        self.count, self.shortest = count, shortest

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        length, rng = self.shortest + index % 5, torch.Generator().manual_seed(index)
        return torch.randn(length, 3, generator=rng), torch.randint(1, WORDS, (length,), generator=rng)


class Padded(NamedTuple):
    inputs: Tensor
    targets: Tensor
    lengths: Tensor


def padded(samples: list[tuple[Tensor, Tensor]]) -> Padded:
    inputs, targets = [one[0] for one in samples], [one[1] for one in samples]
    lengths = torch.tensor([len(one) for one in inputs])
    return Padded(pad_sequence(inputs, batch_first=True), pad_sequence(targets, True, -100), lengths)


def loader(collate: Any = padded, **how: Any) -> DataLoader[tuple[Tensor, Tensor]]:
    return DataLoader(Series(**how), 4, collate_fn=collate)


# ---- a word language model with carried state


class WordModel(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = nn.Embedding(WORDS, 6)
        self.rnn = nn.LSTM(6, 8, 2, dropout=dropout)
        self.decoder = nn.Linear(8, WORDS)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        y, state = self.rnn(self.encoder(x), state)
        return self.decoder(y), state


def text(rows: int, steps: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, WORDS, (steps + 1, rows))
    return words[:-1], words[1:]


def carried(model: nn.Module, batch: tuple[Tensor, Tensor], state: Any) -> tuple[Tensor, int, Any]:
    logits, state = model(batch[0], state)
    total = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return total, batch[1].numel(), tuple(one.detach() for one in state)


word_model = Task(model=WordModel, loss=carried, batch=text)
dropped_out = Task(model=lambda: WordModel(0.5), loss=carried, batch=text)

# ---- a packed bidirectional tagger


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(3, 5, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, WORDS)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.encoder(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.head(y)


def token_sum(model: nn.Module, batch: Padded) -> tuple[Tensor, Tensor]:
    logits = model(batch.inputs, batch.lengths).flatten(0, 1)
    return F.cross_entropy(logits, batch.targets.flatten(), reduction="sum"), (batch.targets >= 0).sum()


def token_mean(model: nn.Module, batch: Padded) -> Tensor:
    return F.cross_entropy(model(batch.inputs, batch.lengths).flatten(0, 1), batch.targets.flatten())


def plain_sum(model: nn.Module, batch: Padded) -> Tensor:
    return token_sum(model, batch)[0]


def contrast(model: nn.Module, batch: Padded) -> Any:
    scores = model(batch.inputs, batch.lengths).mean((1, 2))
    return ((scores - scores.mean()) / (scores.std() + 1)).pow(4).mean()


tagger = Task(model=Tagger, loss=token_sum, data=loader())
token_mean_tagger = Task(model=Tagger, loss=token_mean, data=loader())
summed_tagger = Task(model=Tagger, loss=plain_sum, data=loader())
contrast_tagger = Task(model=Tagger, loss=contrast, data=loader())

# ---- convolution, packed BiLSTM, CTC


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3, padding=1)
        self.rnn = nn.LSTM(4, 5, bidirectional=True)
        self.head = nn.Linear(10, WORDS)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        y = F.relu(self.conv(x.permute(1, 2, 0))).permute(2, 0, 1)
        y = pad_packed_sequence(self.rnn(pack_padded_sequence(y, lengths, enforce_sorted=False))[0])[0]
        return self.head(y).log_softmax(2)


def flat(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Frames time-first, and all texts in one flat tensor."""
    frames, texts = [one[0] for one in samples], [one[1][:2] if len(one[1]) < 7 else one[1][:3] for one in samples]
    return {
        "frames": pad_sequence(frames),
        "text": torch.cat(texts),
        "sizes": {"frames": torch.tensor([*map(len, frames)]), "text": torch.tensor([*map(len, texts)])},
    }


def ctc(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, int]:
    frames, letters = batch["sizes"]["frames"], batch["sizes"]["text"]
    scores = model(batch["frames"], frames)
    return F.ctc_loss(scores, batch["text"], frames, letters, reduction="sum", zero_infinity=True), len(frames)


speech = Task(model=Speech, loss=ctc, data=loader(flat))

# ---- sequence to sequence with attention and a loop over cells


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.encoder = nn.GRU(6, 6, batch_first=True)
        self.cell = nn.GRUCell(12, 6)
        self.head = nn.Linear(6, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Any:
        memory, state = self.encoder(self.words(source))
        h, word, steps = state[0], self.words(target[:, 0]), []
        for step in range(target.shape[1]):
            weights = torch.softmax((memory * h.unsqueeze(1)).sum(2), 1)
            h = self.cell(torch.cat([word, (weights.unsqueeze(2) * memory).sum(1)], 1), h)
            steps.append(self.head(h))
            taught = random.random() < 0.5
            word = self.words(target[:, step] if taught else steps[-1].argmax(1))
        return torch.stack(steps, 1)


def translate(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(**batch).flatten(0, 1), batch["target"].flatten())


def pairs(rows: int, steps: int) -> dict[str, Tensor]:
    return {name: torch.randint(0, WORDS, (rows, steps)) for name in ("source", "target")}


translator = Task(model=Translator, loss=translate, batch=pairs)

# ---- forecasting


class Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(2, 6, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        mean, scale = self.head(self.rnn(x)[0]).unbind(2)
        return mean, F.softplus(scale) + 1e-3


def likelihood(model: nn.Module, series: Tensor) -> Any:
    mean, scale = model(series[:, :-1])
    return (0.5 * ((series[:, 1:, 0] - mean) / scale).square() + scale.log()).mean()


forecast = Task(model=Forecast, loss=likelihood, batch=lambda rows, steps: torch.randn(rows, steps + 1, 2))

# ---- BatchNorm, weight drop, no recurrence, a wide head


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.norm, self.head = nn.LSTM(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.norm(self.rnn(x)[0].flatten(0, 1)))


class WeightDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 6), nn.Linear(6, 1)
        raw = self.rnn.weight_hh_l0
        del self.rnn._parameters["weight_hh_l0"]
        assert isinstance(raw, Tensor)
        self.raw = nn.Parameter(raw.data)

    def forward(self, x: Tensor) -> Any:
        self.rnn.weight_hh_l0 = F.dropout(self.raw, 0.5, self.training)
        self.rnn._flat_weights = [getattr(self.rnn, name) for name in self.rnn._flat_weights_names]
        return self.head(self.rnn(x)[0])


def squares(model: nn.Module, batch: Tensor) -> Any:
    return model(batch).square().mean()


def waves(rows: int, steps: int) -> Tensor:
    return torch.randn(steps, rows, 3)


normed = Task(model=Normed, loss=squares, batch=waves)
weight_drop = Task(model=WeightDrop, loss=squares, batch=waves)
feed_forward = Task(model=lambda: nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1)), loss=squares, batch=waves)


def made_later() -> Task:
    return forecast


not_a_task = 5
