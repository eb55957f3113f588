"""Runs keep the options that they were trained with, and are compared by what their files say."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from plans import plan_of, saved
from task import trained

import oomguard
from oomguard._cli.app import run
from oomguard._core.errors import MisuseError
from oomguard._train.runs import read_run
from oomguard._train.settings import read_settings

pytestmark = pytest.mark.filterwarnings("ignore:The plan's peak was measured with")


@pytest.fixture(scope="module")
def task_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a task, trained in two parts."""
    plan = oomguard.find_feasible_config("task.trained:task", threads=1, max_probes=1, allow="microbatch")
    home = tmp_path_factory.mktemp("runs") / "tagger"
    oomguard.train(plan, trained.task, run=str(home), steps=2, clip=0.5, seed=3)
    oomguard.train(plan, trained.task, run=str(home), steps=4, resume=True)
    return home


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two runs of a spec."""
    monkeypatch.chdir(tmp_path)
    runs: dict[str, dict[str, Any]] = {"a": {"lr": 0.01, "epochs": 2}, "b": {"lr": 0.1, "epochs": 1, "clip": 1.0}}
    for name, options in runs.items():
        oomguard.train(plan_of(), saved(tmp_path / "data.npy"), run=f"runs/{name}", **options)
    return tmp_path


def words_of(capsys: pytest.CaptureFixture[str], line: str) -> list[list[str]]:
    assert run(line.split()) == 0
    return [printed.split() for printed in capsys.readouterr().out.splitlines()]


# ---- options


def test_a_task_keeps_its_options_and_a_resumed_run_has_them_without_being_told(task_run: Path) -> None:
    settings = read_settings(task_run)
    assert settings is not None
    assert (settings.model, settings.train.clip, settings.options.seed) == ("task.trained:task", 0.5, 3)
    assert (settings.train.steps, settings.train.run) == (4, str(task_run))


def test_show_tells_what_a_run_has_reached_and_its_options(
    home: Path, task_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["show", "runs/a"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Run runs/a Reached: steps 10, loss" in shown
    assert "--epochs 2, --lr 0.01." in shown
    assert run(["show", str(task_run)]) == 0
    assert "Options: --steps 4, --clip 0.5, --seed 3." in " ".join(capsys.readouterr().out.split())
    assert run(["show", "runs/a/plan.json"]) == 0
    assert "Reached" not in capsys.readouterr().out


# ---- comparisons


def test_only_settings_that_differ_are_shown(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = words_of(capsys, "compare runs/a runs/b")
    assert lines[:3] == [["2", "runs"], ["They", "differ", "in", "3", "settings."], ["a", "b"]]
    rows = {line[0]: line[1:] for line in lines[3:]}
    assert (rows["epochs"], rows["lr"], rows["clip"]) == (["2", "1"], ["0.01", "0.1"], ["–", "1"])
    assert rows["steps"] == ["10", "5"]
    assert "batch" not in rows
    assert words_of(capsys, "compare runs/a")[1] == ["All", "settings", "are", "the", "same."]


def test_speed_peak_and_plan_are_shown_even_if_they_are_alike(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {line[0]: line[1:] for line in words_of(capsys, "compare runs/a runs/b")[3:]}
    assert [len(rows[name]) for name in ("tokens/s", "peak")] == [2, 4]  # a size is a number and a unit
    assert (rows["microbatch"], rows["segments"], rows["precision"]) == (["8", "8"], ["1", "1"], ["fp32", "fp32"])
    assert rows["planned"][0] == "peak"


def test_even_a_run_of_one_step_keeps_its_peak(home: Path) -> None:
    result = oomguard.train(plan_of(), home / "data.npy", run="runs/short", steps=1, validation=0)
    kept_bytes = read_run("runs/short").reached["peak_bytes"]
    assert kept_bytes == pytest.approx(result.peak_bytes, rel=0.02)  # saving the run comes after it


def test_the_table_fits_60_columns_however_many_runs_there_are(
    home: Path, task_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert run(["compare", *["runs/a", "runs/b", str(task_run)] * 2]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert [line for line in lines if line.startswith("Runs")] == ["Runs 1 to 3", "Runs 4 to 6"]


def test_runs_of_specs_and_tasks_are_rows_of_one_table(home: Path, task_run: Path) -> None:
    table = oomguard.compare("runs/a", Path("runs/b"), task_run)
    assert [*table["model"]] == ["gru", "gru", "task.trained:task"]
    assert [*table["steps"]] == [10, 5, 4]
    assert [*table["lr"]][:2] == [0.01, 0.1]
    assert table["lr"][2] == pytest.approx(read_run(task_run).settings["lr"])
    assert [*table["clip"]][1:] == [1.0, 0.5]
    assert all(math.isfinite(loss) for loss in table["loss"])
    assert [*table["microbatch"]][:2] == [8, 8]


def test_as_json_every_setting_is_there(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "runs/a", "runs/b", "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["runs"]
    assert [row["run"] for row in rows] == ["runs/a", "runs/b"]
    assert rows[0].keys() == rows[1].keys() >= {"loss", "validation_loss", "peak_bytes", "segments", "lr", "seed"}


def test_the_best_validation_loss_is_the_lowest_one(home: Path) -> None:
    (home / "runs/a/metrics.csv").write_text(
        "step,loss,lr,norm,tokens_per_second,peak_bytes,epoch,validation_loss\n"
        "1,0.9,0.1,1,100,5,0,0.5\n2,0.8,0.1,1,300,9,0,nan\n3,0.7,0.1,1,200,,0,0.6\n4,0.6,0.1\n"
    )
    reached = read_run("runs/a").reached
    assert (reached["loss"], reached["validation_loss"], reached["peak_bytes"]) == (0.6, 0.5, 9)
    assert reached["tokens_per_second"] == 200


def test_a_run_that_was_killed_before_its_first_step_has_no_losses(home: Path) -> None:
    (home / "runs/a/metrics.csv").unlink()
    reached = read_run("runs/a").reached
    assert (reached["steps"], reached["loss"], reached["peak_bytes"]) == (10, None, None)


def test_the_options_of_a_run_of_0_1_are_not_made_up(capsys: pytest.CaptureFixture[str]) -> None:
    old = Path(__file__).parents[1] / "surface" / "run_0_1"
    summary = read_run(old)
    assert summary.reached["steps"] == 3
    assert (summary.settings["epochs"], summary.settings["seed"], summary.settings["lr"]) == (None, None, 0.001)
    assert run(["show", str(old)]) == 0
    assert "Its options are not known" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("line", ["compare", "compare nowhere", "compare runs/a nowhere"])
def test_bad_input_is_one_message_and_exit_code_2(home: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "directory" in printed.err


def test_in_python_no_run_is_refused() -> None:
    with pytest.raises(MisuseError, match="compare takes runs"):
        oomguard.compare()
