"""Claim: the estimate of a task tracks the measured peak of a training step of models that no spec describes.

    python benchmarks/task_estimates_track_peaks.py                   # all models of tasks.py
    python benchmarks/task_estimates_track_peaks.py tagger speech     # only these
    python benchmarks/task_estimates_track_peaks.py --smoke           # two models, as small as possible

oomguard estimates each task before anything runs at full size. Then a new process with the heap setting `tight` runs a
tiny step, so that every library is loaded, and two optimizer steps at full size. The error is that of the growth of the
peak over the memory after the tiny step. torch's MemTracker (with fake tensors) and torchinfo predict the same step in
processes of their own. A tool that raises an error or takes more than two minutes has no answer.

After that, two probes of other batch sizes correct the traces, as they do in a search for a plan. The peak of this
batch, which neither of them ran, is predicted again ("probed") and compared with that of a third probe.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from finders import is_installed
from peak import status_bytes, tight, without_heap_settings
from results import print_row, publish
from tasks import CASES
from torch import nn

import oomguard
from oomguard import Task
from oomguard._core.units import MIB
from oomguard._device.cpu import Cpu
from oomguard._device.find import find_budget, find_target
from oomguard._plan.task_curve import Curves, Shape
from oomguard._task.ask import Asker
from oomguard._task.batches import Batches
from oomguard._task.layout import mapped
from oomguard._task.trace import build, evaluate, make_optimizer, mean_of

MEDIAN, WORST = 0.03, 0.15
PROBED_MEDIAN, PROBED_WORST = 0.015, 0.06
"""Largest errors before any probe, and after two probes of other sizes."""
STEPS = 2
"""Optimizer steps. The second one is the first that starts with the optimizer state in memory."""
RIVALS = ("memtracker", "torchinfo")
OURS = ("oomguard", "probed")
WIDTHS = (16, 12, 9, 9, 12, 12, 9, 9)
SECONDS = 600
SMOKE = {"forecast": (2, 20), "autoencoder": (2, 20)}
"""Models of a smoke run, with rows and time steps."""


def run(task: Task, batch: Any, steps: int = STEPS) -> None:
    """Run optimizer steps as a plain training loop does."""
    model = build(task).train()
    optimizer = make_optimizer(task, model)
    for _ in range(steps):
        mean_of(*evaluate(task, model, batch)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def measured(task: Task, rows: int, steps: int | None) -> dict[str, Any]:
    """Measure the growth of the peak in this process."""
    batches = Batches(task)
    run(task, batches.tiny(2, steps))
    gc.collect()
    Cpu().release()
    runtime_bytes = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    began = time.monotonic()
    run(task, batches.make(rows, steps))
    seconds = (time.monotonic() - began) / STEPS
    return {"growth_bytes": status_bytes("VmHWM") - runtime_bytes, "seconds_per_step": seconds}


def memtracker(task: Task, rows: int, steps: int | None) -> dict[str, Any]:
    """Trace one optimizer step under FakeTensorMode, with the optimizer state in memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    batch = Batches(task).make(rows, steps)
    with FakeTensorMode() as mode:
        model = task.model().train()  # fake tensors cannot be moved to a device, as `build` does
        optimizer = make_optimizer(task, model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        fake = mapped(mode.from_tensor, batch)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            mean_of(*evaluate(task, model, fake)).backward()
            optimizer.step()
        peaks = tracker.get_tracker_snapshot("peak")
    return {"memtracker_bytes": int(peaks[torch.device("cpu")]["Total"])}


def torchinfo(task: Task, rows: int, steps: int | None) -> dict[str, Any]:
    """Add up input, forward/backward pass and parameters in torchinfo's summary."""
    import torchinfo as tool

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build(task)
            self.batch = Batches(task).make(rows, steps)

        def forward(self, _: torch.Tensor) -> torch.Tensor:
            result = task.loss(self.model, self.batch, *[None] * task.piecewise)
            return result[0] if isinstance(result, tuple) else result

    summary = tool.summary(Whole(), input_data=[torch.zeros(1)], mode="train", verbose=0)
    return {"torchinfo_bytes": int(summary.total_input + summary.total_output_bytes + summary.total_param_bytes)}


TOOLS: dict[str, Callable[[Task, int, int | None], dict[str, Any]]] = {
    "measured": measured,
    "memtracker": memtracker,
    "torchinfo": torchinfo,
}


def elsewhere(tool: str, name: str, rows: int, steps: int | None, seconds: float) -> dict[str, Any]:
    """Run a tool on a task in a new process; an empty result if it has no answer."""
    request = json.dumps({"tool": tool, "name": name, "rows": rows, "steps": steps})
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--alone", request],
            capture_output=True, text=True, timeout=seconds, check=True,
            env=without_heap_settings() | tight(),
        )  # fmt: skip
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        if tool == "measured":
            raise
        return {}
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def probed(name: str, rows: int, steps: int | None) -> dict[str, Any]:
    """Predict the growth of the peak by traces that two probes of other sizes have corrected, by the planner's code."""
    task, shape, target = CASES[name].task(), Shape(allocator="tight"), find_target("cpu")
    sizes = [max(1, rows // 2), rows * 3 // 4]
    sizes[1] += 2 * (sizes[1] == sizes[0])  # a batch of two rows is predicted from one row and from three
    with Asker(task, target, steps=steps, allocator=shape.allocator) as asker:
        curves = Curves(asker, target, shape, find_budget("cpu").limit_bytes, rows)
        for size in sizes:
            record = oomguard.probe(task, microbatch=size, steps=steps, threads=1, allocator=shape.allocator)
            curves.correct(shape, record)
        assert record.runtime_bytes is not None
        predicted_bytes = curves[shape].peak_bytes(rows) - record.runtime_bytes
    last = oomguard.probe(task, microbatch=rows, steps=steps, threads=1, allocator=shape.allocator)
    assert last.peak_bytes is not None
    assert last.runtime_bytes is not None
    third_bytes = last.peak_bytes - last.runtime_bytes
    return {"probed_rows": sizes, "probed_bytes": predicted_bytes, "third_bytes": third_bytes}


def compare(name: str, rows: int, steps: int | None) -> dict[str, Any]:
    """Estimate a task, measure it, and ask the rivals."""
    began = time.monotonic()
    found = oomguard.estimate(CASES[name].task(), microbatch=rows, steps=steps)
    row: dict[str, Any] = {"task": name, "rows": rows, "estimate_seconds": time.monotonic() - began}
    row |= {"oomguard_bytes": int(found.growth_bytes), "peak_part": next(iter(found.parts)), "moment": found.moment}
    row |= elsewhere("measured", name, rows, steps, SECONDS) | probed(name, rows, steps)
    for tool in RIVALS:
        if tool != "torchinfo" or is_installed(tool):
            row |= elsewhere(tool, name, rows, steps, 120)
    return row


def errors(rows: list[dict[str, Any]], tool: str) -> list[float]:
    """Compute the relative errors of a tool for the rows that it has an answer for, smallest first."""
    return sorted(abs(error) for row in rows if (error := error_of(row, tool)) is not None)


def error_of(row: dict[str, Any], tool: str) -> float | None:
    """Compute the relative error of a tool; None if it has no answer."""
    predicted_bytes = row.get(f"{tool}_bytes")
    measured_bytes = row["third_bytes" if tool == "probed" else "growth_bytes"]
    return None if predicted_bytes is None else predicted_bytes / measured_bytes - 1


def show(row: dict[str, Any]) -> None:
    words = ["none" if (error := error_of(row, tool)) is None else f"{error:+.1%}" for tool in (*OURS, *RIVALS)]
    growth = f"{row['growth_bytes'] / MIB:.0f} MiB"
    print_row((row["task"], growth, *words, f"{row['seconds_per_step']:.1f} s", f"{row['estimate_seconds']:.0f} s"),
              WIDTHS)  # fmt: skip


def alone(request: dict[str, Any]) -> None:
    """Run one tool on one task in this process, and print its answer as JSON."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps(TOOLS[request["tool"]](CASES[request["name"]].task(), request["rows"], request["steps"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="tasks to compare (default: all)")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="compare two small tasks")
    args = parser.parse_args()
    if args.alone:
        alone(json.loads(args.alone))
        return
    sizes = SMOKE if args.smoke else {name: (case.rows, case.steps) for name, case in CASES.items()}
    chosen = {name: sizes[name] for name in args.names or sizes}
    print_row(("task", "growth", *OURS, "memtracker", "torchinfo", "a step", "estimate"), WIDTHS)
    rows = []
    for name, (count, steps) in chosen.items():
        rows.append(compare(name, count, steps))
        show(rows[-1])
    result: dict[str, Any] = {"rows": rows}
    for tool in (*OURS, *RIVALS):
        found = errors(rows, tool)
        if found:
            result[tool] = {"answers": len(found), "median": median(found), "worst": found[-1]}
    ours, later = result["oomguard"], result["probed"]
    claims = {
        f"{len(rows)} tasks: median error at most {MEDIAN:.0%} ({ours['median']:.1%})": ours["median"] <= MEDIAN,
        f"{len(rows)} tasks: worst error at most {WORST:.0%} ({ours['worst']:.1%})": ours["worst"] <= WORST,
        f"{len(rows)} tasks, after two probes of other sizes: median error at most {PROBED_MEDIAN:.1%} "
        f"({later['median']:.1%}), {PROBED_WORST:.0%} in the worst case ({later['worst']:.1%})": (
            later["median"] <= PROBED_MEDIAN and later["worst"] <= PROBED_WORST
        ),
    }
    packages = tuple(name for name in ("torchinfo",) if is_installed(name))
    whole = chosen.keys() == CASES.keys()
    publish("task_estimates_track_peaks", result, {} if args.smoke else claims, whole=whole, packages=packages)


if __name__ == "__main__":
    main()
