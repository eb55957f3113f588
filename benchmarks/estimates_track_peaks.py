"""Claim: the estimate tracks the measured peak of a training step on the CPU before any calibration, and closely after.

    python benchmarks/estimates_track_peaks.py                  # compare with the stored rows
    python benchmarks/estimates_track_peaks.py --measure 100    # also measure 100 new rows, each in a new process
    python benchmarks/estimates_track_peaks.py --calibrated 50  # also calibrate 50 new rows in each of two runs
    python benchmarks/estimates_track_peaks.py --smoke          # compare a few stored rows and calibrate one

Each row is a random spec and candidate whose growth over the runtime is 50 MiB to 2 GiB. When a stored row is measured,
torch's MemTracker and torchinfo predict its peak in the same run. accelerate's estimate is computed when the rows are
compared. The hidden size of a row decides whether it is judged or a tune row (models.py). Claims are about judged rows.
The table shows both. New rows are judged ones, or tune rows with `--set tune`.

The calibrated rows are drawn anew in each of two runs, with a seed for each run. They are judged rows with a step of at
most about 1.5 s. For each, two shorter versions with a quarter and a half of the time steps are probed, as a search
would do. A calibration from their records predicts the peak of the row, and then the same runner measures it. A row
takes about 10 s. These rows are not added to results/cpu_peaks.csv. A smoke run claims nothing.
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
from models import HIDDEN, JUDGE_HIDDEN, ROW_GROWTH_BYTES, draw_row, is_judged, row_growth_bytes
from peak import measure
from results import print_row, publish
from rivals import accelerate_bytes, predict

from oomguard import Runner
from oomguard._device.cpu import cpu_name
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.target import CPU
from oomguard._predict.calibration import Calibration
from oomguard._spec.candidate import make_candidate
from oomguard._spec.lengths import shorten
from oomguard._spec.read import make_spec

ROWS = Path(__file__).parent / "results" / "cpu_peaks.csv"
COLUMNS = (
    *("date", "torch", "cpu", "spec", "candidate", "runtime_bytes", "growth_bytes"),
    *("seconds_per_step", "memtracker_bytes", "torchinfo_bytes"),
)
MAX_WORK = 5e11
"""Multiplications in the two optimizer steps of a stored row. The limit keeps it under about a minute on one core."""
CALIBRATED_MAX_WORK = 3e10
"""The same for a row that is calibrated: a step takes at most about 1.5 s."""
PARTS = (4, 2)
"""Divisors of a row's sequence length in the two shorter versions."""
MEDIAN, P95 = 0.04, 0.10
CALIBRATED_MEDIAN, CALIBRATED_P95, CALIBRATED_ABOVE = 0.015, 0.04, 0.01
RUNS, CALIBRATED_ROWS = 2, 50
"""Runs with calibrated rows, each with a seed of its own, and the rows of a whole run."""
WIDTHS = (12, 8, 8, 9, 8)
SMOKE_ROWS = 10


def measure_rows(count: int, seed: int, sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Draw and measure new rows, one after the other."""
    rng = random.Random(seed)
    origin = {
        "date": datetime.date.today().isoformat(),
        "torch": importlib.metadata.version("torch"),
        "cpu": cpu_name(),
    }
    for _ in range(count):
        spec, knobs = draw_row(rng, sizes, MAX_WORK)
        row = origin | {"spec": json.dumps(spec), "candidate": json.dumps(knobs)}
        yield row | measure(spec, knobs) | predict(spec, knobs)


def stored_rows() -> list[dict[str, Any]]:
    """Read the rows of results/cpu_peaks.csv that are in the range of the claim."""
    with ROWS.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    return [row for row in rows if ROW_GROWTH_BYTES[0] <= int(row["growth_bytes"]) <= ROW_GROWTH_BYTES[1]]


def estimated_growth_bytes(row: dict[str, Any]) -> int:
    """Estimate a stored row with oomguard."""
    return row_growth_bytes(json.loads(row["spec"]), json.loads(row["candidate"]))


def calibrated_row(fields: dict[str, Any], knobs: dict[str, Any], runner: Runner) -> dict[str, Any]:
    """Predict a row with a calibration from two shorter versions of it, and then measure it."""
    spec = make_spec(fields)
    candidate = make_candidate(spec, **knobs, threads=1, allocator="tight")
    shorter = [runner.probe(*shorten(spec, candidate, max(1, spec.steps // part))) for part in PARTS]
    expected = Calibration(spec, shorter, CPU).predict(estimate_step(spec, candidate))[0]
    measured = runner.probe(spec, candidate)
    for record in (*shorter, measured):
        assert record.verdict.ran, record.message
    runtime_bytes = max(record.runtime_bytes or 0 for record in shorter)
    return {
        "spec": json.dumps(fields),
        "candidate": json.dumps(knobs),
        "growth_bytes": (measured.peak_bytes or 0) - (measured.runtime_bytes or 0),
        "calibrated_bytes": expected.peak_bytes - runtime_bytes,
        "peak_bytes": measured.peak_bytes,
        "safe_bytes": expected.safe_bytes,
    }


def calibrated_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw judged rows, and calibrate and measure them one after the other."""
    rng = random.Random(seed)
    with Runner("cpu") as runner:
        return [calibrated_row(*draw_row(rng, JUDGE_HIDDEN, CALIBRATED_MAX_WORK), runner) for _ in range(count)]


def predicted_bytes(row: dict[str, Any], tool: str) -> int | None:
    """Return the growth that a tool predicts for a row, or None if it has no answer."""
    if tool == "oomguard":
        return estimated_growth_bytes(row)
    if tool == "accelerate":
        return accelerate_bytes(make_spec(json.loads(row["spec"])))
    return int(row[tool + "_bytes"]) if row.get(tool + "_bytes") else None


def errors(rows: list[dict[str, Any]], tool: str) -> list[float]:
    """Compute the relative errors of a tool for the rows that it has an answer for, smallest first."""
    pairs = [(predicted_bytes(row, tool), int(row["growth_bytes"])) for row in rows]
    return sorted(abs(predicted / growth - 1) for predicted, growth in pairs if predicted is not None)


def compare(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Print and return the errors of every tool."""
    if not rows:
        return {"rows": 0}
    print(f"\n{name} ({len(rows)}):")
    tools = ["calibrated"] * ("calibrated_bytes" in rows[0]) + ["oomguard", "memtracker", "torchinfo"]
    tools += ["accelerate"] * is_installed("accelerate")
    result: dict[str, Any] = {"rows": len(rows)}
    print_row(("growth", "answers", "median", "95th pct", "worst"), WIDTHS)
    for tool in tools:
        sizes = errors(rows, tool)
        if sizes:
            middle, p95, worst = median(sizes), sizes[int(0.95 * (len(sizes) - 1))], sizes[-1]
            print_row((f"  {tool}", len(sizes), f"{middle:.1%}", f"{p95:.1%}", f"{worst:.1%}"), WIDTHS)
            result[tool] = {"answers": len(sizes), "median": middle, "p95": p95, "worst": worst}
    return result


def packages() -> tuple[str, ...]:
    """List the rivals that are installed. MemTracker is part of torch."""
    return tuple(name for name in ("torchinfo", "accelerate") if is_installed(name))


def uncalibrated_claims(result: dict[str, Any]) -> dict[str, bool]:
    ours = result["oomguard"]
    return {
        f"uncalibrated, judged rows: median error at most {MEDIAN:.0%} ({ours['median']:.1%})": ours["median"]
        <= MEDIAN,
        f"uncalibrated, judged rows: 95th percentile at most {P95:.0%} ({ours['p95']:.1%})": ours["p95"] <= P95,
    }


def calibrated_claims(result: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Check the calibrated rows of all runs together."""
    ours, below = result["calibrated"], sum(row["safe_bytes"] < row["peak_bytes"] for row in rows)
    share = below / len(rows)
    middle, p95 = ours["median"], ours["p95"]
    above = f"at most {CALIBRATED_ABOVE:.0%} of the peaks are above ({below} of {len(rows)})"
    return {
        f"calibrated: median error at most {CALIBRATED_MEDIAN:.1%} ({middle:.1%})": middle <= CALIBRATED_MEDIAN,
        f"calibrated: 95th percentile at most {CALIBRATED_P95:.0%} over {RUNS} runs ({p95:.1%})": p95 <= CALIBRATED_P95,
        f"calibrated, with the margin: {above}": share <= CALIBRATED_ABOVE,
    }


def store(count: int, seed: int, sizes: tuple[int, ...]) -> None:
    """Measure new rows and append them to results/cpu_peaks.csv."""
    new = not ROWS.exists()
    with ROWS.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in measure_rows(count, seed, sizes):
            writer.writerow(row)
            file.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=int, metavar="COUNT", help="first measure COUNT new rows and store them")
    parser.add_argument("--set", choices=HIDDEN, default="judge", help="set of the stored new rows (default: judge)")
    parser.add_argument(
        "--calibrated", type=int, default=0, metavar="COUNT", help=f"calibrate COUNT judged rows in each of {RUNS} runs"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the new rows, and of the first calibrated run")
    parser.add_argument("--smoke", action="store_true", help="compare a few stored rows and calibrate one")
    args = parser.parse_args()
    if args.measure and not args.smoke:
        store(args.measure, args.seed, HIDDEN[args.set])
    rows, count, runs = stored_rows(), args.calibrated, RUNS
    if args.smoke:
        rows, count, runs = rows[:SMOKE_ROWS], 1, 1
    sets = {
        "judged rows": compare([row for row in rows if is_judged(json.loads(row["spec"]))], "judged rows"),
        "tune rows": compare([row for row in rows if not is_judged(json.loads(row["spec"]))], "tune rows"),
    }
    result = compare(rows, "all rows")
    claims = {} if args.smoke else uncalibrated_claims(sets["judged rows"])
    result["sets"] = {
        f"{tool}, {name}": figures
        for name, tools in sets.items()
        for tool, figures in tools.items()
        if isinstance(figures, dict)
    }
    if count:
        print(f"\nCalibrated with probes of {' and '.join(f'1/{part}' for part in PARTS)} of the sequence length:")
        calibrated: list[dict[str, Any]] = []
        result["runs"] = []
        for seed in range(args.seed, args.seed + runs):
            drawn = calibrated_rows(count, seed)
            figures = compare(drawn, f"judged rows of seed {seed}")
            result["runs"].append({"seed": seed, "rows": len(drawn), **figures["calibrated"]})
            calibrated += drawn
        result["calibrated"] = compare(calibrated, "judged rows of all runs")
        claims |= {} if args.smoke else calibrated_claims(result["calibrated"], calibrated)
        result["calibrated_rows"] = calibrated
    whole = count >= CALIBRATED_ROWS and is_installed("accelerate")  # torchinfo runs only when rows are measured
    publish("estimates_track_peaks", result, claims, whole=whole, packages=packages())


if __name__ == "__main__":
    main()
