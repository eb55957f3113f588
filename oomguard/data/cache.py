"""What is converted once and mapped from then on: a directory of raw arrays, whole or not there at all."""

import hashlib
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from oomguard.data.source import Array, Mapped
from oomguard.errors import MisuseError

ABOUT = "about.json"
VERSION = 2
"""Of the layout of the arrays: another one is converted anew."""

Make = Callable[[Path], dict[str, Any]]
"""Writes the arrays into a directory, and says what a reader must know of them."""


def cached(path: Path, directory: str | None, asked: dict[str, Any], make: Make) -> tuple[Path, dict[str, Any]]:
    """The directory with the converted file, and what is known of it; made anew if the file has changed.

    `asked` is all that the conversion depends on. It is made under another name and renamed when it is whole, so a
    conversion that is killed, or two at once, leave no torn one.
    """
    stat = path.stat()
    state = {"version": VERSION, "bytes": stat.st_size, "changed": stat.st_mtime_ns}
    key = hashlib.sha256(json.dumps([str(path.resolve()), asked], sort_keys=True).encode()).hexdigest()[:16]
    base = Path(directory) if directory else path.parent
    home = base / f"{path.name}.{key}.oomguard"
    found = _read(home)
    if found is not None and found["state"] == state:
        return home, found["about"]
    try:
        base.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".oomguard", dir=base))
        try:
            about = make(fresh)
            (fresh / ABOUT).write_text(json.dumps({"state": state, "about": about}))
            _put_in_place(fresh, home, state)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise _unwritable(base, error) from None
    return home, about


def _put_in_place(fresh: Path, home: Path, state: dict[str, Any]) -> None:
    """The new directory under its name, unless another process was first: that one is read by somebody already."""
    if (_read(home) or {}).get("state") == state:
        return
    shutil.rmtree(home, ignore_errors=True)
    try:
        os.replace(fresh, home)
    except OSError:
        if (_read(home) or {}).get("state") != state:
            raise


def _read(home: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((home / ABOUT).read_text())
    except (OSError, ValueError):
        return None
    return found


def _unwritable(base: Path, error: OSError) -> MisuseError:
    return MisuseError(
        rule="There must be a directory for what is converted once",
        got=f"{base} cannot be written ({error.strerror or error})",
        advice="Name another one as --cache.",
    )


def spool_directory(directory: str | None) -> Path:
    """A new directory for data that has no file of its own."""
    try:
        if directory:
            Path(directory).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="oomguard-", dir=directory))
    except OSError as error:
        raise _unwritable(Path(directory or tempfile.gettempdir()), error) from None


def remove_with(owner: Any, directory: Path) -> None:
    """Let a directory go when its owner does, or this process ends."""
    weakref.finalize(owner, _remove, str(directory), os.getpid())


def _remove(directory: str, pid: int) -> None:
    if os.getpid() == pid:  # a forked worker that ends must not take it away from its parent
        shutil.rmtree(directory, ignore_errors=True)


class Appended:
    """An array on the disk that grows by rows; only the rows that come are in memory."""

    def __init__(self, path: Path, dtype: Any, width: int | None) -> None:
        self.path, self.dtype, self.width, self.rows = path, np.dtype(dtype), width, 0
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 (it is closed by `with`)

    def append(self, block: Array) -> None:
        """Rows more, with `width` numbers each (None: one number, without an axis)."""
        self._file.write(np.ascontiguousarray(block, dtype=self.dtype).tobytes())
        self.rows += len(block)

    def mapped(self) -> Mapped:
        """All that was written."""
        return Mapped(str(self.path), self.dtype, shape_of(self.rows, self.width))

    def __enter__(self) -> "Appended":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def shape_of(rows: int, width: int | None) -> tuple[int, ...]:
    """Of an array with so many rows."""
    return (rows,) if width is None else (rows, width)
