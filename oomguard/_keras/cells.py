"""Recurrent layers of Keras as those of PyTorch, which run in the kernels that segments reach."""

from typing import Any

import torch
from torch import Tensor, nn

from oomguard._core.errors import shown, visible
from oomguard._keras.graph import Layer, as_layer
from oomguard._keras.settings import Settings

GATES = {"LSTM": 4, "GRU": 3, "SimpleRNN": 1}
KINDS = {
    **{"LSTM": "LSTM", "GRU": "GRU", "SimpleRNN": "SimpleRNN", "CuDNNLSTM": "LSTM", "CuDNNGRU": "GRU"},
    **{"LSTMCell": "LSTM", "GRUCell": "GRU", "SimpleRNNCell": "SimpleRNN"},
}
"""The cell of each recurrent layer, and of the cells that the layer RNN takes."""
MERGES = ("concat", "sum", "ave", "mul")


class _Cell(nn.RNNBase):
    """What the recurrent layers of Keras add to those of PyTorch."""

    surplus = 0  # parameters that PyTorch has and Keras has not
    drop = 0.0  # share of the inputs that are dropped, the same at every step
    sequences, returns_state, backwards = False, False, False
    merge: str | None = "concat"  # how the directions are joined; None: side by side

    def forward(self, inputs: Tensor, *states: Tensor) -> Any:
        """The outputs of Keras's layer: all steps or the last one, and the states if they are returned."""
        if self.backwards:
            inputs = inputs.flip(1)
        if self.drop and self.training:
            inputs = inputs * nn.functional.dropout(torch.ones_like(inputs[:, :1]), self.drop)
        outputs, ends = self._run(inputs, states)
        last = ends[0].transpose(0, 1).flatten(1)  # rows x (directions x units)
        result = self._merged(outputs if self.sequences else last)
        if not self.returns_state:
            return result
        own = [end[direction] for direction in range(len(ends[0])) for end in ends]
        return (*(result if isinstance(result, tuple) else (result,)), *own)

    def _run(self, inputs: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        both, count = 2 if self.bidirectional else 1, 2 if self.mode == "LSTM" else 1
        if inputs.is_meta:  # only shapes are asked for
            outputs = inputs.new_empty(*inputs.shape[:2], both * self.hidden_size)
            return outputs, (inputs.new_empty(both, inputs.shape[0], self.hidden_size),) * count
        begin: Any = None
        if states:  # of each direction in turn
            begin = tuple(torch.stack(states[index::count]) for index in range(count))
            begin = begin if count == 2 else begin[0]
        outputs, ends = super().forward(inputs, begin)
        return outputs, ends if isinstance(ends, tuple) else (ends,)

    def _merged(self, outputs: Tensor) -> Any:
        if not self.bidirectional or self.merge == "concat":
            return outputs
        one, other = outputs.chunk(2, -1)
        if self.merge is None:
            return one, other
        return one * other if self.merge == "mul" else (one + other) * (0.5 if self.merge == "ave" else 1.0)


class _Lstm(_Cell, nn.LSTM):  # type: ignore[misc]  # other arguments, as Keras has them
    pass


class _Gru(_Cell, nn.GRU):  # type: ignore[misc]  # other arguments, as Keras has them
    pass


class _Rnn(_Cell, nn.RNN):  # type: ignore[misc]  # other arguments, as Keras has them
    pass


CELLS: dict[str, Any] = {"LSTM": _Lstm, "GRU": _Gru, "SimpleRNN": _Rnn}


def recurrent(settings: Settings, width: int, *, directions: int = 1, merge: str | None = "concat") -> nn.Module:
    """A recurrent layer of Keras, or the layer RNN with one cell."""
    layer, outer = settings.layer, settings.layer
    if layer.kind == "RNN":
        layer = as_layer(settings.inner("cell"))
        settings = Settings(Layer(outer.name, layer.kind, layer.settings), settings.notes)
    if layer.kind not in KINDS:
        raise outer.wrong(f"PyTorch has no kernel for its cell {visible(shown(layer.kind))}")
    kind, flags, units = KINDS[layer.kind], Settings(outer), settings.whole("units")
    bias, more = settings.switch("use_bias", True), _checked(settings, kind)
    module = CELLS[kind](width, units, bias=bias, batch_first=True, bidirectional=directions == 2, **more)
    module.sequences = flags.switch("return_sequences", False)
    module.returns_state, module.backwards = flags.switch("return_state", False), flags.switch("go_backwards", False)
    module.drop, module.merge = settings.number("dropout", 0.0), merge
    one_bias = kind != "GRU" or not settings.switch("reset_after", False)
    if bias and one_bias and not layer.kind.startswith("CuDNN"):
        module.surplus = directions * GATES[kind] * units
    return module  # type: ignore[no-any-return]


def _checked(settings: Settings, kind: str) -> dict[str, Any]:
    """Note what PyTorch's kernels do not have, and return the nonlinearity of a SimpleRNN."""
    activation = settings.activation_name(usual="tanh")
    inner = settings.activation_name("recurrent_activation", "sigmoid")
    gated = kind != "SimpleRNN"
    if activation not in (("tanh",) if gated else ("tanh", "relu")):
        settings.note(f"its activation {visible(shown(activation))} is in no kernel of PyTorch; it counts like tanh")
    if gated and inner != "sigmoid":
        settings.note(f"its gates use {visible(shown(inner))}, PyTorch's sigmoid")
    if settings.number("recurrent_dropout", 0.0):
        settings.note("its recurrent_dropout is left out, since PyTorch's kernels have none")
    return {} if gated else {"nonlinearity": "relu" if activation == "relu" else "tanh"}


def bidirectional(settings: Settings, width: int) -> nn.Module:
    """Both directions of a recurrent layer in one call of PyTorch's kernel."""
    layer = as_layer(settings.inner("layer"))
    forward = Settings(Layer(settings.layer.name, layer.kind, layer.settings), settings.notes)
    merge = settings.layer.settings.get("merge_mode", "concat")
    if merge not in (*MERGES, None):
        raise settings.wrong("merge_mode", f"one of {', '.join(MERGES)}", merge)
    if (saved := settings.inner("backward_layer")) is not None:
        back = as_layer(saved)
        same = ("units", "use_bias", "activation", "reset_after", "return_sequences")
        if back.kind != layer.kind or any(back.settings.get(n) != layer.settings.get(n) for n in same):
            raise settings.layer.wrong("its directions differ, and PyTorch runs two equal ones")
    return recurrent(forward, width, directions=2, merge=merge)
