"""The time model: a guess before anything is measured, and how the times of candidates resemble each other."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oomguard._estimate import terms
from oomguard._estimate.malloc import heap_limit
from oomguard._predict.fit import FAR, Data, Fit, Floats, Term, matrix, without_outliers
from oomguard._spec.candidate import Candidate, Candidates, is_none
from oomguard._spec.spec import Spec

SPEED = {"cpu": 6e10, "cuda": 5e12}
"""Floating-point operations per second before anything is measured: the first probe corrects it."""
HALF_ROWS = {"cpu": 2.0, "cuda": 64.0}
"""The microbatch at which half of the time does not depend on the microbatch. (CPU: LSTM 128, T = 400, 2 threads: a
step in microbatches of 2, 4, 8, 16, 32 took 1.8, 1.2, 1.1, 0.9, 1 of the time.)"""
FAULTS = 0.5
"""CPU: share added to the time if the blocks of a pass are new pages each time (LSTM 128, T = 400: 0.1 to 1.0; GRU 128,
T = 500: 0.45 to 0.6)."""
FORWARD = {"cpu": 0.05, "cuda": 1 / 3}
"""Share that each level of segments adds to the time: a forward pass is a third of forward and backward. On the CPU
most of it is won back, since a segment stays in the caches (LSTM 128, T = 400 to 10,000: 0.76 to 1.44 of the plain
step, most of them near 1)."""
LAUNCH_SECONDS = {"native": 2e-5, "fused": 3e-4}
"""Seconds of a layer's kernel, however small its work: of PyTorch's own one for each time step, of the others one for
each segment (LSTM 128, 1 thread)."""
LEVEL, EFFECT = 1.5, 0.3
"""Standard deviations (of logarithms) before anything is measured: of the speed; of the effect of one setting or one
coordinate of the shape, or of an earlier search (the machine may have been busier). With 0.4 for settings and 0.2 for
shapes, 36 simulated searches found 0.905 of the best in the mean and 0.62 in the worst case; with 0.3, 0.909 and 0.74.
"""
NOISE, LOCAL = 0.04, 0.1
"""Standard deviation of a measured time, and of a local deviation that only similar candidates share. The noise of a
search is half of this, twice or more, as its own records make likely."""
NOISY = 2 * NOISE  # a time with such a deviation is told with it: the next noise above the usual that `fit_times` knows

ROWS, PIECE, THREADS, NATIVE, KEEPS, HALF, OTHER, CHUNKS, LIVE, STEPS, OLD = range(11)  # coordinates of a candidate
EFFECTS = (THREADS, NATIVE, KEEPS, HALF, OTHER, ROWS, PIECE, CHUNKS, LIVE, OLD)
SUMMANDS = (Term(LEVEL), *(Term(EFFECT, (column,)) for column in EFFECTS), Term(LOCAL, (*range(STEPS + 1),)))
"""The summands of the logarithm of a time over its guess."""

Knobs = Candidate | Candidates
Engine = str | NDArray[np.str_]  # the engine of all candidates, or one for each


def guess(spec: Spec, knobs: Knobs, engine: Engine, *, cuda: bool) -> Floats:
    """Seconds of one time step of one sequence, before anything is measured."""
    where, native = "cuda" if cuda else "cpu", _is(engine, "native")
    again = np.asarray(knobs.levels * np.greater(knobs.segments, 1) * knobs.recompute)  # further forward passes
    share = (1 + HALF_ROWS[where] / knobs.microbatch) * (1 + FORWARD[where] * again)
    if not cuda:
        share = share * (1 + FAULTS * faults(spec, knobs, engine))
    work = 6.0 * terms.weights_bytes(spec) / 4 / SPEED[where] * share
    launch = np.where(native, LAUNCH_SECONDS["native"], LAUNCH_SECONDS["fused"] / piece_of(spec, knobs))
    return np.asarray(work + spec.layers * spec.directions * (1 + again) * launch / knobs.microbatch)


def places(spec: Spec, knobs: Knobs, engine: Engine, steps: ArrayLike, *, old: bool = False) -> Floats:
    """Coordinates of each candidate, run with sequences of so many steps, now or (`old`) in an earlier search.

    A shorter version with fewer segments of the same length differs in `STEPS` alone; one that keeps all its
    activations also in `LIVE`, because memory that is in no cache takes longer.
    """
    fewest = np.minimum(knobs.segments, np.where(np.greater(knobs.segments, 1), 2 * np.asarray(knobs.levels), 1))
    rows, piece = np.asarray(knobs.microbatch), np.minimum(piece_of(spec, knobs), np.maximum(1, steps // fewest))
    live = np.where(knobs.recompute, piece, steps) * rows
    fp32, fp16 = _is(knobs.precision, "fp32"), _is(knobs.precision, "fp16")
    other = [knobs.offload, _is(knobs.keep, "host"), _is(knobs.update, "fused"), ~is_none(knobs.window)]
    switches = [
        np.log2(filled(knobs.threads, 1).astype(float)),
        _is(engine, "native"),
        keeps(knobs),
        ~fp32 * 1.0 + fp16,
        sum(2**index * np.asarray(switch) for index, switch in enumerate(other)),
        ~np.asarray(knobs.recompute),
    ]
    lengths = [np.log2(live) / 8, np.log2(steps) / 8]
    columns = [np.log2(rows) / 2, np.log2(piece) / 2, *switches, *lengths]
    return matrix([*columns, FAR * old])


def fit_times(data: Data) -> tuple[Fit, float]:
    """The fit of measured times over guessed ones, and the standard deviation of a time that is measured once.

    `data.noise` is what is known beforehand of each value; the noise that all share is learned from how well other
    records predict each one.
    """
    quiet = without_outliers(SUMMANDS, data._replace(noise=np.hypot(data.noise, NOISE)))
    extra = np.sqrt(np.square(quiet.noise) - NOISE**2)
    best, likely = (Fit(SUMMANDS, quiet), NOISE), -math.inf
    for louder in range(-1, 4) if len(data.values) > 1 else ():
        noise = NOISE * 2.0**louder
        fit = Fit(SUMMANDS, data._replace(noise=np.hypot(extra, noise)))
        if (evidence := fit.evidence - louder**2 / 2) > likely:  # a doubling is a deviation
            likely, best = evidence, (fit, noise)
    return best


def faults(spec: Spec, knobs: Knobs, engine: Engine) -> NDArray[np.bool_]:
    """CPU: where the blocks of a pass are mapped anew each time, which costs a page fault for every 4 KiB.

    oneDNN has blocks for whole segments, PyTorch's own kernels for single steps.
    """
    native = _is(engine, "native")
    block = np.asarray(knobs.microbatch) * 16 * spec.hidden * piece_of(spec, knobs)
    return np.asarray(np.where(native, ~keeps(knobs), block >= heap_limit(knobs.allocator, engine)))


def piece_of(spec: Spec, knobs: Knobs) -> NDArray[np.int64]:
    """Steps of a segment or window, for candidates with and without a window side by side."""
    windows = filled(knobs.window, spec.steps).astype(np.int64)
    return np.asarray(np.minimum(np.ceil(spec.steps / np.asarray(knobs.segments)).astype(np.int64), windows))


def filled(values: object, default: object) -> NDArray[np.object_]:
    """The values of a knob, with a default where it is None."""
    return np.where(is_none(values), np.array(default, dtype=object), np.asarray(values, dtype=object))


def keeps(knobs: Knobs) -> NDArray[np.bool_]:
    """CPU: whether the C heap keeps freed memory for later."""
    return np.isin(np.asarray(knobs.allocator, dtype=str), ("system", "fast"))


def _is(values: ArrayLike, name: str) -> NDArray[np.bool_]:
    return np.asarray(np.asarray(values) == name)
