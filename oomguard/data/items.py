"""Data that comes from Python: a map-style Dataset is asked for its items; pairs that only come once are spooled."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oomguard.data import values
from oomguard.data.cache import Appended, remove_with, spool_directory
from oomguard.data.options import DataOptions
from oomguard.data.rows import Store
from oomguard.data.source import Array, Ints, Mapped, Pair, fingerprint, nothing_in
from oomguard.errors import MisuseError
from oomguard.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Items:
    """The sequences of a map-style Dataset of pairs (inputs, targets), asked for one at a time."""

    dataset: Any
    spec: Spec
    options: DataOptions
    chosen: Ints
    """The numbers of the items that are sequences here."""
    lengths: Ints
    """Steps of each, once cut."""
    cut: NDArray[np.bool_]
    """Which were longer."""
    left_out: int = 0
    """Items of the whole Dataset that are no sequences: they hold a NaN, or nothing."""

    @property
    def truncated(self) -> int:
        return int(self.cut.sum())

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(self.chosen[index])
        inputs, targets = checked_pair(self.spec, self.dataset[number], self.options, f"item {number:,}")
        steps = int(self.lengths[index])
        if self.spec.head == "last-step":
            return inputs[-steps:], targets
        return inputs[:steps], targets[:steps]

    def part(self, some: Ints) -> "Items":
        """Some of the sequences."""
        return replace(self, chosen=self.chosen[some], lengths=self.lengths[some], cut=self.cut[some])

    def describe(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        found = {"kind": "Dataset", "path": type(self.dataset).__name__, "items": len(self.dataset)}
        found |= {"sequences": len(self), "steps": int(self.lengths.sum()), "truncated": self.truncated}
        return {**found, "dropped" if self.options.nan == "drop" else "short": self.left_out}


def open_items(dataset: Any, spec: Spec, options: DataOptions) -> Items:
    """A map-style Dataset. Its lengths are those it has as `lengths`, otherwise every item is looked at once."""
    count = len(dataset)
    if not count:
        raise nothing_in(f"the {type(dataset).__name__}")
    known = getattr(dataset, "lengths", None)
    if known is None or options.nan == "drop":
        lengths = np.empty(count, dtype=np.int64)
        for number in range(count):
            inputs, targets = checked_pair(spec, dataset[number], options, f"item {number:,}")
            fine = options.nan != "drop" or (_finished(inputs) and _finished(targets))
            lengths[number] = len(inputs) if fine else 0
    else:
        lengths = np.asarray(known, dtype=np.int64)
    chosen = np.flatnonzero(lengths > 0)
    if not len(chosen):
        raise nothing_in(f"the {type(dataset).__name__}")
    lengths = lengths[chosen]
    long = lengths > spec.steps
    if long.any() and not options.truncate:
        worst = int(lengths.argmax())
        raise MisuseError(
            rule=f"A sequence must not be longer than the spec says ({spec.steps:,} steps)",
            got=f"item {int(chosen[worst]):,} has {int(lengths[worst]):,} steps ({int(long.sum()):,} are too long)",
            advice="Raise --seq, or say --truncate.",
        )
    return Items(
        dataset=dataset,
        spec=spec,
        options=options,
        chosen=chosen,
        lengths=np.minimum(lengths, spec.steps),
        cut=long,
        left_out=count - len(chosen),
    )


def checked_pair(spec: Spec, item: Any, options: DataOptions, name: str) -> Pair:
    """One pair of arrays as the model takes it, with the name of the item in every error."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise MisuseError(
            rule="Data from Python comes in pairs (inputs, targets)",
            got=f"{name} is {type(item).__name__}",
            advice="Give a pair of arrays or tensors.",
        )
    inputs, targets = (as_array(part) for part in item)
    steps = len(inputs) if inputs.ndim else 0
    wanted = (steps,) if spec.vocab is not None else (steps, spec.inputs)
    _check_shape(inputs, wanted, f"The inputs of {name}", "--features and --vocab")
    lead = (steps,) if spec.head == "per-step" else ()
    wanted = (*lead, values.target_width(spec))
    _check_shape(targets, wanted, f"The targets of {name}", "--outputs and --head")
    if not steps:
        raise nothing_in(name)
    rows = targets if lead else targets.reshape(1, -1)
    found = values.as_targets(
        spec, rows, options.nan, lambda row, column: f"the target of {name}, step {row:,}, column {column}"
    )
    return values.as_inputs(
        spec, inputs, options.nan, lambda row, column: f"{name}, step {row:,}, column {column}"
    ), found if lead else found[0]


def as_array(part: Any) -> Array:
    """An array, also of a tensor that is on a card or has a gradient to come."""
    return np.asarray(part.detach().cpu() if hasattr(part, "detach") else part)


def _finished(block: Array) -> bool:
    return bool((np.isfinite(block) & (block != values.MISSING)).all())


def _check_shape(array: Array, wanted: tuple[int, ...], what: str, options: str) -> None:
    """The shape, or the same without a last axis of one."""
    if array.dtype.kind in "fiub" and (array.shape == wanted or (wanted[-1:] == (1,) and array.shape == wanted[:-1])):
        return
    raise MisuseError(
        rule=f"{what} must be numbers, {' x '.join(map(str, wanted))}",
        got=f"they are {array.dtype}, {' x '.join(map(str, array.shape)) or 'a single one'}",
        advice=f"Check {options}.",
    )


def spool(pairs: Iterable[Any], spec: Spec, options: DataOptions) -> Store:
    """Pairs that come only once, written to the disk one by one: epochs need them again, in another order."""
    home = spool_directory(options.cache)
    try:
        inputs, targets = _written(pairs, spec, options, home)
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    remove_with(inputs, home)
    lengths = np.fromfile(home / "steps", dtype=np.int64)
    size_bytes, content = (home / "inputs").stat().st_size, fingerprint(home / "inputs", home / "targets")
    return Store(
        inputs=inputs,
        targets=targets,
        borders=np.concatenate([[0], np.cumsum(lengths)]),
        long=False,
        per_series=spec.head == "last-step",
        checked=True,
        about={"kind": "pairs", "path": type(pairs).__name__, "bytes": size_bytes, "content": content},
    )


def _written(pairs: Iterable[Any], spec: Spec, options: DataOptions, home: Path) -> tuple[Mapped, Mapped]:
    """All pairs, in three arrays: inputs, targets, steps of each."""
    tokens, classes = spec.vocab is not None, spec.loss == "cross-entropy"
    with (
        Appended(home / "inputs", np.int64 if tokens else np.float32, None if tokens else spec.inputs) as inputs,
        Appended(home / "targets", np.int64 if classes else np.float32, None if classes else spec.classes) as targets,
        Appended(home / "steps", np.int64, None) as steps,
    ):
        for number, item in enumerate(islice(pairs, options.limit)):
            one, target = checked_pair(spec, item, options, f"pair {number:,}")
            inputs.append(one)
            targets.append(target if spec.head == "per-step" else target[None])
            steps.append(np.array([len(one)]))
    if not steps.rows:
        raise nothing_in(f"the {type(pairs).__name__}")
    return inputs.mapped(), targets.mapped()
