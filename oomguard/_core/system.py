"""The operating system: files that survive a kill, and child processes that run this package.

Lines are only appended, other contents are replaced as a whole. They are written in as few system calls as possible,
and are on the disk (`fsync`) before anything relies on them.
"""

import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from oomguard._core.errors import MisuseError

try:
    import fcntl
except ImportError:  # Windows: lines are appended without a lock
    fcntl = None  # type: ignore[assignment]

Value = TypeVar("Value")


@contextmanager
def file_errors(
    rule: str, path: str | os.PathLike[str], advice: str = "Give another path.", use: str = "used"
) -> Iterator[None]:
    """Turn an OSError into an error for the user: the rule that is broken, the path and why, what to do."""
    try:
        yield
    except OSError as error:
        got = f"{f'{path} cannot be {use}'.rstrip()} ({error.strerror or error})"
        raise MisuseError(rule=rule, got=got, advice=advice) from None


def write_file(path: str | os.PathLike[str], content: bytes, what: str) -> Path:
    """Write a file that the user asked for. A kill leaves the old content or the new one, complete."""
    target = Path(path)
    with file_errors(f"{what} needs a writable file", target, use="written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_content(target, content)
    return target


def append_line(path: Path, line: bytes) -> None:
    """Append one line; it is on the disk when this returns. Makes directories, and ends a half-written last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as file:
        ended = True
        if os.fstat(file).st_size:  # a last line that is not ended was left by a writer that was killed
            os.lseek(file, -1, os.SEEK_END)
            ended = os.read(file, 1) == b"\n"
        write_all(file, (b"" if ended else b"\n") + line + b"\n")
        os.fsync(file)
    if is_new:
        sync_directory(path.parent)


def read_lines(path: Path) -> tuple[list[bytes], bytes]:
    """The complete lines, and the rest after them, which a killed writer left."""
    with opened(path, os.O_RDONLY) as file, open(file, "rb", closefd=False) as reader:
        *lines, rest = reader.read().split(b"\n")
    return lines, rest


def read_values(path: Path, kind: type[Value]) -> list[Value]:
    """All values of a file of JSON lines; none if there is no file. A line it cannot read is skipped with a warning."""
    try:
        lines, rest = read_lines(path)
    except FileNotFoundError:
        return []
    values: list[Value] = []
    problems: dict[int, str] = {}
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                values.append(msgspec.json.decode(line, type=kind))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            problems[number] = str(error)
    if rest.strip():
        problems[len(lines) + 1] = "its end is missing"
    for number, why in problems.items():
        warnings.warn(f"{path}, line {number} could not be read ({why}). It is skipped.", stacklevel=3)
    return values


def replace_content(path: Path, content: bytes) -> None:
    """Replace the content of a file. A kill leaves the old content or the new one, complete."""
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
    """A file descriptor, locked against writers and, if opened for writing, also against readers."""
    file = os.open(path, flags | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX if flags & os.O_RDWR else fcntl.LOCK_SH)  # released by close
        yield file
    finally:
        os.close(file)


def write_all(file: int, content: bytes | memoryview) -> None:
    """Write everything: in one call, unless the disk fills up, a signal arrives, or it is more than 2 GiB."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]


def sync_directory(directory: Path) -> None:
    """Put a directory on the disk: only then is a new file in it there after a power cut."""
    if os.name == "posix":
        with opened(directory, os.O_RDONLY) as entry:
            os.fsync(entry)


def command(call: str) -> list[str]:
    """The command of a child that runs a line of Python with this package and this process's `sys.path`."""
    root, path = str(Path(__file__).parents[2]), [str(entry) for entry in sys.path]
    # first this package, wherever it was imported from, then the `sys.path` of this process
    start = f"import sys; sys.path.insert(0, {root!r}); import oomguard; sys.path[:] = {path!r}"
    return [sys.executable, "-c", f"{start}\n{call}"]


def run_elsewhere(
    module: str, function: str, *arguments: Any, seconds: float | None = None, variables: dict[str, str] | None = None
) -> Any:
    """Call a function of a module in a child process; returns its result or raises its error.

    The memory of the child, with the libraries that the function imports, is free again afterwards. `variables` replace
    those of this process for the C heap. Raises TimeoutError if the child takes more than so many seconds.
    """
    call = f"from {__name__} import _answer; _answer()"
    own = {name: value for name, value in os.environ.items() if variables is None or not name.startswith("MALLOC_")}
    question = pickle.dumps((module, function, arguments))
    try:
        done = subprocess.run(
            command(call), input=question, stdout=subprocess.PIPE, timeout=seconds, env=own | (variables or {})
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{module}.{function} took more than {seconds} seconds") from None
    if done.returncode:
        raise ChildProcessError(f"the process that ran {module}.{function} ended with exit code {done.returncode}")
    returned, value = pickle.loads(done.stdout)
    if returned:
        return value
    raise value


def _answer() -> None:
    """Run in the child: read the call from stdin and write the result or the error to stdout."""
    import signal
    from importlib import import_module

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends this child
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints go to stderr, so that they cannot mix with the answer
    module, function, arguments = pickle.load(sys.stdin.buffer)
    try:
        answer = (True, getattr(import_module(module), function)(*arguments))
    except Exception as error:
        answer = (False, error.with_traceback(None))
    with answers:
        pickle.dump(answer, answers)
