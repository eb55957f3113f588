"""Claim: the estimate tracks the measured peak of a training step on the CPU, before any calibration.

    python benchmarks/estimates_track_peaks.py               # compare with the stored rows
    python benchmarks/estimates_track_peaks.py --measure 100  # measure so many new rows, each in a fresh process

Each row is a random spec and candidate whose growth over the runtime is 50 MiB to 2 GiB. Its peak is measured, and
torch's MemTracker and torchinfo predict it in the same run. Prints a table and ends with one JSON line.
"""

import argparse
import csv
import datetime
import importlib.metadata
import json
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from peak import measure
from rivals import predict

from oomguard.candidate import make_candidate
from oomguard.device.cpu import cpu_name
from oomguard.estimate.breakdown import estimate_step
from oomguard.presets import make_spec
from oomguard.units import GIB, MIB

ROWS = Path(__file__).parent / "results" / "cpu_peaks.csv"
COLUMNS = (
    *("date", "torch", "cpu", "spec", "candidate", "runtime_bytes", "growth_bytes"),
    *("seconds_per_step", "memtracker_bytes", "torchinfo_bytes"),
)
GROWTH_BYTES = (50 * MIB, 2 * GIB)
MOST_WORK = 5e11  # multiplications of a row's two steps: keeps it under about a minute on one core
MOST_STEPS = 20_000  # time steps that native kernels go through, one by one


def random_row(pick: random.Random) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """A spec and its knobs, or None if the draw is too large, too small or too slow."""
    spec: dict[str, Any] = {
        "cell": pick.choice(["lstm", "gru", "rnn"]),
        "hidden": pick.choice([32, 64, 96, 128, 200, 256, 384, 512]),
        "layers": pick.choice([1, 2, 3]),
        "bidirectional": pick.random() < 0.3,
        "head": pick.choice(["per-step", "per-step", "last-step"]),
        "optimizer": pick.choice(["adam", "adam", "sgd"]),
        "batch_first": pick.random() < 0.1,
        "layer_norm": pick.random() < 0.1,
        "dropout": 0.2 if pick.random() < 0.1 else 0.0,
    }
    if pick.random() < 0.45:
        spec |= {"vocab": pick.choice([50, 256, 1000, 5000, 20_000, 50_000]), "embedding": pick.choice([64, 128, 300])}
        spec |= {"outputs": 2} if spec["head"] == "last-step" else {}
    else:
        spec |= {"features": pick.choice([1, 16, 64, 128, 300]), "outputs": pick.choice([1, 8])}
    microbatch = 2 ** pick.randrange(9)
    segments = 1 if spec["bidirectional"] or pick.random() < 0.35 else pick.choice([2, 4, 10, 25, 50, 100])
    knobs: dict[str, Any] = {"microbatch": microbatch, "segments": segments}
    if spec["cell"] == "lstm" and pick.random() < 0.25:
        knobs["engine"] = "native"
    spec["batch"] = microbatch * pick.choice([1, 1, 2, 3]) - (pick.randrange(microbatch) if pick.random() < 0.2 else 0)
    if spec["batch"] < microbatch:
        return None
    return _with_length(spec, knobs, MIB * 2 ** pick.uniform(5.9, 10.8 if segments == 1 else 7))


def _with_length(
    spec: dict[str, Any], knobs: dict[str, Any], wanted_bytes: float
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The length at which the growth is about what is wanted, if that is a length worth running."""
    low, high = 4 * knobs["segments"], 200_000
    while high - low > low // 50 + 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _growth_bytes(spec | {"seq": middle}, knobs) < wanted_bytes else (low, middle)
    spec = spec | {"seq": low}
    width = spec["hidden"] * (2 if spec["bidirectional"] else 1)
    outputs = spec.get("outputs", spec.get("vocab")) if spec["head"] == "per-step" else 0
    work = 6 * low * spec["batch"] * (8 * width * width * spec["layers"] + width * outputs)
    slow = (spec["cell"] != "lstm" or "engine" in knobs) and low * spec["layers"] * 2 > MOST_STEPS
    inside = GROWTH_BYTES[0] <= _growth_bytes(spec, knobs) <= GROWTH_BYTES[1]
    return (spec, knobs) if inside and work < MOST_WORK and not slow else None


def _growth_bytes(spec: dict[str, Any], knobs: dict[str, Any]) -> int:
    made = make_spec(spec)
    return int(estimate_step(made, make_candidate(made, **knobs)).growth_bytes)


def measure_rows(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """So many new rows, one after the other."""
    pick = random.Random(seed)
    about = {"date": datetime.date.today().isoformat(), "torch": importlib.metadata.version("torch"), "cpu": cpu_name()}
    while count:
        drawn = random_row(pick)
        if drawn is None:
            continue
        count -= 1
        spec, knobs = drawn
        row = about | {"spec": json.dumps(spec), "candidate": json.dumps(knobs)}
        yield row | measure(spec, knobs) | predict(spec, knobs)


def stored_rows() -> list[dict[str, Any]]:
    """The measured rows of the repository, those in the range of the claim."""
    with ROWS.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    return [row for row in rows if GROWTH_BYTES[0] <= int(row["growth_bytes"]) <= GROWTH_BYTES[1]]


def estimated_growth_bytes(row: dict[str, Any]) -> int:
    """oomguard's estimate for a stored row."""
    return _growth_bytes(json.loads(row["spec"]), json.loads(row["candidate"]))


def errors(rows: list[dict[str, Any]], tool: str) -> list[float]:
    """Relative errors of a tool where it has an answer, smallest first."""
    found = []
    for row in rows:
        predicted = estimated_growth_bytes(row) if tool == "oomguard" else row[tool + "_bytes"]
        if predicted not in (None, ""):
            found.append(abs(int(predicted) / int(row["growth_bytes"]) - 1))
    return sorted(found)


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Print the comparison; return it as one value."""
    result: dict[str, Any] = {"claim": "estimates_track_peaks", "rows": len(rows)}
    print(f"{'tool':<12} {'answers':>8} {'median':>8} {'95th pct':>9} {'worst':>8}")
    for tool in ("oomguard", "memtracker", "torchinfo"):
        found = errors(rows, tool)
        middle, late, worst = median(found), found[int(0.95 * (len(found) - 1))], found[-1]
        print(f"{tool:<12} {len(found):>8} {middle:>8.1%} {late:>9.1%} {worst:>8.1%}")
        result[tool] = {"answers": len(found), "median": middle, "p95": late, "worst": worst}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=int, metavar="COUNT", help="measure so many new rows first")
    parser.add_argument("--seed", type=int, default=0, help="of the random rows")
    asked = parser.parse_args()
    if asked.measure:
        new = not ROWS.exists()
        with ROWS.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            for row in measure_rows(asked.measure, asked.seed):
                writer.writerow(row)
                file.flush()
    print(json.dumps(report(stored_rows())))


if __name__ == "__main__":
    main()
