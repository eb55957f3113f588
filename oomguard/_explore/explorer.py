"""Explorer: answers the questions of a page or a widget, and probes where that is allowed."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from oomguard._core.errors import MisuseError
from oomguard._core.units import format_bytes, format_seconds
from oomguard._probe.record import Record, TaskRecord

Settings = Mapping[str, Any]  # fields, knobs, device and budget, by their names


class Explorer(ABC):
    """Answers questions about one model, or one task. Probes run one at a time."""

    def __init__(self, settings: Settings, *, probes: bool = False) -> None:
        self.settings, self.probes = dict(settings), probes
        self._lock = threading.Lock()

    @abstractmethod
    def controls(self) -> list[dict[str, Any]]:
        """The controls of the page."""

    @abstractmethod
    def answer(self, settings: Settings) -> dict[str, Any]:
        """All that the page shows for some settings, or why they describe nothing. It takes at most 100 ms."""

    @abstractmethod
    def probe(self, settings: Settings) -> Record | TaskRecord:
        """Run a few real steps on this machine, and keep the record."""

    def whole_answer(self, settings: Settings) -> dict[str, Any]:
        """The answer when there is nothing left to find out."""
        return self.answer(settings)

    def close(self) -> None:
        """End what runs for the answers, if anything does."""
        return

    def measure(self, settings: Settings) -> dict[str, Any]:
        """What a probe has measured, in words, or why there is none."""
        if not self.probes:
            return {"error": "Start the explorer with --allow-probes to measure."}
        if not self._lock.acquire(blocking=False):
            return {"error": "Another measurement is running."}
        try:
            record = self.probe(settings)
        except MisuseError as error:
            return {"error": str(error)}
        finally:
            self._lock.release()
        words = f"{record.verdict.name}"
        if record.peak_bytes is not None:
            words += f", measured peak {format_bytes(record.peak_bytes)}"
        if record.seconds_per_step is not None:
            words += f", {format_seconds(record.seconds_per_step)} a step"
        return {"words": words, "record": msgspec.to_builtins(record)}
