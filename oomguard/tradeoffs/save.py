"""The table's file."""

import io
from pathlib import Path

import pandas as pd

from oomguard.errors import MisuseError
from oomguard.files import replace_content


def save_table(table: pd.DataFrame, path: Path) -> Path:
    """Write the table as .csv or .parquet.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save_table(pd.DataFrame({"microbatch": [1]}), Path(directory) / "table.csv").read_text()
    'microbatch\\n1\\n'
    """
    if path.suffix.lower() == ".csv":
        return write_file(path, table.to_csv(index=False).encode())
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    return write_file(path, buffer.getvalue())


def write_file(path: Path, content: bytes) -> Path:
    """Write a file: it is there whole, or as it was before.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     write_file(Path(directory) / "new" / "x.csv", b"1").read_bytes()
    b'1'
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_content(path, content)
    except OSError as error:
        raise MisuseError(
            rule="Figures are written to a file of yours",
            got=f"{path} cannot be written ({error.strerror})",
            advice="Give another path.",
        ) from None
    return path
