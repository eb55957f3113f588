"""What a child process does with a task: it tries the user's code on a tiny batch, then traces or measures a step."""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch

from oomguard._core.errors import MisuseError, OomguardError
from oomguard._core.units import format_bytes
from oomguard._device.cpu import Cpu
from oomguard._estimate.target import Target
from oomguard._task.batches import Batches
from oomguard._task.layout import Layout, mapped, tensors_of
from oomguard._task.task import USUAL_ROWS, Task, line_of, resolve, user_code
from oomguard._task.times import in_segments, time_of
from oomguard._task.trace import Trace, build, evaluate, make_optimizer, mean_of, trace

PATIENCE_SECONDS = 40.0  # time for several traces of one task
TRAINING = ("oomguard._train.task", "oomguard._train.task_start", "oomguard._cli.app")
"""The modules of a training on the command line, which take 6 MiB of its process and so count as runtime. They are
above this package, so they are loaded by name."""
HELD_OUT_ERROR = 0.03  # the largest error of a fit on the pass that it has not seen
POINTS = ((2, 1), (4, 1), (2, 2), (4, 2), (6, 3))
"""Rows and lengths (in units of the shortest) of the passes that a fit is made from. The last one is held out."""
SCALES = (1, 4)
"""Factors of their rows, tried in turn until the fit holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A step of a task that a child is asked about."""

    rows: int | None
    steps: int | None
    target: Target
    heap: str
    segments: int = 1
    accumulation: int = 1
    precision: str = "fp32"
    traced: bool = True  # whether to trace; otherwise tiny real passes are measured
    training: bool = True  # otherwise an evaluation, without gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A traced or fitted step, and what else the child has found."""

    step: Trace
    rows: int
    runtime_bytes: int  # resident bytes of the process with the user's imports, after a tiny step
    notes: tuple[str, ...]
    row_bytes: int  # bytes of a row of the batch
    layout: Layout  # where a batch holds its rows
    time: Layout  # where it holds its time steps, if the loss is computed piece by piece
    longest: int | None  # steps of the longest sample; 0 if all are equally long, None if a function makes any length


@dataclass(frozen=True, slots=True)
class Subject:
    """The task that this process is asked about."""

    source: str | bytes  # the name of the task, or the task itself
    runtime_bytes: int

    @property
    def batches(self) -> Batches:
        """The batches of the task. A task that was sent is loaded again, since a step may have left states in it."""
        return batches_of(self.source)


_subject: Subject | None = None
_uncut: set[str | bytes] = set()  # tasks that do not run on the first steps of their samples


def subject() -> Subject:
    """The task that this process has begun with."""
    assert _subject is not None, "`begin` comes first"
    return _subject


def batches_of(source: str | bytes) -> Batches:
    """The batches of the task that was sent, or that is named."""
    batches = _named(source) if isinstance(source, str) else Batches(_sent(source))
    batches.cuts = source not in _uncut
    return batches


@cache
def _named(name: str) -> Batches:
    return Batches(resolve(name))


def _sent(content: bytes) -> Task:
    import cloudpickle

    try:
        task: Task = cloudpickle.loads(content)
    except Exception as error:
        raise MisuseError(
            rule="A task is sent to a child process",
            got=f"the child cannot load it ({type(error).__name__}: {error})",
            advice="Define its functions in a module that can be imported, or in the script itself.",
        ) from None
    return task


def seed(number: int = 0) -> None:
    """Seed Python's, NumPy's and torch's random numbers."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def begin(source: str | bytes, steps: int | None, limit_bytes: int) -> None:
    """Limit this process, try the task, and measure what the process needs without it."""
    global _subject
    torch.set_num_threads(1)  # threads that wait for each other took most of the time where other programs run
    device = Cpu()
    device.enforce(limit_bytes)
    seed()
    try_task(source, steps)
    device.release()
    known = None if _subject is None else _subject.runtime_bytes  # the same task with more of its samples
    _subject = Subject(source, device.reading().now_bytes if known is None else known)


def answers(questions: list[dict[str, Any]]) -> list[Answer]:
    """Trace or fit a step for every question, given as the fields of a `Question`.

    After two of them, the others are left out if `PATIENCE_SECONDS` have passed.
    """
    found, began = list[Answer](), time.monotonic()
    for fields in questions:
        if len(found) < 2 or time.monotonic() - began < PATIENCE_SECONDS:
            found.append(_answer(subject().batches, Question(**fields), subject().runtime_bytes))
    return found


def _answer(batches: Batches, question: Question, runtime_bytes: int) -> Answer:
    rows = question.rows or (batches.samples and batches.samples.batch_size) or USUAL_ROWS
    notes = [] if batches.samples is None else batches.samples.notes(rows)
    batch = batches.make(rows, question.steps)
    row_bytes = sum(tensor.nbytes for tensor in tensors_of(batch)) // rows
    step, why = _traced(batches, batch, question) if question.traced else (None, "the trace took too long")
    if step is None:
        step = _fitted(batches, question, rows, why)
        notes.append(f"It is extrapolated from a few tiny passes, since the model could not be traced ({why}).")
    if not step.cells and not batches.task.piecewise:
        notes.append("The model has no recurrent calls that segments could reach: they will not help.")
    facts: dict[str, Any] = {"runtime_bytes": runtime_bytes, "row_bytes": row_bytes, "layout": batches.layout}
    facts |= {"time": time_of(batches), "longest": None if batches.samples is None else batches.samples.longest}
    return Answer(step=step, rows=rows, notes=tuple(notes), **facts)


def try_task(source: str | bytes, steps: int | None, device: str = "cpu") -> None:
    """Run one real step on a tiny batch, so that errors of the user's code are found where they can be explained.

    Afterwards this process holds all that a training loads.
    """
    for module in TRAINING:
        import_module(module)
    batches = batches_of(source)
    try:
        _tiny_step(batches, steps, device)
    except MisuseError:
        if not (batches.cuts and batches.equal_time):
            raise
        _uncut.add(source)  # such as a linear layer over all time steps
        _tiny_step(batches_of(source), steps, device)


def _tiny_step(batches: Batches, steps: int | None, device: str) -> None:
    task = batches.task
    model = build(task, device).train()
    optimizer = make_optimizer(task, model)
    batch = mapped(lambda tensor: tensor.to(device), batches.tiny(2, steps))
    loss = mean_of(*evaluate(task, model, batch))
    if not math.isfinite(loss.item()):
        raise MisuseError(
            rule="The loss of a tiny batch must be finite",
            got=f"{line_of(task.loss)} returned {loss.item()}",
            advice="Look for divisions by zero, logarithms of zero and lengths of zero.",
        )
    with user_code("A step of the task must run", task.loss, "Correct that line."):
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _traced(batches: Batches, batch: Any, question: Question) -> tuple[Trace | None, str]:
    """Trace the step. If fake tensors cannot run the model, there is a reason instead."""
    model = build(batches.task)
    try:
        return _run(batches, model, batch, question, fake=True), ""
    except Exception as error:
        cause = error.__cause__ or error if isinstance(error, OomguardError) else error
        return None, f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"


def _run(batches: Batches, model: torch.nn.Module, batch: Any, question: Question, *, fake: bool) -> Trace:
    passes = 2 if question.accumulation > 1 else 1
    task, segments = in_segments(batches.task, question.segments, time_of(batches))
    options: dict[str, Any] = {"heap": question.heap, "segments": segments, "passes": passes, "fake": fake}
    options |= {"training": question.training, "precision": question.precision}
    return trace(task, model, batch, question.target, **options)


def _fitted(batches: Batches, question: Question, rows: int, why: str) -> Trace:
    """Extrapolate from tiny real passes: each moment by rows, length and their product. One pass checks the others.

    They are counted as in glibc's own heap, where no block is so large that it gets pages of its own. If they do not
    grow evenly, those of more rows are tried: few rows may run in another kernel than many.
    """
    question, goal = replace(question, heap="system"), (rows, batches.steps_of(batches.make(rows, question.steps)))
    got = ""
    for scale in SCALES:
        points, traces = list[tuple[int, int]](), list[Trace]()
        for count, factor in POINTS:
            batch = batches.of_length(scale * count, factor)
            points.append((scale * count, batches.steps_of(batch)))
            seed()
            traces.append(_run(batches, build(batches.task), batch, question, fake=False))
        expected = max(size for size, _ in _grown(traces[:-1], points[:-1], points[-1]).values())
        measured = max(size for size, _ in traces[-1].moments.values())
        if abs(expected / measured - 1) <= HELD_OUT_ERROR:
            return replace(traces[-1], moments=_grown(traces, points, goal), steps=goal[1])
        got = got or f"a tiny pass needs {format_bytes(measured)}, where others let expect {format_bytes(expected)}"
    raise MisuseError(
        rule="The memory of a task that cannot be traced must grow evenly with rows and length",
        got=f"{got} ({why})",
        advice="No estimate can be given for this model: try smaller batches under oomguard.guard.",
    )


def _grown(traces: list[Trace], points: list[tuple[int, int]], goal: tuple[int, int]) -> Any:
    """The moments that all traces have, at another number of rows and steps."""
    found = {}
    for moment in set.intersection(*({*one.moments} for one in traces)):
        totals, sizes = zip(*(one.moments[moment] for one in traces), strict=True)
        labels = {label: _extrapolate(points, [one.get(label, 0) for one in sizes], goal) for label in sizes[-1]}
        found[moment] = _extrapolate(points, totals, goal), {label: max(0, size) for label, size in labels.items()}
    return found


def _extrapolate(points: list[tuple[int, int]], values: Sequence[int], goal: tuple[int, int]) -> int:
    """The value at a goal by the least squares of constant, rows, steps and their product."""

    def terms(rows: int, steps: int) -> list[float]:
        return [1.0, rows, steps, rows * steps]

    found = np.linalg.lstsq(np.array([terms(*point) for point in points]), np.array(values, dtype=float), rcond=None)[0]
    return int(np.dot(found, terms(*goal)))
