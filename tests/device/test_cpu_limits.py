"""The CPU held to a limit, for real: each in a process of its own, where an allocation beyond the limit fails."""

import sys

import pytest
from device.child import BIG_BYTES, PRELUDE, child, numbers

from oomguard._core.units import GIB, MIB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces RLIMIT_DATA")


def test_beyond_the_limit_an_allocation_fails_and_can_be_caught() -> None:
    code = """
cpu.enforce(cpu.reading().now_bytes + BIG_BYTES)
kept = commit(2 * BIG_BYTES)
try:
    touch()
except MemoryError:
    print(1)
"""
    assert numbers(code) == [1]


def test_torch_raises_what_it_raises_out_of_memory() -> None:
    code = """
import torch
cpu.enforce(cpu.reading().now_bytes + BIG_BYTES)
try:
    torch.empty(4 * BIG_BYTES, dtype=torch.uint8)
except RuntimeError as error:
    print(error)
"""
    assert "can't allocate memory" in child(PRELUDE + code)


def test_within_the_limit_2_8_bytes_may_be_committed_for_each_resident_one() -> None:
    code = "cpu.enforce(cpu.reading().now_bytes + BIG_BYTES); commit(BIG_BYTES * 27 // 10); print(1)"
    assert numbers(code) == [1]


def test_a_limit_of_committed_bytes_is_kept_as_it_is() -> None:
    code = "cpu.enforce(64 * BIG_BYTES, cpu.reading().committed_bytes + BIG_BYTES); "
    code += "print(soft() - cpu.reading().committed_bytes)"
    assert abs(numbers(code)[0] - BIG_BYTES) < MIB


def test_a_limit_can_be_taken_back() -> None:
    code = "before = soft(); cpu.enforce(0); cpu.unlimit(); kept = commit(4 * BIG_BYTES); print(soft() == before and 1)"
    assert numbers(code) == [1]


def test_a_limit_can_be_raised_again() -> None:
    code = "cpu.enforce(0); cpu.enforce(cpu.reading().now_bytes + BIG_BYTES); kept = commit(); print(1)"
    assert numbers(code) == [1]


def test_without_a_limit_there_is_nothing_to_take_back() -> None:
    code = "before = soft(); cpu.unlimit(); print(soft() == before and 1)"
    assert numbers(code) == [1]


@pytest.mark.parametrize("last", ["cpu.enforce(64 * BIG_BYTES)", "cpu.enforce(0); cpu.unlimit()"])
def test_an_inherited_soft_limit_is_never_raised(last: str) -> None:
    code = f"resource.setrlimit(resource.RLIMIT_DATA, ({GIB}, {2 * GIB})); {last}; print(soft())"
    assert numbers(code) == [GIB]


def test_the_hard_limit_stays_as_it_was() -> None:
    code = f"resource.setrlimit(resource.RLIMIT_DATA, ({GIB}, {2 * GIB})); cpu.enforce(0); "
    code += "print(resource.getrlimit(resource.RLIMIT_DATA)[1])"
    assert numbers(code) == [2 * GIB]


def test_a_limit_of_this_process_shows_in_its_budget() -> None:
    code = "cpu.enforce(cpu.reading().now_bytes + BIG_BYTES); print(cpu.budget().committed_bytes == soft() and 1)"
    assert numbers(code) == [1]
