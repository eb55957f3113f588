"""The Pareto front."""

import numpy as np
import pytest

from oomguard._plan.make import pareto_front


@pytest.mark.parametrize("columns", [1, 2, 3, 4])
def test_the_front_is_what_no_other_point_beats(columns: int) -> None:
    points = np.random.default_rng(columns).integers(0, 12, size=(300, columns))
    beaten = [(np.all(points <= one, axis=1) & np.any(points < one, axis=1)).any() for one in points]
    assert pareto_front(*points.T).tolist() == [not one for one in beaten]


def test_equal_points_are_all_on_the_front() -> None:
    assert pareto_front([1, 1, 2], [5, 5, 5]).tolist() == [True, True, False]


@pytest.mark.parametrize("columns", [2, 3])
def test_the_front_of_nothing_is_empty(columns: int) -> None:
    assert pareto_front(*([] for _ in range(columns))).tolist() == []
