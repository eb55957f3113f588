"""Advice on a task: what segments and smaller microbatches would save, by traces in the child that estimates it."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oomguard._core.units import format_bytes
from oomguard._estimate.breakdown import Estimate
from oomguard._estimate.target import Target
from oomguard._plan.advice import WORTH, in_flags
from oomguard._plan.task import SEGMENTS
from oomguard._spec.candidate import Candidate
from oomguard._task.ask import SECONDS, Asker
from oomguard._task.estimate import check_counted, to_estimate
from oomguard._task.task import USUAL_ROWS, Task

ROWS = 5  # numbers of rows that are tried: a half, a quarter, ...


def estimate_and_advise(
    task: Task,
    knobs: dict[str, Any],
    target: Target,
    budget_bytes: int,
    *,
    steps: int,
    training: bool = True,
    splits: bool = True,
    seconds: float = SECONDS,
) -> tuple[Estimate, list[str]]:
    """Estimate a task, and say in sentences which knob helps. `splits`: microbatches keep the gradient of the batch."""
    knobs = {"microbatch": USUAL_ROWS} | knobs
    check_counted(Candidate(**knobs))
    changes = changes_of(knobs, steps, splits) if training else []
    how: dict[str, Any] = {"steps": steps, "allocator": knobs.get("allocator"), "seconds": seconds}
    with Asker(task, target, **how, until=time.monotonic() + seconds) as asker:
        answers = asker.trace([knobs | change | {"training": training} for change in ({}, *changes)])
    made = [
        replace(to_estimate(answer, Candidate(**knobs | change), target), budget_bytes=budget_bytes)
        for answer, change in zip(answers, ({}, *changes), strict=False)  # traces that would take long are left out
    ]
    return made[0], advice_words(made[0], [*zip(changes, made[1:], strict=False)])


def changes_of(knobs: dict[str, Any], steps: int, splits: bool) -> list[dict[str, Any]]:
    """Knobs to try, the cheapest first: more segments, then fewer rows, then both."""
    own, rows, passes = knobs.get("segments", 1), knobs["microbatch"], knobs.get("accumulation", 1)
    pieces = [{"segments": count} for count in SEGMENTS if count > own and 2 * count <= steps]
    sizes = [-(-rows // 2**power) for power in range(1, ROWS + 1)] if splits else []
    fewer: list[dict[str, Any]] = [
        {"microbatch": size, "accumulation": -(-rows * passes // size)} for size in dict.fromkeys(sizes) if size < rows
    ]
    return [*pieces, *fewer, *([pieces[-1] | fewer[-1]] if pieces and fewer else [])]


def advice_words(now: Estimate, tried: Sequence[tuple[dict[str, Any], Estimate]]) -> list[str]:
    """The first change of each kind that makes it fit; without any, the one that saves most, if it is worth it."""
    useful = [(change, less) for change, less in tried if less.total_bytes < (1 - WORTH) * now.total_bytes]
    enough = [(change, less) for change, less in tried if less.fits and not now.fits]
    kinds = [{"segments"}, {"microbatch", "accumulation"}, {"segments", "microbatch", "accumulation"}]
    lines = list[str]()
    for kind in kinds:
        own = [(change, less) for change, less in enough or useful if {*change} == kind]
        if own and (len(kind) < 3 or not lines):
            change, less = own[0] if enough else min(own, key=lambda one: int(one[1].total_bytes))
            sizes = f"{format_bytes(int(less.total_bytes))} instead of {format_bytes(int(now.total_bytes))}"
            lines.append(f"{in_flags(**change)}, {_cost(change)}: {sizes}.")
    return lines


def _cost(change: dict[str, Any]) -> str:
    if "microbatch" not in change:
        return "the same gradient for one more forward pass of the recurrent layers"
    return f"the same gradient in {change['accumulation']:,} passes"
