"""Running a search: one worker for each device, within limits, and what came of it, however it ended."""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from oomguard.estimate.place import resident_within
from oomguard.probe.ledger import Ledger
from oomguard.probe.record import Record, torch_version
from oomguard.probe.runner import Runner
from oomguard.probe.verdict import Verdict
from oomguard.search.approach import CONFIRM_SECONDS, Known
from oomguard.search.cache import Cache, current, is_stale
from oomguard.search.problem import Probe, Problem
from oomguard.search.propose import propose

if TYPE_CHECKING:
    from oomguard.search.loop import Book

MAX_PROBES = 24
TIMEOUT_SECONDS = 100.0
"""Of a whole search, unless it is told otherwise."""
MEASURE_SECONDS = {False: 1.0, True: 1.5}
"""Once its steps have taken so long, a probe begins no further one: a little later if seconds decide."""
START_SECONDS = 45.0
"""What the start of a child may take on a busy machine: on a card 17 s were seen."""
PATIENCE = 6.0
"""How many times longer than expected a probe may take."""
RESERVE = 0.45
"""Of the whole time, what is kept for confirming."""
LAST_SECONDS = 4.0
"""With no more time than this, no further probe begins."""
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a search ends, if it is not done before."""

    max_probes: int = MAX_PROBES
    """Probes in all, those of the interrupted search that it continues included (not those of other searches in its
    ledger, though it learns from them)."""
    seconds: float = TIMEOUT_SECONDS
    """From now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search is."""

    probes: int
    """Done."""
    running: tuple[Probe, ...]
    """What is being run."""
    best: Record | None
    """The fastest that ran within the budget, per time step of a sequence."""
    seconds_left: float
    """Until it ends at the latest."""
    budget_bytes: int
    """What it plans for, as of now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of a search."""

    problem: Problem
    """With the budget and the cached records as they were at the end."""
    records: tuple[Record, ...]
    """All that it rests on, in the order of their beginning."""
    ended: str
    """Why: `done`, `max-probes`, `timeout`, `interrupted`."""
    seconds: float
    """What it took this time."""
    stale: bool = False
    """Whether cached calibrations were found wrong and dropped."""


@dataclass(kw_only=True)
class Search:
    """A search under way."""

    problem: Problem
    book: "Book"
    ledger: Ledger | None
    cache: Cache
    limits: Limits
    progress: Callable[[Progress], None] | None = None
    records: list[Record] = field(default_factory=list)
    stale: bool = False
    ended: str | None = None
    began: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: dict[str, Probe] = field(default_factory=dict)

    def run(self, devices: Iterable[str]) -> Found:
        """Work on all devices until it is done, out of time or interrupted."""
        with ExitStack() as stack:
            seconds = MEASURE_SECONDS[self.problem.timed]
            runners = [stack.enter_context(Runner(name, seconds=seconds)) for name in devices]
            try:
                if len(runners) == 1:
                    self._work(runners[0])
                else:
                    self._work_together(runners)
            except KeyboardInterrupt:
                self.ended = "interrupted"
        records = tuple(sorted(self.records, key=lambda one: one.started))
        seconds = time.monotonic() - self.began
        return Found(
            problem=self.problem, records=records, ended=self.ended or "done", seconds=seconds, stale=self.stale
        )

    def _work_together(self, runners: list[Runner]) -> None:
        failures: list[BaseException] = []

        def work(runner: Runner) -> None:
            try:
                self._work(runner)
            except BaseException as error:
                failures.append(error)
                self.ended = self.ended or "failed"  # nobody waits for it

        threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in runners]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            self.ended = "interrupted"
            for runner in runners:
                runner.close()
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.limits.seconds - (time.monotonic() - self.began)

    def _work(self, runner: Runner) -> None:
        """Propose, probe, tell, until there is nothing more to do."""
        while self.ended is None:
            with self.lock:
                probe = self._next(runner)
                if probe is None and not self._others():
                    return
                trial = None if probe is None else self.book.begin(probe, self._patience(probe))
                if probe is not None:
                    self.running[runner.device.name] = probe
            if probe is None or trial is None:
                time.sleep(POLL_SECONDS)  # what the others find may need a further probe
                continue
            try:
                self._tell()
                record = self._probe(runner, probe)
                with self.lock:
                    if self._interrupted():
                        self.book.drop(trial)
                        return
                    self._keep(record)
                    self.book.end(trial, self.problem.spec, record)
            except BaseException:
                self.book.drop(trial)
                raise
            finally:
                self.running.pop(runner.device.name, None)
            self._tell()

    def _interrupted(self) -> bool:
        return self.ended == "interrupted"

    def _others(self) -> bool:
        """Whether somebody is still running a probe: here, or at another machine."""
        return bool(self.running) or bool(self.book.pending())

    def _next(self, runner: Runner) -> Probe | None:
        """The next probe, under what is free now; notes why there is none."""
        self._refresh()
        if len(self.book.records()) >= self.limits.max_probes:
            self.ended = "max-probes"
        elif self.left <= LAST_SECONDS:
            self.ended = "timeout"
        if self.ended is not None:
            return None
        free_bytes = free_for(runner)
        if free_bytes < self.problem.budget_bytes:  # somebody else has taken some: plan for what is left
            self.problem = replace(self.problem, budget_bytes=free_bytes)
        reserve = min(RESERVE * self.limits.seconds, 1.2 * CONFIRM_SECONDS)
        known = Known(
            problem=self.problem,
            records=self.records,
            pending=[*self.running.values(), *self.book.pending()],
            explore=self.left > reserve,
            confirm_seconds=max(1.0, min(CONFIRM_SECONDS, 0.7 * self.left)),
        )
        return propose(known)

    def _refresh(self) -> None:
        """Take in what other machines have found, and what has become of those that are gone."""
        self.book.recover()
        seen = {(one.started, one.candidate) for one in self.records}
        new = [one for one in self.book.records() if (one.started, one.candidate) not in seen]
        self.records += ours(new, self.cache.title)

    def _patience(self, probe: Probe) -> float:
        """How long a probe may take: what is expected, several times, but not beyond the end of the search."""
        patience = PATIENCE if probe.role != "confirm" else PATIENCE / 2  # of which the time is well known by then
        seconds = MEASURE_SECONDS[self.problem.timed] + probe.passes * probe.seconds_per_pass
        expected = START_SECONDS + patience * seconds
        return min(expected, max(LAST_SECONDS, self.left))

    def _probe(self, runner: Runner, probe: Probe) -> Record:
        budget_bytes = min(self.problem.budget_bytes, free_for(runner))
        return runner.probe(
            probe.spec,
            probe.candidate,
            budget_bytes=budget_bytes,
            timeout=self._patience(probe),
            steps=probe.steps,
            passes=probe.passes,
        )

    def _keep(self, record: Record) -> None:
        """On the disk first: what has been measured is not lost."""
        if self.ledger is not None:
            self.ledger.append(record)
        self.records.append(record)
        cached = current(self.problem.cached, record)
        if is_stale(cached, record, self.problem.place):
            self.stale, cached = True, [one for one in cached if one.engine != record.engine]
            self.cache.drop(record)
        self.problem = replace(self.problem, cached=tuple(cached))
        self.cache.add(record)

    def _tell(self) -> None:
        if self.progress is None:
            return
        ran = [one for one in self.records if one.verdict.ran and one.tokens_per_second is not None]
        self.progress(
            Progress(
                probes=len(self.records),
                running=tuple(self.running.values()),
                best=max(ran, key=lambda one: one.tokens_per_second or 0.0, default=None),
                seconds_left=max(0.0, self.left),
                budget_bytes=self.problem.budget_bytes,
            )
        )


def free_for(runner: Runner) -> int:
    """What a training process may use there now, in the unit of estimates."""
    free = runner.free()
    if free.committed_bytes is None:
        return free.device_bytes
    return min(free.device_bytes, resident_within(free.committed_bytes))


def ours(records: Iterable[Record], title: str) -> list[Record]:
    """Those that were measured on such a device, with this torch."""
    return [one for one in records if one.title == title and one.torch == torch_version()]


def count_ooms(records: Iterable[Record]) -> int:
    """How often memory ran out."""
    return sum(one.verdict in (Verdict.OOM, Verdict.KILLED) for one in records)
