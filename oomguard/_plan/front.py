"""The Pareto front."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def pareto_front(*columns: ArrayLike) -> NDArray[np.bool_]:
    """Where the points of the Pareto front are; every column is to be as small as possible.

    A point is on the front unless another one is at most as large in all columns and smaller in one. Two columns take
    the time of sorting them, more columns that time times the length of the front.
    """
    points = np.column_stack([np.asarray(column, dtype=float) for column in columns])
    points, inverse = np.unique(points, axis=0, return_inverse=True)  # sorted: no point is beaten by a later one
    front, left = np.zeros(len(points), dtype=bool), np.arange(len(points))
    if len(columns) == 2:
        lowest = np.minimum.accumulate(points[:, 1])
        front, left = np.r_[True, lowest[1:] < lowest[:-1]][: len(points)], left[:0]
    while left.size:
        front[left[0]] = True
        left = left[np.less(points[left], points[left[0]]).any(axis=1)]
    return front[inverse.ravel()]
