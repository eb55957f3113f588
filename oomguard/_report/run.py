"""The run of a script in words: how it starts, what is told while it runs, and the summary at its end."""

import math
import shlex
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from oomguard._core.units import format_bytes, format_seconds, read_budget
from oomguard._estimate.malloc import ENVIRONMENT
from oomguard._probe.verdict import Verdict
from oomguard._report.tables import Section, Table, show_sections
from oomguard._report.words import times
from oomguard._run.notes import CallNotes, ProcessNotes
from oomguard._run.result import RunResult, outlook
from oomguard._run.settings import RunOptions, Start

if TYPE_CHECKING:
    from rich.console import Console

PAGE = "A page", (".html", ".htm"), "run.html"  # what is written, its endings, and an example
NEAR_PERCENT, MORE_PERCENT = 90, 3  # of the budget: from which it is told, and how much more is told again
PAUSE_SECONDS = 60.0  # seconds between two lines about how near the limit it is


def start_words(start: Start, options: RunOptions) -> str:
    """The settings that a script starts with, in one line."""
    heap = "heap settings of the environment" if start.allocator is None else f"allocator {start.allocator}"
    threads = "" if start.threads is None else f", {times(start.threads, 'thread')}"
    budget_bytes = read_budget(options.budget)
    budget = "what is free" if budget_bytes is None else format_bytes(budget_bytes)
    dry = "" if options.dry_run is None else f" It ends after {times(options.dry_run, 'update')}."
    return f"running with {heap}{threads}, budget {budget}.{dry}"


def call_words(call: CallNotes) -> str:
    """A recurrent call in words, such as `lstm 64 → 256 × 2 layers (train.py:42)`."""
    directions = " × 2 directions" if call.directions == 2 else ""
    return f"{call.cell} {call.inputs} → {call.hidden} × {times(call.layers, 'layer')}{directions} ({call.where})"


def size_words(call: CallNotes) -> str:
    return f"T = {call.steps:,}, {times(call.rows, 'row')}"


class RunNews:
    """Says in few lines what happens in the first process of a script."""

    def __init__(self, say: Callable[[str], None], options: RunOptions) -> None:
        self._say, self._options = say, options
        self._failed, self._segmented, self._first_update = set[str](), set[str](), True
        self._percent, self._near_at = NEAR_PERCENT - MORE_PERCENT, -math.inf

    def begin(self, start: Start) -> None:
        self._say(start_words(start, self._options))

    def take(self, processes: Sequence[ProcessNotes], unwatched: dict[str, str]) -> None:
        for python in unwatched.keys() - self._failed:
            self._failed.add(python)
            self._say(unwatched_words(python, unwatched[python]))
        for notes in processes[:1]:
            self._take_segments(notes)
            self._take_update(notes)
            self._take_memory(notes)

    def _take_segments(self, notes: ProcessNotes) -> None:
        for call in notes.calls:
            if call.in_segments and call.where not in self._segmented:
                self._segmented.add(call.where)
                need, used = format_bytes(call.plain_bytes), format_bytes(call.used_bytes)
                self._say(
                    f"{call_words(call)} needs {need} at once for {size_words(call)}. It runs in "
                    f"{times(call.segments, 'segment')} with about {used}, with the same gradient."
                )

    def _take_update(self, notes: ProcessNotes) -> None:
        if notes.updates and self._first_update:
            self._first_update = False
            memory = f"{format_bytes(notes.training_bytes)} of {format_bytes(notes.budget_bytes)}"
            self._say(f"the peak so far is {memory} ({notes.budget_name}).{_outlook_words(notes)}")

    def _take_memory(self, notes: ProcessNotes) -> None:
        percent = 100 * notes.now_bytes // max(1, notes.budget_bytes)
        if percent >= self._percent + MORE_PERCENT and monotonic() - self._near_at >= PAUSE_SECONDS:
            self._percent, self._near_at = percent, monotonic()
            largest = notes.largest
            call = (
                "" if largest is None else f" The call that needs most is {call_words(largest)}, {size_words(largest)}."
            )
            memory = f"{format_bytes(notes.now_bytes)} of {format_bytes(notes.budget_bytes)}"
            self._say(f"{percent} % of the budget is in use, {memory} ({notes.budget_name}).{call}")


def unwatched_words(python: str, reason: str) -> str:
    return (
        f"oomguard cannot be imported by {python} ({reason}), so this process is not watched, and no call runs in "
        f"segments. The heap settings apply. Install oomguard there: {shlex.quote(python)} -m pip install oomguard"
    )


def _outlook_words(notes: ProcessNotes) -> str:
    found = outlook(notes)
    if found is None:
        return ""
    words = f" A batch twice as large would need about {format_bytes(found.twice_bytes)}"
    fits = "fits" if found.twice_bytes <= notes.budget_bytes else "does not fit without more segments"
    return f"{words}, which {fits}."


def show_run(result: RunResult, console: "Console") -> None:
    """Print the summary of a run."""
    show_sections(explain_run(result), console)


def explain_run(result: RunResult) -> list[Section]:
    """The summary of a run in sections: the result, the calls, and other processes."""
    rows = tuple((name, value) for name, value in run_facts(result) if value)
    table = Table(header=("", ""), rows=rows, align="ll")
    sections = [Section(title=f"oomguard: {result_words(result)}", sentences=tuple(_remarks(result)), table=table)]
    if result.first is not None and len(result.first.calls) > 1:
        sections.append(Section(title="Recurrent calls", table=calls_table(result.first)))
    if len(result.processes) > 1:
        sections.append(Section(title="Processes", table=_processes_table(result.processes)))
    return sections


def result_words(result: RunResult) -> str:
    """How the script ended, in one sentence."""
    after = f"after {format_seconds(result.seconds)}"
    if result.verdict == Verdict.OOM.name:
        return f"The script ran out of memory {after} (exit code {result.exit_code})."
    if result.verdict == Verdict.KILLED.name:
        return f"The script was killed {after} (SIGKILL, exit code {result.exit_code})."
    if result.signal is not None:
        return f"The script was ended by {result.signal} {after} (exit code {result.exit_code})."
    if any(notes.dry for notes in result.processes):
        return f"The dry run ended {after}."
    return f"The script ended with exit code {result.exit_code} {after}."


def _remarks(result: RunResult) -> list[str]:
    remarks = [unwatched_words(*each) for each in result.unwatched.items()]
    if result.verdict == Verdict.OOM.name:
        remarks.append(f"{result.message.rstrip('.')}. {_advice(result)}")
    elif result.verdict in (Verdict.KILLED.name, Verdict.CRASHED.name):
        remarks.append(Verdict[result.verdict].advice)
    elif result.verdict == Verdict.OVER.name:
        remarks.append("It went over the budget. The script itself ended well.")
    if not result.processes and not result.unwatched:
        rest = "Programs other than Python, and python -I, -E and -S, cannot be watched."
        remarks.append(f"No training with PyTorch was seen. ({rest})")
    return remarks


def _advice(result: RunResult) -> str:
    first = result.first
    if first is None or first.largest is None:
        return "Its recurrent calls, if any, had not begun."
    if any(call.in_segments for call in first.calls):
        return "Calls ran in segments already: what is around them needs the memory. Use a smaller batch, or --budget."
    return "Give --budget with less than what is free, so that calls run in segments, or use a smaller batch."


def run_facts(result: RunResult) -> list[tuple[str, str]]:
    """The figures of a run by name; empty where nothing is known."""
    notes = result.first
    facts = [("command", shlex.join(result.command))]
    if notes is None:
        peak = format_bytes(result.peak_bytes) if result.peak_bytes else ""
        return [*facts, ("peak", peak), ("settings", _settings(result))]
    device = "" if notes.device == "cpu" else f" on {notes.device}"
    share = f"{100 * notes.peak_bytes / max(1, notes.budget_bytes):.0f} %"
    peak = (
        f"{format_bytes(notes.peak_bytes)}{device}, {share} of {format_bytes(notes.budget_bytes)} ({notes.budget_name})"
    )
    updates = f"{notes.updates:,}"
    if notes.updates > 1:
        updates += f", {format_seconds(notes.seconds / (notes.updates - 1))} each"
    calls, pieces = sum(call.calls for call in notes.calls), sum(call.in_segments for call in notes.calls)
    in_segments = f"{pieces:,} of {times(calls, 'call')}" if calls else ""
    largest = notes.largest
    return [
        *facts,
        ("peak", peak),
        ("host peak", format_bytes(result.peak_bytes) if device else ""),
        ("updates", updates if notes.updates else ""),
        ("largest call", "" if largest is None else _largest_words(largest)),
        ("in segments", in_segments),
        ("recomputed", _recomputed(notes) if pieces else ""),
        ("larger batch", _larger(notes)),
        ("settings", _settings(result)),
    ]


def _largest_words(call: CallNotes) -> str:
    return f"{call_words(call)}, {size_words(call)}: {format_bytes(call.plain_bytes)} at once"


def _recomputed(notes: ProcessNotes) -> str:
    share = f", {100 * notes.recomputed_seconds / notes.seconds:.0f} % of the time" if notes.seconds else ""
    retried = f"; {times(notes.retried, 'call')} ran out of memory first" if notes.retried else ""
    return f"{format_seconds(notes.recomputed_seconds)}{share}{retried}"


def _larger(notes: ProcessNotes) -> str:
    found = outlook(notes)
    if found is None:
        return ""
    most = (
        f"the budget is full at about {found.times:.1f} times the rows" if found.times >= 1 else "nothing larger fits"
    )
    return f"twice the rows would need about {format_bytes(found.twice_bytes)}; {most}"


def _settings(result: RunResult) -> str:
    heap = "heap settings of the environment" if result.allocator is None else f"allocator {result.allocator}"
    names = {name for variables in ENVIRONMENT.values() for name in variables}
    set_ones = " ".join(f"{name}={value}" for name, value in result.exports.items() if name in names)
    threads = "" if result.threads is None else f", {times(result.threads, 'thread')}"
    return f"{heap}{f' ({set_ones})' if set_ones else ''}{threads}"


def calls_table(notes: ProcessNotes) -> Table:
    """The recurrent calls of a process, those that need most first."""
    calls = sorted(notes.calls, key=lambda call: -call.plain_bytes)
    rows = tuple(
        (
            call_words(call),
            f"{call.steps:,} × {call.rows:,}",
            format_bytes(call.plain_bytes),
            f"{call.calls:,}",
            f"{call.in_segments:,}",
            f"{call.segments:,}",
        )
        for call in calls
    )
    header = ("call", "steps × rows", "at once", "calls", "in segments", "at most")
    return Table(
        header=header,
        rows=rows,
        align="lrrrrr",
        caption="Recurrent calls: the largest of each, what it needs at once, and how many ran in segments.",
        drops=("at most", "steps × rows"),
    )


def _processes_table(processes: Sequence[ProcessNotes]) -> Table:
    rows = tuple(
        (
            str(notes.pid) if notes.rank is None else f"rank {notes.rank}",
            format_bytes(notes.peak_bytes),
            format_bytes(notes.budget_bytes),
            f"{notes.updates:,}",
            f"{sum(call.in_segments for call in notes.calls):,}",
        )
        for notes in processes
    )
    return Table(header=("process", "peak", "budget", "updates", "in segments"), rows=rows, align="lrrrr")
