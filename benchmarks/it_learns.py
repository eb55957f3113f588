"""Claim: the loss falls as in plain PyTorch, on the adding problem at T = 1,000 and on the next character of a text.

    python benchmarks/it_learns.py [STEPS] [--case adding|text] [--smoke]

The benchmark takes about 30 minutes for 600 steps. The same model with the same initial weights is trained twice on the
same batches: by `train` with exact segments and microbatches, and by a plain loop that runs the whole batch at once.
The first losses must agree, before rounding separates the two runs. The means of the last tenth of the losses are
compared as well.
"""

import argparse
import csv
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from results import print_row, publish

import oomguard
from oomguard._data.open import open_data
from oomguard._data.options import DataOptions
from oomguard._data.order import Order
from oomguard._rnn.model import build
from oomguard._spec.spec import Spec

TEXT = Path(__file__).parent / "data" / "tides.txt"
STEPS, AGREE, FIRST = 600, 0.05, 50
"""Optimizer steps; tolerance for the mean of the last tenth of the losses; number of losses that must agree to 1e-5."""
SMOKE_STEPS = 5
CASES: dict[str, dict[str, Any]] = {
    "adding": {"cell": "lstm", "seq": 1000, "features": 2, "hidden": 64, "layers": 1, "batch": 32, "head": "last-step"},
    "text": {"cell": "lstm", "seq": 100, "vocab": 64, "embedding": 32, "hidden": 128, "layers": 1, "batch": 16},
}
KNOBS: dict[str, dict[str, Any]] = {
    "adding": {"microbatch": 16, "segments": 4},
    "text": {"microbatch": 8, "segments": 2},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "adding": {"lr": 2e-3, "clip": 1.0, "normalise": "none", "validation": 0},
    "text": {"lr": 5e-3, "clip": 1.0, "characters": True, "stride": 20, "validation": 0},
}
WIDTHS = (10, 14, 14, 14, 14)


def adding(rows: int, steps: int) -> np.ndarray:
    """Make sequences of random numbers, two of which are marked. The target is the sum of the two."""
    rng = np.random.default_rng(0)
    data = np.zeros((rows, steps, 3), dtype=np.float32)
    data[..., 0] = rng.random((rows, steps))
    for row in data:
        row[rng.choice(steps // 2), 1] = row[steps // 2 + rng.choice(steps // 2), 1] = 1
    data[..., 2] = (data[..., 0] * data[..., 1]).sum(axis=1, keepdims=True)
    return data


def by_hand(spec: Spec, data: Any, options: dict[str, Any], steps: int) -> list[float]:
    """Train with a plain loop, and return the losses."""
    names = {name: value for name, value in options.items() if name not in ("lr", "clip")}
    source = open_data(data, spec, DataOptions(**names)).train
    torch.manual_seed(0)
    model = build(spec)
    optimizer = torch.optim.Adam(model.parameters(), lr=options["lr"])
    losses = []
    for rows in batches(spec, source.lengths, steps):
        loss = torch.zeros(())
        for length in {*source.lengths[rows].tolist()}:  # a single length, except at the end of the text
            pairs = [source[int(row)] for row in rows if source.lengths[row] == length]
            loss = loss + loss_sum(model, *(torch.from_numpy(np.stack(part)) for part in zip(*pairs, strict=True)))
        targets = len(rows) if spec.head == "last-step" else int(source.lengths[rows].sum())
        loss = loss / targets
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options["clip"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def loss_sum(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Add up the losses of sequences that have the same length."""
    outputs, _ = model(inputs.transpose(0, 1), None)
    if targets.is_floating_point():
        return torch.nn.functional.mse_loss(outputs, targets, reduction="sum")
    return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), targets.T.flatten(), reduction="sum")


def batches(spec: Spec, lengths: Any, steps: int) -> Iterator[Any]:
    """Yield the rows of each batch in the order that `train` uses."""
    order = Order(lengths=lengths, buckets={spec.steps: 1}, batch=spec.batch)
    for number in range(steps):
        yield next(order.batches(number // len(order), number % len(order)))[1]


def by_train(plan: oomguard.Plan, data: Any, options: dict[str, Any], steps: int) -> list[float]:
    """Train with oomguard, and return the losses."""
    with tempfile.TemporaryDirectory() as run, warnings.catch_warnings(action="ignore"):
        oomguard.train(plan, data, run=run, steps=steps, **options)
        with open(Path(run) / "metrics.csv", newline="") as file:
            return [float(row["loss"]) for row in csv.DictReader(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="?", type=int, default=STEPS)
    parser.add_argument("--case", choices=[*CASES])
    parser.add_argument("--smoke", action="store_true", help="check that the losses agree, for a few steps on the text")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.case = SMOKE_STEPS, "text"
    torch.set_num_threads(1)
    data: dict[str, Callable[[], Any]] = {"adding": lambda: adding(2048, 1000), "text": lambda: str(TEXT)}
    result: dict[str, Any] = {"steps": args.steps, "rows": []}
    claims = {}
    print_row(("", "first loss", "by hand, last", "train, last", "apart, first"), WIDTHS)
    for name in [args.case] if args.case else CASES:
        plan = oomguard.find_feasible_config(**CASES[name], **KNOBS[name], threads=1, allow="none", max_probes=1)
        source = data[name]()
        with tempfile.TemporaryDirectory() as cache:
            options = OPTIONS[name] | ({"cache": cache} if name == "text" else {})
            ours = by_train(plan, source, options, args.steps)
            plain = by_hand(plan.spec, source, options, args.steps)
        tenth = max(1, args.steps // 10)
        last = [fmean(losses[-tenth:]) for losses in (plain, ours)]
        apart = max(abs(a - b) / b for a, b in zip(ours[:FIRST], plain[:FIRST], strict=True))
        print_row((name, f"{plain[0]:.4f}", f"{last[0]:.4f}", f"{last[1]:.4f}", f"{apart:.1e}"), WIDTHS)
        result["rows"].append({"case": name, "first": plain[0], "by_hand": last[0], "train": last[1], "apart": apart})
        claims[f"{name}: the first {min(FIRST, args.steps)} losses agree to 1e-5"] = apart <= 1e-5
        claims[f"{name}: the last losses are at most 5 % above those by hand"] = last[1] <= (1 + AGREE) * last[0]
        if not args.smoke:
            claims[f"{name}: the loss falls"] = last[1] < fmean(ours[:tenth])
    publish("it_learns", result, claims, whole=args.steps >= STEPS and args.case is None)


if __name__ == "__main__":
    main()
