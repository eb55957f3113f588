"""Where a batch holds its time steps, and its pieces along time: for losses that add up over time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from oomguard._core.errors import MisuseError
from oomguard._rnn.losses import piecewise_loss
from oomguard._task.batches import Batches
from oomguard._task.layout import Layout, count_rows, find_time, split
from oomguard._task.task import Task


def time_of(batches: Batches) -> Layout:
    """Where the batches of a task hold time; empty if its loss is not computed piece by piece."""
    if not batches.task.piecewise:
        return {}
    return batches.equal_time or find_time(batches.pair(0), batches.pair(1), batches.layout)


def cut_time(batch: Any, time: Layout, segments: int) -> list[Any]:
    """Cut a batch into so many pieces along time, as equal as they can be. Raise if a part cannot be cut."""
    odd = next((path for path, axis in time.items() if axis.kind == "unknown"), None)
    if odd is not None or not time:
        name = "".join(f"[{key!r}]" for key in odd or ())
        raise MisuseError(
            rule="A loss with a state gets pieces of a batch along time",
            got=f"batch{name} has no dimension that could be cut" if time else "no part of the batch grows with time",
            advice="Return tensors with one dimension for time, or cut them yourself with oomguard.piecewise_loss.",
        )
    return split(batch, time, -(-count_rows(batch, time) // segments))


def in_pieces(loss: Callable[..., Any], segments: int, time: Layout) -> Callable[[nn.Module, Any], tuple[Tensor, Any]]:
    """A loss of whole batches, sum and weight, that runs a loss with a state over so many pieces of them."""

    def whole(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        if segments == 1:
            total, count, _ = loss(model, batch, None)
        else:
            total, count, _ = piecewise_loss(loss, model, cut_time(batch, time, segments))
        return total, count

    return whole


def in_segments(task: Task, segments: int, time: Layout) -> tuple[Task, int]:
    """The task as it runs in segments, and the segments of its recurrent calls.

    A loss with a state gets a piece of the batch for each segment, and recurrent calls run whole.
    """
    return (replace(task, loss=in_pieces(task.loss, segments, time)), 1) if task.piecewise else (task, segments)
