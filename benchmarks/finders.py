"""How oomguard and other tools find the largest microbatch: find_feasible_config, Lightning's Tuner.scale_batch_size,
accelerate's find_executable_batch_size, toma's batch, and a plain Optuna search.

    python benchmarks/finders.py '{"tool": "lightning-binsearch", "spec": {...}, "growth_bytes": ..., "start": ...}'

prints one JSON line: what it found, its trials, how many of them ran out of memory, and its seconds: of the whole
process, from its start, but without what only this measurement needs. oomguard is given `budget_bytes`. The others find
the border by running into it, so their process is given one: RLIMIT_DATA, `growth_bytes` over what is committed after
all is imported and a tiny step has run (so that the tool's own libraries do not count against it).
`"translate": true` shows the tool every error that is one of memory in the words that it knows. The tool `plain` runs
`start` sequences without a limit and prints what was committed.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from oomguard._estimate.malloc import ENVIRONMENT
from oomguard._spec.read import make_spec
from oomguard._spec.spec import Spec

STEPS = 3
"""Of a trial: Lightning's default."""
OPTUNA_TRIALS = 20
PACKAGES = {
    "lightning-power": "pytorch-lightning",
    "lightning-binsearch": "pytorch-lightning",
    "accelerate": "accelerate",
    "toma": "toma",
    "optuna": "optuna",
}
"""The rivals, and what they come from."""
KNOWN = "DefaultCPUAllocator: can't allocate memory"
"""What the three tools take for an error of memory on the CPU (lightning 2.6.6, utilities/memory.py; accelerate 1.15.0,
utils/memory.py; toma 1.1.0, cpu_memory.py)."""


def installed() -> list[str]:
    """The rivals that are here."""
    return [tool for tool, package in PACKAGES.items() if is_installed(package)]


def is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def find(tool: str, spec: dict[str, Any], timeout: float = 1800, **asked: Any) -> dict[str, Any]:
    """One tool in a process of its own, with the allocator setting `steady`. That it dies is a result."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | ENVIRONMENT["steady"]
    began = time.monotonic()
    asked |= {"tool": tool, "spec": spec, "began": began}  # this clock is the same in all processes
    command = [sys.executable, str(Path(__file__)), json.dumps(asked)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
        lines, died = done.stdout.splitlines(), f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"
    except subprocess.TimeoutExpired:
        lines, died = [], f"not done after {timeout:.0f} s"
    answer: dict[str, Any] = {"found": None, "trials": None, "ooms": None, "seconds": time.monotonic() - began}
    return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else answer | {"error": died}


class Trials:
    """Runs sizes, and counts."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.sizes, self.ooms, self.unknown = spec, list[int](), 0, list[str]()
        self.prepared = 0.0
        """Seconds that only the measurement needed."""

    def count(self, rows: int, run: Callable[[], None], *, translate: bool) -> None:
        """One trial of a tool."""
        from oomguard._probe.verdict import Verdict, judge

        self.sizes.append(rows)
        try:
            return run()
        except Exception as error:
            if judge(error) is not Verdict.OOM:
                raise
            self.ooms += 1
            if KNOWN not in str(error):
                self.unknown.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}")
            if not translate:
                raise
        raise RuntimeError(KNOWN)  # outside of the except block, so that it holds no tensors

    def answer(self, found: int | None) -> dict[str, Any]:
        return {"found": found, "trials": len(self.sizes), "ooms": self.ooms, "unknown": self.unknown}


def knobs(spec: Spec) -> dict[str, Any]:
    """What is fixed for all: what PyTorch does by itself, with one thread."""
    engine = "onednn" if spec.cell == "lstm" else "native"
    return {"segments": 1, "threads": 1, "allocator": "steady", "engine": engine}


def with_oomguard(spec: Spec, budget_bytes: int) -> dict[str, Any]:
    """What oomguard finds, and what that took."""
    from oomguard import find_feasible_config

    plan = find_feasible_config(spec, budget=budget_bytes, maximize="microbatch", **knobs(spec))
    over = sum(one.verdict.name == "OVER" for one in plan.records)
    found = {"found": plan.candidate.microbatch, "trials": plan.probes, "ooms": plan.ooms + over}
    return found | {"over": over, "peak_bytes": plan.peak_bytes}


def steps_of(spec: Spec, rows: int) -> None:
    """What a user's training function does: a new model, a few optimizer steps."""
    import torch

    from oomguard._probe.sample import random_microbatch
    from oomguard._rnn.model import build
    from oomguard._spec.candidate import Candidate
    from oomguard._step import make_optimizer

    model, dice = build(spec), torch.Generator().manual_seed(0)
    optimizer = make_optimizer(model, Candidate(microbatch=1))
    for _ in range(STEPS):
        batch = random_microbatch(spec, rows, dice)
        torch.nn.functional.mse_loss(model(batch.inputs, None)[0], batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        del batch


def training(trials: Trials, asked: dict[str, Any]) -> Callable[[int], int]:
    """What a user hands to a tool: trains with a microbatch, and gives it back."""

    def train(rows: int) -> int:
        trials.count(rows, lambda: steps_of(trials.spec, rows), translate=asked["translate"])
        return rows

    return train


def with_accelerate(trials: Trials, asked: dict[str, Any], ready: Callable[[], None]) -> int:
    from accelerate.utils import find_executable_batch_size

    ready()
    found: int = find_executable_batch_size(training(trials, asked), starting_batch_size=asked["start"])()
    return found


def with_toma(trials: Trials, asked: dict[str, Any], ready: Callable[[], None]) -> int:
    from toma import toma

    ready()
    found: int = toma.batch(training(trials, asked), initial_batchsize=asked["start"])()
    return found


def with_optuna(trials: Trials, asked: dict[str, Any], ready: Callable[[], None]) -> int | None:
    """TPE over the logarithm of the microbatch, to maximise what runs; a trial that runs out of memory is pruned.

    It is told of any error of memory: here it is the user who catches them.
    """
    import optuna

    train = training(trials, asked)

    def objective(trial: Any) -> int:
        rows, before = trial.suggest_int("microbatch", 1, asked["start"], log=True), trials.ooms
        try:
            return train(rows)
        except Exception:
            if trials.ooms == before:
                raise
        raise optuna.TrialPruned  # outside of the except block, as above

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    began = time.monotonic()
    warm = optuna.create_study(sampler=optuna.samplers.TPESampler(n_startup_trials=1, seed=0))
    warm.optimize(lambda trial: trial.suggest_int("microbatch", 1, 9, log=True), n_trials=3)  # loads all it needs
    trials.prepared += time.monotonic() - began
    ready()
    study.optimize(objective, n_trials=OPTUNA_TRIALS)
    done = [one.params["microbatch"] for one in study.trials if one.state is optuna.trial.TrialState.COMPLETE]
    return max(done, default=None)


def with_lightning(trials: Trials, asked: dict[str, Any], ready: Callable[[], None]) -> int | None:
    import torch
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.tuner import batch_size_scaling
    from pytorch_lightning.tuner.tuning import Tuner
    from torch.utils.data import DataLoader, IterableDataset

    from oomguard._probe.sample import random_microbatch
    from oomguard._rnn.model import build
    from oomguard._spec.candidate import Candidate
    from oomguard._step import make_optimizer

    class Random(IterableDataset[Any]):
        """Whole microbatches, each made when its turn comes."""

        def __init__(self, rows: int) -> None:
            self.rows = rows

        def __iter__(self) -> Iterator[Any]:
            dice = torch.Generator().manual_seed(0)
            while True:
                yield random_microbatch(trials.spec, self.rows, dice)[:2]

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batch_size = build(trials.spec), 2

        def training_step(self, batch: Any, _: int) -> Any:
            return torch.nn.functional.mse_loss(self.model(batch[0], None)[0], batch[1])

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.model, Candidate(microbatch=1))

        def train_dataloader(self) -> Any:
            return DataLoader(Random(self.batch_size), batch_size=None)

    run, module = batch_size_scaling._try_loop_run, Module()

    def counted(trainer: Any, params: dict[str, Any]) -> None:
        trials.count(module.batch_size, lambda: run(trainer, params), translate=asked["translate"])

    with tempfile.TemporaryDirectory() as directory:
        quiet: dict[str, Any] = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        trainer = Trainer(accelerator="cpu", max_steps=1, default_root_dir=directory, **quiet)
        batch_size_scaling._try_loop_run = counted
        began = time.monotonic()
        Trainer(accelerator="cpu", max_steps=1, default_root_dir=directory, **quiet).fit(Module())  # loads all it needs
        trials.prepared += time.monotonic() - began
        ready()
        return Tuner(trainer).scale_batch_size(module, mode=asked["tool"].partition("-")[2], steps_per_trial=STEPS)


TOOLS: dict[str, Callable[..., int | None]] = {
    "lightning": with_lightning,
    "accelerate": with_accelerate,
    "toma": with_toma,
    "optuna": with_optuna,
}


def main() -> None:
    warnings.simplefilter("ignore")
    asked: dict[str, Any] = {"translate": False} | json.loads(sys.argv[1])
    spec = make_spec(asked["spec"])
    if asked["tool"] == "oomguard":
        answer = with_oomguard(spec, asked["budget_bytes"]) | {"error": None}
        print(json.dumps(answer | {"seconds": time.monotonic() - asked["began"]}))
        return
    import torch

    from oomguard._device.cpu import Cpu
    from oomguard._device.proc import read_status
    from oomguard._probe.sample import tiny_spec

    torch.set_num_threads(1)
    trials, error, found = Trials(spec), None, None
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # loads much, which the tool needs too
    loaded = time.monotonic()
    steps_of(tiny_spec(spec), 2)
    trials.prepared = time.monotonic() - loaded
    if asked["tool"] == "plain":
        before = read_status()
        Cpu().reset()
        steps_of(spec, asked["start"])
        committed_bytes = Cpu().reading().committed_peak_bytes
        assert before is not None
        print(json.dumps({"growth_bytes": (committed_bytes or 0) - (before.committed_bytes or 0)}))
        return

    def limit() -> None:
        now = read_status()
        most_bytes = (now.committed_bytes or 0 if now is not None else 0) + asked["growth_bytes"]
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, resource.RLIM_INFINITY))

    try:
        found = TOOLS[asked["tool"].partition("-")[0]](trials, asked, limit)
    except Exception as failure:  # it crashed, which is its answer
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        error = traceback.format_exception_only(failure)[-1].strip().partition("\n")[0][:200]
    seconds = time.monotonic() - asked["began"] - trials.prepared
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(json.dumps(trials.answer(found) | {"seconds": seconds, "error": error}))


if __name__ == "__main__":
    main()
