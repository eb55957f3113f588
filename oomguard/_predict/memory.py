"""The memory model: which part of a peak records correct, and how the corrections of candidates resemble each other."""

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from oomguard._estimate.margins import spread
from oomguard._predict.fit import FAR, Floats, Term, matrix
from oomguard._predict.speed import Knobs, piece_of
from oomguard._spec.spec import Spec

MODEL, PIECES, CHUNKS, REST, ROWS, STEPS, PLACE = range(7)  # coordinates of a candidate


@cache
def terms(*kind: str | bool) -> tuple[Term, ...]:
    """The terms of a correction (a logarithm), by the stored rows of a kind."""
    _, level, shape, length = spread(*kind)
    return (
        Term(level / math.sqrt(2)),
        Term(level / math.sqrt(2), (MODEL,)),
        Term(shape, (MODEL, PIECES, CHUNKS, REST, ROWS)),
        Term(length, (MODEL, PIECES, CHUNKS, ROWS, STEPS)),
    )


def is_chunked(knobs: Knobs) -> NDArray[np.bool_]:
    """Where segments are not recomputed."""
    return np.asarray(np.greater(knobs.segments, 1) & np.logical_not(knobs.recompute))


def places(spec: Spec, knobs: Knobs, rest: Floats, model: float = 0.0) -> Floats:
    """Coordinates of each candidate. Its shorter versions differ in their rest and their steps alone.

    Recomputed segments are identified by their length; chunks, which all stay in memory, by their number.
    """
    pieces, chunks = np.greater(knobs.segments, 1), is_chunked(knobs)
    piece = np.where(pieces, np.where(chunks, -np.asarray(knobs.segments), piece_of(spec, knobs)), 0)
    place = np.asarray(knobs.microbatch, dtype=np.int64) * (1 << 31) + piece
    for switch in (np.asarray(knobs.offload), np.asarray(knobs.keep) == "host"):
        place = 2 * place + switch
    sizes = np.log2(rest), np.log2(knobs.microbatch), np.log2(spec.steps)
    return matrix([FAR * model, FAR * pieces, FAR * chunks, *sizes, FAR * place])
