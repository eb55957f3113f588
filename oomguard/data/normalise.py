"""Numbers brought to mean 0 and deviation 1, by what the training part holds, in one streaming pass."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from oomguard.data.source import Array, Ints, Pair, Source


class Normaliser(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mean and deviation of every feature, as plain numbers that go through JSON."""

    mean: tuple[float, ...]
    """Of each feature."""
    std: tuple[float, ...]
    """Of each feature; 1 where it is constant, so that it becomes 0."""
    target_mean: tuple[float, ...] | None = None
    """Of each target; None: targets stay as they are."""
    target_std: tuple[float, ...] | None = None
    steps: int
    """How many steps they were taken from."""

    def restored(self, outputs: Array) -> Array:
        """What the head gives, in the units of the data."""
        if self.target_mean is None or self.target_std is None:
            return outputs
        return outputs * np.array(self.target_std, np.float32) + np.array(self.target_mean, np.float32)


class Moments:
    """Count, mean and sum of squared deviations of numbers that come in blocks, in float64.

    Blocks are merged as Chan, Golub and LeVeque do (1979), which loses nothing to a mean far from 0.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: Any = 0.0
        self.squares: Any = 0.0

    def add(self, block: Array) -> None:
        """Rows more."""
        rows = block.reshape(len(block), -1).astype(np.float64)
        mean = rows.mean(axis=0)
        total, shift = self.count + len(rows), mean - self.mean
        self.squares = self.squares + ((rows - mean) ** 2).sum(axis=0) + shift**2 * (self.count * len(rows) / total)
        self.mean = self.mean + shift * (len(rows) / total)
        self.count = total

    def result(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of each column."""
        std = np.sqrt(self.squares / self.count)
        std = np.where(std > np.abs(self.mean) * 1e-12, std, 1.0)  # constant, but for rounding
        return tuple(map(float, self.mean)), tuple(map(float, std))


def fit_normaliser(source: Source, indices: Ints | None = None, *, targets: bool = False) -> Normaliser:
    """Mean and deviation over the steps of these sequences (None: of all), each read once and none kept.

    Steps of windows that overlap count as often as they are trained on.
    """
    chosen: Iterable[Any] = range(len(source)) if indices is None else indices
    read, aimed = Moments(), Moments()
    for index in chosen:
        inputs, wanted = source[int(index)]
        read.add(inputs)
        if targets:
            aimed.add(wanted if wanted.ndim > 1 else wanted[None])
    mean, std = read.result()
    target_mean, target_std = aimed.result() if targets else (None, None)
    return Normaliser(mean=mean, std=std, target_mean=target_mean, target_std=target_std, steps=read.count)


@dataclass(frozen=True, slots=True, eq=False)
class Normalised:
    """A source whose numbers are normalised when they are read."""

    source: Source
    normaliser: Normaliser

    @property
    def lengths(self) -> Ints:
        return self.source.lengths

    @property
    def truncated(self) -> int:
        return self.source.truncated

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Pair:
        inputs, targets = self.source[index]
        own = self.normaliser
        inputs = _scaled(inputs, own.mean, own.std)
        if own.target_mean is not None and own.target_std is not None:
            targets = _scaled(targets, own.target_mean, own.target_std)
        return inputs, targets

    def describe(self) -> dict[str, Any]:
        """As the source, with the normaliser."""
        return self.source.describe() | {"normaliser": msgspec.to_builtins(self.normaliser)}


def _scaled(block: Array, mean: tuple[float, ...], std: tuple[float, ...]) -> Array:
    return np.asarray((block - np.array(mean)) / np.array(std), dtype=np.float32)
