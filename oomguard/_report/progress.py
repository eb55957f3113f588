"""Progress on stderr while a search or a training runs, and the result of a training as text and JSON."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

from oomguard._core.units import format_bytes, format_seconds
from oomguard._report.tables import printer, safe
from oomguard._report.words import figure, pieces_words, times

if TYPE_CHECKING:  # a search does not wait for the import of training, nor the reverse
    from rich.console import Console, ConsoleRenderable

    from oomguard._search.propose import Probe
    from oomguard._search.run import Progress
    from oomguard._train.loop import TaskResult, TrainProgress

ROLES = {"calibrate": "calibrating", "explore": "trying", "confirm": "confirming"}
PAUSE_SECONDS = 60.0  # seconds between two lines of a log without events and validations


@contextmanager
def live(*, quiet: bool = False) -> Iterator[Callable[["Progress"], None] | None]:
    """Show the progress of a search on stderr while it runs; None if stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(file=sys.stderr, highlight=False, markup=False, emoji=False)
    lines = Lines(console)
    rate = 2  # refreshes per second: enough for the clock, and too few to disturb a probe
    with Live(console=console, get_renderable=lines.render, transient=True, refresh_per_second=rate) as display:

        def follow(progress: "Progress") -> None:
            lines.take(progress)
            display.refresh()

        yield follow


class Lines:
    """The last progress that a search reported; the time left counts down by itself."""

    def __init__(self, console: "Console") -> None:
        self.console = console
        self.last: Progress | None = None
        self.reported_at = monotonic()

    def take(self, progress: "Progress") -> None:
        self.last, self.reported_at = progress, monotonic()

    def render(self) -> "ConsoleRenderable":
        """One line for the search, and one for each running probe."""
        from rich.text import Text

        text = "Estimating what fits"
        if self.last is not None:
            left = max(0.0, self.last.seconds_left - (monotonic() - self.reported_at))
            text = "\n".join(progress_lines(self.last, left))
        return Text(safe(text, self.console), style="cyan", no_wrap=True, overflow="crop")


def progress_lines(progress: "Progress", seconds_left: float) -> list[str]:
    """The state of a search, and each running probe, in words."""
    words = [times(progress.probes, "probe") + " done"]
    if progress.best is not None and progress.best.tokens_per_second is not None:
        words.append(f"best {figure(progress.best.tokens_per_second)} tokens/s")
    words.append(f"at most {format_seconds(round(seconds_left))} left" if seconds_left >= 1 else "ending")
    running = [_probe_words(probe, progress.budget_bytes) for probe in progress.running]
    return [", ".join(words), *(running or ["  choosing the next probe"])]


def _probe_words(probe: "Probe", budget_bytes: int) -> str:
    knobs = probe.candidate
    pieces = pieces_words(knobs) if knobs.window is not None else f"segments {pieces_words(knobs)}"
    what = f"T = {probe.spec.steps:,}, microbatch {knobs.microbatch:,}, {pieces}"
    # a narrow terminal crops the end of a line, so memory comes first
    memory = f"{format_bytes(probe.peak_bytes)} of {format_bytes(budget_bytes)}"
    return f"  {ROLES[probe.role]} {memory}: {what}"


@contextmanager
def follow(*, quiet: bool = False) -> Iterator[Callable[["TrainProgress"], None] | None]:
    """Show the progress of a training on stderr: a bar on a terminal, otherwise lines; None if it is to be quiet."""
    if quiet or not sys.stderr.isatty():
        yield None if quiet else in_lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as ProgressBar
    from rich.table import Column

    columns = (
        BarColumn(bar_width=10, table_column=Column(min_width=10)),
        TimeRemainingColumn(compact=True, table_column=Column(min_width=7)),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, ratio=1)),  # cut if the terminal is narrow
    )
    with ProgressBar(*columns, console=Console(file=sys.stderr), expand=True, transient=True) as bar:
        task = bar.add_task("reading the data", total=None)

        def take(progress: "TrainProgress") -> None:
            bar.update(task, description=progress_words(progress), completed=progress.step, total=progress.total)

        yield take


def in_lines() -> Callable[["TrainProgress"], None]:
    """A function that logs every event and every validation, and otherwise one line a minute."""
    last: tuple[float | None, float] = (None, monotonic())

    def take(progress: "TrainProgress") -> None:
        nonlocal last
        for event in progress.events:
            print(f"Step {event.step:,}, {event.kind}: {event.reason}", file=sys.stderr, flush=True)  # noqa: T201
        # compared by identity, because a NaN never equals itself
        if progress.validation is not last[0] or monotonic() >= last[1] + PAUSE_SECONDS:
            last = (progress.validation, monotonic())
            print(f"Step {progress_words(progress)}", file=sys.stderr, flush=True)  # noqa: T201

    return take


def progress_words(progress: "TrainProgress") -> str:
    words = [f"{progress.step:,} of {progress.total:,}", f"loss {progress.loss:.4g}"]
    tokens = progress.tokens_per_second
    words.append(f"{figure(progress.rows_per_second)} rows/s" if tokens is None else f"{figure(tokens)} tokens/s")
    if progress.peak_bytes:
        percent = 100 * progress.peak_bytes / progress.budget_bytes
        words.append(f"{percent:.0f} % of {format_bytes(progress.budget_bytes)}")
    words += [f"fallback {progress.rung}"] if progress.rung else []
    words += [] if progress.validation is None else [f"validation {progress.validation:.4g}"]
    return ", ".join(words)


def result_json(result: "TaskResult") -> dict[str, Any]:
    names = ("steps", "loss", "validation_loss", "ended", "rung", "peak_bytes")
    return {"run": str(result.run)} | {name: getattr(result, name) for name in names} | result.missing._asdict()


def show_training(result: "TaskResult", console: "Console") -> None:
    say = printer(console)
    why = {"done": "Trained", "patience": "Stopped early", "interrupted": "Interrupted"}[result.ended]
    losses = [] if result.loss is None else [f"loss {result.loss:.6g}"]
    losses += [] if result.validation_loss is None else [f"best validation loss {result.validation_loss:.6g}"]
    say(f"{why} after {result.steps:,} steps" + (f": {', '.join(losses)}." if losses else "."))
    rung = f" It ended on fallback {result.rung} of the plan." if result.rung else ""
    say(f"Measured peak: {format_bytes(result.peak_bytes)}.{rung}")
    if result.scaled:
        say("Inputs and targets were scaled (--normalise), and so are the losses.")
    if any(result.missing):
        say(f"Of all sequences, {result.missing.words()}.")
    say(f"Checkpoints, metrics and events are in {result.run}.")
    if result.ended == "interrupted":
        say(f"To continue: oomguard resume {result.run}")
