"""Claim: 100 probes of random candidates, a third of them far over budget, all return a verdict and leave nothing.

    python benchmarks/probes_hurt_nobody.py [COUNT] [--smoke]

The budget is 640 MiB for the whole child. Asserted: no exception, no process left over, the parent grows by at most
20 MiB, every candidate that is far over the budget is caught (OOM or OVER), and every other one FITS.
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
"""Far over budget: the estimated growth is at least so many times what the budget leaves over the runtime."""
MOST_GROWTH_BYTES = 20 * MIB
COUNT = 100


def draw(dice: random.Random, *, far: bool) -> tuple[Spec, Candidate]:
    """A random spec and candidate, far over the budget or not."""
    while True:
        fields: dict[str, Any] = {
            "cell": dice.choice(["rnn", "gru", "lstm"]),
            "seq": dice.choice([50, 200, 500, 2000, 20_000] if far else [20, 50, 100, 200, 400]),
            "features": dice.choice([4, 32]),
            "hidden": dice.choice([16, 64, 128, 256]),
            "layers": dice.choice([1, 2, 3]),
            "batch": dice.choice([4, 16, 64, 256]),
            "bidirectional": dice.random() < 0.2,
            "head": dice.choice(["per-step", "last-step"]),
        }
        spec = make_spec(fields)
        knobs = {"microbatch": dice.randint(1, spec.batch), "segments": dice.choice([1, 1, 4, 16])}
        candidate = make_candidate(spec, threads=1, **knobs)
        found = estimate_step(spec, candidate)
        times = found.growth_bytes / (BUDGET_BYTES - found.terms["runtime"])
        if (times >= FAR) if far else (times < 0.5 and spec.steps * candidate.microbatch < 20_000):
            return spec, candidate


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=COUNT)
    parser.add_argument("--smoke", action="store_true", help="three probes")
    given = parser.parse_args()
    count = 3 if given.smoke else given.count
    dice = random.Random(0)
    verdicts: Counter[tuple[str, str]] = Counter()
    wrong, before, began = [], 0, time.monotonic()
    with Runner("cpu", timeout=120, seconds=0.2) as runner:
        for number in range(count):
            far = number % 3 == 2
            spec, candidate = draw(dice, far=far)
            record = runner.probe(spec, candidate, budget_bytes=BUDGET_BYTES)
            kind = "far over" if far else "within"
            verdicts[kind, record.verdict.name] += 1
            if record.verdict.name not in (("OOM", "OVER") if far else ("FITS",)):
                wrong.append((spec, candidate, record.verdict.name, record.message))
            if number == min(4, count - 1):  # by then everything that the parent imports is imported
                before = resident_bytes()
    growth_bytes = resident_bytes() - before
    left = [one.pid for one in psutil.Process().children(recursive=True)]

    for (kind, name), times in sorted(verdicts.items()):
        print(f"{kind:<10} {name:<12} {times:>4}")
    for one in wrong:
        print(*one)
    found = {f"{kind}, {name}": times for (kind, name), times in sorted(verdicts.items())}
    result = {"probes": count, "verdicts": found, "parent_growth_bytes": growth_bytes}
    claims = {
        f"a verdict for each, none wrong ({len(wrong)})": not wrong,
        f"no process is left ({len(left)})": not left,
        f"the parent grew by at most {MOST_GROWTH_BYTES // MIB} MiB ({growth_bytes / MIB:.1f})": growth_bytes
        <= MOST_GROWTH_BYTES,
    }
    result["seconds"] = round(time.monotonic() - began, 1)
    publish("probes_hurt_nobody", result, claims, whole=count >= COUNT)


if __name__ == "__main__":
    main()
