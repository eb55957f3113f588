"""Files that survive a kill: lines only ever appended, contents that are whole before they get their name.

What is written here is given to the system in as few calls as can be, and is on the disk (`fsync`) before anybody
relies on it.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from oomguard.errors import MisuseError

try:
    import fcntl
except ImportError:  # Windows: appends of one line each, without a lock
    fcntl = None  # type: ignore[assignment]

Value = TypeVar("Value")


def write_file(path: str | os.PathLike[str], content: bytes, what: str) -> Path:
    """Write what a user asked for (`what`: "A plan"): the file is there whole, or as it was before.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     write_file(f"{directory}/new/x.csv", b"1", "A table").read_bytes()
    b'1'
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_content(target, content)
    except OSError as error:
        raise MisuseError(
            rule=f"{what} is written to a file of yours",
            got=f"{target} cannot be written ({error.strerror})",
            advice="Give another file.",
        ) from None
    return target


def append_line(path: Path, line: bytes) -> None:
    """Append one line, and return once it is on the disk. Directories are made; a torn last line is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as file:
        write_all(file, (b"" if _ends_whole(file) else b"\n") + line + b"\n")
        os.fsync(file)
    if new:
        sync_directory(path.parent)


def read_lines(path: Path) -> tuple[list[bytes], bytes]:
    """The lines that are whole, and what comes after the last of them: a writer was killed in the middle of that."""
    with opened(path, os.O_RDONLY) as file, open(file, "rb", closefd=False) as reader:
        *lines, torn = reader.read().split(b"\n")
    return lines, torn


def read_values(path: Path, kind: type[Value]) -> list[Value]:
    """All values of a file of JSON lines, the first first; none if there is no file.

    A line that cannot be read is left out, with a warning that names it.
    """

    def warn(number: int, why: str) -> None:
        warnings.warn(f"{path}, line {number} could not be read ({why}); it is left out.", stacklevel=4)

    try:
        lines, torn = read_lines(path)
    except FileNotFoundError:
        return []
    found: list[Value] = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                found.append(msgspec.json.decode(line, type=kind))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            warn(number, str(error))
    if torn.strip():
        warn(len(lines) + 1, "its end is missing")
    return found


def replace_content(path: Path, content: bytes) -> None:
    """Give a file another content: a kill leaves either the old or the new one, whole."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with opened(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as file:
            write_all(file, content)
            os.fsync(file)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """The file, while nobody else writes it (and, to write, while nobody else reads it)."""
    file = os.open(path, flags | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX if flags & os.O_RDWR else fcntl.LOCK_SH)  # given back by close
        yield file
    finally:
        os.close(file)


def write_all(file: int, content: bytes | memoryview) -> None:
    """All of it: in one call, unless the disk fills up, a signal comes in between, or it is more than 2 GiB."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]


def sync_directory(directory: Path) -> None:
    """A new file is on the disk only once its directory is."""
    if os.name != "posix":
        return
    entry = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)


def _ends_whole(file: int) -> bool:
    """Whether the last line is ended. If not, its writer was killed in the middle of it."""
    size = os.lseek(file, 0, os.SEEK_END)
    if not size:
        return True
    os.lseek(file, size - 1, os.SEEK_SET)
    return os.read(file, 1) == b"\n"
