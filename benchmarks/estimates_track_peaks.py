"""Claim: the estimate tracks the measured peak of a training step on the CPU before any calibration, and closely after.

    python benchmarks/estimates_track_peaks.py                  # compare with the stored rows
    python benchmarks/estimates_track_peaks.py --measure 100    # also measure 100 new rows, each in a new process
    python benchmarks/estimates_track_peaks.py --calibrated 30  # also calibrate and measure 30 stored rows again
    python benchmarks/estimates_track_peaks.py --smoke          # compare a few stored rows and calibrate one

Each row is a random spec and candidate whose growth over the runtime is 50 MiB to 2 GiB. When a row is measured,
torch's MemTracker and torchinfo predict its peak in the same run. accelerate's estimate is computed when the rows are
compared.

The calibrated rows are drawn at random from the stored rows whose step takes at most 1.5 s. For each, two shorter
versions with a quarter and a half of the time steps are probed, as a search would do. A calibration from their records
predicts the peak of the row, and then the same runner measures it. A row takes about 15 s. A smoke run claims nothing.
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

from finders import is_installed
from peak import measure
from results import print_row, publish
from rivals import accelerate_bytes, predict

from oomguard import Runner
from oomguard._core.units import GIB, MIB
from oomguard._device.cpu import cpu_name
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.target import CPU
from oomguard._predict.calibration import Calibration
from oomguard._search.lengths import shorten
from oomguard._spec.candidate import make_candidate
from oomguard._spec.read import make_spec

ROWS = Path(__file__).parent / "results" / "cpu_peaks.csv"
COLUMNS = (
    *("date", "torch", "cpu", "spec", "candidate", "runtime_bytes", "growth_bytes"),
    *("seconds_per_step", "memtracker_bytes", "torchinfo_bytes"),
)
GROWTH_BYTES = (50 * MIB, 2 * GIB)
MAX_WORK = 5e11
"""Multiplications in the two optimizer steps of a row. The limit keeps a row under about a minute on one core."""
MAX_STEPS = 20_000
"""Time steps of a row that runs on native kernels, which compute them one by one."""
PARTS = (4, 2)
"""Divisors of a row's sequence length in the two shorter versions."""
MAX_SECONDS = 1.5
"""Time of an optimizer step of a row that is calibrated and measured again."""
MEDIAN, P95 = 0.04, 0.10
CALIBRATED_MEDIAN, CALIBRATED_P95, CALIBRATED_ROWS = 0.015, 0.05, 30
WIDTHS = (12, 8, 8, 9, 8)
SMOKE_ROWS = 10


def random_row(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Draw a spec and its knobs. Return None if they are too large, too small or too slow."""
    spec: dict[str, Any] = {
        "cell": rng.choice(["lstm", "gru", "rnn"]),
        "hidden": rng.choice([32, 64, 96, 128, 200, 256, 384, 512]),
        "layers": rng.choice([1, 2, 3]),
        "bidirectional": rng.random() < 0.3,
        "head": rng.choice(["per-step", "per-step", "last-step"]),
        "optimizer": rng.choice(["adam", "adam", "sgd"]),
        "batch_first": rng.random() < 0.1,
        "layer_norm": rng.random() < 0.1,
        "dropout": 0.2 if rng.random() < 0.1 else 0.0,
    }
    if rng.random() < 0.45:
        spec |= {"vocab": rng.choice([50, 256, 1000, 5000, 20_000, 50_000]), "embedding": rng.choice([64, 128, 300])}
        spec |= {"outputs": 2} if spec["head"] == "last-step" else {}
    else:
        spec |= {"features": rng.choice([1, 16, 64, 128, 300]), "outputs": rng.choice([1, 8])}
    microbatch = 2 ** rng.randrange(9)
    segments = 1 if spec["bidirectional"] or rng.random() < 0.35 else rng.choice([2, 4, 10, 25, 50, 100])
    knobs: dict[str, Any] = {"microbatch": microbatch, "segments": segments}
    if spec["cell"] == "lstm" and rng.random() < 0.25:
        knobs["engine"] = "native"
    spec["batch"] = microbatch * rng.choice([1, 1, 2, 3]) - (rng.randrange(microbatch) if rng.random() < 0.2 else 0)
    if spec["batch"] < microbatch:
        return None
    return _with_length(spec, knobs, MIB * 2 ** rng.uniform(5.9, 10.8 if segments == 1 else 7))


def _with_length(
    spec: dict[str, Any], knobs: dict[str, Any], growth_bytes: float
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Set the length at which the estimated growth is about `growth_bytes`. Return None if the row is not usable."""
    low, high = 4 * knobs["segments"], 200_000
    while high - low > low // 50 + 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _growth_bytes(spec | {"seq": middle}, knobs) < growth_bytes else (low, middle)
    spec = spec | {"seq": low}
    width = spec["hidden"] * (2 if spec["bidirectional"] else 1)
    outputs = spec.get("outputs", spec.get("vocab")) if spec["head"] == "per-step" else 0
    work = 6 * low * spec["batch"] * (8 * width * width * spec["layers"] + width * outputs)
    slow = (spec["cell"] != "lstm" or "engine" in knobs) and low * spec["layers"] * 2 > MAX_STEPS
    inside = GROWTH_BYTES[0] <= _growth_bytes(spec, knobs) <= GROWTH_BYTES[1]
    return (spec, knobs) if inside and work < MAX_WORK and not slow else None


def _growth_bytes(spec: dict[str, Any], knobs: dict[str, Any]) -> int:
    made = make_spec(spec)
    return int(estimate_step(made, make_candidate(made, **knobs)).growth_bytes)


def measure_rows(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Draw and measure new rows, one after the other."""
    rng = random.Random(seed)
    origin = {
        "date": datetime.date.today().isoformat(),
        "torch": importlib.metadata.version("torch"),
        "cpu": cpu_name(),
    }
    while count:
        drawn = random_row(rng)
        if drawn is None:
            continue
        count -= 1
        spec, knobs = drawn
        row = origin | {"spec": json.dumps(spec), "candidate": json.dumps(knobs)}
        yield row | measure(spec, knobs) | predict(spec, knobs)


def stored_rows() -> list[dict[str, Any]]:
    """Read the rows of results/cpu_peaks.csv that are in the range of the claim."""
    with ROWS.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    return [row for row in rows if GROWTH_BYTES[0] <= int(row["growth_bytes"]) <= GROWTH_BYTES[1]]


def estimated_growth_bytes(row: dict[str, Any]) -> int:
    """Estimate a stored row with oomguard."""
    return _growth_bytes(json.loads(row["spec"]), json.loads(row["candidate"]))


def calibrated_row(row: dict[str, Any], runner: Runner) -> dict[str, Any]:
    """Predict a row with a calibration from two shorter versions of it, and then measure it again."""
    spec = make_spec(json.loads(row["spec"]))
    candidate = make_candidate(spec, **json.loads(row["candidate"]), threads=1, allocator="tight")
    shorter = [runner.probe(*shorten(spec, candidate, max(1, spec.steps // part))) for part in PARTS]
    expected = Calibration(spec, shorter, CPU).predict(estimate_step(spec, candidate))[0]
    measured = runner.probe(spec, candidate)
    for record in (*shorter, measured):
        assert record.verdict.ran, record.message
    runtime_bytes = max(record.runtime_bytes or 0 for record in shorter)
    return row | {
        "growth_bytes": (measured.peak_bytes or 0) - (measured.runtime_bytes or 0),
        "calibrated_bytes": expected.peak_bytes - runtime_bytes,
        "peak_bytes": measured.peak_bytes,
        "safe_bytes": expected.safe_bytes,
    }


def calibrated_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw stored rows, and calibrate and measure them one after the other."""
    fast_rows = [row for row in stored_rows() if float(row["seconds_per_step"]) <= MAX_SECONDS]
    with Runner("cpu") as runner:
        return [
            calibrated_row(row, runner) for row in random.Random(seed).sample(fast_rows, min(count, len(fast_rows)))
        ]


def predicted_bytes(row: dict[str, Any], tool: str) -> int | None:
    """Return the growth that a tool predicts for a row, or None if it has no answer."""
    if tool == "oomguard":
        return estimated_growth_bytes(row)
    if tool == "accelerate":
        return accelerate_bytes(make_spec(json.loads(row["spec"])))
    return int(row[tool + "_bytes"]) if row[tool + "_bytes"] else None


def errors(rows: list[dict[str, Any]], tool: str) -> list[float]:
    """Compute the relative errors of a tool for the rows that it has an answer for, smallest first."""
    pairs = [(predicted_bytes(row, tool), int(row["growth_bytes"])) for row in rows]
    return sorted(abs(predicted / growth - 1) for predicted, growth in pairs if predicted is not None)


def compare(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Print and return the errors of every tool."""
    tools = ["calibrated"] * ("calibrated_bytes" in rows[0]) + ["oomguard", "memtracker", "torchinfo"]
    tools += ["accelerate"] * is_installed("accelerate")
    result: dict[str, Any] = {"rows": len(rows)}
    print_row(("growth", "answers", "median", "95th pct", "worst"), WIDTHS)
    for tool in tools:
        sizes = errors(rows, tool)
        if sizes:
            middle, p95, worst = median(sizes), sizes[int(0.95 * (len(sizes) - 1))], sizes[-1]
            print_row((tool, len(sizes), f"{middle:.1%}", f"{p95:.1%}", f"{worst:.1%}"), WIDTHS)
            result[tool] = {"answers": len(sizes), "median": middle, "p95": p95, "worst": worst}
    return result


def packages() -> tuple[str, ...]:
    """List the rivals that are installed. MemTracker is part of torch."""
    return tuple(name for name in ("torchinfo", "accelerate") if is_installed(name))


def uncalibrated_claims(result: dict[str, Any]) -> dict[str, bool]:
    ours = result["oomguard"]
    return {
        f"uncalibrated: median error at most {MEDIAN:.0%} ({ours['median']:.1%})": ours["median"] <= MEDIAN,
        f"uncalibrated: 95th percentile at most {P95:.0%} ({ours['p95']:.1%})": ours["p95"] <= P95,
    }


def calibrated_claims(result: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, bool]:
    ours, below = result["calibrated"], sum(row["safe_bytes"] < row["peak_bytes"] for row in rows)
    middle, p95 = ours["median"], ours["p95"]
    return {
        f"calibrated: median error at most {CALIBRATED_MEDIAN:.1%} ({middle:.1%})": middle <= CALIBRATED_MEDIAN,
        f"calibrated: 95th percentile at most {CALIBRATED_P95:.0%} ({p95:.1%})": p95 <= CALIBRATED_P95,
        f"calibrated, with its margin: never below the measured peak ({below} of {len(rows)})": not below,
    }


def store(count: int, seed: int) -> None:
    """Measure new rows and append them to results/cpu_peaks.csv."""
    new = not ROWS.exists()
    with ROWS.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in measure_rows(count, seed):
            writer.writerow(row)
            file.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=int, metavar="COUNT", help="first measure COUNT new rows")
    parser.add_argument("--calibrated", type=int, default=0, metavar="COUNT", help="calibrate COUNT stored rows")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random rows")
    parser.add_argument("--smoke", action="store_true", help="compare a few stored rows and calibrate one")
    args = parser.parse_args()
    if args.measure and not args.smoke:
        store(args.measure, args.seed)
    rows, count = stored_rows(), args.calibrated
    if args.smoke:
        rows, count = rows[:SMOKE_ROWS], 1
    result = compare(rows)
    claims = uncalibrated_claims(result)
    if count:
        print(f"\nCalibrated with probes of {' and '.join(f'1/{part}' for part in PARTS)} of the sequence length:")
        calibrated = calibrated_rows(count, args.seed)
        result["calibrated"] = compare(calibrated)
        claims |= calibrated_claims(result["calibrated"], calibrated)
        result["calibrated_rows"] = calibrated
    whole = count >= CALIBRATED_ROWS and is_installed("accelerate")  # torchinfo runs only when rows are measured
    publish("estimates_track_peaks", result, {} if args.smoke else claims, whole=whole, packages=packages())


if __name__ == "__main__":
    main()
