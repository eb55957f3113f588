"""Calibration: estimates and records of probes -> predictions of peak and time, with a margin."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from oomguard._core.units import MAX_BYTES
from oomguard._estimate import terms
from oomguard._estimate.breakdown import MARGIN_PERCENT, SCATTERED_PERCENT, Estimate, estimate_step, scattered
from oomguard._estimate.malloc import heap_of
from oomguard._estimate.target import Target
from oomguard._predict import memory, speed
from oomguard._predict.fit import Data, Fit, Floats, Prior, fit_robustly, stacked
from oomguard._probe.record import Record
from oomguard._probe.verdict import Verdict
from oomguard._spec.spec import Spec

STALE_TIMES = 3.0
"""Factor between a measured and a predicted time from which on the cached times are stale."""

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
    precision: str
    allocator: str


def same_model(spec: Spec, other: Spec) -> bool:
    """Whether two specs differ only in the number and length of their sequences."""
    one, two = (
        msgspec.structs.replace(some, seq=1, batch=1, lengths=None, packed=some.packs) for some in (spec, other)
    )
    return one == two


def kind_of(record: Record) -> Kind:
    """The kind of a record's candidate."""
    knobs = record.candidate
    return Kind(record.engine or "", knobs.precision, _allocator(knobs.allocator, cuda=record.device != "cpu"))


def kinds_of(estimate: Estimate, target: Target) -> dict[Kind, NDArray[np.bool_]]:
    """The kinds among the candidates of an estimate, each with a mask of its candidates."""
    knobs, length = estimate.candidate, len(np.atleast_1d(estimate.total_bytes))
    allocators = speed.filled(knobs.allocator, _allocator(None, cuda=target.cuda))
    columns = [
        np.broadcast_to(np.asarray(values, dtype=object), length)
        for values in (estimate.engine, knobs.precision, allocators)
    ]
    kinds = [Kind(*map(str, names)) for names in {*zip(*columns, strict=True)}]
    return {
        kind: np.all([column == name for column, name in zip(columns, kind, strict=True)], axis=0) for kind in kinds
    }


def _allocator(name: str | None, *, cuda: bool) -> str:
    """The allocator setting of a candidate, or the default one of the device."""
    return name or ("system" if cuda else "tight")


def heap_setting(allocator: str | None, engine: str | None, target: Target) -> str:
    """The row of the tables of margins and noise that a candidate belongs to."""
    return "cuda" if target.cuda else heap_of(allocator, engine)


def _deviation(percent: float) -> float:
    """The standard deviation whose margin is this percentage."""
    return float(np.log1p(percent / 100) / memory.SIGMAS)


class Calibration:
    """The correction of estimates of one spec on one device by records."""

    def __init__(self, spec: Spec, records: Iterable[Record], target: Target, cached: Iterable[Record] = ()) -> None:
        """`cached` are records of earlier searches: their peaks still hold, their times less so."""
        self.spec, self.target, self.device = spec, target, "cuda" if target.cuda else "cpu"
        records = [*records]
        old, new = (
            [record for record in some if record.steps and record.terms and record.spec.cell == spec.cell]
            for some in (cached, records)
        )
        self.records, self._new = [*old, *new], {id(record) for record in new}
        # a probe that ran out of memory before its first step tells a lower bound of its peak
        ended = [record for record in records if record.verdict in (Verdict.OVER, Verdict.OOM) and not record.terms]
        self._failed = [record for record in ended if record.peak_bytes and same_model(record.spec, spec)]
        self.own = [record for record in self.records if same_model(record.spec, spec)]
        self._memory: dict[Kind, Fit] = {}
        self._estimates: dict[int, Estimate] = {}

    def of(self, spec: Spec) -> "Calibration":
        """The same calibration for another number or length of the model's sequences."""
        assert self._time is not None  # computed before the copy, so that all copies share it
        other = copy(self)
        other.spec = spec
        return other

    def predict(self, estimate: Estimate) -> Predictions:
        """Peak, margin and time of each candidate of an estimate."""
        peak, margin = self.predict_memory(estimate)
        seconds, doubt = self.predict_time(estimate)
        return Predictions(peak_bytes=peak, margin_bytes=margin, seconds_per_step=seconds, doubt=doubt)

    def predict_memory(self, estimate: Estimate) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The calibrated peak of each candidate, and its margin."""
        known, rest = memory.split(estimate)
        peak, margin = np.zeros_like(rest), np.zeros_like(rest)
        columns = memory.features(estimate.candidate, rest)
        places = memory.places(self.spec, estimate.candidate, cuda=self.target.cuda)
        places = np.broadcast_to(places, (len(rest), 2))
        fragmented = np.broadcast_to(scattered(self.spec, estimate.candidate), len(rest)) & (not self.target.cuda)
        for kind, rows in kinds_of(estimate, self.target).items():
            ratio, spread = self._memory_fit(kind).at(columns[rows], places[rows])
            expected = rest[rows] * np.exp(ratio)
            # a candidate far from all records errs by no more than a bare estimate does
            most = np.maximum(self._level(kind), fragmented[rows] * _deviation(SCATTERED_PERCENT))
            setting = heap_setting(kind.allocator, kind.engine, self.target)
            usual = np.broadcast_to(memory.noise(self.spec, estimate.candidate, kind.engine, setting), len(rest))
            noise = np.hypot(usual[rows], fragmented[rows] * memory.SCATTERED)
            deviation = np.minimum(np.hypot(spread, noise), most)
            peak[rows] = known[rows] + expected + self._runtime_bytes(kind, estimate)
            margin[rows] = expected * np.expm1(memory.SIGMAS * deviation) + memory.FLOOR_BYTES[self.device]
        return np.ceil(peak).astype(np.int64), np.ceil(margin).astype(np.int64)

    def predict_time(self, estimate: Estimate) -> tuple[Floats, Floats]:
        """Seconds of a step of the whole batch for each candidate, and the standard deviation of their logarithm."""
        knobs, engine, cuda = estimate.candidate, estimate.engine, self.target.cuda
        columns = speed.features(self.spec, knobs, engine, cuda=cuda)
        ratio, doubt = self._time.at(columns, speed.places(self.spec, knobs, engine))
        each = speed.guess(self.spec, knobs, engine, cuda=cuda) * np.exp(ratio)
        return each * (self.spec.steps * self.spec.batch) + self.update_seconds, doubt

    @property
    def update_seconds(self) -> float:
        """Seconds of the optimizer's part of a step."""
        measured = [record.seconds_per_update for record in self.own if record.seconds_per_update is not None]
        bytes_per_second = 1e12 if self.target.cuda else 1e10
        return float(np.median(measured)) if measured else 20 * terms.weights_bytes(self.spec) / bytes_per_second

    def seconds_without_drift(self, record: Record) -> float:
        """The seconds of a record's pass under average load of the machine."""
        assert record.seconds_per_pass is not None
        return record.seconds_per_pass * float(np.exp(-self._drift.get(id(record), 0.0)))

    def _estimate(self, record: Record) -> Estimate:
        """The estimate of a record, made once."""
        if id(record) not in self._estimates:
            self._estimates[id(record)] = estimate_step(record.spec, record.candidate, self.target)
        return self._estimates[id(record)]

    def _runtime_bytes(self, kind: Kind, estimate: Estimate) -> int:
        """The largest runtime of any record of the kind, or the estimated one."""
        measured = [record.runtime_bytes or 0 for record in self.records if kind_of(record) == kind]
        return max(measured, default=int(np.max(estimate.terms["runtime"])))

    def _level(self, kind: Kind) -> float:
        """The standard deviation of the ratio of a kind: that of bare estimates, or of a model measured on a card."""
        if self.target.cuda and any(kind_of(record) == kind for record in self.own):
            return memory.CARD_LEVEL
        return _deviation(MARGIN_PERCENT[heap_setting(kind.allocator, kind.engine, self.target)])

    def _memory_fit(self, kind: Kind) -> Fit:
        """The fit of measured rests over estimated ones."""
        if kind not in self._memory:
            others = [record for record in self.records if not same_model(record.spec, self.spec)]
            rows = [self._memory_row(kind, record) for record in (*self.own, *others) if kind_of(record) == kind]
            fit = self._fit_memory(kind, rows)
            # what ran out of memory counts if it had reached more than its predicted peak
            failed = [self._memory_row(kind, record) for record in self._failed if kind_of(record) == kind]
            beyond = [row for row in failed if row.values[0] > fit.at(row.features, row.places)[0][0]]
            self._memory[kind] = self._fit_memory(kind, [*rows, *beyond]) if beyond else fit
        return self._memory[kind]

    def _fit_memory(self, kind: Kind, rows: Sequence[Data]) -> Fit:
        # without records the margin is that of the bare estimate, whatever its size
        slopes = [slope if rows else 0.0 for slope in memory.SLOPES[self.device]]
        local = memory.SHAPE[heap_setting(kind.allocator, kind.engine, self.target)] if rows else 0.0
        data = stacked(rows, effects=1 + len(slopes), coordinates=2)
        return Fit(Prior([self._level(kind), *slopes], local), data)

    def _memory_row(self, kind: Kind, record: Record) -> Data:
        """The logarithm of the measured rest of a record over the estimated one."""
        spec, knobs, same = record.spec, record.candidate, same_model(record.spec, self.spec)
        known, rest = memory.split(self._estimate(record))
        if record.terms is not None:
            measured: float = record.terms["rest"] + record.terms["gradients"]
        else:
            measured = (record.peak_bytes or 0) - self._runtime_bytes(kind, self._estimate(record)) - float(known[0])
        places = memory.places(spec, knobs, cuda=self.target.cuda) * (1 if same else -1)  # models share no places
        usual = float(memory.noise(spec, knobs, kind.engine, heap_setting(kind.allocator, kind.engine, self.target)))
        noise = [usual + memory.ERROR_BYTES[self.device] / rest[0]]
        noise += [] if same else [memory.OTHER_MODEL[self.device]]
        noise += [memory.ONE_PASS] if record.passes == 1 and kind.engine == "native" else []
        ratio = np.log(max(1, measured) / rest)
        return Data(memory.features(knobs, rest), places, ratio, np.array([np.linalg.norm(noise)]))

    @cached_property
    def _drift(self) -> dict[int, float]:
        """The drift of each timed record, by its id."""
        timed = [record for record in self.own if record.seconds_per_pass is not None]
        return dict(zip(map(id, timed), speed.drift(timed).tolist(), strict=True))

    @cached_property
    def _time(self) -> Fit:
        """The fit of measured times over guessed ones."""
        rows = [self._time_row(record) for record in self.own if record.seconds_per_pass is not None]
        data = stacked(rows, effects=len(speed.EFFECTS), coordinates=speed.DIRECTIONS)
        return fit_robustly(Prior(speed.EFFECTS, speed.LOCAL, speed.REACH), data)

    def _time_row(self, record: Record) -> Data:
        """The logarithm of the measured time of a record over the guessed one."""
        spec, knobs, engine, cuda = record.spec, record.candidate, self._estimate(record).engine, self.target.cuda
        each = self.seconds_without_drift(record) / (spec.steps * knobs.microbatch)
        ratio = np.log(each / np.atleast_1d(speed.guess(spec, knobs, engine, cuda=cuda)))
        noise = speed.noise(record) if id(record) in self._new else speed.OLD_NOISE
        features, places = speed.features(spec, knobs, engine, cuda=cuda), speed.places(spec, knobs, engine)
        return Data(features, places, ratio, np.array([noise]))


def is_stale(cached: Sequence[Record], record: Record, target: Target) -> bool:
    """Whether a new record contradicts the cached ones: its peak exceeds the margin, or its time is off by a factor 3.

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
    return record.peak_bytes > expected.safe_bytes or not 1 / STALE_TIMES < ratio < STALE_TIMES
