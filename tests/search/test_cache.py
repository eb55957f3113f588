"""Calibrations that are kept for the next search: where, of what, for whom, and until when."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from search.machine import TITLE, Machine, make_problem
from search.rig import Rig, make_search

from oomguard._core.units import GIB
from oomguard._estimate.target import CPU
from oomguard._predict.calibration import is_stale
from oomguard._probe import cache as module
from oomguard._probe.cache import MOST_RECORDS, Cache, user_directory
from oomguard._probe.record import Record
from oomguard._search.run import current
from oomguard._spec.candidate import make_candidate
from oomguard._spec.spec import Spec

LSTM = Spec(cell="lstm", seq=500, hidden=128)


def record_of(machine: Machine | None = None, spec: Spec = LSTM, **changes: Any) -> Record:
    knobs = {name: changes.pop(name) for name in ("engine", "precision", "microbatch") if name in changes}
    candidate = make_candidate(spec, **{"allocator": "tight", "threads": 1} | knobs)
    record = (machine or Machine()).run(spec, candidate, 1 << 40)
    return msgspec.structs.replace(record, **changes)


@pytest.fixture
def kept(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "calibrations", TITLE)


@contextmanager
def powerless() -> Iterator[None]:
    """For root too, what is forbidden is forbidden."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_what_is_kept_is_read_by_the_next_search(kept: Cache) -> None:
    record = record_of()
    kept.add(record)
    assert Cache(kept.directory, TITLE).read(LSTM) == [record]


def test_another_model_of_the_same_cell_sees_it_too(kept: Cache) -> None:
    kept.add(record_of())
    assert len(kept.read(Spec(cell="lstm", seq=9, hidden=7))) == 1


def test_another_device_sees_nothing(kept: Cache) -> None:
    kept.add(record_of())
    assert Cache(kept.directory, "another machine").read(LSTM) == []


def test_another_cell_sees_nothing(kept: Cache) -> None:
    kept.add(record_of())
    assert kept.read(Spec(cell="gru", seq=500)) == []


def test_another_torch_sees_nothing(kept: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.add(record_of())
    monkeypatch.setattr(module, "torch_version", lambda: "1.0")
    assert kept.read(LSTM) == []


def test_records_of_another_torch_are_passed_over(kept: Cache) -> None:
    kept.add(record_of(torch="1.0"))
    assert kept.read(LSTM) == []


def test_each_engine_precision_and_library_has_its_own_file(kept: Cache) -> None:
    records = [
        record_of(),
        record_of(engine="native"),
        record_of(precision="bf16"),
        record_of(library="formulas 2.0"),
        record_of(spec=Spec(cell="gru", seq=500)),
    ]
    for one in records:
        kept.add(one)
    assert kept.directory is not None
    assert len([*kept.directory.iterdir()]) == len(records)


def test_records_of_another_library_are_left_out_once_the_new_one_is_known() -> None:
    old, native, new = record_of(library="formulas 0.9"), record_of(engine="native"), record_of()
    assert current([old, native, new], new) == [native, new]


def test_forgetting_one_kind_leaves_the_others(kept: Cache) -> None:
    kept.add(record_of())
    kept.add(record_of(engine="native"))
    kept.drop(record_of())
    assert [one.engine for one in kept.read(LSTM)] == ["native"]


def test_what_is_not_there_can_be_forgotten(kept: Cache) -> None:
    kept.drop(record_of())
    assert kept.read(LSTM) == []


def test_of_many_records_the_last_are_read(kept: Cache) -> None:
    records = [record_of(microbatch=1 + number % 32) for number in range(MOST_RECORDS + 5)]
    for one in records:
        kept.add(one)
    assert kept.read(LSTM) == records[5:]


def test_what_measured_nothing_is_not_kept(kept: Cache) -> None:
    kept.add(Machine().run(LSTM, make_candidate(LSTM), 1))
    assert kept.read(LSTM) == []


# stale


def test_nothing_is_stale_that_nobody_has_measured_before() -> None:
    assert not is_stale([], record_of(), CPU)
    assert not is_stale([record_of(spec=Spec(cell="lstm", seq=500, hidden=64))], record_of(), CPU)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_a_time_that_is_off_by_two_is_noise(factor: float) -> None:
    record = record_of()
    assert record.seconds_per_pass is not None
    again = msgspec.structs.replace(record, seconds_per_pass=factor * record.seconds_per_pass)
    assert not is_stale([record_of(), record_of(microbatch=8)], again, CPU)


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_time_that_is_off_by_four_is_stale(factor: float) -> None:
    record = record_of()
    assert record.seconds_per_pass is not None
    again = msgspec.structs.replace(record, seconds_per_pass=factor * record.seconds_per_pass)
    assert is_stale([record_of(), record_of(microbatch=8)], again, CPU)


def test_a_peak_over_the_margin_is_stale_and_one_under_it_is_not() -> None:
    cached = [record_of(), record_of(microbatch=8)]
    assert is_stale(cached, record_of(Machine(ratio=1.4)), CPU)
    assert not is_stale(cached, record_of(Machine(ratio=0.8)), CPU)


def test_what_did_not_run_makes_nothing_stale() -> None:
    assert not is_stale([record_of()], Machine().run(LSTM, make_candidate(LSTM), 1), CPU)


@pytest.mark.parametrize("wrong", [Machine(ratio=0.5), Machine(effects={"all": -2.5})], ids=["smaller", "faster"])
def test_a_search_drops_what_its_records_contradict_and_keeps_them_instead(
    kept: Cache, wrong: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Spec(cell="gru", seq=500, hidden=128)
    for rows in (4, 8, 32):
        kept.add(record_of(wrong, spec, microbatch=rows))
    rig = Rig().install(monkeypatch)
    # of the kind that was kept: records of one allocator setting say nothing of another one's peaks
    problem = make_problem(spec, 2 * GIB, fixed={"allocator": "tight"}, cached=tuple(kept.read(spec)))
    found = make_search(problem, cache=kept).run(["cpu"])
    assert found.stale
    assert found.problem.cached == ()
    assert kept.read(spec) == rig.records


def test_a_search_that_the_cache_helps_keeps_it(kept: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(LSTM, 2 * GIB)
    Rig().install(monkeypatch)
    first = make_search(problem, cache=kept).run(["cpu"])
    again = make_search(make_problem(LSTM, 2 * GIB, cached=tuple(kept.read(LSTM))), cache=kept).run(["cpu"])
    assert not again.stale
    assert len(again.problem.cached) == len(first.records)
    assert len(again.records) <= len(first.records)


# where nothing can be kept


@pytest.fixture
def closed() -> Iterator[Path]:
    """A directory with a record that others may read and not write."""
    with tempfile.TemporaryDirectory() as name:
        Cache(Path(name), TITLE).add(record_of())
        for one in Path(name).iterdir():
            one.chmod(0o444)
        Path(name).chmod(0o555)
        yield Path(name)
        Path(name).chmod(0o700)


def test_a_directory_that_cannot_be_made_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "calibrations", TITLE)
    cache.add(record_of())
    assert cache.read(LSTM) == []


def test_a_directory_that_cannot_be_written_is_read_and_does_no_harm(closed: Path) -> None:
    cache = Cache(closed, TITLE)
    with powerless():
        assert len(cache.read(LSTM)) == 1
        cache.add(record_of(engine="native"))
        cache.add(record_of(engine="native"))


def test_stale_records_that_cannot_be_deleted_do_no_harm(closed: Path) -> None:
    cache = Cache(closed, TITLE)
    with powerless():
        cache.drop(record_of())
        assert len(cache.read(LSTM)) == 1


def test_a_directory_that_cannot_even_be_seen_does_no_harm(closed: Path) -> None:
    closed.chmod(0o000)
    with powerless():
        cache = Cache(closed / "calibrations", TITLE)
        assert cache.read(LSTM) == []
        cache.add(record_of())
        cache.drop(record_of())


def test_without_a_directory_nothing_is_kept() -> None:
    cache = Cache(None, TITLE)
    cache.add(record_of())
    cache.drop(record_of())
    assert cache.read(LSTM) == []


# where it is


def test_an_empty_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOMGUARD_CACHE", "")
    assert user_directory() is None


def test_the_users_own_directory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOMGUARD_CACHE", "/some/where")
    assert user_directory() == Path("/some/where")


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"XDG_CACHE_HOME": "/caches", "HOME": "/home/me"}, "/caches/oomguard/calibrations"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/oomguard/calibrations"),
        ({"HOME": "/home/me"}, "/home/me/.cache/oomguard/calibrations"),
    ],
)
def test_otherwise_it_is_among_the_users_caches(
    variables: dict[str, str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OOMGUARD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert user_directory() == Path(wanted)


def test_in_the_tests_it_is_off() -> None:
    assert user_directory() is None
