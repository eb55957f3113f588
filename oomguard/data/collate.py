"""Sequences side by side in one microbatch, padded to the longest of them."""

from collections.abc import Iterable

import numpy as np
import torch

from oomguard.bptt import Microbatch
from oomguard.bptt.run import IGNORED
from oomguard.data.source import Ints, Pair
from oomguard.spec import Spec


def collate(spec: Spec, pairs: Iterable[Pair], lengths: Ints) -> Microbatch:
    """A microbatch of these sequences. They may come one by one: none is kept.

    Padding is 0 in the inputs and in targets that are numbers, and `IGNORED` in classes. Lengths are there only if
    there is padding, or the kernels read packed sequences.

    >>> spec = Spec(cell="gru", seq=5, features=1, batch=2)
    >>> pairs = [(np.ones((n, 1), np.float32), np.ones((n, 1), np.float32)) for n in (3, 2)]
    >>> collate(spec, pairs, np.array([3, 2])).inputs.squeeze(-1).tolist()
    [[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]
    """
    rows, steps = len(lengths), int(lengths.max())
    inputs, targets = _empty(spec, rows, steps)
    padding = IGNORED if spec.loss == "cross-entropy" else 0
    for row, (one, wanted) in enumerate(pairs):
        inputs[row, : len(one)], inputs[row, len(one) :] = one, 0
        if spec.head == "per-step":
            targets[row, : len(wanted)], targets[row, len(wanted) :] = wanted, padding
        else:
            targets[row] = wanted
    padded = bool((lengths != steps).any())
    kept = torch.from_numpy(np.array(lengths, dtype=np.int64)) if padded or spec.packs else None
    first = spec.batch_first
    by_step = spec.head == "per-step" and not first
    return Microbatch(
        torch.from_numpy(inputs if first else inputs.swapaxes(0, 1)),
        torch.from_numpy(targets.swapaxes(0, 1) if by_step else targets),
        kept,
    )


def _empty(spec: Spec, rows: int, steps: int) -> Pair:
    """Room for them, sequences first; what lies in memory is as the spec has it, time first or not."""
    wide = () if spec.vocab is not None else (spec.inputs,)
    classes = spec.loss == "cross-entropy"
    out = () if classes else (spec.classes,)
    inputs = _laid_out(spec, (rows, steps, *wide), np.int64 if spec.vocab is not None else np.float32)
    kind = np.int64 if classes else np.float32
    if spec.head == "last-step":
        return inputs, np.empty((rows, *out), dtype=kind)
    return inputs, _laid_out(spec, (rows, steps, *out), kind)


def _laid_out(spec: Spec, shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
    if spec.batch_first:
        return np.empty(shape, dtype=dtype)
    return np.empty((shape[1], shape[0], *shape[2:]), dtype=dtype).swapaxes(0, 1)
