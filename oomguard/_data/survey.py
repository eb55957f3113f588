"""The survey of a table: whether each column holds numbers, times or text, and the values of text."""

from pathlib import Path

import pyarrow as pa
from pyarrow import compute as pc

from oomguard._data.columns import MAX_VALUES, Column, Kind
from oomguard._data.parse import Table, parse_error, read_batches, read_header, read_schema, time_type


def survey(path: Path, kind: str, id_column: str | None, classes: tuple[str, ...]) -> list[Column]:
    """All columns but that of the ids. The table is read once if it has text, or for the largest of `classes`."""
    table = read_header(path, kind)
    try:
        kinds = {field.name: _kind(field.type) for field in read_schema(table) if _is_own(field.name, id_column)}
    except pa.ArrowException as error:
        raise parse_error(table, str(error)) from None
    values: dict[str, set[str]] = {name: set() for name, known in kinds.items() if known == "text"}
    largest = {name: 0.0 for name in classes if kinds.get(name) == "number"}
    if values or largest:
        _read(table, values, largest)
    return [
        Column(name, known, _sorted(values.get(name, set())), largest.get(name, 0.0)) for name, known in kinds.items()
    ]


def _is_own(name: str, id_column: str | None) -> bool:
    """Whether a column is neither the id nor an index without a name that pandas has stored."""
    return name != id_column and not name.startswith("__index_level_")


def _kind(kind: pa.DataType) -> Kind:
    types = pa.types
    if time_type(kind) is not None:
        return "time"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_null(kind):
        return "number"
    if types.is_dictionary(kind):
        return _kind(kind.value_type)
    return "text" if types.is_boolean(kind) or types.is_string(kind) or types.is_large_string(kind) else "other"


def _sorted(values: set[str]) -> tuple[str, ...]:
    return () if len(values) > MAX_VALUES else tuple(sorted(values))


def _read(table: Table, values: dict[str, set[str]], largest: dict[str, float]) -> None:
    """Collect the different values of text columns and the largest numbers of others."""
    types = dict.fromkeys(values, pa.string()) | dict.fromkeys(largest, pa.float64())
    try:
        for batch in read_batches(table, types):
            for name, known in values.items():
                if len(known) <= MAX_VALUES:
                    known.update(pc.unique(batch.column(name).cast(pa.string()).fill_null("")).to_pylist())
            for name in largest:
                largest[name] = max(largest[name], pc.max(batch.column(name)).as_py() or 0.0)
    except pa.ArrowException as error:
        raise parse_error(table, str(error)) from None
