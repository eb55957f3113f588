"""Claim: two changed lines give models of four forecasting packages at least 90 % of their largest batch, and no OOM.

    python benchmarks/lightning_batches_are_found.py [CASE ...] [--smoke]

The cases are scripts as users of darts, pytorch-forecasting, neuralforecast and GluonTS write them (`--smoke` runs one
of Lightning alone with few steps, and claims nothing). Changed lines end with "# oomguard". The budget is what a
training of two rows peaks at, and some room. Each training is a process of its own with the heap setting `tight` and
one thread:

- oomguard, with `maximize="batch"`: the batch that it finds, in child processes, and the training with that batch. It
  gets `segments=1`, since with segments it finds far larger batches than any other tool can. The loader of GluonTS
  cannot be resized from outside, so a second script trains with the batch that was found;
- the true maximum: the largest batch whose training, without the callback, peaks within the budget;
- Lightning's BatchSizeFinder in the place of the callback, where allocations fail beyond the budget.

A case whose package is not installed is left out, and the claim is not whole then.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.util import find_spec
from typing import Any

from peak import tight, without_heap_settings
from results import print_row, publish

from oomguard._core.units import MIB

ROOM, WIDE_ROOM = 120 * MIB, 480 * MIB
"""What the budget leaves beside a training of two rows: room for 50 to 150 rows. A row of neuralforecast is a series
with all of its windows, and needs the wide one."""
STEPS, SMOKE_STEPS = 200, 40
MIN_SHARE, MAX_LINES = 0.90, 2
SECONDS = 900.0  # time limit of a process
SMOKE = "lightning"
PACKAGES = {
    "lightning": "lightning", "darts": "darts", "pytorch-forecasting": "pytorch_forecasting",
    "neuralforecast": "neuralforecast", "gluonts": "gluonts",
}  # fmt: skip
SCRIPTS = {
    "darts": """
from darts import TimeSeries
from darts.models import BlockRNNModel
from oomguard.integrations.lightning import OomGuard  # oomguard

model = BlockRNNModel(
    input_chunk_length=steps,
    output_chunk_length=10,
    model="LSTM",
    hidden_dim=64,
    batch_size=rows,
    n_epochs=1,
    pl_trainer_kwargs={
        "callbacks": [OomGuard(budget, **options)],  # oomguard
        **settings,
    },
)
model.fit(TimeSeries.from_values(values))
""",
    "pytorch-forecasting": """
import lightning
import pandas
from pytorch_forecasting import RecurrentNetwork, TimeSeriesDataSet
from oomguard.integrations.lightning import OomGuard  # oomguard

frame = pandas.DataFrame({"value": values, "time": range(len(values)), "group": "a"})
data = TimeSeriesDataSet(
    frame, time_idx="time", target="value", group_ids=["group"], time_varying_unknown_reals=["value"],
    min_encoder_length=steps, max_encoder_length=steps, max_prediction_length=10,
)
model = RecurrentNetwork.from_dataset(data, hidden_size=64, rnn_layers=1, dropout=0.0)
trainer = lightning.Trainer(
    max_epochs=1,
    callbacks=[OomGuard(budget, **options)],  # oomguard
    **settings,
)
trainer.fit(model, data.to_dataloader(train=True, batch_size=rows))
""",
    "neuralforecast": """
import numpy
import pandas
from neuralforecast import NeuralForecast
from neuralforecast.models import LSTM
from oomguard.integrations.lightning import OomGuard  # oomguard

length, series = steps + 11, 1500
days = numpy.tile(pandas.date_range("2020", periods=length, freq="D"), series)
frame = pandas.DataFrame({"unique_id": numpy.repeat(numpy.arange(series), length), "ds": days})
frame["y"] = numpy.random.randn(len(frame)).astype("float32")
model = LSTM(
    h=10,
    input_size=steps,
    encoder_hidden_size=64,
    encoder_n_layers=1,
    max_steps=3,
    batch_size=rows,
    windows_batch_size=None,
    callbacks=[OomGuard(budget, **options)],  # oomguard
    **settings,
)
NeuralForecast(models=[model], freq="D").fit(frame)
""",
    "gluonts": """
import pandas
from gluonts.dataset.pandas import PandasDataset
from gluonts.torch.model.deepar import DeepAREstimator
from oomguard.integrations.lightning import OomGuard  # oomguard

hours = pandas.date_range("2020", periods=len(values), freq="h")
estimator = DeepAREstimator(
    freq="h",
    prediction_length=10,
    context_length=steps,
    hidden_size=64,
    num_layers=1,
    lags_seq=[1, 2, 3, 24],
    batch_size=rows,
    num_batches_per_epoch=3,
    trainer_kwargs={
        "max_epochs": 1,
        "callbacks": [OomGuard(budget, **options)],  # oomguard
        **settings,
    },
)
estimator.train(PandasDataset(pandas.DataFrame({"target": values}, index=hours)))
""",
    "lightning": """
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from oomguard.integrations.lightning import OomGuard  # oomguard

class Forecast(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 64, batch_first=True), nn.Linear(64, 1)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.head(self.rnn(batch[0])[0][:, -1]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

data = TensorDataset(torch.randn(2000, steps, 4), torch.randn(2000, 1))
trainer = lightning.Trainer(
    max_epochs=1,
    callbacks=[OomGuard(budget, **options)],  # oomguard
    **settings,
)
trainer.fit(Forecast(), DataLoader(data, batch_size=rows))
""",
}
COLUMNS, WIDTHS = ("", "found", "of max", "peak, MiB", "OOMs", "lines", "seconds"), (24, 6, 7, 10, 5, 6, 8)


def run(tool: str, name: str, steps: int, rows: int, budget_bytes: int = 0) -> dict[str, Any]:
    """Train one case in a process of its own. If it crashes, the answer has the error."""
    began = time.monotonic()
    request = {"tool": tool, "case": name, "steps": steps, "rows": rows, "budget_bytes": budget_bytes}
    environment = without_heap_settings() | tight() | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", json.dumps(request)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, env=environment, cwd=folder, check=False
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith('{"peak_bytes"')]
            error = f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"
        except subprocess.TimeoutExpired:
            lines, error = [], f"not done after {SECONDS:.0f} s"
    answer = json.loads(lines[-1]) if lines else {"peak_bytes": None, "found": None, "ooms": None, "error": error}
    return answer | {"seconds": time.monotonic() - began}


def largest(name: str, steps: int, budget_bytes: int, guess: int, peaks: dict[int, int]) -> tuple[int, int]:
    """Search the largest batch whose training peaks within the budget, from a guess and known peaks by batch.

    Return it and the number of trainings.
    """

    def fits(rows: int) -> bool:
        if rows not in peaks:
            answer = run("plain", name, steps, rows)
            assert answer["peak_bytes"] is not None, answer["error"]
            peaks[rows] = answer["peak_bytes"]
        return peaks[rows] <= budget_bytes

    low, high = (guess, 2 * guess) if fits(guess) else (2, guess)
    while high - low > max(1, low // 50):  # to 2 %
        ends = min(peaks), max(peaks)
        slope = (peaks[ends[1]] - peaks[ends[0]]) / (ends[1] - ends[0])  # peaks are nearly a line in the rows
        middle = int(ends[0] + (budget_bytes - peaks[ends[0]]) / max(1.0, slope))
        step = max(1, low // 50)
        middle = min(max(middle, low + step), high - 1)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, len(peaks)


def run_case(name: str, steps: int, *, rivals: bool) -> dict[str, Any]:
    """Run oomguard, the search for the true maximum and BatchSizeFinder on one script."""
    two = run("plain", name, steps, 2)
    assert two["peak_bytes"] is not None, two["error"]
    budget_bytes = two["peak_bytes"] + (WIDE_ROOM if name == "neuralforecast" else ROOM)
    own = run("oomguard", name, steps, 2, budget_bytes)
    assert own["found"] is not None, own["error"]
    if name == "gluonts":
        again = run("guarded", name, steps, own["found"], budget_bytes)
        own |= {key: again[key] for key in ("peak_bytes", "events")} | {"ooms": own["ooms"] + (again["ooms"] or 0)}
    own["lines"] = sum(line.endswith("# oomguard") for line in SCRIPTS[name].splitlines())
    maximum, trainings = largest(name, steps, budget_bytes, own["found"], {2: two["peak_bytes"]})
    case = {"case": name, "budget_bytes": budget_bytes, "maximum": maximum, "trainings": trainings, "oomguard": own}
    if rivals:
        case["BatchSizeFinder"] = run("finder", name, steps, 2, budget_bytes)
    return case


# ---- the process of a training


def child(request: dict[str, Any]) -> None:
    """Run a script plainly, with the callback, or with BatchSizeFinder in its place."""
    import numpy as np
    import torch

    from oomguard.integrations import lightning as ours

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    name, tool, budget_bytes = request["case"], request["tool"], request["budget_bytes"]
    done: dict[str, Any] = {"found": None, "ooms": 0, "events": [], "peak": 0, "error": None}
    random = np.random.default_rng(0)
    settings = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    if name == "gluonts":  # it adds a callback for checkpoints itself
        del settings["enable_checkpointing"]
    names: dict[str, Any] = {
        "__name__": "__main__", "steps": request["steps"], "rows": request["rows"], "budget": budget_bytes,
        "values": random.normal(size=request["steps"] + 2000).astype("float32"),
        "options": {"maximize": "batch", "timeout": 300.0, "segments": 1} if tool == "oomguard" else {"timeout": 300.0},
        "settings": {"accelerator": "cpu", "limit_train_batches": 3, "num_sanity_val_steps": 0, **settings},
    }  # fmt: skip

    class Seen(ours.OomGuard):
        """The callback, which tells its plan and its events: a package may train copies of it."""

        def _set_batch(self, trainer: Any, module: Any, rows: int | None) -> None:
            done["found"] = rows
            if name != "gluonts":
                super()._set_batch(trainer, module, rows)

        def _close(self) -> None:
            super()._close()
            done["events"] = [event.kind for event in self.events]
            done["peak"] = self.peak_bytes  # the guard resets the peak that the kernel counts
            done["ooms"] = sum(event.kind == "oom" for event in self.events) + (self.plan.ooms if self.plan else 0)

    script = SCRIPTS[name]
    if tool == "plain":
        script = "\n".join(line for line in script.splitlines() if not line.endswith("# oomguard"))
    else:
        ours.OomGuard = Seen  # type: ignore[misc]
    if tool == "finder":
        ours.OomGuard = lambda budget, **_: _finder(done, budget, name)  # type: ignore[assignment,misc]
    try:
        exec(compile(script, name, "exec"), names)
    except Exception as failure:  # a tool that crashes is a result, not a failure of the benchmark
        done["error"] = f"{type(failure).__name__}: {str(failure)[:300]}"
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with open("/proc/self/status") as file:
        peak_bytes = next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    assert tool != "plain" or done["error"] is None, done["error"]
    print(json.dumps({"peak_bytes": max(peak_bytes, done.pop("peak")), **done}))


def _finder(done: dict[str, Any], budget_bytes: int, name: str) -> Any:
    """BatchSizeFinder in a process whose allocations fail where the budget ends."""
    from oomguard._device.cpu import Cpu

    package = "lightning.pytorch" if name in ("lightning", "pytorch-forecasting", "gluonts") else "pytorch_lightning"
    callbacks = __import__(f"{package}.callbacks", fromlist=["callbacks"])

    done["ooms"] = None  # it does not tell

    class Finder(callbacks.BatchSizeFinder):  # type: ignore[misc, name-defined]
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            now = Cpu().reading()
            free_bytes = max(0, budget_bytes - now.now_bytes)
            limit_bytes = (now.committed_bytes or 0) + free_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.RLIM_INFINITY))
            super().on_fit_start(trainer, pl_module)
            done["found"] = self.optimal_batch_size

    return Finder(mode="binsearch", init_val=2, steps_per_trial=3)


# ---- the result


def show(case: dict[str, Any]) -> None:
    """Print the table of one case."""
    budget = case["budget_bytes"] // MIB
    print(f"\n{case['case']}, {budget} MiB: true maximum {case['maximum']} ({case['trainings']} trainings)")
    print_row(COLUMNS, WIDTHS)
    for tool in ("oomguard", "BatchSizeFinder"):
        answer = case.get(tool)
        if answer is None:
            continue
        share = "-" if answer["found"] is None else f"{answer['found'] / case['maximum']:.1%}"
        peak = "-" if answer["peak_bytes"] is None else answer["peak_bytes"] // MIB
        cells = [
            answer["found"] or "-",
            share,
            peak,
            "-" if answer["ooms"] is None else answer["ooms"],
            answer.get("lines", "-"),
        ]
        print_row((f"  {tool}", *cells, f"{answer['seconds']:.1f}"), WIDTHS)
        if answer.get("error"):
            print(f"    stopped with an error: {answer['error']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"scripts to run: {', '.join(PACKAGES)}")
    parser.add_argument("--smoke", action="store_true", help="run one script with few steps")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    names = [SMOKE] if args.smoke else args.cases or [name for name in SCRIPTS if name != SMOKE]
    installed = [name for name in names if find_spec(PACKAGES[name]) is not None]
    finished = []
    for name in installed:
        finished.append(run_case(name, SMOKE_STEPS if args.smoke else STEPS, rivals=not args.smoke))
        show(finished[-1])
    own = [case["oomguard"] for case in finished]
    share = min(case["oomguard"]["found"] / case["maximum"] for case in finished)
    lines, ooms = max(one["lines"] for one in own), sum(one["ooms"] for one in own)
    over = sum(one["peak_bytes"] > case["budget_bytes"] for one, case in zip(own, finished, strict=True))
    claims = {
        f"at most {MAX_LINES} changed lines (most: {lines})": lines <= MAX_LINES,
        f"at least {MIN_SHARE:.0%} of the true largest batch (least: {share:.1%})": share >= MIN_SHARE,
        f"no probe and no training runs out of memory ({ooms})": ooms == 0,
        f"no training peaks above its budget ({over})": over == 0,
    }
    figures = {"least_share": share, "lines": lines, "ooms": ooms, "over": over, "cases": finished}
    whole = not args.smoke and {*installed} >= {*SCRIPTS} - {SMOKE}
    packages = ("lightning", "pandas", *installed)
    publish("lightning_batches_are_found", figures, {} if args.smoke else claims, whole=whole, packages=packages)


if __name__ == "__main__":
    main()
