"""The search as an Optuna study: every probe is a trial, in a storage that survives a kill.

optuna-dashboard can show it, and several workers and machines can share it.
"""

import os
import re
import socket
import time
import warnings
from pathlib import Path
from typing import Any

with warnings.catch_warnings():  # in a notebook tqdm, which Optuna imports, warns that it has no widgets
    warnings.filterwarnings("ignore", message="IProgress not found")
    import optuna
    from optuna.trial import FrozenTrial, Trial, TrialState

from oomguard._core.errors import MisuseError
from oomguard._device.proc import read_status
from oomguard._probe.record import Record
from oomguard._search.propose import Probe
from oomguard._search.sampler import Sampler, pending_in, records_in
from oomguard._search.space import Problem

STUDY = "study.db"  # the storage's name in the directory that `--ledger` takes
GRACE_SECONDS = 60.0  # a trial of another machine that should have ended so many seconds ago is taken for dead


class TrialStore:
    """The trials of one search. `storage`: a URL that Optuna takes, or None for this process alone."""

    def __init__(self, name: str, problem: Problem, storage: str | None = None, sampler: str = "auto") -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # a probe that does not fit is a trial that fails
        self.sampler, maximize = Sampler(problem, sampler), problem.maximize
        self._owner = f"{socket.gethostname()} {os.getpid()} {_start_time(os.getpid())}"
        try:
            self.study = optuna.create_study(
                study_name=name,
                storage=storage,
                sampler=self.sampler,
                directions=["maximize"] * len(maximize),
                load_if_exists=True,
            )
        except Exception as error:  # whatever the database's driver raises
            raise MisuseError(
                rule="The storage must be a URL that Optuna takes, such as sqlite:///study.db",
                got=_masked(f"{storage} cannot be opened ({str(error).splitlines()[0]})"),
                advice="Give another --storage, or another directory to --ledger.",
            ) from None
        with warnings.catch_warnings():  # the names are for the dashboard; Optuna calls that experimental
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self.study.set_metric_names([*maximize])
        self.recover()

    def recover(self) -> None:
        """Mark the trials whose process is gone as failed, so that none stays RUNNING for ever."""
        for trial in self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            if self._is_dead(trial):
                self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def _is_dead(self, trial: FrozenTrial) -> bool:
        begun = trial.datetime_start.timestamp() if trial.datetime_start else 0.0  # a trial is marked soon after that
        owner, until = trial.user_attrs.get("owner", ""), trial.user_attrs.get("until", begun)
        host, _, process = owner.partition(" ")
        if host == socket.gethostname():
            pid, _, started = process.partition(" ")
            return not pid or _start_time(int(pid)) != started
        return bool(time.time() > until + GRACE_SECONDS)

    def records(self) -> list[Record]:
        """The records of all workers so far."""
        return records_in(self.study)

    def pending(self) -> list[Probe]:
        """The probes that workers are running."""
        return pending_in(self.study)

    def mark(self, trial: Trial, probe: Probe, seconds: float) -> None:
        """Note who runs the trial of a probe, and until when."""
        trial.set_user_attr("owner", self._owner)
        trial.set_user_attr("until", time.time() + seconds)
        trial.set_user_attr("role", probe.role)

    def note(self, name: str, value: Any) -> Any:
        """Store a value for later continuations of the search, and return the first one that was stored."""
        if name not in self.study.user_attrs:
            self.study.set_user_attr(name, value)
        return self.study.user_attrs[name]


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
