"""Claim: a sequence of 1,000,000 steps trains one exact step on the CPU within 1 GiB resident, libraries included.

    python benchmarks/a_million_steps_fit.py [--smoke]

A child process that is limited to 1 GiB probes the plain step and the same step in exact segments. The plain step must
not fit, because otherwise the case would not be hard.
"""

import argparse
from typing import Any

import msgspec
from results import publish

from oomguard._core.units import GIB, MIB, format_bytes, format_seconds
from oomguard._probe.runner import Runner
from oomguard._spec.candidate import make_candidate
from oomguard._spec.spec import Spec

SPEC = Spec(cell="lstm", seq=1_000_000, features=4, hidden=32, layers=1, batch=1)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "1,000 segments": {"segments": 1000},
    "1,000 segments, 2 levels": {"segments": 1000, "levels": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="40,000 steps within 360 MiB")
    smoke = parser.parse_args().smoke
    spec, budget_bytes = (msgspec.structs.replace(SPEC, seq=40_000), 360 * MIB) if smoke else (SPEC, GIB)
    claims, result = dict[str, bool](), {"seq": spec.steps, "budget_bytes": budget_bytes}
    with Runner("cpu", timeout=1200, seconds=0.1 if smoke else 1) as runner:
        for way, knobs in WAYS.items():
            record = runner.probe(spec, make_candidate(spec, threads=1, **knobs), budget_bytes=budget_bytes)
            claims[f"{way}: {record.verdict.name}"] = record.verdict.ran == (way != "plain")
            peak = format_bytes(record.peak_bytes or 0)
            seconds = "" if record.seconds_per_step is None else format_seconds(record.seconds_per_step)
            print(f"{way:<28} {record.verdict.name:<6} {peak:>12}  {seconds}", flush=True)
            result[way] = {"verdict": record.verdict.name, "peak_bytes": record.peak_bytes}
            result[way] |= {"seconds_per_step": record.seconds_per_step}
    publish("a_million_steps_fit", result, claims, whole=not smoke)


if __name__ == "__main__":
    main()
