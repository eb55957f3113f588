"""The plan of a task: a trace predicts the largest microbatch, one probe of half of it corrects, another confirms.

Small probes would see only the optimizer's moment. The trace has all moments, each of which is a line in the rows.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from oomguard._core.errors import MisuseError, check_choice, check_whole, conflict, nearest, shown
from oomguard._core.progress import Status, tell
from oomguard._core.units import format_bytes, format_seconds
from oomguard._device.cpu import cores
from oomguard._device.find import find_budget, find_target
from oomguard._estimate.margins import SETTLED
from oomguard._plan.find import is_here, make_environment
from oomguard._plan.task_curve import Curve, Curves, Shape
from oomguard._plan.task_value import UNRUN, Part, TaskPlan, TaskRung
from oomguard._plan.value import NothingFitsError, Shortfall, Way, figures
from oomguard._probe.record import TaskRecord
from oomguard._probe.runner import Runner
from oomguard._probe.verdict import Verdict
from oomguard._search.run import usable_bytes
from oomguard._search.space import WORTH_LOSSY
from oomguard._spec.candidate import ALLOWED, Candidate, check_fixed
from oomguard._spec.spec import MAX_BATCH
from oomguard._task.ask import CHILD_SECONDS, Asker, send
from oomguard._task.task import Task, name_of

if TYPE_CHECKING:
    from oomguard._task.check import Finding
    from oomguard._task.layout import Layout

RAN = (Verdict.FITS, Verdict.STRAINED)
KNOBS = ("microbatch", "segments", "precision", "allocator", "threads")  # knobs of a task that can be fixed
ALLOW = (*ALLOWED, "microbatch", "segments")
"""Words that `allow` takes: for some tasks, microbatches or segments change the gradient."""
SEGMENTS = (4, 16, 64, 256)  # numbers of segments that are tried
TRACE_ERROR, MARGIN, SMALL_MARGIN = 0.15, 0.05, 0.01
"""Margins as shares of the growth over the runtime: of a trace alone, after a probe of half the rows, and after a probe
close by; the last two also of `OFFSET_BYTES`. The first is the worst error that a trace may have. Half of the rows gave
up to 3 % too little (3.4 MiB for a tagger that grew by 52), and a third probe makes up for a small second one. Probes
repeat to about 1 %."""
WORTH = 1.02  # a further probe must promise so many times the rows, and another setting must be so much faster
MAX_PROBES = 3  # probes that find the largest microbatch
FEWEST_PASSES = 2  # of a probe: the second finds the gradients and the heap of the first


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
    seconds: float = 55.0  # time limit of the search

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


class Choice(NamedTuple):
    """A candidate that is expected to fit."""

    rows: int
    shape: Shape
    curve: Curve  # as it was when the candidate was chosen
    threads: int | None = None

    def safe_bytes(self, margin: float) -> int:
        """The predicted peak with a margin."""
        return self.curve.safe_bytes(self.rows, margin)


def find_task_plan(question: TaskQuestion) -> TaskPlan:
    """The plan of a task; raises `NothingFitsError` if nothing fits."""
    target, limit = find_target(question.device), question.seconds
    how: dict[str, Any] = {"steps": question.steps, "allocator": question.fixed.get("allocator")}
    how |= {"seconds": limit, "until": time.monotonic() + limit}
    with Asker(question.task, target, **how) as asker, ExitStack() as stack:
        runner = stack.enter_context(Runner(question.device)) if is_here(question.device) else None
        return _Search(question, asker, runner).run()


class _Search:
    """The traces and probes of one task, and what follows from them."""

    def __init__(self, question: TaskQuestion, asker: Asker, runner: Runner | None) -> None:
        self.question, self.asker, self.runner = question, asker, runner
        self.began = asker.until - question.seconds
        self.target, self.budget, fixed = asker.target, find_budget(question.device), question.fixed
        free_bytes = self.budget.limit_bytes if runner is None else usable_bytes(runner.free())
        self.budget_bytes = min(free_bytes, question.budget_bytes or free_bytes)
        self.is_open = question.maximize == "batch"
        self.plain = Shape(
            segments=fixed.get("segments", 1),
            precision=fixed.get("precision", "fp32"),
            allocator=fixed.get("allocator", None if self.target.cuda else "tight"),
        )
        half = self.target.card_precisions if runner is None else runner.device.precisions()
        self.half = next((one for one in ("bf16", "fp16") if one in half and "precision" in question.allow), None)
        self.curves = Curves(asker, self.target, self.plain, self.budget_bytes, question.batch)
        self.records: list[TaskRecord] = []
        self.findings: dict[str, Finding] = {}
        self.notes: list[str] = []
        self.refused: set[int] = set()  # segments with which a probe of the whole batch has failed
        self.useless = False  # whether segments save no memory on this task
        self.repeats = 0  # probes that were run again, since the first peak was far below its trace

    def run(self) -> TaskPlan:
        choice = self._pick(0.0)
        if choice is None and not self._unchecked():
            choice = self._pick(-TRACE_ERROR)  # traces may err on the high side too
        if choice is None:
            raise self._nothing_fits()
        if self.runner is None:
            return self._plan(self._pick(TRACE_ERROR) or choice, None)
        sure = self._is_whole(choice) and choice.safe_bytes(TRACE_ERROR) <= self.budget_bytes
        if not sure and "microbatch" not in self.question.fixed:
            choice = choice._replace(rows=max(1, choice.rows // 2))
        best = self._search(choice)
        if best is not None:
            return self._plan(*(best if self.is_open else self._fastest(*best)))
        if not all(record.verdict.ran or record.verdict is Verdict.TIMEOUT for record in self.records):
            raise self._nothing_fits()
        return self._unprobed()

    def _search(self, choice: Choice) -> tuple[Choice, TaskRecord] | None:
        """Probe a choice and what follows from it, as far as there is time; the best that can be planned."""
        best: tuple[Choice, TaskRecord] | None = None
        next_choice: Choice | None = choice
        while next_choice is not None and self._sizes < min(MAX_PROBES, self.question.max_probes):
            if self._is_late():
                break
            last, record = next_choice, self._probe(next_choice)
            if record.verdict.ran and self._keeps_batch(last):
                best = last, record
            try:
                next_choice = self._next(last, record, best)
            except MisuseError:  # a trace takes too long, or the model does not run in a setting
                if best is None:
                    raise
                break
        return best

    def _unprobed(self) -> TaskPlan:
        """The best plan that is known if its candidate cannot be run any more."""
        measured = any(record.verdict.ran for record in self.records)
        choice = self._pick(MARGIN if measured else TRACE_ERROR)
        if choice is None:
            raise self._nothing_fits()
        late = self._is_late() or not measured
        limit = f"--timeout (it was {format_seconds(self.question.seconds)})" if late else "--max-probes"
        self.notes.append(f"{UNRUN} Raise {limit} to have it run.")
        return self._plan(choice, None)

    def _next(self, last: Choice, record: TaskRecord, best: tuple[Choice, TaskRecord] | None) -> Choice | None:
        """The next probe, if one is needed or worth it."""
        if record.verdict is Verdict.TIMEOUT:
            return None
        if not record.verdict.ran:
            if self._is_whole(last):
                self.refused.add(last.shape.segments)
                return self._pick(MARGIN)
            rows = last.rows // 2 if best is None else (2 * last.rows + best[0].rows) // 3
            wanted = rows > (0 if best is None else best[0].rows) and "microbatch" not in self.question.fixed
            return last._replace(rows=rows) if wanted else None
        if not all(one.verdict.ran for one in self.records):
            return None
        self._compare(last, record)
        self.curves.correct(last.shape, record)
        choice = self._pick(MARGIN if self._sizes == 1 else SMALL_MARGIN)
        if choice is None or best is None:
            return choice
        return choice if choice.rows >= WORTH * best[0].rows else None

    def _fastest(self, best: Choice, record: TaskRecord) -> tuple[Choice, TaskRecord]:
        """Try other settings of the choice, one by one, as far as there is time, and keep those that are faster."""
        for knobs in self._settings(best):
            if self._is_late() or len(self.records) >= self.question.max_probes:
                break
            with suppress(MisuseError):  # the model does not run in this setting
                choice, found = self._try(best, knobs)
                worth = WORTH_LOSSY if "precision" in knobs else WORTH
                if found is not None and worth * (found.seconds_per_step or 0.0) < (record.seconds_per_step or 0.0):
                    best, record = choice, found
        return best, record

    def _try(self, best: Choice, knobs: dict[str, Any]) -> tuple[Choice, TaskRecord | None]:
        """The choice in another setting, and its record; None if it may not fit or did not run."""
        shape = best.shape._replace(**{name: value for name, value in knobs.items() if name != "threads"})
        choice = best._replace(shape=shape, threads=knobs.get("threads", best.threads), curve=self.curves[shape])
        if shape != best.shape and choice.safe_bytes(TRACE_ERROR) > self.budget_bytes:
            return choice, None
        record = self._probe(choice)
        return choice, record if record.verdict.ran else None

    def _settings(self, best: Choice) -> Iterator[dict[str, Any]]:
        """Knobs that may make a choice faster, as far as they are not fixed."""
        tried: dict[str, Any] = {"precision": self.half} if self.half and best.shape.precision == "fp32" else {}
        if not self.target.cuda:
            tried = ({"threads": 1} if cores() > 1 else {}) | {"allocator": "fast"} | tried
        return ({name: value} for name, value in tried.items() if name not in self.question.fixed)

    @property
    def _sizes(self) -> int:
        """Probes that were run, without repeated ones."""
        return len(self.records) - self.repeats

    def _is_late(self) -> bool:
        return self.asker.left <= CHILD_SECONDS

    def _is_whole(self, choice: Choice) -> bool:
        """Whether the batch of the user is run in one pass."""
        return not self.is_open and not choice.shape.accumulates and choice.rows == self.curves.batch

    def _keeps_batch(self, choice: Choice) -> bool:
        """Whether a choice can be planned; half of a batch in one pass is only measured."""
        return self.is_open or choice.shape.accumulates or choice.rows == self.curves.batch

    # ---- choices

    def _usable(self, knob: str) -> bool:
        """Whether a knob keeps the gradient of this task, or is allowed to change it."""
        if knob not in self.findings:
            self.findings[knob] = self.asker.check(knob)
        return self.findings[knob].exact or knob in self.question.allow

    def _pick(self, margin: float) -> Choice | None:
        """The best candidate that is expected to fit with a margin: in as few pieces and passes as possible."""
        fixed, best = self.question.fixed, self._largest(self.plain, margin)
        others = () if "precision" in fixed or self.half is None or not self.target.cuda else (self.half,)
        for precision in others:  # on the CPU, half precision is not known to save memory
            if best is None or not self._is_whole(best):
                best = self._better(best, self._largest(self.plain._replace(precision=precision), margin))
        reached = self.curves.usual.step.cells or self.curves.usual.time
        if "segments" in fixed or not reached or (best is not None and not self.is_open):
            return best
        if self.useless or not self._usable("segments"):
            return best
        for segments in SEGMENTS:
            for precision in (self.plain.precision, *others):
                shape = self.plain._replace(segments=segments, precision=precision)
                best = self._better(best, self._largest(shape, margin))
            if best is not None and not self.is_open:
                break
        return best

    def _better(self, best: Choice | None, other: Choice | None) -> Choice | None:
        """The other choice if it has by far more rows in one pass; ties go to the first."""
        if best is None or other is None:
            return best or other
        return other if other.rows > (1 + TRACE_ERROR) * best.rows else best

    def _largest(self, shape: Shape, margin: float) -> Choice | None:
        """The largest microbatch of a shape: the whole batch, or fewer rows if they can be accumulated."""
        batch, fixed = self.curves.batch, self.question.fixed.get("microbatch")
        if self.is_open:
            rows = self.curves.largest(shape, margin)
            return Choice(rows, shape, self.curves[shape]) if rows else None
        whole = shape.segments not in self.refused and (fixed or batch) >= batch
        if whole and self.curves.largest(shape, margin, batch) == batch:
            return Choice(batch, shape, self.curves[shape])
        if batch == 1 or not self._usable("microbatch"):
            return None
        shape = shape._replace(accumulates=True)
        rows = self.curves.largest(shape, margin, min(fixed or batch, batch - 1))
        if fixed:
            rows *= rows == fixed
        elif rows:
            rows = -(-batch // -(-batch // rows))  # the fewest rows for so many passes
        return Choice(rows, shape, self.curves[shape]) if rows else None

    def _compare(self, choice: Choice, record: TaskRecord) -> None:
        """Give segments up if they did not save memory, by a measured peak and the trace of the pass without them."""
        assert record.peak_bytes is not None
        assert record.runtime_bytes is not None
        whole = self.curves[choice.shape._replace(segments=1)]
        whole = replace(whole, ratio=1.0, shift_bytes=None, runtime_bytes=record.runtime_bytes)
        if choice.shape.segments == 1 or record.peak_bytes < whole.peak_bytes(choice.rows):
            return
        self.useless = True
        sizes = f"{format_bytes(record.peak_bytes)} measured with {choice.shape.segments:,} of them"
        sizes += f", {format_bytes(whole.peak_bytes(choice.rows))} by a trace without"
        self.notes.append(f"Segments are not used, since they save no memory on this task: {sizes}.")

    def _candidate(self, choice: Choice) -> Candidate:
        shape = choice.shape
        passes = -(-self.curves.batch // choice.rows) if shape.accumulates else 1
        knobs = {"allocator": shape.allocator, "threads": choice.threads} | self.question.fixed
        shaped = {"segments": shape.segments, "precision": shape.precision, "microbatch": choice.rows}
        return Candidate(**knobs | shaped, accumulation=passes)

    def _probe(self, choice: Choice) -> TaskRecord:
        """Run a choice; again, in a new child process, if its peak is far below its trace."""
        assert self.runner is not None
        record = self._run(choice)
        if self.repeats or not record.verdict.ran or (1 + TRACE_ERROR) * choice.curve.ratio_to(record) >= 1:
            return record
        if len(self.records) >= self.question.max_probes or self._is_late():
            self.notes.append("The measured peak is far below its trace, and was not measured again.")
            return record
        self.repeats += 1
        self.runner.close()
        again = self._run(choice)
        return max(record, again, key=lambda one: one.peak_bytes or 0) if again.verdict.ran else again

    def _run(self, choice: Choice) -> TaskRecord:
        assert self.runner is not None
        rows = self.curves.batch if choice.shape.accumulates else choice.rows
        tell(self._status(choice))
        source = send(self.asker.task, rows, self.question.steps)
        record = self.runner.probe_task(
            name=name_of(self.question.task),
            content=source if isinstance(source, bytes) else None,
            candidate=self._candidate(choice),
            rows=rows,
            seq=self.question.steps,
            budget_bytes=self.budget_bytes,
            passes=self._passes(choice),
            timeout=max(CHILD_SECONDS, self.asker.left),
        )
        if record.verdict not in (*RAN, Verdict.OVER, Verdict.OOM, Verdict.KILLED, Verdict.TIMEOUT):
            raise MisuseError(
                rule="A step of the task must run in a child process",
                got=f"{record.verdict.name}: {record.message.rstrip('.')}",
                advice=record.verdict.advice,
            )
        self.records.append(record)
        return record

    def _passes(self, choice: Choice) -> int:
        """Passes of a probe, at least: until its peak has settled, if that takes at most a quarter of the time left."""
        times = [one.seconds_per_pass / one.candidate.microbatch for one in self.records if one.seconds_per_pass]
        if not times:
            return FEWEST_PASSES
        passes = int(self.asker.left / 4 / (times[-1] * choice.rows))
        return min(max(passes, FEWEST_PASSES), SETTLED)

    def _status(self, choice: Choice) -> Status:
        """What the next probe runs, in words."""
        size = f"about {format_bytes(choice.curve.peak_bytes(choice.rows))} of {format_bytes(self.budget_bytes)}"
        pieces = f" with {choice.shape.segments:,} segments" if choice.shape.segments > 1 else ""
        left = self.question.seconds - (time.monotonic() - self.began)
        words = f"Probe {len(self.records) + 1}: a few real steps with a microbatch of {choice.rows:,}{pieces}, {size}"
        return Status(words, seconds_left=left if left > 0 and self.records else None)

    # ---- results

    def _plan(self, choice: Choice, record: TaskRecord | None) -> TaskPlan:
        question, curves, candidate = self.question, self.curves, self._candidate(choice)
        fallbacks = tuple(self._fallbacks(choice))  # before the findings are read: it may be the first to need a check
        batch = curves.batch if choice.shape.accumulates else choice.rows
        evaluation, device = curves.evaluation, None if self.runner is None else self.runner.device
        libraries = [one.library for one in self.records if one.library is not None]
        lossy = {knob: finding.reason for knob, finding in self.findings.items() if not finding.exact}
        used = {"microbatch": candidate.accumulation > 1, "segments": candidate.segments > 1}
        unused = "is not used, since it is not known to keep the gradient."
        self.notes += [f"The knob {knob} {unused} {reason}" for knob, reason in lossy.items() if not used[knob]]
        lossy = {knob: reason for knob, reason in lossy.items() if used[knob]}
        if candidate.precision != "fp32":
            lossy["precision"] = f"The model runs in {candidate.precision}."
        if candidate.precision == "fp16":
            self.notes.append("Gradients in fp16 need a scale: oomguard.stepper(..., scaler=torch.amp.GradScaler()).")
        guessed = record is None and choice.curve.runtime_bytes is None
        estimate = min(choice.curve.points, key=lambda point: abs(int(point.candidate.microbatch) - choice.rows))
        return TaskPlan(
            task=name_of(question.task),
            batch=batch,
            seq=question.steps,
            candidate=candidate,
            where=self.target,
            budget_bytes=self.budget_bytes,
            asked_budget_bytes=question.budget_bytes,
            maximize="batch" if self.is_open else "throughput",
            allow=question.allow,
            lossy=lossy,
            estimate=figures(estimate),
            expected=choice.curve.prediction(choice.rows, TRACE_ERROR if guessed else MARGIN),
            record=record,
            time_spread=None if record is None or record.time_spread is None else round(record.time_spread, 4),
            fallbacks=fallbacks,
            plain_bytes=curves[self.plain].peak_bytes(batch),
            evaluation_rows=None if evaluation is None else evaluation.largest(self.budget_bytes, TRACE_ERROR) or None,
            layout=_parts(curves.usual.layout),
            time=_parts(curves.usual.time),
            row_bytes=curves.usual.row_bytes,
            notes=(*curves.usual.notes, *self.notes),
            records=tuple(self.records),
            seconds=time.monotonic() - self.began,
            environment=make_environment(self.target, device, self.budget, libraries),
            exports={} if device is None else device.environment(candidate, "native"),
        )

    def _fallbacks(self, choice: Choice) -> Iterator[TaskRung]:
        """Halved microbatches, if they keep the gradient or may change it."""
        if choice.rows == 1 or not self._usable("microbatch"):
            return
        batch, rows = self.curves.batch if choice.shape.accumulates else choice.rows, choice.rows
        while rows > 1:
            rows = -(-rows // 2)
            smaller = msgspec.structs.replace(self._candidate(choice), microbatch=rows, accumulation=-(-batch // rows))
            yield TaskRung(candidate=smaller, expected=choice.curve.prediction(rows, MARGIN))

    def _unchecked(self) -> list[str]:
        """The knobs that are not used because their check took too long."""
        return [knob for knob, finding in self.findings.items() if finding.late and knob not in self.question.allow]

    def _nothing_fits(self) -> NothingFitsError | MisuseError:
        """The error if nothing fits, or if nothing that fits was found in time."""
        late = self._unchecked()
        if not late and not any(record.verdict is Verdict.TIMEOUT for record in self.records):
            return NothingFitsError(self._shortfall())
        what = "the check of the gradient" if late else "a probe"
        advice = "Raise --timeout" + (f", or give --allow {','.join(late)}." if late else ".")
        limit = format_seconds(self.question.seconds)
        return MisuseError(rule="A plan must be found in time", got=f"{what} took too long for {limit}", advice=advice)

    def _shortfall(self) -> Shortfall:
        """Why nothing fits, and which lossy knob would help."""
        made = self.curves.made.items()
        shape, curve = min(made, key=lambda one: one[1].peak_bytes(self._least(one[0])))
        rows, ways = self._least(shape), []
        lossy = [knob for knob, finding in self.findings.items() if not finding.exact]
        for knob in [one for one in lossy if one not in self.question.allow]:
            changed = {"accumulates": True} if knob == "microbatch" else {"segments": SEGMENTS[-1]}
            smaller = self.curves[shape._replace(**changed)]
            needed = smaller.safe_bytes(1 if knob == "microbatch" else rows, MARGIN)
            ways.append(
                Way(change=f"--allow {knob}", needed_bytes=needed, fits=needed <= self.budget_bytes, allowed=False)
            )
        terms = {name: int(size) for name, size in curve.points[0].terms.items()}
        return Shortfall(
            needed_bytes=curve.safe_bytes(rows, MARGIN),
            budget_bytes=self.budget_bytes,
            candidate=self._candidate(Choice(rows, shape, curve)),
            terms=terms,
            term=max(terms, key=terms.__getitem__),
            ways=tuple(sorted(ways, key=lambda way: not way.fits)),
            records=tuple(self.records),
        )

    def _least(self, shape: Shape) -> int:
        """The fewest rows of a microbatch of a shape."""
        return 1 if shape.accumulates or self.is_open else self.curves.batch


def _parts(layout: "Layout") -> tuple[Part, ...]:
    """The layout of a batch as a plan keeps it; empty if a part of the batch cannot be split, or has another key."""
    fields = ({"path": path} | asdict(axis) for path, axis in layout.items())
    try:
        return tuple(msgspec.convert(part, Part) for part in fields)
    except msgspec.ValidationError:
        return ()
