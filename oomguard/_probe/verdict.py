"""Verdict: the outcome of a probe. This is the only judge of exceptions, of processes that died, and of peaks."""

import errno
import signal
import sys
from collections.abc import Iterator
from enum import Enum

from oomguard._core.errors import MisuseError
from oomguard._device.budget import Reading


class Verdict(Enum):
    """The outcome of a probe, and the advice that follows from it.

    >>> Verdict.OVER.advice
    'It ran over the budget: lower the microbatch, raise the segments, or raise the budget.'
    """

    FITS = "FITS"
    STRAINED = "STRAINED"
    OVER = "OVER"
    OOM = "OOM"
    UNSUPPORTED = "UNSUPPORTED"
    TIMEOUT = "TIMEOUT"
    CRASHED = "CRASHED"
    KILLED = "KILLED"
    BROKEN = "BROKEN"

    @property
    def advice(self) -> str:
        """One sentence: the meaning, and what to do."""
        return _ADVICE[self]

    @property
    def ran(self) -> bool:
        """Whether whole steps were run and measured, within the budget."""
        return self in (Verdict.FITS, Verdict.STRAINED)


_ADVICE = {
    Verdict.FITS: "It ran within the budget: use it as it is.",
    Verdict.STRAINED: "It ran, but so tightly that the allocator had to retry or the system to swap: lower the "
    "microbatch, or raise the budget.",
    Verdict.OVER: "It ran over the budget: lower the microbatch, raise the segments, or raise the budget.",
    Verdict.OOM: "Memory ran out: lower the microbatch, raise the segments, or raise the budget.",
    Verdict.UNSUPPORTED: "It cannot run here, whatever the memory: change what is named (precision, engine, segments).",
    Verdict.TIMEOUT: "It was not done in time: raise the time limit, or lower the segments or the sequence length.",
    Verdict.CRASHED: "The process that ran it crashed: try another engine, and report the error with this record.",
    Verdict.KILLED: "The process that ran it was killed from outside, most likely since the machine ran out of memory: "
    "lower the budget, or free memory.",
    Verdict.BROKEN: "It failed for a reason that is not known: read the error, and report it if it is not yours.",
}

_OOM_TEXTS = (
    "out of memory",  # CUDA, MPS, libgomp; torch.OutOfMemoryError is known by its type
    "out_of_memory",  # oneDNN's status
    "[enforce fail at alloc_cpu",  # the CPU allocator
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "std::bad_alloc",
    "cudnn_status_alloc_failed",
    "allocation_failed",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED, and HOST
    "cublas_status_alloc_failed",
    "could not create a memory",  # oneDNN
    "could not create a primitive",  # oneDNN took the descriptor, so it has the kernel (seen under an rlimit)
    "failed to map segment from shared object",  # a library that could not be loaded
    "[errno 12] cannot allocate memory",  # a folder that could not be read while modules were imported
    "cannot map zero-fill pages",
    # the few threads of a process fail to start when there is no memory for their stacks
    "can't start new thread",
    "libgomp: thread creation failed",
)
_UNSUPPORTED_TEXTS = (
    "cudnn_status_not_supported",
    "cudnn_status_arch_mismatch",
    "cublas_status_not_supported",
    "cublas_status_arch_mismatch",
    "could not create a primitive descriptor",  # oneDNN has no such kernel for this processor
    "not implemented for '",  # "…" not implemented for 'Half'
)
_SUSPICIOUS_TEXT = "cudnn_status_execution_failed"
"""The report of a recurrent cuDNN kernel on a card that is nearly full (speechbrain issues 310 and 1447)."""
LITTLE_BYTES = 400 << 20
"""With less than this free on a card, such a failure is taken for a lack of memory. (A CUDA context and its kernels,
which are loaded when they are first used, take 300 to 400 MiB.)"""
_CUT_SHORT = "[enforce fail at alloc_cpu"
"""Without memory, the message itself can be cut off: `[enforce fail a` was seen under an rlimit."""


def judge(error: BaseException) -> Verdict:
    """Judge an exception: by its type, then by its text, then by its causes."""
    verdicts = [_judge_alone(each) for each in _chain(error)]
    return next((verdict for verdict in (Verdict.OOM, Verdict.UNSUPPORTED) if verdict in verdicts), Verdict.BROKEN)


def judge_exit(code: int, stderr: str, free_bytes: int | None = None) -> Verdict:
    """Judge a process that ended without an answer, by its exit code (negative: the signal) and its last output.

    A crash with little of its card free (`free_bytes`) is taken for a lack of memory (deepspeech.pytorch issue 172).
    """
    if code == -signal.SIGKILL:
        return Verdict.KILLED
    crowded = code < 0 and free_bytes is not None and free_bytes < LITTLE_BYTES
    if crowded or "MemoryError" in stderr or _judge_text(stderr) is Verdict.OOM:
        return Verdict.OOM
    return Verdict.CRASHED if code < 0 else Verdict.BROKEN


def judge_reading(reading: Reading, budget_bytes: int, committed_bytes: int | None) -> Verdict:
    """Judge steps that ran."""
    committed_peak_bytes = reading.committed_peak_bytes or 0
    if reading.peak_bytes > budget_bytes or (committed_bytes is not None and committed_peak_bytes > committed_bytes):
        return Verdict.OVER
    return Verdict.STRAINED if reading.retries or reading.swapped_bytes else Verdict.FITS


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception, those of its group, and all their causes."""
    todo, seen = [error], set()
    while todo:
        current = todo.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        before = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
        todo += [
            *(current.exceptions if isinstance(current, BaseExceptionGroup) else ()),
            *([before] if before else []),
        ]


def _judge_alone(error: BaseException) -> Verdict | None:
    """Judge an exception without its causes; None if it says nothing about memory or support."""
    torch = sys.modules.get("torch")  # a process that has not imported torch has none of its errors
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return Verdict.OOM
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return Verdict.OOM
    if isinstance(error, MisuseError | NotImplementedError):
        return Verdict.UNSUPPORTED
    if isinstance(error, RuntimeError | ImportError):  # what torch raises; the texts mean nothing in other types
        suspicious = _SUSPICIOUS_TEXT in str(error).lower()
        return Verdict.OOM if suspicious and _card_is_full() else _judge_text(str(error))
    return None


def _card_is_full() -> bool:
    """Whether this process uses a card of which little is free. A card that no longer answers is not taken for full."""
    torch = sys.modules["torch"]
    try:
        return torch.cuda.is_initialized() and bool(torch.cuda.mem_get_info()[0] < LITTLE_BYTES)
    except RuntimeError:
        return False


def _judge_text(text: str) -> Verdict | None:
    text = text.strip()
    cut_short = bool(text) and _CUT_SHORT.startswith(text)
    text = text.lower()
    if any(phrase in text for phrase in _UNSUPPORTED_TEXTS):
        return Verdict.UNSUPPORTED
    if cut_short or any(phrase in text for phrase in _OOM_TEXTS):
        return Verdict.OOM
    return None
