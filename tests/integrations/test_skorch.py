"""The callback of skorch: the weights of the undisturbed training, in pieces and when memory runs out."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from sklearn.base import clone
from skorch import NeuralNetRegressor
from skorch.callbacks import Callback
from torch import Tensor, nn

import oomguard
from oomguard._device.cpu import Cpu
from oomguard._plan.task_value import TaskPlan
from oomguard.integrations.skorch import OomGuard

pytestmark = pytest.mark.timeout(300)  # a plan starts processes that import PyTorch
SAME: Any = {"rel": 1e-5, "abs": 1e-7}
RANDOM = np.random.default_rng(0)
SERIES, TARGETS = (RANDOM.normal(size=size).astype("float32") for size in ((50, 8, 3), (50, 1)))


class Trouble:
    """How often the passes in training and in evaluation run out of memory, and what rows they had."""

    times: ClassVar[dict[bool, int]] = {True: 0, False: 0}
    rows: ClassVar[dict[bool, list[int]]] = {True: [], False: []}


class Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head, self.trouble = nn.GRU(3, 6, batch_first=True), nn.Linear(6, 1), Trouble
        self.seen = torch.zeros(())

    def forward(self, series: Tensor) -> Tensor:
        mode = self.training
        Trouble.rows[mode].append(len(series))
        self.seen = self.seen + len(series) * mode
        found: Tensor = self.head(self.rnn(series)[0][:, -1])
        Trouble.times[mode] -= 1
        if Trouble.times[mode] >= 0:
            torch.empty(1 << 50)  # more than any machine has
        return found


def net(*callbacks: Any, failures: int = 0, evaluations: int = 0, **options: Any) -> Any:
    Trouble.times, Trouble.rows = {True: failures, False: evaluations}, {True: [], False: []}
    torch.manual_seed(0)
    given = {"batch_size": 16, "max_epochs": 2, "verbose": 0, "optimizer": torch.optim.Adam, **options}
    return NeuralNetRegressor(Forecast, callbacks=[*callbacks], **given)


def fitted(*callbacks: Any, **options: Any) -> Any:
    return net(*callbacks, **options).fit(SERIES, TARGETS)


def weights(trained: Any) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in trained.module_.parameters()]).tolist()


@pytest.fixture(scope="module")
def plan() -> TaskPlan:
    """A plan that runs a batch of 16 rows in microbatches of 6, with fallbacks and a size for evaluations."""
    data = torch.utils.data.TensorDataset(torch.as_tensor(SERIES), torch.as_tensor(TARGETS))
    task = oomguard.Task(
        model=lambda: nn.GRU(3, 6, batch_first=True),
        loss=lambda model, batch: model(batch[0])[0].mean(),
        data=torch.utils.data.DataLoader(data, batch_size=16),
    )
    named = oomguard.find_feasible_config(task, device="t4", batch=16, microbatch=6, timeout=200, progress=False)
    where = replace(named.where, device="cpu")
    return replace(named, where=where, budget_bytes=8 << 30, asked_budget_bytes=8 << 30, evaluation_rows=7)


def test_microbatches_give_the_weights_and_the_history_of_whole_batches(plan: TaskPlan) -> None:
    plain, ours = fitted(), fitted(OomGuard(plan=plan))
    assert weights(ours) == pytest.approx(weights(plain), **SAME)
    assert Trouble.rows[True][:7] == [6, 6, 4, 6, 6, 4, 6]
    assert Trouble.rows[False][:2] == [7, 3]
    for name in ("train_loss", "valid_loss"):
        assert ours.history[:, name] == pytest.approx(plain.history[:, name], rel=1e-5)
    assert ours.history[:, "oomguard_rung"] == [0, 0]
    assert ours.history[-1, "oomguard_peak_mib"] > 100
    assert not {"train_step_single", "validation_step", "_step_optimizer", "get_loss"} & {*vars(ours)}


def test_a_batch_that_runs_out_of_memory_runs_again_in_smaller_pieces(plan: TaskPlan, tmp_path: Path) -> None:
    plain = fitted()
    guard = OomGuard(plan=plan, events=str(tmp_path / "events.jsonl"))
    ours = fitted(guard, failures=2)
    assert weights(ours) == pytest.approx(weights(plain), **SAME)
    assert Trouble.rows[True][:4] == [6, 3, 2, 2]
    assert ours.module_.seen == plain.module_.seen == 80  # the states of failed attempts are dropped
    assert (guard.rung_, [event.kind for event in guard.events_]) == (2, ["oom", "oom"])
    assert ours.history[-1, "oomguard_events"] == 2


def test_without_a_plan_the_first_attempt_takes_the_whole_batch() -> None:
    plain, ours = fitted(), fitted(OomGuard(plan=False), failures=1, evaluations=1)
    assert weights(ours) == pytest.approx(weights(plain), **SAME)
    assert Trouble.rows[True][:3] == [16, 8, 8]
    assert Trouble.rows[False][:3] == [10, 5, 5]


def test_a_weight_makes_pieces_of_unequal_weight_exact(plan: TaskPlan) -> None:
    class Masked(nn.Module):
        def forward(self, found: Tensor, targets: Tensor) -> Tensor:
            counts = targets > 0
            return ((found - targets).square() * counts).sum() / counts.sum().clamp(min=1)

    plain = fitted(criterion=Masked)
    ours = fitted(OomGuard(plan=plan, weight=lambda batch: (batch[1] > 0).sum()), criterion=Masked)
    assert weights(ours) == pytest.approx(weights(plain), **SAME)


def test_a_plan_is_made_from_the_net_and_its_data_in_child_processes() -> None:
    plain = fitted()
    budget = Cpu().reading().now_bytes + (300 << 20)
    guard = OomGuard(budget, timeout=200)
    ours = fitted(guard)
    assert guard.plan_ is not None
    assert guard.plan_.task == f"{__name__}:Forecast"
    assert (guard.plan_.batch, guard.plan_.candidate.microbatch, guard.plan_.asked_budget_bytes) == (16, 16, budget)
    assert guard.plan_.confirmed
    assert weights(ours) == pytest.approx(weights(plain), **SAME)


SAVED: list[bytes] = []


class Saves(Callback):  # type: ignore[misc]
    def on_epoch_end(self, net: Any, **_: Any) -> None:
        SAVED.append(pickle.dumps(net))


def test_a_net_can_be_pickled_in_the_middle_of_a_training(plan: TaskPlan) -> None:
    ours = net(OomGuard(plan=plan), Saves(), max_epochs=1).fit(SERIES, TARGETS)
    found = pickle.loads(SAVED[-1])
    assert weights(found) == weights(ours)
    found.partial_fit(SERIES, TARGETS)
    assert weights(found) == pytest.approx(weights(ours.partial_fit(SERIES, TARGETS)), **SAME)
    assert clone(ours).callbacks[0].plan == ours.callbacks[0].plan


def test_memory_that_runs_out_on_the_last_rung_ends_the_training_and_the_guard() -> None:
    ours = net(OomGuard(plan=False), failures=100)
    with pytest.raises(oomguard.GuardError, match="last rung"):
        ours.fit(SERIES, TARGETS)
    assert "train_step_single" not in vars(ours)
    torch.ones(1000).sum()


def test_what_cannot_be_guarded_is_refused() -> None:
    class Closure(torch.optim.SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            return closure()

    with pytest.raises(oomguard.MisuseError, match="Closure calls a closure"):
        fitted(OomGuard(), optimizer=Closure)
    with pytest.raises(oomguard.MisuseError, match="more than this process already uses"):
        fitted(OomGuard("1MiB"))
    with pytest.raises(oomguard.MisuseError, match="budget"):
        fitted(OomGuard("much"))


@pytest.mark.parametrize("wrong", [{"allow": "everything"}, {"segments": 0}])
def test_wrong_arguments_are_told_before_the_training(wrong: dict[str, Any]) -> None:
    with pytest.raises(oomguard.MisuseError, match=next(iter(wrong))):
        fitted(OomGuard(**wrong))


def test_a_missing_package_is_told_with_the_extra_that_has_it() -> None:
    code = "import sys; sys.modules['skorch'] = None; import oomguard.integrations.skorch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'oomguard[skorch]'" in done.stderr.splitlines()[-1]
