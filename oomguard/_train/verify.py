"""The state of an optimizer in a checkpoint, checked before a training takes it over: a file may come from anybody."""

from collections.abc import Iterator
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.optim import Optimizer

from oomguard._adam8bit import TorchaoAdam8bit
from oomguard._core.errors import shown
from oomguard._step import TaskTraining
from oomguard._train.tensors import Dense, Entry, OptimizerState, Scalar, TensorFile


def faults(training: TaskTraining, saved: OptimizerState, file: TensorFile) -> Iterator[str]:
    """What in the state of an optimizer is not as this training's own optimizer would have it."""
    optimizer = training.optimizer
    names = {parameter: name for name, parameter in training.model.named_parameters()}
    if unknown := saved.kept.keys() - names.values():
        yield f"state.kept has {shown(min(unknown))}, which the model has not"
    for i, (group, values) in enumerate(zip(optimizer.param_groups, saved.groups, strict=True)):
        for key in values.keys() & group.keys():
            if not _alike(group[key], values[key]):
                yield f"state.groups[{i}].{key} is {shown(values[key])}, and was to be like {shown(group[key])}"
        some = next(iter(group["params"]))
        if _try_out(optimizer, group, some) is not None and _try_out(optimizer, group | values, some) is None:
            yield f"state.groups[{i}] has values that {type(optimizer).__name__} refuses"
        for parameter in group["params"]:
            if names[parameter] in saved.kept:
                yield from _parameter_faults(optimizer, group, parameter, names[parameter], saved, file)


def _alike(own: object, other: object) -> bool:
    """Whether a value has the kind of another: a number, several numbers, true or false, or nothing."""
    if isinstance(own, bool) or own is None:
        return own is None or isinstance(other, bool)
    if isinstance(own, int | float):
        return isinstance(other, int | float) and not isinstance(other, bool)
    if isinstance(own, tuple | list):
        return isinstance(other, tuple | list) and len(own) == len(other) and all(map(_alike, own, other))
    return True


def _parameter_faults(
    optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, name: str, saved: OptimizerState, file: TensorFile
) -> Iterator[str]:
    kept = saved.kept[name]
    if isinstance(optimizer, TorchaoAdam8bit):  # what it keeps depends on the size of a weight
        usual: dict[str, Any] | None = {**optimizer.new_state(parameter.to("meta"))}
    else:
        usual = _try_out(optimizer, group, parameter)
    for key in kept.keys() if usual is None else kept.keys() | usual.keys():
        where = f"state.kept.{name}.{key}"
        if key not in kept:
            yield f"{where} is missing"
        elif usual is not None and key not in usual and _makes_all_at_once(optimizer):
            yield f"{where} is not part of the state of {type(optimizer).__name__}"
        elif (why := _entry_fault(kept[key], f"optimizer.{name}.{key}", parameter, (usual or {}).get(key), file)) != "":
            yield f"{where} {why}"


def _makes_all_at_once(optimizer: Optimizer) -> bool:
    """Whether the first step makes the whole state. An optimizer of the user may switch its rule in a later one."""
    return type(optimizer).__module__.startswith("torch.optim.") or isinstance(optimizer, TorchaoAdam8bit)


def _try_out(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> dict[str, Any] | None:
    """The state that such an optimizer makes for a parameter of two elements in each dimension; None if it fails."""
    tiny = torch.zeros((2,) * parameter.dim(), dtype=parameter.dtype, requires_grad=True)
    tiny.grad = torch.ones_like(tiny)
    settings = {key: group[key] for key in optimizer.defaults if key in group}
    settings |= {key: tuple(value) for key, value in settings.items() if isinstance(value, list)}
    try:
        like = type(optimizer)([tiny], **settings)
        like.step()
    except Exception:  # an optimizer that is made in another way, or that does not run here
        return None
    return dict(like.state[tiny])


def _entry_fault(entry: Entry, name: str, parameter: Tensor, usual: object, file: TensorFile) -> str:
    """Why an entry is not the state that it should be; empty if it is. `usual`: None if nothing is known of it."""
    if isinstance(entry, Scalar):
        return "is no tensor" if isinstance(usual, Tensor) else ""
    if not isinstance(entry, Dense):  # a sparse one: PyTorch checks it when it is built
        return ""
    if usual is not None and not isinstance(usual, Tensor):
        return "is a tensor"
    try:
        found = file.read(name)
    except SafetensorError:
        return "has no tensor"
    if usual is None:
        return ""
    expected = [size if small == 2 else small for size, small in zip(parameter.shape, usual.shape, strict=False)]
    if [*found.shape] != expected or found.dtype != usual.dtype:
        return f"is {_kind(found.dtype, found.shape)}, and was to be {_kind(usual.dtype, expected)}"
    return ""


def _kind(dtype: torch.dtype, shape: Any) -> str:
    return f"{dtype} of shape {tuple(shape)}"
