"""Exports the model of the run of a task: its weights, and as TorchScript or ONNX if its inputs are tensors."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oomguard._core.errors import MisuseError, shown
from oomguard._task.task import Task, user_code
from oomguard._task.trace import build, evaluate
from oomguard._train.checkpoint import load_weights
from oomguard._train.evaluate import find_checkpoint
from oomguard._train.export import exported, largest_difference, onnx_run, script, write_onnx, written
from oomguard._train.results import Exported
from oomguard._train.task_predict import task_of_run

Inputs = tuple[Tensor, ...]
_RULE = "A model can be exported in this format if its inputs are tensors, and its first output too"


def export_task_run(run: Path, to: str, path: Path, task: Task | str | None) -> Exported:
    """Export the run of a task. Its model is checked with the batches that it was exported with."""
    known, plan = task_of_run(run, task)
    model = build(known).eval()
    load_weights(find_checkpoint(run), model)
    notes = ["Load it with model.load_state_dict(torch.load(file, weights_only=True))."]
    with written(path) as file:
        if to == "state_dict":
            torch.save(model.state_dict(), file)
            read = torch.load(file, weights_only=True)
            pairs = [(read[name].double(), value.double()) for name, value in model.state_dict().items()]
            how = "Its weights are those of the run"
        else:
            batches = [_captured(known, model, rows, plan.seq or 1) for rows in (2, 3)]
            check, notes = _write(model, to, file, batches)
            with torch.no_grad():
                pairs = [(_first(check(*batch)), _first(model(*batch))) for batch in batches]
            how = "Its outputs are those of the model"
        difference = largest_difference(pairs)
    return exported(path, to, difference, how, notes)


def _write(model: nn.Module, to: str, file: Path, batches: list[Inputs]) -> tuple[Any, list[str]]:
    """Write the model, and return a function that runs the file, with notes."""
    if to == "onnx":
        names = [f"input{number}" for number in range(len(batches[0]))]
        write_onnx(model, batches[0], file, names, _axes(model, names, batches))
        return onnx_run(file), ["Axes in which two batches differed are of any size: rows, and steps if they varied."]
    try:
        return script(model, file), []
    except Exception:  # whatever TorchScript raises for Python that it cannot read
        note = "It was traced with one batch: decisions that the model takes in Python are fixed."
        return script(model, file, batches[0]), [note]


def _captured(task: Task, model: nn.Module, rows: int, steps: int) -> Inputs:
    """The tensors that the model gets for a batch of the task."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = model.register_forward_pre_hook(lambda _, args, given: calls.append((args, given)), with_kwargs=True)
    with user_code("The loss of a batch must be computed", task.loss, "Correct that line."), torch.no_grad():
        evaluate(task, model, _batch(task, rows, steps), training=False)
    hook.remove()
    args, given = calls[0] if calls else ((), {})
    if not args or given or not all(isinstance(value, Tensor) for value in args):
        got = f"it is called with {shown([*map(_kind, args), *given])}" if calls else "the loss does not call the model"
        raise MisuseError(rule=_RULE, got=got, advice="Take --to state_dict, which is the weights alone.")
    return args


def _batch(task: Task, rows: int, steps: int) -> Any:
    """A batch of so many rows: the first samples of the data, or one that the task makes."""
    if task.data is None:
        assert callable(task.batch), "a task has data or batches"
        return task.batch(rows, steps + rows)  # other steps for other rows
    loader = task.data
    return loader.collate_fn([loader.dataset[(rows * index) % len(loader.dataset)] for index in range(rows)])  # type: ignore[arg-type]


def _axes(model: nn.Module, names: list[str], batches: list[Inputs]) -> dict[str, dict[int, str]]:
    """The dimensions in which two batches and their outputs differ, by name."""
    with torch.no_grad():
        sides = [(*batch, _first(model(*batch))) for batch in batches]
    return {
        name: {d: f"{name}_{d}" for d, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b}
        for name, one, other in zip([*names, "outputs"], *sides, strict=True)
    }


def _first(made: Any) -> Any:
    """The first output of a model, which must be a tensor; None if there is none to check."""
    made = made[0] if isinstance(made, tuple | list) else made
    if made is not None and not isinstance(made, Tensor):
        raise MisuseError(rule=_RULE, got=f"it returns {_kind(made)}", advice="Take --to state_dict.")
    return made


def _kind(value: object) -> str:
    return type(value).__name__
