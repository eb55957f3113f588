"""Where batches hold time, and their pieces along time."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

import oomguard
from oomguard._task.layout import Axis, Layout, find_equal_time, find_layout, find_time
from oomguard._task.times import cut_time


def layouts(make: Any) -> tuple[Layout, Layout]:
    """Where batches hold their rows and their time."""
    rows = find_layout(None, make(2, 5), make(3, 5), make(2, 5), make(2, 5))
    return rows, find_time(make(2, 5), make(2, 9), rows)


def test_time_may_be_any_dimension_and_other_parts_are_kept_whole() -> None:
    def make(rows: int, steps: int) -> dict[str, Any]:
        values = torch.arange(steps).expand(rows, steps)
        return {"x": values, "y": (values.T, torch.zeros(rows)), "name": "a"}

    _, time = layouts(make)
    pieces = cut_time(make(2, 7), time, 3)
    assert [piece["x"][0].tolist() for piece in pieces] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [piece["y"][0][:, 1].tolist() for piece in pieces] == [[0, 1, 2], [3, 4, 5], [6]]
    assert all(len(piece["y"][1]) == 2 and piece["name"] == "a" for piece in pieces)


def test_targets_that_are_flattened_time_first_are_cut_by_step() -> None:
    def make(rows: int, steps: int) -> tuple[Tensor, Tensor]:
        values = torch.arange(steps)[:, None].expand(steps, rows)
        return values, values.flatten()

    time = find_time(make(2, 5), make(2, 9), {(0,): Axis("dimension", 1), (1,): Axis("interleaved", 0)})
    assert [piece[1].tolist() for piece in cut_time(make(3, 4), time, 2)] == [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]]


def test_a_part_with_several_entries_for_each_step_is_cut_with_it() -> None:
    _, time = layouts(lambda rows, steps: (torch.arange(steps)[:, None], torch.arange(3 * steps)))
    assert [piece[1].tolist() for piece in cut_time((torch.arange(4)[:, None], torch.arange(12)), time, 2)] == [
        [*range(6)],
        [*range(6, 12)],
    ]


def test_equally_long_samples_have_their_time_beside_the_rows() -> None:
    def make(rows: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros(rows, 8, 3), torch.zeros(rows, 8), torch.arange(rows)

    rows = find_layout(None, make(2, 8), make(3, 8), make(2, 8), make(2, 8))
    pieces = cut_time(make(4, 8), find_equal_time(make(2, 8), rows), 2)
    assert [[tuple(part.shape) for part in piece] for piece in pieces] == [[(4, 4, 3), (4, 4), (4,)]] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rows, steps: torch.zeros(rows, 3), "no part of the batch grows"),
        (lambda rows, steps: {"x": torch.zeros(rows, steps), "mask": torch.zeros(steps, steps)}, r"batch\['mask'\]"),
        (lambda rows, steps: (torch.zeros(rows, steps), torch.zeros(rows, steps // 2)), "no dimension that could"),
        (lambda rows, steps: pack_sequence([torch.zeros(steps)] * rows), "no dimension that could"),
        (lambda rows, steps: [torch.zeros(steps)] * rows, "no dimension that could"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(make: Any, message: str) -> None:
    with pytest.raises(oomguard.MisuseError, match=message):
        cut_time(make(2, 6), layouts(make)[1], 2)
