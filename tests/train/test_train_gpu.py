"""Trainings on a CUDA card: falling back, climbing back, resuming."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from plans import card_plan, saved

import oomguard
from oomguard._core.errors import GuardError
from oomguard._guard.events import Event, Events
from oomguard._guard.ladder import FIRST_WAIT
from oomguard._plan.value import Plan
from oomguard._train.loop import TrainProgress

pytestmark = pytest.mark.gpu

SPEC: dict[str, Any] = {"cell": "lstm", "seq": 400, "features": 2, "hidden": 2048}


def ladder(rows: int) -> list[tuple[int, int]]:
    """Half the microbatch on each rung, down to one sequence in segments."""
    return [(rows >> halvings, 1) for halvings in range(rows.bit_length())] + [(1, 4), (1, 16)]


def filling(share: float) -> Plan:
    """A plan whose expected peak is this share of the card, or slightly less."""
    total_bytes, rows = torch.cuda.mem_get_info(0)[1], 4
    while card_plan([(rows + rows // 4, 1)], **SPEC, batch=2 * rows).expected.peak_bytes < share * total_bytes:
        rows += rows // 4
    return card_plan(ladder(rows), **SPEC, batch=rows)


def data(tmp_path: Path, rows: int = 64) -> str:
    return saved(tmp_path / "data.npy", rows=rows, steps=SPEC["seq"])


def events(run: Path, kinds: tuple[str, ...] = ("oom", "tight", "climb", "bottom")) -> list[Event]:
    return [event for event in Events(run / "events.jsonl").read() if event.kind in kinds]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return card_plan(ladder(16), **SPEC, batch=32)


def test_a_plan_for_the_card_is_trained_there(tmp_path: Path, plan: Plan) -> None:
    result = oomguard.train(plan, data(tmp_path), run=str(tmp_path / "run"), steps=6)
    assert (result.steps, result.ended, result.rung) == (6, "done", 0)
    assert result.model.device.type == "cuda"
    assert 0 < result.peak_bytes <= plan.budget_bytes
    assert not events(tmp_path / "run")


def test_training_survives_a_process_that_takes_half_of_the_card_and_frees_it(
    tmp_path: Path, neighbour: Callable[[int], None]
) -> None:
    plan, half_bytes = filling(0.9), torch.cuda.mem_get_info(0)[1] // 2
    assert plan.expected.peak_bytes > 1.2 * half_bytes, "too easy: the plan fits beside the other process"
    steps, rungs = 60 + 4 * FIRST_WAIT, list[int]()

    def watch(progress: TrainProgress) -> None:
        rungs.append(progress.rung)
        if progress.step == 20:
            neighbour(half_bytes)
        elif progress.step == 60:
            neighbour(0)

    result = oomguard.train(
        plan, data(tmp_path, rows=plan.spec.batch), run=str(tmp_path / "run"), steps=steps, progress=watch, workers=0
    )
    assert (result.steps, result.ended) == (steps, "done")
    assert rungs[:20] == [0] * 20
    assert max(rungs[20:60]) > 0, "it did not fall back"
    assert rungs[-1] == 0, "it did not climb back"
    logged = Events(tmp_path / "run" / "events.jsonl").read()
    assert [event.step for event in logged] == sorted(event.step for event in logged)
    down, up = ([event for event in logged if event.kind in kinds] for kinds in (("oom", "tight"), ("climb",)))
    assert len(down) == len(up) == max(rungs)
    assert all(event.reason and event.figures for event in down)


def test_an_out_of_memory_error_on_the_card_leads_to_a_fallback(tmp_path: Path, plan: Plan) -> None:
    budget_bytes = plan.expected.peak_bytes * 3 // 4
    smaller = msgspec.structs.replace(plan, budget_bytes=budget_bytes, asked_budget_bytes=budget_bytes)
    result = oomguard.train(smaller, data(tmp_path), run=str(tmp_path / "run"), steps=5, workers=0)
    assert (result.steps, result.ended) == (5, "done")
    assert result.rung > 0
    assert "oom" in {event.kind for event in events(tmp_path / "run")}


def test_failing_on_the_last_rung_leaves_a_checkpoint_and_a_message(
    tmp_path: Path, plan: Plan, neighbour: Callable[[int], None]
) -> None:
    file, run = data(tmp_path), tmp_path / "run"
    total_bytes = torch.cuda.mem_get_info(0)[1]

    def watch(progress: TrainProgress) -> None:
        if progress.step == 3:
            neighbour(total_bytes)

    with pytest.raises(GuardError, match="last rung"):
        oomguard.train(plan, file, run=str(run), steps=60, progress=watch, workers=0)
    neighbour(0)
    result = oomguard.train(plan, file, run=str(run), steps=60, resume=True, workers=0)
    assert (result.steps, result.ended) == (60, "done")


def test_predictions_can_be_computed_on_the_card(tmp_path: Path, plan: Plan) -> None:
    file = data(tmp_path)
    oomguard.train(plan, file, run=str(tmp_path / "run"), steps=2)
    predictions = oomguard.predict(str(tmp_path / "run"), file)
    assert predictions.shape == (64, SPEC["seq"], 1)
    assert np.isfinite(predictions).all()
