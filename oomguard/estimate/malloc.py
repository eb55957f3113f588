"""The C allocator on the CPU: what glibc makes of PyTorch's requests.

PyTorch asks for each tensor with `posix_memalign(64, size)`. Blocks of at least the mmap threshold get pages of their
own and give them back when freed; smaller ones live in the heap, whose high-water mark stays resident.
"""

from oomguard.estimate.call import Count, round_up

STEADY_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "30000",
}
"""The allocator setting `steady`: exported before the process starts. A fixed threshold stops glibc from raising its
own (mallopt(3)); 30,000 mappings are less than half of what Linux allows a process (vm.max_map_count = 65,530)."""

STEADY_THRESHOLD_BYTES = 65_536
"""Of the setting `steady`."""
PLAIN_THRESHOLD_BYTES = 32 << 20
"""glibc raises its threshold to what was freed, up to 32 MiB (DEFAULT_MMAP_THRESHOLD_MAX, malloc.c, glibc 2.36)."""
PAGE_BYTES = 4096


def in_heap(block: Count, allocator: str) -> Count:
    """Whether a block of so many bytes lives in the heap (on CUDA there is none)."""
    return block < {"plain": PLAIN_THRESHOLD_BYTES, "cuda": 0}.get(allocator, STEADY_THRESHOLD_BYTES)


def mapped_bytes(block: Count) -> Count:
    """A block with pages of its own: it, the alignment and glibc's header, in whole pages."""
    return round_up(block + 112, PAGE_BYTES)
