"""Readers of /proc: files as text and sizes, and the memory of one process; psutil where there is no /proc."""

import os
import re
import sys
from pathlib import Path

import msgspec

from oomguard._core.units import KIB

PROC = Path("/proc")


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one process, as /proc/PID/status shows it; 0 where it does not."""

    resident_bytes: int  # VmRSS: what it has in RAM, libraries and shared memory included
    peak_bytes: int  # VmHWM: the largest VmRSS since a reset (`5` written to clear_refs) or the start
    committed_bytes: int | None  # VmData: private writable mappings, touched or not; None without /proc
    pid: int | None = None  # its id as this /proc numbers it; None without /proc
    anonymous_bytes: int = 0
    """RssAnon and RssShmem: resident and backed by no file. Without /proc, what would be freed if it ended."""
    file_bytes: int = 0  # RssFile: resident pages of files
    space_bytes: int = 0  # VmSize: all mappings
    space_peak_bytes: int = 0  # VmPeak: the largest VmSize since the process began. The kernel never resets it.
    swapped_bytes: int = 0  # VmSwap: the part that is swapped out


def read_status(pid: int | None = None, proc: Path = PROC) -> Status | None:
    """The memory of a process (None: this one) now; None if it is gone, or has ended and was not yet waited for."""
    text = read_text(proc / ("self" if pid is None else str(pid)) / "status")
    if not text and (pid is None or not (proc / "self").exists()):  # macOS, Windows
        return _by_psutil(pid)
    sizes, number = read_sizes(text), re.search(r"^Pid:\s*(\d+)$", text, re.MULTILINE)
    if "VmRSS" not in sizes:
        return None
    return Status(
        resident_bytes=sizes["VmRSS"],
        peak_bytes=sizes.get("VmHWM", sizes["VmRSS"]),
        committed_bytes=sizes.get("VmData"),
        pid=int(number[1]) if number else None,
        anonymous_bytes=sizes.get("RssAnon", 0) + sizes.get("RssShmem", 0),
        file_bytes=sizes.get("RssFile", 0),
        space_bytes=sizes.get("VmSize", 0),
        space_peak_bytes=sizes.get("VmPeak", 0),
        swapped_bytes=sizes.get("VmSwap", 0),
    )


def read_resident() -> int:
    """The resident bytes of this process now: one number, in a small part of the time of `read_status`."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # macOS, Windows
        status = read_status()
        assert status is not None  # this process is not gone
        return status.resident_bytes


def _by_psutil(pid: int | None) -> Status | None:
    """Read a process's memory by psutil. Windows reports a peak; macOS only that of this process, in bytes, not KiB."""
    import psutil

    try:
        process = psutil.Process(pid)
        memory = process.memory_info()
    except psutil.NoSuchProcess:
        return None
    peak_bytes = getattr(memory, "peak_wset", memory.rss)
    own_bytes = process.memory_full_info().uss if pid is None else 0  # of others it may not be asked
    if pid is None and sys.platform != "win32":
        import resource

        unit_bytes = 1 if sys.platform == "darwin" else KIB
        peak_bytes = max(peak_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes)
    return Status(resident_bytes=memory.rss, peak_bytes=peak_bytes, committed_bytes=None, anonymous_bytes=own_bytes)


def read_text(path: Path) -> str:
    """Read a file's text; empty if it does not exist or may not be read, which is common here."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def read_sizes(lines: str) -> dict[str, int]:
    """The lines `Name: 12 kB` of /proc/meminfo and /proc/self/status, in bytes."""
    return {name: int(size) * KIB for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", lines, re.MULTILINE)}
