"""Run the benchmarks, each in its own process, and print for each whether its claim held and how long it took.

    python benchmarks/run.py [NAME...]      # run with fewer cases; all benchmarks take half an hour
    python benchmarks/run.py --whole        # run all cases of the claims; this takes hours
    python benchmarks/run.py --smoke        # run as small as possible, to check that they work; this takes minutes

The exit code is 1 if a claim did not hold. A smoke run checks only statements that hold at any size, never times.
Therefore two smoke runs go in parallel. They show output only of benchmarks that failed, and skip rivals that are not
installed.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
SMALLER: dict[str, tuple[str, ...]] = {
    "a_killed_search_goes_on": ("4",),
    "bad_input_is_refused": ("--seconds", "5"),
    "cost_grows_gently": ("--longest", "100000"),
    "data_stay_on_disk": ("1",),
    "estimates_track_peaks": ("--calibrated", "4"),
    "first_hour": ("operations", "keras"),
    "fleets_take_seconds": ("--most", "10000"),
    "it_learns": ("30",),
    "long_sequences_fit": ("--budgets", "256MiB"),
    "own_models_go_in_segments": ("1", "--cases", "2"),
    "plans_are_fast": ("--cases", "1", "--every", "12", "--samplers", "random"),
    "plans_do_not_run_out": ("3",),
    "probes_hurt_nobody": ("30",),
    "processes_end_together": ("6",),
    "recovers_without_loss": ("5",),
    "scripts_run_unchanged": ("1",),
    "search_needs_few_probes": ("1",),
    "segments_cost_little": ("1", "--cases", "3"),
    "studies_do_not_run_out": ("20",),
    "task_batches_are_found": ("2",),
    "task_estimates_track_peaks": ("word model", "speech", "forecast", "attention"),
    "training_costs_nothing": ("2",),
    "training_survives_an_hour": ("--minutes", "2"),
}
"""Arguments that make a benchmark take two or three minutes, for those that take longer by default."""
WHOLE: dict[str, tuple[str, ...]] = {
    "estimates_track_peaks": ("--measure", "20", "--calibrated", "50", "--seed", str(os.getpid()))
}
"""Arguments of a whole run, for benchmarks whose default is not a whole run."""
PARALLEL = 2
"""Smoke runs at the same time."""


class Result(NamedTuple):
    """The result of one benchmark."""

    name: str
    code: int
    seconds: float
    output: str
    """What the benchmark printed, or empty if it printed directly to the terminal."""


def names() -> list[str]:
    """List all benchmarks: the files that begin with a claim."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.read_text("utf-8").startswith('"""Claim:'))


def missing() -> list[str]:
    """List the packages of the extra `bench` that are not installed."""
    packages = []
    for line in requires("oomguard") or []:
        name, _, extra = line.partition(";")
        name = re.split(r"[^\w-]", name)[0]
        try:
            version(name)
        except PackageNotFoundError:
            packages += [name] if "bench" in extra else []
    return packages


def run(name: str, arguments: tuple[str, ...], *, quiet: bool) -> Result:
    """Run one benchmark. With `quiet`, its output is captured."""
    began = time.monotonic()
    if not quiet:
        print(f"\n# {' '.join([name, *arguments])}\n", flush=True)
    done = subprocess.run(
        [sys.executable, str(HERE / f"{name}.py"), *arguments],
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
        env=os.environ | {"OOMGUARD_CACHE": ""},
    )
    return Result(name, done.returncode, time.monotonic() - began, done.stdout or "")


def smoke(selected: Iterable[str]) -> Iterator[Result]:
    """Make smoke runs, a few at the same time."""
    with ThreadPoolExecutor(PARALLEL) as lanes:
        yield from lanes.map(lambda name: run(name, ("--smoke",), quiet=True), selected)


def show(done: Result) -> None:
    """Print one line about a benchmark and, if it failed, its captured output."""
    print(f"{'FAIL' if done.code else 'PASS'}  {done.seconds:>7.1f} s  {done.name}", flush=True)
    for line in done.output.splitlines() if done.code else ():
        print(f"                 {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--whole", action="store_true", help="run all cases of the claims")
    size.add_argument("--smoke", action="store_true", help="run as small as possible")
    args = parser.parse_args()
    unknown = {*args.names} - {*names()}
    if unknown:
        parser.error(f"Unknown benchmark: {', '.join(sorted(unknown))}. Choose from: {', '.join(names())}.")
    selected, began, results = args.names or names(), time.monotonic(), list[Result]()
    if args.smoke:
        if left_out := missing():
            print(f"Skipped, because they are not installed (extra `bench`): {', '.join(left_out)}")
        for done in smoke(selected):
            show(done)
            results.append(done)
    else:
        arguments = WHOLE if args.whole else SMALLER
        results = [run(name, arguments.get(name, ()), quiet=False) for name in selected]
        print()
        for done in results:
            show(done)
    failed = sum(done.code != 0 for done in results)
    print(f"{len(results) - failed} of {len(results)} claims hold; total time {time.monotonic() - began:.0f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
