"""Data from Python: Datasets, generators and iterables of pairs."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from data.making import inputs_of, numbers, spec, targets_of, tokens
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from oomguard._core.errors import MisuseError
from oomguard._data.infer import spec_from_data
from oomguard._data.open import open_data, open_source
from oomguard._data.options import DataOptions
from oomguard._data.rows import Arrays

Pairs = list[tuple[Any, Any]]


class Listed(Dataset[Any]):
    """A map-style Dataset that counts how often it is asked."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs, self.asked = pairs, 0

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return self.pairs[index]


class Measured(Listed):
    @property
    def lengths(self) -> list[int]:
        return [len(pair[0]) for pair in self.pairs]


class Streamed(IterableDataset[Any]):
    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pairs)


def pairs(*lengths: int) -> Pairs:
    return [(numbers(n, 2) + 100 * i, numbers(n, 1) + 100 * i) for i, n in enumerate(lengths)]


def generated(given: Pairs) -> Iterator[Any]:
    yield from given


FORMS = pytest.mark.parametrize("form", [Listed, Streamed, generated, list])


@FORMS
def test_pairs_come_as_they_were_given(form: Any) -> None:
    given = pairs(3, 1, 4)
    source = open_source(form(given), spec())
    assert source.lengths.tolist() == [3, 1, 4]
    assert inputs_of(source) == [value.tolist() for value, _ in given]
    assert targets_of(source) == [value.tolist() for _, value in given]


@FORMS
def test_tensors_of_tokens_and_classes_will_do(form: Any) -> None:
    given = [(torch.tensor([1, 2, 3]), torch.tensor(4)), (torch.tensor([5]), torch.tensor(0))]
    source = open_source(form(given), tokens(head="last-step"))
    assert (inputs_of(source), [int(target) for target in targets_of(source)]) == ([[1, 2, 3], [5]], [4, 0])


def test_a_tensor_dataset_is_a_source() -> None:
    inputs, targets = torch.randn(5, 4, 2), torch.randn(5, 4, 1)
    source = open_source(TensorDataset(inputs, targets), spec())
    np.testing.assert_array_equal(source[3][0], inputs[3])


def test_a_tensor_is_an_array() -> None:
    whole: Tensor = torch.randn(5, 4, 3)
    np.testing.assert_array_equal(open_source(whole, spec())[2][1], whole[2, :, 2:])


def test_a_dataset_that_knows_its_lengths_is_not_read_at_first() -> None:
    dataset = Measured(pairs(3, 2))
    source = open_source(dataset, spec())
    assert dataset.asked == 0
    source[1]
    assert dataset.asked == 1


def test_a_generator_is_on_the_disk_and_not_in_memory(tmp_path: Path) -> None:
    source = open_source(generated(pairs(3, 2)), spec(), DataOptions(cache=str(tmp_path)))
    assert isinstance(source.store, Arrays)
    [home] = tmp_path.iterdir()
    assert np.load(home / "inputs.npy", mmap_mode="r").nbytes == 5 * 2 * 4
    del source
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_generator_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="pair 1"):
        open_source(generated([*pairs(3), (1, 2)]), spec(), DataOptions(cache=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_a_generator_without_end_needs_a_limit() -> None:
    def endless() -> Iterator[Any]:
        while True:
            yield from pairs(2)

    assert len(open_source(endless(), spec(), DataOptions(limit=7))) == 7


@FORMS
def test_sequences_are_truncated_only_if_asked(form: Any) -> None:
    with pytest.raises(MisuseError, match=r"1 .*has 6 steps \(1 are too long\)|item 1 has 6 steps"):
        open_source(form(pairs(3, 6)), spec())
    source = open_source(form(pairs(3, 6)), spec(), DataOptions(truncate=True))
    assert (source.describe()["truncated"], source.lengths.tolist()) == (1, [3, 4])
    assert source[1][0].tolist() == (numbers(4, 2) + 100).tolist()


@FORMS
def test_a_nan_is_named_dropped_or_zero(form: Any) -> None:
    given = pairs(3, 2)
    given[0][0][2, 1] = np.nan
    with pytest.raises(MisuseError, match=r"(item|pair) 0, step 2, column 1 is nan"):
        inputs_of(open_source(form(given), spec()))
    assert open_source(form(given), spec(), DataOptions(nan="drop")).lengths.tolist() == [2]
    assert open_source(form(given), spec(), DataOptions(nan="zero"))[0][0][2].tolist() == [4, 0]


@FORMS
def test_items_without_a_class_can_be_dropped(form: Any) -> None:
    given = [(numbers(2, 2), np.array([0.0, np.nan])), (numbers(3, 2), np.array([2.0, 1.0, 0.0]))]
    wanted = spec(loss="cross-entropy", outputs=3)
    assert targets_of(open_source(form(given), wanted, DataOptions(nan="drop"))) == [[2, 1, 0]]
    with pytest.raises(MisuseError, match=r"is nan.*--nan drop"):
        targets_of(open_source(form(given), wanted, DataOptions(nan="zero")))


@FORMS
@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            (numbers(3, 5), numbers(3, 1)),
            r"inputs of (item|pair) 1 must be numbers, 3 x 2, but they are float32, 3 x 5",
        ),
        ((numbers(3, 2), numbers(2, 1)), r"targets of (item|pair) 1 must be numbers, 3 x 1, but .* 2 x 1"),
        ((numbers(0, 2), numbers(0, 1)), r"(item|pair) 1 has none"),
        (numbers(3, 2), r"(item|pair) 1 is ndarray"),
        (("a", "b"), r"inputs of (item|pair) 1 must be numbers"),
    ],
)
def test_an_item_that_is_wrong_is_named(form: Any, item: Any, message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        open_source(form([*pairs(3), item]), spec())


@FORMS
def test_a_class_out_of_range_is_named(form: Any) -> None:
    given = [(numbers(3, 2), np.array([0, 1, 2])), (numbers(2, 2), np.array([0, 3]))]
    with pytest.raises(MisuseError, match=r"0 to 2, but the target of (item|pair) 1, step 1, column 0 is 3"):
        open_source(form(given), spec(loss="cross-entropy", outputs=3))


@FORMS
def test_no_pairs_at_all_are_refused(form: Any) -> None:
    with pytest.raises(MisuseError, match="has none"):
        open_source(form([]), spec())


def test_what_is_no_data_is_refused() -> None:
    with pytest.raises(MisuseError, match="Data is a path"):
        open_source(5, spec())


@FORMS
def test_pairs_are_split_by_series(form: Any) -> None:
    options = DataOptions(validation=0.3, normalise="none")
    data = open_data(form(pairs(*[2] * 10)), spec(), options)
    assert data.validation is not None
    firsts = [int(sequence[0][0]) // 100 for side in (data.train, data.validation) for sequence in inputs_of(side)]
    assert (len(data.validation), sorted(firsts)) == (3, list(range(10)))


def test_a_dataset_is_not_split_by_time() -> None:
    with pytest.raises(MisuseError, match="--split series"):
        open_data(Listed(pairs(2, 2)), spec(), DataOptions(split="time"))


@pytest.mark.parametrize("form", [dict, pandas.DataFrame], ids=["dict", "frame"])
def test_a_table_in_memory_is_read_like_a_file(form: Any) -> None:
    source = open_source(form({"a": [1, 2], "b": [3, 4], "y": [5, 6]}), spec())
    assert inputs_of(source) == [[[1, 3], [2, 4]]]
    assert targets_of(source) == [[[5], [6]]]


def test_a_table_with_series_of_several_lengths_is_refused() -> None:
    with pytest.raises(MisuseError, match="y is 3 x 5 x 1, and others have 3 series of 4 steps"):
        open_source({"x": np.zeros((3, 4, 2)), "y": np.zeros((3, 5, 1))}, spec())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"x": [[1, 2], [3]], "y": [1, 2]}, "inhomogeneous"),
        ({"x": np.zeros((2, 3, 4, 5)), "y": np.zeros((2, 3))}, "x is 2 x 3 x 4 x 5, and others have 2 series of 3"),
        ({"x": np.zeros((2, 3)), "y": 5}, "unsized"),
    ],
)
def test_a_dict_that_is_no_table_is_refused(data: Any, why: str) -> None:
    with pytest.raises(MisuseError, match=f"must have columns of one length, with names, but this dict.*{why}"):
        spec_from_data({"cell": "gru"}, data, DataOptions(target=("y",)))


def test_arrays_with_one_column_each_are_columns() -> None:
    source = open_source({"x": np.zeros((4, 1)), "z": np.ones(4), "y": np.zeros((4, 1))}, spec())
    assert inputs_of(source) == [[[0, 1]] * 4]


def test_tensors_may_have_a_gradient() -> None:
    wanted = torch.from_numpy(numbers(2, 4, 3)).requires_grad_()
    assert inputs_of(open_source(wanted, spec())) == numbers(2, 4, 3)[..., :2].tolist()
    pair = (wanted[0, :, :2], wanted[0, :, 2:])
    assert inputs_of(open_source([pair], spec())) == [numbers(2, 4, 3)[0, :, :2].tolist()]
