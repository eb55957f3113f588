"""Tables in memory: DataFrames of pandas and Polars, and dicts of arrays, written once to Parquet files."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from oomguard._core.errors import MisuseError
from oomguard._core.system import process_directory
from oomguard._data.options import DataOptions
from oomguard._data.rows import as_array

SERIES = "series"  # the column that says which series a row belongs to, in the table of a dict of series


def is_frame(data: Any) -> bool:
    """Whether the data is a table in memory."""
    return isinstance(data, Mapping) or (hasattr(data, "columns") and hasattr(data, "dtypes"))


def write_frame(data: Any) -> Path:
    """The file of a table, which goes when this process ends; the same file for the same content."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        if isinstance(data, Mapping):
            data = _columns(_arrays(data))
        elif hasattr(data, "reset_index") and type(data.index).__name__ != "RangeIndex":
            data = data.reset_index()  # dates are often the index
        table = uniform(pa.table(data))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise _not_a_table(data, error) from None
    written = process_directory() / "new.parquet"
    parquet.write_table(table, written)
    with written.open("rb") as file:
        path = process_directory() / f"{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}.parquet"
    if path.exists():  # with what was converted of it
        written.unlink()
    else:
        os.replace(written, path)
    return path


def _not_a_table(data: Any, error: Exception) -> MisuseError:
    return MisuseError(
        rule="A table must have columns of one length, with names",
        got=f"this {type(data).__name__} does not ({error})",
        advice="Give an array of shape (sequences, steps, features), or a DataFrame.",
    )


@contextmanager
def table_errors(path: Path) -> Iterator[None]:
    """Let errors about the file of a table in memory name the table: the user knows no such file."""
    try:
        yield
    except MisuseError as error:
        beats = (error.rule, error.got, error.advice)
        rule, got, advice = (text.replace(str(path), "the table") for text in beats)
        raise MisuseError(rule=rule, got=got, advice=advice) from None


def frame_defaults(data: Any, fields: dict[str, Any], options: DataOptions) -> tuple[dict[str, Any], DataOptions]:
    """Fields and options for a dict of series: the id of its rows, and all columns of an array that is named."""
    arrays = _arrays(data) if isinstance(data, Mapping) else {}
    shape = _series_and_steps(arrays)
    if shape is None:
        return fields, options
    named = {
        name: None if (given := getattr(options, name)) is None else tuple(p for n in given for p in _parts(n, arrays))
        for name in ("columns", "target")
    }
    if any(name in arrays and _is_per_series(arrays[name], shape[1]) for name in options.target or ()):
        fields = fields | {"head": fields.get("head") or "last-step"}
    return fields, msgspec.structs.replace(options, id=options.id or SERIES, **named)


def _arrays(data: Mapping[Any, Any]) -> dict[str, NDArray[Any]]:
    try:
        return {str(name): as_array(column) for name, column in data.items()}
    except ValueError as error:  # lists of several lengths
        raise _not_a_table(data, error) from None


def _series_and_steps(arrays: Mapping[str, NDArray[Any]]) -> tuple[int, int] | None:
    """The numbers of series and of steps if arrays hold series; None if each is a column."""
    shapes = (array.shape for array in arrays.values() if array.ndim > 1 and not _is_per_series(array, 2))
    return next(((shape[0], shape[1]) for shape in shapes), None)


def _is_per_series(array: NDArray[Any], steps: int) -> bool:
    """Whether an array has one value for each series, not for each step."""
    return array.ndim == 1 or (array.ndim == 2 and array.shape[1] == 1 < steps)


def _parts(name: str, arrays: Mapping[str, NDArray[Any]]) -> list[str]:
    """The columns of an array: `x` for one number per step, and `x.0`, `x.1`, ... for several."""
    array = arrays.get(name)
    if array is None or array.ndim < 3 or array.shape[2] == 1:
        return [name]
    return [f"{name}.{number}" for number in range(array.shape[2])]


def _columns(arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The columns of a dict of arrays. Arrays of N series with T steps become N × T rows, with the number of each."""
    shape = _series_and_steps(arrays)
    if shape is None:
        return {name: array[:, 0] if array.ndim == 2 else array for name, array in arrays.items()}
    series, steps = shape
    columns: dict[str, NDArray[Any]] = {SERIES: np.repeat(np.arange(series), steps)}
    for name, array in arrays.items():
        if len(array) == series and _is_per_series(array, steps):
            columns[name] = np.repeat(array.reshape(-1), steps)
        elif array.shape[:2] == (series, steps) and array.ndim < 4:
            rows = array.reshape(series * steps, *array.shape[2:] or (1,))
            columns |= {part: rows[:, place] for place, part in enumerate(_parts(name, arrays))}
        else:
            sizes = " x ".join(map(str, array.shape))
            raise ValueError(f"{name} is {sizes}, and others have {series:,} series of {steps:,} steps")
    return columns


def _as_text(column: Any) -> Any:
    """A column of any kind of text, with or without a dictionary, as plain strings."""
    import pyarrow as pa

    chunks = [
        pa.DictionaryArray.from_arrays(chunk.indices, chunk.dictionary.cast(pa.string()))
        if pa.types.is_dictionary(chunk.type)
        else chunk
        for chunk in column.chunks
    ]
    return pa.chunked_array(chunks, type=None if chunks else pa.string()).cast(pa.string())


def uniform(table: Any) -> Any:
    """The table with text of one kind, and with times in place of text that holds nothing but dates, as in a CSV."""
    import pyarrow as pa

    for place, field in enumerate(table.schema):
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            column = _as_text(table.column(place))
            with suppress(pa.ArrowInvalid):
                column = column.cast(pa.timestamp("us"))
            table = table.set_column(place, field.name, column)
    return table
