"""What oomguard is doing now. Code that takes a while tells it, and whoever listens shows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class Status(NamedTuple):
    """What goes on at one moment, in words for the user."""

    words: str
    done: float | None = None  # share that is done, from 0 to 1; None: not known
    seconds_left: float | None = None  # seconds that are left at most; None: not known
    lines: tuple[str, ...] = ()  # what runs now, one line each
    topic: str = ""  # changes when something new begins; empty: the words are the topic
    milestone: bool = False  # whether every log has a line for it
    notes: tuple[str, ...] = ()  # lines that stay on the screen


Listener = Callable[[Status], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def tell(words: str | Status, done: float | None = None) -> None:
    """Say what is being done now. It costs nothing if nobody listens."""
    listener = _listener.get()
    if listener is not None:
        listener(Status(words, done) if isinstance(words, str) else words)


def nobody(_: Status) -> None:
    """The listener where nothing is to be shown."""


def current() -> Listener | None:
    """The listener of this thread, if only `nobody`. Threads that it starts have to be given it."""
    return _listener.get()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let a function hear of everything that is told inside."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
