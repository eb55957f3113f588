"""The guard falls back, climbs back, and loses nothing by it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from guard.fakes import SHORT, FakeDevice, events, run
from plans import LADDER, plan_of
from torch import Tensor

import oomguard
from oomguard._core.errors import GuardError, MisuseError
from oomguard._core.units import GIB, MIB, format_bytes
from oomguard._guard import Guard, ladder
from oomguard._guard.events import Events
from oomguard._guard.ladder import FIRST_WAIT, LONGEST_WAIT, LadderPosition, make_ladder
from oomguard._plan.buckets import Bucket
from oomguard._plan.value import Plan


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "PAUSE_SECONDS", {"cpu": 0.0, "cuda": 0.0})


def make_guard(tmp_path: Path, plan: Plan | None = None, **more: Any) -> tuple[Guard, FakeDevice]:
    device: Any = FakeDevice()
    made = Guard(plan or plan_of(), device=device, events=Events(tmp_path / "events.jsonl"), **more)
    made.watch.start()
    return made, device


# ---- falling back


def test_a_step_that_runs_out_of_memory_is_repeated_one_rung_down(tmp_path: Path) -> None:
    guard, _ = make_guard(tmp_path)
    assert (run(guard, lambda: guard.rung < 2), guard.rung, guard.steps) == (3, 2, 1)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), RuntimeError(SHORT)])
def test_every_kind_of_out_of_memory_error_is_caught(tmp_path: Path, error: Exception) -> None:
    guard, _ = make_guard(tmp_path)
    for attempt in guard.attempts():
        with attempt:
            if not guard.rung:
                raise error
    assert guard.rung == 1


@pytest.mark.parametrize(
    ("free_bytes", "falls"), [(0, True), (ladder.SPARE_BYTES - 1, True), (ladder.SPARE_BYTES, False), (GIB, False)]
)
def test_a_card_filled_by_other_processes_is_memory_pressure(free_bytes: int, falls: bool) -> None:
    device = FakeDevice(name="cuda:0", free_bytes=8 * GIB, held_bytes=2 * GIB, others_bytes=GIB)
    watching = ladder.Watch(device=device)  # type: ignore[arg-type]
    watching.start()
    assert watching.check() is None
    device.others_bytes = 6 * GIB - free_bytes
    pressure = watching.check()
    assert (pressure is not None) == falls
    assert pressure is None or pressure.reason.startswith(
        f"Other processes took {format_bytes(5 * GIB - free_bytes)} of the"
    )
    assert watching.check() is None, "reported only once"


def test_a_card_filled_by_this_process_is_not_memory_pressure() -> None:
    device = FakeDevice(name="cuda:0", free_bytes=8 * GIB, held_bytes=2 * GIB, others_bytes=GIB)
    watching = ladder.Watch(device=device)  # type: ignore[arg-type]
    watching.start()
    device.held_bytes = 7 * GIB
    assert watching.check() is None


def test_another_error_is_raised(tmp_path: Path) -> None:
    guard, _ = make_guard(tmp_path)
    with pytest.raises(ZeroDivisionError):
        run(guard, lambda: 1 // guard.rung > 0)
    assert guard.rung == 0


def test_memory_is_released_after_the_tensors_of_the_failed_attempt_are_gone(tmp_path: Path) -> None:
    guard, device = make_guard(tmp_path)
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


def test_random_numbers_repeat_after_a_failed_attempt(tmp_path: Path) -> None:
    guard, _ = make_guard(tmp_path)
    seen: list[Tensor] = []
    for attempt in guard.attempts():
        with attempt:
            seen.append(torch.rand(3))
            if not guard.rung:
                raise RuntimeError(SHORT)
    assert torch.equal(seen[0], seen[1])


def test_no_part_of_a_failed_gradient_is_left(tmp_path: Path) -> None:
    guard, _ = make_guard(tmp_path)
    weight = torch.nn.Parameter(torch.ones(1))
    for attempt in guard.attempts(torch.optim.SGD([weight])):
        with attempt:
            weight.sum().backward()  # type: ignore[no-untyped-call]
            if not guard.rung:
                raise RuntimeError(SHORT)
    assert weight.grad is not None
    assert weight.grad.item() == 1


def test_the_event_of_a_fallback_has_a_reason_and_figures(tmp_path: Path) -> None:
    guard, _ = make_guard(tmp_path)
    run(guard, lambda: not guard.rung)
    (event,) = events(guard)
    assert (event.kind, event.step, event.reason) == ("oom", 0, SHORT)
    assert event.figures["rung"] == 1
    assert event.figures["microbatch"] == 4
    assert event.figures["free_bytes"] == 8 * GIB


def test_failing_on_the_last_rung_is_an_error_with_figures(tmp_path: Path) -> None:
    guard, _ = make_guard(tmp_path)
    with pytest.raises(GuardError, match=r"The last rung .* must fit") as caught:
        run(guard, lambda: True)
    assert caught.value.figures["rung"] == len(LADDER) - 1
    assert [event.kind for event in events(guard)[-2:]] == ["again", "bottom"]


def test_a_step_is_repeated_once_on_the_last_rung(tmp_path: Path) -> None:
    guard, device = make_guard(tmp_path, plan_of(rungs=LADDER[:1]))
    assert run(guard, lambda: not device.released) == 2


def test_an_attempt_that_is_not_entered_is_an_error(tmp_path: Path) -> None:
    guard, _ = make_guard(tmp_path)
    with pytest.raises(MisuseError, match="with attempt"):
        list(guard.attempts())


def test_the_guard_enforces_the_budget_and_lifts_it_at_the_end(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(plan_of(), asked_budget_bytes=GIB, budget_bytes=GIB)
    guard, device = make_guard(tmp_path, plan)
    with guard:
        pass
    assert device.limits == [GIB, None]


# ---- memory pressure without an error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"retries": 2}, "had to empty its cache and ask the driver again, 2 times"),
        ({"swapped_bytes": 40 * MIB}, "swapped out 40.00 MiB"),
        ({"free_bytes": 400 * MIB}, "memory.max now leaves only 400.00 MiB"),
        ({"peak_bytes": 3 * GIB}, "over the budget of 2.00 GiB"),
    ],
)
def test_memory_pressure_leads_to_a_fallback_before_an_error(
    tmp_path: Path, change: dict[str, int], words: str
) -> None:
    plan = msgspec.structs.replace(plan_of(), asked_budget_bytes=2 * GIB, budget_bytes=2 * GIB)
    guard, device = make_guard(tmp_path, plan)
    run(guard)
    assert guard.rung == 0
    for name, value in change.items():
        setattr(device, name, value)
    run(guard)
    assert guard.rung == 1
    (event,) = events(guard)
    assert event.kind == "tight"
    assert words in event.reason


def test_memory_pressure_on_the_last_rung_is_reported_once(tmp_path: Path) -> None:
    guard, device = make_guard(tmp_path, plan_of(rungs=LADDER[:1]))
    device.free_bytes = 100 * MIB
    for _ in range(3):
        run(guard)
    assert [event.kind for event in events(guard)] == ["tight"]
    assert guard.steps == 3


def test_memory_is_not_checked_more_often_than_the_pause_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "PAUSE_SECONDS", {"cpu": 0.5})
    now, device = [0.0], FakeDevice()
    monkeypatch.setattr(ladder, "monotonic", lambda: now[0])
    watching = ladder.Watch(device=device)  # type: ignore[arg-type]
    watching.start()
    device.free_bytes = MIB
    checks = []
    for now[0] in (0.1, 0.4, 0.6, 0.7):
        checks.append(watching.check() is not None)
    assert checks == [False, False, True, False]


# ---- climbing back


def test_the_guard_climbs_one_rung_after_enough_quiet_steps(tmp_path: Path) -> None:
    guard, _ = make_guard(tmp_path, position=LadderPosition(rung=2))
    rungs = []
    for _ in range(2 * FIRST_WAIT):
        run(guard)
        rungs.append(guard.rung)
    assert (rungs[FIRST_WAIT - 2], rungs[FIRST_WAIT - 1], rungs[-1]) == (2, 1, 0)
    assert [event.kind for event in events(guard)] == ["climb", "climb"]


def test_the_guard_does_not_climb_if_the_rung_above_would_not_fit(tmp_path: Path) -> None:
    guard, device = make_guard(tmp_path, position=LadderPosition(rung=1, quiet=FIRST_WAIT))
    device.peak_bytes, device.free_bytes = 100 * MIB, 200 * MIB
    run(guard)
    assert guard.rung == 1


def test_the_wait_doubles_after_a_failed_climb(tmp_path: Path) -> None:
    guard, _ = make_guard(tmp_path, position=LadderPosition(rung=1, quiet=FIRST_WAIT))
    run(guard)
    run(guard, lambda: guard.rung == 0)
    assert (guard.rung, guard.position.wait) == (1, 2 * FIRST_WAIT)


def test_the_wait_has_an_upper_limit() -> None:
    position = LadderPosition(rung=1)
    for _ in range(20):
        position = position.up().down()
    assert position.wait == LONGEST_WAIT


# ---- several processes


def test_all_processes_fall_back_when_one_runs_out_of_memory(tmp_path: Path) -> None:
    answers = [[1, 0, 1], [0, 0, 1]]
    guard, _ = make_guard(tmp_path, agree=lambda numbers: answers.pop(0))
    assert run(guard) == 2
    assert guard.rung == 1


def test_an_error_in_another_process_ends_this_one(tmp_path: Path) -> None:
    guard, _ = make_guard(tmp_path, agree=lambda numbers: [2, 0, 1])
    with pytest.raises(GuardError, match="another one failed"):
        run(guard)


# ---- buckets and split


def plan_with_buckets() -> Plan:
    plan = plan_of(seq=64, rungs=((8, 1), (4, 1), (1, 1), (1, 4)))
    short = msgspec.structs.replace(plan.candidate, microbatch=8)
    made = [Bucket(longest=n, sequences=5, candidate=short, expected=plan.expected) for n in (16, 64)]
    return msgspec.structs.replace(plan, buckets=tuple(made))


def test_a_rung_down_shrinks_every_bucket() -> None:
    rows = [[candidate.microbatch for _, candidate in step.buckets] for step in make_ladder(plan_with_buckets())]
    assert all(a >= b for before, after in pairwise(rows) for a, b in zip(before, after, strict=True))
    assert rows[0] == [8, 8]
    assert rows[-1] == [1, 1]


def test_a_microbatch_uses_the_candidate_of_its_bucket() -> None:
    step = make_ladder(plan_with_buckets())[0]
    assert step.candidate_for(10) is step.buckets[0][1]
    assert step.candidate_for(17) is step.buckets[1][1]


def test_a_rung_with_more_segments_means_fewer_sequences_in_a_custom_loop(tmp_path: Path) -> None:
    guard, _ = make_guard(tmp_path, plan_of(rungs=((8, 1), (8, 2), (8, 6))))
    rows = []
    for guard.position in (LadderPosition(rung=n) for n in range(3)):
        rows.append([len(piece) for piece, _ in guard.split((torch.zeros(8, 2), torch.zeros(8)))])
    assert rows == [[8], [4, 4], [1] * 8]


def test_a_batch_can_be_a_dict(tmp_path: Path) -> None:
    (guard, _), batch = make_guard(tmp_path), {"x": torch.arange(9), "y": torch.arange(18).reshape(9, 2)}
    pieces = [*guard.split(batch)]
    assert [len(piece["x"]) for piece in pieces] == [guard.rows, 9 - guard.rows]
    assert all(torch.equal(torch.cat([piece[name] for piece in pieces]), batch[name]) for name in batch)


def test_a_custom_loop_gets_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
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
    gradient = model.weight.grad
    assert gradient is not None
    model.weight.grad = None
    (loss_of(model(inputs), targets) / len(inputs)).backward()
    assert torch.allclose(gradient, model.weight.grad)  # type: ignore[arg-type]
