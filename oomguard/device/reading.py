"""Reading and Watched: what a process uses, seen from inside and from outside."""

import msgspec


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What this process uses on a device, now and at most since the last `reset()`.

    `peak_bytes` counts what estimates and budgets count, so all three compare directly.
    """

    peak_bytes: int
    """The largest since the reset. CPU: resident bytes of the whole process (of its whole life, where the kernel does
    not let the peak be reset). CUDA: what the card would show for the process, reserved bytes and context."""
    now_bytes: int
    """The same, now."""
    runtime_bytes: int
    """What is there before any model. CPU: resident bytes at the reset. CUDA: the context."""
    committed_bytes: int | None = None
    """CPU: VmData now, which is what an rlimit counts. None on CUDA, and where nothing counts it."""
    committed_peak_bytes: int | None = None
    """CPU: the largest VmData since the reset, as far as it is known: exact while the address space grows beyond all it
    ever was, else from below. None as above."""
    allocated_bytes: int | None = None
    """CUDA: the largest sum of tensors since the reset (`torch.cuda.max_memory_allocated`); None on the CPU."""
    reserved_bytes: int | None = None
    """CUDA: the most that PyTorch's allocator has taken since the reset (`max_memory_reserved`); None on the CPU."""
    retries: int = 0
    """CUDA: how often since the reset the allocator had to empty its cache and ask again: a sign of strain."""
    swapped_bytes: int = 0
    """CPU: what of this process is swapped out now."""


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """What another process uses of the host's memory now."""

    resident_bytes: int
    """In RAM, libraries and shared memory included."""
    committed_bytes: int | None
    """VmData; None where nothing counts it."""
