"""The C allocator on the CPU: what glibc makes of PyTorch's requests.

PyTorch asks for each tensor with `posix_memalign(64, size)`. Blocks of at least the mmap threshold get pages of their
own and give them back when freed; smaller ones live in the heap, whose high-water mark stays resident.
"""

from typing import Any

import numpy as np

from oomguard.estimate.call import Count, round_up

THRESHOLD_BYTES = {"steady": 65_536, "pooled": 4 << 20, "roomy": 32 << 20, "plain": 32 << 20, "cuda": 0}
"""From so many bytes on a block gets pages of its own, by allocator setting (on CUDA there is no heap). `steady` gives
back what it can; `pooled` has all that a step of PyTorch's own kernels needs in the heap, and little that is larger;
`roomy` as much as glibc can be told to. `plain`: glibc raises its threshold to what was freed, up to that
(DEFAULT_MMAP_THRESHOLD_MAX, malloc.c, glibc 2.36)."""

ENVIRONMENT: dict[str, dict[str, str]] = {
    "plain": {},
    "steady": {
        "MALLOC_MMAP_THRESHOLD_": str(THRESHOLD_BYTES["steady"]),
        "MALLOC_TRIM_THRESHOLD_": str(THRESHOLD_BYTES["steady"]),
        "MALLOC_TOP_PAD_": "0",
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "30000",
    },
    **{
        name: {
            "MALLOC_MMAP_THRESHOLD_": str(THRESHOLD_BYTES[name]),
            "MALLOC_TRIM_THRESHOLD_": str(1 << 50),
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_MAX_": "30000",
        }
        for name in ("pooled", "roomy")
    },
}
"""What is exported before the process starts, by allocator setting. A fixed threshold stops glibc from raising its own
(mallopt(3)); 30,000 mappings are less than half of what Linux allows a process (vm.max_map_count = 65,530)."""
PAGE_BYTES = 4096


def setting_of(allocator: str | None) -> str:
    """Which of the settings above a process on the CPU is started with: `steady`, unless another of them is asked for.

    >>> [setting_of(name) for name in ("plain", "expandable", None)]
    ['plain', 'steady', 'steady']
    """
    return allocator if allocator is not None and allocator in ENVIRONMENT else "steady"


def in_heap(block: Count, allocator: str) -> Count:
    """Whether a block of so many bytes lives in the heap."""
    return block < THRESHOLD_BYTES[allocator]


def in_heap_of(block: Any, allocators: Any) -> Any:
    """The same on the CPU for a column of candidates, each with its own setting or None.

    >>> in_heap_of(1 << 20, np.array(["steady", "pooled", None], dtype=object)).tolist()
    [False, True, False]
    """
    names = np.asarray(allocators, dtype=object)
    thresholds = np.full(names.shape, THRESHOLD_BYTES["steady"])
    for name in ENVIRONMENT:
        thresholds[names == name] = THRESHOLD_BYTES[name]
    return np.asarray(block) < thresholds


def mapped_bytes(block: Count) -> Count:
    """A block with pages of its own: it, the alignment and glibc's header, in whole pages."""
    return round_up(block + 112, PAGE_BYTES)
