"""How a candidate is approached: with short sequences, with a small microbatch, half way, whole.

From what is surely safe towards the predicted border: a kind of which nothing has been measured is measured small
first, and nothing is run whose peak and margin exceed the budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oomguard.calibrate import Calibration, Kind, kind_of, memory, same_model
from oomguard.estimate.breakdown import Estimate, estimate_step
from oomguard.probe.record import Record
from oomguard.search.problem import Probe, Problem, Role
from oomguard.search.screen import Screened
from oomguard.search.shorten import shorten
from oomguard.units import MIB

PROBE_SECONDS = 0.4
"""What a pass of a short probe should take: several of them go into a second, and the fastest counts."""
CONFIRM_SECONDS = 40.0
"""What a pass at full length may take; a longer one is confirmed with shorter sequences."""
TWO_PASSES_SECONDS = 5.0
"""Up to so long a pass is measured twice, if seconds decide, or if later ones peak higher (native engines)."""
MEASURE_STEPS = {False: 6, True: 30}
"""Of a candidate whose passes are measured twice, at most: small ones are over in a moment. More if seconds decide."""
SMALL_BYTES = 64 * MIB
"""What a first probe should grow by, to tell something about memory."""
SMALL_SHARE = 3
"""On the way to the largest, a first probe grows by this part of what the budget leaves: from there the border is less
than two doublings away, over which the heap's ways do not change much."""
FEWEST_STEPS = 48
"""Of a short probe: fewer would tell more about calls than about steps."""
SAFE_SHARE = 4
"""A kind of which nothing has been measured is first run with this part of what the budget leaves to it."""
NEAR, CLOSE = 0.8, 0.05
"""The border is near from this share of what the budget leaves over the runtime on; a peak is known well if its margin
is this share of its growth."""
SHARES = {"cpu": (1 / 2,), "cuda": (1 / 2, 7 / 8)}
"""Parts of its sequences that a candidate is run with before it is run whole, if it is not known well. (What a card's
allocator reserves goes in leaps: half of the sequences led to 5 % too little.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known when a probe is chosen."""

    problem: Problem
    records: Sequence[Record]
    """All so far."""
    pending: Sequence[Probe] = ()
    """What others are running."""
    explore: bool = True
    """Whether there is time to look further; if not, the best known is confirmed."""
    confirm_seconds: float = CONFIRM_SECONDS
    """What confirming may take."""

    def turns(self, probe: Probe) -> int:
        """How often this very probe has been run, or is being run."""
        others: list[Record | Probe] = [*self.records, *self.pending]
        return sum(probe.is_of(one) for one in others)

    def awaits(self, probe: Probe) -> bool:
        """Whether somebody else is running this very probe."""
        return any(probe.is_of(one) for one in self.pending)

    @property
    def alone(self) -> "Known":
        """The same without what others are running."""
        return replace(self, pending=())

    @property
    def measured(self) -> list[Record]:
        """All records of the very model, those of earlier searches included."""
        return [one for one in (*self.problem.cached, *self.records) if same_model(one.spec, self.problem.spec)]


def confirm(known: Known, view: Screened, row: int) -> Probe | None:
    """The candidate itself, at full length if that can be afforded; before that half of it, if much is uncertain."""
    return halfway(known, view, row) or short(known, view, row, "confirm", known.confirm_seconds)


def halfway(known: Known, view: Screened, row: int) -> Probe | None:
    """The candidate with half as long sequences, on a card then with nearly as long ones, on the way to the border;
    None if that is far, or known well."""
    problem, expected = known.problem, view.prediction[row]
    runtime_bytes = int(np.max(view.estimate.terms["runtime"]))
    growth_bytes = expected.peak_bytes - runtime_bytes
    near = problem.place.cuda or expected.safe_bytes - runtime_bytes > NEAR * (problem.budget_bytes - runtime_bytes)
    passes = -(-view.spec.batch // view.candidates[row].microbatch)
    if not near or expected.margin_bytes <= CLOSE * growth_bytes:
        return None
    for share in SHARES["cuda" if problem.place.cuda else "cpu"]:
        late = share * float(view.expected[row]) / passes > known.confirm_seconds / 4
        if not late and view.longest[row] < int(share * view.spec.steps):
            probe = short(known.alone, view, row, "calibrate", steps=int(share * view.spec.steps))
            if probe is not None:  # nothing longer is run while others run that
                return None if known.awaits(probe) else probe
    return None


def small(known: Known, view: Screened, row: int) -> Probe | None:
    """The same setting and pieces with a smaller microbatch, or if that is not enough, with shorter sequences."""
    chosen, rows = view.candidates[row], np.arange(len(view.fits))
    alike = np.ones(len(rows), dtype=bool)
    for name, values in view.candidates.arrays.items():
        if name not in ("microbatch", "accumulation"):
            alike &= np.asarray(values == getattr(chosen, name))
    runtime_bytes = int(np.max(view.estimate.terms["runtime"]))
    most = max(SMALL_BYTES, (known.problem.budget_bytes - runtime_bytes) // SMALL_SHARE)
    enough = alike & (view.prediction.peak_bytes - runtime_bytes <= most)
    sizes = np.broadcast_to(view.candidates.microbatch, len(rows))
    row = int(rows[enough][np.argmax(sizes[enough])]) if enough.any() else row
    return short(known, view, row, "calibrate", 2 * PROBE_SECONDS)


def short(
    known: Known, view: Screened, row: int, role: Role, seconds: float = PROBE_SECONDS, steps: int | None = None
) -> Probe | None:
    """A probe of a candidate in which a pass takes about so long, and which surely fits. None if it has been run."""
    problem, candidate = known.problem, view.candidates[row]
    passes = -(-view.spec.batch // candidate.microbatch)
    each = float(view.prediction.seconds_per_step[row]) / passes / view.spec.steps
    if role == "confirm" and not np.isnan(view.seconds[row]):
        each = float(view.seconds[row]) / passes / view.spec.steps
    steps = steps or max(FEWEST_STEPS, int(seconds / each))
    steps = view.spec.steps if steps >= view.spec.steps else _round(steps)
    while True:
        # what chunks reserve on a card depends on their number, what they take on their length
        fewer = candidate.recompute or role != "calibrate"
        short_spec, cut = shorten(view.spec, candidate, steps, fewer=fewer)
        calibration = Calibration(short_spec, known.records, problem.place, problem.cached)
        estimate = estimate_step(short_spec, cut, problem.place)
        expected = calibration.predict(estimate)
        whole = short_spec == view.spec and role == "confirm"
        safe = expected.safe_bytes <= problem.budget_bytes and _is_modest(known, kind_at(view, row), estimate)
        if whole or safe or steps <= 1:
            break
        steps //= 2
    pass_seconds = each * short_spec.steps
    twice = pass_seconds <= TWO_PASSES_SECONDS and (problem.timed or estimate.engine == "native")
    probe = Probe(
        spec=short_spec,
        candidate=cut,
        role=role,
        passes=2 if twice else 1,
        steps=MEASURE_STEPS[problem.timed] if twice else 1,
        peak_bytes=int(expected.peak_bytes),
        seconds_per_pass=pass_seconds,
    )
    return None if known.turns(probe) else probe


def again(known: Known, view: Screened, row: int) -> Probe:
    """Another turn of a candidate that has been run at full length, and for more than a pass."""
    candidate = view.candidates[row]
    passes = -(-view.spec.batch // candidate.microbatch)
    return Probe(
        spec=view.spec,
        candidate=candidate,
        role="explore",
        passes=2,
        steps=MEASURE_STEPS[known.problem.timed],
        peak_bytes=int(view.peak_bytes[row]),
        seconds_per_pass=float(view.seconds[row]) / passes,
    )


def _is_modest(known: Known, kind: Kind, estimate: Estimate) -> bool:
    """Whether what is uncertain of an estimate is a small part of what there is, if its kind is new."""
    if kind in {kind_of(one) for one in known.measured}:
        return True
    place, spare_bytes = known.problem.place, max(0, known.problem.budget_bytes - int(estimate.terms["runtime"]))
    # a C heap without fixed thresholds can keep several times what is in use (3.5 times: an LSTM's logits in 2 chunks)
    least_bytes = 0 if kind.allocator in ("plain", "roomy") and not place.cuda else SMALL_BYTES
    return float(memory.split(estimate)[1][0]) <= max(least_bytes, spare_bytes // SAFE_SHARE)


def _round(steps: int) -> int:
    """Two leading digits: a slightly other prediction of the time gives the same probe."""
    unit = int(10 ** max(0, len(str(steps)) - 2))
    return max(1, steps // unit * unit)


def kind_at(view: Screened, row: int) -> Kind:
    """The kind of a candidate."""
    knobs = view.candidates[row]
    engine = np.broadcast_to(view.estimate.engine, len(view.fits))[row]
    return Kind(str(engine), knobs.precision, knobs.allocator or "plain")


def of_kinds(view: Screened, kinds: set[Kind]) -> Any:
    """Where candidates are of one of these kinds."""
    found, length = np.zeros(len(view.fits), dtype=bool), len(view.fits)
    knobs = view.candidates
    for kind in kinds:
        columns = zip((view.estimate.engine, knobs.precision, knobs.allocator), kind, strict=True)
        rows = np.ones(length, dtype=bool)
        for values, value in columns:
            rows &= np.broadcast_to(np.asarray(values) == value, length)
        found |= rows
    return found
