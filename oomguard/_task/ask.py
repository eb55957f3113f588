"""Ask a child process about a task. This module does not import torch, unless the task has data of this process."""

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oomguard._core.errors import MisuseError
from oomguard._core.progress import tell
from oomguard._core.system import Elsewhere
from oomguard._core.units import format_seconds
from oomguard._device.cpu import Cpu
from oomguard._estimate.malloc import ENVIRONMENT, heap_of
from oomguard._estimate.target import Target
from oomguard._spec.spec import MAX_BATCH
from oomguard._task.task import Task, name_of, packed

if TYPE_CHECKING:
    from oomguard._task.check import Finding
    from oomguard._task.child import Answer

SECONDS = 180.0  # time limit of traces or a check, and of the tiny passes that are run if traces take longer
CHILD_SECONDS = 3.0  # the least time for anything: a child takes as long to start
KNOBS = ("accumulation", "segments", "precision", "training")  # what a run may say beside microbatch and allocator


def sampled(task: Task | str) -> Task | str:
    """The task with the samples of its data in the place of the loader, so that they are looked at once."""
    if isinstance(task, str) or task.data is None:
        return task
    from oomguard._task.batches import Batches

    data: Any = Batches(task).samples
    return replace(task, data=data)


def send(task: Task | str, rows: int | None = None, steps: int | None = None) -> str | bytes:
    """The name of a task, or the task as bytes, with only those samples of its data that a child needs."""
    task = sampled(task)
    if isinstance(task, str):
        return task
    if task.data is not None:
        samples: Any = task.data
        task = replace(task, data=samples.reduced(rows or samples.batch_size or 1, steps))
    return packed(replace(task, scheduler=None, validation=None, predict=None))  # needed after the plan


class Asker(AbstractContextManager["Asker", None]):
    """Asks one child process about steps of a task. The child imports the user's code once."""

    def __init__(
        self,
        task: Task | str,
        target: Target,
        *,
        steps: int | None = None,
        allocator: str | None = None,
        seconds: float = SECONDS,
        until: float = math.inf,
    ) -> None:
        self.until = until  # when all work must be done, as `time.monotonic` counts
        self.task, self.target, self.steps, self.seconds = sampled(task), target, steps, seconds
        self.traced = True  # whether traces are quick enough; tiny passes are measured otherwise
        self._variables = ENVIRONMENT[heap_of(allocator, "native")]
        self._child: Elsewhere | None = None
        self._doing = ""  # what the child does, in words
        self._rows = 0  # rows of the largest batch that the child has samples for
        self._steps = steps  # the length of those samples

    def trace(self, runs: Sequence[dict[str, Any]]) -> "list[Answer]":
        """Trace steps, each described by its knobs and `training`.

        There are fewer answers than runs (at least two) if they take long.
        """
        usual: dict[str, Any] = {"steps": self.steps, "target": self.target}
        rows = max(run.get("microbatch") or 1 for run in runs)
        began = time.monotonic()
        self._doing = f"Tracing a step of {name_of(self.task)} with a microbatch of {rows:,}, without running it"
        for traced in (True, False) if self.traced else (False,):
            self.traced = traced
            if not traced:
                self._doing = f"Tracing took too long: running tiny passes of {name_of(self.task)}"
            questions = [usual | _fields(run) | {"traced": traced} for run in runs]
            with suppress(TimeoutError):  # traces that take too long are followed by a fit
                found: list[Answer] = self._ask("child", "answers", questions, seconds=self._seconds(), rows=rows)
                return found
        got = f"neither a trace nor tiny passes were after {format_seconds(time.monotonic() - began)}"
        advice = "Give shorter sequences or fewer rows."
        advice = advice if math.isinf(self.until) else "Raise --timeout, or give shorter sequences or fewer rows."
        raise MisuseError(rule="The estimate of a task must be done in time", got=got, advice=advice)

    def check(self, knob: str) -> "Finding":
        """Compare the gradient with a knob with the plain step's on a tiny batch."""
        self._doing = f"Checking on a tiny batch whether {knob} keeps the gradient"
        seconds = self._seconds()
        try:
            found: Finding = self._ask("check", "finding", knob, seconds=seconds)
        except TimeoutError:
            from oomguard._task.check import unchecked

            return unchecked(knob, seconds)
        return found

    def _seconds(self) -> float:
        """The time limit of the next work: half of what is left, so that other work has some too."""
        return max(CHILD_SECONDS, min(self.seconds, self.left / 2))

    @property
    def left(self) -> float:
        """Seconds until all work must be done."""
        return self.until - time.monotonic()

    def _ask(self, module: str, function: str, *arguments: Any, seconds: float, rows: int = 1) -> Any:
        """Call a function in the child, which begins with the task and as much memory as is free."""
        until = time.monotonic() + seconds
        if self._child is None:
            self._child, self._rows = Elsewhere(self._variables), 0
        try:
            if rows > self._rows or (self.steps != self._steps and self._sends_samples):
                tell("Starting a process with PyTorch and your code, and trying a tiny step")
                begin = send(self.task, rows, self.steps), self.steps, Cpu().budget().left_bytes
                self._child.call("oomguard._task.child", "begin", *begin, seconds=seconds)
                self._rows, self._steps = rows if self._sends_samples else MAX_BATCH, self.steps
            tell(self._doing)
            left = until - time.monotonic()
            return self._child.call(f"oomguard._task.{module}", function, *arguments, seconds=left)
        except TimeoutError:
            self.close()
            raise
        except (ChildProcessError, MemoryError) as error:
            self.close()
            advice = "Run the loss on one small batch to see why; it may have run out of memory."
            got = f"its process ended early ({error or 'out of memory'})"
            raise MisuseError(rule="A task must survive a tiny step", got=got, advice=advice) from None

    @property
    def _sends_samples(self) -> bool:
        """Whether the child is given the samples of a batch. Otherwise it makes batches itself."""
        return not isinstance(self.task, str) and self.task.data is not None

    def kill(self) -> None:
        """End the child at once. May be called while another thread waits for it."""
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """End the child, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.__exit__()

    def __exit__(self, *error: object) -> None:
        self.close()


def _fields(run: dict[str, Any]) -> dict[str, Any]:
    """The fields of a question that the knobs of a run give."""
    own = {name: run[name] for name in KNOBS if name in run}
    return own | {"rows": run.get("microbatch"), "heap": heap_of(run.get("allocator"), "native")}
