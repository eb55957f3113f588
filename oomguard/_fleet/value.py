"""Fleet: which card each job runs on, with its knobs, its margin and its cost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from oomguard._fleet.pack import Packed, pack
from oomguard._fleet.pairs import NEVER_BYTES, Floats, Ints, Pairs
from oomguard._fleet.read import FleetCard, Job
from oomguard._spec.candidate import Candidate

if TYPE_CHECKING:
    from pandas import DataFrame


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A job on a card that it fits."""

    card: str
    price: float  # of an hour of that card
    candidate: Candidate
    peak_bytes: int
    margin_bytes: int
    host_bytes: int  # of the host's memory, beside the process itself
    seconds_per_step: float | None  # None unless records of such a card tell
    measured: bool  # whether this very candidate was timed at full length; otherwise records of others predict it
    seconds_per_epoch: float | None  # None too if the number of sequences is not known
    cost_per_epoch: float | None


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """Where a job runs."""

    name: str
    fits: tuple[str, ...]  # the cards that it fits
    cheapest: Option | None
    by: str  # what the cheapest is chosen by: `cost` of a step if it is known on all these cards, otherwise `price`
    fastest: Option | None  # None if nothing was timed
    timed: int  # on how many of these cards the time of a step is known
    needed_bytes: int  # what the job needs on its cheapest card; if it fits none, the least that any card needs
    advice: tuple[str, ...]  # what would make it fit


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Jobs on cards, by arithmetic and by records. `oomguard.fleet` makes it."""

    jobs: Sequence[Job]
    cards: Sequence[FleetCard]
    pairs: Pairs = field(repr=False)
    batches: Ints = field(repr=False)  # sequences of a step of each job
    sequences: Ints = field(repr=False)  # sequences of an epoch of each job; 0 if that is not known
    advice: dict[int, tuple[str, ...]] = field(repr=False)  # for some of the jobs that fit no card

    @property
    def fits(self) -> bool:
        """Whether every job fits some card."""
        return bool(self.pairs.fits.any(axis=1).all())

    @cached_property
    def _prices(self) -> Floats:
        return np.array([card.price for card in self.cards])

    @cached_property
    def by_cost(self) -> Any:
        """For each job, whether the time of a step is known on all cards that it fits, so that costs compare."""
        known = ~np.isnan(self.pairs.seconds) | ~self.pairs.fits
        return known.all(axis=1) & self.pairs.fits.any(axis=1)

    @cached_property
    def cheapest(self) -> Ints:
        """The number of the cheapest card for each job, of equals the smallest; -1 if it fits none."""
        seconds = np.where(self.by_cost[:, None], self.pairs.seconds, 1.0)
        return self._least(self._prices * np.where(self.pairs.fits, seconds, 1.0))

    @cached_property
    def fastest(self) -> Ints:
        """The number of the fastest card for each job, of those that are timed; -1 if none is."""
        return self._least(np.where(np.isnan(self.pairs.seconds), np.inf, self.pairs.seconds))

    def _least(self, values: Floats) -> Ints:
        order = np.argsort([card.card.usable_bytes for card in self.cards], kind="stable")
        masked = np.where(self.pairs.fits, values, np.inf)[:, order]
        return np.where(np.isfinite(masked).any(axis=1), order[masked.argmin(axis=1)], -1)

    @cached_property
    def packed(self) -> tuple[Packed, ...]:
        """The cards that the jobs fill if each runs on its cheapest kind and small ones share one: first fit, the
        largest first.
        """
        return tuple(
            pack(card, np.flatnonzero(self.cheapest == number), self.pairs.needed_bytes[:, number])
            for number, card in enumerate(self.cards)
        )

    def result(self, job: int) -> JobResult:
        """Where a job runs."""
        fits, needed = self.pairs.fits[job], self.pairs.needed_bytes[job]
        cheapest, fastest = int(self.cheapest[job]), int(self.fastest[job])
        known = needed[(needed > 0) & (needed < NEVER_BYTES)]
        return JobResult(
            name=self.jobs[job].name,
            fits=tuple(card.name for card, fit in zip(self.cards, fits.tolist(), strict=True) if fit),
            cheapest=None if cheapest < 0 else self.option(job, cheapest),
            by="cost" if self.by_cost[job] else "price",
            fastest=None if fastest < 0 else self.option(job, fastest),
            timed=int((fits & ~np.isnan(self.pairs.seconds[job])).sum()),
            needed_bytes=int(needed[cheapest] if cheapest >= 0 else known.min() if known.size else 0),
            advice=self.advice.get(job, ()),
        )

    def results(self) -> Iterator[JobResult]:
        """Where every job runs."""
        return map(self.result, range(len(self.jobs)))

    def option(self, job: int, card: int) -> Option:
        """A job on a card that it fits."""
        pairs, price = self.pairs, self.cards[card].price
        seconds = None if np.isnan(pairs.seconds[job, card]) else float(pairs.seconds[job, card])
        epoch = None
        if seconds is not None and self.sequences[job]:
            epoch = seconds * float(self.sequences[job] / self.batches[job])
        return Option(
            card=self.cards[card].name,
            price=price,
            candidate=pairs.candidate(job, card, int(self.batches[job])),
            peak_bytes=int(pairs.peak_bytes[job, card]),
            margin_bytes=int(pairs.margin_bytes[job, card]),
            host_bytes=int(pairs.host_bytes[job, card]),
            seconds_per_step=seconds,
            measured=bool(pairs.measured[job, card]),
            seconds_per_epoch=epoch,
            cost_per_epoch=None if epoch is None else epoch / 3600 * price,
        )

    def table(self) -> "DataFrame":
        """All pairs of a job and a card: a row each, with the choices in the column `choice`."""
        from oomguard._fleet.table import table_of

        return table_of(self)

    def to_dict(self) -> dict[str, Any]:
        """The fleet as its JSON has it: the jobs, the cards, and how jobs share them."""
        cards = [
            {"name": card.name, "count": card.count, "price": card.price, "usable_bytes": card.card.usable_bytes}
            for card in self.cards
        ]
        packed = [one.to_dict([job.name for job in self.jobs]) for one in self.packed]
        jobs = [msgspec.to_builtins(result) for result in self.results()]
        return {"fits": self.fits, "jobs": jobs, "cards": cards, "packed": packed}
