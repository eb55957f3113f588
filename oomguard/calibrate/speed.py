"""How long a pass takes: a guess before anything is measured, and what may make it faster or slower than that."""

from typing import Any

import numpy as np

from oomguard.candidate import Candidate, Candidates, is_none
from oomguard.estimate import terms
from oomguard.estimate.malloc import in_heap, in_heap_of
from oomguard.probe.record import Record
from oomguard.spec import Spec

SPEED = {"cpu": 6e10, "cuda": 5e12}
"""Floating-point operations per second, before anything is measured."""
HALF_ROWS = {"cpu": 4.0, "onednn": 1.5, "cuda": 64.0}
"""The microbatch at which half of the time goes into what does not depend on it, before anything is measured. (oneDNN:
LSTM 128, T = 400, 2 threads: a step of microbatches 2, 4, 8, 16, 32 took 1.8, 1.2, 1.1, 0.9, 1 of the time.)"""
HALF_TIME = 0.7
"""Of the time in fp32, what half precision takes on a card before anything is measured."""
NATIVE = 1.3
"""Of oneDNN's time, what PyTorch's own kernels take for an LSTM (2-core CPU, T = 500, B = 16)."""
STEADY = 0.6
"""What fixed thresholds of the C heap add to the time of PyTorch's own kernels on the CPU: what a pass frees goes back
to the system, and comes as new pages. (GRU 128, T = 500, 2 cores: 1.6 of the time in one piece, 1.45 in chunks, 2.0 and
1.1 in 2 and 4 segments, which free less at a time.)"""
FORWARD_SHARE = {"cpu": 0.05, "cuda": 0.33}
"""What segments add for each level. A forward pass takes a third of forward and backward; on the CPU most of that is
won back, since a piece stays in the caches and its memory is used again. (LSTM 128, T = 400 and 1,000, one thread and
two: 0.76 to 1.44 of the time of the plain step, most of them near 1; T = 10,000: 0.89 to 1.21.)"""
FAULTS = 0.4
"""CPU: what it adds to the time of oneDNN if the blocks of a pass are mapped anew each time. (LSTM 128, T = 400: 1.1 to
2.0 of the time, in one piece and in several.)"""
PIECE_SECONDS = 3e-4
"""What it takes to call the kernels of one layer, forward and backward, however short the piece."""
STEP_SECONDS = {"native": 2e-5, "fused": 2e-6}
"""The same of one time step, however small the layer: where each is a call of its own, and where one call does all."""
COLD = 1.3
"""How much slower a pass on the CPU is whose blocks are so large (32 MiB) that each is new memory. (Measured for an
LSTM at T = 10,000 and B = 32 with 2 threads: 1.24 and 1.34; when others used the memory too, up to 3.)"""
LOCAL, REACH = 0.2, 1.0
"""By how much a microbatch with its pieces usually differs (its logarithm) from what the effects explain; and how many
doublings away others differ alike."""
DIRECTIONS, APART = 6, 1.5
"""Of a place, and how many doublings away another engine, precision, allocator, thread number or way is."""
NOISE, QUIET = 0.06, 0.03
"""Standard deviation of a measured time (of its logarithm), on a machine that others use too: of a single pass; and at
least, however alike its passes were."""
OLD_NOISE = 0.25
"""The same of a time that an earlier search measured: the machine may have had other things to do."""
EFFECTS = (
    *(1.5, 0.5, 0.2, 0.6, 0.5, 0.2, 0.12, 0.2, 0.15, 0.12, 0.2, 0.2, 0.2, 0.05),
    *(0.15, 0.12, 0.06, 0.12, 0.12, 0.12, 0.12, 0.1),
)
"""Standard deviation of each effect: the speed itself; native; page faults; doublings of threads; half precision; fp16;
doublings of the microbatch; pieces, their number, chunks, window; offload, host, fused; cold memory; interactions."""

Knobs = Candidate | Candidates


def guess(spec: Spec, knobs: Knobs, engine: Any, *, cuda: bool) -> Any:
    """Seconds for one time step of one sequence, before anything is measured: operations, and what rows share."""
    where = "cuda" if cuda else "cpu"
    operations: Any = 6.0 * terms.weights_bytes(spec) / 4
    if cuda:
        operations = operations * np.where(np.asarray(knobs.precision) == "fp32", 1.0, HALF_TIME)
    half = np.where(np.asarray(engine) == "onednn", HALF_ROWS["onednn"], HALF_ROWS[where])
    alone = 1 + half / np.asarray(knobs.microbatch)
    new = 0.0 if cuda else cold(spec, knobs, engine) * (COLD - 1)
    if not cuda and spec.cell == "lstm":
        operations = operations * np.where(np.asarray(engine) == "native", NATIVE, 1.0)
        new = np.maximum(new, FAULTS * (faults(spec, knobs, engine) & (np.asarray(engine) != "native")))
    new = new + (0.0 if cuda else STEADY * _returns(knobs, engine))
    passes = operations / SPEED[where] * alone * (1 + FORWARD_SHARE[where] * _forwards(knobs)) * (1 + new)
    tokens = piece_of(spec, knobs) * np.asarray(knobs.microbatch)
    calls = spec.layers * spec.directions * (1 + _forwards(knobs))
    step = np.where(np.asarray(engine) == "native", STEP_SECONDS["native"], STEP_SECONDS["fused"])
    return passes + calls * (PIECE_SECONDS / tokens + step / np.asarray(knobs.microbatch))


def features(spec: Spec, knobs: Knobs, engine: Any, *, cuda: bool) -> Any:
    """What may make it faster or slower than that, one column for each of `EFFECTS`."""
    rows = np.log2(np.asarray(knobs.microbatch, dtype=float)) - 4
    native = _is(engine, "native")
    allocator = 0.0 if cuda else faults(spec, knobs, engine) * 1.0
    threads = np.log2(_threads(knobs))
    pieces = np.greater(knobs.segments, 1) * 1.0
    depth = np.log2(np.asarray(knobs.segments, dtype=float)) / 8
    columns = [
        1.0, native, allocator, threads, 1.0 - _is(knobs.precision, "fp32"), _is(knobs.precision, "fp16"),
        rows, pieces, depth, 1.0 - np.asarray(knobs.recompute) * 1.0, 1.0 - is_none(knobs.window),
        np.asarray(knobs.offload) * 1.0, _is(knobs.keep, "host"), _is(knobs.update, "fused"),
        0.0 if cuda else cold(spec, knobs, engine),
        native * rows, threads * rows, allocator * pieces, native * pieces, allocator * native, threads * native,
        threads * pieces,
    ]  # fmt: skip
    wide = np.broadcast_arrays(*(np.atleast_1d(np.asarray(one, dtype=float)) for one in columns))
    return np.stack(wide, axis=1)


def places(spec: Spec, knobs: Knobs, engine: Any) -> Any:
    """Where a candidate is among others: doublings of the microbatch and of a piece's steps, and what else differs.

    A shorter version of it, with fewer pieces as long as its own, is at the same place.
    """
    rows, threads = np.log2(np.asarray(knobs.microbatch, dtype=float)), np.log2(_threads(knobs))
    columns = [
        rows, np.log2(piece_of(spec, knobs)), APART * threads, APART * _is(engine, "native"),
        APART * _keeps(knobs), APART * (1.0 - np.asarray(knobs.recompute) * 1.0),
    ]  # fmt: skip
    return np.stack(np.broadcast_arrays(*(np.atleast_1d(np.asarray(one, dtype=float)) for one in columns)), axis=1)


def noise(record: Record) -> float:
    """Standard deviation of the logarithm of a record's time: passes that differ much tell little."""
    assert record.seconds_per_pass is not None
    if record.passes < 2 or not record.fastest_pass_seconds:
        return NOISE
    return float(np.hypot(QUIET, np.log(record.seconds_per_pass / record.fastest_pass_seconds) / 2))


def _forwards(knobs: Knobs) -> Any:
    """Forward passes beyond the first: one for each level of segments that are recomputed."""
    return np.asarray(knobs.levels) * np.greater(knobs.segments, 1) * np.asarray(knobs.recompute)


def _returns(knobs: Knobs, engine: Any) -> Any:
    """CPU: which part of a pass's small blocks goes back to the system at a time."""
    native = (np.asarray(engine) == "native") & ~_keeps(knobs)
    return native / np.where(np.asarray(knobs.recompute), np.asarray(knobs.segments), 1)


def faults(spec: Spec, knobs: Knobs, engine: Any) -> Any:
    """CPU: where the large blocks of a pass are mapped anew each time, which costs a page fault for every 4 KiB.

    oneDNN's blocks hold a whole piece, PyTorch's own kernels' one step. Short sequences do not show what whole ones
    will do, if theirs are on the other side of the C library's threshold.

    >>> spec = Spec(cell="lstm", seq=10_000)
    >>> [bool(faults(spec, Candidate(microbatch=32, segments=n, allocator="plain"), "onednn")) for n in (1, 100)]
    [True, False]
    """
    block = _block_bytes(spec, knobs, engine)
    return ~in_heap_of(block, knobs.allocator)


def cold(spec: Spec, knobs: Knobs, engine: Any) -> Any:
    """CPU: where blocks are so large that each is new memory, which no cache knows, whatever the allocator."""
    return ~in_heap(_block_bytes(spec, knobs, engine), "plain")


def _block_bytes(spec: Spec, knobs: Knobs, engine: Any) -> Any:
    """The gates: of a whole piece (oneDNN), of one step (PyTorch's own kernels)."""
    return (
        np.asarray(knobs.microbatch)
        * (16 * spec.hidden)
        * np.where(np.asarray(engine) == "native", 1, piece_of(spec, knobs))
    )


def piece_of(spec: Spec, knobs: Knobs) -> Any:
    """Steps of a piece, for candidates with and without a window side by side."""
    pieces = np.ceil(spec.steps / np.asarray(knobs.segments)).astype(np.int64)
    if is_none(knobs.window).all():
        return pieces
    windows = np.array([one or spec.steps for one in np.atleast_1d(np.asarray(knobs.window, dtype=object))])
    return np.minimum(pieces, windows)


def _keeps(knobs: Knobs) -> Any:
    """CPU: whether the C heap keeps what is freed for later."""
    return np.isin(np.asarray(knobs.allocator, dtype=str), ("plain", "pooled", "roomy"))


def _is(value: Any, name: str) -> Any:
    return np.asarray(np.asarray(value) == name) * 1.0


def _threads(knobs: Knobs) -> Any:
    """As numbers, 1 where there is none."""
    return np.asarray([one or 1 for one in np.atleast_1d(np.asarray(knobs.threads, dtype=object))], dtype=float)
