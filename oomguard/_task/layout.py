"""Layouts: where a batch holds its rows and its time steps, and how it is split along them."""

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from oomguard._core.errors import MisuseError

Path = tuple[Hashable, ...]  # the keys that lead to a part of a batch
Kind = Literal["dimension", "blocks", "interleaved", "list", "count", "packed", "unknown"]
_LEAVES = (Tensor, np.ndarray, PackedSequence, str, bytes, int, float, type(None))


@dataclass(frozen=True, slots=True)
class Axis:
    """How one part of a batch holds the rows."""

    kind: Kind
    dimension: int = 0
    lengths: Path | None = None  # of blocks: the part of the batch that has the length of each block


Layout = dict[Path, Axis]
"""The parts of a batch that depend on the number of rows."""
_TURNED: dict[Kind, Kind] = {"blocks": "interleaved", "interleaved": "blocks"}
"""How a dimension holds time that also holds the rows in that way."""


def children(value: Any) -> dict[Hashable, Any]:
    """The parts of a list, tuple, mapping, dataclass or other object by key; empty for an array or a plain value."""
    if isinstance(value, _LEAVES) or callable(value) or hasattr(value, "__array__"):
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(getattr(value, "__dict__", {}))


def rebuilt(value: Any, parts: dict[Hashable, Any]) -> Any:
    """A copy of a value with other parts."""
    if not parts:
        return value
    if isinstance(value, list | tuple):
        return type(value)(*parts.values()) if hasattr(value, "_fields") else type(value)(parts.values())
    new = copy.copy(value)
    for key, part in parts.items():
        if isinstance(value, Mapping):
            new[key] = part
        else:
            object.__setattr__(new, str(key), part)
    return new


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A copy of a batch with the function applied to every tensor."""
    if isinstance(value, PackedSequence):
        return value._replace(data=function(value.data))
    if isinstance(value, Tensor):
        return function(value)
    return rebuilt(value, {key: mapped(function, part) for key, part in children(value).items()})


def tensors_of(batch: Any) -> list[Tensor]:
    """All tensors of a batch."""
    found: list[Tensor] = []
    mapped(found.append, batch)
    return found


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every part of a batch that has no parts of its own, with its path."""
    parts = children(value)
    if not parts:
        yield path, value
    for key, part in parts.items():
        yield from leaves(part, (*path, key))


def find_layout(one: Any, two: Any, three: Any, mixed: Any = None, longer: Any = None) -> Layout:
    """Find where a batch holds its rows, by comparing batches of one, two and three equal samples.

    Flat parts hold rows x steps in one dimension. `longer`, of two longer samples, and `mixed`, of one of each length,
    show whether they are padded. A function that makes random batches has no equal samples: `one` is None then, and the
    order of rows in a flat part is a guess.
    """
    found = dict(_axes((), one, two, three))
    singles, parts = dict(leaves(one)), dict(leaves(two))
    unequal, long = dict(leaves(mixed)), dict(leaves(longer))
    for path, axis in found.items():
        if axis.kind == "blocks":
            size = parts[path].shape[axis.dimension] // 2
            names = [other for other in parts if _numbers(parts[other]) == [size, size] and other in found]
            padded = path in unequal and unequal[path].shape == long[path].shape
            if names:
                found[path] = Axis("blocks", axis.dimension, names[0])
            elif one is None:
                found[path] = Axis(_likely_order(found, parts), axis.dimension)
            else:
                found[path] = _order(singles.get(path), parts[path], axis) if padded else Axis("unknown")
    return found


def _likely_order(found: Layout, parts: dict[Path, Any]) -> Kind:
    """How a flat part most likely holds the rows: as those that are not flat. The check of gradients tells if not."""
    others = [axis for path, axis in found.items() if axis.kind == "dimension" and parts[path].ndim > 1]
    return "interleaved" if others and all(axis.dimension for axis in others) else "blocks"


def _numbers(value: Any) -> list[int]:
    """The values of a vector of whole numbers; empty for anything else."""
    is_vector = isinstance(value, Tensor) and value.dim() == 1 and not value.is_floating_point()
    return value.tolist() if is_vector else []


def _order(single: Any, pair: Any, axis: Axis) -> Axis:
    """Tell blocks of rows from interleaved rows by the values of a batch of two equal samples."""
    if single is None or single.ndim != pair.ndim:
        return Axis("unknown")
    size = pair.shape[axis.dimension] // 2
    first = (slice(None),) * axis.dimension
    halves = {"blocks": pair[(*first, slice(0, size))], "interleaved": pair[(*first, slice(0, None, 2))]}
    same = [kind for kind, half in halves.items() if np.array_equal(np.asarray(half), np.asarray(single))]
    return Axis(same[0], axis.dimension) if len(same) == 1 else Axis("unknown")  # type: ignore[arg-type]


def _axes(path: Path, one: Any, two: Any, three: Any) -> Iterator[tuple[Path, Axis]]:
    if type(two) is not type(three):
        yield path, Axis("unknown")
    elif isinstance(two, PackedSequence):
        yield path, Axis("packed")
    elif isinstance(two, Tensor | np.ndarray):
        dimensions = [i for i, (a, b) in enumerate(zip(two.shape, three.shape, strict=False)) if a != b]
        if dimensions or two.ndim != three.ndim:
            yield path, _axis_of(dimensions, two, three)
        elif one is not None and not np.array_equal(two, three):  # such as the number of all tokens
            yield path, Axis("unknown")
    elif isinstance(two, list | tuple) and len(two) != len(three):
        yield path, Axis("list" if (len(two), len(three)) == (2, 3) else "unknown")
    elif hasattr(two, "__array__") and len(two) != len(three):  # such as a Series of pandas
        yield path, Axis("unknown")
    elif isinstance(two, int | float) and two != three:
        yield path, Axis("count" if (two, three) == (2, 3) else "unknown")
    else:
        once, wide = children(one), children(three)
        for key, part in children(two).items():
            yield from _axes((*path, key), once.get(key), part, wide.get(key))


def _axis_of(dimensions: list[int], two: Any, three: Any) -> Axis:
    if len(dimensions) != 1 or two.ndim != three.ndim:
        return Axis("unknown")
    pair, triple = two.shape[dimensions[0]], three.shape[dimensions[0]]
    if (pair, triple) == (2, 3):
        return Axis("dimension", dimensions[0])
    return Axis("blocks", dimensions[0]) if 3 * pair == 2 * triple else Axis("unknown")


def count_rows(batch: Any, layout: Layout) -> int:
    """The rows of a batch."""
    parts = dict(leaves(batch))
    for path, axis in layout.items():
        part = parts.get(path)
        if axis.kind == "dimension" and part is not None:
            return int(part.shape[axis.dimension])
        if axis.kind == "count" and part is not None:
            return int(part)
        if axis.kind == "packed" and part is not None:
            return int(part.batch_sizes[0])
        if axis.kind == "list":
            return len(_at(batch, path))
    raise _unsplittable((), "no part of it has one entry for each row")


def split(batch: Any, layout: Layout, rows: int) -> list[Any]:
    """Split a batch into microbatches of at most so many rows. Raise if a part cannot be split."""
    for path, axis in layout.items():
        if axis.kind == "unknown":
            raise _unsplittable(path, "it depends on the number of rows, and it is not known how")
    total = count_rows(batch, layout)
    return [take(batch, layout, start, min(start + rows, total)) for start in range(0, total, rows)]


def take(batch: Any, layout: Layout, start: int, stop: int) -> Any:
    """Some rows of a batch."""
    return _cut(batch, batch, layout, (), start, stop, count_rows(batch, layout))


def _unsplittable(path: Path, why: str) -> MisuseError:
    name = "".join(f"[{key!r}]" for key in path)
    advice = "Return tensors with one dimension for the rows from collate_fn, or use smaller batches."
    return MisuseError(rule="A batch is split along its rows", got=f"batch{name} cannot be split: {why}", advice=advice)


def _at(batch: Any, path: Path) -> Any:
    for key in path:
        batch = children(batch)[key]
    return batch


def _cut(value: Any, batch: Any, layout: Layout, path: Path, start: int, stop: int, total: int) -> Any:
    axis = layout.get(path)
    if axis is None:
        parts = children(value)
        return rebuilt(value, {k: _cut(v, batch, layout, (*path, k), start, stop, total) for k, v in parts.items()})
    if axis.kind == "count":
        return stop - start
    if axis.kind == "list":
        return value[start:stop]
    if axis.kind == "packed":
        return pack_sequence(unpack_sequence(value)[start:stop], enforce_sorted=value.sorted_indices is None)
    first, size = (slice(None),) * axis.dimension, value.shape[axis.dimension]
    if axis.kind == "interleaved":
        shape = (*value.shape[: axis.dimension], size // total, total, *value.shape[axis.dimension + 1 :])
        rows = value.reshape(shape)[(*first, slice(None), slice(start, stop))]
        return rows.reshape(*value.shape[: axis.dimension], -1, *value.shape[axis.dimension + 1 :])
    if axis.kind == "blocks":
        each = [size // total] * total if axis.lengths is None else _numbers(_at(batch, axis.lengths))
        ends = [0, *accumulate(each)]
        if ends[-1] != size:
            raise _unsplittable(path, f"its rows have {ends[-1]:,} entries in all, and it has {size:,}")
        start, stop = ends[start], ends[stop]
    return value[(*first, slice(start, stop))]


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
