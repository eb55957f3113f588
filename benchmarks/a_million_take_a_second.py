"""Claim: a million candidates of one spec are estimated in under a second, hundreds of times faster than one by one.

    python benchmarks/a_million_take_a_second.py [ROUNDS] [--smoke]

Times a million random candidates as arrays against a thousand of the same as single ones, in one process, by turns.
Both must give the same bytes.
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
        "--smoke", action="store_true", help="few candidates, one round: only that the bytes are the same"
    )
    given = parser.parse_args()
    rounds, count, single = (1, 20_000, 100) if given.smoke else (given.rounds, COUNT, SINGLE)
    pick = np.random.default_rng(0)
    many = Candidates(microbatch=pick.integers(1, 33, count), segments=pick.integers(1, 1000, count))
    together, alone, same = [], [], True
    for _ in range(rounds):
        began = time.perf_counter()
        found = oomguard.estimate(SPEC, many, device="cpu", budget_bytes=BUDGET_BYTES)
        together.append(time.perf_counter() - began)
        began = time.perf_counter()
        ones = []
        for microbatch, segments in zip(many.microbatch[:single], many.segments[:single], strict=True):  # type: ignore[index]
            knobs = {"microbatch": int(microbatch), "segments": int(segments)}
            ones.append(oomguard.estimate(SPEC, device="cpu", budget_bytes=BUDGET_BYTES, **knobs).total_bytes)
        alone.append((time.perf_counter() - began) * count / single)
        same &= ones == found.total_bytes[:single].tolist()
    ours, theirs = median(together), median(alone)
    print(f"{'as arrays':<12} {ours:.2f} s\n{'one by one':<12} {theirs:.0f} s\n{'ratio':<12} {theirs / ours:.0f}")
    claims = {"the same bytes as one by one": same}
    if not given.smoke:
        claims[f"in under a second ({ours:.2f} s)"] = ours < 1
    result = {"candidates": count, "seconds": ours, "ratio": theirs / ours, "rounds": rounds}
    publish("a_million_take_a_second", result, claims, whole=count == COUNT and rounds >= ROUNDS)


if __name__ == "__main__":
    main()
