"""Claim: training on a 4 GiB file needs at most 200 MiB of host memory for the data.

    python benchmarks/data_stay_on_disk.py [GIB] [--smoke]

About 3 minutes, and the disk space. The same training (same model, same plan, same number of steps) runs in two
processes of their own: on the large file, and on one with just enough sequences for two batches. What the first peaks
at (resident) above the second is what its data needs. Numbers are normalised, so all of the file is read.
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
from peak import status_bytes
from results import print_row, publish

import oomguard
from oomguard._core.units import GIB, MIB, format_bytes
from oomguard._estimate.malloc import ENVIRONMENT

SPEC: dict[str, Any] = {"cell": "gru", "seq": 1000, "features": 31, "hidden": 32, "layers": 1, "batch": 16}
ROW_BYTES = SPEC["seq"] * (SPEC["features"] + 1) * 4
WHOLE_GIB, MOST_BYTES, STEPS = 4.0, 200 * MIB, 20
WIDTHS = (12, 12, 12, 12)


def write(path: Path, rows: int) -> None:
    """Random numbers, some at a time."""
    array = np.lib.format.open_memmap(path, "w+", np.float32, (rows, SPEC["seq"], SPEC["features"] + 1))
    dice = np.random.default_rng(0)
    for start in range(0, rows, 256):
        block = dice.standard_normal((min(256, rows - start), *array.shape[1:]), dtype=np.float32)
        array[start : start + len(block)] = block
    array.flush()


def run_one(plan: str, data: str, run: str, steps: str) -> dict[str, Any]:
    """In the child: the training, and its peak."""
    import torch

    torch.set_num_threads(1)
    result = oomguard.train(plan, data, run=run, steps=int(steps))
    # the guard looks at the peak and sets it back now and then, so neither alone is the largest
    return {"peak_bytes": max(status_bytes("VmHWM"), result.peak_bytes), "steps": result.steps}


def measure(home: Path, name: str, steps: int) -> dict[str, Any]:
    words = [str(home / "plan.json"), str(home / f"{name}.npy"), str(home / f"run-{name}"), str(steps)]
    command = [sys.executable, str(Path(__file__)), "--one", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | ENVIRONMENT["steady"])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(run_one(*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gib", nargs="?", type=float, default=WHOLE_GIB)
    parser.add_argument("--directory", help="for the file; the system's for temporary files unless given")
    parser.add_argument("--smoke", action="store_true", help="a small file, a few steps")
    asked = parser.parse_args()
    gib, steps = (0.25, 3) if asked.smoke else (asked.gib, STEPS)
    with tempfile.TemporaryDirectory(dir=asked.directory) as directory:
        home = Path(directory)
        plan = oomguard.find_feasible_config(**SPEC, threads=1, allow="none", max_probes=1)
        oomguard.save_plan(plan, home / "plan.json")
        sizes = {"small": 2 * SPEC["batch"] + 4, "large": int(gib * GIB) // ROW_BYTES}
        print_row(("", "file", "peak", "steps"), WIDTHS)
        found = {}
        for name, rows in sizes.items():
            write(home / f"{name}.npy", rows)
            found[name] = measure(home, name, steps)
            size = format_bytes((home / f"{name}.npy").stat().st_size)
            print_row((name, size, format_bytes(found[name]["peak_bytes"]), found[name]["steps"]), WIDTHS)
    data_bytes = found["large"]["peak_bytes"] - found["small"]["peak_bytes"]
    print_row(("for the data", "", format_bytes(data_bytes), ""), WIDTHS)
    claims = {f"{gib:g} GiB on the disk need at most 200 MiB of memory": data_bytes <= MOST_BYTES}
    result = {"gib": gib, "data_bytes": data_bytes, "runs": found}
    publish("data_stay_on_disk", result, claims, whole=gib >= WHOLE_GIB)


if __name__ == "__main__":
    main()
