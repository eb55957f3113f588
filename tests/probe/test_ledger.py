"""The ledger: survives torn lines, several writers, readers at any time, and kill -9."""

import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from probe.probing import TINY, one_thread

from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB
from oomguard._probe.record import Ledger, Measured, Record, Request, make_record
from oomguard._probe.verdict import Verdict

ROOT = str(Path(__file__).parents[2])
WRITE = """
import sys
sys.path.insert(0, sys.argv[1])
import msgspec
from oomguard._probe.record import Ledger, Record
record, ledger = msgspec.json.decode(sys.argv[3], type=Record), Ledger(sys.argv[2])
for number in range(int(sys.argv[4])):
    ledger.append(msgspec.structs.replace(record, message=f"{sys.argv[5]} {number} " + "x" * 20_000))
"""
"""Writes so many records of 20 kB, which is more than a page and more than a pipe's atomic write."""


def record(message: str = "It fits.") -> Record:
    request = Request(spec=TINY, candidate=one_thread(TINY), device="cpu", budget_bytes=GIB)
    measured = Measured(verdict=Verdict.FITS, message=message, peak_bytes=1 << 28, seconds_per_step=0.5, steps=1)
    return make_record(request, measured, datetime.now(UTC))


def writer(path: Path, count: int, name: str) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-c", WRITE, ROOT, str(path), msgspec.json.encode(record()).decode(), str(count), name]
    return subprocess.Popen(words)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "searches" / "of today" / "ledger.jsonl"


def test_what_was_appended_is_read_in_its_order(path: Path) -> None:
    ledger = Ledger(path)
    written = [record(f"Number {number}\nof several.") for number in range(5)]
    for entry in written:
        ledger.append(entry)
    assert Ledger(path).read() == written


def test_a_ledger_that_is_not_there_is_empty(path: Path) -> None:
    assert Ledger(path).read() == []


@pytest.mark.parametrize("kept", [1, 100, -1])
def test_a_torn_last_line_is_left_out_and_named(path: Path, kept: int) -> None:
    ledger = Ledger(path)
    ledger.append(record("whole"))
    with path.open("ab") as file:
        file.write(msgspec.json.encode(record("torn"))[:kept])
    with pytest.warns(UserWarning, match=r"ledger\.jsonl, line 2"):
        records = ledger.read()
    assert [entry.message for entry in records] == ["whole"]


def test_writing_goes_on_after_a_torn_line(path: Path) -> None:
    ledger = Ledger(path)
    ledger.append(record("first"))
    with path.open("ab") as file:
        file.write(b'{"verdict": "FI')
    ledger.append(record("third"))
    with pytest.warns(UserWarning, match=r"ledger\.jsonl, line 2"):
        records = ledger.read()
    assert [entry.message for entry in records] == ["first", "third"]


@pytest.mark.parametrize("junk", [b"\x00" * 50, b"\xff\xfe", b"{}", b'{"verdict": "MAYBE"}', b"null"])
def test_a_line_that_is_no_record_is_left_out_and_named(path: Path, junk: bytes) -> None:
    ledger = Ledger(path)
    ledger.append(record("first"))
    with path.open("ab") as file:
        file.write(junk + b"\n")
    ledger.append(record("third"))
    with pytest.warns(UserWarning, match=r"ledger\.jsonl, line 2"):
        records = ledger.read()
    assert [entry.message for entry in records] == ["first", "third"]


def test_two_writers_at_once_and_a_reader_disturb_nobody(path: Path) -> None:
    writers = [writer(path, 60, name) for name in ("first", "second")]
    seen = [0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no reading ever finds a torn line
        while any(number.poll() is None for number in writers):
            seen.append(len(Ledger(path).read()))
        words = [entry.message.split()[:2] for entry in Ledger(path).read()]
    assert [number.returncode for number in writers] == [0, 0]
    assert seen == sorted(seen)
    for name in ("first", "second"):
        assert [int(number) for by, number in words if by == name] == list(range(60))


def test_what_a_killed_writer_had_written_is_all_there(path: Path) -> None:
    killed = writer(path, 10**6, "killed")
    while len(Ledger(path).read()) < 20:
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    Ledger(path).append(record("after"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = Ledger(path).read()
    assert len(caught) <= 1  # the line that it was writing, if it was
    assert [int(entry.message.split()[1]) for entry in records[:-1]] == list(range(len(records) - 1))
    assert records[-1].message == "after"


def test_a_path_that_is_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"cannot be \(Is a directory\)"):
        Ledger(tmp_path).append(record())
    with pytest.raises(MisuseError, match=r"cannot be \(Is a directory\)"):
        Ledger(tmp_path).read()


def test_a_directory_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(MisuseError, match="cannot be"):
        Ledger("/proc/nobody/may/write/here.jsonl").append(record())


def test_a_disk_that_takes_no_more_is_told(path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(MisuseError, match="File too large"):
            Ledger(path).append(record())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
