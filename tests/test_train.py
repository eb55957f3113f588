"""The trainer: what it learns, what it writes, and that a shortage of memory changes nothing of it."""

import csv
import gc
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray
from plans import LADDER, numbers, plan_of
from torch import Tensor, nn

import oomguard
from oomguard import step as step_file
from oomguard.bptt import Microbatch, backward, count_targets, evaluate
from oomguard.candidate import Candidate
from oomguard.checkpoint import load
from oomguard.data import cuts
from oomguard.data.loader import Loader
from oomguard.data.open import open_data
from oomguard.data.options import DataOptions
from oomguard.device.cpu import Cpu
from oomguard.errors import GuardError, MisuseError, TornUpdateError
from oomguard.estimate.breakdown import estimate_step
from oomguard.estimate.malloc import ENVIRONMENT
from oomguard.estimate.place import CPU
from oomguard.guard import ladder
from oomguard.metrics import Events
from oomguard.model import Recurrent, build
from oomguard.plan.value import Bucket
from oomguard.spec import Spec
from oomguard.train import evaluate as evaluate_file
from oomguard.train import loop, start
from oomguard.train.evaluate import evaluation_candidate
from oomguard.train.job import Job, Result
from oomguard.train.options import TrainOptions, rate_at
from oomguard.train.ranks import Ranks
from oomguard.units import GIB, MIB

SHORT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."


def train(tmp_path: Path, data: Any = None, **options: Any) -> Result:
    plan = options.pop("plan", None) or plan_of()
    usual: dict[str, Any] = {"run": str(tmp_path / "run"), "validation": 0, "lr": 0.01}
    return oomguard.train(plan, numbers() if data is None else data, **usual | options)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def difference(one: nn.Module, other: nn.Module) -> float:
    return float((weights(one) - weights(other)).norm() / weights(one).norm())


def rows_of(run: Path) -> list[dict[str, str]]:
    with open(run / "metrics.csv", newline="") as file:
        return [*csv.DictReader(file)]


def kinds(result: Result) -> list[str]:
    return [event.kind for event in Events(result.run / "events.jsonl").read()]


# ---- a shortage of memory


class Shortage:
    """Raises an out-of-memory error at a random microbatch of so many steps, and notes which sequences came through.

    The first number of a sequence is its own.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
        self.dice, self.steps = Random(0), steps
        self.seen: list[int] = []
        self.done: list[int] = []
        self.raised, self.due = 0, True
        self.count = loop.Trainer._count
        monkeypatch.setattr(step_file, "backward", self.run)
        monkeypatch.setattr(loop.Trainer, "_count", lambda *given: self.step(*given))
        monkeypatch.setattr(Cpu, "release", lambda _: None)  # a quarter of a second each time, in a large process

    def run(self, model: Recurrent, batch: Microbatch, *rest: Any) -> Tensor:
        rows = batch.inputs.shape[1]
        if self.due and (self.dice.random() < 0.3 or len(self.seen) + rows == model.spec.batch):
            self.due, self.seen = False, []
            self.raised += 1
            raise torch.OutOfMemoryError(SHORT) if self.raised % 2 else RuntimeError(SHORT)
        loss = backward(model, batch, *rest)
        self.seen += [round(float(one)) for one in batch.inputs[0, :, 0]]
        return loss

    def step(self, trainer: Any, *rest: Any) -> None:
        self.done += self.seen
        self.seen, self.due = [], self.raised < self.steps
        self.count(trainer, *rest)


def numbered(rows: int = 40) -> NDArray[np.float32]:
    found = numbers(rows)
    found[:, 0, 0] = np.arange(rows)
    return found


def test_a_shortage_in_every_step_changes_nothing_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"plan": plan_of(layers=2), "epochs": 6, "normalise": "none", "clip": 1.0}
    whole = train(tmp_path / "whole", numbered(), **options)
    shortage = Shortage(monkeypatch, steps=30)
    mended = train(tmp_path / "mended", numbered(), **options)
    assert mended.steps == whole.steps == 30
    assert shortage.raised == 30
    assert sorted(shortage.done) == sorted([*range(40)] * 6)
    assert difference(whole.model, mended.model) < 1e-6


def test_after_a_shortage_it_grows_back_to_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "FIRST_WAIT", 5)
    monkeypatch.setattr(ladder.Standing, "may_climb", property(lambda own: own.rung > 0 and own.quiet >= 5))
    Shortage(monkeypatch, steps=1)
    result = train(tmp_path, epochs=3)
    assert result.rung == 0
    assert kinds(result) == ["oom", "climb"]


def test_at_the_bottom_there_is_a_checkpoint_from_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [0]

    def failing(*given: Any) -> Tensor:
        calls[0] += 1
        if 4 <= calls[0] < 20:
            raise RuntimeError(SHORT)
        return backward(*given)

    plan = plan_of(rungs=LADDER[:2])
    whole = train(tmp_path / "whole", plan=plan)
    monkeypatch.setattr(step_file, "backward", failing)
    with pytest.raises(GuardError, match="--resume"):
        train(tmp_path, plan=plan)
    calls[0] = 20
    resumed = train(tmp_path, plan=plan, resume=True)
    assert (resumed.steps, resumed.rung) == (5, 1)
    assert difference(whole.model, resumed.model) < 1e-6


def test_a_torn_update_goes_back_to_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(tmp_path / "whole", epochs=2)
    root, calls = torch._foreach_sqrt, [0]

    def failing(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 7 or (len(given[0]) > 2 and calls[0] > 7):  # from then on only a few weights at once fit
            raise RuntimeError(SHORT)
        return root(*given)

    monkeypatch.setattr(torch, "_foreach_sqrt", failing)
    mended = train(tmp_path / "mended", epochs=2, save_every="3")
    assert torch.equal(weights(whole.model), weights(mended.model))
    assert [int(row["step"]) for row in rows_of(mended.run)] == [*range(1, 11)]


def test_a_torn_update_lets_its_weights_go_before_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, alive = start._trainer, []

    def counting(*given: Any) -> loop.Trainer:
        gc.collect()
        alive.append(sum(one() is not None for one in models))
        trainer = made(*given)
        models.append(weakref.ref(trainer.training.model))
        return trainer

    def torn(_: Any) -> Result:
        raise TornUpdateError(rule="An update must be whole", got="it was not", advice="Go back.")

    models: list[Any] = []
    monkeypatch.setattr(start, "_trainer", counting)
    monkeypatch.setattr(loop.Trainer, "run", torn)
    with pytest.raises(TornUpdateError):
        train(tmp_path)
    assert alive == [0, 0]


REAL = """
import json, resource, sys
import torch
torch.set_num_threads(1)
import oomguard
from plans import numbers, plan_of
from oomguard.device import cpu, proc

LADDER = ((64, 1), (8, 1), (4, 2))  # tensors of the first are larger than 64 KiB: it is one of them that fails
data = numbers(rows=128, steps=60)

def trained(name, rungs, limit_bytes):
    cpu._marks.inherited_bytes = None
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.RLIM_INFINITY))
    plan = plan_of(rungs=rungs, seq=60, hidden=256, batch=64)
    found = oomguard.train(plan, data, validation=0, run=f"{sys.argv[1]}/{name}")
    return found, torch.cat([p.detach().flatten() for p in found.model.parameters()])

trained("loads all libraries", LADDER[-1:], resource.RLIM_INFINITY)
held, weights = trained("held", LADDER, proc.read_status().committed_bytes + (24 << 20))
_, others = trained("whole", LADDER, resource.RLIM_INFINITY)
difference = float((weights - others).norm() / others.norm())
print(json.dumps({"rung": held.rung, "steps": held.steps, "difference": difference}))
"""


def test_a_real_shortage_changes_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-c", REAL, str(tmp_path)]
    paths = f"{Path(__file__).parent}:{Path(__file__).parents[1]}"
    environment = ENVIRONMENT["steady"] | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}  # free memory is given back
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(done.stdout)
    assert found["rung"] > 0
    assert found["steps"] == 2
    assert found["difference"] < 1e-6


# ---- data that is wrong


def tokens(**wrong: int) -> NDArray[np.int64]:
    """Numbers of which a sequence may have one that is no token."""
    found = np.arange(40 * 7).reshape(40, 7) % 9
    for name, token in wrong.items():
        found[int(name.removeprefix("at_")), 3] = token
    return found


def test_what_is_wrong_with_the_training_part_is_known_before_the_first_step(tmp_path: Path) -> None:
    plan = plan_of(vocab=9, features=None)
    with pytest.raises(MisuseError, match="sequence 7, step 3 is 9"):
        train(tmp_path, tokens(at_7=9), plan=plan)
    assert load(tmp_path / "run" / "checkpoints") is None


def test_what_is_wrong_with_the_validation_part_is_known_before_the_first_step(tmp_path: Path) -> None:
    data = numbers()
    data[39:, 5, 1] = np.nan
    for seed in range(40):  # until that one is kept for validation
        if 39 in cuts.chosen_share(40, 0.1, seed)[0]:
            break
    with pytest.raises(MisuseError, match="sequence 39, step 5, column 1 is nan"):
        train(tmp_path, data, validation=0.1, seed=seed)
    assert load(tmp_path / "run" / "checkpoints") is None


class Spoiled:
    """A Dataset that has a NaN from some time on."""

    lengths = (6,) * 40

    def __init__(self, after: int) -> None:
        self.asked, self.after, self.data = 0, after, numbers()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.asked += 1
        found = self.data[index] * (np.nan if self.asked > self.after else 1)
        return found[:, :2], found[:, 2:]


def test_an_error_in_the_data_loses_no_step_before_it(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", Spoiled(10**9), epochs=2, normalise="none")
    with pytest.raises(MisuseError, match="is nan"):
        train(tmp_path, Spoiled(3 * 8 + 5), epochs=2, normalise="none")
    last = load(tmp_path / "run" / "checkpoints")
    assert last is not None
    assert last.step == 3
    mended = train(tmp_path, Spoiled(10**9), epochs=2, normalise="none", resume=True)
    assert torch.equal(weights(whole.model), weights(mended.model))


# ---- what it learns


def adding(rows: int, steps: int) -> NDArray[np.float32]:
    """The adding problem: the sum of the two numbers that are marked, known at the last step."""
    dice = np.random.default_rng(0)
    found = np.zeros((rows, steps, 3), dtype=np.float32)
    found[..., 0] = dice.random((rows, steps))
    for row in found:
        row[dice.choice(steps, 2, replace=False), 1] = 1
    found[..., 2] = (found[..., 0] * found[..., 1]).sum(axis=1, keepdims=True)
    return found


def test_the_losses_are_those_of_a_loop_by_hand(tmp_path: Path) -> None:
    plan, data = plan_of(seq=12, batch=10, rungs=((5, 3),), head="last-step"), adding(100, 12)
    result = train(tmp_path, data, plan=plan, steps=50, normalise="none")
    torch.manual_seed(0)
    model = build(plan.spec)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    order = loader_order(plan.spec, data)
    losses = []
    for rows in order:
        outputs, _ = model(torch.from_numpy(data[rows, :, :2]).transpose(0, 1), None)
        loss = nn.functional.mse_loss(outputs, torch.from_numpy(data[rows, -1, 2:]))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = [float(row["loss"]) for row in rows_of(result.run)]
    assert found == pytest.approx(losses, rel=1e-5)


def loader_order(spec: Spec, data: NDArray[np.float32]) -> Iterator[NDArray[np.int64]]:
    """The sequences of the first 50 batches."""
    from oomguard.data.order import Bucket as Lengths
    from oomguard.data.order import Order

    lengths = np.full(len(data), spec.steps)
    order = Order(lengths=lengths, buckets=(Lengths(longest=spec.steps, microbatch=5),), batch=spec.batch)
    for number in range(50):
        yield order.epoch(number // len(order)).sequences(number % len(order))


def test_buckets_give_the_weights_of_a_run_without_them(tmp_path: Path) -> None:
    plan = plan_of(seq=8)
    some = numbers(rows=40, steps=8)
    pairs = [(one[: 3 + i % 6, :2], one[: 3 + i % 6, 2:]) for i, one in enumerate(some)]
    large = msgspec.structs.replace(plan.candidate, microbatch=8)
    small = msgspec.structs.replace(plan.candidate, microbatch=3, accumulation=3, segments=2)
    made = [Bucket(longest=n, sequences=20, candidate=c, expected=plan.expected) for n, c in ((5, large), (8, small))]
    other = [Bucket(longest=n, sequences=20, candidate=large, expected=plan.expected) for n in (5, 8)]
    one = train(tmp_path / "one", pairs, plan=msgspec.structs.replace(plan, buckets=tuple(made)), epochs=2)
    two = train(tmp_path / "two", pairs, plan=msgspec.structs.replace(plan, buckets=tuple(other)), epochs=2)
    assert difference(one.model, two.model) < 1e-5


def test_worker_processes_change_nothing(tmp_path: Path) -> None:
    one, two = (train(tmp_path / str(n), epochs=2, workers=n) for n in (0, 1))
    assert torch.equal(weights(one.model), weights(two.model))


def sized(monkeypatch: pytest.MonkeyPatch, shared_bytes: int, ranks: Ranks, device: str, **asked: Any) -> Loader:
    """The loader of a training on a machine of four cores with so much of /dev/shm."""
    monkeypatch.setattr(start, "cores", lambda: 4)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=shared_bytes))
    plan, options = plan_of(), DataOptions(**asked)
    data = open_data(numbers(), plan.spec, options)
    job = Job(plan=plan, options=TrainOptions(), data_options=options, data=data, home=Path())
    return start._loader(job, cast(Any, SimpleNamespace(name=device)), ranks)


@pytest.mark.parametrize(("shared_bytes", "workers"), [(0, 0), (400 * MIB, 2), (GIB, 3)])
def test_workers_for_a_card_fit_into_shared_memory(
    monkeypatch: pytest.MonkeyPatch, shared_bytes: int, workers: int
) -> None:
    assert sized(monkeypatch, shared_bytes, Ranks(), "cuda:0").workers == workers


@pytest.mark.parametrize(("shared_bytes", "prefetch"), [(0, 1), (GIB, 2)])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_workers_that_were_asked_for_prepare_no_more_than_fits(
    monkeypatch: pytest.MonkeyPatch, shared_bytes: int, prefetch: int, device: str
) -> None:
    found = sized(monkeypatch, shared_bytes, Ranks(), device, workers=3)
    assert (found.workers, found.prefetch) == (3, prefetch)


@pytest.mark.parametrize("asked", [{}, {"workers": 2}])
def test_processes_that_train_together_start_no_workers_that_they_do_not_use(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, int]
) -> None:
    assert sized(monkeypatch, GIB, Ranks(rank=1, world=2), "cuda:0", **asked).workers == 0


def test_workers_that_are_killed_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(rungs=((2, 1),), dropout=0.5, layers=2)
    whole = train(tmp_path / "whole", plan=plan, epochs=3)
    before, passes = {child.pid for child in psutil.Process().children()}, [0]

    def killing(*given: Any) -> Tensor:
        passes[0] += 1
        if passes[0] in (6, 31):  # in the second and in the eighth step
            [*(child.kill() for child in psutil.Process().children() if child.pid not in before)]
        return backward(*given)

    monkeypatch.setattr(step_file, "backward", killing)
    mended = train(tmp_path / "mended", plan=plan, epochs=3, workers=2)
    assert torch.equal(weights(whole.model), weights(mended.model))
    told = [event for event in Events(mended.run / "events.jsonl").read() if event.kind == "worker"]
    assert [event.figures["workers"] for event in told] == [1, 0]
    assert all(event.reason.startswith("A process that loads data was lost") for event in told)


# ---- rates, validation, stopping


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 5 / 6, 4 / 6, 0.5, 2 / 6, 1 / 6]),
        ({"schedule": "step", "decay_every": 2, "decay": 0.5}, [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ({"warmup": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
    ],
)
def test_the_rate_follows_its_schedule(options: dict[str, Any], rates: list[float]) -> None:
    asked = TrainOptions(lr=1.0, **options)
    assert [rate_at(asked, step, 6) for step in range(6)] == pytest.approx(rates)


def test_the_metrics_have_a_row_for_each_step(tmp_path: Path) -> None:
    result = train(tmp_path, validation=0.2, epochs=2, clip=1.0, schedule="linear")
    rows = rows_of(result.run)
    assert [int(row["step"]) for row in rows] == [*range(1, 9)]
    assert [bool(row["validation_loss"]) for row in rows] == [False, False, False, True] * 2
    assert all(float(row["norm"]) > 0 for row in rows)
    assert float(rows[-1]["lr"]) == pytest.approx(0.01 / 8)


def test_it_stops_after_validations_without_a_new_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 2.0, 2.5, 2.0, 1.0])
    monkeypatch.setattr(loop, "validate", lambda *_: next(losses))
    result = train(tmp_path, validation=0.2, epochs=9, validate_every=2, patience=2)
    assert (result.ended, result.steps, result.validation_loss) == ("patience", 8, 2.0)


def test_a_validation_without_a_number_is_no_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([float("nan"), 2.0, float("nan"), float("inf")])
    monkeypatch.setattr(loop, "validate", lambda *_: next(losses))
    result = train(tmp_path, validation=0.2, epochs=4)
    best = load(result.run / "best")
    assert best is not None
    assert (result.validation_loss, best.step) == (2.0, 8)


@pytest.mark.parametrize("asked", [{"patience": 1}, {"validate_every": 3}])
def test_what_needs_validation_is_refused_without(tmp_path: Path, asked: dict[str, int]) -> None:
    with pytest.raises(MisuseError, match=r"needs data that is kept for validation, but got --validation 0\."):
        train(tmp_path, **asked)


def test_the_validation_loss_is_the_mean_over_all_targets(tmp_path: Path) -> None:
    result = train(tmp_path, validation=0.2, lr=1e-12)
    source = oomguard_validation(result)
    assert result.validation_loss == pytest.approx(source, rel=1e-5)


def oomguard_validation(result: Result) -> float:
    source = open_data(numbers(), result.model.spec, DataOptions(validation=0.2)).validation
    assert source is not None
    pairs = [source[i] for i in range(len(source))]
    inputs, targets = (torch.from_numpy(np.stack(part)).transpose(0, 1) for part in zip(*pairs, strict=True))
    assert count_targets(result.model.spec, Microbatch(inputs, targets)) == inputs.shape[0] * inputs.shape[1]
    return float(nn.functional.mse_loss(result.model(inputs, None)[0].detach(), targets))


def short_of_rows(most: int) -> Callable[..., Tensor]:
    """An evaluation for which memory is enough for so many sequences only."""

    def found(model: Recurrent, batch: Microbatch, candidate: Candidate) -> Tensor:
        if batch.inputs.shape[1] > most:
            raise RuntimeError(SHORT)
        return evaluate(model, batch, candidate)

    return found


def test_a_shortage_in_validation_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(tmp_path / "whole", validation=0.2)
    monkeypatch.setattr(evaluate_file, "evaluate", short_of_rows(3))
    mended = train(tmp_path / "mended", validation=0.2)
    assert mended.validation_loss == pytest.approx(whole.validation_loss, rel=1e-6)


def test_a_validation_that_cannot_be_made_ends_the_run_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_file, "evaluate", short_of_rows(0))
    with pytest.raises(GuardError, match="one sequence must fit"):
        train(tmp_path, validation=0.2)
    last = load(tmp_path / "run" / "checkpoints")
    assert last is not None
    assert last.step == 4


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_validation_takes_more_sequences_at_once_and_no_more_memory(cell: str) -> None:
    spec, candidate = Spec(cell=cell, seq=1000), Candidate(microbatch=4, accumulation=8)  # type: ignore[arg-type]
    found = evaluation_candidate(spec, candidate, CPU)
    assert found.microbatch > candidate.microbatch
    most_bytes = estimate_step(spec, candidate, CPU).total_bytes
    assert estimate_step(spec, found, CPU, training=False).total_bytes <= most_bytes


@pytest.mark.parametrize("wrong", [{"lr": 0}, {"epochs": 0}, {"schedule": "cosin"}, {"save_every": "soon"}])
def test_wrong_options_are_misuse(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(MisuseError):
        train(tmp_path, **wrong)


def test_a_plan_may_be_the_path_of_one(tmp_path: Path) -> None:
    oomguard.save_plan(plan_of(), tmp_path / "plan.json")
    assert train(tmp_path, plan=tmp_path / "plan.json", steps=1).steps == 1


def test_what_is_no_plan_is_misuse(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"executes a plan.*but got 3"):
        train(tmp_path, plan=3)


def test_an_unknown_option_is_misuse_and_the_likeliest_is_named(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="epochs"):
        train(tmp_path, epoch=3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_almost_the_same(tmp_path: Path, precision: str) -> None:
    whole = train(tmp_path / "whole", epochs=2)
    half = train(tmp_path / "half", plan=plan_of(knobs={"precision": precision}), epochs=2)
    assert half.loss == pytest.approx(whole.loss, rel=0.1)


def test_a_loss_that_is_no_number_is_told_once(tmp_path: Path) -> None:
    result = train(tmp_path, numbers() * 1e30, normalise="none")
    assert kinds(result).count("not-finite") == 1


# ---- models of ones own, the environment


def own_model(spec: Spec) -> Recurrent:
    model = build(spec)
    nn.init.zeros_(model.head.weight)
    return model


@pytest.mark.parametrize("model", [own_model, "own:build"])
def test_a_function_may_build_the_model(
    tmp_path: Path, model: Callable[[Spec], Recurrent] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "own", SimpleNamespace(build=own_model))
    result = train(tmp_path, model=model, lr=1e-12)
    assert float(result.model.head.weight.detach().abs().max()) < 1e-6


@pytest.mark.parametrize("model", [lambda spec: nn.Linear(2, 1), "nowhere:model"])
def test_a_model_of_another_kind_is_refused(tmp_path: Path, model: Any) -> None:
    with pytest.raises(MisuseError, match="A model of your own"):
        train(tmp_path, model=model)


def test_without_the_plans_environment_there_is_a_warning(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(plan_of(), exports={"SOMETHING_": "1"})
    with pytest.warns(UserWarning, match="SOMETHING_=1"):
        train(tmp_path, plan=plan)


def test_a_plan_for_another_processor_is_refused(tmp_path: Path) -> None:
    plan = plan_of()
    other = msgspec.structs.replace(plan, environment=msgspec.structs.replace(plan.environment, title="Another"))
    with pytest.raises(MisuseError, match="made on Another"):
        train(tmp_path, plan=other)
