"""Batches of a task: where they hold their rows, how they are split, and which samples they are made of."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from task.models import Padded, Series, flat, loader, padded, text, waves, word_model
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from oomguard import MisuseError, Task
from oomguard._estimate.target import CPU
from oomguard._task.ask import Asker, send
from oomguard._task.batches import Batches, look
from oomguard._task.layout import count_rows, find_layout, leaves, split

Samples = list[tuple[Tensor, Tensor]]


def task_of(collate: Any) -> Task:
    return Task(model=torch.nn.Identity, loss=lambda model, batch: 0, data=loader(collate))


def same(first: Any, second: Any) -> bool:
    """Whether two batches have the same parts with the same values."""
    one, two = dict(leaves(first)), dict(leaves(second))
    return one.keys() == two.keys() and all(
        same(tuple(one[path]), tuple(two[path]))
        if isinstance(one[path], PackedSequence)
        else np.array_equal(np.asarray(one[path]), np.asarray(two[path]))
        for path in one
        if one[path] is not None
    )


@dataclass
class Example:
    inputs: Tensor
    rows: int
    name: str


def as_dataclass(samples: Samples) -> Example:
    return Example(pad_sequence([one[0] for one in samples]), len(samples), "some")


def as_object(samples: Samples) -> Any:
    return SimpleNamespace(inputs=pad_sequence([one[0] for one in samples]), lengths=[len(one[0]) for one in samples])


def as_nested(samples: Samples) -> Any:
    return [{"inputs": (pad_sequence([one[0] for one in samples]),)}, None, [one[1] for one in samples]]


def as_packed(samples: Samples) -> Any:
    return pack_sequence([one[0] for one in samples], enforce_sorted=False), torch.zeros(len(samples))


def as_interleaved(samples: Samples) -> Any:
    """Time and rows flattened into one dimension, step by step."""
    return pad_sequence([one[0] for one in samples]).flatten(0, 1), torch.zeros(len(samples))


def as_blocks(samples: Samples) -> Any:
    """Rows and time flattened into one dimension, row by row."""
    return pad_sequence([one[0] for one in samples], batch_first=True).flatten(0, 1), torch.zeros(len(samples))


FORMS = [padded, flat, as_dataclass, as_object, as_nested, as_packed, as_interleaved, as_blocks]


@pytest.mark.parametrize("collate", FORMS, ids=lambda one: one.__name__)
def test_a_batch_of_equal_samples_is_split_into_what_the_samples_collate_to(collate: Any) -> None:
    sample = Series()[1]
    batches = Batches(task_of(collate))
    pieces = split(collate([sample] * 5), batches.layout, 2)
    assert [count_rows(piece, batches.layout) for piece in pieces] == [2, 2, 1]
    assert same(pieces[0], collate([sample] * 2))
    assert same(pieces[2], collate([sample]))


def test_flat_targets_of_unequal_length_are_split_by_the_lengths_in_the_batch() -> None:
    series = Series()
    samples = [series[0], series[3], series[4], series[1]]
    pieces = split(flat(samples), Batches(task_of(flat)).layout, 2)
    assert [piece["text"].tolist() for piece in pieces] == [flat(samples[i : i + 2])["text"].tolist() for i in (0, 2)]


def test_packed_sequences_of_unequal_length_are_split_by_rows() -> None:
    series = Series()
    samples = [series[0], series[3], series[4]]
    pieces = split(as_packed(samples), Batches(task_of(as_packed)).layout, 2)
    assert same(pieces[1][0], as_packed(samples[2:])[0])


def test_flat_rows_without_lengths_cannot_be_split_and_are_collated_again() -> None:
    def concatenated(samples: Samples) -> Any:
        return torch.cat([one[0] for one in samples]), torch.zeros(len(samples))

    batches = Batches(task_of(concatenated))
    whole = batches.make(4)
    with pytest.raises(MisuseError, match=r"batch\[0\] cannot be split"):
        split(whole, batches.layout, 2)
    pieces = batches.split(whole, 2)
    assert [len(piece[1]) for piece in pieces] == [2, 2]
    assert torch.equal(torch.cat([piece[0] for piece in pieces]), whole[0])


def test_a_function_of_rows_and_steps_is_split_along_its_rows() -> None:
    layout = Batches(word_model).layout
    whole = text(5, 7)
    pieces = split(whole, layout, 3)
    assert [piece[0].shape for piece in pieces] == [(7, 3), (7, 2)]
    assert torch.equal(torch.cat([piece[1] for piece in pieces], 1), whole[1])


def test_a_matrix_of_all_pairs_of_rows_cannot_be_split() -> None:
    layout = find_layout(None, torch.zeros(2, 2), torch.zeros(3, 3))
    with pytest.raises(MisuseError, match="cannot be split"):
        split(torch.zeros(4, 4), layout, 2)


def test_the_worst_batch_has_the_longest_samples() -> None:
    batches = Batches(task_of(padded))
    assert batches.make(2).lengths.tolist() == [8, 8]
    assert batches.steps_of(batches.make(3)) == 8


def test_a_batch_of_chosen_length_has_the_samples_closest_to_it() -> None:
    assert Batches(task_of(padded)).make(2, 5).lengths.tolist() == [5, 5]


def test_a_batch_larger_than_the_data_repeats_samples() -> None:
    assert len(Batches(task_of(padded)).make(30).lengths) == 30


def test_longer_batches_than_the_data_are_refused() -> None:
    with pytest.raises(MisuseError, match="The longest of all 12 samples has 8 steps"):
        Batches(task_of(padded)).make(2, 9)


def test_steps_are_found_in_batches_of_a_function() -> None:
    batches = Batches(Task(model=torch.nn.Identity, loss=lambda model, batch: 0, batch=waves))
    assert batches.steps_of(waves(3, 17)) == 17


def test_a_large_dataset_is_not_read_whole() -> None:
    class Counting(Series):
        read = 0

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            self.read += 1
            return super().__getitem__(index)

    dataset = Counting(50_000)
    found = look(DataLoader(dataset, 4, collate_fn=padded))
    assert dataset.read == 1000
    assert found.words == "The longest of 1,000 of 50,000 samples has 8 steps."


def test_only_the_samples_that_are_needed_are_sent() -> None:
    found = look(loader(count=600)).reduced(4, None)
    assert 4 <= len(found.dataset) < 60
    assert isinstance(found.make(found.nearest(4, None)), Padded)


def test_samples_that_are_parts_of_one_large_tensor_are_sent_without_the_rest() -> None:
    dataset = TensorDataset(torch.randn(20_000, 10))
    task = Task(model=torch.nn.Identity, loss=lambda model, batch: 0, data=DataLoader(dataset, 4))
    assert len(send(task)) < 100_000


def test_a_function_of_random_batches_is_split_where_its_targets_are_flat() -> None:
    def time_first(rows: int, steps: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(9, (steps, rows))
        return words, words.reshape(-1)

    def rows_first(rows: int, steps: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(9, (rows, steps))
        return words, words.reshape(-1)

    for make in (time_first, rows_first):
        task = Task(model=torch.nn.Identity, loss=lambda model, batch: 0, batch=make)
        for words, targets in split(make(5, 4), Batches(task).layout, 2):
            assert torch.equal(words.reshape(-1), targets)


def test_a_collate_function_that_fails_is_named_with_its_line() -> None:
    def picky(samples: Samples) -> Any:
        if len(samples) == 3:
            raise ValueError("three samples")
        return padded(samples)

    with pytest.raises(MisuseError, match=r"collate 3 samples, but .*test_batches\.py:\d+ raised ValueError: three"):
        _ = Batches(task_of(picky)).layout


def test_a_number_of_all_tokens_cannot_be_split_and_is_collated_again() -> None:
    def counted(samples: Samples) -> Any:
        return padded(samples), torch.tensor(sum(len(one[0]) for one in samples))

    batches = Batches(task_of(counted))
    whole = batches.make(4)
    with pytest.raises(MisuseError, match=r"batch\[1\] cannot be split"):
        split(whole, batches.layout, 2)
    assert [int(piece[1]) for piece in batches.split(whole, 2)] == [16, 14]


# ---- samples of equal length


def equal(steps: int, count: int = 6) -> Task:
    samples: Any = [(torch.randn(steps, 3), torch.randn(steps)) for _ in range(count)]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0])[0].mean(-1), batch[1])

    return Task(model=lambda: nn.LSTM(3, 4, batch_first=True), loss=loss, data=DataLoader(samples, batch_size=4))


def test_a_tiny_batch_of_equally_long_samples_has_their_first_steps() -> None:
    batches = Batches(equal(5000))
    whole = batches.make(2)
    assert whole[0].shape == (2, 5000, 3)
    assert batches.steps_of(whole) == 5000
    for part, tiny in zip(whole, batches.tiny(2), strict=True):
        assert torch.equal(tiny, part[:, :64])


def test_short_samples_of_equal_length_stay_whole() -> None:
    assert Batches(equal(20)).tiny(3)[0].shape == (3, 20, 3)


def test_a_model_that_needs_all_steps_of_its_samples_gets_them() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4 * 200, 1)

        def forward(self, steps: Tensor) -> Any:
            return self.head(self.rnn(steps)[0].flatten(1))

    def loss(model: nn.Module, batch: Tensor) -> Any:
        return model(batch).square().mean()

    samples: Any = [torch.randn(200, 3) for _ in range(6)]
    task = Task(model=Fixed, loss=loss, data=DataLoader(samples, batch_size=4))
    with Asker(task, CPU) as asker:
        assert asker.check("microbatch").exact
        assert asker.check("segments").exact


def test_a_batch_that_is_larger_than_the_data_is_told() -> None:
    samples = look(loader())
    assert samples.notes(12) == [samples.words]
    assert samples.notes(13)[1:] == ["A batch of 13 rows has some of the 12 samples more than once."]
