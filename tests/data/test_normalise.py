"""The normaliser is what NumPy says of the training part, and of nothing else."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from data.making import spec, tokens
from hypothesis import given
from hypothesis import strategies as st

from oomguard._data.open import open_data
from oomguard._data.options import DataOptions
from oomguard._data.rows import Normaliser, RunningStatistics, Source
from oomguard._data.source import Array


def noise(*shape: int) -> Array:
    return (np.random.default_rng(0).normal(size=shape) * 3 + 1000).astype(np.float32)


def steps_of(source: Source) -> Array:
    return np.concatenate([source[index][0] for index in range(len(source))]).astype(np.float64)


@pytest.mark.parametrize("shape", [(103, 3), (20, 4, 3)])
def test_mean_and_deviation_are_those_of_the_training_part(shape: tuple[int, ...]) -> None:
    plain = open_data(noise(*shape), spec(), DataOptions(normalise="none")).train
    normaliser = open_data(noise(*shape), spec()).normaliser
    assert normaliser is not None
    np.testing.assert_allclose(normaliser.mean, steps_of(plain).mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(normaliser.std, steps_of(plain).std(axis=0), rtol=1e-10)
    assert normaliser.steps == len(steps_of(plain))


def test_validation_does_not_move_it() -> None:
    series = noise(100, 3)
    moved = series.copy()
    moved[90:] += 1e6
    options = DataOptions(split="time", validation=0.1)
    assert open_data(series, spec(), options).normaliser == open_data(moved, spec(), options).normaliser


def test_both_sides_are_normalised_by_it_when_read() -> None:
    data = open_data(noise(200, 3), spec(), DataOptions(validation=0.3))
    assert data.validation is not None
    np.testing.assert_allclose(steps_of(data.train).mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(steps_of(data.train).std(axis=0), 1, atol=1e-4)
    assert np.abs(steps_of(data.validation)).max() < 10
    assert data.train[0][0].dtype == np.float32


def test_targets_are_normalised_unless_only_inputs_are_asked_for() -> None:
    whole = noise(200, 3)
    plain = open_data(whole, spec(), DataOptions(validation=0, normalise="inputs")).train
    both = open_data(whole, spec(), DataOptions(validation=0))
    assert plain[0][1].mean() > 900
    assert abs(both.train[0][1].mean()) < 5
    assert both.normaliser is not None
    np.testing.assert_allclose(both.normaliser.restored(both.train[0][1]), whole[:4, 2:], rtol=1e-6)


def test_a_constant_feature_becomes_zero() -> None:
    whole = noise(50, 3)
    whole[:, 0] = 0.1
    data = open_data(whole, spec(), DataOptions(validation=0))
    assert np.abs(steps_of(data.train)[:, 0]).max() < 1e-6


def test_tokens_have_none() -> None:
    assert open_data(np.arange(100) % 10, tokens()).normaliser is None


def test_it_goes_through_json_and_is_used_as_it_is() -> None:
    fitted = open_data(noise(100, 3), spec(), DataOptions(normalise="both")).normaliser
    back = msgspec.json.decode(json.dumps(msgspec.to_builtins(fitted)).encode(), type=Normaliser)
    assert back == fitted
    assert open_data(noise(100, 3) + 5, spec(), normaliser=back).normaliser is back


def test_a_source_describes_its_normaliser_in_plain_values() -> None:
    data = open_data(noise(100, 3), spec())
    assert json.loads(json.dumps(data.train.describe()))["normaliser"]["steps"] == 90


@given(st.lists(st.integers(1, 50), min_size=1, max_size=10), st.floats(-1e8, 1e8))
def test_blocks_of_any_size_give_what_the_whole_gives(sizes: list[int], offset: float) -> None:
    whole: Any = np.random.default_rng(1).normal(size=(sum(sizes), 2)) + offset
    moments = RunningStatistics()
    for block in np.split(whole, np.cumsum(sizes)[:-1]):
        moments.add(block)
    np.testing.assert_allclose(moments.mean, whole.mean(axis=0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(moments.squares / sum(sizes), whole.var(axis=0), rtol=1e-6, atol=1e-12)
