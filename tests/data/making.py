"""Small data, and what the tests ask of it."""

from pathlib import Path
from typing import Any

import numpy as np

from oomguard._data.rows import Source
from oomguard._data.source import Array
from oomguard._spec.spec import Spec


def spec(**changes: Any) -> Spec:
    """Two features, one number for each step."""
    fields: dict[str, Any] = {"cell": "gru", "seq": 4, "features": 2, "hidden": 4, "batch": 4}
    return Spec(**fields | changes)


def tokens(**changes: Any) -> Spec:
    """A vocabulary of ten, predicting the next."""
    fields: dict[str, Any] = {"cell": "gru", "seq": 4, "vocab": 10, "hidden": 4, "batch": 4}
    return Spec(**fields | changes)


def saved(path: Path, array: Any) -> Path:
    np.save(path, np.asarray(array))
    return path


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def numbers(*shape: int) -> Array:
    """0, 1, 2, ... as float32, so that a value says where it is from."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def inputs_of(source: Source) -> list[Any]:
    return [source[index][0].tolist() for index in range(len(source))]


def targets_of(source: Source) -> list[Any]:
    return [source[index][1].tolist() for index in range(len(source))]
