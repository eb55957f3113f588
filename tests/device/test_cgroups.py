"""The cgroups' part of the CPU's budget: v1, v2, hybrids, containers and namespaces."""

from pathlib import Path

import pytest
from device.fake_proc import (
    ANONYMOUS_BYTES,
    FILE_BYTES,
    PID,
    cgroup_limits,
    group1,
    group2,
    in_v1,
    in_v2,
    machine,
    v1,
    v2,
    write,
)

from oomguard._core.units import GIB, MIB
from oomguard._device import limits

# cgroups, version 2


def test_a_v2_limit_binds(tmp_path: Path) -> None:
    group2(tmp_path / "cg/job", limit=2 * GIB, used=GIB)
    budget = limits.budget(in_v2(tmp_path))
    assert (budget.binding.name, budget.binding.source) == ("memory.max", f"cgroup {tmp_path / 'cg/job'}")


def test_the_least_limit_on_the_way_up_binds(tmp_path: Path) -> None:
    group2(tmp_path / "cg/a", limit=3 * GIB, used=GIB)
    group2(tmp_path / "cg/a/b", limit=2 * GIB, used=GIB)
    group2(tmp_path / "cg/a/b/c", limit=5 * GIB, used=GIB)
    budget = limits.budget(in_v2(tmp_path, "/a/b/c"))
    assert budget.limit_bytes == GIB + ANONYMOUS_BYTES


def test_a_crowded_ancestor_binds_before_a_smaller_but_empty_group(tmp_path: Path) -> None:
    group2(tmp_path / "cg/a", limit=8 * GIB, used=7 * GIB)
    group2(tmp_path / "cg/a/b", limit=4 * GIB, used=GIB)
    budget = limits.budget(in_v2(tmp_path, "/a/b"))
    assert budget.binding.source.endswith("cg/a")


def test_a_neighbouring_group_does_not_count(tmp_path: Path) -> None:
    group2(tmp_path / "cg/a")
    group2(tmp_path / "cg/b", limit=GIB)
    assert cgroup_limits(in_v2(tmp_path, "/a")) == []


def test_memory_high_is_a_limit_too(tmp_path: Path) -> None:
    group2(tmp_path / "cg/job", limit=3 * GIB, high=2 * GIB, used=GIB)
    budget = limits.budget(in_v2(tmp_path))
    assert budget.binding.name == "memory.high"


def test_max_is_no_limit(tmp_path: Path) -> None:
    group2(tmp_path / "cg/job")
    assert cgroup_limits(in_v2(tmp_path)) == []


def test_the_root_group_needs_no_files(tmp_path: Path) -> None:
    group2(tmp_path / "cg/job", limit=2 * GIB)
    assert not (tmp_path / "cg/memory.max").exists()
    assert cgroup_limits(in_v2(tmp_path)) == [2 * GIB]


def test_cache_that_the_kernel_drops_first_is_not_used(tmp_path: Path) -> None:
    group2(tmp_path / "cg/job", limit=2 * GIB, used=2 * GIB, inactive=GIB)
    assert limits.budget(in_v2(tmp_path)).left_bytes == GIB


def test_own_libraries_are_given_back_where_the_group_counts_them(tmp_path: Path) -> None:
    group2(tmp_path / "cg/job", limit=2 * GIB, used=GIB, active=500 * MIB)
    assert limits.budget(in_v2(tmp_path)).limit_bytes == GIB + ANONYMOUS_BYTES + FILE_BYTES


def test_own_libraries_are_not_given_back_twice(tmp_path: Path) -> None:
    group2(tmp_path / "cg/job", limit=2 * GIB, used=GIB, inactive=500 * MIB, active=10 * MIB)
    assert limits.budget(in_v2(tmp_path)).limit_bytes == GIB + 500 * MIB + ANONYMOUS_BYTES + 10 * MIB


def test_no_more_is_given_back_than_the_group_uses(tmp_path: Path) -> None:
    group2(tmp_path / "cg/job", limit=2 * GIB, used=30 * MIB)  # the process came from another group
    assert limits.budget(in_v2(tmp_path)).limit_bytes == 2 * GIB


def test_a_limit_below_what_others_use_leaves_nothing(tmp_path: Path) -> None:
    group2(tmp_path / "cg/job", high=GIB, used=3 * GIB)
    budget = limits.budget(in_v2(tmp_path))
    assert (budget.left_bytes, budget.limit_bytes) == (0, 0)


# cgroups, version 1


def test_a_v1_limit_binds(tmp_path: Path) -> None:
    group1(tmp_path / "cg/job", limit=2 * GIB, used=2 * GIB, inactive=GIB)
    budget = limits.budget(in_v1(tmp_path))
    assert (budget.binding.name, budget.limit_bytes) == ("memory.limit_in_bytes", GIB + ANONYMOUS_BYTES)


@pytest.mark.parametrize("page_bytes", [4096, 65536])
def test_the_v1_number_for_no_limit_is_no_limit(tmp_path: Path, page_bytes: int) -> None:
    group1(tmp_path / "cg/job", limit=(1 << 63) - page_bytes, least=(1 << 63) - page_bytes)
    assert cgroup_limits(in_v1(tmp_path)) == []


def test_a_v1_ancestor_binds(tmp_path: Path) -> None:
    group1(tmp_path / "cg/a", limit=GIB)
    group1(tmp_path / "cg/a/b", limit=2 * GIB, least=GIB)
    assert cgroup_limits(in_v1(tmp_path, "/a/b")) == [2 * GIB, GIB]


def test_a_v1_ancestor_without_hierarchy_does_not_bind(tmp_path: Path) -> None:
    group1(tmp_path / "cg/a", limit=GIB)
    write(tmp_path / "cg/a/memory.use_hierarchy", "0\n")
    group1(tmp_path / "cg/a/b", limit=2 * GIB, least=2 * GIB)
    assert cgroup_limits(in_v1(tmp_path, "/a/b")) == [2 * GIB]


def test_a_v1_ancestor_out_of_sight_binds(tmp_path: Path) -> None:
    group1(tmp_path / "cg", limit=3 * GIB, used=GIB, least=2 * GIB)
    budget = limits.budget(in_v1(tmp_path, "/"))
    assert (budget.binding.name, budget.limit_bytes) == ("hierarchical_memory_limit", GIB + ANONYMOUS_BYTES)


def test_memory_may_share_its_v1_hierarchy(tmp_path: Path) -> None:
    group1(tmp_path / "cg/job", limit=GIB, least=GIB)
    proc = machine(tmp_path, cgroup="4:cpu,memory:/job\n", mounts=(v1(tmp_path / "cg", controllers="cpu,memory"),))
    assert cgroup_limits(proc) == [GIB]


def test_a_v1_hierarchy_without_memory_says_nothing(tmp_path: Path) -> None:
    group1(tmp_path / "cg/job", limit=GIB)
    proc = machine(tmp_path, cgroup="4:cpu:/job\n", mounts=(v1(tmp_path / "cg", controllers="cpu"),))
    assert cgroup_limits(proc) == []


def test_in_a_hybrid_the_hierarchy_that_has_memory_counts(tmp_path: Path) -> None:
    group1(tmp_path / "cg/memory/job", limit=GIB, least=GIB)
    write(tmp_path / "cg/unified/user.slice/cgroup.procs", f"{PID}\n")
    mounts = (v1(tmp_path / "cg/memory"), v2(tmp_path / "cg/unified"))
    assert cgroup_limits(machine(tmp_path, cgroup="4:memory:/job\n0::/user.slice\n", mounts=mounts)) == [GIB]


# containers and namespaces


def test_a_container_that_sees_only_its_own_group_finds_it(tmp_path: Path) -> None:
    group2(tmp_path / "cg", limit=3 * GIB)
    group2(tmp_path / "cg/job", limit=2 * GIB)
    assert cgroup_limits(in_v2(tmp_path, "/docker/ab/job", "/docker/ab")) == [2 * GIB, 3 * GIB]


def test_at_the_root_of_a_namespace_the_limit_is_at_the_top_of_the_mount(tmp_path: Path) -> None:
    group2(tmp_path / "cg", limit=2 * GIB)
    assert cgroup_limits(in_v2(tmp_path, "/")) == [2 * GIB]


def test_above_the_root_of_a_namespace_our_group_is_the_one_that_lists_us(tmp_path: Path) -> None:
    group2(tmp_path / "cg/a", limit=4 * GIB)
    for name, pid, limit in (("other", 1, GIB), ("ours", PID, 2 * GIB)):
        group2(tmp_path / "cg/a" / name, limit=3 * GIB)
        group2(tmp_path / "cg/a" / name / "job", limit=limit)
        write(tmp_path / "cg/a" / name / "job/cgroup.procs", f"2\n{pid}\n")
    assert cgroup_limits(in_v2(tmp_path, "/job", "/../..")) == [2 * GIB, 3 * GIB, 4 * GIB]


def test_above_the_root_of_a_namespace_the_top_counts_even_if_our_group_is_not_found(tmp_path: Path) -> None:
    group2(tmp_path / "cg", limit=4 * GIB)
    assert cgroup_limits(in_v2(tmp_path, "/", "/..")) == [4 * GIB]


@pytest.mark.parametrize(("root", "path"), [("/docker/ab", "/docker/cd"), ("/", "/../cd"), ("/../ab", "/")])
def test_a_mount_of_a_group_that_is_not_ours_does_not_count(tmp_path: Path, root: str, path: str) -> None:
    group2(tmp_path / "cg", limit=GIB)
    write(tmp_path / "cg/cgroup.procs", "1\n")
    assert cgroup_limits(in_v2(tmp_path, path, root)) == []


def test_a_mount_of_another_name_counts_if_it_lists_us(tmp_path: Path) -> None:
    group2(tmp_path / "cg", limit=GIB)
    write(tmp_path / "cg/cgroup.procs", f"1\n{PID}\n")
    assert cgroup_limits(in_v2(tmp_path, "/", "/docker/ab")) == [GIB]


def test_a_group_that_is_gone_leaves_its_ancestors(tmp_path: Path) -> None:
    group2(tmp_path / "cg/a", limit=GIB)
    assert cgroup_limits(in_v2(tmp_path, "/a/b (deleted)")) == [GIB]


def test_a_group_that_is_mounted_twice_counts_once(tmp_path: Path) -> None:
    group2(tmp_path / "cg/job", limit=GIB)
    proc = machine(tmp_path, cgroup="0::/job\n", mounts=(v2(tmp_path / "cg"), v2(tmp_path / "cg")))
    assert cgroup_limits(proc) == [GIB]


def test_a_mount_point_with_a_space_is_found(tmp_path: Path) -> None:
    group2(tmp_path / "c g/job", limit=GIB)
    mount = v2(tmp_path / "c\\040g")
    assert cgroup_limits(machine(tmp_path, cgroup="0::/job\n", mounts=(mount,))) == [GIB]


def test_a_group_with_a_colon_and_brackets_is_found(tmp_path: Path) -> None:
    group2(tmp_path / "cg/a/job:[1]", limit=GIB)
    write(tmp_path / "cg/a/job:[1]/cgroup.procs", f"{PID}\n")
    assert cgroup_limits(in_v2(tmp_path, "/job:[1]", "/..")) == [GIB]


def test_a_limit_counts_in_full_if_the_usage_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path / "cg/job/memory.max", f"{GIB}\n")
    assert limits.budget(in_v2(tmp_path)).limit_bytes == GIB


def test_other_file_systems_are_passed_over(tmp_path: Path) -> None:
    other = f"22 1 0:5 / {tmp_path} rw - ext4 /dev/sda1 rw,memory"
    assert cgroup_limits(machine(tmp_path, cgroup="0::/\n4:memory:/\n", mounts=(other,))) == []


# processors


def test_a_group_pays_for_so_many_processors(tmp_path: Path) -> None:
    write(tmp_path / "cg/job/cpu.max", "150000 100000\n")
    assert limits.cpu_quota(in_v2(tmp_path)) == 1.5


def test_the_least_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    write(tmp_path / "cg/a/cpu.max", "200000 100000\n")
    write(tmp_path / "cg/a/b/cpu.max", "800000 100000\n")
    assert limits.cpu_quota(in_v2(tmp_path, "/a/b")) == 2.0


@pytest.mark.parametrize("text", ["max 100000\n", "", "max\n", "100000\n", "100000 0\n", "x y\n"])
def test_what_is_no_quota_limits_nothing(tmp_path: Path, text: str) -> None:
    write(tmp_path / "cg/job/cpu.max", text)
    assert limits.cpu_quota(in_v2(tmp_path)) is None


def test_a_quota_of_another_group_does_not_count(tmp_path: Path) -> None:
    write(tmp_path / "cg/other/cpu.max", "50000 100000\n")
    assert limits.cpu_quota(in_v2(tmp_path)) is None


def test_without_v2_nobody_says_what_is_paid_for(tmp_path: Path) -> None:
    write(tmp_path / "cg/job/cpu.max", "50000 100000\n")
    assert limits.cpu_quota(in_v1(tmp_path)) is None
    assert limits.cpu_quota(machine(tmp_path)) is None
