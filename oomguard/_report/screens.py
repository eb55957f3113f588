"""Screens that show what goes on: a live line on a terminal, an output of a notebook, or lines of a log."""

import html
import math
import sys
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from time import monotonic
from typing import TYPE_CHECKING, Any

from oomguard._core.progress import Status
from oomguard._core.units import format_seconds
from oomguard._report.tables import safe

if TYPE_CHECKING:  # a command that shows nothing does not wait for rich
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

FIRST_SECONDS = 3.0  # seconds until a log has a line, so that it is never silent for 5; what is done sooner leaves none
PAUSE_SECONDS = 15.0  # seconds between two lines of a long log if nothing new begins: a few lines a minute
WATCHED_SECONDS = 120.0  # so long somebody may be watching a log: until then it pauses for `FIRST_SECONDS` at most
BAR = 16  # characters of a bar


@dataclass(frozen=True, slots=True)
class Moment:
    """A status as it is shown now: the time that is left counts down, and that of a long step counts up."""

    status: Status
    seconds: float  # seconds since it was told

    @property
    def left(self) -> str:
        if self.status.seconds_left is None:
            return ""
        left = self.status.seconds_left - self.seconds
        return f"at most {format_seconds(round(left))} left" if left >= 1 else "ending"

    @property
    def text(self) -> str:
        """The status in one line, with the time that it has taken if that is long."""
        since = f"for {format_seconds(round(self.seconds))}" if self.seconds >= FIRST_SECONDS else ""
        return ", ".join(filter(None, (self.status.words, self.left or since)))


class Screen(ABC):
    """Shows the last status, and shows it again every `period` seconds, so that it never looks dead."""

    period = 0.5
    gap = 0.0  # seconds between two statuses that are shown at once; the ticker shows the last of the others

    def __init__(self) -> None:
        self._shown_at = -math.inf
        self.began = self.told_at = monotonic()
        self.status = Status("Starting")
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._ticker = threading.Thread(target=self._tick, name="oomguard progress", daemon=True)

    def start(self) -> None:
        self._ticker.start()

    def take(self, status: Status) -> None:
        """Show a new status."""
        with self._lock:
            self.status, self.told_at = status, monotonic()
            for note in status.notes:
                self.note(note)
            if self.told_at - self._shown_at >= self.gap:
                self._shown_at = self.told_at
                self.show(Moment(status, 0.0))

    def close(self) -> None:
        """Stop, and remove what is shown."""
        self._closed.set()
        self._ticker.join()
        with self._lock:
            self.end()

    def _tick(self) -> None:
        while not self._closed.wait(self.period):
            with self._lock:
                self.show(Moment(self.status, monotonic() - self.told_at))

    @abstractmethod
    def show(self, moment: Moment) -> None:
        """Show a moment in the place of the one before."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Write a line that stays."""

    def end(self) -> None:  # noqa: B027 (a log removes nothing)
        """Remove what is shown."""


class Terminal(Screen):
    """A live line on stderr, and one for each thing that runs. They vanish at the end."""

    gap = 0.1

    def __init__(self, console: "Console | None" = None) -> None:
        super().__init__()
        self._console = console

    @cached_property
    def console(self) -> "Console":
        """The console of stderr, made when something is shown: what is done at once needs none."""
        from rich.console import Console

        return self._console or Console(file=sys.stderr, highlight=False, markup=False, emoji=False)

    @cached_property
    def live(self) -> "Live":
        from rich.live import Live

        live = Live(console=self.console, transient=True, auto_refresh=False)
        live.start()
        return live

    def show(self, moment: Moment) -> None:
        self.live.update(self.render(moment), refresh=True)

    def render(self, moment: Moment) -> "Text":
        from rich.text import Text

        words = [bar(moment.status.done) + moment.text, *(f"  {line}" for line in moment.status.lines)]
        return Text(safe("\n".join(words), self.console), style="cyan")

    def note(self, text: str) -> None:
        self.console.print(safe(text, self.console), soft_wrap=True)

    def end(self) -> None:
        if "live" in self.__dict__:
            self.live.stop()


class Log(Screen):
    """Lines on stderr: one every few seconds at first, and later a few a minute, or when something new begins.

    `verbose` writes every status, with the seconds since the beginning.
    """

    period = 0.25

    def __init__(self, *, verbose: bool = False) -> None:
        super().__init__()
        self.verbose, self.topic, self.written_at = verbose, "", self.began

    def show(self, moment: Moment) -> None:
        status, now = moment.status, monotonic()
        topic = status.topic or status.words
        new = topic != self.topic
        wait = FIRST_SECONDS if new or now - self.began < WATCHED_SECONDS else PAUSE_SECONDS
        if moment.seconds == 0 and (self.verbose or status.milestone):
            wait = 0.0
        if now - self.written_at >= wait:
            self.topic, self.written_at = topic, now
            self.note("; ".join([moment.text, *(line.strip() for line in status.lines)]))

    def note(self, text: str) -> None:
        before = f"{monotonic() - self.began:7.1f} s  " if self.verbose else ""
        print(before + text, file=sys.stderr, flush=True)  # noqa: T201


class Notebook(Screen):
    """One output of the running cell. It is empty at the end."""

    period = 2.0
    gap = 0.5

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = import_module("IPython.display").DisplayHandle()
        self._handle.display(self._bundle("", ""), raw=True)

    def show(self, moment: Moment) -> None:
        lines, done = [moment.text, *moment.status.lines], moment.status.done
        value = "" if done is None else f' value="{done:.3f}"'
        words = "<br>".join(html.escape(line) for line in lines)
        style = "font-variant-numeric: tabular-nums; opacity: .85"
        page = f'<div style="{style}"><progress{value}></progress> {words}</div>'
        self._handle.update(self._bundle("\n".join(lines), page), raw=True)

    def note(self, text: str) -> None:
        print(text)  # noqa: T201

    def end(self) -> None:
        self._handle.update(self._bundle("", ""), raw=True)

    def _bundle(self, text: str, page: str) -> dict[str, str]:
        return {"text/plain": text, "text/html": page}


def bar(done: float | None) -> str:
    """A bar of characters before the words of a status; empty if its share is not known."""
    if done is None:
        return ""
    full = round(BAR * min(1.0, max(0.0, done)))
    return "█" * full + "–" * (BAR - full) + f" {done:4.0%} "


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


def make_screen(*, verbose: bool = False) -> Screen:
    """The screen for this process: a log if every status is wanted or nobody looks at a terminal."""
    if verbose:
        return Log(verbose=True)
    if in_notebook():
        return Notebook()
    return Terminal() if sys.stderr.isatty() else Log()
