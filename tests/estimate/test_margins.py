"""Quantiles of stored errors."""

import math

import numpy as np
import pytest

from oomguard._core.units import MIB
from oomguard._estimate.margins import (
    FEWEST,
    OFFSET_BYTES,
    SETTLED,
    Residual,
    differences,
    enough,
    quantile,
    repeats,
    residuals,
)

LSTM = ("cpu", "onednn", "tight", "fp32", False)
GRU = ("cpu", "native", "tight", "fp32", True)  # with blocks in the heap


def test_a_quantile_is_that_of_a_further_error_and_the_largest_if_there_are_few() -> None:
    assert quantile(range(100), 0.05) == 95
    assert quantile([3, 1], 0.05) == 3


def row(candidate: int, mib: float, *, model: int = 0, turn: int = 0, passes: int = 2, steps: float = 8) -> Residual:
    """A row whose estimate was 100 MiB."""
    error = math.log((mib + OFFSET_BYTES / MIB) / (100 + OFFSET_BYTES / MIB))
    return Residual(*LSTM, model, candidate, turn, passes, steps, mib, error)


def test_errors_are_compared_with_those_of_the_same_candidate_and_model() -> None:
    rows = [row(0, 110), row(0, 104, steps=6), row(0, 109, steps=7), row(0, 113, turn=1, passes=12)]
    rows += [row(1, 130, passes=SETTLED), row(1, 131, turn=1, passes=24), row(2, 80, model=1)]
    found = differences(tuple(rows))
    assert found["few"] == pytest.approx([3 / 174])
    assert found["few_mib"] == [3]
    assert found["settled_mib"] == [1]
    assert found["length"] == pytest.approx([math.log(174 / 168), math.log(174 / 173)])
    levels = [math.log(value / 164) for value in (174, 194, 144)]
    assert found["model"] == pytest.approx([(levels[0] + levels[1]) / 2, levels[2]])
    apart = math.sqrt(2) * (levels[1] - levels[0]) / 2
    assert found["shape"] == pytest.approx([-apart, apart])


def test_a_peak_of_many_passes_grows_less_than_one_of_few() -> None:
    for kind in (LSTM, GRU):
        few, settled = (repeats(*kind, settled=settled) for settled in (False, True))
        assert settled.most < few.most
        assert settled.deviation < few.deviation


def test_a_peak_whose_blocks_live_in_the_heap_grows_more_and_with_its_size() -> None:
    rests, mapped, heap = (
        np.array([100.0, 400]) * MIB,
        *(repeats(*GRU[:4], small, settled=True) for small in (False, True)),
    )
    low, high = mapped.bytes_of(mapped.most, rests)
    assert low == high
    assert low * 2 < heap.bytes_of(heap.most, rests)[0] < heap.bytes_of(heap.most, rests)[1]


def test_kinds_with_few_rows_are_judged_with_similar_ones() -> None:
    rare = ("cpu", "onednn", "tight", "bf16", False)
    assert sum(one.kind == rare for one in residuals()) < FEWEST
    assert enough("settled", *rare) == enough("settled", *LSTM)
    assert len(enough("settled", *LSTM)) >= FEWEST
