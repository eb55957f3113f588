"""Values as the model takes them: checked, in the right type, with the place of what is wrong."""

from collections.abc import Callable
from typing import Any

import numpy as np

from oomguard.data.options import Nan
from oomguard.data.source import Array
from oomguard.errors import MisuseError
from oomguard.spec import Spec

Where = Callable[[int, int], str]
"""The place of a value, from its row in the block and its column."""


def target_width(spec: Spec) -> int:
    """Numbers of one target: one class, or all that the head gives."""
    return 1 if spec.loss == "cross-entropy" else spec.classes


def as_inputs(spec: Spec, block: Array, nan: Nan, where: Where) -> Array:
    """Steps x features in float32, or tokens in int64; always a copy."""
    if spec.vocab is not None:
        return as_indices(block, spec.vocab, ("A token", "--vocab"), where)
    return as_numbers(block, nan, where)


def as_targets(spec: Spec, block: Array, nan: Nan, where: Where) -> Array:
    """Steps x outputs in float32, or classes in int64; always a copy."""
    if spec.loss == "cross-entropy":
        return as_indices(block, spec.classes, ("A target", "--outputs"), where)
    return as_numbers(block, nan, where)


def as_numbers(block: Array, nan: Nan, where: Where) -> Array:
    """Float32, two axes. What is not finite is an error, or 0; to drop it is the business of whoever cuts sequences."""
    with np.errstate(over="ignore"):
        found = np.array(block, dtype=np.float32, order="C").reshape(len(block), -1)
    if nan == "drop":
        return found
    if found.size and not np.isfinite([found.min(), found.max()]).all():  # without a mask of its size, if all is well
        bad = ~np.isfinite(found)
        if nan == "error":
            row, column = (int(one) for one in np.argwhere(bad)[0])
            raise not_finite(where(row, column), found[row, column])
        found[bad] = 0
    return found


def as_indices(block: Array, below: int, named: tuple[str, str], where: Where) -> Array:
    """Int64, one axis, each from 0 to `below` - 1."""
    flat = np.asarray(block).reshape(len(block))
    if flat.dtype.kind in "iub" and (not flat.size or (flat.min() >= 0 and flat.max() < below)):
        return flat.astype(np.int64)
    with np.errstate(invalid="ignore"):  # NaN has no whole number; it is found below
        found = flat.astype(np.int64)
        bad = (found != flat) | (found < 0) | (found >= below)
    if bad.any():
        row = int(bad.argmax())
        what, option = named
        raise MisuseError(
            rule=f"{what} must be a whole number from 0 to {below - 1:,}",
            got=f"{where(row, 0)} is {flat[row]}",
            advice=f"Correct the data, or change {option}.",
        )
    return found


def not_finite(place: str, value: Any) -> MisuseError:
    """The error for a NaN."""
    return MisuseError(
        rule="Numbers in the data must be finite",
        got=f"{place} is {value}",
        advice="Mend it, or say --nan drop (leave such sequences out) or --nan zero.",
    )
