"""The CPU's budget: the least of free RAM, every cgroup above this process, and what rlimits allow.

What this process already holds is not lost to it. Its anonymous pages count as used everywhere, so they are given back
in full. Its file pages (libraries) are cache to the kernel: MemAvailable and `inactive_file` count them as free
already, only those among `active_file` count as used, so no more than those are given back. So at `limit_bytes`
resident, others' memory and this whole process still fit the limit together, whoever was charged for the libraries.
Swap is not counted: training that swaps is as good as stopped.
"""

import glob
import itertools
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from oomguard._core.units import KIB, MAX_BYTES
from oomguard._device.budget import Budget, Limit
from oomguard._device.proc import PROC, read_sizes, read_text


def budget(proc: Path = PROC) -> Budget:
    """Read the budget of this process: every limit that applies to it now, from `proc` and the mounts that it names."""
    own = _own(proc)
    limits = (_free_ram(proc, own), *_cgroups(proc, own), *_overcommit(proc, own), *_rlimits(own))
    return Budget(device="cpu", limits=limits)


class _Own(NamedTuple):
    """The memory that this process holds, by /proc/self/status."""

    pid: int | None
    """Its id as `proc` numbers it; None without /proc."""
    anonymous_bytes: int
    """Resident and backed by no file: RssAnon and RssShmem."""
    file_bytes: int
    """Resident pages of files: RssFile."""
    data_bytes: int
    """VmData: private writable mappings, exactly what RLIMIT_DATA counts (Linux >= 4.7, `mm->data_vm`)."""
    space_bytes: int
    """VmSize: all mappings, exactly what RLIMIT_AS counts (`mm->total_vm`)."""


def _own(proc: Path) -> _Own:
    status = read_text(proc / "self/status")
    if not status:  # macOS, Windows: what would be freed if this process ended
        import psutil

        return _Own(None, psutil.Process().memory_full_info().uss, 0, 0, 0)
    sizes = read_sizes(status)
    pid = re.search(r"^Pid:\s*(\d+)$", status, re.MULTILINE)
    return _Own(
        pid=int(pid[1]) if pid else None,
        anonymous_bytes=sizes.get("RssAnon", 0) + sizes.get("RssShmem", 0),
        file_bytes=sizes.get("RssFile", 0),
        data_bytes=sizes.get("VmData", 0),
        space_bytes=sizes.get("VmSize", 0),
    )


def _free_ram(proc: Path, own: _Own) -> Limit:
    """MemAvailable: what can be had without swapping. psutil where /proc does not say."""
    sizes, source = read_sizes(read_text(proc / "meminfo")), f"MemAvailable of {proc / 'meminfo'}"
    if "MemAvailable" not in sizes:
        import psutil

        memory = psutil.virtual_memory()
        sizes, source = {"MemTotal": memory.total, "MemAvailable": memory.available}, "psutil.virtual_memory"
    used_bytes = max(0, sizes["MemTotal"] - sizes["MemAvailable"])
    return Limit(
        name="free RAM",
        limit_bytes=sizes["MemTotal"],
        used_bytes=used_bytes,
        held_bytes=min(own.anonymous_bytes, used_bytes),
        unit="resident",
        source=source,
    )


def _rlimits(own: _Own) -> Iterator[Limit]:
    """Soft limits, which are the ones enforced, where the kernel says what they count. A child inherits them in full.

    Both are given in VmData: of RLIMIT_AS, what is mapped besides (code, files) counts as used by others. Libraries
    loaded later add to that, so it is exact only once torch is imported. RLIMIT_RSS is not enforced by Linux.
    """
    if own.pid is None:  # Windows has none, the kernel of macOS does not enforce them
        return
    import resource

    kinds = (("RLIMIT_DATA", resource.RLIMIT_DATA, own.data_bytes), ("RLIMIT_AS", resource.RLIMIT_AS, own.space_bytes))
    for name, kind, used_bytes in kinds:
        soft_bytes = resource.getrlimit(kind)[0]
        if soft_bytes != resource.RLIM_INFINITY and soft_bytes < MAX_BYTES:
            yield Limit(
                name=name,
                limit_bytes=soft_bytes,
                used_bytes=used_bytes,
                held_bytes=min(own.data_bytes, used_bytes),
                unit="committed",
                source=f"getrlimit({name})",
            )


def _overcommit(proc: Path, own: _Own) -> Iterator[Limit]:
    """The machine's CommitLimit, which binds under vm.overcommit_memory = 2 only, less what the kernel sets aside."""
    if read_text(proc / "sys/vm/overcommit_memory").strip() != "2":
        return
    sizes = read_sizes(read_text(proc / "meminfo"))
    asides = (proc / "sys/vm/admin_reserve_kbytes", proc / "sys/vm/user_reserve_kbytes")
    aside_bytes = sum((_number(read_text(path)) or 0) * KIB for path in asides)
    used_bytes = sizes.get("Committed_AS", 0)
    yield Limit(
        name="overcommit",
        limit_bytes=max(0, sizes.get("CommitLimit", 0) - aside_bytes),
        used_bytes=used_bytes,
        held_bytes=min(own.data_bytes, used_bytes),
        unit="committed",
        source=f"CommitLimit of {proc / 'meminfo'}, with vm.overcommit_memory = 2",
    )


_NAMES = {1: ("memory.usage_in_bytes", "total_"), 2: ("memory.current", "")}
"""The file with a group's usage, and the prefix of memory.stat's counts that include all groups below, by version."""


class _Mount(NamedTuple):
    """One cgroup file system, as /proc/self/mountinfo shows it."""

    root: str
    """The group that the mount shows at its top. `/../..`: two above the root of this process's cgroup namespace."""
    point: Path
    """The directory of the mount."""
    version: int
    """1 or 2: both can be there, the memory controller is in one of them."""


def _cgroups(proc: Path, own: _Own) -> Iterator[Limit]:
    """Every limit on the way up from this process's group, in each hierarchy that has the memory controller."""
    paths = _group_paths(read_text(proc / "self/cgroup"))
    seen: set[tuple[int, int]] = set()  # the same group can be mounted twice
    for mount in _mounts(read_text(proc / "self/mountinfo")):
        if mount.version not in paths:
            continue
        groups = []
        for group in _way_up(mount, paths[mount.version], own.pid):
            if group.is_dir() and (key := (group.stat().st_dev, group.stat().st_ino)) not in seen:
                seen.add(key)
                groups.append(group)
        yield from _v2_limits(groups, own) if mount.version == 2 else _v1_limits(groups, own)


def cpu_quota(proc: Path = PROC) -> float | None:
    """Processors that the cgroups (v2) of this process pay for, at most; None if none says so."""
    own, paths = _own(proc), _group_paths(read_text(proc / "self/cgroup"))
    shares: list[float] = []
    for mount in _mounts(read_text(proc / "self/mountinfo")):
        if mount.version == 2 and 2 in paths:
            for group in _way_up(mount, paths[2], own.pid):
                quota, _, period = read_text(group / "cpu.max").strip().partition(" ")
                if quota.isdecimal() and period.isdecimal() and int(period):
                    shares.append(int(quota) / int(period))
    return min(shares, default=None)


def _group_paths(text: str) -> dict[int, str]:
    """The process's group in v2 and in v1's memory hierarchy, from the lines of /proc/self/cgroup.

    >>> _group_paths("4:cpu,memory:/job\\n0::/user.slice") == {1: "/job", 2: "/user.slice"}
    True
    """
    found = {}
    for number, controllers, path in (line.split(":", 2) for line in text.split("\n") if line):
        if number == "0" and not controllers:
            found[2] = path
        elif "memory" in controllers.split(","):
            found[1] = path
    return found


def _mounts(text: str) -> Iterator[_Mount]:
    """The cgroup mounts among the lines of /proc/self/mountinfo (man 5 proc_pid_mountinfo)."""
    for line in filter(None, text.split("\n")):
        left, _, right = line.partition(" - ")  # before it stands any number of optional fields
        kind, _, options = right.split(" ")[:3]
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            root, point = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), x) for x in left.split(" ")[3:5])
            yield _Mount(root=root, point=Path(point), version=2 if kind == "cgroup2" else 1)


def _way_up(mount: _Mount, path: str, pid: int | None) -> list[Path]:
    """The directories from the process's group up to the mount's top: all of its ancestors that can be seen.

    Groups above the root of a cgroup namespace have no names that we could know: the one that lists us is ours.
    """
    below = _below(mount.root, path)
    if below is None:  # a mount of some other group, unless it lists us
        return [mount.point] if _lists(mount.point, pid) else []
    unnamed, names = below
    leaf = mount.point.joinpath(*names)
    if unnamed:
        pattern = "/".join(["*"] * unnamed + [glob.escape(name) for name in names])
        leaf = next((group for group in mount.point.glob(pattern) if _lists(group, pid)), mount.point)
    return [group for group in (leaf, *leaf.parents) if group.is_relative_to(mount.point)]


def _below(root: str, path: str) -> tuple[int, list[str]] | None:
    """Find the way from the top of a mount down to a group: levels without a name, then names. None: it is not below.

    >>> _below("/docker/ab", "/docker/ab/job"), _below("/../..", "/job"), _below("/docker/ab", "/other")
    ((0, ['job']), (2, ['job']), None)
    """
    tops, names = list(PurePosixPath(root).parts[1:]), list(PurePosixPath(path).parts[1:])
    while tops and names and tops[0] == names[0]:
        tops, names = tops[1:], names[1:]
    if ".." in names or any(top != ".." for top in tops):
        return None
    return len(tops), names


def _lists(group: Path, pid: int | None) -> bool:
    return pid is not None and str(pid) in read_text(group / "cgroup.procs").split()


def _v2_limits(groups: list[Path], own: _Own) -> Iterator[Limit]:
    """Over memory.high nothing is killed, but all of the group is throttled to a crawl: a limit too."""
    for group, name in itertools.product(groups, ("memory.max", "memory.high")):
        limit_bytes = _number(read_text(group / name))
        if limit_bytes is not None:
            yield _group_limit(group, name, limit_bytes, 2, own)


def _v1_limits(groups: list[Path], own: _Own) -> Iterator[Limit]:
    """Limits of v1 groups, and `hierarchical_memory_limit`: the least limit of all ancestors, visible or not."""
    least_bytes = MAX_BYTES
    for index, group in enumerate(groups):
        if index and read_text(group / "memory.use_hierarchy").strip() == "0":
            break  # neither counts nor limits the groups below it
        limit_bytes = _number(read_text(group / "memory.limit_in_bytes"))
        if limit_bytes is not None:
            least_bytes = min(least_bytes, limit_bytes)
            yield _group_limit(group, "memory.limit_in_bytes", limit_bytes, 1, own)
    for group in groups[:1]:
        hidden_bytes = _stat(group).get("hierarchical_memory_limit", MAX_BYTES)
        if hidden_bytes < least_bytes:  # used of it: at least what the highest group in sight uses
            yield _group_limit(groups[-1], "hierarchical_memory_limit", hidden_bytes, 1, own)


def _group_limit(group: Path, name: str, limit_bytes: int, version: int, own: _Own) -> Limit:
    """Make the limit of a group. Its usage leaves out `inactive_file`, the cache that the kernel drops first."""
    stat, (usage, prefix) = _stat(group), _NAMES[version]
    used_bytes = max(0, (_number(read_text(group / usage)) or 0) - stat.get(f"{prefix}inactive_file", 0))
    library_bytes = min(own.file_bytes, stat.get(f"{prefix}active_file", 0))
    return Limit(
        name=name,
        limit_bytes=limit_bytes,
        used_bytes=used_bytes,
        held_bytes=min(own.anonymous_bytes + library_bytes, used_bytes),
        unit="resident",
        source=f"cgroup {group}",
    )


def _stat(group: Path) -> dict[str, int]:
    pairs = (line.split() for line in read_text(group / "memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def _number(text: str) -> int | None:
    """A number of bytes; None for `max`, for nothing, and for v1's way to say no limit (2^63 less a page).

    >>> _number("4096\\n"), _number("max\\n"), _number(""), _number("9223372036854771712")
    (4096, None, None, None)
    """
    text = text.strip()
    return int(text) if text.isdecimal() and int(text) < MAX_BYTES else None
