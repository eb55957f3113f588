"""Rows: the source behind every file. Arrays of all steps of all series, mapped, and sequences cut from them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from oomguard.data import cuts, values
from oomguard.data.cuts import Cuts, Pieces
from oomguard.data.options import DataOptions, Nan
from oomguard.data.source import Array, Ints, Mapped, Pair, nothing_in
from oomguard.errors import MisuseError
from oomguard.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Store:
    """An opened file: where its numbers are, and what they mean. Nothing of it is read yet."""

    inputs: Mapped
    """A row for each step."""
    targets: Mapped
    """A row for each step, or for each series. May be the inputs."""
    borders: Ints
    """The row at which each series begins, and the row at which the last ends."""
    long: bool
    """Whether it is one long series, to be cut into windows."""
    input_columns: tuple[int, ...] | None = None
    """Of the rows; None: all."""
    target_columns: tuple[int, ...] | None = None
    ahead: int = 0
    """Steps that a target lies ahead of its inputs."""
    per_series: bool = False
    """A row of the targets is for a whole series."""
    unfinished: Ints | None = None
    """Rows, in order, that hold a NaN; None: nobody has looked."""
    checked: bool = False
    """Whether every number was looked at when it was opened."""
    first_row: int = 0
    """The number of the first row, as messages count them."""
    ids: Path | None = None
    """The file with the id of each series; None: they have none."""
    places: Mapped | None = None
    """The number of each row in the file that the user knows; None: they lie as there."""
    about: dict[str, Any]
    """For `Source.describe`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Sequences cut from an opened file; each is read from the disk when it is asked for."""

    store: Store
    cuts: Cuts
    spec: Spec
    nan: Nan = "error"
    truncated: int = 0
    dropped: int = 0
    """Sequences that were left out since they hold a NaN."""
    short: int = 0
    """Series that were left out since they are too short to have a target."""
    lengths: Ints = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", self.cuts.lengths())

    def __len__(self) -> int:
        return len(self.cuts)

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, steps, series = self.cuts[index]
        store, spec = self.store, self.spec
        first, count = start + store.ahead, steps
        if store.per_series:
            first, count = series, 1
        elif spec.head == "last-step":
            first, count = first + steps - 1, 1
        inputs = values.as_inputs(
            spec,
            _picked(store.inputs.rows(start, steps), store.input_columns),
            self.nan,
            lambda row, column: store.inputs.where(start + row, _number(column, store.input_columns)),
        )
        targets = values.as_targets(
            spec,
            _picked(store.targets.rows(first, count), store.target_columns),
            self.nan,
            lambda row, column: store.targets.where(first + row, _number(column, store.target_columns)),
        )
        return inputs, targets[0] if spec.head == "last-step" else targets

    def describe(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        found = {"sequences": len(self), "steps": int(self.lengths.sum()), "truncated": self.truncated}
        return {**self.store.about, **found, "dropped": self.dropped, "short": self.short}


def origins(rows: Rows) -> tuple[list[str], Callable[[int], list[Any]]]:
    """Whose each sequence is: names of columns, and what they hold for a sequence. Series of an array have numbers."""
    store, unit = rows.store, f"first_{rows.store.inputs.unit}"
    if store.ids is None:
        return ([unit], lambda index: [store.first_row + rows.cuts[index][0]]) if store.long else ([], lambda _: [])
    ids, places = json.loads(store.ids.read_bytes()), store.places
    assert places is not None  # they were written together

    def found(index: int) -> list[Any]:
        start, _, series = rows.cuts[index]
        return [ids[series], int(places.rows(start, 1)[0])]

    return ["id", unit], found


def cut_rows(store: Store, spec: Spec, options: DataOptions, pieces: Pieces | None = None) -> Rows:
    """The sequences of some pieces of a file (None: of all its series)."""
    pieces = cuts.whole(store.borders) if pieces is None else pieces
    check_lengths(store, pieces, spec, options)
    truncated = 0
    if store.long or options.stride is not None:
        _check_windows(store)
        made = Cuts(pieces=pieces, ahead=store.ahead, seq=spec.steps, stride=options.stride or spec.steps)
    else:
        shorter, truncated = cuts.shorten(pieces, spec.steps, store.ahead, keep_end=spec.head == "last-step")
        made = Cuts(pieces=shorter, ahead=store.ahead)
    if store.unfinished is not None:
        made = made.without(store.unfinished)
    if not len(made):
        raise nothing_in(store.about["path"])
    return Rows(
        store=store,
        cuts=made,
        spec=spec,
        nan=options.nan,
        truncated=truncated,
        dropped=made.total - len(made),
        short=int(np.count_nonzero((pieces.stops > pieces.starts) & (pieces.stops - pieces.starts <= store.ahead))),
    )


def _picked(block: Array, columns: tuple[int, ...] | None) -> Array:
    if columns is None:
        return block
    if columns == tuple(range(columns[0], columns[-1] + 1)):
        return block[:, columns[0] : columns[-1] + 1]  # a view; a list of columns would read all of the rows
    return block[:, list(columns)]


def _number(column: int, columns: tuple[int, ...] | None) -> int:
    """The number of a column in its file."""
    return column if columns is None else columns[column]


def _check_windows(store: Store) -> None:
    if store.per_series:
        raise MisuseError(
            rule="A series with one target cannot be cut into windows",
            got=f"{store.targets.path} has one target for each series",
            advice="Leave --stride out, or give a target for each step.",
        )


def check_lengths(store: Store, pieces: Pieces, spec: Spec, options: DataOptions) -> None:
    """Raise if a sequence would be too long, and none may be cut."""
    steps = pieces.stops - pieces.starts - store.ahead
    over = int(np.count_nonzero(steps > spec.steps))
    if not over or options.truncate or store.long or options.stride is not None:
        return
    worst = int(steps.argmax())
    raise MisuseError(
        rule=f"A sequence must not be longer than the spec says ({spec.steps:,} steps)",
        got=f"series {int(pieces.series[worst]):,} of {store.about['path']} has {int(steps[worst]):,} steps "
        f"({over:,} are too long)",
        advice="Raise --seq, cut windows with --stride, or say --truncate.",
    )


def unfinished_rows(store: Store) -> Ints:
    """The rows, in order, that hold a NaN as input or as target. All of the file is gone through once."""
    found = [np.empty(0, dtype=np.int64), *_bad_rows(store.inputs, store.input_columns)]
    own = set(store.target_columns or ()) - set(store.input_columns or store.target_columns or ())
    if store.targets is not store.inputs or own:
        bad = _bad_rows(store.targets, store.target_columns)
        if store.per_series:  # one row that every sequence of the series has
            bad = [store.borders[1:][series] - 1 for series in bad]
        found += bad
    return np.unique(np.concatenate(found))


def _bad_rows(mapped: Mapped, columns: tuple[int, ...] | None) -> list[Ints]:
    if mapped.dtype.kind != "f" and mapped.dtype != np.int64:
        return []
    found = []
    for start, block in mapped.blocks():
        rows = _picked(block, columns).reshape(len(block), -1)
        fine = (np.isfinite(rows) if mapped.dtype.kind == "f" else rows != values.MISSING).all(axis=1)
        if not fine.all():
            found.append(np.flatnonzero(~fine) + start)
    return found
