"""Running a search: one worker per device, within limits. The result is kept, however the search ends."""

import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, TypeAlias

from oomguard._core.errors import MisuseError
from oomguard._device.find import find_target
from oomguard._estimate.target import resident_within
from oomguard._predict.belief import believed, doubted
from oomguard._predict.calibration import is_stale
from oomguard._probe.cache import Cache
from oomguard._probe.record import MAX_STEPS, Ledger, Record, torch_version
from oomguard._probe.runner import Free, LostError, Runner
from oomguard._probe.verdict import Verdict
from oomguard._search.propose import CHILD_SECONDS, MEASURE_SECONDS, Probe
from oomguard._search.space import Problem

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial, Trial

    from oomguard._probe.ray import RayRunner
    from oomguard._search.study import TrialStore

AnyRunner: TypeAlias = "Runner | RayRunner"
MAX_PROBES = 24
TIMEOUT_SECONDS = 55.0  # seconds of a whole search by default
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits at which a search ends."""

    max_probes: int = MAX_PROBES
    """Probes in all, with those of the interrupted search that is continued, but not those of other searches."""
    seconds: float = TIMEOUT_SECONDS  # seconds from now, less those that such probes have taken


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
    ended: str
    """Why the search ended: `done`, `max-probes`, `timeout`, `interrupted`, `storage`, `estimate` (nothing was run)."""
    seconds: float  # seconds that the search took, since it was last started
    stale: bool = False  # whether cached records contradicted new ones and were dropped

    @property
    def evidence(self) -> tuple[Record, ...]:
        """The records whose peaks are believed."""
        return believed(self.records, self.problem.target)


@dataclass(kw_only=True)
class Search:
    """A search under way."""

    problem: Problem
    trials: "TrialStore"
    ledger: Ledger | None
    cache: Cache
    limits: Limits
    progress: Callable[[Progress], None] | None = None
    records: list[Record] = field(default_factory=list)
    stale: bool = False
    ended: str | None = None
    workers: Mapping[str, AnyRunner] | None = None  # runners elsewhere, by device; None: devices are here
    lost: list[LostError] = field(default_factory=list)  # why workers were lost
    helps: bool = False  # whether it is a worker for the search of another process, and ends with that one
    waited_with: object = None  # what was known when there was nothing to do but to wait for others
    unreachable: bool = False  # whether the storage has failed to answer
    began: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: dict[str, Probe] = field(default_factory=dict)

    def run(self, devices: Iterable[str]) -> SearchResult:
        """Work on each device in a thread of its own until the search is done, out of time, interrupted or failed."""
        with ExitStack() as stack:
            runners = [self._open(name, stack) for name in devices]
            pool = stack.enter_context(ThreadPoolExecutor(len(runners)))
            running = workers = {pool.submit(self._work, runner) for runner in runners}
            try:
                while running:
                    done, running = wait(workers, POLL_SECONDS)
                    if any(worker.exception() for worker in done):
                        self.ended = self.ended or "failed"  # the other workers stop
                for worker in workers:
                    worker.result()
            except KeyboardInterrupt:
                self.ended = "interrupted"
                for runner in runners:
                    runner.close()
        if len(self.lost) == len(runners) and self.ended is None:
            got, advice = f"all are lost ({self.lost[-1]})", "Look after the cluster, and start the search again."
            raise MisuseError(rule="A search needs workers that run its probes", got=got, advice=advice)
        return SearchResult(
            problem=self.problem,
            records=tuple(sorted(self.records, key=lambda record: record.started)),
            ended=self.ended or "done",
            seconds=time.monotonic() - self.began,
            stale=self.stale,
        )

    def _open(self, device: str, stack: ExitStack) -> AnyRunner:
        """The runner of a device, which is closed with the stack."""
        runner = Runner(device, seconds=MEASURE_SECONDS) if self.workers is None else self.workers[device]
        stack.callback(runner.close)
        return runner

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.limits.seconds - (time.monotonic() - self.began)

    def _work(self, runner: AnyRunner) -> None:
        """Let the study choose probes, and run them and store their records, until there is nothing more to do."""
        from oomguard._search.study import is_outage

        def objective(trial: "Trial") -> list[float]:
            with self.trials.running_trial():
                return self._measure(trial, runner, self.trials.sampler.suggest(trial))

        def go_on(study: "Study", trial: "FrozenTrial") -> None:
            if not self._decide(runner):
                study.stop()

        while self.ended is None:
            try:
                if self._decide(runner):
                    self.trials.study.optimize(objective, callbacks=[go_on])
                return
            except Exception as error:
                can_go_on = self.trials.give_up(error)
                if isinstance(error, LostError):
                    self._lose(error)
                    return
                if not can_go_on:
                    raise
                if is_outage(error):
                    self._wait()

    def _lose(self, error: LostError) -> None:
        """A worker is lost, and its trial has failed. The others go on."""
        if self.ended is None:
            self.lost.append(error)
            warnings.warn(f"A worker of the search is lost: {error}. The others go on.", stacklevel=2)

    def _wait(self) -> None:
        """The storage does not answer. It is tried again until the time is up; what was measured is kept here."""
        if not self.unreachable:
            warnings.warn("The storage does not answer. The search tries again until its time is up.", stacklevel=2)
        self.unreachable = True
        if self.left <= CHILD_SECONDS:
            self.ended = self.ended or "storage"
        time.sleep(POLL_SECONDS)

    def _decide(self, runner: AnyRunner) -> bool:
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

    def _next(self, runner: AnyRunner) -> Probe | None:
        """The next probe within what is free now, in the light of other machines' records.

        If a limit is reached there is none, and `ended` says why.
        """
        self.trials.recover()
        stored, most = measured_on(self.cache.title, self.trials.records()), self.limits.max_probes
        self.records += measured_on(self.cache.title, stored, known=self.records)
        left, pending = self._left_after(stored), [*self.running.values(), *self.trials.pending()]
        if len(stored) >= most or min(left, self.left) <= CHILD_SECONDS:
            self.ended = self.ended or ("max-probes" if len(stored) >= most else "timeout")
        elif self.helps:
            self.ended = self.ended or self.trials.ended
        if self.ended is not None:
            return None
        free_bytes = usable_bytes(runner.free())
        if free_bytes < self.problem.budget_bytes:  # another process has taken some: plan for what is left
            self.problem = replace(self.problem, budget_bytes=free_bytes)
        known = len(stored), pending, self.problem.budget_bytes
        if known == self.waited_with or len(stored) + len(self.trials.pending()) >= most:
            return None
        self.trials.sampler.problem = self.problem
        probe = self.trials.sampler.propose(
            self.trials.study,
            records=self.records,
            pending=pending,
            explore=self.trials.sampler.name == "auto" or len(stored) < most - 1,  # the last probe is to confirm
            left=left,
        )
        self.waited_with = known if probe is None else None
        return probe

    def _left_after(self, stored: Iterable[Record]) -> float:
        """The seconds left, by what probes took instead of by the clock, so that a search that was killed goes on as if
        it had not been. The clock counts where it leaves not even the half that a confirming probe may take.
        """
        left = self.limits.seconds - probing_seconds(stored)
        return left if left / 2 <= self.left else self.left

    def _measure(self, trial: "Trial", runner: AnyRunner, probe: Probe) -> list[float]:
        """Run a probe, store its record, and return the values of its trial."""
        timeout = max(CHILD_SECONDS, self.left if probe.role == "confirm" else self.left / 2)
        self.trials.mark(trial, probe)
        if self._gives_way(trial, probe):
            self.running.pop(runner.device.name, None)
            return []
        self._report()
        if probe.fresh:
            runner.close()
        try:
            record = runner.probe(
                probe.spec,
                probe.candidate,
                budget_bytes=self.problem.budget_bytes,  # at most what was free when the probe was chosen
                timeout=timeout,
                steps=MAX_STEPS if self.problem.timed and probe.passes > 1 else probe.passes,
                passes=probe.passes,
                rival=probe.rival,
            )
        finally:
            self.running.pop(runner.device.name, None)
        with self.lock:
            if self.ended == "interrupted":
                return []
            self._keep(record)
            values = self.trials.report(trial, record)
        self._report()
        return values

    def _gives_way(self, trial: "Trial", probe: Probe) -> bool:
        """Whether another worker has chosen the same probe, or the last one that is allowed, at the same moment."""
        earlier, stored = self.trials.earlier(trial), measured_on(self.cache.title, self.trials.records())
        others: list[Record | Probe] = [*earlier, *measured_on(self.cache.title, stored, known=self.records)]
        return any(map(probe.is_of, others)) or len(stored) + len(earlier) >= self.limits.max_probes

    def _keep(self, record: Record) -> None:
        """Store a record: on the disk first, so that it is not lost. Drop cached records that it contradicts."""
        if self.ledger is not None:
            self.ledger.append(record)
        self.records.append(record)
        if record in doubted(self.records, self.problem.target):
            return
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
    return min(free.device_bytes, resident_within(free.committed_bytes, find_target("cpu")))


def probing_seconds(records: Iterable[Record]) -> float:
    """The seconds during which at least one probe ran: several workers may have run them at the same time."""
    seconds, end = 0.0, -math.inf
    for began, lasted in sorted((datetime.fromisoformat(one.started).timestamp(), one.seconds) for one in records):
        seconds += max(0.0, began + lasted - max(began, end))
        end = max(end, began + lasted)
    return seconds


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
