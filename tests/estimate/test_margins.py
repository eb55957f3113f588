"""Quantiles of stored errors."""

import math

import pytest

from oomguard._estimate.margins import (
    FEWEST,
    SETTLED,
    Residual,
    creep,
    differences,
    enough,
    quantile,
    residuals,
    spread,
)

LSTM = ("cpu", "onednn", "tight", "fp32", False)
GRU = ("cpu", "native", "tight", "fp32", True)  # with blocks in the heap


def test_a_quantile_is_that_of_a_further_error_and_the_largest_if_there_are_few() -> None:
    assert quantile(range(100), 0.05) == 95
    assert quantile([3, 1], 0.05) == 3


def row(candidate: int, error: float, *, model: int = 0, turn: int = 0, passes: int = 2, steps: float = 8) -> Residual:
    return Residual(*LSTM, model, candidate, turn, passes, steps, error)


def test_errors_are_compared_with_those_of_the_same_candidate_and_model() -> None:
    rows = [row(0, 0.1), row(0, 0.04, steps=6), row(0, 0.09, steps=7), row(0, 0.13, turn=1, passes=12)]
    rows += [row(1, 0.3, passes=SETTLED), row(1, 0.31, turn=1, passes=24), row(2, -0.2, model=1)]
    found = differences(tuple(rows))
    assert found.few == pytest.approx([0.03])
    assert found.settled == pytest.approx([0.01])
    assert sorted(found.length) == pytest.approx([0.01, 0.06])
    assert found.nearest == pytest.approx([0.01])
    assert found.models == pytest.approx([0.2, -0.2])
    assert found.shape == pytest.approx([-0.1 * math.sqrt(2), 0.1 * math.sqrt(2)])


def test_a_peak_of_many_passes_grows_less_than_one_of_few() -> None:
    for kind in (LSTM, GRU):
        assert creep(*kind, settled=True) < creep(*kind, settled=False)
        assert spread(*kind, settled=True).near < spread(*kind).near


def test_a_peak_whose_blocks_live_in_the_heap_grows_more() -> None:
    assert creep(*GRU, settled=True) > 5 * creep(*GRU[:4], False, settled=True)


def test_kinds_with_few_rows_are_judged_with_similar_ones() -> None:
    rare = ("cpu", "onednn", "tight", "bf16", False)
    assert sum(one.kind == rare for one in residuals()) < FEWEST
    assert enough("settled", *rare) == enough("settled", *LSTM)
    assert len(enough("settled", *LSTM)) >= FEWEST
