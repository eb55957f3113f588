"""Tasks on cards: each task is traced once, and every card reads the same traces."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oomguard._core.progress import tell
from oomguard._estimate.cards import Card, card
from oomguard._estimate.target import on_card
from oomguard._fleet.pairs import Pairs
from oomguard._fleet.read import Job
from oomguard._plan.task import SEGMENTS, TRACE_ERROR
from oomguard._spec.candidate import Candidate
from oomguard._task.ask import Asker
from oomguard._task.estimate import to_estimate
from oomguard._task.task import name_of

if TYPE_CHECKING:
    from oomguard._task.child import Answer

TRACED_ON = "a100-80gb"
"""The card that tasks are traced for. Traces are in fp32, in which the kernels of all cards since sm 6.0 need the same.
"""
Traces = list[tuple[dict[str, Any], "Answer"]]
"""Knobs and traced steps, from the fewest passes and pieces on."""


def fit_task(job: Job, number: int, cards: Sequence[Card], pairs: Pairs) -> int:
    """Fit a task to each card, and return the rows of its batch."""
    tell(f"Tracing {name_of(job.task)}")
    with Asker(job.task, on_card(card(TRACED_ON)), steps=job.seq) as asker:
        batch, traces = _traces(asker, job)
    for column, known in enumerate(cards):
        target, least_bytes = on_card(known), 0
        for knobs, answer in traces:
            candidate = Candidate(microbatch=answer.rows, **knobs | {"accumulation": -(-batch // answer.rows)})
            estimate = to_estimate(answer, candidate, target)
            peak_bytes = int(estimate.total_bytes)
            margin_bytes = int(TRACE_ERROR * int(estimate.growth_bytes))
            if peak_bytes + margin_bytes <= known.usable_bytes:
                sizes = {"peak_bytes": peak_bytes, "margin_bytes": margin_bytes}
                pairs.put(number, column, candidate, **sizes)
                break
            least_bytes = min(least_bytes or peak_bytes + margin_bytes, peak_bytes + margin_bytes)
        else:
            pairs.put(number, column, None, least_bytes=least_bytes)
    return batch


def _traces(asker: Asker, job: Job) -> tuple[int, Traces]:
    """The rows of a batch, and steps of it: whole, in smaller and smaller microbatches, and in segments.

    Microbatches and segments are left out where they change the gradient of this task, unless that is allowed.
    """
    first = asker.trace([{"microbatch": job.batch}, {"microbatch": 1}])[0]
    batch, runs = first.rows, list[dict[str, Any]]()
    if batch > 1 and _usable(asker, job, "microbatch"):
        halves = [-(-batch // 2**power) for power in range(1, batch.bit_length())]
        runs += [{"microbatch": rows, "accumulation": -(-batch // rows)} for rows in dict.fromkeys(halves)]
    if (first.step.cells or first.time) and _usable(asker, job, "segments"):
        smallest = runs[-1] if runs else {"microbatch": batch}
        runs += [smallest | {"segments": segments} for segments in SEGMENTS]
    answers = asker.trace(runs) if runs else []
    pieces = [{name: run[name] for name in run if name == "segments"} for run in runs]
    return batch, [({}, first), *zip(pieces, answers, strict=False)]  # fewer answers if traces take long


def _usable(asker: Asker, job: Job, knob: str) -> bool:
    """Whether a knob keeps the gradient of the task, or is allowed to change it."""
    return knob in job.allow or asker.check(knob).exact
