"""The search as an Optuna study: every probe is a trial, in a storage that survives a kill.

optuna-dashboard can show it, and several workers and machines can share it.
"""

import importlib.util
import itertools
import os
import random
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec

with warnings.catch_warnings():  # in a notebook tqdm, which Optuna imports, warns that it has no widgets
    warnings.filterwarnings("ignore", message="IProgress not found")
    import optuna
    from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
    from optuna.storages import RDBStorage, fail_stale_trials
    from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
    from sqlalchemy import create_engine, inspect, make_url
    from sqlalchemy.exc import DBAPIError

from oomguard._core.errors import MisuseError
from oomguard._device.proc import read_status
from oomguard._probe.record import Record
from oomguard._search.propose import Probe
from oomguard._search.sampler import Sampler, pending_in, records_in
from oomguard._search.space import Problem

STUDY = "study.db"  # the storage's name in the directory that `--ledger` takes
HEARTBEAT_SECONDS, STALE_SECONDS = 5, 30
"""While a probe runs, its worker writes a sign of life so often. After the second time without one, it is taken for
dead: six signs have failed to come, and a search of a minute can still run the probe again."""
SETTLE_SECONDS = 1.0  # a trial that has begun has its probe after so many seconds, or its worker has died
OUTAGES = StorageInternalError, DBAPIError
DRIVERS = {"psycopg": "'oomguard[postgresql]'"}  # what to install for a driver that is not called as its package

_numbers = itertools.count()
Opened = TypeVar("Opened")


class AbsentError(MisuseError):
    """There is no storage, or no search in it, but there may be one later."""


class Storage(RDBStorage):
    """A database of Optuna's in which running trials have a heartbeat."""

    def __init__(self, url: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            super().__init__(_with_driver(url), heartbeat_interval=HEARTBEAT_SECONDS, grace_period=STALE_SECONDS)

    def record_heartbeat(self, trial_id: int) -> None:
        """Write a sign of life. One that is lost because the storage does not answer ends nothing."""
        with suppress(*OUTAGES):
            super().record_heartbeat(trial_id)

    def close(self) -> None:
        """Close all connections."""
        self.remove_session()
        self.engine.dispose()


class TrialStore:
    """The trials of one search. `storage`: a URL that Optuna takes, or None for this process alone."""

    running: ClassVar = dict[tuple[int, int], str]()
    """The owner of the trial that each store and thread of this process runs: the process, and a number."""

    def __init__(self, name: str, problem: Problem, storage: str | None = None, sampler: str = "auto") -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # a probe that does not fit is a trial that fails
        self.sampler, maximize = Sampler(problem, sampler), problem.maximize
        self._process = f"{_host()} {os.getpid()} {_start_time(os.getpid())} "
        self._freed = set[int]()  # threads whose trial another worker has freed
        self._storage = None if storage is None else opened(storage, lambda: Storage(storage))
        self.study = opened(storage, lambda: self._open(name))
        with warnings.catch_warnings():  # the names are for the dashboard; Optuna calls that experimental
            warnings.simplefilter("ignore", ExperimentalWarning)
            self.study.set_metric_names([*maximize])
        self.recover()

    def _open(self, name: str) -> optuna.Study:
        return optuna.create_study(
            study_name=name,
            storage=self._storage,
            sampler=self.sampler,
            directions=["maximize"] * len(self.sampler.problem.maximize),
            load_if_exists=True,
        )

    def close(self) -> None:
        """Close the connections to the storage. They are opened again when they are needed."""
        if self._storage is not None:
            self._storage.close()

    def give_up(self, error: BaseException) -> bool:
        """Note that this thread runs no trial any more. Returns whether the search can go on after the error.

        It can if the storage did not answer, or if another worker has freed the trial.
        """
        thread = threading.get_ident()
        self.running.pop((id(self), thread), None)
        self.sampler.decided.pop(thread, None)
        freed = thread in self._freed
        self._freed.discard(thread)
        return freed or is_outage(error)

    @contextmanager
    def running_trial(self) -> Iterator[None]:
        """Inside, this thread runs a trial. Note if another worker frees it, which Optuna tells as a wrong value."""
        try:
            yield
        except UpdateFinishedTrialError:
            self._freed.add(threading.get_ident())
            raise

    def recover(self) -> None:
        """Mark the trials of workers that have died as failed, so that none stays RUNNING for ever."""
        for trial in self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            if self._is_gone(trial):
                with suppress(UpdateFinishedTrialError):  # another worker was faster
                    self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            fail_stale_trials(self.study)

    def _is_gone(self, trial: FrozenTrial) -> bool:
        """Whether a trial's process was on this machine and has ended, which is known before its heartbeat is late."""
        owner = trial.user_attrs.get("owner", "")
        host, _, process = owner.partition(" ")
        if owner.startswith(self._process):
            return owner not in self.running.values()
        pid, _, started = process.partition(" ")
        return bool(host == _host() and _start_time(int(pid)) != started.partition(" ")[0])

    def records(self) -> list[Record]:
        """The records of all workers so far."""
        return records_in(self.study)

    def pending(self) -> list[Probe]:
        """The probes that workers are running."""
        return pending_in(self.study)

    def mark(self, trial: Trial, probe: Probe) -> None:
        """Note who runs the trial of a probe."""
        owner = self.running[id(self), threading.get_ident()] = f"{self._process}{next(_numbers)}"
        trial.set_user_attr("owner", owner)
        trial.set_user_attr("role", probe.role)

    def earlier(self, trial: Trial) -> list[Probe]:
        """The probes of the trials that began before and still run, so that of two workers which chose at the same
        moment the later one can give way.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            running = self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
            texts = [other.user_attrs.get("probe") for other in running if other.number < trial.number]
            if None not in texts or time.monotonic() > deadline:
                return [msgspec.json.decode(text, type=Probe) for text in texts if text is not None]
            time.sleep(SETTLE_SECONDS / 20)

    def report(self, trial: Trial, record: Record) -> list[float]:
        """Store the record of a trial and return its values.

        If another worker has taken this one for dead and freed the trial, the record gets a trial of its own.
        """
        try:
            return self.sampler.report(trial, record)
        except UpdateFinishedTrialError:
            self._freed.add(threading.get_ident())
            again = create_trial(state=TrialState.FAIL)
            values = self.sampler.report(again, record)
            if record.verdict.ran:
                again.state, again.values = TrialState.COMPLETE, values
            self.study.add_trial(again)
            return values

    def note(self, name: str, value: Any) -> Any:
        """Store a value for later continuations of the search, and return the first one that was stored."""
        if name not in self.study.user_attrs:
            self.study.set_user_attr(name, value)
        return self.study.user_attrs[name]

    def share(self, search: str) -> None:
        """Store what workers must know of the search, which goes on."""
        self.study.set_user_attr("ended", None)
        self.study.set_user_attr("search", search)

    def end(self, why: str) -> None:
        """Tell workers that the search has ended."""
        self.study.set_user_attr("ended", why)

    @property
    def ended(self) -> str | None:
        """Why the search has ended that workers take part in; None if it has not."""
        why = self.study.user_attrs.get("ended")
        return None if why is None else str(why)

    def own_records(self) -> int:
        """The number of records that this process has measured."""
        owners = (trial.user_attrs.get("owner", "") for trial in self.study.trials if "record" in trial.user_attrs)
        return sum(owner.startswith(self._process) for owner in owners)


def opened(url: str | None, opening: Callable[[], Opened], pauses: Sequence[float] = (0.1, 0.5, 2.0)) -> Opened:
    """What `opening` gets of a storage. Of two searches that make its tables at the same moment, one tries again."""
    try:
        return opening()
    except Exception as error:  # whatever the database's driver raises
        if pauses and is_outage(error):
            time.sleep(pauses[0] * (1 + random.random()))
            return opened(url, opening, pauses[1:])
        missing = error.__cause__ if isinstance(error, ImportError) else None
        if isinstance(missing, ImportError) and missing.name is not None:
            advice = f"Run `pip install {DRIVERS.get(missing.name, missing.name)}`, or give another --storage."
            got = masked(f"{missing.name} is not installed ({url})")
            raise MisuseError(rule="A database needs its driver", got=got, advice=advice) from None
        why = str(error.__cause__ or error).partition("\n")[0]
        if re.search(r"://[^:/@\s]*:\S*@\S*@", url or ""):  # the rest of the password would be taken for the host
            why = "in a password, @ is written as %40"
        raise (AbsentError if is_outage(error) else MisuseError)(
            rule="The storage must be a URL that Optuna takes, such as sqlite:///study.db",
            got=masked(f"{url} cannot be opened ({why})"),
            advice="Give another --storage, or another directory to --ledger.",
        ) from None


def is_outage(error: BaseException | None) -> bool:
    """Whether a storage that did not answer is behind an error (Optuna 5 fails once more while it handles it)."""
    return error is not None and (isinstance(error, OUTAGES) or is_outage(error.__context__))


def studies_in(url: str) -> dict[str, dict[str, Any]]:
    """The attributes of the searches in a storage that workers can join, by study. Nothing is written."""
    return opened(url, lambda: _studies_in(url))


def _studies_in(url: str) -> dict[str, dict[str, Any]]:
    parts = make_url(_with_driver(url))
    if parts.get_backend_name() == "sqlite" and not os.path.exists(parts.database or ""):  # it would be made
        return {}
    engine = create_engine(parts)
    try:
        if not inspect(engine).has_table("studies"):
            return {}
    finally:
        engine.dispose()
    with closing(Storage(url)) as storage:
        studies = optuna.get_all_study_summaries(storage)
    return {one.study_name: one.user_attrs for one in studies if "search" in one.user_attrs}


def _with_driver(url: str) -> str:
    """The URL with the driver that oomguard[postgresql] installs: SQLAlchemy 2.0 would take another one."""
    if url.startswith("postgresql:") and importlib.util.find_spec("psycopg"):
        return url.replace("postgresql", "postgresql+psycopg", 1)
    return url


def storage_in(directory: Path) -> str:
    """The storage of a ledger's directory."""
    return f"sqlite:///{directory / STUDY}"


def masked(text: str) -> str:
    """The text without the passwords of its URLs: messages end in logs."""
    text = re.sub(r"(://[^:/@\s]*:)\S+@", r"\1***@", text)
    return re.sub(r"(?i)(passw(?:or)?d=)[^&\s)]+", r"\1***", text)


@cache
def _host() -> str:
    """The name of this machine, with the namespace of its process numbers: containers may share the name alone."""
    try:
        return socket.gethostname() + os.readlink("/proc/self/ns/pid").removeprefix("pid:")
    except OSError:
        return socket.gethostname()


def _start_time(pid: int) -> str:
    """When a process started, by the system's clock (a pid is given to another process later); empty if it ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]  # starttime, proc(5)
    except (OSError, IndexError):
        return "" if read_status(pid) is None else "alive"
