"""Inside a script: every recurrent call of a training goes in segments where it has to, with the same result."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run.scripts import Ran, environment, run

SCRIPT = Path(__file__).parent / "everything.py"
SEGMENTED = (
    "lstm",
    "batch first",
    "both directions",
    "projection",
    "rnn",
    "dropout",
    "packed",
    "functional",
    "thread",
    "compiled",
)
Losses = dict[str, list[float]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The script with a budget that no call fits."""
    return run(tmp_path_factory.mktemp("run"), sys.executable, str(SCRIPT), "--own", flags=("--budget", "1MiB"))


@pytest.fixture(scope="module")
def ours(ran: Ran) -> Losses:
    assert ran.code == 0, ran.err
    losses: Losses = json.loads(ran.out)
    return losses


@pytest.fixture(scope="module")
def plain() -> Losses:
    words = [sys.executable, str(SCRIPT), "--own"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment())
    losses: Losses = json.loads(done.stdout)
    return losses


def names() -> list[str]:
    source = SCRIPT.read_text().partition("CASES")[2]
    return [line.split('"')[1] for line in source.splitlines() if line.startswith('    "')]


def calls(ran: Ran) -> dict[str, dict[str, Any]]:
    """The calls that were noted, by the text of their line."""
    lines = SCRIPT.read_text().splitlines()
    notes = [call for process in ran.report["processes"] for call in process["calls"]]
    return {lines[int(call["where"].split(":")[1]) - 1].strip(): call for call in notes}


@pytest.mark.parametrize("name", names())
def test_a_script_has_the_losses_and_gradients_that_it_has_alone(name: str, ours: Losses, plain: Losses) -> None:
    assert ours[name] == pytest.approx(plain[name], rel=1e-5)


def test_calls_of_layers_of_functions_and_of_threads_go_in_segments(ran: Ran) -> None:
    noted = [call for process in ran.report["processes"] for call in process["calls"]]
    assert sum(call["in_segments"] for call in noted) == sum(call["calls"] for call in noted) == len(SEGMENTED)
    assert all(call["where"].startswith("everything.py:") for call in noted)


def test_what_cannot_or_shall_not_be_changed_is_left_alone(ran: Ran) -> None:
    """TorchScript, a trace, segments of the script's own, calls without a gradient and those of loader workers."""
    assert len(ran.report["processes"]) == 1, "a worker that trains nothing writes nothing"
    assert "own_segments" not in "".join(calls(ran))
    assert sum(call["calls"] for call in calls(ran).values()) <= len(SEGMENTED)


def test_recomputation_takes_time_that_is_told(ran: Ran) -> None:
    assert ran.report["processes"][0]["recomputed_seconds"] > 0
