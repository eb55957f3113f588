"""Recurrent: the model of a spec, with embedding, recurrent layers and head."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from oomguard._spec.spec import Spec

CallState = tuple[Tensor, ...]  # hidden (and cell) state of one recurrent call
State = list[CallState]  # the state of every call, first call first


def build(spec: Spec) -> "Recurrent":
    """Build the model of a spec, on the CPU, in training mode, with frozen parts frozen."""
    model = Recurrent(spec)
    for part in spec.frozen:
        model.part(part).requires_grad_(False)
    return model


class Recurrent(nn.Module):
    """Embedding, recurrent calls with dropout and normalisation between them, head.

    The layers are one call if they can be (`Spec.one_call`).

    >>> model = Recurrent(Spec(cell="gru", seq=5, features=3, hidden=4))
    >>> outputs, state = model(torch.zeros(5, 2, 3), None)  # time x sequences x features
    >>> outputs.shape
    torch.Size([5, 2, 1])
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
        """Return a part by its name in `Spec.frozen`."""
        return self.get_submodule(name.replace("layer", "calls."))

    def forward(self, inputs: Tensor, state: State | None, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        """Return the outputs and the state after the last step. `lengths`: real steps of padded sequences."""
        hidden, state = self.advance(inputs, state, lengths)
        if self.spec.head == "last-step":
            hidden = self.last_steps(hidden, lengths)
        outputs: Tensor = self.head(hidden)
        return outputs, state

    def advance(self, inputs: Tensor, state: State | None, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        """Run everything below the head; return the outputs of the last layer and the state after the last step."""
        hidden, after = self.enter(inputs), []
        for i, call in enumerate(self.calls):
            if i > 0:
                hidden = self.dropout(hidden)
            if lengths is not None and self.spec.bidirectional and hidden.device.type == "cpu":
                hidden, new = self._both_directions(i, hidden, lengths)
            else:
                hidden, new = self.run(call, hidden, None if state is None else state[i], lengths)
            hidden = self.normalise(i, hidden)
            after.append(new)
        return hidden, after

    def enter(self, inputs: Tensor) -> Tensor:
        """Return the input of the first layer."""
        return inputs if self.embedding is None else self.embedding(inputs)

    def normalise(self, layer: int, hidden: Tensor) -> Tensor:
        """Normalise the output of a layer if the spec says so."""
        return self.norms[layer](hidden) if len(self.norms) else hidden

    def last_steps(self, hidden: Tensor, lengths: Tensor | None) -> Tensor:
        """Return the outputs of each sequence's last step."""
        if lengths is None:
            return hidden.select(self.time_dim, -1)
        steps, rows = (lengths - 1).to(hidden.device), torch.arange(len(lengths), device=hidden.device)
        return hidden[rows, steps] if self.spec.batch_first else hidden[steps, rows]

    def run(
        self, call: nn.Module, hidden: Tensor, state: CallState | None, lengths: Tensor | None, *, ends: bool = False
    ) -> tuple[Tensor, CallState]:
        """Make one recurrent call. `ends`: the state after the last real step of each sequence is needed too.

        On a card, sequences are packed where the spec says so. On the CPU they are not, because the time of PyTorch's
        kernels for packed sequences grows with the square of the length, and steps after the last real one do no harm.
        Only where the state at that step is needed are the sequences that end here packed. A sequence without a step
        here gives zeros.
        """
        card, steps = hidden.device.type == "cuda", hidden.shape[self.time_dim]
        packs = card and (self.spec.packs or (self.spec.bidirectional and lengths is not None))
        if not packs and (lengths is None or not ends or int(lengths.min()) == steps):
            outputs, after = call(hidden, None if state is None else _for_call(state))
            return outputs, _as_tuple(after)
        rows = hidden.shape[1 - self.time_dim]
        lengths = torch.full((rows,), steps) if lengths is None else lengths
        whole = torch.zeros(rows, dtype=torch.bool) if card else lengths == steps
        outputs, after = _zeros(call, hidden, rows)
        after = after if state is None else state
        for group, short in ((whole, False), (~whole & (lengths > 0), True)):
            if group.any():
                outputs, after = self._run_some(call, (hidden, lengths if short else None), (outputs, after), group)
        return outputs, after

    def _run_some(
        self, call: nn.Module, given: tuple[Tensor, Tensor | None], before: tuple[Tensor, CallState], group: Tensor
    ) -> tuple[Tensor, CallState]:
        """Run some of the sequences, packed if they have lengths; the outputs and states of the others stay."""
        (hidden, lengths), (outputs, state) = given, before
        rows, dim, everyone = group.nonzero().flatten(), 1 - self.time_dim, bool(group.all())
        there = rows.to(hidden.device)
        inputs = hidden if everyone else hidden.index_select(dim, there)
        active = state if everyone else tuple(part.index_select(1, there) for part in state)
        if lengths is None:
            made, after = call(inputs, _for_call(active))
        else:
            packed = pack_padded_sequence(inputs, lengths[rows], self.spec.batch_first, enforce_sorted=False)
            with _without_onednn():
                packed, after = call(packed, _for_call(active))
            made, _ = pad_packed_sequence(packed, self.spec.batch_first, total_length=hidden.shape[self.time_dim])
        if everyone:
            return made, _as_tuple(after)
        pairs = zip(state, _as_tuple(after), strict=True)
        return outputs.to(made.dtype).index_copy(dim, there, made), tuple(
            old.to(new.dtype).index_copy(1, there, new) for old, new in pairs
        )

    def _both_directions(self, call: int, hidden: Tensor, lengths: Tensor) -> tuple[Tensor, CallState]:
        """Run the layers of a call with each direction alone, so that the second does not start in the padding."""
        layers, after = [call] if len(self.calls) > 1 else [*range(self.spec.layers)], []
        for layer in layers:
            outputs = []
            for direction in (0, 1):
                inputs = turned(hidden, lengths, self.time_dim) if direction else hidden
                made, new = self.run(self.direction(layer, direction), inputs, None, None)
                outputs.append(turned(made, lengths, self.time_dim) if direction else made)
                after.append(new)
            hidden = torch.cat(outputs, -1)
        return hidden, tuple(torch.cat(parts) for parts in zip(*after, strict=True))

    def direction(self, layer: int, direction: int) -> nn.Module:
        """Return one direction of one layer as a module of its own, on the same weights."""
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
        """The device of the weights."""
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the outputs."""
        return self.head.weight.dtype


def _recurrent(spec: Spec, index: int, layers: int, directions: int | None = None) -> nn.Module:
    shape: dict[str, Any] = {
        **{"input_size": spec.inputs if index == 0 else spec.width, "hidden_size": spec.hidden, "num_layers": layers},
        **{"bidirectional": (directions or spec.directions) == 2, "batch_first": spec.batch_first},
    }
    if spec.cell == "lstm":
        return nn.LSTM(**shape, proj_size=spec.projection or 0)
    if spec.cell == "gru":
        return nn.GRU(**shape)
    return nn.RNN(**shape, nonlinearity=spec.nonlinearity)


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Use PyTorch's own CPU kernels: oneDNN would run a packed LSTM if its lengths happen to be equal."""
    mkldnn = torch.backends.mkldnn
    before = mkldnn.enabled
    try:
        mkldnn.enabled = False  # type: ignore[assignment]
        yield
    finally:
        mkldnn.enabled = before


def _for_call(state: CallState) -> Any:
    """LSTM takes a tuple of states, the others one tensor."""
    return state if len(state) == 2 else state[0]


def _as_tuple(state: Any) -> CallState:
    return state if isinstance(state, tuple) else (state,)


def _zeros(call: Any, hidden: Tensor, rows: int) -> tuple[Tensor, CallState]:
    """Return zeros in the shape of a call's outputs, and the state before the first step."""
    directions, width = 2 if call.bidirectional else 1, call.proj_size or call.hidden_size
    sizes = [width, call.hidden_size] if call.mode == "LSTM" else [width]
    state = tuple(hidden.new_zeros(call.num_layers * directions, rows, size) for size in sizes)
    return hidden.new_zeros(*hidden.shape[:2], width * directions), state


def turned(piece: Tensor, lengths: Tensor | None, time_dim: int) -> Tensor:
    """Reverse the real steps of a piece; padding stays at the end."""
    if lengths is None:
        return piece.flip(time_dim)
    steps = torch.arange(piece.shape[time_dim])[:, None]
    index = torch.where(steps < lengths, lengths - 1 - steps, steps)
    index = (index.T if time_dim else index).to(piece.device).unsqueeze(-1)
    return piece.take_along_dim(index.expand_as(piece), time_dim)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]
