"""The batches of a task in training, in an order that a seed fixes, so that a run can be resumed at any of them."""

import itertools
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from oomguard._core.errors import GuardError, MisuseError, shown
from oomguard._data.loader import handle_ended_children, lost_worker, share_sockets
from oomguard._data.order import Position
from oomguard._probe.verdict import Verdict, judge
from oomguard._rnn.rng import seeded
from oomguard._task.layout import Layout, take
from oomguard._task.task import user_code
from oomguard._train.ranks import Ranks

Key = tuple[int, int, list[Any]]  # a batch of a loader: its epoch, its number there, and the indices of its samples


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskBatch:
    """The batch of one optimizer step."""

    position: Position  # where training is before this batch
    after: Position  # where training is once it is done
    rows: int  # of this process
    content: Any  # what `collate_fn` or the function returned; otherwise the list of its samples
    collate: Callable[[list[Any]], Any] | None = None  # what is to collate samples; None: that is done
    lost: str | None = None  # the error of a worker process that has died, if one has
    steps: None = None  # nothing tells how many time steps are padding


@dataclass(frozen=True, kw_only=True)
class TaskLoader:
    """Batches of a DataLoader. Their order follows from (seed, epoch), what they draw at random also from their number.

    Batches before the first one that is asked for are neither read nor collated. Of several processes, each has its
    share of the samples of a batch, unless the loader has a DistributedSampler: then that is the share.
    """

    data: DataLoader[Any]
    rows: int | None  # rows of a batch; None: as the loader has them
    seed: int
    workers: int
    collates: bool = True  # otherwise the content of a batch is the list of its samples
    ranks: Ranks = Ranks()  # noqa: RUF009 (it is frozen)

    def __len__(self) -> int:
        """Batches of the first epoch."""
        return len(self._first)

    @cached_property
    def _first(self) -> list[list[Any]]:
        order = self._draw(0)
        if order != self._draw(0):
            raise MisuseError(
                rule="The order of the data must follow from the seed",
                got="the sampler of the loader gave two orders for one seed",
                advice="Let it draw from PyTorch's, NumPy's or Python's global generator, or write set_epoch(epoch).",
            )
        return order

    def order(self, epoch: int) -> list[list[Any]]:
        """The indices of the samples of every batch of an epoch."""
        return self._draw(epoch) if epoch else self._first

    def _draw(self, epoch: int) -> list[list[Any]]:
        sampler: Any = getattr(self.data, "sampler", None) or range(len(self.data.dataset))  # type: ignore[arg-type]
        batches: Any = getattr(self.data, "batch_sampler", None)
        parts = self._distributed(sampler)
        if batches is None or (type(batches) is BatchSampler and (self.rows is not None or parts > 1)):
            rows = -(-(self.rows or getattr(self.data, "batch_size", None) or 1) // parts)
            batches = BatchSampler(sampler, rows, getattr(self.data, "drop_last", False))
        with seeded(self.seed, epoch):
            for part in (self.data, sampler, batches):
                if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                    generator.manual_seed(torch.initial_seed())
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
            with user_code("The sampler must give the indices of batches", type(sampler), "Correct that line."):
                order = [list(batch) for batch in batches]
        if parts == 1:
            order = [[batch[row] for row in self.ranks.rows(len(batch))] for batch in order]
        if not order:
            got, advice = "this one has none", "Add samples, or leave drop_last out."
            raise MisuseError(rule="A loader must have batches", got=got, advice=advice)
        return order

    def _distributed(self, sampler: Any) -> int:
        """The processes that a DistributedSampler deals its samples to; 1 for other samplers."""
        if not isinstance(sampler, DistributedSampler):
            return 1
        world = self.ranks.world
        if (sampler.num_replicas, sampler.rank) != (world, self.ranks.rank):
            got = f"it is number {sampler.rank} of {sampler.num_replicas}, and the process {self.ranks.rank} of {world}"
            advice = "Give it num_replicas and rank of torchrun (WORLD_SIZE, RANK), or leave it out."
            raise MisuseError(rule="A DistributedSampler must be that of its process", got=got, advice=advice)
        return world

    def batches(self, start: Position) -> Iterator[TaskBatch]:
        """The batches of an epoch, from a position on. If a worker dies, this process reads the others."""
        order, number, lost = self.order(start.epoch), start.done, None
        workers, collate = self.workers, None if self.collates else self.data.collate_fn
        while number < len(order):
            keys = [(start.epoch, n, order[n]) for n in range(number, len(order))]
            with self._reading(keys, workers) as contents:
                for content in contents:
                    if isinstance(content, MisuseError | GuardError):
                        raise content
                    if isinstance(content, _Lost):
                        lost, workers = content.message, 0
                        break
                    last = number + 1 == len(order)
                    after = Position(epoch=start.epoch + 1) if last else Position(epoch=start.epoch, done=number + 1)
                    position = Position(epoch=start.epoch, done=number)
                    yield TaskBatch(
                        position=position,
                        after=after,
                        rows=len(order[number]),
                        content=content,
                        collate=collate,
                        lost=lost,
                    )
                    number += 1

    @contextmanager
    def _reading(self, keys: list[Key], workers: int) -> Iterator[Iterator[Any]]:
        """The contents of batches in order, from workers if there are any."""
        reader, data = _Reader(self.data.dataset, self.data.collate_fn if self.collates else list, self.seed), self.data
        if not workers:
            yield map(reader.__getitem__, keys)
            return
        made: DataLoader[Any] = DataLoader(
            reader,
            batch_size=None,
            sampler=keys,
            num_workers=workers,
            collate_fn=_unchanged,
            pin_memory=data.pin_memory,
            timeout=data.timeout,
            worker_init_fn=partial(_start_worker, share_sockets(), data.worker_init_fn),
            multiprocessing_context=data.multiprocessing_context,
            prefetch_factor=data.prefetch_factor,
            generator=torch.Generator(),  # its own, so that the training draws the same numbers as without workers
        )
        contents = _until_lost(iter(made))
        handler = handle_ended_children(signal.SIG_DFL)  # see oomguard._data.loader
        try:
            yield contents
        finally:
            contents.close()  # ends the workers
            handle_ended_children(handler)


@dataclass(frozen=True, slots=True)
class _Lost:
    """Stands for a batch that a worker should have read: the worker has died."""

    message: str


def _until_lost(answers: Iterator[Any]) -> Generator[Any, None, None]:
    try:
        yield from answers
    except (RuntimeError, OSError, EOFError) as error:
        message = lost_worker(error)
        if message is None:
            raise
    else:
        return
    yield _Lost(message)


@dataclass(frozen=True, slots=True)
class _Reader(Dataset[Any]):
    """Reads and collates whole batches, here or in a worker. Errors are returned: PyTorch would change their type."""

    dataset: Any
    collate: Callable[[list[Any]], Any]
    seed: int

    def __getitem__(self, key: Key) -> Any:
        epoch, number, indices = key
        with seeded(self.seed, epoch, number):
            return made_by(self.dataset, lambda: self.collate(self._samples(indices))) if indices else None

    def _samples(self, indices: list[Any]) -> list[Any]:
        fetch: Callable[[list[Any]], list[Any]] | None = getattr(self.dataset, "__getitems__", None)
        return [self.dataset[index] for index in indices] if fetch is None else fetch(indices)


def made_by(owner: Any, make: Callable[[], Any]) -> Any:
    """The batch that the user's code makes, or the error for the user."""
    try:
        with user_code("A batch of the task must be made", owner, "Correct that line."):
            return make()
    except Exception as error:
        failed = error if isinstance(error, MisuseError) else None
        if failed is None or judge(error) is Verdict.OOM:
            got, advice = f"memory ran out ({shown(str(error))})", "Free memory, or load with fewer workers."
            return GuardError(rule="A batch must fit beside the training", got=got, advice=advice)
        return failed


def _unchanged(batch: Any) -> Any:
    return batch


def _start_worker(begin: Callable[[int], None], init: Callable[[int], None] | None, worker: int) -> None:
    """Run ours, then the user's `worker_init_fn`, which finds its own dataset."""
    begin(worker)
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # PyTorch has frozen it
    if init is not None:
        init(worker)


@dataclass(frozen=True, kw_only=True)
class MadeBatches:
    """Batches that a function of rows and time steps makes, without end; their random numbers follow from the seed.

    Each of several processes makes whole batches, and keeps its share of the rows.
    """

    make: Callable[[int, int], Any]
    rows: int
    seq: int
    seed: int
    layout: Layout  # where a batch holds its rows
    ranks: Ranks = Ranks()  # noqa: RUF009 (it is frozen)
    workers: int = 0

    def batches(self, start: Position) -> Iterator[TaskBatch]:
        """The batches from a position on."""
        for number in itertools.count(start.done):
            with seeded(self.seed, start.epoch, number):
                content = made_by(self.make, lambda: self.make(self.rows, self.seq))
            if isinstance(content, MisuseError | GuardError):
                raise content
            position, after = (Position(epoch=start.epoch, done=n) for n in (number, number + 1))
            start_row, end_row = self.ranks.span(self.rows)
            if self.ranks.world > 1:
                content = take(content, self.layout, start_row, end_row) if end_row > start_row else None
            yield TaskBatch(position=position, after=after, rows=end_row - start_row, content=content)
