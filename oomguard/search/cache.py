"""Calibrations of earlier searches, kept for this user: the records of each device, library, cell, engine, precision.

A cache can be deleted at any time. What it holds only steers a search: every plan rests on records of its own.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from oomguard.calibrate import Calibration, same_model
from oomguard.errors import MisuseError
from oomguard.estimate.breakdown import estimate_step
from oomguard.estimate.place import Place
from oomguard.probe.ledger import Ledger
from oomguard.probe.record import Record, torch_version
from oomguard.spec import Spec

MOST_RECORDS = 40
"""Of one kind, the last so many are read."""
STALE_TIMES = 3.0
"""A time that is off by this factor is not noise."""


class Cache:
    """The records of one device. `directory` None: nothing is kept."""

    def __init__(self, directory: Path | None, title: str) -> None:
        self.directory, self.title = directory, title

    def read(self, spec: Spec) -> list[Record]:
        """What earlier searches measured of this cell here, with this torch."""
        if self.directory is None:
            return []
        found: list[Record] = []
        try:
            paths = sorted(self.directory.glob(f"{self._stem(spec.cell)}-*.jsonl"))
        except OSError:
            paths = []
        for path in paths:
            try:
                found += Ledger(path).read()[-MOST_RECORDS:]
            except (OSError, MisuseError):  # of another user, perhaps: then without it
                continue
        return [one for one in found if one.torch == torch_version()]

    def add(self, record: Record) -> None:
        """Keep a record, if it tells something. That it cannot be kept is no reason to end a search."""
        if self.directory is None or not record.steps:
            return
        try:
            Ledger(self._path(record)).append(record)
        except (OSError, MisuseError):
            self.directory = None

    def drop(self, record: Record) -> None:
        """Forget what is kept of a record's kind: it is stale."""
        if self.directory is not None:
            with suppress(OSError):
                self._path(record).unlink(missing_ok=True)

    def _stem(self, cell: str) -> str:
        return hashlib.sha256(f"{self.title} {torch_version()} {cell}".encode()).hexdigest()[:16]

    def _path(self, record: Record) -> Path:
        assert self.directory is not None
        library = (record.library or "unknown").replace(" ", "-").lower()
        kind = f"{record.engine}-{record.candidate.precision}-{library}"
        return self.directory / f"{self._stem(record.spec.cell)}-{record.spec.cell}-{kind}.jsonl"


def user_directory() -> Path | None:
    """Where calibrations are kept; None if OOMGUARD_CACHE is empty, which turns it off."""
    own = os.environ.get("OOMGUARD_CACHE")
    if own is not None:
        return Path(own) if own else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "oomguard" / "calibrations"
    except RuntimeError:  # there is no home
        return None


def current(cached: Iterable[Record], record: Record) -> list[Record]:
    """Of cached records, those that were measured with the library of a new one; the rest are of another."""
    return [one for one in cached if one.library == record.library or one.engine != record.engine]


def is_stale(cached: Sequence[Record], record: Record, place: Place) -> bool:
    """Whether a new record contradicts what was kept of its model: it peaks over the margin, or takes thrice the time.

    Only records of the very model are asked: the margin of others is wide by design.
    """
    own = [one for one in cached if same_model(one.spec, record.spec) and one.engine == record.engine]
    if not own or not record.steps or record.peak_bytes is None or record.seconds_per_pass is None:
        return False
    calibration = Calibration(record.spec, own, place)
    expected = calibration.predict(estimate_step(record.spec, record.candidate, place))
    passes = record.spec.batch / record.candidate.microbatch
    seconds = (expected.seconds_per_step - calibration.update_seconds) / passes
    off = record.seconds_per_pass / seconds
    return record.peak_bytes > expected.safe_bytes or not 1 / STALE_TIMES < off < STALE_TIMES
