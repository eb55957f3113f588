"""Models of our own in the kinds that people train, as tasks: language, speech, tagging, translation, forecasting.

`CASES` names each with the rows and time steps that its step is measured at. Their parts are written in the ways that
public training codes use: packed and padded sequences, carried states, cells in loops, weights that are not leaves.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

from oomguard import Task


def tokens(rows: int, steps: int, words: int) -> Tensor:
    return torch.randint(1, words, (rows, steps))


def summed_cross_entropy(logits: Tensor, targets: Tensor, ignore: int = -100) -> tuple[Tensor, Tensor]:
    """Return the sum over all targets and their number, so that microbatches add up."""
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore, reduction="sum")
    return total, (targets != ignore).sum()


# ---- language models


class WordModel(nn.Module):
    def __init__(self, words: int = 12_000, width: int = 200, layers: int = 2) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=0.2)
        self.decoder = nn.Linear(width, words)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        y, state = self.rnn(self.drop(self.encoder(x)), state)
        return self.decoder(self.drop(y)), state


def carried(model: nn.Module, batch: tuple[Tensor, Tensor], state: Any) -> tuple[Tensor, Tensor, Any]:
    """Return the loss of a piece of text that goes on from the state of the piece before."""
    logits, state = model(batch[0], state)
    return *summed_cross_entropy(logits, batch[1]), tuple(one.detach() for one in state)


def time_first(rows: int, steps: int, words: int = 12_000) -> tuple[Tensor, Tensor]:
    text = tokens(rows, steps + 1, words).t().contiguous()
    return text[:-1], text[1:]


class WeightDrop(nn.Module):
    """An LSTM whose recurrent weights lose some entries in every pass, so that they are not leaves."""

    def __init__(self, words: int = 4000, width: int = 320) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width)
        raw = self.rnn.weight_hh_l0
        del self.rnn._parameters["weight_hh_l0"]
        self.raw = nn.Parameter(raw.data)
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.weight_hh_l0 = F.dropout(self.raw, 0.5, self.training)
        self.rnn._flat_weights = [getattr(self.rnn, name) for name in self.rnn._flat_weights_names]
        return self.head(self.rnn(self.embedding(x))[0])


class CharModel(nn.Module):
    def __init__(self, words: int = 120, width: int = 200) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.rnn = nn.GRU(width, width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.rnn(self.embedding(x))[0]))


# ---- tagging


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Sentences of unequal length with a tag for every word."""

    def __init__(self, count: int, longest: int, words: int, tags: int) -> None:
        self.count, self.longest, self.words, self.tags = count, longest, words, tags

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        rng = torch.Generator().manual_seed(index)
        length = self.longest // 4 + (index * 37) % (3 * self.longest // 4) + 1
        return (
            torch.randint(1, self.words, (length,), generator=rng),
            torch.randint(0, self.tags, (length,), generator=rng),
        )


def padded(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    words, tags = zip(*samples, strict=True)
    return {
        "words": pad_sequence(words, batch_first=True),
        "tags": pad_sequence(tags, batch_first=True, padding_value=-100),
        "lengths": torch.tensor([len(one) for one in words]),
    }


class Tagger(nn.Module):
    def __init__(self, words: int = 6000, width: int = 112, tags: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 100, padding_idx=0)
        self.encoder = nn.LSTM(100, width, 2, bidirectional=True, batch_first=True, dropout=0.3)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.encoder(packed)[0], batch_first=True)[0])


class Crf(Tagger):
    """A tagger with a transition score between neighbouring tags: its loss is a loop over time."""

    def __init__(self, tags: int = 20) -> None:
        super().__init__(width=80, tags=tags)
        self.transitions = nn.Parameter(torch.zeros(tags, tags))

    def loss(self, scores: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        alpha = scores[:, 0]
        for step in range(1, scores.shape[1]):
            longer = torch.logsumexp(alpha.unsqueeze(2) + self.transitions, 1) + scores[:, step]
            alpha = torch.where(mask[:, step].unsqueeze(1), longer, alpha)
        tags = tags.clamp(min=0)
        emitted = scores.gather(2, tags.unsqueeze(2)).squeeze(2)
        moved = self.transitions[tags[:, :-1], tags[:, 1:]]
        gold = (emitted * mask).sum(1) + (moved * mask[:, 1:]).sum(1)
        return (torch.logsumexp(alpha, 1) - gold).sum()


def crf_loss(model: Crf, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    scores = model(batch["words"], batch["lengths"])
    return model.loss(scores, batch["tags"], batch["tags"] >= 0), len(scores)


# ---- speech


class Utterances(Dataset[tuple[Tensor, Tensor]]):
    """Spectrograms of unequal length with a short text."""

    def __init__(self, count: int, longest: int, bands: int = 64, letters: int = 29) -> None:
        self.count, self.longest, self.bands, self.letters = count, longest, bands, letters

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        rng = torch.Generator().manual_seed(index)
        length = self.longest // 2 + (index * 53) % (self.longest // 2) + 1
        text = torch.randint(1, self.letters, (length // 12 + 1,), generator=rng)
        return torch.randn(length, self.bands, generator=rng), text


def collated_speech(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pad the sound to time-first frames, and put all texts into one flat tensor, as CTC takes them."""
    sound, text = zip(*samples, strict=True)
    frames, letters = (torch.tensor([len(one) for one in parts]) for parts in (sound, text))
    return pad_sequence(sound, batch_first=True), torch.cat(text), frames, letters


class Speech(nn.Module):
    def __init__(self, bands: int = 64, width: int = 160, letters: int = 29) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            *(nn.Conv2d(1, 16, (11, 21), stride=(2, 2), padding=(5, 10)), nn.BatchNorm2d(16), nn.Hardtanh(0, 20)),
            *(nn.Conv2d(16, 16, (11, 11), stride=(1, 2), padding=(5, 5)), nn.BatchNorm2d(16), nn.Hardtanh(0, 20)),
        )
        self.rnns = nn.ModuleList(
            nn.LSTM(16 * bands // 4 if not i else width, width, bidirectional=True) for i in range(2)
        )
        self.head = nn.Linear(width, letters)

    def forward(self, sound: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(sound.unsqueeze(1))
        x = x.permute(2, 0, 1, 3).flatten(2)
        frames = (frames + 1) // 2
        for rnn in self.rnns:
            packed = pack_padded_sequence(x, frames, enforce_sorted=False)
            x = pad_packed_sequence(rnn(packed)[0])[0]
            x = x.view(*x.shape[:2], 2, -1).sum(2)
        return self.head(x).log_softmax(2), frames


def ctc(model: Speech, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, int]:
    sound, text, frames, letters = batch
    scores, frames = model(sound, frames)
    return F.ctc_loss(scores, text, frames, letters, reduction="sum", zero_infinity=True), len(frames)


class Separation(nn.Module):
    """Two LSTMs by turns, within chunks of the signal and across them."""

    def __init__(self, width: int = 64, hidden: int = 112, chunk: int = 50) -> None:
        super().__init__()
        self.chunk = chunk
        self.encoder = nn.Conv1d(1, width, 16, stride=8)
        self.within = nn.LSTM(width, hidden, batch_first=True, bidirectional=True)
        self.across = nn.LSTM(width, hidden, batch_first=True, bidirectional=True)
        self.joins = nn.ModuleList(nn.Linear(2 * hidden, width) for _ in range(2))
        self.decoder = nn.ConvTranspose1d(width, 1, 16, stride=8)

    def forward(self, signal: Tensor) -> Tensor:
        x = self.encoder(signal.unsqueeze(1))
        rows, width, frames = x.shape
        y = F.pad(x, (0, -frames % self.chunk)).view(rows, width, -1, self.chunk).permute(0, 2, 3, 1)
        chunks = y.shape[1]
        y = y + self.joins[0](self.within(y.reshape(-1, self.chunk, width))[0]).view(y.shape)
        z = y.transpose(1, 2).reshape(-1, chunks, width)
        y = y + self.joins[1](self.across(z)[0]).view(rows, self.chunk, chunks, width).transpose(1, 2)
        mask = torch.sigmoid(y.reshape(rows, -1, width)[:, :frames].transpose(1, 2))
        return self.decoder(x * mask).squeeze(1)


def separation_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    made = model(batch[0])
    return F.l1_loss(made, batch[1][:, : made.shape[1]])


# ---- translation


class Attention(nn.Module):
    """An encoder, and a decoder whose cell runs in a loop and attends to all states of the encoder."""

    def __init__(self, words: int = 5000, width: int = 200) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * width, width)
        self.cell = nn.GRUCell(3 * width, width)
        self.score = nn.Linear(3 * width, 1)
        self.head = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(self.source(source))
        state, steps = torch.tanh(self.bridge(torch.cat([*last], 1))), []
        for word in self.target(target).unbind(1):
            asked = torch.cat([memory, state.unsqueeze(1).expand(-1, memory.shape[1], -1)], 2)
            weights = torch.softmax(self.score(torch.tanh(asked)), 1)
            state = self.cell(torch.cat([word, (weights * memory).sum(1)], 1), state)
            steps.append(self.head(state))
        return torch.stack(steps, 1)


def translation_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return summed_cross_entropy(model(batch["source"], batch["target"]), batch["target"])


class Autoencoder(nn.Module):
    """An LSTM that reads a sequence into its state, and one that writes it again from there."""

    def __init__(self, features: int = 24, width: int = 200) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.LSTM(features, width, 2), nn.LSTM(features, width, 2)
        self.head = nn.Linear(width, features)

    def forward(self, x: Tensor) -> Tensor:
        _, state = self.encoder(x)
        return self.head(self.decoder(torch.zeros_like(x), state)[0])


# ---- forecasting and classification


class Forecast(nn.Module):
    def __init__(self, covariates: int = 12, width: int = 112) -> None:
        super().__init__()
        self.rnn = nn.GRU(1 + covariates, width, 3, batch_first=True, dropout=0.1)
        self.mean, self.scale = nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, series: Tensor, covariates: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.rnn(torch.cat([series, covariates], 2))
        return self.mean(y), F.softplus(self.scale(y)) + 1e-4


def forecast_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    mean, scale = model(batch["series"][:, :-1], batch["covariates"][:, 1:])
    return -torch.distributions.Normal(mean, scale).log_prob(batch["series"][:, 1:]).mean()


class Normed(nn.Module):
    """LSTMs between dense layers with BatchNorm, and a skip connection around them."""

    def __init__(self, bins: int = 256, width: int = 160) -> None:
        super().__init__()
        self.enter, self.first = nn.Linear(bins, width, bias=False), nn.BatchNorm1d(width)
        self.rnn = nn.LSTM(width, width // 2, 3, bidirectional=True, dropout=0.4)
        self.middle, self.second = nn.Linear(2 * width, 2 * width, bias=False), nn.BatchNorm1d(2 * width)
        self.leave = nn.Linear(2 * width, bins)

    def forward(self, x: Tensor) -> Tensor:
        steps, rows, bins = x.shape
        y = torch.tanh(self.first(self.enter(x.reshape(-1, bins))).view(steps, rows, -1))
        y = torch.cat([y, self.rnn(y)[0]], 2)
        y = F.relu(self.second(self.middle(y.reshape(steps * rows, -1))))
        return F.relu(self.leave(y).view(x.shape)) * x


class Projected(nn.Module):
    def __init__(self, features: int = 40, width: int = 320, out: int = 80, classes: int = 12) -> None:
        super().__init__()
        self.rnn = nn.LSTM(features, width, 2, batch_first=True, proj_size=out)
        self.head = nn.Linear(out, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Residual(nn.Module):
    """A stack of bidirectional GRUs, each added to its input and normalised."""

    def __init__(self, features: int = 32, width: int = 160, layers: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.rnns = nn.ModuleList(nn.GRU(width, width // 2, bidirectional=True) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for rnn, norm in zip(self.rnns, self.norms, strict=True):
            x = norm(x + rnn(x)[0])
        return self.head(x.mean(0))


class Case(NamedTuple):
    """A task, and the size that its step is measured at."""

    task: Callable[[], Task]
    rows: int
    steps: int | None  # None: the longest samples of its data


def _sequences(rows: int, steps: int, features: int, *, first: bool = True) -> Tensor:
    return torch.randn(rows, steps, features) if first else torch.randn(steps, rows, features)


def text_task(build: Callable[[], nn.Module], words: int) -> Task:
    return Task(
        model=build,
        loss=lambda model, batch: summed_cross_entropy(model(batch[0]), batch[1]),
        batch=lambda rows, steps: time_first(rows, steps, words),
    )


def tagger_task(build: Callable[[], nn.Module], loss: Callable[..., Any]) -> Task:
    return Task(model=build, loss=loss, data=DataLoader(Sentences(400, 130, 6000, 20), 32, collate_fn=padded))


def tagger_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return summed_cross_entropy(model(batch["words"], batch["lengths"]), batch["tags"])


def translation_batch(rows: int, steps: int) -> dict[str, Tensor]:
    return {"source": tokens(rows, steps, 5000), "target": tokens(rows, steps, 5000)}


def mse(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


CASES = {
    "word model": Case(lambda: Task(model=WordModel, loss=carried, batch=time_first), 20, 70),
    "weight drop": Case(lambda: text_task(WeightDrop, 4000), 24, 100),
    "character model": Case(
        lambda: Task(model=CharModel, loss=lambda model, batch: summed_cross_entropy(model(batch), batch),
                     batch=lambda rows, steps: tokens(rows, steps, 120)), 16, 300),
    "tagger": Case(lambda: tagger_task(Tagger, tagger_loss), 64, None),
    "crf": Case(lambda: tagger_task(Crf, crf_loss), 32, None),
    "speech": Case(
        lambda: Task(model=Speech, loss=ctc, data=DataLoader(Utterances(200, 500), 8, collate_fn=collated_speech)),
        8, None),
    "separation": Case(
        lambda: Task(model=Separation, loss=separation_loss,
                     batch=lambda rows, steps: (torch.randn(rows, steps), torch.randn(rows, steps))), 2, 32_000),
    "attention": Case(lambda: Task(model=Attention, loss=translation_loss, batch=translation_batch), 16, 40),
    "autoencoder": Case(
        lambda: Task(model=Autoencoder, loss=lambda model, batch: F.mse_loss(model(batch), batch),
                     batch=lambda rows, steps: _sequences(rows, steps, 24, first=False)), 32, 150),
    "forecast": Case(
        lambda: Task(model=Forecast, loss=forecast_loss,
                     batch=lambda rows, steps: {"series": _sequences(rows, steps, 1),
                                                "covariates": _sequences(rows, steps, 12)}), 48, 240),
    "normed": Case(
        lambda: Task(model=Normed, loss=mse,
                     batch=lambda rows, steps: (_sequences(rows, steps, 256, first=False),) * 2), 12, 250),
    "projected": Case(
        lambda: Task(model=Projected, loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
                     batch=lambda rows, steps: (_sequences(rows, steps, 40), torch.zeros(rows, dtype=torch.int64)),
                     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)), 24, 160),
    "residual": Case(
        lambda: Task(model=Residual, loss=lambda model, batch: model(batch).square().mean(),
                     batch=lambda rows, steps: _sequences(rows, steps, 32, first=False),
                     optimizer=torch.optim.Adamax), 32, 200),
}  # fmt: skip
