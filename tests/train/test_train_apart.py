"""`train(isolate=True)`: a training in a process of its own ends as one in this process does."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from plans import plan_of

import oomguard
from oomguard._estimate.malloc import ENVIRONMENT
from oomguard._train.apart import is_apart
from oomguard._train.loop import Result, TrainProgress

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module", name="plan")
def _plan() -> oomguard.Plan:
    return msgspec.structs.replace(plan_of(), exports=ENVIRONMENT["tight"])


def numbers(rows: int = 16) -> Any:
    return np.random.default_rng(0).normal(size=(rows, 6, 3)).astype(np.float32)


def test_it_ends_as_a_training_in_this_process(plan: oomguard.Plan, tmp_path: Path) -> None:
    progress: list[TrainProgress] = []
    options: Any = {"epochs": 2, "validation": 0}
    apart = oomguard.train(plan, numbers(), run=str(tmp_path / "a"), isolate=True, progress=progress.append, **options)
    assert plan.exports, "a plan for the processor sets its heap"
    with pytest.warns(UserWarning, match="isolate=True"):
        here = oomguard.train(plan, numbers(), run=str(tmp_path / "b"), isolate=False, **options)
    assert isinstance(apart, Result)
    assert (apart.steps, apart.loss, apart.ended) == (here.steps, here.loss, here.ended)
    assert [one.step for one in progress] == [*range(1, apart.steps + 1)]
    for mine, other in zip(apart.model.parameters(), here.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert (tmp_path / "a" / "metrics.csv").exists()


def test_its_heap_is_that_of_the_plan(plan: oomguard.Plan, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    result = oomguard.train(plan, numbers(), run=str(tmp_path / "a"), steps=1, validation=0, isolate=True)
    assert result.steps == 1
    assert not [one for one in recwarn if "MALLOC" in str(one.message)]


def test_a_task_of_a_script_comes_back_as_its_own_class(tmp_path: Path) -> None:
    class Own(torch.nn.GRU):
        """A class that only this test knows."""

    task = oomguard.Task(
        model=lambda: Own(3, 4),
        loss=lambda model, batch: model(batch)[0].pow(2).mean(),
        batch=lambda rows, steps: torch.ones(steps, rows, 3),
    )
    plan = oomguard.find_feasible_config(task, batch=4, steps=5, threads=1, precision="fp32", allocator="tight")
    result = oomguard.train(plan, task, steps=2, run=str(tmp_path / "run"), isolate=True)
    assert type(result.model) is Own
    assert result.steps == 2


def test_an_error_of_the_data_comes_through(plan: oomguard.Plan, tmp_path: Path) -> None:
    with pytest.raises(oomguard.MisuseError, match="--target"):
        oomguard.train(plan, numbers()[..., :2], run=str(tmp_path / "a"), isolate=True)


def test_data_that_cannot_be_sent_is_refused_with_advice(plan: oomguard.Plan, tmp_path: Path) -> None:
    pairs = ((row[:, :2], row[:, 2:]) for row in numbers())
    with pytest.raises(oomguard.MisuseError, match="isolate=False"):
        oomguard.train(plan, pairs, run=str(tmp_path / "a"), isolate=True)


def test_ctrl_c_ends_it_after_its_step_with_a_result(plan: oomguard.Plan, tmp_path: Path) -> None:
    sent: list[int] = []

    def interrupt(progress: TrainProgress) -> None:
        if progress.step >= 2 and not sent:
            sent.append(progress.step)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    result = oomguard.train(
        plan, numbers(), run=str(tmp_path / "a"), steps=100_000, validation=0, isolate=True, progress=interrupt
    )
    assert result.ended == "interrupted"
    assert 2 <= result.steps < 100_000
    assert signal.getsignal(signal.SIGINT) is before
    assert threading.active_count() < 10


@pytest.mark.parametrize(
    ("isolate", "in_notebook", "apart"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_it_is_the_default_in_notebooks(
    isolate: bool | None, in_notebook: bool, apart: bool, plan: oomguard.Plan
) -> None:
    assert is_apart(plan, isolate, in_notebook) is apart


def test_a_notebook_that_has_the_heap_of_the_plan_trains_itself(
    plan: oomguard.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in plan.exports.items():
        monkeypatch.setenv(name, value)
    assert not is_apart(plan, None, in_notebook=True)


def test_torchrun_keeps_its_processes(plan: oomguard.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not is_apart(plan, True, in_notebook=False)
