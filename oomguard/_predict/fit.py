"""A Gaussian process, which keeps a wide margin for what is unlike its data; and the Pareto front.

A value is the sum of a few effects (linear in features), each with a prior
standard deviation; of a local deviation that rows at the same place share, and nearby rows in part; and of noise.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROUNDS = 8
"""Rounds of the robust regression: by then it no longer moves."""

Floats = NDArray[np.float64]


class Prior(NamedTuple):
    """Standard deviations before there are data."""

    effects: Sequence[float]
    """The standard deviation of each effect."""
    local: float = 0.0
    """The standard deviation of what the rows at one place share."""
    reach: float = 0.1
    """How far the local deviation reaches: at this distance 0.6 of it is shared, at three times this distance 0.01.
    Places that are whole numbers share nothing with their neighbours."""


class Data(NamedTuple):
    """Measured values, one row each."""

    features: Floats
    """One column for each effect."""
    places: Floats
    """Coordinates."""
    values: Floats
    noise: Floats
    """The standard deviation of each value."""


class Fit:
    """The posterior of a prior and data."""

    def __init__(self, prior: Prior, data: Data) -> None:
        self.variances, self.prior, self.data = np.square(np.asarray(prior.effects)), prior, data
        own = self._covariance(data.features, data.places) + np.diag(np.square(data.noise))
        self._inverse = np.linalg.inv(own) if len(data.values) else np.empty((0, 0))
        self._weights = self._inverse @ np.asarray(data.values, dtype=float)

    def at(self, features: Floats, places: Floats) -> tuple[Floats, Floats]:
        """The expected values of some rows, and their standard deviations (noise not included)."""
        shared = self._covariance(features, places)
        before = np.square(features) @ self.variances + self.prior.local**2
        variance = before - np.sum((shared @ self._inverse) * shared, axis=1)
        return shared @ self._weights, np.sqrt(np.maximum(variance, 0.0))

    def _covariance(self, features: Floats, places: Floats) -> Floats:
        """The covariance of some rows with the rows of the data."""
        shared: Floats = (features * self.variances) @ self.data.features.T
        if not self.prior.local:
            return shared
        away = np.zeros_like(shared)
        for ours, theirs in zip(places.T, self.data.places.T, strict=True):
            away += np.square((ours[:, None] - theirs[None, :]) / self.prior.reach)
        return shared + self.prior.local**2 * np.exp(-away / 2)


def matrix(columns: Iterable[ArrayLike]) -> Floats:
    """Columns, some of them single numbers, as a matrix."""
    arrays = (np.atleast_1d(np.asarray(column, dtype=float)) for column in columns)
    return np.stack(np.broadcast_arrays(*arrays), axis=1)


def stacked(rows: Iterable[Data], *, effects: int, coordinates: int) -> Data:
    """The rows of several data, perhaps of none."""
    empty = Data(np.empty((0, effects)), np.empty((0, coordinates)), np.empty(0), np.empty(0))
    return Data(*map(np.concatenate, zip(empty, *rows, strict=True)))


def fit_robustly(prior: Prior, data: Data) -> Fit:
    """Fit values of which some are far off: a value that the others contradict counts less in each round.

    >>> data = Data(np.ones((3, 1)), np.zeros((3, 1)), np.array([0.1, 0.1, 3.0]), np.full(3, 0.05))
    >>> round(float(fit_robustly(Prior([1.0]), data).at(np.ones((1, 1)), np.zeros((1, 1)))[0][0]), 1)
    0.1
    """
    noise = data.noise
    for _ in range(ROUNDS):
        fit = Fit(prior, data._replace(noise=noise))
        noise = np.hypot(data.noise, (data.values - fit.at(data.features, data.places)[0]) / 2)
    return fit


def pareto_front(*columns: ArrayLike) -> NDArray[np.bool_]:
    """Where the points of the Pareto front are; every column is to be as small as possible.

    A point is on the front unless another one is at most as large in all columns and smaller in one. Two columns take
    the time of sorting them, more columns that time times the length of the front.

    >>> pareto_front([4, 1, 2, 3], [-40, -10, -30, -20]).tolist()
    [True, True, True, False]
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
