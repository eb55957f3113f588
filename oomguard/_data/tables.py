"""CSV and Parquet files: pyarrow reads them once, some rows at a time, into arrays that are mapped from then on.

Training reads sequences in random order, and would have to parse a CSV, or decode a row group of Parquet, for each.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from csv import Error as CellError
from csv import reader as read_cells
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv, parquet

from oomguard._core.errors import MisuseError
from oomguard._data import source
from oomguard._data.options import DataOptions, check_column, choose_columns
from oomguard._data.rows import Arrays
from oomguard._data.source import Appended, Ints, Mapped, cached, fingerprint, group_rows, no_data, unreadable
from oomguard._spec.spec import Spec

BLOCK_BYTES = 1 << 20  # bytes of a CSV that are parsed at a time: pyarrow 26 reads about 30 blocks ahead
ROWS_PER_BLOCK = 64  # rows of a block at least, if they are as long as the header: a row must fit into a block
HEADER_BYTES = 64 << 20  # longest header of a CSV: no more than this is read of a file without line ends
BLOCK_ROWS = 1 << 16  # rows of a Parquet file that are decoded at a time; a row group is never in memory whole


class Table(NamedTuple):
    """A table whose header was read."""

    path: Path
    names: list[str]
    first_row: int  # number of the first row of data, as an editor shows it: in a CSV the header is row 1
    delimiter: str | None = None  # what separates the columns of a CSV; None: the table is Parquet
    block_bytes: int = 0  # bytes of a CSV that are parsed at a time


class Part(NamedTuple):
    """Columns that are stored together as one array."""

    file: str
    names: list[str]
    range: source.Index | None  # the range of tokens or classes; None: the columns are numbers


def open_table(path: Path, kind: str, spec: Spec, options: DataOptions) -> Arrays:
    """A table as a store. The first time, all of it is read."""
    table = _read_header(path, kind)
    if options.id is not None:
        check_column(options.id, table.names, path)
    names = [name for name in table.names if name != options.id]
    input_names, target_names, ahead = choose_columns(names, spec, options, path)
    parts = _layout(input_names, target_names, spec)
    settings = {"parts": parts, "id": options.id}
    home, about = cached(path, options.cache, settings, _Reader(table, parts, options.id).convert)
    for part in parts:
        refused = options.nan == "error" or (options.nan == "zero" and part.range is not None)
        if refused and part.file in about["nan"]:
            place, value = about["nan"][part.file]
            raise source.wrong_value(place, value, part.range)
    inputs, targets = _map(home, parts[0], input_names), _map(home, parts[-1], target_names)
    rows, size_bytes = len(inputs.array), path.stat().st_size
    return Arrays(
        inputs=inputs,
        targets=inputs if (targets.path, targets.columns) == (inputs.path, inputs.columns) else targets,
        borders=np.load(home / "borders.npy"),
        long=options.id is None,
        first_row=table.first_row,
        ids=None if options.id is None else home,
        ahead=ahead,
        checked=True,
        about={"kind": kind, "path": str(path), "bytes": size_bytes, "rows": rows, "content": fingerprint(path)},
    )


def _layout(inputs: list[str], targets: list[str], spec: Spec) -> list[Part]:
    """Inputs and targets share an array if both are numbers, or the same column of tokens."""
    tokens, classes = source.indices(spec)
    if tokens is None and classes is None:
        return [Part("numbers.npy", list(dict.fromkeys([*inputs, *targets])), None)]
    if tokens is not None and classes is not None and inputs == targets:
        return [Part("tokens.npy", inputs, tokens)]
    return [Part("inputs.npy", inputs, tokens), Part("targets.npy", targets, classes)]


def _map(home: Path, part: Part, names: list[str]) -> Mapped:
    """Some columns of an array. Tokens and classes have no axis for columns."""
    mapped = Mapped.npy(home / part.file)
    if part.range is not None:
        return mapped
    place = {name: number for number, name in enumerate(part.names)}
    return replace(mapped, columns=tuple(place[name] for name in names))


def _read_header(path: Path, kind: str) -> Table:
    try:
        table = Table(path, parquet.read_schema(path).names, 1) if kind == "parquet" else _read_csv_header(path)
    except (OSError, CellError, pa.ArrowException) as error:
        raise unreadable(path, error) from None
    repeated = [name for name, count in Counter(table.names).items() if count > 1]
    if repeated:
        raise MisuseError(
            rule="Every column of a table must have a name of its own",
            got=f"{path} has {repeated[0]!r} more than once",
            advice="Rename one of the two.",
        )
    return table


def _read_csv_header(path: Path) -> Table:
    """The first row of a CSV. If it is all numbers it is data, and the columns' names are their numbers."""
    if not path.stat().st_size:
        raise no_data(path)
    with path.open("rb") as file:
        first = file.readline(HEADER_BYTES)
    try:
        header = first.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _not_utf8(path) from None
    delimiter = next((mark.decode() for mark in (b",", b"\t", b";") if mark in first), ",")
    cells = next(read_cells([header], delimiter=delimiter), [])
    has_names = not all(_is_number(cell) for cell in cells)
    names = [cell.strip() if has_names else str(number) for number, cell in enumerate(cells)]
    return Table(path, names, 2 if has_names else 1, delimiter, max(BLOCK_BYTES, ROWS_PER_BLOCK * len(first)))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _batches(table: Table, wanted: list[str], id_column: str | None) -> Iterator[pa.RecordBatch]:
    if table.delimiter is None:
        # without a buffer, the columns of a row group would be read whole
        with parquet.ParquetFile(table.path, buffer_size=BLOCK_BYTES, pre_buffer=False) as file:
            yield from file.iter_batches(batch_size=BLOCK_ROWS, columns=wanted, use_threads=False)
        return
    types: dict[str, Any] = dict.fromkeys(wanted, pa.float64()) | ({id_column: pa.string()} if id_column else {})
    with csv.open_csv(
        table.path,
        # without threads, errors name the row
        csv.ReadOptions(
            use_threads=False, block_size=table.block_bytes, column_names=table.names, skip_rows=table.first_row - 1
        ),
        csv.ParseOptions(delimiter=table.delimiter),
        csv.ConvertOptions(column_types=types, include_columns=wanted),
    ) as reader:
        yield from reader


class _Reader:
    """Turns a table into arrays, some rows at a time. Of the ids, each is in memory once."""

    def __init__(self, table: Table, parts: list[Part], id_column: str | None) -> None:
        self.table, self.parts, self.id_column, self.rows = table, parts, id_column, 0
        self.nan: dict[str, tuple[str, str]] = {}  # place and value of the first NaN of each array
        self.series: dict[Any, int] = {}  # number of each series by its id, in the order in which they come up

    def convert(self, home: Path) -> dict[str, Any]:
        """Write the arrays; returns the place and the value of the first NaN of each, if it has one."""
        wanted = list(dict.fromkeys(name for part in self.parts for name in part.names))
        forms = [(part.file, len(part.names) if part.range is None else None) for part in self.parts]
        if self.id_column is not None:
            wanted.append(self.id_column)
            forms += [("codes.npy", None), ("places.npy", None)]
        with ExitStack() as stack:
            arrays = [stack.enter_context(Appended(home / name, width)) for name, width in forms]
            try:
                for batch in _batches(self.table, wanted, self.id_column):
                    for array, block in zip(arrays, self._blocks(batch), strict=True):
                        array.append(block)
            except pa.ArrowException as error:
                raise _parse_error(self.table, str(error)) from None
        if not self.rows:
            raise no_data(self.table.path)
        borders = np.array([0, self.rows], dtype=np.int64)
        if self.id_column is not None:
            paths = [*(home / part.file for part in self.parts), home / "places.npy"]
            borders = group_rows(paths, home / "codes.npy", len(self.series))
            (home / "ids.json").write_text(json.dumps([*self.series], default=str))
        np.save(home / "borders.npy", borders)
        return {"nan": self.nan}

    def _blocks(self, batch: pa.RecordBatch) -> list[NDArray[Any]]:
        """The checked rows of a batch for each array."""
        blocks: list[NDArray[Any]] = [self._checked(batch, part) for part in self.parts]
        if self.id_column is not None:
            first = self.rows + self.table.first_row
            blocks += [self._codes(batch.column(self.id_column)), np.arange(first, first + batch.num_rows)]
        self.rows += batch.num_rows
        return blocks

    def _checked(self, batch: pa.RecordBatch, part: Part) -> NDArray[Any]:
        """Values in the type they are stored in. NaN is kept, since another --nan may ask for the same file."""
        block = np.stack([self._numbers(batch, name) for name in part.names], axis=1)

        def where(row: int, column: int) -> str:
            return self._place(row, part.names[column])

        checked = source.as_values(block, part.range, "drop", where)
        # in float32, a number that is too large for it is infinite
        bad = ~np.isfinite(checked) if part.range is None else (checked == source.MISSING)[:, None]
        if part.file not in self.nan and bad.any():
            row, column = (int(place) for place in np.argwhere(bad)[0])
            self.nan[part.file] = (where(row, column), str(block[row, column]))
        return checked

    def _numbers(self, batch: pa.RecordBatch, name: str) -> NDArray[np.float64]:
        """A column in float64, nulls as NaN."""
        column = batch.column(name)
        try:
            numbers: NDArray[np.float64] = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        except pa.ArrowException:
            row = next((i for i, cell in enumerate(column) if not _is_number(str(cell.as_py()))), 0)
            raise _not_a_number(self._place(row, name), str(column[row].as_py())) from None
        return numbers

    def _codes(self, column: pa.Array) -> Ints:
        """The number of each row's series."""
        coded = column.dictionary_encode(null_encoding="encode")
        places, ids = coded.indices.to_numpy(zero_copy_only=False), coded.dictionary.to_pylist()
        for empty in (None, ""):
            if empty in ids:
                raise MisuseError(
                    rule="Every row must say which series it belongs to",
                    got=f"{self._place(int((places == ids.index(empty)).argmax()), str(self.id_column))} is empty",
                    advice="Fill the column, or name another as --id.",
                )
        numbers = [self.series.setdefault(name, len(self.series)) for name in ids]
        codes: Ints = np.array(numbers, dtype=np.int64)[places]
        return codes

    def _place(self, row: int, column: str) -> str:
        return f"{self.table.path}, row {self.rows + row + self.table.first_row:,}, column {column!r}"


def _parse_error(table: Table, text: str) -> MisuseError:
    """The error for what pyarrow found wrong with a CSV, with file, row and column."""
    row = re.search(r"Row #(\d+)", text)
    place = f"{table.path}, row {int(row[1]):,}" if row else str(table.path)
    ragged = re.search(r"Expected (\d+) columns, got (\d+)", text)
    if ragged:
        return MisuseError(
            rule=f"Every row of a table must have as many columns as the first ({ragged[1]})",
            got=f"{place} has {ragged[2]}",
            advice="Correct that row.",
        )
    cell = re.search(r"column #(\d+):.*invalid value '(.*)'", text, re.DOTALL)
    if cell:
        return _not_a_number(f"{place}, column {table.names[int(cell[1])]!r}", cell[2])
    return _not_utf8(place) if "UTF8" in text else unreadable(table.path, ValueError(text))


def _not_utf8(place: object) -> MisuseError:
    return MisuseError(
        rule="A table must be text in UTF-8",
        got=f"{place} has other bytes (perhaps latin-1)",
        advice="Convert it: iconv -f latin1 -t utf-8 old.csv > new.csv.",
    )


def _not_a_number(place: str, value: str) -> MisuseError:
    return MisuseError(
        rule="Inputs and targets must be numbers",
        got=f"{place} is {value[:40]!r}",
        advice="Correct it, or name the columns that are numbers as --columns and --target.",
    )
