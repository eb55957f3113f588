"""Runner: probes candidates in a child process. Start, limit, watch, judge, reap.

Whatever happens in the child (it runs out of memory, crashes, hangs, is killed), the result is a record, and the next
probe works. One child serves several probes as long as they would measure the same in a new one.
"""

import os
import select
import subprocess
import tempfile
import threading
import time
import traceback
import weakref
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from signal import Signals
from typing import IO, Any, NamedTuple, TypeVar

import msgspec

from oomguard._core.errors import MisuseError
from oomguard._core.system import command, thread_variables
from oomguard._core.units import MIB, format_bytes, format_seconds, read_budget
from oomguard._device.find import find_target, open_device
from oomguard._device.proc import read_status
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.target import CPU_RUNTIME_BYTES
from oomguard._probe.record import (
    Answer,
    Measured,
    Record,
    Request,
    TaskRecord,
    TaskRequest,
    check_seconds,
    make_record,
    make_task_record,
)
from oomguard._probe.verdict import Verdict, judge, judge_exit
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec

AnyRequest = TypeVar("AnyRequest", Request, TaskRequest)
TIMEOUT_SECONDS = 600.0  # default time limit of a probe
POLL_SECONDS = 0.02  # seconds between readings of the child's memory while it works
REAP_SECONDS = 30.0  # seconds to wait for the end of a killed child: freeing a card can take seconds
TAIL_BYTES = 8192  # bytes kept of the end of a child's output
WORDS_BYTES = 16 * MIB  # bytes of output after which a child's output is dropped: its file may be in memory
CHILD_ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "24", "MALLOC_ARENA_MAX": "1"}
"""Environment of a child, unless the user has set the first. oneDNN keeps the last 1024 kernels it made, about 0.1 MiB
each, so a child would grow with every new shape. A step uses 8 to 22 of them, whatever the number of layers.

A training runs in the main thread, a probe in a thread of its own. One arena gives both the same heap, and malloc_trim
does not free the top of other arenas (mtrim, malloc.c, glibc 2.36: 10 to 28 MiB were left, and every probe needed a new
child)."""


class LostError(Exception):
    """The worker that was to run a probe does not answer any more."""


class Runner(AbstractContextManager["Runner", None]):
    """Probes candidates on one device, one after the other. Close it, or use it as a context, to end its child.

    The default budget is the free memory of the device when a probe begins. Threads wait for each other.

    >>> spec = Spec(cell="gru", seq=20, hidden=8, batch=2)
    >>> with Runner("cpu") as runner:
    ...     records = [runner.probe(spec, Candidate(microbatch=2, segments=pieces), steps=1) for pieces in (1, 4)]
    >>> [record.verdict.name for record in records], runner.pid
    (['FITS', 'FITS'], None)
    """

    def __init__(self, device: str = "cpu", *, timeout: float = TIMEOUT_SECONDS, seconds: float = 3.0) -> None:
        check_seconds("The time limit of a probe", timeout)
        check_seconds("The seconds to measure", seconds)
        self.device = open_device(device)
        self.timeout, self.seconds = timeout, seconds
        self._child: _Child | None = None
        self._lock = threading.Lock()  # one child answers one question at a time

    @property
    def pid(self) -> int | None:
        """The process id of the child; None if there is none."""
        return None if self._child is None else self._child.process.pid

    def probe(
        self,
        spec: Spec,
        candidate: Candidate,
        *,
        budget: int | str | None = None,
        budget_bytes: int | None = None,
        committed_bytes: int | None = None,
        timeout: float | None = None,
        seconds: float | None = None,
        steps: int = 3,
        passes: int = 2,
        rival: Candidate | None = None,
    ) -> Record:
        """Run a few real steps of a candidate and return the record, whatever happens.

        `budget` is bytes or text such as "6GiB", `budget_bytes` the same in bytes. `seconds`, `steps` and `passes` say
        how much is measured, as in `Request`. A `rival` of the same engine, precision and heap setting runs by turns
        with the candidate in the same child process, so that a change of the machine's load slows both down. The
        record has the ratio of their times.
        """
        budget_bytes = read_budget(budget) if budget_bytes is None else budget_bytes
        limits = {"budget_bytes": budget_bytes, "committed_bytes": committed_bytes, "seconds": seconds}
        asked: dict[str, Any] = limits | {"spec": spec, "candidate": candidate, "steps": steps, "passes": passes}
        asked |= {"rival": rival}
        with self._lock:
            request, measured, began = self._ask(Request, asked, timeout)
            return make_record(request, measured, began, self.device.title())

    def probe_task(self, timeout: float | None = None, **asked: Any) -> TaskRecord:
        """Run a few real steps of a task. `asked` are fields of a `TaskRequest`; those of the device may be left out.

        Raises `MisuseError` if the user's own code fails.
        """
        with self._lock:
            request, measured, began = self._ask(TaskRequest, asked, timeout)
            if isinstance(measured, Answer) and measured.misuse is not None:
                raise MisuseError(**measured.misuse)
            return make_task_record(request, measured, began, self.device.title())

    def _ask(
        self, kind: type[AnyRequest], asked: dict[str, Any], timeout: float | None
    ) -> tuple[AnyRequest, Measured, datetime]:
        """Send a request whose limits, where they are None, are those of the device; returns what was measured."""
        timeout = self.timeout if timeout is None else timeout
        check_seconds("The time limit of a probe", timeout)
        began, free = datetime.now(UTC), self.free()
        usual = {"budget_bytes": free.device_bytes, "committed_bytes": free.committed_bytes, "seconds": self.seconds}
        given = {name: value for name, value in asked.items() if value is not None or name not in usual}
        request = kind(device=self.device.name, **usual | given)
        limit_bytes = request.budget_bytes if self.device.name == "cpu" else free.host_bytes
        try:
            measured = self._watch(self._ready(request), request, timeout, limit_bytes, free.device_bytes)
            if not (isinstance(measured, Answer) and measured.fresh):
                self.close()
        except MisuseError as error:  # the device does not have the engine
            measured = Measured(verdict=judge(error), message=str(error))
        except OSError as error:  # no child could be started
            self.close()
            measured = Measured(verdict=judge(error), message=str(error), error=traceback.format_exc())
        except BaseException:  # Ctrl-C too
            self.close()
            raise
        return request, measured, began

    def free(self) -> "Free":
        """Read the memory that a child may use now. The memory of the present child counts as free."""
        here, cpu = self.device, open_device("cpu")
        host = cpu.budget()
        held_here, held_there = (0, 0) if self.pid is None else (here.held(self.pid), cpu.held(self.pid))
        return Free(
            device_bytes=max(1, (host if here == cpu else here.budget()).left_bytes + held_here),
            host_bytes=max(1, host.left_bytes + held_there),
            committed_bytes=host.child_committed_bytes if here.name == "cpu" else None,
        )

    def close(self) -> None:
        """End the child, if there is one, and wait for its end."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ready(self, request: Request | TaskRequest) -> "_Child":
        """Return the present child if it lives, has the candidate's environment and no other kernels; else a new one.

        Kernels stay loaded: oneDNN's LSTM takes 11 MiB that would count in the peak of PyTorch's own.
        """
        environment, child = self.device.environment(request.candidate, request.engine), self._child
        subject = request.name if isinstance(request, TaskRequest) else ""
        kind: Any = (type(request), subject, environment, request.engine, request.candidate.precision)
        largest_bytes = _largest_bytes(request)
        usable = child is not None and child.kind == kind and child.process.poll() is None
        if child is None or not usable or largest_bytes < child.raised_bytes:
            self.close()
            child = self._child = _Child(environment, kind)
        child.raised_bytes = largest_bytes
        return child

    def _watch(
        self, child: "_Child", request: Request | TaskRequest, timeout: float, limit_bytes: int, free_bytes: int
    ) -> Measured:
        """Send the request, and watch the child until it answers, ends, grows too large or takes too long.

        It may use `limit_bytes` of host memory, and `free_bytes` are free on its device.
        """
        deadline = time.monotonic() + timeout
        on_cpu = request.device == "cpu"
        child.send(msgspec.json.encode(request) + b"\n")
        while (line := child.wait(POLL_SECONDS)) is None:
            child.look()
            if child.resident_bytes > limit_bytes:
                what = f"It grew to {format_bytes(child.resident_bytes)}, over its {format_bytes(limit_bytes)}"
                what += f" of host memory, and was ended.{_too_little(limit_bytes)}"
                return child.figures(Verdict.OVER, what, child.end(), on_cpu)
            child.drop_output(WORDS_BYTES)
            if time.monotonic() > deadline:
                what = f"It was not done after {format_seconds(timeout)}, and was ended."
                return child.figures(Verdict.TIMEOUT, what, child.end(), on_cpu)
        if not line:
            code = child.process.wait(REAP_SECONDS)  # it has closed its pipe
            words = child.end()
            what = _exit_message(code) + _too_little(min(limit_bytes, request.committed_bytes or limit_bytes))
            left_bytes = None
            if not on_cpu and isinstance(request, Request):
                estimate = estimate_step(request.spec, request.candidate, find_target(request.device))
                left_bytes = free_bytes - int(estimate.total_bytes)
            return child.figures(judge_exit(code, words, left_bytes), what, words, on_cpu)
        answer = msgspec.json.decode(line, type=Answer)
        committed_bytes = max(answer.committed_bytes or 0, child.committed_bytes) if on_cpu else None
        return msgspec.structs.replace(answer, committed_bytes=committed_bytes or None)


class Free(NamedTuple):
    """The bytes that a child may use."""

    device_bytes: int
    host_bytes: int
    committed_bytes: int | None


def _largest_bytes(request: Request | TaskRequest) -> int:
    """Estimate the largest block of a pass, where that sets the thresholds of the C heap; 0 where they are fixed.

    glibc raises its thresholds to the largest freed block (malloc.c, glibc 2.36) and then keeps smaller blocks in the
    heap. In a child that had run larger blocks before, an LSTM in chunks took 0.7 of the time of a new process.
    """
    knobs = request.candidate
    if request.device != "cpu" or knobs.allocator != "system" or isinstance(request, TaskRequest):
        return 0
    spec = request.spec
    piece = -(-min(spec.steps, knobs.window or spec.steps) // knobs.segments)
    return 4 * knobs.microbatch * piece * max(4 * spec.hidden, spec.inputs)


def _too_little(limit_bytes: int) -> str:
    """Explain limits in which not even an empty process fits."""
    if limit_bytes >= CPU_RUNTIME_BYTES:
        return ""
    return f" Python and torch alone need about {format_bytes(CPU_RUNTIME_BYTES)}."


class _Child:
    """A child process with its pipes. It ends with `end()`, with its garbage collection, or with this process."""

    def __init__(self, environment: dict[str, str], kind: object) -> None:
        self.kind = kind
        self.raised_bytes = self.resident_bytes = self.committed_bytes = 0
        own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        tied = threading.current_thread() is threading.main_thread()
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115  a pipe that nobody reads would fill up
        try:
            self.process = subprocess.Popen(
                command(f"from oomguard._probe.child import main; main({os.getpid()}, {tied})"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.stderr,
                env=thread_variables() | CHILD_ENVIRONMENT | own | environment,
                bufsize=0,
            )
        except OSError:
            self.stderr.close()
            raise
        self._end = weakref.finalize(self, _reap, self.process, self.stderr, os.getpid())
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._answers = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._requests, False)  # a child that does not read must not block this process
        self._unsent = self._unread = b""

    def send(self, line: bytes) -> None:
        """Queue a request. `wait` sends what the pipe does not take now."""
        self.drop_output()
        self.resident_bytes = self.committed_bytes = 0  # the most since then, read from outside
        self._unsent += line

    def look(self) -> None:
        """Read its memory from outside."""
        now = read_status(self.process.pid)
        if now is not None:
            self.resident_bytes = max(self.resident_bytes, now.resident_bytes)
            self.committed_bytes = max(self.committed_bytes, now.committed_bytes or 0)

    def figures(self, verdict: Verdict, message: str, words: str, on_cpu: bool) -> Measured:
        """Make the figures of a request that it did not answer."""
        return Measured(
            verdict=verdict,
            message=message,
            error=words or message,
            peak_bytes=(self.resident_bytes or None) if on_cpu else None,
            committed_bytes=(self.committed_bytes or None) if on_cpu else None,
        )

    def wait(self, seconds: float) -> bytes | None:
        """Wait for the answer; return it, empty bytes if the child has ended, or None if it is still at work."""
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        if self._unsent:
            poll.register(self._requests, select.POLLOUT)
        ready = dict(poll.poll(seconds * 1000))
        if self._requests in ready:
            try:
                self._unsent = self._unsent[os.write(self._requests, self._unsent) :]
            except BrokenPipeError:  # it has ended: its answers end too
                self._unsent = b""
        if self._answers not in ready:
            return None
        read = os.read(self._answers, 1 << 16)
        line, newline, self._unread = (self._unread + read).partition(b"\n")
        if newline or not read:
            return line if newline else b""
        self._unread = line
        return None

    def drop_output(self, over_bytes: int = 0) -> None:
        """Drop the child's output if it is larger than that."""
        if os.fstat(self.stderr.fileno()).st_size > over_bytes:
            os.lseek(self.stderr.fileno(), 0, os.SEEK_SET)  # parent and child share the position in the file
            self.stderr.truncate(0)

    def end(self) -> str:
        return self._end() or ""


def _reap(process: "subprocess.Popen[bytes]", stderr: IO[bytes], owner: int) -> str:
    """Kill, wait, close; not in a fork of this process, which is not its parent."""
    if os.getpid() != owner:
        return ""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(REAP_SECONDS)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    with stderr:
        size = os.fstat(stderr.fileno()).st_size
        return os.pread(stderr.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace").strip()


def _exit_message(code: int) -> str:
    if code >= 0:
        return f"The process ended with exit code {code} and no answer."
    try:
        return f"The process was ended by {Signals(-code).name}."
    except ValueError:  # a real-time signal
        return f"The process was ended by signal {-code}."
