"""Training and validation share nothing: neither a series, nor a window, nor a single row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.making import numbers, saved, spec, written
from hypothesis import given
from hypothesis import strategies as st

from oomguard._core.errors import MisuseError
from oomguard._data.open import Data, open_data
from oomguard._data.options import DataOptions
from oomguard._data.order import MAX_BLOCKS
from oomguard._data.rows import Source


def rows_of(source: Source | None) -> set[float]:
    """The rows that a source reads, as inputs or as targets: their first column is their number."""
    assert source is not None
    parts = [part[:, 0] for index in range(len(source)) for part in source[index]]
    return {float(row) for part in parts for row in part}


def numbered(*shape: int) -> Any:
    """All rows counted through, in two columns."""
    count = int(np.prod(shape))
    return np.stack([np.arange(count), np.arange(count)], axis=-1).reshape(*shape, 2).astype(np.float32)


def opened(array: Any, seq: int = 4, **options: Any) -> Data:
    return open_data(array, spec(seq=seq, outputs=2), DataOptions(**{"normalise": "none"} | options))


@given(
    rows=st.integers(60, 300),
    seq=st.integers(1, 9),
    stride=st.none() | st.integers(1, 12),
    split=st.sampled_from(["time", "series"]),
    share=st.floats(0.05, 0.6),
    seed=st.integers(0, 5),
)
def test_no_row_of_a_long_series_is_on_both_sides(
    rows: int, seq: int, stride: int | None, split: str, share: float, seed: int
) -> None:
    data = opened(numbered(rows), seq, stride=stride, split=split, validation=share, seed=seed)
    assert not rows_of(data.train) & rows_of(data.validation)


@given(
    series=st.integers(2, 20),
    steps=st.integers(8, 20),
    stride=st.none() | st.integers(1, 6),
    split=st.sampled_from(["time", "series"]),
)
def test_no_row_of_many_series_is_on_both_sides(series: int, steps: int, stride: int | None, split: str) -> None:
    data = opened(numbered(series, steps), seq=20, stride=stride, split=split, validation=0.4)
    assert not rows_of(data.train) & rows_of(data.validation)


def test_by_time_validation_is_what_comes_last() -> None:
    data = opened(numbered(100), split="time", validation=0.2)
    assert (max(rows_of(data.train)), min(rows_of(data.validation))) == (79, 80)


def test_by_time_every_series_gives_its_last_steps() -> None:
    data = opened(numbered(3, 10), seq=10, split="time", validation=0.3)
    assert rows_of(data.validation) == {7, 8, 9, 17, 18, 19, 27, 28, 29}


def test_by_series_a_series_is_whole_on_one_side() -> None:
    data = opened(numbered(10, 5), seq=5, split="series", validation=0.2)
    assert data.validation is not None
    assert (len(data.train), len(data.validation)) == (8, 2)
    sides = [{int(row) // 5 for row in rows_of(side)} for side in (data.train, data.validation)]
    assert sides[0] | sides[1] == set(range(10))


def test_one_long_series_is_split_by_time_unless_asked_otherwise() -> None:
    assert rows_of(opened(numbered(100)).validation) == rows_of(opened(numbered(100), split="time").validation)


def test_many_series_are_split_by_series_unless_asked_otherwise() -> None:
    assert rows_of(opened(numbered(9, 5)).validation) == rows_of(opened(numbered(9, 5), split="series").validation)


def test_a_long_series_split_by_series_gives_blocks_from_all_over_it() -> None:
    data = opened(numbered(10_000), split="series", validation=0.2)
    chosen = {int(row) // (10_000 // MAX_BLOCKS) for row in rows_of(data.validation)}
    assert len(chosen) == 20
    assert min(chosen) < 20 <= 80 < max(chosen)


def test_nearly_all_rows_are_used_on_some_side() -> None:
    data = opened(numbered(10_000), split="series", validation=0.2)
    assert rows_of(data.train) | rows_of(data.validation) == set(range(10_000))


def test_the_seed_decides() -> None:
    first, same, other = (rows_of(opened(numbered(50, 5), seq=5, seed=seed).validation) for seed in (1, 1, 2))
    assert first == same != other


def test_without_a_share_there_is_no_validation() -> None:
    data = opened(numbered(9, 5), validation=0)
    assert (data.validation, len(data.train)) == (None, 9)


def test_a_table_is_split_by_series(tmp_path: Path) -> None:
    lines = "".join(f"{row % 6},{row},{row}\n" for row in range(24))
    path = written(tmp_path / "t.csv", "id,a,b\n" + lines)
    options = DataOptions(id="id", normalise="none", validation=0.3)
    data = open_data(path, spec(outputs=2), options)
    sides = [{int(row) % 6 for row in rows_of(side)} for side in (data.train, data.validation)]
    assert (len(sides[0]), len(sides[1]), sides[0] & sides[1]) == (4, 2, set())


@pytest.mark.parametrize(
    ("array", "options", "message"),
    [
        (numbered(1, 4), {}, "at least two, but it has 1"),
        (numbered(6), {"split": "series"}, "two blocks of 5 rows, but it has 6 rows"),
        (numbered(6), {"validation": 0.1}, "the part of .* for validation has none"),
        (numbered(6), {"validation": 0.9}, "the part of .* for training has none"),
    ],
)
def test_data_that_is_too_small_to_split_is_refused(array: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        opened(array, **options)


def test_series_with_one_target_are_not_split_by_time(tmp_path: Path) -> None:
    targets = saved(tmp_path / "y.npy", numbers(3))
    options = DataOptions(split="time", targets=str(targets))
    with pytest.raises(MisuseError, match=r"one target each cannot be split by time.*--split series"):
        open_data(numbers(3, 4, 2), spec(head="last-step"), options)
