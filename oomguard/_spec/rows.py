"""SpecRows: specs that differ in number and length of their sequences alone, estimated at once."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from oomguard._spec.spec import Spec

Ints = NDArray[np.int64]


class SpecRows(Spec, frozen=True, kw_only=True):
    """A spec with a length and a batch for each candidate, in the place of one for all.

    It is made of specs that have been checked, and is not checked again. Its numbers are arrays, which the arithmetic
    takes wherever it takes numbers.
    """

    batch: Any = 32
    """Sequences per optimizer step, a number for each candidate."""
    row_steps: Ints
    """Time steps, a number for each candidate."""

    def __post_init__(self) -> None:
        pass

    @property
    def steps(self) -> Any:
        """Time steps, a number for each candidate."""
        return self.row_steps


def with_rows(spec: Spec, steps: Ints, batch: Ints) -> SpecRows:
    """The spec with these lengths and batches, one of each for every candidate."""
    fields = {name: getattr(spec, name) for name in Spec.__struct_fields__}
    return SpecRows(**fields | {"batch": batch}, row_steps=steps)


def pick(spec: Spec, rows: Ints) -> Spec:
    """The spec of some candidates."""
    if not isinstance(spec, SpecRows):
        return spec
    return msgspec.structs.replace(spec, row_steps=spec.row_steps[rows], batch=spec.batch[rows])
