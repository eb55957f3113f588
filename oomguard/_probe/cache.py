"""The cache keeps records for later searches. It can be deleted at any time.

Cached records only steer a search: every plan rests on records of its own search.
"""

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path

from oomguard._core.errors import MisuseError
from oomguard._probe.record import Ledger, Record, torch_version
from oomguard._spec.spec import Spec

STORED = re.compile(r"[0-9a-f]{16}-(rnn|lstm|gru)-.+\.jsonl")  # name of a file of the cache
MOST_RECORDS = 40  # records that are read of each file of the cache: the last ones


class Cache:
    """The cached records of one device. With `directory` None nothing is kept."""

    def __init__(self, directory: Path | None, title: str) -> None:
        self.directory, self.title = directory, title

    def read(self, spec: Spec) -> list[Record]:
        """The records of earlier searches with this cell on this device, with this torch."""
        if self.directory is None:
            return []
        records: list[Record] = []
        with suppress(OSError):
            for path in sorted(self.directory.glob(f"{self._stem(spec.cell)}-*.jsonl")):
                with suppress(OSError, MisuseError):  # a file of another user, perhaps
                    records += Ledger(path).read()[-MOST_RECORDS:]
        return [record for record in records if record.torch == torch_version()]

    def add(self, record: Record) -> None:
        """Keep a record that measured a step. A cache that cannot be written does not end a search."""
        if self.directory is None or not record.steps:
            return
        try:
            Ledger(self._path(record)).append(record)
        except (OSError, MisuseError):
            self.directory = None

    def drop(self, record: Record) -> None:
        """Delete the stale file that a record belongs to."""
        with suppress(OSError):
            if self.directory is not None:
                self._path(record).unlink()

    def _stem(self, cell: str) -> str:
        return hashlib.sha256(f"{self.title} {torch_version()} {cell}".encode()).hexdigest()[:16]

    def _path(self, record: Record) -> Path:
        assert self.directory is not None
        library = (record.library or "unknown").replace(" ", "-").lower()
        kind = f"{record.engine}-{record.candidate.precision}-{library}"
        return self.directory / f"{self._stem(record.spec.cell)}-{record.spec.cell}-{kind}.jsonl"


def user_directory() -> Path | None:
    """The directory of the cache; None if OOMGUARD_CACHE is empty, which turns the cache off."""
    own, base = os.environ.get("OOMGUARD_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own is not None:
        return Path(own) if own else None
    try:
        return (Path(base) if base else Path.home() / ".cache") / "oomguard" / "calibrations"
    except RuntimeError:  # there is no home
        return None
