"""Claim: on models that no constant is fitted to, a plan is at least 97 % as fast as the best of an exhaustive grid in
the median and 93 % in the worst case, with at most 1/8 of the grid's runs.

    python benchmarks/plans_are_fast.py [--set judge|tune] [--cases N | --case I] [--every K] [--samplers A,B] [--smoke]

The benchmark takes about 40 minutes on 2 quiet cores. It has 7 judged models (see models.py): in three the plain step
fits the budget, in four it does not. A probe asserts this. `--set tune` runs the models that constants may be fitted
to, claims nothing and stores nothing. `--every 8` measures every eighth candidate of the grid. `--smoke` measures a few
candidates of one tiny case in about a minute and claims nothing.

The grid combines engine, threads (1 and all cores), heap setting (`tight`, `fast`, `system`), microbatch and pieces
(whole, segments, chunks), each at a factor of 2. The numbers of chunks are 4 and 16, because time hardly depends on
them. It has 144 candidates on 2 cores. An LSTM has two engines, so there the smaller microbatches have fewer numbers of
segments. A candidate is counted as not fitting, without a run, if its uncalibrated growth is more than twice what the
budget leaves over the runtime. The others are the grid's runs. A plan gets at most 1/8 as many probes.

A plan must stay within the budget for 20 steps (plans_do_not_run_out.py), so a candidate of the grid must do the same.
The fastest candidates run for 20 whole steps, each in its own child process, until two have stayed within the budget.
`dropped` lists the faster candidates that did not.

The fastest of 100 measurements is partly a matter of luck. Therefore the plan and these two candidates are measured
again in turns, each in its own child process, in several short rounds. The median of the rounds counts, and the faster
of the two candidates is "the best of the grid". The column `over` counts the rounds in which a candidate did not stay
within the budget. Its speed counts the other rounds only. Contenders that chose the same candidate share its
measurement.

The same rounds also measure what others find. The claim is not about them:

- `gp`, `tpe` and `random` are plans of Optuna's GPSampler, TPESampler and RandomSampler in the same space. They have
  the same screening by arithmetic, the same first trial, and as many probes as the plan took.
- `lightning` is what a user of Lightning would get. Lightning's Tuner.scale_batch_size(mode="binsearch") finds a batch.
  (finders.py runs it with a limit at which allocations fail beyond the bytes that the largest fitting batch commits.)
  The candidate is the largest divisor of the batch up to what it found, with accumulation to the batch and PyTorch's
  defaults otherwise. oomguard's code runs it like the others, so that candidates are compared and not training loops.
"""

import argparse
import itertools
import time
from contextlib import ExitStack
from statistics import median
from typing import Any

from finders import find, is_installed
from models import SETS, Model
from results import print_row, publish
from search_needs_few_probes import BATCH, largest

from oomguard import NothingFitsError, Plan, Runner, find_feasible_config
from oomguard._core.units import MIB
from oomguard._device.cpu import cores
from oomguard._estimate.breakdown import estimate_step
from oomguard._probe.record import Record
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.read import make_spec
from oomguard._spec.spec import Spec

SMOKE = Model(
    "smoke", {"cell": "lstm", "seq": 200, "features": 16, "hidden": 64, "layers": 1, "batch": 256}, 420 * MIB, False
)
SMOKE_EVERY, SMOKE_ROUNDS, SMOKE_PROBES, SMOKE_SAMPLERS = 37, 1, 2, ("random",)
SAMPLERS = ("gp", "tpe", "random")
"""Samplers of Optuna that oomguard's own one is compared with."""
PARTS = (1, 2, 4, 8)
"""Divisors of the batch: the microbatches."""
PIECES: tuple[dict[str, Any], ...] = (
    *({"segments": count} for count in (1, 2, 4, 8)),
    *({"segments": count, "recompute": False} for count in (4, 16)),
)
PIECES_BOTH_WAYS: tuple[dict[str, Any], ...] = tuple({"segments": count} for count in (1, 2, 4, 8, 16, 32))
"""Pieces of a bidirectional model, which has no chunks."""
FEWER: tuple[dict[str, Any], ...] = ({"segments": 1}, {"segments": 4}, {"segments": 4, "recompute": False})
"""Pieces of the smaller microbatches if there are two engines. Then 1/8 of the batch is left out too."""
FAR = 2.0
"""A candidate is not run if its estimated growth is more than this multiple of what the budget leaves for it."""
ROUNDS = 11
RUN: dict[str, Any] = {"seconds": 0.25, "steps": 2}
RACE: dict[str, Any] = {"seconds": 0.6, "steps": 20}
HOLD_STEPS, SMOKE_HOLD_STEPS = 20, 1
PROBE_PASSES = 2
"""Passes per step of a probe, at most."""
MIN_MEDIAN, MIN_WORST, SHARE_OF_RUNS = 0.97, 0.93, 8


def grid(spec: Spec) -> list[Candidate]:
    """List the candidates of the grid, in an order in which one child process can run many of them."""
    engines = ("onednn", "native") if spec.cell == "lstm" else ("native",)
    settings = itertools.product(("tight", "system", "fast"), engines, dict.fromkeys((1, cores())))
    return [
        make_candidate(
            spec, microbatch=spec.batch // part, allocator=allocator, engine=engine, threads=threads, **pieces
        )
        for allocator, engine, threads in settings
        for part, pieces in shapes(spec, len(engines))
    ]


def shapes(spec: Spec, engines: int) -> list[tuple[int, dict[str, Any]]]:
    """List the divisors of the batch, each with the ways to cut the sequence."""
    all_pieces = PIECES_BOTH_WAYS if spec.bidirectional else PIECES
    if engines == 1:
        return list(itertools.product(PARTS, all_pieces))
    return [(1, pieces) for pieces in all_pieces] + list(itertools.product(PARTS[1:3], FEWER))


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


def run_grid(spec: Spec, candidates: list[Candidate], budget_bytes: int) -> list[tuple[float, Candidate]]:
    """Run the candidates. Return those that stayed within the budget, fastest first."""
    ran = []
    with Runner("cpu", timeout=60) as runner:
        for candidate in candidates:
            record = runner.probe(spec, candidate, budget_bytes=budget_bytes, **RUN)
            if record.verdict.ran:
                ran.append((seconds_per_step(record), candidate))
    return sorted(ran, key=lambda pair: pair[0])


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
    """Measure the contenders in turns. Return the seconds per step of each round, None if it exceeded the budget.

    A candidate that several contenders chose is measured once per round.
    """
    candidates = list(dict.fromkeys(contenders.values()))
    seconds: dict[Candidate, list[float | None]] = {candidate: [] for candidate in candidates}
    with ExitStack() as stack:
        runners = [stack.enter_context(Runner("cpu", timeout=60)) for _ in candidates]
        for _ in range(rounds):
            for candidate, runner in zip(candidates, runners, strict=True):
                record = runner.probe(spec, candidate, budget_bytes=budget_bytes, **RACE)
                seconds[candidate].append(seconds_per_step(record) if record.verdict.ran else None)
    return {name: seconds[candidate] for name, candidate in contenders.items()}


def median_seconds(rounds: list[float | None]) -> float:
    """Return the median of the rounds that stayed within the budget, or inf if none did."""
    return median([seconds for seconds in rounds if seconds is not None] or [float("inf")])


def by_sampler(spec: Spec, budget_bytes: int, max_probes: int, sampler: str) -> tuple[Candidate | None, dict[str, Any]]:
    """Search with a sampler of Optuna. Return its candidate, or None if it found none, and what the search cost."""
    began = time.monotonic()
    try:
        plan = find_feasible_config(spec, budget=budget_bytes, max_probes=max_probes, allow="none", sampler=sampler)
    except NothingFitsError:
        return None, {"probes": None, "seconds": time.monotonic() - began, "ooms": None}
    return plan.candidate, cost(plan)


def cost(plan: Plan) -> dict[str, Any]:
    """Return the probes and seconds of a search, and how many probes ran out of memory or exceeded the budget."""
    over = sum(record.verdict.name == "OVER" for record in plan.records)
    return {"probes": plan.probes, "seconds": plan.seconds, "ooms": plan.ooms + over}


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
    model: Model, *, every: int = 1, rounds: int = ROUNDS, samplers: tuple[str, ...] = SAMPLERS
) -> dict[str, Any]:
    """Run one case: the grid, the searches, Lightning's finder, and the final measurement in turns."""
    spec, budget_bytes, smoke = make_spec(model.fields), model.budget_bytes, rounds < ROUNDS
    with Runner("cpu") as runner:
        plain = runner.probe(spec, make_candidate(spec, threads=1), budget_bytes=budget_bytes)
    assert plain.verdict.ran == model.plain_fits, f"The case is not as hard as it should be: {plain.verdict.name}"
    candidates = grid(spec)
    near = [candidate for candidate in candidates if not is_far(spec, candidate, budget_bytes)]
    began = time.monotonic()
    ran = run_grid(spec, near[::every], budget_bytes)
    grid_seconds = time.monotonic() - began
    most_probes = SMOKE_PROBES if smoke else max(1, len(near) // SHARE_OF_RUNS)
    plan = find_feasible_config(spec, budget=budget_bytes, max_probes=most_probes, allow="none")
    held, dropped = hold(spec, ran, budget_bytes, SMOKE_HOLD_STEPS if smoke else HOLD_STEPS, 1 if smoke else 2)
    # on a busy machine a candidate may take longer than its minute
    assert held, (
        f"Of the grid {len(ran)} candidates ran within the budget and a minute each, and none again: {dropped}."
    )
    found: dict[str, Candidate | None] = {
        "plan": plan.candidate,
        **dict(zip(("best", "second"), held, strict=False)),
    }
    searches, tuned = {"plan": cost(plan)}, None
    for sampler in samplers:
        found[sampler], searches[sampler] = by_sampler(spec, budget_bytes, plan.probes, sampler)
    if not smoke and is_installed("pytorch-lightning"):  # search_needs_few_probes.py --smoke runs it instead
        found["lightning"], tuned = by_lightning(model.fields, budget_bytes)
    contenders = {name: candidate for name, candidate in found.items() if candidate is not None}
    step_seconds = race(spec, contenders, budget_bytes, rounds)
    medians = {name: median_seconds(seconds) for name, seconds in step_seconds.items()}
    best = min(medians[name] for name in ("best", "second") if name in medians)
    speeds = {name: best / medians[name] if name in medians else 0.0 for name in found}
    return {
        **{"model": model.name, "spec": model.fields, "budget_bytes": budget_bytes, "plain_fits": model.plain_fits},
        **{"grid": len(candidates), "near": len(near), "runs": len(near[::every]), "ran": len(ran)},
        **{"grid_seconds": grid_seconds, "most_probes": most_probes, "probes": plan.probes},
        **{"seconds": plan.seconds, "ended": plan.ended, "ooms": plan.ooms, "searches": searches},
        **{"tuner": tuned, "dropped": dropped},
        **{"contenders": {name: describe(candidate) for name, candidate in contenders.items()}},
        **{"step_seconds": step_seconds, "speed": speeds["plan"], "speeds": speeds},
        **{"over": step_seconds["plan"].count(None)},
    }


def show(case: dict[str, Any]) -> None:
    """Print the table of one case."""
    spec = case["spec"]
    plain = "fits" if case["plain_fits"] else "does not fit"
    head = f"{case['model']}, T = {spec['seq']}, batch {spec['batch']}, {case['budget_bytes'] // MIB} MiB"
    print(f"\n{head}; the plain step {plain}")
    widths, tuner = (12, 58, 6, 5, 9, 9, 5, 8), case["tuner"]
    print_row(("", "candidate", "runs", "OOMs", "search s", "step ms", "over", "of best"), widths)
    costs = {name: (one["probes"], one["ooms"], one["seconds"]) for name, one in case["searches"].items()}
    costs["best"] = (case["runs"], "", case["grid_seconds"])
    costs |= {"lightning": (tuner["trials"], tuner["ooms"], tuner["seconds"])} if tuner else {}
    for name, speed in case["speeds"].items():
        runs, ooms, searched = costs.get(name, ("", "", None))
        rounds = case["step_seconds"].get(name, [])
        over, step = rounds.count(None), "-" if not any(rounds) else f"{median_seconds(rounds) * 1e3:.1f}"
        candidate = case["contenders"].get(name, "found nothing")
        cells = (runs, ooms, "" if searched is None else f"{searched:.0f}", step, over, f"{speed:.1%}")
        print_row((f"  {name}", candidate, *("-" if cell is None else cell for cell in cells)), widths)
    print(f"  {len(case['dropped'])} faster candidates of the grid did not stay within the budget for 20 steps")
    if tuner and not tuner["found"]:
        print(f"  Lightning's finder found nothing: {tuner['error']}")


def summarise(cases: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the speed of each contender relative to the best of the grid, in the median and in the worst case."""
    names = dict.fromkeys(name for case in cases for name in case["speeds"] if name not in ("best", "second"))
    rows = {}
    for name in names:
        speeds = [case["speeds"][name] for case in cases if name in case["speeds"]]
        spent = [
            case["tuner"] if name == "lightning" else case["searches"][name] for case in cases if name in case["speeds"]
        ]
        row: dict[str, Any] = {"median": median(speeds), "worst": min(speeds), "cases": len(speeds)}
        row["over"] = sum(case["step_seconds"].get(name, []).count(None) for case in cases)
        row["ooms"] = sum(one["ooms"] or 0 for one in spent)
        rows["oomguard" if name == "plan" else name] = row
    print("\nSpeed relative to the best of the grid, rounds over the budget, and probes that ran out of it:")
    widths = (12, 8, 8, 6, 5, 5)
    print_row(("", "median", "worst", "cases", "over", "OOMs"), widths)
    for name, row in rows.items():
        shares = (f"{row['median']:.1%}", f"{row['worst']:.1%}")
        print_row((f"  {name}", *shares, row["cases"], row["over"], row["ooms"]), widths)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    most = max(map(len, SETS.values()))
    parser.add_argument("--set", choices=SETS, default="judge", help="the models (default: judge)")
    parser.add_argument("--cases", type=int, default=most, help="run only the first CASES models")
    parser.add_argument("--case", type=int, choices=range(1, most + 1), help="run only this model")
    parser.add_argument("--every", type=int, default=1, help="run only every EVERYth candidate of the grid")
    parser.add_argument(
        "--samplers", default=",".join(SAMPLERS), help="samplers of Optuna to compare with, or none (default: all)"
    )
    parser.add_argument("--smoke", action="store_true", help="run one tiny case with the packages that are installed")
    args = parser.parse_args()
    samplers = tuple(name for name in args.samplers.split(",") if name != "none")
    if {*samplers} - {*SAMPLERS}:
        parser.error(f"--samplers takes {', '.join(SAMPLERS)}, or none")
    packages = ("optuna", "pytorch-lightning") if is_installed("pytorch-lightning") else ("optuna",)
    if args.smoke:
        case = run_case(SMOKE, every=SMOKE_EVERY, rounds=SMOKE_ROUNDS, samplers=SMOKE_SAMPLERS)
        show(case)
        publish("plans_are_fast", {"cases": [case]}, {}, whole=False, packages=packages)
    models, finished = SETS[args.set], list[dict[str, Any]]()
    for model in models[: args.cases] if args.case is None else models[args.case - 1 : args.case]:
        finished.append(run_case(model, every=args.every, samplers=samplers))
        show(finished[-1])
    compared = summarise(finished)
    if args.set != "judge":
        return
    speeds = [case["speed"] for case in finished]
    middle, slowest, over = median(speeds), min(speeds), sum(case["over"] for case in finished)
    share = max(case["probes"] / case["near"] for case in finished)
    ooms = sum(case["searches"]["plan"]["ooms"] for case in finished)
    claims = {
        f"at least {MIN_MEDIAN:.0%} as fast as the best of the grid in the median ({middle:.1%})": middle >= MIN_MEDIAN,
        f"at least {MIN_WORST:.0%} as fast in the worst case ({slowest:.1%})": slowest >= MIN_WORST,
        f"at most 1/{SHARE_OF_RUNS} of the grid's runs (most: {share:.3f})": share <= 1 / SHARE_OF_RUNS,
        f"no probe of the search runs out of memory or over the budget ({ooms})": not ooms,
        f"no plan goes over its budget in the final rounds ({over})": not over,
    }
    is_whole = len(finished) == len(models) and args.every == 1 and {*samplers} == {*SAMPLERS}
    result = {"median_speed": middle, "least_speed": slowest, "most_runs": share, "compared": compared}
    whole = is_whole and "pytorch-lightning" in packages
    publish("plans_are_fast", result | {"cases": finished}, claims, whole=whole, packages=packages)


if __name__ == "__main__":
    main()
