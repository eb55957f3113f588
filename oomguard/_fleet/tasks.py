"""Tasks on cards: each task is traced once, and every card reads the same traces."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from oomguard._core.progress import tell
from oomguard._estimate.cards import Card, card
from oomguard._estimate.target import Target, on_card
from oomguard._fleet.pairs import Pairs
from oomguard._fleet.read import Job
from oomguard._plan.task import SEGMENTS, TRACE_ERROR
from oomguard._plan.task_curve import Curve
from oomguard._spec.candidate import Candidate
from oomguard._task.ask import Asker
from oomguard._task.estimate import to_estimate
from oomguard._task.task import name_of

if TYPE_CHECKING:
    from oomguard._task.child import Answer

TRACED_ON = "a100-80gb"
"""The card that tasks are traced for, in fp32: in that the kernels of all cards since sm 6.0 need the same."""


class Traces(NamedTuple):
    """The traces of a task."""

    batch: int  # rows of a batch
    whole: "Answer"  # a step with the whole batch in one pass
    parts: "list[Answer]"  # two steps with smaller microbatches; none if those change the gradient
    pieces: "list[Answer]"  # steps in segments with the smallest microbatch; none if those change the gradient


def fit_task(job: Job, number: int, cards: Sequence[Card], pairs: Pairs) -> int:
    """Fit a task to each card, and return the rows of its batch."""
    tell(f"Tracing {name_of(job.task)}")
    with Asker(job.task, on_card(card(TRACED_ON)), steps=job.seq) as asker:
        traces = _trace(asker, job)
    for column, known in enumerate(cards):
        least_bytes = 1 << 62
        for candidate, peak_bytes, margin_bytes in _choices(traces, on_card(known), known.usable_bytes):
            least_bytes = min(least_bytes, peak_bytes + margin_bytes)
            if least_bytes <= known.usable_bytes:
                pairs.put(number, column, candidate, peak_bytes=peak_bytes, margin_bytes=margin_bytes)
                break
        else:
            pairs.put(number, column, None, least_bytes=least_bytes)
    return traces.batch


def _trace(asker: Asker, job: Job) -> Traces:
    """Trace the steps that candidates are made of.

    Microbatches and segments are left out where they change the gradient of this task, unless that is allowed.
    """
    (whole, *_), pieces, parts = asker.trace([{"microbatch": job.batch}]), list["Answer"](), list["Answer"]()
    batch, smallest = whole.rows, {"microbatch": whole.rows}
    if batch > 1 and _usable(asker, job, "microbatch"):
        sizes = dict.fromkeys((1, max(2, batch // 2)))
        parts = asker.trace([{"microbatch": rows, "accumulation": 2} for rows in sizes])
        smallest = {"microbatch": 1, "accumulation": 2}
    if (whole.step.cells or whole.time) and _usable(asker, job, "segments"):
        pieces = asker.trace([smallest | {"segments": segments} for segments in SEGMENTS])
    return Traces(batch, whole, parts, pieces)


def _usable(asker: Asker, job: Job, knob: str) -> bool:
    """Whether a knob keeps the gradient of the task, or is allowed to change it."""
    return knob in job.allow or asker.check(knob).exact


def _choices(traces: Traces, target: Target, room_bytes: int) -> Iterator[tuple[Candidate, int, int]]:
    """Candidates with peak and margin: the whole batch, the largest microbatch that fits, and segments."""
    batch = traces.batch

    def figures(curve: Curve, rows: int, **knobs: Any) -> tuple[Candidate, int, int]:
        candidate = Candidate(microbatch=rows, accumulation=-(-batch // rows), **knobs)
        expected = curve.prediction(rows, TRACE_ERROR)
        return candidate, expected.peak_bytes, expected.margin_bytes

    yield figures(_curve([traces.whole], target, batch), batch)
    if traces.parts:
        curve = _curve(traces.parts, target, batch)
        rows = max(1, curve.largest(room_bytes, TRACE_ERROR, batch - 1))
        yield figures(curve, -(-batch // -(-batch // rows)))  # the fewest rows for so many passes
    for segments, answer in zip(SEGMENTS, traces.pieces, strict=False):  # fewer answers if traces take long
        yield figures(_curve([answer], target, batch), answer.rows, segments=segments)


def _curve(answers: "list[Answer]", target: Target, batch: int) -> Curve:
    """The curve through traces, with the rows that wait while a microbatch is run. One trace gives a level curve."""
    points = [to_estimate(answer, Candidate(microbatch=answer.rows), target) for answer in answers]
    if len(points) == 1:
        points += [to_estimate(answers[0], Candidate(microbatch=answers[0].rows + 1), target)]
    return Curve(points=tuple(points), waiting_bytes=answers[0].row_bytes, batch=batch)
