"""Claim: `train` makes at least 0.97 of the steps per second of a loop written by hand for the same candidate.

    python benchmarks/training_costs_nothing.py [ROUNDS] [--steps N] [--smoke]

The benchmark takes about 12 minutes. `--smoke` runs one case for a few steps and claims nothing. The cases are LSTM and
GRU, with whole batches and with accumulation, on one thread. The loop by hand is what a user of PyTorch would write: it
reads the batch from the mapped file, runs the microbatches, clips, updates and stores the loss. `train` does the same
and adds the guard, the metrics and the order of the data. Lightning's Trainer runs the same model, data and candidate
(accumulate_grad_batches, gradient_clip_val; no logger, checkpoints, progress bar or summary).

After every step of a trainer, the loop by hand runs one step in the same process, so that a busy machine slows both
alike. The time of a trainer is everything between two steps of the loop by hand. The slowest tenth of these pairs, by
the sum of both times, is left out. The figures are computed from the sums of the other pairs of all rounds
(`ratio_of_all`: from all pairs). The claim is only about `train`.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from finders import is_installed
from peak import tight
from results import print_row, publish

import oomguard

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
ROUNDS, STEPS, MIN_RATIO = 5, 40, 0.97
SMOKE_STEPS = 3
WIDTHS = (12, 12, 12, 8, 14, 8)


def make_layers(case: dict[str, Any]) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Make the recurrent layers and the head."""
    torch.manual_seed(0)
    kind = torch.nn.LSTM if case["cell"] == "lstm" else torch.nn.GRU
    return kind(case["features"], case["hidden"], case["layers"]), torch.nn.Linear(case["hidden"], 1)


def microbatches(case: dict[str, Any], path: Path, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield inputs and targets from the mapped file, for `steps` timed steps and one that is not timed."""
    data = np.load(path, mmap_mode="r")
    order, batch, rows = np.random.default_rng(0).permutation(len(data)), case["batch"], case["microbatch"]
    for number in range(steps + 1):
        for first in range(0, batch, rows):
            start = (number * batch + first) % (len(data) - batch)
            block = torch.from_numpy(data[np.sort(order[start : start + rows])]).transpose(0, 1)
            yield block[..., :-1].contiguous(), block[..., -1:]


def by_hand(case: dict[str, Any], path: Path, steps: int) -> Iterator[None]:
    """Train with a plain loop. Each `next` runs one step."""
    layers, head = make_layers(case)
    parameters = [*layers.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3, foreach=True)
    losses, batch = [], case["batch"]
    feed = microbatches(case, path, steps)
    for _ in range(steps + 1):
        total = 0.0
        for _ in range(0, batch, case["microbatch"]):
            inputs, targets = next(feed)
            loss = torch.nn.functional.mse_loss(head(layers(inputs)[0]), targets, reduction="sum")
            loss = loss / (batch * case["seq"])
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        yield


class Turns:
    """A callback for the end of each step of a trainer. It times the step and one step of the loop by hand.

    The first step is not timed.
    """

    def __init__(self, hand_loop: Iterator[None]) -> None:
        self.hand_loop, self.since = hand_loop, 0.0
        self.pairs: list[tuple[float, float]] = []

    def __call__(self, *_: object) -> None:
        ended = time.perf_counter()
        next(self.hand_loop)
        now = time.perf_counter()
        if self.since:
            self.pairs.append((ended - self.since, now - ended))
        self.since = now


def by_train(plan: oomguard.Plan, path: Path, steps: int, turns: Turns) -> None:
    """Train with oomguard."""
    options: dict[str, Any] = {"steps": steps + 1, "clip": 1.0, "validation": 0, "normalise": "none"}
    with tempfile.TemporaryDirectory() as run:
        oomguard.train(plan, str(path), progress=turns, run=run, **options)


def by_lightning(case: dict[str, Any], path: Path, steps: int, turns: Turns) -> None:
    """Train with Lightning's Trainer."""
    from pytorch_lightning import LightningModule, Trainer
    from torch.utils.data import DataLoader, IterableDataset

    passes = case["batch"] // case["microbatch"]

    class Feed(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return microbatches(case, path, steps)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = make_layers(case)
            self.losses: list[float] = []

        def training_step(self, batch: Any, _: int) -> Any:
            loss = torch.nn.functional.mse_loss(self.head(self.layers(batch[0])[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def on_train_batch_end(self, _outputs: Any, _batch: Any, number: int) -> None:
            if (number + 1) % passes == 0:
                turns()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-3, foreach=True)

    disabled: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    with tempfile.TemporaryDirectory() as home:
        options: dict[str, Any] = {"accumulate_grad_batches": passes, "gradient_clip_val": 1.0, "max_steps": steps + 1}
        trainer = Trainer(accelerator="cpu", devices=1, default_root_dir=home, **options, **disabled)
        trainer.fit(Module(), DataLoader(Feed(), batch_size=None))


def run_case(case: dict[str, Any], path: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Run each trainer in turns with the loop by hand, and compare their steps per second."""
    shape = (case["batch"] * 8, case["seq"], case["features"] + 1)
    np.save(path, np.random.default_rng(0).normal(size=shape).astype(np.float32))
    plan = oomguard.find_feasible_config(**case, threads=1, segments=1, allocator="tight", allow="none", max_probes=1)
    trainers: dict[str, Callable[[Turns], None]] = {"train": lambda turns: by_train(plan, path, steps, turns)}
    trainers |= {"lightning": lambda turns: by_lightning(case, path, steps, turns)} if packages() else {}
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in trainers}
    for _ in range(rounds):
        for name, train in trainers.items():
            turns = Turns(by_hand(case, path, steps))
            train(turns)
            assert len(turns.pairs) == steps, f"{name} ran {len(turns.pairs)} timed steps instead of {steps}."
            pairs[name] += turns.pairs
    return {name: compare(pairs[name]) for name in trainers}


def compare(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Compute the steps per second of a trainer and of the loop by hand, without the slowest tenth of the pairs."""
    kept = sorted(pairs, key=sum)[: len(pairs) - len(pairs) // 10]
    (own, by_hand), (all_own, all_by_hand) = ([*map(sum, zip(*group, strict=True))] for group in (kept, pairs))
    speeds = {"per_second": len(kept) / own, "by_hand": len(kept) / by_hand}
    return speeds | {"ratio": by_hand / own, "ratio_of_all": all_by_hand / all_own}


def packages() -> tuple[str, ...]:
    """Return the package of the rival, if it is installed."""
    return ("pytorch-lightning",) if is_installed("pytorch-lightning") else ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--smoke", action="store_true", help="run the last case for 1 round of 3 steps")
    args = parser.parse_args()
    rounds, steps = (1, SMOKE_STEPS) if args.smoke else (args.rounds, args.steps)
    warnings.simplefilter("ignore")  # Lightning advises on data loader workers
    logging.disable(logging.INFO)  # Lightning lists the devices of the machine
    torch.set_num_threads(1)
    result: dict[str, Any] = {"rounds": rounds, "steps": steps, "rows": []}
    print_row(("", "by hand /s", "train /s", "ratio", "Lightning /s", "ratio"), WIDTHS)
    with tempfile.TemporaryDirectory() as home:
        for name, knobs in list(CASES.items())[-1 if args.smoke else 0 :]:
            row = {"case": name} | run_case(COMMON | knobs, Path(home) / "data.npy", rounds, steps)
            result["rows"].append(row)
            cells = [f"{row['train']['by_hand']:.2f}"]
            for trainer in ("train", "lightning"):
                speeds = row.get(trainer)
                cells += [f"{speeds['per_second']:.2f}", f"{speeds['ratio']:.3f}"] if speeds else ["-", "-"]
            print_row((name, *cells), WIDTHS)
    claims = {
        f"{row['case']}: at least {MIN_RATIO} of the steps per second": row["train"]["ratio"] >= MIN_RATIO
        for row in result["rows"]
    }
    whole = rounds >= ROUNDS and steps >= STEPS and bool(packages())
    publish("training_costs_nothing", result, {} if args.smoke else claims, whole=whole, packages=packages())


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in tight().items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | tight())
    main()
