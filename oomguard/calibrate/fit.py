"""A small regression: what is like the data is predicted closely, and what is not keeps a wide margin.

A Gaussian process. The value is a sum of a few effects (linear in features), each with a prior that says how large it
usually is; of something that rows at the same place have in common, and those nearby to some extent; and of noise.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

ROUNDS = 8
"""Of the robust regression: by then it no longer moves."""


class Prior(NamedTuple):
    """What is known before there are data: standard deviations."""

    effects: Sequence[float]
    """Of each effect."""
    local: float = 0.0
    """Of what the rows at one place have in common."""
    reach: float = 0.1
    """How far that goes: at this distance 0.6 of it is left, at three times this distance 0.01. (Of places that are
    whole numbers, nothing reaches the next.)"""


class Data(NamedTuple):
    """What was measured."""

    features: Any
    """One row for each value, one column for each effect."""
    places: Any
    """Where each row is: one row of coordinates for each value."""
    values: Any
    """The values."""
    noise: Any
    """The standard deviation of each."""


class Fit:
    """What the data tell.

    >>> data = Data(np.ones((2, 1)), np.zeros((2, 1)), np.array([0.1, 0.1]), np.array([0.01, 0.01]))
    >>> mean, deviation = Fit(Prior([1.0]), data).at(np.ones((1, 1)), np.zeros((1, 1)))
    >>> round(float(mean[0]), 3), float(deviation[0]) < 0.01
    (0.1, True)
    """

    def __init__(self, prior: Prior, data: Data) -> None:
        self.variances, self.prior = np.square(np.asarray(prior.effects)), prior
        self.data = data
        own = self._covariance(data.features, data.places) + np.diag(np.square(data.noise))
        self._inverse = np.linalg.inv(own) if len(data.values) else np.empty((0, 0))
        self._weights = self._inverse @ np.asarray(data.values, dtype=float)

    def at(self, features: Any, places: Any) -> tuple[Any, Any]:
        """The expected value there, and its standard deviation (noise not included)."""
        shared = self._covariance(features, places)
        before = np.square(features) @ self.variances + self.prior.local**2
        variance = before - np.sum((shared @ self._inverse) * shared, axis=1)
        return shared @ self._weights, np.sqrt(np.maximum(variance, 0.0))

    def _covariance(self, features: Any, places: Any) -> Any:
        """Of rows with the rows of the data."""
        shared = (features * self.variances) @ self.data.features.T
        if not self.prior.local:
            return shared
        away = sum(
            np.square((one[:, None] - other[None, :]) / self.prior.reach)
            for one, other in zip(np.asarray(places).T, np.asarray(self.data.places).T, strict=True)
        )
        return shared + self.prior.local**2 * np.exp(-away / 2)


def fit_robustly(prior: Prior, data: Data) -> Fit:
    """The same for values of which some are far off: what the others contradict counts less and less.

    >>> data = Data(np.ones((3, 1)), np.zeros((3, 1)), np.array([0.1, 0.1, 3.0]), np.full(3, 0.05))
    >>> round(float(fit_robustly(Prior([1.0]), data).at(np.ones((1, 1)), np.zeros((1, 1)))[0][0]), 1)
    0.1
    """
    noise = data.noise
    for _ in range(ROUNDS):
        found = Fit(prior, data._replace(noise=noise))
        noise = np.hypot(data.noise, (np.asarray(data.values) - found.at(data.features, data.places)[0]) / 2)
    return found
