"""Claim: training on a 4 GiB file needs at most 200 MiB of host memory for the data.

    python benchmarks/data_stay_on_disk.py [GIB] [--smoke]

The benchmark takes about 3 minutes and as much disk space as the file. Two processes run the same training (same model,
plan and number of steps): one on the large file, the other on a file with just enough sequences for two batches. The
difference of their resident peaks is the memory that the data needs. Inputs are normalised, so the whole file is read.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from peak import status_bytes, tight
from results import print_row, publish

import oomguard
from oomguard._core.units import GIB, MIB, format_bytes

SPEC: dict[str, Any] = {"cell": "gru", "seq": 1000, "features": 31, "hidden": 32, "layers": 1, "batch": 16}
ROW_BYTES = SPEC["seq"] * (SPEC["features"] + 1) * 4
WHOLE_GIB, MAX_BYTES, STEPS = 4.0, 200 * MIB, 20
WIDTHS = (12, 12, 12, 12)


def write(path: Path, rows: int) -> None:
    """Write random numbers in blocks of 256 rows."""
    array = np.lib.format.open_memmap(path, "w+", np.float32, (rows, SPEC["seq"], SPEC["features"] + 1))
    rng = np.random.default_rng(0)
    for start in range(0, rows, 256):
        block = rng.standard_normal((min(256, rows - start), *array.shape[1:]), dtype=np.float32)
        array[start : start + len(block)] = block
    array.flush()


def train_in_child(plan: str, data: str, run: str, steps: str) -> dict[str, Any]:
    """Train in this child process, and return the peak."""
    import torch

    torch.set_num_threads(1)
    result = oomguard.train(plan, data, run=run, steps=int(steps))
    # The guard resets the kernel's peak from time to time, so the true peak is the larger of the two figures.
    return {"peak_bytes": max(status_bytes("VmHWM"), result.peak_bytes), "steps": result.steps}


def measure(home: Path, name: str, steps: int) -> dict[str, Any]:
    arguments = [str(home / "plan.json"), str(home / f"{name}.npy"), str(home / f"run-{name}"), str(steps)]
    command = [sys.executable, str(Path(__file__)), "--one", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | tight())
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(train_in_child(*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gib", nargs="?", type=float, default=WHOLE_GIB)
    parser.add_argument("--directory", help="directory of the file (default: the system's temporary directory)")
    parser.add_argument("--smoke", action="store_true", help="use a small file and a few steps")
    args = parser.parse_args()
    gib, steps = (0.25, 3) if args.smoke else (args.gib, STEPS)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        home = Path(directory)
        plan = oomguard.find_feasible_config(**SPEC, threads=1, allow="none", max_probes=1)
        oomguard.save_plan(plan, home / "plan.json")
        sizes = {"small": 2 * SPEC["batch"] + 4, "large": int(gib * GIB) // ROW_BYTES}
        print_row(("", "file", "peak", "steps"), WIDTHS)
        runs = {}
        for name, rows in sizes.items():
            write(home / f"{name}.npy", rows)
            runs[name] = measure(home, name, steps)
            size = format_bytes((home / f"{name}.npy").stat().st_size)
            print_row((name, size, format_bytes(runs[name]["peak_bytes"]), runs[name]["steps"]), WIDTHS)
    data_bytes = runs["large"]["peak_bytes"] - runs["small"]["peak_bytes"]
    print_row(("for the data", "", format_bytes(data_bytes), ""), WIDTHS)
    claims = {f"{gib:g} GiB on the disk need at most 200 MiB of memory": data_bytes <= MAX_BYTES}
    result = {"gib": gib, "data_bytes": data_bytes, "runs": runs}
    publish("data_stay_on_disk", result, claims, whole=gib >= WHOLE_GIB)


if __name__ == "__main__":
    main()
