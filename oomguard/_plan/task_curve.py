"""Curves: the peak of a task by the rows of a microbatch, from traces, corrected by probes.

The peak is the maximum of moments, each of which is a line in the rows. Small probes would see only the optimizer's
moment, the traces have all of them.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from oomguard._estimate.breakdown import Estimate
from oomguard._estimate.margins import OFFSET_BYTES
from oomguard._estimate.target import Target
from oomguard._predict.calibration import Prediction
from oomguard._probe.record import TaskRecord
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import MAX_BATCH
from oomguard._task.ask import Asker
from oomguard._task.estimate import to_estimate

if TYPE_CHECKING:
    from oomguard._task.child import Answer

EVALUATED = (4, 16)  # rows of the traces of an evaluation
CLOSE = 0.02  # a trace so close to the largest microbatch, relative to its rows, is close enough
ROUNDS = 3  # traces that approach the largest microbatch
PATIENCE_SECONDS = 40.0  # time for the traces of a task after which no more approach the largest microbatch


class Shape(NamedTuple):
    """The knobs of a candidate that its curve depends on."""

    segments: int = 1
    accumulates: bool = False  # whether the batch is run in several microbatches
    precision: str = "fp32"
    allocator: str | None = None

    @property
    def run(self) -> dict[str, Any]:
        """The knobs, as a trace takes them."""
        knobs: dict[str, Any] = {"segments": self.segments, "precision": self.precision, "allocator": self.allocator}
        return knobs | {"accumulation": 1 + self.accumulates}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Peaks of a task by the rows of a microbatch: traced at some sizes, corrected by a probe, lines in between."""

    points: tuple[Estimate, ...]  # by rows, at least two
    waiting_bytes: int = 0  # bytes of a row that waits while a microbatch is run
    batch: int = 0  # rows that wait or run
    ratio: float = 1.0  # measured growth over traced growth
    shift_bytes: int | None = None  # measured growth less traced growth, if it was measured on this curve
    runtime_bytes: int | None = None  # as a probe has measured it

    def peak_bytes(self, rows: int) -> int:
        """The predicted peak."""
        low, high = self.neighbours(rows)
        first, last = int(low.candidate.microbatch), int(high.candidate.microbatch)
        share = (rows - first) / (last - first)
        both = low.moments.keys() & high.moments.keys()
        traced = max(int(low.moments[one] + share * (high.moments[one] - low.moments[one])) for one in both)
        growth = traced - int(low.terms["runtime"]) + self.waiting_bytes * max(0, self.batch - rows)
        corrected = self.ratio * growth  # exact if the trace errs in what grows with the rows
        if self.shift_bytes is not None:  # exact if it errs in the rest
            corrected = max(corrected, growth + self.shift_bytes)
        return int(self._runtime + corrected)

    def neighbours(self, rows: int) -> tuple[Estimate, Estimate]:
        """The traces whose line goes through so many rows: those around them, or the two nearest."""
        above = (n for n, point in enumerate(self.points) if int(point.candidate.microbatch) >= rows)
        high = max(1, next(above, len(self.points) - 1))
        return self.points[high - 1], self.points[high]

    @property
    def _runtime(self) -> int:
        return int(self.points[0].terms["runtime"]) if self.runtime_bytes is None else self.runtime_bytes

    def safe_bytes(self, rows: int, margin: float) -> int:
        """The predicted peak with a margin: a share of the growth over the runtime.

        Peaks that a probe has corrected err by some MiB whatever their size, so that theirs has a share of
        `OFFSET_BYTES` too.
        """
        peak_bytes = self.peak_bytes(rows)
        offset_bytes = 0 if self.runtime_bytes is None else OFFSET_BYTES
        return peak_bytes + int(margin * (peak_bytes - self._runtime + offset_bytes))

    def largest(self, budget_bytes: int, margin: float, most: int = MAX_BATCH) -> int:
        """The most rows that fit a budget, from the largest trace that fits on; 0 if not even one row does."""

        def fits(rows: int) -> bool:
            return rows <= most and self.safe_bytes(rows, margin) <= budget_bytes

        rows, step = max(filter(fits, (int(point.candidate.microbatch) for point in self.points)), default=0), 1
        while fits(rows + step):
            rows, step = rows + step, 2 * step
        while step > 1:
            step //= 2
            rows += step * fits(rows + step)
        return rows

    def prediction(self, rows: int, margin: float) -> Prediction:
        """The predicted peak, and its margin in bytes."""
        peak_bytes = self.peak_bytes(rows)
        margin_bytes = self.safe_bytes(rows, margin) - peak_bytes
        return Prediction(peak_bytes=peak_bytes, margin_bytes=margin_bytes, seconds_per_step=None)

    def corrected_by(self, other: "Curve") -> "Curve":
        """The curve with the ratio of another one."""
        return replace(self, ratio=other.ratio, runtime_bytes=other.runtime_bytes)

    def corrected(self, record: TaskRecord) -> "Curve":
        """The curve through the measured peak of a record."""
        assert record.peak_bytes is not None
        assert record.runtime_bytes is not None
        rows, growth = record.candidate.microbatch, record.peak_bytes - record.runtime_bytes
        plain = replace(self, ratio=1.0, shift_bytes=None, runtime_bytes=record.runtime_bytes)
        traced = max(1, plain.peak_bytes(rows) - record.runtime_bytes)
        return replace(plain, ratio=growth / traced, shift_bytes=growth - traced)

    def ratio_to(self, record: TaskRecord) -> float:
        """The measured growth of a record over the growth that this curve predicts, as stored errors are compared."""
        runtime_bytes = record.runtime_bytes or 0
        growth = replace(self, runtime_bytes=runtime_bytes).peak_bytes(record.candidate.microbatch) - runtime_bytes
        return ((record.peak_bytes or 0) - runtime_bytes + OFFSET_BYTES) / (max(0, growth) + OFFSET_BYTES)


class Curves:
    """The curves of a task, each traced when it is first asked for. All of them share what a probe has corrected."""

    def __init__(self, asker: Asker, target: Target, base: Shape, budget_bytes: int, batch: int | None) -> None:
        self.asker, self.target, self.budget_bytes = asker, target, budget_bytes
        self.made: dict[Shape, Curve] = {}
        self._seconds = 0.0  # spent on traces
        runs: list[dict[str, Any]] = [{"microbatch": 2}, {"microbatch": batch}]
        runs += [{"microbatch": rows, "training": False} for rows in EVALUATED]
        small, self.usual, *evaluations = self._trace([base.run | run for run in runs])
        self.batch = self.usual.rows  # rows of a batch
        self.evaluation = self._curve(base, evaluations) if len(evaluations) == len(EVALUATED) else None
        self._add(base, [small, self.usual])

    def __getitem__(self, shape: Shape) -> Curve:
        if shape not in self.made:
            runs = [{"microbatch": rows} for rows in (2, max(3, self.batch // 2))]
            self._add(shape, self._trace([shape.run | run for run in runs]))
        return self.made[shape]

    def largest(self, shape: Shape, margin: float, most: int = MAX_BATCH) -> int:
        """The most rows that fit the budget, or 0. Traces approach them: moments jump as blocks leave the heap."""
        rows = self[shape].largest(self.budget_bytes, margin, most)
        for _ in range(ROUNDS):
            if self._is_near(shape, rows):
                break
            self._trace_at(shape, max(1, rows))
            rows = self[shape].largest(self.budget_bytes, margin, most)
        return rows

    def correct(self, shape: Shape, record: TaskRecord) -> None:
        """Correct all curves by the measured peak of a candidate."""
        if not self._is_near(shape, record.candidate.microbatch):
            self._trace_at(shape, record.candidate.microbatch)
        measured = self[shape].corrected(record)
        self.made = {other: curve.corrected_by(measured) for other, curve in self.made.items()}
        self.made[shape] = measured

    def _is_near(self, shape: Shape, rows: int) -> bool:
        """Whether a trace has about so many rows, or traces take too long, by themselves or for the time left.

        There is no line from rows of equal length, which one engine runs, to rows that need another engine, so such a
        trace may take long.
        """
        low, high = self[shape].neighbours(rows)
        patience = PATIENCE_SECONDS if low.engine == high.engine else math.inf
        distances = [abs(int(one.candidate.microbatch) - max(1, rows)) for one in self[shape].points]
        return self._seconds > min(patience, self.asker.left) or min(distances) <= CLOSE * rows

    def _trace_at(self, shape: Shape, rows: int) -> None:
        curve, traced = self[shape], self._trace([shape.run | {"microbatch": rows}])
        points = (*curve.points, *self._curve(shape, traced).points)
        self.made[shape] = replace(curve, points=tuple(sorted(points, key=lambda one: int(one.candidate.microbatch))))

    def _trace(self, runs: list[dict[str, Any]]) -> "list[Answer]":
        began = time.monotonic()
        answers = self.asker.trace(runs)
        self._seconds += time.monotonic() - began
        return answers

    def _curve(self, shape: Shape, answers: "Sequence[Answer]", **more: Any) -> Curve:
        """The curve through traces."""
        knobs: dict[str, Any] = shape._asdict()
        del knobs["accumulates"]
        points = {one.rows: to_estimate(one, Candidate(microbatch=one.rows, **knobs), self.target) for one in answers}
        return Curve(points=tuple(points[rows] for rows in sorted(points)), **more)

    def _add(self, shape: Shape, answers: "list[Answer]") -> None:
        """Add a curve through two traces at least."""
        more: dict[str, Any] = {}
        if shape.accumulates:
            more = {"waiting_bytes": self.usual.row_bytes, "batch": self.batch}
        more |= next(({"ratio": one.ratio, "runtime_bytes": one.runtime_bytes} for one in self.made.values()), {})
        if len({one.rows for one in answers}) < 2:
            answers = [*answers, *self._trace([shape.run | {"microbatch": 2 * self.batch}])]
        self.made[shape] = self._curve(shape, answers, **more)
