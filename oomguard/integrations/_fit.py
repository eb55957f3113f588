"""What callbacks of training frameworks share: a plan for this process, and batches in pieces under a guard."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oomguard._api.plan import find_feasible_config
from oomguard._batch import Rows, map_leaves
from oomguard._core.errors import MisuseError, check_choice, check_whole
from oomguard._core.units import format_bytes, read_budget
from oomguard._device.find import Device, open_device
from oomguard._estimate.malloc import ENVIRONMENT
from oomguard._guard import DONE, Guard, check_room, layout_of
from oomguard._plan.task_value import TaskPlan
from oomguard._probe.verdict import Verdict, judge
from oomguard._spec.spec import MAX_SEQ
from oomguard._task.layout import count_rows, split
from oomguard._task.task import Task

LOOKED_AT = 8
"""Batches of a loader without indices that are looked at: the largest of them is planned for."""
ALLOWED = ("precision", "microbatch", "segments")
"""Words of `allow`: precision, and the knobs that a check of gradients may find to be lossy."""
Batch = Any  # whatever a loader returns: tensors, nested as the user likes
Result = TypeVar("Result")
Restore = Callable[[], None]


def check_options(budget: int | str | None, segments: int | None, allow: str | tuple[str, ...]) -> tuple[str, ...]:
    """Check the arguments that callbacks have in common, and return the words of `allow`."""
    read_budget(budget)
    check_whole("segments", segments, 1, MAX_SEQ)
    words = allow.split(",") if isinstance(allow, str) else allow
    for word in words:
        check_choice("allow", word or "none", ("none", *ALLOWED))
    return tuple(word for word in words if word in ALLOWED)


class Parameters(Iterator[nn.Parameter]):
    """The parameters of a model, which know it: a task gives its optimizer the parameters of a copy of the model."""

    def __init__(self, owner: nn.Module, parameters: Iterator[nn.Parameter]) -> None:
        self.owner, self._parameters = owner, parameters

    def __next__(self) -> nn.Parameter:
        return next(self._parameters)


def optimizer_of(parameters: Any) -> Optimizer:
    """The optimizer of the model that the parameters are of, which it has as an attribute."""
    optimizer: Optimizer = parameters.owner.optimizer
    return optimizer


class BatchOfRows:
    """A function that makes batches of any number of rows out of one batch that a loader returned."""

    def __init__(self, batch: Batch, dim: object) -> None:
        self.batch, self.dim = batch, dim

    def __call__(self, rows: int, steps: int) -> Batch:
        """So many rows of the batch, in turn. It is as long as it is."""
        found = Rows(self.batch, self.dim)
        return found.take([row % found.count for row in range(rows)])


def largest_batch(batches: Iterator[Batch], size: Callable[[Batch], int]) -> Batch:
    """The largest of the first batches; None if there are none."""
    largest, most = None, -1
    for _, batch in zip(range(LOOKED_AT), batches, strict=False):
        if size(batch) > most:
            largest, most = batch, size(batch)
    return largest


def heap_here() -> str:
    """The allocator setting that this process was started with."""
    for name in ("tight", "fast native"):
        if all(os.environ.get(key) == value for key, value in ENVIRONMENT[name].items()):
            return name.split()[0]
    return "system"


def plan_here(
    task: Task,
    device: str,
    budget: int | str | None,
    *,
    module: nn.Module,
    share: int = 1,
    held_bytes: int = 0,
    **question: Any,
) -> TaskPlan:
    """Plan a task for this process, with its threads and its heap, in child processes.

    What this process holds beside the libraries and the module, such as a data set, counts against the budget.
    `share` processes share the memory of this machine, and each step begins with so many `held_bytes`.
    """
    budget_bytes, here = read_budget(budget), open_device(device)
    if budget_bytes is None and share > 1:
        budget_bytes = here.budget().limit_bytes // share
    check_room(here, budget_bytes or here.budget().limit_bytes)
    question |= {"device": device, "threads": torch.get_num_threads()}
    if device == "cpu":
        question["allocator"] = heap_here()
    less = None if budget_bytes is None else budget_bytes - held_bytes
    plan = find_feasible_config(task, budget=less, **question)
    if less is not None and budget_bytes is not None:
        held_here_bytes = _held_here(here, plan, module)
        check_held(held_here_bytes, less)
        # a child has measured the peak: for this process it is a prediction, which needs its margin
        extra_bytes = held_here_bytes + plan.expected.margin_bytes
        if plan.peak_bytes + extra_bytes > less:
            plan = find_feasible_config(task, budget=max(1, less - extra_bytes), **question)
        plan = msgspec.structs.replace(plan, budget_bytes=budget_bytes, asked_budget_bytes=budget_bytes)
    return plan


def check_held(extra_bytes: int, budget_bytes: int) -> None:
    """Raise if what this process holds beside libraries and module leaves nothing of the budget for training."""
    if extra_bytes >= budget_bytes:
        raise MisuseError(
            rule=f"Training must stay within {format_bytes(budget_bytes)}",
            got=f"this process already holds {format_bytes(extra_bytes)} beside PyTorch and the model",
            advice="Raise the budget, or free what it holds, such as data that could stay on disk.",
        )


def _held_here(device: Device, plan: TaskPlan, module: nn.Module) -> int:
    """Bytes of this process that a child does not have. On a card, the plan has seen them as taken."""
    if device.name != "cpu":
        return 0
    _load_kernels()
    weights_bytes = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    runtime_bytes = plan.estimate.terms.get("runtime", 0)
    return max(0, device.reading().now_bytes - weights_bytes - runtime_bytes)


def _load_kernels() -> None:
    """Run a tiny step, which loads the libraries that the first step of any model loads: a child has them loaded."""
    model = nn.LSTM(8, 8)
    model(torch.zeros(2, 2, 8))[0].sum().backward()
    torch.optim.Adam(model.parameters()).step()


def in_pieces(
    guard: Guard, batch: Batch, run: Callable[[Batch, float], Result], *, undo: Restore, dim: object
) -> list[Result]:
    """The results of all pieces of a batch, in the first attempt that does not run out of memory.

    `run` gets a piece and its share of the rows. `undo` sets back what a failed attempt changed.
    """
    results: list[Result] = []
    for attempt in guard.attempts():
        with attempt:
            results = [run(piece, share) for piece, share in guard.pieces(batch, dim)]
        if attempt.agreed is None or attempt.agreed[0] != DONE:
            undo()
    return results


def in_halves(
    guard: Guard,
    batch: Batch,
    rows: int | None,
    run: Callable[[Batch, float], Result],
    *,
    undo: Restore,
    dim: object,
) -> tuple[list[Result], int | None]:
    """The results of a batch of an evaluation in pieces of so many rows (None: whole), halved when memory runs out.

    Returns the rows that the pieces had, for the next batch. No other process is asked.
    """
    while True:
        try:
            pieces = [(batch, 1.0)] if rows is None else _evaluated(guard, batch, rows, dim)
            return [run(piece, share) for piece, share in pieces], rows
        except Exception as error:
            if judge(error) is not Verdict.OOM:
                raise
            count = round(1 / min(share for _, share in _evaluated(guard, batch, 1, dim)))
            if min(rows or count, count) == 1:
                raise
            message = str(error).strip().partition("\n")[0][:300]
        undo()  # only now, after the except block, no traceback holds the tensors of the failed attempt any more
        guard.device.release()
        rows = -(-min(rows or count, count) // 2)
        guard.tell("evaluation", message, rows=rows)


def _evaluated(guard: Guard, batch: Batch, rows: int, dim: object) -> list[tuple[Batch, float]]:
    """The pieces of a batch of an evaluation, with their shares; the whole batch if nothing tells how it is split."""
    try:
        if isinstance(guard.plan, TaskPlan) and guard.plan.layout and dim == 0:
            layout = layout_of(guard.plan.layout)
            pieces, total = split(batch, layout, rows), count_rows(batch, layout)
            return [(piece, count_rows(piece, layout) / total) for piece in pieces]
        found = Rows(batch, dim)
    except (MisuseError, LookupError, AttributeError):  # it has another form than the batches of the training
        return [(batch, 1.0)]
    starts = range(0, found.count, rows)
    return [(found.take(slice(i, i + rows)), min(rows, found.count - i) / found.count) for i in starts]


_OF_MODULES = frozenset(vars(nn.Module()))


def remember_state(module: nn.Module) -> Restore:
    """Return a function that sets buffers and plain attributes of a module, and of those below it, back.

    Tensors, numbers, text, tuples and dicts are set back to what they are now, and lists to their present length.
    """
    marks = [(part, _attributes(part)) for part in module.modules()]
    held = [(part._buffers, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()]
    buffers = [(own, name, buffer, buffer.clone()) for own, name, buffer in held if buffer is not None]
    attributes = {id(part): {name: _kept(value) for name, value in found.items()} for part, found in marks}

    def restore() -> None:
        with torch.no_grad():
            for own, name, buffer, value in buffers:
                own[name] = buffer.copy_(value)
        for part, before in marks:
            for name in _attributes(part).keys() - before.keys():
                del vars(part)[name]
            for name, value in before.items():
                vars(part)[name] = _set_back(value, attributes[id(part)][name])

    return restore


def _attributes(part: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module: states that a step may change."""
    kinds = (Tensor, int, float, str, tuple, list, dict, type(None))
    return {name: value for name, value in vars(part).items() if name not in _OF_MODULES and isinstance(value, kinds)}


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.grad_fn is not None else value.detach().clone()
    if isinstance(value, list):
        return len(value)
    return dict(value) if type(value) is dict else value


def _set_back(value: Any, kept: Any) -> Any:
    """An attribute as it was. A list or a dict remains the same object, since others may have it too."""
    if isinstance(value, list):
        del value[kept:]
        return value
    if type(value) is dict:
        value.clear()
        value.update(kept)
        return value
    return kept


def detached(value: Any) -> Any:
    """The same nested tensors without their graphs."""
    return map_leaves(lambda path, leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def joined(parts: list[Any], shares: list[float]) -> Any:
    """What all pieces of a batch returned, as the batch would have returned it.

    Numbers are averaged by the shares of the rows, other tensors and lists put together. What is neither is that of the
    last piece.
    """
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return first
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in parts], shares) for key in first}
    if isinstance(first, tuple):
        return tuple(joined([*column], shares) for column in zip(*parts, strict=True))
    if isinstance(first, list):
        return [item for part in parts for item in part]
    if isinstance(first, Tensor | np.ndarray) and first.ndim:
        cat: Any = torch.cat if isinstance(first, Tensor) else np.concatenate
        return cat(parts) if len({part.shape[1:] for part in parts}) == 1 else last
    return mean(parts, shares) if _is_number(first) else last


def mean(values: list[Any], shares: list[float]) -> Any:
    """The mean of numbers, weighted by the shares of the rows."""
    total = sum(value * share for value, share in zip(values, shares, strict=True))
    return total / (sum(shares) or 1.0)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor | np.number | float) and not isinstance(value, bool)
