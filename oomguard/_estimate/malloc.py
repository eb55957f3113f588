"""The allocators: glibc's on the CPU, and PyTorch's caching allocator on CUDA.

On the CPU, PyTorch asks for each tensor with `posix_memalign(64, size)`. Blocks of at least the mmap threshold get
pages of their own and give them back when freed; smaller ones live in the heap, whose high-water mark stays resident.

On CUDA, a tensor gets a *block*, cut from a *segment* that came from cudaMalloc. Freed blocks stay in the cache, so the
card shows the *reserved* bytes (all segments), while `torch.cuda.max_memory_allocated` shows the blocks in use.
"""

import numpy as np
from numpy.typing import NDArray

from oomguard._estimate.call import Count, Flag, round_up

THRESHOLD_BYTES = {"tight": 65_536, "fast native": 4 << 20, "fast onednn": 32 << 20, "system": 32 << 20, "cuda": 0}
"""Bytes from which a block gets pages of its own, by heap (on CUDA there is none). `tight` gives back what it can.
`fast` keeps what an engine frees and asks for again: all that a step of PyTorch's own kernels needs, and little that is
larger; for oneDNN, which needs blocks of a whole segment, as much as glibc can be set to. `system`: glibc raises its
threshold to what was freed, up to that (DEFAULT_MMAP_THRESHOLD_MAX, malloc.c, glibc 2.36)."""


def _fixed(heap: str, trim_bytes: int) -> dict[str, str]:
    return {
        "MALLOC_MMAP_THRESHOLD_": str(THRESHOLD_BYTES[heap]),
        "MALLOC_TRIM_THRESHOLD_": str(trim_bytes),
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "30000",
    }


ENVIRONMENT: dict[str, dict[str, str]] = {
    "system": {},
    "tight": _fixed("tight", THRESHOLD_BYTES["tight"]) | {"MALLOC_TOP_PAD_": "0"},
    "fast native": _fixed("fast native", 1 << 50),
    "fast onednn": _fixed("fast onednn", 1 << 50),
}
"""Environment variables of a process, by heap. A fixed threshold stops glibc from raising its own
(mallopt(3)); 30,000 mappings are less than half of what Linux allows a process (vm.max_map_count = 65,530)."""
PAGE_BYTES = 4096

MIN_BLOCK_BYTES = 512  # c10/core/AllocatorConfig.h, kMinBlockSize, torch 2.13
SMALL_SEGMENT_BYTES = 2 << 20  # c10/core/AllocatorConfig.h, kSmallBuffer, torch 2.13
LARGE_SEGMENT_BYTES = 20 << 20  # c10/cuda/CUDACachingAllocator.cpp, kLargeBuffer, torch 2.6
ROUND_LARGE_BYTES = 2 << 20  # c10/core/AllocatorConfig.h, kRoundLarge, torch 2.13


def default_allocator(device: str) -> str:
    """The allocator setting of a candidate that names none."""
    return "tight" if device == "cpu" else "system"


def heap_of(allocator: str | None, engine: str | None) -> str:
    """The heap of a process on the CPU, as the tables name it: `tight` unless the candidate names another."""
    if allocator == "fast":
        return "fast onednn" if engine == "onednn" else "fast native"
    return "system" if allocator == "system" else default_allocator("cpu")


def heap_limit(allocator: object, engine: object) -> NDArray[np.int64]:
    """Bytes from which blocks have pages of their own, for each of many candidates on the CPU."""
    limits = np.vectorize(lambda *names: THRESHOLD_BYTES[heap_of(*names)], otypes=[np.int64])
    return np.asarray(limits(np.asarray(allocator, dtype=object), np.asarray(engine, dtype=object)))


def in_heap(block: Count, heap: str) -> Flag:
    """Whether a block of this size lives in the heap."""
    return block < THRESHOLD_BYTES[heap]


def mapped_bytes(block: Count) -> Count:
    """Bytes of a block that has pages of its own: with alignment and glibc's header, in whole pages."""
    return round_up(block + 112, PAGE_BYTES)


def block_bytes(size: Count) -> Count:
    """Round a tensor's bytes up as `max_memory_allocated` counts them: to 512 bytes; 0 stays 0.

    A block may be larger: the allocator does not split off a rest of at most 1 MiB from a segment over 1 MiB. That
    costs at most 1 MiB for each block over 1 MiB.
    """
    return round_up(size, MIN_BLOCK_BYTES)


def reserved_bytes(allocated: Count, *, expandable: bool = False) -> Count:
    """Bytes reserved for blocks of `allocated` bytes: an eighth more, and a segment of each pool.

    Blocks do not fit segments to the byte, and backward does not always ask for the sizes that forward freed. An eighth
    is the average of whole steps (1,500 simulated Adam steps with peaks over 200 MB: median 1.14 of the allocated
    peak). Expandable segments grow page by page (2 MiB) and need only the segments; not measured.
    """
    pools = SMALL_SEGMENT_BYTES + LARGE_SEGMENT_BYTES
    return round_up(allocated, ROUND_LARGE_BYTES) + pools if expandable else allocated + allocated // 8 + pools
