"""Processes with unequal plans, or with a share of the optimizer's state each, train the weights of one process."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from plans import plan_of
from task import trained
from train.test_distributed import fails_once, no_failure, peaks, run, run_two, sends_itself, tears_update
from train.test_task_distributed import run_two as run_two_tasks
from train.test_train import weights
from train.test_train_task import plan, with_rows  # noqa: F401 (fixtures)
from train.test_train_task import train as train_task
from train.test_train_task import weights as task_weights

import oomguard
from oomguard import MisuseError, TaskPlan
from oomguard import _step as step_file
from oomguard._core.units import GIB, MIB
from oomguard._estimate.terms import divide, optimizer_bytes
from oomguard._guard.events import Events
from oomguard._plan.buckets import Bucket
from oomguard._rnn import backward
from oomguard._train.loop import Trainer
from oomguard._train.plans import own_plan, plans_of
from oomguard._train.ranks import Ranks, deal
from oomguard._train.shards import SharedState

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:The plan's peak was measured with")]
SHORT_LADDER = ((2, 1), (1, 2))


def with_budget(own: Any, budget_bytes: int, seconds: float) -> Any:
    """The plan for another budget, with so many seconds for a step."""
    expected = msgspec.structs.replace(own.expected, seconds_per_step=seconds)
    sizes = {"budget_bytes": budget_bytes, "asked_budget_bytes": budget_bytes}
    return msgspec.structs.replace(own, expected=expected, **sizes)


def unequal(**fields: Any) -> list[Any]:
    """The plan of a process with much memory, and of one with little, which is a third as fast."""
    pairs = ((plan_of(**fields), 3 * GIB, 1.0), (plan_of(rungs=SHORT_LADDER, **fields), 2 * GIB, 3.0))
    return [with_budget(*pair) for pair in pairs]


def counts_rows(folder: Path, prepare: Callable[[int], None]) -> Callable[[int], None]:
    """Each process writes the rows of every pass to a file."""

    def start(rank: int) -> None:
        prepare(rank)
        run_pass = getattr(step_file, "backward")  # noqa: B009 (mypy)

        def counting(model: Any, batch: Any, *given: Any) -> Any:
            with (folder / f"rows-{rank}").open("a") as file:
                file.write(f"{batch.inputs.shape[1 - model.time_dim]} ")
            return run_pass(model, batch, *given)

        setattr(step_file, "backward", counting)  # noqa: B010 (mypy)

    return start


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def loaded(folder: Path) -> list[torch.Tensor]:
    """The weights of both processes, which must be equal."""
    first, second = (torch.load(folder / f"{rank}.pt")[0] for rank in (0, 1))
    assert torch.equal(first, second)
    return [first, second]


@pytest.mark.parametrize("prepare", [no_failure, fails_once])
def test_processes_with_unequal_plans_train_the_weights_of_one(tmp_path: Path, prepare: Callable[[int], None]) -> None:
    assert run_two(tmp_path, counts_rows(tmp_path, prepare), plan=unequal()) == [0, 0]
    alone = weights(run(tmp_path, "one").model)
    assert distance(loaded(tmp_path)[0], alone) < 1e-6
    passes = [[*map(int, (tmp_path / f"rows-{rank}").read_text().split())] for rank in (0, 1)]
    assert max(passes[0]) == 6  # three quarters of a batch of 8, in one pass
    assert max(passes[1]) == 2
    kinds = [event.kind for event in Events(tmp_path / "two" / "events.jsonl").read()]
    assert kinds == ([] if prepare is no_failure else ["oom"])


def test_a_process_with_fewer_fallbacks_stays_on_its_last_one(tmp_path: Path) -> None:
    def fails_often(rank: int) -> None:
        run_pass, calls = backward, [0]

        def failing(*given: Any) -> Any:
            calls[0] += 1
            if rank == 0 and calls[0] in (2, 3, 4):
                raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")
            return run_pass(*given)

        setattr(step_file, "backward", failing)  # noqa: B010 (mypy)

    assert run_two(tmp_path, fails_often, plan=unequal()) == [0, 0]
    assert torch.load(tmp_path / "1.pt")[1] == 3  # the second has two candidates
    assert distance(loaded(tmp_path)[0], weights(run(tmp_path, "one").model)) < 1e-6


def test_a_run_of_unequal_processes_is_resumed_with_the_plans_that_it_stored(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": None, "plan": unequal()}
    assert run_two(tmp_path, name="whole", steps=6, **options) == [0, 0]
    whole = loaded(tmp_path)
    assert run_two(tmp_path, fails_once, steps=3, **options) == [0, 0]
    assert [path.name for path in map(Path, map(str, plans_of(tmp_path / "two")))] == ["plan.json", "plan-1.json"]
    kept = [oomguard.load_plan(str(path)) for path in plans_of(tmp_path / "two")]
    assert kept == options["plan"]
    assert run_two(tmp_path, steps=6, resume=True, epochs=None, plan=plans_of(tmp_path / "two")) == [0, 0]
    assert distance(loaded(tmp_path)[0], whole[0]) < 1e-6
    assert torch.load(tmp_path / "0.pt")[1] == torch.load(tmp_path / "1.pt")[1] == 1  # both on the rung of before


def test_processes_with_unequal_length_buckets_draw_the_same_batches(tmp_path: Path) -> None:
    own = plan_of()
    made = [Bucket(longest=n, sequences=9, candidate=own.candidate, expected=own.expected) for n in (3, 6)]
    assert run_two(tmp_path, plan=[msgspec.structs.replace(own, buckets=tuple(made)), own]) == [0, 0]
    assert distance(loaded(tmp_path)[0], weights(run(tmp_path, "one").model)) < 1e-6


def test_processes_whose_plans_differ_in_the_gradient_or_the_update_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for number, other in enumerate((plan_of(batch=16), plan_of(knobs={"update": "loop"}))):
        assert run_two(tmp_path, name=f"run-{number}", plan=[plan_of(), other]) == [1, 1]
    errors = capfd.readouterr().err
    assert errors.count("--batch is 8 in process 0 and 16 in process 1") == 2
    assert errors.count("--update is 'foreach' in process 0 and 'loop' in process 1") == 2


def test_rows_are_dealt_in_proportion_to_the_speed_of_each_process() -> None:
    assert deal((1.0, 1.0), 5).tolist() == [0, 1, 0, 1, 0]
    assert deal((3.0, 1.0), 8).tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    assert np.bincount(deal((5.0, 2.0, 1.0), 800)).tolist() == [500, 200, 100]
    assert deal((1.0, 1.0), 0).tolist() == []
    ranks = [Ranks(rank=rank, world=3, speeds=(5.0, 2.0, 1.0)) for rank in range(3)]
    assert sorted(row for each in ranks for row in each.rows(11)) == [*range(11)]
    assert [each.span(11) for each in ranks] == [(0, 7), (7, 10), (10, 11)]


def test_a_process_takes_the_plan_for_its_processor_or_the_one_with_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, second = unequal()
    strange = msgspec.structs.replace(own, environment=msgspec.structs.replace(own.environment, title="another"))
    with pytest.raises(MisuseError, match="Several plans are for several processes, but got 2 plans and one process"):
        own_plan([own, second])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert own_plan([strange, own]) is own
    assert own_plan([own, strange, own]) is own
    assert own_plan([own, second]) is second
    with pytest.raises(MisuseError, match=r"2 of 3 are for .*, and there are 2 processes"):
        own_plan([own, second, strange])


class Double(trained.Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.double()


def test_unequal_processes_train_a_task_in_float64_to_the_weights_of_one(plan: TaskPlan, tmp_path: Path) -> None:  # noqa: F811
    own = msgspec.structs.replace(plan, batch=26)
    plans = [with_rows(own, 8), with_rows(own, 3)]
    task = replace(trained.calm, model=Double, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    results = run_two_tasks(plans, task, tmp_path, clip=1.0)
    alone = train_task(plans[0], task, tmp_path / "one", clip=1.0)
    assert task_weights(alone.model).dtype == torch.float64
    assert torch.equal(results[0][0], results[1][0])
    assert distance(results[0][0], task_weights(alone.model)) < 1e-12


def notes_state(folder: Path, prepare: Callable[[int], None] = no_failure) -> Callable[[int], None]:
    """Each process writes the bytes of its optimizer's state to a file at the end."""

    def start(rank: int) -> None:
        prepare(rank)
        end = Trainer._result

        def noting(self: Trainer, *given: Any) -> Any:
            states = [value for state in self.training.optimizer.state.values() for value in state.values()]
            sizes = [value.nbytes for value in states if isinstance(value, torch.Tensor) and value.dim()]
            (folder / f"state-{rank}").write_text(str(sum(sizes)))
            return end(self, *given)

        setattr(Trainer, "_result", noting)  # noqa: B010 (mypy)

    return start


def sharded(knobs: dict[str, Any] | None = None, **fields: Any) -> Any:
    return plan_of(knobs={"shards": 2} | (knobs or {}), **fields)


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [("adam", "fp32"), ("sgd-momentum", "fp32"), ("adagrad", "fp32"), ("adafactor", "fp32"), ("adam", "fp16")],
)
def test_processes_that_share_the_optimizer_state_train_the_same_weights_with_less_of_it(
    tmp_path: Path, optimizer: Any, precision: str
) -> None:
    fields: dict[str, Any] = {"optimizer": optimizer, "layers": 2}
    fields["knobs"] = {"precision": precision}
    assert run_two(tmp_path, plan=plan_of(**fields), name="whole") == [0, 0]
    whole = loaded(tmp_path)
    assert run_two(tmp_path, notes_state(tmp_path), plan=sharded(**fields)) == [0, 0]
    assert torch.equal(loaded(tmp_path)[0], whole[0])
    own, sizes = sharded(**fields), [int((tmp_path / f"state-{rank}").read_text()) for rank in (0, 1)]
    full_bytes = optimizer_bytes(own.spec, plan_of(**fields).candidate)
    assert sum(sizes) == full_bytes
    assert max(sizes) == optimizer_bytes(own.spec, own.candidate) < full_bytes


@pytest.mark.parametrize("prepare", [fails_once, tears_update])
def test_processes_that_share_the_optimizer_state_keep_the_gradient_when_memory_runs_out(
    tmp_path: Path, prepare: Callable[[int], None]
) -> None:
    assert run_two(tmp_path, prepare, plan=sharded(), save_every="3") == [0, 0]
    assert distance(loaded(tmp_path)[0], weights(run(tmp_path, "one").model)) < 1e-5
    kinds = [event.kind for event in Events(tmp_path / "two" / "events.jsonl").read()]
    assert kinds == (["oom"] if prepare is fails_once else ["resume"])


def test_a_checkpoint_of_processes_that_share_the_state_is_resumed_by_any_number_of_them(tmp_path: Path) -> None:
    common: dict[str, Any] = {"epochs": None, "name": "cut"}
    assert run_two(tmp_path, plan=sharded(), epochs=None, name="whole", steps=6) == [0, 0]
    whole = loaded(tmp_path)[0]
    assert run_two(tmp_path, plan=sharded(), steps=2, **common) == [0, 0]
    assert run_two(tmp_path, plan=sharded(), steps=4, resume=True, **common) == [0, 0]
    alone = run(tmp_path, plan=plan_of(), steps=5, resume=True, **common)
    assert alone.steps == 5
    assert run_two(tmp_path, plan=sharded(), steps=6, resume=True, **common) == [0, 0]
    assert distance(loaded(tmp_path)[0], whole) < 1e-6


def ends_itself_while_lending(rank: int) -> None:
    """The second process is killed while the first writes the second checkpoint."""
    fetch, calls = SharedState.fetch, [0]

    def failing(*given: Any) -> Any:
        calls[0] += 1
        if rank == 1 and calls[0] == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return fetch(*given)

    setattr(SharedState, "fetch", failing)  # noqa: B010 (mypy)


@pytest.mark.parametrize("prepare", [ends_itself_while_lending, sends_itself(signal.SIGKILL, 0)])
def test_a_lost_process_that_shares_the_state_ends_the_other_and_the_run_is_resumed(
    tmp_path: Path, prepare: Callable[[int], None]
) -> None:
    assert {*run_two(tmp_path, prepare, plan=sharded(), save_every="2")} == {-signal.SIGKILL, 1}
    assert run_two(tmp_path, plan=sharded(), save_every="2", resume=True) == [0, 0]
    assert distance(loaded(tmp_path)[0], weights(run(tmp_path, "one").model)) < 1e-5
    assert not [*(tmp_path / "two" / "checkpoints").glob(".unfinished*")]


def test_a_plan_for_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"shared by 2 processes, but 1 trains\. Start 2 with torchrun"):
        run(tmp_path, "one", plan=sharded())


def test_a_checkpoint_that_cannot_be_written_ends_all_processes_that_share_the_state(tmp_path: Path) -> None:
    def fills_the_disk(rank: int) -> None:
        from oomguard._train import checkpoint

        write, calls = checkpoint._write_file, [0]

        def failing(path: Path, pieces: Any) -> Any:
            calls[0] += 1
            if calls[0] > 3:
                next(iter(pieces))
                raise OSError(28, "No space left on device")
            return write(path, pieces)

        setattr(checkpoint, "_write_file", failing)  # noqa: B010 (mypy)

    assert run_two(tmp_path, fills_the_disk, plan=sharded(), save_every="2") == [1, 1]


def test_the_state_is_divided_evenly_and_the_first_process_has_most() -> None:
    assert divide([5, 1, 9, 3, 3], 2) == [0, 1, 1, 0, 0]
    for shards in (1, 2, 3, 7):
        sizes = np.random.default_rng(shards).integers(1, 1000, 40).tolist()
        loads = np.bincount(divide(sizes, shards), sizes, shards).tolist()
        assert loads == sorted(loads, reverse=True)
        assert loads[0] - loads[-1] <= max(sizes)


def test_sharing_the_optimizer_state_lowers_the_peak_of_every_process_as_far_as_the_estimate_says(
    tmp_path: Path,
) -> None:
    common: dict[str, Any] = {"optimizer": "adam", "layers": 2, "hidden": 2048}  # three weights of 16 MiB
    [(alone_bytes, whole_bytes)] = peaks(tmp_path / "one", 1, {}, **common)
    for peak_bytes, estimated_bytes in peaks(tmp_path / "two", 2, {"shards": 2}, **common):
        assert peak_bytes <= estimated_bytes
        saved_bytes = whole_bytes - estimated_bytes
        assert saved_bytes > 3 * 16 * MIB  # of the state, and of the copies and gradients in the update
        assert alone_bytes - peak_bytes > saved_bytes - 8 * MIB
