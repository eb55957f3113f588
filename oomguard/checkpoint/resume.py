"""From a checkpoint back to a training, or to a model."""

import os
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from oomguard.checkpoint.state import put, put_weights, weights
from oomguard.checkpoint.store import TENSORS, Checkpoint, load
from oomguard.checks import flag, shown
from oomguard.errors import MisuseError
from oomguard.model import Recurrent
from oomguard.spec import Spec
from oomguard.step import Training
from oomguard.units import MIB

_SHAPELESS = ("seq", "lengths", "batch", "optimizer", "loss", "packed", "batch_first", "sparse_embedding")
"""What of a spec the weights do not depend on."""
_MAPPED_BYTES = 32 * MIB
"""Read so much, then open the file anew."""


def restore(checkpoint: Checkpoint, training: Training) -> None:
    """Let a training go on where the checkpoint was saved: the next step is the one that would have come then.

    The spec must be the same. The candidate may be another one, as long as its optimizer keeps the same things.
    """
    if checkpoint.spec != training.model.spec:
        raise _differs(checkpoint.spec, training.model.spec)
    state, optimizer = checkpoint.state, training.optimizer
    if state.optimizer != type(optimizer).__name__ or len(state.groups) != len(optimizer.param_groups):
        raise MisuseError(
            rule="A training goes on with the optimizer that its checkpoint was made with",
            got=f"that was {state.optimizer} and this is {type(optimizer).__name__}",
            advice="Take the candidate that the checkpoint was made with, or start anew in another directory.",
        )
    put(training, state, _Reader(checkpoint))


def load_weights(source: Checkpoint | str | os.PathLike[str], model: Recurrent) -> Checkpoint:
    """Give a model the weights of a checkpoint, or of the newest one in a directory. Returns the checkpoint.

    Only what shapes the weights must be as it was: the batch, the length of the sequences or the optimizer need not.
    """
    found = source if isinstance(source, Checkpoint) else load(source)
    if found is None:
        raise MisuseError(
            rule="To load weights there must be a checkpoint",
            got=f"there is none in {source}",
            advice="Give the directory that a training has written to.",
        )
    read = _Reader(found)
    try:
        fits = all(read(name).shape == weight.shape for name, weight in weights(model).items())
    except KeyError:
        fits = False
    if not fits:
        raise _differs(found.spec, model.spec, besides=_SHAPELESS)
    put_weights(model, read)
    return found


class _Reader:
    """Reads a tensor when it is asked for. KeyError: there is none of that name.

    What was read stays mapped, and so counts as resident, until the file is closed: it is opened anew every so often.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._path = checkpoint.path / TENSORS
        self._open()
        self._names = {*self._file.keys()}

    def __call__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        if self._read_bytes > _MAPPED_BYTES:
            self._open()
        found: Tensor = self._file.get_tensor(name)
        self._read_bytes += found.nbytes
        return found

    def _open(self) -> None:
        self._read_bytes = 0
        try:
            self._file: Any = safe_open(self._path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise MisuseError(
                rule="A checkpoint must stay where it is until it is restored",
                got=f"{self._path} cannot be read any more ({error})",
                advice="Load the newest one again.",
            ) from None


def _differs(old: Spec, new: Spec, besides: tuple[str, ...] = ()) -> MisuseError:
    """Names what differs, so that it can be put right."""
    names = [field.name for field in msgspec.structs.fields(Spec) if field.name not in besides]
    pairs = {name: (getattr(old, name), getattr(new, name)) for name in names}
    named = [f"{flag(name)} was {shown(a)} and is {shown(b)}" for name, (a, b) in pairs.items() if a != b]
    return MisuseError(
        rule="A checkpoint belongs to the spec it was made with",
        got=", ".join(named) or "its weights are not those of this model",
        advice="Give that spec again, or another directory.",
    )
