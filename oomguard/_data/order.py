"""Which sequences there are and when they come: series split and cut, and the order of every epoch. Nothing is read.

Rows are counted over all series. A piece is a run of rows of one series. A split gives each piece to one side, and
sequences are cut within pieces only, so that no row is on both sides.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from oomguard._core.errors import Bounds, MisuseError, check_fields, check_whole
from oomguard._data.source import Ints
from oomguard._spec.spec import MAX_SEQ

MAX_BLOCKS = 100  # blocks that one long series is split into at most: enough for a share of 1 %
ONLY_ONE = 1 << 62  # a stride beyond the end of every piece


class Pieces(NamedTuple):
    """Runs of rows."""

    starts: Ints
    stops: Ints
    series: Ints  # number of the series of each piece

    @property
    def steps(self) -> Ints:
        return self.stops - self.starts

    def take(self, chosen: Ints) -> "Pieces":
        return Pieces(*(part[chosen] for part in self))

    def around(self, rows: Ints) -> "Pieces":
        """The pieces without these rows (ascending): each row ends one piece, and the next begins after it."""
        if not len(rows) or not len(self.starts):
            return self
        owner = np.searchsorted(self.starts, rows, side="right") - 1
        inside = (owner >= 0) & (rows < self.stops[owner])
        rows, owner = rows[inside], owner[inside]
        piece = np.concatenate([np.arange(len(self.starts)), owner])
        starts, stops = np.concatenate([self.starts, rows + 1]), np.concatenate([self.stops, rows])
        by_start, by_stop = np.lexsort((starts, piece)), np.lexsort((stops, piece))
        parts = Pieces(starts[by_start], stops[by_stop], self.series[piece[by_start]])
        return parts.take(np.flatnonzero(parts.steps > 0))

    def without(self, rows: Ints) -> "Pieces":
        """Only the pieces that have none of these rows (ascending)."""
        return self.take(np.flatnonzero(np.searchsorted(rows, self.starts) == np.searchsorted(rows, self.stops)))


def whole(borders: Ints) -> Pieces:
    """All series that have rows, each a piece, from the row at which each begins and the row at which the last ends."""
    return Pieces(borders[:-1], borders[1:], np.arange(len(borders) - 1)).take(np.flatnonzero(np.diff(borders)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Cuts:
    """Sequences cut from pieces. Where one begins is computed when it is asked for, so a window costs no memory."""

    pieces: Pieces
    ahead: int  # rows at the end of a piece that are targets only
    seq: int  # steps of a window; the last one of a piece may be shorter
    stride: int
    """Steps from the start of a window to that of the next; `ONLY_ONE`: a piece has one window, at its start."""
    kept: Ints | None = None  # numbers of the sequences that were not dropped; None: all

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", self.pieces.take(np.flatnonzero(self.usable > 0)))

    @cached_property
    def first(self) -> Ints:
        """Number of the first sequence of each piece, and the number of all sequences."""
        counts = -(-np.maximum(0, self.usable - self.seq) // self.stride) + 1
        counts = np.minimum(counts, -(-self.usable // self.stride))  # for strides that leave gaps
        return np.concatenate([[0], np.cumsum(counts)])

    @property
    def usable(self) -> Ints:
        """Steps of each piece that have a target."""
        return self.pieces.steps - self.ahead

    @property
    def total(self) -> int:
        """Sequences before any was dropped."""
        return int(self.first[-1])

    def __len__(self) -> int:
        return self.total if self.kept is None else len(self.kept)

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        """First row, steps and series of a sequence."""
        number = index if self.kept is None else int(self.kept[index])
        piece = int(np.searchsorted(self.first, number, side="right")) - 1
        offset = (number - int(self.first[piece])) * self.stride
        start = int(self.pieces.starts[piece]) + offset
        steps = int(self.pieces.stops[piece]) - self.ahead - start
        return start, min(self.seq, steps), int(self.pieces.series[piece])

    def lengths(self) -> Ints:
        steps = np.full(self.total, self.seq, dtype=np.int64)  # all windows are full but the last of each piece
        last = (np.diff(self.first) - 1) * self.stride
        steps[self.first[1:] - 1] = np.minimum(self.seq, self.usable - last)
        return steps if self.kept is None else steps[self.kept]

    def without(self, rows: Ints) -> "Cuts":
        """Only the sequences that have none of these rows (ascending), neither as input nor as target."""
        counts = np.diff(self.first)
        offsets = (np.arange(self.total) - np.repeat(self.first[:-1], counts)) * self.stride
        starts = np.repeat(self.pieces.starts, counts) + offsets
        clean = np.searchsorted(rows, starts) == np.searchsorted(rows, starts + self.lengths() + self.ahead)
        return replace(self, kept=np.flatnonzero(clean))


def split_in_blocks(piece: Pieces, share: float, seed: int, least: int) -> tuple[Pieces, Pieces]:
    """One long series in blocks of at least `least` rows, some for validation. Adjacent blocks become one piece."""
    start, stop, series = (int(part[0]) for part in piece)
    count = min(MAX_BLOCKS, (stop - start) // least)
    if count < 2:
        raise MisuseError(
            rule=f"A series that is split must have at least two blocks of {least:,} rows",
            got=f"it has {stop - start:,} rows",
            advice="Set --validation 0, or give validation data of its own.",
        )
    bounds = start + (stop - start) * np.arange(count + 1) // count
    validates = np.zeros(count, dtype=bool)
    validates[chosen_share(count, share, seed)[0]] = True
    turns = np.concatenate([[0], np.flatnonzero(validates[1:] != validates[:-1]) + 1, [count]])
    runs = Pieces(bounds[turns[:-1]], bounds[turns[1:]], np.full(len(turns) - 1, series))
    side = validates[turns[:-1]]
    return runs.take(np.flatnonzero(~side)), runs.take(np.flatnonzero(side))


def chosen_share(count: int, share: float, seed: int) -> tuple[Ints, Ints]:
    """A random share of the numbers from 0 to `count` - 1 (at least one, not all), and the rest, both ascending."""
    if count < 2:
        raise MisuseError(
            rule="Data that is split by series must have at least two",
            got=f"it has {count}",
            advice="Set --validation 0, or --split time.",
        )
    order = shuffled(count, (seed, 0))
    size = min(count - 1, max(1, round(count * share)))
    return np.sort(order[:size]), np.sort(order[size:])


class Position(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where training is in the data: all that a checkpoint needs to continue from there."""

    epoch: Annotated[int, Bounds(0, 1 << 40)] = 0  # number of the pass through the data, from 0
    done: Annotated[int, Bounds(0, 1 << 40)] = 0  # batches of this epoch that are done

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """The order of all sequences in every epoch, a function of (seed, epoch) alone.

    A batch holds sequences of one bucket. What remains of the buckets fills further batches, neighbouring buckets
    first. Every batch is full, except perhaps the last one of an epoch, which is kept.
    """

    lengths: Ints  # time steps of each sequence
    buckets: Mapping[int, int]
    """Length of the longest sequence of each bucket -> its microbatch: the rows of a pass that the plan has measured.
    Shorter sequences do not get more rows, since some memory is per row, not per step."""
    batch: int  # sequences of an optimizer step
    seed: int = 0

    def __post_init__(self) -> None:
        for bound, microbatch in self.buckets.items():
            check_whole("longest of a bucket", bound, 1, MAX_SEQ, optional=False)
            check_whole("microbatch", microbatch, 1, 1 << 20, optional=False)
        longest, most = int(self.lengths.max(initial=0)), max(self.buckets, default=0)
        if longest > most:
            raise MisuseError(
                rule="The largest bucket must hold the longest sequence",
                got=f"it holds {most:,} steps, and sequence {int(self.lengths.argmax()):,} has {longest:,}",
                advice="Make a plan for this data (oomguard plan --data), or cut the data.",
            )

    @cached_property
    def bounds(self) -> Ints:
        """Length of the longest sequence of each bucket, ascending."""
        return np.array(sorted(self.buckets), dtype=np.int64)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return -(-len(self.lengths) // self.batch)

    def epoch(self, epoch: int) -> Ints:
        """Every sequence once, in the order of one pass through the data: each run of `batch` sequences is a batch."""
        bucket_of = self.bucket_of(np.arange(len(self.lengths)))
        full, rest = [], []
        for bucket in range(len(self.bounds)):
            members = np.flatnonzero(bucket_of == bucket)
            members = members[shuffled(len(members), (self.seed, epoch, bucket))]
            whole = len(members) // self.batch * self.batch
            full.append(members[:whole])
            rest.append(members[whole:])
        order, count = np.concatenate([*full, *rest]), len(self.lengths) // self.batch
        turns = shuffled(count, (self.seed, epoch, len(self.bounds)))
        end = count * self.batch
        order[:end] = order[:end].reshape(count, self.batch)[turns].ravel()
        return order

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[int, Ints]]:
        """Number and sequences of each batch of an epoch, from batch `start` on."""
        order = self.epoch(epoch)
        for number in range(start, len(self)):
            yield number, order[number * self.batch : (number + 1) * self.batch]

    def bucket_of(self, sequences: Ints) -> Ints:
        """The number of the smallest bucket that holds each of these sequences."""
        return np.searchsorted(self.bounds, self.lengths[sequences])

    def microbatches(self, sequences: Ints) -> list[Ints]:
        """A batch cut into microbatches of one bucket each, the longest sequences first, so that padding is short."""
        ranked = sequences[np.argsort(-self.lengths[sequences], kind="stable")]
        bucket_of, parts = self.bucket_of(ranked), []
        for bucket in np.unique(bucket_of)[::-1]:
            members, rows = ranked[bucket_of == bucket], self.buckets[int(self.bounds[bucket])]
            parts += [members[start : start + rows] for start in range(0, len(members), rows)]
        return parts


def shuffled(count: int, seeds: tuple[int, ...]) -> Ints:
    """The numbers from 0 to `count` - 1 in a random order.

    They are sorted by the raw bits of a generator, which NumPy promises to keep from version to version, unlike
    `permutation`: a run may be resumed with another version.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)
