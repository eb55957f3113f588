"""TaskPlan: how to run a task, why, and what to fall back to. It names the task and contains no code."""

from typing import Annotated, Any, Literal

import msgspec

from oomguard._estimate.target import Target
from oomguard._plan.buckets import Positive
from oomguard._plan.value import Amount, Environment, Figures
from oomguard._predict.calibration import Prediction, Size
from oomguard._probe.record import TaskRecord
from oomguard._spec.candidate import Candidate

Key = str | int
TaskAim = Literal["throughput", "batch"]
UNRUN = "This candidate was not run, and its peak is predicted."  # begins a note if the device is here


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one part of a batch holds the rows or the time steps, as `oomguard._task.batches.Axis` does."""

    path: tuple[Key, ...]  # the keys that lead to the part
    kind: Literal["dimension", "blocks", "interleaved", "list", "count", "packed"]
    dimension: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    lengths: tuple[Key, ...] | None = None  # the part that has the length of each block


class TaskRung(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fallback: a smaller microbatch of the same batch."""

    candidate: Candidate
    expected: Prediction


class TaskPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to run a task: `oomguard.find_feasible_config(task)` makes it, `oomguard.train` and `stepper` run it.

    >>> import oomguard, torch
    >>> task = oomguard.Task(model=lambda: torch.nn.GRU(3, 4), loss=lambda model, batch: model(batch)[0].mean(),
    ...                      batch=lambda rows, steps: torch.randn(steps, rows, 3))
    >>> plan = oomguard.find_feasible_config(task, steps=5, batch=4, device="t4")
    >>> plan.batch, plan.candidate.accumulation, plan.record
    (4, 1, None)
    """

    version: Literal[1] = 1
    """The version of this format."""
    task: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
    """The name of the task, or of the function that builds its model. A plan contains no code."""
    batch: Positive
    """Rows of a batch. With `maximize` batch, the largest that fits in one pass."""
    seq: Positive | None = None
    """Time steps of the batches; None: the longest samples of the task's data."""
    candidate: Candidate
    """The chosen candidate."""
    where: Target
    """The device."""
    budget_bytes: Size
    """Bytes that the training process may use there."""
    asked_budget_bytes: Size | None = None
    """The budget that the user gave, if any; if it is larger than `budget_bytes`, less was free."""
    maximize: TaskAim
    """The aim: the fewest passes for the batch, or the largest batch in one pass."""
    allow: tuple[str, ...] = ()
    """The lossy knobs that were allowed."""
    lossy: dict[str, str] = {}
    """The knobs of the candidate that change the gradient of this task, each with the reason."""
    estimate: Figures
    """The estimate by a trace, before any probe."""
    expected: Prediction
    """The prediction by the trace and the probes before that of the candidate itself."""
    record: TaskRecord | None
    """The run of this candidate with the worst batch; None if the device is not here, or if there was no time."""
    time_spread: Amount | None = None
    """By which share the median pass took longer than the fastest one; None if it was not run."""
    fallbacks: tuple[TaskRung, ...]
    """Smaller microbatches, down to one row."""
    plain_bytes: Size
    """The predicted peak of the whole batch in one pass, without segments."""
    evaluation_rows: Positive | None = None
    """The largest microbatch of an evaluation, without gradients, by a trace; None if none is known to fit."""
    layout: tuple[Part, ...] = ()
    """Where a batch holds its rows; empty if its parts do not tell."""
    time: tuple[Part, ...] = ()
    """Where a batch holds its time steps, if the loss is computed piece by piece: then segments are such pieces."""
    row_bytes: Size
    """Bytes of a row of the worst batch."""
    notes: tuple[str, ...] = ()
    """What the plan rests on, in sentences."""
    records: tuple[TaskRecord, ...]
    """The records of all probes."""
    seconds: Amount
    """Seconds that the search took."""
    environment: Environment
    """The machine and the software that the plan was made with."""
    exports: dict[str, str]
    """Environment variables to start the training process with: the allocator's settings."""

    @property
    def peak_bytes(self) -> int:
        """The peak: measured if the candidate was run, otherwise expected."""
        measured = None if self.record is None else self.record.peak_bytes
        return self.expected.peak_bytes if measured is None else measured

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds of an optimizer step with the worst batch; None if it was not run."""
        return None if self.record is None else self.record.seconds_per_step

    @property
    def confirmed(self) -> bool:
        """Whether this very candidate ran with the worst batch."""
        return self.record is not None and self.record.verdict.ran

    @property
    def unrun(self) -> str | None:
        """Why this candidate was not run although the device is here, and what to do about it; otherwise None."""
        return next((note for note in self.notes if note.startswith(UNRUN)), None)

    @property
    def ooms(self) -> int:
        """The number of probes that ran out of memory or over the budget."""
        return sum(not record.verdict.ran for record in self.records)

    def to_dict(self) -> dict[str, Any]:
        """The plan as its JSON has it."""
        return dict(msgspec.to_builtins(self))

    def __repr__(self) -> str:
        from oomguard._report.notebook import plan_line

        return f"<TaskPlan {plan_line(self)}>"

    def __str__(self) -> str:
        """The result in five lines."""
        from oomguard._report.notebook import plan_lines

        return plan_lines(self)

    def _repr_html_(self) -> str:
        """The plan as a notebook shows it."""
        from oomguard._report.notebook import task_plan_html

        return task_plan_html(self)
