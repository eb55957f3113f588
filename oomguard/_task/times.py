"""Where a batch holds its time steps, and its pieces along time: for losses that add up over time."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from oomguard._core.errors import MisuseError
from oomguard._task.batches import Axis, Kind, Layout, Path, count_rows, leaves, split

_TURNED: dict[Kind, Kind] = {"blocks": "interleaved", "interleaved": "blocks"}
"""How a dimension holds time that also holds the rows in that way."""


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
