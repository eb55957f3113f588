"""How a candidate is approached: with short sequences, with a small microbatch, at half its length, whole.

A probe goes from what is surely safe towards the predicted border: a kind that has not been measured is measured small
first, and no probe is run whose peak and margin exceed the budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np

from oomguard._core.units import MIB
from oomguard._estimate.breakdown import Estimate, estimate_step
from oomguard._estimate.malloc import heap_of
from oomguard._predict import memory
from oomguard._predict.calibration import Kind, Prediction, kind_of, same_model
from oomguard._probe.record import Record
from oomguard._search.lengths import shorten
from oomguard._search.screen import CandidateTable
from oomguard._search.space import Problem
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec

PROBE_SECONDS = 0.4
"""Seconds that a pass of a short probe should take: several of them go into a second, and the fastest counts."""
TWO_PASSES_SECONDS = 5.0
"""Up to so many seconds a pass is measured twice, if time decides, or if later passes peak higher (native engine)."""
MEASURE_STEPS = {False: 6, True: 30}
"""Optimizer steps of a probe whose passes are measured twice, at most; more if time decides."""
SMALL_BYTES = 64 * MIB
"""Growth of a first probe: enough to tell something about memory."""
SMALL_SHARE = 3
"""A first probe on the way to the largest grows by a third of the spare budget: within two doublings of the border."""
FEWEST_STEPS = 48
"""Steps of a short probe: fewer would tell more about calls than about steps."""
SAFE_SHARE = 4
"""A kind that has not been measured is first run in a quarter of the spare budget."""
NEAR, CLOSE = 0.8, 0.05
"""The border is near from this share of the spare budget on; a peak is known well if its margin is at most this share
of its growth."""
SHARES = {"cpu": (1 / 2,), "cuda": (1 / 2, 7 / 8)}
"""Shares of its sequence length that a candidate is run with before it is run whole, if its peak is not known well. (A
card's allocator reserves memory in leaps: half of the length led to predictions 5 % too low.)"""
CONFIRM_SECONDS = 40.0
"""Seconds that a pass at full length may take; a longer one is confirmed with shorter sequences."""
Role = Literal["calibrate", "explore", "confirm"]


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A probe to run, and why."""

    spec: Spec
    """The spec, perhaps with shorter sequences."""
    candidate: Candidate
    """The candidate, with as many segments as such sequences have."""
    role: Role
    """Calibrate: correct the estimates. Explore: time a candidate. Confirm: run the chosen candidate."""
    passes: int
    """Passes to measure, at least."""
    steps: int = 1
    """Optimizer steps to measure, at most."""
    peak_bytes: int
    """The expected peak."""
    seconds_per_pass: float
    """The expected seconds of a pass."""

    def is_of(self, other: "Record | Probe") -> bool:
        """Whether a record, or another probe, has the same spec and candidate."""
        return other.candidate == self.candidate and other.spec == self.spec


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is known when a probe is chosen."""

    problem: Problem
    records: Sequence[Record]
    pending: Sequence[Probe] = ()
    """Probes that other workers are running."""
    explore: bool = True
    """Whether there is time to explore; if not, the best known candidate is confirmed."""
    confirm_seconds: float = CONFIRM_SECONDS
    """Seconds that a pass of a confirming probe may take."""

    def turns(self, probe: Probe) -> int:
        """How often this very probe has been run or is being run."""
        return sum(map(probe.is_of, self.records)) + sum(map(probe.is_of, self.pending))

    def awaits(self, probe: Probe) -> bool:
        """Whether another worker is running this very probe."""
        return any(map(probe.is_of, self.pending))

    @property
    def alone(self) -> "State":
        """The same without the probes of other workers."""
        return replace(self, pending=())

    @property
    def measured(self) -> set[Kind]:
        """The kinds of which this model has been measured, by earlier searches too."""
        return {kind_of(record) for record in self.own_records}

    @property
    def own_records(self) -> list[Record]:
        """All records of this model, by earlier searches too."""
        records = (*self.problem.cached, *self.records)
        return [record for record in records if same_model(record.spec, self.problem.spec)]


def confirm(state: State, table: CandidateTable, row: int) -> Probe | None:
    """A probe of the whole candidate if there is time for it; before that of half its length, if much is uncertain."""
    return halfway(state, table, row) or short(state, table, row, "confirm", state.confirm_seconds)


def halfway(state: State, table: CandidateTable, row: int) -> Probe | None:
    """A probe with some of the sequence length (`SHARES`); None if the border is far or the peak is known well."""
    problem, expected = state.problem, table.prediction[row]
    spare_bytes = problem.budget_bytes - table.runtime_bytes
    near = problem.target.cuda or expected.safe_bytes - table.runtime_bytes > NEAR * spare_bytes
    if not near or expected.margin_bytes <= CLOSE * (expected.peak_bytes - table.runtime_bytes):
        return None
    for share in SHARES["cuda" if problem.target.cuda else "cpu"]:
        slow = share * float(table.pass_seconds[row]) > state.confirm_seconds / 4
        if not slow and table.longest[row] < int(share * table.spec.steps):
            probe = short(state.alone, table, row, "calibrate", steps=int(share * table.spec.steps))
            if probe is not None:  # nothing longer is run while another worker runs this
                return None if state.awaits(probe) else probe
    return None


def small(state: State, table: CandidateTable, row: int) -> Probe | None:
    """A probe of the same setting and segments with a smaller microbatch, or if needed with shorter sequences."""
    chosen = table.candidates[row]
    others = [name for name in table.candidates.arrays if name not in ("microbatch", "accumulation")]
    most_bytes = max(SMALL_BYTES, (state.problem.budget_bytes - table.runtime_bytes) // SMALL_SHARE)
    enough = table.like(chosen, *others) & (table.prediction.peak_bytes - table.runtime_bytes <= most_bytes)
    row = int(np.argmax(np.where(enough, table.microbatches, 0))) if enough.any() else row
    return short(state, table, row, "calibrate", 2 * PROBE_SECONDS)


def short(
    state: State, table: CandidateTable, row: int, role: Role, seconds: float = PROBE_SECONDS, steps: int | None = None
) -> Probe | None:
    """A probe shortened so that a pass takes about `seconds` (or to `steps`) and surely fits; None if it was run."""
    problem, whole = state.problem, table.spec.steps
    measured = role == "confirm" and not np.isnan(table.seconds[row])
    step_seconds = table.seconds[row] if measured else table.prediction.seconds_per_step[row]
    each = float(step_seconds) / int(table.passes[row]) / whole
    steps = steps or max(FEWEST_STEPS, int(seconds / each))
    # two leading digits: a slightly different predicted time gives the same probe
    steps = whole if steps >= whole else steps - steps % 10 ** max(0, len(str(steps)) - 2)
    spec, candidate, expected = _safe_version(state, table, row, role, steps)
    pass_seconds = each * spec.steps
    native = table.kind_at(row).engine == "native"
    twice = pass_seconds <= TWO_PASSES_SECONDS and (problem.timed or native)
    probe = Probe(
        spec=spec,
        candidate=candidate,
        role=role,
        passes=2 if twice else 1,
        steps=MEASURE_STEPS[problem.timed] if twice else 1,
        peak_bytes=expected.peak_bytes,
        seconds_per_pass=pass_seconds,
    )
    return None if state.turns(probe) else probe


def _safe_version(
    state: State, table: CandidateTable, row: int, role: Role, steps: int
) -> tuple[Spec, Candidate, Prediction]:
    """The candidate with sequences of so many steps, or half of them, and so on, until it surely fits.

    The whole candidate is not shortened to confirm it: it has been chosen because it fits.
    """
    problem, chosen = state.problem, table.candidates[row]
    whole = problem.spec_of(chosen.microbatch, table.spec)
    while True:
        # what chunks reserve on a card depends on their number, their time on their length
        spec, candidate = shorten(whole, chosen, steps, fewer=chosen.recompute or role != "calibrate")
        estimate = estimate_step(spec, candidate, problem.target)
        expected = table.calibration.of(spec).predict(estimate)[0]
        safe = expected.safe_bytes <= problem.budget_bytes and _is_modest(state, table.kind_at(row), estimate)
        if safe or steps <= 1 or (spec == whole and role == "confirm"):
            return spec, candidate, expected
        steps //= 2


def again(state: State, table: CandidateTable, row: int) -> Probe:
    """Another turn of a candidate that has been run at full length, and for more than a pass."""
    return Probe(
        spec=table.spec,
        candidate=table.candidates[row],
        role="explore",
        passes=2,
        steps=MEASURE_STEPS[state.problem.timed],
        peak_bytes=int(table.expected.peak_bytes[row]),
        seconds_per_pass=float(table.seconds[row]) / int(table.passes[row]),
    )


def _is_modest(state: State, kind: Kind, estimate: Estimate) -> bool:
    """Whether the uncertain part of an estimate is small beside the spare budget; always, if its kind was measured."""
    if kind in state.measured:
        return True
    spare_bytes = max(0, state.problem.budget_bytes - int(estimate.terms["runtime"]))
    # a C heap without fixed thresholds can keep several times what is in use (3.5 times: an LSTM's logits in 2 chunks)
    erratic = heap_of(kind.allocator, kind.engine) in ("system", "fast onednn") and not state.problem.target.cuda
    return float(memory.split(estimate)[1][0]) <= max(0 if erratic else SMALL_BYTES, spare_bytes // SAFE_SHARE)
