"""Claim: in models that oomguard did not build, segments save at least 80 % of the memory of long sequences for at most
1.35 of the time, and a budget lets one long batch through where plain PyTorch runs out of memory.

    python benchmarks/own_models_go_in_segments.py [ROUNDS] [--cases N] [--smoke]

The models are ordinary modules: a recurrent layer of nn and a linear head. `oomguard.segmented` runs their calls at
T = 10,000 with a fixed number of segments. The rivals are the plain call and torch.utils.checkpoint, applied by hand to
the same pieces of the sequence with the state between them. By hand, it cannot run both directions.

Short sequences are run with a budget that nothing fits: segments must then not be chosen if they would need more.

Unequal lengths: an epoch of batches, one of which has a sequence of 50 times the median length. The process may commit
half of the bytes that this batch needs in plain PyTorch (RLIMIT_DATA), and `oomguard.segmented` gets a budget. The loss
of every batch is compared with an unlimited plain run. The batches that fit then run three times more under that limit,
plain and with the budget by turns; the shortest time of each counts.

Each figure comes from its own process with one thread and the default settings of the C allocator. Memory is the growth
of the peak over the bytes that are resident before the model is made. The contenders take turns, so that a busy machine
slows all alike; ratios are medians over the rounds.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from peak import status_bytes, without_heap_settings
from results import print_row, publish

import oomguard
from oomguard._estimate.target import COMMITTED_TENTHS

Case = dict[str, Any]
LONG: Case = {"steps": 10_000, "rows": 8, "features": 16, "segments": 64}
CASES: dict[str, Case] = {
    "LSTM 160": LONG | {"kind": "LSTM", "hidden": 160},
    "LSTM 112 × 2": LONG | {"kind": "LSTM", "hidden": 112, "layers": 2},
    "LSTM 112 × 2, dropout": LONG | {"kind": "LSTM", "hidden": 112, "layers": 2, "dropout": 0.2},
    "GRU 112": LONG | {"kind": "GRU", "hidden": 112},
    "LSTM 80, both directions": LONG | {"kind": "LSTM", "hidden": 80, "both": True},
}
SHORT: dict[str, Case] = {
    f"{kind} 112, T = {steps}": {"kind": kind, "hidden": 112, "steps": steps, "rows": 16, "features": 16}
    for kind in ("LSTM", "GRU")
    for steps in (10, 100)
}
EPOCH: Case = {"kind": "LSTM", "hidden": 160, "features": 16, "rows": 8, "steps": 200, "batches": 30, "times": 50}
MIN_SAVED, MAX_TIME, MAX_SHORT, MAX_LOSS, MAX_EPOCH = 0.80, 1.35, 1.02, 1e-5, 1.05
STEPS = 3  # passes of one process; the first one does not count for the time
WIDTHS = (40, 12, 9, 10, 9)


def measure(case: Case) -> Case:
    """Run one contender in its own process."""
    command = [sys.executable, str(Path(__file__)), "--one", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, env=without_heap_settings())
    assert done.returncode == 0, done.stderr
    found: Case = json.loads(done.stdout)
    return found


def measure_in_child(case: Case) -> Case:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return run_epoch(case) if "batches" in case else run_passes(case)


def make_loss(case: Case) -> tuple[Any, Callable[..., Any]]:
    """Make a model, and a function that returns its loss for some inputs, as users write them."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    options = {"num_layers": case.get("layers", 1), "dropout": case.get("dropout", 0.0)}
    rnn = getattr(nn, case["kind"])(case["features"], case["hidden"], bidirectional=case.get("both", False), **options)
    head = nn.Linear(case["hidden"] * (2 if case.get("both") else 1), 1)

    def by_hand(inputs: Any) -> Any:
        made, state = [], None
        for piece in inputs.split(-(-len(inputs) // case["segments"])):
            outputs, state = checkpoint(rnn, piece, state, use_reentrant=False)
            made.append(outputs)
        return torch.cat(made)

    def loss(inputs: Any) -> Any:
        outputs = by_hand(inputs) if case["way"] == "checkpoint" else rnn(inputs)[0]
        return (head(outputs).squeeze(-1) - inputs.cumsum(0).mean(-1)).square().mean()

    return nn.ModuleList([rnn, head]), loss


def way_of(case: Case, resident_bytes: int) -> AbstractContextManager[Any]:
    if case["way"] == "segments":
        return oomguard.segmented(case["segments"])
    if case["way"] == "budget":
        return oomguard.segmented(budget=resident_bytes + case["budget_bytes"])
    return nullcontext()


def run_passes(case: Case) -> Case:
    """Measure forward and backward passes over one batch."""
    import torch

    model, loss = make_loss(case)
    with way_of(case, 0):  # load everything
        loss(torch.randn(max(8, case.get("segments", 1)), case["rows"], case["features"])).backward()
    model.zero_grad()
    resident_bytes, seconds = status_bytes("VmRSS"), []
    Path("/proc/self/clear_refs").write_text("5")
    inputs = torch.randn(case["steps"], case["rows"], case["features"])
    for _ in range(STEPS):
        began = time.perf_counter()
        with way_of(case, resident_bytes):
            loss(inputs).backward()
        model.zero_grad()
        seconds.append(time.perf_counter() - began)
    return {"growth_bytes": status_bytes("VmHWM") - resident_bytes, "seconds": min(seconds[1:])}


def run_epoch(case: Case) -> Case:
    """Measure one epoch: the loss and the seconds of every batch, and the bytes that the process committed."""
    import torch

    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(
        case["steps"] // 2, case["steps"] * 3 // 2, (case["batches"],), generator=generator
    ).tolist()
    lengths[case["batches"] // 2] = case["steps"] * case["times"]
    model, loss = make_loss(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with way_of(case, 0):
        loss(torch.zeros(8, 2, case["features"])).backward()
    resident_bytes, committed_bytes, peak_bytes = (status_bytes(name) for name in ("VmRSS", "VmData", "VmPeak"))
    if "limit_bytes" in case:
        resource.setrlimit(resource.RLIMIT_DATA, (committed_bytes + case["limit_bytes"], resource.RLIM_INFINITY))
    losses = []

    def update(batch: Any, context: AbstractContextManager[Any]) -> float:
        began = time.perf_counter()
        with context:
            value = loss(batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
        return time.perf_counter() - began

    batches = [torch.randn(length, case["rows"], case["features"], generator=generator) for length in lengths]
    try:
        for batch in batches:
            update(batch, way_of(case, resident_bytes))
    except RuntimeError as error:
        return {"ran_out": str(error).partition("\n")[0], "losses": losses}
    found = {"losses": losses[:], "committed_bytes": status_bytes("VmPeak") - peak_bytes}
    if case["way"] == "budget":
        del batches[case["batches"] // 2]
        turns = [
            [(update(batch, nullcontext()), update(batch, way_of(case, resident_bytes))) for _ in range(STEPS)]
            for batch in batches
        ]
        plain, ours = (sum(min(turn[way] for turn in three) for three in turns) for way in (0, 1))
        found |= {"plain_seconds": plain, "seconds": ours}
    return found


def long_sequences(cases: dict[str, Case], rounds: int) -> tuple[list[Case], dict[str, bool]]:
    """Measure the cases with long sequences: rows of the table, and the statements."""
    rows, claims = [], dict[str, bool]()
    print_row(("", "growth", "saved", "pass", "time"), WIDTHS)
    for name, case in cases.items():
        ways = ["plain", "segments", *(["checkpoint"] if not case.get("both") else [])]
        turns = [{way: measure(case | {"way": way}) for way in ways} for _ in range(rounds)]
        for way in ways:
            ratio = {
                figure: median(turn[way][figure] / turn["plain"][figure] for turn in turns)
                for figure in ("growth_bytes", "seconds")
            }
            growth, seconds = (median(turn[way][figure] for turn in turns) for figure in ("growth_bytes", "seconds"))
            row = {"case": name, "way": way, "growth_bytes": growth, "seconds": seconds}
            rows.append(row | {"saved": 1 - ratio["growth_bytes"], "time": ratio["seconds"]})
            cells = (
                f"{growth / 2**20:.1f} MiB",
                f"{rows[-1]['saved']:.1%}",
                f"{seconds:.2f} s",
                f"{ratio['seconds']:.2f}",
            )
            print_row((f"{name}, {way}", *cells), WIDTHS)
            if way == "segments":
                saved, took = rows[-1]["saved"], rows[-1]["time"]
                statement = f"{name}: segments save {saved:.1%} of the memory, at {took:.2f} of the time"
                claims[statement] = saved >= MIN_SAVED and (took <= MAX_TIME or "--smoke" in sys.argv)
    return rows, claims


def short_sequences(cases: dict[str, Case], rounds: int) -> tuple[list[Case], dict[str, bool]]:
    """Measure the cases with short sequences, with a budget that nothing fits."""
    rows, claims = [], dict[str, bool]()
    for name, case in cases.items():
        plain = median(measure(case | {"way": "plain"})["growth_bytes"] for _ in range(rounds))
        ours = median(measure(case | {"way": "budget", "budget_bytes": 1})["growth_bytes"] for _ in range(rounds))
        rows.append({"case": name, "plain_bytes": plain, "budget_bytes": ours})
        claims[f"{name}: with a budget that nothing fits, {ours / plain:.2f} of the memory"] = ours <= MAX_SHORT * plain
    return rows, claims


def unequal_lengths(case: Case, rounds: int) -> tuple[Case, dict[str, bool]]:
    """Measure an epoch with one long batch, under a limit that it exceeds in plain PyTorch."""
    turns = []
    for _ in range(rounds):
        plain = measure(case | {"way": "plain"})
        limit_bytes = plain["committed_bytes"] // 2
        budget_bytes = limit_bytes * 10 // COMMITTED_TENTHS
        limited = case | {"limit_bytes": limit_bytes, "budget_bytes": budget_bytes}
        turns.append((plain, measure(limited | {"way": "plain"}), measure(limited | {"way": "budget"})))
    died = all("ran_out" in limited and len(limited["losses"]) == case["batches"] // 2 for _, limited, _ in turns)
    finished = all("ran_out" not in ours for _, _, ours in turns)
    furthest, took = float("inf"), float("inf")
    if finished:
        pairs = [pair for plain, _, ours in turns for pair in zip(plain["losses"], ours["losses"], strict=True)]
        furthest = max(abs(ours / theirs - 1) for theirs, ours in pairs)
        took = median(ours["seconds"] / ours["plain_seconds"] for _, _, ours in turns)
    claims = {
        "Unequal lengths: plain PyTorch runs out of memory in the long batch": died,
        "Unequal lengths: with a budget, the epoch ends": finished,
        f"Unequal lengths: the losses differ by at most {furthest:.1e}": furthest <= MAX_LOSS,
        f"Unequal lengths: the batches that fit take {took:.2f} of the time": took <= MAX_EPOCH
        or "--smoke" in sys.argv,
    }
    return {"case": case, "loss_error": furthest, "time": took, "limit_bytes": limit_bytes}, claims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    parser.add_argument("--cases", type=int, default=len(CASES), help="number of models at T = 10,000")
    parser.add_argument("--smoke", action="store_true", help="run as small as possible; store nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure_in_child(json.loads(args.one))))
        return
    rounds, cases, short, epoch = args.rounds, dict([*CASES.items()][: args.cases]), SHORT, EPOCH
    if args.smoke:
        rounds, short = 1, dict([*SHORT.items()][1:2])
        cases = {"LSTM 160": CASES["LSTM 160"] | {"steps": 4_000, "segments": 32}}
        epoch = EPOCH | {"steps": 60, "batches": 6}
    rows, claims = long_sequences(cases, rounds)
    short_rows, more = short_sequences(short, rounds)
    lengths, last = unequal_lengths(epoch, rounds)
    whole = not args.smoke and rounds >= 3 and args.cases >= len(CASES)
    result = {"rows": rows, "short": short_rows, "unequal": lengths, "rounds": rounds}
    publish("own_models_go_in_segments", result, claims | more | last, whole=whole)


if __name__ == "__main__":
    main()
