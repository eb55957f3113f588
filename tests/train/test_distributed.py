"""Several processes that train together get the weights of one, and none of them waits for ever."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import numbers, plan_of
from train.test_train import SHORT, fits_at_most, weights

import oomguard
from oomguard import _step as step_file
from oomguard._core.units import MIB
from oomguard._estimate.malloc import ENVIRONMENT
from oomguard._guard.events import Events
from oomguard._rnn import backward
from oomguard._train import evaluate as evaluate_file
from oomguard._train.checkpoint import load
from oomguard._train.ranks import Ranks

TIMEOUT = 60


def run(tmp_path: Path, name: str, **options: Any) -> Any:
    usual: dict[str, Any] = {"run": str(tmp_path / name), "validation": 0.2, "epochs": 3, "clip": 1.0}
    return oomguard.train(options.pop("plan", None) or plan_of(), numbers(rows=42), **usual | options)


def run_child(rank: int, port: int, tmp_path: Path, prepare: Callable[[int], None], options: dict[str, Any]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    prepare(rank)
    result = run(tmp_path, **{"name": "two"} | options)
    torch.save((weights(result.model), result.rung, result.validation_loss), tmp_path / f"{rank}.pt")
    os._exit(0)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def no_failure(rank: int) -> None:
    """Let all processes succeed."""


def run_two(
    tmp_path: Path, prepare: Callable[[int], None] = no_failure, stopped: int | None = None, **options: Any
) -> list[int | None]:
    """The exit codes of two processes; None for one that did not end in time. `stopped`: one that is not waited for."""
    port = free_port()
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=run_child, args=(rank, port, tmp_path, prepare, options)) for rank in (0, 1)]
    for process in children:
        process.start()
    for rank, process in enumerate(children):
        if rank != stopped:
            process.join(TIMEOUT)
    codes = [process.exitcode for process in children]
    for process in children:
        process.kill()
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


def fails_otherwise(rank: int) -> None:
    """The second process fails for another reason."""

    def failing(*given: Any) -> Any:
        raise KeyError("something else")

    if rank == 1:
        setattr(step_file, "backward", failing)  # noqa: B010 (mypy)


def fails_before_the_exchange(rank: int) -> None:
    """The second process runs out of memory after its gradients, before the exchange."""
    complete, calls = Ranks.complete_gradients, [0]

    def failing(*given: Any) -> None:
        calls[0] += 1
        if rank == 1 and calls[0] == 3:
            raise RuntimeError(SHORT)
        complete(*given)

    setattr(Ranks, "complete_gradients", failing)  # noqa: B010 (mypy)


def sends_itself(number: signal.Signals, victim: int) -> Callable[[int], None]:
    """A process gets a signal before its fourth exchange of gradients."""

    def prepare(rank: int) -> None:
        exchange, calls = Ranks.sum_gradients, [0]

        def failing(*given: Any) -> Any:
            calls[0] += 1
            if rank == victim and calls[0] == 4:
                os.kill(os.getpid(), number)
            return exchange(*given)

        setattr(Ranks, "sum_gradients", failing)  # noqa: B010 (mypy)

    return prepare


def cannot_validate(rank: int) -> None:
    """The second process has no memory for a single sequence."""
    if rank == 1:
        setattr(evaluate_file, "evaluate", fits_at_most(0))  # noqa: B010 (mypy)


def tears_update(rank: int) -> None:
    """The second process runs out of memory in the middle of its seventh update."""
    root, calls = torch._foreach_sqrt, [0]

    def failing(*given: Any) -> Any:
        calls[0] += 1
        if rank == 1 and calls[0] == 7:
            raise RuntimeError(SHORT)
        return root(*given)

    setattr(torch, "_foreach_sqrt", failing)  # noqa: B010 (mypy)


@pytest.mark.parametrize("prepare", [no_failure, fails_once, fails_before_the_exchange])
def test_two_processes_train_the_same_weights_as_one(tmp_path: Path, prepare: Callable[[int], None]) -> None:
    assert run_two(tmp_path, prepare) == [0, 0]
    alone = run(tmp_path, "one")
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    assert float((results[0][0] - weights(alone.model)).norm() / weights(alone.model).norm()) < 1e-5
    assert results[0][2] == pytest.approx(alone.validation_loss, rel=1e-4)
    assert results[0][1] == (0 if prepare is no_failure else 1)


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    run_two(tmp_path, fails_once)
    kinds = [event.kind for event in Events(tmp_path / "two" / "events.jsonl").read()]
    assert kinds == ["oom"]


def test_an_error_in_one_process_ends_the_other(tmp_path: Path) -> None:
    codes = run_two(tmp_path, fails_otherwise)
    assert None not in codes
    assert 0 not in codes


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_ends_the_other_and_a_resumed_run_has_the_right_weights(
    tmp_path: Path, victim: int
) -> None:
    codes = run_two(tmp_path, sends_itself(signal.SIGKILL, victim), save_every="2")
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 1
    assert run_two(tmp_path, resume=True, save_every="2") == [0, 0]
    resumed, alone = torch.load(tmp_path / "0.pt")[0], weights(run(tmp_path, "one").model)
    assert float((resumed - alone).norm() / alone.norm()) < 1e-5


def test_a_process_that_is_stopped_ends_the_other_which_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    codes = run_two(tmp_path, sends_itself(signal.SIGSTOP, 1), stopped=1, save_every="2")
    assert codes == [1, None]
    assert "one was lost (process 1 does not answer)" in capfd.readouterr().err
    last = load(tmp_path / "two" / "checkpoints")
    assert last is not None
    assert last.step == 2


def test_a_validation_that_fails_in_one_process_ends_both_with_a_checkpoint(tmp_path: Path) -> None:
    codes = run_two(tmp_path, cannot_validate)
    assert None not in codes
    assert 0 not in codes
    last = load(tmp_path / "two" / "checkpoints")
    assert last is not None
    assert last.step == 5  # the end of the first epoch


def test_a_torn_update_in_one_process_takes_both_back_to_the_checkpoint(tmp_path: Path) -> None:
    assert run_two(tmp_path, tears_update, save_every="3") == [0, 0]
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    alone = run(tmp_path, "one")
    assert torch.equal(results[0][0], results[1][0])
    assert float((results[0][0] - weights(alone.model)).norm() / weights(alone.model).norm()) < 1e-5
    kinds = [event.kind for event in Events(tmp_path / "two" / "events.jsonl").read()]
    assert kinds == ["resume"]


def test_a_resumed_run_repeats_the_dropout_of_an_uninterrupted_one(tmp_path: Path) -> None:
    plan, weights_after = plan_of(dropout=0.5, layers=2), []
    for name, steps in (("whole", 6), ("cut", 3), ("cut", 6)):
        resume = (tmp_path / name).exists()
        assert run_two(tmp_path, plan=plan, epochs=None, resume=resume, name=name, steps=steps) == [0, 0]
        weights_after.append(torch.load(tmp_path / "0.pt")[0])
    assert torch.equal(weights_after[0], weights_after[2])
    assert not torch.equal(weights_after[0], weights_after[1])


SIZED = """
import json
import sys
import numpy as np
import torch
torch.set_num_threads(1)
import oomguard
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.breakdown import margin_bytes
from oomguard._estimate.target import CPU
from plans import plan_of

knobs, fields = json.loads(sys.argv[2])
plan = plan_of(rungs=((2, 1),), knobs=knobs, cell="rnn", seq=1, features=8, batch=2, **fields)
data = np.zeros((8, 1, 9), dtype=np.float32)
result = oomguard.train(plan, data, validation=0, normalise="none", run=sys.argv[1])
estimate = estimate_step(plan.spec, plan.candidate, CPU)
margin = int(margin_bytes(plan.spec, estimate, CPU))
print(result.peak_bytes, estimate.total_bytes + margin)
"""


def peaks(run: Path, world: int, knobs: dict[str, Any], **fields: Any) -> list[tuple[int, int]]:
    """For each process of a training: its peak, and the estimate with its margin."""
    paths = f"{Path(__file__).parents[1]}:{Path(__file__).parents[2]}"
    common = ENVIRONMENT["tight"] | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    for rank in range(world):
        own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        words = [sys.executable, "-c", SIZED, str(run), json.dumps([knobs, fields])]
        started.append(subprocess.Popen(words, env=own, stdout=subprocess.PIPE, text=True))
    answers = [process.communicate(timeout=100)[0].split() for process in started]
    return [(int(peak_bytes), int(estimated_bytes)) for peak_bytes, estimated_bytes in answers]


def test_exchanging_gradients_needs_no_memory_beyond_the_plan(tmp_path: Path) -> None:
    # one weight of 64 MiB, and passes and updates so small that copies of the gradients would set the peak
    common: dict[str, Any] = {"knobs": {"update": "fused"}, "hidden": 4096, "optimizer": "sgd"}
    [(alone_bytes, estimated_bytes)] = peaks(tmp_path / "one", 1, **common)
    both = peaks(tmp_path / "two", 2, **common)
    most_bytes = max(peak_bytes for peak_bytes, _ in both)
    assert most_bytes <= estimated_bytes
    assert most_bytes < alone_bytes + 8 * MIB  # gloo itself takes about 3 MiB
