"""Claim: 30 steps with an out-of-memory error in each, and a run killed 20 times, lose nothing.

    python benchmarks/recovers_without_loss.py [KILLS] [--seed S] [--smoke]

The benchmark takes about 4 minutes and has two parts. In the first part, an out-of-memory error is raised at a random
microbatch of a single step, and in another run at a random microbatch of every step. The final weights must be within
1e-6 of those of an undisturbed run, and every sequence must be seen once per epoch. In the second part, `oomguard train
--resume` is killed (kill -9) at random moments and started again, until there were KILLS kills. The final checkpoint
must be equal, bit for bit, to that of a run that was never killed.

accelerate's find_executable_batch_size runs a training loop through the same errors and for as many epochs. After an
error it calls the training function again with 0.9 of the batch. If the function makes the model (as in accelerate's
guide), the steps so far are lost. If the model exists before (as in its docstring), those steps are repeated on top of
what the model has learned. In both cases the batch has changed. The final weights are compared with those of the same
loop without errors.

Composer is not compared. Its automatic microbatch raises "Can only use adaptive device_train_microbatch_size on GPU" on
any other device (0.32.1, trainer/trainer.py). Version 0.32.1 also requires torch < 2.7.1; with torch 2.13, pip installs
version 0.3.1, which has no automatic microbatch.
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
STEPS, KILLS, TOLERANCE = 30, 20, 1e-6
KILLED_STEPS, SMOKE_STEPS = 150, 20
"""Optimizer steps of the run that is killed."""
SEQUENCES = 160
EPOCHS = STEPS * SPEC["batch"] // SEQUENCES
ERRORS: dict[str, Collection[int]] = {"one step": (STEPS // 2,), "every step": range(1, STEPS + 1)}
"""Steps in which an error is raised. A step that is repeated has no second error."""
INJECTED = "CUDA out of memory. Injected."
"""A message that accelerate recognises as an out-of-memory error."""
WIDTHS = (40, 7, 11, 11, 6, 11)


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train_with_errors(
    plan: oomguard.Plan, data: np.ndarray, home: Path, errors: Collection[int], seed: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Train with an error in each of these steps. Return the final weights, and a row about what was lost."""
    rng, seen, done, raised = random.Random(seed), list[int](), Counter[int](), list[int]()
    finish_step, number = loop.Trainer._finish_step, 1

    def failing(model: Any, batch: Microbatch, *rest: Any) -> torch.Tensor:
        rows, due = batch.inputs.shape[1], number in errors and number not in raised
        if due and (rng.random() < 0.3 or len(seen) + rows == plan.spec.batch):
            raised.append(number)
            seen.clear()
            raise torch.OutOfMemoryError(INJECTED)
        loss = backward(model, batch, *rest)
        seen.extend(round(float(sequence)) for sequence in batch.inputs[0, :, 0])
        return loss

    def counted(trainer: Any, *rest: Any) -> None:
        nonlocal number
        done.update(seen)
        seen.clear()
        number += 1
        finish_step(trainer, *rest)

    setattr(step, "backward", failing)  # noqa: B010
    loop.Trainer._finish_step = counted
    try:
        result = oomguard.train(plan, data, run=str(home), steps=STEPS, validation=0, normalise="none")
    finally:
        setattr(step, "backward", backward)  # noqa: B010
        loop.Trainer._finish_step = finish_step
    row = {"errors": len(raised), "lost": number - 1 - result.steps, "batch": plan.spec.batch, "died": None}
    return weights(result.model), row | seen_again(done)


def seen_again(done: Counter[int]) -> dict[str, Any]:
    """Count how often sequences were part of an update more than once per epoch, and how often less."""
    again = sum(max(0, done[sequence] - EPOCHS) for sequence in range(SEQUENCES))
    return {"again": again, "missed": sum(max(0, EPOCHS - done[sequence]) for sequence in range(SEQUENCES))}


def by_accelerate(data: np.ndarray, errors: Collection[int], *, keep: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """Train with find_executable_batch_size. With `keep`, the model survives an error; otherwise it is made again."""
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
    except RuntimeError as error:  # it gives up when there is no smaller batch
        died = str(error)
    lost = 0 if keep else sum(len(start) for start in (starts if died else starts[:-1]))
    row = {"errors": len(raised), "lost": lost, "batch": batch, "died": died}
    done = Counter(int(row) for start in starts for rows in start for row in rows)
    return weights(training.model), row | seen_again(done)


def command(home: Path, run: str, steps: int) -> list[str]:
    line = ["train", str(home / "plan.json"), "--data", str(home / "data.npy"), "--run", str(home / run), "--resume"]
    line += ["--steps", str(steps), "--save-every", "4", "--clip", "1", "--schedule", "cosine", "--json"]
    return [sys.executable, "-m", "oomguard", *line]


def tensors(run: Path) -> dict[str, bytes]:
    """Read all tensors of the last checkpoint."""
    last = load(run / "checkpoints")
    assert last is not None
    with safe_open(last.tensors().path, framework="np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def train_with_kills(home: Path, kills: int, steps: int, seed: int) -> tuple[int, int, bool]:
    """Kill and resume training. Return the kills, the starts, and whether all final checkpoints are equal."""
    rng, hits, runs = random.Random(seed), 0, 0
    began = time.monotonic()
    subprocess.run(command(home, "whole", steps), check=True, capture_output=True)
    seconds, same, number = time.monotonic() - began, True, 0
    while hits < kills:
        number += 1
        while True:
            runs += 1
            with subprocess.Popen(command(home, f"killed{number}", steps), stdout=subprocess.DEVNULL) as process:
                try:
                    process.wait(rng.uniform(0.2, 1.0) * seconds if hits < kills else None)
                except subprocess.TimeoutExpired:
                    process.kill()
                    hits += 1
                    continue
            assert process.returncode == 0
            break
        same &= tensors(home / f"killed{number}") == tensors(home / "whole")
    return hits, runs, same


def difference(final: torch.Tensor, reference: torch.Tensor) -> float:
    """Compute the relative difference of two sets of weights."""
    return float((final - reference).norm() / reference.norm())


def compare(
    plan: oomguard.Plan, data: np.ndarray, home: Path, seed: int, *, keeps: tuple[bool, ...] = (False, True)
) -> dict[str, dict[str, Any]]:
    """Train with oomguard and accelerate through the same errors. `keeps` has the values of `keep` for accelerate."""
    whole = oomguard.train(plan, data, run=str(home / "whole-in-memory"), steps=STEPS, validation=0, normalise="none")
    rows: dict[str, dict[str, Any]] = {}
    for where, errors in ERRORS.items():
        final, row = train_with_errors(plan, data, home / where.replace(" ", "-"), errors, seed)
        rows[f"oomguard, {where}"] = row | {"difference": difference(final, weights(whole.model))}
    if packages():
        for keep in keeps:
            how = "kept" if keep else "made anew"
            undisturbed, _ = by_accelerate(data, (), keep=keep)
            for where, errors in ERRORS.items():
                final, row = by_accelerate(data, errors, keep=keep)
                rows[f"accelerate, model {how}, {where}"] = row | {"difference": difference(final, undisturbed)}
    assert all(row["errors"] for row in rows.values()), "The case is not hard: no error was raised."
    return rows


def packages() -> tuple[str, ...]:
    """Return the package of the rival, if it is installed."""
    return ("accelerate",) if is_installed("accelerate") else ()


def show(rows: dict[str, dict[str, Any]]) -> None:
    print_row((f"errors in {STEPS} steps", "errors", "steps lost", "seen again", "batch", "difference"), WIDTHS)
    for name, row in rows.items():
        last = ("-", "-") if row["died"] else (row["batch"], f"{row['difference']:.1e}")
        print_row((name, row["errors"], row["lost"], row["again"], *last), WIDTHS)
        if row["died"]:
            print(f"  stopped with an error: {row['died']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", nargs="?", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="run with one kill, and accelerate in one variant")
    args = parser.parse_args()
    kills = 1 if args.smoke else args.kills
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        plan = oomguard.find_feasible_config(**SPEC, threads=1, allow="none", allocator="system", max_probes=1)
        data = np.random.default_rng(0).normal(size=(SEQUENCES, SPEC["seq"], 5)).astype(np.float32)
        data[:, 0, 0] = np.arange(len(data))
        rows = compare(plan, data, home, args.seed, keeps=(False,) if args.smoke else (False, True))
        show(rows)
        np.save(home / "data.npy", data)
        oomguard.save_plan(plan, home / "plan.json")
        hits, runs, same = train_with_kills(home, kills, SMOKE_STEPS if args.smoke else KILLED_STEPS, args.seed)
        print(f"\n{hits} kills, {runs} starts: the final checkpoint {'is equal bit for bit' if same else 'differs'}")
    every_step = rows["oomguard, every step"]
    exact = every_step["errors"] == STEPS and every_step["difference"] <= TOLERANCE
    ours = [row for name, row in rows.items() if name.startswith("oomguard")]
    result = {"steps": STEPS, "rows": rows, "kills": hits, "starts": runs}
    claims = {
        f"an error in each of {STEPS} steps: weights within {TOLERANCE}": exact,
        "no sequence is lost or seen twice": not any(row["again"] or row["missed"] for row in ours),
        f"{kills} kills: the last checkpoint is that of a run without any, bit for bit": same,
    }
    whole = kills >= KILLS and bool(packages())
    publish("recovers_without_loss", result, claims, whole=whole, packages=packages())


if __name__ == "__main__":
    main()
