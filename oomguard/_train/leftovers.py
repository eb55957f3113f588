"""What oomguard has stored to be faster, and what killed processes have left. No other files are touched."""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import psutil

from oomguard._core.errors import MisuseError
from oomguard._core.system import TEMPORARY
from oomguard._data.source import CONVERTED, is_converted
from oomguard._probe.cache import STORED, user_directory
from oomguard._train.settings import BEST, CHECKPOINTS, UNFINISHED

IDLE_SECONDS = 24 * 3600
"""A conversion or a checkpoint that is being written changes within a day, whatever machine writes it."""
CONVERTING = re.compile(r"\.\w+\.oomguard")  # a conversion that has not ended, see `cached` in oomguard._data.source


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """Files that nobody needs, or that are made again when they are needed."""

    kind: str
    path: str  # a file or a folder
    bytes: int


def find_leftovers(folder: Path) -> list[Leftover]:
    """What can be removed: calibrations, temporary files, and what lies in a folder and in those below it."""
    if not folder.is_dir():
        rule, advice = "oomguard clean looks into a folder", "Give the folder of your data and runs."
        raise MisuseError(rule=rule, got=f"there is no folder {folder}", advice=advice)
    found = {
        os.path.realpath(path): Leftover(kind=kind, path=str(path), bytes=_size(path))
        for kind, path in (*_calibrations(), *_temporary(Path(tempfile.gettempdir())), *_below(folder))
    }
    return [*found.values()]


def remove(leftovers: Iterable[Leftover]) -> list[str]:
    """Remove files and folders; returns a sentence for each that could not be removed."""
    problems = []
    for path in (Path(leftover.path) for leftover in leftovers):
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            problems.append(f"{path} could not be removed ({error.strerror or error}).")
    return problems


def _calibrations() -> Iterator[tuple[str, Path]]:
    directory = user_directory()
    if directory is not None and directory.is_dir():
        yield from (("calibration", path) for path in sorted(directory.iterdir()) if STORED.fullmatch(path.name))


def _temporary(home: Path) -> Iterator[tuple[str, Path]]:
    """Temporary folders of this user whose process has ended."""
    for path in sorted(home.iterdir()):
        match = TEMPORARY.fullmatch(path.name)
        if match and _is_ours(path) and not psutil.pid_exists(int(match[1])):
            yield "temporary files", path


def _below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Converted data, and unfinished conversions and checkpoints, in a folder and in those below it."""
    yield from _temporary(folder)  # of --cache
    for home, names, _ in os.walk(folder):
        for name in sorted(names):
            path = Path(home, name)
            kind = _kind_of(path)
            if kind is not None:
                yield kind, path
        names[:] = [name for name in names if not name.startswith(".") and not CONVERTED.fullmatch(name)]


def _kind_of(path: Path) -> str | None:
    """The kind of a folder that can be removed; None if it is something else."""
    if path.is_symlink():
        return None
    if CONVERTED.fullmatch(path.name):
        return "converted data" if is_converted(path) else None
    if CONVERTING.fullmatch(path.name):
        return "unfinished conversion" if _is_idle(path) else None
    if path.name.startswith(UNFINISHED) and path.parent.name in (CHECKPOINTS, BEST):
        return "unfinished checkpoint" if _is_idle(path) else None
    return None


def _is_ours(path: Path) -> bool:
    """Whether it is a folder of this user."""
    return path.is_dir() and not path.is_symlink() and (os.name != "posix" or path.stat().st_uid == os.getuid())


def _is_idle(path: Path) -> bool:
    """Whether nothing in a folder has changed for a day."""
    changed = max((inner.lstat().st_mtime for inner in (path, *path.rglob("*"))), default=0.0)
    return time.time() - changed > IDLE_SECONDS


def _size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if not file.is_dir())
