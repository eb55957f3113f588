"""The memory model: which part of a peak records correct, and what the correction depends on."""

import numpy as np
from numpy.typing import NDArray

from oomguard._core.units import MIB
from oomguard._estimate.breakdown import Estimate
from oomguard._estimate.malloc import in_heap
from oomguard._predict.fit import Floats, matrix
from oomguard._predict.speed import Knobs, piece_of
from oomguard._spec.spec import Spec

KNOWN = ("runtime", "weights", "optimizer", "input")
"""Terms that are sizes of tensors: a probe measures them apart from the rest, and nothing corrects them."""
SIGMAS = 2.0
"""The margin, in standard deviations of the rest."""
ERROR_BYTES = {"cpu": 2 * MIB, "cuda": 8 * MIB}
"""Error of a measured peak, whatever its size: pages that come and go; part of a segment of PyTorch's allocator (20
MiB, CUDACachingAllocator.cpp, kLargeBuffer, torch 2.13)."""
FLOOR_BYTES = {"cpu": 3 * MIB, "cuda": 24 * MIB}
"""The least margin."""
REPEAT = {"tight": 0.012, "fast native": 0.25, "chunks": 0.02, "fast onednn": 0.25, "system": 0.2, "cuda": 0.01}
"""Share of its growth by which a candidate may peak higher than when it was measured. Peaks of PyTorch's own kernels
creep by 1 % over 20 steps; in a heap that keeps what is freed, those of recomputed segments by up to 26 %, but not
those of chunks, which free in the order in which they allocate. Without fixed thresholds peaks vary between runs."""
NOISE = {
    **{"tight": 0.008, "native": 0.011, "rnn": 0.03, "fast native": 0.1, "chunks": 0.015},
    **{"fast onednn": 0.12, "system": 0.08, "cuda": 0.015},
}
"""Standard deviation of a measured rest around what the effects explain. `native`: PyTorch's own kernels with the
allocator `tight`. `rnn`: a vanilla RNN with its states in the heap, which has two outcomes (one estimate was 9 % too
low). `chunks`: segments that are not recomputed, with the allocator `fast`."""
SCATTERED = 0.08
"""Standard deviation on top of that where the heap becomes fragmented (`scattered`, _estimate/breakdown.py)."""
OTHER_MODEL = {"cpu": 0.05, "cuda": 0.5}
"""Standard deviation on top of that if the record is of another model with the same cell and engine. What a card's
allocator reserves depends on how sizes fit one another, and the other model has other sizes."""
ONE_PASS = 0.04
"""Standard deviation on top of that if PyTorch's own kernels ran a single pass: the heap has not settled yet."""
SLOPES = {"cpu": (0.04, 0.04, 0.012, 0.012), "cuda": (0.2, 0.2, 0.05, 0.03)}
"""Prior standard deviations of four effects: segments, chunks, a doubling of the rest, a doubling of the microbatch."""
CARD_LEVEL = 0.2
"""Prior standard deviation of the ratio on a card once the model has been measured there. What PyTorch's allocator
reserves per byte in use (1.01 to 1.68 in 155 records of four models) is not estimated; records tell it."""
SHAPE = {"tight": 0.006, "fast native": 0.05, "fast onednn": 0.2, "system": 0.03, "cuda": 0.08}
"""Prior standard deviation of what one microbatch with its segments differs by, always in the same way. (With the
allocator `fast`, an LSTM of three layers peaked at 1.0 to 2.0 of the estimate, depending on its segments.)"""
FEW = 4
"""CPU: up to so many segments, a candidate is matched to its half-length probe by segment count."""
NEARBY = 0.05
"""Distance on a card between sequences of one length and of twice that length: they share 0.9 of the local deviation
(`Prior.reach`)."""


def repeat(knobs: Knobs, setting: str) -> Floats:
    """The share of `REPEAT` for each candidate.

    >>> from oomguard._spec.candidate import Candidates
    >>> repeat(Candidates(microbatch=1, segments=4, recompute=np.array([True, False])), "fast native").tolist()
    [0.25, 0.02]
    """
    return np.where((setting == "fast native") & _chunks(knobs), REPEAT["chunks"], REPEAT[setting])


def noise(spec: Spec, knobs: Knobs, engine: str, setting: str) -> Floats:
    """The standard deviation of `NOISE` for each candidate."""
    if setting == "fast native":
        return np.where(_chunks(knobs), NOISE["chunks"], NOISE["fast native"])
    if setting != "tight" or engine != "native":
        return np.asarray(NOISE[setting])
    unsure = (spec.cell == "rnn") & in_heap(4 * spec.hidden * np.asarray(knobs.microbatch), setting)
    return np.where(unsure, NOISE["rnn"], NOISE["native"])


def _chunks(knobs: Knobs) -> NDArray[np.bool_]:
    """Where segments are not recomputed."""
    return np.asarray(np.greater(knobs.segments, 1) & np.logical_not(knobs.recompute))


def split(estimate: Estimate) -> tuple[Floats, Floats]:
    """The known part of the peak without the runtime, and the rest, which records correct (at least a page)."""
    parts = (estimate.total_bytes, *(estimate.terms[term] for term in KNOWN))
    total, runtime, *others = np.broadcast_arrays(*map(np.atleast_1d, parts))
    known = np.sum(others, axis=0, dtype=float)
    return known, np.maximum(total - runtime - known, 4096.0)


def features(knobs: Knobs, rest: Floats) -> Floats:
    """One row per candidate: 1, segments or not, chunks or not, doublings of the rest, doublings of the microbatch."""
    sizes = np.log2(rest / (256 * MIB)), np.log2(knobs.microbatch) - 4
    return matrix([1.0, np.greater(knobs.segments, 1), _chunks(knobs), *sizes])


def places(spec: Spec, knobs: Knobs, *, cuda: bool) -> Floats:
    """Coordinates of each candidate: a number for microbatch and segments, the same for its shorter versions.

    Recomputed segments are identified by their length; chunks (which all stay in memory), and on the CPU a few
    segments, by their number. On a card, the second coordinate brings versions of similar length together.
    """
    by_length = knobs.recompute & np.greater(knobs.segments, 1 if cuda else FEW)
    length = np.where(by_length, piece_of(spec, knobs), -np.asarray(knobs.segments))
    pieces = np.where(np.greater(knobs.segments, 1), length, 0)
    number = np.asarray(knobs.microbatch, dtype=np.int64) * (1 << 31) + pieces
    for switch in (np.asarray(knobs.recompute), np.asarray(knobs.offload), np.asarray(knobs.keep) == "host"):
        number = 2 * number + switch
    return matrix([number, np.log2(spec.steps) * NEARBY if cuda else 0.0])
