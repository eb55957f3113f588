"""Packing: several small jobs on one card, first fit, the largest first."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from oomguard._fleet.pairs import Ints
from oomguard._fleet.read import FleetCard


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The jobs of one kind of card, put together so that peaks and margins fit."""

    card: FleetCard
    bins: tuple[tuple[int, ...], ...]  # the numbers of the jobs on each card
    used_bytes: tuple[int, ...]  # peaks and margins of all jobs on each card

    @property
    def enough(self) -> bool:
        """Whether there are as many cards as the jobs fill at once."""
        return len(self.bins) <= self.card.count

    def to_dict(self, names: list[str]) -> dict[str, Any]:
        """As JSON has it, with the names of the jobs."""
        bins = zip(self.bins, self.used_bytes, strict=True)
        filled = [{"jobs": [names[job] for job in jobs], "used_bytes": used} for jobs, used in bins]
        return {"card": self.card.name, "count": self.card.count, "enough": self.enough, "filled": filled}


def pack(card: FleetCard, jobs: Ints, needed_bytes: Ints) -> Packed:
    """Put each job, the largest first, on the first card that has room for it. `needed_bytes` is of every job."""
    order = jobs[np.argsort(-needed_bytes[jobs], kind="stable")]
    room, used, bins = card.card.usable_bytes, np.zeros(max(1, len(jobs)), dtype=np.int64), list[list[int]]()
    for job, needed in zip(order.tolist(), needed_bytes[order].tolist(), strict=True):
        first = int(np.argmax(used[: len(bins) + 1] + needed <= room))
        if first == len(bins):
            bins.append([])
        bins[first].append(job)
        used[first] += needed
    return Packed(card=card, bins=tuple(map(tuple, bins)), used_bytes=tuple(used[: len(bins)].tolist()))
