"""Claim: within 256 MiB of growth over the runtime, oomguard trains exact sequences at least 100 times as long as plain
PyTorch does, and takes at most 1.5 times as long for a token.

    python benchmarks/long_sequences_fit.py [--budgets 128MiB,256MiB,1GiB] [--smoke]

About 20 minutes, most of them for 1 GiB. One LSTM layer, hidden 64, microbatch 4, a target at every step, one thread,
the allocator setting `steady` for all. Side by side: the plain step; torch.utils.checkpoint by hand in sqrt(T) pieces,
the loss inside the piece, in its better variant (`use_reentrant=True`, no random numbers kept); oomguard with the
pieces that its planner chooses by arithmetic alone.

Inputs and targets are a mapped file in every contender. Before each call of the LSTM the pages that have been read are
let go, as oomguard's own data sources do, so that they do not count as growth: a backward pass that needs them again
reads them again. Every run is a process of its own: a short step loads the libraries, then the kernel's high-water
mark is set back, and what it rises to above what is resident then is the growth. The parent looks every 5 ms and kills
what goes over. Times are the processor's, so that what else runs does not count. The plain length is bisected to 2 %.
The others are tried at 100 times that length, and bisected if that goes over: what they reach at most was not looked
for, since it takes hours to run; the planner's own figure is printed.
"""

import argparse
import gc
import json
import math
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from peak import status_bytes
from results import print_row, publish

from oomguard._core.units import MIB, format_bytes, parse_bytes
from oomguard._device.proc import read_status
from oomguard._estimate import terms
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.malloc import ENVIRONMENT
from oomguard._estimate.target import CPU
from oomguard._probe.verdict import Verdict, judge
from oomguard._search.propose import choose
from oomguard._search.screen import screen
from oomguard._search.space import Choices, Problem, make_space
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.spec import MAX_SEQ, Spec

HIDDEN, MICROBATCH, FEW = 64, 4, 4
BUDGETS = ("128MiB", "256MiB", "1GiB")
REACH, MOST_TIME, NEAR = 100, 1.5, 1e-3
MEASURE_SECONDS, POLL_SECONDS = 0.5, 0.005
KNOBS: dict[str, Any] = {"microbatch": MICROBATCH, "engine": "onednn", "threads": 1, "allocator": "steady"}
REFUSED = "an allocation was refused"
WAYS = ("plain", "checkpoint", "oomguard")
WIDTHS = (14, 14, 9, 10, 9, 12, 12)


def spec_of(steps: int) -> Spec:
    return Spec(cell="lstm", seq=steps, features=1, hidden=HIDDEN, layers=1, batch=MICROBATCH)


def write(path: Path, steps: int) -> None:
    """Random inputs and targets for so many time steps."""
    array = np.memmap(path, np.float32, "w+", shape=(2 * steps * MICROBATCH,))
    dice = np.random.default_rng(0)
    for start in range(0, len(array), 1 << 20):
        array[start : start + (1 << 20)] = dice.standard_normal(len(array[start : start + (1 << 20)]), np.float32)
    array.flush()


def make_step(way: str, path: str) -> Callable[[int, dict[str, Any]], float]:
    """What trains one optimizer step of the first so many time steps, and returns the norm of its gradient."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from oomguard._rnn import Microbatch
    from oomguard._step import prepare, step

    with open(path, "r+b") as file:  # never written to, but torch wants to be allowed to
        content = mmap.mmap(file.fileno(), 0)
    data = torch.frombuffer(content, dtype=torch.float32).view(2, -1, MICROBATCH, 1)
    torch.manual_seed(0)
    training = prepare(spec_of(FEW), Candidate(microbatch=MICROBATCH))
    for call in training.model.calls:
        call.register_forward_pre_hook(lambda *_: content.madvise(mmap.MADV_DONTNEED))

    def ours(steps: int, knobs: dict[str, Any]) -> float:
        how = replace(training, candidate=make_candidate(spec_of(steps), **knobs))
        outcome = step(how, [Microbatch(data[0, :steps], data[1, :steps])], steps * MICROBATCH, clip=math.inf)
        assert outcome.norm is not None
        return float(outcome.norm)

    def piece(inputs: Any, wanted: Any, *state: Any) -> tuple[Any, ...]:
        outputs, (after,) = training.model(inputs, [state])
        return torch.nn.functional.mse_loss(outputs, wanted, reduction="sum"), *after

    def by_hand(steps: int, knobs: dict[str, Any]) -> float:
        length, total = -(-steps // knobs["segments"]), torch.zeros(())
        state = [torch.zeros(1, MICROBATCH, HIDDEN, requires_grad=True) for _ in range(2)]
        for inputs, wanted in zip(data[0, :steps].split(length), data[1, :steps].split(length), strict=True):
            loss, *state = checkpoint(piece, inputs, wanted, *state, use_reentrant=True, preserve_rng_state=False)
            total = total + loss
        (total / (steps * MICROBATCH)).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.get_total_norm([p.grad for p in training.model.parameters() if p.grad is not None])
        training.optimizer.step()
        training.optimizer.zero_grad()
        return float(norm)

    return by_hand if way == "checkpoint" else ours


def run_one(case: dict[str, Any]) -> None:
    """In the child: says what is resident before the model, then measures steps."""
    import torch

    torch.set_num_threads(1)
    make_step(case["way"], case["path"])(FEW, case["knobs"] | {"segments": min(2, case["knobs"]["segments"])})
    gc.collect()
    runtime_bytes = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    print(json.dumps({"runtime_bytes": runtime_bytes}), flush=True)
    train = make_step(case["way"], case["path"])
    train(FEW, case["knobs"] | {"segments": 1, "levels": 1})  # makes the optimizer's state
    norm, seconds = 0.0, list[float]()
    while not seconds or sum(seconds) < MEASURE_SECONDS:
        began = time.process_time()
        found = train(case["steps"], case["knobs"])
        seconds.append(time.process_time() - began)
        norm = norm or found
    growth_bytes = status_bytes("VmHWM") - runtime_bytes
    print(json.dumps({"growth_bytes": growth_bytes, "seconds": min(seconds), "norm": norm}))


def measure(way: str, steps: int, knobs: dict[str, Any], path: Path, budget_bytes: int) -> dict[str, Any]:
    """A contender in a process of its own, killed if it goes over. Outcome: within, over or refused."""
    case = {"way": way, "steps": steps, "knobs": knobs, "path": str(path)}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | ENVIRONMENT["steady"]
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
        words, errors = child.communicate()
    if child.returncode:
        assert REFUSED in errors, errors  # whatever else goes wrong is no result
        return row | {"outcome": "refused"}
    found: dict[str, Any] = json.loads(words.splitlines()[-1])
    return row | found | {"outcome": "within" if found["growth_bytes"] <= budget_bytes else "over"}


def planned(steps: int, budget_bytes: int) -> dict[str, Any] | None:
    """The knobs that oomguard's planner chooses by arithmetic; None if nothing fits.

    It counts the inputs as memory, which they are not here: the budget is larger by that.
    """
    spec = spec_of(steps)
    most_bytes = CPU.runtime_bytes + budget_bytes + int(terms.input_bytes(spec, Candidate(microbatch=MICROBATCH)))
    space = make_space(spec, CPU, most_bytes, Choices(fixed=KNOBS))
    view = screen(Problem(spec=spec, target=CPU, space=space, budget_bytes=most_bytes), ())
    row = choose(view)
    if row is None:
        return None
    chosen = view.candidates[row]
    names = ("segments", "levels", "recompute", "keep")
    return KNOBS | {name: getattr(chosen, name) for name in names}


def knobs_of(way: str, steps: int, budget_bytes: int) -> dict[str, Any] | None:
    if way == "oomguard":
        return planned(steps, budget_bytes)
    return KNOBS | {"segments": 1 if way == "plain" else math.isqrt(steps)}


def longest(way: str, path: Path, budget_bytes: int, tries: tuple[int, int], part: int) -> dict[str, Any]:
    """The longest run within the budget, to one `part`; no longer than the second of the tries."""
    guess, most = tries
    best: dict[str, Any] = {"way": way, "steps": 0, "outcome": "over"}

    def runs(steps: int) -> bool:
        nonlocal best
        knobs = knobs_of(way, steps, budget_bytes)
        found = {"outcome": "over"} if knobs is None else measure(way, steps, knobs, path, budget_bytes)
        best = found if found["outcome"] == "within" else best
        return found["outcome"] == "within"

    if runs(most):
        return best | {"at_least": True}
    low, high = guess, most
    while not runs(low):
        low, high = low * 9 // 10, low
    while high - low > low // part:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return best | {"at_least": False}


def plain_guess(budget_bytes: int) -> int:
    """How long the plain step can be by the estimate: its growth grows with the length."""
    spec = spec_of(10_000)
    candidate = make_candidate(spec, **KNOBS)
    growth_bytes = estimate_step(spec, candidate).growth_bytes - terms.input_bytes(spec, candidate)
    return int(spec.steps * budget_bytes // growth_bytes)


def arithmetic_limit(steps: int, budget_bytes: int) -> int:
    """How far the planner would go, in doublings."""
    while 2 * steps <= MAX_SEQ and planned(2 * steps, budget_bytes) is not None:
        steps *= 2
    return steps


def run_budget(budget_bytes: int, path: Path, reach: int, part: int) -> dict[str, Any]:
    """All contenders within one budget."""
    guess = plain_guess(budget_bytes)
    plain = longest("plain", path, budget_bytes, (guess, 2 * guess), part)
    assert not plain["at_least"], "The plain step is not at its border."
    case: dict[str, Any] = {"budget_bytes": budget_bytes, "plain": plain}
    for way in WAYS[1:]:
        case[way] = longest(way, path, budget_bytes, (plain["steps"], reach * plain["steps"]), part)
    hard = measure("plain", case["oomguard"]["steps"], KNOBS | {"segments": 1}, path, budget_bytes)
    same = measure("oomguard", plain["steps"], KNOBS | {"segments": math.isqrt(plain["steps"])}, path, budget_bytes)
    case |= {"plain_there": hard["outcome"], "apart": abs(same["norm"] / plain["norm"] - 1)}
    return case | {"by_arithmetic": arithmetic_limit(case["oomguard"]["steps"], budget_bytes)}


def token_seconds(row: dict[str, Any]) -> float:
    return float(row["seconds"] / (row["steps"] * MICROBATCH))


def show(case: dict[str, Any]) -> None:
    print(f"\n{format_bytes(case['budget_bytes'])} over the runtime")
    print_row(("", "longest", "of plain", "pieces", "levels", "growth", "µs a token"), WIDTHS)
    for way in WAYS:
        row, knobs = case[way], case[way]["knobs"]
        length = f"{'≥ ' * row['at_least']}{row['steps']:,}"
        times = f"{row['steps'] / case['plain']['steps']:.0f} ×"
        growth, each = format_bytes(row["growth_bytes"]), f"{1e6 * token_seconds(row):.2f}"
        print_row((f"  {way}", length, times, knobs["segments"], knobs.get("levels", 1), growth, each), WIDTHS)
    far = case["oomguard"]["steps"]
    print(f"  plain at {far:,}: {case['plain_there']}; the planner would go to {case['by_arithmetic']:,} by arithmetic")


def claims_of(cases: list[dict[str, Any]], reach: int, *, timed: bool) -> dict[str, bool]:
    claims = {}
    for case in cases:
        name = format_bytes(case["budget_bytes"])
        times = case["oomguard"]["steps"] / case["plain"]["steps"]
        slower = token_seconds(case["oomguard"]) / token_seconds(case["plain"])
        claims[f"{name}: at least {reach} times plain's length ({times:.0f})"] = times >= reach
        claims[f"{name}: plain at that length does not fit ({case['plain_there']})"] = case["plain_there"] != "within"
        claims[f"{name}: the gradient at plain's length is plain's ({case['apart']:.0e} apart)"] = case["apart"] <= NEAR
        if timed:
            claims[f"{name}: at most {MOST_TIME} of plain's time for a token ({slower:.2f})"] = slower <= MOST_TIME
    return claims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--smoke", action="store_true", help="one small budget, coarsely, a tenth of the reach")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        try:
            run_one(json.loads(given.one))
        except Exception as error:
            if judge(error) is not Verdict.OOM:
                raise
            sys.exit(REFUSED)
        return
    budgets = [16 * MIB] if given.smoke else [parse_bytes(one) for one in given.budgets.split(",")]
    reach, part = (REACH // 10, 1) if given.smoke else (REACH, 50)
    with tempfile.TemporaryDirectory() as directory:
        path, cases = Path(directory) / "data", list[dict[str, Any]]()
        write(path, reach * 2 * plain_guess(max(budgets)))
        for budget_bytes in budgets:
            cases.append(run_budget(budget_bytes, path, reach, part))
            show(cases[-1])
    whole = not given.smoke and {*map(parse_bytes, BUDGETS)} <= {*budgets}
    result = {"hidden": HIDDEN, "microbatch": MICROBATCH, "reach": reach, "cases": cases}
    publish("long_sequences_fit", result, claims_of(cases, reach, timed=not given.smoke), whole=whole)


if __name__ == "__main__":
    main()
