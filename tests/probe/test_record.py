"""Requests and records: checked at birth, through JSON and back unchanged."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe.probing import TINY, one_thread

from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB
from oomguard._probe.record import TERMS, Answer, Ledger, Measured, Record, Request, make_record
from oomguard._probe.verdict import Verdict
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec

REQUEST = Request(spec=TINY, candidate=one_thread(TINY), device="cpu", budget_bytes=GIB)
NOW = datetime.now(UTC)
FOUND: dict[str, Any] = {"peak_bytes": 1 << 28, "seconds_per_step": 0.5, "steps": 2}


@given(
    verdict=st.sampled_from(Verdict),
    message=st.text(),
    error=st.text(min_size=1),
    terms=st.none() | st.fixed_dictionaries({name: st.integers(-(1 << 60), 1 << 60) for name in TERMS}),
    seconds=st.floats(1e-9, 1e9),
)
def test_a_record_goes_through_json_and_back_unchanged(seconds: float, **given: Any) -> None:
    record = make_record(REQUEST, Measured(**given, **FOUND, seconds_per_pass=seconds), NOW)
    assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record


def test_a_histogram_of_lengths_survives_the_way_to_the_child() -> None:
    spec = Spec(cell="gru", lengths={100: 3, 20: 5})
    request = Request(spec=spec, candidate=one_thread(spec), device="cpu", budget_bytes=GIB)
    assert msgspec.json.decode(msgspec.json.encode(request), type=Request) == request


def test_a_record_knows_engine_budget_and_torch() -> None:
    record = make_record(REQUEST, Answer(verdict=Verdict.FITS, message="It fits.", **FOUND), NOW)
    assert (record.engine, record.budget_bytes, record.committed_budget_bytes) == ("native", GIB, None)
    assert record.torch is not None
    assert record.torch[0].isdigit()
    assert datetime.fromisoformat(record.started).tzinfo is not None


def test_an_engine_that_the_device_lacks_leaves_the_record_without_one() -> None:
    request = msgspec.structs.replace(REQUEST, candidate=one_thread(TINY, engine="cudnn"))
    assert make_record(request, Measured(verdict=Verdict.UNSUPPORTED, message="No."), NOW).engine is None


@pytest.mark.parametrize(
    "change",
    [
        {"seconds_per_step": 0.0},
        {"seconds_per_pass": -1.0},
        {"peak_bytes": -1},
        {"passes": 10**30},
        {"terms": dict.fromkeys(TERMS[1:], 1)},
    ],
    ids=str,
)
def test_a_line_of_a_ledger_with_a_figure_that_no_probe_has_is_skipped(tmp_path: Path, change: dict[str, Any]) -> None:
    record = make_record(REQUEST, Measured(verdict=Verdict.FITS, message="It ran.", **FOUND), NOW)
    ledger = Ledger(tmp_path / "records.jsonl")
    ledger.append(record)
    with ledger.path.open("a") as file:
        file.write(json.dumps(msgspec.to_builtins(record) | change) + "\n")
    with pytest.warns(UserWarning, match="line 2 could not be read"):
        assert ledger.read() == [record]


@pytest.mark.parametrize("missing", FOUND)
@pytest.mark.parametrize("verdict", [Verdict.FITS, Verdict.STRAINED])
def test_a_record_of_something_that_ran_has_its_figures(verdict: Verdict, missing: str) -> None:
    fields: dict[str, Any] = {name: value for name, value in FOUND.items() if name != missing}
    with pytest.raises(MisuseError, match=verdict.name):
        make_record(REQUEST, Measured(verdict=verdict, message="It ran.", **fields), NOW)


def test_a_record_of_something_broken_has_its_error() -> None:
    with pytest.raises(MisuseError, match="BROKEN"):
        make_record(REQUEST, Measured(verdict=Verdict.BROKEN, message="It broke."), NOW)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budget_bytes": 0}, "--budget must be"),
        ({"budget_bytes": None}, "--budget must be"),
        ({"budget_bytes": 1.5}, "--budget must be"),
        ({"committed_bytes": -1}, "committed bytes must be"),
        ({"seconds": 0}, "seconds to measure"),
        ({"seconds": float("nan")}, "seconds to measure"),
        ({"steps": 0}, "--steps must be"),
        ({"candidate": Candidate(microbatch=2)}, "must give the batch"),
    ],
)
def test_a_request_that_cannot_be_meant_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MisuseError, match=words):
        msgspec.structs.replace(REQUEST, **changes)
