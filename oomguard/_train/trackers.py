"""Trackers that show a training where people look: MLflow, Weights & Biases, TensorBoard. Nothing leaves the machine.

TensorBoard's event files are written by `metrics.py`. The others are fed by a process of their own (`tracking.py`),
which reads what the training writes to its directory: their libraries take none of the training's memory, and neither a
slow nor a failing tracker disturbs it.
"""

import importlib.util
import os
import shlex
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from oomguard._core.errors import MisuseError
from oomguard._core.progress import tell
from oomguard._core.system import command, file_errors, read_file

STATE = "trackers.json"
"""File in the directory of a run with the state of its trackers, so that a resumed run goes on with the same ones."""
LOG = "trackers.log"  # what the process of the trackers prints
MLFLOW = "mlflow.db"  # the database of MLflow
APART = ("mlflow", "wandb")  # trackers that are fed by a process of their own
SECONDS = 120.0  # time that the process has to finish after the training; then it is ended
_TITLES = {"mlflow": "MLflow", "wandb": "Weights & Biases", "tensorboard": "TensorBoard"}


class TrackerState(msgspec.Struct, kw_only=True):
    """How far a tracker is."""

    id: str  # identifies the run in the tracker
    step: int = 0  # the last step that it has
    events: int = 0  # lines of the file of events that it has


def check_trackers(names: Sequence[str]) -> None:
    """Raise if the package of a tracker is not installed. Nothing is imported."""
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # the folder that wandb writes looks like a package without files
            raise MisuseError(
                rule=f"--log {name} needs the package {name}",
                got="it is not installed",
                advice=f'Run pip install "oomguard[{name}]", or leave it out.',
            )


def mlflow_uri(run: Path) -> str:
    """The database of MLflow: that of the run, or a local one of the user."""
    own = os.environ.get("MLFLOW_TRACKING_URI", "")
    return own if own.startswith("sqlite:") else f"sqlite:///{(run / MLFLOW).absolute()}"


def open_commands(run: Path, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each tracker's title with the command that opens a run in it."""
    for name in names:
        if name == "mlflow":
            yield _TITLES[name], f"mlflow ui --backend-store-uri {shlex.quote(mlflow_uri(run))}"
        elif name == "tensorboard":
            yield _TITLES[name], f"tensorboard --logdir {shlex.quote(str(run))}"
        elif (state := read_state(run).get(name)) is not None:  # one folder for each time that it was resumed
            yield _TITLES[name], f"wandb sync {shlex.quote(str(run / 'wandb'))}/offline-run-*-{state.id}"


def read_state(run: Path) -> dict[str, TrackerState]:
    """The state of each tracker of a run; none if there is no such file, or it is damaged."""
    path = run / STATE
    with file_errors("The state of trackers must be readable", path, use="read"):
        try:
            return msgspec.json.decode(read_file(path), type=dict[str, TrackerState]) if path.exists() else {}
        except msgspec.DecodeError:
            warnings.warn(f"{path} cannot be read. The trackers begin anew.", stacklevel=2)
            return {}


class Trackers(AbstractContextManager["Trackers"]):
    """The process that feeds trackers while a training runs. It ends with the training, whatever ends that."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self.ended, self.peak_bytes = "failed", 0  # why the training ended, and its peak; set once it has
        self.directory, self.names = directory, [name for name in names if name in APART]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Trackers":
        if self.names:
            given = f"{str(self.directory.absolute())!r}, {self.names!r}, {os.getpid()}"
            call = f"from oomguard._train.tracking import serve; serve({given})"
            with file_errors("Trackers need a writable directory", self.directory), self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command(call), stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
                )
        return self

    def __exit__(self, *error: object) -> None:
        process = self._process
        if process is None:
            return
        tell("Waiting for the trackers")
        try:
            process.communicate(f"{self.ended} {self.peak_bytes}\n".encode(), timeout=SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also if Ctrl-C is pressed again
            process.kill()
            process.wait()
        if process.returncode:
            titles = " and ".join(_TITLES[name] for name in self.names)
            warnings.warn(f"{titles} may lack the end of the training ({self._last_line()}).", stacklevel=3)
        else:
            self._log.unlink(missing_ok=True)

    @property
    def _log(self) -> Path:
        return self.directory / LOG

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it did not finish in time")
