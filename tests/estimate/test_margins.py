"""Quantiles of stored errors."""

from oomguard._estimate.margins import quantile


def test_a_quantile_is_that_of_a_further_error_and_the_largest_if_there_are_few() -> None:
    assert quantile(range(100), 0.05) == 95
    assert quantile([3, 1], 0.05) == 3
