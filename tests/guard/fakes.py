"""A device with figures that a test sets, and steps of a guard on it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from oomguard._core.units import GIB, MIB
from oomguard._device.budget import Budget, Limit, Reading
from oomguard._guard import Guard
from oomguard._guard.events import Event

SHORT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."


@dataclass
class FakeDevice:
    """A processor with figures set by the test."""

    peak_bytes: int = 500 * MIB
    free_bytes: int = 8 * GIB
    retries: int = 0
    swapped_bytes: int = 0
    others_bytes: int = 0
    held_bytes: int = 0
    released: int = 0
    name: str = "cpu"
    limits: list[int | None] = field(default_factory=list)

    def reading(self) -> Reading:
        return Reading(
            peak_bytes=self.peak_bytes,
            now_bytes=self.peak_bytes,
            runtime_bytes=0,
            retries=self.retries,
            swapped_bytes=self.swapped_bytes,
        )

    def budget(self) -> Budget:
        limit = Limit(
            name="memory.max",
            limit_bytes=self.free_bytes,
            used_bytes=self.others_bytes + self.held_bytes,
            held_bytes=self.held_bytes,
            unit="resident",
            source="a test",
        )
        return Budget(device="cpu", limits=(limit,))

    def release(self) -> None:
        self.released += 1

    def enforce(self, limit_bytes: int, committed_bytes: int | None = None) -> None:
        self.limits.append(limit_bytes)

    def unlimit(self) -> None:
        self.limits.append(None)

    def settle(self, candidate: Any) -> None: ...

    def reset(self) -> None:
        self.retries = 0


def run(guard: Guard, fails: Callable[[], bool] = lambda: False) -> int:
    """Make one step; returns the number of attempts."""
    count = 0
    for attempt in guard.attempts():
        with attempt:
            count += 1
            if fails():
                raise RuntimeError(SHORT)
    return count


def events(guard: Guard) -> list[Event]:
    assert guard.events is not None
    return guard.events.read()
