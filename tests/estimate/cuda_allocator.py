"""A simulator of PyTorch's CUDA caching allocator, exact to the byte: it checks the closed forms of the estimate."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from oomguard._estimate.call import round_up
from oomguard._estimate.malloc import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    ROUND_LARGE_BYTES,
    SMALL_SEGMENT_BYTES,
    block_bytes,
)

SMALL_BYTES = 1 << 20  # c10/core/AllocatorConfig.h, kSmallSize: the largest block of the small pool, torch 2.13
MIN_LARGE_BYTES = 10 << 20  # c10/core/AllocatorConfig.h, kMinLargeAlloc: from here on a segment of its own, torch 2.13

Event = tuple[str, int | None]
"""`(name, bytes)` allocates a tensor under this name, `(name, None)` frees it. A tensor of 0 bytes takes nothing."""


def segment_bytes(size: int) -> int:
    """What is asked of cudaMalloc for a tensor that no cached block can hold.

    >>> segment_bytes(100) >> 20, segment_bytes(3 << 20) >> 20, segment_bytes((10 << 20) + 1) >> 20
    (2, 20, 12)
    """
    size = int(block_bytes(size))
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    return LARGE_SEGMENT_BYTES if size < MIN_LARGE_BYTES else int(round_up(size, ROUND_LARGE_BYTES))


@dataclass(slots=True, eq=False)
class _Block:
    """A piece of a segment, linked to its neighbours there."""

    order: tuple[int, int]
    """Segment and offset: ties between equal sizes go to the lower address."""
    size: int
    pool: "list[_Block]"
    """The free blocks of its kind, smallest first."""
    free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None


class Cache:
    """A model of the allocator on an empty card: best fit, split, merge; nothing is ever given back to the card.

    Exact to the byte on every column of PyTorch 1.9.1's steps (tests/facts/torch191_steps.csv), reserved bytes too.
    Limits: one stream, no expandable segments, no emptying of the cache (which an allocation does before it fails).
    """

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_bytes = 0
        self._segments = 0
        self._small: list[_Block] = []
        self._large: list[_Block] = []
        self._named: dict[str, _Block] = {}

    def run(self, events: Iterable[Event]) -> None:
        """Allocate and free, in order."""
        for name, size in events:
            if size is None:
                self._release(self._named.pop(name, None))
            elif size:
                if name in self._named:
                    raise ValueError(f"A name is allocated once, but {name!r} is already live. Free it first.")
                self._named[name] = self._take(int(block_bytes(size)))

    def restart_peak(self) -> None:
        """Forget the peak, as `torch.cuda.reset_peak_memory_stats` does."""
        self.peak_bytes = self.allocated_bytes

    def _take(self, size: int) -> _Block:
        small = size <= SMALL_BYTES
        pool = self._small if small else self._large
        at = bisect_left(pool, (size, (-1, -1)), key=_rank)
        block = pool.pop(at) if at < len(pool) else self._grow(size, pool)
        rest = block.size - size
        # should_split of CUDACachingAllocator.cpp: a large block keeps a rest of up to 1 MiB.
        if rest >= MIN_BLOCK_BYTES if small else rest > SMALL_BYTES:
            tail = _Block((block.order[0], block.order[1] + size), rest, pool, before=block, after=block.after)
            if tail.after is not None:
                tail.after.before = tail
            block.after, block.size = tail, size
            insort(pool, tail, key=_rank)
        block.free = False
        self.allocated_bytes += block.size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return block

    def _grow(self, size: int, pool: list[_Block]) -> _Block:
        segment = segment_bytes(size)
        self.reserved_bytes += segment
        self._segments += 1
        return _Block((self._segments, 0), segment, pool)

    def _release(self, block: _Block | None) -> None:
        if block is None:  # it was empty
            return
        self.allocated_bytes -= block.size
        block.free = True
        if block.before is not None and block.before.free:
            block = _join(block.before, block, cached=block.before)
        if block.after is not None and block.after.free:
            block = _join(block, block.after, cached=block.after)
        insort(block.pool, block, key=_rank)


def _rank(block: _Block | tuple[int, tuple[int, int]]) -> tuple[int, tuple[int, int]]:
    return block if isinstance(block, tuple) else (block.size, block.order)


def _join(left: _Block, right: _Block, cached: _Block) -> _Block:
    """Merge two neighbours into the left one; `cached`, the one that was free already, leaves the pool."""
    left.pool.pop(bisect_left(left.pool, _rank(cached), key=_rank))
    left.free = True
    left.size += right.size
    left.after = right.after
    if left.after is not None:
        left.after.before = left
    return left


def replay(events: Iterable[Event]) -> Cache:
    """The allocator after these events, on a card that was empty: read `peak_bytes` and `reserved_bytes` from it.

    >>> after = replay([("x", 3 << 20), ("y", 100), ("x", None)])
    >>> after.peak_bytes, after.reserved_bytes >> 20
    (3146240, 22)
    """
    cache = Cache()
    cache.run(events)
    return cache
