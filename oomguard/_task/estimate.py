"""The estimate of a task: a child process traces one step, and its bytes become the terms and parts of an estimate."""

import math
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oomguard._core.errors import MisuseError, flag
from oomguard._core.units import format_seconds
from oomguard._estimate.breakdown import KNOWN, Estimate
from oomguard._estimate.call import Count
from oomguard._estimate.malloc import ENVIRONMENT, heap_of, reserved_bytes
from oomguard._estimate.margins import OFFSET_BYTES, allocator_on, bare
from oomguard._estimate.moments import MATH_BUFFER_BYTES, TERMS
from oomguard._estimate.target import CUBLAS_HANDLES, Target
from oomguard._spec.candidate import KNOBS, Candidate
from oomguard._task.ask import ask, send
from oomguard._task.task import Task

if TYPE_CHECKING:
    from oomguard._task.child import Answer

SECONDS = 180.0  # time limit of a trace, and of the tiny passes that are run if it ends in that
COUNTED = ("microbatch", "accumulation", "segments", "allocator", "threads")
"""Knobs whose effect on a task is estimated."""


def estimate_task(
    task: Task | str,
    knobs: dict[str, Any],
    target: Target,
    *,
    steps: int | None = None,
    training: bool = True,
    seconds: float = SECONDS,
) -> Estimate:
    """Estimate one optimizer step of a task, or of the task of that name, without running it at full size."""
    _check_counted(Candidate(**{"microbatch": 1} | knobs))
    run = knobs | {"training": training}
    answer = trace_task(task, [run], target, allocator=knobs.get("allocator"), steps=steps, seconds=seconds)[0]
    return to_estimate(answer, Candidate(**knobs | {"microbatch": answer.rows}), target)


def trace_task(
    task: Task | str,
    runs: list[dict[str, Any]],
    target: Target,
    *,
    allocator: str | None,
    steps: int | None,
    seconds: float = SECONDS,
) -> "list[Answer]":
    """Trace steps of a task in one child process, each with its microbatch, accumulation, segments and `training`.

    There are fewer answers than runs (at least two) if they take long.
    """
    heap, most = heap_of(allocator, "native"), max((run.get("microbatch") or 0 for run in runs), default=0)
    question: dict[str, Any] = {
        "source": send(task, most or None, steps),
        "steps": steps,
        "target": target,
        "heap": heap,
    }
    names = {"microbatch": "rows"} | {name: name for name in ("accumulation", "segments", "training")}
    usual = {"rows": None, "accumulation": 1, "segments": 1}
    question |= usual | {"runs": [{names[k]: value for k, value in run.items() if k in names} for run in runs]}
    for traced in (True, False):
        with suppress(TimeoutError):  # a trace that takes too long is followed by a fit
            found: list[Answer] = ask("child", "answers", question | {"traced": traced}, seconds, ENVIRONMENT[heap])
            return found
    raise MisuseError(
        rule=f"The estimate of a task takes at most {format_seconds(seconds)}",
        got="neither a trace nor tiny passes were done by then",
        advice="Give shorter sequences or fewer rows.",
    )


def _check_counted(candidate: Candidate) -> None:
    for name, knob in KNOBS.items():
        if name not in COUNTED and getattr(candidate, name) != knob.field.default:
            got = f"got {flag(name)} {getattr(candidate, name)}"
            advice = f"Leave it out, or change one of {', '.join(map(flag, COUNTED))}."
            raise MisuseError(rule="The estimate of a task does not count every knob", got=got, advice=advice)


def to_estimate(answer: "Answer", candidate: Candidate, target: Target) -> Estimate:
    """The estimate of a traced step."""
    step, runtime = answer.step, target.runtime_bytes if target.cuda else answer.runtime_bytes
    standing = CUBLAS_HANDLES * target.cublas_bytes if target.cuda else MATH_BUFFER_BYTES
    expandable = candidate.allocator == "expandable"

    def total(used: int) -> int:
        used += standing
        return runtime + int(reserved_bytes(used, expandable=expandable) if target.cuda else used)

    used_bytes, labels = step.moments[step.peak]
    terms: dict[str, Count] = {name: runtime if name == "runtime" else 0 for name in TERMS}
    parts: dict[str, int] = {}
    for (term, part), size in labels.items():
        terms[term] += size
        parts[_part(part, term, step.logits)] = parts.get(_part(part, term, step.logits), 0) + size
    total_bytes = total(used_bytes)
    terms["workspace"] += total_bytes - sum(int(size) for size in terms.values())  # what the allocator keeps besides
    on_card: dict[str, Any] = {}
    if target.cuda:
        on_card = {"allocated_bytes": used_bytes + standing, "reserved_bytes": total_bytes - runtime}
    found = Estimate(
        total_bytes=total_bytes,
        terms=terms,
        moment=_moment(*step.peak),
        moments={_moment(*moment): total(size) for moment, (size, _) in step.moments.items()},
        engine=step.engine or "native",
        device=target.device,
        candidate=candidate,
        steps=-(-step.steps // candidate.segments),
        parts=dict(sorted(((name, size) for name, size in parts.items() if size), key=lambda one: -one[1])),
        notes=answer.notes,
        **on_card,
    )
    return replace(found, margin_bytes=_margin_bytes(found, target, fragile="rnn" in step.cells))


def _part(part: str, term: str, logits: str) -> str:
    """The part of a model as reports name it."""
    if term in ("input", "optimizer"):
        return {"input": "batch", "optimizer": "optimizer state"}[term]
    return f"{part} (logits)" if part == logits else part


def _moment(phase: str, part: str) -> str:
    if phase == "optimizer" or (phase, part) == ("forward", "loss"):
        return "optimizer" if phase == "optimizer" else "loss"
    return f"{phase} of {f'the {part}' if part in ('loss', 'model') else part}"


def _margin_bytes(estimate: Estimate, target: Target, *, fragile: bool) -> int:
    """Bytes to add because estimates err, by the errors of specs with the same engine (margins.py)."""
    device, knobs = "cuda" if target.cuda else "cpu", estimate.candidate
    share = bare(device, str(estimate.engine), allocator_on(device, knobs.allocator), "fp32", fragile)
    rest = int(estimate.total_bytes - sum(estimate.terms[term] for term in KNOWN)) + OFFSET_BYTES
    return math.ceil(rest * share)
