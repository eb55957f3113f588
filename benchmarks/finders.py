"""Find the largest batch with oomguard or with another tool: find_feasible_config, Lightning's
Tuner.scale_batch_size, accelerate's find_executable_batch_size, toma's batch, or a plain Optuna search.

    python benchmarks/finders.py '{"tool": "lightning-binsearch", "spec": {...}, "growth_bytes": ..., "start": ...}'

prints one JSON line: the batch that the tool found, the number of its trials, how many of them ran out of memory,
and the seconds from the start of the process, without the time that only this measurement needs.

oomguard gets a budget, `budget_bytes`. The other tools find the limit by running into it, so their process gets a real
one: RLIMIT_DATA is set to `growth_bytes` more than the bytes that are committed after all imports and a tiny step. The
libraries of a tool therefore do not count against it.

With `"translate": true`, the tool sees every out-of-memory error with the message that it recognises. The tool `plain`
runs `start` sequences without a limit and prints how many bytes were committed.
"""

import json
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

from peak import tight, without_heap_settings

from oomguard._spec.read import make_spec
from oomguard._spec.spec import Spec

STEPS = 3
"""Optimizer steps per trial. 3 is Lightning's default."""
OPTUNA_TRIALS = 20
PACKAGES = {
    "lightning-power": "pytorch-lightning",
    "lightning-binsearch": "pytorch-lightning",
    "accelerate": "accelerate",
    "toma": "toma",
    "optuna": "optuna",
}
"""The rivals, and the package of each."""
RECOGNISED = "DefaultCPUAllocator: can't allocate memory"
"""The message by which Lightning, accelerate and toma recognise an out-of-memory error on the CPU (lightning 2.6.6,
utilities/memory.py; accelerate 1.15.0, utils/memory.py; toma 1.1.0, cpu_memory.py)."""


def installed() -> list[str]:
    """List the rivals that are installed."""
    return [tool for tool, package in PACKAGES.items() if is_installed(package)]


def is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def find(tool: str, spec: dict[str, Any], timeout: float = 1800, **request: Any) -> dict[str, Any]:
    """Run one tool in its own process with the heap setting `tight`. If it crashes, the answer has the error."""
    environment = without_heap_settings() | tight()
    began = time.monotonic()
    request |= {"tool": tool, "spec": spec, "began": began}  # all processes share the monotonic clock
    command = [sys.executable, str(Path(__file__)), json.dumps(request)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
        lines, error = done.stdout.splitlines(), f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"
    except subprocess.TimeoutExpired:
        lines, error = [], f"not done after {timeout:.0f} s"
    answer: dict[str, Any] = {"found": None, "trials": None, "ooms": None, "seconds": time.monotonic() - began}
    return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else answer | {"error": error}


class Trials:
    """Counts the trials of a tool and the out-of-memory errors among them."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.sizes, self.ooms, self.unknown = spec, list[int](), 0, list[str]()
        self.prepared = 0.0
        """Seconds that only the measurement needed. They are not counted for the tool."""

    def count(self, rows: int, run: Callable[[], None], *, translate: bool) -> None:
        """Run and count one trial with this batch. `translate` replaces the message of an out-of-memory error."""
        from oomguard._probe.verdict import Verdict, judge

        self.sizes.append(rows)
        try:
            return run()
        except Exception as error:
            if judge(error) is not Verdict.OOM:
                raise
            self.ooms += 1
            if RECOGNISED not in str(error):
                self.unknown.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}")
            if not translate:
                raise
        raise RuntimeError(RECOGNISED)  # raised outside of the except block, so that the error holds no tensors

    def answer(self, batch: int | None) -> dict[str, Any]:
        return {"found": batch, "trials": len(self.sizes), "ooms": self.ooms, "unknown": self.unknown}


def knobs(spec: Spec) -> dict[str, Any]:
    """Return the knobs that are fixed for all tools: PyTorch's defaults with one thread."""
    engine = "onednn" if spec.cell == "lstm" else "native"
    return {"segments": 1, "threads": 1, "allocator": "tight", "engine": engine, "precision": "fp32"}


def with_oomguard(fields: dict[str, Any], budget_bytes: int) -> dict[str, Any]:
    """Find the largest batch with oomguard. The batch of the spec is not passed on, so that it is no limit."""
    from oomguard import find_feasible_config

    fields = {name: value for name, value in fields.items() if name != "batch"}
    plan = find_feasible_config(**fields, budget=budget_bytes, maximize="batch", **knobs(make_spec(fields)))
    over = sum(record.verdict.name == "OVER" for record in plan.records)
    answer = {"found": plan.spec.batch, "trials": plan.probes, "ooms": plan.ooms + over}
    return answer | {"over": over, "peak_bytes": plan.peak_bytes}


def train_steps(spec: Spec, rows: int) -> None:
    """Make a new model and run a few optimizer steps, as the training function of a user would."""
    import torch

    from oomguard._probe.sample import random_microbatch
    from oomguard._rnn.model import build
    from oomguard._spec.candidate import Candidate
    from oomguard._step import make_optimizer

    model, rng = build(spec), torch.Generator().manual_seed(0)
    optimizer = make_optimizer(model, Candidate(microbatch=1))
    for _ in range(STEPS):
        batch = random_microbatch(spec, rows, rng)
        loss_of(spec, model(batch.inputs, None)[0], batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        del batch


def loss_of(spec: Spec, outputs: Any, targets: Any) -> Any:
    """Return the mean loss, as the training function of a user would compute it."""
    from torch.nn import functional

    if spec.loss == "cross-entropy":
        return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
    return functional.mse_loss(outputs, targets)


def make_train(trials: Trials, request: dict[str, Any]) -> Callable[[int], int]:
    """Make the function that a user passes to a tool. It trains with a batch of `rows` sequences and returns `rows`."""

    def train(rows: int) -> int:
        trials.count(rows, lambda: train_steps(trials.spec, rows), translate=request["translate"])
        return rows

    return train


def with_accelerate(trials: Trials, request: dict[str, Any], ready: Callable[[], None]) -> int:
    from accelerate.utils import find_executable_batch_size

    ready()
    batch: int = find_executable_batch_size(make_train(trials, request), starting_batch_size=request["start"])()
    return batch


def with_toma(trials: Trials, request: dict[str, Any], ready: Callable[[], None]) -> int:
    from toma import toma

    ready()
    batch: int = toma.batch(make_train(trials, request), initial_batchsize=request["start"])()
    return batch


def with_optuna(trials: Trials, request: dict[str, Any], ready: Callable[[], None]) -> int | None:
    """Maximise the batch with TPE on a logarithmic scale. A trial that runs out of memory is pruned.

    The objective catches every out-of-memory error itself, as a user of Optuna would, whatever its message is.
    """
    import optuna

    train = make_train(trials, request)

    def objective(trial: Any) -> int:
        rows, before = trial.suggest_int("batch", 1, request["start"], log=True), trials.ooms
        try:
            return train(rows)
        except Exception:
            if trials.ooms == before:
                raise
        raise optuna.TrialPruned  # raised outside of the except block, as in Trials.count

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    began = time.monotonic()
    warm_up = optuna.create_study(sampler=optuna.samplers.TPESampler(n_startup_trials=1, seed=0))
    warm_up.optimize(lambda trial: trial.suggest_int("batch", 1, 9, log=True), n_trials=3)  # loads libraries
    trials.prepared += time.monotonic() - began
    ready()
    study.optimize(objective, n_trials=OPTUNA_TRIALS)
    complete = [trial.params["batch"] for trial in study.trials if trial.state is optuna.trial.TrialState.COMPLETE]
    return max(complete, default=None)


def with_lightning(trials: Trials, request: dict[str, Any], ready: Callable[[], None]) -> int | None:
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
        """An endless stream of random microbatches, each made when it is needed."""

        def __init__(self, rows: int) -> None:
            self.rows = rows

        def __iter__(self) -> Iterator[Any]:
            rng = torch.Generator().manual_seed(0)
            while True:
                yield random_microbatch(trials.spec, self.rows, rng)[:2]

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batch_size = build(trials.spec), 2

        def training_step(self, batch: Any, _: int) -> Any:
            return loss_of(trials.spec, self.model(batch[0], None)[0], batch[1])

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.model, Candidate(microbatch=1))

        def train_dataloader(self) -> Any:
            return DataLoader(Random(self.batch_size), batch_size=None)

    run, module = batch_size_scaling._try_loop_run, Module()

    def counted(trainer: Any, params: dict[str, Any]) -> None:
        trials.count(module.batch_size, lambda: run(trainer, params), translate=request["translate"])

    with tempfile.TemporaryDirectory() as directory:
        quiet: dict[str, Any] = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        trainer = Trainer(accelerator="cpu", max_steps=1, default_root_dir=directory, **quiet)
        batch_size_scaling._try_loop_run = counted
        began = time.monotonic()
        Trainer(accelerator="cpu", max_steps=1, default_root_dir=directory, **quiet).fit(Module())  # loads libraries
        trials.prepared += time.monotonic() - began
        ready()
        return Tuner(trainer).scale_batch_size(module, mode=request["tool"].partition("-")[2], steps_per_trial=STEPS)


TOOLS: dict[str, Callable[..., int | None]] = {
    "lightning": with_lightning,
    "accelerate": with_accelerate,
    "toma": with_toma,
    "optuna": with_optuna,
}


def main() -> None:
    warnings.simplefilter("ignore")
    request: dict[str, Any] = {"translate": False} | json.loads(sys.argv[1])
    spec = make_spec(request["spec"])
    if request["tool"] == "oomguard":
        answer = with_oomguard(request["spec"], request["budget_bytes"]) | {"error": None}
        print(json.dumps(answer | {"seconds": time.monotonic() - request["began"]}))
        return
    import torch

    from oomguard._device.cpu import Cpu
    from oomguard._device.proc import read_status
    from oomguard._probe.sample import tiny_spec

    torch.set_num_threads(1)
    trials, error, batch = Trials(spec), None, None
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # loads libraries that the tool needs too
    loaded = time.monotonic()
    train_steps(tiny_spec(spec), 2)
    trials.prepared = time.monotonic() - loaded
    if request["tool"] == "plain":
        before = read_status()
        Cpu().reset()
        train_steps(spec, request["start"])
        committed_bytes = Cpu().reading().committed_peak_bytes
        assert before is not None
        print(json.dumps({"growth_bytes": (committed_bytes or 0) - (before.committed_bytes or 0)}))
        return

    def limit() -> None:
        now = read_status()
        limit_bytes = (now.committed_bytes or 0 if now is not None else 0) + request["growth_bytes"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.RLIM_INFINITY))

    try:
        batch = TOOLS[request["tool"].partition("-")[0]](trials, request, limit)
    except Exception as failure:  # a tool that crashes is a result, not a failure of the benchmark
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        error = traceback.format_exception_only(failure)[-1].strip().partition("\n")[0][:200]
    seconds = time.monotonic() - request["began"] - trials.prepared
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(json.dumps(trials.answer(batch) | {"seconds": seconds, "error": error}))


if __name__ == "__main__":
    main()
