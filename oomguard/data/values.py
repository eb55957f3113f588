"""Values as the model takes them: checked, in the right type, with the place of what is wrong."""

from collections.abc import Callable
from math import isfinite
from typing import Any

import numpy as np

from oomguard.data.options import Nan
from oomguard.data.source import Array
from oomguard.errors import MisuseError
from oomguard.spec import Spec

MISSING = np.iinfo(np.int64).min
"""What stands for a NaN among tokens and classes, which have none."""

Where = Callable[[int, int], str]
"""The place of a value, from its row in the block and its column."""


def target_width(spec: Spec) -> int:
    """Numbers of one target: one class, or all that the head gives."""
    return 1 if spec.loss == "cross-entropy" else spec.classes


def as_inputs(spec: Spec, block: Array, nan: Nan, where: Where) -> Array:
    """Steps x features in float32, or tokens in int64; always a copy."""
    if spec.vocab is not None:
        return as_indices(block, spec.vocab, ("A token", "--vocab"), where, nan)
    return as_numbers(block, nan, where)


def as_targets(spec: Spec, block: Array, nan: Nan, where: Where) -> Array:
    """Steps x outputs in float32, or classes in int64; always a copy."""
    if spec.loss == "cross-entropy":
        return as_indices(block, spec.classes, ("A target", "--outputs"), where, nan)
    return as_numbers(block, nan, where)


def as_numbers(block: Array, nan: Nan, where: Where) -> Array:
    """Float32, two axes. What is not finite is an error, or 0; to drop it is the business of whoever cuts sequences."""
    found = _as_floats(block)
    if nan == "drop" or not found.size:
        return found
    if not isfinite(np.vdot(found, found)):  # the quickest look, without a mask; squares of large numbers overflow too
        bad = ~np.isfinite(found)
        if nan == "error" and bad.any():
            row, column = (int(one) for one in np.argwhere(bad)[0])
            raise not_finite(where(row, column), found[row, column])
        found[bad] = 0
    return found


def _as_floats(block: Array) -> Array:
    """A copy in float32, two axes. What is too large for it becomes infinite, and is found as that."""
    if block.dtype == np.float32:  # the usual case, for each of many short sequences: no context is entered for it
        return np.array(block, order="C").reshape(len(block), -1)
    with np.errstate(over="ignore"):
        return np.array(block, dtype=np.float32, order="C").reshape(len(block), -1)


def as_indices(block: Array, below: int, named: tuple[str, str], where: Where, nan: Nan = "error") -> Array:
    """Int64, one axis, each from 0 to `below` - 1. What is not finite is an error, also for zero: that is a token too.

    To drop it is the business of whoever cuts sequences, who finds it as `MISSING`.
    """
    flat = np.asarray(block).reshape(len(block))
    if flat.dtype.kind in "iub" and (not flat.size or (flat.min() >= 0 and flat.max() < below)):
        return flat.astype(np.int64)
    with np.errstate(invalid="ignore"):  # NaN has no whole number; it is found below
        found = flat.astype(np.int64)
        bad = (found != flat) | (found < 0) | (found >= below)
    if nan == "drop":
        gone = ~np.isfinite(flat)
        found[gone], bad = MISSING, bad & ~gone
    if bad.any():
        row = int(bad.argmax())
        raise no_index(where(row, 0), flat[row], below, named)
    return found


def no_index(place: str, value: Any, below: int, named: tuple[str, str]) -> MisuseError:
    """The error for what is no token or class."""
    what, option = named
    drop = "Mend it, or say --nan drop (leave such sequences out); --nan zero is for numbers alone."
    return MisuseError(
        rule=f"{what} must be a whole number from 0 to {below - 1:,}",
        got=f"{place} is {value}",
        advice=f"Correct the data, or change {option}." if np.isfinite(float(value)) else drop,
    )


def not_finite(place: str, value: Any) -> MisuseError:
    """The error for a NaN."""
    return MisuseError(
        rule="Numbers in the data must be finite",
        got=f"{place} is {value}",
        advice="Mend it, or say --nan drop (leave such sequences out) or --nan zero.",
    )
