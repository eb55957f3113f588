"""Where a batch holds its time steps, and its pieces along time: for losses that add up over time."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from oomguard._core.errors import MisuseError
from oomguard._rnn.losses import piecewise_loss
from oomguard._task.batches import Axis, Batches, Kind, Layout, Path, count_rows, leaves, split
from oomguard._task.task import Task

_TURNED: dict[Kind, Kind] = {"blocks": "interleaved", "interleaved": "blocks"}
"""How a dimension holds time that also holds the rows in that way."""


def time_of(batches: Batches) -> Layout:
    """Where the batches of a task hold time; empty if its loss is not computed piece by piece."""
    if not batches.task.piecewise:
        return {}
    if batches.samples is not None and not batches.samples.longest:
        return find_equal_time(batches.pair(0), batches.layout)
    return find_time(batches.pair(0), batches.pair(1), batches.layout)


def find_time(short: Any, long: Any, rows: Layout) -> Layout:
    """Find the dimensions that hold time, from batches of short and of long samples and where they hold their rows.

    Several entries for each step are cut together. Parts that do not grow are kept whole.
    """
    grown = dict(_grown(short, long, rows))
    steps = min((axis[1:] for axis in grown.values() if axis is not None), default=(1, 1))
    return {path: _axis(found, steps, rows.get(path)) for path, found in grown.items()}


def _grown(short: Any, long: Any, rows: Layout) -> Iterator[tuple[Path, tuple[int, int, int] | None]]:
    """The dimension of each part that grows, and its two sizes; None if a part grows in another way."""
    parts = dict(leaves(long))
    for path, part in leaves(short):
        listed = any(axis.kind == "list" and path[: len(place)] == place for place, axis in rows.items())
        other = parts.get(path)
        if isinstance(part, PackedSequence):
            yield path, None
        elif isinstance(part, Tensor | np.ndarray) and isinstance(other, Tensor | np.ndarray):
            sizes = [(i, a, b) for i, (a, b) in enumerate(zip(part.shape, other.shape, strict=False)) if a != b]
            if sizes or part.ndim != other.ndim:
                one = len(sizes) == 1 and part.ndim == other.ndim and not listed
                yield path, sizes[0] if one else None


def find_equal_time(batch: Any, rows: Layout) -> Layout:
    """Find the dimensions that hold time in a batch of two equally long samples.

    Time is taken for the first dimension beside the rows of the largest part.
    """
    parts = {path: part for path, part in leaves(batch) if isinstance(part, Tensor | np.ndarray) and part.ndim}
    others = {path: [i for i in range(part.ndim) if not _holds_rows(rows, path, i)] for path, part in parts.items()}
    largest = max(
        (path for path in parts if others[path]), key=lambda path: int(np.prod(parts[path].shape)), default=()
    )
    steps = parts[largest].shape[others[largest][0]] if largest in parts else 1
    found = dict[Path, Axis]()
    for path, part in parts.items():
        flat = path in rows and rows[path].kind in _TURNED
        place = next((i for i in others[path] if part.shape[i] == (2 * steps if flat else steps)), None)
        if place is not None and steps > 1:
            found[path] = Axis(_TURNED[rows[path].kind] if flat else "dimension", place)
    return found


def _holds_rows(rows: Layout, path: Path, dimension: int) -> bool:
    return path in rows and (rows[path].kind, rows[path].dimension) == ("dimension", dimension)


def _axis(found: tuple[int, int, int] | None, steps: tuple[int, int], rows: Axis | None) -> Axis:
    """How a part holds time, by the sizes of its dimension and by the time steps of the two batches."""
    if found is None or found[1] % steps[0] or found[1] // steps[0] * steps[1] != found[2]:
        return Axis("unknown")
    dimension = found[0]
    if found[1] == steps[0]:
        return Axis("dimension", dimension)
    if rows is None or rows.dimension != dimension:
        return Axis("blocks", dimension)
    return Axis(_TURNED.get(rows.kind, "unknown"), dimension)


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
