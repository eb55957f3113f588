"""Nested batches: a walk over tuples, lists, dicts and dataclasses, and how a batch is cut into pieces by rows.

A row is one sequence of the batch. A place in a batch is named as in Python: `batch["targets"][1]`.
"""

from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from oomguard._core.errors import MisuseError, shown

ROOT = "batch"
ADVICE = "`dim` may be a structure like the batch, or a function of path and part; None keeps a part whole."
IsLeaf = Callable[[str, object], bool]  # whether the part at a path is a leaf, though it is a container


def map_leaves(
    function: Callable[[str, Any], object], value: Any, is_leaf: IsLeaf = lambda path, value: False, path: str = ROOT
) -> Any:
    """Rebuild nested tuples, lists, dicts and dataclasses with `function(path, leaf)` in the place of each leaf."""

    def below(part: object, place: str) -> Any:
        return map_leaves(function, part, is_leaf, path + place)

    if isinstance(value, PackedSequence) or is_leaf(path, value):
        return function(path, value)
    if isinstance(value, Mapping):
        places = {key: f'["{key}"]' if isinstance(key, str) else f"[{key!r}]" for key in value}
        rebuilt: Any = copy(value) if isinstance(value, MutableMapping) else {}
        rebuilt.update({key: below(part, places[key]) for key, part in value.items()})
        return rebuilt
    if isinstance(value, tuple | list):
        parts = [below(part, f"[{index}]") for index, part in enumerate(value)]
        make: Any = getattr(value, "_make", list if isinstance(value, list) else tuple)
        return make(parts)
    if is_dataclass(value) and not isinstance(value, type):
        rebuilt = copy(value)
        for field in fields(value):
            object.__setattr__(rebuilt, field.name, below(getattr(value, field.name), f".{field.name}"))
        return rebuilt
    return function(path, value)


def leaves_of(value: object, is_leaf: IsLeaf = lambda path, value: False) -> dict[str, Any]:
    """The leaves of a nested structure by their paths."""
    leaves: dict[str, Any] = {}
    map_leaves(leaves.setdefault, value, is_leaf)
    return leaves


class Leaf(NamedTuple):
    """A leaf of a batch: its rows (None: it is kept whole), its longest sequence, and how rows are cut out of it."""

    rows: int | None
    steps: int
    cut: Callable[["slice | list[int]"], object]


class Rows:
    """The rows of a nested batch: their number, their time steps, and any slice of them as a batch of the same form.

    `Guard.split` says how each kind of part is cut along `dim`.
    """

    def __init__(self, batch: object, dim: object = 0) -> None:
        self._batch, find_dim = batch, _dim_finder(dim)
        self._is_leaf = _inner_list if isinstance(batch, list) and _has_parts(batch, dim) else _any_list
        leaves = leaves_of(batch, self._is_leaf)
        self._leaves = {path: _read_leaf(path, leaf, find_dim(path, leaf)) for path, leaf in leaves.items()}
        self.steps = max((leaf.steps for leaf in self._leaves.values()), default=1)
        counts = [(path, leaf.rows) for path, leaf in self._leaves.items() if leaf.rows is not None]
        if not counts or not counts[0][1]:
            raise _refused("A batch needs a tensor, a list or a packed sequence with rows", f"got {shown(batch)}")
        first, self.count = counts[0]
        for path, count in counts:
            if count != self.count:
                got = f"{first} has {self.count:,} and {path} has {count:,}"
                raise _refused("All parts of a batch must have the same number of rows", got)

    def take(self, rows: slice | list[int]) -> Any:
        """The batch with these rows alone, which may be repeated."""
        return map_leaves(lambda path, _: self._leaves[path].cut(rows), self._batch, self._is_leaf)


def _read_leaf(path: str, value: Any, dim: int | None) -> Leaf:
    """The leaf of a batch at a path, which is cut along a dimension."""
    if dim is None or value is None or isinstance(value, Number | str | bytes):
        return Leaf(None, 1, lambda rows: value)
    if isinstance(value, list):
        lengths = [len(x) for x in leaves_of(value, _inner_list).values() if isinstance(x, list) or np.ndim(x)]
        return Leaf(len(value), max(lengths, default=1), lambda rows: _items(value, rows))
    if isinstance(value, PackedSequence):
        sequences, is_sorted = unpack_sequence(value), value.sorted_indices is None
        steps = len(value.batch_sizes)
        return Leaf(
            len(sequences), steps, lambda rows: pack_sequence(_items(sequences, rows), enforce_sorted=is_sorted)
        )
    if not isinstance(value, Tensor | np.ndarray):
        raise _refused("Every part of a batch must be one that can be split", f"{path} is a {type(value).__name__}")
    if not value.ndim:
        return Leaf(None, 1, lambda rows: value)
    if not -value.ndim <= dim < value.ndim:
        got = f"{path} has the shape {tuple(value.shape)}"
        raise _refused(f"A part of a batch that is split along dim {dim} must have that dimension", got)
    before, others = (slice(None),) * (dim % value.ndim), [*value.shape]
    count = others.pop(dim)
    return Leaf(count, others[0] if others else 1, lambda rows: value[(*before, rows)])


def _items(values: list[Any], rows: slice | list[int]) -> list[Any]:
    return values[rows] if isinstance(rows, slice) else [values[row] for row in rows]


def _dim_finder(dim: Any) -> Callable[[str, object], int | None]:
    """The function that says along which dimension the leaf at a path is cut."""
    if callable(dim):
        return dim  # type: ignore[no-any-return]
    if dim is None or isinstance(dim, int):
        return lambda path, leaf: dim
    dims: dict[str, int | None] = leaves_of(dim)

    def find(path: str, leaf: object) -> int | None:
        if path not in dims:
            raise _refused("`dim` must have the form of the batch", f"it has nothing for {path}")
        return dims[path]

    return find


def _any_list(path: str, value: object) -> bool:
    return isinstance(value, list)


def _inner_list(path: str, value: object) -> bool:
    return isinstance(value, list) and path != ROOT


def _has_parts(batch: list[Any], dim: object) -> bool:
    """Whether a batch that is a list has parts, such as inputs and targets, and not rows, which differ in length only.

    A list that may be either is refused.
    """
    if isinstance(dim, list):
        return True
    leaves = [leaves_of(item, _any_list) for item in batch]
    forms = [{p: (getattr(x, "dtype", None), getattr(x, "shape", ())[1:]) for p, x in one.items()} for one in leaves]
    alike = all(form == forms[0] for form in forms)
    if alike and all(isinstance(x, Tensor) and x.ndim and x.shape == batch[0].shape for x in batch) and batch:
        raise _refused(
            "A batch that is a list must tell its parts from its sequences",
            f"its {len(batch)} tensors have the same shape",
            "Give tuple(batch) if they are parts such as inputs and targets, (batch,) if they are sequences.",
        )
    return not alike


def _refused(rule: str, got: str, advice: str = ADVICE) -> MisuseError:
    return MisuseError(rule=rule, got=got, advice=advice)
