"""The live lines of a search: what runs, the best so far, the time left. On a terminal only, and gone at its end."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from oomguard.plan.phrases import figure, pieces_words, times
from oomguard.report.common import safe
from oomguard.search.problem import Probe
from oomguard.search.run import Progress
from oomguard.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console, ConsoleRenderable

REFRESHES = 2
"""In a second: enough for a clock, and nothing that a probe could feel."""
ROLES = {"calibrate": "learning", "explore": "trying", "confirm": "confirming"}
"""What a probe is for."""


@contextmanager
def live(*, quiet: bool = False) -> Iterator[Callable[[Progress], None] | None]:
    """Lines on stderr that follow a search; None if nobody would see them."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(file=sys.stderr, highlight=False, markup=False, emoji=False)
    lines = Lines(console)
    with Live(console=console, get_renderable=lines.render, transient=True, refresh_per_second=REFRESHES) as shown:

        def follow(progress: Progress) -> None:
            lines.take(progress)
            shown.refresh()

        yield follow


class Lines:
    """What is shown of the last that was told; the time left goes on by itself."""

    def __init__(self, console: "Console") -> None:
        self.console = console
        self.last: Progress | None = None
        self.told = time.monotonic()

    def take(self, progress: Progress) -> None:
        """Show this from now on."""
        self.last, self.told = progress, time.monotonic()

    def render(self) -> "ConsoleRenderable":
        """One line for the search, and one for each probe that is running."""
        from rich.text import Text

        text = "Looking at what fits by arithmetic"
        if self.last is not None:
            left = max(0.0, self.last.seconds_left - (time.monotonic() - self.told))
            text = "\n".join(progress_lines(self.last, left))
        return Text(safe(text, self.console), style="cyan", no_wrap=True, overflow="crop")


def progress_lines(progress: Progress, seconds_left: float) -> list[str]:
    """A search in words: its state, and each probe that is running."""
    words = [times(progress.probes, "probe") + " done"]
    if progress.best is not None and progress.best.tokens_per_second is not None:
        words.append(f"best {figure(progress.best.tokens_per_second)} tokens/s")
    words.append(f"at most {format_seconds(round(seconds_left))} left" if seconds_left >= 1 else "ending")
    running = [_probe_words(one, progress.budget_bytes) for one in progress.running]
    return [", ".join(words), *(running or ["  choosing"])]


def _probe_words(probe: Probe, budget_bytes: int) -> str:
    knobs = probe.candidate
    pieces = pieces_words(knobs) if knobs.window is not None else f"segments {pieces_words(knobs)}"
    what = f"T = {probe.spec.steps:,}, microbatch {knobs.microbatch:,}, {pieces}"
    # a narrow terminal crops the end of a line: memory, which the search is about, comes before it
    memory = f"{format_bytes(probe.peak_bytes)} of {format_bytes(budget_bytes)}"
    return f"  {ROLES[probe.role]} {memory}: {what}"
