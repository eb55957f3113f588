"""The model of a spec: embedding, recurrent stack, head. `forward(inputs, state) -> (outputs, state)`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from oomguard.spec import Spec

CallState = tuple[Tensor, ...]
"""Hidden (and cell) state of one recurrent call."""
State = list[CallState]
"""That of every call, first call first."""


def build(spec: Spec) -> "Recurrent":
    """The model that a spec describes, on the CPU, in training mode, with frozen parts frozen.

    >>> model = build(Spec(cell="gru", seq=5, features=3, hidden=4, layers=1))
    >>> outputs, state = model(torch.randn(5, 2, 3), None)
    >>> outputs.shape, len(state)
    (torch.Size([5, 2, 1]), 1)
    """
    model = Recurrent(spec)
    for part in spec.frozen:
        model.part(part).requires_grad_(False)
    return model


class Recurrent(nn.Module):
    """Embedding, recurrent calls with dropout and normalisation between them, head.

    The layers are one call if they can be (`Spec.one_call`).
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding: nn.Embedding | None = None
        if spec.vocab is not None:
            self.embedding = nn.Embedding(spec.vocab, spec.inputs, sparse=spec.sparse_embedding)
        calls = 1 if spec.one_call else spec.layers
        self.calls = nn.ModuleList(_recurrent(spec, i, spec.layers // calls) for i in range(calls))
        self.norms = nn.ModuleList(nn.LayerNorm(spec.width) for _ in range(spec.layers if spec.layer_norm else 0))
        self.dropout = nn.Dropout(spec.dropout)
        self.head = nn.Linear(spec.width, spec.classes)
        if spec.tied and self.embedding is not None:
            self.head.weight = self.embedding.weight

    def part(self, name: str) -> nn.Module:
        """A part by the name it has in `Spec.frozen`."""
        if name.startswith("layer"):
            call = self.calls[int(name.removeprefix("layer"))]
            assert isinstance(call, nn.Module)
            return call
        part = getattr(self, name)
        assert isinstance(part, nn.Module)
        return part

    def forward(self, inputs: Tensor, state: State | None, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        """Outputs, and the state after the last step. `lengths`: real steps of each sequence, if some are padded."""
        hidden, state = self.advance(inputs, state, lengths)
        if self.spec.head == "last-step":
            hidden = self.last_steps(hidden, lengths)
        outputs: Tensor = self.head(hidden)
        return outputs, state

    def advance(self, inputs: Tensor, state: State | None, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        """Everything below the head: outputs of the last layer, and the state after the last step."""
        hidden, after = self.enter(inputs), []
        for i, call in enumerate(self.calls):
            if i > 0:
                hidden = self.dropout(hidden)
            hidden, new = self.run(call, hidden, None if state is None else state[i], lengths)
            hidden = self.normalise(i, hidden)
            after.append(new)
        return hidden, after

    def enter(self, inputs: Tensor) -> Tensor:
        """What the first layer reads."""
        return inputs if self.embedding is None else self.embedding(inputs)

    def normalise(self, layer: int, hidden: Tensor) -> Tensor:
        """The output of a layer, normalised if the spec says so."""
        return self.norms[layer](hidden) if len(self.norms) else hidden

    def last_steps(self, hidden: Tensor, lengths: Tensor | None) -> Tensor:
        """The outputs of each sequence's last step."""
        if lengths is None:
            return hidden.select(self.time_dim, -1)
        steps, rows = (lengths - 1).to(hidden.device), torch.arange(len(lengths), device=hidden.device)
        return hidden[rows, steps] if self.spec.batch_first else hidden[steps, rows]

    def run(
        self, call: nn.Module, hidden: Tensor, state: CallState | None, lengths: Tensor | None
    ) -> tuple[Tensor, CallState]:
        """One recurrent call. Where padding is not to be read, it gets packed sequences and only those that have steps.

        A sequence that has none gives zeros, and its state stays as it is.
        """
        packs = self.spec.packs or (lengths is not None and self.spec.bidirectional)
        if not packs:
            outputs, after = call(hidden, None if state is None else _for_call(state))
            return outputs, _as_tuple(after)
        batch_first, steps, rows = self.spec.batch_first, hidden.shape[self.time_dim], hidden.shape[1 - self.time_dim]
        lengths = torch.full((rows,), steps) if lengths is None else lengths
        state = _zeros(call, hidden, rows) if state is None else state
        some = lengths.nonzero().flatten()
        if not len(some):
            return _empty(call, hidden), state
        if len(some) == rows:
            packed = pack_padded_sequence(hidden, lengths, batch_first, enforce_sorted=False)
            outputs, after = call(packed, _for_call(state))
            return pad_packed_sequence(outputs, batch_first, total_length=steps)[0], _as_tuple(after)
        there, dim = some.to(hidden.device), 1 - self.time_dim
        active = tuple(part.index_select(1, there) for part in state)
        outputs, new = self.run(call, hidden.index_select(dim, there), active, lengths[some])
        outputs = _empty(call, hidden).to(outputs.dtype).index_copy(dim, there, outputs)
        pairs = zip(state, new, strict=True)
        return outputs, tuple(old.to(one.dtype).index_copy(1, there, one) for old, one in pairs)

    def direction(self, layer: int, direction: int) -> nn.Module:
        """One direction of one layer as a call of its own, on the same weights."""
        call = self.calls[layer if len(self.calls) > 1 else 0]
        within, second = layer if len(self.calls) == 1 else 0, "_reverse" if direction else ""
        with torch.device("meta"):
            alone = _recurrent(self.spec, layer, 1, directions=1)
        for name in dict(alone.named_parameters()):
            setattr(alone, name, getattr(call, name.replace("_l0", f"_l{within}{second}")))
        return alone.train(torch.is_grad_enabled())

    @property
    def time_dim(self) -> int:
        """The dimension of the inputs that is time."""
        return 1 if self.spec.batch_first else 0

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head.weight.device


def _recurrent(spec: Spec, index: int, layers: int, directions: int | None = None) -> nn.Module:
    two = (directions or spec.directions) == 2
    shape: dict[str, Any] = {
        **{"input_size": spec.inputs if index == 0 else spec.width, "hidden_size": spec.hidden, "num_layers": layers},
        **{"bidirectional": two, "batch_first": spec.batch_first},
    }
    if spec.cell == "lstm":
        return nn.LSTM(**shape, proj_size=spec.projection or 0)
    if spec.cell == "gru":
        return nn.GRU(**shape)
    return nn.RNN(**shape, nonlinearity=spec.nonlinearity)


def _for_call(state: CallState) -> Any:
    """LSTM takes a tuple of states, the others one tensor."""
    return state if len(state) == 2 else state[0]


def _as_tuple(state: Any) -> CallState:
    return state if isinstance(state, tuple) else (state,)


def _zeros(call: Any, like: Tensor, rows: int) -> CallState:
    """The state before the first step."""
    calls = call.num_layers * (2 if call.bidirectional else 1)
    sizes = [call.proj_size or call.hidden_size, call.hidden_size] if call.mode == "LSTM" else [call.hidden_size]
    return tuple(torch.zeros(calls, rows, size, dtype=like.dtype, device=like.device) for size in sizes)


def _empty(call: Any, like: Tensor) -> Tensor:
    """Outputs of a call that has not been made."""
    width = (call.proj_size or call.hidden_size) * (2 if call.bidirectional else 1)
    return like.new_zeros(*like.shape[:2], width)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained."""
    return [p for p in model.parameters() if p.requires_grad]


def grads(model: nn.Module) -> list[Tensor]:
    """The gradients as they are now, in the order of the parameters."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable(model)]
