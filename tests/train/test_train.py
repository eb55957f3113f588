"""The trainer: its results, its files, and that running out of memory changes neither."""

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
from oomguard import _step as step_file
from oomguard._core.errors import GuardError, MisuseError, TornUpdateError
from oomguard._core.units import GIB, MIB
from oomguard._data.loader import Loader
from oomguard._data.open import open_data
from oomguard._data.options import DataOptions
from oomguard._data.order import chosen_share
from oomguard._device.cpu import Cpu
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.malloc import ENVIRONMENT
from oomguard._estimate.target import CPU
from oomguard._guard import ladder
from oomguard._guard.events import Events
from oomguard._plan.buckets import Bucket
from oomguard._rnn import Microbatch, backward, count_targets, evaluate
from oomguard._rnn.model import Recurrent, build
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec
from oomguard._train import TrainOptions, learning_rate, loop, start
from oomguard._train import evaluate as evaluate_file
from oomguard._train.checkpoint import load
from oomguard._train.evaluate import evaluation_candidate
from oomguard._train.loop import Result, TrainConfig
from oomguard._train.ranks import Ranks
from oomguard._train.settings import RunSettings

SHORT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."


def train(tmp_path: Path, data: Any = None, **options: Any) -> Result:
    plan = options.pop("plan", None) or plan_of()
    usual: dict[str, Any] = {"run": str(tmp_path / "run"), "validation": 0, "lr": 0.01}
    return oomguard.train(plan, numbers() if data is None else data, **usual | options)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def difference(model: nn.Module, other: nn.Module) -> float:
    return float((weights(model) - weights(other)).norm() / weights(model).norm())


def rows_of(run: Path) -> list[dict[str, str]]:
    with open(run / "metrics.csv", newline="") as file:
        return [*csv.DictReader(file)]


def kinds(result: Result) -> list[str]:
    return [event.kind for event in Events(result.run / "events.jsonl").read()]


# ---- running out of memory


class Shortage:
    """Raises an out-of-memory error once in each of the first `steps` steps, and records the sequences trained on.

    The first input of each sequence is its number.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
        self.rng, self.steps = Random(0), steps
        self.seen: list[int] = []
        self.done: list[int] = []
        self.raised, self.due = 0, True
        self.count = loop.Trainer._finish_step
        monkeypatch.setattr(step_file, "backward", self.run)
        monkeypatch.setattr(loop.Trainer, "_finish_step", lambda *given: self.step(*given))
        monkeypatch.setattr(Cpu, "release", lambda _: None)  # takes a quarter of a second in a large process

    def run(self, model: Recurrent, batch: Microbatch, *rest: Any) -> Tensor:
        rows = batch.inputs.shape[1]
        if self.due and (self.rng.random() < 0.3 or len(self.seen) + rows == model.spec.batch):
            self.due, self.seen = False, []
            self.raised += 1
            raise torch.OutOfMemoryError(SHORT) if self.raised % 2 else RuntimeError(SHORT)
        loss = backward(model, batch, *rest)
        self.seen += [round(float(number)) for number in batch.inputs[0, :, 0]]
        return loss

    def step(self, trainer: Any, *rest: Any) -> None:
        self.done += self.seen
        self.seen, self.due = [], self.raised < self.steps
        self.count(trainer, *rest)


def numbered_data(rows: int = 40) -> NDArray[np.float32]:
    data = numbers(rows)
    data[:, 0, 0] = np.arange(rows)
    return data


def test_running_out_of_memory_in_every_step_changes_no_weights_and_loses_no_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"plan": plan_of(layers=2), "epochs": 6, "normalise": "none", "clip": 1.0}
    whole = train(tmp_path / "whole", numbered_data(), **options)
    shortage = Shortage(monkeypatch, steps=30)
    mended = train(tmp_path / "mended", numbered_data(), **options)
    assert mended.steps == whole.steps == 30
    assert shortage.raised == 30
    assert sorted(shortage.done) == sorted([*range(40)] * 6)
    assert difference(whole.model, mended.model) < 1e-6


def test_training_climbs_back_to_the_plan_after_a_shortage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "FIRST_WAIT", 5)
    monkeypatch.setattr(ladder.LadderPosition, "may_climb", property(lambda own: own.rung > 0 and own.quiet >= 5))
    Shortage(monkeypatch, steps=1)
    result = train(tmp_path, epochs=3)
    assert result.rung == 0
    assert kinds(result) == ["oom", "climb"]


def test_failing_on_the_last_rung_leaves_a_checkpoint_from_before_the_step(
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
        if calls[0] == 7 or (len(given[0]) > 2 and calls[0] > 7):  # from then on, only a few weights fit at once
            raise RuntimeError(SHORT)
        return root(*given)

    monkeypatch.setattr(torch, "_foreach_sqrt", failing)
    mended = train(tmp_path / "mended", epochs=2, save_every="3")
    assert torch.equal(weights(whole.model), weights(mended.model))
    assert [int(row["step"]) for row in rows_of(mended.run)] == [*range(1, 11)]


def test_after_a_torn_update_the_old_weights_are_freed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, alive = start._trainer, []

    def counting(*given: Any) -> loop.Trainer:
        gc.collect()
        alive.append(sum(model() is not None for model in models))
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
from oomguard._device import cpu, proc

LADDER = ((64, 1), (8, 1), (4, 2))  # only on the first rung are tensors larger than 64 KiB, so it is the one that fails
data = numbers(rows=128, steps=60)

def trained(name, rungs, limit_bytes):
    cpu._inherited_bytes = None
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.RLIM_INFINITY))
    plan = plan_of(rungs=rungs, seq=60, hidden=256, batch=64)
    result = oomguard.train(plan, data, validation=0, run=f"{sys.argv[1]}/{name}")
    return result, torch.cat([p.detach().flatten() for p in result.model.parameters()])

trained("loads all libraries", LADDER[-1:], resource.RLIM_INFINITY)
held, weights = trained("held", LADDER, proc.read_status().committed_bytes + (24 << 20))
_, others = trained("whole", LADDER, resource.RLIM_INFINITY)
difference = float((weights - others).norm() / others.norm())
print(json.dumps({"rung": held.rung, "steps": held.steps, "difference": difference}))
"""


def test_a_real_memory_shortage_changes_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-c", REAL, str(tmp_path)]
    paths = f"{Path(__file__).parents[1]}:{Path(__file__).parents[2]}"
    # this allocator setting returns freed memory to the system at once
    environment = ENVIRONMENT["tight"] | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(done.stdout)
    assert report["rung"] > 0
    assert report["steps"] == 2
    assert report["difference"] < 1e-6


# ---- errors in the data


def tokens(**wrong: int) -> NDArray[np.int64]:
    """Tokens; `at_7=9` puts token 9 into sequence 7."""
    data = np.arange(40 * 7).reshape(40, 7) % 9
    for name, token in wrong.items():
        data[int(name.removeprefix("at_")), 3] = token
    return data


def test_an_error_in_the_training_data_is_found_before_the_first_step(tmp_path: Path) -> None:
    plan = plan_of(vocab=9, features=None)
    with pytest.raises(MisuseError, match="sequence 7, step 3 is 9"):
        train(tmp_path, tokens(at_7=9), plan=plan)
    assert load(tmp_path / "run" / "checkpoints") is None


def test_an_error_in_the_validation_data_is_found_before_the_first_step(tmp_path: Path) -> None:
    data = numbers()
    data[39:, 5, 1] = np.nan
    for seed in range(40):  # until sequence 39 is in the validation part
        if 39 in chosen_share(40, 0.1, seed)[0]:
            break
    with pytest.raises(MisuseError, match="sequence 39, step 5, column 1 is nan"):
        train(tmp_path, data, validation=0.1, seed=seed)
    assert load(tmp_path / "run" / "checkpoints") is None


class Spoiled:
    """A Dataset that returns NaN after some number of reads."""

    lengths = (6,) * 40

    def __init__(self, after: int) -> None:
        self.asked, self.after, self.data = 0, after, numbers()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.asked += 1
        values = self.data[index] * (np.nan if self.asked > self.after else 1)
        return values[:, :2], values[:, 2:]


def test_an_error_in_the_data_loses_no_step_before_it(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", Spoiled(10**9), epochs=2, normalise="none")
    with pytest.raises(MisuseError, match="is nan"):
        train(tmp_path, Spoiled(3 * 8 + 5), epochs=2, normalise="none")
    last = load(tmp_path / "run" / "checkpoints")
    assert last is not None
    assert last.step == 3
    mended = train(tmp_path, Spoiled(10**9), epochs=2, normalise="none", resume=True)
    assert torch.equal(weights(whole.model), weights(mended.model))


# ---- results of the training


def adding_problem(rows: int, steps: int) -> NDArray[np.float32]:
    """The adding problem: the target is the sum of the two marked numbers."""
    rng = np.random.default_rng(0)
    data = np.zeros((rows, steps, 3), dtype=np.float32)
    data[..., 0] = rng.random((rows, steps))
    for row in data:
        row[rng.choice(steps, 2, replace=False), 1] = 1
    data[..., 2] = (data[..., 0] * data[..., 1]).sum(axis=1, keepdims=True)
    return data


def test_the_losses_equal_those_of_a_handwritten_loop(tmp_path: Path) -> None:
    plan, data = plan_of(seq=12, batch=10, rungs=((5, 3),), head="last-step"), adding_problem(100, 12)
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
    logged = [float(row["loss"]) for row in rows_of(result.run)]
    assert logged == pytest.approx(losses, rel=1e-5)


def loader_order(spec: Spec, data: NDArray[np.float32]) -> Iterator[NDArray[np.int64]]:
    """The sequences of the first 50 batches."""
    from oomguard._data.order import Order

    lengths = np.full(len(data), spec.steps)
    order = Order(lengths=lengths, buckets={spec.steps: 5}, batch=spec.batch)
    for number in range(50):
        yield next(order.batches(number // len(order), number % len(order)))[1]


def test_buckets_give_the_weights_of_a_run_without_them(tmp_path: Path) -> None:
    plan = plan_of(seq=8)
    few = numbers(rows=40, steps=8)
    pairs = [(sequence[: 3 + i % 6, :2], sequence[: 3 + i % 6, 2:]) for i, sequence in enumerate(few)]
    large = msgspec.structs.replace(plan.candidate, microbatch=8)
    small = msgspec.structs.replace(plan.candidate, microbatch=3, accumulation=3, segments=2)
    made = [Bucket(longest=n, sequences=20, candidate=c, expected=plan.expected) for n, c in ((5, large), (8, small))]
    other = [Bucket(longest=n, sequences=20, candidate=large, expected=plan.expected) for n in (5, 8)]
    first = train(tmp_path / "one", pairs, plan=msgspec.structs.replace(plan, buckets=tuple(made)), epochs=2)
    second = train(tmp_path / "two", pairs, plan=msgspec.structs.replace(plan, buckets=tuple(other)), epochs=2)
    assert difference(first.model, second.model) < 1e-5


def test_worker_processes_change_nothing(tmp_path: Path) -> None:
    without, with_worker = (train(tmp_path / str(n), epochs=2, workers=n) for n in (0, 1))
    assert torch.equal(weights(without.model), weights(with_worker.model))


def make_loader(monkeypatch: pytest.MonkeyPatch, shared_bytes: int, ranks: Ranks, device: str, **asked: Any) -> Loader:
    """The loader of a training on a machine with four cores and `shared_bytes` of /dev/shm."""
    monkeypatch.setattr(start, "cores", lambda: 4)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=shared_bytes))
    plan, options = plan_of(), DataOptions(**asked)
    data = open_data(numbers(), plan.spec, options)
    settings = RunSettings(options=options)
    config = TrainConfig(plan=plan, options=settings.train, settings=settings, data=data, directory=Path(), ranks=ranks)
    return start._loader(config, cast(Any, SimpleNamespace(name=device)))


@pytest.mark.parametrize(("shared_bytes", "workers"), [(0, 0), (400 * MIB, 2), (GIB, 3)])
def test_workers_for_a_card_fit_into_shared_memory(
    monkeypatch: pytest.MonkeyPatch, shared_bytes: int, workers: int
) -> None:
    assert make_loader(monkeypatch, shared_bytes, Ranks(), "cuda:0").workers == workers


@pytest.mark.parametrize(("shared_bytes", "prefetch"), [(0, 1), (GIB, 2)])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_requested_workers_prepare_no_more_than_fits(
    monkeypatch: pytest.MonkeyPatch, shared_bytes: int, prefetch: int, device: str
) -> None:
    loader = make_loader(monkeypatch, shared_bytes, Ranks(), device, workers=3)
    assert (loader.workers, loader.prefetch) == (3, prefetch)


@pytest.mark.parametrize("asked", [{}, {"workers": 2}])
def test_several_training_processes_start_no_workers(monkeypatch: pytest.MonkeyPatch, asked: dict[str, int]) -> None:
    assert make_loader(monkeypatch, GIB, Ranks(rank=1, world=2), "cuda:0", **asked).workers == 0


def test_workers_that_are_killed_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(rungs=((2, 1),), dropout=0.5, layers=2)
    whole = train(tmp_path / "whole", plan=plan, epochs=3)
    before, passes = {child.pid for child in psutil.Process().children()}, [0]

    def killing(*given: Any) -> Tensor:
        passes[0] += 1
        if passes[0] in (6, 31):  # in the second and the eighth step
            [*(child.kill() for child in psutil.Process().children() if child.pid not in before)]
        return backward(*given)

    monkeypatch.setattr(step_file, "backward", killing)
    mended = train(tmp_path / "mended", plan=plan, epochs=3, workers=2)
    assert torch.equal(weights(whole.model), weights(mended.model))
    events = [event for event in Events(mended.run / "events.jsonl").read() if event.kind == "worker"]
    assert [event.figures["workers"] for event in events] == [1, 0]
    assert all(event.reason.startswith("A process that loads data was lost") for event in events)


# ---- learning rate, validation, stopping


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1, 1, 1]),
        ({"schedule": "cosine", "warmup": 2}, [0.5, 1, 1, 0.5 + 0.125**0.5, 0.5, 0.5 - 0.125**0.5]),
        ({"schedule": "linear"}, [1, 5 / 6, 4 / 6, 0.5, 2 / 6, 1 / 6]),
        ({"schedule": "step", "decay_every": 2, "decay": 0.5}, [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ({"warmup": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
    ],
)
def test_the_learning_rate_follows_its_schedule(options: dict[str, Any], rates: list[float]) -> None:
    asked = TrainOptions(lr=1.0, **options)
    assert [learning_rate(asked, step, 6) for step in range(6)] == pytest.approx(rates)


def test_the_metrics_have_a_row_for_each_step(tmp_path: Path) -> None:
    result = train(tmp_path, validation=0.2, epochs=2, clip=1.0, schedule="linear")
    rows = rows_of(result.run)
    assert [int(row["step"]) for row in rows] == [*range(1, 9)]
    assert [bool(row["validation_loss"]) for row in rows] == [False, False, False, True] * 2
    assert all(float(row["norm"]) > 0 for row in rows)
    assert float(rows[-1]["lr"]) == pytest.approx(0.01 / 8)


def test_training_stops_after_validations_without_a_new_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 2.0, 2.5, 2.0, 1.0])
    monkeypatch.setattr(loop, "validate", lambda *_: next(losses))
    result = train(tmp_path, validation=0.2, epochs=9, validate_every=2, patience=2)
    assert (result.ended, result.steps, result.validation_loss) == ("patience", 8, 2.0)


def test_a_validation_loss_of_nan_or_infinity_is_never_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([float("nan"), 2.0, float("nan"), float("inf")])
    monkeypatch.setattr(loop, "validate", lambda *_: next(losses))
    result = train(tmp_path, validation=0.2, epochs=4)
    best = load(result.run / "best")
    assert best is not None
    assert (result.validation_loss, best.step) == (2.0, 8)


@pytest.mark.parametrize("asked", [{"patience": 1}, {"validate_every": 3}])
def test_options_for_validation_need_validation_data(tmp_path: Path, asked: dict[str, int]) -> None:
    with pytest.raises(MisuseError, match=r"needs data for validation, but got --validation 0\."):
        train(tmp_path, **asked)


def test_the_validation_loss_is_the_mean_over_all_targets(tmp_path: Path) -> None:
    result = train(tmp_path, validation=0.2, lr=1e-12)
    source = expected_validation_loss(result)
    assert result.validation_loss == pytest.approx(source, rel=1e-5)


def expected_validation_loss(result: Result) -> float:
    source = open_data(numbers(), result.model.spec, DataOptions(validation=0.2)).validation
    assert source is not None
    pairs = [source[i] for i in range(len(source))]
    inputs, targets = (torch.from_numpy(np.stack(part)).transpose(0, 1) for part in zip(*pairs, strict=True))
    assert count_targets(result.model.spec, Microbatch(inputs, targets)) == inputs.shape[0] * inputs.shape[1]
    return float(nn.functional.mse_loss(result.model(inputs, None)[0].detach(), targets))


def fits_at_most(most: int) -> Callable[..., Tensor]:
    """An evaluation that runs out of memory with more than `most` sequences."""

    def evaluate_some(model: Recurrent, batch: Microbatch, candidate: Candidate) -> Tensor:
        if batch.inputs.shape[1] > most:
            raise RuntimeError(SHORT)
        return evaluate(model, batch, candidate)

    return evaluate_some


def test_running_out_of_memory_in_validation_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(tmp_path / "whole", validation=0.2)
    monkeypatch.setattr(evaluate_file, "evaluate", fits_at_most(3))
    mended = train(tmp_path / "mended", validation=0.2)
    assert mended.validation_loss == pytest.approx(whole.validation_loss, rel=1e-6)


def test_a_validation_that_does_not_fit_ends_the_run_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_file, "evaluate", fits_at_most(0))
    with pytest.raises(GuardError, match="one sequence must fit"):
        train(tmp_path, validation=0.2)
    last = load(tmp_path / "run" / "checkpoints")
    assert last is not None
    assert last.step == 4


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_validation_uses_larger_microbatches_but_no_more_memory(cell: str) -> None:
    spec, candidate = Spec(cell=cell, seq=1000), Candidate(microbatch=4, accumulation=8)  # type: ignore[arg-type]
    evaluation = evaluation_candidate(spec, candidate, CPU)
    assert evaluation.microbatch > candidate.microbatch
    most_bytes = estimate_step(spec, candidate, CPU).total_bytes
    assert estimate_step(spec, evaluation, CPU, training=False).total_bytes <= most_bytes


@pytest.mark.parametrize("wrong", [{"lr": 0}, {"epochs": 0}, {"schedule": "cosin"}, {"save_every": "soon"}])
def test_invalid_options_are_errors(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(MisuseError):
        train(tmp_path, **wrong)


def test_a_plan_can_be_given_by_its_path(tmp_path: Path) -> None:
    oomguard.save_plan(plan_of(), tmp_path / "plan.json")
    assert train(tmp_path, plan=tmp_path / "plan.json", steps=1).steps == 1


def test_training_something_else_than_a_plan_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"takes a plan.*but got 3"):
        train(tmp_path, plan=3)


def test_the_error_for_an_unknown_option_suggests_a_name(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="epochs"):
        train(tmp_path, epoch=3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_almost_the_same(tmp_path: Path, precision: str) -> None:
    whole = train(tmp_path / "whole", epochs=2)
    half = train(tmp_path / "half", plan=plan_of(knobs={"precision": precision}), epochs=2)
    assert half.loss == pytest.approx(whole.loss, rel=0.1)


def test_a_loss_that_is_not_finite_is_reported_once(tmp_path: Path) -> None:
    result = train(tmp_path, numbers() * 1e30, normalise="none")
    assert kinds(result).count("not-finite") == 1


# ---- custom models, the environment


def own_model(spec: Spec) -> Recurrent:
    model = build(spec)
    nn.init.zeros_(model.head.weight)
    return model


@pytest.mark.parametrize("model", [own_model, "own:build"])
def test_a_function_can_build_the_model(
    tmp_path: Path, model: Callable[[Spec], Recurrent] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "own", SimpleNamespace(build=own_model))
    result = train(tmp_path, model=model, lr=1e-12)
    assert float(result.model.head.weight.detach().abs().max()) < 1e-6


@pytest.mark.parametrize("model", [lambda spec: nn.Linear(2, 1), "nowhere:model"])
def test_a_model_of_another_type_is_an_error(tmp_path: Path, model: Any) -> None:
    with pytest.raises(MisuseError, match="A model of your own"):
        train(tmp_path, model=model)


def test_missing_environment_variables_of_the_plan_are_a_warning(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(plan_of(), exports={"SOMETHING_": "1"})
    with pytest.warns(UserWarning, match="SOMETHING_=1"):
        train(tmp_path, plan=plan)


def test_a_plan_for_another_processor_is_an_error(tmp_path: Path) -> None:
    plan = plan_of()
    other = msgspec.structs.replace(plan, environment=msgspec.structs.replace(plan.environment, title="Another"))
    with pytest.raises(MisuseError, match="made on Another"):
        train(tmp_path, plan=other)
