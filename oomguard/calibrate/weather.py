"""The weather: a machine that others use too is slower at one moment than at another, by a third within a minute.

What is run again tells: if several candidates have become slower since they were first measured, it is not theirs. Only
that counts as weather, never that a candidate is slower than expected.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np

from oomguard.calibrate.speed import noise
from oomguard.probe.record import Record

WEATHER, LASTS_SECONDS = 0.2, 20.0
"""By how much it makes a machine slower or faster (a logarithm), and for how long."""
LEVEL = 2.0
"""By how much candidates differ: by so much that nothing follows from that."""


def weather(records: Sequence[Record]) -> Any:
    """What each record owes to its moment, as the logarithm of a time: around the average of them all, since only
    differences decide what is fastest. Records without times are not asked about.

    >>> weather([]).tolist()
    []
    """
    if not records:
        return np.empty(0)
    values = np.log([(one.seconds_per_pass or 0.0) / one.spec.steps / one.candidate.microbatch for one in records])
    same = _same([(one.device, one.spec, one.candidate) for one in records])
    apart = np.abs(np.subtract.outer(*[np.array([_moment(one) for one in records])] * 2))
    share = WEATHER / np.sqrt([1 + one.seconds / LASTS_SECONDS for one in records])  # a long probe sees some of each
    moments = np.outer(share, share) * np.exp(-apart / LASTS_SECONDS) * _same([one.device for one in records])
    own = LEVEL**2 * same + moments + np.diag(np.square([noise(one) for one in records]))
    found = moments @ np.linalg.solve(own, values - values.mean())
    return found - found.mean()


def _same(things: Sequence[Any]) -> Any:
    return np.array([[float(one == other) for other in things] for one in things])


def _moment(record: Record) -> float:
    """The middle of a probe, in seconds; long ago if its ledger does not say when that was."""
    try:
        return datetime.fromisoformat(record.started).timestamp() + record.seconds / 2
    except ValueError:
        return 0.0
