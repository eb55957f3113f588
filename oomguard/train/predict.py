"""Predictions of a trained run: read, computed and written a microbatch at a time."""

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np
from torch import Tensor

from oomguard.bptt import outputs
from oomguard.bptt.run import IGNORED
from oomguard.checkpoint import Checkpoint, load, load_weights
from oomguard.data.normalise import Normalised, Normaliser
from oomguard.data.open import open_source
from oomguard.data.options import DataOptions
from oomguard.data.rows import Rows, origins
from oomguard.data.source import Array, Ints, Source
from oomguard.device import open_device
from oomguard.errors import MisuseError
from oomguard.model import Recurrent, build
from oomguard.plan.store import load_plan
from oomguard.spec import Spec
from oomguard.train.evaluate import evaluation_candidate, read, tried
from oomguard.train.job import BEST, CHECKPOINTS, State
from oomguard.train.own import Model, build_own

SUFFIXES = (".npy", ".csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is made of the predictions. Checked at birth."""

    output: str | None = None
    """The file they go to; None: into memory."""
    probabilities: bool = False
    """Of classes: those of all, instead of the likeliest."""
    device: str | None = None
    """Where; None: where it was trained."""
    model: Model = None
    """What builds the model; None: what the run was trained with, by its name."""

    def __post_init__(self) -> None:
        if self.output is not None and Path(self.output).suffix.lower() not in SUFFIXES:
            raise MisuseError(
                rule="Predictions are written as .npy or .csv",
                got=f"got {self.output!r}",
                advice="Give --output predictions.npy.",
            )


def run_prediction(run: str | os.PathLike[str], data: Any, wanted: Wanted, options: dict[str, Any]) -> Array | Path:
    """All predictions in the order of the sequences, as an array or in a file."""
    found = _newest(Path(run))
    plan, spec, state = load_plan(Path(run) / "plan.json"), found.spec, msgspec.convert(found.facts, State)
    if wanted.probabilities and spec.loss != "cross-entropy":
        raise MisuseError(
            rule="Probabilities are of classes", got="this run predicts numbers", advice="Leave --probabilities out."
        )
    # a token means the character that it meant in training, whatever the new file holds
    was = {"validation": 0.0, "vocabulary": state.data.get("vocabulary")}
    asked = msgspec.structs.replace(state.data_options, **was | options)
    if isinstance(data, str | Path | np.ndarray | Tensor):  # a Dataset and pairs give what they give
        source, own = _inputs_of(data, spec, asked, state.normaliser), reading(spec)
    else:
        source, own = _source(data, spec, asked, state.normaliser), spec
    device = open_device(plan.where.device if wanted.device is None else wanted.device)
    by = wanted.model or state.model
    model = (build(spec) if by is None else build_own(by, spec)).to(device.torch_device)
    load_weights(found, model)
    candidate = evaluation_candidate(spec, found.candidate, plan.where.place)
    device.settle(candidate)
    form = _form(spec, source, probabilities=wanted.probabilities)
    made = _predicted(model, _Read(source, own), candidate, wanted)
    if state.normaliser is not None:
        made = ((start, state.normaliser.restored(rows)) for start, rows in made)
    return _written(made, source, form, wanted.output)


def _newest(run: Path) -> Checkpoint:
    """The best checkpoint by validation, otherwise the last."""
    found = load(run / BEST) or load(run / CHECKPOINTS)
    if found is None:
        raise MisuseError(
            rule="Predictions need a run that was trained",
            got=f"there is no checkpoint in {run}",
            advice="Give the directory that oomguard train has written to, such as runs/lstm-1000.",
        )
    return found


def reading(spec: Spec) -> Spec:
    """The spec of which the inputs are the targets too, so that data without targets can be read.

    >>> reading(Spec(cell="gru", seq=9, features=3, outputs=9, loss="cross-entropy", head="last-step")).outputs
    3
    """
    loss: Any = "mse" if spec.vocab is None else "cross-entropy"
    return msgspec.structs.replace(spec, head="per-step", loss=loss, outputs=spec.vocab or spec.inputs)


def _inputs_of(data: Any, spec: Spec, options: DataOptions, normaliser: Normaliser | None) -> Source:
    """The inputs of a file or an array, whether it has targets or not."""
    alone = msgspec.structs.replace(options, inputs_only=True, targets=None, ahead=None)
    if normaliser is not None:
        normaliser = msgspec.structs.replace(normaliser, target_mean=None, target_std=None)
    return _source(data, reading(spec), alone, normaliser)


def _source(data: Any, spec: Spec, options: DataOptions, normaliser: Normaliser | None) -> Source:
    source = open_source(data, spec, options)
    return source if normaliser is None else Normalised(source, normaliser)


@dataclass(frozen=True, slots=True)
class _Read:
    """A source and how its microbatches are put together."""

    source: Source
    spec: Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What predictions look like."""

    shape: tuple[int, ...]
    """Sequences x steps x outputs, without the steps for one prediction each and the outputs for classes."""
    stepped: bool
    """Whether there are steps."""
    classes: bool
    """Whether they are classes, by their numbers."""

    @property
    def names(self) -> list[str]:
        """Of the columns."""
        return ["class"] if self.classes else [f"output{i}" for i in range(self.shape[-1])]

    def block(self, rows: Array, lengths: Ints) -> Array:
        """Some sequences as wide as all, what comes after their last step left empty."""
        kind, empty = (np.int64, IGNORED) if self.classes else (np.float32, np.nan)
        whole = np.full((len(rows), *self.shape[1:]), empty, dtype=kind)
        if not self.stepped:
            whole[:] = rows
        else:
            for row, steps in enumerate(lengths):
                whole[row, :steps] = rows[row, :steps]
        return whole


def _form(spec: Spec, source: Source, *, probabilities: bool) -> _Form:
    classes, stepped = spec.loss == "cross-entropy" and not probabilities, spec.head == "per-step"
    steps = (int(source.lengths.max()),) if stepped else ()
    return _Form(shape=(len(source), *steps, *(() if classes else (spec.classes,))), stepped=stepped, classes=classes)


def _predicted(model: Recurrent, data: _Read, candidate: Any, wanted: Wanted) -> Iterator[tuple[int, Array]]:
    """The number of the first sequence and the predictions of some, until all are done."""
    start, rows = 0, candidate.microbatch
    while start < len(data.source):
        some = np.arange(start, min(start + rows, len(data.source)))
        batch = read(data.spec, data.source, some)
        found = tried(lambda batch=batch: outputs(model, batch, candidate), last=rows == 1)  # type: ignore[misc]
        if found is None:
            rows //= 2
            continue
        if model.spec.loss == "cross-entropy":
            found = found.softmax(-1) if wanted.probabilities else found.argmax(-1)
        yield start, found.numpy()
        start += len(some)


def _written(made: Iterator[tuple[int, Array]], source: Source, form: _Form, output: str | None) -> Array | Path:
    """The predictions in an array, in memory or on the disk, or as lines of text."""
    if output is not None and output.lower().endswith(".csv"):
        with _opened(output) as file:
            csv.writer(file, lineterminator="\n").writerows(_lines(made, source, form))
        return Path(output)
    kind: Any = np.int64 if form.classes else np.float32
    if output is None:
        array = np.empty(form.shape, kind)
    else:
        _opened(output).close()
        array = np.lib.format.open_memmap(output, "w+", kind, form.shape)
    for start, rows in made:
        array[start : start + len(rows)] = form.block(rows, source.lengths[start : start + len(rows)])
    if output is None:
        return array
    array.flush()  # type: ignore[attr-defined]
    return Path(output)


def _opened(output: str) -> TextIO:
    try:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        return open(output, "w", encoding="utf-8", newline="")
    except OSError as error:
        raise MisuseError(
            rule="--output must be a file that can be written",
            got=f"{output} cannot ({error.strerror})",
            advice="Give another --output.",
        ) from None


def _lines(made: Iterator[tuple[int, Array]], source: Source, form: _Form) -> Iterator[list[Any]]:
    """The names of the columns, and one line for each prediction."""
    read = source.source if isinstance(source, Normalised) else source
    names, origin = origins(read) if isinstance(read, Rows) else ([], lambda _: [])
    yield ["sequence", *names, *(["step"] if form.stepped else []), *form.names]
    for start, rows in made:
        for number, steps in enumerate(rows.reshape(len(rows), -1, len(form.names)), start=start):
            whose = [number, *origin(number)]
            for step in range(int(source.lengths[number]) if form.stepped else 1):
                yield [*whose, *([step] if form.stepped else []), *steps[step].tolist()]
