"""Pieces of series, and how sequences are cut from them: arithmetic on row numbers, nothing is read.

Rows of all series are counted through. A piece is a run of rows of one series; by a split, pieces go to one side or
the other, and sequences are cut within each piece only. So no row is on both sides.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from oomguard.data.source import Ints
from oomguard.errors import MisuseError

BLOCKS = 100
"""Blocks that one long series is split in at most: as even a choice as a share of 1 % needs."""


class Pieces(NamedTuple):
    """Runs of rows."""

    starts: Ints
    stops: Ints
    series: Ints
    """The number of the series that each is from."""

    def take(self, chosen: Ints) -> "Pieces":
        """Some of them."""
        return Pieces(*(one[chosen] for one in self))


def whole(borders: Ints) -> Pieces:
    """All series, each a piece, from the rows at which they begin and the row at which the last ends."""
    return Pieces(borders[:-1], borders[1:], np.arange(len(borders) - 1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cuts:
    """Sequences cut from pieces. Where one begins is computed when asked, so that a window costs no memory.

    >>> cuts = Cuts(pieces=whole(np.array([0, 10, 13])), ahead=1, seq=4, stride=4)
    >>> [cuts[i] for i in range(len(cuts))]
    [(0, 4, 0), (4, 4, 0), (8, 1, 0), (10, 2, 1)]
    """

    pieces: Pieces
    ahead: int
    """Rows at the end of a piece that are targets only."""
    seq: int | None = None
    """Steps of a window, the last of a piece may be shorter; None: a piece is one sequence."""
    stride: int = 1
    """Steps from window to window."""
    kept: Ints | None = None
    """Numbers of the sequences that were not dropped; None: all are there."""
    first: Ints = field(init=False)
    """Number of the first sequence of each piece, and how many there are."""

    def __post_init__(self) -> None:
        pieces = self.pieces.take(np.flatnonzero(self.pieces.stops - self.pieces.starts > self.ahead))
        object.__setattr__(self, "pieces", pieces)
        counts = np.ones(len(pieces.starts), dtype=np.int64)
        if self.seq is not None:
            over = -(-np.maximum(0, self.usable - self.seq) // self.stride) + 1
            counts = np.minimum(over, -(-self.usable // self.stride))  # the second: strides that leave gaps
        object.__setattr__(self, "first", np.concatenate([[0], np.cumsum(counts)]))

    @property
    def usable(self) -> Ints:
        """Steps of each piece that have a target."""
        return self.pieces.stops - self.pieces.starts - self.ahead

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
        steps = int(self.pieces.stops[piece] - self.pieces.starts[piece]) - self.ahead - offset
        start = int(self.pieces.starts[piece]) + offset
        return start, steps if self.seq is None else min(self.seq, steps), int(self.pieces.series[piece])

    def lengths(self) -> Ints:
        """Steps of all sequences."""
        if self.seq is None:
            found = self.usable
        else:  # all are full but the last of each piece
            found = np.full(self.total, self.seq, dtype=np.int64)
            last = (np.diff(self.first) - 1) * self.stride
            found[self.first[1:] - 1] = np.minimum(self.seq, self.usable - last)
        return found if self.kept is None else found[self.kept]

    def without(self, rows: Ints) -> "Cuts":
        """Only the sequences that do not touch one of these rows (in order), be it as input or as target."""
        counts = np.diff(self.first)
        offsets = (np.arange(self.total) - np.repeat(self.first[:-1], counts)) * self.stride
        starts = np.repeat(self.pieces.starts, counts) + offsets
        clean = np.searchsorted(rows, starts) == np.searchsorted(rows, starts + self.lengths() + self.ahead)
        return Cuts(pieces=self.pieces, ahead=self.ahead, seq=self.seq, stride=self.stride, kept=np.flatnonzero(clean))


def shorten(pieces: Pieces, most: int, ahead: int, *, keep_end: bool) -> tuple[Pieces, int]:
    """Pieces of at most so many steps, their first or their last, and how many were longer."""
    surplus = np.maximum(0, pieces.stops - pieces.starts - ahead - most)
    starts, stops = (pieces.starts + surplus, pieces.stops) if keep_end else (pieces.starts, pieces.stops - surplus)
    return Pieces(starts, stops, pieces.series), int(np.count_nonzero(surplus))


def split_by_time(pieces: Pieces, share: float) -> tuple[Pieces, Pieces]:
    """The first steps of every piece, and its last."""
    middle = pieces.stops - np.rint((pieces.stops - pieces.starts) * share).astype(np.int64)
    return Pieces(pieces.starts, middle, pieces.series), Pieces(middle, pieces.stops, pieces.series)


def split_by_series(pieces: Pieces, share: float, seed: int) -> tuple[Pieces, Pieces]:
    """Some pieces, and the others, each in order."""
    last, rest = chosen_share(len(pieces.starts), share, seed)
    return pieces.take(rest), pieces.take(last)


def split_in_blocks(piece: Pieces, share: float, seed: int, least: int) -> tuple[Pieces, Pieces]:
    """One long series in blocks of at least so many rows, some for validation. Blocks side by side are one piece."""
    start, stop, series = (int(one[0]) for one in piece)
    count = min(BLOCKS, (stop - start) // least)
    if count < 2:
        raise MisuseError(
            rule=f"A series that is split must have at least two blocks of {least:,} rows",
            got=f"it has {stop - start:,} rows",
            advice="Set --validation 0, or give validation data of its own.",
        )
    bounds = start + (stop - start) * np.arange(count + 1) // count
    last, _ = chosen_share(count, share, seed)
    side = np.zeros(count, dtype=bool)
    side[last] = True
    turns = np.concatenate([[0], np.flatnonzero(side[1:] != side[:-1]) + 1, [count]])
    runs = Pieces(bounds[turns[:-1]], bounds[turns[1:]], np.full(len(turns) - 1, series))
    return runs.take(np.flatnonzero(~side[turns[:-1]])), runs.take(np.flatnonzero(side[turns[:-1]]))


def chosen_share(count: int, share: float, seed: int) -> tuple[Ints, Ints]:
    """A random share of so many numbers (at least one, and not all), and the rest, both in order.

    >>> [one.tolist() for one in chosen_share(5, 0.2, seed=1)]
    [[2], [0, 1, 3, 4]]
    """
    if count < 2:
        raise MisuseError(
            rule="Data that is split by series must have at least two",
            got=f"it has {count}",
            advice="Set --validation 0, or --split time.",
        )
    order = shuffled(count, (seed, 0))
    some = min(count - 1, max(1, round(count * share)))
    return np.sort(order[:some]), np.sort(order[some:])


def shuffled(count: int, seeds: tuple[int, ...]) -> Ints:
    """The numbers from 0 in a random order.

    By sorting the raw bits of a generator: NumPy promises those to stay the same from version to version, which it
    does not of `permutation`, and a run may be resumed with another version.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)
