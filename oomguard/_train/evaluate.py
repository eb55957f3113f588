"""Evaluation passes, in microbatches as large as they allow: the validation loss, and the predictions of a run."""

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, TypeVar

import msgspec
import numpy as np
from torch import Tensor

from oomguard._core.errors import GuardError, MisuseError
from oomguard._core.progress import Status, tell
from oomguard._core.system import check_regular, file_errors
from oomguard._data.files import BYTE_TOKENS
from oomguard._data.loader import read_microbatch
from oomguard._data.open import open_data, open_source
from oomguard._data.rows import Source
from oomguard._data.source import Array, Ints
from oomguard._device.find import open_device
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.target import Target
from oomguard._plan.store import load_spec_plan
from oomguard._probe.verdict import Verdict, judge
from oomguard._rnn import Microbatch, count_targets, evaluate, outputs
from oomguard._rnn.model import Recurrent
from oomguard._rnn.run import IGNORED
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec
from oomguard._train.checkpoint import Checkpoint, Model, TrainState, build_model, load, load_weights
from oomguard._train.ranks import Ranks
from oomguard._train.settings import BEST, CHECKPOINTS, check_run, read_settings

MOST_ROWS = 4096  # most sequences of an evaluation pass: beyond that no kernel gets faster
Output = TypeVar("Output")
Blocks = Iterator[tuple[Ints, Array]]  # numbers of some sequences, and their predictions


def evaluation_candidate(spec: Spec, candidate: Candidate, target: Target) -> Candidate:
    """The candidate for evaluation passes during a training with the given candidate.

    It takes more sequences, since no activations are kept for a gradient, as long as its estimated peak stays within
    that of a training step, which is known to fit.
    """
    limit_bytes = estimate_step(spec, candidate, target).total_bytes
    if spec.bidirectional:  # the second direction starts at the end, so it cannot be evaluated in segments
        candidate = msgspec.structs.replace(candidate, segments=1)
    best = msgspec.structs.replace(candidate, microbatch=1, accumulation=1)
    while best.microbatch < MOST_ROWS:
        larger = msgspec.structs.replace(best, microbatch=2 * best.microbatch)
        if estimate_step(spec, larger, target, training=False).total_bytes > limit_bytes:
            break
        best = larger
    return best


def validate(model: Recurrent, source: Source, candidate: Candidate, ranks: Ranks) -> float:
    """The mean loss over all real targets of a source."""
    done = Told("Validating", len(source))

    def loss_of(sequences: Ints) -> tuple[float, int]:
        batch = read_microbatch(source, sequences)
        done.add(len(sequences))
        return float(evaluate(model, batch, candidate)), count_targets(model.spec, batch)

    total, targets = 0.0, 0
    # longest first: neighbours need little padding, and a microbatch that does not fit is known at once
    order = ranks.share(np.argsort(-source.lengths, kind="stable"))
    with ranks.together():
        for _, (loss, count) in in_microbatches(order, candidate.microbatch, loss_of):
            total, targets = total + loss, targets + count
    loss_sum, target_sum = ranks.sums([total, targets])
    return loss_sum / max(1, target_sum)


class Told:
    """Tells how many sequences of a pass are begun."""

    def __init__(self, words: str, total: int) -> None:
        self.words, self.total, self.begun = words, total, 0

    def add(self, count: int) -> None:
        """Tell that some more begin."""
        words = f"{self.words}: {self.begun:,} of {self.total:,} sequences"
        tell(Status(words, self.begun / max(1, self.total), topic=self.words))
        self.begun = min(self.total, self.begun + count)


def in_microbatches(order: Ints, rows: int, compute: Callable[[Ints], Output]) -> Iterator[tuple[Ints, Output]]:
    """Each microbatch with its result. Out of memory halves it; `GuardError` if not even one sequence fits."""
    while len(order):
        sequences = order[:rows]
        try:
            yield sequences, compute(sequences)
            order = order[rows:]
            continue
        except Exception as error:
            if judge(error) is not Verdict.OOM:
                raise
            message = str(error).strip().partition("\n")[0]
        if len(sequences) == 1:
            raise GuardError(
                rule="An evaluation pass of one sequence must fit",
                got=f"memory ran out ({message})",
                advice="Free memory, or make a plan for a smaller budget.",
            )
        rows = len(sequences) // 2


def run_prediction(
    run: str | os.PathLike[str],
    data: Any,
    options: Mapping[str, Any],
    *,
    output: str | None = None,
    probabilities: bool = False,
    device: str | None = None,
    model: Model = None,
    precision: str | None = None,
) -> Array | Path:
    """All predictions as an array or in the file `output`. `options` are data options other than the training's.

    `precision`: int8, or None for that of the training.
    """
    checkpoint = find_checkpoint(Path(run))
    plan, state = load_spec_plan(Path(run) / "plan.json"), checkpoint.state
    spec = checkpoint.spec or plan.spec
    classes = spec.loss == "cross-entropy" and not probabilities
    if data is None:
        data = _own_data(Path(run))
    tell("Reading the data")
    source = _open_inputs(data, spec, state, options)
    done = Told("Predicting", len(source))
    target_device = open_device(plan.where.device if device is None else device)
    network = build_model(model or state.model, spec).to(target_device.name)
    load_weights(checkpoint, network)
    candidate = evaluation_candidate(spec, checkpoint.candidate, plan.where)
    target_device.settle(candidate)
    if precision is not None:
        candidate = msgspec.structs.replace(candidate, precision="fp32")
        some = read_microbatch(source, np.arange(min(len(source), candidate.microbatch)))
        network = _in_8_bits(Path(run), network, some, candidate, state)

    def predict(sequences: Ints) -> Array:
        done.add(len(sequences))
        values = outputs(network, read_microbatch(source, sequences), candidate)
        if spec.loss == "cross-entropy":
            values = values.softmax(-1) if probabilities else values.argmax(-1)
        array: Array = values.numpy()
        return array if state.normaliser is None else state.normaliser.restored(array)

    blocks = in_microbatches(np.arange(len(source)), candidate.microbatch, predict)
    if output is not None and output.lower().endswith(".csv"):
        labels = labels_of(state, spec)
        names = ["class"] if classes else columns_of(state, spec, labels)
        return _write_csv(blocks, source, spec, output, names, labels if classes else ())
    return _write_array(blocks, source, spec, output, classes=classes)


def _in_8_bits(run: Path, network: Recurrent, batch: Microbatch, candidate: Candidate, state: TrainState) -> Recurrent:
    """The network with weights in 8 bits. It is told what that changes."""
    from oomguard._train.quantise import measure_effect, quantise

    smaller, losses = quantise(network), None
    source = validation_source(run, state, network.spec)
    if source is not None:
        after, before = (validate(each, source, candidate, Ranks()) for each in (smaller, network))
        losses = after, before
    effect = measure_effect(network, smaller, batch, candidate, losses)
    tell(Status("Predicting", notes=(str(effect),)))
    return smaller


def validation_source(run: Path, state: TrainState, spec: Spec) -> Source | None:
    """The validation data of a run; None if it had none, or was trained with data in memory."""
    settings = read_settings(run)
    if settings is None or settings.data is None or not state.data_options.validation:
        return None
    return open_data(settings.data, spec, state.data_options, state.normaliser).validation


def find_checkpoint(run: Path) -> Checkpoint:
    """The best checkpoint of a run by validation, or the last if there was no validation."""
    check_run(run)
    checkpoint = load(run / BEST) or load(run / CHECKPOINTS)
    assert checkpoint is not None, "load raises if all are damaged"
    return checkpoint


def _open_inputs(data: Any, spec: Spec, state: TrainState, options: Mapping[str, Any]) -> Source:
    """The data. A file or an array may lack targets, so its inputs are read in their place."""
    normaliser = state.normaliser
    # the training's vocabulary: a token stands for the same character, whatever the new file contains
    changes = {"validation": 0.0, "vocabulary": state.data.get("vocabulary")} | {**options}
    if isinstance(data, str | Path | np.ndarray | Tensor):
        loss = "mse" if spec.vocab is None else "cross-entropy"
        spec = msgspec.structs.replace(spec, head="per-step", loss=loss, outputs=spec.vocab or spec.inputs)
        changes |= {"inputs_only": True, "targets": None, "ahead": None}
        if normaliser is not None:
            normaliser = msgspec.structs.replace(normaliser, target_mean=None, target_std=None)
    source = open_source(data, spec, msgspec.structs.replace(state.data_options, **changes))
    return replace(source, normaliser=normaliser)


def _write_array(blocks: Blocks, source: Source, spec: Spec, output: str | None, *, classes: bool) -> Array | Path:
    """The predictions as an array in memory, or mapped to a .npy file: sequences x steps x outputs.

    There are no steps for one prediction per sequence, and no outputs for classes.
    """
    dtype, missing = (np.int64, IGNORED) if classes else (np.float32, np.nan)
    per_step = spec.head == "per-step"
    steps = (int(source.lengths.max()),) if per_step else ()
    shape = (len(source), *steps, *(() if classes else (spec.classes,)))
    if output is None:
        array: Array = np.empty(shape, dtype)
    else:
        _open_output(output).close()
        array = np.lib.format.open_memmap(output, "w+", dtype, shape)
    for sequences, values in blocks:
        array[sequences] = missing if per_step else values
        if per_step:
            for number, predictions in zip(sequences.tolist(), values, strict=True):
                length = int(source.lengths[number])
                array[number, :length] = predictions[:length]
    if isinstance(array, np.memmap):
        array.flush()
    return array if output is None else Path(output)


def labels_of(state: TrainState, spec: Spec) -> Sequence[str]:
    """The names of the classes: values of a text column, characters or bytes; none if classes are only numbers."""
    options = state.data_options
    if spec.loss != "cross-entropy":
        return ()
    for name in (options.target or ())[:1]:
        if name in options.categories:
            return options.categories[name]
    if state.data.get("kind") != "text":
        return ()
    return str(state.data.get("vocabulary") or "".join(map(chr, range(BYTE_TOKENS))))


def columns_of(state: TrainState, spec: Spec, labels: Sequence[str]) -> list[str]:
    """The names of the outputs: those of the target columns, or of the classes whose probabilities they are."""
    names = labels if spec.loss == "cross-entropy" else state.data.get("predicts", ())
    return [names[i] if i < len(names) else f"output{i}" for i in range(spec.classes)]


def _own_data(run: Path) -> str:
    settings = read_settings(run)
    if settings is None or settings.data is None:
        advice = "Add --data with a file in the form of the training data."
        raise MisuseError(rule="Predictions need data", got=f"{run} does not name a file", advice=advice)
    return settings.data


def _write_csv(
    blocks: Blocks, source: Source, spec: Spec, output: str, columns: list[str], labels: Sequence[str]
) -> Path:
    """A CSV file with one line for each prediction, classes by their names if they have any."""
    names, origin = source.origins()
    per_step = spec.head == "per-step"
    with _open_output(output) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["sequence", *names, *(["step"] if per_step else []), *columns])
        for sequences, values in blocks:
            steps = values.reshape(len(values), -1, len(columns))
            for number, predictions in zip(sequences.tolist(), steps, strict=True):
                first = [number, *origin(number)]
                for step in range(int(source.lengths[number]) if per_step else 1):
                    cells = predictions[step].tolist()
                    if labels:
                        cells = [labels[cell] if cell < len(labels) else cell for cell in cells]
                    writer.writerow([*first, *([step] if per_step else []), *cells])
    return Path(output)


def _open_output(output: str) -> TextIO:
    with file_errors("Predictions need a writable file", output, "Give another --output."):
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        check_regular(output)
        return open(output, "w", encoding="utf-8", newline="")
