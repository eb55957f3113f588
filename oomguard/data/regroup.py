"""Rows of one series brought together, wherever they stood: out of core, by counting first and scattering then."""

import os
from typing import Any

import numpy as np

from oomguard.data.cache import Appended
from oomguard.data.source import Array, Ints, Mapped, let_go, map_file

CHUNK_ROWS = 1 << 16
"""Rows that are moved at a time."""


class Regrouped:
    """The series and the place of every row, on the disk: series as numbers in the order in which they come up.

    Only the ids themselves, each once, are in memory.
    """

    def __init__(self, codes: Appended, places: Appended) -> None:
        self.numbers: dict[Any, int] = {}
        self.codes, self.places = codes, places

    def append(self, coded: tuple[Array, list[Any]], first: int) -> None:
        """Rows more: for each the number of its id in a list; and the number of the first of them in the file."""
        listed, ids = coded
        numbers = [self.numbers.setdefault(one, len(self.numbers)) for one in ids]
        self.codes.append(np.array(numbers, dtype=np.int64)[listed])
        self.places.append(np.arange(first, first + len(listed)))


def regroup(groups: Regrouped, arrays: list[Mapped]) -> Ints:
    """Order the rows of the arrays and their places, in their files, by series; within one they stay in order.

    All of them must have been written and closed. Returns the borders.
    """
    codes, total = groups.codes.mapped(), len(groups.numbers)
    counts, last, in_order = np.zeros(total, dtype=np.int64), 0, True
    for _, block in codes.blocks():
        counts += np.bincount(block, minlength=total)
        in_order = in_order and block[0] >= last and bool((np.diff(block) >= 0).all())
        last = int(block[-1])
    borders = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    if not in_order:
        for array in (*arrays, groups.places.mapped()):
            _scatter(array, codes, borders[:-1].copy())
    os.unlink(codes.path)
    return borders


def _scatter(array: Mapped, codes: Mapped, cursors: Ints) -> None:
    """Write every row to the next free place of its series, a chunk at a time."""
    path = array.path + ".grouped"
    with open(path, "wb") as file:
        file.truncate(array.array.nbytes)
    content = map_file(path, write=True)
    to = np.ndarray(array.shape, array.dtype, content)
    for start in range(0, array.count, CHUNK_ROWS):
        block = codes.rows(start, min(CHUNK_ROWS, array.count - start))
        by_series = np.argsort(block, kind="stable")
        present, firsts, counts = np.unique(block[by_series], return_index=True, return_counts=True)
        ranks = np.arange(len(block)) - np.repeat(firsts, counts)
        places = np.repeat(cursors[present], counts) + ranks
        to[places] = array.rows(start, len(block))[by_series]
        cursors[present] += counts
        let_go(content)
    content.flush()
    os.replace(path, array.path)
