"""Interrupted runs continue as if nothing had happened, whatever stopped them."""

import csv
import multiprocessing
import os
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from plans import numbers, plan_of
from train.test_train import weights

import oomguard
from oomguard._core.errors import MisuseError
from oomguard._guard.events import Events
from oomguard._guard.ladder import LadderPosition
from oomguard._rnn.model import build
from oomguard._train import loop
from oomguard._train.checkpoint import load
from oomguard._train.loop import Result

STEPS = 40


def train(run: Path, **options: Any) -> Result:
    """A run that uses all random numbers: dropout, the order of the data, the split."""
    plan = plan_of(dropout=0.3, layers=2)
    usual: dict[str, Any] = {"validation": 0.1, "steps": STEPS, "clip": 1.0, "schedule": "cosine", "save_every": "3"}
    return oomguard.train(plan, numbers(), run=str(run), **usual | options)


def run_slowly(run: Path, pause: float) -> None:
    """A run with slow steps, so that a kill hits one of them."""
    step = loop.Trainer.step

    def slow(*given: Any) -> Any:
        time.sleep(pause)
        return step(*given)

    setattr(loop.Trainer, "step", slow)  # noqa: B010 (mypy)
    train(run, resume=True)
    os._exit(0)


def steps_of(run: Path) -> list[int]:
    with open(run / "metrics.csv", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def test_a_run_killed_five_times_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, rng, kills = train(tmp_path / "whole"), Random(1), 0
    context = multiprocessing.get_context("fork")
    while kills < 5:
        child = context.Process(target=run_slowly, args=(tmp_path / "killed", 0.08))
        child.start()
        child.join(0.1 + rng.random())
        if child.exitcode is not None:
            break
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        kills += 1
    assert kills == 5
    resumed = train(tmp_path / "killed", resume=True)
    assert resumed.steps == STEPS
    assert torch.equal(weights(whole.model), weights(resumed.model))
    assert steps_of(tmp_path / "killed") == [*range(1, STEPS + 1)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_after_its_step_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    count = loop.Trainer._finish_step

    def at_seven(trainer: Any, *rest: Any) -> None:
        count(trainer, *rest)
        if trainer.state.step == 7:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(loop.Trainer, "_finish_step", at_seven)
    result = train(tmp_path)
    assert (result.ended, result.steps) == ("interrupted", 7)
    last = load(tmp_path / "checkpoints")
    assert last is not None
    assert last.step == 7


def test_a_resumed_run_drops_the_rows_after_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = loop.Trainer._finish_step

    def at_five(trainer: Any, *rest: Any) -> None:
        count(trainer, *rest)
        if trainer.state.step == 5:
            raise KeyError("something else")

    monkeypatch.setattr(loop.Trainer, "_finish_step", at_five)
    with pytest.raises(KeyError):
        train(tmp_path)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]
    monkeypatch.undo()
    train(tmp_path, resume=True, steps=6)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_a_resumed_run_continues_on_the_same_rung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = loop.Trainer.run

    def lower(trainer: Any) -> Any:
        trainer.guard.position = LadderPosition(rung=2, quiet=7)
        return run(trainer)

    monkeypatch.setattr(loop.Trainer, "run", lower)
    train(tmp_path, steps=3)
    monkeypatch.undo()
    resumed = train(tmp_path, steps=6, resume=True)
    assert resumed.rung == 2
    assert Events(tmp_path / "events.jsonl").read()[-1].figures["rung"] == 2


def test_a_run_resumed_with_another_plan_starts_at_the_top_of_its_ladder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = loop.Trainer.run

    def lower(trainer: Any) -> Any:
        trainer.guard.position = LadderPosition(rung=3)
        return run(trainer)

    monkeypatch.setattr(loop.Trainer, "run", lower)
    train(tmp_path, steps=3)
    monkeypatch.undo()
    other = plan_of(rungs=((2, 1), (1, 1)), dropout=0.3, layers=2)
    resumed = oomguard.train(other, numbers(), run=str(tmp_path), steps=6, resume=True)
    assert (resumed.steps, resumed.rung) == (6, 0)


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    train(tmp_path, steps=1)
    with pytest.raises(MisuseError, match="--resume"):
        train(tmp_path, steps=1)


def test_a_run_cannot_continue_with_other_data(tmp_path: Path) -> None:
    train(tmp_path, steps=1)
    other = np.concatenate([numbers(), numbers(rows=3)])
    with pytest.raises(MisuseError, match="continues with its own data"):
        oomguard.train(plan_of(dropout=0.3, layers=2), other, run=str(tmp_path), resume=True)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 1}, "--seed was 0 and is 1"),
        ({"validation": 0.2}, "--validation was 0.1 and is 0.2"),
        ({"columns": ("1", "0"), "target": ("2",)}, "--columns was None and is"),
        ({"target": ("2",)}, "--target was None and is"),
    ],
)
def test_a_run_cannot_continue_with_other_data_options(tmp_path: Path, other: dict[str, Any], message: str) -> None:
    train(tmp_path, steps=1)
    with pytest.raises(MisuseError, match=message):
        train(tmp_path, steps=2, resume=True, **other)


def test_a_run_cannot_continue_with_another_model(tmp_path: Path) -> None:
    train(tmp_path, steps=1, model=build)
    with pytest.raises(MisuseError, match=r"that was oomguard\._rnn\.model:build and is other:model"):
        train(tmp_path, steps=2, resume=True, model="other:model")
    assert train(tmp_path, steps=2, resume=True).steps == 2


def test_options_that_only_affect_reading_speed_may_change(tmp_path: Path) -> None:
    train(tmp_path, steps=1)
    assert train(tmp_path, steps=2, resume=True, workers=1, nan="zero").steps == 2


@pytest.mark.parametrize("where", [0, -1])
def test_a_run_cannot_continue_with_other_numbers_of_the_same_shape(tmp_path: Path, where: int) -> None:
    train(tmp_path, steps=1)
    other = numbers()
    other[where, where, 0] += 1
    with pytest.raises(MisuseError, match="its content was"):
        oomguard.train(plan_of(dropout=0.3, layers=2), other, run=str(tmp_path), resume=True)


@pytest.mark.parametrize("name", ["a.csv", "a.txt"])
def test_a_run_cannot_continue_with_another_file_of_the_same_size(tmp_path: Path, name: str) -> None:
    first, second = tmp_path / name, tmp_path / "elsewhere" / name
    second.parent.mkdir()
    first.write_text("1,2,3\n4,5,6\n" * 40)
    second.write_text("1,2,3\n4,5,6\n" * 39 + "1,2,3\n4,5,7\n")
    plan = plan_of(vocab=256, features=None) if name == "a.txt" else plan_of()
    oomguard.train(plan, str(first), run=str(tmp_path / "run"), steps=1)
    with pytest.raises(MisuseError, match="its content was"):
        oomguard.train(plan, str(second), run=str(tmp_path / "run"), steps=2, resume=True)
    second.write_text(first.read_text())
    assert oomguard.train(plan, str(second), run=str(tmp_path / "run"), steps=2, resume=True).steps == 2


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    train(tmp_path, steps=9, save_every="1", keep=2)
    assert len([*(tmp_path / "checkpoints").iterdir()]) == 2


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    first = train(tmp_path, steps=4)
    again = train(tmp_path, steps=4, resume=True)
    assert again.ended == "done"
    assert torch.equal(weights(first.model), weights(again.model))
