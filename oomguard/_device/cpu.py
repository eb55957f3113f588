"""The CPU as a device: its budget (limits.py), the memory that this process uses, and how a limit is enforced."""

import ctypes
import gc
import math
import os
import platform
import re
from contextlib import suppress
from pathlib import Path

import msgspec

from oomguard._device import limits
from oomguard._device.budget import Budget, Reading
from oomguard._device.proc import PROC, Status, read_status, read_text
from oomguard._estimate.malloc import ENVIRONMENT, heap_of
from oomguard._estimate.target import COMMITTED_TENTHS
from oomguard._spec.candidate import Candidate

NEEDED_FLAGS = {
    "bf16": [{"avx512bw", "avx512vl", "avx512dq"}],
    "fp16": [{"avx512_fp16"}, {"amx_fp16"}],
}
"""Any of these sets of cpuinfo flags lets oneDNN train in that precision: bf16 from `avx512_core` on (slowly, unless
avx512_bf16 or amx_bf16 is there too), fp16 from `avx512_core_fp16` on (oneDNN 3.12, Data Types, hardware limitations;
torch's `mkldnn_bf16_device_check` asks for the same). Only x86: others are taken to have fp32 alone."""

_at_reset: Status | None = None  # this process at the last reset: one for all devices, as the kernel keeps one peak
_inherited_bytes: int | None = None  # the soft RLIMIT_DATA before `enforce` first changed it (-1: none)


class Cpu(msgspec.Struct, frozen=True):
    """The CPU and the host's memory."""

    @property
    def name(self) -> str:
        """The name as `--device` and torch take it."""
        return "cpu"

    def title(self) -> str:
        """The processor's or the card's name."""
        return cpu_name()

    def precisions(self) -> tuple[str, ...]:
        """The precisions that it trains in, `fp32` first."""
        return cpu_precisions()

    def library(self) -> str | None:
        """The library of its kernels, with the version; None if it is unknown. Imports torch."""
        import torch

        match = re.search(r"(?:MKL-DNN|oneDNN) v?(\d[\w.]*)", torch.__config__.show())
        return None if match is None else f"oneDNN {match[1]}"

    def driver(self) -> str | None:
        """The version of its driver; None if it has none or it is unknown."""
        return None

    def budget(self) -> Budget:
        """The budget of this process, all that it already holds included."""
        return limits.budget()

    def environment(self, candidate: Candidate, engine: str) -> dict[str, str]:
        """The variables that the candidate's process must start with: glibc reads its thresholds only then."""
        return dict(ENVIRONMENT[heap_of(candidate.allocator, engine)])

    def settle(self, candidate: Candidate) -> None:
        """Set the candidate's threads and engine, which a running process can change."""
        import torch

        if candidate.threads is not None:
            torch.set_num_threads(candidate.threads)
        torch.backends.mkldnn.enabled = candidate.engine != "native"  # type: ignore[assignment]

    def enforce(self, limit_bytes: int, committed_bytes: int | None = None) -> None:
        """Make allocations fail before this process exceeds the committed bytes that a resident limit can need.

        Linux enforces no limit of resident bytes on a process, and oneDNN commits up to 2.8 bytes for each that it
        touches: so this is a backstop against a runaway, not the limit itself. Never above an inherited limit.
        """
        now = read_status()
        if now is None or now.committed_bytes is None:  # nothing counts them: nothing to enforce
            return
        growth_bytes = max(0, limit_bytes - now.resident_bytes)
        backstop_bytes = now.committed_bytes + growth_bytes * COMMITTED_TENTHS // 10
        _set_soft_limit(backstop_bytes if committed_bytes is None else min(backstop_bytes, committed_bytes))

    def unlimit(self) -> None:
        """Remove the limit that `enforce` set."""
        if _inherited_bytes is not None:
            _set_soft_limit(_inherited_bytes)

    def reset(self) -> None:
        """Begin a new section: peaks count from here."""
        global _at_reset
        with suppress(OSError):  # not Linux, or not allowed here: the peak stays that of the process's whole life
            (PROC / "self/clear_refs").write_text("5")
        _at_reset = read_status()

    def reading(self) -> Reading:
        """The memory that this process uses, now and at most since the reset."""
        now = read_status()
        assert now is not None  # this process is not gone
        start = _at_reset or now
        return Reading(
            peak_bytes=now.peak_bytes,
            now_bytes=now.resident_bytes,
            runtime_bytes=start.resident_bytes,
            committed_bytes=now.committed_bytes,
            committed_peak_bytes=_committed_peak(start, now),
            swapped_bytes=now.swapped_bytes,
        )

    def wait(self) -> None:
        """Wait until all work issued to the device is done. Work on the CPU is done when its call returns."""

    def release(self) -> None:
        """Free garbage and caches."""
        gc.collect()
        trim_heap()

    def held(self, pid: int) -> int:
        """The bytes of this device that another process holds now, as far as is known."""
        status = read_status(pid)
        return 0 if status is None else status.resident_bytes


def trim_heap() -> None:
    """Let glibc give free pages of its heap back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if platform.libc_ver()[0] == "glibc" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))


def cores() -> int:
    """The number of processors that this process may run on, at most as many as its cgroup allows."""
    ask = getattr(os, "sched_getaffinity", None)
    allowed = len(ask(0)) if ask is not None else os.cpu_count() or 1
    return max(1, min(allowed, math.ceil(limits.cpu_quota() or allowed)))


def cpu_name(proc: Path = PROC) -> str:
    """The processor's name, for a plan's environment."""
    match = re.search(r"^model name\s*:\s*(.+)$", read_text(proc / "cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def cpu_precisions(proc: Path = PROC) -> tuple[str, ...]:
    """The precisions that oneDNN trains in on this processor, by its flags."""
    match = re.search(r"^flags\s*:\s*(.+)$", read_text(proc / "cpuinfo"), re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    half = [name for name in ("fp16", "bf16") if any(needed <= flags for needed in NEEDED_FLAGS[name])]
    return "fp32", *half


def _committed_peak(start: Status, now: Status) -> int | None:
    """The largest VmData between two readings, by VmPeak: if that rose, all that was mapped meanwhile was data."""
    if start.committed_bytes is None or now.committed_bytes is None:
        return None
    ends_bytes = max(start.committed_bytes, now.committed_bytes)
    if now.space_peak_bytes <= start.space_peak_bytes:
        return ends_bytes
    return max(ends_bytes, start.committed_bytes + now.space_peak_bytes - start.space_bytes)


def _set_soft_limit(limit_bytes: int) -> None:
    """Set the soft RLIMIT_DATA, never above the hard limit or the soft limit that this process came with."""
    import resource

    global _inherited_bytes
    soft_bytes, hard_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    if _inherited_bytes is None:
        _inherited_bytes = soft_bytes
    finite = [limit for limit in (limit_bytes, _inherited_bytes, hard_bytes) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(finite, default=resource.RLIM_INFINITY), hard_bytes))
