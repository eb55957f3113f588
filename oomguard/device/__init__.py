"""What memory this process may use and uses, and who says so: the only readers of /proc, cgroups, rlimits, torch's
memory statistics and NVML.

limits.py reads free RAM, cgroups and rlimits; proc.py the memory of a process; nvml.py the cards, through NVML; cuda.py
the cards, through torch. None of them imports torch before it is needed.
"""

import re
from typing import TYPE_CHECKING, Protocol

from oomguard.checks import shown
from oomguard.device.budget import Budget
from oomguard.device.reading import Reading, Watched
from oomguard.errors import MisuseError

if TYPE_CHECKING:
    from oomguard.candidate import Candidate


class Device(Protocol):
    """Where a candidate runs: the CPU or a card. `cpu.Cpu` and `cuda.Cuda` are the two there are."""

    @property
    def name(self) -> str:
        """As `--device` takes it: `cpu`, `cuda:0`."""

    @property
    def torch_device(self) -> str:
        """As torch takes it."""

    def title(self) -> str:
        """The processor's or the card's name."""

    def precisions(self) -> tuple[str, ...]:
        """What its hardware computes in: `fp32`, and which of `fp16` and `bf16`."""

    def library(self) -> str | None:
        """What its kernels come from, with the version; None if torch does not say. Imports torch."""

    def driver(self) -> str | None:
        """The version of its driver; None if it has none, or nobody says."""

    def budget(self) -> Budget:
        """What this process may use there, all it holds already included."""

    def environment(self, candidate: "Candidate") -> dict[str, str]:
        """Environment variables that the process which runs the candidate must be started with."""

    def settle(self, candidate: "Candidate") -> None:
        """Set what of a candidate can be set in a running process: threads and engine."""

    def enforce(self, limit_bytes: int, committed_bytes: int | None = None) -> None:
        """Make allocations fail, as an error that can be caught, before this process runs away beyond the limit."""

    def unlimit(self) -> None:
        """Take back what `enforce` set."""

    def reset(self) -> None:
        """Begin a new section, of which the peaks are read."""

    def reading(self) -> Reading:
        """What this process uses, now and at most since the reset."""

    def wait(self) -> None:
        """Until all work issued to the device is done."""

    def release(self) -> None:
        """Give back what is free but kept: garbage and caches."""

    def watch(self, pid: int) -> Watched | None:
        """What another process uses of the host's memory now; None if it is gone or has ended."""

    def held(self, pid: int) -> int:
        """The bytes that another process holds of this device now, as far as anybody says."""


def open_device(name: str) -> Device:
    """The device of that name, if this process can run on it: `cpu`, `cuda` or `cuda:1`.

    >>> open_device("cpu").name
    'cpu'
    """
    from oomguard.device.cpu import Cpu
    from oomguard.device.cuda import open_card

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
