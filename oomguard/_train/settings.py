"""What a run was started with, kept in its directory, so that it goes on without being told again."""

import os
from pathlib import Path
from typing import Any

import msgspec

from oomguard._core.errors import MisuseError
from oomguard._core.system import file_errors, write_file
from oomguard._data.options import DataOptions
from oomguard._plan.value import Plan
from oomguard._train import TrainOptions
from oomguard._train.checkpoint import CHECKPOINTS, load

NAME = "settings.json"


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The data and the options of a run, all but its plan."""

    data: str | None = None  # file of the data; None: it was in memory
    model: str | None = None  # the function that builds the model, as package.module:function
    train: TrainOptions = TrainOptions()
    options: DataOptions = DataOptions()
    known: bool = False  # whether the options have what is to be known of the data


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
    checkpoint = load(directory / CHECKPOINTS) if settings is None else None
    if checkpoint is None:
        return settings
    return RunSettings(model=checkpoint.state.model, options=checkpoint.state.data_options, known=True)


def settle(plan: Plan, data: Any, model: str | None, given: dict[str, Any]) -> RunSettings:
    """The settings of a training: what is given, then those of the run that is resumed, then those of the plan."""
    directory = Path(given.get("run") or f"runs/{plan.spec.cell}-{plan.spec.steps}")
    settings = _resumed(directory) if given.get("resume") else None
    if settings is None:
        read = plan.data
        settings = RunSettings() if read is None else RunSettings(data=read.path, options=read.options, known=True)
    elif {"epochs", "steps"} & given.keys():  # either of the two says how long to train
        settings = msgspec.structs.replace(
            settings, train=msgspec.structs.replace(settings.train, epochs=None, steps=None)
        )
    train = {name: value for name, value in given.items() if name in TrainOptions.__struct_fields__}
    options = {name: value for name, value in given.items() if name in DataOptions.__struct_fields__}
    in_file = isinstance(data, str | os.PathLike)
    path = settings.data if data is None else os.fspath(data) if in_file else None
    if path is None and data is None:
        raise MisuseError(
            rule="Training needs data",
            got="neither the plan nor the run names a file",
            advice="Give --data a .npy, .csv, .parquet or .txt file, or in Python an array or a DataFrame.",
        )
    return msgspec.structs.replace(
        settings,
        data=path,
        model=model or settings.model,
        train=msgspec.structs.replace(settings.train, **train | {"run": str(directory)}),
        options=msgspec.structs.replace(settings.options, **options),
    )
