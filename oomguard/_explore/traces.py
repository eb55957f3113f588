"""Traces of a task: a child process makes them one by one, and steps between them are interpolated at once."""

import threading
import time
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from oomguard._core.errors import MisuseError
from oomguard._estimate.target import Target
from oomguard._plan.task_curve import Shape
from oomguard._task.ask import Asker
from oomguard._task.task import Task

if TYPE_CHECKING:
    from oomguard._task.check import Finding
    from oomguard._task.child import Answer
    from oomguard._task.live import Label

SLOW_SECONDS = 5.0  # where a trace takes longer, only what an answer needs is traced
END_SECONDS = 5.0  # the thread has so long to end


class Point(NamedTuple):
    """A step that can be traced."""

    shape: Shape
    target: Target
    rows: int | None  # None: those of the loader
    steps: int | None

    @property
    def key(self) -> Hashable:
        """What the trace depends on. All cards need the same, but not in fp16 (engines/cudnn.py)."""
        cuda = self.target.cuda
        return (
            self.shape,
            self.target.device if cuda and self.shape.precision == "fp16" else cuda,
            self.rows,
            self.steps,
        )


Want = Point | str  # a step to trace, or a knob to check


class Tracer:
    """Traces steps and checks knobs in a thread, one after the other. New wants replace those before."""

    def __init__(self, task: Task | str, first: Point) -> None:
        """Trace a first step, so that errors of the user's code are raised here."""
        self._asker = Asker(task, first.target, steps=first.steps, allocator=first.shape.allocator)
        self._made: dict[Hashable, Answer | Finding | MisuseError] = {}
        self._wants: list[Want] = []
        self._news, self._closed = threading.Condition(), False
        self._seconds: list[float] = []
        try:
            self.first = self._trace(first)
        except BaseException:
            self._asker.close()
            raise
        self._made[first._replace(rows=self.first.rows).key] = self.first
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def answer(self, point: Point) -> "Answer | None":
        """The trace of a step; None if there is none yet. Raises the error that it ended with."""
        found: Answer | MisuseError | None = self._made.get(point.key)  # type: ignore[assignment]
        if isinstance(found, MisuseError):
            raise found
        return found

    def finding(self, knob: str) -> "Finding | None":
        """Whether a knob keeps the gradient; None if that is not known yet, or cannot be checked."""
        found: Finding | MisuseError | None = self._made.get(knob)  # type: ignore[assignment]
        return None if isinstance(found, MisuseError) else found

    def want(self, needed: Sequence[Want], useful: Sequence[Want]) -> int:
        """Set what is made next, the first ones first; returns how many are still missing.

        What is only useful is left out where traces are slow.
        """
        slow = len(self._seconds) > 1 and median(self._seconds[1:]) > SLOW_SECONDS
        missing = [want for want in (*needed, *(() if slow else useful)) if not self.has(want)]
        with self._news:
            if missing != self._wants:
                self._wants = missing
                self._news.notify()
        return len(missing)

    def has(self, want: Want) -> bool:
        """Whether a step was traced or a knob was checked, or could not be."""
        return (want if isinstance(want, str) else want.key) in self._made

    def _work(self) -> None:
        while (want := self._next()) is not None:
            key = want if isinstance(want, str) else want.key
            try:
                self._made[key] = self._asker.check(want) if isinstance(want, str) else self._trace(want)
            except MisuseError as error:
                self._made[key] = error
        self._asker.close()

    def _next(self) -> Want | None:
        """The next want as soon as there is one; None at the end."""
        with self._news:
            while not self._closed:
                want = next((want for want in self._wants if not self.has(want)), None)
                if want is not None:
                    return want
                self._news.wait()
        return None

    def _trace(self, point: Point) -> "Answer":
        began = time.monotonic()
        self._asker.target, self._asker.steps = point.target, point.steps
        (found,) = self._asker.trace([point.shape.run | {"microbatch": point.rows}])
        self._seconds.append(time.monotonic() - began)
        return found

    def close(self) -> None:
        """End the thread and the child."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._asker.kill()
        self._thread.join(END_SECONDS)


class Grid:
    """Traces of one shape at some rows and lengths. Other steps lie on planes between them, moment by moment."""

    def __init__(self, answers: "dict[tuple[int, int], Answer]") -> None:
        """`answers`: the traces by rows and length, at every crossing."""
        self._answers = answers
        self._rows, self._lengths = (sorted({*one}) for one in zip(*answers, strict=True))

    def at(self, rows: int, steps: int) -> "Answer":
        """The step with so many rows and so long, as a trace would give it."""
        corners = [
            (by_rows * by_steps, self._answers[row, length])
            for row, by_rows in _weights(self._rows, rows)
            for length, by_steps in _weights(self._lengths, steps)
        ]
        traces = [(weight, answer.step) for weight, answer in corners]
        moments = [one for one in traces[0][1].moments if all(one in trace.moments for _, trace in traces)]
        sizes = {one: int(sum(weight * trace.moments[one][0] for weight, trace in traces)) for one in moments}
        peak = max(sizes, key=sizes.__getitem__)
        labels: dict[Label, float] = {}
        for weight, trace in traces:
            for label, size in trace.moments[peak][1].items():
                labels[label] = labels.get(label, 0.0) + weight * size
        whole = {label: max(0, int(size)) for label, size in labels.items()}
        step = replace(
            traces[-1][1],
            moments={one: (size, whole if one == peak else {}) for one, size in sizes.items()},
            steps=max(1, round(sum(weight * trace.steps for weight, trace in traces))),
        )
        return replace(corners[-1][1], step=step, rows=rows)


def _weights(places: list[int], value: int) -> list[tuple[int, float]]:
    """The places beside a value with their shares; beyond the last, the line through the last two goes on."""
    if len(places) == 1:
        return [(places[0], 1.0)]
    above = min(max(1, bisect_left(places, value)), len(places) - 1)
    low, high = places[above - 1], places[above]
    share = (value - low) / (high - low)
    return [(low, 1 - share), (high, share)]
