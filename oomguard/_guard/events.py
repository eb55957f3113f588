"""Events: every change that the guard or the trainer makes, with its reason, as one line of JSON each."""

import math
import os
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from oomguard._core.errors import shown
from oomguard._core.system import append_line, file_errors, read_values

_RULE = "Events need a readable and writable file"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One change in a training."""

    time: datetime  # when it happened, in UTC
    step: int  # optimizer steps made before it
    kind: str  # the kind of change in one word, such as `oom`, `tight` or `climb`
    reason: str  # the reason as a sentence for the user
    figures: dict[str, Any] = {}  # The numbers behind the reason. Numbers that JSON lacks are text (`nan`, `inf`).


class Events:
    """A file of events, one line of JSON each. Lines are only appended, so a kill at any moment loses none of them."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.listener: Callable[[Event], None] | None = None
        """Called with each event after it was written."""
        self._unread: deque[Event] = deque(maxlen=100)  # bounded: a caller may never ask for them

    def append(self, step: int, kind: str, reason: str, **figures: object) -> Event:
        """Write one event. It is on the disk when this returns."""
        plain = {name: _json_value(value) for name, value in figures.items()}
        event = Event(time=datetime.now(UTC), step=step, kind=kind, reason=reason, figures=plain)
        with file_errors(_RULE, self.path):
            append_line(self.path, msgspec.json.encode(event))
        self._unread.append(event)
        if self.listener is not None:
            self.listener(event)
        return event

    def take_new(self) -> tuple[Event, ...]:
        events = tuple(self._unread)
        self._unread.clear()
        return events

    def read(self) -> list[Event]:
        """All events, oldest first. A line that cannot be read is skipped, with a warning that names it."""
        with file_errors(_RULE, self.path):
            return read_values(self.path, Event)


def _json_value(value: object) -> Any:
    """A figure as JSON can hold it."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(float(value))
    try:
        return msgspec.to_builtins(value, str_keys=True)
    except TypeError:
        return _json_value(float(value)) if hasattr(value, "__float__") else shown(value)
