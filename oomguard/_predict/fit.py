"""A Gaussian process, which keeps a wide margin for what is unlike its data."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

FAR = 1e3  # distance of rows that have nothing in common

Floats = NDArray[np.float64]


class Term(NamedTuple):
    """One summand of a value: a smooth function of some coordinates; without coordinates, a constant."""

    deviation: float  # its standard deviation before there are data
    columns: tuple[int, ...] = ()
    """The coordinates it depends on. Rows at distance 1 share 0.6 of it, at distance 3 a hundredth."""


class Data(NamedTuple):
    """Measured values, one row each."""

    places: Floats  # coordinates
    values: Floats
    noise: Floats  # the standard deviation of each value around the sum of the terms


class Fit:
    """The posterior of some terms and data."""

    def __init__(self, terms: Sequence[Term], data: Data) -> None:
        self.terms, self.data = terms, data
        own = covariance(terms, data.places[:, None], data.places[None]) + np.diag(np.square(data.noise))
        self._inverse = np.linalg.inv(own) if len(data.values) else np.empty((0, 0))
        self._weights = self._inverse @ data.values
        self.evidence = -0.5 * float(data.values @ self._weights + np.linalg.slogdet(own)[1])
        """The logarithm of the data's likelihood, up to a constant."""

    def at(self, places: Floats) -> tuple[Floats, Floats]:
        """The expected values of some rows, and their standard deviations (noise not included)."""
        shared = self._shared(places)
        prior = sum(term.deviation**2 for term in self.terms)
        variance = prior - np.sum((shared @ self._inverse) * shared, axis=1)
        return shared @ self._weights, np.sqrt(np.maximum(variance, 0.0))

    def between(self, places: Floats, others: Floats) -> Floats:
        """The covariance of the value of each row with that of another, given the data."""
        known = (self._shared(places) @ self._inverse) * self._shared(others)
        return np.asarray(covariance(self.terms, places, others) - np.sum(known, axis=1))

    def _shared(self, places: Floats) -> Floats:
        """The covariance of some rows with those of the data."""
        return covariance(self.terms, places[:, None], self.data.places[None])

    @property
    def surprises(self) -> Floats:
        """How far each value is from what all others predict, in standard deviations of that prediction."""
        return np.asarray(self._weights / np.sqrt(np.diag(self._inverse)))


def covariance(terms: Sequence[Term], places: Floats, others: Floats) -> Floats:
    """The covariance of the values of rows before there are data."""
    shape = np.broadcast_shapes(places.shape, others.shape)[:-1]
    away = {column: np.square(places[..., column] - others[..., column]) for term in terms for column in term.columns}
    shared = np.zeros(shape)
    for term in terms:
        distance = sum((away[column] for column in term.columns), np.zeros(()))
        shared += term.deviation**2 * np.exp(-distance / 2)
    return shared


def matrix(columns: Iterable[ArrayLike]) -> Floats:
    """Columns, some of them single numbers, as a matrix."""
    arrays = (np.atleast_1d(np.asarray(column, dtype=float)) for column in columns)
    return np.stack(np.broadcast_arrays(*arrays), axis=1)


def stacked(rows: Iterable[Data], *, coordinates: int) -> Data:
    """The rows of several data, perhaps of none."""
    empty = Data(np.empty((0, coordinates)), np.empty(0), np.empty(0))
    return Data(*map(np.concatenate, zip(empty, *rows, strict=True)))


def without_outliers(terms: Sequence[Term], data: Data) -> Data:
    """The data with more noise where a value is far from what the others predict, so that it counts less."""
    noise = data.noise
    for _ in data.values:
        fit = Fit(terms, data._replace(noise=noise))
        noise = np.hypot(data.noise, (data.values - fit.at(data.places)[0]) / 2)
    return data._replace(noise=noise)
