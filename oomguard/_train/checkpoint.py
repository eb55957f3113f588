"""Checkpoints: directories from which a training continues bit for bit, whatever stopped it.

- `save` writes a directory under a temporary name and renames it once it is on the disk. A kill at any moment leaves
  the old checkpoints, or the old and the new one, each of them complete. The last few are kept.
- `load` finds the newest checkpoint whose checksums agree, and warns about each one it skips.
- `restore` gives weights, optimizer, scaler and random numbers back to a training; `load_weights` gives only the
  weights to a model, which `build_model` builds again from the name of its function.

Nothing is pickled: tensors are in a safetensors file, the rest is JSON.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import msgspec
from safetensors import SafetensorError
from torch import nn

from oomguard._core.errors import MisuseError, flag, shown
from oomguard._core.system import file_errors, opened, read_file, sync_directory, write_all
from oomguard._core.units import format_bytes
from oomguard._data.options import DataOptions
from oomguard._data.order import Position
from oomguard._data.rows import Normaliser
from oomguard._guard.ladder import LadderPosition
from oomguard._rnn.model import Recurrent, build
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec
from oomguard._step import TaskTraining
from oomguard._task.task import Task
from oomguard._train.settings import CHECKPOINT_RULE, UNFINISHED, list_checkpoints, serial
from oomguard._train.shards import SharedState
from oomguard._train.tensors import OptimizerState, TensorFile, file_pieces, get_state, put_state, put_weights, weights
from oomguard._train.verify import faults

Model = Callable[[Spec], Recurrent] | str | None
"""A function from a spec to a model, or its name package.module:function; None: the model that the spec describes."""
VERSION = 1  # Version of the format. Others are not read.
TENSORS, FACTS, CHECKSUMS = "tensors.safetensors", "facts.json", "checksums.json"  # files of a checkpoint
_NOT_IN_WEIGHTS = ("seq", "lengths", "batch", "optimizer", "loss", "packed", "batch_first", "sparse_embedding")
"""Fields of a spec that do not affect the shape of the weights."""


class DamagedError(MisuseError):
    """A checkpoint whose files are whole, but not as oomguard wrote them."""


class Checksum(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identifies the content of a file."""

    sha256: str
    size_bytes: int


class TrainState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far a training is, besides its weights, optimizer and random numbers.

    Names in the file differ from those here where renaming them would break runs of earlier versions.
    """

    step: int = 0  # optimizer steps made
    position: Position = Position()
    ladder: LadderPosition = msgspec.field(name="standing", default=LadderPosition())
    """Rung of the plan. A resumed run continues there, since other microbatches round sums differently."""
    loss: float | None = None  # loss of the last step
    best: float | None = None  # lowest validation loss
    worse: int = 0  # validations since the lowest
    data: dict[str, Any] = {}  # the training data, as its source describes itself
    data_options: DataOptions = DataOptions()  # how the data was read
    normaliser: Normaliser | None = None  # how numbers were scaled; None: not at all
    model: str | None = None
    """The function that built the model, as package.module:function; None: the spec's own model."""
    task: str | msgspec.UnsetType = msgspec.UNSET  # the name of the task; not in the file: the model of a spec
    schedule: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET  # state of the scheduler of a task that has one


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A complete checkpoint, as `facts.json` has it. Its tensors are still in its directory."""

    version: int
    step: int  # optimizer steps made when it was saved
    spec: Spec | None = None  # None: the model of a task
    candidate: Candidate
    optimizer: OptimizerState = msgspec.field(name="state")
    state: TrainState = msgspec.field(name="facts")
    directory: str = ""  # where it was found; not in the file

    def tensors(self) -> TensorFile:
        return TensorFile(Path(self.directory) / TENSORS)


def save(
    directory: str | os.PathLike[str],
    training: TaskTraining,
    state: TrainState,
    keep: int = 3,
    shared: SharedState | None = None,
) -> Path:
    """Write a checkpoint, then remove all but the last `keep`. Returns its directory.

    `shared` is the state of the optimizer if several processes share it.
    """
    home, spec, candidate = Path(directory), _spec_of(training.model), training.candidate
    optimizer, tensors = get_state(training) if shared is None else (shared.optimizer, shared.tensors)
    content = Checkpoint(
        version=VERSION, step=state.step, spec=spec, candidate=candidate, optimizer=optimizer, state=state
    )
    size = format_bytes(sum(tensor.nbytes for tensor in tensors.values()))
    advice = f"Give a directory with {size} free that you can write to. Older checkpoints are intact."
    with file_errors(CHECKPOINT_RULE, home, advice):
        path = _write(home, file_pieces(tensors, None if shared is None else shared.fetch), content)
    _remove_old(home, keep)
    return path


def _write(home: Path, tensors: Iterable[bytes | memoryview], content: Checkpoint) -> Path:
    """Write the files of a checkpoint; its directory gets its name once they are on the disk."""
    if not home.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        sync_directory(home.parent)
    for leftover in home.glob(f"{UNFINISHED}*"):
        shutil.rmtree(leftover)
    # by serial number, since a step number may come back after a return to an older checkpoint
    number = max(map(serial, list_checkpoints(home)), default=0) + 1
    name = f"step-{content.step:08d}-save-{number:04d}"
    unfinished = home / f"{UNFINISHED}{name}"
    # not by msgspec's own encoder, which writes a loss of NaN or infinity as null
    text = json.dumps(msgspec.to_builtins(content, str_keys=True), indent=1).encode()
    try:
        unfinished.mkdir()
        sums = {TENSORS: _write_file(unfinished / TENSORS, tensors)}
        sums[FACTS] = _write_file(unfinished / FACTS, [text])
        _write_file(unfinished / CHECKSUMS, [msgspec.json.encode(sums)])
        sync_directory(unfinished)
        os.replace(unfinished, home / name)
        sync_directory(home)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # there only if the save failed
    return home / name


def _write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Checksum:
    """Write a new file piece by piece. It is on the disk when this returns."""
    digest, size_bytes = hashlib.sha256(), 0
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
        for piece in pieces:
            digest.update(piece)
            write_all(file, piece)
            size_bytes += len(piece)
            del piece  # otherwise it stays in host memory while the next tensor comes from the card
        os.fsync(file)
    return Checksum(sha256=digest.hexdigest(), size_bytes=size_bytes)


def checksum_of(path: Path) -> Checksum:
    with opened(path, os.O_RDONLY) as descriptor, open(descriptor, "rb", closefd=False) as file:
        return Checksum(sha256=hashlib.file_digest(file, "sha256").hexdigest(), size_bytes=file.tell())


def _remove_old(home: Path, keep: int) -> None:
    """Remove all but the newest checkpoints. A failure is only a warning, since the new one is safe."""
    for path in list_checkpoints(home)[keep:]:
        unfinished = path.with_name(f"{UNFINISHED}{path.name}")
        try:
            os.replace(path, unfinished)  # first, so that half a checkpoint never has a checkpoint's name
            shutil.rmtree(unfinished)
        except OSError as error:
            warnings.warn(f"{path}: an old checkpoint could not be removed ({error.strerror}).", stacklevel=3)


def load(directory: str | os.PathLike[str], before: Checkpoint | None = None) -> Checkpoint | None:
    """The newest complete checkpoint, perhaps of those before another one; None if there is none at all.

    Damaged ones are skipped with a warning.
    """
    home, tried, newer = Path(directory), None, None if before is None else Path(before.directory)
    while (listed := list_checkpoints(home, newer)) != tried:  # again if a running training removed one meanwhile
        tried = listed
        for path in listed:
            checkpoint = _open(path)
            if isinstance(checkpoint, Checkpoint):
                return checkpoint
            if path.is_dir():
                warnings.warn(f"{path / checkpoint}. Looking for an older checkpoint.", stacklevel=2)
    if not tried:
        return None
    raise MisuseError(
        rule="At least one checkpoint must be complete",
        got=f"all {len(tried)} in {home} are damaged",
        advice="Restore one from a backup, or start again in another directory.",
    )


def _open(path: Path) -> Checkpoint | str:
    """A checkpoint, or the name of the file that is damaged, and why."""
    name = CHECKSUMS
    try:
        sums = msgspec.json.decode(read_file(path / CHECKSUMS), type=dict[str, Checksum])
        for name in (FACTS, TENSORS):
            if name not in sums or checksum_of(path / name) != sums[name]:
                return f"{name}: the checksum does not match"
        name = FACTS
        raw = json.loads(read_file(path / FACTS))
        if raw["version"] != VERSION:
            return f"{name}: its format is version {shown(raw['version'])}, and only {VERSION} can be read"
        checkpoint = msgspec.convert(raw, type=Checkpoint, str_keys=True)
    except OSError as error:
        return f"{name}: it cannot be read ({error.strerror})"
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        return f"{name}: it is not in the expected format ({error})"
    return msgspec.structs.replace(checkpoint, directory=str(path))


def restore(checkpoint: Checkpoint, training: TaskTraining) -> None:
    """Let a training continue where the checkpoint was saved: its next step is the one that would have come then.

    The spec must be the same. The candidate may differ, as long as its optimizer has the same state.
    """
    if checkpoint.spec != _spec_of(training.model):
        raise _spec_error(checkpoint.spec, _spec_of(training.model))
    _check_weights(checkpoint, training.model)
    saved, optimizer = checkpoint.optimizer, training.optimizer
    if saved.optimizer != type(optimizer).__name__ or len(saved.groups) != len(optimizer.param_groups):
        raise MisuseError(
            rule="A training continues with the optimizer of its checkpoint",
            got=f"that was {saved.optimizer} and this is {type(optimizer).__name__}",
            advice="Use the checkpoint's candidate, or start again in another directory.",
        )
    try:
        if (fault := next(faults(training, saved, checkpoint.tensors()), None)) is None:
            put_state(training, saved, checkpoint.tensors())
    except (ValueError, TypeError, LookupError, RuntimeError, SafetensorError) as error:
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        raise DamagedError(
            rule="A checkpoint must be as oomguard train has written it",
            got=f"{Path(checkpoint.directory) / FACTS} is not ({fault})",
            advice="Continue from an older checkpoint, or start again in another directory.",
        )


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Give a model the weights of a checkpoint. Batch, sequence length and optimizer may differ."""
    _check_weights(checkpoint, model)
    put_weights(model, checkpoint.tensors())


def _check_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Raise unless a checkpoint has all weights of a model, in their shapes, and no others."""
    file, own = checkpoint.tensors(), weights(model)
    differing = {name for name in file.names if name.startswith("model.")} ^ own.keys()
    for name, weight in own.items():
        if name in differing or file.read(name).shape != weight.shape:
            differing.add(name)
    spec = _spec_of(model)
    if differing and checkpoint.spec is not None and spec is not None:
        raise _spec_error(checkpoint.spec, spec, ignored=_NOT_IN_WEIGHTS)
    if differing:
        raise MisuseError(
            rule="A checkpoint can only be used with the model it was made with",
            got=f"{min(differing).removeprefix('model.')} is not the same",
            advice="Build the model in the same way, or give another directory.",
        )


def _spec_of(model: nn.Module) -> Spec | None:
    return model.spec if isinstance(model, Recurrent) else None


def _spec_error(old: Spec | None, new: Spec | None, ignored: tuple[str, ...] = ()) -> MisuseError:
    if old is None or new is None:
        rule, which = "A run continues with the kind of model it began with", {True: "a task", False: "a spec"}
        got = f"that was {which[old is None]}'s and is {which[new is None]}'s"
        return MisuseError(rule=rule, got=got, advice="Give another directory.")
    names = [field.name for field in msgspec.structs.fields(Spec) if field.name not in ignored]
    pairs = {name: (getattr(old, name), getattr(new, name)) for name in names}
    differences = [f"{flag(name)} was {shown(a)} and is {shown(b)}" for name, (a, b) in pairs.items() if a != b]
    return MisuseError(
        rule="A checkpoint can only be used with the spec it was made with",
        got=", ".join(differences) or "its weights are not those of this model",
        advice="Give that spec again, or another directory.",
    )


def name_of(model: Model) -> str | None:
    """The name package.module:function, by which a run remembers the function that built its model."""
    if model is None or isinstance(model, str):
        return model
    return f"{getattr(model, '__module__', '')}:{getattr(model, '__qualname__', shown(model))}"


def build_model(model: Model, spec: Spec) -> Recurrent:
    if model is None:
        return build(spec)
    try:
        function = resolve_name(model) if isinstance(model, str) else model
    except (ImportError, AttributeError, ValueError) as error:
        raise MisuseError(
            rule="A model of your own is named as package.module:function",
            got=f"{model!r} cannot be imported ({error})",
            advice="Check the name and the import path, or pass the function itself, in Python as model=.",
        ) from None
    if isinstance(function, Task):
        raise MisuseError(
            rule="A task is trained with the plan of a task",
            got="this plan is for a spec",
            advice=f"Make a plan of it: oomguard plan --model {shown(model).strip(chr(39))}.",
        )
    own = function(spec)
    if not isinstance(own, Recurrent) or own.spec != spec:
        raise MisuseError(
            rule="A model of your own must be an oomguard.Recurrent with the plan's spec",
            got=f"{shown(model)} returned {type(own).__name__}",
            advice="Change what it builds, or train any other module in a loop of your own with oomguard.guard.",
        )
    return own
