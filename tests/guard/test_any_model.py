"""The guard in loops of your own: without a plan, with longer sequences than planned, with Python's random numbers."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from guard.fakes import SHORT, FakeDevice, events, run
from plans import plan_of

import oomguard
from oomguard._core.errors import GuardError, MisuseError
from oomguard._core.units import GIB, MIB
from oomguard._estimate.malloc import ENVIRONMENT
from oomguard._guard import Guard, ladder
from oomguard._guard.events import Events
from oomguard._guard.ladder import FIRST_WAIT, LadderPosition, make_halvings


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "PAUSE_SECONDS", {"cpu": 0.0, "cuda": 0.0})


def budget_guard(tmp_path: Path, **more: Any) -> tuple[Guard, FakeDevice]:
    device: Any = FakeDevice()
    made = Guard(device=device, events=Events(tmp_path / "events.jsonl"), **{"budget_bytes": GIB, **more})
    made.watch.start()
    return made, device


def sizes(guard: Guard, rows: int = 8) -> list[int]:
    return [len(piece) for piece in guard.split(torch.zeros(rows, 3))]


def child(script: str, *arguments: object, **environment: str) -> Any:
    """Run a script in a fresh process; returns what it prints as JSON."""
    words = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---- without a plan


@pytest.mark.parametrize(("rows", "halves"), [(1, [1]), (2, [2, 1]), (12, [12, 6, 3, 2, 1]), (16, [16, 8, 4, 2, 1])])
def test_without_a_plan_every_rung_halves_the_rows(rows: int, halves: list[int]) -> None:
    assert [rung.candidate.microbatch for rung in make_halvings(rows)] == halves


def test_without_a_plan_the_whole_batch_is_tried_first(tmp_path: Path) -> None:
    guard, _ = budget_guard(tmp_path)
    tried: list[list[int]] = []
    for attempt in guard.attempts():
        with attempt:
            tried.append(sizes(guard))
            if len(tried) < 3:
                raise RuntimeError(SHORT)
    assert tried == [[8], [4, 4], [2, 2, 2, 2]]


def test_a_larger_batch_does_not_enlarge_the_pieces_once_memory_was_short(tmp_path: Path) -> None:
    guard, _ = budget_guard(tmp_path)
    assert (sizes(guard), sizes(guard, 12)) == ([8], [12])
    guard.position = LadderPosition(rung=2)
    assert (sizes(guard, 12), sizes(guard, 24)) == ([3] * 4, [3] * 8)
    assert sizes(guard, 5) == [3, 2]


def test_the_first_microbatch_can_be_given(tmp_path: Path) -> None:
    guard, _ = budget_guard(tmp_path, microbatch=4)
    assert sizes(guard, 10) == [4, 4, 2]
    assert len(guard.ladder) == 3


def test_without_a_plan_the_last_rung_is_an_error_too(tmp_path: Path) -> None:
    guard, _ = budget_guard(tmp_path, microbatch=2)
    with pytest.raises(GuardError, match=r"The last rung \(microbatch 1.* a limit of 1.00 GiB"):
        run(guard, lambda: True)


def test_without_a_plan_the_guard_climbs_after_quiet_steps(tmp_path: Path) -> None:
    guard, _ = budget_guard(tmp_path, microbatch=8, position=LadderPosition(rung=2))
    for _ in range(2 * FIRST_WAIT):
        run(guard)
    assert guard.rung == 0


def test_without_a_plan_the_guard_does_not_climb_to_a_peak_that_was_over_the_budget(tmp_path: Path) -> None:
    guard, device = budget_guard(tmp_path, microbatch=8)
    device.peak_bytes = GIB + MIB
    run(guard)
    assert (guard.rung, events(guard)[0].kind) == (1, "tight")
    device.peak_bytes = GIB // 2
    for _ in range(FIRST_WAIT):
        run(guard)
    assert guard.rung == 1
    guard.watch.limit_bytes = 2 * GIB
    run(guard)
    assert guard.rung == 0


def test_a_budget_that_is_already_used_up_is_refused() -> None:
    with pytest.raises(MisuseError, match="must be more than this process already uses"), oomguard.guard(budget="1MiB"):
        pass


def test_a_plan_and_a_budget_exclude_each_other() -> None:
    with pytest.raises(MisuseError, match="A plan has its own budget"):
        oomguard.guard(plan_of(), budget="6GiB")


# ---- random numbers


def test_python_and_numpy_repeat_their_random_numbers_in_every_attempt_and_piece(tmp_path: Path) -> None:
    guard, _ = budget_guard(tmp_path)
    seen: list[tuple[float, float]] = []
    for attempt in guard.attempts():
        with attempt:
            seen += [(random.random(), float(np.random.random())) for _ in guard.split(torch.zeros(8))]
            if guard.rung < 2:
                raise RuntimeError(SHORT)
    assert len(seen) == 1 + 2 + 4
    assert len({*seen}) == 1
    assert random.random() != seen[0][0], "after the step they go on"


TEACHER_FORCING = """
import json, random, sys
import numpy as np, torch
import oomguard
from oomguard._device.cpu import Cpu
torch.set_num_threads(1)

class Translator(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.GRU(8, 64, batch_first=True)
        self.decoder = torch.nn.GRUCell(8, 64)
        self.head = torch.nn.Linear(64, 8)

    def forward(self, source, target):
        state, last, outputs = self.encoder(source)[1][0], source[:, -1], []
        for step in range(target.shape[1]):
            state = self.decoder(last, state)
            outputs.append(self.head(state))
            forced = random.random() < 0.5 if step % 2 else np.random.random() < 0.5
            last = target[:, step] if forced else outputs[-1]
        return torch.stack(outputs, 1)

def train(room_bytes):
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    model = Translator().double()
    optimizer = torch.optim.Adam(model.parameters())
    batches = [(torch.randn(512, 30, 8).double(), torch.randn(512, 12, 8).double()) for _ in range(3)]
    torch.nn.functional.mse_loss(model(*[part[:2] for part in batches[0]]), batches[0][1][:2]).backward()
    random.seed(1), np.random.seed(1)
    budget = Cpu().reading().now_bytes + room_bytes
    def loss(model, batch):
        return torch.nn.functional.mse_loss(model(*batch), batch[1])
    with oomguard.stepper(budget, model, loss, optimizer) as step:
        for batch in batches:
            step(batch)
    return step.guard.rung, torch.cat([p.detach().flatten() for p in model.parameters()])

rung, disturbed = train(int(sys.argv[1]))
calm, undisturbed = train(8 << 30)
error = ((disturbed - undisturbed).abs().max() / undisturbed.abs().max()).item()
json.dump({"rung": rung, "calm": calm, "error": error}, sys.stdout)
"""


def test_a_disturbed_training_with_teacher_forcing_gives_the_weights_of_the_undisturbed_one() -> None:
    found = child(TEACHER_FORCING, 48 * MIB)
    assert found["calm"] == 0
    assert found["rung"] > 0, "memory ran out for real"
    assert found["error"] <= 1e-12


# ---- a budget, and real memory

WITHIN = """
import json, sys
import torch
import oomguard
from oomguard._device.cpu import Cpu
torch.set_num_threads(1)
torch.manual_seed(0)
lstm = torch.nn.LSTM(16, 128, batch_first=True)
optimizer = torch.optim.SGD(lstm.parameters(), lr=0.1)
batch = torch.randn(64, 200, 16)
def learn(inputs, share):
    (lstm(inputs)[0].square().mean() * share).backward()
def step(budget):
    rows = []
    with oomguard.guard(budget=budget) as guard:
        for attempt in guard.attempts(optimizer):
            with attempt:
                for piece, share in guard.pieces(batch):
                    rows.append(len(piece))
                    learn(piece, share)
    return rows, guard.watch.peak_bytes
learn(torch.randn(1, 9, 16), 1.0)
budget = Cpu().reading().now_bytes + int(sys.argv[1])
json.dump([budget, step(budget), step("8GiB")], sys.stdout)
"""


def test_without_a_plan_the_resident_peak_stays_within_the_budget() -> None:
    budget, (rows, peak_bytes), (whole, whole_peak_bytes) = child(WITHIN, 64 * MIB)
    assert rows[0] == 64, "the whole batch is tried"
    assert rows[-1] <= 32
    assert peak_bytes <= budget
    assert whole == [64]
    assert whole_peak_bytes > budget


# ---- sequences that are longer than the plan's


def longer_guard(tmp_path: Path, room_bytes: int, held_bytes: int = 0) -> Guard:
    plan = plan_of(seq=100, hidden=64)
    budget = plan.peak_bytes + room_bytes
    plan = msgspec.structs.replace(plan, asked_budget_bytes=budget, budget_bytes=budget)
    device: Any = FakeDevice(peak_bytes=plan.estimate.terms["runtime"] + held_bytes)
    return Guard(plan, device=device, events=Events(tmp_path / "events.jsonl"))


def rows_at(guard: Guard, steps: int) -> int:
    return len(next(guard.split(torch.zeros(8, steps, 2))))


def test_longer_sequences_than_the_plan_knows_make_smaller_pieces(tmp_path: Path) -> None:
    guard = longer_guard(tmp_path, 0)
    assert [rows_at(guard, steps) for steps in (50, 100, 200, 400, 10_000)] == [8, 8, 4, 2, 1]
    guard.position = LadderPosition(rung=1)
    assert [rows_at(guard, steps) for steps in (100, 200, 400)] == [4, 2, 1], "a rung down halves them too"
    assert [event.figures["rows"] for event in events(guard)] == [4, 2, 1]


def test_what_the_process_holds_already_makes_smaller_pieces_of_longer_sequences(tmp_path: Path) -> None:
    plan = plan_of(seq=100, hidden=64)
    growth_bytes = plan.peak_bytes - plan.estimate.terms["runtime"]
    assert rows_at(longer_guard(tmp_path, 0, held_bytes=growth_bytes // 2), 200) == 2, "4 if it held nothing"


def test_longer_sequences_that_fit_the_budget_are_not_cut_smaller(tmp_path: Path) -> None:
    guard = longer_guard(tmp_path, GIB)
    assert rows_at(guard, 200) == 8
    assert not guard.events or not guard.events.path.exists()


def test_the_length_of_sequences_can_be_given(tmp_path: Path) -> None:
    guard = longer_guard(tmp_path, 0)
    assert [len(piece) for piece in guard.split(torch.zeros(8, 300), steps=100)] == [8]


LONGER = """
import json, sys
import torch
import oomguard
torch.set_num_threads(1)
plan = oomguard.load_plan(sys.argv[1])
lstm, head = torch.nn.LSTM(16, 128, batch_first=True), torch.nn.Linear(128, 1)
optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()])
def learn(inputs, targets, rows):
    (torch.nn.functional.mse_loss(head(lstm(inputs)[0]), targets, reduction="sum") / rows).backward()
def train(**given):
    with oomguard.guard(plan) as guard:
        for steps in (plan.spec.steps, 4 * plan.spec.steps):
            batch = torch.randn(32, steps, 16), torch.randn(32, steps, 1)
            for attempt in guard.attempts(optimizer):
                with attempt:
                    for piece in guard.split(batch, **given):
                        learn(*piece, 32)
            guard.update(optimizer)
            optimizer.zero_grad()
    return guard.watch.peak_bytes
json.dump([train(), train(steps=plan.spec.steps)], sys.stdout)
"""


def test_a_longer_batch_stays_within_the_budget_of_the_plan(tmp_path: Path) -> None:
    knobs = {"engine": "onednn", "allocator": "tight"}
    rungs = [(rows, 1) for rows in (32, 16, 8, 4, 2, 1)]
    plan = plan_of(rungs, knobs, cell="lstm", seq=200, features=16, hidden=128, layers=1, batch=32)
    budget = plan.peak_bytes + 48 * MIB
    plain = msgspec.structs.replace(plan.plain, fits=False)
    plan = msgspec.structs.replace(plan, asked_budget_bytes=budget, budget_bytes=budget, plain=plain)
    path = oomguard.save_plan(plan, tmp_path / "plan.json")
    peak_bytes, unseen_peak_bytes = child(LONGER, path, **ENVIRONMENT["tight"])
    assert peak_bytes <= budget
    assert unseen_peak_bytes > budget, "if the guard did not see the length"


def test_a_piece_comes_with_its_share_of_the_rows(tmp_path: Path) -> None:
    guard, _ = budget_guard(tmp_path, microbatch=3)
    batch = {"x": torch.arange(8), "name": "waves"}
    shares = [(len(piece["x"]), share) for piece, share in guard.pieces(batch)]  # type: ignore[arg-type]
    assert shares == [(3, 3 / 8), (3, 3 / 8), (2, 2 / 8)]
