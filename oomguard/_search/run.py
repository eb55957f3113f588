"""Running a search: one worker per device, within limits. The result is kept, however the search ends."""

import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from oomguard._estimate.target import resident_within
from oomguard._predict.calibration import is_stale
from oomguard._probe.cache import Cache
from oomguard._probe.record import Ledger, Record, torch_version
from oomguard._probe.runner import Free, Runner
from oomguard._probe.verdict import Verdict
from oomguard._search.propose import MEASURE_SECONDS, Probe, State, make_probe, short_steps
from oomguard._search.screen import CandidateTable, screen
from oomguard._search.space import Problem

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial, Trial

    from oomguard._search.study import TrialStore

MAX_PROBES = 24
TIMEOUT_SECONDS = 55.0  # seconds of a whole search by default
START_SECONDS = 45.0  # seconds that the start of a child may take on a busy machine: on a card 17 s were measured
PATIENCE = 6.0  # how many times longer than expected a probe may take
RESERVE = 0.45  # share of the whole time in which one of Optuna's samplers does not explore
LAST_SECONDS = 4.0  # with no more seconds left than this, no further probe begins
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits at which a search ends."""

    max_probes: int = MAX_PROBES
    """Probes in all, with those of the interrupted search that is continued, but not those of other searches."""
    seconds: float = TIMEOUT_SECONDS  # seconds from now


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search is."""

    probes: int
    """The number of probes done."""
    running: tuple[Probe, ...]
    best: Record | None
    """The fastest record within the budget, per time step of a sequence."""
    seconds_left: float
    """Seconds until the search ends at the latest."""
    budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The records of a search, and how it ended."""

    problem: Problem  # the problem, with the budget and the cached records as they were at the end
    records: tuple[Record, ...]  # all records, in the order in which they began
    ended: str  # why the search ended: `done`, `max-probes`, `timeout`, `interrupted`, `estimate` (nothing was run)
    seconds: float  # seconds that the search took, since it was last started
    stale: bool = False  # whether cached records contradicted new ones and were dropped


@dataclass(kw_only=True)
class Search:
    """A search under way."""

    problem: Problem
    trials: "TrialStore"
    ledger: Ledger | None
    cache: Cache
    limits: Limits
    sampler: str = "auto"
    progress: Callable[[Progress], None] | None = None
    records: list[Record] = field(default_factory=list)
    stale: bool = False
    ended: str | None = None
    began: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: dict[str, Probe] = field(default_factory=dict)

    def run(self, devices: Iterable[str]) -> SearchResult:
        """Work on all devices until the search is done, out of time or interrupted."""
        with ExitStack() as stack:
            seconds = MEASURE_SECONDS[self.problem.timed]
            runners = [stack.enter_context(Runner(name, seconds=seconds)) for name in devices]
            try:
                if self.sampler != "auto":
                    self._draw(runners[0])
                if len(runners) == 1:
                    self._work(runners[0])
                else:
                    self._work_together(runners)
            except KeyboardInterrupt:
                self.ended = "interrupted"
        return SearchResult(
            problem=self.problem,
            records=tuple(sorted(self.records, key=lambda record: record.started)),
            ended=self.ended or "done",
            seconds=time.monotonic() - self.began,
            stale=self.stale,
        )

    def _work_together(self, runners: list[Runner]) -> None:
        """Work on each device in a thread of its own, until all have ended or one has failed."""
        with ThreadPoolExecutor(len(runners)) as pool:
            workers = [pool.submit(self._work, runner) for runner in runners]
            running = {*workers}
            try:
                while running:
                    done, running = wait(workers, POLL_SECONDS)
                    if any(worker.exception() for worker in done):
                        self.ended = self.ended or "failed"  # the other workers stop
            except KeyboardInterrupt:
                self.ended = "interrupted"
                for runner in runners:
                    runner.close()
        for worker in workers:
            worker.result()

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.limits.seconds - (time.monotonic() - self.began)

    def _work(self, runner: Runner) -> None:
        """Let the study choose probes, and run them and store their records, until there is nothing more to do."""

        def objective(trial: "Trial") -> list[float]:
            return self._measure(trial, runner, self.trials.sampler.suggest(trial))

        def go_on(study: "Study", trial: "FrozenTrial") -> None:
            if not self._decide(runner):
                study.stop()

        if self._decide(runner):
            self.trials.study.optimize(objective, callbacks=[go_on])

    def _decide(self, runner: Runner) -> bool:
        """Decide on the next probe of this worker, or wait for what others find; False if there is nothing to do."""
        while self.ended is None:
            with self.lock:
                probe = self._next(runner)
                if probe is not None:
                    self.running[runner.device.name] = self.trials.sampler.decided[threading.get_ident()] = probe
                    return True
                if not (self.running or self.trials.pending()):
                    return False
            time.sleep(POLL_SECONDS)
        return False

    def _measure(self, trial: "Trial", runner: Runner, probe: Probe) -> list[float]:
        """Run a probe, store its record, and return the values of its trial."""
        self.trials.mark(trial, probe, self._patience(probe))
        self._report()
        try:
            record = self._probe(runner, probe)
        finally:
            self.running.pop(runner.device.name, None)
        with self.lock:
            if self._interrupted():
                return []
            self._keep(record)
            values = self.trials.sampler.report(trial, record)
        self._report()
        return values

    def _draw(self, runner: Runner) -> None:
        """Explore with one of Optuna's samplers in the screened space, for comparison, from arithmetic's best on."""
        from oomguard._search.sampler import draw

        def measure(row: int, table: CandidateTable) -> float:
            state = State(problem=self.problem, records=self.records)
            probe = make_probe(state, table, row, "explore", int(short_steps(table)[row]))
            self.trials.sampler.decided[threading.get_ident()] = probe
            trial = self.trials.study.ask()
            (value,) = self._measure(trial, runner, self.trials.sampler.suggest(trial)) or [math.nan]
            self.trials.tell(trial, value)
            return value

        def is_late() -> bool:
            probes = len(self.trials.records())
            return probes >= self.limits.max_probes - 1 or self.left < RESERVE * self.limits.seconds

        if self.problem.maximize == ("throughput",):
            draw(self.sampler, lambda: screen(self.problem, self.records), measure, is_late)

    def _interrupted(self) -> bool:
        return self.ended == "interrupted"

    def _next(self, runner: Runner) -> Probe | None:
        """The next probe within what is free now, in the light of other machines' records.

        If a limit is reached there is none, and `ended` says why.
        """
        self.trials.recover()
        stored = self.trials.records()
        self.records += measured_on(self.cache.title, stored, known=self.records)
        if len(stored) >= self.limits.max_probes:
            self.ended = "max-probes"
        elif self.left <= LAST_SECONDS:
            self.ended = "timeout"
        if self.ended is not None:
            return None
        free_bytes = usable_bytes(runner.free())
        if free_bytes < self.problem.budget_bytes:  # another process has taken some: plan for what is left
            self.problem = replace(self.problem, budget_bytes=free_bytes)
        self.trials.sampler.problem = self.problem
        return self.trials.sampler.propose(
            self.trials.study,
            records=self.records,
            pending=[*self.running.values(), *self.trials.pending()],
            explore=self.sampler == "auto",
            left=self.left,
        )

    def _patience(self, probe: Probe) -> float:
        """Seconds that a probe may take: several times what is expected, but not beyond the end of the search."""
        patience = PATIENCE if probe.role != "confirm" else PATIENCE / 2  # its time is well known by then
        seconds = MEASURE_SECONDS[self.problem.timed] + probe.passes * probe.seconds_per_pass
        return min(START_SECONDS + patience * seconds, max(LAST_SECONDS, self.left))

    def _probe(self, runner: Runner, probe: Probe) -> Record:
        return runner.probe(
            probe.spec,
            probe.candidate,
            budget_bytes=self.problem.budget_bytes,  # at most what was free when the probe was chosen
            timeout=self._patience(probe),
            steps=probe.steps,
            passes=probe.passes,
        )

    def _keep(self, record: Record) -> None:
        """Store a record: on the disk first, so that it is not lost."""
        if self.ledger is not None:
            self.ledger.append(record)
        self.records.append(record)
        cached = current(self.problem.cached, record)
        if is_stale(cached, record, self.problem.target):
            self.stale, cached = True, [other for other in cached if other.engine != record.engine]
            self.cache.drop(record)
        self.problem = replace(self.problem, cached=tuple(cached))
        self.cache.add(record)

    def _report(self) -> None:
        """Tell the caller how far the search is."""
        if self.progress is None:
            return
        ran = [record for record in self.records if record.verdict.ran and record.tokens_per_second is not None]
        self.progress(
            Progress(
                probes=len(self.records),
                running=tuple(self.running.values()),
                best=max(ran, key=lambda record: record.tokens_per_second or 0.0, default=None),
                seconds_left=max(0.0, self.left),
                budget_bytes=self.problem.budget_bytes,
            )
        )


def usable_bytes(free: Free) -> int:
    """The free bytes that a training process may use, in the unit of estimates."""
    if free.committed_bytes is None:
        return free.device_bytes
    return min(free.device_bytes, resident_within(free.committed_bytes))


def measured_on(title: str, records: Iterable[Record], known: Iterable[Record] = ()) -> list[Record]:
    """The records that were measured on a device of that name, with this torch, without the known ones."""
    own, seen = (title, torch_version()), {(record.started, record.candidate) for record in known}
    ours = [record for record in records if (record.title, record.torch) == own]
    return [record for record in ours if (record.started, record.candidate) not in seen]


def count_ooms(records: Iterable[Record]) -> int:
    """The number of records that ran out of memory."""
    return sum(record.verdict in (Verdict.OOM, Verdict.KILLED) for record in records)


def current(cached: Iterable[Record], record: Record) -> list[Record]:
    """The cached records that were measured with the library of a new record, or with another engine."""
    return [other for other in cached if other.library == record.library or other.engine != record.engine]
