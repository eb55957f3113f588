"""Several processes that train a task together get the weights of one. They talk over the loopback device, by gloo."""

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from task import trained
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from train.test_distributed import TIMEOUT, free_port
from train.test_train_task import column, plan, train, wave_plan, weights, with_rows  # noqa: F401 (fixtures)

from oomguard import MisuseError, Task, TaskPlan
from oomguard._data.order import Position
from oomguard._train.ranks import Ranks
from oomguard._train.task_data import TaskLoader

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:The plan's peak was measured with")]


def run_child(
    rank: int, port: int, own: TaskPlan | list[TaskPlan], task: Task, folder: Path, options: dict[str, Any]
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.manual_seed(rank)  # what is drawn before a training must not matter
    result = train(own[rank] if isinstance(own, list) else own, task, folder / "two", **options)
    torch.save((weights(result.model), result.validation_loss), folder / f"{rank}.pt")
    os._exit(0)


def run_two(own: TaskPlan | list[TaskPlan], task: Task, folder: Path, **options: Any) -> list[Any]:
    """The weights and the validation losses of two processes, by one plan or by a plan for each."""
    context, port = multiprocessing.get_context("fork"), free_port()
    children = [context.Process(target=run_child, args=(rank, port, own, task, folder, options)) for rank in (0, 1)]
    for process in children:
        process.start()
    for process in children:
        process.join(TIMEOUT)
        process.kill()
    assert [process.exitcode for process in children] == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


class Unused(trained.Tagger):
    """It has weights that never get a gradient, which AdamW must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = nn.Linear(3, 3)


def mean_of_rows(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
    losses = nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="none")
    return (losses.view(batch[1].shape).sum(1) / (batch[1] >= 0).sum(1)).mean()


@pytest.mark.parametrize(("batch", "rows"), [(6, 6), (26, 4)], ids=["whole", "pieces, and a row for one process"])
@pytest.mark.parametrize("loss", [trained.loss, mean_of_rows])
def test_two_processes_train_the_weights_of_one(
    plan: TaskPlan,  # noqa: F811
    tmp_path: Path,
    batch: int,
    rows: int,
    loss: Any,
) -> None:
    own = with_rows(msgspec.structs.replace(plan, batch=batch), rows)
    task = replace(trained.calm, model=Unused, loss=loss, validation=trained.loader())
    results = run_two(own, task, tmp_path, clip=1.0)
    alone = train(own, task, tmp_path / "one", clip=1.0)
    assert torch.equal(results[0][0], results[1][0])
    assert float((results[0][0] - weights(alone.model)).norm() / weights(alone.model).norm()) < 1e-6
    assert results[0][1] == results[1][1] == pytest.approx(alone.validation_loss, rel=1e-6)
    assert column(tmp_path / "two") == pytest.approx(column(tmp_path / "one"), rel=1e-5)


def test_two_processes_share_made_batches_and_begin_with_the_same_weights(
    wave_plan: TaskPlan,  # noqa: F811
    tmp_path: Path,
) -> None:
    results = run_two(wave_plan, trained.wave, tmp_path, steps=3)
    alone = train(wave_plan, trained.wave, tmp_path / "one", steps=3)
    assert torch.equal(results[0][0], results[1][0])
    assert float((results[0][0] - weights(alone.model)).norm() / weights(alone.model).norm()) < 1e-6


def test_a_resumed_run_of_two_processes_ends_with_the_same_weights(plan: TaskPlan, tmp_path: Path) -> None:  # noqa: F811
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = run_two(plan, trained.task, tmp_path / "whole", epochs=None, steps=6)
    run_two(plan, trained.task, tmp_path / "parts", epochs=None, steps=3)
    parts = run_two(plan, trained.task, tmp_path / "parts", epochs=None, steps=6, resume=True)
    assert torch.equal(whole[0][0], parts[0][0])
    assert torch.equal(whole[1][0], parts[1][0])


def orders(data: Any, ranks: Ranks) -> list[Any]:
    loader = TaskLoader(data=data, rows=6, seed=0, workers=0, collates=False, ranks=ranks)
    return [[words.tolist() for words, _ in batch.content or ()] for batch in loader.batches(Position())]


def test_processes_share_the_samples_of_every_batch() -> None:
    data = trained.loader(shuffle=True)
    whole, *shares = (orders(data, ranks) for ranks in (Ranks(), Ranks(world=2), Ranks(rank=1, world=2)))
    for batch, first, second in zip(whole, *shares, strict=True):
        assert sorted(batch) == sorted(first + second)


def test_a_distributed_sampler_deals_the_samples_itself() -> None:
    data: Any = [(torch.tensor([number]), 0) for number in range(24)]
    dealt: list[int] = []
    for rank in (0, 1):
        sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
        loader: Any = DataLoader(data, 6, sampler=sampler, collate_fn=list)
        found = orders(loader, Ranks(rank=rank, world=2))
        assert [len(batch) for batch in found] == [3, 3, 3, 3]  # the batch of the plan has 6 rows in both
        dealt += [word for batch in found for [word] in batch]
        with pytest.raises(MisuseError, match=r"must be that of its process, but it is number \d of"):
            orders(loader, Ranks(rank=1 - rank, world=2))
    assert sorted(dealt) == [*range(24)]
