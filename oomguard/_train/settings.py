"""The data and options of a run, stored in its directory, so that a resumed run needs nothing again."""

import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from oomguard._core.errors import MisuseError, check_choice, check_whole, conflict, flag, shown, wrong
from oomguard._core.system import file_errors, read_file, write_file
from oomguard._data.open import kind_of
from oomguard._data.options import DataOptions, check_used
from oomguard._device.find import find_target
from oomguard._plan.store import load_plan, load_spec_plan
from oomguard._plan.task_value import TaskPlan
from oomguard._plan.value import Plan
from oomguard._task.task import NAME as TASK_NAME
from oomguard._task.task import Task
from oomguard._train import TrainOptions
from oomguard._train.trackers import check_trackers

NAME = "settings.json"
CHECKPOINTS, BEST = "checkpoints", "best"  # names in the directory of a run
UNFINISHED = ".unfinished-"
"""Prefix of checkpoints that are being written or removed. The next save removes what a kill left."""
CHECKPOINT_RULE = "Checkpoints need a readable and writable directory"
_CHECKPOINT = re.compile(r"step-(\d{8,})-save-(\d{4,})")


OF_SPECS = ("lr", "schedule", "warmup", "decay_every", "decay", "validation", "normalise", "data")
"""Options of the model of a spec: a task has its own optimizer, scheduler and data."""


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The data and the options of a run, all but its plan."""

    data: str | None = None  # file of the data; None: it was in memory
    model: str | None = None  # the function that builds the model, or the task, as package.module:name
    train: TrainOptions = TrainOptions()
    options: DataOptions = DataOptions()
    known: bool = False  # whether the options have what is to be known of the data


class TextRequest(NamedTuple):
    """A text that a model is to go on with."""

    prompt: str
    length: int = 200  # characters, or bytes, to draw
    temperature: float = 1.0  # 0: always the likeliest
    seed: int = 0


def read_request(given: Mapping[str, Any]) -> TextRequest:
    """The text that the arguments of `predict` ask for, which take nothing but a prompt and how to go on with it."""
    request = TextRequest(**{name: value for name, value in given.items() if name in TextRequest._fields})
    prompt, length, temperature, seed = request
    check_whole("length", length, 1, 10**9, optional=False)
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not is_number or not 0 <= temperature < math.inf:
        advice = "Write it as 0.8. With 0 the likeliest character comes every time."
        raise wrong("temperature", "a number from 0 on", temperature, advice)
    DataOptions(seed=seed)
    if not isinstance(prompt, str) or not prompt:
        raise wrong("prompt", "text of at least one character", prompt, 'Write it as --prompt "Once".')
    for name in given:
        if name not in (*TextRequest._fields, "device", "model"):
            raise conflict("A prompt takes the place of data", "--prompt", flag(name))
    return request


def list_checkpoints(home: Path, newer: Path | None = None) -> list[Path]:
    """Directories with a checkpoint's name, newest first: by serial number, since a step may come back.

    `newer`: only those before this one.
    """
    with file_errors(CHECKPOINT_RULE, home), suppress(FileNotFoundError):
        named = {path: _CHECKPOINT.fullmatch(path.name) for path in home.iterdir()}
        found = sorted((path for path, match in named.items() if match), key=serial, reverse=True)
        return found if newer is None else [path for path in found if serial(path) < serial(newer)]
    return []


def serial(path: Path) -> int:
    """The serial number of a checkpoint."""
    return int(path.name.rpartition("-")[2])


def check_run(run: Path) -> None:
    """Raise unless the directory is that of a run that was trained."""
    if not list_checkpoints(run / BEST) and not list_checkpoints(run / CHECKPOINTS):
        raise MisuseError(
            rule="The directory must have a run that was trained",
            got=f"there is no checkpoint in {run}",
            advice="Give the directory that oomguard train has written to, such as runs/lstm-1000.",
        )


def check_predicted(run: Path, data: Any, output: str | None, given: Mapping[str, Any]) -> None:
    """Raise unless the directory has a run, data in a file is of a known kind, and predictions can be written."""
    if output is not None and Path(output).suffix.lower() not in (".npy", ".csv"):
        advice = "Give --output predictions.npy."
        raise MisuseError(rule="Predictions are written as .npy or .csv", got=f"got {output!r}", advice=advice)
    if given.get("precision") is not None:
        check_choice("precision", given["precision"], ("int8",))
    check_run(run)
    if given.get("device") is not None:
        find_target(given["device"])  # a device of that name exists somewhere
    if given.get("probabilities") and load_spec_plan(run / "plan.json").spec.loss != "cross-entropy":
        advice = "Leave --probabilities out."
        raise MisuseError(rule="Probabilities need classes", got="this run predicts numbers", advice=advice)
    settings = read_settings(run)
    if settings is not None and isinstance(data, str | Path):
        kind_of(Path(data), DataOptions(format=given.get("format", settings.options.format)))


def is_task_run(run: str | os.PathLike[str]) -> bool:
    """Whether a directory has the run of a task."""
    path = Path(run) / "plan.json"
    return path.exists() and isinstance(load_plan(path), TaskPlan)


def check_task_predicted(run: Path, task: Task | str | None, output: str | None) -> TaskPlan:
    """Raise unless the directory has a run of the task, and the output can have its form; returns the plan."""
    check_run(run)
    plan = load_plan(run / "plan.json")
    assert isinstance(plan, TaskPlan), "of a task, by `is_task_run`"
    if output is not None and Path(output).suffix.lower() not in (".npy", ".pt"):
        advice = "Give --output predictions.npy for one tensor with a row for each sample, predictions.pt for others."
        raise MisuseError(rule="Predictions of a task are written as .npy or .pt", got=f"got {output!r}", advice=advice)
    if not isinstance(task, Task) and not (isinstance(task, str) and TASK_NAME.fullmatch(task)):
        got = "none was given" if task is None else f"got {shown(task)}"
        advice = f"Add --model {plan.task}, or write predict(run, task): no run imports code by itself."
        raise MisuseError(
            rule=f"The run is one of the task {plan.task}, which has model and data", got=got, advice=advice
        )
    return plan


def read_settings(directory: Path) -> RunSettings | None:
    """The settings of a run; None if it has none, as those of version 0.1."""
    path = directory / NAME
    try:
        with file_errors("The settings of a run must be readable", path, use="read"):
            return msgspec.json.decode(read_file(path), type=RunSettings) if path.exists() else None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MisuseError(
            rule="The settings of a run are a file that oomguard train has written",
            got=f"{path} is not one ({error})",
            advice="Remove it, and give the options of the run again.",
        ) from None


def write_settings(directory: Path, settings: RunSettings) -> None:
    write_file(directory / NAME, msgspec.json.format(msgspec.json.encode(settings), indent=2) + b"\n", "A run")


def _resumed(directory: Path) -> RunSettings | None:
    """The settings of a run; of one without them, how its newest checkpoint says that the data was read."""
    settings = read_settings(directory)
    if settings is not None:
        return settings
    from oomguard._train.checkpoint import load

    checkpoint = load(directory / CHECKPOINTS)
    if checkpoint is None:
        return None
    return RunSettings(model=checkpoint.state.model, options=checkpoint.state.data_options, known=True)


def settle(plan: Plan, data: Any, model: str | None, given: dict[str, Any]) -> RunSettings:
    """The settings of a training: what is given, then those of the run that is resumed, then those of the plan."""
    directory = Path(given.get("run") or f"runs/{plan.spec.cell}-{plan.spec.steps}")
    before = _before(plan, directory, given)
    train = {name: value for name, value in given.items() if name in TrainOptions.__struct_fields__}
    options = {name: value for name, value in given.items() if name in DataOptions.__struct_fields__}
    in_file = isinstance(data, str | os.PathLike)
    settings = msgspec.structs.replace(
        before,
        data=before.data if data is None else os.fspath(data) if in_file else None,
        model=model or before.model,
        train=msgspec.structs.replace(before.train, **train | {"run": str(directory)}),
        options=msgspec.structs.replace(before.options, **options),
    )
    check_trackers(settings.train.trackers)
    _check_validation(settings)
    if settings.data is not None:
        check_used(kind_of(Path(settings.data), settings.options), settings.options)
    elif data is None:
        raise MisuseError(
            rule="Training needs data",
            got="neither the plan nor the run names a file",
            advice="Give --data a .npy, .csv, .parquet or .txt file, or in Python an array or a DataFrame.",
        )
    if not given.get("resume") and (newest := list_checkpoints(directory / CHECKPOINTS)):
        raise MisuseError(
            rule="A new run needs a directory of its own",
            got=f"{directory} has a run at step {int(newest[0].name.split('-')[1]):,}",
            advice="Add --resume to continue it, or give another --run.",
        )
    return settings


def _check_validation(settings: RunSettings) -> None:
    """Raise if an option needs validation and there is none."""
    for name in ("patience", "validate_every"):
        if getattr(settings.train, name) is not None and not settings.options.validation:
            raise MisuseError(
                rule=f"{flag(name)} needs data for validation",
                got=f"got --validation {settings.options.validation:g}",
                advice=f"Leave {flag(name)} out, or give --validation a share such as 0.1.",
            )


def _before(plan: Plan, directory: Path, given: dict[str, Any]) -> RunSettings:
    """The settings of the run that is resumed, or those of the plan."""
    settings = _resumed(directory) if given.get("resume") else None
    if settings is None:
        read = plan.data
        return RunSettings() if read is None else RunSettings(data=read.path, options=read.options, known=True)
    return _without_length(settings, given)


def _without_length(settings: RunSettings, given: Mapping[str, Any]) -> RunSettings:
    """The settings of a run that is resumed: `epochs` or `steps` that are given now say alone how long to train."""
    if not {"epochs", "steps"} & given.keys():
        return settings
    train = msgspec.structs.replace(settings.train, epochs=None, steps=None)
    return msgspec.structs.replace(settings, train=train)


def settle_task(name: str, directory: Path, given: Mapping[str, Any]) -> RunSettings:
    """The settings of the training of a task: what is given, then those of the run that is resumed."""
    before = (read_settings(directory) if given.get("resume") else None) or RunSettings(model=name, known=True)
    before = _without_length(before, given)
    train = {key: value for key, value in given.items() if key in TrainOptions.__struct_fields__}
    settings = msgspec.structs.replace(
        before,
        train=msgspec.structs.replace(before.train, **train | {"run": str(directory)}),
        options=msgspec.structs.replace(before.options, seed=given.get("seed", before.options.seed)),
    )
    check_trackers(settings.train.trackers)
    return settings
