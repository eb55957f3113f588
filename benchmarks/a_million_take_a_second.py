"""Claim: a million candidates of one spec are estimated in under a second, hundreds of times faster than one by one.

    python benchmarks/a_million_take_a_second.py [ROUNDS] [--smoke]

One process alternates between two measurements: it estimates a million random candidates as arrays, and the first
thousand of them one by one. Both must give the same bytes.
"""

import argparse
import time
from statistics import median

import numpy as np
from results import publish

import oomguard
from oomguard._spec.candidate import Candidates

COUNT, SINGLE, ROUNDS = 1_000_000, 1_000, 5
SPEC = oomguard.Spec(cell="lstm", seq=10_000)
BUDGET_BYTES = 8 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=ROUNDS)
    parser.add_argument(
        "--smoke", action="store_true", help="check only that the bytes are the same, with few candidates"
    )
    args = parser.parse_args()
    rounds, count, single = (1, 20_000, 100) if args.smoke else (args.rounds, COUNT, SINGLE)
    rng = np.random.default_rng(0)
    candidates = Candidates(microbatch=rng.integers(1, 33, count), segments=rng.integers(1, 1000, count))
    array_seconds, single_seconds, same = [], [], True
    for _ in range(rounds):
        began = time.perf_counter()
        estimates = oomguard.estimate(SPEC, candidates, device="cpu", budget_bytes=BUDGET_BYTES)
        array_seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        totals = []
        for microbatch, segments in zip(candidates.microbatch[:single], candidates.segments[:single], strict=True):  # type: ignore[index]
            knobs = {"microbatch": int(microbatch), "segments": int(segments)}
            totals.append(oomguard.estimate(SPEC, device="cpu", budget_bytes=BUDGET_BYTES, **knobs).total_bytes)
        single_seconds.append((time.perf_counter() - began) * count / single)
        same &= totals == estimates.total_bytes[:single].tolist()
    array_median, single_median = median(array_seconds), median(single_seconds)
    ratio = single_median / array_median
    print(
        f"{'as arrays':<12} {array_median:.2f} s\n{'one by one':<12} {single_median:.0f} s\n{'ratio':<12} {ratio:.0f}"
    )
    claims = {"the same bytes as one by one": same}
    if not args.smoke:
        claims[f"in under a second ({array_median:.2f} s)"] = array_median < 1
    result = {"candidates": count, "seconds": array_median, "ratio": ratio, "rounds": rounds}
    publish("a_million_take_a_second", result, claims, whole=count == COUNT and rounds >= ROUNDS)


if __name__ == "__main__":
    main()
