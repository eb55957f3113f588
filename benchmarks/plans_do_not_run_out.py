"""Claim: of 60 plans for random specs and budgets, none goes over its budget in 20 optimizer steps of the whole batch.

    python benchmarks/plans_do_not_run_out.py [COUNT] [--seed S] [--steps N] [--smoke]

The benchmark takes about 35 minutes. The hidden sizes are those of the judged models (models.py). Each search has at
most 15 s and 4 probes, and starts without records. Then a new process with the plan's environment (`exports`) trains
for real: it runs every accumulation pass of every step, with the uneven last microbatch.

The budget is a hard limit. The parent reads the resident bytes every 10 ms and kills the process if they exceed it. The
kernel's high-water mark at the end, which misses no moment, must be within it as well.

In at least a third of the cases the plain step must not fit, because otherwise the cases would not be hard. A probe
checks this in each case. A search that finds that nothing fits is counted separately.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from models import JUDGE_HIDDEN, draw_case
from peak import status_bytes
from results import print_row, publish

from oomguard import NothingFitsError, Plan, Runner, find_feasible_config, load_plan, save_plan
from oomguard._core.units import MIB
from oomguard._device.cpu import Cpu
from oomguard._device.proc import read_status
from oomguard._spec.candidate import make_candidate
from oomguard._spec.read import make_spec
from oomguard._spec.spec import Spec

COUNT, STEPS = 60, 20
SEARCH: dict[str, Any] = {"timeout": 15, "max_probes": 4, "threads": 1}
POLL_SECONDS = 0.01
MIN_HARD = 1 / 3
WIDTHS = (66, 8, 12, 6, 6, 9, 8)


def train(path: str, steps: int) -> None:
    """Train the plan on random data, in this child process."""
    import torch

    from oomguard._probe.sample import random_microbatch
    from oomguard._rnn import Microbatch
    from oomguard._step import prepare, step

    plan = load_plan(path)
    spec, candidate = plan.spec, plan.candidate
    Cpu().settle(candidate)
    training, rng = prepare(spec, candidate), torch.Generator().manual_seed(0)
    full, rest = divmod(spec.batch, candidate.microbatch)
    targets = spec.batch * (spec.steps if spec.head == "per-step" else 1)

    def microbatches() -> Any:
        for rows in [candidate.microbatch] * full + [rest] * (rest > 0):
            held: list[Microbatch] = [random_microbatch(spec, rows, rng)]
            yield held.pop()  # this generator keeps no reference

    began = time.monotonic()
    for _ in range(steps):
        loss = step(training, microbatches(), targets).loss
        assert bool(torch.isfinite(loss)), "The loss is not finite."
    print(json.dumps({"peak_bytes": status_bytes("VmHWM"), "seconds": (time.monotonic() - began) / steps}))


def run_plan(plan: Plan, steps: int) -> dict[str, Any]:
    """Train in a child process. The outcome is `trained`, `over` (it exceeded the budget) or `failed`."""
    with tempfile.TemporaryDirectory() as directory:
        path = save_plan(plan, Path(directory) / "plan.json")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | plan.exports
        command = [sys.executable, str(Path(__file__)), "--train", str(path), "--steps", str(steps)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as child:
            seen_bytes = 0
            while child.poll() is None:
                now = read_status(child.pid)
                seen_bytes = max(seen_bytes, 0 if now is None else now.resident_bytes)
                if seen_bytes > plan.budget_bytes:
                    child.kill()
                    return {"outcome": "over", "run_bytes": seen_bytes}
                time.sleep(POLL_SECONDS)
            output, errors = child.communicate()
    if child.returncode:
        return {"outcome": "failed", "run_bytes": seen_bytes, "error": errors.strip()[-300:]}
    figures = json.loads(output.splitlines()[-1])
    outcome = "trained" if figures["peak_bytes"] <= plan.budget_bytes else "over"
    return {"outcome": outcome, "run_bytes": figures["peak_bytes"], "seconds_per_step": figures["seconds"]}


def does_plain_fit(spec: Spec, budget_bytes: int) -> bool:
    """Probe whether the whole batch fits in one pass, as plain PyTorch would run it."""
    with Runner("cpu", timeout=60, seconds=0.1) as runner:
        record = runner.probe(spec, make_candidate(spec, threads=1), budget_bytes=budget_bytes, steps=1)
    return record.verdict.ran


def run_case(fields: dict[str, Any], budget_bytes: int, steps: int) -> dict[str, Any]:
    """Search for a plan and train it."""
    spec, began = make_spec(fields), time.monotonic()
    case: dict[str, Any] = {
        "spec": fields,
        "budget_bytes": budget_bytes,
        "plain_fits": does_plain_fit(spec, budget_bytes),
    }
    try:
        plan = find_feasible_config(spec, budget=budget_bytes, **SEARCH)
    except NothingFitsError as error:
        return case | {"outcome": "nothing fits", "needed_bytes": error.shortfall.needed_bytes}
    case |= {"candidate": plan.to_dict()["candidate"], "confirmed": plan.confirmed, "plan_bytes": plan.peak_bytes}
    case |= {"probes": plan.probes, "search_seconds": time.monotonic() - began, "ended": plan.ended}
    case |= {"ooms": plan.ooms + sum(record.verdict.name == "OVER" for record in plan.records)}
    return case | run_plan(plan, steps)


def describe(fields: dict[str, Any]) -> str:
    """Describe a spec in one line."""
    extra = [name for name in ("bidirectional", "dropout", "vocab") if fields.get(name)]
    extra += ["last step"] if fields["head"] == "last-step" else []
    shape = f"{fields['cell']} {fields['hidden']} × {fields['layers']} T {fields['seq']} B {fields['batch']}"
    return " ".join([shape, fields["optimizer"], *extra])


def show(case: dict[str, Any]) -> None:
    """Print the row of one case."""
    share = f"{case['run_bytes'] / case['budget_bytes']:.1%}" if "run_bytes" in case else ""
    plain = "fits" if case["plain_fits"] else "no"
    budget = f"{case['budget_bytes'] // MIB} MiB"
    seconds = f"{case['search_seconds']:.0f}" if "search_seconds" in case else ""
    print_row((describe(case["spec"]), budget, case["outcome"], plain, case.get("probes", ""), seconds, share), WIDTHS)
    if "error" in case:
        print("   ", case["error"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--smoke", action="store_true", help="train one plan for a few steps")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.steps)
        return
    if args.smoke:
        args.count, args.steps = 1, 3
    rng, cases = random.Random(args.seed), []
    print_row(("", "budget", "outcome", "plain", "probes", "search s", "peak"), WIDTHS)
    for _ in range(args.count):
        cases.append(run_case(*draw_case(rng, JUDGE_HIDDEN), args.steps))
        show(cases[-1])
    ran = [case for case in cases if "run_bytes" in case]
    failed = [case for case in ran if case["outcome"] != "trained"]
    hard = sum(not case["plain_fits"] for case in cases) / len(cases)
    shares = sorted(case["run_bytes"] / case["budget_bytes"] for case in ran)
    nothing_fits = len(cases) - len(ran)
    tenths = [round(share, 3) for share in quantiles(shares, n=10)] if len(shares) > 1 else shares
    if shares:
        print(f"\nPeak / budget: lowest {shares[0]:.1%}, median {median(shares):.1%}, highest {shares[-1]:.1%}.")
    print(f"Cases in which nothing fits: {nothing_fits} of {len(cases)}.")
    claims = {
        f"none of {len(ran)} plans goes over its budget in {args.steps} steps ({len(failed)})": not failed,
        f"no probe runs out of memory or over the budget ({sum(case['ooms'] for case in ran)})": not any(
            case["ooms"] for case in ran
        ),
    }
    if not args.smoke:
        claims[f"the plain step does not fit in at least a third of the cases ({hard:.0%})"] = hard >= MIN_HARD
    result = {"plans": len(ran), "out": len(failed), "nothing_fits": nothing_fits, "hard": hard, "peak_tenths": tenths}
    result |= {"seed": args.seed, "steps": args.steps, "cases": cases}
    whole = args.count >= COUNT and args.steps >= STEPS
    publish("plans_do_not_run_out", result, claims, whole=whole)


if __name__ == "__main__":
    main()
