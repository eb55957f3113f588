"""The CPU's budget: the least of free RAM, every cgroup above this process, and what rlimits allow.

Memory that this process already holds is available to it. Its anonymous pages count as used everywhere, so they are
added back in full. Its file pages (libraries) are cache to the kernel: MemAvailable and `inactive_file` count them as
free already. Only those among `active_file` count as used, so no more than those are added back. So at `limit_bytes`
resident, others' memory and this whole process still fit the limit together, whoever was charged for the libraries.
Swap is not counted: training that swaps is as good as stopped.
"""

import glob
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from oomguard._core.units import KIB, MAX_BYTES
from oomguard._device.budget import Budget, Limit
from oomguard._device.proc import PROC, Status, read_sizes, read_status, read_text

LIMIT_FILES = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
"""Limits of a cgroup, by version. Over memory.high nothing is killed, but all of the group is throttled to a crawl."""


def budget(proc: Path = PROC) -> Budget:
    """Read the budget of this process: every limit that applies to it now, from `proc` and the mounts that it names."""
    own = _own(proc)
    limits = (_free_ram(proc, own), *_cgroups(proc, own), *_overcommit(proc, own), *_rlimits(own))
    return Budget(device="cpu", limits=limits)


def cpu_quota(proc: Path = PROC) -> float | None:
    """The number of processors that the cgroups (v2) of this process allow it; None without a limit."""
    shares: list[float] = []
    for version, groups in _ways_up(proc, _own(proc)):
        for group in groups if version == 2 else ():
            quota, _, period = read_text(group / "cpu.max").strip().partition(" ")
            if quota.isdecimal() and period.isdecimal() and int(period):
                shares.append(int(quota) / int(period))
    return min(shares, default=None)


def _own(proc: Path) -> Status:
    own = read_status(proc=proc)
    assert own is not None  # this process is not gone
    return own


def _free_ram(proc: Path, own: Status) -> Limit:
    """MemAvailable: what can be had without swapping. psutil where /proc does not say."""
    sizes, source = read_sizes(read_text(proc / "meminfo")), f"MemAvailable of {proc / 'meminfo'}"
    if "MemAvailable" not in sizes:
        import psutil

        memory = psutil.virtual_memory()
        sizes, source = {"MemTotal": memory.total, "MemAvailable": memory.available}, "psutil.virtual_memory"
    used_bytes = sizes["MemTotal"] - sizes["MemAvailable"]
    return Limit.read("free RAM", source, sizes["MemTotal"], used_bytes, own.anonymous_bytes)


def _rlimits(own: Status) -> Iterator[Limit]:
    """Soft limits, which are the ones enforced, where the kernel says what they count. A child inherits them in full.

    RLIMIT_DATA counts VmData, RLIMIT_AS VmSize (`mm->data_vm` and `mm->total_vm`, Linux >= 4.7). Both are given in
    VmData: of RLIMIT_AS, what is mapped besides (code, files) counts as used by others. Libraries loaded later add to
    that, so it is exact only once torch is imported. RLIMIT_RSS is not enforced by Linux.
    """
    if own.pid is None:  # Windows has none, the kernel of macOS does not enforce them
        return
    import resource

    data_bytes = own.committed_bytes or 0
    for name, used_bytes in (("RLIMIT_DATA", data_bytes), ("RLIMIT_AS", own.space_bytes)):
        soft_bytes = resource.getrlimit(getattr(resource, name))[0]
        if soft_bytes != resource.RLIM_INFINITY and soft_bytes < MAX_BYTES:
            yield Limit.read(name, f"getrlimit({name})", soft_bytes, used_bytes, data_bytes, "committed")


def _overcommit(proc: Path, own: Status) -> Iterator[Limit]:
    """The machine's CommitLimit, which binds under vm.overcommit_memory = 2 only, less what the kernel sets aside."""
    if read_text(proc / "sys/vm/overcommit_memory").strip() != "2":
        return
    sizes = read_sizes(read_text(proc / "meminfo"))
    asides = (proc / "sys/vm/admin_reserve_kbytes", proc / "sys/vm/user_reserve_kbytes")
    limit_bytes = sizes.get("CommitLimit", 0) - sum((_number(read_text(path)) or 0) * KIB for path in asides)
    source = f"CommitLimit of {proc / 'meminfo'}, with vm.overcommit_memory = 2"
    used_bytes, data_bytes = sizes.get("Committed_AS", 0), own.committed_bytes or 0
    yield Limit.read("overcommit", source, limit_bytes, used_bytes, data_bytes, "committed")


def _cgroups(proc: Path, own: Status) -> Iterator[Limit]:
    """Every limit on the way up from this process's group, in each hierarchy that has the memory controller."""
    seen: set[tuple[int, int]] = set()  # the same group can be mounted twice
    for version, way in _ways_up(proc, own):
        groups = []
        for group in way:
            if group.is_dir() and (key := (group.stat().st_dev, group.stat().st_ino)) not in seen:
                seen.add(key)
                groups.append(group)
        yield from _group_limits(groups, version, own)


def _ways_up(proc: Path, own: Status) -> Iterator[tuple[int, list[Path]]]:
    """The groups from this process's own up to the top of each cgroup mount, with the cgroup version (1 or 2)."""
    paths = {}  # this process's group in v2 and in v1's memory hierarchy
    for line in filter(None, read_text(proc / "self/cgroup").split("\n")):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    for version, root, point in _mounts(read_text(proc / "self/mountinfo")):
        if version in paths:
            yield version, _way_up(root, point, paths[version], own.pid)


def _mounts(text: str) -> Iterator[tuple[int, str, Path]]:
    """Version, root and directory of the cgroup mounts in /proc/self/mountinfo (man 5 proc_pid_mountinfo).

    The root is the group that the mount shows at its top; `/../..` is two above the root of the cgroup namespace.
    """
    for line in filter(None, text.split("\n")):
        left, _, right = line.partition(" - ")  # before it stands any number of optional fields
        kind, _, options = right.split(" ")[:3]
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            root, point = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), x) for x in left.split(" ")[3:5])
            yield 2 if kind == "cgroup2" else 1, root, Path(point)


def _way_up(root: str, point: Path, path: str, pid: int | None) -> list[Path]:
    """The directories from the process's group up to the mount's top: all of its ancestors that can be seen.

    Groups above the root of a cgroup namespace have no names that we could know: the one that lists us is ours.
    """
    below = _below(root, path)
    if below is None:  # a mount of some other group, unless it lists us
        return [point] if _lists(point, pid) else []
    unnamed, names = below
    leaf = point.joinpath(*names)
    if unnamed:
        pattern = "/".join(["*"] * unnamed + [glob.escape(name) for name in names])
        leaf = next((group for group in point.glob(pattern) if _lists(group, pid)), point)
    return [group for group in (leaf, *leaf.parents) if group.is_relative_to(point)]


def _below(root: str, path: str) -> tuple[int, list[str]] | None:
    """The way from the top of a mount down to a group: levels without a name, then names. None if it is not below."""
    tops, names = list(PurePosixPath(root).parts[1:]), list(PurePosixPath(path).parts[1:])
    while tops and names and tops[0] == names[0]:
        tops, names = tops[1:], names[1:]
    if ".." in names or any(top != ".." for top in tops):
        return None
    return len(tops), names


def _lists(group: Path, pid: int | None) -> bool:
    return pid is not None and str(pid) in read_text(group / "cgroup.procs").split()


def _group_limits(groups: list[Path], version: int, own: Status) -> Iterator[Limit]:
    """The limits of groups; in v1 also `hierarchical_memory_limit`, the least of all ancestors, visible or not."""
    least_bytes = MAX_BYTES
    for index, group in enumerate(groups):
        if index and read_text(group / "memory.use_hierarchy").strip() == "0":
            break  # v1: neither counts nor limits the groups below it
        for name in LIMIT_FILES[version]:
            limit_bytes = _number(read_text(group / name))
            if limit_bytes is not None:
                least_bytes = min(least_bytes, limit_bytes)
                yield _group_limit(group, name, limit_bytes, version, own)
    for group in groups[:1]:
        hidden_bytes = _stat(group).get("hierarchical_memory_limit", MAX_BYTES)
        if hidden_bytes < least_bytes:  # used of it: at least what the highest group in sight uses
            yield _group_limit(groups[-1], "hierarchical_memory_limit", hidden_bytes, version, own)


def _group_limit(group: Path, name: str, limit_bytes: int, version: int, own: Status) -> Limit:
    """Make the limit of a group. Its usage leaves out `inactive_file`, the cache that the kernel drops first."""
    stat = _stat(group)
    # in v1, memory.stat also has counts of the group without those below it
    usage, prefix = ("memory.current", "") if version == 2 else ("memory.usage_in_bytes", "total_")
    used_bytes = (_number(read_text(group / usage)) or 0) - stat.get(f"{prefix}inactive_file", 0)
    library_bytes = min(own.file_bytes, stat.get(f"{prefix}active_file", 0))
    return Limit.read(name, f"cgroup {group}", limit_bytes, used_bytes, own.anonymous_bytes + library_bytes)


def _stat(group: Path) -> dict[str, int]:
    text = read_text(group / "memory.stat")
    return {name: int(count) for name, count in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}


def _number(text: str) -> int | None:
    """A number of bytes; None for `max`, for nothing, and for v1's way to say no limit (2^63 less a page)."""
    text = text.strip()
    return int(text) if text.isdecimal() and int(text) < MAX_BYTES else None
