"""Probes on a CUDA card, whichever is there."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from device.cards import two_cards
from probe.probing import is_running, meanwhile, one_thread

from oomguard._core.units import MIB
from oomguard._device.find import find_target, open_device
from oomguard._estimate.breakdown import estimate_step
from oomguard._probe.runner import Runner
from oomguard._probe.sample import random_microbatch
from oomguard._probe.verdict import LITTLE_BYTES, Verdict, judge
from oomguard._spec.spec import Spec
from oomguard._step import prepare, step

pytestmark = pytest.mark.gpu

LSTM = Spec(cell="lstm", seq=500, features=64, hidden=256, batch=32)
"""Some 300 MiB over the context."""


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner("cuda", timeout=100, seconds=1) as runner:
        yield runner


def test_a_record_has_what_the_card_showed(runner: Runner) -> None:
    record = runner.probe(LSTM, one_thread(LSTM))
    assert (record.verdict, record.engine, record.device) == (Verdict.FITS, "cudnn", "cuda:0")
    assert record.peak_bytes is not None
    assert record.runtime_bytes is not None
    assert record.allocated_bytes is not None
    assert record.reserved_bytes is not None
    assert 200 * MIB < record.allocated_bytes <= record.reserved_bytes
    assert record.peak_bytes == record.runtime_bytes + record.reserved_bytes
    assert record.committed_bytes is None
    assert record.terms is not None
    assert record.terms["weights"] == record.terms["gradients"] > 3 * MIB
    assert record.terms["input"] == 500 * 32 * (64 + 1) * 4
    assert record.seconds_per_step is not None


def test_a_shorter_piece_leaves_no_blocks_that_are_too_small_for_the_others(runner: Runner) -> None:
    """Of 4 pieces of 101 steps, the odd one is differentiated last: reserved is no more than for equal ones."""
    even, uneven = (Spec(cell="gru", seq=steps, hidden=512, layers=2, batch=64) for steps in (404, 401))
    peaks = [runner.probe(each, one_thread(each, segments=4)).reserved_bytes or 0 for each in (even, uneven)]
    assert 0 < peaks[1] <= peaks[0]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_needs_less(runner: Runner, precision: str) -> None:
    if precision not in open_device("cuda").precisions():
        pytest.skip(f"this card does not compute in {precision}")
    full, half = (runner.probe(LSTM, one_thread(LSTM, precision=each)) for each in ("fp32", precision))
    assert half.verdict is Verdict.FITS
    assert half.allocated_bytes is not None
    assert full.allocated_bytes is not None
    assert half.allocated_bytes < full.allocated_bytes


@pytest.mark.parametrize("knobs", [{"segments": 10}, {"microbatch": 8}, {"segments": 10, "keep": "host"}], ids=str)
def test_pieces_need_less(runner: Runner, knobs: dict[str, Any]) -> None:
    whole, pieces = runner.probe(LSTM, one_thread(LSTM)), runner.probe(LSTM, one_thread(LSTM, **knobs))
    assert pieces.verdict is Verdict.FITS
    assert pieces.allocated_bytes is not None
    assert whole.allocated_bytes is not None
    assert pieces.allocated_bytes < whole.allocated_bytes / 2


def test_each_chunk_keeps_the_weights_that_were_cast_for_it_as_the_estimate_says(runner: Runner) -> None:
    """64 copies of 10 MiB in half precision, none in fp32."""
    spec = Spec(cell="gru", seq=1280, features=64, hidden=512, layers=4, batch=8)
    target = find_target("cuda")
    for precision in ("fp32", "bf16" if "bf16" in open_device("cuda").precisions() else "fp16"):
        candidate = one_thread(spec, segments=64, recompute=False, precision=precision)
        record, estimate = runner.probe(spec, candidate), estimate_step(spec, candidate, target)
        assert record.verdict is Verdict.FITS
        assert record.allocated_bytes == pytest.approx(estimate.allocated_bytes, rel=0.1)


def test_inputs_kept_in_host_memory_take_none_of_the_card(runner: Runner) -> None:
    record = runner.probe(LSTM, one_thread(LSTM, segments=10, keep="host"))
    assert record.terms is not None
    assert record.terms["input"] == 0


def test_a_record_does_not_depend_on_what_ran_before(runner: Runner) -> None:
    before = runner.probe(LSTM, one_thread(LSTM))
    for knobs in ({"microbatch": 4}, {"segments": 7}, {"microbatch": 16}):
        assert runner.probe(LSTM, one_thread(LSTM, **knobs)).verdict is Verdict.FITS
    after = runner.probe(LSTM, one_thread(LSTM))
    assert after.peak_bytes == pytest.approx(before.peak_bytes, rel=0.01)
    assert after.allocated_bytes == before.allocated_bytes


def test_a_probe_reserves_what_training_reserves(runner: Runner) -> None:
    spec = Spec(cell="lstm", seq=200, vocab=20_000, hidden=512, batch=32)  # large weights between large activations
    candidate = one_thread(spec, microbatch=16)
    record = runner.probe(spec, candidate)
    training, dice = prepare(spec, candidate, "cuda:0"), torch.Generator(device="cuda:0").manual_seed(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        step(training, (random_microbatch(spec, 16, dice) for _ in range(2)), targets=1)
    assert record.reserved_bytes == pytest.approx(torch.cuda.max_memory_reserved(), rel=0.02)
    del training
    torch.cuda.empty_cache()


def test_memory_that_is_refused_is_an_oom_and_the_next_probe_works(runner: Runner) -> None:
    enough = runner.probe(LSTM, one_thread(LSTM))
    assert enough.peak_bytes is not None
    record = runner.probe(LSTM, one_thread(LSTM), budget_bytes=enough.peak_bytes - 100 * MIB)
    assert record.verdict is Verdict.OOM
    assert "out of memory" in record.message
    assert record.peak_bytes is not None
    assert record.peak_bytes <= record.budget_bytes
    assert runner.probe(LSTM, one_thread(LSTM)).verdict is Verdict.FITS


def test_between_what_fits_and_what_does_not_lies_what_is_strained(runner: Runner) -> None:
    enough = runner.probe(LSTM, one_thread(LSTM))
    assert enough.peak_bytes is not None
    budget_bytes, record = enough.peak_bytes, enough
    while record.verdict is Verdict.FITS:
        budget_bytes -= 2 * MIB  # the allocator takes no less at once
        record = runner.probe(LSTM, one_thread(LSTM), budget_bytes=budget_bytes)
    assert record.verdict is Verdict.STRAINED
    assert record.retries > 0


def test_a_sequence_too_long_for_cudnn_is_unsupported_and_segments_cure_it(runner: Runner) -> None:
    spec = Spec(cell="gru", seq=70_000, features=4, hidden=16, layers=1, batch=1)
    record = runner.probe(spec, one_thread(spec))
    assert record.verdict is Verdict.UNSUPPORTED
    assert "NOT_SUPPORTED" in record.message
    assert runner.probe(spec, one_thread(spec, segments=2)).verdict is Verdict.FITS


def test_a_probe_that_takes_too_long_is_ended(runner: Runner) -> None:
    with Runner("cuda") as slow:
        record = slow.probe(LSTM, one_thread(LSTM), timeout=0.5)
        assert slow.pid is None or not is_running(slow.pid)
    assert record.verdict is Verdict.TIMEOUT
    assert record.seconds < 10


@pytest.mark.parametrize(
    ("number", "verdict"),
    [(signal.SIGKILL, Verdict.KILLED), (signal.SIGSEGV, Verdict.CRASHED), (None, Verdict.TIMEOUT)],
)
def test_what_happens_to_a_child_in_the_middle_of_a_probe_is_its_verdict(
    runner: Runner, number: signal.Signals | None, verdict: Verdict
) -> None:
    """It is stopped first, so that it is surely at work when the signal comes."""
    assert runner.probe(LSTM, one_thread(LSTM)).verdict is Verdict.FITS
    pid = runner.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)

    def strike() -> None:
        for each in (number, signal.SIGCONT) if number is not None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, each)

    with meanwhile(strike):
        record = runner.probe(LSTM, one_thread(LSTM), timeout=5)
    assert record.verdict is verdict
    assert runner.probe(LSTM, one_thread(LSTM)).verdict is Verdict.FITS


@two_cards
def test_each_card_has_its_own_probes() -> None:
    with Runner("cuda:0", seconds=1) as first, Runner("cuda:1", seconds=1) as second:
        records = [runner.probe(LSTM, one_thread(LSTM)) for runner in (first, second)]
    assert [record.device for record in records] == ["cuda:0", "cuda:1"]
    assert records[0].reserved_bytes == records[1].reserved_bytes


def test_what_a_neighbour_takes_is_not_offered_to_a_probe(neighbour: Callable[[int], None]) -> None:
    with Runner("cuda", seconds=1) as runner:
        before = runner.probe(LSTM, one_thread(LSTM))
        neighbour(1024 * MIB)
        after = runner.probe(LSTM, one_thread(LSTM))
    assert after.verdict is Verdict.FITS
    assert after.budget_bytes <= before.budget_bytes - 1000 * MIB


def test_a_failed_kernel_of_cudnn_is_taken_for_a_lack_of_memory_only_on_a_full_card() -> None:
    error = RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.empty_cache()
    assert judge(error) is Verdict.BROKEN
    free_bytes, _ = torch.cuda.mem_get_info()
    kept = torch.empty(free_bytes - LITTLE_BYTES // 2, dtype=torch.uint8, device="cuda")
    assert judge(error) is Verdict.OOM
    del kept
    torch.cuda.empty_cache()
