"""Tables in memory: DataFrames of pandas and Polars, and dicts of arrays, written once to Parquet files."""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from oomguard._core.errors import MisuseError
from oomguard._core.system import process_directory
from oomguard._data.rows import as_array


def is_frame(data: Any) -> bool:
    """Whether the data is a table in memory."""
    return isinstance(data, Mapping) or (hasattr(data, "columns") and hasattr(data, "dtypes"))


def write_frame(data: Any) -> Path:
    """The file of a table, which goes when this process ends; the same file for the same content."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        if isinstance(data, Mapping):
            data = {str(name): as_array(column) for name, column in data.items()}
        elif hasattr(data, "reset_index") and type(data.index).__name__ != "RangeIndex":
            data = data.reset_index()  # dates are often the index
        table = _with_dates(pa.table(data))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise MisuseError(
            rule="A table must have columns of one axis and one length, with names",
            got=f"this {type(data).__name__} does not ({error})",
            advice="Give an array of shape (sequences, steps, features), or a DataFrame.",
        ) from None
    written = process_directory() / "new.parquet"
    parquet.write_table(table, written)
    with written.open("rb") as file:
        path = process_directory() / f"{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}.parquet"
    if path.exists():  # with what was converted of it
        written.unlink()
    else:
        os.replace(written, path)
    return path


def _with_dates(table: Any) -> Any:
    """The table with times in place of text that holds nothing but dates, as in a CSV."""
    import pyarrow as pa

    for place, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            with suppress(pa.ArrowInvalid):
                table = table.set_column(place, field.name, table.column(place).cast(pa.timestamp("us")))
    return table
