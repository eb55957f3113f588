"""The callback of Lightning: the weights of the undisturbed training, in pieces and when memory runs out."""

import copy
import csv
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch
import msgspec
import numpy as np
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import oomguard
from oomguard._device.cpu import Cpu
from oomguard._plan.task_value import TaskPlan
from oomguard.integrations import _lightning_task as own
from oomguard.integrations._fit import optimizer_of
from oomguard.integrations._lightning_steps import _Given
from oomguard.integrations.lightning import OomGuard

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Lightning warns of few workers, few batches and missing loggers
    pytest.mark.timeout(300),  # a plan starts processes that import PyTorch and both packages
]
ROWS, STEPS = 16, 12
QUIET = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
SAME: Any = {"rel": 1e-5, "abs": 1e-7}


class Trouble:
    """How often memory runs out, by the kind of step, and what the steps have seen."""

    def __init__(self, **times: int) -> None:
        self.times, self.rows, self.evaluated, self.draws = times, list[int](), list[int](), list[float]()

    def strikes(self, kind: str) -> bool:
        self.times[kind] = self.times.get(kind, 0) - 1
        return self.times[kind] >= 0

    def strike(self, kind: str) -> None:
        if self.strikes(kind):
            torch.empty(1 << 50)  # more than any machine has


class Steps:
    """A GRU with a mean loss, as a mixin for the modules of both packages."""

    def __init__(self, batch_size: int = ROWS, **times: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 6, batch_first=True), nn.Linear(6, 1)
        self.seen, self.batch_size, self.trouble = torch.zeros(()), batch_size, Trouble(**times)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return mse_loss(self.head(self.rnn(batch[0])[0][:, -1]), batch[1])

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.trouble.rows.append(len(batch[0]))
        self.trouble.draws.append(random.random() + float(np.random.rand()) + float(torch.rand(())))
        self.seen = self.seen + len(batch[0])
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("rows", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        self.trouble.strike("training")
        if loss.requires_grad:
            loss.register_hook(lambda gradient: self.trouble.strike("backward"))
        return {"loss": loss, "error": (batch[1] - 0.5).abs(), "many": len(batch[0])}

    def validation_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.trouble.evaluated.append(len(batch[0]))
        self.trouble.strike("evaluation")
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Any:
        return loader(self.batch_size)


class Forecast(Steps, lightning.pytorch.LightningModule):
    """The module of `lightning`."""


class OldForecast(Steps, pytorch_lightning.LightningModule):
    """The module of `pytorch_lightning`."""


def loader(rows: int = ROWS) -> "DataLoader[Any]":
    """40 series: the last batch is smaller."""
    random_numbers = torch.Generator().manual_seed(1)
    series, targets = (torch.randn(40, *size, generator=random_numbers) for size in ((STEPS, 3), (1,)))
    return DataLoader(TensorDataset(series, targets), batch_size=rows)


def made(kind: Any = Forecast, **named: Any) -> Any:
    torch.manual_seed(0)
    return kind(**named)


def fit(module: Any, *callbacks: Any, package: Any = lightning.pytorch, ckpt_path: Any = None, **options: Any) -> Any:
    loaders = options.pop("loaders", (loader(), loader()))
    trainer = package.Trainer(accelerator="cpu", callbacks=[*callbacks], **{"max_epochs": 2, **QUIET, **options})
    torch.manual_seed(0)
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return trainer


def weights(module: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


@pytest.fixture(scope="module")
def plan() -> TaskPlan:
    """A plan that runs a batch of 16 rows in microbatches of 6, with fallbacks and a size for evaluations."""
    task = oomguard.Task(
        model=lambda: nn.GRU(3, 6, batch_first=True), loss=lambda model, batch: model(batch[0])[0].mean(), data=loader()
    )
    named = oomguard.find_feasible_config(task, device="t4", batch=ROWS, microbatch=6, timeout=200, progress=False)
    where = replace(named.where, device="cpu")
    return replace(named, where=where, budget_bytes=8 << 30, asked_budget_bytes=8 << 30, evaluation_rows=7)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written elsewhere, and no limit on memory stays."""
    monkeypatch.chdir(tmp_path)


# ---- pieces


@pytest.mark.parametrize(("package", "kind"), [(lightning.pytorch, Forecast), (pytorch_lightning, OldForecast)])
def test_microbatches_give_the_weights_and_the_logs_of_whole_batches(package: Any, kind: Any, plan: TaskPlan) -> None:
    plain, ours = made(kind), made(kind)
    expected = fit(plain, package=package)
    trainer = fit(ours, OomGuard("8GiB", plan=plan), package=package)
    assert weights(ours) == pytest.approx(weights(plain), **SAME)
    assert ours.trouble.rows[:8] == [6, 6, 4, 6, 6, 4, 6, 2]
    assert ours.trouble.evaluated[:5] == [7, 7, 2, 7, 7]
    for name, value in expected.callback_metrics.items():
        assert float(trainer.callback_metrics[name]) == pytest.approx(float(value), rel=1e-5), name
    assert trainer.global_step == expected.global_step == 6
    assert not {"training_step", "validation_step", "log"} & {*vars(ours)}


def test_what_a_step_returns_for_a_batch_is_that_of_all_its_pieces(plan: TaskPlan) -> None:
    found: list[Any] = []

    class Outputs(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            found.append(outputs)

    fit(made(), OomGuard(plan=plan), Outputs(), max_steps=1)
    assert found[0]["error"].shape == (ROWS, 1)
    assert found[0]["many"] == 4  # neither a tensor nor a fraction: that of the last piece
    assert not found[0]["loss"].requires_grad


def test_accumulation_and_clipping_are_lightnings_own(plan: TaskPlan) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}
    plain, ours, unclipped = made(), made(), made()
    fit(plain, **options)
    fit(ours, OomGuard(plan=plan), **options)
    fit(unclipped, accumulate_grad_batches=2)
    assert weights(ours) == pytest.approx(weights(plain), **SAME)
    assert weights(ours) != pytest.approx(weights(unclipped), **SAME)


def test_a_known_gradient_is_handed_over_without_a_copy() -> None:
    parameter, gradient = nn.Parameter(torch.zeros(1000)), torch.ones(1000)
    place, known = gradient.data_ptr(), _Given
    loss = known.apply(torch.zeros(()), [gradient], 2.0, parameter)  # type: ignore[no-untyped-call]
    del gradient
    (4 * loss).backward()
    assert parameter.grad is not None
    assert parameter.grad.data_ptr() == place
    assert parameter.grad.tolist() == [2.0] * 1000


def test_a_weight_makes_pieces_of_unequal_weight_exact(plan: TaskPlan) -> None:
    class Masked(Forecast):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            counts = batch[1] > 0
            errors = (self.head(self.rnn(batch[0])[0][:, -1]) - batch[1]).square()
            loss: Tensor = (errors * counts).sum() / counts.sum().clamp(min=1)
            return loss

    plain, ours, unweighted = made(Masked), made(Masked), made(Masked)
    fit(plain)
    fit(ours, OomGuard(plan=plan, weight=lambda batch: (batch[1] > 0).sum()))
    fit(unweighted, OomGuard(plan=plan))
    assert weights(ours) == pytest.approx(weights(plain), **SAME)
    assert weights(unweighted) != pytest.approx(weights(plain), **SAME)


def test_a_piece_without_a_loss_is_skipped(plan: TaskPlan) -> None:
    class Skips(Forecast):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    plain, ours = made(Skips), made(Skips)
    fit(plain)
    fit(ours, OomGuard(plan=plan))
    assert weights(ours) == pytest.approx(weights(plain), **SAME)


def test_a_copy_of_the_module_trains_itself(plan: TaskPlan) -> None:
    class Copies(lightning.pytorch.Callback):
        copied: Any = None

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.copied = copy.deepcopy(module)

    module, copies = made(), Copies()
    guard = OomGuard(plan=plan)
    fit(module, guard, copies, max_steps=1)
    assert copies.copied.training_step.__func__ is Steps.training_step
    assert copies.copied.training_step.__self__ is copies.copied
    copied = copy.deepcopy(guard)
    fit(copies.copied, copied, max_steps=1)
    assert weights(copies.copied) == pytest.approx(weights(module), **SAME)


# ---- when memory runs out


@pytest.mark.parametrize("kind", ["training", "backward"])
def test_a_batch_that_runs_out_of_memory_runs_again_in_smaller_pieces(
    kind: str, plan: TaskPlan, tmp_path: Path
) -> None:
    plain, ours, guard = made(), made(**{kind: 2}), OomGuard(plan=plan)
    fit(plain)
    logger = CSVLogger(tmp_path, name="", version="")
    fit(ours, guard, logger=logger, log_every_n_steps=1)
    assert weights(ours) == pytest.approx(weights(plain), **SAME)
    assert ours.trouble.rows[:7] == [6, 3, 2, 2, 2, 2, 2]
    assert len({*ours.trouble.draws[:3]}) == 1  # all random numbers repeat
    assert ours.seen == plain.seen == 80  # the states of failed attempts are dropped
    assert (guard.rung, [event.kind for event in guard.events]) == (2, ["oom", "oom"])
    assert (tmp_path / "oomguard-events.jsonl").read_text().count('"oom"') == 2
    rows = [*csv.DictReader((tmp_path / "metrics.csv").open())]
    assert {float(row["oomguard/rung"]) for row in rows if row["oomguard/rung"]} == {2.0}
    assert max(float(row["oomguard/peak_mib"] or 0) for row in rows) == pytest.approx(guard.peak_bytes / 2**20)
    assert {float(row["oomguard/events"]) for row in rows if row["oomguard/events"]} == {2.0}
    assert "oomguard/microbatch: 6" in (tmp_path / "hparams.yaml").read_text()


def test_without_a_plan_the_first_attempt_takes_the_whole_batch() -> None:
    plain, ours, guard = made(), made(training=1), OomGuard(plan=False)
    fit(plain)
    fit(ours, guard)
    assert weights(ours) == pytest.approx(weights(plain), **SAME)
    assert ours.trouble.rows[:4] == [16, 8, 8, 8]
    assert guard.rung == 1


class Sgd(torch.optim.SGD):
    """Runs out of memory in the middle of its third update."""

    fails, updates = False, 0

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.updates += 1
        with torch.no_grad():
            for number, parameter in enumerate(self.param_groups[0]["params"]):
                if self.fails and (self.updates, number) == (3, 1):
                    torch.empty(1 << 50)
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.1)
        return loss


def test_an_update_that_runs_out_of_memory_is_completed(plan: TaskPlan) -> None:
    class Updates(Forecast):
        fails = False

        def configure_optimizers(self) -> Any:
            optimizer = Sgd(self.parameters(), lr=0.1)
            optimizer.fails = self.fails
            return optimizer

    plain, ours, guard = made(Updates), made(Updates), OomGuard(plan=plan)
    fit(plain)
    ours.fails = True
    fit(ours, guard)
    assert weights(ours) == pytest.approx(weights(plain), **SAME)
    assert [event.kind for event in guard.events] == ["update"]


def test_a_validation_that_runs_out_of_memory_goes_on_in_smaller_pieces(plan: TaskPlan) -> None:
    plain, ours, guard = made(), made(evaluation=1), OomGuard(plan=plan)
    expected = fit(plain).callback_metrics["val_loss"]
    assert float(fit(ours, guard).callback_metrics["val_loss"]) == pytest.approx(float(expected), rel=1e-5)
    assert ours.trouble.evaluated[:5] == [7, 4, 4, 4, 4]
    assert guard.rung == 0
    assert [event.kind for event in guard.events] == ["evaluation"]


def test_memory_that_runs_out_on_the_last_rung_ends_the_training_and_the_guard() -> None:
    module = made(training=100)
    with pytest.raises(oomguard.GuardError, match="last rung"):
        fit(module, OomGuard(plan=False), default_root_dir="runs")
    assert "training_step" not in vars(module)
    torch.ones(1000).sum()


# ---- batches


def test_an_update_of_more_rows_accumulates_the_batches_that_fit_was_given(plan: TaskPlan) -> None:
    plain, ours = made(), made()
    fit(plain, accumulate_grad_batches=4, loaders=(loader(8),))
    trainer = fit(ours, OomGuard(plan=plan, batch=32), loaders=(loader(8),))
    assert trainer.accumulate_grad_batches == 4
    assert weights(ours) == pytest.approx(weights(plain), **SAME)


def test_an_update_of_more_rows_sets_the_batch_size_of_a_module_that_makes_its_loader(plan: TaskPlan) -> None:
    plain, ours = made(batch_size=20), made(batch_size=8)
    fit(plain, loaders=())
    trainer = fit(ours, OomGuard(plan=plan, batch=20), loaders=())
    assert (trainer.accumulate_grad_batches, ours.batch_size) == (1, 20)
    assert ours.trouble.rows[:4] == [6, 6, 6, 2]
    assert weights(ours) == pytest.approx(weights(plain), **SAME)


def test_rows_that_no_number_of_batches_gives_are_refused(plan: TaskPlan) -> None:
    with pytest.raises(oomguard.MisuseError, match="batch is 30 and those have 16 rows"):
        fit(made(), OomGuard(plan=plan, batch=30))


@pytest.mark.parametrize("own_loader", [True, False])
def test_the_largest_batch_goes_to_the_loader_and_keeps_the_rows_of_an_update(own_loader: bool, plan: TaskPlan) -> None:
    largest = replace(plan, batch=15, candidate=replace(plan.candidate, microbatch=15, accumulation=1), fallbacks=())
    plain, ours = made(), made(batch_size=4)
    fit(plain, loaders=(loader(10),), accumulate_grad_batches=2)
    guard = OomGuard(plan=largest, maximize="batch", batch=20)
    trainer = fit(ours, guard, loaders=() if own_loader else (loader(4),))
    assert trainer.accumulate_grad_batches == 2
    assert ours.trouble.rows == [10] * 8
    assert weights(ours) == pytest.approx(weights(plain), **SAME)


def test_the_largest_batch_of_a_loader_that_cannot_change_is_refused(plan: TaskPlan) -> None:
    with pytest.raises(oomguard.MisuseError, match="The rows of a batch must be settable"):
        fit(made(), OomGuard(plan=plan, maximize="batch"), loaders=([*loader()],))


class Endless(IterableDataset[Any]):
    """Series of unequal length, already collated."""

    def __iter__(self) -> Iterator[Any]:
        for steps in (4, 9, 6):
            yield {"series": torch.randn(5, steps, 3), "name": "a"}, torch.randn(5, 1)


def task_data(module: Any, loaders: Any, **options: Any) -> Any:
    """What a task gets of the loaders of a training, once it has begun."""
    found: list[Any] = []

    class Looks(lightning.pytorch.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            found.extend(own.data_of(trainer, pl_module, 0))
            trainer.should_stop = True

    fit(module, Looks(), loaders=loaders, max_epochs=0, **options)
    return found


def test_samples_by_index_are_collated_by_the_loader_itself() -> None:
    loaders = (loader(),)
    data, rows, steps = task_data(made(), loaders)
    assert (data["data"], rows, steps) == (loaders[0], ROWS, None)


def test_batches_without_indices_are_made_of_the_largest_of_the_first_ones() -> None:
    data, rows, steps = task_data(made(), (DataLoader(Endless(), batch_size=None),))
    assert (rows, steps) == (5, 9)
    (inputs, targets) = data["batch"](12, 64)
    assert inputs["series"].shape == (12, 9, 3)
    assert torch.equal(inputs["series"][:5], inputs["series"][5:10])
    assert targets.shape == (12, 1)


def test_batches_are_those_that_the_step_gets_after_the_hooks_of_their_transfer() -> None:
    class Changes(Forecast):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0].double(), batch[1]

    data, rows, steps = task_data(made(Changes), (loader(),))
    assert (rows, steps) == (ROWS, STEPS)
    assert data["batch"](3, 1)[0].dtype == torch.float64


@pytest.mark.parametrize(("precision", "kind"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16)])
def test_the_task_of_a_module_gets_its_inputs_in_the_precision_of_the_trainer(precision: Any, kind: Any) -> None:
    losses: list[Tensor] = []

    class Looks(lightning.pytorch.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            model = own.TrainedModule(pl_module, trainer.optimizers[0], trainer)
            losses.append(own.loss_of(copy.deepcopy(model), next(iter(loader()))))

    fit(made(), Looks(), max_epochs=0, precision=precision)
    assert losses[0].dtype == kind


def test_a_copy_of_the_task_of_a_module_has_the_optimizer_of_its_own_parameters() -> None:
    found: list[Any] = []

    class Looks(lightning.pytorch.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            found.append(copy.deepcopy(own.TrainedModule(pl_module, trainer.optimizers[0], trainer)))

    fit(made(), Looks(), max_epochs=0)
    parameters = [*found[0].parameters()]
    assert all(
        one is other for one, other in zip(parameters, found[0].optimizer.param_groups[0]["params"], strict=True)
    )
    assert optimizer_of(found[0].parameters()) is found[0].optimizer


# ---- plans


def test_a_plan_is_made_from_the_module_and_its_loader_in_child_processes() -> None:
    plain, ours = made(), made()
    fit(plain)
    budget = Cpu().reading().now_bytes + (300 << 20)
    guard = OomGuard(budget, timeout=200)
    before = torch.get_rng_state()
    trainer = fit(ours, guard)
    assert trainer.global_step == 6
    assert guard.plan is not None
    assert guard.plan.task == f"{__name__}:Forecast"
    assert (guard.plan.batch, guard.plan.candidate.microbatch, guard.plan.asked_budget_bytes) == (ROWS, ROWS, budget)
    assert guard.plan.confirmed
    assert ours.trouble.rows == [16, 16, 8] * 2
    assert len(before) == len(torch.get_rng_state())
    assert weights(ours) == pytest.approx(weights(plain), **SAME)
    assert 0 < guard.peak_bytes < budget


def test_a_budget_that_fits_nothing_is_told_before_the_training() -> None:
    module = made()
    with pytest.raises(oomguard.MisuseError, match="more than this process already uses"):
        fit(module, OomGuard("1MiB"))
    assert module.trouble.rows == []


def test_a_fast_run_of_one_batch_is_not_planned() -> None:
    guard = OomGuard("8GiB")
    fit(made(), guard, fast_dev_run=True)
    assert guard.plan is None


def test_a_resumed_training_has_the_weights_of_one_that_was_not_interrupted(plan: TaskPlan, tmp_path: Path) -> None:
    plain, first, second = made(), made(training=1), made()
    fit(plain)
    guard = OomGuard("8GiB")
    guard.load_state_dict(OomGuard(plan=plan).state_dict())  # as from a checkpoint: nothing has to be planned
    fit(first, guard, ModelCheckpoint(tmp_path, "first"), enable_checkpointing=True, max_epochs=1)
    resumed = OomGuard("8GiB")
    fit(second, resumed, ckpt_path=tmp_path / "first.ckpt")
    assert weights(second) == pytest.approx(weights(plain), **SAME)
    assert resumed.plan == plan
    assert resumed.rung == 1
    assert second.trouble.rows[:4] == [3, 3, 3, 3]


def test_a_checkpoint_with_another_budget_is_planned_anew(plan: TaskPlan) -> None:
    guard = OomGuard("7GiB")
    guard.load_state_dict(OomGuard(plan=plan).state_dict())
    assert guard.plan is None


# ---- several processes

DDP = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = [sys.argv[1]]
import torch
torch.set_num_threads(1)
import msgspec
import test_lightning as tests
from oomguard._plan.task_value import TaskPlan
class Ranked(tests.Forecast):
    def on_fit_start(self):
        self.trouble.times = {"training": self.global_rank}
plan = msgspec.json.decode(open("plan.json").read(), type=TaskPlan)
results = []
for guard in (None, tests.OomGuard(plan=plan)):
    module = tests.made(tests.Forecast if guard is None else Ranked)
    callbacks = () if guard is None else (guard,)
    trainer = tests.fit(module, *callbacks, strategy="ddp", devices=2, num_sanity_val_steps=0, max_epochs=1)
    results.append({"rung": guard and guard.rung, "rows": module.trouble.rows, "weights": tests.weights(module)})
open(f"results{trainer.global_rank}.json", "w").write(json.dumps(results))
"""


def test_two_processes_fall_together_and_keep_the_weights(plan: TaskPlan, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan))
    (tmp_path / "train.py").write_text(DDP)
    command = [sys.executable, "train.py", str(Path(__file__).parent)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    read = [json.loads((tmp_path / f"results{rank}.json").read_text()) for rank in (0, 1)]
    (plain, first), (_, second) = read
    assert first["weights"] == second["weights"]
    assert first["weights"] == pytest.approx(plain["weights"], **SAME)
    assert plain["rows"] == [16, 4]
    assert first["rung"] == second["rung"] == 1
    # the first process has run all of its pieces when the second one fails, and runs them again with it
    assert (first["rows"][:6], second["rows"][:4]) == ([6, 6, 4, 3, 3, 3], [6, 3, 3, 3])


# ---- refusals


def refused(module: Any, **options: Any) -> str:
    with pytest.raises(oomguard.MisuseError) as caught:
        fit(module, OomGuard(plan=False), **options)
    return str(caught.value)


def test_what_cannot_run_in_pieces_is_refused_before_the_training() -> None:
    class Manual(Forecast):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    class Closure(Forecast):
        def configure_optimizers(self) -> Any:
            return Lbfgs(self.parameters())

    class Lbfgs(torch.optim.SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            return closure()

    class Backward(Forecast):
        def backward(self, loss: Tensor) -> None:
            torch.autograd.backward(loss)

    class Iterates(Forecast):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return super().training_step(next(dataloader_iter)[0], 0)

    assert "Manual optimizes manually" in refused(made(Manual))
    assert "oomguard.stepper" in refused(made(Manual))
    assert "Lbfgs calls a closure" in refused(made(Closure))
    assert "Backward has its own backward" in refused(made(Backward))
    assert "dataloader_iter" in refused(made(Iterates))


@pytest.mark.parametrize(
    "wrong", [{"budget": "many"}, {"batch": 0}, {"maximize": "seq"}, {"allow": "everything"}, {"segments": 0}]
)
def test_wrong_arguments_are_told_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(oomguard.MisuseError):
        OomGuard(**wrong)


def test_a_missing_package_is_told_with_the_extra_that_has_it() -> None:
    code = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("lightning", "pytorch_lightning"):
            raise ModuleNotFoundError(name)
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if "lightning" in name else find(name, *more)
import oomguard.integrations.lightning
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'oomguard[lightning]'" in done.stderr.splitlines()[-1]


def test_a_module_without_recurrent_layers_runs_in_pieces_too(plan: TaskPlan) -> None:
    class Dense(Forecast):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return mse_loss(self.head(torch.cat([batch[0][:, -1]] * 2, 1)), batch[1])

    plain, ours = made(Dense), made(Dense, training=1)
    fit(plain)
    fit(ours, OomGuard(plan=plan))
    assert weights(ours) == pytest.approx(weights(plain), **SAME)


def test_states_of_layers_are_those_of_the_attempt_that_succeeded(plan: TaskPlan) -> None:
    class Normed(Forecast):
        def __init__(self, **times: int) -> None:
            super().__init__(**times)
            self.norm = nn.BatchNorm1d(6)
            self.losses, self.names = list[float](), {"last": 0.0}

        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            loss = mse_loss(self.head(self.norm(self.rnn(batch[0])[0][:, -1])), batch[1])
            self.losses.append(float(loss))
            self.names["last"] = float(loss)
            return loss

    wide = replace(plan, candidate=replace(plan.candidate, microbatch=8, accumulation=2))
    narrow = replace(plan, candidate=replace(plan.candidate, microbatch=4, accumulation=4))
    wide = replace(wide, fallbacks=(replace(plan.fallbacks[0], candidate=narrow.candidate),))
    plain, ours = made(Normed), made(Normed, training=1)
    fit(plain, OomGuard(plan=narrow), max_steps=1)
    fit(ours, OomGuard(plan=wide), max_steps=1)
    assert ours.norm.running_mean.tolist() == pytest.approx(plain.norm.running_mean.tolist())
    assert int(ours.norm.num_batches_tracked) == int(plain.norm.num_batches_tracked)
    assert ours.losses == pytest.approx(plain.losses)
    assert ours.names == pytest.approx(plain.names)
