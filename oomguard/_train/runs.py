"""What the files of a run say about it: what it has reached, its plan, and its options. Nothing is imported or run."""

import csv
import math
import os
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from oomguard._core.errors import MisuseError
from oomguard._core.system import read_lines
from oomguard._plan.store import load_plan
from oomguard._plan.value import Plan
from oomguard._train.metrics import COLUMNS, CSV
from oomguard._train.settings import CHECKPOINTS, OF_SPECS, RunSettings, list_checkpoints, read_settings

OPTIONS = ("epochs", "lr", "schedule", "warmup", "decay_every", "decay", "clip", "patience")
"""Options of a training that decide what it learns. `steps` is beside them, as `asked_steps`."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as its files describe it."""

    run: str
    reached: dict[str, Any]  # steps, losses, speed and peak
    settings: dict[str, Any]  # model, device, plan and options

    def row(self) -> dict[str, Any]:
        """All figures and settings by name."""
        return {"run": self.run} | self.reached | self.settings


def read_run(run: str | os.PathLike[str]) -> RunSummary:
    """Read a run of a spec or of a task. A run that was killed before its first step has no losses."""
    directory = Path(run)
    if not (directory / "plan.json").is_file():
        raise MisuseError(
            rule="A run is a directory that oomguard train has written",
            got=f"there is no {directory / 'plan.json'}",
            advice="Give one such as runs/lstm-1000.",
        )
    metrics, settings = _read_metrics(directory), read_settings(directory)
    saved = [int(path.name.split("-")[1]) for path in list_checkpoints(directory / CHECKPOINTS)]
    losses = [loss for loss in metrics["validation_loss"] if math.isfinite(loss)]
    reached = {
        "steps": max([int(step) for step in metrics["step"]] + saved, default=0),
        "loss": metrics["loss"][-1] if metrics["loss"] else None,
        "validation_loss": min(losses, default=None),
        "tokens_per_second": median(metrics["tokens_per_second"]) if metrics["tokens_per_second"] else None,
        "peak_bytes": int(max(metrics["peak_bytes"])) if metrics["peak_bytes"] else None,
    }
    plan = load_plan(directory)
    options = _options(settings or RunSettings(), is_spec=isinstance(plan, Plan))
    if settings is None:  # a run of version 0.1
        options = dict.fromkeys(options)
    if options.get("lr") is None:  # it is not known, or that of the optimizer of a task
        options["lr"] = metrics["lr"][0] if metrics["lr"] else None
    settings_of_plan = {
        "model": plan.spec.cell if isinstance(plan, Plan) else plan.task,
        "hidden": plan.spec.hidden if isinstance(plan, Plan) else None,
        "layers": plan.spec.layers if isinstance(plan, Plan) else None,
        "seq": plan.spec.steps if isinstance(plan, Plan) else plan.seq,
        "batch": plan.spec.batch if isinstance(plan, Plan) else plan.batch,
        "device": plan.where.device,
        "budget_bytes": plan.budget_bytes,
        "planned_peak_bytes": plan.peak_bytes,
        "planned_seconds_per_step": plan.seconds_per_step,
    }
    candidate = msgspec.structs.asdict(plan.candidate)
    return RunSummary(run=str(run), reached=reached, settings=settings_of_plan | candidate | options)


def given_options(settings: RunSettings, *, is_spec: bool) -> dict[str, Any]:
    """The options of a training that are not at their defaults, by name."""
    usual = _options(RunSettings(), is_spec=is_spec)
    return {name: value for name, value in _options(settings, is_spec=is_spec).items() if value != usual[name]}


def _options(settings: RunSettings, *, is_spec: bool) -> dict[str, Any]:
    train, data = settings.train, settings.options
    options: dict[str, Any] = {"data": settings.data, "asked_steps": train.steps}
    options |= {name: getattr(train, name) for name in OPTIONS}
    options |= {"seed": data.seed, "validation": data.validation, "normalise": data.normalise}
    return options if is_spec else {name: value for name, value in options.items() if name not in OF_SPECS}


def _read_metrics(directory: Path) -> dict[str, list[float]]:
    """The columns of the metrics without empty cells."""
    columns: dict[str, list[float]] = {name: [] for name in ("step", *COLUMNS)}
    try:
        lines, _ = read_lines(directory / CSV)
    except FileNotFoundError:
        return columns
    for row in csv.DictReader(line.decode(errors="replace") for line in lines):
        for name, values in columns.items():
            try:
                values.append(float(row.get(name) or ""))
            except ValueError:  # an empty cell, or a damaged row
                continue
    return columns
