"""The memory model: which part of a peak records correct, and how the corrections of candidates resemble each other."""

import math
from functools import cache

import numpy as np

from oomguard._estimate.margins import spread
from oomguard._predict.fit import FAR, Floats, Term, matrix
from oomguard._predict.speed import Knobs
from oomguard._spec.spec import Spec

MODEL, PIECES, CHUNKS, REST, ROWS, STEPS = range(6)  # coordinates of a candidate


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


def places(spec: Spec, knobs: Knobs, rest: Floats, model: float = 0.0) -> Floats:
    """Coordinates of each candidate. Its shorter versions differ in their rest and their steps alone."""
    pieces = np.greater(knobs.segments, 1)
    chunks = pieces & np.logical_not(knobs.recompute)
    sizes = np.log2(rest), np.log2(knobs.microbatch), np.log2(spec.steps)
    return matrix([FAR * model, FAR * pieces, FAR * chunks, *sizes])
