"""The estimate of a task: a child process traces one step, and its bytes become the terms and parts of an estimate."""

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oomguard._core.errors import MisuseError, flag
from oomguard._estimate.breakdown import KNOWN, Estimate
from oomguard._estimate.call import Count
from oomguard._estimate.malloc import reserved_bytes
from oomguard._estimate.margins import OFFSET_BYTES, allocator_on, bare
from oomguard._estimate.moments import MATH_BUFFER_BYTES, TERMS
from oomguard._estimate.target import CUBLAS_HANDLES, Target
from oomguard._spec.candidate import KNOBS, Candidate
from oomguard._task.ask import SECONDS, Asker
from oomguard._task.task import Task

if TYPE_CHECKING:
    from oomguard._task.child import Answer

COUNTED = ("microbatch", "accumulation", "segments", "precision", "allocator", "threads")
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
    check_counted(Candidate(**{"microbatch": 1} | knobs))
    how: dict[str, Any] = {"steps": steps, "allocator": knobs.get("allocator"), "seconds": seconds}
    with Asker(task, target, **how, until=time.monotonic() + seconds) as asker:
        answer = asker.trace([knobs | {"training": training}])[0]
    return to_estimate(answer, Candidate(**knobs | {"microbatch": answer.rows}), target)


def check_counted(candidate: Candidate) -> None:
    """Raise if a knob has a value whose effect on a task is not estimated."""
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
    share = bare(device, str(estimate.engine), allocator_on(device, knobs.allocator), str(knobs.precision), fragile)
    rest = int(estimate.total_bytes - sum(estimate.terms[term] for term in KNOWN)) + OFFSET_BYTES
    return math.ceil(rest * share)
