"""The guard: what falls back, what grows back, and that nothing is lost by it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from plans import LADDER, plan_of
from torch import Tensor

import oomguard
from oomguard.device.budget import Budget, Limit
from oomguard.device.reading import Reading
from oomguard.errors import GuardError, MisuseError
from oomguard.guard import watch
from oomguard.guard.guard import Guard
from oomguard.guard.ladder import FIRST_WAIT, LONGEST_WAIT, Standing, make_footings
from oomguard.metrics import Event, Events
from oomguard.plan.value import Bucket, Plan
from oomguard.units import GIB, MIB, format_bytes

SHORT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."


@dataclass
class Fake:
    """A processor whose figures are what a test says."""

    peak_bytes: int = 500 * MIB
    free_bytes: int = 8 * GIB
    retries: int = 0
    swapped_bytes: int = 0
    others_bytes: int = 0
    held_bytes: int = 0
    released: int = 0
    name: str = "cpu"
    torch_device: str = "cpu"
    limits: list[int | None] = field(default_factory=list)

    def reading(self) -> Reading:
        return Reading(
            peak_bytes=self.peak_bytes,
            now_bytes=self.peak_bytes,
            runtime_bytes=0,
            retries=self.retries,
            swapped_bytes=self.swapped_bytes,
        )

    def budget(self) -> Budget:
        limit = Limit(
            name="memory.max",
            limit_bytes=self.free_bytes,
            used_bytes=self.others_bytes + self.held_bytes,
            held_bytes=self.held_bytes,
            unit="resident",
            source="a test",
        )
        return Budget(device="cpu", limits=(limit,))

    def release(self) -> None:
        self.released += 1

    def enforce(self, limit_bytes: int, committed_bytes: int | None = None) -> None:
        self.limits.append(limit_bytes)

    def unlimit(self) -> None:
        self.limits.append(None)

    def settle(self, candidate: Any) -> None: ...

    def reset(self) -> None:
        self.retries = 0


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SECONDS", {"cpu": 0.0, "cuda": 0.0})


def guarding(tmp_path: Path, plan: Plan | None = None, **more: Any) -> tuple[Guard, Fake]:
    device: Any = Fake()
    made = Guard(plan or plan_of(), device=device, events=Events(tmp_path / "events.jsonl"), **more)
    made.watch.start()
    return made, device


def run(guard: Guard, fails: Callable[[], bool] = lambda: False) -> int:
    """One step; returns how many attempts it took."""
    count = 0
    for attempt in guard.attempts():
        with attempt:
            count += 1
            if fails():
                raise RuntimeError(SHORT)
    return count


def events(guard: Guard) -> list[Event]:
    assert guard.events is not None
    return guard.events.read()


# ---- falling


def test_a_step_that_runs_out_of_memory_is_run_again_one_rung_down(tmp_path: Path) -> None:
    guard, _ = guarding(tmp_path)
    assert (run(guard, lambda: guard.rung < 2), guard.rung, guard.steps) == (3, 2, 1)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), RuntimeError(SHORT)])
def test_every_kind_of_out_of_memory_error_is_caught(tmp_path: Path, error: Exception) -> None:
    guard, _ = guarding(tmp_path)
    for attempt in guard.attempts():
        with attempt:
            if not guard.rung:
                raise error
    assert guard.rung == 1


@pytest.mark.parametrize(
    ("free_bytes", "falls"), [(0, True), (watch.SPARE_BYTES - 1, True), (watch.SPARE_BYTES, False), (GIB, False)]
)
def test_a_card_that_others_have_filled_is_tight_though_nothing_failed(free_bytes: int, falls: bool) -> None:
    device = Fake(name="cuda:0", free_bytes=8 * GIB, held_bytes=2 * GIB, others_bytes=GIB)
    watching = watch.Watch(device=device)  # type: ignore[arg-type]
    watching.start()
    assert watching.look() is None
    device.others_bytes = 6 * GIB - free_bytes
    found = watching.look()
    assert (found is not None) == falls
    assert found is None or found.reason.startswith(f"Other processes took {format_bytes(5 * GIB - free_bytes)} of the")
    assert watching.look() is None, "once is enough"


def test_a_card_that_this_process_fills_itself_is_not_tight() -> None:
    device = Fake(name="cuda:0", free_bytes=8 * GIB, held_bytes=2 * GIB, others_bytes=GIB)
    watching = watch.Watch(device=device)  # type: ignore[arg-type]
    watching.start()
    device.held_bytes = 7 * GIB
    assert watching.look() is None


def test_another_error_goes_its_way(tmp_path: Path) -> None:
    guard, _ = guarding(tmp_path)
    with pytest.raises(ZeroDivisionError):
        run(guard, lambda: 1 // guard.rung > 0)
    assert guard.rung == 0


def test_memory_is_released_after_the_tensors_of_the_failed_attempt_are_gone(tmp_path: Path) -> None:
    guard, device = guarding(tmp_path)
    alive: list[int] = []
    device.release = lambda: alive.append(Large.count)  # type: ignore[method-assign]

    class Large:
        count = 0

        def __init__(self) -> None:
            Large.count += 1

        def __del__(self) -> None:
            Large.count -= 1

    def learn() -> None:
        held = Large()
        if not guard.rung:
            raise RuntimeError(SHORT)
        del held

    for attempt in guard.attempts():
        with attempt:
            learn()
    assert alive == [0]


def test_random_numbers_fall_again_as_in_the_failed_attempt(tmp_path: Path) -> None:
    guard, _ = guarding(tmp_path)
    seen: list[Tensor] = []
    for attempt in guard.attempts():
        with attempt:
            seen.append(torch.rand(3))
            if not guard.rung:
                raise RuntimeError(SHORT)
    assert torch.equal(seen[0], seen[1])


def test_no_part_of_a_failed_gradient_is_left(tmp_path: Path) -> None:
    guard, _ = guarding(tmp_path)
    weight = torch.nn.Parameter(torch.ones(1))
    for attempt in guard.attempts(torch.optim.SGD([weight])):
        with attempt:
            weight.sum().backward()  # type: ignore[no-untyped-call]
            if not guard.rung:
                raise RuntimeError(SHORT)
    assert weight.grad is not None
    assert weight.grad.item() == 1


def test_the_event_of_a_fall_has_its_reason_and_its_figures(tmp_path: Path) -> None:
    guard, _ = guarding(tmp_path)
    run(guard, lambda: not guard.rung)
    (event,) = events(guard)
    assert (event.kind, event.step, event.reason) == ("oom", 0, SHORT)
    assert event.figures["rung"] == 1
    assert event.figures["microbatch"] == 4
    assert event.figures["free_bytes"] == 8 * GIB


def test_at_the_bottom_there_is_an_error_with_figures(tmp_path: Path) -> None:
    guard, _ = guarding(tmp_path)
    with pytest.raises(GuardError, match=r"The last rung of the plan .* must fit") as caught:
        run(guard, lambda: True)
    assert caught.value.figures["rung"] == len(LADDER) - 1
    assert [event.kind for event in events(guard)[-2:]] == ["again", "bottom"]


def test_on_the_last_rung_a_step_is_tried_once_more(tmp_path: Path) -> None:
    guard, device = guarding(tmp_path, plan_of(rungs=LADDER[:1]))
    assert run(guard, lambda: not device.released) == 2


def test_an_attempt_that_is_not_entered_is_misuse(tmp_path: Path) -> None:
    guard, _ = guarding(tmp_path)
    with pytest.raises(MisuseError, match="with attempt"):
        list(guard.attempts())


def test_the_guard_holds_the_process_to_its_budget_and_lets_it_go(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(plan_of(), asked_budget_bytes=GIB, budget_bytes=GIB)
    guard, device = guarding(tmp_path, plan)
    with guard:
        pass
    assert device.limits == [GIB, None]


# ---- tight without an error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"retries": 2}, "had to empty its cache and ask again, 2 times"),
        ({"swapped_bytes": 40 * MIB}, "swapped out 40.00 MiB"),
        ({"free_bytes": 400 * MIB}, "by memory.max only 400.00 MiB are left"),
        ({"peak_bytes": 3 * GIB}, "over the budget of 2.00 GiB"),
    ],
)
def test_memory_that_gets_tight_leads_down_before_it_is_an_error(
    tmp_path: Path, change: dict[str, int], words: str
) -> None:
    plan = msgspec.structs.replace(plan_of(), asked_budget_bytes=2 * GIB, budget_bytes=2 * GIB)
    guard, device = guarding(tmp_path, plan)
    run(guard)
    assert guard.rung == 0
    for name, value in change.items():
        setattr(device, name, value)
    run(guard)
    assert guard.rung == 1
    (event,) = events(guard)
    assert event.kind == "tight"
    assert words in event.reason


def test_tight_memory_on_the_last_rung_is_told_once_and_goes_on(tmp_path: Path) -> None:
    guard, device = guarding(tmp_path, plan_of(rungs=LADDER[:1]))
    device.free_bytes = 100 * MIB
    for _ in range(3):
        run(guard)
    assert [event.kind for event in events(guard)] == ["tight"]
    assert guard.steps == 3


def test_it_is_not_looked_more_often_than_the_pause_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SECONDS", {"cpu": 0.5})
    now, device = [0.0], Fake()
    looking = watch.Watch(device=device, clock=lambda: now[0])  # type: ignore[arg-type]
    looking.start()
    device.free_bytes = MIB
    found = []
    for now[0] in (0.1, 0.4, 0.6, 0.7):
        found.append(looking.look() is not None)
    assert found == [False, False, True, False]


# ---- growing back


def test_after_a_quiet_while_it_climbs_one_rung(tmp_path: Path) -> None:
    guard, _ = guarding(tmp_path, standing=Standing(rung=2))
    rungs = []
    for _ in range(2 * FIRST_WAIT):
        run(guard)
        rungs.append(guard.rung)
    assert (rungs[FIRST_WAIT - 2], rungs[FIRST_WAIT - 1], rungs[-1]) == (2, 1, 0)
    assert [event.kind for event in events(guard)] == ["climb", "climb"]


def test_it_does_not_climb_where_the_rung_above_would_not_fit(tmp_path: Path) -> None:
    guard, device = guarding(tmp_path, standing=Standing(rung=1, quiet=FIRST_WAIT))
    device.peak_bytes, device.free_bytes = 100 * MIB, 200 * MIB
    run(guard)
    assert guard.rung == 1


def test_a_climb_that_failed_makes_it_wait_longer(tmp_path: Path) -> None:
    guard, _ = guarding(tmp_path, standing=Standing(rung=1, quiet=FIRST_WAIT))
    run(guard)
    run(guard, lambda: guard.rung == 0)
    assert (guard.rung, guard.standing.wait) == (1, 2 * FIRST_WAIT)


def test_the_wait_has_an_end() -> None:
    standing = Standing(rung=1)
    for _ in range(20):
        standing = standing.up().down()
    assert standing.wait == LONGEST_WAIT


# ---- several processes


def test_all_fall_when_another_process_ran_out(tmp_path: Path) -> None:
    answers = [[1, 0, 1], [0, 0, 1]]
    guard, _ = guarding(tmp_path, agree=lambda numbers: answers.pop(0))
    assert run(guard) == 2
    assert guard.rung == 1


def test_an_error_in_another_process_ends_this_one(tmp_path: Path) -> None:
    guard, _ = guarding(tmp_path, agree=lambda numbers: [2, 0, 1])
    with pytest.raises(GuardError, match="another one failed"):
        run(guard)


# ---- buckets and splits


def bucketed() -> Plan:
    plan = plan_of(seq=64, rungs=((8, 1), (4, 1), (1, 1), (1, 4)))
    short = msgspec.structs.replace(plan.candidate, microbatch=8)
    made = [Bucket(longest=n, sequences=5, candidate=short, expected=plan.expected) for n in (16, 64)]
    return msgspec.structs.replace(plan, buckets=tuple(made))


def test_a_rung_down_shrinks_every_bucket() -> None:
    rows = [[candidate.microbatch for _, candidate in step.buckets] for step in make_footings(bucketed())]
    assert all(a >= b for before, after in pairwise(rows) for a, b in zip(before, after, strict=True))
    assert rows[0] == [8, 8]
    assert rows[-1] == [1, 1]


def test_a_microbatch_is_run_as_its_bucket_says() -> None:
    step = make_footings(bucketed())[0]
    assert step.candidate_for(10) is step.buckets[0][1]
    assert step.candidate_for(17) is step.buckets[1][1]


def test_more_segments_mean_fewer_sequences_in_a_loop_without_segments(tmp_path: Path) -> None:
    guard, _ = guarding(tmp_path, plan_of(rungs=((8, 1), (8, 2), (8, 6))))
    rows = []
    for guard.standing in (Standing(rung=n) for n in range(3)):
        rows.append([len(piece) for piece, _ in guard.split((torch.zeros(8, 2), torch.zeros(8)))])
    assert rows == [[8], [4, 4], [1] * 8]


def test_a_batch_may_be_a_dict(tmp_path: Path) -> None:
    (guard, _), batch = guarding(tmp_path), {"x": torch.arange(9), "y": torch.arange(18).reshape(9, 2)}
    pieces = [*guard.split(batch)]
    assert [len(one["x"]) for one in pieces] == [guard.rows, 9 - guard.rows]
    assert all(torch.equal(torch.cat([one[name] for one in pieces]), batch[name]) for name in batch)


def test_a_loop_of_ones_own_gets_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    inputs, targets = torch.randn(8, 3), torch.randn(8, 1)
    model, loss_of = torch.nn.Linear(3, 1), torch.nn.MSELoss(reduction="sum")
    optimizer, seen = torch.optim.SGD(model.parameters()), []

    def learn(x: Tensor, y: Tensor) -> None:
        seen.append(len(x))
        if len(x) > 2:
            raise RuntimeError(SHORT)
        (loss_of(model(x), y) / len(inputs)).backward()

    with oomguard.guard(plan_of(), events=str(tmp_path / "events.jsonl")) as guard:
        for attempt in guard.attempts(optimizer):
            with attempt:
                for piece in attempt.split((inputs, targets)):
                    learn(*piece)
    assert seen == [8, 4, 2, 2, 2, 2]
    found = model.weight.grad
    assert found is not None
    model.weight.grad = None
    (loss_of(model(inputs), targets) / len(inputs)).backward()
    assert torch.allclose(found, model.weight.grad)  # type: ignore[arg-type]
