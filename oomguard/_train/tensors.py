"""The state of a training as named tensors and JSON, and safetensors files that hold the tensors.

Tensors go to the disk and come back one at a time, so neither direction needs room for a second model. safetensors
itself only reads the files: its own writer first copies all tensors of a card to host memory, and a checksum would need
a second pass over the file.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from oomguard._core.errors import MisuseError
from oomguard._rnn.rng import global_states, rng_states, set_global_states, set_rng_states
from oomguard._step import TaskTraining

_RUN_OPTIONS = ("params", "foreach", "fused", "capturable", "differentiable")
"""Entries of an optimizer's group that follow from the candidate, which may differ after a resume."""
_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
"""Names in the header (safetensors 0.8, lib.rs, Dtype) of all dtypes that weights and optimizer states have."""
_ALIGNED_BYTES = 8  # safetensors 0.8, lib.rs: the header is padded with spaces, so that the tensors are aligned


class Dense(msgspec.Struct, frozen=True, tag="dense"):
    """A tensor of the optimizer's state; its content is in the file."""


class Sparse(msgspec.Struct, frozen=True, kw_only=True, tag="sparse"):
    """A sparse tensor of the optimizer's state; its indices and values are in the file."""

    size: list[int]
    coalesced: bool  # Whether each index occurs once. The rounding of the next addition depends on it.


class Scalar(msgspec.Struct, frozen=True, kw_only=True, tag="plain"):
    """An entry of the optimizer's state that is not a tensor."""

    value: Any


Entry = Dense | Sparse | Scalar


class OptimizerState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of optimizer and scaler without the tensors' content."""

    optimizer: str  # name of the optimizer's class
    groups: list[dict[str, Any]]  # learning rate and other numbers of each parameter group
    kept: dict[str, dict[str, Entry]]  # state of each parameter, by the parameter's name
    scaler: dict[str, Any] | None = None  # state of the loss scaler for fp16; None: there is none


def get_state(training: TaskTraining) -> tuple[OptimizerState, dict[str, Tensor]]:
    """The state of a training as it is now. The tensors are its own, not copies."""
    tensors = weights(training.model)
    tensors |= {f"random.{name}": state for name, state in (rng_states(training.device) | global_states()).items()}
    kept: dict[str, dict[str, Entry]] = {}
    for name, parameter in training.model.named_parameters():
        for key, value in training.optimizer.state.get(parameter, {}).items():
            kept.setdefault(name, {})[key] = _describe(f"optimizer.{name}.{key}", value, tensors)
    groups = [
        {name: value for name, value in group.items() if name not in _RUN_OPTIONS}
        for group in training.optimizer.param_groups
    ]
    scaler = None if training.scaler is None else training.scaler.state_dict()
    return OptimizerState(optimizer=type(training.optimizer).__name__, groups=groups, kept=kept, scaler=scaler), tensors


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their names in a checkpoint. Tied weights are there once, under their first name."""
    return {f"model.{name}": value for name, value in [*model.named_parameters(), *model.named_buffers()]}


def _describe(name: str, value: object, tensors: dict[str, Tensor]) -> Entry:
    """Put a tensor of the optimizer's state among the tensors and return its description."""
    if not isinstance(value, Tensor):
        return Scalar(value=value)
    if value.layout is not torch.sparse_coo:
        tensors[name] = value
        return Dense()
    tensors[f"{name}.indices"], tensors[f"{name}.values"] = value._indices(), value._values()
    return Sparse(size=[*value.shape], coalesced=value.is_coalesced())


class TensorFile:
    """A safetensors file, read one tensor at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            self.names = {*file.keys()}

    def read(self, name: str) -> Tensor:
        """A tensor that is mapped from the file. Copy it to keep it."""
        with self._open() as file:  # again for each tensor: pages that were read count as memory until it is closed
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def _open(self) -> Any:
        try:
            return safe_open(self.path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise MisuseError(
                rule="A checkpoint must stay in place until it is restored",
                got=f"{self.path} cannot be read any more ({error})",
                advice="Load the newest checkpoint again.",
            ) from None


def put_weights(model: torch.nn.Module, file: TensorFile) -> None:
    """Copy the weights into a model in place: they may be tied, or views of one block that cuDNN reads."""
    with torch.no_grad():
        for name, value in weights(model).items():
            value.copy_(file.read(name))


def put_state(training: TaskTraining, state: OptimizerState, file: TensorFile) -> None:
    """Give a training the state that `get_state` returned, bit for bit."""
    put_weights(training.model, file)
    optimizer, names = training.optimizer, {p: name for name, p in training.model.named_parameters()}
    optimizer.state.clear()
    for group, numbers in zip(optimizer.param_groups, state.groups, strict=True):
        for key, value in numbers.items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        for parameter in group["params"]:
            is_owned = training.owned is None or parameter in training.owned
            if is_owned and (name := names[parameter]) in state.kept:
                optimizer.state[parameter] = {
                    key: _rebuild(f"optimizer.{name}.{key}", value, file, _device_of(training, group, parameter, key))
                    for key, value in state.kept[name].items()
                }
    if training.scaler is not None and state.scaler is not None:
        training.scaler.load_state_dict(state.scaler)
    # last, since nothing after it may draw random numbers
    generators = ("cpu", "cuda", "python", "numpy")
    states = {name: file.read(f"random.{name}").clone() for name in generators if f"random.{name}" in file.names}
    set_rng_states(training.device, states)
    set_global_states(states)


def _device_of(training: TaskTraining, group: dict[str, Any], parameter: Tensor, key: str) -> torch.device:
    """The device on which the optimizer expects an entry of its state.

    PyTorch keeps the step counter on the CPU unless a kernel on the card reads it (torch 2.13, optimizer.py,
    `_process_value_according_to_param_policy`).
    """
    on_card = group.get("fused") or group.get("capturable") if key == "step" else not training.candidate.offload
    return parameter.device if on_card else torch.device("cpu")


def _rebuild(name: str, entry: Entry, file: TensorFile, device: torch.device) -> object:
    if isinstance(entry, Scalar):
        return entry.value
    if isinstance(entry, Dense):
        return file.read(name).to(device, copy=True)
    indices, values = (file.read(f"{name}.{part}").to(device, copy=True) for part in ("indices", "values"))
    return torch.sparse_coo_tensor(indices, values, entry.size, is_coalesced=entry.coalesced, check_invariants=False)


def in_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors in the order of a file: widest dtypes first, so that all are aligned without gaps."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def file_pieces(
    tensors: Mapping[str, Tensor], fetch: Callable[[str], Tensor] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, piece by piece. Tensors that share memory are written separately.

    First come eight bytes with the length of the header, then the header: dtype, shape and place of every tensor as
    JSON. A tensor is copied only if it is on a card or not contiguous. `fetch` returns the content of a tensor by its
    name, in the order of the file.
    """
    ordered = in_order(tensors)
    entries, end = {}, 0
    for name in ordered:
        start, end = end, end + tensors[name].numel() * tensors[name].element_size()
        dtype, shape = _DTYPES[tensors[name].dtype], [*tensors[name].shape]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    yield len(text).to_bytes(8, "little") + text
    for name in ordered:
        tensor = tensors[name] if fetch is None else fetch(name)
        yield tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
