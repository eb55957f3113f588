"""The memory that this process may use and uses, each figure with its source. Only this package reads /proc, cgroups,
rlimits, torch's memory statistics and NVML.

limits.py reads free RAM, cgroups and rlimits; proc.py the memory of a process; nvml.py the cards, through NVML; cuda.py
the cards, through torch; find.py finds devices. None of them imports torch before it is needed.
"""

import re
from typing import TYPE_CHECKING, Protocol

import msgspec

from oomguard._core.errors import MisuseError, shown
from oomguard._device.budget import Budget

if TYPE_CHECKING:
    from oomguard._spec.candidate import Candidate


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that this process uses on a device, now and at most since the last `reset()`.

    `peak_bytes` counts what estimates and budgets count, so all three compare directly.
    """

    peak_bytes: int
    """The largest since the reset. CPU: resident bytes of the whole process (of its whole life, where the kernel does
    not let the peak be reset). CUDA: what the card would show for the process, reserved bytes and context."""
    now_bytes: int
    """The bytes in use now, counted as `peak_bytes`."""
    runtime_bytes: int
    """Bytes in use before any model exists. CPU: resident bytes at the reset. CUDA: the context."""
    committed_bytes: int | None = None
    """CPU: VmData now, which is what an rlimit counts. None on CUDA, and where nothing counts it."""
    committed_peak_bytes: int | None = None
    """CPU: the largest VmData since the reset, as far as it is known: exact while the address space grows beyond all it
    ever was, else from below. None as above."""
    allocated_bytes: int | None = None
    """CUDA: the largest sum of tensors since the reset (`torch.cuda.max_memory_allocated`); None on the CPU."""
    reserved_bytes: int | None = None
    """CUDA: the most that PyTorch's allocator has taken since the reset (`max_memory_reserved`); None on the CPU."""
    retries: int = 0
    """CUDA: how often since the reset the allocator had to empty its cache and ask again: a sign of strain."""
    swapped_bytes: int = 0
    """CPU: bytes of this process that are swapped out now."""


class Device(Protocol):
    """A device that is present and runs candidates: `cpu.Cpu` or `cuda.Cuda`."""

    @property
    def name(self) -> str:
        """The name as `--device` and torch take it: `cpu`, `cuda:0`."""

    def title(self) -> str:
        """The processor's or the card's name."""

    def precisions(self) -> tuple[str, ...]:
        """The precisions that it trains in, `fp32` first."""

    def library(self) -> str | None:
        """The library of its kernels, with the version; None if torch does not tell. Imports torch."""

    def driver(self) -> str | None:
        """The version of its driver; None if it has none or it is unknown."""

    def budget(self) -> Budget:
        """The budget of this process, all that it already holds included."""

    def environment(self, candidate: "Candidate") -> dict[str, str]:
        """Environment variables that the process which runs the candidate must be started with."""

    def settle(self, candidate: "Candidate") -> None:
        """Set the candidate's threads and engine, which a running process can change."""

    def enforce(self, limit_bytes: int, committed_bytes: int | None = None) -> None:
        """Make allocations fail, as an error that can be caught, before this process runs away beyond the limit."""

    def unlimit(self) -> None:
        """Remove the limit that `enforce` set."""

    def reset(self) -> None:
        """Begin a new section: peaks count from here."""

    def reading(self) -> Reading:
        """The memory that this process uses, now and at most since the reset."""

    def wait(self) -> None:
        """Wait until all work issued to the device is done."""

    def release(self) -> None:
        """Free garbage and caches."""

    def held(self, pid: int) -> int:
        """The bytes of this device that another process holds now, as far as is known."""


def open_device(name: str) -> Device:
    """Open a device that is present by its name: `cpu`, `cuda` or `cuda:1`."""
    from oomguard._device.cpu import Cpu
    from oomguard._device.cuda import open_card

    if name == "cpu":
        return Cpu()
    index = card_index(name)
    if index is None:
        raise MisuseError(
            rule="A run needs a device that is here: cpu, cuda or cuda:1",
            got=f"got {shown(name)}",
            advice="For a card that is not here, oomguard estimate answers.",
        )
    return open_card(index)


def card_index(name: str) -> int | None:
    """The number of a card that is here, from `cuda` or `cuda:1`; None if the name means something else.

    >>> card_index("cuda"), card_index("cuda:1"), card_index("cpu")
    (0, 1, None)
    """
    if name != "cuda" and not str(name).startswith("cuda:"):
        return None
    number = re.fullmatch(r"cuda(?::(\d{1,3}))?", name)
    if number is None:
        raise MisuseError(
            rule="--device cuda takes the card's number",
            got=f"got {shown(name)}",
            advice="Write it as cuda or cuda:1.",
        )
    return int(number[1] or 0)
