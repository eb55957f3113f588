"""`oomguard train` and `oomguard predict`: flags, messages, exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from plans import LADDER, numbers, plan_of, saved
from rich.console import Console

import oomguard
from oomguard import _step as step_file
from oomguard._cli import program
from oomguard._cli.app import run
from oomguard._cli.flags import DATA, TRAINED
from oomguard._data.open import Missing
from oomguard._data.options import DataOptions
from oomguard._guard.events import Events
from oomguard._report.progress import progress_words, show_training
from oomguard._rnn import backward
from oomguard._train import Schedule, TrainOptions
from oomguard._train.loop import Result, TrainProgress


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a plan and data."""
    oomguard.save_plan(plan_of(), tmp_path / "plan.json")
    saved(tmp_path / "data.npy")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_plan_is_trained_and_the_run_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "plan.json", "--data", "data.npy", "--epochs", "2", "--run", "r", "--validation", "0"]) == 0
    printed = capsys.readouterr()
    assert "Trained after 10 steps: loss" in printed.out
    assert "oomguard:" not in printed.err  # progress alone
    assert (here / "r" / "metrics.csv").exists()


def test_as_json_it_is_one_document(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "plan.json", "--data", "data.npy", "--steps", "3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["run"], document["steps"], document["ended"], document["rung"]) == ("runs/gru-6", 3, "done", 0)


def test_predictions_replace_a_file_only_by_force(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "plan.json", "--data", "data.npy", "--run", "r", "--steps", "1"]) == 0
    (here / "p.npy").write_text("mine")
    assert run(["predict", "r", "--output", "p.npy"]) == 2
    assert "--output must be a new file, but p.npy exists. Add --force" in capsys.readouterr().err
    assert (here / "p.npy").read_text() == "mine"
    assert run(["predict", "r", "--output", "p.npy", "--force"]) == 0
    assert np.load(here / "p.npy").shape == (40, 6, 1)


@pytest.mark.parametrize(
    "words",
    [
        "train plan.json --data nowhere.npy",
        "train plan.json --lr x",
        "train plan.json --data data.npy --patience 3 --validation 0",
        "train --model nowhere:task",
        "predict nowhere",
        "predict r --data nowhere.npy",
    ],
)
def test_misuse_is_told_without_importing_torch(here: Path, words: str) -> None:
    call = f"import sys; from oomguard._cli.app import run; code = run({words.split()!r})"
    check = "assert 'torch' not in sys.modules; sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", f"{call}; {check}"], cwd=here, capture_output=True, check=False)
    assert done.returncode == 2, done.stderr


def test_a_run_is_taken_up_and_used(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("--steps 2", "--steps 4 --resume"):
        assert run(f"train plan.json --data data.npy --run r {words}".split()) == 0
    capsys.readouterr()
    assert run(["predict", "r", "--data", "data.npy", "--output", "p.npy"]) == 0
    assert capsys.readouterr().out == "p.npy\n"
    assert np.load(here / "p.npy").shape == (40, 6, 1)


def test_a_table_is_read_as_the_flags_say(here: Path) -> None:
    rows = numbers(rows=4, steps=30).reshape(-1, 3)
    lines = [f"{i // 30},{a},{b},{c}" for i, (a, b, c) in enumerate(rows.tolist())]
    (here / "data.csv").write_text("\n".join(["shop,open,high,close", *lines]) + "\n")
    words = "--columns open,high --target close --id shop --stride 6 --split series --validation 0.25 --nan zero"
    assert run(f"train plan.json --data data.csv --run r {words}".split()) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train", "oomguard train needs a plan file"),
        ("train plan.json", "Training needs data"),
        ("train plan.json --data nowhere.npy", "nowhere.npy is not (there is no such file)"),
        ("train plan.json --data data.npy --validation 2", "--validation must be a share"),
        ("train plan.json --data data.npy --lr fast", "--lr must be a number above 0"),
        ("train plan.json --data data.npy --epochs x", "--epochs must be a whole number"),
        ("train plan.json --data data.npy --scheduel cosine", "Did you mean --schedule"),
        ("train plan.json --data data.npy --model nowhere:model", "nowhere:model"),
        ("train other.json --data data.npy", "other.json cannot be read"),
        ("predict", "oomguard predict needs the directory of a run"),
        ("predict nowhere --data data.npy", "there is no checkpoint in nowhere"),
        ("predict r --data data.npy --output p.txt", ".npy or .csv"),
    ],
)
def test_misuse_is_one_message_and_exit_code_2(
    here: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert run(words.split()) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_bad_data_is_named_with_its_place(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = numbers()
    data[3, 2, 1] = np.nan
    np.save(here / "data.npy", data)
    assert run(["train", "plan.json", "--data", "data.npy"]) == 2
    assert "data.npy, sequence 3, step 2, column 1 is nan" in capsys.readouterr().err


def test_the_bottom_of_the_ladder_is_exit_code_1_with_a_checkpoint(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    oomguard.save_plan(plan_of(rungs=LADDER[:1]), "plan.json")

    def failing(*_: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(step_file, "backward", failing)
    assert run(["train", "plan.json", "--data", "data.npy", "--run", "r"]) == 1
    assert "The last rung of the plan" in capsys.readouterr().err
    assert [*(here / "r" / "checkpoints").iterdir()]


def test_the_process_starts_again_with_the_plans_environment(here: Path) -> None:
    plan = msgspec.structs.replace(plan_of(), exports={"MALLOC_ARENA_MAX": "1"})
    oomguard.save_plan(plan, "plan.json")
    words = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "oomguard",
        *["train", "plan.json", "--data", "data.npy", "--steps", "1", "--validation", "0", "--quiet"],
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_starts_again_only_if_something_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(program, "started_with", ["train", "plan.json"])
    monkeypatch.setenv("ONE", "1")
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    program.restart_with({"ONE": "1"})
    assert started == []
    with pytest.raises(program.Restart) as restart:
        program.restart_with({"ONE": "2"})
    restart.value.do()
    assert started[0][1][1:] == ["-m", "oomguard", "train", "plan.json"]
    assert started[0][2]["ONE"] == "2"


@pytest.mark.filterwarnings("default")  # not the tests', which make errors of them
def test_a_damaged_checkpoint_is_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "train plan.json --data data.npy --run r --validation 0 --save-every 1"
    assert run(f"{words} --steps 3".split()) == 0
    newest = max((here / "r" / "checkpoints").iterdir())
    (newest / "facts.json").write_text("{}")
    capsys.readouterr()
    assert run(f"{words} --steps 3 --resume --json".split()) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("oomguard: r/checkpoints/")
    assert line.endswith("facts.json: the checksum does not match. Looking for an older checkpoint.")


def test_every_option_has_its_flag() -> None:
    names = {flag.name for flag in (*DATA, *TRAINED)}
    options = {*TrainOptions.__struct_fields__, *DataOptions.__struct_fields__}
    assert names - {"data", "model"} == options - {
        "limit",
        "inputs_only",
        "categories",
    }  # not given by flags


def test_the_schedules_are_those_that_the_help_names() -> None:
    assert next(flag.choices for flag in TRAINED if flag.name == "schedule") == get_args(Schedule)


def test_without_a_terminal_a_log_has_events_and_validations(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(10**9))

    def once(*given: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return backward(*given)

    monkeypatch.setattr(step_file, "backward", once)
    words = "train plan.json --data data.npy --epochs 2 --validation 0.2"
    assert run(f"{words} --run r".split()) == 0
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "Step 1, oom: DefaultCPUAllocator: can't allocate memory"
    assert [line.partition(",")[0] for line in rest] == ["Step 4 of 8", "Step 8 of 8"]
    assert run(f"{words} --run s --json".split()) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["steps"] == 8
    assert [line.partition(",")[0] for line in printed.err.splitlines()] == ["Step 4 of 8", "Step 8 of 8"]
    assert run(f"{words} --run t --json --quiet".split()) == 0
    assert capsys.readouterr().err == ""


def test_what_was_cut_and_left_out_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = numbers(rows=40, steps=8)
    data[3, 2, 1] = np.nan
    np.save(here / "data.npy", data)
    words = "train plan.json --data data.npy --truncate --nan drop"
    assert run(f"{words} --run r".split()) == 0
    line = "40 were cut to the length of the spec, 1 was left out for missing values (8 steps)."
    printed = capsys.readouterr()
    assert f"Of all sequences, {line}" in " ".join(printed.out.split())
    assert f"Step 0, data: Of all sequences, {line}" in printed.err
    events = Events(here / "r" / "events.jsonl").read()
    counts = {"truncated": 40, "dropped": 1, "short": 0, "dropped_steps": 8, "cut_rows": 0}
    assert [(event.kind, event.figures) for event in events] == [("data", counts)]
    assert run(f"{words} --run s --json".split()) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["truncated"], document["dropped"], document["short"]) == (40, 1, 0)


def test_sequences_that_are_too_long_are_counted_in_all_parts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(here / "data.npy", steps=8)
    assert run(["train", "plan.json", "--data", "data.npy", "--validation", "0.1"]) == 2
    assert "(40 are too long)" in capsys.readouterr().err


def test_an_interrupted_run_says_how_to_go_on() -> None:
    fields: Any = {"steps": 3, "loss": 0.5, "validation_loss": None, "ended": "interrupted", "rung": 2, "peak_bytes": 1}
    console = Console(width=100)
    with console.capture() as captured:
        show_training(Result(run=Path("r"), model=None, missing=Missing(), **fields), console)  # type: ignore[arg-type]
    assert "Interrupted after 3 steps: loss 0.5." in captured.get()
    assert "fallback 2" in captured.get()
    assert "oomguard resume r" in captured.get()


def test_the_progress_of_a_training_is_one_line() -> None:
    usual: Any = {"tokens_per_second": 1234.5, "peak_bytes": 900 << 20, "budget_bytes": 1 << 30}
    progress = TrainProgress(step=3, total=10, loss=0.25, validation=None, rung=1, **usual)
    assert progress_words(progress) == "3 of 10, loss 0.25, 1,234 tokens/s, 88 % of 1.00 GiB, fallback 1"


def test_what_is_missing_is_counted_with_separators() -> None:
    words = Missing(truncated=1200, dropped=1).words()
    assert words == "1,200 were cut to the length of the spec, 1 was left out for missing values"
