"""Loader: for each optimizer step a batch, whose microbatches are made one at a time, here or by worker processes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader

from oomguard.bptt import Microbatch
from oomguard.candidate import Candidate
from oomguard.checks import check_whole
from oomguard.data.collate import collate
from oomguard.data.order import Bucket, Epoch, Order, Position
from oomguard.data.source import Ints, Source
from oomguard.errors import MisuseError
from oomguard.estimate.terms import loader_bytes
from oomguard.spec import Spec
from oomguard.units import MIB

WORKER_BYTES = 160 * MIB
"""What a worker process takes of its own, without microbatches: 155 MiB if it is spawned and imports torch 2.13 anew;
8 MiB if it is forked."""
MOST_WORKERS = 4
"""More do not help who maps files: one fills a microbatch faster than a pass goes through it."""
_DEAD = "DataLoader worker (pid"
"""How PyTorch begins to say that a worker is no more (torch 2.13, dataloader.py)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The sequences of one optimizer step. Its microbatches can be asked for again, also smaller."""

    position: Position
    """Where training is before it; `after` it is done."""
    sequences: Ints
    """Their numbers in the source."""
    targets: int
    """Real targets of all of them together, as `oomguard.step.step` takes them."""
    steps: int
    """Real steps of all of them together."""
    loader: "Loader" = field(repr=False)
    stream: "_Stream | None" = field(default=None, repr=False)

    @property
    def lost(self) -> str | None:
        """How a worker was lost, if one was: since then all is read here."""
        return None if self.stream is None else self.stream.lost

    @property
    def after(self) -> Position:
        """Where training is once this batch is done; the end of an epoch is the start of the next."""
        done = self.position.done + 1
        if done < len(self.loader):
            return Position(epoch=self.position.epoch, done=done)
        return Position(epoch=self.position.epoch + 1)

    def microbatches(self, size: int | None = None) -> Iterator[Microbatch]:
        """Each when it is asked for: as its bucket says, or of at most `size` sequences.

        What workers have prepared is used the first time, if the size is the bucket's; otherwise all is read here.
        """
        parts = self.loader.order.microbatches(self.sequences, size)
        if self.stream is not None and size is None and self.stream.is_ahead_of(self.position.done):
            yield from self.stream.take(self.position.done, parts)
            return
        for part in parts:
            yield self.loader.read(part)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loader:
    """Batches of a source, in an order that (seed, epoch) fixes. Other buckets or workers: `dataclasses.replace`.

    If only the microbatches of the buckets change, the batches stay the same.
    """

    source: Source
    spec: Spec
    buckets: tuple[Bucket, ...]
    seed: int = 0
    workers: int = 0
    """Processes that prepare microbatches; 0: they are made here, when asked for."""
    prefetch: int = 2
    """Microbatches that each of them prepares ahead."""
    pinned: bool = False
    """In memory that a CUDA card reads from directly."""
    order: Order = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_whole("workers", self.workers, 0, 128, optional=False)
        check_whole("prefetch", self.prefetch, 1, 32, optional=False)
        lengths = self.source.lengths
        if len(lengths) and int(lengths.max()) > self.spec.steps:
            worst = int(lengths.argmax())
            raise MisuseError(
                rule=f"A sequence must not be longer than the spec says ({self.spec.steps:,} steps)",
                got=f"sequence {worst:,} has {int(lengths[worst]):,}",
                advice="Raise --seq, or say --truncate.",
            )
        made = Order(lengths=lengths, buckets=self.buckets, batch=self.spec.batch, seed=self.seed)
        object.__setattr__(self, "order", made)

    def __len__(self) -> int:
        """Batches of an epoch; the last may be smaller."""
        return len(self.order)

    @property
    def truncated(self) -> int:
        """How many sequences were cut to the spec's length."""
        return self.source.truncated

    def batches(self, start: Position | None = None) -> Iterator[Batch]:
        """The batches of an epoch, from a position on. What was done before it is not read."""
        start = start or Position()
        epoch = self.order.epoch(start.epoch)
        stream = _Stream(self, epoch, start.done) if self.workers and start.done < len(epoch) else None
        try:
            for number in range(start.done, len(epoch)):
                sequences = epoch.sequences(number)
                steps = int(self.source.lengths[sequences].sum())
                yield Batch(
                    position=Position(epoch=start.epoch, done=number),
                    sequences=sequences,
                    targets=steps if self.spec.head == "per-step" else len(sequences),
                    steps=steps,
                    loader=self,
                    stream=stream,
                )
        finally:
            if stream is not None:
                stream.close()

    def read(self, sequences: Ints) -> Microbatch:
        """One microbatch, made here and now."""
        made = _read(self.source, self.spec, sequences)
        return _pin(made) if self.pinned else made


def _read(source: Source, spec: Spec, sequences: Ints) -> Microbatch:
    return collate(spec, (source[int(one)] for one in sequences), source.lengths[sequences])


def _pin(made: Microbatch) -> Microbatch:
    return Microbatch(made.inputs.pin_memory(), made.targets.pin_memory(), made.lengths)


class _Key(NamedTuple):
    """What a worker is asked for: a microbatch of a batch."""

    number: int
    sequences: Ints


class _Reader:
    """What a worker holds: the source and the spec, no data. It answers with errors instead of raising them, since
    PyTorch would make RuntimeErrors of them."""

    def __init__(self, source: Source, spec: Spec) -> None:
        self.source, self.spec = source, spec

    def __getitem__(self, key: _Key) -> tuple[int, Microbatch | MisuseError]:
        try:
            return key.number, _read(self.source, self.spec, key.sequences)
        except MisuseError as error:
            return key.number, error


class _Stream:
    """The microbatches of the batches to come, prepared by workers that live as long as the epoch.

    A worker may be killed, most likely by the kernel for its memory. PyTorch would raise an error for that in whatever
    is being done at the moment, be it an update of the weights. So its handler is not told of these workers: a loss
    shows where a microbatch is waited for, within seconds, and what is missing is read here.
    """

    def __init__(self, loader: Loader, epoch: Epoch, start: int) -> None:
        self.loader, self.last = loader, start - 1
        self.lost: str | None = None
        keys = (
            _Key(number, part)
            for number in range(start, len(epoch))
            for part in loader.order.microbatches(epoch.sequences(number))
        )
        reader: Any = _Reader(loader.source, loader.spec)
        made: DataLoader[Any] = DataLoader(
            reader,
            batch_size=None,
            sampler=keys,
            num_workers=loader.workers,
            prefetch_factor=loader.prefetch,
            collate_fn=_as_it_is,
            pin_memory=loader.pinned,
            generator=torch.Generator(),  # its own: dropout must fall as it does without workers
        )
        items: Any = iter(made)
        _remove_worker_pids(id(items))
        items._worker_pids_set = False  # as its own end would: it does not take them off a second time
        self.items: Iterator[Any] | None = items

    def is_ahead_of(self, number: int) -> bool:
        """Whether no microbatch of this batch was taken yet."""
        return self.items is not None and number > self.last

    def take(self, number: int, parts: list[Ints]) -> Iterator[Microbatch]:
        """The microbatches of a batch. Those of batches before it that nobody took are thrown away."""
        self.last = number
        for part in parts:
            yield self._next(number, part)  # in no variable here: it would live on while the next one is waited for

    def _next(self, number: int, part: Ints) -> Microbatch:
        try:
            for of, made in () if self.items is None else self.items:
                if isinstance(made, Microbatch) and of == number:
                    return made
                if isinstance(made, MisuseError) and of == number:
                    self.close()
                    raise made
        except (RuntimeError, OSError, EOFError) as error:  # the last two: it died while it handed something over
            if isinstance(error, RuntimeError) and _DEAD not in str(error):
                raise
            self.lost = str(error).strip().partition("\n")[0] or type(error).__name__
        assert self.lost is not None, f"the workers have ended before batch {number}"
        self.close()  # not where it was caught: there the traceback still held them
        return self.loader.read(part)

    def close(self) -> None:
        """End the workers."""
        self.items = None


def _as_it_is(made: Any) -> Any:
    return made


def size_loader(
    spec: Spec, candidate: Candidate, free_bytes: int, *, cores: int = 2, pinned: bool = False
) -> tuple[int, int]:
    """Workers and microbatches each prepares ahead: as many as fit into so many free bytes of host memory.

    At most one for each core but the one that trains, and `MOST_WORKERS`. Rather fewer prepared ahead than fewer
    workers; 0 workers if not even one fits. Microbatches come over in shared memory: where /dev/shm is smaller than
    what is free (64 MiB in a container, unless asked for more), `free_bytes` is what it has.

    >>> spec = Spec(cell="lstm", seq=1000, batch=32)
    >>> size_loader(spec, Candidate(microbatch=32), 1 << 30, cores=4), size_loader(spec, Candidate(microbatch=32), 0)
    ((3, 2), (0, 2))
    """
    for workers in range(min(MOST_WORKERS, cores - 1), 0, -1):
        asked = msgspec.structs.replace(candidate, workers=workers)
        prefetch = prefetch_within(spec, asked, free_bytes, pinned=pinned)
        if prefetch is not None:
            return workers, prefetch
    return 0, candidate.prefetch


def prefetch_within(spec: Spec, candidate: Candidate, free_bytes: int, *, pinned: bool = False) -> int | None:
    """Microbatches that each of the candidate's workers may prepare ahead; None if there is no room for one each."""
    for prefetch in range(candidate.prefetch, 0, -1):
        asked = msgspec.structs.replace(candidate, prefetch=prefetch)
        if asked.workers * WORKER_BYTES + int(loader_bytes(spec, asked, pinned=pinned)) <= free_bytes:
            return prefetch
    return None
