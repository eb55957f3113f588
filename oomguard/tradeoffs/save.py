"""The table's file."""

import io
from pathlib import Path

import pandas as pd

from oomguard.files import write_file


def save_table(table: pd.DataFrame, path: Path) -> Path:
    """Write the table as .csv or .parquet.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save_table(pd.DataFrame({"microbatch": [1]}), Path(directory) / "table.csv").read_text()
    'microbatch\\n1\\n'
    """
    if path.suffix.lower() == ".csv":
        return write_file(path, table.to_csv(index=False).encode(), "A table")
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    return write_file(path, buffer.getvalue(), "A table")
