"""From what the user names (a path, an array, a Dataset, pairs) to sources: split, and normalised."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from oomguard.checks import shown
from oomguard.children import run_elsewhere
from oomguard.data import cuts
from oomguard.data.arrays import open_array
from oomguard.data.items import Items, as_array, open_items, spool
from oomguard.data.normalise import Normalised, Normaliser, fit_normaliser
from oomguard.data.options import DataOptions, Format, check_used
from oomguard.data.rows import Rows, Store, check_lengths, cut_rows, unfinished_rows
from oomguard.data.source import Source, nothing_in, unreadable
from oomguard.data.text import open_text
from oomguard.errors import MisuseError
from oomguard.spec import Spec

_SUFFIXES = {
    ".npy": "npy",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}


class Missing(NamedTuple):
    """What of the data is not there for training and validation.

    >>> Missing(truncated=1200, dropped=1).words()
    '1,200 were cut to the length of the spec, 1 was left out for a NaN'
    """

    truncated: int = 0
    """Sequences that were cut."""
    dropped: int = 0
    """Sequences that were left out, for a NaN."""
    short: int = 0
    """Series, or what the split leaves of one, that were left out, without a target."""

    def words(self) -> str:
        """What there is to tell, if there is."""
        told = ("cut to the length of the spec", "left out for a NaN", "too short to have a target")
        counted = [(count, f"{count:,} {'was' if count == 1 else 'were'}") for count in self]
        return ", ".join(f"{words} {what}" for (count, words), what in zip(counted, told, strict=True) if count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What is trained on, and what is kept to see how well. No step of one is in the other."""

    train: Source
    validation: Source | None
    normaliser: Normaliser | None
    """Fitted on the training part, or as it was given."""
    missing: Missing
    """Of both."""


def open_source(data: Any, spec: Spec, options: DataOptions | None = None) -> Source:
    """All of the data as one source: neither split nor normalised."""
    options = options or DataOptions()
    opened = _ready(data, spec, options)
    return opened if isinstance(opened, Items) else cut_rows(opened, spec, options)


def open_data(data: Any, spec: Spec, options: DataOptions | None = None, normaliser: Normaliser | None = None) -> Data:
    """The data as a source for training and one for validation.

    A normaliser from a checkpoint is used as it is; otherwise, unless `normalise` is none, it is fitted in one pass
    over the training part.
    """
    options = options or DataOptions()
    if options.inputs_only:
        raise MisuseError(
            rule="Training needs targets", got="got inputs_only", advice="Leave it out: it is for predictions."
        )
    opened = _ready(data, spec, options)
    train, validation = _split_items(opened) if isinstance(opened, Items) else _split_rows(opened, spec, options)
    missing = _missing([opened] if isinstance(opened, Items) else [train, validation])
    if spec.vocab is not None or options.normalise == "none":
        return Data(train=train, validation=validation, normaliser=None, missing=missing)
    if normaliser is None:
        normaliser = fit_normaliser(train, targets=options.normalise == "both" and spec.loss == "mse")
    checked = None if validation is None else Normalised(validation, normaliser)
    return Data(train=Normalised(train, normaliser), validation=checked, normaliser=normaliser, missing=missing)


def _missing(parts: list[Any]) -> Missing:
    described = [part.describe() for part in parts if part is not None]
    return Missing(*(sum(one.get(name, 0) for one in described) for name in Missing._fields))


def check_data(data: Data) -> None:
    """Read what nobody has read yet, so that what is wrong with it is known now, and not after hours.

    Who fitted a normaliser has read the training part. A Dataset is left alone: it may be slow, and has said its
    lengths or was looked at.
    """
    parts = [data.validation] if data.normaliser is not None else [data.train, data.validation]
    for part in parts:
        source = part.source if isinstance(part, Normalised) else part
        if isinstance(source, Rows) and not source.store.checked:
            check_source(source)


def check_source(source: Source) -> int:
    """Read every sequence once, so that what is wrong with the data is known before training; returns its steps."""
    return sum(len(source[index][0]) for index in range(len(source)))


def _ready(data: Any, spec: Spec, options: DataOptions) -> Store | Items:
    """Opened, and gone through for NaNs if these are to be dropped: once, whatever is cut from it."""
    opened = _opened(data, spec, options)
    if isinstance(opened, Items) or options.nan != "drop":
        return opened
    return replace(opened, unfinished=unfinished_rows(opened))


def _opened(data: Any, spec: Spec, options: DataOptions) -> Store | Items:
    """Any kind of data, not yet cut into sequences."""
    if isinstance(data, str | Path):
        return _opened_file(Path(data), spec, options)
    if isinstance(data, np.ndarray):
        check_used("npy", options)
        return open_array(data, spec, options)
    from torch import Tensor  # who names a file may do without
    from torch.utils.data import IterableDataset

    if isinstance(data, Tensor):
        return _opened(as_array(data), spec, options)
    if isinstance(data, Mapping) or (hasattr(data, "columns") and hasattr(data, "dtypes")):  # without items 0, 1, ...
        raise MisuseError(
            rule="A table is read from a file, so that it need not be in memory",
            got=f"got a {type(data).__name__}",
            advice='Write it to a file, such as frame.to_parquet("data.parquet"), and give its path.',
        )
    once = isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__"))
    if not once:
        check_used("Dataset", options)
        return open_items(data, spec, options)
    if not isinstance(data, Iterable):
        raise MisuseError(
            rule="Data is a path, an array, a Dataset, or pairs (inputs, targets)",
            got=f"got {shown(data)}",
            advice="Give one of these.",
        )
    check_used("pairs", options)
    return spool(data, spec, options)


def _opened_file(path: Path, spec: Spec, options: DataOptions) -> Store:
    if not path.is_file():
        why = "it is a directory" if path.is_dir() else "there is no such file"
        raise unreadable(path, FileNotFoundError(2, why))
    kind = options.format or _SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise MisuseError(
            rule=f"A data file must be one of {', '.join(get_args(Format))}",
            got=f"{path} does not say which by its suffix",
            advice="Say it as --format.",
        )
    check_used(kind, options)
    try:
        if kind == "npy":
            return open_array(path, spec, options)
        if kind == "text":
            return open_text(path, spec, options)
        return _opened_table(path, kind, spec, options)
    except OSError as error:
        raise unreadable(path, error) from None


def _opened_table(path: Path, kind: str, spec: Spec, options: DataOptions) -> Store:
    """A table, read in a process of its own unless pyarrow is here already: it would take 70 MiB from the training."""
    if "pyarrow" not in sys.modules:
        store: Store = run_elsewhere("oomguard.data.tables", "open_table", path, kind, spec, options)
        return store
    from oomguard.data.tables import open_table

    return open_table(path, kind, spec, options)


def _split_rows(store: Store, spec: Spec, options: DataOptions) -> tuple[Source, Source | None]:
    """Pieces go to one side or the other, and sequences are cut within them."""
    pieces, share = cuts.whole(store.borders), options.validation
    if not share:
        return cut_rows(store, spec, options), None
    how = options.split or ("time" if store.long else "series")
    if how == "time" and store.per_series:
        raise MisuseError(
            rule="Series with one target each cannot be split by time",
            got=f"{store.about['path']} has one for each series",
            advice="Say --split series.",
        )
    if how == "time":
        sides = cuts.split_by_time(pieces, share)
    elif store.long:
        sides = cuts.split_in_blocks(pieces, share, options.seed, least=spec.steps + store.ahead)
    else:
        sides = cuts.split_by_series(pieces, share, options.seed)
    check_lengths(store, cuts.Pieces(*map(np.concatenate, zip(*sides, strict=True))), spec, options)
    for name, side in zip(("training", "validation"), sides, strict=True):
        if not (side.stops - side.starts > store.ahead).any():
            raise nothing_in(f"the part of {store.about['path']} for {name}")
    return cut_rows(store, spec, options, sides[0]), cut_rows(store, spec, options, sides[1])


def _split_items(items: Items) -> tuple[Source, Source | None]:
    options = items.options
    if not options.validation:
        return items, None
    if options.split == "time":
        raise MisuseError(rule="A Dataset is split by its items", got="got --split time", advice="Say --split series.")
    last, rest = cuts.chosen_share(len(items), options.validation, options.seed)
    return items.part(rest), items.part(last)
