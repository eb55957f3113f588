"""Trackers with the real packages, offline: what a training writes appears in them, once, also after a resume.

Nothing may reach the network: requests would go to a proxy that counts them. No process may outlive a training.
"""

import importlib
import json
import os
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from plans import plan_of, saved

import oomguard
from oomguard._cli.app import run as command
from oomguard._core.errors import MisuseError
from oomguard._guard.events import Event, Events
from oomguard._train import TrainOptions
from oomguard._train.metrics import Metrics
from oomguard._train.settings import RunSettings, write_settings
from oomguard._train.trackers import Trackers, check_trackers, open_commands, read_state
from oomguard._train.tracking import _Reader

torch.set_num_threads(1)
ROOT = str(Path(__file__).parents[2])
pytestmark = pytest.mark.timeout(300)  # MLflow makes its database in some ten seconds, and more beside other tests


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is sent over HTTP by this process and those that it starts."""
    found = list[str]()
    server = socket.create_server(("127.0.0.1", 0))

    def count() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            found.append(connection.recv(200).decode(errors="replace"))
            connection.close()

    threading.Thread(target=count, daemon=True).start()
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{server.getsockname()[1]}")
    yield found
    server.close()


def processes(run: Path) -> list[str]:
    """Processes of trackers: those of ours for this run, and services of wandb that they have started."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        words = " ".join(process.info["cmdline"] or [])
        if "tracking import serve" in words and str(run) in words:
            found.append(words[-80:])
        elif "wandb-core" in words and str(run) in (process.info["environ"] or {}).get("OOMGUARD_TEST_RUN", ""):
            found.append(words)
    return found


def gone(run: Path, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while processes(run) and time.monotonic() < end:
        time.sleep(0.2)
    return not processes(run)


def mlflow_run(run: Path) -> Any:
    from mlflow.tracking import MlflowClient

    with warnings.catch_warnings(action="ignore"):  # MLflow uses what SQLAlchemy calls old
        client = MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("oomguard")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    return client, found


def wandb_records(run: Path) -> list[dict[str, Any]]:
    """The rows of the histories in all offline folders of a run."""
    wandb_internal_pb2: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")

    rows = []
    for file in sorted(run.glob("wandb/offline-run-*/run-*.wandb")):
        content, place = file.read_bytes(), 7  # after the header come records: checksum, length, type, content
        assert len(content) < 1 << 15, "records of larger files are split"
        while place < len(content):
            _, length, kind = struct.unpack_from("<IHB", content, place)
            assert kind == 1
            record = wandb_internal_pb2.Record.FromString(content[place + 7 : place + 7 + length])
            place += 7 + length
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return rows


def test_a_training_and_its_resume_are_one_run_in_each_tracker(
    tmp_path: Path, requests: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "a run"
    monkeypatch.setenv("OOMGUARD_TEST_RUN", str(run))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    oomguard.save_plan(plan_of(), tmp_path / "plan.json")
    words = ["--data", saved(tmp_path / "data.npy"), "--validation", "0.2", "--steps", "3", "--run", str(run)]
    with warnings.catch_warnings(action="ignore"):
        assert command(["train", str(tmp_path / "plan.json"), *words, "--log", "mlflow,wandb,tensorboard"]) == 0
        out = capsys.readouterr().out
        assert command(["resume", str(run), "--steps", "5", "--quiet"]) == 0
    state = read_state(run)
    assert f"mlflow ui --backend-store-uri 'sqlite:///{run}/mlflow.db'" in out
    assert f"wandb sync '{run}/wandb'/offline-run-*-{state['wandb'].id}" in out
    assert f"tensorboard --logdir '{run}'" in out
    assert gone(run)
    assert not (run / "trackers.log").exists()
    assert requests == []
    rows = (run / "metrics.csv").read_text().splitlines()[1:]
    losses = {int(row.split(",")[0]): float(row.split(",")[1]) for row in rows}
    assert [*losses] == [1, 2, 3, 4, 5]
    check_mlflow(run, losses)
    check_wandb(run, losses)
    check_tensorboard(run, losses)


def check_mlflow(run: Path, losses: dict[int, float]) -> None:
    client, found = mlflow_run(run)
    history = client.get_metric_history(found.info.run_id, "loss")
    assert {metric.step: metric.value for metric in history} == losses
    assert len(history) == len(losses), "no step is there twice"
    assert found.data.metrics.keys() >= {"loss", "lr", "peak_bytes", "rung", "validation_loss", "tokens_per_second"}
    assert found.data.metrics["rung"] == 0
    assert found.data.params.items() >= {"model": "gru", "hidden": "5", "microbatch": "8", "asked_steps": "3"}.items()
    assert int(found.data.params["planned_peak_bytes"]) > 0
    assert found.info.status == "FINISHED"
    assert found.data.tags["ended"] == "done"
    assert "Step 3, resume: The run was resumed" in found.data.tags["last event"]
    assert found.data.tags["mlflow.note.content"].startswith("Plan for gru")
    assert {file.path for file in client.list_artifacts(found.info.run_id)} == {"plan.json", "events.jsonl"}


def check_wandb(run: Path, losses: dict[int, float]) -> None:
    folders = [*run.glob("wandb/offline-run-*")]
    assert len(folders) == 2
    assert {folder.name.rsplit("-", 1)[1] for folder in folders} == {read_state(run)["wandb"].id}
    rows = [row for row in wandb_records(run) if "loss" in row]
    assert any(row.get("peak_bytes", 0) > 0 for row in wandb_records(run))
    assert {row["_step"]: row["loss"] for row in rows} == losses
    assert len(rows) == len(losses)
    assert all((folder / "files" / "plan.json").exists() for folder in folders)
    assert any("events" in row or any(key.startswith("events") for key in row) for row in wandb_records(run))


def check_tensorboard(run: Path, losses: dict[int, float]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run), size_guidance={"tensors": 0, "scalars": 0})
    found.Reload()
    assert {event.step: pytest.approx(event.value) for event in found.Scalars("loss")} == losses
    assert [event.value for event in found.Scalars("rung")] == [0.0] * 5
    assert found.Scalars("peak_bytes")[-1].value > 0
    assert {"plan/text_summary", "events/text_summary"} <= {*found.Tags()["tensors"]}


def test_the_training_of_a_task_is_tracked_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("OOMGUARD_TEST_RUN", str(run))
    task = oomguard.Task(
        model=lambda: torch.nn.GRU(3, 4),
        loss=lambda model, batch: model(batch)[0].square().mean(),
        batch=lambda rows, steps: torch.randn(steps, rows, 3),
    )
    plan = oomguard.find_feasible_config(
        task, batch=4, steps=5, threads=1, max_probes=1, timeout="5min", progress=False
    )
    with warnings.catch_warnings(action="ignore"):
        result = oomguard.train(plan, task, steps=2, run=str(run), log="wandb", progress=False)
        oomguard.train(plan, task, steps=3, run=str(run), resume=True, progress=False)
    assert result.log == ("wandb",)
    assert [row["_step"] for row in wandb_records(run) if "loss" in row] == [1, 2, 3]
    assert len({folder.name.rsplit("-", 1)[1] for folder in run.glob("wandb/offline-run-*")}) == 1
    assert gone(run)


# ---- the process of the trackers, on a directory as a training writes it


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    run = tmp_path / "run"
    monkeypatch.setenv("OOMGUARD_TEST_RUN", str(run))
    oomguard.save_plan(plan_of(), run / "plan.json")
    write_settings(run, RunSettings())
    return run


def test_a_training_that_is_killed_leaves_no_process_and_what_it_wrote_is_shown(begun: Path) -> None:
    code = f"""
import sys, time
sys.path.insert(0, {ROOT!r})
from pathlib import Path
from oomguard._train.metrics import Metrics
from oomguard._train.trackers import Trackers
run = Path({str(begun)!r})
with Trackers(run, ["wandb"]):
    metrics = Metrics(run)
    for step in range(1, 4):
        metrics.write(step, loss=1 / step)
    print("ready", flush=True)
    time.sleep(1000)
"""
    training = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert training.stdout is not None
    assert training.stdout.readline() == "ready\n"
    assert processes(begun)
    os.kill(training.pid, signal.SIGKILL)
    training.wait()
    training.stdout.close()
    assert gone(begun)
    assert [row["_step"] for row in wandb_records(begun) if "loss" in row] == [1, 2, 3]
    assert read_state(begun)["wandb"].step == 3


def test_a_tracker_that_fails_is_told_at_the_end_and_disturbs_nothing(begun: Path) -> None:
    with sqlite3.connect(begun / "mlflow.db") as database:  # as a later release of MLflow may write it
        database.execute("CREATE TABLE alembic_version AS SELECT 'later' AS version_num")
    database.close()
    trackers = Trackers(begun, ["mlflow"])
    trackers.__enter__()
    Metrics(begun).write(1, loss=1.0)
    trackers.ended = "done"
    with pytest.warns(UserWarning, match=r"MLflow may lack the end of the training \(mlflow: "):
        trackers.__exit__(None, None, None)
    assert (begun / "trackers.log").exists()
    assert gone(begun)


def test_a_tracker_that_hangs_is_ended(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oomguard._train.trackers.SECONDS", 0.01)
    began = time.monotonic()
    with pytest.warns(UserWarning, match="may lack the end"), Trackers(begun, ["wandb"]):
        pass
    assert time.monotonic() - began < 30
    assert gone(begun)


def test_the_rung_of_a_row_is_that_of_its_step(tmp_path: Path) -> None:
    """As the guard writes it: memory ran out in step 3, was tight after step 4, and the training climbed after 6."""
    metrics, events = Metrics(tmp_path), Events(tmp_path / "events.jsonl")
    changes = {2: ("oom", 1), 4: ("tight", 2), 6: ("climb", 1)}
    for step in range(1, 9):
        if step == 3:
            events.append(2, "oom", "x", rung=1)
        metrics.write(step, loss=0.5)
        if step in (4, 6):
            events.append(step, changes[step][0], "x", rung=changes[step][1])
    reader = _Reader(tmp_path)
    assert [row["rung"] for _, row in reader.rows()] == [0, 0, 1, 1, 2, 2, 1, 1]
    assert [event.kind for event in reader.events] == ["oom", "tight", "climb"]
    events.append(5, "resume", "x", rung=0)  # after a kill, steps 6 to 8 are made again
    Metrics(tmp_path, 5).write(6, loss=0.5)


def test_rows_are_read_once_and_half_a_line_waits(tmp_path: Path) -> None:
    reader, file = _Reader(tmp_path), tmp_path / "metrics.csv"
    assert reader.rows() == []
    Metrics(tmp_path).write(1, loss=0.5, norm=float("nan"))
    ((step, row),) = reader.rows()
    assert (step, row["loss"], row["rung"]) == (1, 0.5, 0.0)
    assert row["norm"] != row["norm"]
    with file.open("a") as half:
        half.write("2,0.25,,")
    assert reader.rows() == []
    with file.open("a") as rest:
        rest.write(",,,,\n")
    assert [step for step, _ in reader.rows()] == [2]


def test_a_listener_hears_of_events(tmp_path: Path) -> None:
    events, heard = Events(tmp_path / "events.jsonl"), list[Event]()
    events.listener = heard.append
    events.append(1, "oom", "Memory ran out.")
    assert heard == events.read()


def test_the_process_of_the_trackers_does_without_pytorch() -> None:
    code = f"import sys; sys.path.insert(0, {ROOT!r}); import oomguard._train.tracking; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "mlflow", "wandb"} & {*done.stdout.split()}


# ---- options


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ()),
        ({"log": "mlflow"}, ("mlflow",)),
        ({"log": ["wandb", "mlflow", "wandb"]}, ("wandb", "mlflow")),
        ({"log": "none"}, ()),
        ({"tensorboard": True}, ("tensorboard",)),
        ({"tensorboard": True, "log": ("tensorboard", "mlflow")}, ("tensorboard", "mlflow")),
    ],
    ids=str,
)
def test_trackers_are_named_one_or_several(given: dict[str, Any], expected: tuple[str, ...]) -> None:
    options = TrainOptions(**given)
    assert options.trackers == expected
    assert msgspec.json.decode(msgspec.json.encode(options), type=TrainOptions) == options


@pytest.mark.parametrize("value", ["mlfow", ["mlflow", "none"], 3])
def test_other_trackers_are_refused(value: Any) -> None:
    with pytest.raises(MisuseError, match="--log takes mlflow, wandb, tensorboard, or none"):
        TrainOptions(log=value)


@pytest.mark.parametrize("name", ["mlflow", "wandb", "tensorboard"])
def test_a_tracker_whose_package_is_missing_names_the_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: None if asked == name else find(asked))
    oomguard.save_plan(plan_of(), tmp_path / "plan.json")
    words = ["--data", saved(tmp_path / "d.npy"), "--run", str(tmp_path / "run"), "--log", name, "--quiet"]
    assert command(["train", str(tmp_path / "plan.json"), *words]) == 2
    assert f'pip install "oomguard[{name}]"' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_folder_that_wandb_writes_is_not_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(MisuseError, match="needs the package wandb"):
        check_trackers(["wandb"])


def test_the_database_of_a_user_takes_several_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///all.db")
    assert [*open_commands(tmp_path, ["mlflow"])] == [("MLflow", "mlflow ui --backend-store-uri sqlite:///all.db")]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://tracker.example")  # nothing is sent
    assert "mlflow.db" in next(iter(open_commands(tmp_path, ["mlflow"])))[1]
