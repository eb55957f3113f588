"""CSV and Parquet: read once, a block of rows at a time, into arrays that are mapped from then on.

Sequences are asked for in random order. A row group of a Parquet file would be decoded for each of them, and a CSV
parsed, so both are converted; rows of one series, wherever they stand in the file, come to lie together.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from oomguard.data import values
from oomguard.data.cache import Appended, cached, shape_of
from oomguard.data.columns import Columns, choose_columns, missing_column
from oomguard.data.options import DataOptions
from oomguard.data.regroup import Regrouped, regroup
from oomguard.data.rows import Store
from oomguard.data.source import Array, Mapped, fingerprint, nothing_in, unreadable
from oomguard.errors import MisuseError
from oomguard.spec import Spec

BLOCK_BYTES = 1 << 20
"""Of a CSV, parsed at a time: pyarrow 26 reads about 30 blocks ahead."""
ROWS_PER_BLOCK = 64
"""At least, if they are as long as the header: a row must fit into a block."""
HEADER_BYTES = 64 << 20
"""Longest header: of a file without line ends no more than this is read."""
BLOCK_ROWS = 1 << 16
"""Of a Parquet file, decoded at a time; a row group is never in memory whole."""


class Table(NamedTuple):
    """A table that is about to be read."""

    path: Path
    names: list[str]
    """Of all its columns."""
    first_row: int
    """The number of its first row of data: in a CSV the header is row 1, as an editor shows it."""
    delimiter: str | None = None
    """Of a CSV; None: it is Parquet."""
    block_bytes: int = 0
    """Of a CSV, parsed at a time."""


def open_table(path: Path, kind: str, spec: Spec, options: DataOptions) -> Store:
    """A table as a store. The first time, all of it is read once."""
    table = _opened(path, kind)
    free = [name for name in table.names if name != options.id]
    if options.id is not None and options.id not in table.names:
        raise missing_column(options.id, table.names, path)
    chosen = choose_columns(free, spec, options, path)
    places = {name: place for place, name in enumerate(table.names)}
    inputs, targets = (tuple(places[free[i]] for i in part) for part in chosen[:2])
    wanted = Columns(inputs, targets, chosen.ahead)
    asked = {"columns": wanted[:2], "id": options.id, "vocab": spec.vocab, "loss": spec.loss, "classes": spec.classes}
    home, about = cached(path, options.cache, asked, lambda to: _convert(table, wanted, spec, options.id, to))
    if about["unfinished"] is not None and options.nan == "error":
        raise values.not_finite(*about["unfinished"])
    if about["missing"] is not None and options.nan != "drop":
        raise values.no_index(*about["missing"])
    read = Mapped(str(home / "inputs"), *_form(spec.vocab is not None, len(wanted.inputs), about["rows"]))
    shared, aimed = _shared(wanted, spec), read
    if shared is None:
        width = len(wanted.targets)
        aimed = Mapped(str(home / "targets"), *_form(spec.loss == "cross-entropy", width, about["rows"]))
    size_bytes, content = path.stat().st_size, fingerprint(path)
    return Store(
        inputs=read,
        targets=aimed,
        borders=np.fromfile(home / "borders", dtype=np.int64),
        long=options.id is None,
        first_row=table.first_row,
        ids=None if options.id is None else home / "ids",
        places=None if options.id is None else Mapped(str(home / "places"), np.int64, (about["rows"],)),
        target_columns=shared or None,
        ahead=wanted.ahead,
        checked=True,
        about={"kind": kind, "path": str(path), "bytes": size_bytes, "rows": about["rows"], "content": content},
    )


def _form(indices: bool, width: int, rows: int) -> tuple[Any, tuple[int, ...]]:
    """Type and shape of an array of numbers, or of tokens or classes."""
    return (np.int64, (rows,)) if indices else (np.float32, shape_of(rows, width))


def _shared(columns: Columns, spec: Spec) -> tuple[int, ...] | None:
    """Where the targets are among the inputs, if they are: then they are not stored twice. Tokens: ()."""
    if not set(columns.targets) <= set(columns.inputs) or (spec.vocab is None) != (spec.loss == "mse"):
        return None
    return () if spec.vocab is not None else tuple(map(columns.inputs.index, columns.targets))


def _opened(path: Path, kind: str) -> Table:
    """The table's columns, by its header alone."""
    try:
        if kind == "parquet":
            with parquet.ParquetFile(path) as file:
                names = file.schema_arrow.names
            table = Table(path, names, 1)
        else:
            table = _header(path)
    except (OSError, pa.ArrowException) as error:
        raise unreadable(path, error) from None
    twice = [name for name, count in Counter(table.names).items() if count > 1]
    if twice:
        raise MisuseError(
            rule="Every column of a table must have a name of its own",
            got=f"{path} has {twice[0]!r} more than once",
            advice="Rename one of the two.",
        )
    return table


def _header(path: Path) -> Table:
    """The first row of a CSV. If it is all numbers it is data, and columns have numbers for names."""
    if not path.stat().st_size:
        raise nothing_in(path)
    with path.open("rb") as file:
        first = file.readline(HEADER_BYTES)
    try:
        first.decode()
    except UnicodeDecodeError:
        raise _no_utf8(path) from None
    options = csv.ReadOptions(autogenerate_column_names=True)
    delimiter = _delimiter(first)
    parsed = csv.read_csv(pa.BufferReader(first), options, csv.ParseOptions(delimiter=delimiter))
    cells = ["" if column[0].as_py() is None else str(column[0].as_py()) for column in parsed.columns]
    block_bytes = max(BLOCK_BYTES, ROWS_PER_BLOCK * len(first))
    if all(_is_number(cell) for cell in cells):
        return Table(path, [str(number) for number in range(len(cells))], 1, delimiter, block_bytes)
    return Table(path, [cell.strip() for cell in cells], 2, delimiter, block_bytes)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _delimiter(first: bytes) -> str:
    """A comma, unless the first row has none and something else."""
    return next((mark.decode() for mark in (b",", b"\t", b";") if mark in first), ",")


def _batches(table: Table, wanted: list[str], id_column: str | None) -> Iterator[pa.RecordBatch]:
    """The columns that are wanted, some rows at a time."""
    if table.delimiter is None:
        with parquet.ParquetFile(table.path, buffer_size=BLOCK_BYTES, pre_buffer=False) as file:
            # without a buffer, the columns of a row group would be read whole
            yield from file.iter_batches(batch_size=BLOCK_ROWS, columns=wanted, use_threads=False)
        return
    types: dict[str, Any] = dict.fromkeys(wanted, pa.float64())
    if id_column is not None:
        types[id_column] = pa.string()
    with csv.open_csv(
        table.path,
        # without threads its errors name the row
        csv.ReadOptions(
            use_threads=False, block_size=table.block_bytes, column_names=table.names, skip_rows=table.first_row - 1
        ),
        csv.ParseOptions(delimiter=table.delimiter),
        csv.ConvertOptions(column_types=types, include_columns=wanted),
    ) as reader:
        yield from reader


def _convert(table: Table, columns: Columns, spec: Spec, id_column: str | None, home: Path) -> dict[str, Any]:
    """Write the arrays, and say how many rows there are and where the first NaN is, of numbers and of indices."""
    wanted = list(dict.fromkeys(table.names[i] for i in (*columns.inputs, *columns.targets)))
    wanted += [] if id_column is None else [id_column]
    with ExitStack() as stack:
        writer = _Writer(table, columns, spec, home, stack)
        groups = None if id_column is None else _groups(home, stack)
        try:
            for batch in _batches(table, wanted, id_column):
                if groups is not None and id_column is not None:
                    groups.append(_ids(batch, id_column, table, writer.rows), writer.rows + table.first_row)
                writer.append(batch)
        except pa.ArrowException as error:
            raise _parse_error(table, wanted, str(error)) from None
        rows = writer.rows
    if not rows:
        raise nothing_in(table.path)
    borders = np.array([0, rows], dtype=np.int64)
    if groups is not None:
        borders = regroup(groups, [one.mapped() for one in writer.arrays])
        (home / "ids").write_text(json.dumps([*groups.numbers], default=str))
    borders.tofile(home / "borders")
    return {"rows": rows, "unfinished": writer.unfinished, "missing": writer.missing}


def _groups(home: Path, stack: ExitStack) -> Regrouped:
    return Regrouped(*(stack.enter_context(Appended(home / name, np.int64, None)) for name in ("codes", "places")))


class _Writer:
    """Checks rows and appends them to the arrays."""

    def __init__(self, table: Table, columns: Columns, spec: Spec, home: Path, stack: ExitStack) -> None:
        self.table, self.spec, self.rows = table, spec, 0
        self.unfinished: tuple[str, str] | None = None
        self.missing: tuple[str, str, int, tuple[str, str]] | None = None
        names = table.names
        parts = [("inputs", [names[i] for i in columns.inputs], spec.vocab, ("A token", "--vocab"))]
        if _shared(columns, spec) is None:
            classes = spec.classes if spec.loss == "cross-entropy" else None
            parts.append(("targets", [names[i] for i in columns.targets], classes, ("A target", "--outputs")))
        self.parts = parts
        self.arrays = [
            stack.enter_context(
                Appended(home / name, np.float32 if below is None else np.int64, len(own) if below is None else None)
            )
            for name, own, below, _ in parts
        ]

    def append(self, batch: pa.RecordBatch) -> None:
        for (_, names, below, named), array in zip(self.parts, self.arrays, strict=True):
            block = np.stack([self._numbers(batch, name) for name in names], axis=1)
            if below is not None:  # a NaN is kept, since it may be asked for again with --nan drop
                indices = values.as_indices(block, below, named, partial(self._place, names), "drop")
                gone = indices == values.MISSING
                if self.missing is None and gone.any():
                    row = int(gone.argmax())
                    self.missing = (self._place(names, row, 0), str(block[row, 0]), below, named)
                array.append(indices)
                continue
            with np.errstate(over="ignore"):
                numbers = block.astype(np.float32)
            bad = ~np.isfinite(numbers)  # also what float32 is too small for
            if self.unfinished is None and bad.any():
                row, column = (int(one) for one in np.argwhere(bad)[0])
                self.unfinished = (self._place(names, row, column), str(block[row, column]))
            array.append(numbers)
        self.rows += batch.num_rows

    def _numbers(self, batch: pa.RecordBatch, name: str) -> Array:
        """A column in float64, what is missing as NaN."""
        column = batch.column(name)
        try:
            found: Array = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        except pa.ArrowException:
            row = next((i for i, cell in enumerate(column) if not _is_number(str(cell.as_py()))), 0)
            raise _no_number(self._place([name], row, 0), str(column[row].as_py())) from None
        return found

    def _place(self, names: list[str], row: int, column: int) -> str:
        return f"{self.table.path}, row {self.rows + row + self.table.first_row:,}, column {names[column]!r}"


def _ids(batch: pa.RecordBatch, column_name: str, table: Table, rows: int) -> tuple[Array, list[Any]]:
    """The ids of some rows as numbers, and what each number stands for."""
    coded = batch.column(column_name).dictionary_encode(null_encoding="encode")
    places, ids = coded.indices.to_numpy(zero_copy_only=False), coded.dictionary.to_pylist()
    for nothing in (None, ""):
        if nothing in ids:
            row = int((places == ids.index(nothing)).argmax()) + rows + table.first_row
            raise MisuseError(
                rule="Every row must say which series it belongs to",
                got=f"{table.path}, row {row:,}, column {column_name!r} is empty",
                advice="Fill the column, or name another as --id.",
            )
    return places, ids


def _parse_error(table: Table, wanted: list[str], text: str) -> MisuseError:
    """What pyarrow found wrong with a CSV, with file, row and column."""
    row = re.search(r"Row #(\d+)", text)
    place = f"{table.path}, row {int(row[1]):,}" if row else str(table.path)
    ragged = re.search(r"Expected (\d+) columns, got (\d+)", text)
    if ragged:
        return MisuseError(
            rule=f"Every row of a table must have as many columns as the first ({ragged[1]})",
            got=f"{place} has {ragged[2]}",
            advice="Mend that row.",
        )
    cell = re.search(r"column #(\d+):.*invalid value '(.*)'", text, re.DOTALL)
    if cell:
        return _no_number(f"{place}, column {table.names[int(cell[1])]!r}", cell[2])
    return _no_utf8(place) if "UTF8" in text else unreadable(table.path, ValueError(text))


def _no_utf8(place: object) -> MisuseError:
    return MisuseError(
        rule="A table must be text in UTF-8",
        got=f"{place} has other bytes (latin-1, perhaps)",
        advice="Convert it: iconv -f latin1 -t utf-8 old.csv > new.csv.",
    )


def _no_number(place: str, value: str) -> MisuseError:
    return MisuseError(
        rule="Inputs and targets must be numbers",
        got=f"{place} is {value[:40]!r}",
        advice="Mend it, or name the columns that are numbers as --columns and --target.",
    )
