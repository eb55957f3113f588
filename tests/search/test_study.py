"""The search as an Optuna study: what a trial holds, who sees it, and what becomes of it if its process is gone."""

import ast
import os
import sqlite3
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import Trial, TrialState
from search.machine import Machine, make_problem
from strategies import attempt, has_three_beats

import oomguard
from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB
from oomguard._probe.record import Record
from oomguard._probe.verdict import Verdict
from oomguard._search.propose import Probe, State, propose
from oomguard._search.study import STALE_SECONDS, Storage, TrialStore, _host, storage_in
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.spec import Spec

GRU = Spec(cell="gru", seq=400, hidden=64, batch=16)


def make_probe(**knobs: Any) -> Probe:
    short = msgspec.structs.replace(GRU, seq=100)
    candidate = make_candidate(short, **{"threads": 2, "microbatch": 4} | knobs)
    return Probe(spec=short, candidate=candidate, role="explore", passes=2, peak_bytes=1, seconds_per_pass=0.1)


def run(probe: Probe, budget_bytes: int = GIB) -> Record:
    return Machine().probe(probe, budget_bytes)


def store(name: str, *aims: str, storage: str | None = None, spec: Spec = GRU) -> TrialStore:
    return TrialStore(name, make_problem(spec, GIB, maximize=aims), storage)


def begin(trials: TrialStore, probe: Probe) -> Trial:
    """Begin the trial of a probe as a search does."""
    trials.sampler.decided[threading.get_ident()] = probe
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed to be used with Study.optimize")
        trial = trials.study.ask()
    trials.mark(trial, trials.sampler.suggest(trial))
    return trial


def end(trials: TrialStore, trial: Trial, record: Record) -> None:
    """End it as `study.optimize` does."""
    values = trials.sampler.report(trial, record)
    if record.verdict.ran:
        trials.study.tell(trial, values)
    else:
        trials.study.tell(trial, state=TrialState.FAIL)


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return storage_in(tmp_path)


# trials


def test_a_probe_is_a_trial_with_its_knobs_and_its_length() -> None:
    trials, probe = store("a", "throughput"), make_probe(segments=5, allocator="system")
    end(trials, begin(trials, probe), run(probe))
    (trial,) = trials.study.trials
    knobs = {name: value for name, value in msgspec.structs.asdict(probe.candidate).items() if value is not None}
    assert trial.params == knobs | {"seq": 100}


def test_a_trial_is_worth_sequences_of_the_asked_length_per_second() -> None:
    trials, probe = store("a", "throughput"), make_probe()
    record = run(probe)
    end(trials, begin(trials, probe), record)
    (trial,) = trials.study.trials
    assert record.seconds_per_step is not None
    assert trial.state is TrialState.COMPLETE
    assert trial.values == [pytest.approx(16 / record.seconds_per_step / 4)]


def test_every_aim_has_its_value_and_its_name() -> None:
    trials, probe = store("a", "microbatch", "seq"), make_probe()
    end(trials, begin(trials, probe), run(probe))
    assert trials.study.trials[0].values == [4.0, 100.0]
    assert trials.study.metric_names == ["microbatch", "seq"]
    assert len(trials.study.best_trials) == 1


@pytest.mark.parametrize(("budget_bytes", "verdict"), [(GIB, Verdict.FITS), (1000, Verdict.OVER)])
def test_the_constraint_is_what_the_peak_exceeds_the_budget_by(budget_bytes: int, verdict: Verdict) -> None:
    trials, probe = store("a", "throughput"), make_probe()
    record = msgspec.structs.replace(run(probe), budget_bytes=budget_bytes, verdict=verdict)
    end(trials, begin(trials, probe), record)
    assert record.peak_bytes is not None
    assert trials.study.trials[0].constraints == {"excess_bytes": float(record.peak_bytes - budget_bytes)}


def test_the_record_is_read_back_as_it_was() -> None:
    trials, probe = store("a", "throughput"), make_probe()
    record = run(probe)
    end(trials, begin(trials, probe), record)
    assert trials.records() == [record]
    assert trials.study.trials[0].user_attrs["verdict"] == "FITS"


def test_what_measured_nothing_is_a_failed_trial_with_its_record() -> None:
    trials, probe = store("a", "throughput"), make_probe()
    record = run(probe, 1)
    end(trials, begin(trials, probe), record)
    assert record.verdict is Verdict.OOM
    assert trials.study.trials[0].state is TrialState.FAIL
    assert trials.records() == [record]


def test_a_probe_is_pending_until_it_ends() -> None:
    trials, probe = store("a", "throughput"), make_probe()
    trial = begin(trials, probe)
    assert trials.pending() == [probe]
    end(trials, trial, run(probe))
    assert trials.pending() == []


def test_a_probe_that_was_interrupted_failed_and_has_no_record() -> None:
    trials = store("a", "throughput")
    trials.study.tell(begin(trials, make_probe()), state=TrialState.FAIL)
    assert [one.state for one in trials.study.trials] == [TrialState.FAIL]
    assert (trials.pending(), trials.records()) == ([], [])


def test_every_candidate_of_a_space_can_be_a_trial() -> None:
    trials = store("a", "throughput")
    for knobs in (
        {"microbatch": 16, "segments": 100},
        {"microbatch": 1, "window": 7, "precision": "fp16"},
        {"segments": 8, "recompute": False, "keep": "host", "offload": True, "update": "loop"},
        {"segments": 8, "levels": 3, "engine": "native", "state_8bit": True, "threads": None},
    ):
        begin(trials, make_probe(**knobs))
    assert [trial.params["microbatch"] for trial in trials.study.trials] == [16, 1, 4, 4]


def test_a_batch_of_one_can_be_a_trial() -> None:
    spec = Spec(cell="gru", seq=1, batch=1)
    probe = Probe(
        spec=spec,
        candidate=Candidate(microbatch=1),
        role="confirm",
        passes=1,
        peak_bytes=1,
        seconds_per_pass=0.1,
    )
    trials = store("a", "throughput")
    end(trials, begin(trials, probe), run(probe))
    assert trials.study.trials[0].params["seq"] == 1


def test_the_first_value_that_is_noted_stays(storage: str) -> None:
    assert store("a", "throughput", storage=storage).note("budget_bytes", 5) == 5
    assert store("a", "throughput", storage=storage).note("budget_bytes", 7) == 5


# a storage


@pytest.mark.parametrize(
    "url",
    [
        "nosuch://me:s3cret@nowhere/study",
        "nosuch://me:s3c@ret@nowhere/study",
        "nosuch://nowhere/a?password=s3cret",
    ],
)
def test_a_storage_that_cannot_be_opened_is_told_without_its_password(url: str) -> None:
    with pytest.raises(MisuseError, match=r"nosuch://.*nowhere") as caught:
        store("a", "throughput", storage=url)
    assert "s3c" not in str(caught.value)


def test_an_unquoted_sign_in_a_password_is_told_without_the_password() -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed (the extra postgresql)")
    with pytest.raises(MisuseError, match="@ is written as %40") as caught:
        store("a", "throughput", storage="postgresql://me:s3c@ret@127.0.0.1:1/x")
    assert "s3c" not in str(caught.value)
    assert "ret" not in str(caught.value)


def test_two_workers_see_each_others_records_and_probes(storage: str) -> None:
    here, there = (store("a", "throughput", storage=storage) for _ in range(2))
    first, second = make_probe(), make_probe(microbatch=8)
    record = run(first)
    end(here, begin(here, first), record)
    begin(here, second)
    assert there.records() == [record]
    assert there.pending() == [second]


def test_two_questions_in_one_storage_do_not_meet(storage: str) -> None:
    one, other = (store(name, "throughput", storage=storage) for name in ("one", "other"))
    begin(one, make_probe())
    assert other.pending() == []


def test_what_a_worker_does_next_takes_in_what_the_other_is_doing(storage: str) -> None:
    problem = make_problem(Spec(cell="lstm", seq=10_000), 20 * GIB)
    here, there = (store("a", "throughput", storage=storage) for _ in range(2))
    first = propose(State(problem=problem, records=[]))
    assert first is not None
    end(here, begin(here, first), run(first, problem.budget_bytes))
    second = propose(State(problem=problem, records=here.records(), pending=here.pending()))
    assert second is not None
    begin(here, second)
    third = propose(State(problem=problem, records=there.records(), pending=there.pending()))
    assert third is None or not third.is_of(second)


BEGIN = """
import os, sys, msgspec
from search.test_study import begin, store
from oomguard._search.propose import Probe
begin(store("a", "throughput", storage=sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Probe))
os._exit(9)
"""


def test_a_trial_of_a_process_that_was_killed_has_failed_when_the_study_is_opened_again(storage: str) -> None:
    words = [sys.executable, "-c", BEGIN, storage, msgspec.json.encode(make_probe()).decode()]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(words, check=False, timeout=60, env=paths).returncode == 9
    trials = store("a", "throughput", storage=storage)
    assert [trial.state for trial in trials.study.trials] == [TrialState.FAIL]
    assert trials.pending() == []


def test_a_trial_of_a_process_that_lives_is_left(storage: str) -> None:
    begin(store("a", "throughput", storage=storage), make_probe())
    assert store("a", "throughput", storage=storage).pending() == [make_probe()]


def test_a_trial_that_has_just_begun_is_not_taken_for_dead() -> None:
    """Another worker may look before it is marked."""
    trials = store("a", "throughput")
    trials.study.ask()
    trials.recover()
    assert [trial.state for trial in trials.study.trials] == [TrialState.RUNNING]


@pytest.mark.parametrize(
    ("owner", "dead"),
    [
        (f"{_host()} {os.getpid()} 1", True),  # another process had this number before
        (f"{_host()} {(1 << 22) + 1} 5", True),
        ("elsewhere 1 1", False),
    ],
    ids=["number taken again", "no such process", "elsewhere"],
)
def test_who_has_died_and_who_may_still_live(owner: str, dead: bool) -> None:
    trials = store("a", "throughput")
    trial = begin(trials, make_probe())
    trial.set_user_attr("owner", owner)
    trials.recover()
    assert (trials.pending() == []) is dead


@pytest.mark.parametrize(("late_seconds", "dead"), [(STALE_SECONDS - 10, False), (STALE_SECONDS + 10, True)])
def test_a_worker_elsewhere_is_dead_when_its_heartbeat_is_late(storage: str, late_seconds: int, dead: bool) -> None:
    trials = store("a", "throughput", storage=storage)
    trial = begin(trials, make_probe())
    trial.set_user_attr("owner", "elsewhere 1 1")
    Storage(storage).record_heartbeat(trial._trial_id)
    with closing(sqlite3.connect(storage.removeprefix("sqlite:///"))) as database, database:
        back = f"datetime(heartbeat, '-{late_seconds} seconds')"
        database.execute(f"UPDATE trial_heartbeats SET heartbeat = {back}")
    trials.recover()
    assert (trials.pending() == []) is dead


def test_a_record_whose_trial_another_worker_has_freed_is_kept(storage: str) -> None:
    here, there = (store("a", "throughput", storage=storage) for _ in range(2))
    probe = make_probe()
    trial, record = begin(here, probe), run(probe)
    there.study.tell(trial.number, state=TrialState.FAIL)
    values = here.report(trial, record)
    with pytest.raises(ValueError, match="Cannot tell a FAIL trial") as caught:
        here.study.tell(trial, values)  # as `study.optimize` does
    assert here.give_up(caught.value)
    assert not here.give_up(caught.value)
    assert there.records() == [record]
    assert [one.state for one in there.study.trials] == [TrialState.FAIL, TrialState.COMPLETE]


def test_a_trial_that_is_freed_before_its_probe_begins_ends_no_search(storage: str) -> None:
    here, there = (store("a", "throughput", storage=storage) for _ in range(2))
    trial = begin(here, make_probe())
    there.study.tell(trial.number, state=TrialState.FAIL)
    with pytest.raises(UpdateFinishedTrialError) as caught, here.running_trial():
        here.mark(trial, make_probe())
    assert here.give_up(caught.value)


def test_workers_that_find_the_same_dead_trial_at_once_all_go_on(storage: str) -> None:
    workers = [store("a", "throughput", storage=storage) for _ in range(4)]
    for _ in range(4):
        begin(workers[0], make_probe()).set_user_attr("owner", f"{_host()} {(1 << 22) + 1} 5")
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(worker.recover) for worker in workers]:
            future.result()
    assert {trial.state for trial in workers[0].study.trials} == {TrialState.FAIL}


def test_a_worker_sees_what_others_began_before_it(storage: str) -> None:
    here, there = (store("a", "throughput", storage=storage) for _ in range(2))
    probe = make_probe()
    first, second = begin(here, probe), begin(there, probe)
    assert here.earlier(first) == []
    assert there.earlier(second) == [probe]


@pytest.mark.parametrize(
    "url", ["sqlite:////nowhere/at/all/study.db", "nonsense", "nosuchdb://host/name", "sqlite:///", ""], ids=str
)
def test_a_storage_that_cannot_be_opened_is_a_misuse(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    error = attempt(lambda: store("a", "throughput", storage=url) and None)
    if url == "sqlite:///":  # a database in memory: nobody else sees it, but it works
        assert error is None
        return
    assert isinstance(error, MisuseError)
    assert has_three_beats(error)
    assert "such as sqlite:///study.db" in error.rule


def test_a_storage_that_is_no_database_is_a_misuse(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_bytes(b"not a database" * 100)
    assert has_three_beats(attempt(lambda: store("a", "throughput", storage=storage_in(tmp_path)) and None))


# imports


def test_only_the_search_and_the_integration_import_optuna() -> None:
    root = Path(oomguard.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {path.relative_to(root).as_posix() for name in names if name.split(".")[0] == "optuna"}
    assert found == {*(f"_search/{name}.py" for name in ("study", "sampler", "run")), "integrations/optuna.py"}


def test_a_plan_by_arithmetic_does_not_wait_for_optuna() -> None:
    code = "import sys, oomguard; oomguard.find_feasible_config(cell='gru', seq=9, device='t4'); "
    code += "print('optuna' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "False False\n"


OPEN = """
import sys
from search.test_study import store
store("a", "throughput", storage=sys.argv[1])
"""


def test_searches_that_begin_at_the_same_moment_share_a_new_storage(tmp_path: Path) -> None:
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", OPEN, storage_in(tmp_path)]
    started = [subprocess.Popen(words, env=paths, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    assert [(one.communicate(timeout=120)[1][-500:], one.returncode) for one in started] == [("", 0)] * 4


def test_a_trial_that_this_process_gave_up_has_failed(storage: str) -> None:
    trials = store("a", "throughput", storage=storage)
    begin(trials, make_probe())
    trials.recover()
    assert trials.pending() == [make_probe()]
    assert not trials.give_up(OSError())
    trials.recover()
    assert trials.pending() == []
