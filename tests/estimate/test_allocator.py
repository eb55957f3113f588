"""The caching allocator's rounding, splitting and reserving. Whole training steps are in test_cudnn.py."""

import pytest
from estimate.cuda_allocator import SMALL_BYTES, Cache, Event, replay, segment_bytes
from hypothesis import given
from hypothesis import strategies as st

from oomguard._estimate.call import round_up
from oomguard._estimate.malloc import block_bytes, heap_of, in_heap

MIB = 1 << 20


@pytest.mark.parametrize(("size", "block"), [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_blocks_are_multiples_of_512(size: int, block: int) -> None:
    assert block_bytes(size) == block


@pytest.mark.parametrize(("size", "multiple"), [(1000, 1008), (1008, 1008)])
def test_a_size_is_rounded_up_to_a_multiple_and_a_multiple_stays(size: int, multiple: int) -> None:
    assert round_up(size, 16) == multiple


@pytest.mark.parametrize(
    ("allocator", "engine", "heap"),
    [
        ("system", "native", "system"),
        ("fast", "native", "fast native"),
        ("fast", "onednn", "fast onednn"),
        ("expandable", "native", "tight"),
        (None, "native", "tight"),
    ],
)
def test_the_heap_is_tight_unless_the_allocator_names_another(allocator: str | None, engine: str, heap: str) -> None:
    assert heap_of(allocator, engine) == heap


def test_a_block_of_8_mib_is_in_the_heap_only_where_onednn_keeps_such_blocks() -> None:
    heaps = [heap_of("tight", "onednn"), heap_of("fast", "native"), heap_of("fast", "onednn"), heap_of(None, None)]
    assert [in_heap(8 * MIB, heap) for heap in heaps] == [False, False, True, False]


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
    ],
)
def test_segments_follow_the_size(size: int, segment: int) -> None:
    assert segment_bytes(size) == segment


def test_a_rest_of_up_to_1_mib_goes_with_a_large_block() -> None:
    assert replay([("a", 11 * MIB)]).allocated_bytes == 12 * MIB


def test_a_larger_rest_is_split_off_and_used() -> None:
    assert replay([("a", 3 * MIB), ("b", 17 * MIB - 512)]).reserved_bytes == 20 * MIB


def test_a_freed_block_is_used_again() -> None:
    assert replay([("a", 30 * MIB), ("a", None), ("b", 29 * MIB)]).reserved_bytes == 30 * MIB


def test_the_best_fit_is_taken() -> None:
    freed: list[Event] = [("a", 40 * MIB), ("b", 30 * MIB), ("a", None), ("b", None)]
    assert replay([*freed, ("c", 30 * MIB), ("d", 40 * MIB)]).reserved_bytes == 70 * MIB


def test_neighbours_merge_when_freed() -> None:
    parts: list[Event] = [("a", 8 * MIB), ("b", 8 * MIB), ("a", None), ("b", None)]
    assert replay([*parts, ("c", 20 * MIB)]).reserved_bytes == 20 * MIB


def test_small_and_large_blocks_do_not_share_a_segment() -> None:
    assert replay([("a", 3 * MIB), ("b", 512)]).reserved_bytes == 22 * MIB


def test_a_freed_block_can_be_too_small_so_that_more_is_reserved_than_ever_in_use() -> None:
    after = replay([("a", 30 * MIB), ("a", None), ("b", 40 * MIB)])
    assert (after.peak_bytes, after.reserved_bytes) == (40 * MIB, 70 * MIB)


def test_a_live_name_is_refused() -> None:
    with pytest.raises(ValueError, match="already live"):
        replay([("a", 1), ("a", 1)])


sizes = st.one_of(st.integers(0, 4096), st.integers(0, 3 * MIB), st.integers(0, 64 * MIB))


@st.composite
def traces(draw: st.DrawFn) -> list[Event]:
    """Allocations in any sizes, freed in any order; the last ones may stay."""
    made = draw(st.lists(st.tuples(sizes, st.booleans()), max_size=25))
    events: list[Event] = []
    for index, (size, free_one) in enumerate(made):
        live = sorted({name for name, _ in events} - {name for name, size in events if size is None})
        if live and free_one:
            events.append((draw(st.sampled_from(live)), None))
        events.append((str(index), size))
    return events


def live_sizes(events: list[Event]) -> list[int]:
    freed = {name for name, size in events if size is None}
    return [size for name, size in events if size is not None and name not in freed]


@given(traces())
def test_allocated_is_the_sum_of_blocks_and_at_most_1_mib_more_for_each_large_one(events: list[Event]) -> None:
    live = [block_bytes(size) for size in live_sizes(events)]
    spare = SMALL_BYTES * sum(block > SMALL_BYTES for block in live)
    assert sum(live) <= replay(events).allocated_bytes <= sum(live) + spare


@given(traces())
def test_the_peak_is_reserved(events: list[Event]) -> None:
    after = replay(events)
    assert after.allocated_bytes <= after.peak_bytes <= after.reserved_bytes


@given(traces())
def test_nothing_is_in_use_when_all_is_freed(events: list[Event]) -> None:
    freed = {name for name, size in events if size is None}
    rest: list[Event] = [(name, None) for name, _ in events if name not in freed]
    assert replay([*events, *rest]).allocated_bytes == 0


@given(traces())
def test_freed_memory_is_whole_again(events: list[Event]) -> None:
    cache = Cache()
    cache.run(events)
    freed = {name for name, size in events if size is None}
    cache.run([(name, None) for name, _ in events if name not in freed])
    before = cache.reserved_bytes
    largest = max((segment_bytes(size) for _, size in events if size and size > MIB), default=0)
    cache.run([("again", largest)])
    assert cache.reserved_bytes == before
