"""The only judge of OOM: by type first, then by text, then by what an exception came from."""

import pickle
import signal
from collections.abc import Callable

import pytest
import torch

from oomguard._core.errors import MisuseError
from oomguard._device.budget import Reading
from oomguard._probe.verdict import LITTLE_BYTES, Verdict, judge, judge_exit, judge_reading

ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 172.00 MiB."),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError(ALLOCATOR),
        RuntimeError("[enforce fail a"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 800000 bytes."),
        RuntimeError("std::bad_alloc"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("could not create a memory object"),
        RuntimeError("could not create a primitive"),
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
    ids=repr,
)
def test_what_lacks_memory_is_an_oom(error: Exception) -> None:
    assert judge(error) is Verdict.OOM


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous"
        ),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED, workspace out of memory or shape too long"),
        RuntimeError(
            "could not create a primitive descriptor for the LSTM forward propagation primitive. Run workload"
        ),
        RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'"),
        NotImplementedError("\"lstm\" not implemented for 'BFloat16'"),
        MisuseError(rule="A rule", got="got something else", advice="Do it."),
    ],
    ids=repr,
)
def test_what_cannot_run_here_is_unsupported_and_never_an_oom(error: Exception) -> None:
    assert judge(error) is Verdict.UNSUPPORTED


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 2x8)"),
        RuntimeError(""),
        RuntimeError("[enforce fail at inline_container.cc:143] . PytorchStreamReader failed reading zip archive"),
        KeyError("out of memory"),
        OSError(2, "No such file or directory"),
        ImportError("libgomp.so: cannot allocate memory in static TLS block"),
        pickle.PicklingError("std::bad_alloc"),
    ],
    ids=repr,
)
def test_anything_unknown_is_broken(error: Exception) -> None:
    assert judge(error) is Verdict.BROKEN


def test_a_real_allocation_that_is_too_large_is_an_oom() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert judge(caught.value) is Verdict.OOM


def raise_from_an_oom() -> None:
    try:
        raise MemoryError
    except MemoryError as error:
        raise ValueError("could not be read") from error


def raise_while_an_oom_is_handled() -> None:
    try:
        raise RuntimeError(ALLOCATOR)
    except RuntimeError:
        int("could not be said")


def raise_with_an_oom_set_aside() -> None:
    try:
        raise MemoryError
    except MemoryError:
        raise ValueError("could not be done after all") from None


@pytest.mark.parametrize(
    ("fail", "verdict"),
    [
        (raise_from_an_oom, Verdict.OOM),
        (raise_while_an_oom_is_handled, Verdict.OOM),
        (raise_with_an_oom_set_aside, Verdict.BROKEN),
    ],
)
def test_what_an_error_came_from_is_judged_too(fail: Callable[[], None], verdict: Verdict) -> None:
    with pytest.raises(ValueError, match="could not") as caught:
        fail()
    assert judge(caught.value) is verdict


def test_an_oom_is_found_in_a_group() -> None:
    assert judge(ExceptionGroup("several", [KeyError("a"), MemoryError()])) is Verdict.OOM


def test_a_chain_that_bites_its_tail_is_judged_too() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert judge(first) is Verdict.BROKEN


@pytest.mark.parametrize(
    ("code", "words", "verdict"),
    [
        (-signal.SIGKILL, "", Verdict.KILLED),
        (-signal.SIGKILL, "std::bad_alloc", Verdict.KILLED),
        (-signal.SIGSEGV, "Fatal Python error: Segmentation fault", Verdict.CRASHED),
        (-signal.SIGBUS, "", Verdict.CRASHED),
        (-signal.SIGABRT, "free(): invalid pointer", Verdict.CRASHED),
        (-signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_alloc'", Verdict.OOM),
        (1, "libgomp: Thread creation failed: Resource temporarily unavailable", Verdict.OOM),
        (1, "Traceback (most recent call last):\nMemoryError", Verdict.OOM),
        (1, "ModuleNotFoundError: No module named 'torch'", Verdict.BROKEN),
        (0, "", Verdict.BROKEN),
    ],
)
def test_a_process_is_judged_by_its_exit_code_and_last_words(code: int, words: str, verdict: Verdict) -> None:
    assert judge_exit(code, words) is verdict


@pytest.mark.parametrize(
    ("code", "free_bytes", "verdict"),
    [
        (-signal.SIGSEGV, LITTLE_BYTES - 1, Verdict.OOM),
        (-signal.SIGABRT, -1, Verdict.OOM),
        (-signal.SIGSEGV, LITTLE_BYTES, Verdict.CRASHED),
        (-signal.SIGKILL, 0, Verdict.KILLED),
        (1, 0, Verdict.BROKEN),
    ],
)
def test_a_crash_on_a_nearly_full_card_is_taken_for_a_lack_of_memory(
    code: int, free_bytes: int, verdict: Verdict
) -> None:
    assert judge_exit(code, "Segmentation fault", free_bytes) is verdict


def test_a_failed_kernel_of_cudnn_is_broken_where_no_card_is_full() -> None:
    assert judge(RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")) is Verdict.BROKEN


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ({"peak_bytes": 100}, Verdict.FITS),
        ({"peak_bytes": 101}, Verdict.OVER),
        ({"peak_bytes": 90, "committed_peak_bytes": 201}, Verdict.OVER),
        ({"peak_bytes": 90, "retries": 1}, Verdict.STRAINED),
        ({"peak_bytes": 90, "swapped_bytes": 4096}, Verdict.STRAINED),
        ({"peak_bytes": 101, "retries": 1}, Verdict.OVER),
    ],
)
def test_steps_that_ran_are_judged_by_their_peak(figures: dict[str, int], verdict: Verdict) -> None:
    reading = Reading(now_bytes=80, runtime_bytes=50, **figures)
    assert judge_reading(reading, 100, 200) is verdict


@pytest.mark.parametrize("verdict", Verdict)
def test_every_verdict_carries_one_sentence_of_advice(verdict: Verdict) -> None:
    assert verdict.advice.endswith(".")
    assert verdict.advice.count(".") == 1
