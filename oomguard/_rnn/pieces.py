"""Pieces of the sequences of one recurrent call: where they are cut, and how their tokens are read and written."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DENSE_STEPS, PACKED_STEPS = 4, 16
"""On the CPU: steps with an equal number of rows that get a call of their own; shorter runs share packed calls of at
most so many steps, whose backward pass takes time that grows with their square. (LSTM and GRU 128, 16 and 64 rows of up
to 200 steps: within 6 % of the fastest of five settings; the plain packed call takes 1.2 to 4.8 times as long.)"""


class Piece(NamedTuple):
    """Consecutive steps of the sequences of a call."""

    start: int  # the first step
    steps: int
    first: int  # the first token
    tokens: int
    sizes: tuple[int, ...]  # the number of sequences that are still running, at each step

    @property
    def rows(self) -> int:
        """Sequences that have a token in the piece."""
        return self.sizes[0]

    @property
    def dense(self) -> bool:
        """Whether all sequences of the piece have all of its steps."""
        return self.sizes[0] == self.sizes[-1]


def cut(sizes: Sequence[int], segments: int, *, dense: bool) -> list[Piece]:
    """Cut a call into pieces of about equal numbers of tokens. `sizes`: sequences still running at each step.

    With `dense` (the CPU, whose kernels for packed sequences are slow), pieces also end where a sequence ends. If
    pieces cannot be equal, the first is shorter: it is differentiated last, in blocks that longer pieces have left.
    """
    rows = np.asarray(sizes, dtype=np.int64)
    offsets = np.concatenate([[0], rows.cumsum()])
    equal, tokens = rows[0] == rows[-1], int(offsets[-1])
    size = -(-len(rows) // segments) * int(rows[0]) if equal else -(-tokens // segments)
    targets = np.arange(tokens, 0, -size)[::-1]
    ends = np.unique(np.searchsorted(offsets, targets))
    spans = [*itertools.pairwise([0, *ends.tolist()])]
    if dense and not equal:
        spans = [shorter for start, end in spans for shorter in _dense_spans(rows, start, end)]
    return [
        Piece(start, end - start, int(offsets[start]), int(offsets[end] - offsets[start]), tuple(sizes[start:end]))
        for start, end in spans
    ]


def _dense_spans(rows: NDArray[np.int64], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield long runs of steps with an equal number of rows, and the short runs between them, gathered."""
    changes = np.flatnonzero(np.diff(rows[start:end])) + 1 + start
    gathered = start
    for first, last in itertools.pairwise([start, *changes.tolist(), end]):
        long = last - first >= DENSE_STEPS
        if first > gathered and (long or last - gathered > PACKED_STEPS):
            yield gathered, first
            gathered = first
        if long:
            yield first, last
            gathered = last
    if gathered < end:
        yield gathered, end


class Order(NamedTuple):
    """The order in which one direction goes through the tokens of a call.

    Padded tensors are steps x rows x features, packed ones tokens x features. The second direction counts its steps
    from the end of each sequence, so that its pieces are those of the first.
    """

    packed: bool
    steps: int
    backwards: bool = False
    reversal: Tensor | None = None  # the tokens of packed sequences in the order of the second direction

    def read(self, whole: Tensor, piece: Piece) -> Tensor:
        """Return one piece of a tensor of all tokens: steps x rows x features if it is dense."""
        if not self.packed:
            part = whole[self._span(piece)]
            return part.flip(0) if self.backwards else part
        if self.reversal is None:
            part = whole[piece.first : piece.first + piece.tokens]
        else:
            part = whole.index_select(0, self._tokens(self.reversal, piece))
        return part.view(piece.steps, piece.rows, -1) if piece.dense else part

    def add(self, whole: Tensor, piece: Piece, values: Tensor) -> None:
        """Add the values of one piece to a tensor of all tokens."""
        if not self.packed:
            whole[self._span(piece)] += values.flip(0) if self.backwards else values
        elif self.reversal is None:
            whole[piece.first : piece.first + piece.tokens] += values.flatten(0, -2)
        else:
            whole.index_add_(0, self._tokens(self.reversal, piece), values.flatten(0, -2).to(whole.dtype))

    def turned(self, whole: Tensor) -> Tensor:
        """Return a tensor of all tokens in this order. Applied twice, it returns the tensor itself."""
        if not self.backwards:
            return whole
        return whole.flip(0) if self.reversal is None else whole.index_select(0, self.reversal)

    def _span(self, piece: Piece) -> slice:
        start = self.steps - piece.start - piece.steps if self.backwards else piece.start
        return slice(start, start + piece.steps)

    @staticmethod
    def _tokens(index: Tensor, piece: Piece) -> Tensor:
        return index[piece.first : piece.first + piece.tokens]


def reversed_tokens(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return the tokens of packed sequences in an order in which every sequence runs backwards.

    >>> reversed_tokens([2, 2, 1], torch.device("cpu")).tolist()  # sequences of 3 steps and 2 steps
    [4, 3, 2, 1, 0]
    """
    rows = np.asarray(sizes, dtype=np.int64)
    offsets = np.concatenate([[0], rows.cumsum()[:-1]])
    lengths = np.searchsorted(-rows, -np.arange(rows[0]), side="left")
    row = np.arange(rows.sum()) - np.repeat(offsets, rows)
    step = np.repeat(np.arange(len(rows)), rows)
    return torch.from_numpy(offsets[lengths[row] - 1 - step] + row).to(device)
