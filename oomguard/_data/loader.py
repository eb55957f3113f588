"""Loader: a batch for each optimizer step, its microbatches made one at a time, here or by worker processes."""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import tee
from multiprocessing import current_process
from multiprocessing.util import Finalize
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from oomguard._core.errors import MisuseError, check_whole
from oomguard._core.system import process_directory
from oomguard._core.units import MIB
from oomguard._data.order import Order, Position
from oomguard._data.rows import Source
from oomguard._data.source import Ints, Pair
from oomguard._estimate.terms import loader_bytes
from oomguard._rnn import Microbatch
from oomguard._rnn.run import IGNORED
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec

WORKER_BYTES = 160 * MIB
"""Memory of a worker process without its microbatches: 155 MiB if it is spawned and imports torch 2.13 anew, 8 MiB if
it is forked."""
MAX_WORKERS = 4  # one fills a microbatch from a mapped file faster than a pass computes it
LOST_WORKER = "DataLoader worker (pid"  # start of the error for a worker that died (torch 2.13, dataloader.py)


def collate(spec: Spec, pairs: Iterable[Pair], lengths: Ints) -> Microbatch:
    """Sequences as one microbatch, padded to the longest with 0, and classes with `IGNORED`. None of them is kept.

    The microbatch has lengths only if there is padding or if the kernels read packed sequences.
    """
    rows, steps, per_step = len(lengths), int(lengths.max()), spec.head == "per-step"
    grid = (rows, steps) if spec.batch_first else (steps, rows)
    shape, dtype = ((*grid, spec.inputs), torch.float32) if spec.vocab is None else (grid, torch.int64)
    inputs = torch.zeros(shape, dtype=dtype)
    places = grid if per_step else (rows,)
    if spec.loss == "cross-entropy":
        targets = torch.full(places, IGNORED, dtype=torch.int64)
    else:
        targets = torch.zeros(*places, spec.classes, dtype=torch.float32)
    # views with one sequence per row, whatever the layout in memory
    input_rows = (inputs if spec.batch_first else inputs.transpose(0, 1)).numpy()
    target_rows = (targets.transpose(0, 1) if per_step and not spec.batch_first else targets).numpy()
    for row, (sequence, target) in enumerate(pairs):
        input_rows[row, : len(sequence)] = sequence
        target_rows[(row, slice(len(target))) if per_step else row] = target
    padded = bool((lengths != steps).any())
    kept = torch.from_numpy(np.array(lengths, dtype=np.int64)) if padded or spec.packs else None
    return Microbatch(inputs, targets, kept)


def read_microbatch(source: Source, sequences: Ints) -> Microbatch:
    return collate(source.spec, (source[int(sequence)] for sequence in sequences), source.lengths[sequences])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The sequences of one optimizer step, by their numbers. Its microbatches can be asked for more than once."""

    position: Position  # where training is before this batch
    sequences: Ints
    loader: "Loader"
    stream: "_Stream"

    @property
    def rows(self) -> int:
        """All sequences."""
        return len(self.sequences)

    @property
    def steps(self) -> int:
        """Real time steps of all sequences together."""
        return int(self.loader.source.lengths[self.sequences].sum())

    @property
    def targets(self) -> int:
        """Real targets of all sequences together, as `oomguard._step.step` takes them."""
        return self.steps if self.loader.spec.head == "per-step" else len(self.sequences)

    @property
    def lost(self) -> str | None:
        """The error of a worker process that has died, if one has: since then this process reads everything."""
        return self.stream.lost

    @property
    def after(self) -> Position:
        """Where training is once this batch is done; the end of an epoch is the start of the next."""
        epoch, done = divmod(self.position.done + 1, len(self.loader))
        return Position(epoch=self.position.epoch + epoch, done=done)

    def microbatches(self) -> Iterator[Microbatch]:
        """The microbatches, each made when it is asked for. What workers have prepared is used the first time."""
        return self.stream.take(self.position.done, self.loader.order.microbatches(self.sequences))


@dataclass(frozen=True, kw_only=True, eq=False)
class Loader:
    """Batches of a source, in an order that (seed, epoch) fixes. Microbatches and workers do not change them."""

    source: Source
    spec: Spec
    buckets: Mapping[int, int]  # length of the longest sequence of each bucket -> its microbatch
    seed: int = 0
    workers: int = 0  # processes that prepare microbatches; 0: this process makes each when it is asked for
    prefetch: int = 2  # microbatches that each worker prepares ahead
    pinned: bool = False  # whether microbatches are in page-locked memory, from which a CUDA card reads directly

    def __post_init__(self) -> None:
        check_whole("workers", self.workers, 0, 128, optional=False)
        check_whole("prefetch", self.prefetch, 1, 32, optional=False)
        longest = self.order.lengths.max(initial=0)
        assert longest <= self.spec.steps, "the source was cut for a spec with longer sequences"

    @cached_property
    def order(self) -> Order:
        return Order(lengths=self.source.lengths, buckets=self.buckets, batch=self.spec.batch, seed=self.seed)

    def __len__(self) -> int:
        """Batches of an epoch; the last may be smaller."""
        return len(self.order)

    def batches(self, start: Position | None = None) -> Iterator[Batch]:
        """The batches of an epoch, from a position on. What was done before it is not read."""
        start = start or Position()
        batches, ahead = tee(self.order.batches(start.epoch, start.done))
        stream = _Stream(self, ahead)
        try:
            for number, sequences in batches:
                position = Position(epoch=start.epoch, done=number)
                yield Batch(position=position, sequences=sequences, loader=self, stream=stream)
        finally:
            stream.close()

    def read(self, sequences: Ints) -> Microbatch:
        made = read_microbatch(self.source, sequences)
        return Microbatch(made.inputs.pin_memory(), made.targets.pin_memory(), made.lengths) if self.pinned else made


Prepared = tuple[int, Microbatch | MisuseError]
"""A message of a worker: the number of a batch, and one of its microbatches or the error in the data."""


@dataclass(frozen=True)
class _Reader(Dataset[Prepared]):
    """Reads microbatches in a worker. Errors are returned, since PyTorch would turn them into RuntimeErrors."""

    source: Source

    def __getitem__(self, key: tuple[int, Ints]) -> Prepared:
        number, sequences = key
        try:
            return number, read_microbatch(self.source, sequences)
        except MisuseError as error:
            return number, error


class _Stream:
    """The microbatches of the coming batches, prepared in order by workers (if any) that live as long as the epoch.

    The kernel may kill a worker to free memory. PyTorch handles SIGCHLD by raising an error in whatever code is running
    then, be it an update of the weights. So its handler is off while the workers run: the loss is noticed where a
    microbatch is waited for, and this process reads what is missing.
    """

    def __init__(self, loader: Loader, batches: Iterator[tuple[int, Ints]]) -> None:
        self.loader, self.last = loader, -1
        self.lost: str | None = None
        self.answers: Iterator[Prepared] | None = None
        if not loader.workers:
            return
        keys = ((number, part) for number, batch in batches for part in loader.order.microbatches(batch))
        made: DataLoader[Prepared] = DataLoader(
            _Reader(loader.source),
            batch_size=None,
            sampler=keys,
            num_workers=loader.workers,
            prefetch_factor=loader.prefetch,
            pin_memory=loader.pinned,
            worker_init_fn=share_sockets(),
            generator=torch.Generator(),  # its own, so that dropout draws the same numbers as without workers
        )
        self.answers = iter(made)
        self.handler = handle_ended_children(signal.SIG_DFL)

    def take(self, number: int, parts: list[Ints]) -> Iterator[Microbatch]:
        """The microbatches of a batch, read here if it was begun before. Those of earlier batches are thrown away."""
        prepared, self.last = self.answers is not None and number > self.last, max(number, self.last)
        for part in parts:  # no variable for the result: it would keep the tensor while the next is waited for
            yield (self._next(number) if prepared else None) or self.loader.read(part)

    def _next(self, number: int) -> Microbatch | None:
        """The next microbatch of a batch; None: a worker was lost."""
        try:
            for batch_number, answer in () if self.answers is None else self.answers:
                if batch_number != number:
                    continue
                if isinstance(answer, Microbatch):
                    return answer
                self.close()
                raise answer
        except (RuntimeError, OSError, EOFError) as error:  # the last two: it died while it handed something over
            self.lost = lost_worker(error)
            if self.lost is None:
                raise
        assert self.lost is not None, f"the workers have ended before batch {number}"
        self.close()  # after the except block, whose traceback still held the workers
        return None

    def close(self) -> None:
        if self.answers is not None:
            self.answers = None
            handle_ended_children(self.handler)


def lost_worker(error: Exception) -> str | None:
    """The message of an error that says that a worker has died; None if it says something else."""
    if isinstance(error, RuntimeError) and LOST_WORKER not in str(error):
        return None
    return str(error).strip().partition("\n")[0] or type(error).__name__


def handle_ended_children(handler: Any) -> Any:
    """Set the handler of SIGCHLD and return the previous one. In other threads neither Python nor PyTorch sets it."""
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGCHLD"):
        return signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)
    return None


def share_sockets() -> Callable[[int], None]:
    """Let workers put the sockets over which they hand tensors over into the directory of this process.

    Otherwise each makes a directory of its own, and one that is killed cannot remove it. Returns the function that a
    worker starts with: if this process is killed, the last of its workers removes the directory.
    """
    config: dict[str, Any] = current_process()._config  # type: ignore[attr-defined]
    directory = config.setdefault("tempdir", str(process_directory()))
    return partial(_tidy_after, directory, os.getpid())


def _tidy_after(directory: str, parent: int, _: int) -> None:
    Finalize(None, _remove_orphaned, args=(directory, parent), exitpriority=-100)


def _remove_orphaned(directory: str, parent: int) -> None:
    if os.getppid() != parent:
        with suppress(OSError):  # the last worker removes it, when the sockets of all are gone
            os.rmdir(directory)


def size_loader(
    spec: Spec, candidate: Candidate, free_bytes: int, *, cores: int = 2, pinned: bool = False, asked: int | None = None
) -> tuple[int, int]:
    """How many workers, and how many microbatches each prepares ahead, fit into `free_bytes` of shared host memory.

    One core is left for the training. Prefetching less is tried before fewer workers. Workers that the user has asked
    for are all there, and prepare at least one microbatch each.
    """
    for workers in [asked] if asked else range(min(MAX_WORKERS, cores - 1), 0, -1):
        for prefetch in range(candidate.prefetch, 0, -1):
            tried = msgspec.structs.replace(candidate, workers=workers, prefetch=prefetch)
            if workers * WORKER_BYTES + int(loader_bytes(spec, tried, pinned=pinned)) <= free_bytes:
                return workers, prefetch
    return (asked, 1) if asked else (0, candidate.prefetch)
