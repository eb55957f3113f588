"""Ask a child process about a task. This module does not import torch, unless the task has data of this process."""

from dataclasses import replace
from typing import Any

from oomguard._core.errors import MisuseError
from oomguard._core.system import run_elsewhere
from oomguard._device.cpu import Cpu
from oomguard._task.task import Task, packed


def send(task: Task | str, rows: int | None = None, steps: int | None = None) -> str | bytes:
    """The name of a task, or the task as bytes, with only those samples of its data that a child needs."""
    if isinstance(task, str):
        return task
    if task.data is not None:
        from oomguard._task.batches import Batches

        samples = Batches(task).samples
        assert samples is not None
        data: Any = samples.reduced(rows or samples.batch_size or 1, steps)
        task = replace(task, data=data)
    return packed(replace(task, scheduler=None, validation=None))  # only training needs them


def ask(
    module: str, function: str, question: dict[str, Any], seconds: float, variables: dict[str, str] | None = None
) -> Any:
    """Call a function of a module of this package in a child, within the memory that is free."""
    question = question | {"limit_bytes": Cpu().budget().left_bytes}
    try:
        return run_elsewhere(f"oomguard._task.{module}", function, question, seconds=seconds, variables=variables)
    except ChildProcessError as error:
        advice = "Run the loss on one small batch to see why; it may have run out of memory."
        got = f"its process ended early ({error})"
        raise MisuseError(rule="A task must survive a tiny step", got=got, advice=advice) from None
