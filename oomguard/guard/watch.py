"""Watch: memory that gets tight without an error, seen between steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from oomguard.device import Device
from oomguard.device.budget import Limit
from oomguard.device.reading import Reading
from oomguard.units import MIB, format_bytes

SECONDS = {"cpu": 1.0, "cuda": 0.1}
"""Between two looks at least: on the CPU one takes 2 ms, since files of the kernel are read. Nothing is missed in
between: peaks and retries count since the last look."""
SWAPPED_BYTES = 16 * MIB
"""What of this process may be swapped out before it counts: idle pages of libraries are, sooner or later."""

SPARE_BYTES = 64 * MIB
"""Of a card: with less than this free, the next block that PyTorch asks the driver for may be refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tight:
    """Why memory is tight."""

    reason: str
    """As a sentence for the user."""
    figures: dict[str, Any]
    """The numbers behind it."""


@dataclass(slots=True, kw_only=True)
class Watch:
    """Looks at what this process uses and may use, now and then."""

    device: Device
    limit_bytes: int | None = None
    """What the user said it may use, if so."""
    clock: Callable[[], float] = time.monotonic
    peak_bytes: int = 0
    """The largest seen so far."""
    _next: float = 0.0
    _swapped_bytes: int | None = field(default=None)
    _others_bytes: int | None = field(default=None)
    """What other processes held of the card when it was last said, or when they held least."""

    def start(self) -> None:
        """Begin: what was before does not count."""
        self._swapped_bytes = self.device.reading().swapped_bytes
        self._taken(self.device.budget().binding)
        self.device.reset()
        self._next = self.clock() + self._pause

    def end(self) -> None:
        """The last look: only for the peak."""
        self.peak_bytes = max(self.peak_bytes, self.device.reading().peak_bytes)

    def look(self) -> Tight | None:
        """Why memory is tight; None if it is not, or if it is too soon to look again."""
        if self.clock() < self._next:
            return None
        self._next = self.clock() + self._pause
        reading = self.device.reading()
        self.peak_bytes = max(self.peak_bytes, reading.peak_bytes)
        found = self._judge(reading)
        self.device.reset()
        return found

    def room_for(self, peak_bytes: int) -> bool:
        """Whether a step with such a peak would fit now."""
        free_bytes = self.device.budget().limit_bytes
        return peak_bytes <= min(free_bytes, self.limit_bytes or free_bytes)

    @property
    def _pause(self) -> float:
        return SECONDS[self.device.name.partition(":")[0]]

    def _judge(self, reading: Reading) -> Tight | None:
        figures: dict[str, Any] = {"peak_bytes": reading.peak_bytes}
        swapped_bytes = reading.swapped_bytes - (self._swapped_bytes or 0)
        if reading.retries:
            times = f"{reading.retries} time{'s' if reading.retries > 1 else ''}"
            return Tight(
                reason=f"PyTorch's allocator had to empty its cache and ask again, {times}.",
                figures=figures | {"retries": reading.retries},
            )
        if swapped_bytes > SWAPPED_BYTES:
            self._swapped_bytes = reading.swapped_bytes  # what is out already is no reason to fall again
            return Tight(
                reason=f"The system swapped out {format_bytes(swapped_bytes)} of this process.",
                figures=figures | {"swapped_bytes": reading.swapped_bytes},
            )
        if self.limit_bytes is not None and reading.peak_bytes > self.limit_bytes:
            return Tight(
                reason=f"It peaked at {format_bytes(reading.peak_bytes)}, over the budget of "
                f"{format_bytes(self.limit_bytes)}.",
                figures=figures | {"budget_bytes": self.limit_bytes},
            )
        limit = self.device.budget().binding
        taken = self._taken(limit)
        if taken is not None:
            return Tight(reason=taken, figures=figures | {"others_bytes": limit.used_bytes - limit.held_bytes})
        if reading.peak_bytes > limit.reach_bytes:
            return Tight(
                reason=f"It peaked at {format_bytes(reading.peak_bytes)}, and by {limit.name} only "
                f"{format_bytes(limit.reach_bytes)} are left to it now.",
                figures=figures | {"limit": limit.name, "limit_bytes": limit.reach_bytes},
            )
        return None

    def _taken(self, limit: Limit) -> str | None:
        """What other processes have taken of a card until nothing was left.

        What this process holds they cannot take, so its steps go on; but it could not ask for a block more.
        """
        if self.device.name == "cpu":
            return None
        others_bytes, free_bytes = limit.used_bytes - limit.held_bytes, limit.limit_bytes - limit.used_bytes
        before_bytes = others_bytes if self._others_bytes is None else min(self._others_bytes, others_bytes)
        self._others_bytes = before_bytes
        if free_bytes >= SPARE_BYTES or others_bytes <= before_bytes + SPARE_BYTES:
            return None
        self._others_bytes = others_bytes
        return (
            f"Other processes took {format_bytes(others_bytes - before_bytes)} of the card, "
            f"and {format_bytes(free_bytes)} of it are free."
        )
