"""Claim: 100 probes of random candidates, a third of them far over budget, all return a verdict and leave nothing
behind.

    python benchmarks/probes_hurt_nobody.py [COUNT] [--smoke]

The budget is 640 MiB for the whole child process. The benchmark checks that no exception is raised, that no process is
left over, that the parent grows by at most 20 MiB, that every candidate far over the budget gets the verdict OOM or
OVER, and that every other one gets FITS.
"""

import argparse
import random
import time
from collections import Counter
from typing import Any

import psutil
from results import publish

from oomguard._core.units import MIB
from oomguard._estimate.breakdown import estimate_step
from oomguard._probe.runner import Runner
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.read import make_spec
from oomguard._spec.spec import Spec

BUDGET_BYTES = 640 * MIB
FAR = 3
"""A candidate is far over budget if its estimated growth is at least this multiple of what the budget leaves for it."""
MAX_GROWTH_BYTES = 20 * MIB
COUNT = 100


def draw(rng: random.Random, *, far: bool) -> tuple[Spec, Candidate]:
    """Draw a random spec and candidate that is far over the budget, or well within it."""
    while True:
        fields: dict[str, Any] = {
            "cell": rng.choice(["rnn", "gru", "lstm"]),
            "seq": rng.choice([50, 200, 500, 2000, 20_000] if far else [20, 50, 100, 200, 400]),
            "features": rng.choice([4, 32]),
            "hidden": rng.choice([16, 64, 128, 256]),
            "layers": rng.choice([1, 2, 3]),
            "batch": rng.choice([4, 16, 64, 256]),
            "bidirectional": rng.random() < 0.2,
            "head": rng.choice(["per-step", "last-step"]),
        }
        spec = make_spec(fields)
        knobs = {"microbatch": rng.randint(1, spec.batch), "segments": rng.choice([1, 1, 4, 16])}
        candidate = make_candidate(spec, threads=1, **knobs)
        estimate = estimate_step(spec, candidate)
        ratio = estimate.growth_bytes / (BUDGET_BYTES - estimate.terms["runtime"])
        if (ratio >= FAR) if far else (ratio < 0.5 and spec.steps * candidate.microbatch < 20_000):
            return spec, candidate


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=COUNT)
    parser.add_argument("--smoke", action="store_true", help="run three probes")
    args = parser.parse_args()
    count = 3 if args.smoke else args.count
    rng = random.Random(0)
    verdicts: Counter[tuple[str, str]] = Counter()
    wrong, before, began = [], 0, time.monotonic()
    with Runner("cpu", timeout=120, seconds=0.2) as runner:
        for number in range(count):
            far = number % 3 == 2
            spec, candidate = draw(rng, far=far)
            record = runner.probe(spec, candidate, budget_bytes=BUDGET_BYTES)
            kind = "far over" if far else "within"
            verdicts[kind, record.verdict.name] += 1
            if record.verdict.name not in (("OOM", "OVER") if far else ("FITS",)):
                wrong.append((spec, candidate, record.verdict.name, record.message))
            if number == min(4, count - 1):  # by then the parent has imported everything that it needs
                before = resident_bytes()
    growth_bytes = resident_bytes() - before
    left = [process.pid for process in psutil.Process().children(recursive=True)]

    for (kind, name), times in sorted(verdicts.items()):
        print(f"{kind:<10} {name:<12} {times:>4}")
    for probe in wrong:
        print(*probe)
    counts = {f"{kind}, {name}": times for (kind, name), times in sorted(verdicts.items())}
    result = {"probes": count, "verdicts": counts, "parent_growth_bytes": growth_bytes}
    claims = {
        f"a verdict for each, none wrong ({len(wrong)})": not wrong,
        f"no process is left ({len(left)})": not left,
        f"the parent grew by at most {MAX_GROWTH_BYTES // MIB} MiB ({growth_bytes / MIB:.1f})": growth_bytes
        <= MAX_GROWTH_BYTES,
    }
    result["seconds"] = round(time.monotonic() - began, 1)
    publish("probes_hurt_nobody", result, claims, whole=count >= COUNT)


if __name__ == "__main__":
    main()
