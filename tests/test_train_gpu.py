"""Trainings on a CUDA card, whichever is there: falling, climbing back, going on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from plans import saved

import oomguard
from oomguard.device import open_device
from oomguard.errors import GuardError
from oomguard.guard.ladder import FIRST_WAIT
from oomguard.metrics import Event, Events
from oomguard.plan.value import Plan
from oomguard.train.job import EVENTS, Told
from oomguard.units import GIB, MIB

pytestmark = pytest.mark.gpu

SPEC: dict[str, Any] = {"cell": "lstm", "seq": 400, "features": 2, "hidden": 512, "layers": 2, "batch": 64}
WHOLE: dict[str, Any] = {"segments": 1, "allocator": "plain", "engine": "cudnn", "max_probes": 4, "allow": "none"}
"""One setting: what is tested here is what comes after the search."""


def planned(budget: int | None = None, batch: int = 64) -> Plan:
    """A plan that takes the whole batch at once."""
    fields = SPEC | {"batch": batch}
    return oomguard.find_feasible_config(**fields, **WHOLE, microbatch=batch, device="cuda", budget=budget)


def data(tmp_path: Path, rows: int = 128) -> str:
    return saved(tmp_path / "data.npy", rows=rows, steps=SPEC["seq"])


def events(run: Path, kinds: tuple[str, ...] = ("oom", "tight", "climb", "bottom")) -> list[Event]:
    return [one for one in Events(run / EVENTS).read() if one.kind in kinds]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(2 * GIB)


@pytest.fixture(scope="module")
def filling() -> Plan:
    """A plan whose peak is more than half of what the card has free."""
    free_bytes = open_device("cuda").budget().left_bytes
    batch = 64
    while oomguard.estimate(**SPEC | {"batch": 2 * batch}, device="cuda").total_bytes < 0.8 * free_bytes:
        batch *= 2
    while oomguard.estimate(**SPEC | {"batch": batch}, device="cuda").total_bytes < 0.6 * free_bytes:
        batch += batch // 4
    return planned(batch=batch)


def test_a_plan_for_the_card_is_trained_there(tmp_path: Path, plan: Plan) -> None:
    result = oomguard.train(plan, data(tmp_path), run=str(tmp_path / "run"), steps=6)
    assert (result.steps, result.ended, result.rung) == (6, "done", 0)
    assert result.model.device.type == "cuda"
    assert 0 < result.peak_bytes <= plan.budget_bytes
    assert not events(tmp_path / "run")


def test_it_survives_a_neighbour_that_takes_half_of_the_card_and_gives_it_back(
    tmp_path: Path, filling: Plan, neighbour: Callable[[int], None]
) -> None:
    steps, rungs = 3 * FIRST_WAIT, []

    def watch(told: Told) -> None:
        rungs.append(told.rung)
        if told.step == 20:
            neighbour(torch.cuda.mem_get_info(0)[1] // 2)
        elif told.step == 60:
            neighbour(0)

    result = oomguard.train(
        filling, data(tmp_path, rows=filling.spec.batch), run=str(tmp_path / "run"), steps=steps, progress=watch
    )
    assert (result.steps, result.ended) == (steps, "done")
    assert rungs[:20] == [0] * 20
    assert max(rungs[20:60]) > 0, "it did not step down"
    assert rungs[-1] == 0, "it did not climb back"
    assert [one.step for one in Events(tmp_path / "run" / EVENTS).read()] == sorted(
        one.step for one in Events(tmp_path / "run" / EVENTS).read()
    )
    down = [one for one in events(tmp_path / "run") if one.kind in ("oom", "tight")]
    up = [one for one in events(tmp_path / "run") if one.kind == "climb"]
    assert len(down) == len(up) == max(rungs)
    assert all(one.reason and one.figures for one in down)


def test_an_out_of_memory_error_of_the_card_is_one_rung_not_the_end(tmp_path: Path, plan: Plan) -> None:
    smaller = msgspec.structs.replace(plan, budget_bytes=plan.peak_bytes - 64 * MIB)
    smaller = msgspec.structs.replace(smaller, asked_budget_bytes=smaller.budget_bytes)
    result = oomguard.train(smaller, data(tmp_path), run=str(tmp_path / "run"), steps=5)
    assert (result.steps, result.ended) == (5, "done")
    assert result.rung > 0
    assert {one.kind for one in events(tmp_path / "run")} == {"oom"}


def test_at_the_bottom_there_are_a_checkpoint_and_a_message(
    tmp_path: Path, plan: Plan, neighbour: Callable[[int], None]
) -> None:
    file, run = data(tmp_path), tmp_path / "run"
    total_bytes = torch.cuda.mem_get_info(0)[1]

    def watch(told: Told) -> None:
        if told.step == 3:
            neighbour(total_bytes)

    with pytest.raises(GuardError, match="last rung"):
        oomguard.train(plan, file, run=str(run), steps=9, progress=watch)
    neighbour(0)
    result = oomguard.train(plan, file, run=str(run), steps=9, resume=True)
    assert (result.steps, result.ended) == (9, "done")


def test_predictions_come_from_the_card(tmp_path: Path, plan: Plan) -> None:
    file = data(tmp_path)
    oomguard.train(plan, file, run=str(tmp_path / "run"), steps=2)
    found = oomguard.predict(str(tmp_path / "run"), file)
    assert found.shape == (128, SPEC["seq"], 1)
    assert np.isfinite(found).all()
