"""The operating system: files that survive a kill, temporary files, and child processes that run this package.

Lines are only appended, other contents are replaced as a whole. They are written in as few system calls as possible,
and are on the disk (`fsync`) before anything relies on them.
"""

import ctypes
import errno
import os
import pickle
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import msgspec

from oomguard._core.errors import MisuseError
from oomguard._core.progress import Status, listening, tell
from oomguard._core.units import format_bytes

try:
    import fcntl
except ImportError:  # Windows: lines are appended without a lock
    fcntl = None  # type: ignore[assignment]

Value = TypeVar("Value")
MAX_FILE_BYTES = 256 << 20  # a plan has some hundred KiB; a larger file is something else
BUSY = 1.5  # load per core from which on others keep all cores busy: a training of one's own makes at most 1
PR_SET_PDEATHSIG = 1  # linux/prctl.h
TEMPORARY = re.compile(r"oomguard-(\d+)-\w+")
"""The name of a temporary directory, with the process that made it: `oomguard clean` removes what a kill has left."""


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


def read_file(path: Path, most: int = MAX_FILE_BYTES) -> bytes:
    """The content of a file that may come from anybody; an OSError if it is no file, or larger than `most` bytes."""
    with opened(path, os.O_RDONLY) as file, open(file, "rb", closefd=False) as reader:
        content = reader.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {format_bytes(most)}")
    return content


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
    check_regular(path)
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
    """A file descriptor, locked against writers and, if opened for writing, also against readers.

    An OSError if it is neither a file nor a directory: a pipe would wait for its other end, a device may never end.
    """
    extra = sum(getattr(os, name, 0) for name in ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK"))
    try:
        file = os.open(path, flags | extra, 0o666)
    except ValueError:  # a NUL byte
        raise OSError(errno.EINVAL, "no file can have such a name") from None
    try:
        _check_kind(os.fstat(file).st_mode)
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX if flags & os.O_RDWR else fcntl.LOCK_SH)  # released by close
        yield file
    finally:
        os.close(file)


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise an OSError if there is something that is neither a file nor a directory, such as /dev/null."""
    with suppress(FileNotFoundError):
        _check_kind(os.stat(path).st_mode)


def _check_kind(mode: int) -> None:
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")


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


def new_temporary(base: Path | None = None) -> Path:
    """A new temporary directory, which the caller removes."""
    return Path(tempfile.mkdtemp(prefix=f"oomguard-{os.getpid()}-", dir=base))


def process_directory() -> Path:
    """A temporary directory for everything of this process, removed when the process ends."""
    return _directory_of(os.getpid())


@cache
def _directory_of(pid: int) -> Path:
    from multiprocessing.util import Finalize

    path = new_temporary()
    # as multiprocessing removes its own, after the children have ended; a forked process leaves it alone
    Finalize(None, shutil.rmtree, args=(path,), kwargs={"ignore_errors": True}, exitpriority=-100)
    return path


def command(call: str) -> list[str]:
    """The command of a child that runs a line of Python with this package and this process's `sys.path`."""
    root, path = str(Path(__file__).parents[2]), [str(entry) for entry in sys.path]
    # first this package, wherever it was imported from, then the `sys.path` of this process
    start = f"import sys; sys.path.insert(0, {root!r}); import oomguard; sys.path[:] = {path!r}"
    return [sys.executable, "-c", f"{start}\n{call}"]


def thread_variables() -> dict[str, str]:
    """Variables with which a process starts: where others keep all cores busy, threads that wait for another one sleep.

    Unless the user has a setting, threads of GNU OpenMP spin while they wait, and take the time of those that they wait
    for: an LSTM took 9.5 s beside 11 busy processes on 2 cores, and 0.3 s with this.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = load > BUSY * (os.cpu_count() or 1)
    return {"OMP_WAIT_POLICY": "passive"} if busy and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & {*os.environ} else {}


class Elsewhere(AbstractContextManager["Elsewhere", None]):
    """A child process that calls functions of modules, one after the other, and ends with this process.

    The memory of the child, with the libraries that the functions import, is free again at the end. `variables` replace
    those of this process for the C heap.
    """

    def __init__(self, variables: dict[str, str] | None = None) -> None:
        own = {n: value for n, value in os.environ.items() if variables is None or not n.startswith("MALLOC_")}
        tied = threading.current_thread() is threading.main_thread()
        call = f"from {__name__} import _serve; _serve({os.getpid()}, {tied})"
        self._process = subprocess.Popen(
            command(call),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=thread_variables() | own | (variables or {}),
        )

    def call(
        self,
        module: str,
        function: str,
        *arguments: Any,
        seconds: float | None = None,
        news: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Call a function; returns its result or raises its error. What the child tells is told here.

        `news` takes what the child gives to `send_news`, and answers what it gives to `ask_parent`. If the call takes
        more than so many seconds, or the process ends, raises TimeoutError or ChildProcessError: the child is gone.
        """
        late, name = threading.Event(), f"{module}.{function}"
        timer = threading.Timer(threading.TIMEOUT_MAX if seconds is None else max(0.0, seconds), self._give_up, (late,))
        timer.daemon = True
        timer.start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(pickle.dumps((module, function, arguments)))
            self._process.stdin.flush()
            returned, value = pickle.load(self._process.stdout)
            while returned is None:  # the child is still at work
                if isinstance(value, Status):
                    tell(value)
                elif news is not None and isinstance(value, Question):
                    self._process.stdin.write(pickle.dumps(news(value.content)))
                    self._process.stdin.flush()
                elif news is not None:
                    news(value)
                returned, value = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            code = self._process.wait()
            if late.is_set():
                raise TimeoutError(f"{name} took more than {seconds} seconds") from None
            raise ChildProcessError(f"the process that ran {name} ended with exit code {code}") from None
        finally:
            timer.cancel()
            timer.join()  # it may be just about to end the child
        if late.is_set():
            raise TimeoutError(f"{name} took more than {seconds} seconds")
        if returned:
            return value
        raise value

    @property
    def pid(self) -> int:
        """The process id of the child."""
        return self._process.pid

    def kill(self) -> None:
        """End the child at once. May be called while a call waits."""
        self._process.kill()

    def stop(self) -> None:
        """Ask the child to end, as a training does after its current step. May be called while a call waits."""
        self._process.terminate()

    def _give_up(self, late: threading.Event) -> None:
        late.set()
        self._process.kill()

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()


def run_elsewhere(module: str, function: str, *arguments: Any) -> Any:
    """Call a function of a module in a child process of its own; returns its result or raises its error."""
    with Elsewhere() as child:
        return child.call(module, function, *arguments)


def end_with(parent: int, tied: bool) -> None:
    """Let the kernel end this process with `parent`. `tied`: the main thread of the parent started this process."""
    if tied and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before that was set
        os._exit(1)


def _serve(parent: int, tied: bool) -> None:
    """Run in the child: read calls from stdin, and write the result or the error of each to stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends this child
    end_with(parent, tied)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    global _answers, _calls
    calls, _answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    _calls = calls
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # prints go to stderr, so that they cannot mix with the answers
    with suppress(EOFError), listening(send_news):  # the parent is done
        while True:
            _send(_answer(*pickle.load(calls)))


class Question(NamedTuple):
    """What a child asks its parent while a call is at work."""

    content: Any


_answers: IO[bytes] | None = None  # in a child: the pipe to the parent
_calls: IO[bytes] | None = None  # in a child: the pipe from the parent


def ask_parent(content: Any) -> Any:
    """In a child: ask the parent while a call is at work, and wait for the answer of its `news`."""
    assert _calls is not None, "this process is no child"
    send_news(Question(content))
    return pickle.load(_calls)


def send_news(value: Any) -> None:
    """In a child: give a value to the parent while a call is at work."""
    _send(pickle.dumps((None, value)))


def _send(content: bytes) -> None:
    assert _answers is not None, "this process is no child"
    _answers.write(content)
    _answers.flush()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _answer(module: str, function: str, arguments: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((True, getattr(import_module(module), function)(*arguments)))
    except Exception as error:
        try:
            return pickle.dumps((False, error.with_traceback(None)))
        except Exception:  # an error of the user's own kind
            return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
