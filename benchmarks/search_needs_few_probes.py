"""Claim: the search finds at least 95 % of the largest microbatch in at most 4 probes, none of which runs out of
memory, in at most a third of the time of Lightning's binary search.

    python benchmarks/search_needs_few_probes.py [CASES] [--smoke]

12 cases (6 models x 2 budgets), about 40 minutes; `--smoke`: one tiny case with the rivals that are installed, about a
minute, which claims nothing. Side by side, on the same model, optimizer, random data and border: the true maximum
(bisection with probes, until one more sequence does not run within the budget); oomguard; Lightning's
Tuner.scale_batch_size in both modes with its defaults; accelerate's find_executable_batch_size and toma's batch, from
the whole batch on; and 20 trials of a plain Optuna study (TPE over the microbatch, maximise what runs, prune what runs
out of memory), which is what oomguard's search would be without arithmetic. All with one thread, in the allocator
setting `steady`.

The budget is one of resident bytes, to which oomguard holds its probes by watching them. The rivals need an error to
find the border, so they get one: allocations fail beyond what the true maximum commits (see finders.py). Each tool runs
in a process of its own, and its seconds are those of the process, imports included. Where a rival does not recognise an
error of memory and dies of it, it is run again with the error in words that it knows (`translated`).
"""

import argparse
from typing import Any

from finders import PACKAGES, find, installed, knobs
from results import print_row, publish

from oomguard import Runner
from oomguard._api import estimate
from oomguard._core.units import MIB
from oomguard._spec.candidate import make_candidate
from oomguard._spec.read import make_spec
from oomguard._spec.spec import Spec

BATCH = 2048
"""Far more than fits, so that the maximum lies inside."""
MODELS: tuple[dict[str, Any], ...] = (
    {"cell": "lstm", "hidden": 128, "layers": 1, "seq": 200},
    {"cell": "gru", "hidden": 128, "layers": 1, "seq": 100},
    {"cell": "rnn", "hidden": 128, "layers": 2, "seq": 200},
    {"cell": "lstm", "hidden": 256, "layers": 2, "seq": 100},
    {"cell": "gru", "hidden": 256, "layers": 2, "seq": 50},
    {"cell": "rnn", "hidden": 256, "layers": 1, "seq": 400},
)
BUDGETS_BYTES = (600 * MIB, 900 * MIB)
SMOKE: tuple[dict[str, Any], int] = ({"cell": "lstm", "hidden": 64, "layers": 1, "seq": 100}, 400 * MIB)
SLOW = ("lightning-binsearch", "optuna", "accelerate")
"""Rivals that a smoke run leaves out: what they need is tried by the others, and accelerate in
recovers_without_loss.py."""
MOST_PROBES, LEAST_SHARE, MOST_TIME = 4, 0.95, 1 / 3
COLUMNS = ("", "found", "of max", "trials", "OOMs", "seconds")
"""Of oomguard, probes that went over the budget and were stopped count among the OOMs: rivals get an error there."""
WIDTHS = (34, 6, 7, 6, 5, 8)


def largest(spec: Spec, budget_bytes: int) -> tuple[int, int]:
    """The largest microbatch that runs within the budget while one more does not, and the probes that it took.

    Starts from the estimate, to save time: where the border is does not depend on where the bisection began.
    """
    with Runner("cpu", seconds=1.0) as runner:
        tried: dict[int, bool] = {}

        def runs(rows: int) -> bool:
            if rows not in tried:
                record = runner.probe(
                    spec, make_candidate(spec, microbatch=rows, **knobs(spec)), budget_bytes=budget_bytes
                )
                assert record.verdict.ran or record.verdict.name in ("OVER", "OOM"), record.message
                tried[rows] = record.verdict.ran
            return tried[rows]

        assert not runs(spec.batch), "The case is not hard: the whole batch fits in one pass."
        guess = first_guess(spec, budget_bytes)
        low, high = guess, spec.batch
        while low > 1 and not runs(low):
            low, high = low * 9 // 10, low
        step = max(1, low // 50)
        while low + step < high and runs(low + step):
            low, step = low + step, 2 * step
        high = min(high, low + step)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if runs(middle) else (low, middle)
        assert runs(low)
        assert not runs(low + 1)
        return low, len(tried)


def first_guess(spec: Spec, budget_bytes: int) -> int:
    """The largest microbatch by the bare estimate."""
    sizes = list(range(1, spec.batch))
    fits = estimate(spec, microbatch=sizes, budget_bytes=budget_bytes, **knobs(spec)).total_bytes <= budget_bytes
    return max((size for size, one in zip(sizes, fits, strict=True) if one), default=1)


def run_case(fields: dict[str, Any], budget_bytes: int, rivals: list[str]) -> dict[str, Any]:
    """oomguard and its rivals on one model and budget."""
    fields = fields | {"features": 16, "batch": BATCH}
    spec = make_spec(fields)
    maximum, probes = largest(spec, budget_bytes)
    border = find("plain", fields, start=maximum)
    case: dict[str, Any] = {"spec": fields, "budget_bytes": budget_bytes, "maximum": maximum, "bisection": probes}
    case |= {
        "committed_growth_bytes": border["growth_bytes"],
        "oomguard": find("oomguard", fields, budget_bytes=budget_bytes),
    }
    for tool in rivals:
        case[tool] = find(tool, fields, start=BATCH, **border)
        if case[tool]["error"]:
            case[f"{tool}, translated"] = find(tool, fields, start=BATCH, translate=True, **border)
    return case


def show(case: dict[str, Any]) -> None:
    """The table of one case."""
    spec = case["spec"]
    model = f"{spec['cell']} {spec['hidden']} × {spec['layers']}, T = {spec['seq']}, {case['budget_bytes'] // MIB} MiB"
    print(f"\n{model}: true maximum {case['maximum']} ({case['bisection']} probes)")
    print_row(COLUMNS, WIDTHS)
    for name, one in case.items():
        if isinstance(one, dict) and "found" in one:
            share = "" if one["found"] is None else f"{one['found'] / case['maximum']:.1%}"
            cells = ("-" if one[key] is None else one[key] for key in ("found", "trials", "ooms"))
            found, trials, ooms = cells
            print_row((f"  {name}", found, share, trials, ooms, f"{one['seconds']:.1f}"), WIDTHS)
            if one["error"]:
                print(f"    died: {one['error']}")


def seconds_of(case: dict[str, Any], tool: str) -> float:
    """Of a tool that died, what it took when it did not."""
    return float(case.get(f"{tool}, translated", case[tool])["seconds"])


def main() -> None:
    cases = [(model, budget_bytes) for budget_bytes in BUDGETS_BYTES for model in MODELS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="?", type=int, default=len(cases))
    parser.add_argument("--smoke", action="store_true", help="one tiny case, with what is installed")
    given = parser.parse_args()
    rivals = [tool for tool in installed() if not (given.smoke and tool in SLOW)]
    if not given.smoke and len(rivals) < len(PACKAGES):
        parser.error("Not all rivals are here. Run: pip install -c constraints.txt '.[bench]'")
    done = []
    for model, budget_bytes in [SMOKE] if given.smoke else cases[: given.cases]:
        done.append(run_case(model, budget_bytes, rivals))
        show(done[-1])
    total = {tool: sum(seconds_of(case, tool) for case in done) for tool in ("oomguard", *rivals)}
    print("\nSeconds in all: " + ", ".join(f"{tool} {seconds:.0f}" for tool, seconds in total.items()))
    packages = tuple(dict.fromkeys(PACKAGES[tool] for tool in rivals))
    if given.smoke:
        publish("search_needs_few_probes", {"cases": done}, {}, whole=False, packages=packages)
    result, claims = judged(done, total["oomguard"] / total["lightning-binsearch"])
    publish("search_needs_few_probes", result, claims, whole=given.cases >= len(cases), packages=packages)


def judged(done: list[dict[str, Any]], ratio: float) -> tuple[dict[str, Any], dict[str, bool]]:
    """The figures of all cases, and what they say of the claims."""
    share = min(case["oomguard"]["found"] / case["maximum"] for case in done)
    probes = max(case["oomguard"]["trials"] for case in done)
    over = sum(case["oomguard"]["over"] for case in done)
    ooms = sum(case["oomguard"]["ooms"] for case in done) - over
    claims = {
        f"at most {MOST_PROBES} probes (most: {probes})": probes <= MOST_PROBES,
        f"no probe runs out of memory ({ooms})": ooms == 0,
        f"no probe goes over the budget, to be stopped there ({over})": over == 0,
        f"at least {LEAST_SHARE:.0%} of the maximum (least: {share:.1%})": share >= LEAST_SHARE,
        f"at most 1/3 of the time of Lightning's binary search ({ratio:.2f})": ratio <= MOST_TIME,
    }
    figures = {"least_share": share, "most_probes": probes, "ooms": ooms, "over": over, "time_ratio": ratio}
    return figures | {"cases": done}, claims


if __name__ == "__main__":
    main()
