"""Run the benchmarks, each in a process of its own, and say of each whether its claim held and what it took.

    python benchmarks/run.py [NAME...]      # one after the other, smaller than whole: half an hour for all
    python benchmarks/run.py --whole        # as the claims have it: hours
    python benchmarks/run.py --smoke        # minutes: does each one work, and does hold what holds at any size?

Ends with exit code 1 if a claim did not hold. Smoke runs go two at a time, since no time counts there, and show only
what failed. Rivals that are not installed are skipped there.
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
    "cost_grows_gently": ("--longest", "100000"),
    "data_stay_on_disk": ("1",),
    "estimates_track_peaks": ("--calibrated", "5"),
    "it_learns": ("30",),
    "long_sequences_fit": ("--budgets", "256MiB"),
    "plans_are_fast": ("--cases", "1", "--every", "24"),
    "plans_do_not_run_out": ("3",),
    "probes_hurt_nobody": ("30",),
    "recovers_without_loss": ("5",),
    "search_needs_few_probes": ("1",),
    "segments_cost_little": ("1", "--cases", "3"),
    "training_costs_nothing": ("2",),
}
"""Arguments of a run that takes two or three minutes, where the default takes more."""
WHOLE: dict[str, tuple[str, ...]] = {
    "estimates_track_peaks": ("--measure", "20", "--calibrated", "30", "--seed", str(os.getpid()))
}
"""Arguments of a whole run, where that is not the default."""
LANES = 2


class Done(NamedTuple):
    """A benchmark that has ended."""

    name: str
    code: int
    seconds: float
    words: str
    """What it printed, if it was not shown at once."""


def names() -> list[str]:
    """All benchmarks: the files that begin with a claim."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.read_text("utf-8").startswith('"""Claim:'))


def missing() -> list[str]:
    """Packages of the extra `bench` that are not installed."""
    found = []
    for line in requires("oomguard") or []:
        name, _, extra = line.partition(";")
        name = re.split(r"[^\w-]", name)[0]
        try:
            version(name)
        except PackageNotFoundError:
            found += [name] if "bench" in extra else []
    return found


def run(name: str, arguments: tuple[str, ...], *, quiet: bool) -> Done:
    """One benchmark to its end."""
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
    return Done(name, done.returncode, time.monotonic() - began, done.stdout or "")


def smoke(wanted: Iterable[str]) -> Iterator[Done]:
    """Small runs, some at a time."""
    with ThreadPoolExecutor(LANES) as lanes:
        yield from lanes.map(lambda name: run(name, ("--smoke",), quiet=True), wanted)


def show(done: Done) -> None:
    """One line and, if it failed unseen, all that it printed."""
    print(f"{'FAIL' if done.code else 'PASS'}  {done.seconds:>7.1f} s  {done.name}", flush=True)
    for line in done.words.splitlines() if done.code else ():
        print(f"                 {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--whole", action="store_true", help="as the claims have it")
    size.add_argument("--smoke", action="store_true", help="as small as can be")
    given = parser.parse_args()
    unknown = {*given.names} - {*names()}
    if unknown:
        parser.error(f"There is no {', '.join(sorted(unknown))}. There are: {', '.join(names())}.")
    wanted, began, ended = given.names or names(), time.monotonic(), list[Done]()
    if given.smoke:
        if left_out := missing():
            print(f"skipped, since they are not installed (extra `bench`): {', '.join(left_out)}")
        for done in smoke(wanted):
            show(done)
            ended.append(done)
    else:
        arguments = WHOLE if given.whole else SMALLER
        ended = [run(name, arguments.get(name, ()), quiet=False) for name in wanted]
        print()
        for done in ended:
            show(done)
    failed = sum(done.code != 0 for done in ended)
    print(f"{len(ended) - failed} of {len(ended)} hold, {time.monotonic() - began:.0f} s in all")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
