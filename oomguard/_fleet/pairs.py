"""Pairs: what is known of each pair of a job and a card, as arrays."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oomguard._spec.candidate import KNOBS, Candidate

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

NEVER_BYTES = 1 << 60  # from here on, what a candidate "needs" says that no candidate runs, whatever the memory
SHAPE = ("microbatch", "segments", "levels", "recompute", "window")
"""The knobs that differ between candidates of one setting. A window of 0 stands for None."""


class Pairs:
    """Arrays with a row for each job and a column for each card."""

    def __init__(self, jobs: int, cards: int) -> None:
        shape = jobs, cards
        self.fits: Mask = np.zeros(shape, dtype=bool)
        self.peak_bytes, self.margin_bytes, self.host_bytes = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        self.least_bytes: Ints = np.zeros(shape, dtype=np.int64)  # what the smallest candidate needs; 0 if not known
        self.seconds: Floats = np.full(shape, np.nan)  # of a step, where records tell; NaN elsewhere
        self.measured: Mask = np.zeros(shape, dtype=bool)  # whether this very candidate was timed at full length
        self.guess: Floats = np.full(shape, np.inf)  # of a step: orders the candidates of a pair, and nothing else
        self._shape = np.zeros((len(SHAPE), *shape), dtype=np.int64)
        self._setting: Ints = np.full(shape, -1)
        self._settings: list[dict[str, Any]] = []
        self._own: dict[tuple[int, int], Candidate] = {}

    @property
    def needed_bytes(self) -> Ints:
        """Peak and margin of the chosen candidate; where none fits, the least that any needs."""
        return np.where(self.fits, self.peak_bytes + self.margin_bytes, self.least_bytes)

    def candidate(self, job: int, card: int, batch: int) -> Candidate:
        """The chosen candidate of a pair that fits, for a batch of that size."""
        if (own := self._own.get((job, card))) is not None:
            return own
        knobs: dict[str, Any] = dict(zip(SHAPE, self._shape[:, job, card].tolist(), strict=True))
        knobs |= {"recompute": bool(knobs["recompute"]), "window": knobs["window"] or None}
        setting = self._settings[self._setting[job, card]]
        return Candidate(**setting | knobs, accumulation=-(-batch // knobs["microbatch"]))

    def column(self, name: str) -> Ints:
        """The microbatch, or another number, of the chosen candidates."""
        return np.asarray(self._shape[SHAPE.index(name)])

    def setting_column(self, name: str) -> list[list[Any]]:
        """The precision, or another setting, of the chosen candidates; None where nothing fits."""
        values = [setting.get(name, KNOBS[name].field.default) for setting in self._settings]
        table = [[None if one < 0 else values[one] for one in row] for row in self._setting.tolist()]
        for (job, card), own in self._own.items():
            table[job][card] = getattr(own, name)
        return table

    def number_of(self, setting: dict[str, Any]) -> int:
        """The number of a setting."""
        if setting not in self._settings:
            self._settings.append(setting)
        return self._settings.index(setting)

    def set(self, jobs: Ints, card: int, setting: dict[str, Any], columns: dict[str, Ints]) -> None:
        """Take candidates of a setting for some jobs on a card; the columns have a value for each job."""
        place, shape = (jobs, card), dict(columns)
        for name, column in zip(SHAPE, self._shape, strict=True):
            column[place] = shape.pop(name)
        for name, values in shape.items():
            getattr(self, name)[place] = values
        self.fits[place], self._setting[place] = True, self.number_of(setting)

    def copy_rows(self, sources: Ints) -> None:
        """Give each job the row of another one that asks for the same, or its own."""
        for name in ("fits", "peak_bytes", "margin_bytes", "host_bytes", "least_bytes", "seconds", "measured"):
            setattr(self, name, getattr(self, name)[sources])
        self._shape, self._setting = self._shape[:, sources], self._setting[sources]
        own, self._own = self._own, {}
        for job, source in enumerate(sources.tolist()) if own else ():
            cards = range(self.fits.shape[1])
            self._own |= {(job, card): own[source, card] for card in cards if (source, card) in own}

    def put(self, job: int, card: int, candidate: Candidate | None, **figures: Any) -> None:
        """Note what records or a trace tell of one pair; without a candidate, that nothing fits."""
        self.fits[job, card] = candidate is not None
        for name, value in figures.items():
            getattr(self, name)[job, card] = value
        if candidate is not None:
            self._own[job, card] = candidate
            for name, column in zip(SHAPE, self._shape, strict=True):
                column[job, card] = getattr(candidate, name) or 0
