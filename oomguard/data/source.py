"""What a source is: sequences that can be asked for one by one, in any order, from any process."""

import hashlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oomguard.errors import MisuseError

Array = NDArray[Any]
Ints = NDArray[np.int64]
Pair = tuple[Array, Array]
"""Inputs (steps x features in float32, or tokens in int64), and targets: for each step, or for the sequence."""


class Source(Protocol):
    """Sequences of some data. It can be pickled, or is inherited by a fork, without the data being copied."""

    @property
    def lengths(self) -> Ints:
        """Steps of each sequence, in one array."""

    @property
    def truncated(self) -> int:
        """How many sequences were cut to the spec's length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Pair: ...

    def describe(self) -> dict[str, Any]:
        """Plain values for a checkpoint: what was read, how large it is, how many sequences it gives."""


CHUNK_ELEMENTS = 1 << 20
"""Elements of what is looked at together when a whole file is gone through."""
PRINT_BYTES = 1 << 20
"""Of each end of the data, by which it is known again."""
RESIDENT_BYTES = 4 << 20
"""Of a mapped file: what was read beyond it is let go."""


def map_file(path: str | Path, *, write: bool = False) -> mmap.mmap:
    """A file as memory."""
    with open(path, "r+b" if write else "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ)


def let_go(content: mmap.mmap) -> None:
    """Take the pages out of this process: they would count as its memory, though the system can have them back.

    Nothing is lost: they stay in the system's cache, or are in the file.
    """
    if hasattr(mmap, "MADV_DONTNEED"):
        content.madvise(mmap.MADV_DONTNEED)


class Mapped:
    """An array in a file, mapped when it is first read, and in each process anew: only its path is pickled.

    The first axis of `rows` counts all steps of all series, whatever the shape. An array in memory will do as well.
    """

    _STATE = ("path", "dtype", "shape", "offset", "order", "group", "unit", "_array")
    __slots__ = (*_STATE, "__weakref__", "_map", "_read_bytes")

    def __init__(self, path: str, dtype: Any, shape: tuple[int, ...], offset: int = 0, order: Any = "C") -> None:
        self.path, self.dtype, self.shape, self.offset, self.order = path, np.dtype(dtype), shape, offset, order
        self.group: int | None = None
        self.unit = "row"
        self._array: Array | None = None
        self._map: mmap.mmap | None = None
        self._read_bytes = 0

    @classmethod
    def held(cls, array: Array, name: str = "the array") -> "Mapped":
        """An array that is already there."""
        made = cls(name, array.dtype, array.shape)
        made._array = array
        return made

    def grouped(self) -> "Mapped":
        """The same, with the first axis for series and the second for their steps."""
        made = Mapped(self.path, self.dtype, self.shape, self.offset, self.order)
        made.group, made.unit = self.shape[1], self.unit
        made._array = self._array if self._map is None else None
        return made

    @property
    def array(self) -> Array:
        """The whole, as a map of the file."""
        if self._array is None:
            self._map = map_file(self.path)
            self._array = np.ndarray(self.shape, self.dtype, self._map, self.offset, order=self.order)
        return self._array

    @property
    def count(self) -> int:
        """Rows, of all series together."""
        return self.shape[0] * (self.group or 1)

    def rows(self, start: int, steps: int) -> Array:
        """Some rows of one series: a view, nothing is read yet."""
        if self.group is None:
            found = self.array[start : start + steps]
        else:
            series, first = divmod(start, self.group)
            found = self.array[series, first : first + steps]
        if self._map is not None and self._read_bytes > RESIDENT_BYTES:
            self._read_bytes = 0
            let_go(self._map)
        self._read_bytes += found.nbytes
        return found

    def blocks(self) -> Iterator[tuple[int, Array]]:
        """All rows, a few at a time, each with the number of its first."""
        width = int(np.prod(self.shape[2 if self.group else 1 :])) or 1
        most, end = max(1, CHUNK_ELEMENTS // width), self.group or self.count
        for series in range(self.shape[0] if self.group else 1):
            for first in range(0, end, most):
                yield series * end + first, self.rows(series * end + first, min(most, end - first))

    def where(self, row: int, column: int | str | None = None) -> str:
        """How a message names a place."""
        if self.group is None:
            place = f"{self.path}, {self.unit} {row:,}"
        else:
            place = f"{self.path}, sequence {row // self.group:,}, step {row % self.group:,}"
        flat = len(self.shape) == (1 if self.group is None else 2)  # tokens, in no column
        return place if column is None or flat else f"{place}, column {column}"

    def __getstate__(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in self._STATE}
        if self._map is not None:
            state["_array"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._map, self._read_bytes = None, 0
        for name, value in state.items():
            setattr(self, name, value)


def fingerprint(*data: Path | Array) -> str:
    """By what files or arrays are known again: a hash of both their ends, so that large ones cost no more than small.

    >>> fingerprint(np.zeros(3)) == fingerprint(np.zeros(3)), fingerprint(np.zeros(3)) == fingerprint(np.ones(3))
    (True, False)
    """
    found = hashlib.sha256()
    for one in data:
        for end in _ends(one):
            found.update(end)
    return found.hexdigest()[:16]


def _ends(data: Path | Array) -> Iterator[bytes]:
    """The first bytes and the last."""
    if isinstance(data, Path):
        with data.open("rb") as file:
            yield file.read(PRINT_BYTES)
            file.seek(max(file.tell(), data.stat().st_size - PRINT_BYTES))
            yield file.read()
        return
    count = PRINT_BYTES // data.itemsize
    for end in (data.flat[:count], data.flat[-count:]):  # whatever its order in memory, no more than this is copied
        yield end.tobytes()


def nothing_in(path: object) -> MisuseError:
    """The error for data without a single sequence."""
    return MisuseError(
        rule="Data must have at least one step to learn from", got=f"{path} has none", advice="Give another file."
    )


def unreadable(path: object, error: Exception) -> MisuseError:
    """The error for a file that cannot be opened, or is not what its name says."""
    why = getattr(error, "strerror", None) or str(error)
    return MisuseError(
        rule="A data file must be whole and readable", got=f"{path} is not ({why})", advice="Check the file."
    )
