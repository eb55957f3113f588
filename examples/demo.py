"""Show the whole of oomguard in a few minutes: plan, train and report on sequences that plain PyTorch cannot hold.

    make demo          or          python examples/demo.py [DIRECTORY]

Everything is written to one directory (build/demo): the data, the records of the search, the plan, the run and a
report page. A second run finds the records of the first and goes straight to training.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import oomguard

BUDGET_MIB = 382 + (int(oomguard.estimate(cell="lstm", seq=1).terms["runtime"]) >> 20)
"""700 with PyTorch's CPU build. Its build for CUDA needs 364 MiB more for itself, also without a card."""
MODEL = f"--model lstm --seq 10000 --budget {BUDGET_MIB}MiB"
BATCH, STEPS, FEATURES = 32, 10_000, 64
"""Rows, length and width of the data: one batch of the default spec."""
TRAIN_SECONDS = 60
"""Training makes as many updates as fit into this time, but at least 2 and at most 5."""


def main() -> int:
    home = Path(sys.argv[1] if len(sys.argv) > 1 else "build/demo")
    home.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    title("1. Plain PyTorch, held to the budget", f"One step in a child process that may use {BUDGET_MIB} MiB.")
    code, _ = oomguard_command(f"probe {MODEL}", home)
    require(code == 1, "The plain step was expected not to fit.")

    title("2. Find a plan that fits", "The search measures a few candidates, each in a child process.")
    code, _ = oomguard_command(f"plan {MODEL} --ledger ledger", home)
    require(code == 0, "No plan was found.")
    plan = oomguard.load_plan(home / "plan.json")

    updates = max(2, min(5, int(TRAIN_SECONDS / plan.seconds_per_step)))
    expected = f"{updates} updates of about {plan.seconds_per_step:.0f} s each"
    title("3. Train it", f"Generated data: {BATCH} series of {STEPS:,} steps with {FEATURES} features. {expected}.")
    make_data(home / "waves.npy")
    shutil.rmtree(home / "run", ignore_errors=True)
    train = f"train plan.json --data waves.npy --validation 0 --epochs {updates} --run run"
    code, peak_bytes = oomguard_command(train, home)
    require(code == 0, "The training failed.")

    title("4. Write a report", "The plan, its evidence and its curves on one page.")
    code, _ = oomguard_command("show plan.json --html report.html", home)
    require(code == 0, "The report was not written.")

    plain = oomguard.estimate(cell="lstm", seq=STEPS)
    title("Result", f"Total time: {time.monotonic() - began:.0f} s.")
    print(f"  budget          {mib(BUDGET_MIB << 20):>9}")
    print(f"  plain PyTorch   {mib(plain.total_bytes):>9}  needed, by the estimate; part 1 ran out of memory")
    print(f"  this training   {mib(peak_bytes):>9}  at its peak, as the kernel counts it for the whole process")
    print(f"\n  Report: {home / 'report.html'}")
    require(peak_bytes < BUDGET_MIB << 20, "The training went over the budget.")
    return 0


def title(text: str, explanation: str) -> None:
    print(f"\n{text}\n{'─' * len(text)}\n{explanation}\n", flush=True)


def oomguard_command(line: str, home: Path) -> tuple[int, int]:
    """Run one command in the directory, and return its exit code and its peak of resident bytes.

    The peak is the kernel's high-water mark (VmHWM). It is read every 20 ms, because training resets that mark itself.
    """
    print(f"$ oomguard {line}", flush=True)
    cache = (home / "cache").resolve()
    environment = os.environ | {"OOMGUARD_CACHE": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "torch")}
    command = [sys.executable, "-m", "oomguard", *shlex.split(line)]
    child, peak_bytes = subprocess.Popen(command, cwd=home, env=environment), 0
    while child.poll() is None:
        peak_bytes = max(peak_bytes, high_water_bytes(child.pid))
        time.sleep(0.02)
    return child.returncode, peak_bytes


def high_water_bytes(process: int) -> int:
    """Read the most resident bytes that a process has had, or 0 if it has just ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def make_data(path: Path) -> None:
    """Write noisy waves. The target, the last column, is the mean of the features one step before."""
    if path.exists():
        return
    rng = np.random.default_rng(0)
    time_steps = np.arange(STEPS, dtype=np.float32)[None, :, None]
    period = rng.uniform(20, 2000, size=(BATCH, 1, FEATURES)).astype(np.float32)
    data = np.empty((BATCH, STEPS, FEATURES + 1), dtype=np.float32)
    data[..., :-1] = np.sin(2 * np.pi * time_steps / period)
    data[..., :-1] += rng.normal(scale=0.1, size=(BATCH, STEPS, FEATURES))
    data[:, 1:, -1] = data[:, :-1, :-1].mean(axis=-1)
    data[:, 0, -1] = 0
    np.save(path, data)


def mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.0f} MiB"


def require(holds: bool, message: str) -> None:
    if not holds:
        sys.exit(f"\nThe demo failed. {message}")


if __name__ == "__main__":
    sys.exit(main())
