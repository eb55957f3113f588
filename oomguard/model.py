"""The model of a spec: embedding, recurrent stack, head. `forward(inputs, state) -> (outputs, state)`."""

from typing import Any

import torch
from torch import Tensor, nn

from oomguard.spec import Spec

State = list[tuple[Tensor, ...]]
"""Hidden (and cell) state of every recurrent call, first call first."""


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

    def forward(self, inputs: Tensor, state: State | None) -> tuple[Tensor, State]:
        hidden, state = self.advance(inputs, state)
        if self.spec.head == "last-step":
            hidden = hidden.select(self.time_dim, -1)
        outputs: Tensor = self.head(hidden)
        return outputs, state

    def advance(self, inputs: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Everything below the head: hidden outputs of the last layer, and the state after the last step."""
        hidden = inputs if self.embedding is None else self.embedding(inputs)
        after: State = []
        for i, call in enumerate(self.calls):
            if i > 0:
                hidden = self.dropout(hidden)
            hidden, new = call(hidden, None if state is None else _for_call(state[i]))
            if len(self.norms):
                hidden = self.norms[i](hidden)
            after.append(new if isinstance(new, tuple) else (new,))
        return hidden, after

    @property
    def time_dim(self) -> int:
        """The dimension of the inputs that is time."""
        return 1 if self.spec.batch_first else 0


def _recurrent(spec: Spec, index: int, layers: int) -> nn.Module:
    shape: dict[str, Any] = {
        **{"input_size": spec.inputs if index == 0 else spec.width, "hidden_size": spec.hidden, "num_layers": layers},
        **{"bidirectional": spec.bidirectional, "batch_first": spec.batch_first},
    }
    if spec.cell == "lstm":
        return nn.LSTM(**shape, proj_size=spec.projection or 0)
    if spec.cell == "gru":
        return nn.GRU(**shape)
    return nn.RNN(**shape, nonlinearity=spec.nonlinearity)


def _for_call(state: tuple[Tensor, ...]) -> Any:
    """LSTM takes a tuple of states, the others one tensor."""
    return state if len(state) == 2 else state[0]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained."""
    return [p for p in model.parameters() if p.requires_grad]


def grads(model: nn.Module) -> list[Tensor]:
    """The gradients as they are now, in the order of the parameters."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable(model)]
