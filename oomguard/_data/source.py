"""Arrays in files: mapped into memory instead of read whole, and converted once. Also the checks of their values, with
the place of a wrong one.

What is converted is in a directory of `.npy` files, complete or not there at all. They are not Arrow IPC files: a
window may cross their record batches, and reading them would bring pyarrow (26 MiB) into the training and each of its
workers.
"""

import hashlib
import json
import math
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from oomguard._core.errors import MisuseError
from oomguard._core.system import file_errors
from oomguard._data.options import Nan
from oomguard._spec.spec import Spec

Array = NDArray[Any]
Ints = NDArray[np.int64]
Pair = tuple[Array, Array]
"""Inputs (steps x features in float32, or tokens in int64) and targets (for each step, or for the sequence)."""

Locate = Callable[[int, int], str]  # the place of a value, from its row in the block and its column

MISSING = np.iinfo(np.int64).min  # what stands for NaN among tokens and classes, which are whole numbers
CHUNK_ELEMENTS = 1 << 20  # elements that are looked at together when a whole file is scanned
PRINT_BYTES = 1 << 20  # bytes of each end of a file or array that its fingerprint covers
RESIDENT_BYTES = 4 << 20  # bytes read from a mapped file after which its pages are released
CONVERTED = re.compile(r".+\.[0-9a-f]{16}\.oomguard")  # name of a folder with the converted data of a file
VERSION = 3  # Version of the layout of converted files. Data with another one is converted again.


def release_pages(array: Array) -> None:
    """Release the pages of a mapped file, which would count as memory of this process. Its content is not lost."""
    pages: object = array.base  # NumPy declares it as an array
    if isinstance(array, np.memmap) and isinstance(pages, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)


@dataclass(eq=False)
class Mapped:
    """Rows of an array, counted over all series. If it is mapped from a file, pickling copies none of its content."""

    array: Array
    path: str  # what messages call the array
    unit: str = "row"  # what messages call a row
    grouped: bool = False  # whether the first axis counts series and the second their steps
    columns: tuple[int, ...] | None = None  # columns that are read; None: all
    _read_bytes: int = field(default=0, init=False)

    @classmethod
    def npy(cls, path: Path) -> "Mapped":
        """A `.npy` file, of which no more than the header is read yet."""
        return cls(np.lib.format.open_memmap(path, mode="r"), str(path))

    def rows(self, start: int, steps: int) -> Array:
        """Some rows of one series, as a view if the columns are neighbours."""
        if self._read_bytes > RESIDENT_BYTES:
            self._read_bytes = 0
            release_pages(self.array)
        array = self.array
        if self.grouped:
            series, start = divmod(start, array.shape[1])
            array = array[series]
        block = array[start : start + steps]
        self._read_bytes += block.nbytes
        if self.columns is None:
            return block
        first, end = self.columns[0], self.columns[-1] + 1
        if self.columns == tuple(range(first, end)):
            return block[:, first:end]
        return block[:, list(self.columns)]

    def values(self, start: int, steps: int, index: "Index | None", nan: Nan) -> Array:
        """Some rows of one series as the model takes them, checked."""
        return as_values(self.rows(start, steps), index, nan, lambda row, *at: self.where(start + row, *at))

    def blocks(self) -> Iterator[tuple[int, Array]]:
        """All rows, some at a time, each block with the number of its first row."""
        series, steps, *width = self.array.shape if self.grouped else (1, *self.array.shape)
        most = max(1, CHUNK_ELEMENTS // math.prod(width))
        for first in (number * steps + step for number in range(series) for step in range(0, steps, most)):
            yield first, self.rows(first, min(most, steps - first % steps))

    def where(self, row: int, column: int) -> str:
        """The place of a value, for messages."""
        place = f"{self.unit} {row:,}"
        if self.grouped:
            series, step = divmod(row, self.array.shape[1])
            place = f"sequence {series:,}, step {step:,}"
        if self.array.ndim > 1 + self.grouped:
            place += f", column {column if self.columns is None else self.columns[column]}"
        return f"{self.path}, {place}"

    def __getstate__(self) -> dict[str, Any]:
        array = self.array
        if not isinstance(array, np.memmap):
            return self.__dict__
        order = "C" if array.flags.c_contiguous else "F"
        how = (array.filename, array.dtype, "r", array.offset, array.shape, order)
        return self.__dict__ | {"array": how, "_read_bytes": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        how = state["array"]
        self.__dict__ |= state | ({"array": np.memmap(*how)} if isinstance(how, tuple) else {})


def fingerprint(*data: Path | Array) -> str:
    """A hash of both ends of files or arrays, to recognise them: large ones take no longer than small ones."""
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


def cached(
    path: Path, directory: str | None, settings: object, convert: Callable[[Path], dict[str, Any]]
) -> tuple[Path, dict[str, Any]]:
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
    if about is not None:
        return home, about
    with (
        writable(base),
        tempfile.TemporaryDirectory(".oomguard", prefix=".", dir=base, ignore_cleanup_errors=True) as fresh,
    ):
        about = convert(Path(fresh))
        Path(fresh, "about.json").write_text(json.dumps({"state": state, "about": about}))
        if _read_about(home, state) is None:  # otherwise another process was first, and may use it already
            shutil.rmtree(home, ignore_errors=True)
            try:
                os.replace(fresh, home)
            except OSError:
                if _read_about(home, state) is None:
                    raise
    return home, about


def _read_about(home: Path, state: dict[str, int]) -> dict[str, Any] | None:
    """The stored result of a conversion; None if there is none of the file in this state."""
    try:
        kept = json.loads((home / "about.json").read_text())
    except (OSError, ValueError):
        return None
    return kept["about"] if kept.get("state") == state else None


def is_converted(home: Path) -> bool:
    """Whether a folder holds the converted data of a file, which is made again when it is needed."""
    try:
        return {*json.loads((home / "about.json").read_text())} == {"state", "about"}
    except (OSError, ValueError, TypeError):
        return False


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


class Index(NamedTuple):
    """Values that are whole numbers from 0 to `below` - 1: tokens or classes."""

    below: int
    noun: str
    flag: str


def indices(spec: Spec) -> tuple[Index | None, Index | None]:
    """The ranges of the spec's tokens and classes; None: its inputs, or its targets, are numbers."""
    tokens = None if spec.vocab is None else Index(spec.vocab, "A token", "--vocab")
    return tokens, Index(spec.classes, "A target", "--outputs") if spec.loss == "cross-entropy" else None


def as_values(block: Array, index: Index | None, nan: Nan, where: Locate) -> Array:
    """Rows x columns in float32, or tokens or classes in int64; always a copy."""
    if index is not None:
        return _as_indices(np.asarray(block).reshape(len(block)), index, nan, where)
    with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite
        numbers = np.array(block, dtype=np.float32, order="C").reshape(len(block), -1)
    # the fastest test, without a mask; squares may overflow as well
    if nan not in ("drop", "cut") and not isfinite(np.vdot(numbers, numbers)):
        bad = ~np.isfinite(numbers)
        if nan == "error" and bad.any():
            row, column = (int(place) for place in np.argwhere(bad)[0])
            raise wrong_value(where(row, column), numbers[row, column], None)
        numbers[bad] = 0
    return numbers


def _as_indices(values: Array, index: Index, nan: Nan, where: Locate) -> Ints:
    """Int64, all within the range. NaN is an error, or `MISSING` for "drop"; never 0, which is a token too."""
    with np.errstate(invalid="ignore"):  # NaN has no whole number; it is found below
        numbers = values.astype(np.int64)
    if values.dtype.kind in "iub" and (not len(values) or (values.min() >= 0 and values.max() < index.below)):
        return numbers
    bad = (numbers != values) | (numbers < 0) | (numbers >= index.below)
    if nan in ("drop", "cut"):
        gone = ~np.isfinite(values)
        numbers[gone], bad = MISSING, bad & ~gone
    if bad.any():
        row = int(bad.argmax())
        raise wrong_value(where(row, 0), values[row], index)
    return numbers


def wrong_value(place: str, value: Any, index: Index | None, words: str | None = None) -> MisuseError:
    """The error for a number that is not finite (index None), or for what is not a token or a class.

    `words` tell the value.
    """
    if index is None:
        rule, change = (
            "Numbers in the data must be finite",
            "use --fill forward, mean, zero or drop, or --nan cut (sequences around such rows)",
        )
    else:
        rule = f"{index.noun} must be a whole number from 0 to {index.below - 1:,}"
        change = "use --nan drop (leave such sequences out); --nan zero is for numbers only"
        if isfinite(float(value)):
            change = f"change {index.flag}"
    return MisuseError(rule=rule, got=f"{place} is {words or value}", advice=f"Correct the data, or {change}.")
