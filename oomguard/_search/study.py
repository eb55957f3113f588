"""The search as an Optuna study: every probe is a trial, in a storage that survives a kill.

optuna-dashboard can show it, and several workers and machines can share it.
"""

import itertools
import os
import random
import re
import socket
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

with warnings.catch_warnings():  # in a notebook tqdm, which Optuna imports, warns that it has no widgets
    warnings.filterwarnings("ignore", message="IProgress not found")
    import optuna
    from optuna.trial import FrozenTrial, Trial, TrialState
    from sqlalchemy.exc import DBAPIError

from oomguard._core.errors import MisuseError
from oomguard._device.proc import read_status
from oomguard._probe.record import Record
from oomguard._search.propose import Probe
from oomguard._search.sampler import Sampler, pending_in, records_in
from oomguard._search.space import Problem

STUDY = "study.db"  # the storage's name in the directory that `--ledger` takes
GRACE_SECONDS = 60.0  # a trial of another machine that should have ended so many seconds ago is taken for dead


_numbers = itertools.count()


class TrialStore:
    """The trials of one search. `storage`: a URL that Optuna takes, or None for this process alone."""

    running: ClassVar = dict[tuple[int, int], str]()
    """The owner of the trial that each store and thread of this process runs: the process, and a number."""

    def __init__(self, name: str, problem: Problem, storage: str | None = None, sampler: str = "auto") -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # a probe that does not fit is a trial that fails
        self.sampler, maximize = Sampler(problem, sampler), problem.maximize
        self._process = f"{socket.gethostname()} {os.getpid()} {_start_time(os.getpid())} "
        self.study = self._open(name, storage)
        with warnings.catch_warnings():  # the names are for the dashboard; Optuna calls that experimental
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self.study.set_metric_names([*maximize])
        self.recover()

    def _open(self, name: str, storage: str | None, pauses: Sequence[float] = (0.1, 0.5, 2.0)) -> optuna.Study:
        """The study. Of two searches that make its tables at the same moment one fails, and tries again."""
        try:
            return optuna.create_study(
                study_name=name,
                storage=storage,
                sampler=self.sampler,
                directions=["maximize"] * len(self.sampler.problem.maximize),
                load_if_exists=True,
            )
        except Exception as error:  # whatever the database's driver raises
            if pauses and is_outage(error):
                time.sleep(pauses[0] * (1 + random.random()))
                return self._open(name, storage, pauses[1:])
            raise MisuseError(
                rule="The storage must be a URL that Optuna takes, such as sqlite:///study.db",
                got=_masked(f"{storage} cannot be opened ({str(error).splitlines()[0]})"),
                advice="Give another --storage, or another directory to --ledger.",
            ) from None

    def give_up(self, error: BaseException) -> bool:
        """Note that this thread runs no trial any more. Returns whether that is because the storage did not answer."""
        self.running.pop((id(self), threading.get_ident()), None)
        self.sampler.decided.pop(threading.get_ident(), None)
        return is_outage(error)

    def recover(self) -> None:
        """Mark the trials whose process is gone as failed, so that none stays RUNNING for ever."""
        for trial in self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            if self._is_dead(trial):
                self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def _is_dead(self, trial: FrozenTrial) -> bool:
        begun = trial.datetime_start.timestamp() if trial.datetime_start else 0.0  # a trial is marked soon after that
        owner, until = trial.user_attrs.get("owner", ""), trial.user_attrs.get("until", begun)
        host, _, process = owner.partition(" ")
        if owner.startswith(self._process):
            return owner not in self.running.values()
        if host == socket.gethostname():
            pid, _, started = process.partition(" ")
            return not pid or _start_time(int(pid)) != started.partition(" ")[0]
        return bool(time.time() > until + GRACE_SECONDS)

    def records(self) -> list[Record]:
        """The records of all workers so far."""
        return records_in(self.study)

    def pending(self) -> list[Probe]:
        """The probes that workers are running."""
        return pending_in(self.study)

    def mark(self, trial: Trial, probe: Probe, seconds: float) -> None:
        """Note who runs the trial of a probe, and until when."""
        owner = self.running[id(self), threading.get_ident()] = f"{self._process}{next(_numbers)}"
        trial.set_user_attr("owner", owner)
        trial.set_user_attr("until", time.time() + seconds)
        trial.set_user_attr("role", probe.role)

    def note(self, name: str, value: Any) -> Any:
        """Store a value for later continuations of the search, and return the first one that was stored."""
        if name not in self.study.user_attrs:
            self.study.set_user_attr(name, value)
        return self.study.user_attrs[name]


def is_outage(error: BaseException | None) -> bool:
    """Whether a storage that did not answer is behind an error (Optuna 5 fails once more while it handles it)."""
    outages = optuna.exceptions.StorageInternalError, DBAPIError
    return error is not None and (isinstance(error, outages) or is_outage(error.__context__))


def storage_in(directory: Path) -> str:
    """The storage of a ledger's directory."""
    return f"sqlite:///{directory / STUDY}"


def _masked(text: str) -> str:
    """The text without the passwords of its URLs: messages end in logs."""
    text = re.sub(r"(://[^:/@\s]*:)\S+@", r"\1***@", text)
    return re.sub(r"(?i)(passw(?:or)?d=)[^&\s)]+", r"\1***", text)


def _start_time(pid: int) -> str:
    """When a process started, by the system's clock (a pid is given to another process later); empty if it ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]  # starttime, proc(5)
    except (OSError, IndexError):
        return "" if read_status(pid) is None else "alive"
