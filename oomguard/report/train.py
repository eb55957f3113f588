"""A training on the screen: a bar while it runs, or lines where there is no terminal, and what came of it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

from oomguard.plan.phrases import figure
from oomguard.report.common import printer
from oomguard.train.job import Result, Told
from oomguard.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

PAUSE_SECONDS = 60.0
"""Between two lines, unless there is something to tell."""


@contextmanager
def follow(*, quiet: bool = False) -> Iterator[Callable[[Told], None] | None]:
    """What follows a training on stderr: a bar, or lines in a log; None if nobody wants to see it."""
    if quiet or not sys.stderr.isatty():
        yield None if quiet else in_lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    columns = (
        BarColumn(bar_width=10, table_column=Column(min_width=10)),
        TimeRemainingColumn(compact=True, table_column=Column(min_width=7)),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, ratio=1)),  # cut if the terminal is narrow
    )
    with Progress(*columns, console=Console(file=sys.stderr), expand=True, transient=True) as bar:
        task = bar.add_task("reading the data", total=None)

        def take(told: Told) -> None:
            bar.update(task, description=told_words(told), completed=told.step, total=told.total)

        yield take


def in_lines() -> Callable[[Told], None]:
    """A line for each event and each validation, otherwise one a minute: what a log of hours should hold."""
    last: tuple[float | None, float] = (None, monotonic())

    def take(told: Told) -> None:
        nonlocal last
        for event in told.events:
            _log(f"Step {event.step:,}, {event.kind}: {event.reason}")
        # another object, not another number: a NaN is never the same
        if told.validation is not last[0] or monotonic() >= last[1] + PAUSE_SECONDS:
            last = (told.validation, monotonic())
            _log(f"Step {told_words(told)}")

    return take


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def told_words(told: Told) -> str:
    """A training in one line.

    >>> told_words(Told(step=3, total=10, loss=0.25, validation=None, tokens_per_second=1234.5, peak_bytes=900 << 20,
    ...                 budget_bytes=1 << 30, rung=1))
    '3 of 10, loss 0.25, 1,234 tokens/s, 88 % of 1.00 GiB, fallback 1'
    """
    words = [f"{told.step:,} of {told.total:,}", f"loss {told.loss:.4g}", f"{figure(told.tokens_per_second)} tokens/s"]
    if told.peak_bytes:
        words.append(
            f"{told.peak_bytes / told.budget_bytes:.0%}".replace("%", " %") + f" of {format_bytes(told.budget_bytes)}"
        )
    words += [f"fallback {told.rung}"] if told.rung else []
    return ", ".join([*words, *([] if told.validation is None else [f"validation {told.validation:.4g}"])])


def result_json(result: Result) -> dict[str, Any]:
    """As `--json` prints it."""
    names = ("steps", "loss", "validation_loss", "ended", "rung", "peak_bytes")
    return {"run": str(result.run)} | {name: getattr(result, name) for name in names} | result.missing._asdict()


def show_training(result: Result, console: "Console") -> None:
    """What came of a training, in a few lines."""
    say = printer(console)
    why = {"done": "Trained", "patience": "Stopped early", "interrupted": "Interrupted"}[result.ended]
    losses = [] if result.loss is None else [f"loss {result.loss:.6g}"]
    losses += [] if result.validation_loss is None else [f"best validation loss {result.validation_loss:.6g}"]
    say(f"{why} after {result.steps:,} steps" + (f": {', '.join(losses)}." if losses else "."))
    rung = f" It ended on fallback {result.rung} of the plan." if result.rung else ""
    say(f"It peaked at {format_bytes(result.peak_bytes)}.{rung}")
    if any(result.missing):
        say(f"Of all sequences, {result.missing.words()}.")
    say(f"Checkpoints, metrics and events are in {result.run}.")
    if result.ended == "interrupted":
        say("To go on, add --resume.")
