"""Claim: a plan is at least 95 % as fast as the best of an exhaustive grid, with at most 1/8 of the grid's runs.

    python benchmarks/plans_are_fast.py [--cases N | --case I] [--every K] [--smoke]

The benchmark takes about 40 minutes. It has 3 cases: in one the plain step fits the budget, in two it does not. A probe
asserts this. `--every 8` measures every eighth candidate of the grid. `--smoke` measures a few candidates of one tiny
case in about a minute and claims nothing.

The grid combines microbatch, pieces (whole, segments, chunks), engine, threads and allocator (`tight`, `fast`,
`system`). It has 360, 360 and 180 candidates. Each candidate runs within the
budget. A candidate is counted as not fitting, without a run, if its uncalibrated growth is more than twice what the
budget leaves over the runtime.

A plan must stay within the budget for 20 steps (plans_do_not_run_out.py), so a candidate of the grid must do the same.
The fastest candidates run for 20 whole steps, each in its own child process, until two have stayed within the budget.
`dropped` lists the faster candidates that did not.

The fastest of 300 measurements is partly a matter of luck. Therefore the plan and these two candidates are measured
again in turns, each in its own child process, in many short rounds. The median of the rounds counts, and the faster of
the two candidates is "the best of the grid". The column `over` counts the rounds in which a candidate did not stay
within the budget.

The same rounds also measure what a user of Lightning would get. Lightning's Tuner.scale_batch_size(mode="binsearch")
finds a microbatch. (finders.py runs it with a limit at which allocations fail beyond the bytes that the largest fitting
microbatch commits.) The candidate is the largest divisor of the batch up to that microbatch, with accumulation to the
batch and PyTorch's defaults otherwise. oomguard's code runs it like the others, so that candidates are compared and not
training loops. The claim is not about it.
"""

import argparse
import itertools
import time
from contextlib import ExitStack
from statistics import median
from typing import Any

from finders import find, is_installed
from results import print_row, publish
from search_needs_few_probes import BATCH, largest

from oomguard import Runner, find_feasible_config
from oomguard._core.units import MIB
from oomguard._device.cpu import cores
from oomguard._estimate.breakdown import estimate_step
from oomguard._probe.record import Record
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.read import make_spec
from oomguard._spec.spec import Spec

CASES: tuple[tuple[dict[str, Any], int, bool], ...] = (
    ({"cell": "lstm", "seq": 400, "features": 16, "hidden": 128, "layers": 1, "batch": 32}, 900 * MIB, True),
    ({"cell": "lstm", "seq": 600, "features": 16, "hidden": 128, "layers": 2, "batch": 32}, 450 * MIB, False),
    ({"cell": "gru", "seq": 500, "features": 16, "hidden": 128, "layers": 1, "batch": 32}, 400 * MIB, False),
)
"""Fields of the spec, budget, and whether the plain step fits."""
SMOKE: tuple[dict[str, Any], int, bool] = (
    {"cell": "lstm", "seq": 200, "features": 16, "hidden": 64, "layers": 1, "batch": 256}, 420 * MIB, False
)  # fmt: skip
SMOKE_EVERY, SMOKE_ROUNDS, SMOKE_PROBES = 240, 1, 2
MICROBATCHES = (2, 4, 8, 16, 32)
PIECES: tuple[dict[str, Any], ...] = (
    *({"segments": count} for count in (1, 2, 4, 8)),
    *({"segments": count, "recompute": False} for count in (4, 16)),
)
FAR = 2.0
"""A candidate is not run if its estimated growth is more than this multiple of what the budget leaves for it."""
ROUNDS = 15
RUN: dict[str, Any] = {"seconds": 0.3, "steps": 3}
RACE: dict[str, Any] = {"seconds": 0.7, "steps": 20}
HOLD_STEPS, SMOKE_HOLD_STEPS = 20, 1
PROBE_PASSES = 2
"""Passes per step of a probe, at most."""
MIN_SPEED, MAX_RUNS = 0.95, 1 / 8


def grid(spec: Spec) -> list[Candidate]:
    """List the candidates of the grid, in an order in which one child process can run many of them."""
    engines = ("onednn", "native") if spec.cell == "lstm" else ("native",)
    settings = itertools.product(("tight", "system", "fast"), engines, dict.fromkeys((1, cores())))
    return [
        make_candidate(spec, microbatch=rows, allocator=allocator, engine=engine, threads=threads, **pieces)
        for allocator, engine, threads in settings
        for pieces in PIECES
        for rows in MICROBATCHES
    ]


def seconds_per_step(record: Record) -> float:
    """Return the seconds of a step of the whole batch, from the median pass. The fastest pass would favour candidates
    with many short passes.
    """
    assert record.seconds_per_step is not None
    return record.seconds_per_step


def is_far(spec: Spec, candidate: Candidate, budget_bytes: int) -> bool:
    """Tell whether a candidate needs so much that no error of the estimate could make it fit."""
    estimate = estimate_step(spec, candidate)
    return bool(estimate.growth_bytes > FAR * (budget_bytes - estimate.terms["runtime"]))


def run_grid(spec: Spec, candidates: list[Candidate], budget_bytes: int) -> tuple[list[tuple[float, Candidate]], int]:
    """Run the grid. Return the candidates that ran within the budget, fastest first, and the number of runs."""
    near = [candidate for candidate in candidates if not is_far(spec, candidate, budget_bytes)]
    ran = []
    with Runner("cpu", timeout=60) as runner:
        for candidate in near:
            record = runner.probe(spec, candidate, budget_bytes=budget_bytes, **RUN)
            if record.verdict.ran:
                ran.append((seconds_per_step(record), candidate))
    return sorted(ran, key=lambda pair: pair[0]), len(near)


def hold(
    spec: Spec, ran: list[tuple[float, Candidate]], budget_bytes: int, steps: int, count: int
) -> tuple[list[Candidate], list[str]]:
    """Run the fastest candidates for as many passes as `steps` whole steps have, until `count` of them have stayed
    within the budget. Return those, and descriptions of the faster candidates that did not stay within it.
    """
    held: list[Candidate] = []
    dropped = []
    for _, candidate in ran:
        if len(held) == count:
            break
        with Runner("cpu", timeout=120) as runner:
            passes = -(-spec.batch // candidate.microbatch)
            probe_steps = steps * -(-passes // PROBE_PASSES)
            record = runner.probe(spec, candidate, budget_bytes=budget_bytes, seconds=600.0, steps=probe_steps)
        if record.verdict.ran:
            held.append(candidate)
        else:
            dropped.append(f"{describe(candidate)}: {record.verdict.name}")
    return held, dropped


def race(spec: Spec, contenders: dict[str, Candidate], budget_bytes: int, rounds: int) -> dict[str, list[float | None]]:
    """Measure the contenders in turns. Return the seconds per step of each round, None if it exceeded the budget."""
    seconds: dict[str, list[float | None]] = {name: [] for name in contenders}
    with ExitStack() as stack:
        runners = {name: stack.enter_context(Runner("cpu", timeout=60)) for name in contenders}
        for _ in range(rounds):
            for name, runner in runners.items():
                record = runner.probe(spec, contenders[name], budget_bytes=budget_bytes, **RACE)
                seconds[name].append(seconds_per_step(record) if record.verdict.ran else None)
    return seconds


def median_seconds(rounds: list[float | None]) -> float:
    """Return the median of the rounds that stayed within the budget, or inf if none did."""
    return median([seconds for seconds in rounds if seconds is not None] or [float("inf")])


def by_lightning(fields: dict[str, Any], budget_bytes: int) -> tuple[Candidate | None, dict[str, Any]]:
    """Run Lightning's finder. Return the candidate that follows from it, or None without one, and its answer."""
    large = fields | {"batch": BATCH}  # the finder must not be limited by the batch
    maximum, _ = largest(make_spec(large), budget_bytes)
    border = find("plain", large, start=maximum)
    tuned = find("lightning-binsearch", large, start=BATCH, **border)
    if tuned["error"]:
        tuned = find("lightning-binsearch", large, start=BATCH, translate=True, **border) | {"translated": True}
    if not tuned["found"]:
        return None, tuned
    spec = make_spec(fields)
    rows = max(size for size in range(1, min(tuned["found"], spec.batch) + 1) if spec.batch % size == 0)
    return make_candidate(spec, microbatch=rows, allocator="system"), tuned


def describe(candidate: Candidate) -> str:
    """Describe a candidate in a few words."""
    pieces = (
        "whole"
        if candidate.segments == 1
        else f"{candidate.segments} {'segments' if candidate.recompute else 'chunks'}"
    )
    engine, threads = candidate.engine or "PyTorch's engine", candidate.threads or "its"
    words = (f"microbatch {candidate.microbatch}", pieces, engine, f"{threads} threads", candidate.allocator)
    return ", ".join(map(str, words))


def run_case(
    fields: dict[str, Any], budget_bytes: int, *, plain_fits: bool, every: int = 1, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Run one case: the grid, the search, Lightning's finder, and the final measurement in turns."""
    spec = make_spec(fields)
    with Runner("cpu") as runner:
        plain = runner.probe(spec, make_candidate(spec, threads=1), budget_bytes=budget_bytes)
    assert plain.verdict.ran == plain_fits, f"The case is not as hard as it should be: {plain.verdict.name}"
    candidates = grid(spec)[::every]
    began = time.monotonic()
    ran, runs = run_grid(spec, candidates, budget_bytes)
    grid_seconds = time.monotonic() - began
    max_probes = max(1, len(grid(spec)) // 8) if rounds == ROUNDS else SMOKE_PROBES
    plan = find_feasible_config(spec, budget=budget_bytes, max_probes=max_probes, allow="none")
    steps, count = (HOLD_STEPS, 2) if rounds == ROUNDS else (SMOKE_HOLD_STEPS, 1)
    held, dropped = hold(spec, ran, budget_bytes, steps, count)
    contenders, tuned = {"plan": plan.candidate, **dict(zip(("best", "second"), held, strict=False))}, None
    if rounds == ROUNDS and is_installed("pytorch-lightning"):  # search_needs_few_probes.py --smoke runs it instead
        lightning, tuned = by_lightning(fields, budget_bytes)
        contenders |= {"lightning": lightning} if lightning is not None else {}
    step_seconds = race(spec, contenders, budget_bytes, rounds)
    medians = {name: median_seconds(seconds) for name, seconds in step_seconds.items()}
    best = min(medians[name] for name in ("best", "second") if name in medians)
    did_lightning_run = any(step_seconds.get("lightning", ()))
    return {
        **{"spec": fields, "budget_bytes": budget_bytes, "plain_fits": plain_fits, "grid": len(candidates)},
        **{"runs": runs, "ran": len(ran), "grid_seconds": grid_seconds},
        **{"most_probes": max_probes, "probes": plan.probes},
        **{"seconds": plan.seconds, "ended": plan.ended, "ooms": plan.ooms, "tuner": tuned, "dropped": dropped},
        **{"contenders": {name: describe(candidate) for name, candidate in contenders.items()}},
        **{"step_seconds": step_seconds, "speed": best / medians["plan"]},
        **{"lightning_speed": medians["lightning"] / medians["plan"] if did_lightning_run else None},
    }


def show(case: dict[str, Any]) -> None:
    """Print the table of one case."""
    spec = case["spec"]
    model = f"{spec['cell']} {spec['hidden']} × {spec['layers']}, T = {spec['seq']}, batch {spec['batch']}"
    plain = "fits" if case["plain_fits"] else "does not fit"
    print(f"\n{model}, {case['budget_bytes'] // MIB} MiB; the plain step {plain}")
    widths, tuner = (12, 58, 6, 9, 9, 5), case["tuner"]
    print_row(("", "candidate", "runs", "search s", "step ms", "over"), widths)
    costs = {"plan": (case["probes"], case["seconds"]), "best": (case["runs"], case["grid_seconds"])}
    costs |= {"lightning": (tuner["trials"], tuner["seconds"])} if tuner else {}
    for name, candidate in case["contenders"].items():
        runs, searched = costs.get(name, ("", None))
        rounds = case["step_seconds"][name]
        over, step = (
            rounds.count(None),
            "-" if rounds.count(None) == len(rounds) else f"{median_seconds(rounds) * 1e3:.1f}",
        )
        print_row((f"  {name}", candidate, runs, "" if searched is None else f"{searched:.0f}", step, over), widths)
    print(f"  {len(case['dropped'])} faster candidates of the grid did not stay within the budget for 20 steps")
    if tuner:
        answer = f"found microbatch {tuner['found']}" if tuner["found"] else f"found nothing: {tuner['error']}"
        print(f"  Lightning's finder {answer}; {tuner['ooms']} of its trials ran out of memory")
    print(f"  the plan is {case['speed']:.1%} as fast as the best of the grid", flush=True)
    if case["lightning_speed"]:
        print(f"  the plan is {case['lightning_speed']:.1%} as fast as the candidate of Lightning's finder", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=len(CASES), help="run only the first CASES cases")
    parser.add_argument("--case", type=int, choices=range(1, len(CASES) + 1), help="run only this case")
    parser.add_argument("--every", type=int, default=1, help="run only every EVERYth candidate of the grid")
    parser.add_argument("--smoke", action="store_true", help="run one tiny case with the packages that are installed")
    args = parser.parse_args()
    packages = ("pytorch-lightning",) if is_installed("pytorch-lightning") else ()
    if args.smoke:
        fields, budget_bytes, plain_fits = SMOKE
        case = run_case(fields, budget_bytes, plain_fits=plain_fits, every=SMOKE_EVERY, rounds=SMOKE_ROUNDS)
        show(case)
        publish("plans_are_fast", {"cases": [case]}, {}, whole=False, packages=packages)
    finished = []
    for fields, budget_bytes, plain_fits in CASES[: args.cases] if args.case is None else [CASES[args.case - 1]]:
        finished.append(run_case(fields, budget_bytes, plain_fits=plain_fits, every=args.every))
        show(finished[-1])
    slowest = min(case["speed"] for case in finished)
    share = max(case["probes"] / (case["runs"] * args.every) for case in finished)
    claims = {
        f"at least {MIN_SPEED:.0%} as fast as the best of the grid (least: {slowest:.1%})": slowest >= MIN_SPEED,
        f"at most 1/8 of the grid's runs (most: {share:.3f})": share <= MAX_RUNS,
        "no probe of the search runs out of memory": not any(case["ooms"] for case in finished),
    }
    whole = len(finished) == len(CASES) and args.every == 1 and bool(packages)
    result = {"least_speed": slowest, "most_runs": share, "cases": finished}
    publish("plans_are_fast", result, claims, whole=whole, packages=packages)


if __name__ == "__main__":
    main()
