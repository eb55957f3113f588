"""Sources: Rows, sequences cut from the arrays of an opened file, and Items, those of a map-style Dataset.

Pairs that come only once are written to the disk and become Rows.
"""

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oomguard._core.errors import MisuseError
from oomguard._data.options import DataOptions, Nan
from oomguard._data.order import Cuts, Pieces, whole
from oomguard._data.source import Appended, Array, Ints, Mapped, Pair, Places, Store, fingerprint, no_data, writable
from oomguard._data.values import MISSING, Index, as_values, input_index, target_index, target_width
from oomguard._spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Sequences cut from an opened file; each is read from the disk when it is asked for."""

    store: Store
    cuts: Cuts
    spec: Spec
    nan: Nan = "error"
    truncated: int = 0
    short: int = 0
    """Series that were left out because they are too short to have a target."""
    lengths: Ints = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", self.cuts.lengths())

    def __len__(self) -> int:
        return len(self.cuts)

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, steps, series = self.cuts[index]
        store, last = self.store, self.spec.head == "last-step"
        first, count = start + store.ahead, steps
        if store.per_series:
            first, count = series, 1
        elif last:
            first, count = first + steps - 1, 1
        inputs = self._read(store.inputs, store.input_columns, (start, steps), input_index(self.spec))
        targets = self._read(store.targets, store.target_columns, (first, count), target_index(self.spec))
        return inputs, targets[0] if last else targets

    def _read(self, mapped: Mapped, columns: Places, place: tuple[int, int], index: Index | None) -> Array:
        """Some rows of an array, checked; `place` is the first row and how many there are."""

        def where(row: int, column: int) -> str:
            return mapped.where(place[0] + row, column if columns is None else columns[column])

        return as_values(_picked(mapped.rows(*place), columns), index, self.nan, where)

    def describe(self) -> dict[str, Any]:
        counts = {"sequences": len(self), "steps": int(self.lengths.sum()), "truncated": self.truncated}
        return {**self.store.about, **counts, "dropped": self.cuts.total - len(self.cuts), "short": self.short}


def origins(rows: Rows) -> tuple[list[str], Callable[[int], list[Any]]]:
    """Where each sequence is from: names of columns, and their values for a sequence. Series of an array have none."""
    store, unit = rows.store, f"first_{rows.store.inputs.unit}"
    if store.ids is None:
        return ([unit], lambda index: [store.first_row + rows.cuts[index][0]]) if store.long else ([], lambda _: [])
    ids, places = json.loads(store.ids.read_bytes()), store.places
    assert places is not None  # written together with the ids

    def origin(index: int) -> list[Any]:
        start, _, series = rows.cuts[index]
        return [ids[series], int(places.rows(start, 1)[0])]

    return ["id", unit], origin


def cut_rows(store: Store, spec: Spec, options: DataOptions, pieces: Pieces | None = None) -> Rows:
    """The sequences of some pieces of a file (None: of all its series)."""
    pieces = whole(store.borders) if pieces is None else pieces
    check_pieces(store, pieces, spec, options)
    steps, truncated = pieces.stops - pieces.starts, 0
    if store.long or options.stride is not None:
        if store.per_series:
            raise MisuseError(
                rule="A series with one target cannot be cut into windows",
                got=f"{store.targets.path} has one target for each series",
                advice="Leave --stride out, or give a target for each step.",
            )
        made = Cuts(pieces=pieces, ahead=store.ahead, seq=spec.steps, stride=options.stride or spec.steps)
    else:
        surplus = np.maximum(0, steps - store.ahead - spec.steps)
        truncated = int(np.count_nonzero(surplus))
        start, stop = (surplus, 0) if spec.head == "last-step" else (0, surplus)  # what is cut off
        kept = Pieces(pieces.starts + start, pieces.stops - stop, pieces.series)
        made = Cuts(pieces=kept, ahead=store.ahead)
    if store.nan_rows is not None:
        made = made.without(store.nan_rows)
    if not len(made):
        raise no_data(store.about["path"])
    short = int(np.count_nonzero((steps > 0) & (steps <= store.ahead)))
    return Rows(store=store, cuts=made, spec=spec, nan=options.nan, truncated=truncated, short=short)


def _picked(block: Array, columns: Places) -> Array:
    if columns is None:
        return block
    if columns == tuple(range(columns[0], columns[-1] + 1)):
        return block[:, columns[0] : columns[-1] + 1]  # a view; a list of columns would read all of the rows
    return block[:, list(columns)]


def check_pieces(store: Store, pieces: Pieces, spec: Spec, options: DataOptions) -> None:
    """Raise if a piece is longer than the spec says and may not be cut."""
    if not (options.truncate or store.long or options.stride is not None):
        steps, path = pieces.stops - pieces.starts - store.ahead, store.about["path"]
        advice = "Raise --seq, cut windows with --stride, or add --truncate."
        _check_lengths(steps, spec, lambda worst: f"series {pieces.series[worst]:,} of {path}", advice)


def _check_lengths(steps: Ints, spec: Spec, name: Callable[[int], str], advice: str) -> None:
    over = int(np.count_nonzero(steps > spec.steps))
    if over:
        worst = int(steps.argmax())
        raise MisuseError(
            rule=f"A sequence must not be longer than the spec says ({spec.steps:,} steps)",
            got=f"{name(worst)} has {steps[worst]:,} steps ({over:,} are too long)",
            advice=advice,
        )


def find_nan_rows(store: Store) -> Ints:
    """The rows that have a NaN as input or as target, ascending. The whole file is read once."""
    found = [_nan_rows(store.inputs, store.input_columns)]
    if store.targets is not store.inputs or store.target_columns != store.input_columns:
        rows = _nan_rows(store.targets, store.target_columns)
        # the target of a series counts as one row, which every sequence of the series has
        found.append(store.borders[1:][rows] - 1 if store.per_series else rows)
    return np.unique(np.concatenate(found))


def _nan_rows(mapped: Mapped, columns: Places) -> Ints:
    rows = [np.empty(0, dtype=np.int64)]
    for start, block in mapped.blocks() if mapped.dtype.kind == "f" or mapped.dtype == np.int64 else ():
        picked = _picked(block, columns).reshape(len(block), -1)
        bad = picked == MISSING if mapped.dtype == np.int64 else ~np.isfinite(picked)
        rows.append(np.flatnonzero(bad.any(axis=1)) + start)
    return np.concatenate(rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Items:
    """The sequences of a map-style Dataset of pairs (inputs, targets), read one at a time."""

    dataset: Any
    spec: Spec
    options: DataOptions
    chosen: Ints
    """Numbers of the items that are sequences."""
    lengths: Ints
    """Steps of each sequence, once cut."""
    cut: NDArray[np.bool_]
    """Which sequences were longer than the spec says."""
    left_out: int = 0
    """Items of the whole Dataset that have a NaN, or no steps."""

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(self.chosen[index])
        inputs, targets = _checked_pair(self.spec, self.dataset[number], self.options, f"item {number:,}")
        steps = int(self.lengths[index])
        if self.spec.head == "last-step":
            return inputs[-steps:], targets
        return inputs[:steps], targets[:steps]

    def part(self, some: Ints) -> "Items":
        return replace(self, chosen=self.chosen[some], lengths=self.lengths[some], cut=self.cut[some])

    def describe(self) -> dict[str, Any]:
        about = {"kind": "Dataset", "path": type(self.dataset).__name__, "items": len(self.dataset)}
        about |= {"sequences": len(self), "steps": int(self.lengths.sum()), "truncated": int(self.cut.sum())}
        return {**about, "dropped" if self.options.nan == "drop" else "short": self.left_out}


def open_items(dataset: Any, spec: Spec, options: DataOptions) -> Items:
    """A map-style Dataset. Its attribute `lengths` gives the lengths; without it, every item is read once."""
    lengths = _lengths(dataset, spec, options)
    chosen = np.flatnonzero(lengths > 0)
    if not len(chosen):
        raise no_data(f"the {type(dataset).__name__}")
    left_out, lengths = len(lengths) - len(chosen), lengths[chosen]
    if not options.truncate:
        _check_lengths(lengths, spec, lambda worst: f"item {chosen[worst]:,}", "Raise --seq, or add --truncate.")
    return Items(
        dataset=dataset,
        spec=spec,
        options=options,
        chosen=chosen,
        lengths=np.minimum(lengths, spec.steps),
        cut=lengths > spec.steps,
        left_out=left_out,
    )


def _lengths(dataset: Any, spec: Spec, options: DataOptions) -> Ints:
    """Steps of every item; 0 for those that are to be dropped."""
    drop = options.nan == "drop"
    known = getattr(dataset, "lengths", None)
    if known is not None and not drop:
        return np.asarray(known, dtype=np.int64)
    lengths = np.zeros(len(dataset), dtype=np.int64)
    for number in range(len(dataset)):
        pair = _checked_pair(spec, dataset[number], options, f"item {number:,}")
        if not drop or all((np.isfinite(part) & (part != MISSING)).all() for part in pair):
            lengths[number] = len(pair[0])
    return lengths


def _checked_pair(spec: Spec, item: Any, options: DataOptions, name: str) -> Pair:
    """A pair of arrays as the model takes it, with the name of the item in every error."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise MisuseError(
            rule="Data from Python comes in pairs (inputs, targets)",
            got=f"{name} is {type(item).__name__}",
            advice="Give a pair of arrays or tensors.",
        )
    inputs, targets = (as_array(part) for part in item)
    steps, per_step = len(inputs) if inputs.ndim else 0, spec.head == "per-step"
    wanted = (steps,) if spec.vocab is not None else (steps, spec.inputs)
    _check_shape(inputs, wanted, f"The inputs of {name}", "--features and --vocab")
    wanted = (steps, target_width(spec)) if per_step else (target_width(spec),)
    _check_shape(targets, wanted, f"The targets of {name}", "--outputs and --head")
    if not steps:
        raise no_data(name)

    def place(row: int, column: int) -> str:
        return f"{name}, step {row:,}, column {column}"

    targets = targets if per_step else targets.reshape(1, -1)
    aimed = as_values(targets, target_index(spec), options.nan, lambda *at: f"the target of {place(*at)}")
    return as_values(inputs, input_index(spec), options.nan, place), aimed if per_step else aimed[0]


def as_array(part: Any) -> Array:
    """An array, or a tensor as one, wherever it is and whether it has a gradient or not."""
    return np.asarray(part.detach().cpu() if hasattr(part, "detach") else part)


def _check_shape(array: Array, wanted: tuple[int, ...], what: str, flags: str) -> None:
    """Raise unless the array has this shape, or the same without a last axis of one."""
    if array.dtype.kind in "fiub" and (array.shape == wanted or (wanted[-1:] == (1,) and array.shape == wanted[:-1])):
        return
    raise MisuseError(
        rule=f"{what} must be numbers, {' x '.join(map(str, wanted))}",
        got=f"they are {array.dtype}, {' x '.join(map(str, array.shape)) or 'a single one'}",
        advice=f"Check {flags}.",
    )


def spool(pairs: Iterable[Any], spec: Spec, options: DataOptions) -> Store:
    """Pairs that come only once, written to the disk: every epoch needs them again, in another order.

    The files are removed when the store is collected, or when this process ends; a forked worker leaves them alone.
    """
    base = Path(options.cache or tempfile.gettempdir())
    with writable(base):
        home = Path(tempfile.mkdtemp(prefix="oomguard-", dir=base))

    def remove(pid: int) -> None:
        if os.getpid() == pid:
            shutil.rmtree(home, ignore_errors=True)

    try:
        lengths = _write(pairs, spec, options, home)
        inputs, targets = Mapped.npy(home / "inputs.npy"), Mapped.npy(home / "targets.npy")
    except BaseException:
        remove(os.getpid())
        raise
    weakref.finalize(inputs, remove, os.getpid())
    size_bytes, content = inputs.array.nbytes, fingerprint(Path(inputs.path), Path(targets.path))
    return Store(
        inputs=inputs,
        targets=targets,
        borders=np.cumsum([0, *lengths], dtype=np.int64),
        long=False,
        per_series=spec.head == "last-step",
        checked=True,
        about={"kind": "pairs", "path": type(pairs).__name__, "bytes": size_bytes, "content": content},
    )


def _write(pairs: Iterable[Any], spec: Spec, options: DataOptions, home: Path) -> list[int]:
    """Write all pairs into two arrays, and return the steps of each."""
    lengths: list[int] = []
    with (
        Appended(home / "inputs.npy", None if spec.vocab is not None else spec.inputs) as inputs,
        Appended(home / "targets.npy", None if spec.loss == "cross-entropy" else spec.classes) as targets,
    ):
        for number, item in enumerate(islice(pairs, options.limit)):
            sequence, target = _checked_pair(spec, item, options, f"pair {number:,}")
            inputs.append(sequence)
            targets.append(target if spec.head == "per-step" else target[None])
            lengths.append(len(sequence))
    if not lengths:
        raise no_data(f"the {type(pairs).__name__}")
    return lengths
