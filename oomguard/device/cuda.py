"""A CUDA card's budget, read through NVML alone: no torch, no CUDA context, a few milliseconds.

Cards are counted as CUDA counts them for this process: NVML shows all of them, CUDA_VISIBLE_DEVICES chooses and orders.
What this process already holds on the card (its CUDA context included) is not lost to it. Where NVML does not say
which process holds what (Windows, most containers), it counts as taken: the budget is then too small, never too large.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from oomguard.device import cpu
from oomguard.device.budget import Budget, Limit
from oomguard.errors import MisuseError
from oomguard.units import format_bytes

SETTING = "CUDA_VISIBLE_DEVICES"


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory of a card."""

    pid: int
    """Its process id, as NVML numbers it."""
    name: str | None
    """Its name; None where NVML may not say."""
    used_bytes: int | None
    """What it holds; None where NVML does not say (Windows)."""


class Present(msgspec.Struct, frozen=True, kw_only=True):
    """A card that is here, as it is now. (`oomguard.estimate.gpus.Card` is one that need not be.)"""

    name: str
    """As NVIDIA calls it: `NVIDIA A100-SXM4-80GB`. `gpus.card` finds it by that."""
    uuid: str
    """`GPU-…`, or `MIG-…` for a part of a card."""
    compute_capability: tuple[int, int]
    """Major and minor: (8, 0) is sm 8.0."""
    total_bytes: int | None
    """What CUDA shows as its memory; None if it has none of its own (DGX Spark): it uses the host's."""
    free_bytes: int | None
    """What nobody holds of it; None as above."""
    holders: tuple[Holder, ...]
    """Who holds memory of it, this process included, as far as NVML says."""

    @property
    def own_bytes(self) -> int:
        """What this process holds."""
        return sum(one.used_bytes or 0 for one in self.holders if one.pid == os.getpid())


def count() -> int:
    """How many cards CUDA would show this process; 0 without a driver."""
    try:
        with _nvml() as nvml:
            return len(_visible(nvml))
    except MisuseError:
        return 0


def card_name(index: int = 0) -> str:
    """The name of card `cuda:index`."""
    return present(index).name


def budget(index: int = 0) -> Budget:
    """What this process may use on card `cuda:index`: the card less what others hold, its own context included."""
    card, device = present(index), f"cuda:{index}"
    if card.total_bytes is None or card.free_bytes is None:
        return Budget(device=device, limits=cpu.budget().limits)
    used_bytes = max(0, card.total_bytes - card.free_bytes)
    memory = Limit(
        name="card memory",
        limit_bytes=card.total_bytes,
        used_bytes=used_bytes,
        held_bytes=min(card.own_bytes, used_bytes),
        unit="resident",
        source=f"NVML on {card.name}{_others(card)}",
    )
    return Budget(device=device, limits=(memory,))


def present(index: int = 0) -> Present:
    """Card `cuda:index` as it is now."""
    with _nvml() as nvml:
        uuids = _visible(nvml)
        _check_index(index, len(uuids))
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
        raise _no_card(f"NVML's binding could not be imported ({error})") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _no_card(f"NVML could not be loaded ({error})") from error
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise _no_card(f"NVML failed ({error})") from error
    finally:
        pynvml.nvmlShutdown()


def _no_card(got: str) -> MisuseError:
    return MisuseError(
        rule="--device cuda needs an NVIDIA driver and a card",
        got=got,
        advice="Use --device cpu, or name a card such as --device a100-80gb to plan for one that is not here.",
    )


def _visible(nvml: Any) -> list[str]:
    """The UUIDs of the cards that CUDA shows this process."""
    uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in _handles(nvml)]
    return visible(os.environ.get(SETTING), uuids)


def _handles(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def _check_index(index: int, shown: int) -> None:
    under = f" under {SETTING}={os.environ[SETTING]!r}" if SETTING in os.environ else ""
    if not shown:
        raise _no_card(f"there is no card{under}")
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


def _others(card: Present) -> str:
    """Who else holds memory, for people: `, where python (4711) holds 3.20 GiB`."""
    texts = [
        f"{one.name or 'process'} ({one.pid}) holds {format_bytes(one.used_bytes)}"
        for one in card.holders
        if one.used_bytes and one.pid != os.getpid()
    ]
    return f", where {' and '.join(texts)}" if texts else ""
