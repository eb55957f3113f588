"""The margin: the bytes added to an estimate because estimates err."""

from typing import Any

import numpy as np

from oomguard.candidate import Candidate, Candidates
from oomguard.estimate.call import Count
from oomguard.estimate.malloc import setting_of
from oomguard.estimate.place import Place
from oomguard.spec import Spec

MARGIN_PERCENT = {"steady": 10, "pooled": 30, "roomy": 110, "plain": 80, "cuda": 15}
"""Of the growth over the runtime, by what errs: the C heap with fixed thresholds or with moving ones (rows of the
benchmark, run again: 16 in `pooled` peaked at 0.96 to 1.19 of the estimate, 18 of oneDNN in `roomy` at 0.99 to 2.0, 24
in `plain` at up to 1.78), cuDNN's workspace (assumed)."""
SCATTERED_PERCENT = 35
"""The same with fixed thresholds, where the heap falls to pieces (two such rows of the benchmark, vanilla RNNs, peaked
at 1.17 and 1.33 of the estimate; a GRU with blocks of 1 KiB at 1.13, and at 1.21 of what shorter sequences had led to
expect)."""
SMALL_BLOCK_BYTES = 4096
"""A page: what is smaller shares it with others."""


def scattered(spec: Spec, knobs: Candidate | Candidates) -> Any:
    """Where the heap falls to pieces: a vanilla RNN or a GRU in segments, whose steps keep small blocks.

    What one segment frees has holes, and the next one, which needs as much, does not fit into them.

    >>> spec = Spec(cell="rnn", seq=10_000, hidden=64)
    >>> [bool(scattered(spec, Candidate(microbatch=8, segments=pieces))) for pieces in (1, 2)]
    [False, True]
    """
    small = np.less(4 * spec.hidden * np.asarray(knobs.microbatch), SMALL_BLOCK_BYTES)
    return small & np.greater(knobs.segments, 1) & (spec.cell != "lstm")


def margin_bytes(spec: Spec, growth_bytes: Count, candidate: Candidate, place: Place) -> Count:
    """What to add to an estimate that no record has calibrated: about the 95th percentile of its error.

    Calibration by the records of this machine replaces it.

    >>> from oomguard.estimate.place import CPU
    >>> spec = Spec(cell="lstm", seq=1000)
    >>> [margin_bytes(spec, 1000, Candidate(microbatch=1, allocator=one), CPU) for one in ("steady", "pooled", "roomy")]
    [100, 300, 1100]
    """
    kind = "cuda" if place.cuda else setting_of(candidate.allocator)
    percent: Any = MARGIN_PERCENT[kind]
    if kind in ("steady", "pooled") and spec.cell != "lstm":
        percent = np.where(scattered(spec, candidate), SCATTERED_PERCENT, percent)
        percent = percent if percent.ndim else int(percent)
    return -(-growth_bytes // 100) * percent  # divided first: the largest specs fill most of an int64
