"""Claim: `train` makes at least 0.97 of the steps per second of a loop written by hand for the same candidate.

    python benchmarks/training_costs_nothing.py [ROUNDS] [--steps N]

About 5 minutes. LSTM and GRU, whole batches and accumulation, one thread. The loop by hand is what a user of PyTorch
would write: read the batch from the mapped file, run the microbatches, clip, update, note the loss. Ours does the same
with the guard, the metrics and the order of the data on top; its time is that between its first step and its last.
Both take turns in one process, so that a busy machine slows them alike; the figure is the median of the rounds' ratios.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from results import print_row, publish

import oomguard
from oomguard.estimate.malloc import STEADY_ENVIRONMENT

COMMON = {"features": 16}
CASES: dict[str, dict[str, Any]] = {
    "lstm, 32": {"cell": "lstm", "seq": 200, "hidden": 128, "layers": 1, "batch": 32, "microbatch": 32},
    "lstm, 4 x 8": {
        "cell": "lstm",
        "seq": 500,
        "features": 16,
        "hidden": 96,
        "layers": 2,
        "batch": 32,
        "microbatch": 8,
    },
    "gru, 2 x 8": {"cell": "gru", "seq": 500, "hidden": 64, "layers": 1, "batch": 16, "microbatch": 8},
}
ROUNDS, STEPS, LEAST = 5, 40, 0.97
WIDTHS = (12, 14, 14, 8)


def by_hand(case: dict[str, Any], path: Path, steps: int) -> float:
    """Steps per second of a plain loop."""
    torch.manual_seed(0)
    data = np.load(path, mmap_mode="r")
    kind = torch.nn.LSTM if case["cell"] == "lstm" else torch.nn.GRU
    layers = kind(case["features"], case["hidden"], case["layers"])
    head = torch.nn.Linear(case["hidden"], 1)
    parameters = [*layers.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3, foreach=True)
    order, losses, began = np.random.default_rng(0).permutation(len(data)), [], 0.0
    batch, rows = case["batch"], case["microbatch"]
    for number in range(steps + 1):
        total = 0.0
        for first in range(0, batch, rows):
            start = (number * batch + first) % (len(data) - batch)
            block = torch.from_numpy(data[np.sort(order[start : start + rows])]).transpose(0, 1)
            outputs = head(layers(block[..., :-1].contiguous())[0])
            loss = torch.nn.functional.mse_loss(outputs, block[..., -1:], reduction="sum") / (batch * case["seq"])
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if not number:
            began = time.perf_counter()
    return steps / (time.perf_counter() - began)


def by_train(plan: oomguard.Plan, path: Path, steps: int) -> float:
    """Steps per second of ours."""
    moments: list[float] = []
    with tempfile.TemporaryDirectory() as run:
        oomguard.train(
            plan,
            str(path),
            progress=lambda told: moments.append(time.perf_counter()),
            run=run,
            steps=steps + 1,
            clip=1.0,
            validation=0,
            normalise="none",
        )
    return steps / (moments[-1] - moments[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"rounds": asked.rounds, "steps": asked.steps, "rows": []}
    print_row(("", "by hand /s", "train /s", "ratio"), WIDTHS)
    with tempfile.TemporaryDirectory() as home:
        for name, knobs in CASES.items():
            case = COMMON | knobs
            path = Path(home) / "data.npy"
            shape = (case["batch"] * 8, case["seq"], case["features"] + 1)
            np.save(path, np.random.default_rng(0).normal(size=shape).astype(np.float32))
            plan = oomguard.find_feasible_config(**case, threads=1, segments=1, allow="none", max_probes=1)
            turns = [(by_hand(case, path, asked.steps), by_train(plan, path, asked.steps)) for _ in range(asked.rounds)]
            hand, ours = (median(turn[side] for turn in turns) for side in (0, 1))
            ratio = median(ours / hand for hand, ours in turns)
            result["rows"].append({"case": name, "by_hand": hand, "train": ours, "ratio": ratio})
            print_row((name, f"{hand:.2f}", f"{ours:.2f}", f"{ratio:.3f}"), WIDTHS)
    claims = {
        f"{row['case']}: at least {LEAST} of the steps per second": row["ratio"] >= LEAST for row in result["rows"]
    }
    publish("training_costs_nothing", result, claims, whole=asked.rounds >= ROUNDS and asked.steps >= STEPS)


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in STEADY_ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | STEADY_ENVIRONMENT)
    main()
