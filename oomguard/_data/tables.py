"""CSV and Parquet files: pyarrow reads them once, some rows at a time, into arrays that are mapped from then on.

Training reads sequences in random order, and would have to parse a CSV, or decode a row group of Parquet, for each.
"""

import json
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute as pc

from oomguard._core.errors import MisuseError
from oomguard._data import source
from oomguard._data.options import DataOptions, check_column, choose_columns
from oomguard._data.parse import (
    Table,
    is_number,
    not_a_number,
    parse_error,
    read_batches,
    read_header,
    read_schema,
    time_type,
)
from oomguard._data.rows import Arrays
from oomguard._data.series import Times, fill_forward, group_rows, sort_by_time
from oomguard._data.source import Appended, Ints, Mapped, cached, fingerprint, no_data
from oomguard._spec.spec import Spec


class Part(NamedTuple):
    """Columns that are stored together as one array."""

    file: str
    names: list[str]  # of columns, and of indicators such as `weather=rain`
    range: source.Index | None  # the range of tokens or classes; None: the columns are numbers


class Rows(NamedTuple):
    """How the rows of a table are read."""

    id: str | None
    time: str | None
    fill: bool  # whether missing inputs are filled with the last value before
    categories: dict[str, tuple[str, ...]]  # values of the text columns that are read

    @property
    def moved(self) -> bool:
        """Whether rows may come in another order than in the file."""
        return self.id is not None or self.time is not None


def open_table(path: Path, kind: str, spec: Spec, options: DataOptions) -> Arrays:
    """A table as a store. The first time, all of it is read."""
    table = read_header(path, kind)
    for name in (options.id, options.time):
        if name is not None:
            check_column(name, table.names, path)
    names, options = _with_indicators(table, spec, options)
    input_names, target_names, ahead = choose_columns(names, spec, options, path)
    parts = _layout(input_names, target_names, spec, apart=options.fill == "forward" and not options.inputs_only)
    wanted = {column_of(name, options.categories) for part in parts for name in part.names}
    categories = {name: values for name, values in options.categories.items() if name in wanted}
    rows = Rows(options.id, options.time, options.fill == "forward", categories)
    settings = {"parts": parts, "rows": rows}
    home, about = cached(path, options.cache, settings, _Reader(table, parts, rows).convert)
    for part in parts:
        refused = options.nan == "error" or (options.nan == "zero" and part.range is not None)
        if refused and options.fill is None and part.file in about["nan"]:
            place, value = about["nan"][part.file]
            words = "empty or NaN" if value == "nan" else value  # an empty cell is read as NaN, too
            raise source.wrong_value(place, value, part.range, words)
    inputs, targets = _map(home, parts[0], input_names), _map(home, parts[-1], target_names)
    facts = {"kind": kind, "path": str(path), "bytes": path.stat().st_size, "rows": len(inputs.array)}
    facts |= {"predicts": target_names, "content": fingerprint(path)}
    return Arrays(
        inputs=inputs,
        targets=inputs if (targets.path, targets.columns) == (inputs.path, inputs.columns) else targets,
        borders=np.load(home / "borders.npy"),
        long=options.id is None,
        first_row=table.first_row,
        ids=home if rows.moved else None,
        fill=options.fill,
        ahead=ahead,
        checked=options.fill is None,
        about=facts | ({"times": about["times"]} if "times" in about else {}),
    )


def _with_indicators(table: Table, spec: Spec, options: DataOptions) -> tuple[list[str], DataOptions]:
    """The columns that can be inputs or targets, and the options, with an indicator for each value of a text column."""
    kept = {*(options.target or ()), *(options.categories if spec.vocab is not None else ())}
    own = {
        name: tuple(f"{name}={value}" for value in values)
        for name, values in options.categories.items()
        if name not in kept
    }
    names = [name for name in table.names if name not in (options.id, options.time)]
    columns = options.columns
    if columns is not None:
        columns = tuple(part for name in columns for part in own.get(name, (name,)))
    spread = [part for name in names for part in own.get(name, (name,))]
    return spread, msgspec.structs.replace(options, columns=columns)


def column_of(name: str, categories: Collection[str]) -> str:
    """The column of the table that a stored column comes from: that of an indicator is before its `=`."""
    if name in categories:
        return name
    return next((text for text in categories if name.startswith(f"{text}=")), name)


def _layout(inputs: list[str], targets: list[str], spec: Spec, *, apart: bool) -> list[Part]:
    """Inputs and targets share an array if both are numbers, or the same column of tokens, unless they stay apart."""
    tokens, classes = source.indices(spec)
    if tokens is None and classes is None and not apart:
        return [Part("numbers.npy", list(dict.fromkeys([*inputs, *targets])), None)]
    if tokens is not None and classes is not None and inputs == targets and not apart:
        return [Part("tokens.npy", inputs, tokens)]
    return [Part("inputs.npy", inputs, tokens), Part("targets.npy", targets, classes)]


def _map(home: Path, part: Part, names: list[str]) -> Mapped:
    """Some columns of an array. Tokens and classes have no axis for columns."""
    mapped = Mapped.npy(home / part.file)
    if part.range is not None:
        return mapped
    place = {name: number for number, name in enumerate(part.names)}
    return replace(mapped, columns=tuple(place[name] for name in names))


class _Reader:
    """Turns a table into arrays, some rows at a time. Of the ids, each is in memory once."""

    def __init__(self, table: Table, parts: list[Part], how: Rows) -> None:
        self.table, self.parts, self.how, self.rows = table, parts, how, 0
        self.times: Times | None = None
        self.nan: dict[str, tuple[str, str]] = {}  # place and value of the first NaN of each array
        self.series: dict[Any, int] = {}  # number of each series by its id, in the order in which they come up

    def convert(self, home: Path) -> dict[str, Any]:
        """Write the arrays; returns the place and the value of the first NaN of each, if it has one."""
        how, types = self.how, self._types()
        forms: list[tuple[Any, ...]]
        forms = [(part.file, len(part.names) if part.range is None else None) for part in self.parts]
        forms += [("places.npy", None)] if how.moved else []
        forms += [] if how.id is None else [("codes.npy", None)]
        forms += [] if how.time is None else [("times.npy", None, np.float64)]
        with ExitStack() as stack:
            arrays = [stack.enter_context(Appended(home / name, *form)) for name, *form in forms]
            try:
                for batch in read_batches(self.table, types):
                    for array, block in zip(arrays, self._blocks(batch), strict=True):
                        array.append(block)
            except pa.ArrowException as error:
                raise parse_error(self.table, str(error)) from None
        if not self.rows:
            raise no_data(self.table.path)
        borders = self._arrange(home, [home / name for name, *_ in forms if name != "codes.npy"])
        np.save(home / "borders.npy", borders)
        return {"nan": self.nan} | ({} if self.times is None else {"times": self.times._asdict()})

    def _types(self) -> dict[str, Any]:
        """The columns to read, and their types."""
        how = self.how
        names = dict.fromkeys(column_of(name, how.categories) for part in self.parts for name in part.names)
        types: dict[str, Any] = {name: pa.string() if name in how.categories else pa.float64() for name in names}
        if how.time is not None:
            types[how.time] = time_type(read_schema(self.table).field(how.time).type) or pa.float64()
        return types if how.id is None else types | {how.id: pa.string()}

    def _arrange(self, home: Path, paths: list[Path]) -> Ints:
        """Bring the rows of each series together, in the order of time, and fill them; returns the borders."""
        borders = np.array([0, self.rows], dtype=np.int64)
        if self.how.id is not None:
            borders = group_rows(paths, home / "codes.npy", len(self.series))
            (home / "ids.json").write_text(json.dumps([*self.series], default=str))
        if self.how.time is not None:
            self.times = sort_by_time(paths, home / "times.npy", borders)
        if self.how.fill and self.parts[0].range is None:
            fill_forward(home / self.parts[0].file, borders)
        return borders

    def _blocks(self, batch: pa.RecordBatch) -> list[NDArray[Any]]:
        """The checked rows of a batch for each array."""
        blocks: list[NDArray[Any]] = [self._checked(batch, part) for part in self.parts]
        if self.how.moved:
            first = self.rows + self.table.first_row
            blocks.append(np.arange(first, first + batch.num_rows))
        if self.how.id is not None:
            blocks.append(self._codes(batch.column(self.how.id)))
        if self.how.time is not None:
            blocks.append(self._seconds(batch.column(self.how.time)))
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
        text = column_of(name, self.how.categories)
        if text in self.how.categories:
            codes = self._category(batch, text)
            return codes if name == text else (codes == self.how.categories[text].index(name[len(text) + 1 :])) * 1.0
        column = batch.column(name)
        try:
            numbers: NDArray[np.float64] = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        except pa.ArrowException:
            row = next((i for i, cell in enumerate(column) if not is_number(str(cell.as_py()))), 0)
            raise not_a_number(self._place(row, name), str(column[row].as_py())) from None
        return numbers

    def _category(self, batch: pa.RecordBatch, name: str) -> NDArray[np.float64]:
        """The number of each value of a text column."""
        values, column = self.how.categories[name], batch.column(name).cast(pa.string()).fill_null("")
        codes: NDArray[np.float64] = (
            pc.index_in(column, pa.array(values)).cast(pa.float64()).to_numpy(zero_copy_only=False)
        )
        unknown = np.flatnonzero(np.isnan(codes))
        if len(unknown):
            row = int(unknown[0])
            raise MisuseError(
                rule=f"Text in column {name!r} must be one of the {len(values)} values that the plan knows",
                got=f"{self._place(row, name)} is {column[row].as_py()[:40]!r}",
                advice="Correct it, or make a plan for this data.",
            )
        return codes

    def _seconds(self, column: pa.Array) -> NDArray[np.float64]:
        """Times as numbers: those of dates in seconds."""
        if time_type(column.type) is not None:
            column = pc.divide(column.cast(pa.timestamp("us")).cast(pa.int64()).cast(pa.float64()), 1e6)
        try:
            times: NDArray[np.float64] = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        except pa.ArrowException:
            times = np.full(len(column), np.nan)
        bad = np.flatnonzero(np.isnan(times))
        if len(bad):
            place, cell = self._place(int(bad[0]), str(self.how.time)), column[int(bad[0])].as_py()
            raise MisuseError(
                rule="Every row must have a date, such as 2024-01-31, or a number as its time",
                got=f"{place} is {'empty' if cell is None else repr(cell)}",
                advice="Correct it, or name another column as --time.",
            )
        return times

    def _codes(self, column: pa.Array) -> Ints:
        """The number of each row's series."""
        coded = column.dictionary_encode(null_encoding="encode")
        places, ids = coded.indices.to_numpy(zero_copy_only=False), coded.dictionary.to_pylist()
        for empty in (None, ""):
            if empty in ids:
                raise MisuseError(
                    rule="Every row must say which series it belongs to",
                    got=f"{self._place(int((places == ids.index(empty)).argmax()), str(self.how.id))} is empty",
                    advice="Fill the column, or name another as --id.",
                )
        numbers = [self.series.setdefault(name, len(self.series)) for name in ids]
        codes: Ints = np.array(numbers, dtype=np.int64)[places]
        return codes

    def _place(self, row: int, column: str) -> str:
        return f"{self.table.path}, row {self.rows + row + self.table.first_row:,}, column {column!r}"
