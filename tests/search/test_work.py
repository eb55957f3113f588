"""Workers: they join a search by what its study says, end with it, and lose nothing when they are killed."""

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
import psutil
import pytest
from optuna.trial import FrozenTrial, TrialState
from search.machine import TITLE, make_problem
from search.rig import Rig, make_search
from strategies import has_three_beats

import oomguard
from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB
from oomguard._search.run import Search
from oomguard._search.study import Storage, TrialStore, storage_in
from oomguard._search.work import shared, work
from oomguard._spec.spec import Spec

PROBLEM = make_problem(Spec(cell="lstm", seq=10_000), GIB, fixed={"threads": 2, "allocator": "tight"})
TINY = "--model gru --seq 400 --hidden 32 --batch 16 --budget 1GiB --threads 1 --allocator tight --timeout 5min"
PATIENCE_SECONDS = 200


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig().install(monkeypatch)


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return storage_in(tmp_path)


def begin(storage: str, name: str = "a study", **more: Any) -> Search:
    """A search that others can join as long as `shared` of it is open."""
    return make_search(PROBLEM, trials=TrialStore(name, PROBLEM, storage), **more)


# what a worker does


def test_a_worker_runs_what_one_process_would_have_run(rig: Rig, storage: str) -> None:
    alone = make_search(PROBLEM).run(["cpu"])
    search, count = begin(storage), len(rig.records)
    with shared(search):
        done = work(storage)
    assert (done.study, done.probes, done.ended) == ("a study", len(alone.records), "done")
    again = search.run(["cpu"])
    assert [*again.records] == rig.records[count:]
    assert [record.candidate for record in again.records] == [record.candidate for record in alone.records]


def test_a_worker_ends_when_the_search_has_ended(rig: Rig, storage: str) -> None:
    search = begin(storage)
    stack = shared(search)
    stack.__enter__()

    def end(number: int) -> None:
        if number == 1:
            stack.__exit__(None, None, None)

    rig.before = end
    assert (work(storage).ended, search.trials.ended) == ("done", "done")
    assert work(storage).ended == "done"
    assert len(rig.records) == 2


def test_a_search_that_is_interrupted_stops_its_workers(rig: Rig, storage: str) -> None:
    search = begin(storage, ended="interrupted")
    with shared(search):
        pass
    assert work(storage).ended == "stopped"


def test_several_workers_run_no_more_probes_than_one_may(rig: Rig, storage: str) -> None:
    rig.before = lambda number: time.sleep(0.05)
    with shared(begin(storage, max_probes=3)):
        threads = [threading.Thread(target=work, args=(storage,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len({(record.spec, record.candidate) for record in rig.records}) == len(rig.records) == 3


def test_records_of_another_kind_of_device_take_no_probe_away(rig: Rig, storage: str) -> None:
    search = begin(storage, max_probes=2)
    search.run(["cpu"])
    other = TrialStore("a study", PROBLEM, storage)
    for trial in other.study.trials:
        text = trial.user_attrs["record"].replace(TITLE, "another machine")
        other.study.add_trial(optuna.trial.create_trial(state=TrialState.FAIL, user_attrs={"record": text}))
    found = begin(storage, max_probes=3).run(["cpu"])
    assert len(rig.records) == len(found.records) == 3


def test_what_a_study_says_is_values_alone(rig: Rig, storage: str) -> None:
    search = begin(storage)
    with shared(search):
        text = search.trials.study.user_attrs["search"]
    assert {"problem", "max_probes", "seconds", "until", "title", "torch", "cores", "sampler"} == {*json.loads(text)}
    assert "sqlite" not in text


# which search it joins


def test_a_worker_joins_the_search_that_is_under_way(rig: Rig, storage: str) -> None:
    with shared(begin(storage, "earlier")):
        pass
    with shared(begin(storage, "now")):
        assert work(storage).study == "now"


def test_of_several_searches_a_worker_needs_the_name(rig: Rig, storage: str) -> None:
    with shared(begin(storage, "one")), shared(begin(storage, "two")):
        with pytest.raises(MisuseError, match=r"several searches.* Choose one with --study: one, two"):
            work(storage)
        assert work(storage, study="two").study == "two"
        with pytest.raises(MisuseError, match=r"no search 'onw'.* Did you mean one"):
            work(storage, study="onw")


def test_a_worker_waits_for_a_search_to_begin(rig: Rig, storage: str) -> None:
    with shared(begin(storage, "earlier")):
        pass
    done = []
    thread = threading.Thread(target=lambda: done.append(work(storage, wait=60)))
    thread.start()
    time.sleep(0.3)
    with shared(begin(storage, "now")):
        thread.join()
    assert [one.study for one in done] == ["now"]


def test_a_storage_without_a_search_is_not_made_or_changed(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="there is none in sqlite") as caught:
        work(storage_in(tmp_path))
    assert has_three_beats(caught.value)
    assert [*tmp_path.iterdir()] == []


def test_a_study_of_somebody_else_is_no_search(storage: str) -> None:
    optuna.create_study(storage=storage, study_name="theirs")
    with pytest.raises(MisuseError, match="there is none in sqlite"):
        work(storage)


def test_a_search_of_another_version_is_refused(rig: Rig, storage: str) -> None:
    search = begin(storage)
    search.trials.share('{"problem": 5}')
    with pytest.raises(MisuseError, match=r"that began the search.* Install the same") as caught:
        work(storage)
    assert has_three_beats(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("device.cpu.cpu_name", "another machine"), ("search.work.torch_version", "1.0"), ("search.work.cores", 64)],
)
def test_a_worker_of_another_kind_is_refused(
    rig: Rig, storage: str, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    with shared(begin(storage)):
        monkeypatch.setattr(f"oomguard._{name}", lambda: value)
        with pytest.raises(MisuseError, match=rf"is for {TITLE}, 2 of its processors.* this is .*{value}"):
            work(storage)
    assert rig.records == []


def test_a_missing_driver_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MisuseError) as caught:
        TrialStore("a", PROBLEM, "postgresql+psycopg://me:s3cret@localhost/x")
    assert "psycopg is not installed" in str(caught.value)
    assert "pip install 'oomguard[postgresql]'" in str(caught.value)
    assert "s3cret" not in str(caught.value)


# real processes


PASSWORD = "s3cret/w@rd"


def program(name: str) -> str:
    """A program of PostgreSQL, which Debian keeps outside of PATH."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = shutil.which(name, path=os.pathsep.join([os.environ["PATH"], *map(str, places)]))
    if found is None:
        pytest.skip(f"PostgreSQL is not installed here (there is no program {name})")
    return found


def is_root() -> bool:
    return os.getuid() == 0


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a database of a server on loopback. It does not run as root, which it refuses."""
    nobody = pwd.getpwnam("nobody")
    own: dict[str, Any] = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []} if is_root() else {}
    initdb, postgres = program("initdb"), program("postgres")
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="pg") as home:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        data, words = Path(home) / "data", Path(home) / "password"
        words.write_text(PASSWORD)
        if own:
            for path in (home, words):
                shutil.chown(path, own["user"], own["group"])
        secret = ["--auth=scram-sha-256", f"--pwfile={words}", "--username=tester", "--no-sync", "--encoding=UTF8"]
        subprocess.run([initdb, "-D", data, *secret], check=True, capture_output=True, cwd=home, **own)
        settings = [f"-p{port}", "-h127.0.0.1", f"-k{home}", "-F"]
        with subprocess.Popen(
            [postgres, "-D", str(data), *settings],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=home,
            **own,
        ) as process:
            try:
                url = f"postgresql://tester:{quote(PASSWORD, safe='')}@127.0.0.1:{port}/postgres"
                _await(lambda: _answers(url))
                yield url
            finally:
                process.send_signal(signal.SIGINT)  # a fast shutdown
                process.wait(60)


def _answers(url: str) -> bool:
    psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed (the extra postgresql)")
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


def _await(condition: Any) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)
    return value


@contextmanager
def started(home: Path, *lines: str, **names: str) -> Iterator[list["subprocess.Popen[str]"]]:
    """Commands of oomguard, each in a process of its own, in a directory."""
    processes = []
    try:
        for line in lines:
            words = [sys.executable, "-m", "oomguard", *(word.format(**names) for word in line.split())]
            pipe = subprocess.PIPE
            processes.append(subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, cwd=home))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def trials_in(url: str) -> list[FrozenTrial]:
    """The trials of the only search in a storage; none as long as there is no search."""
    with closing(Storage(url)) as storage:
        names = optuna.get_all_study_names(storage)
        return optuna.load_study(study_name=names[0], storage=storage).trials if names else []


def running_trial(url: str, pid: int) -> FrozenTrial | None:
    """The trial whose probe a process is running."""
    running = [one for one in trials_in(url) if one.state is TrialState.RUNNING]
    own = [one for one in running if f" {pid} " in one.user_attrs.get("owner", "")]
    return own[0] if own and psutil.Process(pid).children() else None


@pytest.mark.timeout(400)
def test_four_workers_of_which_two_are_killed_lose_nothing(server: str, tmp_path: Path) -> None:
    plan, join = f"plan {TINY} --max-probes 6 --storage {{url}}", "work --storage {url} --wait 2min --json"
    seen: set[str] = set()
    with started(tmp_path, plan, *[join] * 4, url=server) as (planning, *workers):
        freed = []
        for worker in workers[:2]:
            trial = _await(lambda pid=worker.pid: running_trial(server, pid))
            for process in (planning, *workers[2:], worker):
                seen |= {word for child in psutil.Process(process.pid).children() for word in child.cmdline()}
            (child,) = psutil.Process(worker.pid).children()
            worker.kill()
            freed.append(trial)
            worker.wait()
            child.wait(30)
        outputs = [one.communicate(timeout=300) for one in (planning, *workers[2:])]
        assert [one.returncode for one in (planning, *workers[2:])] == [0, 0, 0], [err[-1500:] for _, err in outputs]
    made = oomguard.load_plan(tmp_path / "plan.json")
    assert isinstance(made, oomguard.Plan)
    assert made.ooms == 0
    trials = trials_in(server)
    assert {trials[one.number].state for one in freed} == {TrialState.FAIL}
    assert not any("record" in trials[one.number].user_attrs for one in freed)
    assert TrialState.RUNNING not in {trial.state for trial in trials}
    done = [json.loads(out) for out, _ in outputs[1:]]
    assert len({one["study"] for one in done}) == 1
    assert sum(one["probes"] for one in done) < made.probes <= 6
    # one process, with those records, comes to the same plan
    again = oomguard.find_feasible_config(
        cell="gru", seq=400, hidden=32, batch=16, budget="1GiB", threads=1, allocator="tight", timeout="5min",
        max_probes=made.probes, storage=server, progress=False,
    )  # fmt: skip
    assert again.records == made.records
    assert again.candidate == made.candidate
    # the password is nowhere
    told = [*(text for both in outputs for text in both), (tmp_path / "plan.json").read_text(), *seen]
    told += [json.dumps(trial.user_attrs) for trial in trials]
    assert not [text for text in told if PASSWORD in text or quote(PASSWORD, safe="") in text]


@pytest.mark.parametrize("command", ["plan --model gru --seq 9 --threads 1", "work"])
def test_a_wrong_password_is_a_misuse_that_does_not_show_it(server: str, tmp_path: Path, command: str) -> None:
    url = server.replace(quote(PASSWORD, safe=""), "wr0ng")
    with started(tmp_path, f"{command} --storage {url}") as (process,):
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert "password authentication failed" in err
    assert "wr0ng" not in err


def test_a_worker_that_is_interrupted_says_so_and_frees_its_probe(tmp_path: Path) -> None:
    plan, join = f"plan {TINY} --storage {{url}}", "work --storage {url} --wait 1min"
    url = storage_in(tmp_path)
    with started(tmp_path, plan, join, url=url) as (planning, worker):
        trial = _await(lambda: running_trial(url, worker.pid))
        worker.send_signal(signal.SIGINT)
        out, _ = worker.communicate(timeout=60)
        assert worker.returncode == 130
        assert "this worker was interrupted" in " ".join(out.split())
        planning.send_signal(signal.SIGINT)
        planning.communicate(timeout=60)
    states = [one.state for one in trials_in(url)]
    assert states[trial.number] is TrialState.FAIL
    assert TrialState.RUNNING not in states
