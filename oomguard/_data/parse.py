"""CSV and Parquet files, parsed some rows at a time, with the place of what cannot be read."""

import re
from collections import Counter
from collections.abc import Iterator
from csv import Error as CellError
from csv import reader as read_cells
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import csv, parquet

from oomguard._core.errors import MisuseError
from oomguard._data.source import no_data, unreadable

BLOCK_BYTES = 1 << 20  # bytes of a CSV that are parsed at a time: pyarrow 26 reads about 30 blocks ahead
ROWS_PER_BLOCK = 64  # rows of a block at least, if they are as long as the header: a row must fit into a block
HEADER_BYTES = 64 << 20  # longest header of a CSV: no more than this is read of a file without line ends
TIMES = (csv.ISO8601, "%Y/%m/%d", "%Y/%m/%d %H:%M:%S", "%d.%m.%Y", "%d.%m.%Y %H:%M:%S")
"""Forms of dates in a CSV that mean the same everywhere; 01/02/2024 does not."""
BLOCK_ROWS = 1 << 16  # rows of a Parquet file that are decoded at a time; a row group is never in memory whole


class Table(NamedTuple):
    """A table whose header was read."""

    path: Path
    names: list[str]
    first_row: int  # number of the first row of data, as an editor shows it: in a CSV the header is row 1
    delimiter: str | None = None  # what separates the columns of a CSV; None: the table is Parquet
    block_bytes: int = 0  # bytes of a CSV that are parsed at a time


def read_header(path: Path, kind: str) -> Table:
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
        raise not_utf8(path) from None
    delimiter = next((mark.decode() for mark in (b",", b"\t", b";") if mark in first), ",")
    cells = next(read_cells([header], delimiter=delimiter), [])
    has_names = not all(is_number(cell) for cell in cells)
    names = [cell.strip() if has_names else str(number) for number, cell in enumerate(cells)]
    return Table(path, names, 2 if has_names else 1, delimiter, max(BLOCK_BYTES, ROWS_PER_BLOCK * len(first)))


def is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def read_schema(table: Table) -> pa.Schema:
    """The types of all columns; those of a CSV are what its first block looks like."""
    if table.delimiter is None:
        return parquet.read_schema(table.path)
    with _open_csv(table, csv.ConvertOptions(timestamp_parsers=[*TIMES])) as reader:
        return reader.schema


def read_batches(table: Table, types: dict[str, Any]) -> Iterator[pa.RecordBatch]:
    """Some columns of a table, some rows at a time; `types` are those of a CSV."""
    wanted = list(types)
    if table.delimiter is None:
        # without a buffer, the columns of a row group would be read whole
        with parquet.ParquetFile(table.path, buffer_size=BLOCK_BYTES, pre_buffer=False) as file:
            yield from file.iter_batches(batch_size=BLOCK_ROWS, columns=wanted, use_threads=False)
        return
    options = csv.ConvertOptions(column_types=types, include_columns=wanted, timestamp_parsers=[*TIMES])
    with _open_csv(table, options) as reader:
        yield from reader


def _open_csv(table: Table, options: csv.ConvertOptions) -> Any:
    return csv.open_csv(
        table.path,
        # without threads, errors name the row
        csv.ReadOptions(
            use_threads=False, block_size=table.block_bytes, column_names=table.names, skip_rows=table.first_row - 1
        ),
        csv.ParseOptions(delimiter=table.delimiter),
        options,
    )


def time_type(kind: pa.DataType) -> pa.DataType | None:
    """The type in which times are read, with fractions of seconds; None: the column has no times."""
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return pa.timestamp("us", getattr(kind, "tz", None))
    return None


def parse_error(table: Table, text: str) -> MisuseError:
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
        return not_a_number(f"{place}, column {table.names[int(cell[1])]!r}", cell[2])
    return not_utf8(place) if "UTF8" in text else unreadable(table.path, ValueError(text))


def not_utf8(place: object) -> MisuseError:
    return MisuseError(
        rule="A table must be text in UTF-8",
        got=f"{place} has other bytes (perhaps latin-1)",
        advice="Convert it: iconv -f latin1 -t utf-8 old.csv > new.csv.",
    )


def not_a_number(place: str, value: str) -> MisuseError:
    return MisuseError(
        rule="Inputs and targets must be numbers",
        got=f"{place} is {value[:40]!r}",
        advice="Correct it, or name the columns that are numbers as --columns and --target.",
    )
