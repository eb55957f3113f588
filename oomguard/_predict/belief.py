"""Which measured peaks to believe: one far below its estimate only if it was measured again, and agreed.

A child that ended early, or that ran other kernels than it was asked for, shows such a peak.
"""

import math
from collections.abc import Sequence
from itertools import combinations

from oomguard._estimate.breakdown import estimate_step, is_fragile, split
from oomguard._estimate.margins import OFFSET_BYTES, is_low
from oomguard._estimate.target import Target
from oomguard._predict.calibration import Calibration, kind_of
from oomguard._probe.record import Record


def doubted(records: Sequence[Record], target: Target) -> list[Record]:
    """The records whose peaks are not believed.

    If two runs of a probe agree on a low peak, the estimates of its kind are too high, and all its records count.
    """
    low = [record for record in records if _is_low(record, target)]
    known = {kind_of(one) for one, other in combinations(low, 2) if _agree(one, other, target)}
    return [record for record in low if kind_of(record) not in known]


def believed(records: Sequence[Record], target: Target) -> tuple[Record, ...]:
    """The records without those whose peaks are not believed."""
    doubts = {id(record) for record in doubted(records, target)}
    return tuple(record for record in records if id(record) not in doubts)


def _is_low(record: Record, target: Target) -> bool:
    """Whether the peak of a record is far below its estimate, by the quantile of stored errors."""
    if not record.verdict.ran or record.terms is None:
        return False
    estimate = estimate_step(record.spec, record.candidate, target)
    measured = record.terms["rest"] + record.terms["gradients"]
    error = math.log((max(0, measured) + OFFSET_BYTES) / (float(split(estimate)[1][0]) + OFFSET_BYTES))
    device = "cuda" if target.cuda else "cpu"
    return is_low(error, device, *kind_of(record), bool(is_fragile(record.spec, estimate)))


def _agree(one: Record, other: Record, target: Target) -> bool:
    """Whether two records are of the same probe, and their peaks are as close as those of repeated runs."""
    if (one.spec, one.candidate) != (other.spec, other.candidate):
        return False
    lower, higher = sorted((one, other), key=lambda record: record.peak_bytes or 0)
    return (higher.peak_bytes or 0) <= Calibration(lower.spec, (), target).repeated_bytes(lower)
