"""Ledger: all records of a search, one JSON line each, only ever appended to. It survives a kill at any moment.

A line is written whole, in one call, under a lock that all writers take. A writer killed in the middle leaves a torn
line; the next one ends it, and readers drop it with a warning.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from oomguard.errors import MisuseError
from oomguard.probe.record import Record

try:
    import fcntl
except ImportError:  # Windows: appends of one line each, without a lock
    fcntl = None  # type: ignore[assignment]


RECORDS = "records.jsonl"
"""The file's name in the directory that `--ledger` takes."""


class Ledger:
    """A file of records. Its directories are made; a file that is there is continued.

    >>> Ledger("/tmp/oomguard-has-never-been-here/ledger.jsonl").read()
    []
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def append(self, record: Record) -> None:
        """Write one record, and return once it is on the disk."""
        line = msgspec.json.encode(record) + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = not self.path.exists()
            with _opened(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as file:
                _write(file, (b"" if _ends_whole(file) else b"\n") + line)
                os.fsync(file)
            if new:
                _sync_directory(self.path.parent)
        except OSError as error:
            raise self._misuse(error) from None

    def read(self) -> list[Record]:
        """All records, the first first. A line that cannot be read is left out, with a warning that names it."""
        try:
            with _opened(self.path, os.O_RDONLY) as file, open(file, "rb", closefd=False) as reader:
                *lines, torn = reader.read().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._misuse(error) from None
        found = [self._decoded(line, number) for number, line in enumerate(lines, start=1) if line.strip()]
        if torn.strip():
            self._warn(len(lines) + 1, "its end is missing")
        return [record for record in found if record is not None]

    def _decoded(self, line: bytes, number: int) -> Record | None:
        try:
            return msgspec.json.decode(line, type=Record)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._warn(number, str(error))
            return None

    def _warn(self, number: int, why: str) -> None:
        warnings.warn(f"{self.path}, line {number}: no record could be read ({why}); it is left out.", stacklevel=3)

    def _misuse(self, error: OSError) -> MisuseError:
        return MisuseError(
            rule="A ledger must be a file that can be read and written",
            got=f"{self.path} cannot be ({error.strerror})",
            advice="Give a directory of yours.",
        )


def open_ledger(directory: str) -> Ledger:
    """The ledger of a directory. It is made now, so that what cannot be written is known before there is something to
    lose."""
    if not directory:
        raise MisuseError(
            rule="--ledger takes a directory", got="got nothing", advice="Name one, such as --ledger runs."
        )
    ledger = Ledger(Path(directory) / RECORDS)
    try:
        ledger.path.parent.mkdir(parents=True, exist_ok=True)
        with _opened(ledger.path, os.O_RDWR | os.O_APPEND | os.O_CREAT):
            return ledger
    except OSError as error:
        raise ledger._misuse(error) from None


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """The file, while nobody else writes it (and, to write, while nobody else reads it)."""
    file = os.open(path, flags | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX if flags & os.O_RDWR else fcntl.LOCK_SH)  # given back by close
        yield file
    finally:
        os.close(file)


def _write(file: int, content: bytes) -> None:
    """All of it: in one call, unless the disk fills up or a signal comes in between."""
    while content:
        content = content[os.write(file, content) :]


def _ends_whole(file: int) -> bool:
    """Whether the last line is ended. If not, its writer was killed in the middle of it."""
    size = os.lseek(file, 0, os.SEEK_END)
    if not size:
        return True
    os.lseek(file, size - 1, os.SEEK_SET)
    return os.read(file, 1) == b"\n"


def _sync_directory(directory: Path) -> None:
    """A new file is on the disk only once its directory is."""
    if os.name != "posix":
        return
    entry = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)
