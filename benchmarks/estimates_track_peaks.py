"""Claim: the estimate tracks the measured peak of a training step on the CPU, before any calibration and closely after.

    python benchmarks/estimates_track_peaks.py                  # compare with the stored rows
    python benchmarks/estimates_track_peaks.py --measure 100    # measure so many new rows, each in a fresh process
    python benchmarks/estimates_track_peaks.py --calibrated 30  # calibrate so many stored rows, measuring them again
    python benchmarks/estimates_track_peaks.py --smoke          # a few stored rows and one calibrated: claims nothing

Each row is a random spec and candidate whose growth over the runtime is 50 MiB to 2 GiB. Its peak is measured, and
torch's MemTracker and torchinfo predict it in the same run; accelerate's estimator is asked when the rows are compared.

Calibrated are random ones of the stored rows whose step takes at most 1.5 s. As a search does on its way to a border,
two shorter versions are probed (a quarter and half of the steps); a calibration fed with their records predicts the
row, which is then measured by the same runner. About 15 s a row. Prints tables and ends with one JSON line.
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
MOST_WORK = 5e11  # multiplications of a row's two steps: keeps it under about a minute on one core
MOST_STEPS = 20_000  # time steps that native kernels go through, one by one
PARTS = (4, 2)
"""What part of a row's steps its two small records have."""
MOST_SECONDS = 1.5
"""Of a step of a row that is measured again."""
MEDIAN, LATE = 0.04, 0.10
CALIBRATED_MEDIAN, CALIBRATED_LATE, CALIBRATED_ROWS = 0.015, 0.05, 30
WIDTHS = (12, 8, 8, 9, 8)
SMOKE_ROWS = 10


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


def calibrated_row(row: dict[str, Any], runner: Runner) -> dict[str, Any]:
    """The row measured again, and what a calibration from two shorter versions of it had predicted."""
    spec = make_spec(json.loads(row["spec"]))
    candidate = make_candidate(spec, **json.loads(row["candidate"]), threads=1, allocator="steady")
    small = [runner.probe(*shorten(spec, candidate, max(1, spec.steps // part))) for part in PARTS]
    expected = Calibration(spec, small, CPU).predict(estimate_step(spec, candidate))[0]
    measured = runner.probe(spec, candidate)
    for record in (*small, measured):
        assert record.verdict.ran, record.message
    runtime_bytes = max(one.runtime_bytes or 0 for one in small)
    return row | {
        "growth_bytes": (measured.peak_bytes or 0) - (measured.runtime_bytes or 0),
        "calibrated_bytes": expected.peak_bytes - runtime_bytes,
        "peak_bytes": measured.peak_bytes,
        "safe_bytes": expected.safe_bytes,
    }


def calibrated_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """So many stored rows, calibrated, one after the other."""
    cheap = [row for row in stored_rows() if float(row["seconds_per_step"]) <= MOST_SECONDS]
    with Runner("cpu") as runner:
        return [calibrated_row(row, runner) for row in random.Random(seed).sample(cheap, min(count, len(cheap)))]


def predicted_bytes(row: dict[str, Any], tool: str) -> int | None:
    """A tool's growth for a row; None where it has no answer."""
    if tool == "oomguard":
        return estimated_growth_bytes(row)
    if tool == "accelerate":
        return accelerate_bytes(make_spec(json.loads(row["spec"])))
    return int(row[tool + "_bytes"]) if row[tool + "_bytes"] else None


def errors(rows: list[dict[str, Any]], tool: str) -> list[float]:
    """Relative errors of a tool where it has an answer, smallest first."""
    found = [(predicted_bytes(row, tool), int(row["growth_bytes"])) for row in rows]
    return sorted(abs(predicted / growth - 1) for predicted, growth in found if predicted is not None)


def compare(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Print how everyone did; return it as one value."""
    tools = ["calibrated"] * ("calibrated_bytes" in rows[0]) + ["oomguard", "memtracker", "torchinfo"]
    tools += ["accelerate"] * is_installed("accelerate")
    result: dict[str, Any] = {"rows": len(rows)}
    print_row(("growth", "answers", "median", "95th pct", "worst"), WIDTHS)
    for tool in tools:
        found = errors(rows, tool)
        if found:
            middle, late, worst = median(found), found[int(0.95 * (len(found) - 1))], found[-1]
            print_row((tool, len(found), f"{middle:.1%}", f"{late:.1%}", f"{worst:.1%}"), WIDTHS)
            result[tool] = {"answers": len(found), "median": middle, "p95": late, "worst": worst}
    return result


def packages() -> tuple[str, ...]:
    """The rivals that are installed; MemTracker is a part of torch."""
    return tuple(name for name in ("torchinfo", "accelerate") if is_installed(name))


def bare_claims(found: dict[str, Any]) -> dict[str, bool]:
    ours = found["oomguard"]
    return {
        f"uncalibrated: median error at most {MEDIAN:.0%} ({ours['median']:.1%})": ours["median"] <= MEDIAN,
        f"uncalibrated: 95th percentile at most {LATE:.0%} ({ours['p95']:.1%})": ours["p95"] <= LATE,
    }


def calibrated_claims(found: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, bool]:
    ours, below = found["calibrated"], sum(row["safe_bytes"] < row["peak_bytes"] for row in rows)
    middle, late = ours["median"], ours["p95"]
    return {
        f"calibrated: median error at most {CALIBRATED_MEDIAN:.1%} ({middle:.1%})": middle <= CALIBRATED_MEDIAN,
        f"calibrated: 95th percentile at most {CALIBRATED_LATE:.0%} ({late:.1%})": late <= CALIBRATED_LATE,
        f"calibrated, with its margin: never below the measured peak ({below} of {len(rows)})": not below,
    }


def store(count: int, seed: int) -> None:
    """Measure new rows and append them."""
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
    parser.add_argument("--measure", type=int, metavar="COUNT", help="measure so many new rows first")
    parser.add_argument("--calibrated", type=int, default=0, metavar="COUNT", help="calibrate so many stored rows")
    parser.add_argument("--seed", type=int, default=0, help="of the random rows")
    parser.add_argument("--smoke", action="store_true", help="a few stored rows and one calibrated")
    asked = parser.parse_args()
    if asked.measure and not asked.smoke:
        store(asked.measure, asked.seed)
    rows, count = stored_rows(), asked.calibrated
    if asked.smoke:
        rows, count = rows[:SMOKE_ROWS], 1
    result = compare(rows)
    claims = bare_claims(result)
    if count:
        print(f"\ncalibrated with records of {' and '.join(f'1/{part}' for part in PARTS)} of the steps:")
        again = calibrated_rows(count, asked.seed)
        result["calibrated"] = compare(again)
        claims |= calibrated_claims(result["calibrated"], again)
        result["calibrated_rows"] = again
    whole = count >= CALIBRATED_ROWS and is_installed("accelerate")  # torchinfo is asked when rows are measured
    publish("estimates_track_peaks", result, {} if asked.smoke else claims, whole=whole, packages=packages())


if __name__ == "__main__":
    main()
