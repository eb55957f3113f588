"""The CPU's budget but for its cgroups (test_cgroups.py). rlimits are real, in a child."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from device.fake_proc import ANONYMOUS_BYTES, AVAILABLE_BYTES, DATA_BYTES, kib, machine, write
from hypothesis import given
from hypothesis import strategies as st

from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB, MIB
from oomguard._device import limits
from oomguard._device.budget import Budget, Limit
from oomguard._device.proc import read_sizes


def test_without_cgroups_free_ram_and_what_the_process_holds_of_it_is_the_budget(tmp_path: Path) -> None:
    budget = limits.budget(machine(tmp_path))
    assert (budget.binding.name, budget.limit_bytes) == ("free RAM", AVAILABLE_BYTES + ANONYMOUS_BYTES)


def test_a_child_may_use_what_is_free_but_not_what_this_process_holds(tmp_path: Path) -> None:
    assert limits.budget(machine(tmp_path)).left_bytes == AVAILABLE_BYTES


def test_without_proc_the_free_ram_is_what_psutil_says(tmp_path: Path) -> None:
    budget = limits.budget(tmp_path)
    assert (budget.binding.limit_bytes, budget.binding.source) == (
        psutil.virtual_memory().total,
        "psutil.virtual_memory",
    )


def test_without_proc_what_the_process_holds_is_counted(tmp_path: Path) -> None:
    assert limits.budget(tmp_path).binding.held_bytes > MIB


# committed bytes


def test_committed_bytes_are_not_limited_by_overcommit_unless_it_is_strict(tmp_path: Path) -> None:
    proc = machine(tmp_path, more=kib({"CommitLimit": 40 * GIB, "Committed_AS": 30 * GIB}))
    write(proc / "sys/vm/overcommit_memory", "0\n")
    assert "overcommit" not in {limit.name for limit in limits.budget(proc).limits}


def test_under_strict_overcommit_the_commit_limit_counts_less_the_kernels_reserves(tmp_path: Path) -> None:
    proc = machine(tmp_path, more=kib({"CommitLimit": 40 * GIB, "Committed_AS": 30 * GIB}))
    write(proc / "sys/vm/overcommit_memory", "2\n")
    write(proc / "sys/vm/admin_reserve_kbytes", "8192\n")
    write(proc / "sys/vm/user_reserve_kbytes", "131072\n")
    (budget,) = (limit for limit in limits.budget(proc).limits if limit.name == "overcommit")
    assert (budget.unit, budget.reach_bytes) == ("committed", 10 * GIB - 136 * MIB + DATA_BYTES)


PRELUDE = """
import mmap, resource, sys
from oomguard._device import limits
def left(name):
    return next(limit for limit in limits.budget().limits if limit.name == name).left_bytes
def commit(size_bytes):
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts and enforces these")


def child(code: str) -> str:
    """What a child of its own prints: a limit set there cannot be undone."""
    run = subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@linux
@pytest.mark.parametrize("name", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_all_that_an_rlimit_leaves_can_be_committed(name: str) -> None:
    code = f"resource.setrlimit(resource.{name}, ({GIB}, {GIB})); commit(left('{name}') // {MIB} * {MIB} - {MIB})"
    assert child(code) == ""  # no error


@linux
@pytest.mark.parametrize("name", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_no_more_than_an_rlimit_leaves_can_be_committed(name: str) -> None:
    code = f"""
resource.setrlimit(resource.{name}, ({GIB}, {GIB}))
try:
    commit(left('{name}') + {MIB})
except OSError as error:
    print(error.strerror)
"""
    assert child(code) == "Cannot allocate memory"


@linux
def test_the_soft_rlimit_is_the_one_that_counts() -> None:
    assert child(
        f"resource.setrlimit(resource.RLIMIT_DATA, ({GIB}, {2 * GIB})); print(limits.budget().committed_bytes)"
    ) == (str(GIB))


@linux
def test_of_an_address_space_what_is_mapped_besides_data_is_not_ours_to_commit() -> None:
    code = f"resource.setrlimit(resource.RLIMIT_AS, ({GIB}, {GIB})); print(limits.budget().committed_bytes)"
    assert GIB // 2 < int(child(code)) < GIB


@linux
def test_an_rlimit_leaves_the_resident_budget_alone() -> None:
    code = f"resource.setrlimit(resource.RLIMIT_DATA, ({GIB}, {GIB})); print(limits.budget().binding.unit)"
    assert child(code) == "resident"


@linux
def test_what_a_process_has_written_counts_as_held() -> None:
    code = f"""
before = limits.budget().limits[0].held_bytes
kept = bytearray(b"x") * {200 * MIB}
print(limits.budget().limits[0].held_bytes - before)
"""
    assert 200 * MIB <= int(child(code)) < 210 * MIB


def test_reading_a_budget_imports_neither_torch_nor_nvml() -> None:
    assert child("limits.budget(); print(sorted({'torch', 'pynvml', 'numpy'} & set(sys.modules)))") == "[]"


# the values


@given(st.integers(0, 100), st.integers(0, 200), st.integers(0, 200))
def test_at_its_reach_a_process_and_all_others_just_fit_the_limit(limit: int, held: int, others: int) -> None:
    read = Limit(name="a", limit_bytes=limit, used_bytes=held + others, held_bytes=held, unit="resident", source="test")
    assert read.reach_bytes + others == max(limit, others)


def test_a_process_cannot_hold_more_than_is_used() -> None:
    with pytest.raises(MisuseError, match="0 <= held <= used"):
        Limit(name="a", limit_bytes=9, used_bytes=1, held_bytes=2, unit="resident", source="test")


def test_a_budget_needs_a_resident_limit() -> None:
    with pytest.raises(AssertionError, match="limit of resident bytes"):
        Budget(device="cpu", limits=())


def test_the_least_limit_of_a_budget_binds() -> None:
    ram, group = Limit.read("free RAM", "…", 900, 100, 50), Limit.read("memory.max", "…", 500, 50, 50)
    budget = Budget(device="cpu", limits=(ram, group))
    assert (budget.limit_bytes, budget.left_bytes, budget.committed_bytes) == (500, 450, None)
    assert budget.binding.name == "memory.max"


def test_sizes_of_proc_are_read_in_bytes() -> None:
    assert read_sizes("Pid:\t7\nVmData:\t     292 kB\n") == {"VmData": 292 << 10}
