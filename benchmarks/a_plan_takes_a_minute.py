"""Claim: `oomguard plan --model lstm --seq 10000` takes at most a minute, both with all free memory as the budget
and with 700 MiB, in which plain PyTorch does not fit.

    python benchmarks/a_plan_takes_a_minute.py [--seq T] [--smoke]

The benchmark takes about 3 minutes. The limit is meant for 2 quiet cores. It measures the whole command from the start
of the process, without calibrations from earlier searches. Both the plan and a probe of the plain step must say that
the plain step does not fit in 700 MiB.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from results import print_row, publish

from oomguard import Plan, Runner, load_plan
from oomguard._core.units import MIB, format_bytes, format_seconds, parse_bytes
from oomguard._spec.candidate import make_candidate

SEQ, BUDGET = 10_000, "700MiB"
SMOKE_SEQ, SMOKE_BUDGET, SMOKE_FLAGS = 200, "420MiB", ("--max-probes", "3", "--threads", "1")
MAX_SECONDS = 60.0
PROGRAM = (sys.executable, "-P", "-m", "oomguard")
"""Runs the oomguard that this process imports, whatever the current directory is."""
WIDTHS = (14, 9, 7, 12, 12, 14, 10)


def run(seq: int, budget: str | None, flags: tuple[str, ...]) -> tuple[Plan, float]:
    """Run the command. Return its plan and the seconds that it took."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "plan.json"
        command = [*PROGRAM, "plan", "--model", "lstm", "--seq", str(seq), "--output", str(output), *flags]
        command += ["--budget", budget] if budget else []
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.monotonic() - began
        if not output.exists():
            sys.exit(f"oomguard plan wrote no plan (exit code {done.returncode}): {done.stderr}")
        return load_plan(output), seconds


def plain_verdict(plan: Plan) -> str:
    """Probe the plain step within the plan's budget, and return the verdict."""
    with Runner("cpu", timeout=300) as runner:
        return runner.probe(plan.spec, make_candidate(plan.spec), budget_bytes=plan.budget_bytes).verdict.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=SEQ)
    parser.add_argument("--smoke", action="store_true", help="short sequences in a small budget, three probes")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    seq = SMOKE_SEQ if args.smoke else args.seq
    budgets = (SMOKE_BUDGET,) if args.smoke else (None, BUDGET)
    print_row(("budget", "seconds", "probes", "peak", "step", "candidate", "ended"), WIDTHS)
    for budget in budgets:
        plan, seconds = run(seq, budget, SMOKE_FLAGS if args.smoke else ())
        chosen = plan.candidate
        row = {"budget": budget, "budget_bytes": plan.budget_bytes, "seconds": seconds, "probes": plan.probes}
        row |= {"ooms": plan.ooms, "peak_bytes": plan.peak_bytes, "seconds_per_step": plan.seconds_per_step}
        row |= {"ended": plan.ended, "confirmed": plan.confirmed, "candidate": plan.to_dict()["candidate"]}
        row |= {"plain_fits": plan.plain.fits, "plain": plain_verdict(plan) if budget else None}
        rows.append(row)
        step = format_seconds(plan.seconds_per_step or 0)
        peak = format_bytes(plan.peak_bytes)
        shape = f"B {chosen.microbatch}, S {chosen.segments}"
        print_row((budget or "free memory", f"{seconds:.0f}", plan.probes, peak, step, shape, plan.ended), WIDTHS)
    tight = rows[-1]
    longest = max(row["seconds"] for row in rows)
    hard = not tight["plain_fits"] and tight["plain"] in ("OVER", "OOM")
    assert tight["budget_bytes"] <= parse_bytes(tight["budget"])
    claims = {
        f"at most {MAX_SECONDS:.0f} s (longest: {longest:.0f})": longest <= MAX_SECONDS,
        f"the plain step does not fit in {tight['budget_bytes'] // MIB} MiB ({tight['plain']})": hard,
        "no probe runs out of memory": not any(row["ooms"] for row in rows),
    }
    result = {"seq": seq, "rows": rows}
    publish("a_plan_takes_a_minute", result, claims, whole=seq == SEQ)


if __name__ == "__main__":
    main()
