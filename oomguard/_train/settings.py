"""The data and options of a run, stored in its directory, so that a resumed run needs nothing again."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from oomguard._core.errors import MisuseError, flag
from oomguard._core.system import file_errors, write_file
from oomguard._data.open import kind_of
from oomguard._data.options import DataOptions, check_used
from oomguard._device.find import find_target
from oomguard._plan.store import load_spec_plan
from oomguard._plan.value import Plan
from oomguard._train import TrainOptions

NAME = "settings.json"
CHECKPOINTS, BEST = "checkpoints", "best"  # names in the directory of a run
CHECKPOINT_RULE = "Checkpoints need a readable and writable directory"
_CHECKPOINT = re.compile(r"step-(\d{8,})-save-(\d{4,})")


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The data and the options of a run, all but its plan."""

    data: str | None = None  # file of the data; None: it was in memory
    model: str | None = None  # the function that builds the model, as package.module:function
    train: TrainOptions = TrainOptions()
    options: DataOptions = DataOptions()
    known: bool = False  # whether the options have what is to be known of the data


def list_checkpoints(home: Path) -> list[Path]:
    """Directories with a checkpoint's name, newest first: by serial number, since a step may come back."""
    with file_errors(CHECKPOINT_RULE, home), suppress(FileNotFoundError):
        named = {path: _CHECKPOINT.fullmatch(path.name) for path in home.iterdir()}
        return sorted((path for path, match in named.items() if match), key=serial, reverse=True)
    return []


def serial(path: Path) -> int:
    """The serial number of a checkpoint."""
    return int(path.name.rpartition("-")[2])


def check_run(run: Path) -> None:
    """Raise unless the directory is that of a run that was trained."""
    if not list_checkpoints(run / BEST) and not list_checkpoints(run / CHECKPOINTS):
        raise MisuseError(
            rule="Predictions need a run that was trained",
            got=f"there is no checkpoint in {run}",
            advice="Give the directory that oomguard train has written to, such as runs/lstm-1000.",
        )


def check_predicted(run: Path, data: Any, output: str | None, given: Mapping[str, Any]) -> None:
    """Raise unless the directory has a run, data in a file is of a known kind, and predictions can be written."""
    if output is not None and Path(output).suffix.lower() not in (".npy", ".csv"):
        advice = "Give --output predictions.npy."
        raise MisuseError(rule="Predictions are written as .npy or .csv", got=f"got {output!r}", advice=advice)
    check_run(run)
    if given.get("device") is not None:
        find_target(given["device"])  # a device of that name exists somewhere
    if given.get("probabilities") and load_spec_plan(run / "plan.json").spec.loss != "cross-entropy":
        advice = "Leave --probabilities out."
        raise MisuseError(rule="Probabilities need classes", got="this run predicts numbers", advice=advice)
    settings = read_settings(run)
    if settings is not None and isinstance(data, str | Path):
        kind_of(Path(data), DataOptions(format=given.get("format", settings.options.format)))


def read_settings(directory: Path) -> RunSettings | None:
    """The settings of a run; None if it has none, as those of version 0.1."""
    path = directory / NAME
    try:
        with file_errors("The settings of a run must be readable", path, use="read"):
            return msgspec.json.decode(path.read_bytes(), type=RunSettings) if path.exists() else None
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
    if {"epochs", "steps"} & given.keys():  # either of the two says how long to train
        train = msgspec.structs.replace(settings.train, epochs=None, steps=None)
        return msgspec.structs.replace(settings, train=train)
    return settings
