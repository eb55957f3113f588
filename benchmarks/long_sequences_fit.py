"""Claim: within 256 MiB of growth over the runtime, oomguard trains exact sequences at least 100 times as long as plain
PyTorch does, and takes at most 1.5 times as long per token.

    python benchmarks/long_sequences_fit.py [--budgets 128MiB,256MiB,1GiB] [--smoke]

The benchmark takes about 20 minutes, most of them for 1 GiB. The model is one LSTM layer with hidden size 64,
microbatch 4 and a target at every time step. All contenders run with one thread and the heap setting `tight`:

- `plain`: the plain step;
- `checkpoint`: torch.utils.checkpoint, applied by hand to sqrt(T) pieces with the loss inside each piece, in its better
  variant (`use_reentrant=True`, `preserve_rng_state=False`);
- `oomguard`: segments that oomguard's planner chooses by arithmetic alone.

Every contender reads inputs and targets from a mapped file. Before each call of the LSTM, the pages that have been read
are released, as in oomguard's own data sources, so that they do not count as growth. The backward pass reads them
again.

Each run has its own process. A short step loads the libraries, and the kernel's high-water mark is reset. The growth is
the new high-water mark minus the bytes that were resident at the reset. The parent reads the resident bytes every 5 ms
and kills a run that exceeds the budget. Times are CPU times, so that other programs do not matter.

The longest plain sequence is bisected to 2 %. The other contenders run at 100 times that length, and are bisected only
if that does not fit. Their true maximum is not measured, because that would take hours; the planner's prediction of it
is printed.
"""

import argparse
import gc
import json
import math
import mmap
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from peak import status_bytes, tight, without_heap_settings
from results import print_row, publish

from oomguard._core.units import MIB, format_bytes, parse_bytes
from oomguard._device.proc import read_status
from oomguard._estimate import terms
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.target import CPU
from oomguard._probe.verdict import Verdict, judge
from oomguard._search.propose import choose
from oomguard._search.screen import screen
from oomguard._search.space import Choices, Problem, make_space
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.spec import MAX_SEQ, Spec

HIDDEN, MICROBATCH, TINY_SEQ = 64, 4, 4
BUDGETS = ("128MiB", "256MiB", "1GiB")
REACH, MAX_TIME, TOLERANCE = 100, 1.5, 1e-3
"""Length relative to plain PyTorch, time per token relative to it, and relative difference of the gradient norms."""
MEASURE_SECONDS, POLL_SECONDS = 0.5, 0.005
KNOBS: dict[str, Any] = {"microbatch": MICROBATCH, "engine": "onednn", "threads": 1, "allocator": "tight"}
REFUSED = "an allocation was refused"
WAYS = ("plain", "checkpoint", "oomguard")
WIDTHS = (14, 14, 9, 10, 9, 12, 12)


def spec_of(steps: int) -> Spec:
    return Spec(cell="lstm", seq=steps, features=1, hidden=HIDDEN, layers=1, batch=MICROBATCH)


def write(path: Path, steps: int) -> None:
    """Write random inputs and targets for this number of time steps."""
    array = np.memmap(path, np.float32, "w+", shape=(2 * steps * MICROBATCH,))
    rng = np.random.default_rng(0)
    for start in range(0, len(array), 1 << 20):
        array[start : start + (1 << 20)] = rng.standard_normal(len(array[start : start + (1 << 20)]), np.float32)
    array.flush()


def make_step(way: str, path: str) -> Callable[[int, dict[str, Any]], float]:
    """Make a function of a length and knobs. It runs one optimizer step on the first time steps of the file and returns
    the norm of the gradient.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    from oomguard._rnn import Microbatch
    from oomguard._step import prepare, step

    with open(path, "r+b") as file:  # torch.frombuffer needs a writable buffer, although nothing is written
        content = mmap.mmap(file.fileno(), 0)
    data = torch.frombuffer(content, dtype=torch.float32).view(2, -1, MICROBATCH, 1)
    torch.manual_seed(0)
    training = prepare(spec_of(TINY_SEQ), Candidate(microbatch=MICROBATCH))
    for call in training.model.calls:
        call.register_forward_pre_hook(lambda *_: content.madvise(mmap.MADV_DONTNEED))

    def ours(steps: int, knobs: dict[str, Any]) -> float:
        configured = replace(training, candidate=make_candidate(spec_of(steps), **knobs))
        outcome = step(configured, [Microbatch(data[0, :steps], data[1, :steps])], steps * MICROBATCH, clip=math.inf)
        assert outcome.norm is not None
        return float(outcome.norm)

    def piece(inputs: Any, targets: Any, *state: Any) -> tuple[Any, ...]:
        outputs, (after,) = training.model(inputs, [state])
        return torch.nn.functional.mse_loss(outputs, targets, reduction="sum"), *after

    def by_hand(steps: int, knobs: dict[str, Any]) -> float:
        length, total = -(-steps // knobs["segments"]), torch.zeros(())
        state = [torch.zeros(1, MICROBATCH, HIDDEN, requires_grad=True) for _ in range(2)]
        for inputs, targets in zip(data[0, :steps].split(length), data[1, :steps].split(length), strict=True):
            loss, *state = checkpoint(piece, inputs, targets, *state, use_reentrant=True, preserve_rng_state=False)
            total = total + loss
        (total / (steps * MICROBATCH)).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.get_total_norm([p.grad for p in training.model.parameters() if p.grad is not None])
        training.optimizer.step()
        training.optimizer.zero_grad()
        return float(norm)

    return by_hand if way == "checkpoint" else ours


def measure_in_child(case: dict[str, Any]) -> None:
    """Print the resident bytes before the model is made, then measure steps, in this child process."""
    import torch

    torch.set_num_threads(1)
    make_step(case["way"], case["path"])(TINY_SEQ, case["knobs"] | {"segments": min(2, case["knobs"]["segments"])})
    gc.collect()
    runtime_bytes = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    print(json.dumps({"runtime_bytes": runtime_bytes}), flush=True)
    train = make_step(case["way"], case["path"])
    train(TINY_SEQ, case["knobs"] | {"segments": 1, "levels": 1})  # creates the optimizer state
    norm, seconds = 0.0, list[float]()
    while not seconds or sum(seconds) < MEASURE_SECONDS:
        began = time.process_time()
        step_norm = train(case["steps"], case["knobs"])
        seconds.append(time.process_time() - began)
        norm = norm or step_norm
    growth_bytes = status_bytes("VmHWM") - runtime_bytes
    print(json.dumps({"growth_bytes": growth_bytes, "seconds": min(seconds), "norm": norm}))


def measure(way: str, steps: int, knobs: dict[str, Any], path: Path, budget_bytes: int) -> dict[str, Any]:
    """Run a contender in its own process, and kill it if it exceeds the budget.

    The outcome is `within`, `over` or `refused` (an allocation failed).
    """
    case = {"way": way, "steps": steps, "knobs": knobs, "path": str(path)}
    environment = without_heap_settings() | tight()
    command = [sys.executable, str(Path(__file__)), "--one", json.dumps(case)]
    row = {"way": way, "steps": steps, "knobs": knobs}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        first = child.stdout.readline()
        runtime_bytes = json.loads(first)["runtime_bytes"] if first else 0
        while first and child.poll() is None:
            now = read_status(child.pid)
            if now is not None and now.resident_bytes - runtime_bytes > budget_bytes:
                child.kill()
                return row | {"outcome": "over"}
            time.sleep(POLL_SECONDS)
        output, errors = child.communicate()
    if child.returncode:
        assert REFUSED in errors, errors  # any other error is a failure of the benchmark
        return row | {"outcome": "refused"}
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return row | figures | {"outcome": "within" if figures["growth_bytes"] <= budget_bytes else "over"}


def planned_knobs(steps: int, budget_bytes: int) -> dict[str, Any] | None:
    """Return the knobs that oomguard's planner chooses by arithmetic, or None if nothing fits.

    The planner counts the inputs as memory, but here they are in a mapped file. The budget is increased by their size.
    """
    spec = spec_of(steps)
    planner_bytes = CPU.runtime_bytes + budget_bytes + int(terms.input_bytes(spec, Candidate(microbatch=MICROBATCH)))
    space = make_space(spec, CPU, planner_bytes, Choices(fixed=KNOBS))
    view = screen(Problem(spec=spec, target=CPU, space=space, budget_bytes=planner_bytes), ())
    row = choose(view)
    if row is None:
        return None
    chosen = view.candidates[row]
    names = ("segments", "levels", "recompute", "keep")
    return KNOBS | {name: getattr(chosen, name) for name in names}


def knobs_of(way: str, steps: int, budget_bytes: int) -> dict[str, Any] | None:
    if way == "oomguard":
        return planned_knobs(steps, budget_bytes)
    return KNOBS | {"segments": 1 if way == "plain" else math.isqrt(steps)}


def longest(way: str, path: Path, budget_bytes: int, lengths: tuple[int, int], part: int) -> dict[str, Any]:
    """Find the longest run within the budget. `lengths` are the first guess and the longest length that is tried.

    The bisection ends at a precision of one `part` of the length.
    """
    guess, most = lengths
    best: dict[str, Any] = {"way": way, "steps": 0, "outcome": "over"}

    def fits(steps: int) -> bool:
        nonlocal best
        knobs = knobs_of(way, steps, budget_bytes)
        row = {"outcome": "over"} if knobs is None else measure(way, steps, knobs, path, budget_bytes)
        best = row if row["outcome"] == "within" else best
        return row["outcome"] == "within"

    if fits(most):
        return best | {"at_least": True}
    low, high = guess, most
    while not fits(low):
        low, high = low * 9 // 10, low
    while high - low > low // part:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return best | {"at_least": False}


def plain_guess(budget_bytes: int) -> int:
    """Estimate the longest plain sequence within the budget. The growth is proportional to the length."""
    spec = spec_of(10_000)
    candidate = make_candidate(spec, **KNOBS)
    growth_bytes = estimate_step(spec, candidate).growth_bytes - terms.input_bytes(spec, candidate)
    return int(spec.steps * budget_bytes // growth_bytes)


def arithmetic_limit(steps: int, budget_bytes: int) -> int:
    """Double the length as long as the planner finds knobs that fit, and return the last length."""
    while 2 * steps <= MAX_SEQ and planned_knobs(2 * steps, budget_bytes) is not None:
        steps *= 2
    return steps


def run_budget(budget_bytes: int, path: Path, reach: int, part: int) -> dict[str, Any]:
    """Run all contenders within one budget."""
    guess = plain_guess(budget_bytes)
    plain = longest("plain", path, budget_bytes, (guess, 2 * guess), part)
    assert not plain["at_least"], "The plain step fits at twice the estimated length, so its limit is unknown."
    case: dict[str, Any] = {"budget_bytes": budget_bytes, "plain": plain}
    for way in WAYS[1:]:
        case[way] = longest(way, path, budget_bytes, (plain["steps"], reach * plain["steps"]), part)
    plain_there = measure("plain", case["oomguard"]["steps"], KNOBS | {"segments": 1}, path, budget_bytes)
    same = measure("oomguard", plain["steps"], KNOBS | {"segments": math.isqrt(plain["steps"])}, path, budget_bytes)
    case |= {"plain_there": plain_there["outcome"], "apart": abs(same["norm"] / plain["norm"] - 1)}
    return case | {"by_arithmetic": arithmetic_limit(case["oomguard"]["steps"], budget_bytes)}


def token_seconds(row: dict[str, Any]) -> float:
    return float(row["seconds"] / (row["steps"] * MICROBATCH))


def show(case: dict[str, Any]) -> None:
    print(f"\nBudget: {format_bytes(case['budget_bytes'])} over the runtime")
    print_row(("", "longest", "of plain", "pieces", "levels", "growth", "µs/token"), WIDTHS)
    for way in WAYS:
        row, knobs = case[way], case[way]["knobs"]
        length = f"{'≥ ' * row['at_least']}{row['steps']:,}"
        times = f"{row['steps'] / case['plain']['steps']:.0f} ×"
        growth, each = format_bytes(row["growth_bytes"]), f"{1e6 * token_seconds(row):.2f}"
        print_row((f"  {way}", length, times, knobs["segments"], knobs.get("levels", 1), growth, each), WIDTHS)
    far = case["oomguard"]["steps"]
    print(
        f"  plain at {far:,} steps: {case['plain_there']}; by arithmetic, oomguard fits {case['by_arithmetic']:,} steps"
    )


def claims_of(cases: list[dict[str, Any]], reach: int, *, timed: bool) -> dict[str, bool]:
    claims = {}
    for case in cases:
        name = format_bytes(case["budget_bytes"])
        times = case["oomguard"]["steps"] / case["plain"]["steps"]
        slower = token_seconds(case["oomguard"]) / token_seconds(case["plain"])
        claims[f"{name}: at least {reach} times plain's length ({times:.0f})"] = times >= reach
        claims[f"{name}: plain at that length does not fit ({case['plain_there']})"] = case["plain_there"] != "within"
        claims[f"{name}: the gradient at plain's length is plain's ({case['apart']:.0e} apart)"] = (
            case["apart"] <= TOLERANCE
        )
        if timed:
            claims[f"{name}: at most {MAX_TIME} of plain's time for a token ({slower:.2f})"] = slower <= MAX_TIME
    return claims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--smoke", action="store_true", help="use one small budget, 10 times plain's length, coarsely")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        try:
            measure_in_child(json.loads(args.one))
        except Exception as error:
            if judge(error) is not Verdict.OOM:
                raise
            sys.exit(REFUSED)
        return
    budgets = [16 * MIB] if args.smoke else [parse_bytes(text) for text in args.budgets.split(",")]
    reach, part = (REACH // 10, 1) if args.smoke else (REACH, 50)
    with tempfile.TemporaryDirectory() as directory:
        path, cases = Path(directory) / "data", list[dict[str, Any]]()
        write(path, reach * 2 * plain_guess(max(budgets)))
        for budget_bytes in budgets:
            cases.append(run_budget(budget_bytes, path, reach, part))
            show(cases[-1])
    whole = not args.smoke and {*map(parse_bytes, BUDGETS)} <= {*budgets}
    result = {"hidden": HIDDEN, "microbatch": MICROBATCH, "reach": reach, "cases": cases}
    publish("long_sequences_fit", result, claims_of(cases, reach, timed=not args.smoke), whole=whole)


if __name__ == "__main__":
    main()
