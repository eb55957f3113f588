"""Rows of converted tables: brought together by series, sorted by time, and missing values filled."""

import os
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oomguard._data.source import Array, Ints, Mapped, release_pages

CHUNK_ROWS = 1 << 16  # rows that are moved at a time when series are brought together
GAP = 1.5  # a gap is longer than this many usual intervals: months differ by less, a missing row makes it 2


class Times(NamedTuple):
    """Facts about the times of a table's rows, for messages."""

    sorted: bool  # whether the rows came in the order of their times
    interval: float  # most common time between two rows of a series
    gaps: int  # number of longer times
    longest: float  # the longest of them
    repeated: int  # rows that have the time of the row before


def group_rows(paths: list[Path], codes_path: Path, series: int) -> Ints:
    """Sort the rows of `.npy` files by series, and return the borders. `codes` has each row's series and is removed."""
    codes = Mapped.npy(codes_path)
    counts, last, in_order = np.zeros(series, dtype=np.int64), 0, True
    for _, block in codes.blocks():
        counts += np.bincount(block, minlength=series)
        in_order = in_order and bool((np.diff(block, prepend=last) >= 0).all())
        last = int(block[-1])
    borders = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    for path in () if in_order else paths:
        _scatter(path, codes, borders[:-1].copy())
    codes_path.unlink()
    return borders


def _scatter(path: Path, codes: Mapped, cursors: Ints) -> None:
    """Write every row to the next free place of its series."""
    rows, grouped_path = Mapped.npy(path), path.with_suffix(".grouped")
    grouped = np.lib.format.open_memmap(grouped_path, "w+", rows.array.dtype, rows.array.shape)
    for start in range(0, len(grouped), CHUNK_ROWS):
        block = codes.rows(start, CHUNK_ROWS)
        by_series = np.argsort(block, kind="stable")
        present, firsts, counts = np.unique(block[by_series], return_index=True, return_counts=True)
        ranks = np.arange(len(block)) - np.repeat(firsts, counts)
        grouped[np.repeat(cursors[present], counts) + ranks] = rows.rows(start, CHUNK_ROWS)[by_series]
        cursors[present] += counts
        release_pages(grouped)
    grouped.flush()
    os.replace(grouped_path, path)


def sort_by_time(paths: list[Path], times_path: Path, borders: Ints) -> Times:
    """Sort the rows of each series in `.npy` files by their times, which stay in the order of the file if equal."""
    times: NDArray[np.float64] = np.load(times_path)
    series = np.repeat(np.arange(len(borders) - 1), np.diff(borders))
    within = series[1:] == series[:-1]
    in_order = bool((np.diff(times)[within] >= 0).all())
    if not in_order:
        order = np.lexsort((times, series))
        times = times[order]
        for path in paths:
            _take(path, order)
    steps = np.diff(times)[within]
    lengths, counts = np.unique(steps[steps > 0], return_counts=True)
    interval = float(lengths[counts.argmax()]) if len(lengths) else 0.0
    gaps = lengths > GAP * interval
    longest = float(lengths[-1]) if gaps.any() else 0.0
    return Times(in_order, interval, int(counts[gaps].sum()), longest, int(np.count_nonzero(steps == 0)))


def _take(path: Path, order: Ints) -> None:
    """Rewrite the rows of a file in another order."""
    rows, sorted_path = Mapped.npy(path), path.with_suffix(".sorted")
    taken = np.lib.format.open_memmap(sorted_path, "w+", rows.array.dtype, rows.array.shape)
    for start in range(0, len(order), CHUNK_ROWS):
        taken[start : start + CHUNK_ROWS] = rows.array[order[start : start + CHUNK_ROWS]]
        release_pages(taken)
    taken.flush()
    os.replace(sorted_path, path)


def fill_forward(path: Path, borders: Ints) -> None:
    """Replace NaN by the last number before it in the same series, and at its start by the first number after it."""
    rows: Array = np.lib.format.open_memmap(path, "r+")
    for start, stop in pairwise(borders.tolist()):
        block = rows[start:stop]
        known = ~np.isnan(block)
        if known.all():
            continue
        places = np.where(known, np.arange(len(block))[:, None], -1)
        last = np.maximum.accumulate(places, axis=0)
        first = known.argmax(axis=0)  # 0 in a column without any number, which stays NaN
        block[:] = np.take_along_axis(block, np.where(last < 0, first, last), axis=0)
