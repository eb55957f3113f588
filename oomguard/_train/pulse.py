"""The pulse of processes that train together: it tells a process that was stopped from one that is slow.

A collective of gloo waits for half an hour for a process that does not answer, for instance because its machine hangs.
Therefore a thread of every process sends a short message to all others every two seconds, and listens for theirs. The
thread also does so while its process computes, so a slow step is not taken for a stop.
"""

import atexit
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

BEAT_SECONDS = 2.0
BEATS = 8  # beats of this process without one of another, after which the other counts as stopped: 16 s
Address = tuple[str, int]


class Pulse:
    """The pulse of all processes, as one of them feels it. `gather` gives every process the address of each."""

    def __init__(self, rank: int, gather: Callable[[Address], list[Address]]) -> None:
        master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        family = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(master)  # sends nothing; it tells by which address the other processes reach this one
            host = str(route.getsockname()[0])
        self.lost: int | None = None  # the first process that did not answer
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((host, 0))
        addresses = gather((host, int(self._socket.getsockname()[1])))
        self._message = str(rank).encode()
        self._others = {str(number).encode(): place for number, place in enumerate(addresses) if number != rank}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="oomguard-pulse", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        missed = dict.fromkeys(self._others, 0)
        while not self._ended.is_set() and self.lost is None:
            for address in self._others.values():
                with suppress(OSError):  # it is gone, or the network is busy: only silence counts
                    self._socket.sendto(self._message, address)
            missed = {other: beats + 1 for other, beats in missed.items()} | dict.fromkeys(self._heard(), 0)
            self.lost = next((int(other) for other, beats in missed.items() if beats >= BEATS), None)
        self._socket.close()

    def _heard(self) -> set[bytes]:
        """The processes that were heard until the next beat."""
        heard, due = set[bytes](), monotonic() + BEAT_SECONDS
        while (left := due - monotonic()) > 0:
            self._socket.settimeout(left)
            with suppress(OSError):  # a timeout is one
                heard.add(self._socket.recv(16))
        return heard & self._others.keys()

    def end(self) -> None:
        """Stop. If a process was lost, a thread of gloo may wait for it, so the exit must not wait for that thread."""
        self._ended.set()
        if self.lost is not None:
            atexit.register(_leave)


def _leave() -> None:
    """End this process without waiting for the threads of gloo."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)
