"""Calibration: estimates and records of probes -> predictions of peak and time, with a margin."""

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from oomguard._core.units import MAX_BYTES
from oomguard._estimate import margins, terms
from oomguard._estimate.breakdown import Estimate, estimate_step, is_fragile, split
from oomguard._estimate.margins import OFFSET_BYTES, SETTLED, Repeats, allocator_on, bare, repeats, spread
from oomguard._estimate.target import Target
from oomguard._predict import memory, speed
from oomguard._predict.fit import Data, Fit, Floats, stacked
from oomguard._probe.record import Record
from oomguard._probe.verdict import Verdict
from oomguard._spec.lengths import model_of, same_model
from oomguard._spec.spec import Spec

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e15)]


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The peak and the time of one candidate: its estimate, corrected by records."""

    peak_bytes: Size
    """The expected peak."""
    margin_bytes: Size
    """Bytes added to the peak because predictions err."""
    seconds_per_step: Seconds | None
    """Seconds of an optimizer step of the whole batch; None if nothing has been timed."""
    doubt: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Standard deviation of the logarithm of that time; None if it is not known."""

    @property
    def safe_bytes(self) -> int:
        """Peak and margin: what must fit the budget."""
        return self.peak_bytes + self.margin_bytes

    def for_plan(self, *, timed: bool) -> "Prediction":
        """The prediction as a plan keeps it: without its doubt, and without a time if no probe was timed."""
        return msgspec.structs.replace(self, seconds_per_step=self.seconds_per_step if timed else None, doubt=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """The predictions of many candidates: the fields of `Prediction` as arrays with one element per candidate."""

    peak_bytes: NDArray[np.int64]
    margin_bytes: NDArray[np.int64]
    seconds_per_step: NDArray[np.float64]
    doubt: NDArray[np.float64]

    @property
    def safe_bytes(self) -> NDArray[np.int64]:
        """Peaks and margins: what must fit the budget."""
        return self.peak_bytes + self.margin_bytes

    def __getitem__(self, index: int) -> Prediction:
        """The prediction of one candidate."""
        return Prediction(**{name: getattr(self, name)[index].item() for name in Prediction.__struct_fields__})


class Kind(NamedTuple):
    """Candidates whose memory is calibrated together."""

    engine: str
    allocator: str
    precision: str


def kind_of(record: Record) -> Kind:
    """The kind of a record's candidate."""
    knobs, device = record.candidate, "cpu" if record.device == "cpu" else "cuda"
    return Kind(record.engine or "", allocator_on(device, knobs.allocator), knobs.precision)


def kinds_of(estimate: Estimate, target: Target) -> dict[Kind, NDArray[np.bool_]]:
    """The kinds among the candidates of an estimate, each with a mask of its candidates."""
    knobs, device = estimate.candidate, "cuda" if target.cuda else "cpu"
    names = estimate.engine, knobs.allocator, knobs.precision
    columns = np.broadcast_arrays(
        *(np.asarray(name, dtype=object) for name in names), np.atleast_1d(estimate.total_bytes)
    )
    rows = zip(*(column.tolist() for column in columns[:3]), strict=True)
    kinds = [Kind(engine, allocator_on(device, allocator), precision) for engine, allocator, precision in rows]
    return {kind: np.array([other == kind for other in kinds]) for kind in dict.fromkeys(kinds)}


class Calibration:
    """The correction of estimates of one spec on one device by records."""

    def __init__(self, spec: Spec, records: Iterable[Record], target: Target, cached: Iterable[Record] = ()) -> None:
        """`cached` are records of earlier searches: their peaks still hold, their times less so."""
        self.spec, self.target, self.device = spec, target, "cuda" if target.cuda else "cpu"
        cached, records = [*cached], [*records]
        self.records = [
            record for record in (*cached, *records) if record.steps and record.terms and record.spec.cell == spec.cell
        ]
        self._old = {*map(id, cached)}
        # a probe that ran out of memory before its first step tells a lower bound of its peak
        ended = [record for record in records if record.verdict in (Verdict.OVER, Verdict.OOM) and not record.terms]
        self._failed = [record for record in ended if record.peak_bytes and same_model(record.spec, spec)]
        self.own = [record for record in self.records if same_model(record.spec, spec)]
        self._fits: dict[tuple[Kind, bool], tuple[Fit, float]] = {}
        self._estimates: dict[int, Estimate] = {}

    def of(self, spec: Spec) -> "Calibration":
        """The same calibration for another number or length of the model's sequences."""
        assert self.times is not None  # computed before the copy, so that all copies share it
        other = copy(self)
        other.spec = spec
        return other

    def predict(self, estimate: Estimate) -> Predictions:
        """Peak, margin and time of each candidate of an estimate."""
        peak, margin = self.predict_memory(estimate)
        seconds, doubt = self.predict_time(estimate)
        return Predictions(peak_bytes=peak, margin_bytes=margin, seconds_per_step=seconds, doubt=doubt)

    def predict_memory(self, estimate: Estimate) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The calibrated peak of each candidate, and its margin: a quantile of stored and own errors."""
        known, rest = split(estimate)
        peak, margin = np.zeros_like(rest), np.zeros_like(rest)
        places = memory.places(self.spec, estimate.candidate, rest)
        vary = np.broadcast_to(is_fragile(self.spec, estimate), len(rest))
        for (kind, of_kind), fragile in product(kinds_of(estimate, self.target).items(), (False, True)):
            rows = of_kind & (vary == fragile)
            if not rows.any():
                continue
            fit, beyond = self._memory_fit(kind, fragile)
            expected, share = rest[rows], np.asarray(math.ceil(1024 * bare(self.device, *kind, fragile)) / 1024)
            if len(fit.data.values) or beyond:
                ratio, doubt = fit.at(places[rows])
                middle, again = spread(self.device, *kind, fragile).middle, self._repeats(kind, fragile)
                noise = again.bytes_of(again.deviation, rest[rows]) / (rest[rows] + OFFSET_BYTES)
                expected = expected * np.exp(ratio + middle + beyond)
                share = np.expm1(margins.sigmas(self.device, fit.surprises) * np.hypot(doubt, noise))
            peak[rows] = known[rows] + expected + self._runtime_bytes(kind, estimate)
            margin[rows] = expected * (1 + OFFSET_BYTES / rest[rows]) * share
        return np.ceil(peak).astype(np.int64), np.ceil(margin).astype(np.int64)

    def predict_time(self, estimate: Estimate) -> tuple[Floats, Floats]:
        """Seconds of a step of the whole batch for each candidate, and the standard deviation of their logarithm."""
        each = speed.guess(self.spec, estimate.candidate, estimate.engine, cuda=self.target.cuda)
        ratio, doubt = self.times[0].at(self.time_places(estimate))
        return each * np.exp(ratio) * (self.spec.steps * self.spec.batch) + self.update_seconds, doubt

    def time_places(self, estimate: Estimate, steps: ArrayLike | None = None) -> Floats:
        """Coordinates of each candidate, perhaps run with fewer steps."""
        return speed.places(self.spec, estimate.candidate, estimate.engine, self.spec.steps if steps is None else steps)

    @property
    def update_seconds(self) -> float:
        """Seconds of the optimizer's part of a step: about those of 20 operations for each byte of the weights."""
        measured = [record.seconds_per_update for record in self.own if record.seconds_per_update is not None]
        return (
            float(np.median(measured)) if measured else 20 * terms.weights_bytes(self.spec) / speed.SPEED[self.device]
        )

    def repeated_bytes(self, record: Record) -> int:
        """The peak that a candidate that has run may reach when it runs again, for longer."""
        assert record.peak_bytes is not None
        fragile = bool(is_fragile(record.spec, self._estimate(record)))
        again = repeats(self.device, *kind_of(record), fragile, settled=record.passes >= SETTLED)
        return record.peak_bytes + round(float(again.bytes_of(again.most, np.array(self._rest_bytes(record)))))

    def settling_bytes(self, estimate: Estimate) -> float:
        """By how much a candidate's margin shrinks if it runs until its peak has settled, not only for a few passes."""
        (kind,), rest = kinds_of(estimate, self.target), split(estimate)[1]
        fragile = bool(is_fragile(self.spec, estimate))
        few, settled = (repeats(self.device, *kind, fragile, settled=settled) for settled in (False, True))
        return float((few.bytes_of(few.most, rest) - settled.bytes_of(settled.most, rest))[0])

    def _estimate(self, record: Record) -> Estimate:
        """The estimate of a record, made once."""
        if id(record) not in self._estimates:
            self._estimates[id(record)] = estimate_step(record.spec, record.candidate, self.target)
        return self._estimates[id(record)]

    def _runtime_bytes(self, kind: Kind, estimate: Estimate) -> int:
        """The largest runtime of any record of the kind, or the estimated one."""
        measured = [record.runtime_bytes or 0 for record in self.records if kind_of(record) == kind]
        return max(measured, default=int(np.max(estimate.terms["runtime"])))

    def _repeats(self, kind: Kind, fragile: bool) -> Repeats:
        """How peaks of a kind repeat whose records ran long enough to show the whole peak, or some of which did not."""
        settled = all(record.passes >= SETTLED for record in self.records if kind_of(record) == kind)
        return repeats(self.device, *kind, fragile, settled=settled)

    def _memory_fit(self, kind: Kind, fragile: bool) -> tuple[Fit, float]:
        """The fit of measured rests over estimated ones, and by how much a probe that ran out had exceeded it."""
        if (kind, fragile) not in self._fits:
            models = [*dict.fromkeys([model_of(self.spec), *(model_of(record.spec) for record in self.records)])]
            records = [record for record in self.records if kind_of(record) == kind]
            rows = [self._memory_row(record, fragile, models.index(model_of(record.spec))) for record in records]
            terms = memory.terms(self.device, *kind, fragile)
            fit = Fit(terms, stacked(rows, coordinates=memory.STEPS + 1))
            failed = [self._memory_row(record, fragile) for record in self._failed if kind_of(record) == kind]
            beyond = max([0.0, *(float(row.values[0] - fit.at(row.places)[0][0]) for row in failed)])
            self._fits[kind, fragile] = fit, beyond
        return self._fits[kind, fragile]

    def _rest_bytes(self, record: Record) -> float:
        """The measured bytes that records correct; a bound of them if a probe ran out before its first step."""
        if record.terms is not None:
            return float(record.terms["rest"] + record.terms["gradients"])
        estimate = self._estimate(record)
        return (record.peak_bytes or 0) - self._runtime_bytes(kind_of(record), estimate) - float(split(estimate)[0][0])

    def _memory_row(self, record: Record, fragile: bool, model: int = 0) -> Data:
        """The logarithm of the measured rest of a record over the estimated one."""
        kind, (_, rest) = kind_of(record), split(self._estimate(record))
        again = repeats(self.device, *kind, fragile, settled=record.passes >= SETTLED)
        measured = self._rest_bytes(record)
        places = memory.places(record.spec, record.candidate, rest, model)
        middle = spread(self.device, *kind, fragile).middle
        return Data(places, np.log(max(1, measured) / rest) - middle, again.bytes_of(again.deviation, rest) / rest)

    @cached_property
    def times(self) -> tuple[Fit, float]:
        """The fit of measured times over guessed ones, and the noise of a time."""
        rows = [self._time_row(record) for record in self.own if record.seconds_per_pass is not None]
        return speed.fit_times(stacked(rows, coordinates=speed.OLD + 1))

    def _time_row(self, record: Record) -> Data:
        """The logarithm of the measured time of a record over the guessed one."""
        spec, knobs, engine = record.spec, record.candidate, self._estimate(record).engine
        assert record.seconds_per_pass is not None
        each = record.seconds_per_pass / (spec.steps * knobs.microbatch)
        ratio = np.log(each / np.atleast_1d(speed.guess(spec, knobs, engine, cuda=self.target.cuda)))
        return Data(speed.places(spec, knobs, engine, spec.steps, old=id(record) in self._old), ratio, np.zeros(1))


def is_stale(cached: Sequence[Record], record: Record, target: Target) -> bool:
    """Whether a new record contradicts the cached ones: its peak exceeds the margin, or its time is far off.

    Only records of the same model count: the margin of other models is wide by design.
    """
    own = [other for other in cached if same_model(other.spec, record.spec) and other.engine == record.engine]
    if not own or not record.steps or record.peak_bytes is None or record.seconds_per_pass is None:
        return False
    calibration = Calibration(record.spec, own, target)
    expected = calibration.predict(estimate_step(record.spec, record.candidate, target))[0]
    assert expected.seconds_per_step is not None
    passes = record.spec.batch / record.candidate.microbatch
    ratio = record.seconds_per_pass * passes / (expected.seconds_per_step - calibration.update_seconds)
    return record.peak_bytes > expected.safe_bytes or abs(math.log(ratio)) > 3 * speed.EFFECT
