"""Claim: the largest batch of a task is found to at least 96 % in at most 3 probes, none of which runs out of memory.

    python benchmarks/task_batches_are_found.py [CASES] [--smoke]

The benchmark has 8 models of tasks.py, each with a budget that its batch does not fill by far. `--smoke` runs one model
with few steps and claims nothing. A batch is trained in one pass. All contenders have the same model, optimizer, data
and limit, one thread and the heap setting `tight`:

- the true maximum, by bisection with probes, until one more row does not run within the budget;
- oomguard, with `maximize="batch"` and without segments; the peak of its batch is compared with what was predicted
  before that batch ran;
- Lightning's Tuner.scale_batch_size with binary search, and accelerate's find_executable_batch_size from 2,048 rows.

The budget limits resident bytes. The rivals find the limit only by an error, so for them allocations fail beyond the
bytes that the true maximum commits, counted from a process that has loaded their libraries. A rival that crashes or
takes longer than `RIVAL_SECONDS` has no answer.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

from finders import RECOGNISED, STEPS, is_installed
from peak import tight, without_heap_settings
from results import print_row, publish
from tasks import CASES

import oomguard
from oomguard._core.units import MIB

BUDGETS_MIB = {
    "word model": 900, "weight drop": 600, "character model": 560, "forecast": 500,
    "autoencoder": 560, "projected": 500, "residual": 530, "normed": 530,
}  # fmt: skip
"""The cases, each with its budget: the runtime of about 315 MiB, and room for so many rows that one is 2 to 3 %."""
SMOKE_CASE, SMOKE_STEPS, SMOKE_MIB = "projected", 20, 360
START = 2048  # rows that accelerate starts from
RIVALS = {"lightning": "pytorch-lightning", "accelerate": "accelerate"}
RIVAL_SECONDS = 600.0
MAX_PROBES, MIN_SHARE = 3, 0.96
MEDIAN_ERROR, WORST_ERROR = 0.015, 0.06
"""Largest errors of the predicted peak of the batch that is found, before that batch has run."""
COLUMNS, WIDTHS = ("", "found", "of max", "trials", "OOMs", "seconds"), (24, 6, 7, 6, 5, 8)
KNOBS: dict[str, Any] = {"threads": 1, "allocator": "tight"}


def largest(name: str, steps: int | None, budget_bytes: int, guess: int) -> tuple[int, int]:
    """Bisect the largest batch that runs in one pass. Return it and the number of probes."""
    tried: dict[int, bool] = {}

    def fits(rows: int) -> bool:
        if rows not in tried:
            record = oomguard.probe(CASES[name].task(), microbatch=rows, steps=steps, budget=budget_bytes, **KNOBS)
            assert record.verdict.ran or record.verdict.name in ("OVER", "OOM"), record.message
            tried[rows] = record.verdict.ran
        return tried[rows]

    low, high = guess, guess + 1
    while low > 1 and not fits(low):
        low, high = low * 24 // 25, low
    step = max(1, low // 25)
    while high == low + 1 and fits(low + step):
        low, high, step = low + step, low + step + 1, 2 * step
    high = max(high, low + step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, len(tried)


def run_case(name: str, steps: int | None, budget_bytes: int, rivals: list[str]) -> dict[str, Any]:
    """Run oomguard, the bisection and the rivals on one model."""
    began = time.monotonic()
    how: dict[str, Any] = {"maximize": "batch", "segments": 1, "steps": steps, "timeout": 600}
    plan = oomguard.find_feasible_config(CASES[name].task(), budget=budget_bytes, **how, **KNOBS)
    own = {"found": plan.batch, "trials": len(plan.records), "ooms": plan.ooms, "seconds": time.monotonic() - began}
    assert plan.record is not None
    assert plan.record.peak_bytes is not None
    own |= {"peak_error": plan.expected.peak_bytes / plan.record.peak_bytes - 1, "before": len(plan.records) - 1}
    maximum, probes = largest(name, steps, budget_bytes, plan.batch)
    case = {"case": name, "budget_bytes": budget_bytes, "maximum": maximum, "bisection": probes, "oomguard": own}
    border = find("plain", name, steps, start=maximum) if rivals else {}
    for tool in rivals:
        case[tool] = find(tool, name, steps, start=START, growth_bytes=border["growth_bytes"])
    return case


def find(tool: str, name: str, steps: int | None, **request: Any) -> dict[str, Any]:
    """Run one tool in a process of its own. If it crashes, the answer has the error."""
    began = time.monotonic()
    command = [sys.executable, __file__, "--child", json.dumps({"tool": tool, "case": name, "steps": steps, **request})]
    environment = without_heap_settings() | tight()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RIVAL_SECONDS, env=environment)
        lines, error = done.stdout.splitlines(), f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"
    except subprocess.TimeoutExpired:
        lines, error = [], f"not done after {RIVAL_SECONDS:.0f} s"
    seconds = time.monotonic() - began
    none: dict[str, Any] = {"found": None, "trials": None, "ooms": None, "error": error}
    return (json.loads(lines[-1]) if lines and lines[-1].startswith("{") else none) | {"seconds": seconds}


# ---- the process of a rival


class Trials:
    """Trains a task with batches of chosen sizes, and counts the trials and those that run out of memory."""

    def __init__(self, name: str, steps: int | None) -> None:
        from oomguard._task.batches import Batches

        self.task, self.steps, self.count, self.ooms = CASES[name].task(), steps, 0, 0
        self.batches = Batches(self.task)

    def loss(self, model: Any, batch: Any) -> Any:
        from oomguard._task.trace import evaluate, mean_of

        return mean_of(*evaluate(self.task, model, batch))

    def train(self, rows: int) -> int:
        from oomguard._task.trace import build, make_optimizer

        model = build(self.task).train()
        optimizer = make_optimizer(self.task, model)
        for _ in range(STEPS):
            self.loss(model, self.batches.make(rows, self.steps)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return rows

    def counted(self, run: Callable[[], Any]) -> Any:
        """Run a trial. The tool sees an out-of-memory error with the message that it recognises."""
        from oomguard._probe.verdict import Verdict, judge

        self.count += 1
        try:
            return run()
        except Exception as error:
            if judge(error) is not Verdict.OOM:
                raise
            self.ooms += 1
        raise RuntimeError(RECOGNISED)  # raised outside of the except block, so that the error holds no tensors


def with_accelerate(trials: Trials, request: dict[str, Any], limit: Callable[[], None]) -> int | None:
    from accelerate.utils import find_executable_batch_size

    def train(rows: int) -> int:
        return int(trials.counted(lambda: trials.train(rows)))

    limit()
    found: int = find_executable_batch_size(train, starting_batch_size=request["start"])()
    return found


def with_lightning(trials: Trials, request: dict[str, Any], limit: Callable[[], None]) -> int | None:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.tuner import batch_size_scaling
    from pytorch_lightning.tuner.tuning import Tuner
    from torch.utils.data import DataLoader

    from oomguard._task.trace import build, make_optimizer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batch_size = build(trials.task), 2

        def training_step(self, batch: Any, _: int) -> Any:
            return trials.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return make_optimizer(trials.task, self.model)

        def train_dataloader(self) -> Any:
            # the finder tries no batch that is larger than the number of samples
            return DataLoader(range(1_000_000), batch_size=1, collate_fn=self.collate)  # type: ignore[arg-type]

        def collate(self, _: Any) -> Any:
            return trials.batches.make(self.batch_size, trials.steps)

    run, module = batch_size_scaling._try_loop_run, Module()
    batch_size_scaling._try_loop_run = lambda trainer, params: trials.counted(lambda: run(trainer, params))
    with tempfile.TemporaryDirectory() as directory:
        quiet: dict[str, Any] = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        trainer = Trainer(accelerator="cpu", max_steps=1, default_root_dir=directory, **quiet)
        Trainer(accelerator="cpu", max_steps=1, default_root_dir=directory, **quiet).fit(Module())  # loads libraries
        limit()
        return Tuner(trainer).scale_batch_size(module, mode="binsearch", steps_per_trial=STEPS)


TOOLS: dict[str, Callable[..., int | None]] = {"lightning": with_lightning, "accelerate": with_accelerate}


def child(request: dict[str, Any]) -> None:
    """Run a rival, or with the tool `plain` one training that tells how many bytes it commits."""
    import torch

    from oomguard._device.cpu import Cpu

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trials = Trials(request["case"], request["steps"])
    trials.train(2)  # loads libraries

    def committed_bytes() -> int:
        return Cpu().reading().committed_bytes or 0

    if request["tool"] == "plain":
        before_bytes = committed_bytes()
        Cpu().reset()
        trials.train(request["start"])
        print(json.dumps({"growth_bytes": (Cpu().reading().committed_peak_bytes or 0) - before_bytes}))
        return

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (committed_bytes() + request["growth_bytes"], resource.RLIM_INFINITY))

    found, error = None, None
    try:
        found = TOOLS[request["tool"]](trials, request, limit)
    except Exception as failure:  # a tool that crashes is a result, not a failure of the benchmark
        error = f"{type(failure).__name__}: {str(failure)[:200]}"
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(json.dumps({"found": found, "trials": trials.count, "ooms": trials.ooms, "error": error}))


# ---- the result


def show(case: dict[str, Any]) -> None:
    """Print the table of one case."""
    budget = case["budget_bytes"] // MIB
    print(f"\n{case['case']}, {budget} MiB: true maximum {case['maximum']} ({case['bisection']} probes)")
    print_row(COLUMNS, WIDTHS)
    for name in ("oomguard", *RIVALS):
        answer = case.get(name)
        if answer is not None:
            share = "-" if answer["found"] is None else f"{answer['found'] / case['maximum']:.1%}"
            cells = ["-" if answer[key] is None else answer[key] for key in ("found", "trials", "ooms")]
            print_row((f"  {name}", cells[0], share, *cells[1:], f"{answer['seconds']:.1f}"), WIDTHS)
            if answer.get("error"):
                print(f"    stopped with an error: {answer['error']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="?", type=int, default=len(BUDGETS_MIB), help="number of models")
    parser.add_argument("--smoke", action="store_true", help="run one model with few steps")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    rivals = [tool for tool, package in RIVALS.items() if is_installed(package)]
    chosen: list[tuple[str, int | None, int]] = [
        (name, CASES[name].steps, budget * MIB) for name, budget in [*BUDGETS_MIB.items()][: args.cases]
    ]
    if args.smoke:
        chosen, rivals = [(SMOKE_CASE, SMOKE_STEPS, SMOKE_MIB * MIB)], [tool for tool in rivals if tool == "accelerate"]
    finished = []
    for name, steps, budget_bytes in chosen:
        finished.append(run_case(name, steps, budget_bytes, rivals))
        show(finished[-1])
    own = [case["oomguard"] for case in finished]
    errors = [abs(one["peak_error"]) for one in own]
    share = min(case["oomguard"]["found"] / case["maximum"] for case in finished)
    probes, ooms = max(one["trials"] for one in own), sum(one["ooms"] for one in own)
    claims = {
        f"at most {MAX_PROBES} probes (most: {probes})": probes <= MAX_PROBES,
        f"no probe runs out of memory or over the budget ({ooms})": ooms == 0,
        f"at least {MIN_SHARE:.0%} of the maximum (least: {share:.1%})": share >= MIN_SHARE,
        f"before it runs, the peak of that batch is predicted with a median error of at most {MEDIAN_ERROR:.1%} "
        f"({median(errors):.1%}), {WORST_ERROR:.0%} in the worst case ({max(errors):.1%})": (
            median(errors) <= MEDIAN_ERROR and max(errors) <= WORST_ERROR
        ),
    }
    figures = {"least_share": share, "most_probes": probes, "ooms": ooms, "cases": finished}
    whole = args.cases >= len(BUDGETS_MIB) and not args.smoke
    packages = tuple(RIVALS[tool] for tool in rivals)
    publish("task_batches_are_found", figures, {} if args.smoke else claims, whole=whole, packages=packages)


if __name__ == "__main__":
    main()
