"""The order of sequences: every one once, from one bucket where possible, the same from the same seed."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard._core.errors import MisuseError
from oomguard._data.order import Cuts, Order, Position, chosen_share, whole


@st.composite
def orders(draw: st.DrawFn) -> Order:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=120))
    bounds = draw(st.sets(st.integers(1, 40), max_size=4)) | {40}
    buckets = {bound: draw(st.integers(1, 8)) for bound in bounds}
    return Order(
        lengths=np.array(lengths), buckets=buckets, batch=draw(st.integers(1, 20)), seed=draw(st.integers(0, 9))
    )


def batches(order: Order, epoch: int = 0) -> list[list[int]]:
    return [sequences.tolist() for _, sequences in order.batches(epoch)]


def buckets_of(order: Order, sequences: Any) -> set[int]:
    return set(np.searchsorted(order.bounds, order.lengths[sequences]).tolist())


@given(orders(), st.integers(0, 5))
def test_every_sequence_comes_once_in_every_epoch(order: Order, epoch: int) -> None:
    assert sorted(sequence for batch in batches(order, epoch) for sequence in batch) == list(range(len(order.lengths)))


@given(orders())
def test_every_batch_is_full_but_perhaps_the_last(order: Order) -> None:
    sizes = [len(batch) for batch in batches(order)]
    assert all(size == order.batch for size in sizes[:-1])
    assert 0 < sizes[-1] <= order.batch
    assert len(sizes) == len(order)


@given(orders())
def test_a_batch_is_of_one_bucket_where_possible(order: Order) -> None:
    home = np.searchsorted(order.bounds, order.lengths)
    possible = sum(np.bincount(home) // order.batch)
    alone = sum(len(batch) == order.batch and len(buckets_of(order, batch)) == 1 for batch in batches(order))
    assert alone >= possible


@given(orders())
def test_microbatches_are_the_batch_within_every_bound(order: Order) -> None:
    for batch in batches(order):
        parts = order.microbatches(np.array(batch))
        assert sorted(np.concatenate(parts).tolist()) == sorted(batch)
        assert [order.lengths[part].max() for part in parts] == sorted(
            (order.lengths[part].max() for part in parts), reverse=True
        )
        for part in parts:
            [number] = buckets_of(order, part)
            bound = int(order.bounds[number])
            assert len(part) <= order.buckets[bound]
            assert int(order.lengths[part].max()) <= bound


@given(orders())
def test_the_same_seed_and_epoch_give_the_same_order(order: Order) -> None:
    same = Order(lengths=order.lengths, buckets=order.buckets, batch=order.batch, seed=order.seed)
    assert batches(order, 3) == batches(same, 3)


def test_another_epoch_or_seed_gives_another_order() -> None:
    order = Order(lengths=np.ones(100, int), buckets={1: 4}, batch=8)
    other = Order(lengths=np.ones(100, int), buckets={1: 4}, batch=8, seed=1)
    assert len({str(batches(order, 0)), str(batches(order, 1)), str(batches(other, 0))}) == 3


def test_buckets_take_turns() -> None:
    order = Order(
        lengths=np.repeat([1, 10], 80),
        buckets={10: 2, 1: 8},
        batch=8,
    )
    turns = [buckets_of(order, batch).pop() for batch in batches(order)]
    assert turns != sorted(turns)
    assert turns != sorted(turns, reverse=True)


def test_smaller_microbatches_leave_the_batches_as_they_are() -> None:
    lengths = np.arange(1, 41)
    large, small = (Order(lengths=lengths, buckets={20: m, 40: m}, batch=6) for m in (6, 1))
    assert batches(large) == batches(small)


def padding_share(order: Order) -> float:
    """The share of all steps of an epoch that is padding."""
    padded = 0
    for _, batch in order.batches(0):
        padded += sum(len(part) * int(order.lengths[part].max()) for part in order.microbatches(batch))
    return 1 - int(order.lengths.sum()) / padded


def test_buckets_leave_little_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 2000)
    order = Order(lengths=lengths, buckets={1000: 8}, batch=8)
    many = Order(lengths=lengths, buckets={100 * i: 8 for i in range(1, 11)}, batch=8)
    assert padding_share(order) > 0.4
    assert padding_share(many) < 0.15


def test_an_epoch_of_ten_million_sequences_is_a_few_arrays() -> None:
    import tracemalloc

    lengths = np.full(1_000_000, 7)
    order = Order(lengths=lengths, buckets={7: 8}, batch=32)
    tracemalloc.start()
    epoch = order.epoch(0)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(epoch), len(order)) == (1_000_000, 31_250)
    assert (kept < 10 * 1_000_000, peak < 60 * 1_000_000) == (True, True)


def test_the_order_and_the_split_stay_as_runs_of_earlier_versions_had_them() -> None:
    order = Order(lengths=np.array([3, 9, 2, 8, 1]), buckets={4: 2, 9: 1}, batch=2)
    assert order.epoch(0).tolist() == [3, 1, 4, 2, 0]
    assert [numbers.tolist() for numbers in chosen_share(5, 0.2, seed=1)] == [[2], [0, 1, 3, 4]]


def test_windows_end_where_their_series_ends() -> None:
    cuts = Cuts(pieces=whole(np.array([0, 10, 13])), ahead=1, seq=4, stride=4)
    assert [cuts[i] for i in range(len(cuts))] == [(0, 4, 0), (4, 4, 0), (8, 1, 0), (10, 2, 1)]


def test_a_sequence_that_no_bucket_holds_is_named() -> None:
    with pytest.raises(MisuseError, match="holds 5 steps, and sequence 1 has 9"):
        Order(lengths=np.array([3, 9]), buckets={5: 1}, batch=2)


def order_with(**fields: Any) -> Order:
    return Order(lengths=np.array([1]), batch=1, **fields)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (order_with, {"buckets": {0: 1}}, "Longest of a bucket must be a whole number from 1"),
        (order_with, {"buckets": {5: 0}}, "--microbatch must be a whole number from 1"),
        (Position, {"epoch": -1}, "--epoch must be"),
        (Position, {"done": 1.5}, "--done must be"),
    ],
)
def test_values_are_checked_at_birth(kind: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        kind(**fields)
