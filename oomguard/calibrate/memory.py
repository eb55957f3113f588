"""What a peak consists of that is known, what is to be corrected, and what the correction may depend on."""

from typing import Any

import numpy as np

from oomguard.calibrate.speed import piece_of
from oomguard.candidate import Candidate, Candidates
from oomguard.estimate.breakdown import Estimate
from oomguard.estimate.malloc import in_heap
from oomguard.spec import Spec
from oomguard.units import MIB

KNOWN = ("runtime", "weights", "optimizer", "input")
"""Terms that are what tensors weigh: a probe measures them apart from the rest, and nothing corrects them."""
SIGMAS = 2.0
"""The margin, in standard deviations of the rest."""
ERROR_BYTES = {"cpu": 2 * MIB, "cuda": 8 * MIB}
"""What a measured peak errs by, whatever its size: pages that come and go; part of a segment of PyTorch's allocator (20
MiB, CUDACachingAllocator.cpp, kLargeBuffer, torch 2.13)."""
FLOOR_BYTES = {"cpu": 3 * MIB, "cuda": 24 * MIB}
"""The least margin."""
REPEAT = {"steady": 0.012, "pooled": 0.25, "chunks": 0.02, "roomy": 0.25, "plain": 0.2, "cuda": 0.01}
"""By which share of its growth a candidate may peak higher than when it was measured. (Of PyTorch's own kernels, peaks
creep by 1 % over 20 steps; in a heap that keeps what is freed, where pieces are computed again, by up to 26 %, but not
those of chunks, which go in the order in which they came; without fixed thresholds they vary from run to run.)"""
NOISE = {
    **{"steady": 0.008, "native": 0.011, "rnn": 0.03, "pooled": 0.1, "chunks": 0.015},
    **{"roomy": 0.12, "plain": 0.08, "cuda": 0.015},
}
"""Standard deviation of a measured rest around what the effects explain. (`native`: PyTorch's own kernels, steady.
`rnn`: a vanilla RNN with its states in the heap, which has two outcomes: one estimate came out 9 % low. `chunks`: in
`pooled`, as above.)"""
SCATTERED = 0.08
"""Standard deviation on top of that, where the heap falls to pieces (estimate/margin.py)."""
OTHER_MODEL = {"cpu": 0.05, "cuda": 0.5}
"""Standard deviation on top of that, if the record is of another model with the same cell and engine. (What a card's
allocator reserves depends on how sizes fit one another, and that model has other ones.)"""
ONE_PASS = 0.04
"""The same, if PyTorch's own kernels went through one pass only: the heap is not yet as it will be."""
SLOPES = {"cpu": (0.04, 0.04, 0.012, 0.012), "cuda": (0.2, 0.2, 0.05, 0.03)}
"""How much pieces, chunks, a doubling of the rest and a doubling of the microbatch usually change the ratio."""
CARD_LEVEL = 0.2
"""Standard deviation of the ratio on a card, once the model has been measured there: how much PyTorch's allocator
reserves for each byte in use (1.01 to 1.68 of it in 155 records of four models) no estimate knows, but records tell."""
SHAPE = {"steady": 0.006, "pooled": 0.05, "roomy": 0.2, "plain": 0.03, "cuda": 0.08}
"""By how much a microbatch with its pieces usually differs from what the effects explain, always in the same way. (In
`roomy`, an LSTM of three layers peaked at 1.0 to 2.0 of the estimate, depending on its pieces.)"""
FEW = 4
"""Segments that half as long sequences are gone through in too."""
NEARBY = 0.05
"""How far apart sequences of twice the length are on a card: what both have in common is 0.9 of it (`Prior.reach`)."""

Knobs = Candidate | Candidates


def repeat(knobs: Knobs, setting: str) -> Any:
    """The figure of `REPEAT` for a candidate, or of each of many.

    >>> repeat(Candidates(microbatch=1, segments=4, recompute=np.array([True, False])), "pooled").tolist()
    [0.25, 0.02]
    """
    return np.where((setting == "pooled") & _chunks(knobs), REPEAT["chunks"], REPEAT[setting])


def noise(spec: Spec, knobs: Knobs, engine: str, setting: str) -> Any:
    """The figure of `NOISE` for a candidate, or of each of many."""
    if setting == "pooled":
        return np.where(_chunks(knobs), NOISE["chunks"], NOISE["pooled"])
    if setting != "steady" or engine != "native":
        return np.asarray(NOISE[setting])
    unsure = (spec.cell == "rnn") & in_heap(4 * spec.hidden * np.asarray(knobs.microbatch), setting)
    return np.where(unsure, NOISE["rnn"], NOISE["native"])


def _chunks(knobs: Knobs) -> Any:
    """Where pieces are not computed again."""
    return np.greater(knobs.segments, 1) & ~np.asarray(knobs.recompute, dtype=bool)


def split(estimate: Estimate) -> tuple[Any, Any]:
    """What is known of the peak, without the runtime; and the rest, which is to be corrected (at least a page)."""
    known = sum(np.atleast_1d(estimate.terms[term]).astype(float) for term in KNOWN if term != "runtime")
    rest = np.atleast_1d(estimate.total_bytes) - np.atleast_1d(estimate.terms["runtime"]) - known
    return known, np.maximum(rest, 4096.0)


def features(knobs: Knobs, rest: Any) -> Any:
    """1, pieces or not, chunks or not, doublings of the rest, doublings of the microbatch."""
    pieces = np.greater(knobs.segments, 1) * 1.0
    chunks = _chunks(knobs) * 1.0
    size = np.log2(rest / (256 * MIB))
    rows = np.log2(np.asarray(knobs.microbatch, dtype=float)) - 4
    columns = (np.ones_like(rest), np.atleast_1d(pieces), np.atleast_1d(chunks), size, np.atleast_1d(rows))
    return np.stack(np.broadcast_arrays(*columns), axis=1)


def places(spec: Spec, knobs: Knobs, *, cuda: bool) -> Any:
    """A number for the microbatch and its pieces: the same for a candidate and for its shorter versions.

    Segments are known by their length, chunks (of which all stay) by their number; on the CPU a few segments too. On a
    card, versions of nearly the same length have more in common than others: a second coordinate.
    """
    many = np.asarray(knobs.recompute) & np.greater(knobs.segments, 1 if cuda else FEW)
    length = np.where(many, piece_of(spec, knobs), -np.asarray(knobs.segments))
    pieces = np.where(np.greater(knobs.segments, 1), length, 0)
    bits = [np.asarray(knobs.recompute), np.asarray(knobs.offload), np.asarray(knobs.keep) == "host"]
    number = np.asarray(knobs.microbatch, dtype=np.int64) * (1 << 31) + pieces
    for bit in bits:
        number = 2 * number + bit
    number = np.atleast_1d(number).astype(float)
    return np.stack([number, np.full_like(number, np.log2(spec.steps) * NEARBY if cuda else 0.0)], axis=1)
