"""Calibration: (estimate, record) pairs -> the correction of estimates and their margin, for memory and for time.

Both are one and the same small regression (fit.py). The logarithm of `measured / predicted` is taken to be a sum of a
few effects: for memory (memory.py) pieces, the size, the microbatch; for time (speed.py) the engine, threads, page
faults and so on. Records narrow them down; what is like the records is then predicted closely, and what is not keeps a
wide margin.
"""

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from oomguard.calibrate import memory, speed
from oomguard.calibrate.fit import Data, Fit, Prior, fit_robustly
from oomguard.calibrate.weather import weather
from oomguard.estimate import terms
from oomguard.estimate.breakdown import Estimate, estimate_step
from oomguard.estimate.malloc import setting_of
from oomguard.estimate.margin import MARGIN_PERCENT, SCATTERED_PERCENT, scattered
from oomguard.estimate.place import Place
from oomguard.probe.record import Record
from oomguard.probe.verdict import Verdict
from oomguard.spec import Spec

OUT = (Verdict.OVER, Verdict.OOM)
"""What ends before a step is done tells how far it came."""


class Kind(NamedTuple):
    """What memory is calibrated for on its own."""

    engine: str
    precision: str
    allocator: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a candidate will need. Numbers, or arrays for an array of candidates."""

    peak_bytes: Any
    """The calibrated peak."""
    margin_bytes: Any
    """What is added because it may err."""
    seconds_per_step: Any
    """An optimizer step of the whole batch."""
    doubt: Any
    """Standard deviation of the logarithm of that time."""

    @property
    def safe_bytes(self) -> Any:
        """Peak and margin: what must fit the budget."""
        return self.peak_bytes + self.margin_bytes

    def __getitem__(self, index: int) -> "Prediction":
        """Of the i-th candidate, in Python's own numbers."""
        return Prediction(
            peak_bytes=int(self.peak_bytes[index]),
            margin_bytes=int(self.margin_bytes[index]),
            seconds_per_step=float(self.seconds_per_step[index]),
            doubt=float(self.doubt[index]),
        )


def same_model(one: Spec, other: Spec) -> bool:
    """Whether two specs differ in nothing but how many and how long their sequences are.

    >>> same_model(Spec(cell="gru", seq=10), Spec(cell="gru", seq=99, batch=4))
    True
    """
    return _nucleus(one) == _nucleus(other)


def _nucleus(spec: Spec) -> Spec:
    return msgspec.structs.replace(spec, seq=1, batch=1, lengths=None, packed=spec.packs)


def kind_of(record: Record) -> Kind:
    """The kind that a record is of."""
    knobs = record.candidate
    return Kind(record.engine or "", knobs.precision, knobs.allocator or _usual_allocator(record.device != "cpu"))


def _usual_allocator(cuda: bool) -> str:
    return "plain" if cuda else "steady"


def bare_deviation(setting: str) -> float:
    """The standard deviation of an estimate that no record calibrates."""
    return _deviation(MARGIN_PERCENT[setting])


def _deviation(percent: float) -> float:
    """The standard deviation of which that is the margin."""
    return float(np.log1p(percent / 100) / memory.SIGMAS)


def _setting(kind: Kind, place: Place) -> str:
    """Which row of the tables above a kind goes by."""
    return "cuda" if place.cuda else setting_of(kind.allocator)


class Calibration:
    """What records tell about a spec on a device.

    >>> from oomguard.candidate import Candidate
    >>> from oomguard.estimate.place import CPU
    >>> spec = Spec(cell="lstm", seq=1000)
    >>> found = Calibration(spec, [], CPU).predict(estimate_step(spec, Candidate(microbatch=32)))
    >>> found.margin_bytes > 0
    True
    """

    def __init__(self, spec: Spec, records: Iterable[Record], place: Place, cached: Iterable[Record] = ()) -> None:
        """`cached` are records of earlier searches: memory is as it was then, time perhaps not."""
        self.spec, self.place = spec, place
        records = [*records]
        new = [one for one in records if one.steps and one.terms and one.spec.cell == spec.cell]
        old = [one for one in cached if one.steps and one.terms and one.spec.cell == spec.cell]
        self.records, self._new = [*old, *new], {id(one) for one in new}
        ended = [one for one in records if one.verdict in OUT and one.peak_bytes and not one.terms]
        self._failed = [one for one in ended if same_model(one.spec, spec)]
        own = [one for one in self.records if same_model(one.spec, spec)]
        self.own = [(one, self._estimate(one)) for one in own]
        self._memory: dict[Kind, Fit] = {}
        self._time: Fit | None = None
        self._weather: dict[int, float] = {}

    @property
    def kinds(self) -> set[Kind]:
        """The kinds of which this very model has been measured."""
        return {kind_of(record) for record, _ in self.own}

    def of(self, spec: Spec) -> "Calibration":
        """The same for other sequences of the model: what records tell does not depend on how many and how long."""
        if self._time is None:
            self._time = self._fit_time()
        other = copy(self)
        other.spec = spec
        return other

    def predict(self, estimate: Estimate) -> Prediction:
        """Peak, margin and time of the estimate's candidate (or of each of them)."""
        peak, margin = self.predict_memory(estimate)
        seconds, doubt = self.predict_time(estimate)
        return Prediction(peak_bytes=peak, margin_bytes=margin, seconds_per_step=seconds, doubt=doubt)

    def predict_memory(self, estimate: Estimate) -> tuple[Any, Any]:
        """The calibrated peak, and its margin."""
        known, rest = memory.split(estimate)
        peak, margin = np.zeros_like(rest), np.zeros_like(rest)
        columns = memory.features(estimate.candidate, rest)
        places = np.broadcast_to(self._places(self.spec, estimate.candidate), (len(rest), 2))
        apart = np.broadcast_to(scattered(self.spec, estimate.candidate), len(rest)) & (not self.place.cuda)
        for kind, rows in _kinds(estimate, self.place):
            fit, setting = self._memory_fit(kind), _setting(kind, self.place)
            ratio, spread = fit.at(columns[rows], places[rows])
            expected = rest[rows] * np.exp(ratio)
            # whatever is far from all records is still an estimate, and errs no more than those do
            most = np.maximum(self._level(kind), apart[rows] * _deviation(SCATTERED_PERCENT))
            usual = np.broadcast_to(memory.noise(self.spec, estimate.candidate, kind.engine, setting), len(rest))
            noise = np.hypot(usual[rows], apart[rows] * memory.SCATTERED)
            deviation = np.minimum(np.hypot(spread, noise), most)
            peak[rows] = known[rows] + expected + self._runtime_bytes(kind, estimate)
            margin[rows] = expected * np.expm1(memory.SIGMAS * deviation) + memory.FLOOR_BYTES[self.where]
        return _as(np.ceil(peak).astype(np.int64), estimate), _as(np.ceil(margin).astype(np.int64), estimate)

    def predict_time(self, estimate: Estimate) -> tuple[Any, Any]:
        """Seconds of a step of the whole batch, and the standard deviation of their logarithm."""
        knobs = estimate.candidate
        if self._time is None:
            self._time = self._fit_time()
        columns = speed.features(self.spec, knobs, estimate.engine, cuda=self.place.cuda)
        ratio, doubt = self._time.at(columns, speed.places(self.spec, knobs, estimate.engine))
        each = speed.guess(self.spec, knobs, estimate.engine, cuda=self.place.cuda) * np.exp(ratio)
        seconds = each * (self.spec.steps * self.spec.batch) + self.update_seconds
        return _as(seconds, estimate), _as(doubt, estimate)

    @property
    def where(self) -> str:
        """`cpu` or `cuda`."""
        return "cuda" if self.place.cuda else "cpu"

    @property
    def update_seconds(self) -> float:
        """The optimizer's part of a step."""
        measured = [one.seconds_per_update for one, _ in self.own if one.seconds_per_update is not None]
        usual = 20 * terms.weights_bytes(self.spec) / (1e12 if self.place.cuda else 1e10)  # bytes moved, and per second
        return float(np.median(measured)) if measured else usual

    def _runtime_bytes(self, kind: Kind, estimate: Estimate) -> int:
        """The most that any record of the kind began with, or what the estimate says."""
        measured = [one.runtime_bytes or 0 for one in self.records if kind_of(one) == kind]
        return max(measured, default=int(np.max(estimate.terms["runtime"])))

    def _memory_fit(self, kind: Kind) -> Fit:
        if kind not in self._memory:
            rows = [
                (record, found, same)
                for same, pairs in ((True, self.own), (False, self._others(kind)))
                for record, found in pairs
                if kind_of(record) == kind
            ]
            fit = self._fit_memory(kind, rows)
            beyond = [(one, found, True) for one, found in self._reached(kind) if self._exceeds(fit, one, found)]
            self._memory[kind] = self._fit_memory(kind, [*rows, *beyond]) if beyond else fit
        return self._memory[kind]

    def _reached(self, kind: Kind) -> list[tuple[Record, Estimate]]:
        """What ran out of memory, and how far it came: it would have needed at least that."""
        return [(one, self._estimate(one)) for one in self._failed if kind_of(one) == kind]

    def _exceeds(self, fit: Fit, record: Record, found: Estimate) -> bool:
        """Whether what ran out came further than it should have needed."""
        rest = memory.split(found)[1]
        features, places = memory.features(record.candidate, rest), self._places(record.spec, record.candidate)
        return bool(self._measured_rest(record, found) > rest[0] * np.exp(fit.at(features, places)[0][0]))

    def _measured_rest(self, record: Record, found: Estimate) -> float:
        """What a record says of that part of the peak that is to be corrected."""
        if record.terms is not None:
            return max(1, record.terms["rest"] + record.terms["gradients"])
        runtime_bytes = self._runtime_bytes(kind_of(record), found)
        return max(1.0, (record.peak_bytes or 0) - runtime_bytes - float(memory.split(found)[0][0]))

    def _level(self, kind: Kind) -> float:
        """By how much estimates of a kind may be off altogether (standard deviation), and so the most they are."""
        measured = self.place.cuda and kind in self.kinds
        return memory.CARD_LEVEL if measured else bare_deviation(_setting(kind, self.place))

    def _places(self, spec: Spec, knobs: memory.Knobs) -> Any:
        return memory.places(spec, knobs, cuda=self.place.cuda)

    def _estimate(self, record: Record) -> Estimate:
        return estimate_step(record.spec, record.candidate, self.place)

    def _others(self, kind: Kind) -> list[tuple[Record, Estimate]]:
        """Records of other models with the same cell, of that kind."""
        others = [one for one in self.records if kind_of(one) == kind and not same_model(one.spec, self.spec)]
        return [(one, self._estimate(one)) for one in others]

    def _fit_memory(self, kind: Kind, rows: list[tuple[Record, Estimate, bool]]) -> Fit:
        setting = _setting(kind, self.place)
        # what no record calibrates keeps the margin of the bare estimate, whatever its size
        slopes = memory.SLOPES[self.where] if rows else (0.0,) * len(memory.SLOPES[self.where])
        effects = [self._level(kind), *slopes]
        features, places, values, noise = [np.empty((0, len(effects)))], [np.empty((0, 2))], [], []
        for record, found, same in rows:
            rest, measured = memory.split(found)[1], self._measured_rest(record, found)
            features.append(memory.features(record.candidate, rest))
            places.append(self._places(record.spec, record.candidate) * (1 if same else -1))
            values.append(float(np.log(measured / rest[0])))
            usual = float(memory.noise(record.spec, record.candidate, kind.engine, setting))
            doubts = [usual + memory.ERROR_BYTES[self.where] / rest[0], 0.0 if same else memory.OTHER_MODEL[self.where]]
            doubts += [memory.ONE_PASS] if record.passes == 1 and kind.engine == "native" else []
            noise.append(float(np.linalg.norm(doubts)))
        data = Data(np.concatenate(features), np.concatenate(places), np.array(values), np.array(noise))
        return Fit(Prior(effects, memory.SHAPE[setting] if rows else 0.0), data)

    def calm_seconds(self, record: Record) -> float:
        """What a pass of a record takes in average weather."""
        if self._time is None:
            self._time = self._fit_time()
        assert record.seconds_per_pass is not None
        return record.seconds_per_pass * float(np.exp(-self._weather.get(id(record), 0.0)))

    def _fit_time(self) -> Fit:
        features, places = [np.empty((0, len(speed.EFFECTS)))], [np.empty((0, speed.DIRECTIONS))]
        values, noise = list[float](), list[float]()
        timed = [(record, found) for record, found in self.own if record.seconds_per_pass is not None]
        owed = weather([record for record, _ in timed])
        self._weather = {id(record): one for (record, _), one in zip(timed, owed.tolist(), strict=True)}
        for record, found in timed:
            knobs, tokens = record.candidate, record.spec.steps * record.candidate.microbatch
            features.append(speed.features(record.spec, knobs, found.engine, cuda=self.place.cuda))
            places.append(speed.places(record.spec, knobs, found.engine))
            guess = np.atleast_1d(speed.guess(record.spec, knobs, found.engine, cuda=self.place.cuda))[0]
            calm = (record.seconds_per_pass or 0.0) * np.exp(-self._weather[id(record)])
            values.append(float(np.log(calm / tokens / guess)))
            noise.append(speed.noise(record) if id(record) in self._new else speed.OLD_NOISE)
        data = Data(np.concatenate(features), np.concatenate(places), np.array(values), np.array(noise))
        return fit_robustly(Prior(speed.EFFECTS, speed.LOCAL, speed.REACH), data)


def _kinds(estimate: Estimate, place: Place) -> Iterable[tuple[Kind, Any]]:
    """The kinds among an estimate's candidates, and where they are."""
    knobs, length = estimate.candidate, len(np.atleast_1d(estimate.total_bytes))
    usual = _usual_allocator(place.cuda)
    columns = [estimate.engine, knobs.precision, knobs.allocator]
    wide = [np.broadcast_to(np.asarray(one, dtype=object), length) for one in columns]
    names = np.array([f"{engine} {precision} {own or usual}" for engine, precision, own in zip(*wide, strict=True)])
    for name in np.unique(names):
        yield Kind(*name.split()), names == name


def _as(values: Any, estimate: Estimate) -> Any:
    """Arrays for arrays, numbers for numbers."""
    return values if isinstance(estimate.total_bytes, np.ndarray) else values[0].item()
