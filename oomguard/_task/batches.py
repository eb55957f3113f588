"""Batches of a task: of a chosen number of rows and length, and split along the dimensions that hold the rows."""

import copy
import dataclasses
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, cycle, islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from oomguard._core.errors import MisuseError
from oomguard._task.task import Task, user_code

LOOKED_AT, LOOK_SECONDS = 1000, 20.0
"""The most samples whose length is looked at, and the seconds for that: reading a large data set takes hours."""
KEPT = 16  # samples of evenly spaced lengths that are kept beside those of the batch
TINY_STEPS = 64  # time steps of a tiny batch, if a function makes it

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


def children(value: Any) -> dict[Hashable, Any]:
    """The parts of a list, tuple, mapping, dataclass or other object by key; empty for a tensor or a plain value."""
    if isinstance(value, _LEAVES) or callable(value):
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


def sizes(sample: Any) -> dict[Path, tuple[int, ...]]:
    """The shape of every part of a sample; the length of text and of a list of numbers counts too."""
    found: dict[Path, tuple[int, ...]] = {}
    parts = children(sample)
    if isinstance(sample, Tensor | np.ndarray):
        return {(): tuple(sample.shape)}
    if isinstance(sample, str | bytes):
        return {(): (len(sample),)}
    if isinstance(sample, list | tuple) and parts and all(isinstance(part, int | float) for part in parts.values()):
        return {(): (len(sample),)}
    for key, part in parts.items():
        found |= {(key, *path): shape for path, shape in sizes(part).items()}
    return found


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of a DataLoader by index, with the length of those that were looked at."""

    dataset: Any  # the dataset of the loader, or a dict with some of its samples
    collate_fn: Callable[[list[Any]], Any]
    batch_size: int | None
    lengths: dict[int, int]  # time steps of each sample; all 0 if they are equally long
    total: int  # samples of the dataset
    seen: int  # samples that were looked at

    @property
    def longest(self) -> int:
        """Time steps of the longest sample that was looked at; 0 if all are equally long."""
        return max(self.lengths.values())

    @property
    def words(self) -> str:
        """The samples that were looked at, in words."""
        looked = f"{self.seen:,} of {self.total:,} samples" if self.seen < self.total else f"all {self.total:,} samples"
        if not self.longest:
            return f"Samples are equally long, by {looked}."
        return f"The longest of {looked} has {self.longest:,} steps."

    def nearest(self, rows: int, steps: int | None) -> list[int]:
        """Indices of so many samples: those closest to a length, or the longest. Few samples are repeated."""
        goal = self.longest if steps is None else steps
        order = sorted(self.lengths, key=lambda index: (abs(self.lengths[index] - goal), index))
        return list(islice(cycle(order), rows))

    def make(self, indices: list[int]) -> Any:
        """Collate samples."""
        chosen = [self.dataset[index] for index in indices]
        advice = "Make it work on any samples of the dataset."
        with user_code(f"collate_fn must collate {len(indices)} samples", self.collate_fn, advice):
            return self.collate_fn(chosen)

    def reduced(self, rows: int, steps: int | None) -> "Samples":
        """Only the samples that a batch needs, and some of every length: what is sent to a child process."""
        ordered = sorted(self.lengths, key=lambda index: (self.lengths[index], index))
        some = ordered[:: max(1, len(ordered) // KEPT)]
        kept = sorted({*some, *self.nearest(rows, steps)})
        some_of_it = {index: mapped(_alone, self.dataset[index]) for index in kept}
        lengths = {index: self.lengths[index] for index in kept}
        return Samples(some_of_it, self.collate_fn, self.batch_size, lengths, self.total, self.seen)


def _alone(tensor: Tensor) -> Tensor:
    """The tensor without the rest of its storage, which would be sent along: a dataset may hold one large tensor."""
    shares = tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.clone() if shares else tensor


def look(loader: Any) -> Samples:
    """Look at the lengths of some samples of a DataLoader, chosen at random."""
    dataset, total = loader.dataset, len(loader.dataset)
    if not total:
        raise MisuseError(rule="The dataset must have samples", got="it has none", advice="Check how it is loaded.")
    shapes: dict[int, dict[Path, tuple[int, ...]]] = {}
    deadline = time.monotonic() + LOOK_SECONDS
    with user_code("The dataset must return its samples by index", type(dataset), "Correct its __getitem__."):
        for index in random.Random(0).sample(range(total), min(total, LOOKED_AT)):
            shapes[index] = sizes(dataset[index])
            if time.monotonic() > deadline:
                break
    return Samples(dataset, loader.collate_fn, loader.batch_size, _lengths(shapes), total, len(shapes))


def _lengths(shapes: dict[int, dict[Path, tuple[int, ...]]]) -> dict[int, int]:
    """The length of each sample: the dimension that varies, of the part with the most numbers; 0 if none varies."""
    first = next(iter(shapes.values()))
    varying = [
        (max(int(np.prod(shape[path])) for shape in shapes.values() if path in shape), path, dimension)
        for path in first
        for dimension in range(len(first[path]))
        if len({shape[path][dimension] for shape in shapes.values() if len(shape.get(path, ())) > dimension}) > 1
    ]
    if not varying:
        return dict.fromkeys(shapes, 0)
    _, path, dimension = max(varying, key=lambda one: one[0])
    return {index: shape[path][dimension] if path in shape else 0 for index, shape in shapes.items()}


class Batches:
    """Makes the batches of a task, and knows where they hold their rows."""

    def __init__(self, task: Task) -> None:
        self.task = task
        data = task.data
        self.samples: Samples | None = data if isinstance(data, Samples) or data is None else look(data)

    def make(self, rows: int, steps: int | None = None) -> Any:
        """A batch of so many rows: of samples close to a length, or the worst batch, of the longest samples."""
        if self.samples is not None:
            if steps is not None and steps > self.samples.longest:
                raise MisuseError(
                    rule="Batches consist of the samples of data",
                    got=f"steps is {steps:,}. {self.samples.words.rstrip('.')}",
                    advice="Leave steps out, or give batch=, a function of rows and time steps.",
                )
            return self.samples.make(self.samples.nearest(rows, steps))
        assert self.task.batch is not None
        if steps is None:
            advice = "Write it as oomguard.estimate(task, steps=1000), or --seq 1000."
            raise MisuseError(rule="batch(rows, steps) needs a number of steps", got="got none", advice=advice)
        rule = f"batch(rows, steps) must make a batch of {rows:,} rows and {steps:,} steps"
        with user_code(rule, self.task.batch, "Correct that line."):
            return self.task.batch(rows, steps)

    def tiny(self, rows: int = 2, steps: int | None = None) -> Any:
        """A small batch to try the user's code on."""
        if self.samples is not None:
            return self.samples.make(self.samples.nearest(rows, 0))
        return self.make(rows, min(steps or TINY_STEPS, TINY_STEPS))

    def of_length(self, rows: int, factor: int) -> Any:
        """A small batch of a length that is about so many times the shortest."""
        if self.samples is None:
            return self.make(rows, TINY_STEPS // 4 * factor)
        return self.samples.make(self.samples.nearest(1, factor * min(self.samples.lengths.values())) * rows)

    @cached_property
    def layout(self) -> Layout:
        """Where a batch holds its rows."""
        if self.samples is None:
            return find_layout(None, *(self.make(rows, TINY_STEPS) for rows in (2, 3)))
        make, short, long = self.samples.make, self.samples.nearest(1, 0), self.samples.nearest(1, None)
        return find_layout(make(short), make(short * 2), make(short * 3), make(short + long), make(long * 2))

    def split(self, batch: Any, microbatch: int, steps: int | None = None) -> list[Any]:
        """Split a batch that `make` made into microbatches, or where that is impossible, collate fewer samples."""
        try:
            return split(batch, self.layout, microbatch)
        except MisuseError:
            if self.samples is None:
                raise
        rows = count_rows(batch, self.layout)
        chosen = self.samples.nearest(rows, steps)
        return [self.samples.make(chosen[start : start + microbatch]) for start in range(0, rows, microbatch)]

    def steps_of(self, batch: Any) -> int:
        """Time steps of a batch: the dimension of its largest part that grows with longer samples."""
        short, long = (self.pair(index) for index in (0, 1))
        best, other = (0, 0), dict(leaves(long))
        parts = dict(leaves(batch))
        for path, part in leaves(short):
            if isinstance(part, PackedSequence) and isinstance(parts.get(path), PackedSequence):
                best = max(best, (part.data.numel(), len(parts[path].batch_sizes)))
            elif isinstance(part, Tensor | np.ndarray) and path in parts and path in other:
                grown = [i for i, (a, b) in enumerate(zip(part.shape, other[path].shape, strict=False)) if a != b]
                if grown:
                    best = max(best, (int(np.prod(part.shape)), int(parts[path].shape[grown[0]])))
        return best[1]

    def pair(self, longer: int) -> Any:
        """Two rows of the shortest samples or, with `longer`, of longer ones."""
        if self.samples is None:
            return self.make(2, TINY_STEPS + 8 * longer)
        return self.samples.make(self.samples.nearest(1, None if longer else 0) * 2)
