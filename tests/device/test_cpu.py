"""The CPU as a device, for real: each scenario in a process of its own, with real allocations."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from device.child import BIG_BYTES, PRELUDE, child, numbers
from device.fake_proc import kib, write

from oomguard._core.units import GIB, MIB
from oomguard._device import limits, proc
from oomguard._device.cpu import Cpu, cores, cpu_name, cpu_precisions
from oomguard._estimate.malloc import ENVIRONMENT
from oomguard._spec.candidate import Candidate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets the peak of a process be reset")

NEAR_BYTES = 8 * MIB


def near(measured: int, wanted: int) -> bool:
    return abs(measured - wanted) < NEAR_BYTES


# readings


def test_the_peak_is_the_largest_even_if_it_is_given_back() -> None:
    code = "cpu.reset(); kept = touch(); del kept; found = cpu.reading(); print(found.peak_bytes - found.now_bytes)"
    assert near(numbers(code)[0], BIG_BYTES)


def test_a_reset_forgets_the_peak_before_it() -> None:
    code = "kept = touch(); del kept; cpu.reset(); found = cpu.reading(); print(found.peak_bytes - found.now_bytes)"
    assert near(numbers(code)[0], 0)


def test_the_runtime_is_what_was_resident_at_the_reset() -> None:
    code = "kept = touch(); cpu.reset(); more = touch(); found = cpu.reading(); "
    code += "print(found.now_bytes - found.runtime_bytes, found.runtime_bytes > BIG_BYTES and 1)"
    grown_bytes, before = numbers(code)
    assert near(grown_bytes, BIG_BYTES)
    assert before


def test_what_is_asked_for_but_not_touched_is_committed_not_resident() -> None:
    code = "cpu.reset(); a = cpu.reading(); kept = commit(); b = cpu.reading(); "
    code += "print(b.committed_bytes - a.committed_bytes, b.now_bytes - a.now_bytes, b.peak_bytes - a.peak_bytes)"
    committed_bytes, now_bytes, peak_bytes = numbers(code)
    assert near(committed_bytes, BIG_BYTES)
    assert near(now_bytes, 0)
    assert near(peak_bytes, 0)


def test_the_peak_of_committed_bytes_outlives_what_was_given_back() -> None:
    code = "cpu.reset(); a = cpu.reading(); commit().close(); b = cpu.reading(); "
    code += "print(b.committed_peak_bytes - a.committed_bytes, b.committed_bytes - a.committed_bytes)"
    peak_bytes, now_bytes = numbers(code)
    assert near(peak_bytes, BIG_BYTES)
    assert near(now_bytes, 0)


def test_a_reset_forgets_the_committed_peak_before_it_too() -> None:
    code = "commit().close(); cpu.reset(); a = cpu.reading(); print(a.committed_peak_bytes - a.committed_bytes)"
    assert near(numbers(code)[0], 0)


def test_below_an_earlier_peak_what_is_committed_now_still_counts() -> None:
    code = "commit(2 * BIG_BYTES).close(); cpu.reset(); a = cpu.reading(); kept = commit(); b = cpu.reading(); "
    code += "print(b.committed_peak_bytes - a.committed_bytes)"
    assert near(numbers(code)[0], BIG_BYTES)


def test_without_a_reset_there_is_a_reading_all_the_same() -> None:
    code = "found = cpu.reading(); print(found.peak_bytes, found.now_bytes, found.committed_peak_bytes, found.retries)"
    peak_bytes, now_bytes, committed_bytes, retries = numbers(code)
    assert peak_bytes >= now_bytes > MIB
    assert committed_bytes > MIB
    assert retries == 0


def test_where_the_peak_cannot_be_reset_it_is_that_of_the_whole_life() -> None:
    code = "from pathlib import Path; from oomguard._device import cpu as module; kept = touch(); del kept; "
    code += "module.PROC = Path('/nowhere'); cpu.reset(); found = cpu.reading(); "
    code += "print(found.peak_bytes - found.now_bytes)"
    assert near(numbers(code)[0], BIG_BYTES)


def test_without_proc_psutil_reads_the_process(tmp_path: Path) -> None:
    status, here = proc.read_status(proc=tmp_path), proc.read_status()
    assert status is not None
    assert here is not None
    assert near(status.resident_bytes, here.resident_bytes)
    assert status.peak_bytes >= status.resident_bytes
    assert status.committed_bytes is None


def test_what_is_swapped_out_is_read(tmp_path: Path) -> None:
    write(tmp_path / "self/status", kib({"VmRSS": 10 * MIB, "VmSwap": 3 * MIB}))
    status = proc.read_status(proc=tmp_path)
    assert status is not None
    assert status.swapped_bytes == 3 * MIB


# giving back


def test_releasing_gives_back_what_glibc_keeps() -> None:
    code = """
blocks = [bytes(100_000) + b"x" for _ in range(2000)]
last = bytes(100_000) + b"x"
blocks.clear()
before = cpu.reading().now_bytes
cpu.release()
print(before - cpu.reading().now_bytes)
"""
    keep = {"MALLOC_MMAP_THRESHOLD_": str(GIB), "MALLOC_TRIM_THRESHOLD_": str(GIB)}
    assert numbers(code, **keep)[0] > 150 * MIB


def test_releasing_collects_cycles() -> None:
    code = """
import gc
gc.disable()
ring = [touch()]
ring.append(ring)
del ring
before = cpu.reading().now_bytes
cpu.release()
print(before - cpu.reading().now_bytes)
"""
    assert near(numbers(code)[0], BIG_BYTES)


# another process


def test_another_process_is_watched_from_outside() -> None:
    code = PRELUDE + "kept, more = touch(), commit(2 * BIG_BYTES); print('held', flush=True); input()"
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        status = proc.read_status(other.pid)
        other.communicate("\n")
    assert status is not None
    assert BIG_BYTES < status.resident_bytes < 2 * BIG_BYTES
    assert status.committed_bytes is not None
    assert status.committed_bytes > 3 * BIG_BYTES


def test_a_process_that_has_ended_is_not_watched_though_nobody_waited_for_it() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as other:
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert proc.read_status(other.pid) is None


def test_a_process_that_is_gone_is_not_watched() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as other:
        pass
    assert proc.read_status(other.pid) is None


# what a candidate asks for


@pytest.mark.parametrize("allocator", [None, "tight", "expandable"])
def test_unless_another_is_asked_for_the_allocator_is_tight(allocator: Any) -> None:
    assert Cpu().environment(Candidate(microbatch=1, allocator=allocator), "native") == ENVIRONMENT["tight"]


def test_the_systems_allocator_needs_no_environment() -> None:
    assert Cpu().environment(Candidate(microbatch=1, allocator="system"), "native") == {}


@pytest.mark.parametrize("engine", ["native", "onednn"])
def test_a_fast_allocator_has_thresholds_for_the_engine(engine: str) -> None:
    assert Cpu().environment(Candidate(microbatch=1, allocator="fast"), engine) == ENVIRONMENT[f"fast {engine}"]


def test_the_environment_reaches_glibc() -> None:
    code = "kept = [bytes(100_000) + b'x' for _ in range(2000)]; last = bytes(100_000) + b'x'; kept.clear(); "
    code += "print(cpu.reading().peak_bytes - cpu.reading().now_bytes)"
    environment = Cpu().environment(Candidate(microbatch=1), "native")
    assert numbers("cpu.reset(); " + code, **environment)[0] > 150 * MIB


@pytest.mark.parametrize(("engine", "enabled"), [(None, 1), ("onednn", 1), ("native", 0)])
def test_the_engine_is_switched_in_the_running_process(engine: str | None, enabled: int) -> None:
    code = f"""
import torch
from oomguard._spec.candidate import Candidate
cpu.settle(Candidate(microbatch=1, engine={engine!r}, threads=1))
print(int(torch._C._get_mkldnn_enabled()), torch.get_num_threads())
"""
    assert numbers(code) == [enabled, 1]


# the processor


@pytest.mark.parametrize(
    ("flags", "precisions"),
    [
        ("fpu avx2", ("fp32",)),
        ("avx512f avx512bw avx512vl avx512dq", ("fp32", "bf16")),
        ("avx512f", ("fp32",)),
        ("avx512bw avx512vl avx512dq avx512_bf16 avx512_fp16", ("fp32", "fp16", "bf16")),
    ],
)
def test_the_flags_tell_what_the_processor_computes_in(tmp_path: Path, flags: str, precisions: tuple[str, ...]) -> None:
    write(tmp_path / "cpuinfo", f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t:\n")
    assert cpu_precisions(tmp_path) == precisions


def test_without_flags_there_is_fp32(tmp_path: Path) -> None:
    assert cpu_precisions(tmp_path) == ("fp32",)


def test_bf16_is_offered_only_where_torch_takes_it() -> None:
    code = "import torch; print(int(torch.ops.mkldnn._is_mkldnn_bf16_supported()))"
    assert ("bf16" in Cpu().precisions()) <= int(child(code))


def test_the_processors_name_is_read(tmp_path: Path) -> None:
    write(tmp_path / "cpuinfo", "processor\t: 0\nmodel name\t: AMD EPYC 7B13\nflags\t: fpu\n")
    assert cpu_name(tmp_path) == "AMD EPYC 7B13"


def test_a_processor_without_a_model_name_has_a_name_still(tmp_path: Path) -> None:
    write(tmp_path / "cpuinfo", "processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert cpu_name(tmp_path) != ""


def test_the_library_is_the_one_that_torch_was_built_with() -> None:
    import torch

    library = Cpu().library()
    assert library is not None
    assert library.startswith("oneDNN ")
    assert library.removeprefix("oneDNN ") in torch.__config__.show()


def test_a_torch_that_does_not_name_its_library_is_told_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__config__.show", lambda: "PyTorch built with:\n  - GCC 11.2\n")
    assert Cpu().library() is None


def test_a_processor_has_no_driver() -> None:
    assert Cpu().driver() is None


@pytest.mark.parametrize(
    ("allowed", "quota", "count"),
    [(4, None, 4), (4, 2.0, 2), (4, 1.5, 2), (4, 0.25, 1), (2, 8.0, 2), (1, None, 1)],
)
def test_the_cores_are_those_that_it_may_run_on_or_that_its_group_pays_for(
    monkeypatch: pytest.MonkeyPatch, allowed: int, quota: float | None, count: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(allowed)})
    monkeypatch.setattr(limits, "cpu_quota", lambda: quota)
    assert cores() == count


def test_where_affinity_cannot_be_asked_all_processors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(limits, "cpu_quota", lambda: None)
    assert cores() == 6


def test_a_process_that_is_bound_to_one_processor_has_one_core() -> None:
    code = "import os; from oomguard._device.cpu import cores; "
    code += "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(cores())"
    assert child(code) == "1"


def test_the_quick_reading_of_resident_bytes_is_that_of_the_status() -> None:
    status = proc.read_status()
    assert status is not None
    assert proc.read_resident() == pytest.approx(status.resident_bytes, abs=4 << 20)
