"""Claim: on models that no constant is fitted to, the search finds at least 98 % of the largest batch in at most 4
probes, none of which runs out of memory, in at most a third of the time of Lightning's binary search.

    python benchmarks/search_needs_few_probes.py [CASES] [--smoke]

The benchmark has 12 cases (6 judged models of models.py, 2 budgets) and takes about 30 minutes. `--smoke` runs one tiny
case with the installed rivals in about a minute, and claims nothing. The batch of a case is trained in one pass. All
contenders have the same model, optimizer, random data and limit, one thread and the heap setting `tight`:

- the true maximum, by bisection with probes of 8 steps, until one more sequence does not stay within the budget (peaks
  grow in the first steps: what goes over the budget in the fifth is not the maximum);
- oomguard, with `maximize="batch"`;
- Lightning's Tuner.scale_batch_size in both modes, with its defaults;
- accelerate's find_executable_batch_size and toma's batch, starting from 2,048 sequences;
- 20 trials of a plain Optuna study: TPE maximises the batch, and trials that run out of memory are pruned. This is
  what oomguard's search would be without arithmetic.

The budget limits resident bytes. oomguard watches its probes and stops those that exceed it. The rivals find the limit
only by an error, so for them allocations fail beyond the bytes that the true maximum commits (see finders.py). Each
tool runs in its own process, and its seconds are those of the process, including imports. If a rival does not recognise
an out-of-memory error and crashes, it runs again with a message that it recognises (`translated`). A rival that takes
longer than two minutes is stopped, and those two minutes count as its time.
"""

import argparse
from typing import Any

import msgspec
from finders import PACKAGES, find, installed, knobs
from models import BATCH_BUDGETS_BYTES, BATCH_SEQ, JUDGE
from results import print_row, publish

from oomguard import Runner
from oomguard._api.measure import estimate
from oomguard._core.units import MIB
from oomguard._estimate.margins import SETTLED
from oomguard._spec.candidate import make_candidate
from oomguard._spec.read import make_spec
from oomguard._spec.spec import Spec

BATCH = 2048
"""Far more than fits. Rivals start from here, or do not go beyond it."""
MODELS = tuple(model.fields | {"seq": BATCH_SEQ[model.name]} for model in JUDGE if model.name in BATCH_SEQ)
SMOKE: tuple[dict[str, Any], int] = (
    {"cell": "lstm", "hidden": 64, "layers": 1, "seq": 100, "features": 16}, 400 * MIB
)  # fmt: skip
RIVAL_SECONDS = 120.0
"""Time limit of a rival."""
SLOW = ("lightning-binsearch", "optuna", "accelerate")
"""Rivals that a smoke run leaves out. Other rivals use the same code, and recovers_without_loss.py runs accelerate."""
MAX_PROBES, MIN_SHARE, MAX_TIME = 4, 0.98, 1 / 3
COLUMNS = ("", "found", "of max", "trials", "OOMs", "seconds")
"""For oomguard, the OOMs include probes that exceeded the budget and were stopped: a rival gets an error there."""
WIDTHS = (34, 6, 7, 6, 5, 8)


def largest(spec: Spec, budget_bytes: int) -> tuple[int, int]:
    """Bisect the largest batch that runs in one pass within the budget. Return it and the number of probes.

    The bisection starts from the estimate to save time. The result does not depend on where it starts.
    """
    with Runner("cpu", seconds=1.0) as runner:
        tried: dict[int, bool] = {}

        def fits(rows: int) -> bool:
            if rows not in tried:
                batch = msgspec.structs.replace(spec, batch=rows)
                record = runner.probe(
                    batch,
                    make_candidate(batch, **knobs(batch)),
                    budget_bytes=budget_bytes,
                    steps=SETTLED,
                    passes=SETTLED,
                )
                assert record.verdict.ran or record.verdict.name in ("OVER", "OOM"), record.message
                tried[rows] = record.verdict.ran
            return tried[rows]

        assert not fits(spec.batch), f"The case is not hard: {spec.batch} sequences fit."
        guess = first_guess(spec, budget_bytes)
        low, high = guess, spec.batch
        while low > 1 and not fits(low):
            low, high = low * 9 // 10, low
        step = max(1, low // 50)
        while low + step < high and fits(low + step):
            low, step = low + step, 2 * step
        high = min(high, low + step)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        assert fits(low)
        assert not fits(low + 1)
        return low, len(tried)


def first_guess(spec: Spec, budget_bytes: int) -> int:
    """Return about the largest batch that fits by the uncalibrated estimate."""
    sizes = list(range(1, spec.batch))
    within = estimate(spec, microbatch=sizes, budget_bytes=budget_bytes, **knobs(spec)).total_bytes <= budget_bytes
    return max((size for size, fits in zip(sizes, within, strict=True) if fits), default=1)


def run_case(fields: dict[str, Any], budget_bytes: int, rivals: list[str]) -> dict[str, Any]:
    """Run oomguard and its rivals on one model and budget."""
    fields = fields | {"batch": BATCH}
    spec = make_spec(fields)
    maximum, probes = largest(spec, budget_bytes)
    border = find("plain", fields, start=maximum)
    case: dict[str, Any] = {"spec": fields, "budget_bytes": budget_bytes, "maximum": maximum, "bisection": probes}
    case |= {
        "committed_growth_bytes": border["growth_bytes"],
        "oomguard": find("oomguard", fields, budget_bytes=budget_bytes),
    }
    for tool in rivals:
        case[tool] = find(tool, fields, RIVAL_SECONDS, start=BATCH, **border)
        if case[tool]["error"] and case[tool]["seconds"] < RIVAL_SECONDS:
            case[f"{tool}, translated"] = find(tool, fields, RIVAL_SECONDS, start=BATCH, translate=True, **border)
    return case


def show(case: dict[str, Any]) -> None:
    """Print the table of one case."""
    spec = case["spec"]
    extra = " bidirectional" * bool(spec.get("bidirectional")) + f" vocabulary {spec.get('vocab')}" * ("vocab" in spec)
    shape = f"{spec['cell']} {spec['hidden']} × {spec['layers']}{extra}"
    model = f"{shape}, T = {spec['seq']}, {case['budget_bytes'] // MIB} MiB"
    print(f"\n{model}: true maximum {case['maximum']} ({case['bisection']} probes)")
    print_row(COLUMNS, WIDTHS)
    for name, answer in case.items():
        if isinstance(answer, dict) and "found" in answer:
            share = "" if answer["found"] is None else f"{answer['found'] / case['maximum']:.1%}"
            cells = ("-" if answer[key] is None else answer[key] for key in ("found", "trials", "ooms"))
            batch, trials, ooms = cells
            print_row((f"  {name}", batch, share, trials, ooms, f"{answer['seconds']:.1f}"), WIDTHS)
            if answer["error"]:
                print(f"    stopped with an error: {answer['error']}")


def seconds_of(case: dict[str, Any], tool: str) -> float:
    """Return the seconds of a tool, or those of its translated run if it crashed in the first one."""
    return float(case.get(f"{tool}, translated", case[tool])["seconds"])


def main() -> None:
    cases = [(model, budget_bytes) for budget_bytes in BATCH_BUDGETS_BYTES for model in MODELS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="?", type=int, default=len(cases))
    parser.add_argument("--smoke", action="store_true", help="run one tiny case with the rivals that are installed")
    args = parser.parse_args()
    rivals = [tool for tool in installed() if not (args.smoke and tool in SLOW)]
    if not args.smoke and len(rivals) < len(PACKAGES):
        parser.error("Not all rivals are installed. Run: pip install -c constraints.txt '.[bench]'")
    finished = []
    for model, budget_bytes in [SMOKE] if args.smoke else cases[: args.cases]:
        finished.append(run_case(model, budget_bytes, rivals))
        show(finished[-1])
    total = {tool: sum(seconds_of(case, tool) for case in finished) for tool in ("oomguard", *rivals)}
    print("\nTotal seconds: " + ", ".join(f"{tool} {seconds:.0f}" for tool, seconds in total.items()))
    packages = tuple(dict.fromkeys(PACKAGES[tool] for tool in rivals))
    if args.smoke:
        publish("search_needs_few_probes", {"cases": finished}, {}, whole=False, packages=packages)
    result, claims = judge(finished, total["oomguard"] / total["lightning-binsearch"])
    publish("search_needs_few_probes", result, claims, whole=args.cases >= len(cases), packages=packages)


def judge(finished: list[dict[str, Any]], ratio: float) -> tuple[dict[str, Any], dict[str, bool]]:
    """Compute the figures of all cases, and check the statements of the claim."""
    share = min(case["oomguard"]["found"] / case["maximum"] for case in finished)
    probes = max(case["oomguard"]["trials"] for case in finished)
    over = sum(case["oomguard"]["over"] for case in finished)
    ooms = sum(case["oomguard"]["ooms"] for case in finished) - over
    claims = {
        f"at most {MAX_PROBES} probes (most: {probes})": probes <= MAX_PROBES,
        f"no probe runs out of memory ({ooms})": ooms == 0,
        f"no probe goes over the budget, to be stopped there ({over})": over == 0,
        f"at least {MIN_SHARE:.0%} of the maximum (least: {share:.1%})": share >= MIN_SHARE,
        f"at most 1/3 of the time of Lightning's binary search ({ratio:.2f})": ratio <= MAX_TIME,
    }
    figures = {"least_share": share, "most_probes": probes, "ooms": ooms, "over": over, "time_ratio": ratio}
    return figures | {"cases": finished}, claims


if __name__ == "__main__":
    main()
