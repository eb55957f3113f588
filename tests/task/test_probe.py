"""Probes of tasks: real updates of the user's model in a child process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from task import sized

import oomguard
from oomguard import MisuseError, Task, TaskRecord, Verdict
from oomguard._core.units import GIB, MIB
from oomguard._estimate.margins import SETTLED

pytestmark = pytest.mark.timeout(300)


def probe(task: Task | str, **how: Any) -> TaskRecord:
    usual: dict[str, Any] = {"threads": 1, "allocator": "tight"}
    return oomguard.probe(task, **usual | how)


def test_a_task_is_measured_with_its_batch_and_its_parts() -> None:
    record = probe(sized.regression, microbatch=100, steps=60, budget="4GiB")
    assert record.verdict is Verdict.FITS
    assert (record.task, record.batch, record.seq) == ("task.sized:Regression", 100, 60)
    assert record.terms is not None
    assert record.terms["input"] == 100 * 60 * 4 * 4
    assert record.terms["optimizer"] > 2 * record.terms["weights"] == 2 * record.terms["gradients"]
    assert record.peak_bytes is not None
    assert record.runtime_bytes is not None
    assert 10 * MIB < record.peak_bytes - record.runtime_bytes < 60 * MIB
    assert record.tokens_per_second is not None


def test_a_peak_has_passes_to_settle() -> None:
    """Blocks of a step in the C heap do not fit all gaps that the one before has left."""
    assert probe(sized.regression, microbatch=2, steps=5).passes == SETTLED


def test_the_process_of_a_probe_holds_what_a_training_on_the_command_line_does() -> None:
    """Otherwise the training would peak higher than its probe."""
    code = "import sys; from oomguard._task.child import try_task; try_task('task.sized:regression', 5)"
    code += "; print(*sys.modules)"
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, check=True)
    assert {"safetensors", "typer", "oomguard._train.task"} <= {*done.stdout.split()}


def test_microbatches_and_segments_need_less() -> None:
    def growth_bytes(**knobs: int) -> int:
        record = probe(sized.long_sample, **knobs)
        assert record.peak_bytes is not None
        assert record.runtime_bytes is not None
        return record.peak_bytes - record.runtime_bytes

    whole, halves, pieces = (growth_bytes(**k) for k in ({"microbatch": 2}, {"microbatch": 1, "accumulation": 2},
                                                          {"microbatch": 2, "segments": 16}))  # fmt: skip
    assert halves < 0.75 * whole
    assert pieces < 0.4 * whole


def test_a_task_over_its_budget_is_a_verdict() -> None:
    record = probe(sized.regression, microbatch=2000, steps=60, budget=sized.runtime_bytes() + 40 * MIB)
    assert record.verdict in (Verdict.OVER, Verdict.OOM)


def test_functions_of_a_script_reach_the_child(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import oomguard, torch

def build():
    return torch.nn.LSTM(3, 4)

task = oomguard.Task(model=build, loss=lambda model, batch: model(batch)[0].mean(),
                     batch=lambda rows, steps: torch.randn(steps, rows, 3))
record = oomguard.probe(task, microbatch=2, steps=5, threads=1)
print(record.verdict.name, record.task)
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["FITS", "__main__:build"]


# ---- the user's own errors


def test_an_error_of_the_loss_is_told_with_its_line() -> None:
    with pytest.raises(MisuseError, match=r"sized\.py:\d+ raised KeyError: 'targets'"):
        probe(sized.mistaken, microbatch=2, steps=5)


def test_an_error_that_only_large_batches_cause_is_told_with_its_line() -> None:
    with pytest.raises(MisuseError, match=r"sized\.py:\d+ raised AssertionError: too many"):
        probe(sized.fussy, microbatch=32, steps=5)


def test_an_optimizer_that_calls_a_closure_is_refused() -> None:
    task = Task(model=sized.Regression, loss=sized.squares, batch=sized.waves, optimizer=torch.optim.LBFGS)
    with pytest.raises(MisuseError, match="must step without a closure, but got LBFGS"):
        probe(task, microbatch=2, steps=5)


def test_unknown_knobs_are_refused() -> None:
    with pytest.raises(MisuseError, match="Unknown knob 'hidden'"):
        probe(sized.regression, hidden=3)


@pytest.mark.gpu
def test_a_task_is_measured_on_a_card() -> None:
    record = oomguard.probe(sized.regression, microbatch=64, steps=60, device="cuda", budget=4 * GIB)
    assert record.verdict is Verdict.FITS
    assert record.reserved_bytes is not None
