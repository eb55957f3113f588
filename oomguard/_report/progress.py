"""The progress of searches and trainings in words, and who sees it; the result of a training as text and JSON."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from oomguard._core.progress import Status, current, listening, nobody
from oomguard._core.units import format_bytes
from oomguard._report.screens import make_screen
from oomguard._report.tables import printer
from oomguard._report.words import figure, pieces_phrase, times

if TYPE_CHECKING:  # a search does not wait for the import of training, nor the reverse
    from rich.console import Console

    from oomguard._search.propose import Probe
    from oomguard._search.run import Progress
    from oomguard._train.loop import TaskResult, TrainProgress

News = TypeVar("News")
ROLES = {"calibrate": "measuring", "explore": "trying", "confirm": "confirming"}


@contextmanager
def showing(progress: bool = True, *, verbose: bool = False) -> Iterator[None]:
    """Show what is told inside: on a terminal, in a notebook, or as lines of a log. Nothing if `progress` is False.

    Inside another one, that one decides. Of several processes that torchrun started, the first one shows.
    """
    if not progress or (current() is None and os.environ.get("RANK", "0") != "0"):
        with listening(nobody):
            yield
    elif current() is not None:
        yield
    else:
        screen = make_screen(verbose=verbose)
        screen.start()
        try:
            with listening(screen.take):
                yield
        finally:
            screen.close()


@contextmanager
def following(
    progress: Callable[[News], None] | bool, status_of: Callable[[News], Status]
) -> Iterator[Callable[[News], None]]:
    """Show what is told inside, and yield a function that shows the progress of a search or a training.

    If `progress` is a function of the user, it takes that progress, and nothing is shown.
    """
    is_own = callable(progress)
    with showing(not is_own and bool(progress)):
        listener = current() or nobody  # a search calls from other threads
        yield progress if callable(progress) else lambda news: listener(status_of(news))


def search_status(progress: "Progress") -> Status:
    """How far a search is, and what runs now."""
    words = [f"Searching: {times(progress.probes, 'probe')} done"]
    if progress.best is not None and progress.best.tokens_per_second is not None:
        words.append(f"fastest so far {figure(progress.best.tokens_per_second)} tokens/s")
    running = [_probe_words(probe, progress.budget_bytes) for probe in progress.running]
    return Status(
        ", ".join(words),
        seconds_left=progress.seconds_left,
        lines=(*(running or ["choosing what to try next"]),),
        topic=f"{progress.probes} {running}",
    )


def _probe_words(probe: "Probe", budget_bytes: int) -> str:
    knobs = probe.candidate
    memory = f"about {format_bytes(probe.peak_bytes)} of {format_bytes(budget_bytes)}"
    what = f"microbatch {knobs.microbatch:,}{pieces_phrase(knobs)}, {times(probe.spec.steps, 'time step')}"
    if (rival := probe.rival) is not None:
        what += f", by turns with microbatch {rival.microbatch:,}{pieces_phrase(rival)}"
    return f"{ROLES[probe.role]} {what}: {memory}"


def train_statuses() -> Callable[["TrainProgress"], Status]:
    """A function that says how far a training is. Events stay on the screen, and a log has every validation."""
    last: float | None = None

    def status(progress: "TrainProgress") -> Status:
        nonlocal last
        new, last = progress.validation is not last, progress.validation  # a NaN equals no other
        return Status(
            f"Step {progress_words(progress)}",
            done=progress.step / max(1, progress.total),
            topic="training",
            milestone=new,
            notes=tuple(f"Step {event.step:,}, {event.kind}: {event.reason}" for event in progress.events),
        )

    return status


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
