"""The search as an Optuna study: every probe is a trial. The only module that imports Optuna.

The next candidate is not sampled: the space is small, and arithmetic knows most of it (propose.py). Optuna stores the
trials with their constraints, for several workers and machines at once, in a storage that survives a kill and that
optuna-dashboard can show.
"""

import os
import re
import socket
import time
import warnings
from pathlib import Path
from typing import Any

import msgspec

with warnings.catch_warnings():  # in a notebook tqdm, which Optuna imports, warns that it has no widgets
    warnings.filterwarnings("ignore", message="IProgress not found")
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
    from optuna.samplers import RandomSampler
    from optuna.trial import FrozenTrial, Trial, TrialState

from oomguard._core.errors import MisuseError
from oomguard._device.proc import read_status
from oomguard._probe.record import Record
from oomguard._search.approach import Probe
from oomguard._spec.candidate import KNOBS
from oomguard._spec.spec import MAX_SEQ, Spec

STUDY = "study.db"
"""The storage's name in the directory that `--ledger` takes."""
GRACE_SECONDS = 60.0
"""A trial of another machine that should have ended so many seconds ago is taken for dead."""


class Sampler(RandomSampler):
    """Gives every trial the candidate that has been chosen for it."""

    params: dict[str, Any]

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self.params[param_name]


class TrialStore:
    """The trials of one search. `storage`: a URL that Optuna takes, or None for this process alone."""

    def __init__(self, name: str, maximize: tuple[str, ...], storage: str | None = None) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.maximize, self.sampler = maximize, Sampler()
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
                self.drop(trial.number)

    def _is_dead(self, trial: FrozenTrial) -> bool:
        owner, until = trial.user_attrs.get("owner", ""), trial.user_attrs.get("until", 0.0)
        host, _, process = owner.partition(" ")
        if host == socket.gethostname():
            pid, _, started = process.partition(" ")
            return not pid or _start_time(int(pid)) != started
        return bool(time.time() > until + GRACE_SECONDS)

    def records(self) -> list[Record]:
        """The records of all workers so far."""
        return [msgspec.json.decode(text, type=Record) for text in self._attributes("record")]

    def pending(self) -> list[Probe]:
        """The probes that workers are running."""
        return [msgspec.json.decode(text, type=Probe) for text in self._attributes("probe", TrialState.RUNNING)]

    def begin(self, probe: Probe, seconds: float) -> Trial:
        """Start the trial of a probe that ends within so many seconds."""
        self.sampler.params = _params(probe)
        trial = self.study.ask(fixed_distributions=_distributions(probe))
        trial.set_user_attr("owner", self._owner)
        trial.set_user_attr("until", time.time() + seconds)
        trial.set_user_attr("role", probe.role)
        trial.set_user_attr("probe", msgspec.json.encode(probe).decode())
        return trial

    def end(self, trial: Trial, asked: Spec, record: Record) -> None:
        """Store the record of a trial, and its values for a search that asked for a spec."""
        trial.set_user_attr("record", msgspec.json.encode(record).decode())
        trial.set_user_attr("verdict", record.verdict.name)
        if record.peak_bytes is not None:
            trial.set_constraint("excess_bytes", float(record.peak_bytes - record.budget_bytes))
        if record.tokens_per_second is None:
            self.study.tell(trial, state=TrialState.FAIL)
        else:
            self.study.tell(trial, [_value(aim, asked, record) for aim in self.maximize])

    def drop(self, trial: Trial | int) -> None:
        """Mark a trial as failed if it has not ended: its probe was interrupted."""
        self.study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)

    def note(self, name: str, value: Any) -> Any:
        """Store a value for later continuations of the search, and return the first one that was stored."""
        if name not in self.study.user_attrs:
            self.study.set_user_attr(name, value)
        return self.study.user_attrs[name]

    def _attributes(self, name: str, *states: TrialState) -> list[Any]:
        trials = self.study.get_trials(deepcopy=False, states=states or None)
        return [trial.user_attrs[name] for trial in trials if name in trial.user_attrs]


def storage_in(directory: Path) -> str:
    """The storage of a ledger's directory."""
    return f"sqlite:///{directory / STUDY}"


def _masked(text: str) -> str:
    """The text without the passwords of its URLs: messages end in logs.

    >>> _masked("mysql://me:secret@db/study cannot be opened"), _masked("mysql://db/study?password=secret&x=1")
    ('mysql://me:***@db/study cannot be opened', 'mysql://db/study?password=***&x=1')
    """
    text = re.sub(r"(://[^:/@\s]*:)\S+@", r"\1***@", text)
    return re.sub(r"(?i)(passw(?:or)?d=)[^&\s)]+", r"\1***", text)


def _start_time(pid: int) -> str:
    """When a process started, by the system's clock (a pid is given to another process later); empty if it ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]  # starttime, proc(5)
    except (OSError, IndexError):
        return "" if read_status(pid) is None else "alive"


def _value(aim: str, asked: Spec, record: Record) -> float:
    """The value of a record: sequences of the asked length per second, the microbatch, or the sequence length."""
    if aim == "throughput":
        assert record.seconds_per_step is not None
        return record.spec.batch / record.seconds_per_step * record.spec.steps / asked.steps
    return float(record.candidate.microbatch if aim == "microbatch" else record.spec.steps)


def _params(probe: Probe) -> dict[str, Any]:
    """Every knob that has a value, and the sequence length."""
    knobs = msgspec.structs.asdict(probe.candidate)
    return {"seq": probe.spec.steps} | {name: value for name, value in knobs.items() if value is not None}


def _distributions(probe: Probe) -> dict[str, BaseDistribution]:
    """The distribution of each parameter of a probe."""
    ranges: dict[str, BaseDistribution] = {
        "seq": IntDistribution(1, MAX_SEQ, log=True),
        "microbatch": IntDistribution(1, max(2, probe.spec.batch), log=True),
    }
    for name in _params(probe).keys() - ranges.keys():
        field = KNOBS[name].field
        ranges[name] = (
            CategoricalDistribution(field.choices or (field.default, not field.default))
            if field.bounds is None
            else IntDistribution(*field.bounds, log=field.bounds.low > 0)
        )
    return ranges
