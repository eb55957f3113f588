"""Claim: a plan is at least 95 % as fast as the best of an exhaustive grid, with at most 1/8 of the grid's runs.

    python benchmarks/plans_are_fast.py [--cases N | --case I] [--every K] [--smoke]

3 cases: one in which the plain step fits the budget and two in which it does not (asserted by a probe). About 40
minutes; `--every 8` measures every eighth candidate of the grid; `--smoke` a few candidates of one tiny case, about a
minute, which claims nothing.

The grid is microbatch x pieces (whole, segments, chunks) x engine x threads x allocator (`steady`, `plain`, and the
engine's own of `pooled` and `roomy`): 360, 360 and 180 candidates. Each is run within the budget; those whose bare
estimate is more than twice what the budget leaves over the runtime are counted as not fitting without a run. Then the
fastest are run for as long as 20 whole steps, each in its own child, until two have stayed within the budget, as a plan
must (plans_do_not_run_out.py): what creeps over it later was no choice. `dropped` says how many.
Since the fastest of 300 measured ones is partly the luckiest, the plan and these two are measured again by turns, each
in its own child, in many short rounds; the median of the rounds counts, and the better of the two is "the best". `over`
counts the rounds in which one did not stay within the budget.

In the same race: what a user of Lightning gets. Its Tuner.scale_batch_size(mode="binsearch") finds a microbatch (in
finders.py, where allocations fail beyond what the largest that fits commits), the largest divisor of the batch within
it is accumulated to the batch, and everything else is as PyTorch has it. It is run by the same code as the others, so
that candidates are compared and not loops. The claim is not about it.
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
from oomguard._search.space import HEAP_FOR
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.read import make_spec
from oomguard._spec.spec import Spec

CASES: tuple[tuple[dict[str, Any], int, bool], ...] = (
    ({"cell": "lstm", "seq": 400, "features": 16, "hidden": 128, "layers": 1, "batch": 32}, 900 * MIB, True),
    ({"cell": "lstm", "seq": 600, "features": 16, "hidden": 128, "layers": 2, "batch": 32}, 450 * MIB, False),
    ({"cell": "gru", "seq": 500, "features": 16, "hidden": 128, "layers": 1, "batch": 32}, 400 * MIB, False),
)
"""Fields of the spec, budget, whether the plain step fits."""
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
ROUNDS = 15
RUN: dict[str, Any] = {"seconds": 0.3, "steps": 3}
RACE: dict[str, Any] = {"seconds": 0.7, "steps": 20}
HOLD_STEPS, SMOKE_HOLD_STEPS = 20, 1
PROBE_PASSES = 2
"""Of a step of a probe, at most."""
LEAST_SPEED, MOST_RUNS = 0.95, 1 / 8


def grid(spec: Spec) -> list[Candidate]:
    """The grid, in an order in which one child can run many of them."""
    engines = ("onednn", "native") if spec.cell == "lstm" else ("native",)
    settings = itertools.product(("steady", "plain", None), engines, dict.fromkeys((1, cores())))
    return [
        make_candidate(
            spec, microbatch=rows, allocator=allocator or HEAP_FOR[engine], engine=engine, threads=threads, **pieces
        )
        for allocator, engine, threads in settings
        for pieces in PIECES
        for rows in MICROBATCHES
    ]


def step_seconds(record: Record) -> float:
    """Of a step of the whole batch. (By its median pass: the fastest of many short ones is luckier than that of a few
    long ones.)"""
    assert record.seconds_per_step is not None
    return record.seconds_per_step


def is_far(spec: Spec, candidate: Candidate, budget_bytes: int) -> bool:
    """Whether it needs so much that no error of the estimate could make it fit."""
    found = estimate_step(spec, candidate)
    return bool(found.growth_bytes > FAR * (budget_bytes - found.terms["runtime"]))


def run_grid(spec: Spec, candidates: list[Candidate], budget_bytes: int) -> tuple[list[tuple[float, Candidate]], int]:
    """Those that ran within the budget, the fastest first, and how many were run."""
    near = [one for one in candidates if not is_far(spec, one, budget_bytes)]
    ran = []
    with Runner("cpu", timeout=60) as runner:
        for one in near:
            record = runner.probe(spec, one, budget_bytes=budget_bytes, **RUN)
            if record.verdict.ran:
                ran.append((step_seconds(record), one))
    return sorted(ran, key=lambda pair: pair[0]), len(near)


def hold(
    spec: Spec, ran: list[tuple[float, Candidate]], budget_bytes: int, steps: int, wanted: int
) -> tuple[list[Candidate], list[str]]:
    """The fastest that stay within the budget for so many whole steps, and what was faster but does not."""
    found: list[Candidate] = []
    dropped = []
    for _, one in ran:
        if len(found) == wanted:
            break
        with Runner("cpu", timeout=120) as runner:
            passes = -(-spec.batch // one.microbatch)
            as_long = steps * -(-passes // PROBE_PASSES)
            record = runner.probe(spec, one, budget_bytes=budget_bytes, seconds=600.0, steps=as_long)
        if record.verdict.ran:
            found.append(one)
        else:
            dropped.append(f"{told(one)}: {record.verdict.name}")
    return found, dropped


def race(spec: Spec, contenders: dict[str, Candidate], budget_bytes: int, rounds: int) -> dict[str, list[float | None]]:
    """Seconds of a step of each in every round, by turns; None where it did not run within the budget."""
    found: dict[str, list[float | None]] = {name: [] for name in contenders}
    with ExitStack() as stack:
        lanes = {name: stack.enter_context(Runner("cpu", timeout=60)) for name in contenders}
        for _ in range(rounds):
            for name, runner in lanes.items():
                record = runner.probe(spec, contenders[name], budget_bytes=budget_bytes, **RACE)
                found[name].append(step_seconds(record) if record.verdict.ran else None)
    return found


def usual(rounds: list[float | None]) -> float:
    """The median of those that ran; inf if none did."""
    return median([one for one in rounds if one is not None] or [float("inf")])


def by_lightning(fields: dict[str, Any], budget_bytes: int) -> tuple[Candidate | None, dict[str, Any]]:
    """What Lightning's finder leads to within the budget (None if it found nothing), and how it came to that."""
    many = fields | {"batch": BATCH}  # it goes as far as it can
    maximum, _ = largest(make_spec(many), budget_bytes)
    border = find("plain", many, start=maximum)
    tuned = find("lightning-binsearch", many, start=BATCH, **border)
    if tuned["error"]:
        tuned = find("lightning-binsearch", many, start=BATCH, translate=True, **border) | {"translated": True}
    if not tuned["found"]:
        return None, tuned
    spec = make_spec(fields)
    rows = max(one for one in range(1, min(tuned["found"], spec.batch) + 1) if spec.batch % one == 0)
    return make_candidate(spec, microbatch=rows, allocator="plain"), tuned


def told(candidate: Candidate) -> str:
    """A candidate in a few words."""
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
    """The grid, the search, Lightning's finder and the race of one case."""
    spec = make_spec(fields)
    with Runner("cpu") as runner:
        plain = runner.probe(spec, make_candidate(spec, threads=1), budget_bytes=budget_bytes)
    assert plain.verdict.ran == plain_fits, f"The case is not as hard as it should be: {plain.verdict.name}"
    candidates = grid(spec)[::every]
    began = time.monotonic()
    ran, runs = run_grid(spec, candidates, budget_bytes)
    grid_seconds = time.monotonic() - began
    most = max(1, len(grid(spec)) // 8) if rounds == ROUNDS else SMOKE_PROBES
    plan = find_feasible_config(spec, budget=budget_bytes, max_probes=most, allow="none")
    steps, wanted = (HOLD_STEPS, 2) if rounds == ROUNDS else (SMOKE_HOLD_STEPS, 1)
    held, dropped = hold(spec, ran, budget_bytes, steps, wanted)
    contenders, tuned = {"plan": plan.candidate, **dict(zip(("best", "second"), held, strict=False))}, None
    if rounds == ROUNDS and is_installed("pytorch-lightning"):  # a smoke run leaves it to search_needs_few_probes.py
        lightning, tuned = by_lightning(fields, budget_bytes)
        contenders |= {"lightning": lightning} if lightning is not None else {}
    found = race(spec, contenders, budget_bytes, rounds)
    return {
        **{"spec": fields, "budget_bytes": budget_bytes, "plain_fits": plain_fits, "grid": len(candidates)},
        **{"runs": runs, "ran": len(ran), "grid_seconds": grid_seconds, "most_probes": most, "probes": plan.probes},
        **{"seconds": plan.seconds, "ended": plan.ended, "ooms": plan.ooms, "tuner": tuned, "dropped": dropped},
        **{"contenders": {name: told(one) for name, one in contenders.items()}, "step_seconds": found},
        **{"speed": min(usual(found[name]) for name in ("best", "second") if name in found) / usual(found["plan"])},
        **{
            "lightning_speed": usual(found["lightning"]) / usual(found["plan"])
            if any(found.get("lightning", ()))
            else None
        },
    }


def show(case: dict[str, Any]) -> None:
    """The table of one case."""
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
        over, step = rounds.count(None), "-" if rounds.count(None) == len(rounds) else f"{usual(rounds) * 1e3:.1f}"
        print_row((f"  {name}", candidate, runs, "" if searched is None else f"{searched:.0f}", step, over), widths)
    print(f"  {len(case['dropped'])} of the grid were faster, but did not stay within the budget for 20 steps")
    if tuner:
        words = f"found microbatch {tuner['found']}" if tuner["found"] else f"found nothing: {tuner['error']}"
        print(f"  Lightning's finder {words}, {tuner['ooms']} of its trials ran out of memory")
    print(f"  the plan is {case['speed']:.1%} as fast as the best of the grid", flush=True)
    if case["lightning_speed"]:
        print(f"  and {case['lightning_speed']:.1%} as fast as what Lightning's finder leads to", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many")
    parser.add_argument("--case", type=int, choices=range(1, len(CASES) + 1), help="only that one")
    parser.add_argument("--every", type=int, default=1, help="only every so many candidates of the grid")
    parser.add_argument("--smoke", action="store_true", help="one tiny case, with what is installed")
    given = parser.parse_args()
    packages = ("pytorch-lightning",) if is_installed("pytorch-lightning") else ()
    if given.smoke:
        fields, budget_bytes, plain_fits = SMOKE
        case = run_case(fields, budget_bytes, plain_fits=plain_fits, every=SMOKE_EVERY, rounds=SMOKE_ROUNDS)
        show(case)
        publish("plans_are_fast", {"cases": [case]}, {}, whole=False, packages=packages)
    done = []
    for fields, budget_bytes, plain_fits in CASES[: given.cases] if given.case is None else [CASES[given.case - 1]]:
        done.append(run_case(fields, budget_bytes, plain_fits=plain_fits, every=given.every))
        show(done[-1])
    slowest = min(case["speed"] for case in done)
    share = max(case["probes"] / (case["runs"] * given.every) for case in done)
    claims = {
        f"at least {LEAST_SPEED:.0%} as fast as the best of the grid (least: {slowest:.1%})": slowest >= LEAST_SPEED,
        f"at most 1/8 of the grid's runs (most: {share:.3f})": share <= MOST_RUNS,
        "no probe of the search runs out of memory": not any(case["ooms"] for case in done),
    }
    whole = len(done) == len(CASES) and given.every == 1 and bool(packages)
    result = {"least_speed": slowest, "most_runs": share, "cases": done}
    publish("plans_are_fast", result, claims, whole=whole, packages=packages)


if __name__ == "__main__":
    main()
