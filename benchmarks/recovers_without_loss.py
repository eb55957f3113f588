"""Claim: 30 steps with an out-of-memory error in each, and a run killed 20 times, lose nothing.

    python benchmarks/recovers_without_loss.py [KILLS] [--seed S] [--smoke]

About 4 minutes; `--smoke`: one kill. First, an out-of-memory error is raised at a random
microbatch of one step, then of every step: the weights are within 1e-6 of an undisturbed run's, every sequence is seen
once per epoch. Then `oomguard train --resume` is killed (kill -9) at random moments and started again, until there were
so many kills; the weights at the end are, bit for bit, those of a run that was never killed.

Beside it, through the same errors: accelerate's find_executable_batch_size around a loop for as many epochs. After an
error it calls the function again with 0.9 of the batch: with a model made inside of it (as its guide has it) the steps
so far are lost, with one handed to it (as its docstring has it) they are made again on top; either way with another
batch. Its weights are compared with those of the same loop undisturbed.

Composer is not here. Its automatic microbatch raises "Can only use adaptive device_train_microbatch_size on GPU" on any
other device (0.32.1, trainer/trainer.py), and 0.32.1 wants torch < 2.7.1: beside torch 2.13, pip falls back to 0.3.1,
which has no automatic microbatch yet.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from finders import is_installed
from results import print_row, publish
from safetensors import safe_open

import oomguard
from oomguard import _step as step
from oomguard._rnn import Microbatch, backward
from oomguard._spec.candidate import Candidate
from oomguard._spec.read import make_spec
from oomguard._train import loop
from oomguard._train.checkpoint import load

SPEC: dict[str, Any] = {"cell": "lstm", "seq": 30, "features": 4, "hidden": 64, "layers": 2, "batch": 16}
STEPS, KILLS, NEAR = 30, 20, 1e-6
KILLED_STEPS, SMOKE_STEPS = 150, 20
"""Of the run that is killed."""
SEQUENCES = 160
EPOCHS = STEPS * SPEC["batch"] // SEQUENCES
ERRORS: dict[str, Collection[int]] = {"one step": (STEPS // 2,), "every step": range(1, STEPS + 1)}
"""The steps in which there is an error, the first time that they are made."""
INJECTED = "CUDA out of memory. Injected."
"""In words that accelerate knows."""
WIDTHS = (40, 7, 11, 11, 6, 11)


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def disturbed(
    plan: oomguard.Plan, data: np.ndarray, home: Path, errors: Collection[int], seed: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """A run with errors in these steps: its weights, and what it lost."""
    dice, seen, done, raised = random.Random(seed), list[int](), Counter[int](), list[int]()
    count, number = loop.Trainer._finish_step, 1

    def failing(model: Any, batch: Microbatch, *rest: Any) -> torch.Tensor:
        rows, due = batch.inputs.shape[1], number in errors and number not in raised
        if due and (dice.random() < 0.3 or len(seen) + rows == plan.spec.batch):
            raised.append(number)
            seen.clear()
            raise torch.OutOfMemoryError(INJECTED)
        found = backward(model, batch, *rest)
        seen.extend(round(float(one)) for one in batch.inputs[0, :, 0])
        return found

    def counted(trainer: Any, *rest: Any) -> None:
        nonlocal number
        done.update(seen)
        seen.clear()
        number += 1
        count(trainer, *rest)

    setattr(step, "backward", failing)  # noqa: B010
    loop.Trainer._finish_step = counted
    try:
        result = oomguard.train(plan, data, run=str(home), steps=STEPS, validation=0, normalise="none")
    finally:
        setattr(step, "backward", backward)  # noqa: B010
        loop.Trainer._finish_step = count
    found = {"errors": len(raised), "lost": number - 1 - result.steps, "batch": plan.spec.batch, "died": None}
    return weights(result.model), found | seen_again(done)


def seen_again(done: Counter[int]) -> dict[str, Any]:
    """How often sequences went through an update beyond once per epoch, and how often less than that."""
    again = sum(max(0, done[one] - EPOCHS) for one in range(SEQUENCES))
    return {"again": again, "missed": sum(max(0, EPOCHS - done[one]) for one in range(SEQUENCES))}


def by_accelerate(data: np.ndarray, errors: Collection[int], *, keep: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """The same through find_executable_batch_size, around a model that is kept or one that is made anew."""
    from accelerate.utils import find_executable_batch_size

    spec, starts, raised = make_spec(SPEC), list[list[Any]](), list[int]()

    def fresh() -> step.Training:
        torch.manual_seed(0)
        return step.prepare(spec, Candidate(microbatch=spec.batch))

    training = fresh()

    def train(batch_size: int) -> int:
        nonlocal training
        training = training if keep else fresh()
        starts.append([])
        for epoch in range(EPOCHS):
            order = np.random.default_rng(epoch).permutation(len(data))
            for first in range(0, len(data), batch_size):
                number, rows = len(starts[-1]) + 1, order[first : first + batch_size]
                if number in errors and number not in raised:
                    raised.append(number)
                    raise torch.OutOfMemoryError(INJECTED)
                block = torch.from_numpy(data[rows]).transpose(0, 1)
                batch = Microbatch(block[..., :-1].contiguous(), block[..., -1:].contiguous())
                step.step(training, [batch], targets=len(rows) * spec.steps)
                starts[-1].append(rows)
        return batch_size

    batch, died = None, None
    try:
        batch = find_executable_batch_size(train, starting_batch_size=spec.batch)()
    except RuntimeError as error:  # it has no smaller batch, which is its answer
        died = str(error)
    vain = 0 if keep else sum(len(start) for start in (starts if died else starts[:-1]))
    found = {"errors": len(raised), "lost": vain, "batch": batch, "died": died}
    done = Counter(int(row) for start in starts for rows in start for row in rows)
    return weights(training.model), found | seen_again(done)


def command(home: Path, run: str, steps: int) -> list[str]:
    words = ["train", str(home / "plan.json"), "--data", str(home / "data.npy"), "--run", str(home / run), "--resume"]
    words += ["--steps", str(steps), "--save-every", "4", "--clip", "1", "--schedule", "cosine", "--json"]
    return [sys.executable, "-m", "oomguard", *words]


def tensors(run: Path) -> dict[str, bytes]:
    """Everything that the last checkpoint holds."""
    last = load(run / "checkpoints")
    assert last is not None
    with safe_open(last.tensors().path, framework="np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def killed(home: Path, kills: int, steps: int, seed: int) -> tuple[int, int, bool]:
    """Kills that hit, runs that were needed, and whether the last bits agree."""
    dice, hits, runs = random.Random(seed), 0, 0
    began = time.monotonic()
    subprocess.run(command(home, "whole", steps), check=True, capture_output=True)
    seconds, same, number = time.monotonic() - began, True, 0
    while hits < kills:
        number += 1
        while True:
            runs += 1
            with subprocess.Popen(command(home, f"killed{number}", steps), stdout=subprocess.DEVNULL) as process:
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


def away(one: torch.Tensor, other: torch.Tensor) -> float:
    """The relative difference of two sets of weights."""
    return float((one - other).norm() / other.norm())


def compare(
    plan: oomguard.Plan, data: np.ndarray, home: Path, seed: int, *, keeps: tuple[bool, ...] = (False, True)
) -> dict[str, dict[str, Any]]:
    """Everyone through the same errors. `keeps`: whether the rival's model stays what it is when it starts anew."""
    whole = oomguard.train(plan, data, run=str(home / "whole-in-memory"), steps=STEPS, validation=0, normalise="none")
    rows: dict[str, dict[str, Any]] = {}
    for where, errors in ERRORS.items():
        others, found = disturbed(plan, data, home / where.replace(" ", "-"), errors, seed)
        rows[f"oomguard, {where}"] = found | {"difference": away(others, weights(whole.model))}
    if packages():
        for keep in keeps:
            how = "kept" if keep else "made anew"
            undisturbed, _ = by_accelerate(data, (), keep=keep)
            for where, errors in ERRORS.items():
                others, found = by_accelerate(data, errors, keep=keep)
                rows[f"accelerate, model {how}, {where}"] = found | {"difference": away(others, undisturbed)}
    assert all(row["errors"] for row in rows.values()), "The case is not hard: no error was raised."
    return rows


def packages() -> tuple[str, ...]:
    """The rival, if it is installed."""
    return ("accelerate",) if is_installed("accelerate") else ()


def show(rows: dict[str, dict[str, Any]]) -> None:
    print_row((f"errors in {STEPS} steps", "errors", "steps lost", "seen again", "batch", "difference"), WIDTHS)
    for name, row in rows.items():
        last = ("-", "-") if row["died"] else (row["batch"], f"{row['difference']:.1e}")
        print_row((name, row["errors"], row["lost"], row["again"], *last), WIDTHS)
        if row["died"]:
            print(f"  died: {row['died']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", nargs="?", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="one kill")
    asked = parser.parse_args()
    kills = 1 if asked.smoke else asked.kills
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        plan = oomguard.find_feasible_config(**SPEC, threads=1, allow="none", allocator="plain", max_probes=1)
        data = np.random.default_rng(0).normal(size=(SEQUENCES, SPEC["seq"], 5)).astype(np.float32)
        data[:, 0, 0] = np.arange(len(data))
        rows = compare(plan, data, home, asked.seed, keeps=(False,) if asked.smoke else (False, True))
        show(rows)
        np.save(home / "data.npy", data)
        oomguard.save_plan(plan, home / "plan.json")
        hits, runs, same = killed(home, kills, SMOKE_STEPS if asked.smoke else KILLED_STEPS, asked.seed)
        print(f"\nkills {hits}, starts {runs}: the last checkpoint {'is the same, bit for bit' if same else 'differs'}")
    all_of_them = rows["oomguard, every step"]
    exact = all_of_them["errors"] == STEPS and all_of_them["difference"] <= NEAR
    ours = [row for name, row in rows.items() if name.startswith("oomguard")]
    result = {"steps": STEPS, "rows": rows, "kills": hits, "starts": runs}
    claims = {
        f"an error in each of {STEPS} steps: weights within {NEAR}": exact,
        "no sequence is lost or seen twice": not any(row["again"] or row["missed"] for row in ours),
        f"{kills} kills: the last checkpoint is that of a run without any, bit for bit": same,
    }
    whole = kills >= KILLS and bool(packages())
    publish("recovers_without_loss", result, claims, whole=whole, packages=packages())


if __name__ == "__main__":
    main()
