"""Subject: the model, device, budget and records that a table or a chart is about, and predictions for them."""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from oomguard._core.errors import MisuseError, flag, shown
from oomguard._core.units import read_budget
from oomguard._device.cpu import cpu_precisions
from oomguard._device.find import find_budget, find_target
from oomguard._estimate import cards
from oomguard._estimate.breakdown import estimate_batch, estimate_step
from oomguard._estimate.malloc import default_allocator
from oomguard._estimate.moments import TERMS
from oomguard._estimate.target import Target
from oomguard._plan.make import pareto_front, plain_candidate
from oomguard._plan.store import load_spec_plan
from oomguard._plan.value import Plan
from oomguard._predict.calibration import Calibration
from oomguard._probe.record import RECORDS, Ledger, Record
from oomguard._report.grid import Over, check_own_spec, fields_for, read_over
from oomguard._report.words import SHAPE
from oomguard._search.space import SHORTEST_PIECE, segment_counts
from oomguard._spec.candidate import KNOBS, Candidate, Candidates, is_none, make_candidate, serve
from oomguard._spec.lengths import same_model
from oomguard._spec.read import read_spec
from oomguard._spec.spec import Spec

DRAWN = ("microbatch", "segments", "precision", "seq")  # names that charts can vary


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model on a device under a budget, with the records that are known."""

    spec: Spec
    target: Target
    budget_bytes: int  # the bytes that the process may use there
    candidate: Candidate  # the values of knobs that do not vary; of a plan, the chosen candidate
    precisions: tuple[str, ...] = ("fp32",)
    records: tuple[Record, ...] = ()  # the records of such models on this device
    plan: Plan | None = None  # the plan that it is about, if it is about one
    fixed: frozenset[str] = frozenset()  # the knobs whose values the user fixed
    over: Over | None = None  # values that the user named; otherwise useful ones are chosen
    calibration: Calibration = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "calibration", Calibration(self.spec, self.records, self.target))

    @property
    def varied(self) -> Over:
        """The values of a table: by default microbatch and segments in powers of two and as measured, and precision."""
        if self.over is not None:
            return self.over
        known = [self.candidate, *(record.candidate for record in self.records if record.spec == self.spec)]
        counts = {1 << power for power in range(max(1, (self.spec.steps // SHORTEST_PIECE).bit_length()))}
        over: Over = {
            "microbatch": sorted({*self._powers, self.spec.batch, *(candidate.microbatch for candidate in known)}),
            "segments": sorted(counts | {candidate.segments for candidate in known}),
            "precision": [*self.precisions],
        }
        if self.candidate.window is not None:
            del over["segments"]
        return {name: values for name, values in over.items() if name not in self.fixed}

    @property
    def _powers(self) -> list[int]:
        return [1 << power for power in range(self.spec.batch.bit_length())]

    @property
    def microbatches(self) -> list[int]:
        """Microbatches of charts: powers of two, one between each two of them, the candidate's, and the batch."""
        usual = [*self._powers, *(3 * power // 2 for power in self._powers if power > 1), self.spec.batch]
        sizes = {*(self.over or {}).get("microbatch", usual), self.candidate.microbatch}
        return sorted(size for size in sizes if size <= self.spec.batch)

    @property
    def segments(self) -> list[int]:
        """Numbers of segments of charts, from 1 on."""
        return sorted({*self.segments_for(self.spec.steps), 1, self.candidate.segments})

    def segments_for(self, steps: int) -> list[int]:
        """Numbers of segments to compare for sequences of another length; at least one."""
        counts = (self.over or {}).get("segments", segment_counts(steps))
        return [count for count in counts if count <= steps] or [1]

    @property
    def calibrated(self) -> bool:
        """Whether there is a record of this very model."""
        return bool(self.calibration.own)

    def vary(self, spec: Spec | None = None, **knobs: Any) -> Candidates:
        """Candidates that differ from the subject's in some knobs; the accumulation follows from the microbatch."""
        values = {name: getattr(self.candidate, name) for name in KNOBS} | {"accumulation": None} | knobs
        if not any(isinstance(value, list | np.ndarray) for value in values.values()):
            values["microbatch"] = [values["microbatch"]]
        return serve(spec or self.spec, Candidates(**values))

    def predict(self, candidates: Candidates, spec: Spec | None = None) -> pd.DataFrame:
        """A row for each candidate of the spec (default: the subject's): its knobs, its estimate, its prediction.

        The estimate is `total_bytes` and its terms, by arithmetic. The prediction is `peak_bytes`, `margin_bytes`,
        `safe_bytes` (their sum), `seconds_per_step`, `doubt` (the standard deviation of the logarithm of that time) and
        `tokens_per_second`; without records, times are rough guesses of which only the proportions are useful. `runs`
        says whether the engine can run the steps of a piece at once, `fits` whether it also stays within the budget.
        """
        spec = spec or self.spec
        estimate = estimate_batch(spec, candidates, self.target)
        own = same_model(spec, self.spec)
        calibration = self.calibration.of(spec) if own else Calibration(spec, self.records, self.target)
        peak, margin = estimate.total_bytes, estimate.margin_bytes
        if calibration.records:
            peak, margin = calibration.predict_memory(estimate)
        seconds, doubt = calibration.predict_time(estimate)
        allocator = default_allocator(self.target.device)
        columns = candidates.knobs | {
            "engine": estimate.engine,
            "allocator": np.where(is_none(candidates.allocator), allocator, candidates.allocator).astype(str),
            **{f"{term}_bytes": estimate.terms[term] for term in TERMS},
            "total_bytes": estimate.total_bytes,
            "peak_bytes": peak,
            "margin_bytes": margin,
            "safe_bytes": peak + margin,
            "runs": estimate.runs,
            "fits": estimate.runs & (peak + margin <= self.budget_bytes),
            "seconds_per_step": seconds,
            "doubt": doubt,
            "tokens_per_second": spec.steps * spec.batch / seconds,
        }
        table = pd.DataFrame(columns, index=range(len(candidates)), copy=False)
        return table.astype({"window": "Int64", "threads": "Int64"})

    @property
    def planned(self) -> Plan | None:
        """The plan, if the subject's candidate is the one that it chose."""
        return self.plan if self.plan is not None and self.plan.candidate == self.candidate else None

    @property
    def plain_bytes(self) -> int:
        """The peak of PyTorch without oomguard: as the plan says it, otherwise as predicted here."""
        if self.plan is not None:
            return self.plan.plain.expected.peak_bytes
        plain = plain_candidate(self.spec, cuda=self.target.cuda, cores=os.cpu_count() or 1)
        return int(self.calibration.predict(estimate_step(self.spec, plain, self.target))[0].peak_bytes)

    @property
    def star(self) -> str:
        """The name of the plan in a chart, with how its peak is known."""
        return "" if self.plan is None else f"the plan, {self.plan.known}"

    def chart(self, candidates: Candidates) -> pd.DataFrame:
        """What `predict` says; of the candidate that the plan chose, what the plan says."""
        table, plan = self.predict(candidates), self.planned
        table["planned"] = False
        chosen = [] if plan is None else [i for i in range(len(candidates)) if candidates[i] == plan.candidate]
        if plan is not None and chosen:
            table.loc[chosen, "peak_bytes"] = plan.peak_bytes
            table.loc[chosen, "safe_bytes"] = plan.peak_bytes + plan.margin_bytes
            table.loc[chosen, "fits"] = table.loc[chosen, "planned"] = True
        if plan is not None and chosen and plan.seconds_per_step is not None:
            table.loc[chosen, "seconds_per_step"] = plan.seconds_per_step
            table.loc[chosen, "tokens_per_second"] = self.spec.steps * self.spec.batch / plan.seconds_per_step
        return table

    def with_seq(self, steps: int) -> Spec:
        return msgspec.structs.replace(self.spec, seq=steps, lengths=None)

    def at_length(self, steps: int) -> tuple[Spec, Candidate]:
        """The spec with sequences of the given length, and the candidate with segments and window for it."""
        segments, window = min(self.candidate.segments, steps), self.candidate.window
        window = None if window is None else min(window, steps)
        return self.with_seq(steps), msgspec.structs.replace(self.candidate, segments=segments, window=window)


def front_of(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that fit and that no other one beats in both memory and speed, the least memory first."""
    fitting = table[table["fits"]]
    front = fitting[pareto_front(fitting["peak_bytes"], -fitting["tokens_per_second"])]
    return front.sort_values("peak_bytes", kind="stable")


def subject_of(plan: Plan) -> Subject:
    used = {"fp32", plan.candidate.precision, *(record.candidate.precision for record in plan.records)}
    known = _precisions(plan.where) if plan.where.cuda and "precision" in plan.allow else ()
    return Subject(
        spec=plan.spec,
        target=plan.where,
        budget_bytes=plan.budget_bytes,
        candidate=plan.candidate,
        precisions=tuple(name for name in ("fp32", "bf16", "fp16") if name in used or name in known),
        records=plan.records,
        plan=plan,
    )


def _precisions(target: Target) -> tuple[str, ...]:
    """fp32 and, where the device has one, a half precision: bf16 rather than fp16, which needs its loss scaled."""
    known = target.card_precisions if target.cuda else cpu_precisions()
    return ("fp32", *[name for name in ("bf16", "fp16") if name in known][:1])


def find_subject(
    spec: Spec | None = None,
    *,
    over: dict[str, Any] | None = None,
    device: str | None = None,
    budget: int | str | None = None,
    measured: Any = None,
    **fields: Any,
) -> Subject:
    """The subject that `tradeoffs` and `curves` are asked about."""
    (records, plan), varied = _read_measured(measured), None if over is None else read_over(over)
    given = {name: value for name, value in fields.items() if name not in KNOBS}
    fixed = {name: value for name, value in fields.items() if name in KNOBS and value is not None}
    if plan is not None and spec is None and "cell" not in given:
        check_own_spec(given)
        spec = plan.spec
    spec = read_spec(spec, given if spec else given | fields_for(varied or {}, given))
    limit_bytes = read_budget(budget)
    if device is None and plan is not None:
        target, budget_bytes = plan.where, limit_bytes or plan.budget_bytes
    else:
        target, budget_bytes = find_target(device or "cpu"), limit_bytes or find_budget(device or "cpu").limit_bytes
    both = [name for name in varied or () if name in fixed]
    if both:
        raise MisuseError(
            rule="A knob is either fixed or varied",
            got=f"got {flag(both[0])} {shown(fixed[both[0]])} and values of it to vary over",
            advice="Leave out one of the two.",
        )
    same = plan is not None and (plan.spec, plan.where, plan.budget_bytes) == (spec, target, budget_bytes)
    if plan is not None and same and not fixed:
        return replace(subject_of(plan), over=varied)
    return Subject(
        spec=spec,
        target=target,
        budget_bytes=budget_bytes,
        candidate=make_candidate(spec, **_usual_knobs(spec, records, plan) | fixed),
        precisions=_precisions(target),
        records=_records_on(records, target),
        plan=plan if same else None,  # otherwise it answers another question
        fixed=frozenset(fixed),
        over=varied,
    )


def _read_measured(measured: Any) -> tuple[tuple[Record, ...], Plan | None]:
    """Records from a `Plan` or its file, from a ledger or its directory, or from a list; and the plan if it is one."""
    if isinstance(measured, str | os.PathLike):
        path = Path(measured)
        path = path / RECORDS if path.is_dir() else path
        if not path.exists():
            raise MisuseError(
                rule="Records are read from the file of a plan or the directory of a ledger",
                got=f"there is no {path}",
                advice="Give the path of a plan.json, or the directory that --ledger named.",
            )
        measured = Ledger(path) if path.suffix == ".jsonl" else load_spec_plan(path)
    if isinstance(measured, Plan):
        return measured.records, measured
    source = measured.read() if isinstance(measured, Ledger) else () if measured is None else measured
    records = tuple(source) if isinstance(source, Iterable) else None
    if records is None or not all(isinstance(record, Record) for record in records):
        raise MisuseError(
            rule="measured must be a plan, a ledger or records",
            got=f"got {shown(measured)}",
            advice="Give a Plan, the path of a plan.json, or the directory of a ledger.",
        )
    return records, None


def _records_on(records: tuple[Record, ...], target: Target) -> tuple[Record, ...]:
    """The records that were measured on such a device; raises if there are records but none is from it."""
    own = tuple(record for record in records if is_on(record, target))
    if records and not own:
        titles = sorted({record.title or record.device for record in records})
        raise MisuseError(
            rule="Records must be from the device that is asked about",
            got=f"got records of {', '.join(titles[:3])} for {target.device}",
            advice="Leave out the device or the records.",
        )
    return own


def is_on(record: Record, target: Target) -> bool:
    if not target.cuda or record.device == "cpu":
        return not target.cuda and record.device == "cpu"
    try:
        return cards.card(target.device).name == cards.card(record.title or "").name
    except MisuseError:  # a card of this machine that the table of cards does not name
        return True


def _usual_knobs(spec: Spec, records: tuple[Record, ...], plan: Plan | None) -> dict[str, Any]:
    """Knobs of the plan, or settings that most records of the model have: a table contains what was measured."""
    if plan is not None and plan.spec == spec:
        return msgspec.structs.asdict(plan.candidate) | {"accumulation": None}
    candidates = [record.candidate for record in records if same_model(record.spec, spec)]
    candidates = candidates if plan is None else [plan.candidate]
    names = [name for name in KNOBS if name not in SHAPE]
    settings = Counter(tuple(getattr(candidate, name) for name in names) for candidate in candidates)
    return dict(zip(names, settings.most_common(1)[0][0], strict=True)) if settings else {}


def for_charts(subject: Subject) -> Subject:
    """The subject as charts show it: with the precisions that vary and, of several lengths, the longest."""
    over = subject.over or {}
    other = [name for name in over if name not in DRAWN]
    if other:
        names = " and ".join(flag(name).removeprefix("--") for name in other)
        raise MisuseError(
            rule="Charts show one model, over its microbatch, segments, precision or seq",
            got=f"got --over {names}",
            advice=f"Write .csv, or give one {' and one '.join(map(flag, other))}.",
        )
    subject = replace(subject, precisions=tuple(over.get("precision", subject.precisions)))
    lengths = [subject.with_seq(steps).steps for steps in over.get("seq", ())]  # `Spec` checks them
    spec, candidate = subject.at_length(max(lengths, default=subject.spec.steps))
    if not lengths or spec == subject.spec:
        return subject
    return replace(subject, spec=spec, candidate=candidate, plan=None)
