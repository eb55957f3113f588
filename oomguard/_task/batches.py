"""Batches of a task: of a chosen number of rows and length."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from oomguard._core.errors import MisuseError
from oomguard._task.layout import (
    Layout,
    Path,
    children,
    count_rows,
    find_equal_time,
    find_layout,
    leaves,
    mapped,
    split,
    take,
    tensors_of,
)
from oomguard._task.task import Task, line_of, user_code

LOOKED_AT, LOOK_SECONDS = 1000, 20.0
"""The most samples whose length is looked at, and the seconds for that: reading a large data set takes hours."""
KEPT = 16  # samples of evenly spaced lengths that are kept beside those of the batch
TINY_STEPS = 64  # time steps of a tiny batch, if a function makes it


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

    def notes(self, rows: int) -> list[str]:
        """Sentences on the samples of a batch of so many rows."""
        few = f"A batch of {rows:,} rows has some of the {self.total:,} samples more than once."
        return [self.words, *([few] if rows > self.total else [])]

    def nearest(self, rows: int, steps: int | None) -> list[int]:
        """Indices of so many samples: those closest to a length, or the longest. Few samples are repeated."""
        goal = self.longest if steps is None else steps
        order = sorted(self.lengths, key=lambda index: (abs(self.lengths[index] - goal), index))
        return list(islice(cycle(order), rows))

    def unequal(self, rows: int) -> list[int]:
        """Indices of so many short samples, by length: of unequal length, as far as there are any not much longer."""
        shortest = sorted(self.lengths, key=lambda index: (self.lengths[index], index))
        firsts = {self.lengths[index]: index for index in reversed(shortest)}
        near = sorted(length for length in firsts if length <= min(firsts) + TINY_STEPS)
        order = dict.fromkeys([*(firsts[length] for length in near), *shortest])  # each index once
        return sorted(islice(cycle(order), rows), key=shortest.index)

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
        self.cuts = True  # whether the task runs on the first steps of equally long samples

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
            return self.beginning(self.samples.make(self.samples.nearest(rows, 0)))
        return self.make(rows, min(steps or TINY_STEPS, TINY_STEPS))

    def beginning(self, batch: Any) -> Any:
        """The first steps of a batch of equally long samples, which have no shorter ones. Other batches stay whole."""
        if not (self.cuts and self.equal_time):
            return batch
        return take(batch, self.equal_time, 0, min(TINY_STEPS, count_rows(batch, self.equal_time)))

    @cached_property
    def equal_time(self) -> Layout:
        """Where batches hold their time steps, if all samples are equally long."""
        if self.samples is None or self.samples.longest:
            return {}
        return find_equal_time(self.pair(0), self.layout)

    def of_length(self, rows: int, factor: int) -> Any:
        """A small batch of a length that is about so many times the shortest."""
        if self.samples is None:
            return self.make(rows, TINY_STEPS // 4 * factor)
        return self.samples.make(self.samples.nearest(1, factor * min(self.samples.lengths.values())) * rows)

    @cached_property
    def layout(self) -> Layout:
        """Where a batch holds its rows."""
        if self.samples is None:
            two, three = (self.make(rows, TINY_STEPS) for rows in (2, 3))
            found = find_layout(None, two, three)
            if not found and tensors_of(two):
                rule, got = "batch(rows, steps) must make a batch of that many rows", f"{line_of(self.task.batch)}"
                got += " returned parts of the same sizes for 2 and for 3 rows"
                raise MisuseError(rule=rule, got=got, advice="Use its first argument as the number of rows.")
            return found
        make, short, long = self.samples.make, self.samples.nearest(1, 0), self.samples.nearest(1, None)
        return find_layout(make(short), make(short * 2), make(short * 3), make(short + long), make(long * 2))

    def split(
        self, batch: Any, microbatch: int, steps: int | None = None, chosen: list[int] | None = None
    ) -> list[Any]:
        """Split a batch that `make` made into microbatches, or where that is impossible, collate fewer samples.

        The batch has the samples closest to a length, or the chosen ones.
        """
        try:
            return split(batch, self.layout, microbatch)
        except MisuseError:
            if self.samples is None:
                raise
        rows = count_rows(batch, self.layout)
        chosen = chosen or self.samples.nearest(rows, steps)
        return [self.samples.make(chosen[start : start + microbatch]) for start in range(0, rows, microbatch)]

    def steps_of(self, batch: Any) -> int:
        """Time steps of a batch: the dimension of its largest part that grows with longer samples, if there are any."""
        if self.equal_time:
            return count_rows(batch, self.equal_time)
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
