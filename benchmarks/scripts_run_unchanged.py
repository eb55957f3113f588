"""Claim: scripts that know nothing of oomguard train under `oomguard run` with the same losses, for at most 1.10 of the
time beside its start. A budget that they exceed alone is kept, where their layers call PyTorch. A script that plain
Python cannot finish under a hard limit finishes.

    python benchmarks/scripts_run_unchanged.py [ROUNDS] [--smoke]

The scripts in benchmarks/scripts/ are written as users write them: a loop by hand, a LightningModule with its Trainer,
Keras on PyTorch with `model.fit`, and reinforcement learning with rollouts of a recurrent policy. They print a loss
for every update or epoch. Keras runs its layers on the CPU as loops over steps, which segments do not reach: it is run
without a budget alone.

- Plain: the script by Python alone. Then by `oomguard run` without flags, with `--allocator tight`, and with a budget
  of 0.85 of the plain peak.
- Peaks are the largest resident set of any process (wait4). Times are seconds of the processor of all processes of a
  run, that of oomguard included. Its start is measured with a script that only imports torch. The contenders take
  turns, and ratios are medians over the rounds.
- Hard limit: the loop with one sequence of 6,000 steps, under an RLIMIT_DATA of 700 MB. Its losses are compared with
  those of the plain script without a limit.

Every process has one thread.
"""

import argparse
import importlib.util
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from peak import without_heap_settings
from results import print_row, publish

from oomguard._core.units import MIB

SCRIPTS = Path(__file__).parent / "scripts"
CASES: dict[str, tuple[str, str | None, list[str]]] = {
    "loop by hand": ("own_loop", None, ["--epochs", "1", "--longest", "300"]),
    "Lightning": ("lightning_forecast", "pytorch_lightning", ["--epochs", "1", "--steps", "100"]),
    "Keras on PyTorch": ("keras_fit", "keras", ["--epochs", "1", "--steps", "10"]),
    "reinforcement learning": ("policy_gradient", None, ["--iterations", "1", "--steps", "50"]),
}
"""For each script its file, the package that it needs, and the flags of a smoke run."""
WITHOUT_BUDGET = ("Keras on PyTorch",)
BUDGET_SHARE, MAX_PEAK, MAX_TIME, MAX_LOSS = 0.85, 1.02, 1.10, 1e-6
LIMIT_BYTES, LIMITED = 700_000_000, ["--epochs", "1", "--longest", "6000"]
WIDTHS = (24, 24, 12, 12, 10)


def measure(words: list[str], limit_bytes: int | None = None) -> dict[str, Any]:
    """Run a command in its own process: its losses, exit code, peak and seconds of the processor."""

    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))

    with tempfile.TemporaryFile("w+") as out:
        env = without_heap_settings() | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=env, preexec_fn=limit)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read()
    losses = [float(number) for number in re.findall(r"^(?!oomguard:).*loss (\S+)$", text, re.MULTILINE)]
    seconds = usage.ru_utime + usage.ru_stime
    return {
        "losses": losses,
        "code": process.returncode,
        "peak_bytes": usage.ru_maxrss * 1024,
        "seconds": seconds,
        "text": text,
    }


def script(name: str, flags: list[str]) -> list[str]:
    return [sys.executable, str(SCRIPTS / f"{name}.py"), *flags]


def ours(words: list[str], *flags: str) -> list[str]:
    return [sys.executable, "-m", "oomguard", "run", *flags, "--", *words]


def finished(words: list[str]) -> dict[str, Any]:
    done = measure(words)
    assert done["code"] == 0, done["text"]
    return done


def furthest(losses: list[float], others: list[float]) -> float:
    """The largest relative difference of losses; infinite if there are none, or not as many."""
    if not losses or len(losses) != len(others):
        return float("inf")
    return max(abs(one - other) / max(1e-3, abs(other)) for one, other in zip(losses, others, strict=True))


def start_seconds(rounds: int) -> float:
    """Seconds of the processor that `oomguard run` adds to a script that only imports torch."""
    words = [sys.executable, "-c", "import torch"]
    return median(finished(ours(words))["seconds"] - finished(words)["seconds"] for _ in range(rounds))


def measure_script(
    name: str, rounds: int, start: float, *, smoke: bool
) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """Measure one script: rows of the table, and the statements."""
    file, _, small = CASES[name]
    words = script(file, small if smoke else [])
    plain = [finished(words)]
    budget_bytes = int(BUDGET_SHARE * plain[0]["peak_bytes"])
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "oomguard run": lambda: finished(ours(words)),
        "--allocator tight": lambda: finished(ours(words, "--allocator", "tight")),
        f"--budget {budget_bytes // MIB}MiB": lambda: finished(ours(words, "--budget", str(budget_bytes))),
    }
    if name in WITHOUT_BUDGET or smoke:
        ways.popitem()
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for number in range(rounds):
        if number:
            plain.append(finished(words))
        for way, run in ways.items():
            found[way].append(run())
    rows = []
    for way, runs in {"plain": plain, **found}.items():
        ratio = median((run["seconds"] - start) / before["seconds"] for run, before in zip(runs, plain, strict=True))
        peak_bytes = max(run["peak_bytes"] for run in runs)
        seconds, error = (
            median(run["seconds"] for run in runs),
            max(furthest(r["losses"], plain[0]["losses"]) for r in runs),
        )
        rows.append({"script": name, "way": way, "peak_bytes": peak_bytes, "seconds": seconds, "loss_error": error})
        rows[-1] |= {} if way == "plain" else {"time": ratio}
        cells = (f"{peak_bytes / MIB:.0f} MiB", f"{seconds:.1f} s", "" if way == "plain" else f"{ratio:.2f}")
        print_row((name, way, *cells), WIDTHS)
    return rows, claims_of(name, rows, budget_bytes, smoke=smoke)


def claims_of(name: str, rows: list[dict[str, Any]], budget_bytes: int, *, smoke: bool) -> dict[str, bool]:
    plain, run, *others = rows
    error = max(row["loss_error"] for row in rows)
    claims = {f"{name}: the losses differ by at most {error:.1e}": error <= MAX_LOSS}
    if smoke:
        return claims
    peak, time = run["peak_bytes"] / plain["peak_bytes"], run["time"]
    claims[f"{name}: {peak:.2f} of the peak without a budget"] = peak <= MAX_PEAK
    claims[f"{name}: {time:.2f} of the time without a budget"] = time <= MAX_TIME
    if name not in WITHOUT_BUDGET:
        kept = others[-1]["peak_bytes"]
        statement = f"{name}: peaks at {kept / MIB:.0f} MiB with a budget of {budget_bytes / MIB:.0f} MiB, plain at "
        claims[f"{statement}{plain['peak_bytes'] / MIB:.0f} MiB"] = kept <= budget_bytes
    return claims


def hard_limit() -> tuple[dict[str, Any], dict[str, bool]]:
    """Run the loop under a limit that plain Python cannot finish it in."""
    words = script("own_loop", LIMITED)
    free, plain, run = finished(words), measure(words, LIMIT_BYTES), measure(ours(words), LIMIT_BYTES)
    error = furthest(run["losses"], free["losses"])
    result = {"limit_bytes": LIMIT_BYTES, "plain_code": plain["code"], "code": run["code"], "loss_error": error}
    return result, {
        f"Hard limit of {LIMIT_BYTES // 10**6} MB: plain Python runs out of memory": plain["code"] != 0
        and "can't allocate memory" in plain["text"],
        f"Hard limit of {LIMIT_BYTES // 10**6} MB: oomguard run finishes": run["code"] == 0,
        f"Hard limit: the losses differ by at most {error:.1e}": error <= MAX_LOSS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="run as small as possible; store nothing")
    args = parser.parse_args()
    rounds = 1 if args.smoke else args.rounds
    names = [name for name, (_, package, _) in CASES.items() if package is None or importlib.util.find_spec(package)]
    for name in CASES.keys() - {*names}:
        print(f"{name} is left out: {CASES[name][1]} is not installed")
    start = start_seconds(rounds)
    print(f"start: {start:.2f} s")
    print_row(("", "", "peak", "processor", "time"), WIDTHS)
    rows, claims = list[dict[str, Any]](), dict[str, bool]()
    for name in names:
        more, statements = measure_script(name, rounds, start, smoke=args.smoke)
        rows += more
        claims |= statements
    limited, statements = hard_limit()
    whole = not args.smoke and rounds >= 3 and len(names) == len(CASES)
    result = {"rows": rows, "start_seconds": start, "limited": limited, "rounds": rounds}
    packages = tuple(package for package in ("keras", "pytorch-lightning") if not args.smoke)
    publish("scripts_run_unchanged", result, claims | statements, whole=whole, packages=packages)


if __name__ == "__main__":
    main()
