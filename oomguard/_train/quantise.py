"""Predictions with weights in 8 bits: the model of a run with quantised layers, and what that changes."""

import copy
import io
import time
import warnings
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from oomguard._core.errors import MisuseError
from oomguard._core.units import format_bytes
from oomguard._rnn import Microbatch, outputs
from oomguard._rnn.model import CallState, Recurrent
from oomguard._spec.candidate import Candidate

REPEATS = 3  # passes of each model, in turns; the fastest of each counts


class Int8Recurrent(Recurrent):
    """A model whose recurrent layers and head have their weights in 8 bits; the rest stays as it is.

    Activations are quantised on the way into every product, by their range at that moment (dynamic quantisation).
    """

    def __init__(self, model: Recurrent) -> None:
        nn.Module.__init__(self)
        self.spec, self.embedding, self.norms, self.dropout = model.spec, model.embedding, model.norms, model.dropout
        self.calls = nn.ModuleList(_quantised(call) for call in model.calls)
        self.head = _quantised(model.head)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def _both_directions(self, call: int, hidden: Tensor, lengths: Tensor) -> tuple[Tensor, CallState]:
        """Run packed sequences: quantised layers have no directions that could be run alone."""
        packed = pack_padded_sequence(hidden, lengths, self.spec.batch_first, enforce_sorted=False)
        made, after = self.calls[call](packed)
        whole, _ = pad_packed_sequence(made, self.spec.batch_first, total_length=hidden.shape[self.time_dim])
        return whole, after if isinstance(after, tuple) else (after,)


class Int8Effect(msgspec.Struct, frozen=True, kw_only=True):
    """What 8 bits change, measured side by side."""

    size_bytes: int  # weights with 8 bits, as they are saved
    size_before_bytes: int
    seconds: float  # one pass over some sequences
    seconds_before: float
    loss: float | None  # validation loss; None: the run names no data for validation
    loss_before: float | None

    def __str__(self) -> str:
        size = f"weights {format_bytes(self.size_bytes)} instead of {format_bytes(self.size_before_bytes)}"
        speed = f"{self.seconds / self.seconds_before:.2f} of the time"
        if self.loss is None or self.loss_before is None:
            loss = "the validation loss is not known, since the run names no data for validation"
        else:
            change = (self.loss - self.loss_before) / abs(self.loss_before or 1.0)
            loss = f"validation loss {self.loss:.6g} instead of {self.loss_before:.6g} ({change:+.2%})"
        return f"int8: {size}, {speed}, {loss}."


def quantise(model: Recurrent) -> Int8Recurrent:
    """The model with weights in 8 bits, on the CPU."""
    if model.spec.cell == "rnn" or model.spec.projection is not None:
        what = "an rnn" if model.spec.cell == "rnn" else "an LSTM with a projection"
        advice = "Leave --precision out."
        raise MisuseError(rule="PyTorch has int8 kernels for LSTM and GRU", got=f"this is {what}", advice=advice)
    if model.device.type != "cpu":
        got, advice = f"got --device {model.device}", "Give --device cpu."
        raise MisuseError(rule="PyTorch's int8 kernels for recurrent layers run on the CPU", got=got, advice=advice)
    return Int8Recurrent(model).eval()


def _quantised(layer: nn.Module) -> Any:
    try:
        from torch.ao.quantization import quantize_dynamic
    except ImportError as error:
        raise MisuseError(
            rule="int8 needs torch.ao.quantization, which newer versions of PyTorch may lack",
            got=f"it could not be imported ({error})",
            advice="Install torch 2.13, or leave --precision out.",
        ) from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is called old, and torchao has no recurrent layers
        kinds = {nn.LSTM, nn.GRU, nn.Linear}
        made = quantize_dynamic(nn.Sequential(copy.deepcopy(layer)), kinds, dtype=torch.qint8)  # type: ignore[no-untyped-call]
    return made[0]


def measure_effect(
    before: Recurrent, after: Int8Recurrent, batch: Microbatch, candidate: Candidate, losses: tuple[float, float] | None
) -> Int8Effect:
    """Compare two models by their size and the time of a pass. `losses`: of validation, with 8 bits and before."""
    times: dict[Recurrent, list[float]] = {before: [], after: []}
    for _ in range(REPEATS):
        for model, taken in times.items():
            began = time.perf_counter()
            outputs(model, batch, candidate)
            taken.append(time.perf_counter() - began)
    loss, loss_before = losses or (None, None)
    return Int8Effect(
        size_bytes=_saved_bytes(after),
        size_before_bytes=_saved_bytes(before),
        seconds=min(times[after]),
        seconds_before=min(times[before]),
        loss=loss,
        loss_before=loss_before,
    )


def _saved_bytes(model: nn.Module) -> int:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(model.state_dict(), file)
    return file.tell()
