"""The plan of a task: a trace predicts the largest microbatch, one probe of half of it corrects, another confirms.

Small probes would see only the optimizer's moment. The trace has all moments, each of which is a line in the rows.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from oomguard._core.errors import MisuseError, check_choice, check_whole, conflict, nearest, shown
from oomguard._device.find import Device, find_budget, find_target, open_device
from oomguard._estimate.breakdown import Estimate
from oomguard._plan.find import is_here, make_environment
from oomguard._plan.task_value import Part, TaskPlan, TaskRung
from oomguard._plan.value import NothingFitsError, Shortfall, Way, figures
from oomguard._predict.calibration import Prediction
from oomguard._probe.record import TaskRecord
from oomguard._probe.runner import Runner
from oomguard._probe.verdict import Verdict
from oomguard._search.run import usable_bytes
from oomguard._spec.candidate import ALLOWED, Candidate, check_fixed
from oomguard._spec.spec import MAX_BATCH
from oomguard._task.ask import send
from oomguard._task.check import Finding, check_task
from oomguard._task.estimate import to_estimate, trace_task
from oomguard._task.task import Task, name_of

if TYPE_CHECKING:
    from oomguard._task.batches import Layout
    from oomguard._task.child import Answer

RAN = (Verdict.FITS, Verdict.STRAINED)
KNOBS = ("microbatch", "segments", "precision", "allocator", "threads")  # knobs of a task that can be fixed
ALLOW = (*ALLOWED, "microbatch", "segments")
"""Words that `allow` takes: for some tasks, microbatches or segments change the gradient."""
SEGMENTS = (4, 16, 64, 256)  # numbers of segments that are tried
TRACE_ERROR, MARGIN, SMALL_MARGIN = 0.15, 0.03, 0.01
"""Margins as shares of the growth over the runtime: of a trace alone, after a probe of half the rows, and after a probe
close by. The first is the worst error that a trace may have; probes in the `tight` heap repeat to about 1 %."""
WORTH = 1.02  # a third probe must promise so many times the rows
MAX_PROBES = 3
EVALUATED = (4, 16)  # rows of the traces of an evaluation
ROUNDS = 3  # traces that approach the largest microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskQuestion:
    """What a plan of a task is asked for. Checked when it is made."""

    task: Task | str
    device: str = "cpu"
    budget_bytes: int | None = None
    maximize: str = "throughput"
    allow: tuple[str, ...] = ("precision",)
    fixed: dict[str, Any] = field(default_factory=dict)
    batch: int | None = None  # rows of a batch; None for those of the loader
    steps: int | None = None  # time steps; None for the longest samples
    max_probes: int = MAX_PROBES  # more than `MAX_PROBES` are never needed
    seconds: float = 55.0  # time after which no third probe begins

    def __post_init__(self) -> None:
        check_choice("maximize", self.maximize, ("throughput", "batch"))
        for name in self.allow:
            check_choice("allow", name, (*ALLOW, "none"))
        for name in self.fixed:
            if name not in KNOBS:
                rule = "The plan of a task can fix some knobs"
                raise MisuseError(rule=rule, got=f"got {shown(name)}", advice=nearest(name, [*KNOBS]))
        check_fixed(self.fixed, self.allow)
        check_whole("batch", self.batch, 1, MAX_BATCH)
        if self.maximize == "batch" and "microbatch" in self.fixed:
            raise conflict("The largest batch is its own microbatch", "maximize batch", "a microbatch")
        check_whole("max_probes", self.max_probes, 1, 100_000, optional=False)
        Candidate(**{"microbatch": 1} | self.fixed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Peaks of a task by the rows of a microbatch: traced at some sizes, corrected by a probe, lines in between."""

    points: tuple[Estimate, ...]  # by rows, at least two
    waiting_bytes: int = 0  # bytes of a row that waits while a microbatch is run
    batch: int = 0  # rows that wait or run
    ratio: float = 1.0  # measured growth over traced growth
    runtime_bytes: int | None = None  # as a probe has measured it
    measured: tuple[int, int, int] | None = None
    """Rows and growth of a probe on this curve, and the part of that growth that does not depend on the rows."""

    def peak_bytes(self, rows: int) -> int:
        """The predicted peak."""
        sizes = [int(point.candidate.microbatch) for point in self.points]
        above = max(1, next((n for n, size in enumerate(sizes) if size >= rows), len(sizes) - 1))
        low, high = self.points[above - 1], self.points[above]
        share = (rows - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
        both = low.moments.keys() & high.moments.keys()
        traced = max(int(low.moments[one] + share * (high.moments[one] - low.moments[one])) for one in both)
        growth = self.ratio * (traced - int(low.terms["runtime"]) + self.waiting_bytes * max(0, self.batch - rows))
        if self.measured is not None:  # traces may count too much that does not depend on the rows
            known_rows, known, fixed = self.measured
            growth = max(growth, fixed + (known - fixed) * rows / known_rows)
        return int(self._runtime + growth)

    @property
    def _runtime(self) -> int:
        return int(self.points[0].terms["runtime"]) if self.runtime_bytes is None else self.runtime_bytes

    def safe_bytes(self, rows: int, margin: float) -> int:
        """The predicted peak with a margin, which is a share of the growth over the runtime."""
        peak_bytes = self.peak_bytes(rows)
        return peak_bytes + int(margin * (peak_bytes - self._runtime))

    def largest(self, budget_bytes: int, margin: float, most: int = MAX_BATCH) -> int:
        """The most rows that fit a budget; 0 if not even one does."""
        low, high = 0, 1
        while high <= most and self.safe_bytes(high, margin) <= budget_bytes:
            low, high = high, 2 * high
        high = min(high, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.safe_bytes(middle, margin) <= budget_bytes else (low, middle)
        return low

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
        plain = replace(self, ratio=1.0, runtime_bytes=record.runtime_bytes, measured=None)
        ratio = growth / max(1, plain.peak_bytes(rows) - record.runtime_bytes)
        fixed = sum((record.terms or {}).get(term, 0) for term in ("weights", "gradients", "optimizer"))
        return replace(plain, ratio=ratio, measured=(rows, growth, min(fixed, growth)))


class Choice(NamedTuple):
    """A candidate that is expected to fit, and the curve that says so."""

    rows: int
    segments: int
    accumulates: bool
    curve: Curve


def find_task_plan(question: TaskQuestion) -> TaskPlan:
    """The plan of a task; raises `NothingFitsError` if nothing fits."""
    return _Search(question).run()


class _Search:
    """The traces and probes of one task, and what follows from them."""

    def __init__(self, question: TaskQuestion) -> None:
        self.question, self.began = question, time.monotonic()
        self.target, self.budget = find_target(question.device), find_budget(question.device)
        self.device: Device | None = open_device(question.device) if is_here(question.device) else None
        free_bytes = self.budget.limit_bytes
        if self.device is not None:
            free_bytes = usable_bytes(Runner(question.device).free())
        self.budget_bytes = min(free_bytes, question.budget_bytes or free_bytes)
        self.heap: Any = question.fixed.get("allocator") or (None if self.target.cuda else "tight")
        self.records: list[TaskRecord] = []
        self.curves: dict[tuple[int, bool], Curve] = {}
        self.findings: dict[str, Finding] = {}
        self.refused: set[int] = set()  # segments with which a probe of the whole batch has failed
        segments = question.fixed.get("segments", 1)
        size = {"microbatch": question.batch} if question.batch else {}
        runs = [{"microbatch": 2}, size, *({"microbatch": rows, "training": False} for rows in EVALUATED)]
        small, self.usual, *evaluations = self._trace([run | {"segments": segments} for run in runs])
        self.rows = self.usual.rows  # rows of a batch
        self.evaluation = self._curve(evaluations, segments) if len(evaluations) == 2 else None
        self.rounds = 0 if self.evaluation is None else ROUNDS  # slow traces are not repeated
        self._add(segments, False, [small, self.usual])

    def run(self) -> TaskPlan:
        choice = self._pick(0.0) or self._pick(-TRACE_ERROR)  # traces may err on the high side too
        if choice is None:
            raise NothingFitsError(self._shortfall())
        if self.device is None:
            choice = self._pick(TRACE_ERROR) or choice
            return self._plan(choice, None)
        sure = self._is_whole(choice) and choice.curve.safe_bytes(choice.rows, TRACE_ERROR) <= self.budget_bytes
        if not sure and "microbatch" not in self.question.fixed:
            choice = choice._replace(rows=max(1, choice.rows // 2))
        best: tuple[Choice, TaskRecord] | None = None
        with Runner(self.question.device) as runner:
            while choice is not None and len(self.records) < min(MAX_PROBES, self.question.max_probes):
                record = self._probe(runner, choice)
                if record.verdict.ran and self._keeps_batch(choice):
                    best = choice, record
                choice = self._next(choice, record, best)
        if best is None:
            raise NothingFitsError(self._shortfall())
        return self._plan(*best)

    def _next(self, last: Choice, record: TaskRecord, best: tuple[Choice, TaskRecord] | None) -> Choice | None:
        """The next probe, if one is needed or worth it."""
        if not record.verdict.ran:
            if self._is_whole(last):
                self.refused.add(last.segments)
                return self._pick(MARGIN)
            rows = last.rows // 2 if best is None else (2 * last.rows + best[0].rows) // 3
            wanted = rows > (0 if best is None else best[0].rows) and "microbatch" not in self.question.fixed
            return last._replace(rows=rows) if wanted else None
        late = len(self.records) > 1 and time.monotonic() - self.began > self.question.seconds
        if late or not all(one.verdict.ran for one in self.records):
            return None
        measured = self.curves[last.segments, last.accumulates].corrected(record)
        self.curves = {key: curve.corrected_by(measured) for key, curve in self.curves.items()}
        self.curves[last.segments, last.accumulates] = measured
        choice = self._pick(MARGIN if len(self.records) == 1 else SMALL_MARGIN)
        if choice is None or best is None:
            return choice
        return choice if choice.rows >= WORTH * best[0].rows else None

    def _is_whole(self, choice: Choice) -> bool:
        """Whether the batch of the user is run in one pass."""
        return self.question.maximize != "batch" and not choice.accumulates and choice.rows == self.rows

    def _keeps_batch(self, choice: Choice) -> bool:
        """Whether a choice can be planned; half of a batch in one pass is only measured."""
        return self.question.maximize == "batch" or choice.accumulates or choice.rows == self.rows

    # ---- traces

    def _trace(self, runs: list[dict[str, Any]]) -> "list[Answer]":
        return trace_task(self.question.task, runs, self.target, allocator=self.heap, steps=self.question.steps)

    def _curve(self, answers: "Sequence[Answer]", segments: int, **more: Any) -> Curve:
        """The curve through traces."""
        points = {
            one.rows: to_estimate(
                one, Candidate(microbatch=one.rows, segments=segments, allocator=self.heap), self.target
            )
            for one in answers
        }
        return Curve(points=tuple(points[rows] for rows in sorted(points)), **more)

    def _add(self, segments: int, accumulates: bool, answers: "list[Answer]") -> None:
        """Add a curve, and traces where it meets the budget."""
        most = self.rows - 1 if accumulates else MAX_BATCH if self.question.maximize == "batch" else self.rows
        more: dict[str, Any] = {"waiting_bytes": self.usual.row_bytes, "batch": self.rows} if accumulates else {}
        more |= next(({"ratio": one.ratio, "runtime_bytes": one.runtime_bytes} for one in self.curves.values()), {})
        run = {"segments": segments, "accumulation": 1 + accumulates}
        if len({one.rows for one in answers}) < 2:
            answers = [*answers, *self._trace([run | {"microbatch": 2 * self.rows}])]
        for _ in range(self.rounds):
            curve = self._curve(answers, segments, **more)
            rows = min(most, max(1, curve.largest(self.budget_bytes, 0.0)))
            if min(abs(one.rows - rows) for one in answers) <= 0.02 * rows:
                break
            answers = [*answers, *self._trace([run | {"microbatch": rows}])]
        self.curves[segments, accumulates] = self._curve(answers, segments, **more)

    def _at(self, segments: int, accumulates: bool) -> Curve:
        if (segments, accumulates) not in self.curves:
            runs = [{"microbatch": rows} for rows in (2, max(3, self.rows // 2))]
            run = {"segments": segments, "accumulation": 1 + accumulates}
            self._add(segments, accumulates, self._trace([one | run for one in runs]))
        return self.curves[segments, accumulates]

    # ---- choices

    def _usable(self, knob: str) -> bool:
        """Whether a knob keeps the gradient of this task, or is allowed to change it."""
        if not self.findings:
            self.findings = check_task(self.question.task)
        return self.findings[knob].exact or knob in self.question.allow

    def _pick(self, margin: float) -> Choice | None:
        """The best candidate that is expected to fit with a margin."""
        fixed = self.question.fixed.get("segments")
        best = self._largest(fixed or 1, margin)
        if fixed or not self.usual.step.cells or (best is not None and self.question.maximize != "batch"):
            return best
        if not self._usable("segments"):
            return best
        for segments in SEGMENTS:
            found = self._largest(segments, margin)
            if found is not None and (best is None or found.rows > (1 + TRACE_ERROR) * best.rows):
                best = found
                if self.question.maximize != "batch":
                    break
        return best

    def _largest(self, segments: int, margin: float) -> Choice | None:
        """The largest microbatch with so many segments: the whole batch, or fewer rows if they can be accumulated."""
        fixed, curve = self.question.fixed.get("microbatch"), self._at(segments, False)
        if self.question.maximize == "batch":
            rows = curve.largest(self.budget_bytes, margin)
            return Choice(rows, segments, False, curve) if rows else None
        whole = segments not in self.refused and (fixed or self.rows) >= self.rows
        if whole and curve.safe_bytes(self.rows, margin) <= self.budget_bytes:
            return Choice(self.rows, segments, False, curve)
        if self.rows == 1 or not self._usable("microbatch"):
            return None
        curve = self._at(segments, True)
        rows = curve.largest(self.budget_bytes, margin, min(fixed or self.rows, self.rows - 1))
        if fixed:
            rows *= rows == fixed
        elif rows:
            rows = -(-self.rows // -(-self.rows // rows))  # the fewest rows for so many passes
        return Choice(rows, segments, True, curve) if rows else None

    def _candidate(self, choice: Choice) -> Candidate:
        passes = -(-self.rows // choice.rows) if choice.accumulates else 1
        knobs = (
            {"allocator": self.heap} | self.question.fixed | {"microbatch": choice.rows, "segments": choice.segments}
        )
        return Candidate(**knobs, accumulation=passes)

    def _probe(self, runner: Runner, choice: Choice) -> TaskRecord:
        source = send(self.question.task, self.rows if choice.accumulates else choice.rows, self.question.steps)
        record = runner.probe_task(
            name=name_of(self.question.task),
            content=source if isinstance(source, bytes) else None,
            candidate=self._candidate(choice),
            rows=self.rows if choice.accumulates else choice.rows,
            seq=self.question.steps,
            budget_bytes=self.budget_bytes,
        )
        if record.verdict not in (*RAN, Verdict.OVER, Verdict.OOM, Verdict.KILLED):
            raise MisuseError(
                rule="A step of the task must run in a child process",
                got=f"{record.verdict.name}: {record.message}",
                advice=record.verdict.advice,
            )
        self.records.append(record)
        return record

    # ---- results

    def _plan(self, choice: Choice, record: TaskRecord | None) -> TaskPlan:
        question, usual, candidate = self.question, self.usual, self._candidate(choice)
        whole = question.fixed.get("segments", 1), False
        batch = self.rows if choice.accumulates else choice.rows
        libraries = [one.library for one in self.records if one.library is not None]
        lossy = {knob: finding.reason for knob, finding in self.findings.items() if not finding.exact}
        used = {"microbatch": candidate.accumulation > 1, "segments": candidate.segments > 1}
        lossy = {knob: reason for knob, reason in lossy.items() if used[knob]}
        if candidate.precision != "fp32":
            lossy["precision"] = f"The model runs in {candidate.precision}."
        estimate = min(choice.curve.points, key=lambda point: abs(int(point.candidate.microbatch) - choice.rows))
        return TaskPlan(
            task=name_of(question.task),
            batch=batch,
            seq=question.steps,
            candidate=candidate,
            where=self.target,
            budget_bytes=self.budget_bytes,
            asked_budget_bytes=question.budget_bytes,
            maximize="batch" if question.maximize == "batch" else "throughput",
            allow=question.allow,
            lossy=lossy,
            estimate=figures(estimate),
            expected=choice.curve.prediction(choice.rows, MARGIN if self.records else TRACE_ERROR),
            record=record,
            fallbacks=tuple(self._fallbacks(choice)),
            plain_bytes=self.curves[whole].peak_bytes(batch),
            evaluation_rows=None
            if self.evaluation is None
            else self.evaluation.largest(self.budget_bytes, TRACE_ERROR) or None,
            layout=_parts(usual.layout),
            row_bytes=usual.row_bytes,
            notes=usual.notes,
            records=tuple(self.records),
            seconds=time.monotonic() - self.began,
            environment=make_environment(self.target, self.device, self.budget, libraries),
            exports={} if self.device is None else self.device.environment(candidate, "native"),
        )

    def _fallbacks(self, choice: Choice) -> Iterator[TaskRung]:
        """Halved microbatches, if they keep the gradient or may change it."""
        if choice.rows == 1 or not self._usable("microbatch"):
            return
        batch = self.rows if choice.accumulates else choice.rows
        rows = choice.rows
        while rows > 1:
            rows = -(-rows // 2)
            smaller = msgspec.structs.replace(self._candidate(choice), microbatch=rows, accumulation=-(-batch // rows))
            yield TaskRung(candidate=smaller, expected=choice.curve.prediction(rows, MARGIN))

    def _shortfall(self) -> Shortfall:
        """Why nothing fits, and which lossy knob would help."""
        key, curve = min(self.curves.items(), key=lambda one: one[1].peak_bytes(self._least(one[0])))
        rows = self._least(key)
        passes = -(-self.rows // rows) if key[1] else 1
        ways = []
        refused = [
            knob for knob, finding in self.findings.items() if not finding.exact and knob not in self.question.allow
        ]
        for knob in refused:
            smaller = self._at(key[0], True) if knob == "microbatch" else self._at(SEGMENTS[-1], key[1])
            needed = smaller.safe_bytes(1 if knob == "microbatch" else rows, MARGIN)
            ways.append(
                Way(change=f"--allow {knob}", needed_bytes=needed, fits=needed <= self.budget_bytes, allowed=False)
            )
        terms = {name: int(size) for name, size in curve.points[0].terms.items()}
        return Shortfall(
            needed_bytes=curve.safe_bytes(rows, MARGIN),
            budget_bytes=self.budget_bytes,
            candidate=Candidate(microbatch=rows, accumulation=passes, segments=key[0]),
            terms=terms,
            term=max(terms, key=terms.__getitem__),
            ways=tuple(sorted(ways, key=lambda way: not way.fits)),
            records=tuple(self.records),
        )

    def _least(self, key: tuple[int, bool]) -> int:
        """The fewest rows of a microbatch on a curve."""
        return 1 if key[1] or self.question.maximize == "batch" else self.rows


def _parts(layout: "Layout") -> tuple[Part, ...]:
    """The layout of a batch as a plan keeps it; empty if a part of the batch cannot be split, or has another key."""
    fields = ({"path": path} | asdict(axis) for path, axis in layout.items())
    try:
        return tuple(msgspec.convert(part, Part) for part in fields)
    except msgspec.ValidationError:
        return ()
