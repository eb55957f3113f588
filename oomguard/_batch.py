"""Nested batches: a walk over tuples, lists, dicts and dataclasses, and how a batch is cut into pieces by rows.

A row is one sequence of the batch. A place in a batch is named as in Python: `batch["targets"][1]`.
"""

from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from oomguard._core.errors import MisuseError, shown

Cut = Callable[[slice], object]  # returns some rows of a leaf
ROOT = "batch"
_ADVICE = "`dim` may be a structure like the batch, or a function of path and value; None keeps a part whole."


def map_leaves(
    function: Callable[[str, Any], object], value: Any, path: str = ROOT, *, rows_in_lists: bool = False
) -> Any:
    """Rebuild a nested structure with `function(path, leaf)` in the place of each leaf.

    Tuples, dicts, dataclasses and lists are walked through; with `rows_in_lists`, a list is a leaf.
    """

    def below(part: object, place: str) -> Any:
        return map_leaves(function, part, path + place, rows_in_lists=rows_in_lists)

    if isinstance(value, PackedSequence) or (rows_in_lists and isinstance(value, list)):
        return function(path, value)
    if isinstance(value, Mapping):
        parts = {
            key: below(part, f'["{key}"]' if isinstance(key, str) else f"[{key!r}]") for key, part in value.items()
        }
        if not isinstance(value, MutableMapping):
            return parts
        rebuilt: Any = copy(value)
        rebuilt.update(parts)
        return rebuilt
    if isinstance(value, tuple | list):
        items = [below(part, f"[{index}]") for index, part in enumerate(value)]
        kind: Any = type(value)
        return kind(*items) if hasattr(value, "_fields") else items if isinstance(value, list) else tuple(items)
    if is_dataclass(value) and not isinstance(value, type):
        rebuilt = copy(value)
        for field in fields(value):
            object.__setattr__(rebuilt, field.name, below(getattr(value, field.name), f".{field.name}"))
        return rebuilt
    return function(path, value)


def leaves_of(value: object, *, rows_in_lists: bool = False) -> dict[str, Any]:
    """The leaves of a nested structure by their paths."""
    leaves: dict[str, Any] = {}
    map_leaves(leaves.setdefault, value, rows_in_lists=rows_in_lists)
    return leaves


class Rows:
    """The rows of a nested batch: how many there are, and any slice of them as a batch of the same form.

    Tensors and arrays are cut along `dim`: one number for all, a structure like the batch, or a function of path and
    value. Lists are cut by item and packed sequences by sequence. None, numbers, text and tensors without dimensions
    are kept whole, and so is a part whose `dim` is None. A batch that is itself a list, as a DataLoader makes it, has
    parts like a tuple, unless its items differ only in length: then it is a list of sequences.
    """

    def __init__(self, batch: object, dim: object = 0) -> None:
        self._batch = tuple(batch) if isinstance(batch, list) and _has_parts(batch, dim) else batch
        self._list = self._batch is not batch
        self.leaves, find_dim = leaves_of(self._batch, rows_in_lists=True), _dim_finder(dim)
        self.dims = {path: find_dim(path, leaf) for path, leaf in self.leaves.items()}
        cuts = {path: _cut(path, leaf, self.dims[path]) for path, leaf in self.leaves.items()}
        self._cuts = {path: cut for path, (_, cut) in cuts.items()}
        rows = {path: count for path, (count, _) in cuts.items() if count is not None}
        if not rows:
            raise MisuseError(
                rule="A batch needs a tensor, a list or a packed sequence",
                got=f"got {shown(batch)}",
                advice="Only such parts can be split into rows.",
            )
        (first, self.count), *others = rows.items()
        for path, count in others:
            if count != self.count:
                raise MisuseError(
                    rule="All parts of a batch must have the same number of rows",
                    got=f"{first} has {self.count:,} and {path} has {count:,}",
                    advice=_ADVICE,
                )

    def take(self, rows: slice) -> Any:
        """The batch with these rows alone."""
        piece = map_leaves(lambda path, _: self._cuts[path](rows), self._batch, rows_in_lists=True)
        return list(piece) if self._list else piece

    @property
    def steps(self) -> int:
        """Time steps of the longest sequence: the first dimension beside the rows, of whichever part has most."""
        return max((_steps(leaf, self.dims[path]) for path, leaf in self.leaves.items()), default=1)


def _cut(path: str, value: Any, dim: int | None) -> tuple[int | None, Cut]:
    """The number of rows of a leaf, None if it is kept whole, and the function that cuts it."""
    if isinstance(value, list) and dim is not None:
        return len(value), lambda rows: value[rows]
    if isinstance(value, PackedSequence) and dim is not None:
        sequences = unpack_sequence(value)
        is_sorted = value.sorted_indices is None
        return len(sequences), lambda rows: pack_sequence(sequences[rows], enforce_sorted=is_sorted)
    is_array = isinstance(value, Tensor | np.ndarray)
    if dim is None or value is None or isinstance(value, Number | str | bytes) or (is_array and not value.ndim):
        return None, lambda rows: value
    if not is_array:
        kind = type(value).__name__
        raise MisuseError(rule="A batch has only parts that can be split", got=f"{path} is a {kind}", advice=_ADVICE)
    if not -value.ndim <= dim < value.ndim:
        got = f"{path} has the shape {tuple(value.shape)}"
        raise MisuseError(rule=f"A part of a batch that is split along dim {dim} must have it", got=got, advice=_ADVICE)
    before = (slice(None),) * (dim % value.ndim)
    return value.shape[dim], lambda rows: value[(*before, rows)]


def _dim_finder(dim: Any) -> Callable[[str, Any], int | None]:
    """The function that says along which dimension a leaf is cut, None if it is kept whole."""
    if dim is None or isinstance(dim, int):
        return lambda path, leaf: dim
    if callable(dim):
        return dim  # type: ignore[no-any-return]
    dims = leaves_of(dim)

    def find(path: str, _: object) -> int | None:
        if path not in dims:
            raise MisuseError(rule="`dim` must have the form of the batch", got=f"it lacks {path}", advice=_ADVICE)
        return dims[path]  # type: ignore[no-any-return]

    return find


def _has_parts(batch: list[Any], dim: object) -> bool:
    """Whether a batch that is a list has parts, such as inputs and targets, and not rows. If unclear, refuse it."""
    if isinstance(dim, list):
        return True
    forms = [[(p, _form(leaf)) for p, leaf in leaves_of(item, rows_in_lists=True).items()] for item in batch]
    if any(form != forms[0] for form in forms):
        return True
    if all(isinstance(item, Tensor) for item in batch) and len({item.shape for item in batch}) == 1 and batch[0].ndim:
        raise MisuseError(
            rule="A batch that is a list must be clear about what it holds",
            got=f"{len(batch)} tensors of the same shape may be its parts or its sequences",
            advice="Give tuple(batch) if they are parts such as inputs and targets, (batch,) if they are sequences.",
        )
    return False


def _form(leaf: Any) -> object:
    """What the sequences of one list have in common: all but their lengths."""
    return (leaf.dtype, leaf.shape[1:]) if isinstance(leaf, Tensor | np.ndarray) else None


def _steps(leaf: Any, dim: int | None) -> int:
    """Time steps of the longest sequence in a leaf; 1 if it has no sequences."""
    if isinstance(leaf, PackedSequence):
        return len(leaf.batch_sizes)
    if isinstance(leaf, list):
        parts = [part for item in leaf for part in leaves_of(item, rows_in_lists=True).values()]
        return max((len(part) for part in parts if isinstance(part, list) or np.ndim(part)), default=1)
    if dim is None or not isinstance(leaf, Tensor | np.ndarray) or leaf.ndim < 2:
        return 1
    return int(leaf.shape[1 if dim % leaf.ndim == 0 else 0])
