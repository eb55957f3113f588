"""Claim: a cold `oomguard estimate --json` takes at most 0.4 of the time of `python -c "import torch"`.

    python benchmarks/estimate_starts_fast.py [ROUNDS] [--smoke]

Both run as new processes, by turns, so that a busy machine slows them alike; the ratio of the medians counts.
"""

import argparse
import subprocess
import sys
import time
from statistics import median

from results import publish

OURS = [sys.executable, "-m", "oomguard", "estimate", "--model", "lstm", "--seq", "10000", "--json"]
THEIRS = [sys.executable, "-c", "import torch"]
MOST, ROUNDS = 0.4, 7


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    code = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
    assert code in (0, 1), command  # that it does not fit here is an answer too
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=ROUNDS)
    parser.add_argument("--smoke", action="store_true", help="one round, from a cold start")
    given = parser.parse_args()
    rounds = 1 if given.smoke else given.rounds
    for command in () if given.smoke else (OURS, THEIRS):
        seconds(command)  # the files come into the cache for both
    times = [(seconds(OURS), seconds(THEIRS)) for _ in range(rounds)]
    ours, theirs = median(one for one, _ in times), median(other for _, other in times)
    for name, value in (("oomguard estimate", ours), ("import torch", theirs), ("ratio", ours / theirs)):
        print(f"{name:<20} {value:.3f}")
    ratio = ours / theirs
    claims = {} if given.smoke else {f"at most {MOST} of the time of importing torch ({ratio:.2f})": ratio <= MOST}
    result = {"ratio": ratio, "seconds": ours, "torch_seconds": theirs, "rounds": rounds}
    publish("estimate_starts_fast", result, claims, whole=rounds >= ROUNDS)


if __name__ == "__main__":
    main()
