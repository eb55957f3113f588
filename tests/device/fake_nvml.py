"""Cards and faults in the place of NVML's answers. Which error comes when is as nvml.h documents it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from oomguard._core.units import GIB, MIB

KEPT_BYTES = 400 * MIB


def card(uuid: str = "GPU-aa11", **differences: Any) -> SimpleNamespace:
    """A card of 16 GiB, 400 MiB kept by the driver, all else free, not divided into parts (MIG), without faults."""
    usual = {"name": "A", "uuid": uuid, "total": 16 * GIB, "free": 16 * GIB - KEPT_BYTES, "capability": (8, 0)}
    return SimpleNamespace(**{**usual, "processes": [], "parts": [], "faults": {}, **differences})


def process(pid: int, used: int | None) -> SimpleNamespace:
    """A process as NVML lists it."""
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def answer(patch: pytest.MonkeyPatch, *cards: SimpleNamespace) -> None:
    """From now on NVML shows these cards."""
    parts = [part for entry in cards for part in entry.parts]
    by_uuid = {entry.uuid: entry for entry in (*cards, *parts)}

    def whole_only(answer: Callable[[Any], Any], code: int) -> Callable[[Any], Any]:
        return lambda handle: fail(code) if handle in parts else answer(handle)

    answers: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": lambda index: cards[index],
        "nvmlDeviceGetHandleByUUID": lambda uuid: by_uuid.get(uuid) or fail(pynvml.NVML_ERROR_NOT_FOUND),
        "nvmlDeviceGetName": lambda handle: handle.name,
        "nvmlDeviceGetUUID": lambda handle: handle.uuid,
        "nvmlDeviceGetCudaComputeCapability": whole_only(
            lambda handle: handle.capability, pynvml.NVML_ERROR_NOT_SUPPORTED
        ),
        "nvmlDeviceGetMigMode": whole_only(
            lambda handle: [int(handle.parts != [])] * 2, pynvml.NVML_ERROR_INVALID_ARGUMENT
        ),
        "nvmlDeviceIsMigDeviceHandle": lambda handle: handle in parts,
        "nvmlDeviceGetMigDeviceHandleByIndex": lambda handle, index: handle.parts[index],
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda part: next(
            entry for entry in cards if part in entry.parts
        ),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: fail(handle.faults.get("processes")) or handle.processes,
        "nvmlDeviceGetGraphicsRunningProcesses": lambda handle: handle.processes[:1],
        "nvmlSystemGetProcessName": lambda pid: fail(pynvml.NVML_ERROR_NO_PERMISSION),
    }
    for name, function in answers.items():
        patch.setattr(pynvml, name, function)


def memory(handle: Any, version: int | None = None) -> SimpleNamespace:
    fail(handle.faults.get("memory v1" if version is None else "memory v2"))
    return SimpleNamespace(total=handle.total, reserved=KEPT_BYTES, free=handle.free)


def fail(code: int | None) -> Any:
    if code is not None:
        raise pynvml.NVMLError(code)
    return None
