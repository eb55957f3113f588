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
    parts = [part for one in cards for part in one.parts]
    by_uuid = {one.uuid: one for one in (*cards, *parts)}

    def whole_only(answer: Callable[[Any], Any], code: int) -> Callable[[Any], Any]:
        return lambda one: fail(code) if one in parts else answer(one)

    answers: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": lambda index: cards[index],
        "nvmlDeviceGetHandleByUUID": lambda uuid: by_uuid.get(uuid) or fail(pynvml.NVML_ERROR_NOT_FOUND),
        "nvmlDeviceGetName": lambda one: one.name,
        "nvmlDeviceGetUUID": lambda one: one.uuid,
        "nvmlDeviceGetCudaComputeCapability": whole_only(lambda one: one.capability, pynvml.NVML_ERROR_NOT_SUPPORTED),
        "nvmlDeviceGetMigMode": whole_only(lambda one: [int(one.parts != [])] * 2, pynvml.NVML_ERROR_INVALID_ARGUMENT),
        "nvmlDeviceIsMigDeviceHandle": lambda one: one in parts,
        "nvmlDeviceGetMigDeviceHandleByIndex": lambda one, index: one.parts[index],
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda part: next(one for one in cards if part in one.parts),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetComputeRunningProcesses": lambda one: fail(one.faults.get("processes")) or one.processes,
        "nvmlDeviceGetGraphicsRunningProcesses": lambda one: one.processes[:1],
        "nvmlSystemGetProcessName": lambda pid: fail(pynvml.NVML_ERROR_NO_PERMISSION),
    }
    for name, function in answers.items():
        patch.setattr(pynvml, name, function)


def memory(one: Any, version: int | None = None) -> SimpleNamespace:
    fail(one.faults.get("memory v1" if version is None else "memory v2"))
    return SimpleNamespace(total=one.total, reserved=KEPT_BYTES, free=one.free)


def fail(code: int | None) -> Any:
    if code is not None:
        raise pynvml.NVMLError(code)
    return None
