"""Fit: whether a model fits a budget by arithmetic, and with which knobs. Nothing is run, and nothing is built here.

A search asks this for every trial before it is built. The knobs are those that code of your own can turn while it
runs: microbatch, accumulation and segments. Others are used only if they are fixed.
"""

from dataclasses import replace
from typing import Any

from oomguard._core.errors import MisuseError, check_names, check_whole
from oomguard._core.units import format_bytes
from oomguard._device.find import find_budget, find_target, open_device
from oomguard._estimate.breakdown import Estimate, estimate_step, margin_bytes
from oomguard._estimate.target import COMMITTED_TENTHS, Target
from oomguard._plan.find import is_here
from oomguard._plan.task import SEGMENTS, TRACE_ERROR
from oomguard._plan.task_curve import Curves, Shape
from oomguard._search.propose import choose
from oomguard._search.screen import screen
from oomguard._search.space import Choices, Problem, make_space
from oomguard._spec.candidate import KNOBS, Candidate, make_candidate, renew
from oomguard._spec.spec import MAX_SEQ, Spec
from oomguard._task.ask import SECONDS, Asker
from oomguard._task.task import Task

TASK_KNOBS = ("microbatch", "segments", "precision", "allocator")


def fit(
    model: Spec | Task | str,
    budget_bytes: int | None,
    device: str,
    *,
    steps: int | None = None,
    here: bool = True,
    **knobs: Any,
) -> Estimate:
    """The estimate of the plain step if it fits, else of the fastest candidate that does, else of the smallest.

    What this process holds beside Python and PyTorch counts, since the model comes on top of it, unless it will not be
    trained `here`.
    """
    target = find_target(device)
    if here:
        budget_bytes = left_bytes(budget_bytes, device)
    elif budget_bytes is None:
        budget_bytes = find_budget(device).limit_bytes
    check_names("knob", knobs, KNOBS)
    checked: object = model
    if not isinstance(checked, Spec | Task | str):
        got = f"got something of type {type(checked).__name__}"
        raise MisuseError(rule="Only a Spec or a Task can be estimated", got=got, advice="Describe the model as one.")
    if isinstance(model, Spec):
        if steps is not None:
            raise MisuseError(rule="A Spec has its own length", got=f"got steps {steps}", advice="Leave steps out.")
        return _fit_spec(model, budget_bytes, target, knobs)
    check_whole("steps", steps, 1, MAX_SEQ)
    return _fit_task(model, budget_bytes, target, steps, knobs)


def left_bytes(budget_bytes: int | None, device: str) -> int:
    """The bytes that a model trained in this process may use with the runtime, beside what the process holds.

    Garbage is collected first, which takes half a second in a process with many packages.
    """
    target = find_target(device)
    budget_bytes = find_budget(device).limit_bytes if budget_bytes is None else budget_bytes
    if not is_here(device) or target.cuda:  # a context may not exist yet, and is not made here
        return budget_bytes
    here = open_device(device)
    here.release()  # what was freed is not held
    now, committed_bytes = here.reading(), find_budget(device).committed_bytes
    left = budget_bytes - max(0, now.now_bytes - target.runtime_bytes)
    if committed_bytes is not None and now.committed_bytes is not None:  # more is committed than held: caches, stacks
        growth_bytes = max(0, committed_bytes - now.committed_bytes) * 10 // COMMITTED_TENTHS
        left = min(left, target.runtime_bytes + growth_bytes)
    return max(1, left)


def _fit_spec(spec: Spec, budget_bytes: int, target: Target, knobs: dict[str, Any]) -> Estimate:
    engine = "onednn" if spec.cell == "lstm" and spec.projection is None else "native"
    usual: dict[str, Any] = {"engine": "cudnn" if target.cuda else engine, "allocator": "system"}
    usual |= {name: knob.field.default for name, knob in KNOBS.items() if knob.searched and name not in usual}
    del usual["microbatch"], usual["segments"]
    fixed = {name: renew(name, value) for name, value in (usual | knobs).items() if name != "accumulation"}
    make_candidate(spec, **{"microbatch": 1} | fixed)  # checks the values

    def estimate(candidate: Candidate) -> Estimate:
        found = estimate_step(spec, candidate, target)
        return replace(found, budget_bytes=budget_bytes, margin_bytes=margin_bytes(spec, found, target))

    plain = estimate(make_candidate(spec, **{"microbatch": spec.batch, "segments": 1} | fixed))
    if plain.fits:  # as it would run without us
        return plain
    space = make_space(spec, target, budget_bytes, Choices(fixed=fixed))
    table = screen(Problem(spec=spec, target=target, space=space, budget_bytes=budget_bytes), ())
    row = choose(table)
    return estimate(table.candidates[table.smallest if row is None else row])


def _fit_task(
    task: Task | str, budget_bytes: int, target: Target, steps: int | None, knobs: dict[str, Any]
) -> Estimate:
    check_names("knob of a task:", knobs, TASK_KNOBS)
    base = Shape(precision=knobs.get("precision", "fp32"), allocator=knobs.get("allocator"))
    with Asker(task, target, steps=steps, allocator=base.allocator, seconds=SECONDS) as asker:
        curves = Curves(asker, target, base, budget_bytes, None)
        tried: list[Estimate] = []
        for shape in _shapes(base, curves, knobs):  # each is traced when it is asked for
            tried.append(_at(curves, shape, knobs))
            if tried[-1].fits:
                return tried[-1]
    return min(tried, key=lambda one: int(one.total_bytes))


def _shapes(base: Shape, curves: Curves, knobs: dict[str, Any]) -> list[Shape]:
    """Ways to run the batch, the fastest first: whole, in segments, in microbatches, in both."""
    longest = curves.usual.step.steps
    counts = [knobs["segments"]] if "segments" in knobs else [1, *(n for n in SEGMENTS if 2 * n <= longest)]
    whole = [base._replace(segments=count) for count in counts]
    pieces = [shape._replace(accumulates=True) for shape in (whole[0], whole[-1])]
    given = knobs.get("microbatch", curves.batch)
    return pieces if given < curves.batch else [*whole, *dict.fromkeys(pieces)]


def _at(curves: Curves, shape: Shape, knobs: dict[str, Any]) -> Estimate:
    """The estimate of a way to run the batch, with the most rows that fit if it may be cut."""
    rows: int = knobs.get("microbatch", curves.batch)
    if shape.accumulates and "microbatch" not in knobs:
        rows = max(1, curves[shape].largest(curves.budget_bytes, TRACE_ERROR, curves.batch))
    safe, peak = curves[shape].safe_bytes(rows, TRACE_ERROR), curves[shape].peak_bytes(rows)
    point, passes = curves[shape].points[0], -(-curves.batch // rows)
    knobs = shape._asdict() | {"microbatch": rows, "accumulation": passes}
    del knobs["accumulates"]
    return replace(
        point,
        candidate=Candidate(**knobs),
        total_bytes=peak,
        margin_bytes=safe - peak,
        budget_bytes=curves.budget_bytes,
        terms={},
        moments={},
        parts={},
    )


def needed_bytes(estimate: Estimate) -> int:
    """The bytes that a process needs, with the margin."""
    return int(estimate.total_bytes + estimate.margin_bytes)


def shortage(least: Estimate) -> str:
    """Why nothing fits, in words."""
    knobs, needed = least.candidate, needed_bytes(least)
    budget = format_bytes(least.budget_bytes or 0)
    pieces = f"microbatch {knobs.microbatch:,}, {knobs.segments:,} segments"
    if not least.runs:
        return f"Nothing fits: {least.engine} cannot run {least.steps:,} steps at once ({pieces})."
    return f"Nothing fits: the smallest candidate ({pieces}) needs {format_bytes(needed)} of {budget}."
