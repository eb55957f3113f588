"""Claim: a million candidates of one spec are estimated in under a second, hundreds of times faster than one by one.

    python benchmarks/a_million_take_a_second.py [ROUNDS]

Times a million random candidates as arrays against a thousand of the same as single ones, in one process, by turns.
"""

import json
import sys
import time
from statistics import median

import numpy as np

import oomguard
from oomguard.candidate import Candidates

COUNT, SINGLE = 1_000_000, 1_000
SPEC = oomguard.Spec(cell="lstm", seq=10_000)
BUDGET_BYTES = 8 << 30


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    pick = np.random.default_rng(0)
    many = Candidates(microbatch=pick.integers(1, 33, COUNT), segments=pick.integers(1, 1000, COUNT))
    together, alone = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        oomguard.estimate(SPEC, many, device="cpu", budget_bytes=BUDGET_BYTES)
        together.append(time.perf_counter() - began)
        began = time.perf_counter()
        for microbatch, segments in zip(many.microbatch[:SINGLE], many.segments[:SINGLE], strict=True):  # type: ignore[index]
            knobs = {"microbatch": int(microbatch), "segments": int(segments)}
            oomguard.estimate(SPEC, device="cpu", budget_bytes=BUDGET_BYTES, **knobs)
        alone.append((time.perf_counter() - began) * COUNT / SINGLE)
    ours, theirs = median(together), median(alone)
    print(f"{'as arrays':<12} {ours:.2f} s\n{'one by one':<12} {theirs:.0f} s\n{'ratio':<12} {theirs / ours:.0f}")
    print(json.dumps({"claim": "a_million_take_a_second", "seconds": ours, "ratio": theirs / ours, "rounds": rounds}))


if __name__ == "__main__":
    main()
