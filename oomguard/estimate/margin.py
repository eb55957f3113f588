"""The margin: the bytes added to an estimate because estimates err."""

from oomguard.candidate import Candidate
from oomguard.estimate.call import Count
from oomguard.estimate.place import Place

MARGIN_PERCENT = {"steady": 10, "plain": 80, "cuda": 15}
"""Of the growth over the runtime, by what errs: the C heap with fixed thresholds or with moving ones (24 of the
benchmark's rows, run again without the setting, peaked at up to 1.78 of the estimate), cuDNN's workspace (assumed)."""


def margin_bytes(growth_bytes: Count, candidate: Candidate, place: Place) -> Count:
    """What to add to an estimate that no record has calibrated: about the 95th percentile of its error.

    Calibration by the records of this machine replaces it.

    >>> from oomguard.estimate.place import CPU
    >>> [margin_bytes(1000, Candidate(microbatch=1, allocator=one), CPU) for one in ("steady", "plain")]
    [100, 800]
    """
    kind = "cuda" if place.cuda else "plain" if candidate.allocator == "plain" else "steady"
    return -(-growth_bytes // 100) * MARGIN_PERCENT[kind]  # divided first: the largest specs fill most of an int64
