"""The CPU engines: shapes of their formulas, and the settings of the C allocator they depend on."""

import subprocess
import sys

import pytest

from oomguard._estimate.call import Call
from oomguard._estimate.engines import native, onednn
from oomguard._estimate.malloc import ENVIRONMENT, THRESHOLD_BYTES, in_heap, mapped_bytes


def lstm(inputs: int = 64, directions: int = 1) -> Call:
    return Call(cell="lstm", steps=100, rows=8, tokens=800, inputs=inputs, hidden=128, directions=directions)


def test_a_leading_dimension_is_a_multiple_of_a_cache_line_but_not_of_the_cache() -> None:
    for width in range(1, 3000):
        ld = onednn.leading(width)
        assert ld >= width
        assert ld % 16 == 0
        assert ld % 256 != 0


def test_onednn_keeps_the_output_the_gates_and_the_cells() -> None:
    assert onednn.footprint(lstm()).kept == 4 * 800 * (128 + 528 + 128)


def test_onednn_keeps_its_own_output_only_in_one_direction() -> None:
    assert onednn.footprint(lstm()).keeps_output
    assert not onednn.footprint(lstm(directions=2)).keeps_output


def test_onednn_needs_wider_rows_for_inputs_wider_than_the_state() -> None:
    narrow, wide = onednn.footprint(lstm(inputs=128)), onednn.footprint(lstm(inputs=384))
    assert wide.backward - narrow.backward == 4 * 800 * ((384 - 128) + 3 * (384 - 128))


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_native_blocks_under_the_threshold_stay_in_the_heap(cell: str) -> None:
    rows = THRESHOLD_BYTES["tight"] // (4 * 128)
    small = native.footprint(Call(cell=cell, steps=10, rows=1, tokens=10, inputs=8, hidden=128))
    large = native.footprint(Call(cell=cell, steps=10, rows=rows, tokens=10 * rows, inputs=8, hidden=128))
    assert small.kept == 0
    assert large.heap == 10 * native.STEPS[cell].node_bytes
    assert large.kept > 0


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_native_memory_has_a_cost_per_step_beside_the_cost_per_token(cell: str) -> None:
    long = native.footprint(Call(cell=cell, steps=1000, rows=1, tokens=1000, inputs=8, hidden=64))
    wide = native.footprint(Call(cell=cell, steps=10, rows=100, tokens=1000, inputs=8, hidden=64))
    assert long.heap + long.kept > wide.heap + wide.kept


def test_on_cuda_nothing_is_in_the_c_heap() -> None:
    foot = native.footprint(Call(cell="gru", steps=10, rows=1, tokens=10, inputs=8, hidden=16), heap="cuda")
    assert foot.heap == 0


def test_glibc_itself_keeps_blocks_of_megabytes_in_the_heap() -> None:
    assert in_heap(1 << 20, "system")
    assert not in_heap(1 << 20, "tight")


def test_mapped_blocks_are_whole_pages() -> None:
    assert [mapped_bytes(size) for size in (1, 3984, 3985)] == [4096, 4096, 8192]


LEFT = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
for _ in range(2):  # the second round finds the threshold raised, unless it is fixed
    blocks = [libc.malloc(1 << 20) for _ in range(40)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 20)
    pin = libc.malloc(1000)
    for block in blocks:
        libc.free(block)
print(resident() - before)
"""
"""What is left of blocks of 1 MiB, freed in the order in which glibc itself raises its threshold."""


def left_bytes(heap: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", LEFT], env=ENVIRONMENT[heap], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_the_tight_heap_gives_freed_memory_back() -> None:
    assert left_bytes("tight") < 2 << 20


def test_the_fast_heap_keeps_it_and_uses_it_again() -> None:
    assert 39 << 20 < left_bytes("fast native") < 45 << 20


def test_blocks_of_a_step_are_in_the_fast_heap_and_larger_ones_are_not() -> None:
    assert in_heap(1 << 20, "fast native")
    assert not in_heap(4 << 20, "fast native")


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_what_a_step_keeps_is_in_the_fast_heap(cell: str) -> None:
    call = Call(cell=cell, steps=10, rows=512, tokens=5120, inputs=8, hidden=128)
    assert native.footprint(call, heap="tight").kept > 0
    assert native.footprint(call, heap="fast native").kept == 0
