"""Any nested batch is cut into pieces by rows; what cannot be cut so is refused, with its place."""

import types
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence, unpack_sequence
from torch.utils.data import DataLoader, TensorDataset

from oomguard._batch import Rows, leaves_of, map_leaves
from oomguard._core.errors import MisuseError


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class Example:
    inputs: Tensor
    sizes: list[int]
    note: str = field(default="", init=False)


def pieces(batch: Any, rows: int = 2, dim: Any = 0) -> list[Any]:
    whole = Rows(batch, dim)
    return [whole.take(slice(start, start + rows)) for start in range(0, whole.count, rows)]


def sequences(*lengths: int) -> list[Tensor]:
    return [torch.arange(length * 3.0).reshape(length, 3) + 100 * length for length in lengths]


def same(one: Any, other: Any) -> bool:
    first, second = leaves_of(one), leaves_of(other)
    return first.keys() == second.keys() and all(
        torch.equal(x, second[path]) if isinstance(x, Tensor) else x == second[path] for path, x in first.items()
    )


# ---- kinds of batches


def test_a_tensor_is_cut_along_its_first_dimension() -> None:
    assert [piece.tolist() for piece in pieces(torch.arange(5))] == [[0, 1], [2, 3], [4]]


def test_a_piece_shares_the_memory_of_the_batch() -> None:
    batch = torch.zeros(4, 3)
    pieces(batch)[1].fill_(1)
    assert batch.sum() == 6


def test_nested_tuples_and_dicts_keep_their_form() -> None:
    inputs, targets, mask = torch.arange(6).reshape(3, 2), torch.arange(3), torch.ones(3, 1)
    cut = pieces(({"x": inputs, 7: (mask, None)}, (targets, 0.5, "name")))
    assert same(cut[0], ({"x": inputs[:2], 7: (mask[:2], None)}, (targets[:2], 0.5, "name")))
    assert same(cut[1], ({"x": inputs[2:], 7: (mask[2:], None)}, (targets[2:], 0.5, "name")))


def test_named_tuples_and_dataclasses_keep_their_types() -> None:
    pair, example = Pair(torch.arange(3), torch.arange(3)), Example(torch.arange(3), [1, 2, 3])
    first, second = pieces((pair, example))[1]
    assert isinstance(first, Pair)
    assert first.targets.tolist() == [2]
    assert isinstance(second, Example)
    assert (second.inputs.tolist(), second.sizes, second.note) == ([2], [3], "")
    assert example.sizes == [1, 2, 3], "the batch itself is unchanged"


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, types.MappingProxyType, lambda d: defaultdict(list, d)])
def test_every_kind_of_dict_is_cut(kind: Any) -> None:
    cut = pieces(kind({"x": torch.arange(3)}))
    assert [piece["x"].tolist() for piece in cut] == [[0, 1], [2]]


def test_a_list_of_sequences_is_cut_by_item() -> None:
    batch = sequences(5, 7, 7)
    cut = pieces(batch)
    assert [len(piece) for piece in cut] == [2, 1]
    assert same([item for piece in cut for item in piece], batch)


def test_a_list_inside_a_batch_is_cut_by_item_even_if_all_sequences_are_equally_long() -> None:
    cut = pieces((sequences(4, 4, 4), torch.arange(3), ["a", "b", "c"]))
    assert [len(piece[0]) for piece in cut] == [2, 1]
    assert cut[1][2] == ["c"]


def test_a_list_of_samples_is_cut_by_item() -> None:
    samples = [(x, len(x)) for x in sequences(4, 6, 6)]
    assert [[size for _, size in piece] for piece in pieces(samples)] == [[4, 6], [6]]


def test_the_list_of_a_data_loader_has_parts() -> None:
    loader = DataLoader(TensorDataset(torch.randn(5, 4, 3), torch.randn(5, 1)), batch_size=5)
    (batch,) = loader
    assert isinstance(batch, list)
    cut = pieces(batch)
    assert [(type(piece), len(piece[0]), len(piece[1])) for piece in cut] == [(list, 2, 2), (list, 2, 2), (list, 1, 1)]


def test_a_list_that_may_be_parts_or_sequences_is_refused_unless_dim_tells() -> None:
    batch = sequences(4, 4)
    with pytest.raises(MisuseError, match=r"same shape.*tuple\(batch\).*\(batch,\)"):
        Rows(batch)
    assert Rows(tuple(batch)).count == Rows(batch, [0, 0]).count == 4
    assert Rows((batch,)).count == 2


@pytest.mark.parametrize("is_sorted", [True, False])
def test_a_packed_sequence_is_cut_by_sequence(is_sorted: bool) -> None:
    batch = sequences(7, 5, 3) if is_sorted else sequences(3, 7, 5)
    packed = pack_sequence(batch, enforce_sorted=is_sorted)
    cut = pieces((packed, torch.arange(3)))
    assert all(isinstance(piece, PackedSequence) for piece, _ in cut)
    assert same([item for piece, _ in cut for item in unpack_sequence(piece)], batch)
    assert [targets.tolist() for _, targets in cut] == [[0, 1], [2]]


def test_arrays_are_cut_and_numbers_are_kept() -> None:
    cut = pieces({"x": np.arange(3), "scale": np.float32(2), "weight": torch.tensor(3.0)})
    assert [piece["x"].tolist() for piece in cut] == [[0, 1], [2]]
    assert all((piece["scale"], piece["weight"].item()) == (2, 3) for piece in cut)


# ---- dimensions


def test_every_tensor_can_have_its_own_dimension() -> None:
    tokens, state = torch.arange(15).reshape(5, 3), (torch.randn(2, 3, 4), torch.randn(2, 3, 4))
    batch = {"tokens": tokens, "state": state, "sizes": torch.arange(3), "classes": torch.ones(9)}
    by_structure = {"tokens": 1, "state": (1, 1), "sizes": 0, "classes": None}

    def by_function(path: str, part: Tensor) -> int | None:
        return None if path == 'batch["classes"]' else int(part.ndim > 1)

    for dim in (by_structure, by_function):
        cut = pieces(batch, dim=dim)
        assert [piece["tokens"].tolist() for piece in cut] == [tokens[:, :2].tolist(), tokens[:, 2:].tolist()]
        assert [tuple(piece["state"][1].shape) for piece in cut] == [(2, 2, 4), (2, 1, 4)]
        assert [len(piece["classes"]) for piece in cut] == [9, 9]


def test_a_dimension_can_count_from_the_end() -> None:
    assert [tuple(piece.shape) for piece in pieces(torch.zeros(4, 3), dim=-1)] == [(4, 2), (4, 1)]


# ---- what is refused


@pytest.mark.parametrize(
    ("batch", "dim", "words"),
    [
        (
            {"x": torch.zeros(4, 2), "targets": (torch.zeros(4), torch.zeros(3))},
            0,
            r'rows, but batch\["x"\] has 4 and batch\["targets"\]\[1\] has 3',
        ),
        ((torch.zeros(4), sequences(2, 3)), 0, r"batch\[0\] has 4 and batch\[1\] has 2"),
        ((torch.zeros(4, 2), torch.zeros(4)), 1, r"along dim 1 .* batch\[1\] has the shape \(4,\)"),
        ((torch.zeros(4), object()), 0, r"batch\[1\] is a object"),
        (Example(torch.zeros(2), [1]), 0, r"batch\.inputs has 2 and batch\.sizes has 1"),
        ((torch.zeros(4), torch.zeros(4)), (0,), r"has nothing for batch\[1\]"),
        ((1, None, "text"), 0, "needs a tensor"),
        ([], 0, "needs a tensor"),
        (torch.zeros(0, 3), 0, "with rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_agree_is_refused_with_its_place(batch: Any, dim: Any, words: str) -> None:
    with pytest.raises(MisuseError, match=words):
        Rows(batch, dim)


# ---- lengths


@pytest.mark.parametrize(
    ("batch", "dim", "steps"),
    [
        ((torch.zeros(4, 9, 3), torch.zeros(4)), 0, 9),
        (torch.zeros(9, 4, 3), 1, 9),
        ({"ids": torch.zeros(4, 9, dtype=torch.long)}, 0, 9),
        ((torch.zeros(9, 4), torch.zeros(2, 4, 30)), 1, 9),
        (sequences(5, 9, 2), 0, 9),
        ([[1, 2, 3], [4]], 0, 3),
        (pack_sequence(sequences(9, 2)), 0, 9),
        (torch.zeros(4), 0, 1),
    ],
)
def test_the_longest_sequence_of_a_batch_is_found(batch: Any, dim: int, steps: int) -> None:
    assert Rows(batch, dim).steps == steps


# ---- the walk


def test_the_paths_of_leaves_are_those_of_python() -> None:
    batch: Any = {"targets": [torch.zeros(1), torch.ones(1)], 3: Example(torch.zeros(1), [5])}
    paths = leaves_of(batch)
    assert [*paths][:2] == ['batch["targets"][0]', 'batch["targets"][1]']
    assert [*paths][2:] == ["batch[3].inputs", "batch[3].sizes[0]", "batch[3].note"]
    assert all(eval(path, {"batch": batch}) is leaf for path, leaf in paths.items())


NESTED = st.recursive(
    st.just("tensor") | st.none() | st.integers() | st.text(max_size=3),
    lambda parts: st.tuples(parts, parts) | st.dictionaries(st.text(max_size=3), parts, max_size=3),
)


@given(NESTED, st.integers(1, 9), st.integers(1, 9))
def test_the_pieces_of_any_batch_add_up_to_it(form: Any, count: int, rows: int) -> None:
    tensors: list[Tensor] = []

    def make(_: str, leaf: object) -> object:
        if leaf != "tensor":
            return leaf
        tensors.append(torch.arange(count) + 100 * len(tensors))
        return tensors[-1]

    batch = (map_leaves(make, form), torch.arange(count))
    cut = [leaves_of(piece) for piece in pieces(batch, rows)]
    for path, leaf in leaves_of(batch).items():
        joined = torch.cat([piece[path] for piece in cut]) if isinstance(leaf, Tensor) else cut[0][path]
        assert torch.equal(joined, leaf) if isinstance(leaf, Tensor) else joined == leaf


def test_padding_a_piece_gives_the_rows_of_the_padded_batch() -> None:
    batch = sequences(3, 5, 4)
    padded = pad_sequence(batch, batch_first=True)
    for start, piece in zip((0, 2), pieces(batch), strict=True):
        own = pad_sequence(piece, batch_first=True)
        assert torch.equal(own, padded[start : start + len(piece), : own.shape[1]])
