"""From what the user gives (a path, an array, a Dataset, pairs) to sources: opened, split and normalised. Also the
histogram of their lengths for the planner (`Spec.lengths`). Needs no torch for files and arrays.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from oomguard._core.errors import MisuseError, shown
from oomguard._core.system import run_elsewhere
from oomguard._data import order
from oomguard._data.files import map_array, open_array, open_text, spool
from oomguard._data.frames import is_frame, table_errors, write_frame
from oomguard._data.options import DataOptions, Format, check_used
from oomguard._data.rows import Arrays, Items, Normaliser, Source, as_array, cut_sources, fit_normaliser, open_items
from oomguard._data.source import Ints, no_data, unreadable
from oomguard._spec.spec import MAX_SEQ, Spec

MAX_LENGTHS = 256  # different lengths in a histogram at most: more would slow the planner down and improve no plan
_FORMATS = {
    **{".npy": "npy", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".pq": "parquet"},
    **{".txt": "text", ".text": "text", ".md": "text"},
}
_LINE = re.compile(rb"\s*(\d{1,18})\s*(?:[:,;\t ]\s*(\d{1,18})\s*)?")
_HEADER = re.compile(rb'\s*[A-Za-z"#_]')
_LINE_BYTES = 1000  # longest line that is read at once: a file without line ends is never in memory whole


class Missing(NamedTuple):
    """Data that is in neither part, training nor validation."""

    truncated: int = 0  # sequences that were cut
    dropped: int = 0  # sequences that were left out for a missing value
    short: int = 0  # series, or parts of a split one, that are too short to have a target
    dropped_steps: int = 0  # steps of the sequences that were left out for a missing value
    cut_rows: int = 0  # rows with a missing value that sequences were cut around

    def words(self) -> str:
        """The counts that are not 0, in words."""
        steps = f" ({self.dropped_steps:,} steps)" if self.dropped_steps else ""
        reasons = ("cut to the length of the spec", f"left out for missing values{steps}", "too short to have a target")
        counts = zip(self, reasons, strict=False)
        words = [f"{count:,} {'was' if count == 1 else 'were'} {why}" for count, why in counts if count]
        if self.cut_rows:
            rows = "1 row" if self.cut_rows == 1 else f"{self.cut_rows:,} rows"
            words.append(f"some were cut around {rows} with missing values")
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The data for training and the data for validation, which share no time step."""

    train: Source
    validation: Source | None
    normaliser: Normaliser | None  # fitted on the training part, or as it was given
    missing: Missing  # sequences that neither part has


def open_source(data: Any, spec: Spec, options: DataOptions | None = None) -> Source:
    """All of the data as one source, neither split nor normalised."""
    options = options or DataOptions()
    store = _open(data, spec, options)
    return cut_sources(store, spec, options, order.whole(store.borders))[0]


def open_data(data: Any, spec: Spec, options: DataOptions | None = None, normaliser: Normaliser | None = None) -> Data:
    """The data for training and validation, both normalised by the training part or by a normaliser that is given."""
    options = options or DataOptions()
    if options.inputs_only:
        raise MisuseError(
            rule="Training needs targets", got="got inputs_only", advice="Leave it out: it is for predictions."
        )
    store = _open(data, spec, options)
    parts = cut_sources(store, spec, options, *_split(store, spec, options))
    missing = Missing(*(sum(part.missing.get(name, 0) for part in parts) for name in Missing._fields))
    if isinstance(store, Items):
        missing = missing._replace(**store.left_out)
    if spec.vocab is not None or options.normalise == "none":
        normaliser = None
    elif normaliser is None:
        pairs = (parts[0][index] for index in range(len(parts[0])))
        normaliser = fit_normaliser(pairs, targets=options.normalise == "both" and spec.loss == "mse")
    train, *validation = (replace(part, normaliser=normaliser) for part in parts)
    return Data(train=train, validation=next(iter(validation), None), normaliser=normaliser, missing=missing)


def check_data(data: Data) -> None:
    """Read what was not read yet, so that errors in the data show before training and not after hours of it."""
    fitted = data.normaliser is not None  # which has read the training part
    for part in (None if fitted else data.train, data.validation):
        if part is not None and not part.store.checked:
            check_source(part)


def check_source(source: Source) -> int:
    """Read every sequence once, which raises an error if a value is wrong; returns the number of time steps."""
    return sum(len(source[index][0]) for index in range(len(source)))


def _open(data: Any, spec: Spec, options: DataOptions) -> Arrays | Items:
    """Any kind of data, not yet cut into sequences."""
    if isinstance(data, str | Path):
        return _open_file(Path(data), spec, options)
    if isinstance(data, np.ndarray):
        check_used("npy", options)
        return open_array(data, spec, options)
    if is_frame(data):
        path = write_frame(data)
        with table_errors(path):
            return _open_file(path, spec, options)
    from torch import Tensor  # files need no torch

    if isinstance(data, Tensor):
        return _open(as_array(data), spec, options)
    if is_dataset(data):
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


def is_dataset(data: Any) -> bool:
    """Whether the data is a map-style Dataset, or a list of pairs."""
    from torch.utils.data import IterableDataset

    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset)


def kind_of(path: Path, options: DataOptions) -> str:
    """The format of a file, by its suffix unless it is given; raise if there is no such file."""
    if not path.is_file():
        why = "it is a directory" if path.is_dir() else "it is a pipe or a device, not a file"
        raise unreadable(path, FileNotFoundError(2, why if path.exists() else "there is no such file"))
    kind = options.format or _FORMATS.get(path.suffix.lower())
    if kind is None:
        raise MisuseError(
            rule=f"A data file must be one of {', '.join(get_args(Format))}",
            got=f"{path} does not say which by its suffix",
            advice="Give its --format.",
        )
    return kind


def _open_file(path: Path, spec: Spec, options: DataOptions) -> Arrays:
    kind = kind_of(path, options)
    check_used(kind, options)
    try:
        if kind in ("npy", "text"):
            return (open_array if kind == "npy" else open_text)(path, spec, options)
        if "pyarrow" not in sys.modules:  # in a child process: reading would take 70 MiB from the training
            store: Arrays = run_elsewhere("oomguard._data.tables", "open_table", path, kind, spec, options)
            return store
        from oomguard._data.tables import open_table

        return open_table(path, kind, spec, options)
    except OSError as error:
        raise unreadable(path, error) from None


def _split(store: Arrays | Items, spec: Spec, options: DataOptions) -> list[order.Pieces]:
    """The pieces for training and, if a share is asked for, those for validation."""
    pieces, share, path = order.whole(store.borders), options.validation, store.about["path"]
    if not share:
        return [pieces]
    how = options.split or ("time" if store.long else "series")
    if how == "time" and isinstance(store, Items):
        raise MisuseError(rule="A Dataset is split by its items", got="got --split time", advice="Use --split series.")
    if how == "time" and store.per_series:
        raise MisuseError(
            rule="Series with one target each cannot be split by time",
            got=f"{path} has one for each series",
            advice="Use --split series.",
        )
    if how == "time":
        middle = pieces.stops - np.rint(pieces.steps * share).astype(np.int64)
        sides = pieces._replace(stops=middle), pieces._replace(starts=middle)
    elif store.long:
        sides = order.split_in_blocks(pieces, share, options.seed, least=spec.steps + store.ahead)
    else:
        chosen, rest = order.chosen_share(len(pieces.starts), share, options.seed)
        sides = (pieces.take(rest), pieces.take(chosen))
    for name, side in zip(("training", "validation"), sides, strict=True):
        if not (side.steps > store.ahead).any():
            raise no_data(f"the part of {path} for {name}")
    return [*sides]


def histogram(lengths: Ints, counts: Ints, most: int = MAX_LENGTHS) -> dict[int, int]:
    """Length -> count, with at most `most` lengths: they are rounded up, never down and never beyond the longest."""
    if len(lengths) > most:
        longest = int(lengths.max())
        step = -(-longest // most)
        lengths = np.minimum(-(-lengths // step) * step, longest)
    total: Counter[int] = Counter()
    for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
        total[length] += count
    return dict(sorted(total.items()))


def read_lengths(path: str | Path) -> dict[int, int]:
    """The histogram in a file: a `.npy` array of lengths, or lines of `length` or `length:count` after any header."""
    path = Path(path)
    try:
        lengths, counts = _from_array(path) if path.suffix.lower() == ".npy" else _from_lines(path)
    except OSError as error:
        raise unreadable(path, error) from None
    if not len(lengths):
        raise no_data(path)
    return histogram(lengths, counts)


def _from_array(path: Path) -> tuple[Ints, Ints]:
    array = map_array(path).array
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise MisuseError(
            rule="An array of lengths must be one axis of whole numbers",
            got=f"{path} is {' x '.join(map(str, array.shape))} of {array.dtype}",
            advice="Save it with np.save(path, lengths.astype(np.int64)).",
        )
    bad = np.flatnonzero((array < 1) | (array > MAX_SEQ))
    if len(bad):
        raise _not_a_length(path, int(bad[0]), int(array[bad[0]]))
    lengths, counts = np.unique(array, return_counts=True)
    return lengths.astype(np.int64), counts


def _from_lines(path: Path) -> tuple[Ints, Ints]:
    total: Counter[int] = Counter()
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LINE_BYTES), b""), start=1):
            match = _LINE.fullmatch(line)
            if match is None and (not line.strip() or (number == 1 and _HEADER.match(line))):
                continue
            length, count = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
            if not 1 <= length <= MAX_SEQ or count < 1:
                raise _not_a_length(path, number, line.decode(errors="replace").strip())
            total[length] += count
    return np.array([*total], dtype=np.int64), np.array([*total.values()], dtype=np.int64)


def _not_a_length(path: Path, row: int, value: int | str) -> MisuseError:
    return MisuseError(
        rule=f"A length must be a whole number from 1 to {MAX_SEQ:,}, alone or as length:count",
        got=f"{path}, row {row:,} is {shown(value)}",
        advice="Correct the file, or give the data itself as --data.",
    )
