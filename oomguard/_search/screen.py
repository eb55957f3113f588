"""The screen: which candidates of the space fit, by prediction and by what records say of them. Nothing is run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from oomguard._core.units import MIB
from oomguard._estimate.breakdown import Estimate, estimate_batch
from oomguard._estimate.malloc import heap_of
from oomguard._estimate.target import Target
from oomguard._predict.calibration import Calibration, Kind, Predictions, heap_setting, kinds_of, same_model
from oomguard._predict.fit import Floats
from oomguard._predict.memory import repeat
from oomguard._predict.speed import LOCAL, cold, faults, noise
from oomguard._probe.record import Record
from oomguard._probe.verdict import Verdict
from oomguard._search.space import Problem, grid, lossy
from oomguard._spec.candidate import KNOBS, Candidate, Candidates, is_none
from oomguard._spec.spec import MAX_SEQ, Spec

REPEAT_BYTES = 2 * MIB
"""Bytes by which a peak may be higher when it is repeated, whatever its size."""
SETTING = tuple(name for name, knob in KNOBS.items() if knob.role.group == "setting" and name != "threads")
"""Knobs that decide which code runs. If it fails once, it always does."""
CAUTION = 0.5
"""Standard deviations by which a predicted time is raised before it is compared with measured ones."""
STRAIN = 0.93
"""Where one candidate was strained, others of its setting must peak below this share of its peak."""
HOPELESS = (Verdict.UNSUPPORTED, Verdict.CRASHED, Verdict.BROKEN)

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateTable:
    """The space of one spec as a table: one row per candidate, with what is predicted and known of it."""

    spec: Spec
    candidates: Candidates
    estimate: Estimate
    calibration: Calibration
    kinds: dict[Kind, Mask]
    """The kinds among them, each with its rows."""
    prediction: Predictions
    """Calibrated predictions, whether or not a candidate has run itself."""
    expected: Predictions
    """Peaks and times as measured where that very candidate has run, as predicted elsewhere (times with caution)."""
    runs: Mask
    """Whether the engine takes so many steps at once."""
    fits: Mask
    """Whether the candidate runs, with peak and margin within the budget."""
    seconds: Floats
    """Seconds of a step where the candidate, perhaps shortened, has been timed (`_damped`); elsewhere nan."""
    longest: Ints
    """Steps of the longest sequences that the candidate has run with; 0 if it never ran."""
    shortest: Ints
    """Steps of the shortest sequences that it has run with; `MAX_SEQ` if it never ran."""
    faulting: Mask
    """CPU: whether the blocks of a pass are mapped anew each time."""
    timeable: Mask
    """Whether short sequences tell the time of long ones."""

    def __len__(self) -> int:
        return len(self.fits)

    @property
    def eligible(self) -> Mask:
        """What may be chosen: exact candidates that fit; if there is none, lossy ones."""
        exact = self.fits & ~lossy(self.candidates)
        return exact if exact.any() else self.fits

    @property
    def microbatches(self) -> Ints:
        """The microbatch of each candidate."""
        return np.broadcast_to(self.candidates.microbatch, len(self))

    @property
    def passes(self) -> Ints:
        """Passes of an optimizer step."""
        return -(-self.spec.batch // self.microbatches)

    @property
    def pass_seconds(self) -> Floats:
        """Expected seconds of one full microbatch."""
        return self.expected.seconds_per_step / self.passes

    @property
    def runtime_bytes(self) -> int:
        """The estimated runtime."""
        return int(np.max(self.estimate.terms["runtime"]))

    def like(self, candidate: Candidate, *names: str) -> Mask:
        """Where some knobs have the values of a candidate."""
        rows = np.ones(len(self), dtype=bool)
        for name in names:
            rows &= np.asarray(getattr(self.candidates, name) == getattr(candidate, name))
        return rows

    def kind_at(self, row: int) -> Kind:
        """The kind of a candidate."""
        return next(kind for kind, rows in self.kinds.items() if rows[row])

    def of_kinds(self, kinds: set[Kind]) -> Mask:
        """Where candidates are of one of these kinds."""
        return np.asarray(np.any([rows & (kind in kinds) for kind, rows in self.kinds.items()], axis=0))

    @property
    def smallest(self) -> int:
        """The row of the candidate that needs least memory, of those that run at all."""
        return least(self.expected.safe_bytes, self.runs)


def least(values: Floats | Ints, rows: Mask) -> int:
    """The row with the least value, of some rows."""
    return int(np.argmin(np.where(rows, values, np.inf)))


def screen(
    problem: Problem, records: Sequence[Record], spec: Spec | None = None, caution: float = 1.0
) -> CandidateTable:
    """The table of the problem's spec, or of a spec with another length.

    Records of earlier searches only steer the predictions; only records of this search say that a candidate ran.
    `caution` is the share of the margin that must fit too.
    """
    spec = spec or problem.spec
    table = _predicted(problem, Calibration(spec, records, problem.target, problem.cached), caution)
    ours, late = [record for record in records if same_model(record.spec, spec)], np.zeros(len(table), dtype=bool)
    for record in sorted(ours, key=lambda record: _weight(record, spec)):  # the most informative record comes last
        if record.verdict.ran or record.spec.steps <= spec.steps:
            late |= _add(table, problem, record, ours) & (record.verdict is Verdict.TIMEOUT)
    for record in ours:
        if record.verdict is Verdict.STRAINED and record.peak_bytes is not None:
            high = table.expected.peak_bytes > STRAIN * record.peak_bytes
            table.fits[table.like(record.candidate, *SETTING) & high] = False
    in_time = table.fits & ~(late & (table.longest == 0))
    if in_time.any():  # otherwise all that fit timed out, which says nothing about memory
        table.fits[:] = in_time
    np.copyto(table.expected.seconds_per_step, table.seconds, where=~np.isnan(table.seconds))
    return table


def _predicted(problem: Problem, calibration: Calibration, caution: float) -> CandidateTable:
    """The table before records of this search are added."""
    spec = calibration.spec
    candidates = grid(spec, problem.space, finest="microbatch" in problem.maximize, one_pass=problem.open_batch)
    estimate, length = estimate_batch(spec, candidates, problem.target), len(candidates)
    prediction = calibration.predict(estimate)
    expected = replace(
        prediction,
        peak_bytes=prediction.peak_bytes.copy(),
        margin_bytes=np.ceil(caution * prediction.margin_bytes).astype(np.int64),
        seconds_per_step=prediction.seconds_per_step * np.exp(CAUTION * prediction.doubt),
    )
    runs = np.broadcast_to(estimate.runs, length)
    fits = runs & (expected.safe_bytes <= problem.budget_bytes)
    if problem.host_bytes is not None:
        fits &= estimate.host_bytes <= problem.host_bytes
    large = np.broadcast_to(cold(spec, candidates, estimate.engine), length)
    return CandidateTable(
        spec=spec,
        candidates=candidates,
        estimate=estimate,
        calibration=calibration,
        kinds=kinds_of(estimate, problem.target),
        prediction=prediction,
        expected=expected,
        runs=runs,
        fits=fits,
        seconds=np.full(length, np.nan),
        longest=np.zeros(length, dtype=np.int64),
        shortest=np.full(length, MAX_SEQ, dtype=np.int64),
        faulting=np.broadcast_to(faults(spec, candidates, estimate.engine), length),
        timeable=~large | problem.target.cuda,
    )


def _add(table: CandidateTable, problem: Problem, record: Record, records: Sequence[Record]) -> Mask:
    """Write what a record of this model says into the table, and return the rows of its candidates."""
    rows, turns, calibration = _rows_of(record, table), turns_of(record, records), table.calibration
    if not problem.target.cuda:  # short sequences with small blocks do not tell the time of large blocks
        own = record.spec, record.candidate, record.engine or ""
        rows &= (table.faulting == faults(*own)) & (table.timeable != cold(*own))
    if record.verdict.ran and record.seconds_per_pass is not None:
        passes = table.spec.steps * table.spec.batch / (record.spec.steps * record.candidate.microbatch)
        measured = passes * median(map(calibration.seconds_without_drift, turns)) + calibration.update_seconds
        table.seconds[rows] = _damped(measured, turns, table.prediction.seconds_per_step[rows])
        table.shortest[rows] = np.minimum(table.shortest[rows], record.spec.steps)
        table.longest[rows] = np.maximum(table.longest[rows], record.spec.steps)
    elif record.verdict in HOPELESS:
        # what is unusual is taken for the cause, or else every knob that decides which code runs
        cause = ("allocator",) if record.candidate.allocator == "expandable" else SETTING
        table.fits[table.like(record.candidate, *cause)] = False
    elif record.verdict is not Verdict.TIMEOUT and record.budget_bytes >= problem.budget_bytes:
        peaks = table.prediction.peak_bytes
        lowest = np.max(peaks[rows]) if rows.any() else np.inf  # nor does anything fit that should peak no lower
        table.fits[rows | (table.like(record.candidate, *SETTING) & (peaks >= lowest))] = False
    whole = problem.spec_of(record.candidate.microbatch, table.spec)
    if record.spec == whole and record.verdict.ran and record.peak_bytes is not None:
        same = rows & table.like(record.candidate, "segments")
        highest = max(turns, key=lambda record: record.peak_bytes or 0)
        peak_bytes, safe_bytes = highest.peak_bytes or 0, repeated_bytes(highest, problem.target)
        table.expected.peak_bytes[same], table.expected.margin_bytes[same] = peak_bytes, safe_bytes - peak_bytes
        table.fits[same] = safe_bytes <= problem.budget_bytes
    return rows


def turns_of(record: Record, records: Sequence[Record]) -> list[Record]:
    """All records of the very same probe that ran: what may be fastest is run several times."""
    ran = [other for other in records if other.verdict.ran and other.steps]
    return [other for other in ran if (other.candidate, other.spec) == (record.candidate, record.spec)]


def _damped(measured: float, turns: Sequence[Record], predicted: Floats) -> Floats:
    """A measured time, drawn towards the predictions by as much as its noise may have moved it away."""
    doubt = median(map(noise, turns)) / len(turns) ** 0.5
    share = doubt**2 / (doubt**2 + LOCAL**2)
    return np.asarray(measured * np.exp(np.clip(share * np.log(predicted / measured), -doubt, doubt)))


def record_of(records: Sequence[Record], table: CandidateTable, row: int) -> Record | None:
    """The most informative record of a candidate (of several turns the highest peak); None if it never ran."""
    ran = [record for record in records if record.verdict.ran and same_model(record.spec, table.spec)]
    own = [record for record in ran if _rows_of(record, table)[row]]
    best = max(own, key=lambda record: _weight(record, table.spec), default=None)
    return best and max(turns_of(best, own), key=lambda record: record.peak_bytes or 0)


def _weight(record: Record, spec: Spec) -> tuple[bool, int, str]:
    """How informative a record is: least if longer than asked for, otherwise the longer and the later, the more."""
    return record.spec.steps <= spec.steps, record.spec.steps, record.started


def repeated_bytes(record: Record, target: Target) -> int:
    """The peak that a candidate that has run may reach when it runs again, for longer."""
    assert record.peak_bytes is not None
    growth_bytes = record.peak_bytes - (record.runtime_bytes or 0)
    share = float(repeat(record.candidate, heap_setting(record.candidate.allocator, record.engine, target)))
    return record.peak_bytes + round(share * growth_bytes) + REPEAT_BYTES


def may_repeat_bytes(table: CandidateTable) -> Floats:
    """CPU: the peaks that candidates that have not run may reach if they peak as expected, when they run again."""
    shares, peaks = np.zeros(len(table)), table.expected.peak_bytes
    for kind, rows in table.kinds.items():
        shares = np.where(rows, repeat(table.candidates, heap_of(kind.allocator, kind.engine)), shares)
    return peaks + shares * (peaks - table.runtime_bytes) + REPEAT_BYTES


def _rows_of(record: Record, table: CandidateTable) -> Mask:
    """The candidates that a record is of: the same knobs and the same segments, perhaps of a shorter sequence."""
    knobs, steps, candidates = record.candidate, record.spec.steps, table.candidates
    rows = table.like(knobs, *SETTING, "threads", "recompute", "levels", "microbatch")
    piece, own = -(-table.spec.steps // candidates.segments), -(-steps // knobs.segments)
    rows &= np.greater(candidates.segments, 1) == (knobs.segments > 1)
    if knobs.segments > 1:  # fewer segments of that length, or two shorter ones if one alone would take too long
        rows &= (piece == own) | ((knobs.segments <= 2 * knobs.levels) & (own < piece))
    whole = is_none(candidates.window)
    windows = np.minimum(np.where(whole, steps, candidates.window), steps)
    return rows & (whole if knobs.window is None else ~whole & (windows == knobs.window))
