"""Probes on the CPU: a record for each, the same whatever ran before, and nothing left behind."""

import gc
import os
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from msgspec.structs import replace
from probe.probing import LONG, TINY, WIDE, children, is_running, meanwhile, one_thread, warm_pid

from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB, MIB
from oomguard._device.budget import Budget, Limit
from oomguard._device.cpu import cpu_precisions
from oomguard._device.find import find_target
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.terms import elements, parameters
from oomguard._probe.record import Record, Request
from oomguard._probe.runner import Runner
from oomguard._probe.verdict import Verdict
from oomguard._spec.spec import Spec

GRU = Spec(cell="gru", seq=150, features=16, hidden=64, layers=1, batch=16)
"""Some 10 MiB in thousands of blocks: of all cells, the one whose peak depends most on what the heap looks like."""


def test_a_record_has_everything_that_was_measured(shared: Runner) -> None:
    record = shared.probe(WIDE, one_thread(WIDE, microbatch=24))
    assert record.verdict is Verdict.FITS
    assert (record.engine, record.device, record.error, record.steps, record.passes) == ("native", "cpu", None, 3, 6)
    assert record.peak_bytes is not None
    assert record.runtime_bytes is not None
    assert record.runtime_bytes == pytest.approx(find_target("cpu").runtime_bytes, rel=0.05)
    assert record.runtime_bytes < record.peak_bytes < record.budget_bytes
    assert record.committed_bytes is not None
    assert record.terms is not None
    assert sum(record.terms.values()) == record.peak_bytes
    assert record.terms["input"] == 200 * 24 * (32 + 1) * 4
    assert record.seconds_per_step is not None
    assert record.tokens_per_second == pytest.approx(200 * 64 / record.seconds_per_step)
    assert record.seconds_per_pass is not None
    assert record.seconds_per_update is not None
    assert record.seconds_per_step == pytest.approx(64 / 24 * record.seconds_per_pass + record.seconds_per_update)


def test_a_measured_peak_is_near_the_estimate(shared: Runner) -> None:
    spec = Spec(cell="gru", seq=200, features=32, hidden=128, layers=1, batch=64)  # 80 MiB: small ones err by more
    record = shared.probe(spec, one_thread(spec))
    assert record.peak_bytes is not None
    assert record.runtime_bytes is not None
    expected_bytes = estimate_step(spec, one_thread(spec)).growth_bytes
    assert record.peak_bytes - record.runtime_bytes == pytest.approx(expected_bytes, rel=0.1)


def test_probes_follow_each_other_in_one_child(shared: Runner) -> None:
    first = warm_pid(shared)
    record = shared.probe(TINY, one_thread(TINY, microbatch=1))
    assert (shared.pid, record.verdict) == (first, Verdict.FITS)
    assert record.seconds < 2


OTHERS = (
    *((300, 64, 16), (20, 8, 2), (60, 128, 32), (200, 48, 8), (100, 96, 4)),
    *((350, 32, 16), (30, 64, 16), (250, 16, 16)),
)
"""Time steps, hidden size and batch: larger and smaller ones."""


def test_a_record_does_not_depend_on_what_ran_before(shared: Runner) -> None:
    with Runner(seconds=0.5) as new:
        alone = new.probe(GRU, one_thread(GRU))
    shared.close()
    pids = set()
    for seq, hidden, batch in OTHERS:
        other = msgspec.structs.replace(GRU, seq=seq, hidden=hidden, batch=batch)
        assert shared.probe(other, one_thread(other)).verdict is Verdict.FITS
        pids.add(shared.pid)
    for knobs in ({"segments": 5}, {"microbatch": 5}):
        assert shared.probe(GRU, one_thread(GRU, **knobs)).verdict is Verdict.FITS
        pids.add(shared.pid)
    after = shared.probe(GRU, one_thread(GRU))
    assert pids == {shared.pid}  # all in one child
    assert after.peak_bytes == pytest.approx(alone.peak_bytes, rel=0.01)
    assert after.committed_bytes == pytest.approx(alone.committed_bytes, rel=0.05)


def test_without_fixed_thresholds_of_the_heap_what_is_smaller_gets_a_new_child(shared: Runner) -> None:
    """Larger blocks raise the thresholds, and nothing lowers them."""
    pids, peaks = [], []
    for rows in (8, 8, 16, 8):
        record = shared.probe(GRU, one_thread(GRU, microbatch=rows, allocator="system"))
        assert record.verdict is Verdict.FITS
        pids.append(shared.pid)
        peaks.append(record.peak_bytes)
    assert pids[0] == pids[1] == pids[2] != pids[3]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.05)


def test_threads_that_share_a_runner_get_their_own_records(shared: Runner) -> None:
    specs = [msgspec.structs.replace(TINY, hidden=hidden) for hidden in (4, 32)] * 4
    with ThreadPoolExecutor(4) as pool:
        records = list(pool.map(lambda spec: shared.probe(spec, one_thread(spec)), specs))
    assert [record.spec.hidden for record in records] == [spec.hidden for spec in specs]
    weights = [record.terms["weights"] if record.terms else None for record in records]
    assert weights == [4 * sum(map(elements, parameters(spec).values())) for spec in specs]


def test_the_budget_is_what_is_free_when_the_probe_begins(shared: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = warm_pid(shared)
    held_bytes = shared.device.held(pid)  # the child that lives is no loss to the next probe
    for left_bytes in (3 * GIB, 2 * GIB):
        free = Limit(
            name="free RAM", limit_bytes=left_bytes, used_bytes=0, held_bytes=0, unit="resident", source="a test"
        )
        monkeypatch.setattr(type(shared.device), "budget", lambda _, free=free: Budget(device="cpu", limits=(free,)))
        budget_bytes = shared.probe(TINY, one_thread(TINY)).budget_bytes
        assert budget_bytes == pytest.approx(left_bytes + held_bytes, abs=16 * MIB)


def test_a_budget_may_be_text(shared: Runner) -> None:
    spec = Spec(cell="gru", seq=8, hidden=8, batch=2)
    assert shared.probe(spec, one_thread(spec), budget="6GiB").budget_bytes == 6 * GIB


def test_the_parent_does_not_grow(shared: Runner) -> None:
    own = psutil.Process(os.getpid())
    for _ in range(3):
        warm_pid(shared)
    gc.collect()
    before_bytes, before_files = own.memory_info().rss, own.num_fds()
    for _ in range(15):
        warm_pid(shared)
    gc.collect()
    assert own.memory_info().rss - before_bytes < MIB
    assert own.num_fds() == before_files


def test_ctrl_c_does_not_reach_the_child(shared: Runner) -> None:
    pid = warm_pid(shared)
    spec = msgspec.structs.replace(LONG, seq=5000)
    with meanwhile(lambda: os.kill(pid, signal.SIGINT), seconds=0.1):
        record = shared.probe(spec, one_thread(spec))
    assert (record.verdict, shared.pid) == (Verdict.FITS, pid)


@pytest.mark.parametrize(("microbatch", "steps"), [(64, 2), (16, 1)])
def test_time_that_is_used_up_ends_the_measuring_after_two_passes(
    shared: Runner, monkeypatch: pytest.MonkeyPatch, microbatch: int, steps: int
) -> None:
    monkeypatch.setattr(shared, "seconds", 0.001)
    record = shared.probe(WIDE, one_thread(WIDE, microbatch=microbatch))
    assert (record.steps, record.passes) == (steps, 2)


@pytest.mark.parametrize(
    ("spec", "knobs", "words"),
    [
        (TINY, {"engine": "cudnn"}, "runs on native"),
        (replace(TINY, optimizer="sgd"), {"state_8bit": True}, "In 8 bits there are adam, adamw here"),
    ],
)
def test_what_cannot_run_here_is_unsupported_and_spares_the_child(
    shared: Runner, spec: Spec, knobs: dict[str, object], words: str
) -> None:
    pid = warm_pid(shared)
    record = shared.probe(spec, one_thread(spec, **knobs))
    assert record.verdict is Verdict.UNSUPPORTED
    assert words in record.message
    assert shared.pid == pid


@pytest.mark.skipif("bf16" in cpu_precisions(), reason="this processor trains LSTMs in bf16")
def test_a_precision_that_the_processor_lacks_is_unsupported() -> None:
    spec = Spec(cell="lstm", seq=5, features=2, hidden=4, layers=1, batch=4)
    with Runner() as runner:
        record = runner.probe(spec, one_thread(spec, precision="bf16"))
    assert record.verdict is Verdict.UNSUPPORTED
    assert record.error is not None
    assert "primitive descriptor" in record.error


def test_an_error_of_pytorch_is_broken_with_its_traceback(shared: Runner) -> None:
    spec = Spec(cell="rnn", seq=5, vocab=9, hidden=4, layers=1, batch=4, sparse_embedding=True, optimizer="sgd")
    record = shared.probe(spec, one_thread(spec, update="fused"))
    assert record.verdict is Verdict.BROKEN
    assert record.error is not None
    assert record.error.startswith("Traceback")
    assert "sparse" in record.message
    assert warm_pid(shared)


def test_another_engine_runs_in_another_child() -> None:
    spec = Spec(cell="lstm", seq=5, features=2, hidden=4, layers=1, batch=4)
    with Runner() as runner:
        onednn = runner.probe(spec, one_thread(spec))
        first = runner.pid
        native = runner.probe(spec, one_thread(spec, engine="native"))
        assert runner.pid != first
    assert onednn.runtime_bytes is not None
    assert native.runtime_bytes is not None
    assert native.runtime_bytes < onednn.runtime_bytes  # whose kernels would still be there


def test_what_libraries_print_does_not_come_between_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_VERBOSE", "1")  # a line on stdout for every kernel
    spec = Spec(cell="lstm", seq=5, features=2, hidden=4, layers=1, batch=4)
    with Runner() as runner:
        assert runner.probe(spec, one_thread(spec)).verdict is Verdict.FITS


def test_the_child_runs_this_very_package_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoy = tmp_path / "oomguard"
    decoy.mkdir()
    (decoy / "__init__.py").write_text("raise ImportError('the wrong package')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with Runner() as runner:
        assert runner.probe(TINY, one_thread(TINY)).verdict is Verdict.FITS


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_nothing_is_left_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, memory = children(), shared_memory()
    with Runner() as runner:
        pid = warm_pid(runner)
        assert is_running(pid)
        assert shared_memory() == memory
        assert list(tmp_path.iterdir()) == []
    assert not psutil.pid_exists(pid)
    assert children() == before
    assert shared_memory() == memory
    runner.close()  # again, for nothing


def test_a_runner_that_is_forgotten_takes_its_child_along() -> None:
    runner = Runner()
    runner._ready(Request(spec=TINY, candidate=one_thread(TINY), device="cpu", budget_bytes=GIB))
    pid = runner.pid
    assert pid is not None
    assert is_running(pid)
    del runner
    gc.collect()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    "asked",
    [{"budget_bytes": 0}, {"budget_bytes": -5}, {"committed_bytes": 0}, {"timeout": 0}, {"timeout": float("inf")}],
)
def test_what_cannot_be_meant_is_refused(shared: Runner, asked: dict[str, Any]) -> None:
    with pytest.raises(MisuseError):
        shared.probe(TINY, one_thread(TINY), **asked)


def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(MisuseError, match="device"):
        Runner("rtx-4090")


def test_a_record_of_a_probe_goes_through_json_and_back(shared: Runner) -> None:
    record = shared.probe(TINY, one_thread(TINY))
    assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record
