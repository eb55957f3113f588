"""What a source of sequences is, and its arrays in files: mapped into memory instead of read whole, and converted once.

What is converted is in a directory of `.npy` files, complete or not there at all. They are not Arrow IPC files: a
window may cross their record batches, and reading them would bring pyarrow (26 MiB) into the training and each of its
workers.
"""

import hashlib
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from oomguard._core.errors import MisuseError
from oomguard._core.system import file_errors

Array = NDArray[Any]
Ints = NDArray[np.int64]
Pair = tuple[Array, Array]
"""Inputs (steps x features in float32, or tokens in int64) and targets (for each step, or for the sequence)."""
Places = tuple[int, ...] | None
"""Columns of an array that are read; None: all."""
Convert = Callable[[Path], dict[str, Any]]
"""Writes arrays into a directory, and returns what a reader must know besides."""

CHUNK_ELEMENTS = 1 << 20
"""Elements that are looked at together when a whole file is scanned."""
CHUNK_ROWS = 1 << 16
"""Rows that are moved at a time when series are brought together."""
PRINT_BYTES = 1 << 20
"""Bytes of each end of a file or array that its fingerprint covers."""
RESIDENT_BYTES = 4 << 20
"""Bytes read from a mapped file after which its pages are released."""
VERSION = 3
"""Version of the layout of converted files. Data with another one is converted again."""


class Source(Protocol):
    """Sequences that can be read one by one, in any order, from any process; pickling it does not copy the data."""

    @property
    def lengths(self) -> Ints:
        """Time steps of each sequence."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Pair: ...

    def describe(self) -> dict[str, Any]:
        """What was read, how large it is and how many sequences it gives, as plain values for a checkpoint."""


def let_go(content: mmap.mmap) -> None:
    """Release the pages of a mapped file, which would count as memory of this process. Its content is not lost."""
    if hasattr(mmap, "MADV_DONTNEED"):
        content.madvise(mmap.MADV_DONTNEED)


@dataclass(eq=False)
class Mapped:
    """An array in a file, mapped when it is first read and anew in every process: pickling copies only its path.

    Rows are counted over all series, whatever the shape.
    """

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int = 0
    order: Literal["C", "F"] = "C"
    unit: str = "row"
    """What messages call a row."""
    held: Array | None = None
    """The array, if it is in memory instead of in a file."""
    group: int | None = None
    """Steps of a series, if the first axis counts series and the second their steps."""
    _array: Array | None = field(default=None, init=False)
    _map: mmap.mmap | None = field(default=None, init=False)
    _read_bytes: int = field(default=0, init=False)

    @classmethod
    def of(cls, array: "np.memmap[Any, Any]") -> "Mapped":
        """The file that a whole `np.memmap` maps."""
        order: Literal["C", "F"] = "C" if array.flags.c_contiguous else "F"
        return cls(str(array.filename), array.dtype, array.shape, array.offset, order)

    @classmethod
    def npy(cls, path: Path) -> "Mapped":
        """A `.npy` file, by its header."""
        return replace(cls.of(np.lib.format.open_memmap(path, mode="r")), path=str(path))  # as given, not resolved

    @property
    def array(self) -> Array:
        """The whole array; a view of the mapped file, of which nothing is read yet."""
        if self.held is not None:
            return self.held
        if self._array is None:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._array = np.ndarray(self.shape, self.dtype, self._map, self.offset, order=self.order)
        return self._array

    @property
    def count(self) -> int:
        """Rows of all series together."""
        return self.shape[0] * (self.group or 1)

    def rows(self, start: int, steps: int) -> Array:
        """Some rows of one series, as a view."""
        if self.group is None:
            block = self.array[start : start + steps]
        else:
            series, first = divmod(start, self.group)
            block = self.array[series, first : first + steps]
        if self._map is not None and self._read_bytes > RESIDENT_BYTES:
            self._read_bytes = 0
            let_go(self._map)
        self._read_bytes += block.nbytes
        return block

    def blocks(self) -> Iterator[tuple[int, Array]]:
        """All rows, some at a time, each block with the number of its first row."""
        width = int(np.prod(self.shape[2 if self.group else 1 :])) or 1
        most, end = max(1, CHUNK_ELEMENTS // width), self.group or self.count
        for series in range(self.shape[0] if self.group else 1):
            for first in range(0, end, most):
                yield series * end + first, self.rows(series * end + first, min(most, end - first))

    def where(self, row: int, column: int) -> str:
        """The place of a value, for messages."""
        if self.group is None:
            place, axes = f"{self.path}, {self.unit} {row:,}", 1
        else:
            place, axes = f"{self.path}, sequence {row // self.group:,}, step {row % self.group:,}", 2
        return f"{place}, column {column}" if len(self.shape) > axes else place

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_array": None, "_map": None, "_read_bytes": 0}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Store:
    """An opened file: where its numbers are and what they mean. None of them is read yet."""

    inputs: Mapped
    """A row for each step."""
    targets: Mapped
    """A row for each step, or for each series. May be the inputs."""
    borders: Ints
    """The row at which each series begins, and the row at which the last ends."""
    long: bool
    """Whether it is one long series, to be cut into windows."""
    input_columns: Places = None
    target_columns: Places = None
    ahead: int = 0
    """Steps that a target lies ahead of its inputs."""
    per_series: bool = False
    """Whether `targets` has a row for each series instead of for each step."""
    nan_rows: Ints | None = None
    """Rows with a NaN, ascending; None: not searched for."""
    checked: bool = False
    """Whether every value was checked when the file was opened."""
    first_row: int = 0
    """Number of the first row, as messages count them."""
    ids: Path | None = None
    """The file with the id of each series; None: series have none."""
    places: Mapped | None = None
    """Number of each row in the user's file; None: the rows are in the order of that file."""
    about: dict[str, Any]
    """What `Source.describe` says of the file."""


def fingerprint(*data: Path | Array) -> str:
    """A hash of both ends of files or arrays, to recognise them: large ones take no longer than small ones.

    >>> fingerprint(np.zeros(3)) == fingerprint(np.zeros(3)), fingerprint(np.zeros(3)) == fingerprint(np.ones(3))
    (True, False)
    """
    digest = hashlib.sha256()
    for part in data:
        if isinstance(part, Path):
            with part.open("rb") as file:
                digest.update(file.read(PRINT_BYTES))
                file.seek(max(file.tell(), part.stat().st_size - PRINT_BYTES))
                digest.update(file.read())
        else:
            count = PRINT_BYTES // part.itemsize
            for end in (part.flat[:count], part.flat[-count:]):  # copies no more, whatever the order in memory
                digest.update(end.tobytes())
    return digest.hexdigest()[:16]


def no_data(path: object) -> MisuseError:
    """The error for data without a single sequence."""
    return MisuseError(
        rule="Data must have at least one step to learn from", got=f"{path} has none", advice="Give another file."
    )


def unreadable(path: object, error: Exception) -> MisuseError:
    """The error for a file that cannot be opened, or that is not what its name says."""
    why = getattr(error, "strerror", None) or str(error)
    return MisuseError(
        rule="A data file must be whole and readable", got=f"{path} is not ({why})", advice="Check the file."
    )


def cached(path: Path, directory: str | None, settings: Any, convert: Convert) -> tuple[Path, dict[str, Any]]:
    """The directory with the converted file, and what `convert` returned; converted again if the file has changed.

    `settings` is all that the conversion depends on. It is done under another name and renamed once it is complete, so
    that a conversion that is killed, or two at the same time, leave no incomplete one.
    """
    stat = path.stat()
    state = {"version": VERSION, "bytes": stat.st_size, "changed": stat.st_mtime_ns}
    key = hashlib.sha256(json.dumps([str(path.resolve()), settings], sort_keys=True).encode()).hexdigest()[:16]
    base = Path(directory) if directory else path.parent
    home = base / f"{path.name}.{key}.oomguard"
    about = _read_about(home, state)
    if about is None:
        with writable(base):
            about = _convert_into(home, state, convert)
    return home, about


def _convert_into(home: Path, state: dict[str, Any], convert: Convert) -> dict[str, Any]:
    hidden = tempfile.TemporaryDirectory(".oomguard", prefix=".", dir=home.parent, ignore_cleanup_errors=True)
    with hidden as fresh:
        about = convert(Path(fresh))
        Path(fresh, "about.json").write_text(json.dumps({"state": state, "about": about}))
        if _read_about(home, state) is None:  # otherwise another process was first, and may use it already
            shutil.rmtree(home, ignore_errors=True)
            try:
                os.replace(fresh, home)
            except OSError:
                if _read_about(home, state) is None:
                    raise
    return about


def _read_about(home: Path, state: dict[str, Any]) -> dict[str, Any] | None:
    """What the conversion of a file returned; None if there is none of the file in this state."""
    try:
        kept = json.loads((home / "about.json").read_text())
    except (OSError, ValueError):
        return None
    return kept["about"] if kept.get("state") == state else None


@contextmanager
def writable(base: Path) -> Iterator[None]:
    """Make a directory for converted data, and turn an OSError in it into an error for the user."""
    with file_errors("Data that is converted once needs a directory", base, "Name another one as --cache."):
        base.mkdir(parents=True, exist_ok=True)
        yield


class Appended(AbstractContextManager["Appended"]):
    """A `.npy` file that grows by rows of `width` numbers in float32, or of one index (None), usually in int64."""

    def __init__(self, path: Path, width: int | None = None, index: DTypeLike = np.int64) -> None:
        self.path, self.dtype, self.width, self.rows = path, np.dtype(index if width is None else np.float32), width, 0
        self._file = open(path, "wb")  # noqa: SIM115 (`with` closes it)
        self._write_header()

    def _write_header(self) -> None:
        shape = (self.rows,) if self.width is None else (self.rows, self.width)
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)  # pads it, so that the number of rows may grow

    def append(self, block: Array) -> None:
        self._file.write(np.ascontiguousarray(block, dtype=self.dtype).tobytes())
        self.rows += len(block)

    def __exit__(self, *_: object) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()


def group_rows(paths: list[Path], codes_path: Path, series: int) -> Ints:
    """Bring the rows of each series together in `.npy` files, in their order, and return the borders of the series.

    The codes are the number of each row's series, and are removed. Rows are moved in chunks, so that memory holds a few
    of them, however many there are.
    """
    codes = Mapped.npy(codes_path)
    counts, last, in_order = np.zeros(series, dtype=np.int64), 0, True
    for _, block in codes.blocks():
        counts += np.bincount(block, minlength=series)
        in_order = in_order and block[0] >= last and bool((np.diff(block) >= 0).all())
        last = int(block[-1])
    borders = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    if not in_order:
        for path in paths:
            _scatter(path, codes, borders[:-1].copy())
    codes_path.unlink()
    return borders


def _scatter(path: Path, codes: Mapped, cursors: Ints) -> None:
    """Write every row to the next free place of its series."""
    array, grouped_path = Mapped.npy(path), path.with_suffix(".grouped")
    grouped = np.lib.format.open_memmap(grouped_path, "w+", array.dtype, array.shape)
    pages: Any = grouped.base  # a mmap, though NumPy declares it as an array
    for start in range(0, array.count, CHUNK_ROWS):
        block = codes.rows(start, min(CHUNK_ROWS, array.count - start))
        by_series = np.argsort(block, kind="stable")
        present, firsts, counts = np.unique(block[by_series], return_index=True, return_counts=True)
        ranks = np.arange(len(block)) - np.repeat(firsts, counts)
        grouped[np.repeat(cursors[present], counts) + ranks] = array.rows(start, len(block))[by_series]
        cursors[present] += counts
        let_go(pages)
    grouped.flush()
    os.replace(grouped_path, path)
