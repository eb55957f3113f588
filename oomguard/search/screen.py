"""The screen: what of the space fits by estimate and margin, and what records say of it. Nothing is run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from oomguard.calibrate import Calibration, Prediction, same_model
from oomguard.calibrate.memory import repeat
from oomguard.calibrate.speed import LOCAL, cold, faults, noise
from oomguard.candidate import Candidate, Candidates
from oomguard.estimate.batch import estimate_batch
from oomguard.estimate.breakdown import Estimate
from oomguard.estimate.malloc import setting_of
from oomguard.probe.record import Record
from oomguard.probe.verdict import Verdict
from oomguard.search.problem import Problem
from oomguard.search.space import grid, lossy, pick
from oomguard.spec import MAX_SEQ, Spec
from oomguard.units import MIB

REPEAT_BYTES = 2 * MIB
"""What a peak may come out higher by, whatever its size."""
SETTING = ("engine", "precision", "allocator", "offload", "keep", "update", "state_8bit")
"""Knobs that decide on what code runs. If it does not run once, it never does."""
CAUTION = 0.5
"""By how many standard deviations a predicted time is raised before it is compared with measured ones."""
STRAIN = 0.93
"""Where one candidate was strained, others must peak at so much less."""
HOPELESS = ("UNSUPPORTED", "CRASHED", "BROKEN")


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """The space of one spec, with what is expected and known of every candidate. All figures are arrays."""

    spec: Spec
    candidates: Candidates
    estimate: Estimate
    prediction: Prediction
    peak_bytes: Any
    """The peak: measured where that very candidate has run, predicted elsewhere."""
    safe_bytes: Any
    """The peak and its margin."""
    fits: Any
    """Whether it runs, and that is within the budget."""
    seconds: Any
    """Of a step, where the candidate (or a shortened one) has been timed; elsewhere nan. What a moment's luck may have
    done to that is taken back."""
    longest: Any
    """The longest sequences that it has been run with; 0 if never."""
    shortest: Any
    """The shortest; as long as can be if never."""
    timeable: Any
    """Whether short sequences tell the time of long ones."""

    @property
    def expected(self) -> Any:
        """Seconds of a step: measured or, where they are not, predicted with some caution."""
        predicted = self.prediction.seconds_per_step * np.exp(CAUTION * self.prediction.doubt)
        return np.where(np.isnan(self.seconds), predicted, self.seconds)

    @property
    def eligible(self) -> Any:
        """What may be chosen: what fits and is exact; lossy cuts only if nothing else fits."""
        exact = self.fits & ~lossy(self.candidates)
        return exact if exact.any() else self.fits

    def find(self, candidate: Candidate) -> int | None:
        """The row of a candidate."""
        rows = np.flatnonzero(rows_like(self.candidates, candidate, [*Candidate.__struct_fields__]))
        return int(rows[0]) if len(rows) else None


def screen(problem: Problem, records: Sequence[Record], spec: Spec | None = None, caution: float = 1.0) -> Screened:
    """What of the space fits, for the problem's spec or for another length of its sequences.

    What earlier searches measured steers the predictions; only records of this one say that something ran. `caution` is
    the part of the margin that must fit too.
    """
    spec = spec or problem.spec
    candidates = grid(spec, problem.space, finest=problem.finest)
    estimate = estimate_batch(spec, candidates, problem.place)
    calibration = Calibration(spec, records, problem.place, problem.cached)
    prediction = calibration.predict(estimate)
    peak = prediction.peak_bytes.copy()
    safe = peak + np.ceil(caution * prediction.margin_bytes).astype(np.int64)
    fits = np.broadcast_to(estimate.runs, len(candidates)) & (safe <= problem.budget_bytes)
    if problem.host_bytes is not None:
        fits = fits & (np.broadcast_to(estimate.host_bytes, len(candidates)) <= problem.host_bytes)
    seconds, longest = np.full(len(candidates), np.nan), np.zeros(len(candidates), dtype=np.int64)
    shortest = np.full(len(candidates), MAX_SEQ, dtype=np.int64)
    faulting, large = (np.broadcast_to(ask(spec, candidates, estimate.engine), len(fits)) for ask in (faults, cold))
    late = np.zeros(len(candidates), dtype=bool)
    for record in sorted(records, key=lambda one: _weight(one, spec)):  # what weighs most has the last word
        longer = record.spec.steps > spec.steps
        if not same_model(record.spec, spec) or (longer and not record.verdict.ran):
            continue
        rows = _rows_of(record, spec, candidates)
        if not problem.place.cuda:  # short sequences of small blocks do not tell the time of large ones
            rows &= (faulting == _asked(faults, record)) & (large == _asked(cold, record))
        if record.verdict.ran and record.seconds_per_pass is not None:
            turns = turns_of(record, records)
            passes = spec.steps * spec.batch / (record.spec.steps * record.candidate.microbatch)
            measured = passes * median(map(calibration.calm_seconds, turns)) + calibration.update_seconds
            seconds[rows] = _sober(measured, turns, prediction.seconds_per_step[rows])
            shortest[rows] = np.minimum(shortest[rows], record.spec.steps)
            longest[rows] = np.maximum(longest[rows], record.spec.steps)
        elif record.verdict.name in HOPELESS:
            fits &= ~rows_like(candidates, record.candidate, _to_blame(record))
        elif record.verdict is Verdict.TIMEOUT:
            late |= rows
        elif record.budget_bytes >= problem.budget_bytes:
            fits &= ~(rows | _no_smaller(record, rows, candidates, prediction))
        if record.spec == spec and record.verdict.ran and record.peak_bytes is not None:
            here = rows & rows_like(candidates, record.candidate, ["segments"])
            highest = max(turns_of(record, records), key=lambda one: one.peak_bytes or 0)
            peak[here], safe[here] = highest.peak_bytes, repeated_bytes(highest, cuda=problem.place.cuda)
            fits[here] = safe[here] <= problem.budget_bytes
    for record in records:
        if record.verdict is Verdict.STRAINED and same_model(record.spec, spec) and record.peak_bytes is not None:
            fits &= ~(rows_like(candidates, record.candidate, [*SETTING]) & (peak > STRAIN * record.peak_bytes))
    in_time = fits & ~(late & (longest == 0))
    fits = in_time if in_time.any() else fits  # that it took long says nothing about its memory
    timeable = ~large | problem.place.cuda
    return Screened(
        spec=spec, candidates=candidates, estimate=estimate, prediction=prediction, peak_bytes=peak, safe_bytes=safe,
        fits=fits, seconds=seconds, longest=longest, shortest=shortest,
        timeable=timeable,
    )  # fmt: skip


def turns_of(record: Record, records: Sequence[Record]) -> list[Record]:
    """All records of the very same probe that ran: what may be fastest is run several times."""
    return [
        one
        for one in records
        if one.verdict.ran and (one.candidate, one.spec) == (record.candidate, record.spec) and one.steps
    ]


def _sober(measured: float, turns: Sequence[Record], predicted: Any) -> Any:
    """A measured time, drawn towards what was predicted by as much as luck may have moved it away from there."""
    doubt = median(map(noise, turns)) / len(turns) ** 0.5
    share = doubt**2 / (doubt**2 + LOCAL**2)
    return measured * np.exp(np.clip(share * np.log(predicted / measured), -doubt, doubt))


def record_of(records: Sequence[Record], view: Screened, row: int) -> Record | None:
    """The record that tells most of a candidate; of several turns the one that peaked highest; None if it never ran."""
    candidate = pick(view.candidates, np.array([row]))
    own = [
        one
        for one in records
        if one.verdict.ran and same_model(one.spec, view.spec) and _rows_of(one, view.spec, candidate)[0]
    ]
    best = max(own, key=lambda one: _weight(one, view.spec), default=None)
    return best and max(turns_of(best, own), key=lambda one: one.peak_bytes or 0)


def _weight(record: Record, spec: Spec) -> tuple[bool, int, str]:
    """Of several records of a candidate, which one tells most: those of longer sequences than asked for tell less than
    any other; of the others the longest and, of equal ones, the last."""
    return record.spec.steps <= spec.steps, record.spec.steps, record.started


def repeated_bytes(record: Record, *, cuda: bool) -> int:
    """What a candidate that has run may peak at when it runs again, for longer."""
    assert record.peak_bytes is not None
    growth_bytes = record.peak_bytes - (record.runtime_bytes or 0)
    setting = "cuda" if cuda else setting_of(record.candidate.allocator)
    return record.peak_bytes + round(float(repeat(record.candidate, setting)) * growth_bytes) + REPEAT_BYTES


def may_repeat_bytes(view: Screened) -> Any:
    """CPU: the same of candidates that have not run, if they peak as expected."""
    names = np.broadcast_to(np.asarray(view.candidates.allocator, dtype=object), len(view.fits))
    shares = np.zeros(len(names))
    for name in {*names.tolist()}:
        shares = np.where(names == name, repeat(view.candidates, setting_of(name)), shares)
    return view.peak_bytes + shares * (view.peak_bytes - np.max(view.estimate.terms["runtime"])) + REPEAT_BYTES


def _no_smaller(record: Record, rows: Any, candidates: Candidates, prediction: Prediction) -> Any:
    """What should peak no lower than a candidate that did not fit, in the same setting."""
    if not rows.any():
        return rows
    return rows_like(candidates, record.candidate, [*SETTING]) & (
        prediction.peak_bytes >= prediction.peak_bytes[rows].max()
    )


def _to_blame(record: Record) -> list[str]:
    """The knobs that are taken to be why it did not run: what is unusual, or else all that decide on the code."""
    return ["allocator"] if record.candidate.allocator == "expandable" else [*SETTING]


def _rows_of(record: Record, spec: Spec, candidates: Candidates) -> Any:
    """The candidates that a record is of: the same knobs and the same pieces, perhaps of a shorter sequence."""
    knobs, steps = record.candidate, record.spec.steps
    rows = rows_like(candidates, knobs, [*SETTING, "threads", "recompute", "levels", "microbatch"])
    pieces = np.broadcast_to(np.asarray(candidates.segments), len(candidates))
    piece, own = -(-spec.steps // pieces), -(-steps // knobs.segments)
    if knobs.segments > 1:  # of fewer pieces, or of two shorter ones if one alone would take too long
        rows &= (pieces > 1) & ((piece == own) | ((knobs.segments <= 2 * knobs.levels) & (own < piece)))
    else:
        rows &= pieces == 1
    windows = np.broadcast_to(np.asarray(candidates.window, dtype=object), len(candidates))
    return rows & np.array([(one and min(one, steps)) == knobs.window for one in windows])


def _asked(ask: Callable[..., Any], record: Record) -> bool:
    return bool(ask(record.spec, record.candidate, record.engine))


def rows_like(candidates: Candidates, knobs: Candidate, names: list[str]) -> Any:
    """Where some knobs have the same values."""
    rows = np.ones(len(candidates), dtype=bool)
    for name in names:
        rows &= np.broadcast_to(np.asarray(getattr(candidates, name) == getattr(knobs, name)), len(candidates))
    return rows
