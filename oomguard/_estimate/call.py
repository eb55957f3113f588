"""Call and Footprint: the arguments of a recurrent kernel that matter for memory, and the bytes that it needs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oomguard._spec.candidate import Candidate, Candidates

Ints = NDArray[np.int64]
Count = int | Ints  # an int, or an array of them: the arithmetic is written once for one candidate and for many
Flag = bool | NDArray[np.bool_]  # a truth value, or an array of them
Knobs = Candidate | Candidates
"""One candidate, or many whose other knobs than numbers are equal: the arithmetic reads both alike."""

GATES = {"rnn": 1, "gru": 3, "lstm": 4}  # gates per cell: rows of the weight matrices in units of the hidden size


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the recurrent kernel. Counts may be NumPy arrays; widths of the model are ints.

    `hidden` and `projection` are sizes of one direction.
    """

    cell: str
    steps: Count
    rows: Count  # sequences in the call (the microbatch)
    tokens: Count  # sum over the time steps of the sequences still running: steps x rows, fewer when packed
    inputs: int  # features that the first layer reads
    hidden: int
    projection: int | None = None
    layers: int = 1  # layers inside this one call
    directions: int = 1
    element_bytes: Count = 4
    packed: bool = False
    input_gradient: bool = False  # whether anything below wants the gradient of the input

    @property
    def output(self) -> int:
        """Features that one direction gives out."""
        return self.projection or self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The bytes that one call needs, and when it needs them. Every engine returns one."""

    kept: Count  # made by forward and needed by backward; given back when the call's backward ends
    keeps_output: bool  # whether the output is part of `kept`; otherwise whoever reads it keeps it
    heap: Count = 0
    """Bytes kept like `kept`, but in the C heap, whose high-water mark stays resident until the step ends."""
    forward: Count
    """Needed by forward while it runs, beside what is kept and the output."""
    backward: Count
    """Needed by backward while it runs, beside the gradient of the output: the input's gradient included."""
    weight_gradients: Count
    """The gradients of the call's weights that backward leaves, and the copies that it makes on the way."""
    inference: Count  # needed by forward while it runs if no gradient is wanted, beside input and output
    scratch: Count = 0  # the largest block that forward and backward ask for while they run
    block: Count = 0  # the block of one direction with what is kept beside the output; 0 if that is in many small ones


def where(condition: Flag, yes: Count, no: Count) -> Count:
    """`yes` where the condition holds, else `no`: ints for a plain condition, an array for an array."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def maximum(first: Count, *others: Count) -> Count:
    """The largest, element by element: an int if all are ints."""
    for other in others:
        arrays = isinstance(first, np.ndarray) or isinstance(other, np.ndarray)
        first = np.maximum(first, other) if arrays else max(first, other)
    return first


def minimum(first: Count, second: Count) -> Count:
    """The smaller, element by element: an int if both are ints."""
    arrays = isinstance(first, np.ndarray) or isinstance(second, np.ndarray)
    return np.minimum(first, second) if arrays else min(first, second)


def round_up(size: Count, multiple: int) -> Count:
    """The next multiple of a power of two. A mask, because arrays of a million rows are rounded often."""
    return (size + (multiple - 1)) & -multiple
