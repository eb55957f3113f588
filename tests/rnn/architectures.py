"""Small models of the kinds that people train, each with a loss. They know nothing of segments."""

import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

LENGTHS = torch.tensor([9, 31, 14, 22])
ROWS, STEPS = len(LENGTHS), int(LENGTHS.max())


class Architecture(NamedTuple):
    """A model, and a function that runs a few passes of it and returns their loss."""

    model: nn.Module
    loss: Callable[[], Tensor]


def _doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class WeightDrop(nn.Module):
    """An LSTM whose recurrent weights are dropped before every call: they are no leaves of the graph."""

    def __init__(self, inputs: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.rnn, self.dropout = nn.LSTM(inputs, hidden), dropout
        self.raw = nn.Parameter(self.rnn.get_parameter("weight_hh_l0").detach().clone())
        del self.rnn._parameters["weight_hh_l0"]
        self.rnn.weight_hh_l0 = self.raw.detach()

    def forward(self, inputs: Tensor, state: Any) -> Any:
        self.rnn.weight_hh_l0 = functional.dropout(self.raw, self.dropout, self.training)
        return self.rnn.forward(inputs, state)


def language_model() -> Architecture:
    """Tied embedding, weight drop, a state that is carried from one window to the next, and detached there."""
    model = nn.ModuleDict({"words": nn.Embedding(11, 6), "low": WeightDrop(6, 8, 0.3), "high": WeightDrop(8, 6, 0.3)})
    text = torch.randint(11, (2 * STEPS + 1, ROWS))

    def loss() -> Tensor:
        total, states = torch.zeros(()).double(), [None, None]
        for window in (text[: STEPS + 1], text[STEPS:]):
            hidden = model["words"](window[:-1])
            for i, name in enumerate(("low", "high")):
                hidden, state = model[name](functional.dropout(hidden, 0.2), states[i])
                states[i] = tuple(part.detach() for part in state)  # type: ignore[call-overload]
            logits = hidden @ model["words"].weight.T
            total = total + functional.cross_entropy(logits.flatten(0, 1), window[1:].flatten())
        return total

    return Architecture(model, loss)


def tagger() -> Architecture:
    """A packed bidirectional LSTM of two layers, with the loss of a linear-chain CRF."""
    model = nn.ModuleDict({"rnn": nn.LSTM(5, 6, 2, bidirectional=True, dropout=0.3), "head": nn.Linear(12, 4)})
    moves = nn.Parameter(_doubles(4, 4))
    model.register_parameter("moves", moves)
    inputs, tags = _doubles(STEPS, ROWS, 5), torch.randint(4, (STEPS, ROWS))

    def loss() -> Tensor:
        packed, _ = model["rnn"](pack_padded_sequence(inputs, LENGTHS, enforce_sorted=False))
        scores: Tensor = model["head"](pad_packed_sequence(packed)[0])
        total, gold = scores[0], scores[0].gather(1, tags[0, :, None]).squeeze(1)
        for step in range(1, STEPS):
            runs = (step < LENGTHS)[:, None]
            total = torch.where(runs, (total[:, :, None] + moves).logsumexp(1) + scores[step], total)
            move = moves[tags[step - 1], tags[step]] + scores[step].gather(1, tags[step, :, None]).squeeze(1)
            gold = gold + torch.where(runs.squeeze(1), move, torch.zeros_like(move))
        return (total.logsumexp(1) - gold).sum()

    return Architecture(model, loss)


def speech() -> Architecture:
    """Convolutions over time, then packed bidirectional GRUs whose directions are added, then CTC."""
    layers = [nn.GRU(6 if i == 0 else 7, 7, bidirectional=True, batch_first=True, bias=False) for i in range(2)]
    model = nn.ModuleDict(
        {"conv": nn.Conv1d(4, 6, 5, padding=2), "rnns": nn.ModuleList(layers), "head": nn.Linear(7, 5)}
    )
    sound, targets = _doubles(ROWS, 4, STEPS), torch.randint(1, 5, (12,))

    def loss() -> Tensor:
        hidden = functional.hardtanh(model["conv"](sound)).transpose(1, 2)
        for rnn in layers:
            packed, _ = rnn(pack_padded_sequence(hidden, LENGTHS, batch_first=True, enforce_sorted=False))
            both, _ = pad_packed_sequence(packed, batch_first=True)
            hidden = both.view(ROWS, -1, 2, 7).sum(2)
        logs = model["head"](hidden).log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(logs, targets, LENGTHS, torch.full((ROWS,), 3))

    return Architecture(model, loss)


def translator() -> Architecture:
    """A bidirectional encoder, and a decoder that calls a GRU for one step at a time and attends to the encoder."""
    rnns = {"encoder": nn.GRU(5, 6, bidirectional=True), "decoder": nn.GRU(5 + 12, 6), "bridge": nn.Linear(12, 6)}
    model = nn.ModuleDict({**rnns, "words": nn.Embedding(9, 5), "key": nn.Linear(12, 6), "head": nn.Linear(6, 9)})
    source, target = torch.randint(9, (STEPS, ROWS)), torch.randint(9, (7, ROWS))

    def loss() -> Tensor:
        memory, last = model["encoder"](model["words"](source))
        state, given, total = model["bridge"](torch.cat([*last], -1)).tanh()[None], target[0], torch.zeros(()).double()
        for word in target[1:]:
            weights = (model["key"](memory) * state).sum(-1).softmax(0)
            context = (weights[..., None] * memory).sum(0)
            outputs, state = model["decoder"](torch.cat([model["words"](given), context], -1)[None], state)
            logits = model["head"](outputs[0])
            total = total + functional.cross_entropy(logits, word)
            given = word if random.random() < 0.5 else logits.argmax(-1)
        return total

    return Architecture(model, loss)


def forecaster() -> Architecture:
    """A GRU with covariates and static embeddings, which gives a normal distribution at every step, scaled by row."""
    rnn = nn.GRU(1 + 2 + 3, 8, 3, batch_first=True, dropout=0.1)
    model = nn.ModuleDict({"item": nn.Embedding(5, 3), "rnn": rnn, "head": nn.Linear(8, 2)})
    series, covariates, item = _doubles(ROWS, STEPS + 1).abs(), _doubles(ROWS, STEPS, 2), torch.arange(ROWS)

    def loss() -> Tensor:
        scale = series.mean(1, keepdim=True)
        fixed = model["item"](item)[:, None].expand(-1, STEPS, -1)
        lagged = (series[:, :-1] / scale)[..., None]
        mean, spread = model["head"](model["rnn"](torch.cat([lagged, covariates, fixed], -1))[0]).unbind(-1)
        deviation = functional.softplus(spread) * scale
        return functional.gaussian_nll_loss(mean * scale, series[:, 1:], deviation.square())

    return Architecture(model, loss)


def agent() -> Architecture:
    """A policy and a value whose state is set to zero where an episode begins, so that it runs from reset to reset."""
    model = nn.ModuleDict({"rnn": nn.LSTM(4, 6), "policy": nn.Linear(6, 3), "value": nn.Linear(6, 1)})
    seen, acts, starts = _doubles(STEPS, ROWS, 4), torch.randint(3, (STEPS, ROWS)), torch.zeros(STEPS, ROWS).double()
    starts[[0, 11, 12, 20], [0, 1, 2, 3]] = 1

    def loss() -> Tensor:
        state = (_doubles(1, ROWS, 6), _doubles(1, ROWS, 6))
        borders = [0, *(step for step in range(1, STEPS) if starts[step].any()), STEPS]
        made = []
        for first, last in itertools.pairwise(borders):
            keep = (1 - starts[first])[None, :, None]
            outputs, state = model["rnn"](seen[first:last], (keep * state[0], keep * state[1]))
            made.append(outputs)
        hidden = torch.cat(made)
        advantage = 1 - model["value"](hidden).squeeze(-1)
        chosen = functional.cross_entropy(model["policy"](hidden).flatten(0, 1), acts.flatten())
        return chosen + functional.mse_loss(advantage, torch.zeros_like(advantage))

    return Architecture(model, loss)


class Residual(nn.LSTM):
    """A subclass of nn.LSTM that adds its input to its output."""

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002
        outputs, state = super().forward(input, hx)
        return outputs + input, state


def subclass() -> Architecture:
    """Layers of a user's own class, one of them used twice."""
    layers = nn.ModuleList([Residual(6, 6), Residual(6, 8, proj_size=6)])
    inputs = _doubles(STEPS, ROWS, 6)

    def loss() -> Tensor:
        hidden = inputs
        for index in (0, 1, 0):
            hidden, _ = layers[index](hidden)
        return hidden.square().mean()

    return Architecture(layers, loss)


def by_name() -> Architecture:
    """Modules that are made by name, of which only the last states are read."""
    model = nn.ModuleList(getattr(nn, name)(5, 4, 2, bidirectional=True) for name in ("LSTM", "GRU", "RNN"))
    inputs = _doubles(STEPS, ROWS, 5)

    def loss() -> Tensor:
        lasts = [state if isinstance(state, Tensor) else state[0] for _, state in (rnn(inputs) for rnn in model)]
        return torch.stack(lasts).square().sum()

    return Architecture(model, loss)


ALL = {
    make.__name__: make for make in (language_model, tagger, speech, translator, forecaster, agent, subclass, by_name)
}


def build(name: str) -> Architecture:
    """An architecture in double precision, with the same weights and data every time."""
    torch.manual_seed(0)
    made = ALL[name]()
    made.model.double()
    return made
