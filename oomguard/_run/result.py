"""The result of a run: how the script ended, whether memory was the reason, and what its processes saw."""

import signal

import msgspec

from oomguard._probe.verdict import Verdict, judge_exit
from oomguard._run.notes import GIVEN, ProcessNotes
from oomguard._run.settings import Start


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of all processes of a script at one moment."""

    seconds: float  # since the start
    resident_bytes: int


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `oomguard run` reports."""

    command: tuple[str, ...]
    exit_code: int  # as a shell tells it: 128 and the number of the signal that ended the script
    signal: str | None  # the name of that signal
    verdict: str | None
    """Name of a Verdict: FITS, OVER, STRAINED, OOM, KILLED or CRASHED. None if it ended for another reason, or if no
    training was seen."""
    message: str  # what ended it, or what the verdict rests on
    seconds: float
    allocator: str | None
    exports: dict[str, str]
    threads: int | None
    peak_bytes: int  # of the largest process, in host memory
    processes: tuple[ProcessNotes, ...]  # those that train
    unwatched: dict[str, str]  # interpreters that could not load oomguard, and why
    samples: tuple[Sample, ...]

    @property
    def first(self) -> ProcessNotes | None:
        """The process that is shown: the first rank, or the one that needs most."""
        ranked = [notes for notes in self.processes if notes.rank is not None]
        return ranked[0] if ranked else max(self.processes, key=lambda notes: notes.peak_bytes, default=None)


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What other batches would need, if all that a batch needs grows with its rows."""

    batch_bytes: int  # what the present batch needs beside weights, gradients, optimizer and all that was there before
    twice_bytes: int  # the peak of a batch with twice the rows
    times: float  # the factor by which a batch that fills the budget is larger


def outlook(notes: ProcessNotes) -> Outlook | None:
    """What larger batches would need; None if no whole update was seen."""
    batch_bytes = notes.training_bytes - notes.base_bytes - notes.lasting_bytes
    if not notes.updates or not notes.calls or batch_bytes <= 0:
        return None
    left_bytes = notes.budget_bytes - notes.base_bytes - notes.lasting_bytes
    return Outlook(
        batch_bytes=batch_bytes,
        twice_bytes=notes.training_bytes + batch_bytes,
        times=max(0.0, left_bytes / batch_bytes),
    )


def judge_run(
    start: Start,
    code: int,
    seconds: float,
    notes: list[ProcessNotes],
    unwatched: dict[str, str],
    peak_bytes: int,
    samples: tuple[Sample, ...],
) -> RunResult:
    """Put the result of a run together. `code` is negative if a signal ended the script."""
    verdict, message = _judge(code, notes)
    return RunResult(
        command=start.words,
        exit_code=code if code >= 0 else 128 - code,
        signal=_name(-code) if code < 0 else None,
        verdict=None if verdict is None else verdict.name,
        message=message,
        seconds=seconds,
        allocator=start.allocator,
        exports=start.exports,
        threads=start.threads,
        peak_bytes=max([peak_bytes, *(_host_bytes(each) for each in notes)]),
        processes=tuple(notes),
        unwatched=unwatched,
        samples=samples,
    )


def _host_bytes(notes: ProcessNotes) -> int:
    return notes.peak_bytes if notes.device == "cpu" else notes.host_peak_bytes


def _judge(code: int, notes: list[ProcessNotes]) -> tuple[Verdict | None, str]:
    failures = [each.failure for each in notes if each.failure is not None]
    ran_out = next((failure for failure in failures if failure.verdict == Verdict.OOM.name), None)
    if code == 0:
        return _judge_finished(notes)
    if ran_out is not None:
        return Verdict.OOM, ran_out.message
    if code == -signal.SIGKILL or code == 128 + signal.SIGKILL:  # the latter from a shell or a launcher in between
        return Verdict.KILLED, "SIGKILL ended it."
    if code == -signal.SIGABRT:  # as C++ ends a process that cannot allocate a few bytes
        free_bytes = min((_committed_left(each) for each in notes), default=None)
        return judge_exit(code, "", free_bytes), f"{_name(-code)} ended it."
    if code in (-signal.SIGSEGV, -signal.SIGBUS):
        return Verdict.CRASHED, f"{_name(-code)} ended it."
    if code < 0:
        return None, f"{_name(-code)} ended it."
    return None, failures[0].message if failures else ""


def _judge_finished(notes: list[ProcessNotes]) -> tuple[Verdict | None, str]:
    """A script that ended well either stayed within its budget or went over it. What is free is no such budget."""
    if any(each.peak_bytes > each.budget_bytes for each in notes if each.budget_name == GIVEN):
        return Verdict.OVER, ""
    return (Verdict.FITS, "") if notes else (None, "")


def _committed_left(notes: ProcessNotes) -> int:
    """The bytes that a process could still commit when it last wrote; many where nothing limits them."""
    if notes.committed_budget_bytes is None or notes.committed_bytes is None:
        return 1 << 60
    return max(0, notes.committed_budget_bytes - notes.committed_bytes)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
