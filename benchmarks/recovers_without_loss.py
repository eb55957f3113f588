"""Claim: 30 steps with an out-of-memory error in each, and a run killed 20 times, lose nothing.

    python benchmarks/recovers_without_loss.py [KILLS] [--seed S]

About 4 minutes. First, an out-of-memory error is raised at a random microbatch of every step: the weights are within
1e-6 of an undisturbed run's, every sequence is seen once per epoch. Then `oomguard train --resume` is killed (kill -9)
at random moments and started again, until there were so many kills; the weights at the end are, bit for bit, those of a
run that was never killed.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import print_row, publish
from safetensors import safe_open

import oomguard
from oomguard import step
from oomguard.bptt import Microbatch, backward
from oomguard.checkpoint import load
from oomguard.train import loop

SPEC: dict[str, Any] = {"cell": "lstm", "seq": 100, "features": 4, "hidden": 64, "layers": 2, "batch": 16}
STEPS, KILLS, NEAR = 30, 20, 1e-6
WIDTHS = (46, 22)


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def disturbed(plan: oomguard.Plan, data: np.ndarray, home: Path, seed: int) -> tuple[torch.Tensor, Counter[int], int]:
    """A run with an error in each step: its weights, how often each sequence came through, errors raised."""
    dice, seen, done, state = random.Random(seed), [], Counter[int](), {"due": True, "raised": 0}
    count = loop.Trainer._count

    def failing(model: Any, batch: Microbatch, *rest: Any) -> torch.Tensor:
        rows = batch.inputs.shape[1]
        if state["due"] and (dice.random() < 0.3 or len(seen) + rows == plan.spec.batch):
            state["due"], state["raised"] = False, state["raised"] + 1
            seen.clear()
            raise torch.OutOfMemoryError("injected: out of memory")
        found = backward(model, batch, *rest)
        seen.extend(round(float(one)) for one in batch.inputs[0, :, 0])
        return found

    def counted(trainer: Any, *rest: Any) -> None:
        done.update(seen)
        seen.clear()
        state["due"] = True
        count(trainer, *rest)

    setattr(step, "backward", failing)  # noqa: B010
    loop.Trainer._count = counted
    try:
        result = oomguard.train(plan, data, run=str(home), steps=STEPS, validation=0, normalise="none")
    finally:
        setattr(step, "backward", backward)  # noqa: B010
        loop.Trainer._count = count
    return weights(result.model), done, state["raised"]


def command(home: Path, run: str) -> list[str]:
    words = ["train", str(home / "plan.json"), "--data", str(home / "data.npy"), "--run", str(home / run), "--resume"]
    words += ["--steps", "150", "--save-every", "4", "--clip", "1", "--schedule", "cosine", "--json"]
    return [sys.executable, "-m", "oomguard", *words]


def tensors(run: Path) -> dict[str, bytes]:
    """Everything that the last checkpoint holds."""
    last = load(run / "checkpoints")
    assert last is not None
    with safe_open(last.path / "tensors.safetensors", framework="np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def killed(home: Path, kills: int, seed: int) -> tuple[int, int, bool]:
    """Kills that hit, runs that were needed, and whether the last bits agree."""
    dice, hits, runs = random.Random(seed), 0, 0
    began = time.monotonic()
    subprocess.run(command(home, "whole"), check=True, capture_output=True)
    seconds, same, number = time.monotonic() - began, True, 0
    while hits < kills:
        number += 1
        while True:
            runs += 1
            with subprocess.Popen(command(home, f"killed{number}"), stdout=subprocess.DEVNULL) as process:
                try:
                    process.wait(dice.uniform(0.2, 1.0) * seconds if hits < kills else None)
                except subprocess.TimeoutExpired:
                    process.kill()
                    hits += 1
                    continue
            assert process.returncode == 0
            break
        same &= tensors(home / f"killed{number}") == tensors(home / "whole")
    return hits, runs, same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", nargs="?", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        plan = oomguard.find_feasible_config(**SPEC, threads=1, allow="none", allocator="plain", max_probes=2)
        data = np.random.default_rng(0).normal(size=(160, SPEC["seq"], 5)).astype(np.float32)
        data[:, 0, 0] = np.arange(len(data))
        whole = oomguard.train(plan, data, run=str(home / "one"), steps=STEPS, validation=0, normalise="none")
        others, done, raised = disturbed(plan, data, home / "two", asked.seed)
        difference = float((others - weights(whole.model)).norm() / weights(whole.model).norm())
        print_row((f"{STEPS} steps, {raised} errors: relative difference", f"{difference:.1e}"), WIDTHS)
        np.save(home / "data.npy", data)
        oomguard.save_plan(plan, home / "plan.json")
        hits, runs, same = killed(home, asked.kills, asked.seed)
        print_row((f"{hits} kills, {runs} starts", "bit for bit" if same else "differs"), WIDTHS)
    result = {"steps": STEPS, "errors": raised, "difference": difference, "kills": hits, "starts": runs}
    claims = {
        f"an error in each of {STEPS} steps: weights within {NEAR}": raised == STEPS and difference <= NEAR,
        "no sequence is lost or seen twice": {*done.values()} == {STEPS * SPEC["batch"] // len(data)},
        f"{asked.kills} kills: the last checkpoint is that of a run without any, bit for bit": same,
    }
    publish("recovers_without_loss", result, claims, whole=asked.kills >= KILLS)


if __name__ == "__main__":
    main()
