"""A /proc and cgroup trees of files, laid out as kernels lay them out."""

from pathlib import Path

from oomguard._core.units import GIB, MIB
from oomguard._device import limits

TOTAL_BYTES, AVAILABLE_BYTES = 64 * GIB, 60 * GIB
ANONYMOUS_BYTES, FILE_BYTES = 100 * MIB, 50 * MIB
DATA_BYTES, SPACE_BYTES = 300 * MIB, GIB
PID = 4711
NO_LIMIT = (1 << 63) - 4096


def machine(tmp_path: Path, *, cgroup: str = "", mounts: tuple[str, ...] = (), more: str = "") -> Path:
    """A /proc with 60 of 64 GiB free and a process that holds 100 MiB of its own and 50 MiB of libraries."""
    own = {"RssAnon": ANONYMOUS_BYTES, "RssFile": FILE_BYTES, "VmData": DATA_BYTES, "VmSize": SPACE_BYTES}
    own["VmRSS"] = ANONYMOUS_BYTES + FILE_BYTES
    ram = {"MemTotal": TOTAL_BYTES, "MemAvailable": AVAILABLE_BYTES, "SwapFree": 8 * GIB}
    write(tmp_path / "proc/self/status", f"Name:\tpython\nPid:\t{PID}\n" + kib(own))
    write(tmp_path / "proc/meminfo", kib(ram) + more)
    write(tmp_path / "proc/self/cgroup", cgroup)
    write(tmp_path / "proc/self/mountinfo", "".join(f"{line}\n" for line in mounts))
    return tmp_path / "proc"


def kib(sizes: dict[str, int]) -> str:
    return "".join(f"{name}:\t{size_bytes // 1024:>8} kB\n" for name, size_bytes in sizes.items())


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def v2(point: Path, root: str = "/") -> str:
    return f"31 23 0:28 {root} {point} rw,nosuid shared:9 master:2 - cgroup2 cgroup2 rw,nsdelegate"


def v1(point: Path, root: str = "/", controllers: str = "memory") -> str:
    return f"35 31 0:32 {root} {point} rw,relatime - cgroup cgroup rw,{controllers}"


def in_v2(tmp_path: Path, path: str = "/job", root: str = "/") -> Path:
    """A /proc whose process is in a v2 group; the hierarchy is under `cg`."""
    return machine(tmp_path, cgroup=f"0::{path}\n", mounts=(v2(tmp_path / "cg", root),))


def in_v1(tmp_path: Path, path: str = "/job") -> Path:
    """The same for v1's memory hierarchy."""
    return machine(tmp_path, cgroup=f"5:cpu:/\n4:memory:{path}\n", mounts=(v1(tmp_path / "cg"),))


def group2(
    path: Path, limit: int | str = "max", high: int | str = "max", used: int = 0, inactive: int = 0, active: int = 0
) -> None:
    write(path / "memory.max", f"{limit}\n")
    write(path / "memory.high", f"{high}\n")
    write(path / "memory.current", f"{used}\n")
    write(path / "memory.stat", f"anon 1\ninactive_file {inactive}\nactive_file {active}\n")


def group1(path: Path, limit: int = NO_LIMIT, used: int = 0, inactive: int = 0, least: int = NO_LIMIT) -> None:
    write(path / "memory.limit_in_bytes", f"{limit}\n")
    write(path / "memory.usage_in_bytes", f"{used}\n")
    write(path / "memory.use_hierarchy", "1\n")
    stat = f"inactive_file 7\nhierarchical_memory_limit {least}\ntotal_inactive_file {inactive}\ntotal_active_file 0\n"
    write(path / "memory.stat", stat)


def cgroup_limits(proc: Path) -> list[int]:
    return [limit.limit_bytes for limit in limits.budget(proc).limits if limit.source.startswith("cgroup")]
