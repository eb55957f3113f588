"""Claim: exact segments need at most 5 % of the plain step's memory for at most 1.33 of its time, at T = 1,000 (what
Gruslys et al. 2016, arXiv 1606.03401, report) and at T = 10,000.

    python benchmarks/segments_cost_little.py [ROUNDS] [--cases N] [--smoke]

The models are LSTM and GRU. At T = 1,000 they have one layer and run with several numbers of segments; the fastest of
those within 5 % of the memory counts. At T = 10,000 they have one or two layers and run with one number of segments.
The contenders are the plain step, oomguard's segments, and both variants of torch.utils.checkpoint, applied by hand to
the same pieces with the loss inside each piece.

Each figure comes from its own process with one thread and the default settings of the C allocator. Memory is the growth
of the peak over the bytes that are resident before the model is made. Time is the median of the steps. The contenders
take turns, so that a busy machine slows all alike. Each case must be hard: with half of the bytes that the plain step
commits, the plain step must run out of memory, and the segments must not.
"""

import argparse
import gc
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from peak import status_bytes
from results import print_row, publish

from oomguard._spec.candidate import make_candidate
from oomguard._spec.read import make_spec
from oomguard._spec.spec import Spec

SHORT: dict[str, Any] = {"seq": 1_000, "features": 8, "hidden": 128, "batch": 64}
LONG: dict[str, Any] = {"seq": 10_000, "features": 8, "hidden": 128, "batch": 4}
COUNTS, LONG_COUNTS, SMOKE_COUNTS = (4, 8, 16, 32, 64), (64,), (8,)
CASES: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
    *((SHORT | {"cell": cell, "layers": 1}, COUNTS) for cell in ("lstm", "gru")),
    *((LONG | {"cell": cell, "layers": layers}, LONG_COUNTS) for cell in ("lstm", "gru") for layers in (1, 2)),
)
"""Fields of the spec, and numbers of segments."""
SMOKE = (LONG | {"seq": 1_000, "cell": "lstm", "layers": 1}, SMOKE_COUNTS)
MAX_MEMORY, MAX_TIME = 0.05, 1.33
STEPS = 2
RIVALS = ("checkpoint", "reentrant")
"""torch.utils.checkpoint with use_reentrant=False, which its documentation recommends, and with True."""
WIDTHS = (34, 12, 9, 10, 9)


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Run one contender in its own process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    command = [sys.executable, str(Path(__file__)), "--one", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def measure_in_child(case: dict[str, Any]) -> dict[str, Any]:
    """Measure steps of one contender in this process. `limit_bytes`, if given, limits the bytes that they commit."""
    import torch

    from oomguard._probe.sample import tiny_spec

    torch.set_num_threads(1)
    spec = make_spec(case["spec"])
    make_step(tiny_spec(spec), case["way"], 2)()
    gc.collect()
    runtime_bytes, committed_bytes = status_bytes("VmRSS"), status_bytes("VmData")
    if "limit_bytes" in case:
        resource.setrlimit(resource.RLIMIT_DATA, (committed_bytes + case["limit_bytes"], resource.RLIM_INFINITY))
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes, seconds = status_bytes("VmPeak"), []
    try:
        step = make_step(spec, case["way"], case["segments"])
        for _ in range(STEPS + 1):
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
    except (RuntimeError, MemoryError) as error:
        return {"ran_out": str(error).partition("\n")[0]}
    return {
        "growth_bytes": status_bytes("VmHWM") - runtime_bytes,
        "committed_bytes": status_bytes("VmPeak") - before_bytes,
        "seconds": median(seconds[1:]),  # the first step creates the optimizer state
    }


def make_step(spec: Spec, way: str, segments: int) -> Callable[[], None]:
    """Make a function that runs one optimizer step of a contender."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from oomguard._probe.sample import random_microbatch
    from oomguard._step import prepare, step

    rng = torch.Generator().manual_seed(0)
    training = prepare(spec, make_candidate(spec, segments=segments if way == "segments" else 1))
    batch = random_microbatch(spec, spec.batch, rng)
    targets = batch.targets.numel()

    def ours() -> None:
        step(training, [batch], targets)

    def piece(inputs: Any, expected: Any, *state: Any) -> tuple[Any, ...]:
        outputs, (after,) = training.model(inputs, [state])
        return torch.nn.functional.mse_loss(outputs, expected, reduction="sum"), *after

    def by_hand() -> None:
        length, total = -(-spec.steps // segments), torch.zeros(())
        shape = (spec.layers, spec.batch, spec.hidden)  # the reentrant variant needs an input that requires a gradient
        state = [torch.zeros(shape, requires_grad=True) for _ in range(2 if spec.cell == "lstm" else 1)]
        for inputs, expected in zip(batch.inputs.split(length), batch.targets.split(length), strict=True):
            loss, *state = checkpoint(piece, inputs, expected, *state, use_reentrant=way == "reentrant")
            total = total + loss
        (total / targets).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()

    return ours if way in ("plain", "segments") else by_hand


def check_hard(spec: dict[str, Any], plain: dict[str, Any], segments: int) -> None:
    """Check that half of the bytes that the plain step commits are too few for it, and enough for the segments."""
    case = {"spec": spec, "segments": segments, "limit_bytes": plain["committed_bytes"] // 2}
    assert "ran_out" in measure(case | {"way": "plain"}), (
        "The case is not hard: the plain step runs in half its memory."
    )
    ours = measure(case | {"way": "segments"})
    assert "ran_out" not in ours, f"Segments ran out of memory in half of the plain step's memory: {ours}"


def run_case(
    spec: dict[str, Any], counts: tuple[int, ...], rounds: int, rivals: tuple[str, ...] = RIVALS
) -> list[dict[str, Any]]:
    """Measure the plain step, each number of segments, and the rivals with the second largest number of segments."""
    shared = counts[max(0, len(counts) - 2)]
    runs = [("plain", 1), *(("segments", count) for count in counts), *((way, shared) for way in rivals)]
    turns = [{run: measure({"spec": spec, "way": run[0], "segments": run[1]}) for run in runs} for _ in range(rounds)]
    plain, rows = turns[0]["plain", 1], []
    check_hard(spec, plain, counts[-1])
    for run in runs:
        row: dict[str, Any] = {"spec": spec, "way": run[0], "segments": run[1]}
        row |= {name: median(turn[run][name] for turn in turns) for name in ("growth_bytes", "seconds")}
        row["memory"] = row["growth_bytes"] / median(turn["plain", 1]["growth_bytes"] for turn in turns)
        row["time"] = median(turn[run]["seconds"] / turn["plain", 1]["seconds"] for turn in turns)
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table of one case."""
    spec = rows[0]["spec"]
    print(f"\n{spec['cell']} {spec['hidden']} × {spec['layers']}, T = {spec['seq']:,}, batch {spec['batch']}")
    print_row(("", "growth", "memory", "step", "time"), WIDTHS)
    names = {"plain": "plain", "segments": "{} segments", "checkpoint": "checkpoint, {} pieces"}
    names["reentrant"] = "reentrant checkpoint, {} pieces"
    for row in rows:
        growth, memory = f"{row['growth_bytes'] / 2**20:.1f} MiB", f"{row['memory']:.1%}"
        name = names[row["way"]].format(row["segments"])
        print_row((f"  {name}", growth, memory, f"{row['seconds']:.2f} s", f"{row['time']:.2f}"), WIDTHS)


def best(rows: list[dict[str, Any]], max_memory: float) -> dict[str, Any]:
    """Return the fastest row of segments within `max_memory`, or the row with the least memory if none is within it."""
    ours = [row for row in rows if row["way"] == "segments"]
    small = [row for row in ours if row["memory"] <= max_memory]
    return min(small, key=lambda row: row["time"]) if small else min(ours, key=lambda row: row["memory"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    parser.add_argument("--cases", type=int, default=len(CASES), help="run only the first CASES cases")
    parser.add_argument("--smoke", action="store_true", help="check that segments save memory in one short case")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure_in_child(json.loads(args.one))))
        return
    rounds, cases = (1, (SMOKE,)) if args.smoke else (args.rounds, CASES[: args.cases])
    max_memory, max_time = (0.5, math.inf) if args.smoke else (MAX_MEMORY, MAX_TIME)
    claims, rows = dict[str, bool](), list[dict[str, Any]]()
    for spec, counts in cases:
        rows += (case_rows := run_case(spec, counts, rounds, RIVALS[:1] if args.smoke else RIVALS))
        show(case_rows)
        row = best(case_rows, max_memory)
        case = f"{spec['cell']} × {spec['layers']}, T = {spec['seq']:,}, {row['segments']} segments"
        holds = row["memory"] <= max_memory and row["time"] <= max_time
        claims[f"{case}: {row['memory']:.1%} of the memory, {row['time']:.2f} of the time"] = holds
    whole = not args.smoke and rounds >= 3 and args.cases >= len(CASES)
    publish("segments_cost_little", {"rows": rows, "rounds": rounds}, claims, whole=whole)


if __name__ == "__main__":
    main()
