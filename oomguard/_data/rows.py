"""Stores are opened data: the arrays of a file, or a map-style Dataset. A source is the sequences cut from a store,
normalised to mean 0 and standard deviation 1 if that is asked for.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from oomguard._core.errors import MisuseError
from oomguard._data.options import DataOptions, Fill, Nan, target_width
from oomguard._data.order import ONLY_ONE, Cuts, Pieces
from oomguard._data.source import MISSING, Array, Ints, Mapped, Pair, as_values, indices, no_data
from oomguard._spec.spec import Spec


@dataclass(frozen=True, kw_only=True, eq=False)
class Store:
    """Facts about all opened data. Rows are the steps of all series."""

    borders: Ints  # the row at which each series begins, and the row at which the last ends
    about: dict[str, Any]  # what `Source.describe` says of the data
    long: bool = False  # whether it is one long series, to be cut into windows
    ahead: int = 0  # steps that a target lies ahead of its inputs
    per_series: bool = False  # whether there is a target for each series instead of for each step
    checked: bool = False  # whether no value need be checked before training


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrays(Store):
    """The arrays of a file, from which each sequence is read when it is asked for."""

    inputs: Mapped
    targets: Mapped  # may be the inputs
    first_row: int = 0  # number of the first row, as messages count them
    ids: Path | None = None
    """Directory with the place of each row in the user's file and, if there are any, the ids of the series; None: rows
    are in the order of the file and series have no ids."""

    fill: Fill | None = None

    def pair(self, spec: Spec, nan: Nan, start: int, steps: int, series: int) -> Pair:
        tokens, classes = indices(spec)
        last, first, count = spec.head == "last-step", start + self.ahead, steps
        filled: Nan = "zero" if self.fill == "zero" else "drop" if self.fill == "mean" else nan  # drop: NaN is kept
        if self.per_series:
            first, count = series, 1
        elif last:
            first, count = first + steps - 1, 1
        inputs = self.inputs.values(start, steps, tokens, filled)
        if self.targets is self.inputs and (first, count) == (start, steps):  # for predictions
            return inputs, inputs
        targets = self.targets.values(first, count, classes, nan)
        return inputs, targets[0] if last else targets

    def nan_rows(self) -> Ints:
        """The rows that have a NaN as input that is not filled, or as target. The whole file is read once."""
        rows = _nan_rows(self.inputs) if self.fill is None else np.empty(0, dtype=np.int64)
        if self.fill is None and self.targets is self.inputs:
            return rows
        others = _nan_rows(self.targets)
        # the target of a series counts as its last row, which every sequence of the series has
        return np.union1d(rows, self.borders[1:][others] - 1 if self.per_series else others)


def _nan_rows(mapped: Mapped) -> Ints:
    rows, dtype = [np.empty(0, dtype=np.int64)], mapped.array.dtype
    for start, block in mapped.blocks() if dtype.kind == "f" or dtype == np.int64 else ():
        bad = block == MISSING if dtype == np.int64 else ~np.isfinite(block)
        rows.append(np.flatnonzero(bad.reshape(len(block), -1).any(axis=1)) + start)
    return np.concatenate(rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class Items(Store):
    """The pairs (inputs, targets) of a map-style Dataset, read one at a time."""

    dataset: Any
    left_out: dict[str, int]  # how many items have a NaN ("dropped") or no steps ("short")

    def pair(self, spec: Spec, nan: Nan, start: int, steps: int, series: int) -> Pair:
        inputs, targets = checked_pair(spec, self.dataset[series], nan, f"item {series:,}")
        first = start - int(self.borders[series])
        kept = slice(first, first + steps)
        return inputs[kept], targets if spec.head == "last-step" else targets[kept]


class Normaliser(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mean and standard deviation of every feature, as plain numbers for JSON."""

    mean: tuple[float, ...]
    std: tuple[float, ...]  # standard deviation of each feature; 1 for a constant one, which becomes 0
    target_mean: tuple[float, ...] | None = None  # mean of each target; None: targets are not normalised
    target_std: tuple[float, ...] | None = None
    steps: int  # time steps that they were computed from

    def applied(self, pair: Pair) -> Pair:
        inputs, targets = pair
        inputs = ((inputs - np.array(self.mean)) / np.array(self.std)).astype(np.float32)
        np.nan_to_num(inputs, copy=False, nan=0.0)  # with --fill mean
        if self.target_mean is not None and self.target_std is not None:
            targets = ((targets - np.array(self.target_mean)) / np.array(self.target_std)).astype(np.float32)
        return inputs, targets

    def restored(self, outputs: Array) -> Array:
        """Outputs of the model in the units of the data."""
        if self.target_mean is None or self.target_std is None:
            return outputs
        return outputs * np.array(self.target_std, np.float32) + np.array(self.target_mean, np.float32)


class RunningStatistics:
    """Count, mean and sum of squared deviations of numbers that come in blocks, in float64.

    Blocks are merged as in Chan, Golub and LeVeque (1979), which stays exact for a mean far from 0.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.count: NDArray[np.float64] = np.zeros(1)  # of each column, without NaN
        self.mean: NDArray[np.float64] = np.zeros(1)
        self.squares: NDArray[np.float64] = np.zeros(1)

    def add(self, block: Array) -> None:
        rows = block.reshape(len(block), -1).astype(np.float64)
        known = ~np.isnan(rows)
        added: NDArray[np.float64] = known.sum(axis=0).astype(np.float64)
        mean = rows.sum(axis=0, where=known) / np.maximum(1, added)
        total, shift = self.count + added, mean - self.mean
        share = added / np.maximum(1, total)
        self.squares = self.squares + ((rows - mean) ** 2).sum(axis=0, where=known) + shift**2 * self.count * share
        self.mean, self.count, self.rows = self.mean + shift * share, total, self.rows + len(rows)

    def result(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each column."""
        std = np.sqrt(self.squares / np.maximum(1, self.count))
        std = np.where(std > np.abs(self.mean) * 1e-12, std, 1.0)  # constant, but for rounding
        return tuple(self.mean.tolist()), tuple(std.tolist())


def fit_normaliser(pairs: Iterable[Pair], *, targets: bool) -> Normaliser:
    """The normaliser of sequences that come one at a time. Steps of overlapping windows count as often as they come."""
    of_inputs, of_targets = RunningStatistics(), RunningStatistics()
    for sequence, target in pairs:
        of_inputs.add(sequence)
        if targets:
            of_targets.add(target if target.ndim > 1 else target[None])
    mean, std = of_inputs.result()
    target_mean, target_std = of_targets.result() if targets else (None, None)
    return Normaliser(mean=mean, std=std, target_mean=target_mean, target_std=target_std, steps=of_inputs.rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Sequences that can be read one by one, in any order, from any process. Pickling copies no data of a file."""

    store: Arrays | Items
    cuts: Cuts
    spec: Spec
    nan: Nan
    missing: dict[str, int]  # how many sequences were cut or left out, by fields of `Missing`
    normaliser: Normaliser | None = None  # applied to each sequence that is read

    @cached_property
    def lengths(self) -> Ints:
        """Time steps of each sequence."""
        return self.cuts.lengths()

    def __len__(self) -> int:
        return len(self.cuts)

    def __getitem__(self, index: int) -> Pair:
        pair = self.store.pair(self.spec, self.nan, *self.cuts[range(len(self))[index]])
        return pair if self.normaliser is None else self.normaliser.applied(pair)

    def describe(self) -> dict[str, Any]:
        """The kind and size of the data and the number of its sequences, as plain values for a checkpoint."""
        counts = {"sequences": len(self), "steps": int(self.lengths.sum())}
        scaled = {} if self.normaliser is None else {"normaliser": msgspec.to_builtins(self.normaliser)}
        return self.store.about | counts | self.missing | scaled

    def origins(self) -> tuple[list[str], Callable[[int], list[Any]]]:
        """Names of columns that say where a sequence is from, and their values for a sequence."""
        store = self.store
        if isinstance(store, Items) or not (store.long or store.ids):
            return [], lambda _: []
        unit, first_row = f"first_{store.inputs.unit}", store.first_row
        if store.ids is None:
            return [unit], lambda index: [first_row + self.cuts[index][0]]
        places, names = Mapped.npy(store.ids / "places.npy"), store.ids / "ids.json"
        ids = json.loads(names.read_bytes()) if names.exists() else None

        def origin(index: int) -> list[Any]:
            start, _, series = self.cuts[index]
            return [*([] if ids is None else [ids[series]]), int(places.rows(start, 1)[0])]

        return [*([] if ids is None else ["id"]), unit], origin


def cut_sources(store: Arrays | Items, spec: Spec, options: DataOptions, *sides: Pieces) -> list[Source]:
    """The sequences of some pieces of the data, a source for each side of a split."""
    windows = store.long or options.stride is not None
    around = options.nan == "cut" or (options.fill is not None and not options.inputs_only)
    nan_rows = store.nan_rows() if isinstance(store, Arrays) and (around or options.nan == "drop") else None
    before = [int(pieces.steps.sum()) for pieces in sides]
    if around:
        _check_cut(store, spec, options)
        sides = tuple(pieces.around(nan_rows) for pieces in sides if nan_rows is not None)
    if not (windows or options.truncate):
        pieces = Pieces(*map(np.concatenate, zip(*sides, strict=True)))
        _check_lengths(store, spec, pieces if nan_rows is None or around else pieces.without(nan_rows))
    if windows and isinstance(store, Arrays) and store.per_series:
        raise MisuseError(
            rule="A series with one target cannot be cut into windows",
            got=f"{store.targets.path} has one target for each series",
            advice="Leave --stride out, or give a target for each step.",
        )
    stride = options.stride or spec.steps if windows else ONLY_ONE
    sources = []
    for pieces, rows in zip(sides, before, strict=True):
        cut_rows = rows - int(pieces.steps.sum())
        surplus = np.maximum(0, pieces.steps - store.ahead - spec.steps) * (not windows)
        if spec.head == "last-step":  # the last steps of a sequence that is cut are kept
            pieces = pieces._replace(starts=pieces.starts + surplus)
        cuts = Cuts(pieces=pieces, ahead=store.ahead, seq=spec.steps, stride=stride)
        every = cuts
        if nan_rows is not None and not around:
            cuts = cuts.without(nan_rows)
        if not len(cuts):
            raise no_data(store.about["path"]) if nan_rows is None else _all_missing(store, cuts, nan_rows)
        short = int(np.count_nonzero((pieces.steps > 0) & (pieces.steps <= store.ahead)))
        left_out = {"dropped": cuts.total - len(cuts), "short": short} if isinstance(store, Arrays) else store.left_out
        if cuts is not every:
            steps = every.lengths() if windows else every.usable
            left_out["dropped_steps"] = int(steps.sum() - steps[cuts.kept].sum())
        missing = {"truncated": int(np.count_nonzero(surplus)), **left_out} | (
            {"cut_rows": cut_rows} if cut_rows else {}
        )
        sources.append(Source(store=store, cuts=cuts, spec=spec, nan=options.nan, missing=missing))
    return sources


def _check_cut(store: Store, spec: Spec, options: DataOptions) -> None:
    """Raise unless sequences can be cut around rows, and inputs filled."""
    if isinstance(store, Items) or store.per_series:  # items are read one by one
        rule, got = "Sequences are cut around a row if every row has a target", "there is one for each sequence"
        raise MisuseError(rule=rule, got=got, advice="Use --nan drop.")
    if options.fill is not None and spec.vocab is not None:
        raise MisuseError(rule="Only numbers can be filled", got="inputs are tokens", advice="Use --nan cut or drop.")


def _all_missing(store: Store, cuts: Cuts, nan_rows: Ints) -> MisuseError:
    rows = f"{len(nan_rows):,} of {int(store.borders[-1]):,} rows"
    return MisuseError(
        rule="A sequence must be left without a missing value",
        got=f"in {store.about['path']}, each of {max(1, cuts.total):,} has one ({rows})",
        advice="Use --nan cut (sequences around such rows), or --fill forward, mean or zero.",
    )


def _check_lengths(store: Arrays | Items, spec: Spec, pieces: Pieces) -> None:
    steps, most = pieces.steps - store.ahead, spec.steps
    over = int(np.count_nonzero(steps > most))
    if not over:
        return
    worst = int(steps.argmax())
    name, instead = f"series {pieces.series[worst]:,} of {store.about['path']}", "cut windows with --stride, "
    if isinstance(store, Items):
        name, instead = f"item {pieces.series[worst]:,}", ""
    raise MisuseError(
        rule=f"A sequence must not be longer than the spec says ({most:,} steps)",
        got=f"{name} has {steps[worst]:,} steps ({over:,} are too long)",
        advice=f"Raise --seq, {instead}or add --truncate.",
    )


def open_items(dataset: Any, spec: Spec, options: DataOptions) -> Items:
    """A map-style Dataset. Its attribute `lengths` gives the lengths; without it, every item is read once."""
    name, drop = type(dataset).__name__, options.nan in ("drop", "cut")
    lengths = None if drop else getattr(dataset, "lengths", None)
    if lengths is None:
        lengths = np.zeros(len(dataset), dtype=np.int64)
        for number in range(len(dataset)):
            pair = checked_pair(spec, dataset[number], options.nan, f"item {number:,}")
            if not drop or all((np.isfinite(part) & (part != MISSING)).all() for part in pair):
                lengths[number] = len(pair[0])
    lengths = np.maximum(0, np.asarray(lengths, dtype=np.int64))
    if not lengths.any():
        raise no_data(f"the {name}")
    return Items(
        dataset=dataset,
        left_out={"dropped" if drop else "short": int(np.count_nonzero(lengths == 0))},
        borders=np.concatenate([[0], np.cumsum(lengths)]),
        checked=True,  # reading it once more may be slow
        about={"kind": "Dataset", "path": name, "items": len(dataset)},
    )


def checked_pair(spec: Spec, item: Any, nan: Nan, name: str) -> Pair:
    """A pair of arrays as the model takes it, with the name of the item in every error."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise MisuseError(
            rule="Data from Python comes in pairs (inputs, targets)",
            got=f"{name} is {type(item).__name__}",
            advice="Give a pair of arrays or tensors.",
        )
    (inputs, targets), (tokens, classes) = map(as_array, item), indices(spec)
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
    aimed = as_values(targets, classes, nan, lambda *at: f"the target of {place(*at)}")
    return as_values(inputs, tokens, nan, place), aimed if per_step else aimed[0]


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
