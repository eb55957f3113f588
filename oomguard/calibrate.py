"""Calibration: (estimate, record) pairs -> the correction of estimates and their margin, for memory and for time.

Both are one and the same small regression. The logarithm of `measured / predicted` is taken to be a sum of a few
effects (the engine, the allocator, segments, the size), each with a prior that says how large it usually is. Records
narrow the effects down; what is like the records is then predicted closely, and what is not keeps a wide margin.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from oomguard.candidate import Candidate, Candidates, is_none
from oomguard.estimate import terms
from oomguard.estimate.breakdown import Estimate, estimate_step
from oomguard.estimate.malloc import in_heap
from oomguard.estimate.margin import MARGIN_PERCENT
from oomguard.estimate.place import Place
from oomguard.probe.record import Record
from oomguard.spec import Spec
from oomguard.units import MIB

KNOWN = ("runtime", "weights", "optimizer", "input")
"""Terms that are what tensors weigh: a probe measures them apart from the rest, and nothing corrects them."""
SIGMAS = 2.0
"""The margin, in standard deviations of the rest."""
ERROR_BYTES = {"cpu": 2 * MIB, "cuda": 20 * MIB}
"""What a measured peak errs by, whatever its size: pages that come and go; a segment of PyTorch's allocator (20 MiB,
CUDACachingAllocator.cpp, kMinLargeAlloc and kLargeBuffer, torch 2.13)."""
FLOOR_BYTES = {"cpu": 3 * MIB, "cuda": 24 * MIB}
"""The least margin."""
REPEAT = {"steady": 0.012, "plain": 0.10, "cuda": 0.01}
"""By which share of its growth a candidate may peak higher than when it was measured. (Of PyTorch's own kernels, peaks
creep by 1 % over 20 steps; without fixed thresholds of the C heap, they vary from run to run.)"""
NOISE = {"steady": 0.01, "plain": 0.05, "cuda": 0.01}
"""Standard deviation of a measured rest around what the effects explain."""
OTHER_MODEL = 0.05
"""Standard deviation on top of that, if the record is of another model with the same cell and engine."""
ONE_PASS = 0.04
"""The same, if PyTorch's own kernels went through one pass only: the heap is not yet as it will be."""
PRIOR_SLOPES = (0.04, 0.012, 0.012)
"""How much segments, a doubling of the rest and a doubling of the microbatch usually change the ratio."""
SPEED = {"cpu": 6e10, "cuda": 5e12}
"""Floating-point operations per second, before anything is measured."""
HALF_ROWS = {"cpu": 4.0, "cuda": 64.0}
"""The microbatch at which half of the time goes into what does not depend on it, before anything is measured."""
FORWARD_SHARE = 0.33
"""A forward pass, as a share of forward and backward: what segments add for each level."""
COLD = 1.3
"""How much slower a pass on the CPU is whose blocks are so large (32 MiB) that each is new memory. (Measured for an
LSTM at T = 10,000 and B = 32 with 2 threads: 1.24 and 1.34; when others used the memory too, up to 3.)"""
TIME_NOISE = 0.06
"""Standard deviation of a measured time (of its logarithm), on a machine that others use too."""
ROUNDS = 8
"""Of the robust regression: by then it no longer moves."""


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


class Fit(NamedTuple):
    """Effects, and how well they are known."""

    mean: Any
    covariance: Any

    def at(self, features: Any) -> tuple[Any, Any]:
        """The expected logarithm there, and its standard deviation."""
        variance = np.einsum("ij,jk,ik->i", features, self.covariance, features)
        return features @ self.mean, np.sqrt(np.maximum(variance, 0.0))


def regress(features: Any, values: Any, noise: Any, prior: Sequence[float]) -> Fit:
    """Bayesian linear regression: the effects are independent, around 0, of the standard deviations of the prior.

    >>> fit = regress(np.ones((2, 1)), np.array([0.1, 0.1]), np.array([0.01, 0.01]), [1.0])
    >>> round(float(fit.mean[0]), 3), float(fit.covariance[0, 0]) < 0.01**2
    (0.1, True)
    """
    features, weights = np.atleast_2d(features), 1.0 / np.square(noise)
    precision = (features.T * weights) @ features + np.diag(1.0 / np.square(np.asarray(prior)))
    covariance = np.linalg.inv(precision)
    return Fit(covariance @ ((features.T * weights) @ np.asarray(values)), covariance)


def regress_robustly(features: Any, values: Any, noise: float, prior: Sequence[float]) -> Fit:
    """The same for values of which some are far off: what the others contradict counts less and less.

    >>> fit = regress_robustly(np.ones((3, 1)), np.array([0.1, 0.1, 3.0]), 0.05, [1.0])
    >>> round(float(fit.mean[0]), 1)
    0.1
    """
    spread = np.full(len(values), noise)
    for _ in range(ROUNDS):
        fit = regress(features, values, spread, prior)
        spread = np.hypot(noise, (np.asarray(values) - fit.at(features)[0]) / 2)
    return fit


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


def _setting(kind: Kind, place: Place) -> str:
    """Which row of the tables above a kind goes by."""
    return "cuda" if place.cuda else kind.allocator


class Calibration:
    """What records tell about a spec on a device.

    >>> from oomguard.estimate.place import CPU
    >>> spec = Spec(cell="lstm", seq=1000)
    >>> found = Calibration(spec, [], CPU).predict(estimate_step(spec, Candidate(microbatch=32)))
    >>> found.margin_bytes > 0
    True
    """

    def __init__(self, spec: Spec, records: Iterable[Record], place: Place) -> None:
        self.spec, self.place = spec, place
        self.records = [one for one in records if one.steps and one.terms and one.spec.cell == spec.cell]
        own = [one for one in self.records if same_model(one.spec, spec)]
        self.own = [(one, estimate_step(one.spec, one.candidate, place)) for one in own]
        self._memory: dict[Kind, Fit] = {}
        self._time: Fit | None = None

    @property
    def kinds(self) -> set[Kind]:
        """The kinds of which this very model has been measured."""
        return {kind_of(record) for record, _ in self.own}

    def predict(self, estimate: Estimate) -> Prediction:
        """Peak, margin and time of the estimate's candidate (or of each of them)."""
        peak, margin = self.predict_memory(estimate)
        seconds, doubt = self.predict_time(estimate)
        return Prediction(peak_bytes=peak, margin_bytes=margin, seconds_per_step=seconds, doubt=doubt)

    def predict_memory(self, estimate: Estimate) -> tuple[Any, Any]:
        """The calibrated peak, and its margin."""
        known, rest = _split(estimate)
        peak, margin = np.zeros_like(rest), np.zeros_like(rest)
        for kind, rows in _kinds(estimate, self.place):
            fit, setting = self._memory_fit(kind), _setting(kind, self.place)
            ratio, spread = fit.at(_memory_features(estimate.candidate, rest)[rows])
            expected = rest[rows] * np.exp(ratio)
            deviation = np.hypot(spread, NOISE[setting])
            peak[rows] = known[rows] + expected + self._runtime_bytes(kind, estimate)
            margin[rows] = expected * np.expm1(SIGMAS * deviation) + FLOOR_BYTES[self.where]
        return _as(np.ceil(peak).astype(np.int64), estimate), _as(np.ceil(margin).astype(np.int64), estimate)

    def predict_time(self, estimate: Estimate) -> tuple[Any, Any]:
        """Seconds of a step of the whole batch, and the standard deviation of their logarithm."""
        knobs = estimate.candidate
        if self._time is None:
            self._time = self._fit_time()
        ratio, doubt = self._time.at(self._time_features(self.spec, knobs, estimate.engine))
        each = self._base_seconds(self.spec, knobs, estimate.engine) * np.exp(ratio)
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
            self._memory[kind] = self._fit_memory(kind, rows)
        return self._memory[kind]

    def _others(self, kind: Kind) -> list[tuple[Record, Estimate]]:
        """Records of other models with the same cell, of that kind."""
        others = [one for one in self.records if kind_of(one) == kind and not same_model(one.spec, self.spec)]
        return [(one, estimate_step(one.spec, one.candidate, self.place)) for one in others]

    def _fit_memory(self, kind: Kind, rows: list[tuple[Record, Estimate, bool]]) -> Fit:
        setting = _setting(kind, self.place)
        # what no record calibrates keeps the margin of the bare estimate
        prior = [np.log1p(MARGIN_PERCENT[setting] / 100) / SIGMAS, *PRIOR_SLOPES]
        features, values, noise = [np.empty((0, len(prior)))], [], []
        for record, found, same in rows:
            assert record.terms is not None
            rest = _split(found)[1]
            measured = max(1, record.terms["rest"] + record.terms["gradients"])
            features.append(_memory_features(record.candidate, rest))
            values.append(float(np.log(measured / rest[0])))
            doubts = [NOISE[setting] + ERROR_BYTES[self.where] / rest[0], 0.0 if same else OTHER_MODEL]
            doubts += [ONE_PASS] if record.passes == 1 and kind.engine == "native" else []
            noise.append(float(np.linalg.norm(doubts)))
        return regress(np.concatenate(features), np.array(values), np.array(noise), prior)

    def _fit_time(self) -> Fit:
        features, values = [np.empty((0, len(_TIME_PRIOR)))], []
        for record, found in self.own:
            if record.fastest_pass_seconds is not None:
                knobs, tokens = record.candidate, record.spec.steps * record.candidate.microbatch
                features.append(self._time_features(record.spec, knobs, found.engine))
                base = np.atleast_1d(self._base_seconds(record.spec, knobs, found.engine))[0]
                values.append(float(np.log(record.fastest_pass_seconds / tokens / base)))
        return regress_robustly(np.concatenate(features), np.array(values), TIME_NOISE, _TIME_PRIOR)

    def _base_seconds(self, spec: Spec, knobs: Candidate | Candidates, engine: Any) -> Any:
        """Seconds for one time step of one sequence, before anything is measured: operations, and what rows share."""
        operations = 6.0 * terms.weights_bytes(spec) / 4
        alone = 1 + HALF_ROWS[self.where] / np.asarray(knobs.microbatch)
        new = 0.0 if self.place.cuda else cold(spec, knobs, engine) * (COLD - 1)
        return operations / SPEED[self.where] * alone * (1 + FORWARD_SHARE * _forwards(knobs)) * (1 + new)

    def _time_features(self, spec: Spec, knobs: Candidate | Candidates, engine: Any) -> Any:
        """What may make it faster or slower than that, one column for each of `_TIME_PRIOR`."""
        rows = np.log2(np.asarray(knobs.microbatch, dtype=float)) - 4
        native = _is(engine, "native")
        allocator = _is(knobs.allocator, "expandable") if self.place.cuda else faults(spec, knobs, engine) * 1.0
        threads = np.log2(np.where(is_none(knobs.threads), 1, _number(knobs.threads)))
        pieces = np.greater(knobs.segments, 1) * 1.0
        depth = np.log2(np.asarray(knobs.segments, dtype=float)) / 8
        columns = [
            1.0, native, allocator, threads, 1.0 - _is(knobs.precision, "fp32"), _is(knobs.precision, "fp16"),
            rows, pieces, depth, 1.0 - np.asarray(knobs.recompute) * 1.0, 1.0 - is_none(knobs.window),
            np.asarray(knobs.offload) * 1.0, _is(knobs.keep, "host"), _is(knobs.update, "fused"),
            0.0 if self.place.cuda else cold(spec, knobs, engine),
            native * rows, threads * rows, allocator * pieces, native * pieces, allocator * native, threads * native,
        ]  # fmt: skip
        wide = np.broadcast_arrays(*(np.atleast_1d(np.asarray(one, dtype=float)) for one in columns))
        return np.stack(wide, axis=1)


_TIME_PRIOR = (
    *(1.5, 0.5, 0.2, 0.3, 0.5, 0.2, 0.12, 0.12, 0.1, 0.1, 0.2, 0.2, 0.2, 0.05),
    *(0.15, 0.12, 0.06, 0.12, 0.12, 0.12, 0.12),
)
"""Standard deviation of each effect: the speed itself; native; page faults (or, on a card, its allocator); doublings
of threads; half precision; fp16; each doubling of the microbatch; pieces, their number, chunks, window; offload, host,
fused; cold memory; interactions."""


def _forwards(knobs: Candidate | Candidates) -> Any:
    """Forward passes beyond the first: one for each level of segments that are recomputed."""
    return np.asarray(knobs.levels) * np.greater(knobs.segments, 1) * np.asarray(knobs.recompute)


def faults(spec: Spec, knobs: Candidate | Candidates, engine: Any) -> Any:
    """CPU: where the large blocks of a pass are mapped anew each time, which costs a page fault for every 4 KiB.

    oneDNN's blocks hold a whole piece, PyTorch's own kernels' one step. Short sequences do not show what whole ones
    will do, if theirs are on the other side of the C library's threshold.

    >>> spec = Spec(cell="lstm", seq=10_000)
    >>> [bool(faults(spec, Candidate(microbatch=32, segments=n, allocator="plain"), "onednn")) for n in (1, 100)]
    [True, False]
    """
    block = _block_bytes(spec, knobs, engine)
    return np.where(np.asarray(knobs.allocator) == "plain", ~in_heap(block, "plain"), ~in_heap(block, "steady"))


def cold(spec: Spec, knobs: Candidate | Candidates, engine: Any) -> Any:
    """CPU: where blocks are so large that each is new memory, which no cache knows, whatever the allocator."""
    return ~in_heap(_block_bytes(spec, knobs, engine), "plain")


def _block_bytes(spec: Spec, knobs: Candidate | Candidates, engine: Any) -> Any:
    """The gates: of a whole piece (oneDNN), of one step (PyTorch's own kernels)."""
    return (
        np.asarray(knobs.microbatch)
        * (16 * spec.hidden)
        * np.where(np.asarray(engine) == "native", 1, piece_of(spec, knobs))
    )


def piece_of(spec: Spec, knobs: Candidate | Candidates) -> Any:
    """Steps of a piece, for candidates with and without a window side by side."""
    pieces = np.ceil(spec.steps / np.asarray(knobs.segments)).astype(np.int64)
    if is_none(knobs.window).all():
        return pieces
    windows = np.array([one or spec.steps for one in np.atleast_1d(np.asarray(knobs.window, dtype=object))])
    return np.minimum(pieces, windows)


def _is(value: Any, name: str) -> Any:
    return np.asarray(np.asarray(value) == name) * 1.0


def _number(value: Any) -> Any:
    """Threads as numbers, 1 where there is none."""
    return np.asarray([one or 1 for one in np.atleast_1d(np.asarray(value, dtype=object))], dtype=float)


def _split(estimate: Estimate) -> tuple[Any, Any]:
    """What is known of the peak, without the runtime; and the rest, which is to be corrected (at least a page)."""
    known = sum(np.atleast_1d(estimate.terms[term]).astype(float) for term in KNOWN if term != "runtime")
    rest = np.atleast_1d(estimate.total_bytes) - np.atleast_1d(estimate.terms["runtime"]) - known
    return known, np.maximum(rest, 4096.0)


def _memory_features(knobs: Candidate | Candidates, rest: Any) -> Any:
    """1, segments or not, doublings of the rest, doublings of the microbatch."""
    pieces = np.greater(knobs.segments, 1) * 1.0
    size = np.log2(rest / (256 * MIB))
    rows = np.log2(np.asarray(knobs.microbatch, dtype=float)) - 4
    return np.stack(np.broadcast_arrays(np.ones_like(rest), np.atleast_1d(pieces), size, np.atleast_1d(rows)), axis=1)


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
