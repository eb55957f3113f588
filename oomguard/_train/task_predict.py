"""Predictions of the run of a task: its model with the weights of the run, on the samples of its data, in order."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oomguard._core.errors import GuardError, MisuseError, shown
from oomguard._core.system import file_errors
from oomguard._data.source import Array, Ints
from oomguard._device.find import open_device
from oomguard._plan.task_value import TaskPlan
from oomguard._rnn.run import IGNORED
from oomguard._step import as_candidate
from oomguard._task.layout import mapped
from oomguard._task.task import Task, goes_by, line_of, resolve, user_code
from oomguard._task.trace import build
from oomguard._train.checkpoint import load_weights
from oomguard._train.evaluate import find_checkpoint, in_microbatches
from oomguard._train.settings import check_task_predicted
from oomguard._train.task_data import made_by


def run_task_prediction(
    run: str | os.PathLike[str], task: Task | str | None, *, output: str | None = None, device: str | None = None
) -> list[Any] | Path:
    """What `predict` of a task returns for every microbatch, on the CPU, or the file that they are written to."""
    known, plan = task_of_run(Path(run), task, output)
    for part, form in (("predict", "a function predict(model, batch)"), ("data", "a DataLoader")):
        if getattr(known, part) is None:
            advice = f"Write Task({part}=..., ...) with {form}, or use oomguard.load_weights in code of your own."
            raise MisuseError(rule=f"Predictions of a task need its {part}", got="this task has none", advice=advice)
    where, loader = open_device(plan.where.device if device is None else device), known.data
    assert loader is not None
    model = build(known, where.name).eval()
    load_weights(find_checkpoint(Path(run)), model)
    where.settle(plan.candidate)

    def predict(indices: Ints) -> Any:
        batch = made_by(loader.dataset, lambda: loader.collate_fn([loader.dataset[int(index)] for index in indices]))
        if isinstance(batch, MisuseError | GuardError):
            raise batch
        return _predict(known, model, mapped(lambda one: one.to(where.name), batch), plan, where.name)

    samples = np.arange(len(loader.dataset))  # type: ignore[arg-type]
    parts = [*in_microbatches(samples, plan.candidate.microbatch, predict)]
    if output is None:
        return [values for _, values in parts]
    return _write(known, parts, output)


def task_of_run(run: Path, task: Task | str | None, output: str | None = None) -> tuple[Task, TaskPlan]:
    """The task of a run, by itself or by its name, and the plan of the run. `output`: the file of predictions."""
    plan = check_task_predicted(run, task, output)
    known = resolve(task) if isinstance(task, str) else task
    assert known is not None
    if task != plan.task and not goes_by(known, plan.task):
        got, advice = f"it is of {plan.task}", "Give the task that was trained, or the run of this task."
        raise MisuseError(rule="A run predicts with its own task", got=got, advice=advice)
    return known, plan


def _predict(task: Task, model: torch.nn.Module, batch: Any, plan: TaskPlan, device: str) -> Any:
    assert task.predict is not None
    advice = "Correct that line; model and batch are on the same device when it is called."
    with (
        torch.no_grad(),
        as_candidate(plan.candidate, device),
        user_code("predict(model, batch) must return the predictions of a batch", task.predict, advice),
    ):
        found = task.predict(model, batch)
    return mapped(lambda one: one.detach().cpu(), found)


def _write(task: Task, parts: list[tuple[Ints, Any]], output: str) -> Path:
    with file_errors("Predictions need a writable file", output, "Give another --output.", use="written"):
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        if output.lower().endswith(".pt"):
            torch.save([values for _, values in parts], output)
        else:
            _write_array(task, parts, output)
    return Path(output)


def _write_array(task: Task, parts: list[tuple[Ints, Any]], output: str) -> None:
    """The predictions as one array. Shorter ones are padded with NaN, whole numbers with -100."""
    arrays = [_rows(task, values, len(indices)) for indices, values in parts]
    shape = tuple(max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays), strict=True))
    rows, dtype = sum(map(len, arrays)), np.result_type(*arrays)
    whole = np.lib.format.open_memmap(output, "w+", dtype, (rows, *shape))
    start, missing = 0, np.nan if np.issubdtype(dtype, np.floating) else IGNORED if dtype != np.bool_ else False
    for array in arrays:
        block = whole[start : start + len(array)]
        block[...] = missing
        block[tuple(map(slice, array.shape))] = array
        start += len(array)
    whole.flush()


def _rows(task: Task, values: Any, rows: int) -> Array:
    """The predictions of a microbatch as an array with a row for each sample."""
    if isinstance(values, Tensor):
        values = (values.float() if values.dtype is torch.bfloat16 else values).numpy()
    if isinstance(values, np.ndarray) and values.ndim and len(values) == rows:
        return values
    what = f"an array of shape {values.shape}" if isinstance(values, np.ndarray) else shown(values)
    raise MisuseError(
        rule="A .npy file takes one tensor with a row for each sample",
        got=f"{line_of(task.predict)} returned {what} for {rows:,} samples",
        advice="Write --output predictions.pt, or return such a tensor.",
    )
