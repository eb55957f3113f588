"""Claim: a cold `oomguard estimate --json` takes at most 0.4 of the time of `python -c "import torch"`.

    python benchmarks/estimate_starts_fast.py [ROUNDS] [--smoke]

The two commands run in turns, each as a new process, so that a busy machine slows both alike. The claim is about the
ratio of their median times.
"""

import argparse
import subprocess
import sys
import time
from statistics import median

from results import publish

ESTIMATE = [sys.executable, "-m", "oomguard", "estimate", "--model", "lstm", "--seq", "10000", "--json"]
IMPORT_TORCH = [sys.executable, "-c", "import torch"]
MAX_RATIO, ROUNDS = 0.4, 7


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    code = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
    assert code in (0, 1), command  # 1 means that the step does not fit, which is a valid answer
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=ROUNDS)
    parser.add_argument("--smoke", action="store_true", help="run one round from a cold start")
    args = parser.parse_args()
    rounds = 1 if args.smoke else args.rounds
    for command in () if args.smoke else (ESTIMATE, IMPORT_TORCH):
        seconds(command)  # loads the files of both commands into the page cache
    times = [(seconds(ESTIMATE), seconds(IMPORT_TORCH)) for _ in range(rounds)]
    estimate_seconds, torch_seconds = median(own for own, _ in times), median(other for _, other in times)
    ratio = estimate_seconds / torch_seconds
    for name, value in (("oomguard estimate", estimate_seconds), ("import torch", torch_seconds), ("ratio", ratio)):
        print(f"{name:<20} {value:.3f}")
    statement = f"at most {MAX_RATIO} of the time of importing torch ({ratio:.2f})"
    claims = {} if args.smoke else {statement: ratio <= MAX_RATIO}
    result = {"ratio": ratio, "seconds": estimate_seconds, "torch_seconds": torch_seconds, "rounds": rounds}
    publish("estimate_starts_fast", result, claims, whole=rounds >= ROUNDS)


if __name__ == "__main__":
    main()
