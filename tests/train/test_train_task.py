"""Tasks in the trainer: the gradient of the plan's microbatches, exact resumes, fallbacks, and what is refused."""

import csv
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from plans import plan_of
from task import trained
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

import oomguard
from oomguard import GuardError, MisuseError, Task, TaskPlan
from oomguard._guard.events import Events
from oomguard._task.task import name_of
from oomguard._train import loop
from oomguard._train.checkpoint import load
from oomguard._train.loop import TaskResult

pytestmark = pytest.mark.filterwarnings("ignore:The plan's peak was measured with")
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def plan() -> TaskPlan:
    """The plan of the tasks of sentences, by name."""
    found = oomguard.find_feasible_config("task.trained:task", threads=1, max_probes=1, timeout=300, allow="microbatch")
    assert found.layout
    return found


@pytest.fixture(scope="module")
def wave_plan() -> TaskPlan:
    return oomguard.find_feasible_config(trained.wave, steps=7, batch=6, threads=1, max_probes=1, timeout=300)


def with_rows(plan: TaskPlan, rows: int, **changes: Any) -> TaskPlan:
    """The plan with another microbatch, and fallbacks of half of it and of one row."""
    first = msgspec.structs.replace(plan.candidate, microbatch=rows, accumulation=-(-plan.batch // rows))
    last = plan.fallbacks[-1:]
    return msgspec.structs.replace(plan, candidate=first, fallbacks=last if rows > 1 else (), **changes)


def train(plan: TaskPlan, task: Task, run: Path, **options: Any) -> TaskResult:
    """Train a task by the plan of another task of the same form, for two epochs if it has any."""
    if task.batch is None:
        options = {"epochs": 2} | options
    plan = msgspec.structs.replace(plan, task=name_of(task))
    return oomguard.train(plan, task, run=str(run), **options)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def column(run: Path, name: str = "loss") -> list[float]:
    with open(run / "metrics.csv", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def kinds(run: Path) -> list[str]:
    return [event.kind for event in Events(run / "events.jsonl").read()]


# ---- the same training as in a plain loop


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """The losses of a plain loop over two epochs."""
    torch.manual_seed(0)
    model = trained.Tagger()
    made, losses = trained.optimizer(model.parameters()), list[float]()
    for _ in range(2):
        for batch in trained.loader():
            total, weight = trained.loss(model, batch)
            made.zero_grad()
            (total / weight).backward()  # type: ignore[no-untyped-call]
            made.step()
            losses.append(float(total.detach() / weight))
    return losses


@pytest.mark.parametrize("rows", [6, 4, 1])
def test_microbatches_give_the_losses_of_a_plain_loop(
    plan: TaskPlan, plain: list[float], tmp_path: Path, rows: int
) -> None:
    result = train(with_rows(plan, rows), trained.calm, tmp_path)
    assert (result.steps, result.ended) == (10, "done")
    assert column(tmp_path) == pytest.approx(plain, rel=1e-5)


def test_segments_give_the_losses_of_a_plain_loop(plan: TaskPlan, plain: list[float], tmp_path: Path) -> None:
    pieces = msgspec.structs.replace(plan.candidate, segments=3)
    train(msgspec.structs.replace(plan, candidate=pieces), trained.calm, tmp_path)
    assert column(tmp_path) == pytest.approx(plain, rel=1e-5)


def test_a_batch_that_cannot_be_split_is_collated_in_pieces(plan: TaskPlan, plain: list[float], tmp_path: Path) -> None:
    train(with_rows(plan, 2, layout=()), trained.calm, tmp_path)
    assert column(tmp_path) == pytest.approx(plain, rel=1e-5)


def test_the_batch_of_the_plan_replaces_that_of_the_loader(plan: TaskPlan, tmp_path: Path) -> None:
    larger = with_rows(msgspec.structs.replace(plan, batch=9, fallbacks=()), 9)
    assert train(larger, trained.calm, tmp_path, epochs=1).steps == 3


def test_half_precision_scales_the_loss(wave_plan: TaskPlan, tmp_path: Path) -> None:
    half = msgspec.structs.replace(wave_plan.candidate, precision="fp16")
    half_plan = msgspec.structs.replace(wave_plan, candidate=half)
    losses = [
        (train(chosen, trained.wave, tmp_path / name, steps=3), column(tmp_path / name))[1]
        for name, chosen in (("half", half_plan), ("whole", wave_plan))
    ]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    stored = load(tmp_path / "half" / "checkpoints")
    assert stored is not None
    assert stored.optimizer.scaler


# ---- resumes


STEPS = 23
SCHEDULERS: dict[str, Any] = {
    "steps": trained.schedule,
    "one cycle": lambda made: OneCycleLR(made, 0.02, total_steps=40),
    "plateau": lambda made: ReduceLROnPlateau(made, patience=0, threshold=0.5),
}


def run_slowly(plan: TaskPlan, task: Task, run: Path) -> None:
    """A run with slow steps, so that a kill hits one of them."""
    step = loop.Trainer.step

    def slow(*given: Any) -> Any:
        time.sleep(0.08)
        return step(*given)

    setattr(loop.Trainer, "step", slow)  # noqa: B010 (mypy)
    train(plan, task, run, epochs=None, steps=STEPS, save_every="3", clip=1.0, resume=True)
    os._exit(0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(plan: TaskPlan, tmp_path: Path, workers: int) -> None:
    plan, task, rng, kills = with_rows(plan, 4), trained.noisy(num_workers=workers), Random(workers), 0
    options: dict[str, Any] = {"epochs": None, "steps": STEPS, "save_every": "3", "clip": 1.0}
    whole = train(plan, trained.noisy(), tmp_path / "whole", **options)
    context = multiprocessing.get_context("fork")
    while kills < 3:
        child = context.Process(target=run_slowly, args=(plan, task, tmp_path / "killed"))
        child.start()
        child.join(0.4 + rng.random() / 2)
        if child.exitcode is not None:
            break
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        kills += 1
    assert kills == 3
    random.seed(5)  # whatever this process has drawn before
    np.random.seed(5)
    resumed = train(plan, task, tmp_path / "killed", resume=True, **options)
    assert resumed.steps == STEPS
    assert torch.equal(weights(whole.model), weights(resumed.model))
    for name in ("loss", "lr", "norm", "validation_loss"):
        assert column(tmp_path / "killed", name) == column(tmp_path / "whole", name)


@pytest.mark.parametrize("name", [*SCHEDULERS])
def test_the_state_of_a_scheduler_is_resumed(plan: TaskPlan, tmp_path: Path, name: str) -> None:
    task = replace(trained.noisy(), scheduler=SCHEDULERS[name])
    train(plan, task, tmp_path / "whole", epochs=3)
    train(plan, task, tmp_path / "parts", epochs=1)
    train(plan, task, tmp_path / "parts", epochs=3, resume=True)
    assert column(tmp_path / "parts", "lr") == column(tmp_path / "whole", "lr")
    assert column(tmp_path / "parts") == column(tmp_path / "whole")
    assert len({*column(tmp_path / "whole", "lr")}) > 1


class Switching(torch.optim.Optimizer):
    """Plain descent at first, and momentum from the fourth update on: a part of its state is made late."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                kept, change = self.state[parameter], parameter.grad
                kept["updates"] = kept.get("updates", 0) + 1
                if kept["updates"] > 3:
                    change = kept.setdefault("momentum", torch.zeros_like(change)).mul_(0.9).add_(change)
                parameter -= group["lr"] * change


def test_an_optimizer_that_switches_its_rule_is_resumed_after_the_switch(plan: TaskPlan, tmp_path: Path) -> None:
    task = replace(trained.noisy(), optimizer=Switching)
    whole = train(plan, task, tmp_path / "whole", epochs=2)
    train(plan, task, tmp_path / "parts", epochs=1)
    resumed = train(plan, task, tmp_path / "parts", epochs=2, resume=True)
    assert torch.equal(weights(whole.model), weights(resumed.model))
    assert column(tmp_path / "parts") == column(tmp_path / "whole")


def test_made_batches_are_resumed(wave_plan: TaskPlan, tmp_path: Path) -> None:
    whole = train(wave_plan, trained.wave, tmp_path / "whole", steps=6, validate_every=3)
    train(wave_plan, trained.wave, tmp_path / "parts", steps=2, validate_every=3)
    resumed = train(wave_plan, trained.wave, tmp_path / "parts", steps=6, validate_every=3, resume=True)
    assert torch.equal(weights(whole.model), weights(resumed.model))
    assert column(tmp_path / "parts", "validation_loss")[-1] == column(tmp_path / "whole", "validation_loss")[-1]


def test_workers_do_not_change_what_is_drawn(plan: TaskPlan, tmp_path: Path) -> None:
    started = list[int]()

    def start(worker: int) -> None:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        assert isinstance(info.dataset, trained.Sentences)
        started.append(worker)

    runs = {"here": trained.noisy(), "workers": trained.noisy(num_workers=2, worker_init_fn=start)}
    results = [train(plan, task, tmp_path / name) for name, task in runs.items()]
    assert torch.equal(*(weights(result.model) for result in results))


def test_a_run_whose_worker_dies_goes_on(plan: TaskPlan, tmp_path: Path) -> None:
    def reading(data: Any, **options: Any) -> Task:
        return replace(trained.noisy(), data=DataLoader(data, trained.ROWS, collate_fn=trained.collate, **options))

    whole = train(plan, reading(trained.Sentences(noisy=True)), tmp_path / "whole")
    dying = reading(trained.Dying(tmp_path / "died"), num_workers=2)
    mended = train(plan, dying, tmp_path / "mended")
    assert (tmp_path / "died").exists()
    assert kinds(tmp_path / "mended") == ["worker"]
    assert torch.equal(weights(whole.model), weights(mended.model))


def test_a_run_that_an_error_of_the_users_code_ended_is_resumed(plan: TaskPlan, tmp_path: Path) -> None:
    calls = list[int]()

    def failing(model: nn.Module, batch: Any) -> Any:
        calls.append(len(batch[0]))
        result = trained.noisy_loss(model, batch)
        if len(calls) == 6:  # in the second microbatch of a step
            raise KeyError("mended later")
        return result

    plan = with_rows(plan, 4)
    whole = train(plan, trained.task, tmp_path / "whole")
    with pytest.raises(MisuseError, match="mended later"):
        train(plan, replace(trained.task, loss=failing), tmp_path / "ended")
    resumed = train(plan, trained.task, tmp_path / "ended", resume=True)
    assert torch.equal(weights(whole.model), weights(resumed.model))


def test_batches_before_the_resumed_one_are_not_read(plan: TaskPlan, tmp_path: Path) -> None:
    read = list[int]()

    class Counted(trained.Sentences):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            read.append(index)
            return super().__getitem__(index)

    data: Any = DataLoader(Counted(), trained.ROWS, collate_fn=trained.collate)
    task = replace(trained.calm, data=data)
    train(plan, task, tmp_path, epochs=1, steps=3)
    read.clear()
    train(plan, task, tmp_path, epochs=1, resume=True)
    assert read == [*range(18, 27)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_after_its_step(
    plan: TaskPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    count = loop.Trainer._finish_step

    def at_four(trainer: Any, *rest: Any) -> None:
        count(trainer, *rest)
        if trainer.state.step == 4:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(loop.Trainer, "_finish_step", at_four)
    result = train(plan, trained.task, tmp_path)
    assert (result.ended, result.steps) == ("interrupted", 4)


# ---- validation


def test_the_validation_loss_is_that_of_the_whole_data(plan: TaskPlan, tmp_path: Path) -> None:
    narrow = msgspec.structs.replace(plan, evaluation_rows=2)
    task = replace(trained.calm, validation=trained.loader())
    result = train(narrow, task, tmp_path)
    assert result.model.training
    result.model.eval()
    with torch.no_grad():
        totals = [trained.loss(result.model, batch) for batch in trained.loader()]
    by_hand = float(sum(total for total, _ in totals) / sum(weight for _, weight in totals))
    assert column(tmp_path, "validation_loss")[-1] == pytest.approx(by_hand, rel=1e-5)
    assert (tmp_path / "best").is_dir()


def test_validation_data_may_have_another_form_than_the_training_data(wave_plan: TaskPlan, tmp_path: Path) -> None:
    series = torch.randn(7, 9, 3, generator=torch.Generator().manual_seed(0))
    samples: Any = [*series]
    data = DataLoader(samples, 7, collate_fn=torch.stack)
    task = replace(trained.wave, validation=data)
    result = train(msgspec.structs.replace(wave_plan, evaluation_rows=2), task, tmp_path, steps=1)
    with torch.no_grad():
        assert result.validation_loss == pytest.approx(float(trained.squares(result.model, series)), rel=1e-5)


def test_validation_does_not_change_the_training(plan: TaskPlan, tmp_path: Path) -> None:
    with_it, without = trained.noisy(), replace(trained.noisy(), validation=None)
    runs = [train(plan, task, tmp_path / str(n)) for n, task in enumerate((with_it, without))]
    assert torch.equal(*(weights(result.model) for result in runs))


def test_patience_ends_a_training_that_gets_no_better(plan: TaskPlan, tmp_path: Path) -> None:
    task = replace(trained.noisy(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    result = train(plan, task, tmp_path, epochs=50, patience=2)
    assert (result.ended, result.steps) == ("patience", 15)
    best = oomguard.load_weights(tmp_path, trained.Tagger())
    assert torch.equal(weights(best), weights(result.model))


def test_a_loss_that_is_not_finite_is_reported_once(plan: TaskPlan, tmp_path: Path) -> None:
    def diverging(model: nn.Module, batch: Any) -> Any:
        return trained.loss(model, batch)[0] * float("nan"), 1

    task = replace(trained.calm, loss=diverging)
    train(plan, task, tmp_path)
    assert kinds(tmp_path) == ["not-finite"]


# ---- running out of memory


def test_a_batch_that_runs_out_is_run_again_in_smaller_pieces(
    plan: TaskPlan, plain: list[float], tmp_path: Path
) -> None:
    def limited(model: nn.Module, batch: Any) -> Any:
        if len(batch[0]) > 3:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return trained.loss(model, batch)

    task = replace(trained.calm, loss=limited)
    result = train(plan, task, tmp_path)
    assert result.rung > 0
    assert kinds(tmp_path)[0] == "oom"
    assert column(tmp_path) == pytest.approx(plain, rel=1e-5)


def test_without_a_fallback_training_ends_with_a_checkpoint(plan: TaskPlan, tmp_path: Path) -> None:
    def short(model: nn.Module, batch: Any) -> Any:
        raise torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory")

    task = replace(trained.calm, loss=short)
    with pytest.raises(GuardError, match="last rung"):
        train(plan, task, tmp_path)
    assert load(tmp_path / "checkpoints") is not None


LIMITED = """
import json, resource, sys
import torch
torch.set_num_threads(1)
import oomguard
from oomguard._device import cpu
from task import sized

plan = oomguard.load_plan(sys.argv[1])
batch = sized.waves(plan.batch, plan.seq)

def plain():
    torch.manual_seed(0)
    model = sized.regression.model()
    made = torch.optim.Adam(model.parameters())
    for _ in range(2):
        made.zero_grad()
        sized.squares(model, batch).backward()
        made.step()

def losses(run):
    rows = open(f"{run}/metrics.csv").read().splitlines()[1:]
    return [float(row.split(",")[1]) for row in rows]

oomguard.train(plan, "task.sized:regression", steps=3, run=sys.argv[2])
cpu._inherited_bytes = None
limit = cpu.Cpu().reading().committed_bytes + (40 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
try:
    plain()
    died = ""
except RuntimeError as error:
    died = str(error)
result = oomguard.train(plan, "task.sized:regression", steps=3, run=sys.argv[3])
print(json.dumps([died, result.rung, losses(sys.argv[2]), losses(sys.argv[3])]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces RLIMIT_DATA")
def test_a_task_that_runs_out_in_a_plain_loop_is_trained_under_a_hard_limit(tmp_path: Path) -> None:
    found = oomguard.find_feasible_config("task.sized:regression", steps=200, batch=128, threads=1, max_probes=1)
    path = oomguard.save_plan(msgspec.structs.replace(found, asked_budget_bytes=None), tmp_path / "plan.json")
    words = [sys.executable, "-W", "ignore", "-c", LIMITED, *map(str, (path, tmp_path / "whole", tmp_path / "limited"))]
    environment = os.environ | {"PYTHONPATH": str(TESTS)} | found.exports
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    died, rung, whole, limited = json.loads(done.stdout)
    assert "can't allocate memory" in died
    assert rung > 0
    assert limited == pytest.approx(whole, rel=1e-5)


# ---- what is refused


def unsorted_loader() -> DataLoader[Any]:
    class Restless:
        rng = Random(0)

        def __iter__(self) -> Iterator[int]:
            return iter(self.rng.sample(range(trained.SAMPLES), trained.SAMPLES))

        def __len__(self) -> int:
            return trained.SAMPLES

    return trained.loader(sampler=Restless())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.1}, r"--lr is for the model of a spec.*Give the task optimizer="),
        ({"schedule": "cosine"}, r"--schedule is for the model of a spec.*scheduler="),
        ({"target": ("a",)}, r"--target is for the model of a spec"),
        ({"validation": 0.2}, r"--validation is for the model of a spec.*Give the task validation="),
        ({"patience": 2, "validate": 3}, "Unknown option 'validate'"),
        ({"budget": "3GiB"}, r"A plan has its own budget.*not set"),
        ({"batch": 99}, r"A plan has its own batch.*that is 6"),
        ({"steps": 0}, r"--steps must be a whole number"),
    ],
)
def test_options_that_do_not_apply_are_named(
    plan: TaskPlan, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(MisuseError, match=message):
        train(plan, trained.task, tmp_path, **options)


def test_a_plan_and_a_task_must_belong_together(plan: TaskPlan, wave_plan: TaskPlan, tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"it is for task\.trained:Wave, and the task is task\.trained:task"):
        oomguard.train(wave_plan, "task.trained:task", run=str(tmp_path))
    with pytest.raises(MisuseError, match="this plan is for a spec"):
        oomguard.train(plan_of(), trained.task, run=str(tmp_path))
    with pytest.raises(MisuseError, match=r"The plan of a task is trained with the task.*waves\.npy"):
        oomguard.train(plan, "waves.npy", run=str(tmp_path))
    oomguard.train(plan, "task.trained:task", run=str(tmp_path), steps=1)


def test_a_run_continues_with_its_own_task_and_data(plan: TaskPlan, wave_plan: TaskPlan, tmp_path: Path) -> None:
    train(plan, trained.task, tmp_path, steps=1)
    with pytest.raises(MisuseError, match=r"A new run needs a directory of its own"):
        train(plan, trained.task, tmp_path)
    with pytest.raises(MisuseError, match=r"A run continues with its own task, but that was .*lambda.* and is"):
        train(wave_plan, trained.wave, tmp_path, steps=2, resume=True)
    with pytest.raises(MisuseError, match=r"--seed was 0 and is 1"):
        train(plan, trained.task, tmp_path, seed=1, resume=True)


def test_a_run_continues_with_its_own_model(plan: TaskPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(plan, trained.calm, tmp_path, steps=1)
    monkeypatch.setattr(trained, "TAGS", 7)
    with pytest.raises(MisuseError, match=r"A checkpoint can only be used with the model.*head\.\w+ is not the same"):
        train(plan, trained.calm, tmp_path, resume=True)


def test_an_optimizer_of_another_model_is_refused(plan: TaskPlan, tmp_path: Path) -> None:
    other = nn.Linear(2, 2)
    task = replace(trained.calm, optimizer=lambda _: torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(MisuseError, match="The optimizer of a task must update parameters of its model"):
        train(plan, task, tmp_path)


def test_a_loader_without_batches_is_refused(plan: TaskPlan, tmp_path: Path) -> None:
    few: Any = DataLoader(trained.Sentences(), 50, collate_fn=trained.collate, drop_last=True)
    with pytest.raises(MisuseError, match=r"A loader must have batches"):
        train(with_rows(msgspec.structs.replace(plan, batch=50), 50), replace(trained.calm, data=few), tmp_path)


def test_an_order_that_does_not_follow_from_the_seed_is_refused(plan: TaskPlan, tmp_path: Path) -> None:
    task = replace(trained.calm, data=unsorted_loader())
    with pytest.raises(MisuseError, match="The order of the data must follow from the seed"):
        train(plan, task, tmp_path)


def test_made_batches_need_a_number_of_steps(wave_plan: TaskPlan, tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="Give --steps instead of --epochs"):
        oomguard.train(wave_plan, trained.wave, run=str(tmp_path), epochs=1)


def test_an_error_of_the_users_code_names_its_line(plan: TaskPlan, tmp_path: Path) -> None:
    def broken(model: nn.Module, batch: Any) -> Any:
        raise KeyError("tokens")

    task = replace(trained.calm, loss=broken)
    with pytest.raises(MisuseError, match=r"test_train_task\.py:\d+ raised KeyError: 'tokens'"):
        train(plan, task, tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_names_its_line(plan: TaskPlan, tmp_path: Path, workers: int) -> None:
    class Broken(trained.Sentences):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            raise OSError("the disk is gone")

    data: Any = DataLoader(Broken(), trained.ROWS, collate_fn=trained.collate, num_workers=workers)
    task = replace(trained.calm, data=data)
    with pytest.raises(MisuseError, match=r"test_train_task\.py:\d+ raised OSError: the disk is gone"):
        train(plan, task, tmp_path)


def test_several_processes_need_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MisuseError, match="Several processes train by one plan, but there is none yet"):
        oomguard.train(None, trained.task, run=str(tmp_path))


# ---- predictions


def scores(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
    assert not torch.is_grad_enabled()
    return model(batch[0])


def by_hand(result: TaskResult) -> list[Tensor]:
    """The scores of every sample, alone in its batch."""
    model = result.model.eval()
    with torch.no_grad():
        return [model(words[None])[0] for words, _ in (trained.Sentences()[n] for n in range(trained.SAMPLES))]


def test_a_run_predicts_all_samples_in_order_with_its_weights(plan: TaskPlan, tmp_path: Path) -> None:
    task = replace(trained.calm, data=trained.loader(shuffle=True), predict=scores)
    expected = by_hand(train(plan, task, tmp_path / "run", epochs=1))
    parts = oomguard.predict(tmp_path / "run", task)
    found = [row for part in parts for row in part]
    assert len(found) == len(expected) == trained.SAMPLES
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[: len(other)], other)
    path = oomguard.predict(tmp_path / "run", task, output=str(tmp_path / "p.npy"))
    array = np.load(path)
    assert array.shape == (trained.SAMPLES, 12, trained.TAGS)
    np.testing.assert_allclose(array[3, :7], expected[3], rtol=1e-5, atol=1e-6)
    assert np.isnan(array).any()  # a microbatch of short samples


def test_nested_predictions_are_written_by_torch(plan: TaskPlan, tmp_path: Path) -> None:
    def named(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        return {"scores": scores(model, batch), "words": batch[0]}

    task = replace(trained.calm, predict=named)
    train(plan, task, tmp_path, steps=1)
    path = oomguard.predict(tmp_path, task, output=str(tmp_path / "p.pt"))
    first = torch.load(path)[0]
    assert first["scores"].shape[:2] == first["words"].shape
    with pytest.raises(MisuseError, match=r"task\.py:\d+ returned \{'scores'.* Write --output predictions\.pt"):
        oomguard.predict(tmp_path, task, output=str(tmp_path / "p.npy"))


def fails(model: nn.Module, batch: Any) -> Any:
    raise KeyError("no head")


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (None, {}, "Add --model trained:calm"),
        (np.zeros((2, 3)), {}, r"which has model and data, but got array"),
        (trained.calm, {}, r"need its predict, but this task has none. Write Task\(predict="),
        (trained.wave, {}, "A run predicts with its own task"),
        (replace(trained.calm, predict=fails), {}, r"task\.py:\d+ raised KeyError"),
        (trained.calm, {"output": "p.csv"}, "are written as .npy or .pt"),
        (trained.calm, {"probabilities": True}, "--probabilities is for the run of a spec"),
        (trained.calm, {"stride": 3}, "--stride is for the run of a spec"),
    ],
)
def test_predictions_of_a_task_that_cannot_be_are_explained(
    plan: TaskPlan, tmp_path: Path, given: Any, options: dict[str, Any], message: str
) -> None:
    train(plan, trained.calm, tmp_path, steps=1)
    message = message.replace("trained:calm", name_of(trained.calm))
    with pytest.raises(MisuseError, match=message):
        oomguard.predict(tmp_path, given, **options)


# ---- the command line


def command(folder: Path, words: str) -> "subprocess.CompletedProcess[str]":
    """Run oomguard in a folder; modules of the tests can be imported there."""
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    line = [sys.executable, "-m", "oomguard", *words.split()]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_the_command_plans_trains_and_resumes_a_task(tmp_path: Path) -> None:
    whole = command(tmp_path, "train --model task.trained:task --batch 6 --epochs 2 --run whole --json")
    assert whole.returncode == 0, whole.stderr
    assert json.loads(whole.stdout)["steps"] == 10
    first = command(tmp_path, "train whole/plan.json --model task.trained:task --epochs 2 --steps 3 --run parts")
    assert first.returncode == 0, first.stderr
    assert "Trained after 3 steps" in first.stdout
    rest = command(tmp_path, "train --model task.trained:task --epochs 2 --run parts --resume")
    assert rest.returncode == 0, rest.stderr
    assert column(tmp_path / "parts") == column(tmp_path / "whole")
    assert "Add --model task.trained:task" in command(tmp_path, "predict parts").stderr
    written = command(tmp_path, "predict parts --model task.trained:task --output parts/p.npy")
    assert (written.returncode, written.stdout) == (0, "parts/p.npy\n"), written.stderr
    assert len(np.load(tmp_path / "parts/p.npy")) == trained.SAMPLES
    shown = command(tmp_path, "show parts")
    assert shown.returncode == 0, shown.stderr
    assert "oomguard train plan.json --model task.trained:task" in shown.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train", "oomguard train needs a plan file, or a task"),
        ("train plan.json", "Add --model task.trained:task"),
        ("train plan.json --model gru", "got --model 'gru'"),
        ("train plan.json --model task.trained:task --data x.npy", "A task has its own data"),
        ("train plan.json --model task.models:word_model", "it is for task.trained:task"),
        ("train plan.json --model task.trained:loss", "task.trained:loss"),
        ("train spec.json --model task.trained:task", "Training needs data"),
        ("train spec.json --data x.npy --model task.trained:task", "this plan is for a spec"),
        ("train spec.json --data x.npy --budget 3GiB", "The plan of a spec has its own budget"),
    ],
)
def test_wrong_command_lines_are_explained(
    plan: TaskPlan,
    words: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from oomguard._cli.app import run

    monkeypatch.chdir(tmp_path)
    oomguard.save_plan(plan, "plan.json")
    oomguard.save_plan(plan_of(), "spec.json")
    np.save("x.npy", np.zeros((20, 6, 3), np.float32))
    assert run([*words.split(), "--run", "r"] if words != "train" else ["train"]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_prints_as_a_few_sentences(plan: TaskPlan) -> None:
    lines = str(plan).splitlines()
    assert lines[0] == "Plan for task.trained:task, the longest samples, batch 6 on cpu"
    assert 4 <= len(lines) <= 10
