"""The search as an Optuna study: what a trial holds, who sees it, and what becomes of it if its process is gone."""

import ast
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from optuna.trial import TrialState
from search.machine import Machine, make_problem
from strategies import attempt, has_three_beats

import oomguard
from oomguard.candidate import Candidate, make_candidate
from oomguard.errors import MisuseError
from oomguard.probe.record import Record
from oomguard.probe.verdict import Verdict
from oomguard.search.approach import Known
from oomguard.search.loop import GRACE_SECONDS, Book, storage_in
from oomguard.search.problem import Probe
from oomguard.search.propose import propose
from oomguard.spec import Spec
from oomguard.units import GIB

GRU = Spec(cell="gru", seq=400, hidden=64, batch=16)


def make_probe(**knobs: Any) -> Probe:
    short = msgspec.structs.replace(GRU, seq=100)
    candidate = make_candidate(short, **{"threads": 2, "microbatch": 4} | knobs)
    return Probe(spec=short, candidate=candidate, role="explore", passes=2, peak_bytes=1, seconds_per_pass=0.1)


def run(probe: Probe, budget_bytes: int = GIB) -> Record:
    return Machine().probe(probe, budget_bytes)


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return storage_in(tmp_path)


# trials


def test_a_probe_is_a_trial_with_its_knobs_and_its_length() -> None:
    book, probe = Book("a", ("throughput",)), make_probe(segments=5, allocator="plain")
    book.end(book.begin(probe, 10), GRU, run(probe))
    (trial,) = book.study.trials
    knobs = {name: value for name, value in msgspec.structs.asdict(probe.candidate).items() if value is not None}
    left_out = {"accumulation", "workers", "prefetch"}
    assert trial.params == {name: knobs[name] for name in knobs.keys() - left_out} | {"seq": 100}


def test_a_trial_is_worth_sequences_of_the_asked_length_per_second() -> None:
    book, probe = Book("a", ("throughput",)), make_probe()
    record = run(probe)
    book.end(book.begin(probe, 10), GRU, record)
    (trial,) = book.study.trials
    assert record.seconds_per_step is not None
    assert trial.state is TrialState.COMPLETE
    assert trial.values == [pytest.approx(16 / record.seconds_per_step / 4)]


def test_every_aim_has_its_value_and_its_name() -> None:
    book, probe = Book("a", ("microbatch", "seq")), make_probe()
    book.end(book.begin(probe, 10), GRU, run(probe))
    assert book.study.trials[0].values == [4.0, 100.0]
    assert book.study.metric_names == ["microbatch", "seq"]
    assert len(book.study.best_trials) == 1


@pytest.mark.parametrize(("budget_bytes", "verdict"), [(GIB, Verdict.FITS), (1000, Verdict.OVER)])
def test_the_constraint_is_what_the_peak_exceeds_the_budget_by(budget_bytes: int, verdict: Verdict) -> None:
    book, probe = Book("a", ("throughput",)), make_probe()
    record = msgspec.structs.replace(run(probe), budget_bytes=budget_bytes, verdict=verdict)
    book.end(book.begin(probe, 10), GRU, record)
    assert record.peak_bytes is not None
    assert book.study.trials[0].constraints == {"excess_bytes": float(record.peak_bytes - budget_bytes)}


def test_the_record_is_read_back_as_it_was() -> None:
    book, probe = Book("a", ("throughput",)), make_probe()
    record = run(probe)
    book.end(book.begin(probe, 10), GRU, record)
    assert book.records() == [record]
    assert book.study.trials[0].user_attrs["verdict"] == "FITS"


def test_what_measured_nothing_is_a_failed_trial_with_its_record() -> None:
    book, probe = Book("a", ("throughput",)), make_probe()
    record = run(probe, 1)
    book.end(book.begin(probe, 10), GRU, record)
    assert record.verdict is Verdict.OOM
    assert book.study.trials[0].state is TrialState.FAIL
    assert book.records() == [record]


def test_a_probe_is_pending_until_it_ends() -> None:
    book, probe = Book("a", ("throughput",)), make_probe()
    trial = book.begin(probe, 10)
    assert book.pending() == [probe]
    book.end(trial, GRU, run(probe))
    assert book.pending() == []


def test_a_probe_that_was_interrupted_failed_and_has_no_record() -> None:
    book = Book("a", ("throughput",))
    book.drop(book.begin(make_probe(), 10))
    assert [one.state for one in book.study.trials] == [TrialState.FAIL]
    assert (book.pending(), book.records()) == ([], [])


def test_every_candidate_of_a_space_can_be_a_trial() -> None:
    book = Book("a", ("throughput",))
    for knobs in (
        {"microbatch": 16, "segments": 100},
        {"microbatch": 1, "window": 7, "precision": "fp16"},
        {"segments": 8, "recompute": False, "keep": "host", "offload": True, "update": "loop"},
        {"segments": 8, "levels": 3, "engine": "native", "state_8bit": True, "threads": None},
    ):
        book.begin(make_probe(**knobs), 10)
    assert [trial.params["microbatch"] for trial in book.study.trials] == [16, 1, 4, 4]


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
    book = Book("a", ("throughput",))
    book.end(book.begin(probe, 10), spec, run(probe))
    assert book.study.trials[0].params["seq"] == 1


def test_the_first_value_that_is_noted_stays(storage: str) -> None:
    assert Book("a", ("throughput",), storage).note("budget_bytes", 5) == 5
    assert Book("a", ("throughput",), storage).note("budget_bytes", 7) == 5


# a storage


@pytest.mark.parametrize(
    "url",
    ["nosuch://me:s3cret@nowhere/study", "nosuch://me:s3c@ret@nowhere/study", "nosuch://nowhere/a?password=s3cret"],
)
def test_a_storage_that_cannot_be_opened_is_told_without_its_password(url: str) -> None:
    with pytest.raises(MisuseError, match=r"nosuch://.*nowhere") as caught:
        Book("a", ("throughput",), url)
    assert "s3c" not in str(caught.value)


def test_two_workers_see_each_others_records_and_probes(storage: str) -> None:
    here, there = (Book("a", ("throughput",), storage) for _ in range(2))
    first, second = make_probe(), make_probe(microbatch=8)
    record = run(first)
    here.end(here.begin(first, 10), GRU, record)
    here.begin(second, 10)
    assert there.records() == [record]
    assert there.pending() == [second]


def test_two_questions_in_one_storage_do_not_meet(storage: str) -> None:
    one, other = (Book(name, ("throughput",), storage) for name in ("one", "other"))
    one.begin(make_probe(), 10)
    assert other.pending() == []


def test_what_a_worker_does_next_takes_in_what_the_other_is_doing(storage: str) -> None:
    problem = make_problem(Spec(cell="lstm", seq=10_000), 20 * GIB)
    here, there = (Book("a", ("throughput",), storage) for _ in range(2))
    first = propose(Known(problem=problem, records=[]))
    assert first is not None
    here.end(here.begin(first, 10), problem.spec, run(first, problem.budget_bytes))
    second = propose(Known(problem=problem, records=here.records(), pending=here.pending()))
    assert second is not None
    here.begin(second, 10)
    third = propose(Known(problem=problem, records=there.records(), pending=there.pending()))
    assert third is None or not third.is_of(second)


BEGIN = """
import os, sys, msgspec
from oomguard.search.loop import Book
from oomguard.search.problem import Probe
Book("a", ("throughput",), sys.argv[1]).begin(msgspec.json.decode(sys.argv[2], type=Probe), 1e6)
os._exit(9)
"""


def test_a_trial_of_a_process_that_was_killed_has_failed_when_the_study_is_opened_again(storage: str) -> None:
    words = [sys.executable, "-c", BEGIN, storage, msgspec.json.encode(make_probe()).decode()]
    assert subprocess.run(words, check=False, timeout=60).returncode == 9
    book = Book("a", ("throughput",), storage)
    assert [trial.state for trial in book.study.trials] == [TrialState.FAIL]
    assert book.pending() == []


def test_a_trial_of_a_process_that_lives_is_left(storage: str) -> None:
    Book("a", ("throughput",), storage).begin(make_probe(), -1e6)
    assert Book("a", ("throughput",), storage).pending() == [make_probe()]


@pytest.mark.parametrize(
    ("owner", "until", "dead"),
    [
        (f"{socket.gethostname()} {os.getpid()} 1", 1e6, True),  # another process had this number before
        (f"{socket.gethostname()} {(1 << 22) + 1} 5", 1e6, True),
        ("elsewhere 1 1", 1e6, False),
        ("elsewhere 1 1", -GRACE_SECONDS / 2, False),
        ("elsewhere 1 1", -2 * GRACE_SECONDS, True),
    ],
    ids=["number taken again", "no such process", "elsewhere", "elsewhere, a little late", "elsewhere, far too late"],
)
def test_who_has_died_and_who_may_still_live(owner: str, until: float, dead: bool) -> None:
    book = Book("a", ("throughput",))
    trial = book.begin(make_probe(), 10)
    trial.set_user_attr("owner", owner)
    trial.set_user_attr("until", time.time() + until)
    book.recover()
    assert (book.pending() == []) is dead


@pytest.mark.parametrize(
    "url", ["sqlite:////nowhere/at/all/study.db", "nonsense", "nosuchdb://host/name", "sqlite:///", ""], ids=str
)
def test_a_storage_that_cannot_be_opened_is_a_misuse(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    error = attempt(lambda: Book("a", ("throughput",), url) and None)
    if url == "sqlite:///":  # a database in memory: nobody else sees it, but it works
        assert error is None
        return
    assert isinstance(error, MisuseError)
    assert has_three_beats(error)
    assert "such as sqlite:///study.db" in error.rule


def test_a_storage_that_is_no_database_is_a_misuse(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_bytes(b"not a database" * 100)
    assert has_three_beats(attempt(lambda: Book("a", ("throughput",), storage_in(tmp_path)) and None))


# imports


def test_no_other_file_imports_optuna() -> None:
    root = Path(oomguard.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {path.relative_to(root).as_posix() for name in names if name.split(".")[0] == "optuna"}
    assert found == {"search/loop.py"}


def test_a_plan_by_arithmetic_does_not_wait_for_optuna() -> None:
    code = "import sys, oomguard; oomguard.find_feasible_config(cell='gru', seq=9, device='t4'); "
    code += "print('optuna' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "False False\n"
