"""The time model: a guess before anything is measured, and the effects that make a pass faster or slower than that."""

from collections.abc import Sequence
from datetime import datetime

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oomguard._estimate import terms
from oomguard._estimate.malloc import in_heap, in_heap_of
from oomguard._predict.fit import Floats, matrix
from oomguard._probe.record import Record
from oomguard._spec.candidate import Candidate, Candidates, is_none
from oomguard._spec.spec import Spec

SPEED = {"cpu": 6e10, "cuda": 5e12}
"""Floating-point operations per second, before anything is measured."""
HALF_ROWS = {"cpu": 4.0, "onednn": 1.5, "cuda": 64.0}
"""The microbatch at which half of the time does not depend on the microbatch, before anything is measured. (oneDNN:
LSTM 128, T = 400, 2 threads: a step of microbatches 2, 4, 8, 16, 32 took 1.8, 1.2, 1.1, 0.9, 1 of the time.)"""
HALF_TIME = 0.7
"""Time in half precision on a card, as a share of the time in fp32, before anything is measured."""
NATIVE = 1.3
"""Time of PyTorch's own LSTM kernels, as a multiple of oneDNN's (2-core CPU, T = 500, B = 16)."""
STEADY = 0.6
"""Share that fixed thresholds of the C heap add to the time of PyTorch's own kernels on the CPU: freed memory goes back
to the system and comes back as new pages. (GRU 128, T = 500, 2 cores: 1.6 of the time unsegmented, 1.45 in chunks, 2.0
and 1.1 in 2 and 4 segments, which free less at a time.)"""
FORWARD_SHARE = {"cpu": 0.05, "cuda": 0.33}
"""Share that each level of segments adds to the time. A forward pass takes a third of forward and backward; on the CPU
most of that is won back, since a segment stays in the caches and its memory is reused. (LSTM 128, T = 400 and 1,000, 1
and 2 threads: 0.76 to 1.44 of the time of the plain step, most of them near 1; T = 10,000: 0.89 to 1.21.)"""
FAULTS = 0.4
"""CPU: share added to the time of oneDNN if the blocks of a pass are mapped anew each time. (LSTM 128, T = 400: 1.1 to
2.0 of the time, unsegmented and in segments.)"""
PIECE_SECONDS = 3e-4
"""Seconds to call the kernels of one layer, forward and backward, however short the segment."""
STEP_SECONDS = {"native": 2e-5, "fused": 2e-6}
"""Seconds of one time step of a layer, however small: where each step is a call, and where one call does all steps."""
COLD = 1.3
"""How much slower a pass on the CPU is whose blocks are so large (32 MiB) that each is new memory. (Measured for an
LSTM at T = 10,000 and B = 32 with 2 threads: 1.24 and 1.34; when others used the memory too, up to 3.)"""
LOCAL, REACH = 0.2, 1.0
"""Prior standard deviation of what one microbatch with its segments differs by (a logarithm), and how many doublings
away others differ alike."""
DIRECTIONS, APART = 6, 1.5
"""Coordinates of a place, and the distance in doublings of another engine, allocator, thread number or mode."""
NOISE, QUIET = 0.06, 0.03
"""Standard deviation of a measured time (of its logarithm) on a shared machine: of a single pass; and the least,
however similar the passes were."""
OLD_NOISE = 0.25
"""Standard deviation of a time that an earlier search measured: the load of the machine may have been different."""
EFFECTS = (
    *(1.5, 0.5, 0.2, 0.6, 0.5, 0.2, 0.12, 0.2, 0.15, 0.12, 0.2, 0.2, 0.2, 0.05),
    *(0.15, 0.12, 0.06, 0.12, 0.12, 0.12, 0.12, 0.1),
)
"""Prior standard deviation of each effect: the speed itself; native; page faults; doublings of threads; half precision;
fp16; doublings of the microbatch; segments, their number, chunks, window; offload, host, fused; cold memory;
interactions."""
DRIFT, LASTS_SECONDS = 0.2, 20.0
"""Prior standard deviation of the drift (the logarithm of a time), and the seconds after which it has changed."""
LEVEL = 2.0
"""Prior standard deviation of a candidate's speed. Wide, so that only repeated runs inform the drift."""

Knobs = Candidate | Candidates
Engine = str | NDArray[np.str_]
"""The engine of all candidates, or one for each."""


def guess(spec: Spec, knobs: Knobs, engine: Engine, *, cuda: bool) -> Floats:
    """Seconds of one time step of one sequence, before anything is measured."""
    where = "cuda" if cuda else "cpu"
    native, operations = _is(engine, "native"), np.asarray(6.0 * terms.weights_bytes(spec) / 4)
    if cuda:
        operations = operations * np.where(_is(knobs.precision, "fp32"), 1.0, HALF_TIME)
    half = np.where(_is(engine, "onednn"), HALF_ROWS["onednn"], HALF_ROWS[where])
    alone = 1 + half / knobs.microbatch
    new = np.asarray(0.0) if cuda else cold(spec, knobs, engine) * (COLD - 1)
    if not cuda and spec.cell == "lstm":
        operations = operations * np.where(native, NATIVE, 1.0)
        new = np.maximum(new, FAULTS * (faults(spec, knobs, engine) & ~native))
    if not cuda:  # the share of a pass's small blocks that goes back to the system at a time
        new = new + STEADY * ((native & ~_keeps(knobs)) / np.where(knobs.recompute, knobs.segments, 1))
    again = np.asarray(knobs.levels * np.greater(knobs.segments, 1) * knobs.recompute)  # further forward passes
    passes = operations / SPEED[where] * alone * (1 + FORWARD_SHARE[where] * again) * (1 + new)
    tokens = piece_of(spec, knobs) * knobs.microbatch
    calls = spec.layers * spec.directions * (1 + again)
    step = np.where(native, STEP_SECONDS["native"], STEP_SECONDS["fused"])
    return np.asarray(passes + calls * (PIECE_SECONDS / tokens + step / knobs.microbatch))


def features(spec: Spec, knobs: Knobs, engine: Engine, *, cuda: bool) -> Floats:
    """One row per candidate, one column for each of `EFFECTS`."""
    rows, threads = np.log2(knobs.microbatch) - 4, np.log2(filled(knobs.threads, 1).astype(float))
    native, pieces = _is(engine, "native"), np.greater(knobs.segments, 1)
    allocator = np.asarray(False) if cuda else faults(spec, knobs, engine)
    return matrix([
        1.0, native, allocator, threads, ~_is(knobs.precision, "fp32"), _is(knobs.precision, "fp16"),
        rows, pieces, np.log2(knobs.segments) / 8, ~np.asarray(knobs.recompute), ~is_none(knobs.window),
        knobs.offload, _is(knobs.keep, "host"), _is(knobs.update, "fused"), not cuda and cold(spec, knobs, engine),
        native * rows, threads * rows, allocator * pieces, native * pieces, allocator * native, threads * native,
        threads * pieces,
    ])  # fmt: skip


def places(spec: Spec, knobs: Knobs, engine: Engine) -> Floats:
    """Coordinates of each candidate: doublings of microbatch and segment length, and what else differs.

    A shorter version of a candidate, with fewer segments of the same length, is at the same place.
    """
    counts = knobs.microbatch, piece_of(spec, knobs), filled(knobs.threads, 1).astype(float)
    rows, pieces, threads = map(np.log2, counts)
    settings = [threads, _is(engine, "native"), _keeps(knobs), ~np.asarray(knobs.recompute)]
    return matrix([rows, pieces, *(APART * column for column in settings)])


def noise(record: Record) -> float:
    """Standard deviation of the logarithm of a record's time: the more its passes differ, the larger."""
    assert record.seconds_per_pass is not None
    if record.passes < 2 or not record.fastest_pass_seconds:
        return NOISE
    return float(np.hypot(QUIET, np.log(record.seconds_per_pass / record.fastest_pass_seconds) / 2))


def faults(spec: Spec, knobs: Knobs, engine: Engine) -> NDArray[np.bool_]:
    """CPU: where the large blocks of a pass are mapped anew each time, which costs a page fault for every 4 KiB.

    Short sequences do not show the time of whole ones if their blocks are on the other side of glibc's threshold.

    >>> spec = Spec(cell="lstm", seq=10_000)
    >>> [bool(faults(spec, Candidate(microbatch=32, segments=n, allocator="system"), "onednn")) for n in (1, 100)]
    [True, False]
    """
    return ~np.asarray(in_heap_of(_block_bytes(spec, knobs, engine), knobs.allocator, engine), dtype=bool)


def cold(spec: Spec, knobs: Knobs, engine: Engine) -> NDArray[np.bool_]:
    """CPU: where blocks are so large that each is new memory, not in any cache, whatever the allocator."""
    return ~np.asarray(in_heap(_block_bytes(spec, knobs, engine), "system"), dtype=bool)


def _block_bytes(spec: Spec, knobs: Knobs, engine: Engine) -> NDArray[np.int64]:
    """Bytes of the gates: of a whole segment (oneDNN), of one step (PyTorch's own kernels)."""
    steps = np.where(_is(engine, "native"), 1, piece_of(spec, knobs))
    return np.asarray(knobs.microbatch * (16 * spec.hidden) * steps)


def piece_of(spec: Spec, knobs: Knobs) -> NDArray[np.int64]:
    """Steps of a segment or window, for candidates with and without a window side by side."""
    windows = filled(knobs.window, spec.steps).astype(np.int64)
    return np.asarray(np.minimum(np.ceil(spec.steps / np.asarray(knobs.segments)).astype(np.int64), windows))


def filled(values: object, default: object) -> NDArray[np.object_]:
    """The values of a knob, with a default where it is None."""
    return np.where(is_none(values), np.array(default, dtype=object), np.asarray(values, dtype=object))


def _keeps(knobs: Knobs) -> NDArray[np.bool_]:
    """CPU: whether the C heap keeps freed memory for later."""
    return np.isin(np.asarray(knobs.allocator, dtype=str), ("system", "fast"))


def _is(values: ArrayLike, name: str) -> NDArray[np.bool_]:
    return np.asarray(np.asarray(values) == name)


def drift(records: Sequence[Record]) -> Floats:
    """How much slower than on average the machine was during each (timed) record, as the logarithm of a time.

    A shared machine changes by a third within a minute. Only repeated runs tell, never a candidate that is slower than
    predicted: if several candidates have become slower since they were first measured, the machine has.
    """
    if not records:
        return np.empty(0)
    values = np.log(
        [(record.seconds_per_pass or 0.0) / record.spec.steps / record.candidate.microbatch for record in records]
    )
    same = _equal([(record.device, record.spec, record.candidate) for record in records])
    middles = [*map(_middle_seconds, records)]
    apart = np.abs(np.subtract.outer(middles, middles))
    # a long probe averages the drift
    share = DRIFT / np.sqrt([1 + record.seconds / LASTS_SECONDS for record in records])
    moments = np.outer(share, share) * np.exp(-apart / LASTS_SECONDS) * _equal([record.device for record in records])
    total = LEVEL**2 * same + moments + np.diag(np.square([*map(noise, records)]))
    slower = moments @ np.linalg.solve(total, values - values.mean())
    return np.asarray(slower - slower.mean())


def _equal(things: Sequence[object]) -> Floats:
    """A matrix with 1 where two of the things are equal."""
    return np.array([[float(first == other) for other in things] for first in things])


def _middle_seconds(record: Record) -> float:
    """The middle of a probe as a time stamp; 0 if its ledger does not say when it ran."""
    try:
        return datetime.fromisoformat(record.started).timestamp() + record.seconds / 2
    except ValueError:
        return 0.0
