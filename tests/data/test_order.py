"""The order of sequences: every one once, from one bucket where possible, the same from the same seed."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.data.order import Bucket, Order, Position, padding_share
from oomguard.errors import MisuseError


@st.composite
def orders(draw: st.DrawFn) -> Order:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=120))
    bounds = draw(st.sets(st.integers(1, 40), max_size=4)) | {40}
    buckets = [Bucket(longest=bound, microbatch=draw(st.integers(1, 8))) for bound in bounds]
    return Order(
        lengths=np.array(lengths), buckets=tuple(buckets), batch=draw(st.integers(1, 20)), seed=draw(st.integers(0, 9))
    )


def batches(order: Order, epoch: int = 0) -> list[list[int]]:
    found = order.epoch(epoch)
    return [found.sequences(number).tolist() for number in range(len(found))]


def buckets_of(order: Order, sequences: Any) -> set[int]:
    return set(np.searchsorted(order.bounds, order.lengths[sequences]).tolist())


@given(orders(), st.integers(0, 5))
def test_every_sequence_comes_once_in_every_epoch(order: Order, epoch: int) -> None:
    assert sorted(one for batch in batches(order, epoch) for one in batch) == list(range(len(order.lengths)))


@given(orders())
def test_every_batch_is_full_but_perhaps_the_last(order: Order) -> None:
    sizes = [len(one) for one in batches(order)]
    assert all(size == order.batch for size in sizes[:-1])
    assert 0 < sizes[-1] <= order.batch
    assert len(sizes) == len(order)


@given(orders())
def test_a_batch_is_of_one_bucket_where_possible(order: Order) -> None:
    home = np.searchsorted(order.bounds, order.lengths)
    possible = sum(np.bincount(home) // order.batch)
    alone = sum(len(one) == order.batch and len(buckets_of(order, one)) == 1 for one in batches(order))
    assert alone >= possible


@given(orders(), st.none() | st.integers(1, 10))
def test_microbatches_are_the_batch_within_every_bound(order: Order, size: int | None) -> None:
    for one in batches(order):
        parts = order.microbatches(np.array(one), size)
        assert sorted(np.concatenate(parts).tolist()) == sorted(one)
        for part in parts:
            [number] = buckets_of(order, part)
            bucket, longest = order.buckets[number], int(order.lengths[part].max())
            assert len(part) <= min(bucket.microbatch, size or bucket.microbatch)
            assert longest <= bucket.longest
            assert len(part) * longest <= bucket.longest * bucket.microbatch


@given(orders())
def test_the_same_seed_and_epoch_give_the_same_order(order: Order) -> None:
    same = Order(lengths=order.lengths, buckets=order.buckets, batch=order.batch, seed=order.seed)
    assert batches(order, 3) == batches(same, 3)


def test_another_epoch_or_seed_gives_another_order() -> None:
    one = Order(lengths=np.ones(100, int), buckets=(Bucket(longest=1, microbatch=4),), batch=8)
    other = Order(lengths=np.ones(100, int), buckets=(Bucket(longest=1, microbatch=4),), batch=8, seed=1)
    assert len({str(batches(one, 0)), str(batches(one, 1)), str(batches(other, 0))}) == 3


def test_buckets_take_turns() -> None:
    order = Order(
        lengths=np.repeat([1, 10], 80),
        buckets=(Bucket(longest=10, microbatch=2), Bucket(longest=1, microbatch=8)),
        batch=8,
    )
    turns = [buckets_of(order, one).pop() for one in batches(order)]
    assert turns != sorted(turns)
    assert turns != sorted(turns, reverse=True)


def test_smaller_microbatches_leave_the_batches_as_they_are() -> None:
    lengths = np.arange(1, 41)
    large, small = (
        Order(lengths=lengths, buckets=(Bucket(longest=20, microbatch=m), Bucket(longest=40, microbatch=m)), batch=6)
        for m in (6, 1)
    )
    assert batches(large) == batches(small)


def test_buckets_leave_little_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 2000)
    one = Order(lengths=lengths, buckets=(Bucket(longest=1000, microbatch=8),), batch=8)
    many = Order(lengths=lengths, buckets=tuple(Bucket(longest=100 * i, microbatch=8) for i in range(1, 11)), batch=8)
    assert padding_share(one) > 0.4
    assert padding_share(many) < 0.15


def test_an_epoch_of_ten_million_sequences_is_a_few_arrays() -> None:
    import tracemalloc

    lengths = np.full(1_000_000, 7)
    order = Order(lengths=lengths, buckets=(Bucket(longest=7, microbatch=8),), batch=32)
    tracemalloc.start()
    epoch = order.epoch(0)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(epoch) == 31_250
    assert (kept < 10 * 1_000_000, peak < 60 * 1_000_000) == (True, True)


def test_a_sequence_that_no_bucket_holds_is_named() -> None:
    with pytest.raises(MisuseError, match="holds 5 steps, and sequence 1 has 9"):
        Order(lengths=np.array([3, 9]), buckets=(Bucket(longest=5, microbatch=1),), batch=2)


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        (Bucket, {"longest": 0, "microbatch": 1}, "Longest of a bucket must be a whole number from 1"),
        (Bucket, {"longest": 5, "microbatch": 0}, "--microbatch must be a whole number from 1"),
        (Position, {"epoch": -1}, "--epoch must be"),
        (Position, {"done": 1.5}, "--done must be"),
    ],
)
def test_values_are_checked_at_birth(kind: Any, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(MisuseError, match=told):
        kind(**fields)
