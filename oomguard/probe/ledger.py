"""Ledger: all records of a search, one JSON line each, only ever appended to. It survives a kill at any moment.

A line is written whole, in one call, under a lock that all writers take. A writer killed in the middle leaves a torn
line; the next one ends it, and readers drop it with a warning.
"""

import os
from pathlib import Path

import msgspec

from oomguard.errors import MisuseError
from oomguard.files import append_line, opened, read_values
from oomguard.probe.record import Record

RECORDS = "records.jsonl"
"""The file's name in the directory that `--ledger` takes."""


class Ledger:
    """A file of records. Its directories are made; a file that is there is continued.

    >>> import oomguard, tempfile
    >>> asked = {"spec": oomguard.Spec(cell="gru", seq=20), "candidate": oomguard.Candidate(microbatch=32)}
    >>> found = {"device": "cpu", "engine": "native", "budget_bytes": 300 << 20, "started": "2026-01-31T12:00:00"}
    >>> refused = {"verdict": oomguard.Verdict.OOM, "message": "An allocation was refused.", "seconds": 1.5}
    >>> record = Record(**asked, **found, **refused)  # what a probe of `Runner` gives
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     ledger = Ledger(f"{directory}/records.jsonl")
    ...     ledger.append(record)
    ...     ledger.read() == [record]
    True
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def append(self, record: Record) -> None:
        """Write one record, and return once it is on the disk."""
        try:
            append_line(self.path, msgspec.json.encode(record))
        except OSError as error:
            raise self._misuse(error) from None

    def read(self) -> list[Record]:
        """All records, the first first. A line that cannot be read is left out, with a warning that names it."""
        try:
            return read_values(self.path, Record)
        except OSError as error:
            raise self._misuse(error) from None

    def _misuse(self, error: OSError) -> MisuseError:
        return MisuseError(
            rule="A ledger must be a file that can be read and written",
            got=f"{self.path} cannot be ({error.strerror})",
            advice="Give a directory of yours.",
        )


def open_ledger(directory: str) -> Ledger:
    """The ledger of a directory. It is made now, so that what cannot be written is known before there is something to
    lose."""
    if not directory:
        raise MisuseError(
            rule="--ledger takes a directory", got="got nothing", advice="Name one, such as --ledger runs."
        )
    ledger = Ledger(Path(directory) / RECORDS)
    try:
        ledger.path.parent.mkdir(parents=True, exist_ok=True)
        with opened(ledger.path, os.O_RDWR | os.O_APPEND | os.O_CREAT):
            return ledger
    except OSError as error:
        raise ledger._misuse(error) from None
