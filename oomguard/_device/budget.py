"""Limit and Budget: how many bytes this process may use on a device, each with its source. Reading: how many it uses.

Every limit is read as three numbers: the limit, what is used of it, and what this process itself holds of that.
They answer two questions. How far may *this* process grow, all it holds included? To the limit less what others use:
`reach_bytes`. How large may *another* process become while this one stays as it is? `left_bytes`.
"""

from typing import Literal, Self

import msgspec

from oomguard._core.errors import MisuseError

Unit = Literal["resident", "committed"]


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that this process uses on a device, now and at most since the last `reset()`.

    `peak_bytes` counts what estimates and budgets count, so all three compare directly.
    """

    peak_bytes: int
    """The largest since the reset. CPU: resident bytes of the whole process (of its whole life, where the kernel does
    not let the peak be reset). CUDA: what the card would show for the process, reserved bytes and context."""
    now_bytes: int  # the bytes in use now, counted as `peak_bytes`
    runtime_bytes: int  # Bytes in use before any model exists. CPU: resident bytes at the reset. CUDA: the context.
    committed_bytes: int | None = None  # CPU: VmData now, which an rlimit counts; None where nothing counts it
    committed_peak_bytes: int | None = None
    """CPU: the largest VmData since the reset: exact while the address space grows beyond all it ever was, else from
    below."""
    allocated_bytes: int | None = None  # CUDA: `torch.cuda.max_memory_allocated` since the reset
    reserved_bytes: int | None = None  # CUDA: `torch.cuda.max_memory_reserved` since the reset
    retries: int = 0  # CUDA: how often since the reset the allocator emptied its cache and asked again
    swapped_bytes: int = 0  # CPU: bytes of this process that are swapped out now


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """One limit on memory. Its figures are checked when it is made."""

    name: str  # the name of the limit: `free RAM`, `memory.max`, `RLIMIT_DATA`, `card memory`
    limit_bytes: int  # the most that may be used, by everyone to whom it applies together
    used_bytes: int  # Bytes in use by this process and by others. Can exceed a limit that was lowered later.
    held_bytes: int  # the part of `used_bytes` that this process itself holds
    unit: Unit
    """The bytes that count: `resident` (RAM or card memory really taken; exceeding ends in a kill or a CUDA error), or
    `committed` bytes (asked for, touched or not; exceeding makes the allocation fail)."""
    source: str  # the source: the file, call or library that was read

    def __post_init__(self) -> None:
        if not (0 <= self.held_bytes <= self.used_bytes and self.limit_bytes >= 0 and self.name and self.source):
            raise MisuseError(
                rule="A limit needs a name, a source and 0 <= held <= used",
                got=f"got {self}",
                advice="Correct the reader that made it.",
            )

    @classmethod
    def read(
        cls, name: str, source: str, limit_bytes: int, used_bytes: int = 0, held_bytes: int = 0, unit: Unit = "resident"
    ) -> Self:
        """Make a limit of figures that were read one after the other, and so may contradict each other a little."""
        limit_bytes, used_bytes = max(0, limit_bytes), max(0, used_bytes)
        figures = {"limit_bytes": limit_bytes, "used_bytes": used_bytes, "held_bytes": min(held_bytes, used_bytes)}
        return cls(name=name, unit=unit, source=source, **figures)

    @property
    def left_bytes(self) -> int:
        """Bytes that may be taken on top of those in use now: the most that a child beside this process may reach."""
        return max(0, self.limit_bytes - self.used_bytes)

    @property
    def reach_bytes(self) -> int:
        """Bytes that this process may reach, all that it holds included: the limit less what others use."""
        return max(0, self.limit_bytes - (self.used_bytes - self.held_bytes))


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes this process may use on a device: every limit that applies, and the least of them."""

    device: str  # the device as `--device` takes it: `cpu`, `cuda:0`
    limits: tuple[Limit, ...]
    """All limits that apply, in the order in which they were read."""

    def __post_init__(self) -> None:
        assert self.least("resident") is not None, "a budget needs a limit of resident bytes"

    @property
    def limit_bytes(self) -> int:
        """The resident bytes that this whole process may reach, interpreter, libraries and all it holds included.

        That is what estimates and peaks count, so they compare with it directly: `peak_bytes <= budget.limit_bytes`.
        """
        return self.binding.reach_bytes

    @property
    def left_bytes(self) -> int:
        """The resident bytes that a child may reach while this process keeps what it holds."""
        return min(limit.left_bytes for limit in self.limits if limit.unit == "resident")

    @property
    def committed_bytes(self) -> int | None:
        """The committed bytes (VmData) that this whole process may reach; None where nothing limits them."""
        least = self.least("committed")
        return None if least is None else least.reach_bytes

    @property
    def child_committed_bytes(self) -> int | None:
        """The committed bytes that a child may reach: an rlimit is its own again, a limit of all processes is not."""
        committed = [limit for limit in self.limits if limit.unit == "committed"]
        bytes_left = [x.reach_bytes if x.name.startswith("RLIMIT") else x.left_bytes for x in committed]
        return min(bytes_left, default=None)

    @property
    def binding(self) -> Limit:
        """The limit that gives `limit_bytes`."""
        least = self.least("resident")
        assert least is not None  # checked when the budget is made
        return least

    def least(self, unit: Unit) -> Limit | None:
        """The limit of that unit that lets this process reach least; None if there is none."""
        limits = (limit for limit in self.limits if limit.unit == unit)
        return min(limits, key=lambda limit: limit.reach_bytes, default=None)
