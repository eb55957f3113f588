"""What a step changes, taken apart into tensors by name and the rest, which is JSON; and put together again."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from oomguard.step import Training

Read = Callable[[str], Tensor]
"""Gives a tensor by its name. It may lie in a file that will be closed, so whoever keeps it copies it."""

_HOW = ("params", "foreach", "fused", "capturable", "differentiable")
"""Of an optimizer's group: what it works on and how. That follows from the candidate, which may be another one now."""


class Dense(msgspec.Struct, frozen=True, tag="dense"):
    """A tensor, which is among the tensors."""


class Sparse(msgspec.Struct, frozen=True, kw_only=True, tag="sparse"):
    """A sparse tensor: its indices and values are among the tensors."""

    size: list[int]
    """Its shape."""
    coalesced: bool
    """Whether every index is there once: what is added next depends on it."""


class Plain(msgspec.Struct, frozen=True, kw_only=True, tag="plain"):
    """Not a tensor."""

    value: Any
    """As JSON has it."""


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of a training is neither a tensor nor its spec."""

    optimizer: str
    """The optimizer's class, by its name."""
    groups: list[dict[str, Any]]
    """Learning rate and the other numbers of each of its groups."""
    kept: dict[str, dict[str, Dense | Sparse | Plain]]
    """What it keeps for each parameter, by the parameter's name."""
    scaler: dict[str, Any] | None = None
    """Of the loss, for fp16."""


def take(training: Training) -> tuple[State, dict[str, Tensor]]:
    """The state of a training as it is now. The tensors are its own, not copies."""
    tensors = weights(training.model) | _random(training.model.device)
    kept: dict[str, dict[str, Dense | Sparse | Plain]] = {}
    for name, parameter in training.model.named_parameters():
        for key, value in training.optimizer.state.get(parameter, {}).items():
            kept.setdefault(name, {})[key] = _taken(f"optimizer.{name}.{key}", value, tensors)
    groups = [
        {name: value for name, value in group.items() if name not in _HOW} for group in training.optimizer.param_groups
    ]
    scaler = None if training.scaler is None else training.scaler.state_dict()
    return State(optimizer=type(training.optimizer).__name__, groups=groups, kept=kept, scaler=scaler), tensors


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their names in a checkpoint; one that has several names (tied weights) by its first."""
    return {f"model.{name}": value for name, value in [*model.named_parameters(), *model.named_buffers()]}


def _random(device: torch.device) -> dict[str, Tensor]:
    """The generators that a step draws from: dropout draws where the model is, the rest on the CPU."""
    found = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["random.cuda"] = torch.cuda.get_rng_state(device)
    return found


def _taken(name: str, value: Any, tensors: dict[str, Tensor]) -> Dense | Sparse | Plain:
    if not isinstance(value, Tensor):
        return Plain(value=value)
    if value.layout is not torch.sparse_coo:
        tensors[name] = value
        return Dense()
    tensors[f"{name}.indices"], tensors[f"{name}.values"] = value._indices(), value._values()
    return Sparse(size=[*value.shape], coalesced=value.is_coalesced())


def put_weights(model: torch.nn.Module, read: Read) -> None:
    """Weights are copied in place: they may be tied, or pieces of one block that cuDNN reads."""
    with torch.no_grad():
        for name, value in weights(model).items():
            value.copy_(read(name))


def put(training: Training, state: State, read: Read) -> None:
    """Give a training the state that `take` took, bit for bit."""
    put_weights(training.model, read)
    optimizer, names = training.optimizer, {p: name for name, p in training.model.named_parameters()}
    optimizer.state.clear()
    for group, numbers in zip(optimizer.param_groups, state.groups, strict=True):
        for key, value in numbers.items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        for parameter in group["params"]:
            if (name := names[parameter]) in state.kept:
                optimizer.state[parameter] = {
                    key: _given(f"optimizer.{name}.{key}", value, read, _place(training, group, parameter, key))
                    for key, value in state.kept[name].items()
                }
    if training.scaler is not None and state.scaler is not None:
        training.scaler.load_state_dict(state.scaler)
    _put_random(training.model.device, read)  # last: nothing after it may draw


def _place(training: Training, group: dict[str, Any], parameter: Tensor, key: str) -> torch.device:
    """Where the optimizer wants to find what it keeps.

    PyTorch leaves the counter of steps on the CPU, unless a kernel on the card reads it (torch 2.13, optimizer.py,
    `_process_value_according_to_param_policy`).
    """
    if key == "step":
        on_card = group.get("fused") or group.get("capturable")
        return parameter.device if on_card else torch.device("cpu")
    return torch.device("cpu") if training.candidate.offload else parameter.device


def _given(name: str, value: Dense | Sparse | Plain, read: Read, device: torch.device) -> Any:
    if isinstance(value, Plain):
        return value.value
    if isinstance(value, Dense):
        return read(name).to(device, copy=True)
    indices, values = (read(f"{name}.{part}").to(device, copy=True) for part in ("indices", "values"))
    return torch.sparse_coo_tensor(indices, values, value.size, is_coalesced=value.coalesced, check_invariants=False)


def _put_random(device: torch.device, read: Read) -> None:
    """A card's numbers go on if the checkpoint was made on a card, be it another one."""
    torch.set_rng_state(read("random.cpu").clone())
    if device.type == "cuda":
        try:
            found = read("random.cuda")
        except KeyError:  # made on the CPU
            return
        torch.cuda.set_rng_state(found.clone(), device)
