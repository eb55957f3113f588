"""A small regression: what is like the data is predicted closely, and what is not keeps a wide margin.

A Gaussian process. The value is a sum of a few effects (linear in features), each with a prior that says how large it
usually is; of something that all rows of one group have in common; and of noise.
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
    group: float = 0.0
    """Of what the rows of a group have in common."""


class Data(NamedTuple):
    """What was measured."""

    features: Any
    """One row for each value, one column for each effect."""
    groups: Any
    """A number for each row: equal for those of one group."""
    values: Any
    """The values."""
    noise: Any
    """The standard deviation of each."""


class Fit:
    """What the data tell.

    >>> data = Data(np.ones((2, 1)), np.array([0, 0]), np.array([0.1, 0.1]), np.array([0.01, 0.01]))
    >>> mean, deviation = Fit(Prior([1.0]), data).at(np.ones((1, 1)), np.array([0]))
    >>> round(float(mean[0]), 3), float(deviation[0]) < 0.01
    (0.1, True)
    """

    def __init__(self, prior: Prior, data: Data) -> None:
        self.variances, self.group_variance = np.square(np.asarray(prior.effects)), prior.group**2
        self.data = data
        own = self._covariance(data.features, data.groups) + np.diag(np.square(data.noise))
        self._inverse = np.linalg.inv(own) if len(data.values) else np.empty((0, 0))
        self._weights = self._inverse @ np.asarray(data.values, dtype=float)

    def at(self, features: Any, groups: Any) -> tuple[Any, Any]:
        """The expected value there, and its standard deviation (noise not included)."""
        shared = self._covariance(features, groups)
        before = np.square(features) @ self.variances + self.group_variance
        variance = before - np.einsum("ij,jk,ik->i", shared, self._inverse, shared)
        return shared @ self._weights, np.sqrt(np.maximum(variance, 0.0))

    def _covariance(self, features: Any, groups: Any) -> Any:
        """Of rows with the rows of the data."""
        same = np.asarray(groups)[:, None] == np.asarray(self.data.groups)[None, :]
        return (features * self.variances) @ self.data.features.T + self.group_variance * same


def fit_robustly(prior: Prior, data: Data) -> Fit:
    """The same for values of which some are far off: what the others contradict counts less and less.

    >>> data = Data(np.ones((3, 1)), np.zeros(3), np.array([0.1, 0.1, 3.0]), np.full(3, 0.05))
    >>> round(float(fit_robustly(Prior([1.0]), data).at(np.ones((1, 1)), np.zeros(1))[0][0]), 1)
    0.1
    """
    noise = data.noise
    for _ in range(ROUNDS):
        found = Fit(prior, data._replace(noise=noise))
        noise = np.hypot(data.noise, (np.asarray(data.values) - found.at(data.features, data.groups)[0]) / 2)
    return found
