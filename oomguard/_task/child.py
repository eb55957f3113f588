"""What a child process does with a task: it tries the user's code on a tiny batch, then traces or measures a step."""

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from oomguard._core.errors import MisuseError, OomguardError
from oomguard._core.units import format_bytes
from oomguard._device.cpu import Cpu
from oomguard._estimate.target import Target
from oomguard._task.batches import Batches, mapped
from oomguard._task.task import Task, line_of, resolve
from oomguard._task.trace import Trace, build, evaluate, make_optimizer, mean_of, trace

USUAL_ROWS = 32  # rows of a microbatch if neither the user nor a loader says
HELD_OUT_ERROR = 0.03  # the largest error of a fit on the pass that it has not seen
POINTS = ((2, 1), (4, 1), (2, 2), (4, 2), (6, 3))
"""Rows and lengths (in units of the shortest) of the passes that a fit is made from. The last one is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a child is asked about a task."""

    source: str | bytes  # the name of the task, or the task itself
    rows: int | None
    steps: int | None
    target: Target
    heap: str
    segments: int
    accumulation: int
    limit_bytes: int  # memory that the child may use
    traced: bool = True  # whether to trace; otherwise tiny real passes are measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A traced or fitted step, and what else the child has found."""

    step: Trace
    rows: int
    runtime_bytes: int  # resident bytes of the process with the user's imports, after a tiny step
    notes: tuple[str, ...]


def load(source: str | bytes) -> Task:
    """The task that was sent, or that is named."""
    if isinstance(source, str):
        return resolve(source)
    import cloudpickle

    try:
        task: Task = cloudpickle.loads(source)
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


def ask(fields: dict[str, Any]) -> Answer:
    """Answer a question given by its fields: the parent does not import this module, since torch takes seconds."""
    return answer(Question(**fields))


def answer(question: Question) -> Answer:
    """Try the task, measure what the process needs without it, and trace or fit one step."""
    task, device = load(question.source), Cpu()
    device.enforce(question.limit_bytes)
    batches = Batches(task)
    seed()
    _try(task, batches, question.steps)
    device.release()
    runtime_bytes = device.reading().now_bytes
    if isinstance(question.source, bytes):  # the tiny step may have left states in it
        task = load(question.source)
        batches = Batches(task)
    rows = question.rows or (batches.samples and batches.samples.batch_size) or USUAL_ROWS
    notes = [batches.samples.words] if batches.samples is not None else []
    step = _traced(task, batches, question, rows, notes) if question.traced else None
    if step is None:
        step = _fitted(task, batches, question, rows)
        notes.append("It is extrapolated from a few tiny passes, since the model could not be traced.")
    if not step.cells:
        notes.append("The model has no recurrent calls that segments could reach: they will not help.")
    return Answer(step=step, rows=rows, runtime_bytes=runtime_bytes, notes=tuple(notes))


def _try(task: Task, batches: Batches, steps: int | None) -> None:
    """Run one real step on a tiny batch, so that errors of the user's code are found where they can be explained."""
    model = build(task).to("cpu").train()
    optimizer = make_optimizer(task, model)
    batch = mapped(lambda tensor: tensor.to("cpu"), batches.tiny(2, steps))
    loss = mean_of(*evaluate(task, model, batch))
    if not math.isfinite(loss.item()):
        raise MisuseError(
            rule="The loss of a tiny batch must be finite",
            got=f"{line_of(task.loss)} returned {loss.item()}",
            advice="Look for divisions by zero, logarithms of zero and lengths of zero.",
        )
    loss.backward()  # type: ignore[no-untyped-call]
    if not isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step()


def _traced(task: Task, batches: Batches, question: Question, rows: int, notes: list[str]) -> Trace | None:
    """Trace the step; None if fake tensors cannot run the model. Memory that the batch itself needs must be there."""
    model, batch = build(task).to("cpu"), batches.make(rows, question.steps)
    try:
        return _run(task, model, batch, question, fake=True)
    except OomguardError as error:
        notes.append(f"The trace stopped: {error.__cause__ or error}.")
    except Exception as error:
        notes.append(f"The trace stopped: {type(error).__name__}: {str(error)[:200]}.")
    return None


def _run(task: Task, model: torch.nn.Module, batch: Any, question: Question, *, fake: bool) -> Trace:
    passes = 2 if question.accumulation > 1 else 1
    options: dict[str, Any] = {"heap": question.heap, "segments": question.segments, "passes": passes, "fake": fake}
    return trace(task, model, batch, question.target, **options)


def _fitted(task: Task, batches: Batches, question: Question, rows: int) -> Trace:
    """Extrapolate from tiny real passes: each phase by rows, length and their product. One pass checks the others."""
    whole = batches.make(rows, question.steps)
    points, steps = list[tuple[int, int]](), list[Trace]()
    for count, factor in POINTS:
        batch = batches.of_length(count, factor)
        points.append((count, batches.steps_of(batch)))
        seed()
        steps.append(_run(task, build(task).to("cpu"), batch, question, fake=False))
    goal = (rows, batches.steps_of(whole))
    peaks: dict[str, int] = {}
    for phase in steps[0].peaks:
        seen = [step.peaks[phase] for step in steps]
        held_out = _extrapolate(points[:-1], seen[:-1], points[-1])
        if abs(held_out / seen[-1] - 1) > HELD_OUT_ERROR:
            got = f"a pass of {points[-1][0]} rows needs {format_bytes(seen[-1])} and was expected to need "
            raise MisuseError(
                rule="Without a trace, the memory of a task must grow evenly with rows and length",
                got=f"{got}{format_bytes(held_out)}",
                advice="No estimate can be given for this model: run it under oomguard.guard, or in smaller batches.",
            )
        peaks[phase] = _extrapolate(points, seen, goal)
    moments = {}
    for phase, (part, labels) in steps[-1].moments.items():
        found = [step.moments[phase][1] for step in steps]
        moments[phase] = part, {
            label: max(0, _extrapolate(points, [sizes.get(label, 0) for sizes in found], goal)) for label in labels
        }
    return replace(steps[-1], peaks=peaks, moments=moments, steps=goal[1])


def _extrapolate(points: list[tuple[int, int]], values: list[int], goal: tuple[int, int]) -> int:
    """The value at a goal by the least squares of constant, rows, steps and their product."""

    def terms(rows: int, steps: int) -> list[float]:
        return [1.0, rows, steps, rows * steps]

    found = np.linalg.lstsq(np.array([terms(*point) for point in points]), np.array(values, dtype=float), rcond=None)[0]
    return int(np.dot(found, terms(*goal)))
