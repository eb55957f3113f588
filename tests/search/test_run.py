"""Whole searches: how they end, what they leave behind, and what they do when memory, time or patience runs out."""

import _thread
import itertools
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from optuna.trial import TrialState
from search.machine import TITLE, Machine, make_problem, without_time
from search.rig import Rig, make_search

import oomguard
from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB, MIB
from oomguard._plan.value import Plan
from oomguard._probe.cache import Cache
from oomguard._probe.record import Ledger
from oomguard._probe.runner import Runner
from oomguard._probe.verdict import Verdict
from oomguard._search.propose import CHILD_SECONDS, choose
from oomguard._search.run import Progress, count_ooms, probing_seconds
from oomguard._search.screen import screen
from oomguard._search.study import TrialStore, storage_in
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec

LSTM = Spec(cell="lstm", seq=10_000)
FIXED: dict[str, Any] = {"threads": 2, "allocator": "tight", "recompute": True}
"""A small space is enough here."""
PROBLEM = make_problem(LSTM, 700 * MIB, fixed=FIXED)
ROOMY = make_problem(LSTM, 20 * GIB, fixed={"threads": 2})
ASKED: dict[str, Any] = {"spec": LSTM, "budget": 700 * MIB, **FIXED}
SLOW = Machine(ratio=1.04, effects={"all": 0.3, "threads": -0.4})


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(machine=SLOW).install(monkeypatch)


def states(trials: TrialStore) -> set[TrialState]:
    return {one.state for one in trials.study.trials}


def at(number: int, act: Callable[[], Any]) -> Callable[[int], None]:
    """Do something before the probe of that number."""
    return lambda now: act() if now == number else None


def interrupt() -> None:
    raise KeyboardInterrupt


# on this machine


@pytest.fixture(scope="module", name="real")
def _real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Plan]:
    """A search with real probes, in a ledger."""
    directory = tmp_path_factory.mktemp("real")
    asked: dict[str, Any] = {
        "cell": "gru",
        "seq": 60,
        "hidden": 16,
        "batch": 4,
        "threads": 1,
        "max_probes": 3,
        "allocator": "tight",
    }
    asked |= {"ledger": str(directory), "budget": GIB}
    return directory, asked, oomguard.find_feasible_config(**asked)


def test_a_real_search_ends_with_a_plan_and_nothing_runs_out(real: tuple[Path, dict[str, Any], Plan]) -> None:
    plan = real[2]
    assert plan.ooms == 0
    assert plan.record is not None
    assert plan.record.verdict is Verdict.FITS
    assert 0 < plan.peak_bytes <= GIB
    assert 1 <= plan.probes <= 3


def test_the_ledger_of_a_real_search_has_every_record(real: tuple[Path, dict[str, Any], Plan]) -> None:
    directory, _, plan = real
    assert Ledger(directory / "records.jsonl").read() == [*plan.records]


def test_a_real_search_that_is_asked_again_runs_nothing_and_says_the_same(
    real: tuple[Path, dict[str, Any], Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, asked, plan = real

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a probe was run")

    monkeypatch.setattr(Runner, "probe", refuse)
    again = oomguard.find_feasible_config(**asked)
    assert (again.candidate, again.record, again.records) == (plan.candidate, plan.record, plan.records)


# a search and its books


def test_a_search_ends_when_more_probes_would_change_nothing(rig: Rig) -> None:
    found = make_search(PROBLEM).run(["cpu"])
    assert found.ended == "done"
    assert [*found.records] == rig.records
    assert count_ooms(found.records) == 0
    assert choose(screen(found.problem, found.records)) is not None


def test_every_probe_is_in_the_ledger_and_in_the_study(rig: Rig, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "records.jsonl")
    search = make_search(PROBLEM, ledger=ledger)
    search.run(["cpu"])
    assert ledger.read() == rig.records == search.trials.records()
    assert states(search.trials) == {TrialState.COMPLETE}


def test_a_record_is_on_the_disk_before_the_next_probe_begins(rig: Rig, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "records.jsonl")
    seen: list[int] = []
    rig.before = lambda number: seen.append(len(ledger.read()))
    make_search(PROBLEM, ledger=ledger).run(["cpu"])
    assert seen == [*range(len(rig.records))]


def test_a_search_in_the_same_study_runs_nothing_anew(rig: Rig) -> None:
    trials = TrialStore("a", PROBLEM)
    first = make_search(PROBLEM, trials=trials).run(["cpu"])
    again = make_search(PROBLEM, trials=trials).run(["cpu"])
    assert again.records == first.records
    assert len(rig.records) == len(first.records)


def test_a_search_that_was_cut_off_goes_on_as_if_it_had_not_been(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oomguard.find_feasible_config(**ASKED, ledger=str(tmp_path), max_probes=2)
    plan = oomguard.find_feasible_config(**ASKED, ledger=str(tmp_path))
    whole = Rig(machine=SLOW).install(monkeypatch)
    oomguard.find_feasible_config(**ASKED)
    assert [without_time(one) for one in plan.records] == [without_time(one) for one in whole.records]


def test_a_slower_clock_changes_no_probe(rig: Rig) -> None:
    undisturbed = make_search(PROBLEM).run(["cpu"])
    rig.before = lambda number: time.sleep(0.2)
    found = make_search(PROBLEM).run(["cpu"])
    assert [*map(without_time, found.records)] == [*map(without_time, undisturbed.records)]


def test_probes_that_ran_at_the_same_time_count_once() -> None:
    first = SLOW.run(LSTM, Candidate(microbatch=32), GIB)
    starts = {0: 5.0, 3: 4.0, 4: 1.0, 20: 2.0}  # the second of the start, and how long it lasted
    records = [
        msgspec.structs.replace(first, started=f"2026-01-01T00:00:{start:02}.000+00:00", seconds=lasted)
        for start, lasted in starts.items()
    ]
    assert probing_seconds(records[::-1]) == pytest.approx(7 + 2)
    assert probing_seconds([]) == 0


def test_the_seconds_of_the_probes_of_the_search_that_it_continues_count(rig: Rig) -> None:
    trials = TrialStore("a", PROBLEM)
    make_search(PROBLEM, trials=trials, max_probes=2).run(["cpu"])
    found = make_search(PROBLEM, trials=trials, seconds=CHILD_SECONDS + 1).run(["cpu"])  # the probes took a second
    assert (found.ended, len(rig.records)) == ("timeout", 2)


def test_the_children_are_ended(rig: Rig) -> None:
    make_search(PROBLEM).run(["cpu"])
    assert {*rig.closed} == {"cpu"}


# limits


@pytest.mark.parametrize("most", [1, 2, 4])
def test_no_more_probes_are_run_than_allowed_and_there_is_a_plan(rig: Rig, most: int) -> None:
    found = make_search(PROBLEM, max_probes=most).run(["cpu"])
    assert found.ended == "max-probes"
    assert len(found.records) == most
    assert choose(screen(found.problem, found.records)) is not None


def test_the_probes_of_the_search_that_it_continues_count(rig: Rig) -> None:
    trials = TrialStore("a", PROBLEM)
    for most in (2, 3):
        make_search(PROBLEM, trials=trials, max_probes=most).run(["cpu"])
    assert len(rig.records) == 3


def test_the_probes_of_other_searches_in_the_ledger_do_not_count(rig: Rig, tmp_path: Path) -> None:
    asked = {**ASKED, "ledger": str(tmp_path), "max_probes": 2}
    oomguard.find_feasible_config(**asked)
    plan = oomguard.find_feasible_config(**asked | {"spec": Spec(cell="lstm", seq=4000)})
    assert len(rig.records) == 4
    assert len(plan.records) == 4  # it learns from all


def test_a_search_without_time_ends_with_a_plan_all_the_same(rig: Rig) -> None:
    plan = oomguard.find_feasible_config(**ASKED, timeout=0.5)
    assert (plan.ended, plan.probes, plan.record) == ("timeout", 0, None)


def test_a_search_ends_with_its_time(rig: Rig) -> None:
    rig.before = lambda number: time.sleep(0.15)
    found = make_search(PROBLEM, seconds=CHILD_SECONDS + 0.2).run(["cpu"])
    assert found.ended == "timeout"
    assert 1 <= len(found.records) <= 2
    assert found.seconds < 2


def test_no_probe_may_take_longer_than_the_search(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    probe = rig.runner("cpu").__class__.probe

    def note(self: Any, *words: Any, timeout: float, **more: Any) -> Any:
        waits.append(timeout)
        return probe(self, *words, **more)

    monkeypatch.setattr("search.rig.FakeRunner.probe", note)
    make_search(PROBLEM, seconds=30).run(["cpu"])
    assert waits
    assert max(waits) <= 30


# interruptions


@pytest.mark.parametrize("number", [0, 1, 3])
def test_an_interrupted_search_has_what_it_found_and_leaves_nothing_running(rig: Rig, number: int) -> None:
    rig.before = at(number, interrupt)
    search = make_search(PROBLEM)
    found = search.run(["cpu"])
    assert found.ended == "interrupted"
    assert len(found.records) == number
    assert TrialState.RUNNING not in states(search.trials)
    assert {*rig.closed} == {"cpu"}


def test_an_interrupted_search_gives_the_best_plan_so_far(rig: Rig) -> None:
    rig.before = at(2, interrupt)
    plan = oomguard.find_feasible_config(**ASKED)
    assert (plan.ended, plan.probes) == ("interrupted", 2)


def test_an_interrupt_while_progress_is_shown_leaves_nothing_running(rig: Rig) -> None:
    def show(progress: Progress) -> None:
        if progress.running and progress.probes == 1:
            raise KeyboardInterrupt

    search = make_search(PROBLEM, progress=show)
    found = search.run(["cpu"])
    assert found.ended == "interrupted"
    assert len(found.records) == 1
    assert TrialState.RUNNING not in states(search.trials)


def test_a_search_that_was_interrupted_can_be_continued(rig: Rig) -> None:
    rig.before = at(2, interrupt)
    trials = TrialStore("a", PROBLEM)
    make_search(PROBLEM, trials=trials).run(["cpu"])
    found = make_search(PROBLEM, trials=trials).run(["cpu"])
    assert found.ended == "done"
    assert len({(one.spec, one.candidate) for one in found.records}) == len(found.records)


# memory


def test_if_less_is_free_in_the_middle_the_plan_is_for_what_is_left(rig: Rig) -> None:
    rig.before = at(1, lambda: setattr(rig, "free_bytes", 600 * MIB))
    found = make_search(make_problem(LSTM, 4 * GIB, fixed=FIXED)).run(["cpu"])
    assert found.problem.budget_bytes == 600 * MIB
    assert {one.verdict for one in found.records} == {Verdict.FITS}
    assert all(one.budget_bytes <= 600 * MIB for one in found.records[2:])
    view = screen(found.problem, found.records)
    row = choose(view)
    assert row is not None
    assert SLOW.peak_bytes(LSTM, view.candidates[row]) <= 600 * MIB


def test_what_comes_free_later_is_not_taken(rig: Rig) -> None:
    rig.free_bytes = 700 * MIB
    rig.before = at(2, lambda: setattr(rig, "free_bytes", 60 * GIB))
    found = make_search(PROBLEM).run(["cpu"])
    assert found.problem.budget_bytes == 700 * MIB


def test_a_machine_that_needs_more_than_the_estimates_costs_no_crash(rig: Rig) -> None:
    rig.machine = Machine(ratio=1.15)
    found = make_search(PROBLEM).run(["cpu"])
    assert count_ooms(found.records) == 0


# several devices


def test_two_devices_search_together_and_run_nothing_twice(rig: Rig) -> None:
    rig.before = lambda number: time.sleep(0.02)
    search = make_search(ROOMY)
    found = search.run(["cpu", "other"])
    assert found.ended == "done"
    assert {one.device for one in found.records} == {"cpu", "other"}
    assert len({(one.spec, one.candidate) for one in found.records}) == len(found.records)
    assert TrialState.RUNNING not in states(search.trials)


def test_two_devices_find_what_one_finds(rig: Rig) -> None:
    problem, chosen = PROBLEM, []
    for devices in (["cpu"], ["cpu", "other"]):
        view = screen(problem, make_search(problem).run(devices).records)
        row = choose(view)
        assert row is not None
        chosen.append(SLOW.pass_seconds(LSTM, view.candidates[row]) / view.candidates[row].microbatch)
    assert chosen[1] == pytest.approx(chosen[0], rel=0.1)


def test_an_interrupt_ends_all_devices(rig: Rig) -> None:
    rig.before = at(3, _thread.interrupt_main)
    search = make_search(ROOMY)
    found = search.run(["cpu", "other"])
    assert found.ended == "interrupted"
    assert TrialState.RUNNING not in states(search.trials)


def test_a_worker_that_fails_ends_the_search_soon_and_says_why(rig: Rig) -> None:
    def fail() -> None:
        raise RuntimeError("the disk is full")

    rig.before = at(1, fail)
    search = make_search(ROOMY, seconds=100)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="the disk is full"):
        search.run(["cpu", "other"])
    assert time.monotonic() - began < 2
    assert TrialState.RUNNING not in states(search.trials)


def test_the_same_device_twice_is_refused(rig: Rig) -> None:
    with pytest.raises(MisuseError, match=r"must be different ones of one kind, but got cpu \(a machine of formulas\)"):
        oomguard.find_feasible_config(LSTM, device="cpu,cpu")


# progress


def test_progress_is_told_before_and_after_every_probe(rig: Rig) -> None:
    told: list[Progress] = []
    make_search(PROBLEM, progress=told.append).run(["cpu"])
    count = len(rig.records)
    assert [(one.probes, len(one.running)) for one in told] == [
        pair for number in range(count) for pair in ((number, 1), (number + 1, 0))
    ]


def test_progress_has_the_best_so_far_and_what_is_left(rig: Rig) -> None:
    told: list[Progress] = []
    make_search(PROBLEM, progress=told.append, seconds=90).run(["cpu"])
    assert told[0].best is None
    assert told[-1].best == max(rig.records, key=lambda one: one.tokens_per_second or 0)
    assert all(a.seconds_left >= b.seconds_left > 80 for a, b in itertools.pairwise(told))
    assert {one.budget_bytes for one in told} == {700 * MIB}


# other people's records


def test_records_of_another_kind_of_device_in_the_study_count_nothing(rig: Rig) -> None:
    trials = TrialStore("a", PROBLEM)
    make_search(PROBLEM, trials=trials, max_probes=2).run(["cpu"])
    search = make_search(PROBLEM, trials=trials, max_probes=2, cache=Cache(None, f"not {TITLE}"))
    found = search.run(["cpu"])
    assert [*found.records] == rig.records[2:]


# a storage that fails


def hide(storage: str, *, hidden: bool) -> None:
    """Take a table of the storage away, or bring it back, so that the database itself refuses every request."""
    names = ("values_kept", "trial_values")
    old, new = names[::-1] if hidden else names
    with closing(sqlite3.connect(storage.removeprefix("sqlite:///"))) as database:
        database.execute(f"ALTER TABLE {old} RENAME TO {new}")


def test_a_storage_that_fails_ends_the_search_at_its_time_with_what_was_measured(tmp_path: Path, rig: Rig) -> None:
    storage, ledger = storage_in(tmp_path), Ledger(tmp_path / "records.jsonl")
    rig.before = at(0, lambda: hide(storage, hidden=True))
    search = make_search(PROBLEM, storage, ledger=ledger, seconds=CHILD_SECONDS + 1)
    with pytest.warns(UserWarning, match="The storage does not answer"):
        found = search.run(["cpu"])
    assert found.ended == "storage"
    assert [*found.records] == ledger.read() == rig.records
    assert len(rig.records) == 1


def test_a_storage_that_comes_back_loses_nothing(tmp_path: Path, rig: Rig) -> None:
    storage, undisturbed = storage_in(tmp_path), make_search(PROBLEM).run(["cpu"])
    rig.begun = 0
    back = threading.Timer(0.3, lambda: hide(storage, hidden=False))

    def fail_for_a_while() -> None:
        hide(storage, hidden=True)
        back.start()

    rig.before = at(2, fail_for_a_while)
    search = make_search(PROBLEM, storage)
    with pytest.warns(UserWarning, match="The storage does not answer"):
        found = search.run(["cpu"])
    back.join()
    assert found.ended == "done"
    assert [*map(without_time, found.records)] == [*map(without_time, undisturbed.records)]
    assert TrialState.RUNNING not in states(search.trials)


# other samplers


@pytest.mark.parametrize("name", ["gp", "tpe", "random"])
def test_one_of_optunas_samplers_explores_what_fits_and_the_best_is_confirmed(rig: Rig, name: str) -> None:
    search = make_search(PROBLEM, sampler=name, max_probes=6)
    found = search.run(["cpu"])
    assert {one.verdict for one in found.records} == {Verdict.FITS}
    assert 3 <= len(found.records) <= 6
    assert max(one.spec.steps for one in found.records) > LSTM.steps // 4
    first = screen(PROBLEM, [])
    best = choose(first)
    assert best is not None
    assert found.records[0].candidate.microbatch == first.candidates[best].microbatch
    assert TrialState.RUNNING not in states(search.trials)


def test_a_sampler_that_does_not_exist_is_a_misuse() -> None:
    with pytest.raises(MisuseError, match="sampler"):
        oomguard.find_feasible_config(LSTM, sampler="grid")
