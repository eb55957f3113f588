"""Subject: what a table or a curve is about, and what is predicted of its candidates."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from oomguard.calibrate import Calibration, same_model
from oomguard.candidate import KNOBS, Candidate, Candidates, serve
from oomguard.estimate.batch import estimate_batch
from oomguard.estimate.breakdown import Estimate
from oomguard.estimate.place import Place
from oomguard.plan.value import Plan
from oomguard.probe.record import Record
from oomguard.search.space import segment_counts
from oomguard.spec import Spec

SHAPE = ("microbatch", "accumulation", "segments", "recompute", "levels", "window")
"""Knobs that say in what pieces the work is done; all others are settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What is expected of many candidates, as arrays. Without records it is what `oomguard.estimate` says."""

    spec: Spec
    """What they train."""
    candidates: Candidates
    """The candidates."""
    estimate: Estimate
    """By arithmetic alone, with all terms."""
    peak_bytes: Any
    """The peak, calibrated if there are records."""
    margin_bytes: Any
    """What is added because it may err."""
    fits: Any
    """Whether it runs, with peak and margin within the budget."""
    seconds_per_step: Any
    """Of an optimizer step of the whole batch. Without records a rough guess: only proportions say something."""
    doubt: Any
    """Standard deviation of the logarithm of that time."""

    @property
    def safe_bytes(self) -> Any:
        """Peak and margin: what must fit the budget."""
        return self.peak_bytes + self.margin_bytes

    @property
    def tokens_per_second(self) -> Any:
        """Time steps of sequences per second."""
        return self.spec.steps * self.spec.batch / self.seconds_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model on a device under a budget, with what is known of it.

    >>> from oomguard.estimate.place import CPU
    >>> subject = Subject(
    ...     spec=Spec(cell="lstm", seq=1000), place=CPU, budget_bytes=1 << 30, candidate=Candidate(microbatch=32)
    ... )
    >>> subject.predict(subject.vary(microbatch=[8, 32])).fits.tolist()
    [True, False]
    """

    spec: Spec
    """What is trained."""
    place: Place
    """Where."""
    budget_bytes: int
    """What the process may use there."""
    candidate: Candidate
    """The knobs that are not varied: of a plan, the chosen candidate."""
    precisions: tuple[str, ...] = ("fp32",)
    """What the device computes in, as far as it is worth a look."""
    records: tuple[Record, ...] = ()
    """What was measured of such models on this device."""
    plan: Plan | None = None
    """The plan that it is about, if it is about one."""
    over: dict[str, list[Any]] = field(default_factory=dict)
    """Values of knobs to look at, by name; of a knob that is not there, those that are worth a look."""
    calibration: Calibration = field(init=False, repr=False, compare=False)
    """What the records correct."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "calibration", Calibration(self.spec, self.records, self.place))

    @property
    def microbatches(self) -> list[int]:
        """Those to look at: doublings, one between two of them, the candidate's, and the batch.

        >>> from oomguard.estimate.place import CPU
        >>> spec, knobs = Spec(cell="gru", seq=100, batch=10), Candidate(microbatch=5, accumulation=2)
        >>> Subject(spec=spec, place=CPU, budget_bytes=1 << 30, candidate=knobs).microbatches
        [1, 2, 3, 4, 5, 6, 8, 10]
        """
        batch = self.spec.batch
        doublings = [1 << power for power in range(batch.bit_length())]
        usual = [*doublings, *(3 * one // 2 for one in doublings if one > 1), batch]
        sizes = {*self.over.get("microbatch", usual), self.candidate.microbatch}
        return sorted(one for one in sizes if one <= batch)

    @property
    def segments(self) -> list[int]:
        """Those to look at, from 1 on."""
        steps = self.spec.steps
        counts = {*self.over.get("segments", segment_counts(steps)), 1, self.candidate.segments}
        return sorted(one for one in counts if one <= steps)

    @property
    def calibrated(self) -> bool:
        """Whether anything of this very model has been measured."""
        return bool(self.calibration.own)

    def vary(self, spec: Spec | None = None, **knobs: Any) -> Candidates:
        """Candidates that differ from the subject's in some knobs; the accumulation follows from the microbatch."""
        found = {name: getattr(self.candidate, name) for name in KNOBS} | {"accumulation": None} | knobs
        if not any(isinstance(value, list | np.ndarray) for value in found.values()):
            found["microbatch"] = [found["microbatch"]]
        return serve(spec or self.spec, Candidates(**found))

    def predict(self, candidates: Candidates, spec: Spec | None = None) -> Predicted:
        """What is expected of candidates of the spec, or of another one."""
        spec = spec or self.spec
        estimate = estimate_batch(spec, candidates, self.place)
        calibration = self._calibration(spec)
        peak, margin = estimate.total_bytes, estimate.margin_bytes
        if calibration.records:
            peak, margin = calibration.predict_memory(estimate)
        seconds, doubt = calibration.predict_time(estimate)
        return Predicted(
            spec=spec,
            candidates=candidates,
            estimate=estimate,
            peak_bytes=peak,
            margin_bytes=margin,
            fits=np.broadcast_to(estimate.runs, len(candidates)) & (peak + margin <= self.budget_bytes),
            seconds_per_step=seconds,
            doubt=doubt,
        )

    def _calibration(self, spec: Spec) -> Calibration:
        if same_model(spec, self.spec):
            return self.calibration.of(spec)
        return Calibration(spec, self.records, self.place)


def subject_of(plan: Plan) -> Subject:
    """What a plan is about.

    >>> from oomguard.api import find_feasible_config
    >>> subject_of(find_feasible_config(cell="gru", seq=100, device="t4")).precisions
    ('fp32', 'fp16')
    """
    turned = {"fp32", plan.candidate.precision, *(one.candidate.precision for one in plan.records)}
    place = plan.where.place
    known = card_precisions(place) if place.cuda and "precision" in plan.allow else ()
    return Subject(
        spec=plan.spec,
        place=place,
        budget_bytes=plan.budget_bytes,
        candidate=plan.candidate,
        precisions=tuple(dict.fromkeys(one for one in ("fp32", "bf16", "fp16") if one in turned or one in known)),
        records=plan.records,
        plan=plan,
    )


def card_precisions(place: Place) -> tuple[str, ...]:
    """What a card computes in, by its generation: half precision as bf16 where it has that, else as fp16.

    >>> from oomguard.estimate import gpus
    >>> from oomguard.estimate.place import on_card
    >>> card_precisions(on_card(gpus.card("a100-80gb"))), card_precisions(on_card(gpus.card("t4")))
    (('fp32', 'bf16'), ('fp32', 'fp16'))
    """
    capability = place.platform.capability if place.platform else (0, 0)
    half = "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else None
    return ("fp32",) if half is None else ("fp32", half)


def with_seq(subject: Subject, steps: int) -> Spec:
    """The subject's spec with sequences of so many steps, as if all were so long.

    >>> from oomguard.estimate.place import CPU
    >>> spec = Spec(cell="gru", lengths={10: 5})
    >>> with_seq(Subject(spec=spec, place=CPU, budget_bytes=1, candidate=Candidate(microbatch=32)), 99).seq
    99
    """
    return msgspec.structs.replace(subject.spec, seq=steps, lengths=None)
