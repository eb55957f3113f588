"""CardStatus: a card that is here, as it is now. It is read through NVML alone: no torch, no CUDA context, a few
milliseconds.

Cards are counted as CUDA counts them for this process: NVML shows all of them, CUDA_VISIBLE_DEVICES chooses and orders.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from oomguard._core.errors import MisuseError
from oomguard._core.units import MAX_BYTES, format_bytes
from oomguard._device import limits
from oomguard._device.budget import Budget, Limit
from oomguard._estimate import cards

SETTING = "CUDA_VISIBLE_DEVICES"
UNKNOWN_SMS = 128
"""Multiprocessors of a card here that cards.toml does not know, from above: only from 98 on cuDNN takes its larger
workspace for fp16 (`cudnn.is_persistent`), and NVML does not report the number."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory of a card."""

    pid: int  # its process id, as NVML numbers it
    name: str | None  # its name; None where NVML may not say
    used_bytes: int | None  # bytes that it holds; None where NVML does not report it (Windows)

    def __str__(self) -> str:
        held = "some" if self.used_bytes is None else format_bytes(self.used_bytes)
        return f"{self.name or 'process'} ({self.pid}) holds {held}"


class CardStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A card that is here, as it is now. (`oomguard._estimate.cards.Card` is one that need not be.)"""

    name: str  # NVIDIA's name: `NVIDIA A100-SXM4-80GB`. `cards.card` takes it.
    uuid: str  # `GPU-…`, or `MIG-…` for a part of a card
    compute_capability: tuple[int, int]  # major and minor: (8, 0) is sm 8.0
    total_bytes: int | None  # memory that CUDA shows; None if the card uses the host's memory (DGX Spark)
    free_bytes: int | None  # memory that no process holds; None as above
    holders: tuple[Holder, ...]  # the processes that hold its memory, this one included, as far as is known
    source: str  # the source: NVML or torch

    @property
    def own_bytes(self) -> int:
        """Bytes that this process holds; 0 if it is not listed."""
        return sum(holder.used_bytes or 0 for holder in self.holders if holder.pid == os.getpid())

    @property
    def others(self) -> tuple[Holder, ...]:
        return tuple(holder for holder in self.holders if holder.pid != os.getpid())

    @property
    def known(self) -> cards.Card:
        """The card as estimates know it: by its name, else by its generation alone."""
        try:
            return msgspec.structs.replace(cards.card(self.name), compute_capability=self.compute_capability)
        except MisuseError:  # too new, too rare, or a part of a card
            return cards.Card(
                name=self.name,
                memory_bytes=self.total_bytes or MAX_BYTES,
                compute_capability=self.compute_capability,
                sms=UNKNOWN_SMS,
                shared_memory=self.total_bytes is None,
                source=self.source,
            )

    def budget(self, device: str, reserved_bytes: int = 0) -> Budget:
        """The budget of this process, its own context included: the card less the bytes that others hold.

        `reserved_bytes` is a lower bound of what this process holds, for containers in which NVML lists no processes.
        Anything beyond it counts as taken by others: the budget is then too small, never too large.
        """
        if self.total_bytes is None or self.free_bytes is None:
            return Budget(device=device, limits=limits.budget().limits)
        others = " and ".join(map(str, self.others))
        source = f"{self.source} on {self.name}{', where ' * bool(others)}{others}"
        used_bytes, held_bytes = self.total_bytes - self.free_bytes, max(self.own_bytes, reserved_bytes)
        memory = Limit.read("card memory", source, self.total_bytes, used_bytes, held_bytes)
        return Budget(device=device, limits=(memory,))


class NoNvmlError(MisuseError):
    """NVML does not answer here. Where it does not, torch may still know the cards."""


def count() -> int:
    """Count the cards that CUDA would show this process."""
    with _nvml() as nvml:
        return len(_visible(nvml))


def driver() -> str | None:
    """The driver's version; None where NVML does not answer."""
    try:
        with _nvml() as nvml:
            return str(nvml.nvmlSystemGetDriverVersion())
    except NoNvmlError:
        return None


def card_status(index: int = 0) -> CardStatus:
    """Card `cuda:index` as it is now."""
    with _nvml() as nvml:
        uuids = _visible(nvml)
        check_index(index, len(uuids))
        _check_order(nvml)
        handle = _part(nvml, nvml.nvmlDeviceGetHandleByUUID(uuids[index]))
        total_bytes, free_bytes = _memory(nvml, handle)
        return CardStatus(
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
    """
    if setting is None:
        return list(uuids)
    chosen: list[str] = []
    kind = setting.strip()[:4]
    for entry in setting.split(","):
        uuid = _named(entry.strip(), kind, uuids)
        if uuid is None:
            break
        if uuid in chosen:
            return []
        chosen.append(uuid)
    return chosen


def _named(entry: str, kind: str, uuids: Sequence[str]) -> str | None:
    """The card that one entry names: a number, enough of a UUID to be the only one, or a part's MIG UUID."""
    if kind in ("GPU-", "MIG-") and not entry.startswith(kind):
        return None
    if kind == "MIG-":
        return entry
    if kind == "GPU-":
        matching = [uuid for uuid in uuids if uuid.startswith(entry)]
        return matching[0] if len(matching) == 1 else None
    number = re.match(r"\+?(\d+)", entry)
    return uuids[int(number[1])] if number and int(number[1]) < len(uuids) else None


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, loaded for as long as it is needed. Each of its errors becomes a `NoNvmlError`."""
    try:
        import pynvml
    except ImportError as error:
        raise NoNvmlError(**_no_card(f"NVML's binding could not be imported ({error})")) from error
    failed = "NVML could not be loaded"
    try:
        pynvml.nvmlInit()
        failed = "NVML failed"
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NoNvmlError(**_no_card(f"{failed} ({error})")) from error


def _no_card(got: str) -> dict[str, str]:
    return {
        "rule": "--device cuda needs an NVIDIA driver and a card",
        "got": got,
        "advice": "Use --device cpu, or name a card such as --device a100-80gb to plan for one that is not here.",
    }


def _visible(nvml: Any) -> list[str]:
    uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in _handles(nvml)]
    return visible(os.environ.get(SETTING), uuids)


def _handles(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def check_index(index: int, shown: int) -> None:
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
    """Total and free bytes, without what driver and firmware keep. Drivers before 510 count that as used."""
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
    holders: dict[int, Holder] = {}
    for list_processes in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            processes = list_processes(handle)
        except nvml.NVMLError:  # not for this card, driver or user
            continue
        for process in processes:
            try:
                name = str(nvml.nvmlSystemGetProcessName(process.pid))
            except nvml.NVMLError:
                name = None
            holders[process.pid] = Holder(pid=process.pid, name=name, used_bytes=process.usedGpuMemory)
    return tuple(holders.values())
