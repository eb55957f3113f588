"""Claim: exact segments need at most 5 % of the plain step's memory for at most 1.33 of its time, at T = 1,000 (what
Gruslys et al. 2016, arXiv 1606.03401, report) and at T = 10,000.

    python benchmarks/segments_cost_little.py [ROUNDS] [--cases N] [--smoke]

LSTM and GRU. At T = 1,000 memory and time against the number of segments, one layer; of those that keep to the 5 % the
fastest counts. At T = 10,000 one number of them, one and two layers. Side by side: the plain step, oomguard's segments,
and torch.utils.checkpoint applied by hand to the same pieces, the loss inside the piece, in both of its variants. Every
figure comes from a process of its own with one thread and the C library's allocator as it comes: growth of the peak
over what is resident before the model, and the median of the steps. Contenders take turns, so that a busy machine slows
them alike. That a case is hard is seen first: with half of what the plain step commits, it runs out of memory, and the
segments do not.
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
"""Spec, and numbers of segments."""
SMOKE = (LONG | {"seq": 1_000, "cell": "lstm", "layers": 1}, SMOKE_COUNTS)
MOST_MEMORY, MOST_TIME = 0.05, 1.33
STEPS = 2
RIVALS = ("checkpoint", "reentrant")
"""torch.utils.checkpoint with use_reentrant=False, as it recommends, and True."""
WIDTHS = (34, 12, 9, 10, 9)


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One contender in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    command = [sys.executable, str(Path(__file__)), "--one", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run_one(case: dict[str, Any]) -> dict[str, Any]:
    """Steps of one contender, in this process; within a limit of committed bytes if there is one."""
    import torch

    from oomguard._probe.sample import tiny_spec

    torch.set_num_threads(1)
    spec = make_spec(case["spec"])
    steps_of(tiny_spec(spec), case["way"], 2)()
    gc.collect()
    runtime_bytes, committed_bytes = status_bytes("VmRSS"), status_bytes("VmData")
    if "limit_bytes" in case:
        resource.setrlimit(resource.RLIMIT_DATA, (committed_bytes + case["limit_bytes"], resource.RLIM_INFINITY))
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes, seconds = status_bytes("VmPeak"), []
    try:
        step = steps_of(spec, case["way"], case["segments"])
        for _ in range(STEPS + 1):
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
    except (RuntimeError, MemoryError) as error:
        return {"ran_out": str(error).partition("\n")[0]}
    return {
        "growth_bytes": status_bytes("VmHWM") - runtime_bytes,
        "committed_bytes": status_bytes("VmPeak") - before_bytes,
        "seconds": median(seconds[1:]),  # the first makes the optimizer's state
    }


def steps_of(spec: Spec, way: str, segments: int) -> Callable[[], None]:
    """What runs one optimizer step that way."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from oomguard._probe.sample import random_microbatch
    from oomguard._step import prepare, step

    dice = torch.Generator().manual_seed(0)
    training = prepare(spec, make_candidate(spec, segments=segments if way == "segments" else 1))
    batch = random_microbatch(spec, spec.batch, dice)
    targets = batch.targets.numel()

    def ours() -> None:
        step(training, [batch], targets)

    def piece(inputs: Any, wanted: Any, *state: Any) -> tuple[Any, ...]:
        outputs, (after,) = training.model(inputs, [state])
        return torch.nn.functional.mse_loss(outputs, wanted, reduction="sum"), *after

    def by_hand() -> None:
        length, total = -(-spec.steps // segments), torch.zeros(())
        shape = (spec.layers, spec.batch, spec.hidden)  # the reentrant variant needs an input that has a gradient
        state = [torch.zeros(shape, requires_grad=True) for _ in range(2 if spec.cell == "lstm" else 1)]
        for inputs, wanted in zip(batch.inputs.split(length), batch.targets.split(length), strict=True):
            loss, *state = checkpoint(piece, inputs, wanted, *state, use_reentrant=way == "reentrant")
            total = total + loss
        (total / targets).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()

    return ours if way in ("plain", "segments") else by_hand


def check_hard(spec: dict[str, Any], plain: dict[str, Any], segments: int) -> None:
    """Half of what the plain step commits must be too little for it, and enough for the segments."""
    case = {"spec": spec, "segments": segments, "limit_bytes": plain["committed_bytes"] // 2}
    assert "ran_out" in measure(case | {"way": "plain"}), "The case is not hard: plain runs in half its memory."
    ours = measure(case | {"way": "segments"})
    assert "ran_out" not in ours, f"Segments run out in half of the plain step's memory: {ours}"


def run_case(
    spec: dict[str, Any], counts: tuple[int, ...], rounds: int, rivals: tuple[str, ...] = RIVALS
) -> list[dict[str, Any]]:
    """A row for the plain step, for each number of segments, and for the rivals with the last but one of them."""
    shared = counts[max(0, len(counts) - 2)]
    ways = [("plain", 1), *(("segments", count) for count in counts), *((way, shared) for way in rivals)]
    turns = [{one: measure({"spec": spec, "way": one[0], "segments": one[1]}) for one in ways} for _ in range(rounds)]
    plain, rows = turns[0]["plain", 1], []
    check_hard(spec, plain, counts[-1])
    for one in ways:
        row: dict[str, Any] = {"spec": spec, "way": one[0], "segments": one[1]}
        row |= {name: median(turn[one][name] for turn in turns) for name in ("growth_bytes", "seconds")}
        row["memory"] = row["growth_bytes"] / median(turn["plain", 1]["growth_bytes"] for turn in turns)
        row["time"] = median(turn[one]["seconds"] / turn["plain", 1]["seconds"] for turn in turns)
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The table of one case."""
    spec = rows[0]["spec"]
    print(f"\n{spec['cell']} {spec['hidden']} × {spec['layers']}, T = {spec['seq']:,}, batch {spec['batch']}")
    print_row(("", "growth", "memory", "step", "time"), WIDTHS)
    names = {"plain": "plain", "segments": "{} segments", "checkpoint": "checkpoint, {} pieces"}
    names["reentrant"] = "reentrant checkpoint, {} pieces"
    for row in rows:
        growth, memory = f"{row['growth_bytes'] / 2**20:.1f} MiB", f"{row['memory']:.1%}"
        words = names[row["way"]].format(row["segments"])
        print_row((f"  {words}", growth, memory, f"{row['seconds']:.2f} s", f"{row['time']:.2f}"), WIDTHS)


def best(rows: list[dict[str, Any]], most_memory: float) -> dict[str, Any]:
    """The fastest of the segments that keep to the memory; if none does, the smallest."""
    ours = [row for row in rows if row["way"] == "segments"]
    small = [row for row in ours if row["memory"] <= most_memory]
    return min(small, key=lambda row: row["time"]) if small else min(ours, key=lambda row: row["memory"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many")
    parser.add_argument("--smoke", action="store_true", help="one short case: less memory than plain, in any time")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run_one(json.loads(given.one))))
        return
    rounds, cases = (1, (SMOKE,)) if given.smoke else (given.rounds, CASES[: given.cases])
    most_memory, most_time = (0.5, math.inf) if given.smoke else (MOST_MEMORY, MOST_TIME)
    claims, rows = dict[str, bool](), list[dict[str, Any]]()
    for spec, counts in cases:
        rows += (found := run_case(spec, counts, rounds, RIVALS[:1] if given.smoke else RIVALS))
        show(found)
        row = best(found, most_memory)
        words = f"{spec['cell']} × {spec['layers']}, T = {spec['seq']:,}, {row['segments']} segments"
        kept = row["memory"] <= most_memory and row["time"] <= most_time
        claims[f"{words}: {row['memory']:.1%} of the memory, {row['time']:.2f} of the time"] = kept
    whole = not given.smoke and rounds >= 3 and given.cases >= len(CASES)
    publish("segments_cost_little", {"rows": rows, "rounds": rounds}, claims, whole=whole)


if __name__ == "__main__":
    main()
