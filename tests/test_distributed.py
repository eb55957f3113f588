"""Several processes that train together: the weights of one, and nobody waits for ever."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import numbers, plan_of
from test_train import SHORT, weights

import oomguard
from oomguard import step as step_file
from oomguard.bptt import backward
from oomguard.metrics import Events

TIMEOUT = 60


def run(tmp_path: Path, name: str, **options: Any) -> Any:
    usual: dict[str, Any] = {"run": str(tmp_path / name), "validation": 0.2, "epochs": 3, "clip": 1.0}
    return oomguard.train(plan_of(), numbers(rows=42), **usual | options)


def child(rank: int, port: int, tmp_path: Path, prepare: Callable[[int], None]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    prepare(rank)
    result = run(tmp_path, "two")
    torch.save((weights(result.model), result.rung, result.validation_loss), tmp_path / f"{rank}.pt")
    os._exit(0)


def two(tmp_path: Path, prepare: Callable[[int], None]) -> list[int | None]:
    """The exit codes of two processes; None for one that did not end in time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=child, args=(rank, port, tmp_path, prepare)) for rank in (0, 1)]
    for one in children:
        one.start()
    for one in children:
        one.join(TIMEOUT)
    codes = [one.exitcode for one in children]
    for one in children:
        one.kill()
    return codes


def fails_once(rank: int) -> None:
    """The second process runs out of memory in its third pass."""
    calls = [0]

    def failing(*given: Any) -> Any:
        calls[0] += 1
        if rank == 1 and calls[0] == 3:
            raise RuntimeError(SHORT)
        return backward(*given)

    setattr(step_file, "backward", failing)  # noqa: B010 (mypy)


def breaks(rank: int) -> None:
    """The second process fails for another reason."""

    def failing(*given: Any) -> Any:
        raise KeyError("something else")

    if rank == 1:
        setattr(step_file, "backward", failing)  # noqa: B010 (mypy)


@pytest.mark.parametrize("prepare", [lambda rank: None, fails_once], ids=["quietly", "with an OOM on one"])
def test_two_processes_give_the_weights_of_one(tmp_path: Path, prepare: Callable[[int], None]) -> None:
    assert two(tmp_path, prepare) == [0, 0]
    alone = run(tmp_path, "one")
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
    assert float((found[0][0] - weights(alone.model)).norm() / weights(alone.model).norm()) < 1e-5
    assert found[0][2] == pytest.approx(alone.validation_loss, rel=1e-4)
    assert found[0][1] == (1 if prepare is fails_once else 0)


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    two(tmp_path, fails_once)
    kinds = [event.kind for event in Events(tmp_path / "two" / "events.jsonl").read()]
    assert kinds == ["oom"]


def test_an_error_in_one_process_ends_the_other(tmp_path: Path) -> None:
    codes = two(tmp_path, breaks)
    assert None not in codes
    assert 0 not in codes
