"""Starts a script in a process of its own, waits for its end, and puts together what it wrote."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic

from oomguard._core.errors import MisuseError, shown
from oomguard._core.system import new_temporary, process_directory
from oomguard._core.units import read_budget
from oomguard._run.notes import ProcessNotes, Settings, read_failures, read_notes, write_settings
from oomguard._run.result import RunResult, Sample, judge_run
from oomguard._run.settings import RunOptions, Start, environment, make_start

LOOK_SECONDS = 0.5  # seconds between two looks at the processes of the script
MOST_SAMPLES = 2000  # when there are more, every second one is dropped, and looks that are kept become rarer
PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH")
FROM_TERMINAL = ("SIGINT", "SIGQUIT", "SIGWINCH")  # a terminal sends these to all processes in its foreground

News = Callable[[list[ProcessNotes], dict[str, str]], None]


def run_script(
    words: list[str], options: RunOptions, begin: Callable[[Start], None] | None = None, news: News | None = None
) -> RunResult:
    """Run a command to its end. `begin` hears how it starts, and `news` twice a second what its processes wrote."""
    start = make_start(words, options)
    budget_bytes = read_budget(options.budget)
    folder = new_temporary(process_directory())
    settings = Settings(budget_bytes=budget_bytes, segments=not options.only_watch, dry_run=options.dry_run)
    write_settings(folder, settings)
    if begin is not None:
        begin(start)
    began = monotonic()
    with _passing_signals() as child:
        child.start(start, folder)
        watch = _Watch(child.pid, folder, news)
        code = child.wait()
        watch.close()
    seconds = monotonic() - began
    notes, peak_bytes = read_notes(folder), max(watch.peak_bytes, _waited_peak())
    return judge_run(start, code, seconds, notes, read_failures(folder), peak_bytes, tuple(watch.samples))


class _Child:
    """The process of the script."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.early: list[int] = []  # signals that came before it was started

    def start(self, start: Start, folder: Path) -> None:
        try:
            self.process = subprocess.Popen(start.words, env=environment(start, folder))
        except OSError as error:
            got = f"{shown(start.words[0])} cannot be started ({error.strerror})"
            advice = "Check that it is a program, or begins with a line such as #!/usr/bin/env python."
            raise MisuseError(rule="oomguard run needs a command that can be started", got=got, advice=advice) from None
        for number in self.early:
            self.send(number)

    @property
    def pid(self) -> int:
        assert self.process is not None, "it was started"
        return self.process.pid

    def send(self, number: int) -> None:
        if self.process is None:
            self.early.append(number)
        else:
            self.process.send_signal(number)

    def wait(self) -> int:
        assert self.process is not None, "it was started"
        return self.process.wait()


@contextmanager
def _passing_signals() -> Iterator[_Child]:
    """Pass signals on to the child, while this process lives on. Ctrl-C has reached the child already."""
    child, before = _Child(), dict[int, object]()

    def pass_on(number: int, _: object) -> None:
        if signal.Signals(number).name not in FROM_TERMINAL or not _in_foreground():
            child.send(number)

    for name in PASSED_ON:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # what is ignored, the child inherits
            before[number] = signal.signal(number, pass_on)
    try:
        yield child
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


def _in_foreground() -> bool:
    """Whether this process and its child are in the foreground of a terminal."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


class _Watch:
    """A thread that samples the memory of the script's processes, and hands on what they write."""

    def __init__(self, pid: int, folder: Path, news: News | None) -> None:
        import psutil

        self._root: psutil.Process | None = None
        with suppress(psutil.NoSuchProcess):
            self._root = psutil.Process(pid)
        self._folder, self._news, self._began = folder, news, monotonic()
        self.samples, self.peak_bytes, self._every, self._looks = list[Sample](), 0, 1, 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="oomguard watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._look()
            if self._news is not None:
                self._news(read_notes(self._folder), read_failures(self._folder))
            self._closed.wait(LOOK_SECONDS)

    def _look(self) -> None:
        """Add up the resident bytes of all processes; the peak is that of the largest one."""
        import psutil

        sizes = []
        with suppress(psutil.Error):
            for process in () if self._root is None else (self._root, *self._root.children(recursive=True)):
                with suppress(psutil.Error):
                    sizes.append(process.memory_info().rss)
        self._looks += 1
        self.peak_bytes = max([self.peak_bytes, *sizes])
        if sizes and self._looks % self._every == 0:
            self.samples.append(Sample(seconds=monotonic() - self._began, resident_bytes=sum(sizes)))
        if len(self.samples) > MOST_SAMPLES:
            self.samples, self._every = self.samples[::2], self._every * 2


def _waited_peak() -> int:
    """The peak of the largest process that has ended, if that tells more than the size of this one at the fork."""
    try:
        import resource
    except ImportError:
        return 0
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return children * unit_bytes if children > own else 0
