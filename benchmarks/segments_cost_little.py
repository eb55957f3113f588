"""Claim: exact segments need at most 6 % of the plain step's memory, for at most 1.35 of its time (T = 10,000).

    python benchmarks/segments_cost_little.py [ROUNDS] [--smoke]

LSTM and GRU, one and two layers. Side by side: the plain step, oomguard's segments, and torch.utils.checkpoint applied
by hand to the same pieces, the loss inside the piece, in both of its variants. Every figure comes from a
process of its own with one thread and the C library's allocator as it comes: growth of the peak over what is resident
before the model, and the median of the steps. Contenders take turns, so that a busy machine slows them alike.
"""

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from peak import status_bytes

from oomguard.candidate import make_candidate
from oomguard.presets import make_spec
from oomguard.spec import Spec

SPEC: dict[str, Any] = {"seq": 10_000, "features": 8, "hidden": 128, "batch": 4}
SEGMENTS = 64
MOST_MEMORY, MOST_TIME = 0.06, 1.35
STEPS = 2
WAYS = ("plain", "segments", "checkpoint", "reentrant")
"""The last two are torch.utils.checkpoint with use_reentrant=False, as it recommends, and True."""


def measure(case: dict[str, Any]) -> dict[str, float]:
    """One contender in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    command = [sys.executable, str(Path(__file__)), "--one", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def run_one(case: dict[str, Any]) -> dict[str, float]:
    """Steps of one contender, in this process."""
    import torch

    from oomguard.probe.sample import tiny_spec

    torch.set_num_threads(1)
    spec = make_spec(SPEC | {"cell": case["cell"], "layers": case["layers"], "seq": case["seq"]})
    steps_of(tiny_spec(spec), case["way"], 2)()
    gc.collect()
    runtime_bytes = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step = steps_of(spec, case["way"], SEGMENTS)
    step()  # makes the optimizer's state; its time does not count
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return {"growth_bytes": status_bytes("VmHWM") - runtime_bytes, "seconds": median(seconds)}


def steps_of(spec: Spec, way: str, segments: int) -> Callable[[], None]:
    """What runs one optimizer step that way."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from oomguard.probe.sample import random_microbatch
    from oomguard.step import prepare, step

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="one short case: less memory than plain, in any time")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run_one(json.loads(given.one))))
        return
    rounds, seq = (1, 1_000) if given.smoke else (given.rounds, SPEC["seq"])
    most_memory, most_time = (0.5, math.inf) if given.smoke else (MOST_MEMORY, MOST_TIME)
    cells, depths = (("lstm",), (1,)) if given.smoke else (("lstm", "gru"), (1, 2))
    result: dict[str, Any] = {"claim": "segments_cost_little", "spec": SPEC, "segments": SEGMENTS, "rows": []}
    print(f"{'':<15}{'plain':>20}" + "".join(f"{way:>26}" for way in WAYS[1:]))
    kept = True
    for cell in cells:
        for layers in depths:
            case = {"cell": cell, "layers": layers, "seq": seq}
            turns = [{way: measure(case | {"way": way}) for way in WAYS} for _ in range(rounds)]
            row: dict[str, Any] = {"cell": cell, "layers": layers}
            for way in WAYS:
                row[way] = {
                    "growth_bytes": median(turn[way]["growth_bytes"] for turn in turns),
                    "seconds": median(turn[way]["seconds"] for turn in turns),
                    "time": median(turn[way]["seconds"] / turn["plain"]["seconds"] for turn in turns),
                }
                row[way]["memory"] = row[way]["growth_bytes"] / row["plain"]["growth_bytes"]
            result["rows"].append(row)
            kept &= row["segments"]["memory"] <= most_memory and row["segments"]["time"] <= most_time
            plain = f"{row['plain']['growth_bytes'] / 2**20:.0f} MiB, {row['plain']['seconds']:.1f} s"
            others = [f"{row[way]['memory']:.1%} memory, {row[way]['time']:.2f} time" for way in WAYS[1:]]
            print(f"{cell + f', {layers} layers':<15}{plain:>20}" + "".join(f"{one:>26}" for one in others), flush=True)
    print(json.dumps(result))
    sys.exit(not kept)


if __name__ == "__main__":
    main()
