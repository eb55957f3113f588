"""The cards that are here, read through NVML alone: no torch, no CUDA context, a few milliseconds.

Cards are counted as CUDA counts them for this process: NVML shows all of them, CUDA_VISIBLE_DEVICES chooses and orders.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from oomguard.device.present import Holder, Present
from oomguard.errors import MisuseError

SETTING = "CUDA_VISIBLE_DEVICES"


class NoNvmlError(MisuseError):
    """NVML does not answer here. Where it does not, torch may still know the cards."""


def count() -> int:
    """How many cards CUDA would show this process."""
    with _nvml() as nvml:
        return len(_visible(nvml))


def driver() -> str | None:
    """The driver's version; None where NVML does not answer."""
    try:
        with _nvml() as nvml:
            return str(nvml.nvmlSystemGetDriverVersion())
    except NoNvmlError:
        return None


def present(index: int = 0) -> Present:
    """Card `cuda:index` as it is now."""
    with _nvml() as nvml:
        uuids = _visible(nvml)
        check_index(index, len(uuids))
        _check_order(nvml)
        handle = _part(nvml, nvml.nvmlDeviceGetHandleByUUID(uuids[index]))
        total_bytes, free_bytes = _memory(nvml, handle)
        return Present(
            name=nvml.nvmlDeviceGetName(handle),
            uuid=nvml.nvmlDeviceGetUUID(handle),
            compute_capability=_capability(nvml, handle),
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            holders=_holders(nvml, handle),
            source="NVML",
        )


def visible(setting: str | None, uuids: Sequence[str]) -> list[str]:
    """The UUIDs of the cards that CUDA shows, in its order: CUDA_VISIBLE_DEVICES applied to NVML's `uuids`.

    The first entry that names no card ends the list; a card named twice empties it (CUDA Programming Guide,
    environment variables; torch.cuda._parse_visible_devices, torch 2.13).

    >>> here = ["GPU-aa", "GPU-ab"]
    >>> visible("1,0", here), visible("GPU-ab", here), visible("0,9,1", here), visible("", here)
    (['GPU-ab', 'GPU-aa'], ['GPU-ab'], ['GPU-aa'], [])
    """
    if setting is None:
        return list(uuids)
    chosen: list[str] = []
    kind = setting.strip()[:4]
    for entry in setting.split(","):
        found = _named(entry.strip(), kind, uuids)
        if found is None:
            break
        if found in chosen:
            return []
        chosen.append(found)
    return chosen


def _named(entry: str, kind: str, uuids: Sequence[str]) -> str | None:
    """The card that one entry names: a number, enough of a UUID to be the only one, or a part's MIG UUID."""
    if kind in ("GPU-", "MIG-") and not entry.startswith(kind):
        return None
    if kind == "MIG-":
        return entry
    if kind == "GPU-":
        found = [uuid for uuid in uuids if uuid.startswith(entry)]
        return found[0] if len(found) == 1 else None
    number = re.match(r"\+?(\d+)", entry)
    return uuids[int(number[1])] if number and int(number[1]) < len(uuids) else None


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, loaded for as long as it is needed. All it can complain of becomes one message."""
    try:
        import pynvml
    except ImportError as error:
        raise NoNvmlError(**_no_card(f"NVML's binding could not be imported ({error})")) from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoNvmlError(**_no_card(f"NVML could not be loaded ({error})")) from error
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise NoNvmlError(**_no_card(f"NVML failed ({error})")) from error
    finally:
        pynvml.nvmlShutdown()


def _no_card(got: str) -> dict[str, str]:
    """The three beats where there is no card to use."""
    return {
        "rule": "--device cuda needs an NVIDIA driver and a card",
        "got": got,
        "advice": "Use --device cpu, or name a card such as --device a100-80gb to plan for one that is not here.",
    }


def _visible(nvml: Any) -> list[str]:
    """The UUIDs of the cards that CUDA shows this process."""
    uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in _handles(nvml)]
    return visible(os.environ.get(SETTING), uuids)


def _handles(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def check_index(index: int, shown: int) -> None:
    """Raise unless `cuda:index` is among the cards that are shown, so many."""
    under = f" under {SETTING}={os.environ[SETTING]!r}" if SETTING in os.environ else ""
    if not shown:
        raise MisuseError(**_no_card(f"there is no card{under}"))
    if not 0 <= index < shown:
        raise MisuseError(
            rule=f"--device cuda:{index} must be a card that CUDA shows",
            got=f"it shows {shown}{under}",
            advice="Use --device cuda:0." if shown == 1 else f"Use --device cuda:0 to cuda:{shown - 1}.",
        )


def _check_order(nvml: Any) -> None:
    """By default CUDA counts the fastest card first, NVML goes by slot.

    That matters where cards of several kinds are chosen by number. Then nothing but CUDA itself knows which is which,
    and the budget of the wrong card is worse than none.
    """
    names = sorted({nvml.nvmlDeviceGetName(handle) for handle in _handles(nvml)})
    by_uuid = os.environ.get(SETTING, "").strip().startswith(("GPU-", "MIG-"))
    if len(names) > 1 and not by_uuid and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise MisuseError(
            rule="Cards of several kinds must be counted by slot",
            got=f"there are {' and '.join(names)}, and by default CUDA counts the fastest as cuda:0",
            advice=f"Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or choose a card by its UUID in {SETTING}.",
        )


def _part(nvml: Any, handle: Any) -> Any:
    """The card, or the part that CUDA takes where the card is divided and no part was chosen: the first."""
    try:
        divided = nvml.nvmlDeviceGetMigMode(handle)[0] == 1 and not nvml.nvmlDeviceIsMigDeviceHandle(handle)
    except nvml.NVMLError:  # a card that cannot be divided, or a part
        return handle
    return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0) if divided else handle


def _capability(nvml: Any, handle: Any) -> tuple[int, int]:
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except nvml.NVMLError:  # a part does not know: its card does
        whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(whole)
    return major, minor


def _memory(nvml: Any, handle: Any) -> tuple[int, int] | tuple[None, None]:
    """Total and free, without what driver and firmware keep. Drivers before 510 do not tell that apart: it is used."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return memory.total - memory.reserved, memory.free
    except nvml.NVMLError:
        pass
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return memory.total, memory.free
    except nvml.NVMLError_NotSupported:
        return None, None


def _holders(nvml: Any, handle: Any) -> tuple[Holder, ...]:
    """Processes that compute or draw on the card; one that does both is listed by NVML twice, with the same bytes."""
    found: dict[int, Holder] = {}
    for list_processes in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            processes = list_processes(handle)
        except nvml.NVMLError:  # not for this card, driver or user
            continue
        for one in processes:
            found[one.pid] = Holder(pid=one.pid, name=_process_name(nvml, one.pid), used_bytes=one.usedGpuMemory)
    return tuple(found.values())


def _process_name(nvml: Any, pid: int) -> str | None:
    try:
        return str(nvml.nvmlSystemGetProcessName(pid))
    except nvml.NVMLError:
        return None
