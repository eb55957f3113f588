"""The screen: which candidates of the space fit, by prediction and by what records say of them. Nothing is run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from oomguard._estimate.breakdown import Estimate, estimate_batch
from oomguard._predict.calibration import Calibration, Kind, Predictions, kinds_of
from oomguard._predict.fit import Floats
from oomguard._predict.speed import NOISE
from oomguard._probe.record import Record
from oomguard._probe.verdict import Verdict
from oomguard._search.space import WORTH_LOSSY, Problem, grid, lossy
from oomguard._spec.candidate import KNOBS, Candidate, Candidates, is_none
from oomguard._spec.lengths import same_model
from oomguard._spec.spec import Spec

if TYPE_CHECKING:
    from oomguard._search.propose import Probe

SETTING = tuple(name for name, knob in KNOBS.items() if knob.role.group == "setting" and name != "threads")
"""Knobs that decide which code runs. If it fails once, it always does."""
SHAPE = ("threads", "microbatch", "segments", "recompute", "levels", "window")
"""Knobs that decide in which pieces it runs, and with how many threads."""

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateTable:
    """The space of one spec as a table: one row per candidate, with what is predicted and known of it."""

    spec: Spec
    candidates: Candidates
    estimate: Estimate
    calibration: Calibration
    kinds: dict[Kind, Mask]  # the kinds among them, each with its rows
    prediction: Predictions  # calibrated predictions, whether or not a candidate has run itself
    expected: Predictions  # peaks and times as measured where that very candidate has run whole, as predicted elsewhere
    runs: Mask  # whether the engine takes so many steps at once
    fits: Mask  # whether the candidate runs, with peak and margin within the budget
    longest: Ints  # steps of the longest sequences that the candidate has run with; 0 if it never ran

    def __len__(self) -> int:
        return len(self.fits)

    @property
    def eligible(self) -> Mask:
        """What may be chosen: exact candidates that fit; if there is none, lossy ones."""
        exact = self.fits & ~lossy(self.candidates)
        return exact if exact.any() else self.fits

    @property
    def costs(self) -> Floats:
        """What candidates are compared by: seconds of a step, of which half precision must save a stated share."""
        return self.expected.seconds_per_step * np.where(self.exact, 1.0, WORTH_LOSSY)

    @property
    def exact(self) -> Mask:
        """Where candidates compute in fp32."""
        return np.broadcast_to(np.equal(self.candidates.precision, "fp32"), len(self))

    def in_time(self, seconds: float) -> Mask:
        """Where a step takes at most so many seconds: as measured, elsewhere with the deviation of its prediction."""
        doubt = np.where(self.longest == self.spec.steps, 0.0, self.expected.doubt)
        return np.asarray(self.expected.seconds_per_step * np.exp(doubt) <= seconds)

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


def screen(problem: Problem, records: Sequence[Record], spec: Spec | None = None) -> CandidateTable:
    """The table of the problem's spec, or of a spec with another length.

    Records of earlier searches only steer the predictions; only records of this search say that a candidate ran.
    """
    spec = spec or problem.spec
    table = _predicted(problem, Calibration(spec, records, problem.target, problem.cached))
    ours = [record for record in records if same_model(record.spec, spec)]
    late, strained = np.zeros(len(table), dtype=bool), np.zeros(len(table), dtype=bool)
    for record in sorted(ours, key=lambda record: _weight(record, spec)):  # the most informative record comes last
        rows, same = rows_of(record, table), table.like(record.candidate, *SETTING)
        if record.verdict.ran:
            table.longest[rows] = np.maximum(table.longest[rows], record.spec.steps)
            if record.spec == problem.spec_of(record.candidate.microbatch, spec):
                _measured(table, problem, rows & table.like(record.candidate, "segments"), turns_of(record, ours))
        elif record.spec.steps <= spec.steps:
            late |= rows & (record.verdict is Verdict.TIMEOUT)
            table.fits[_failed(table, problem, record, rows, same)] = False
        if record.verdict is Verdict.STRAINED:  # others of its setting must surely peak lower
            strained |= same & (table.expected.safe_bytes > (record.peak_bytes or 0))
    table.fits[strained] = False
    _compare(table, ours)
    in_time = table.fits & ~(late & (table.longest == 0))
    if in_time.any():  # otherwise all that fit timed out, which says nothing about memory
        table.fits[:] = in_time
    return table


def _predicted(problem: Problem, calibration: Calibration) -> CandidateTable:
    """The table before records of this search are added."""
    spec = calibration.spec
    candidates = grid(spec, problem.space, finest="microbatch" in problem.maximize, one_pass=problem.open_batch)
    estimate, length = estimate_batch(spec, candidates, problem.target), len(candidates)
    prediction = calibration.predict(estimate)
    names = ("peak_bytes", "margin_bytes", "seconds_per_step")
    expected = replace(prediction, **{name: getattr(prediction, name).copy() for name in names})
    runs = np.broadcast_to(estimate.runs, length)
    fits = runs & (expected.safe_bytes <= problem.budget_bytes)
    if problem.host_bytes is not None:
        fits &= estimate.host_bytes <= problem.host_bytes
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
        longest=np.zeros(length, dtype=np.int64),
    )


def _measured(table: CandidateTable, problem: Problem, rows: Mask, turns: Sequence[Record]) -> None:
    """Write what the turns of a candidate at full length say of it into the table.

    Its time is the median, drawn towards the prediction by no more than its noise.
    """
    highest, expected = max(turns, key=lambda record: record.peak_bytes or 0), table.expected
    peak_bytes, safe_bytes = highest.peak_bytes or 0, table.calibration.repeated_bytes(highest)
    expected.peak_bytes[rows], expected.margin_bytes[rows] = peak_bytes, safe_bytes - peak_bytes
    table.fits[rows] = safe_bytes <= problem.budget_bytes
    passes, noise = table.spec.batch / highest.candidate.microbatch, NOISE / len(turns) ** 0.5
    seconds = passes * median([turn.seconds_per_pass or 0.0 for turn in turns]) + table.calibration.update_seconds
    pull = np.clip(np.log(table.prediction.seconds_per_step[rows] / seconds), -noise, noise)
    expected.seconds_per_step[rows] = seconds * np.exp(pull)


def _failed(table: CandidateTable, problem: Problem, record: Record, rows: Mask, same: Mask) -> Mask:
    """The candidates that will fail because one did: those of its setting, if the code does not run there."""
    if record.verdict in (Verdict.UNSUPPORTED, Verdict.CRASHED, Verdict.BROKEN):
        unusual = record.candidate.allocator == "expandable"  # taken for the cause
        return table.like(record.candidate, "allocator") if unusual else same
    if record.verdict is Verdict.TIMEOUT or record.budget_bytes < problem.budget_bytes:
        return np.zeros(len(table), dtype=bool)
    peaks = table.prediction.peak_bytes
    if record.rival is not None:  # either of the two
        rows = rows | table.like(record.rival, *SETTING, *SHAPE)
    lowest = np.max(peaks[rows]) if rows.any() else np.inf  # nor does anything fit that should peak no lower
    return rows | (same & (peaks >= lowest))


def _compare(table: CandidateTable, records: Sequence[Record]) -> None:
    """Let the times of two candidates that ran by turns differ by the ratio of their turns."""
    seconds = table.expected.seconds_per_step
    for record in records:
        if record.rival is not None and record.ratio is not None and record.spec == table.spec:
            one, other = (table.like(candidate, *SETTING, *SHAPE) for candidate in (record.candidate, record.rival))
            if one.any() and other.any():
                middle = np.sqrt(seconds[one][0] * seconds[other][0])
                seconds[one], seconds[other] = middle * record.ratio**0.5, middle / record.ratio**0.5


def turns_of(record: Record, records: Sequence[Record]) -> list[Record]:
    """All records of the very same probe that ran: what may be fastest is run several times."""
    ran = [other for other in records if other.verdict.ran and other.steps]
    return [other for other in ran if (other.candidate, other.spec) == (record.candidate, record.spec)]


def record_of(records: Sequence[Record], table: CandidateTable, row: int) -> Record | None:
    """The most informative record of a candidate (of several turns the highest peak); None if it never ran."""
    ran = [record for record in records if record.verdict.ran and same_model(record.spec, table.spec)]
    own = [record for record in ran if rows_of(record, table)[row]]
    best = max(own, key=lambda record: _weight(record, table.spec), default=None)
    return best and max(turns_of(best, own), key=lambda record: record.peak_bytes or 0)


def _weight(record: Record, spec: Spec) -> tuple[bool, int, str]:
    """How informative a record is: least if longer than asked for, otherwise the longer and the later, the more."""
    return record.spec.steps <= spec.steps, record.spec.steps, record.started


def rows_of(record: "Record | Probe", table: CandidateTable) -> Mask:
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
