"""Small things to probe, and what happens to a process."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from oomguard._probe.runner import Runner
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.spec import Spec

TINY = Spec(cell="rnn", seq=5, features=2, hidden=4, layers=1, batch=4)
LONG = Spec(cell="rnn", seq=40_000, features=2, hidden=4, layers=1, batch=1)
"""Several seconds of work, and next to no memory."""
WIDE = Spec(cell="rnn", seq=200, features=32, hidden=64, layers=1, batch=64)
"""Some 20 MiB over the runtime."""


def one_thread(spec: Spec, **knobs: Any) -> Candidate:
    return make_candidate(spec, threads=1, **knobs)


def warm_pid(runner: Runner) -> int:
    """The child of a runner that works: started if need be, and ready for the next probe."""
    record = runner.probe(TINY, one_thread(TINY))
    assert record.verdict.ran, record
    assert runner.pid is not None
    return runner.pid


@contextmanager
def meanwhile(act: Callable[[], object], seconds: float = 0.3) -> Iterator[None]:
    """Do something while what is inside runs, a moment after it began."""
    timer = threading.Timer(seconds, act)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is more than an entry that waits to be reaped."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def ends_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


def children() -> list[int]:
    return [child.pid for child in psutil.Process(os.getpid()).children(recursive=True)]
