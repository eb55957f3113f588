"""Claim: 1,000 jobs on 20 cards are fitted in the time of 5 estimates for each pair, and 100,000 in that of 1.25.

    python benchmarks/fleets_take_seconds.py [--most N] [--smoke]

The jobs are grids of 100 models with 10 batches and 100 lengths; more than half of them do not fit in one piece on the
smallest cards. Times are CPU seconds of one thread, in units of one estimate that is measured in turns with them, and
the exponent is that of the time over the number of jobs. Some pairs are compared with plans for the same card: both
must choose the same candidate with the same peak and margin.
"""

import argparse
import itertools
import math
import random
import time
from statistics import median
from typing import Any

from results import print_row, publish

import oomguard
from oomguard._device.find import find_target
from oomguard._estimate import cards
from oomguard._estimate.breakdown import estimate_step
from oomguard._fleet.fit import Request, fit_all
from oomguard._fleet.pairs import Pairs
from oomguard._plan.find import Question, find_plan
from oomguard._spec.candidate import make_candidate

COUNTS = (100, 1_000, 10_000, 100_000)
MOST_UNITS = {1_000: 100_000, 100_000: 2_500_000}
"""Time of some numbers of jobs in units of one estimate, at most: 12 s and 5 min where one takes 0.12 ms."""
CARDS = (
    "p100-16gb", "v100-16gb", "v100-32gb", "rtx-2080-ti", "t4", "rtx-3060", "rtx-3080", "rtx-3090", "rtx-a6000",
    "a10g-24gb", "a100-40gb", "a100-80gb", "rtx-4070", "rtx-4090", "l4", "l40s-48gb", "h100-80gb", "h200-141gb",
    "b200-180gb", "rtx-5090",
)  # fmt: skip
CELLS, LAYERS, HIDDEN = ("lstm", "gru"), (1, 2, 3, 4, 6), (80, 112, 160, 200, 320, 512, 640, 1000, 1500, 2000)
BATCHES = tuple(2**power for power in range(3, 13))
LENGTHS = tuple(round(100 * 10 ** (index / 30)) for index in range(100))
WIDTHS = (8, 10, 12, 14, 8)
COMPARED = 40  # pairs that are compared with plans


def make_jobs(count: int) -> list[Request]:
    """Draw jobs of the grid, always the same."""
    grid = [*itertools.product(CELLS, LAYERS, HIDDEN, BATCHES, LENGTHS)]
    random.Random(0).shuffle(grid)
    names = ("cell", "layers", "hidden", "batch", "seq")
    chosen: list[dict[str, Any]] = [dict(zip(names, values, strict=True)) for values in grid[:count]]
    return [Request(spec=oomguard.Spec(**fields)) for fields in chosen]


def estimate_seconds(times: int = 300) -> float:
    """Measure one estimate."""
    spec, target = oomguard.Spec(cell="lstm", seq=10_000), find_target("t4")
    candidate = make_candidate(spec)
    began = time.process_time()
    for _ in range(times):
        estimate_step(spec, candidate, target)
    return (time.process_time() - began) / times


def measure(count: int) -> tuple[dict[str, float], list[Request], Pairs]:
    """Fit some jobs, between two measurements of one estimate."""
    jobs, pairs = make_jobs(count), Pairs(count, len(CARDS))
    before = estimate_seconds()
    began = time.process_time()
    fit_all(jobs, [*map(cards.card, CARDS)], pairs, range(count))
    seconds = time.process_time() - began
    unit = median([before, estimate_seconds()])
    return {"jobs": count, "seconds": seconds, "unit_seconds": unit, "units": seconds / unit}, jobs, pairs


def agrees(jobs: list[Request], pairs: Pairs) -> bool:
    """Compare some pairs with plans for the same card."""
    rng = random.Random(1)
    for _ in range(COMPARED):
        job, card = rng.randrange(len(jobs)), rng.randrange(len(CARDS))
        spec = jobs[job].spec
        if not pairs.fits[job, card]:
            continue
        plan = find_plan(Question(spec=spec, devices=(CARDS[card],)))
        found = pairs.candidate(job, card, spec.batch), pairs.peak_bytes[job, card], pairs.margin_bytes[job, card]
        if found != (plan.candidate, plan.expected.peak_bytes, plan.expected.margin_bytes):
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=COUNTS[-1], help="the largest number of jobs")
    parser.add_argument("--smoke", action="store_true", help="check only that candidates are those of plans")
    args = parser.parse_args()
    counts = (50,) if args.smoke else [count for count in COUNTS if count <= args.most]
    print_row(("jobs", "seconds", "per job ms", "in estimates", "in pieces"), WIDTHS)
    lines, claims, same = [], dict[str, bool](), True
    for count in counts:
        line, jobs, pairs = measure(count)
        pieces = float((pairs.column("segments") > 1).mean())
        lines.append(line | {"in_pieces": pieces})
        cells = f"{line['seconds']:.1f}", f"{1e3 * line['seconds'] / count:.2f}", f"{line['units']:,.0f}"
        print_row((f"{count:,}", *cells, f"{pieces:.0%}"), WIDTHS)
        if count <= 1_000:
            same &= agrees(jobs, pairs)
    claims["the candidates, peaks and margins are those of plans"] = same
    exponent = None
    if not args.smoke and len(lines) > 1:
        first, last = lines[0], lines[-1]
        exponent = math.log(last["units"] / first["units"]) / math.log(last["jobs"] / first["jobs"])
        claims[f"time grows no faster than the jobs (exponent {exponent:.2f})"] = exponent <= 1.05
        for line in lines:
            if (most := MOST_UNITS.get(int(line["jobs"]))) is not None:
                statement = f"{line['jobs']:,} jobs take at most {most:,} estimates ({line['units']:,.0f})"
                claims[statement] = line["units"] <= most
    result = {"cards": len(CARDS), "lines": lines, "exponent": exponent}
    publish("fleets_take_seconds", result, claims, whole=not args.smoke and args.most >= COUNTS[-1])


if __name__ == "__main__":
    main()
