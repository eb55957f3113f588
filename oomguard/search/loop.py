"""The search as an Optuna study: every probe is a trial, asked for and told. The only file that imports Optuna.

Which candidate comes next is not left to chance: the space is small, and arithmetic knows most of it. So the sampler is
ours (propose.py), and Optuna keeps the books: trials with their constraints, for several workers and machines at once,
in a storage that survives a kill, and that optuna-dashboard can show.
"""

import os
import re
import socket
import time
import warnings
from pathlib import Path
from typing import Any

import msgspec

with warnings.catch_warnings():  # in a notebook tqdm, which Optuna imports, warns that it has no widgets: nobody asked
    warnings.filterwarnings("ignore", message="IProgress not found")
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
    from optuna.samplers import BaseSampler, RandomSampler
    from optuna.trial import FrozenTrial, Trial, TrialState

from oomguard.candidate import Allocator, Engine, Keep, Precision, Update
from oomguard.device.proc import read_status
from oomguard.errors import MisuseError
from oomguard.probe.record import Record
from oomguard.search.problem import Probe
from oomguard.spec import MAX_SEQ, Spec

STUDY = "study.db"
"""The storage's name in the directory that `--ledger` takes."""
GRACE_SECONDS = 60.0
"""A trial of another machine that should have ended so long ago is taken for dead."""
_CHOICES = {
    "precision": Precision.__args__,  # type: ignore[attr-defined]
    "engine": Engine.__args__,  # type: ignore[attr-defined]
    "allocator": Allocator.__args__,  # type: ignore[attr-defined]
    "keep": Keep.__args__,  # type: ignore[attr-defined]
    "update": Update.__args__,  # type: ignore[attr-defined]
    "recompute": (True, False),
    "offload": (False, True),
    "state_8bit": (False, True),
}
_LARGEST = {"segments": 10**9, "levels": 3, "window": 10**9, "threads": 4096}


class Sampler(BaseSampler):
    """Gives every trial the candidate that has been chosen for it."""

    def __init__(self) -> None:
        self.probe: Probe | None = None

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {} if self.probe is None else _distributions(self.probe)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {} if self.probe is None else _params(self.probe)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return RandomSampler(seed=0).sample_independent(study, trial, param_name, param_distribution)


class Book:
    """The study of one problem. `storage`: a URL that Optuna takes, or None for this process alone."""

    def __init__(self, name: str, maximize: tuple[str, ...], storage: str | None = None) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.maximize, self.sampler = maximize, Sampler()
        self._owner = f"{socket.gethostname()} {os.getpid()} {_born(os.getpid())}"
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
        """Tell Optuna of trials whose process is gone that they failed: none stays RUNNING for ever."""
        for trial in self._trials(TrialState.RUNNING):
            if self._is_dead(trial):
                self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def _is_dead(self, trial: FrozenTrial) -> bool:
        owner, until = trial.user_attrs.get("owner", ""), trial.user_attrs.get("until", 0.0)
        host, _, rest = owner.partition(" ")
        if host == socket.gethostname():
            pid, _, born = rest.partition(" ")
            return not pid or _born(int(pid)) != born
        return bool(time.time() > until + GRACE_SECONDS)

    def records(self) -> list[Record]:
        """What all workers have measured so far."""
        done = [one.user_attrs["record"] for one in self._trials() if "record" in one.user_attrs]
        return [msgspec.json.decode(one, type=Record) for one in done]

    def pending(self) -> list[Probe]:
        """What workers are running."""
        running = [one.user_attrs["probe"] for one in self._trials(TrialState.RUNNING) if "probe" in one.user_attrs]
        return [msgspec.json.decode(one, type=Probe) for one in running]

    def begin(self, probe: Probe, seconds: float) -> Trial:
        """Ask for the trial of a probe that ends within so many seconds."""
        self.sampler.probe = probe
        trial = self.study.ask(fixed_distributions=_distributions(probe))
        trial.set_user_attr("owner", self._owner)
        trial.set_user_attr("until", time.time() + seconds)
        trial.set_user_attr("role", probe.role)
        trial.set_user_attr("probe", msgspec.json.encode(probe).decode())
        return trial

    def end(self, trial: Trial, asked: Spec, record: Record) -> None:
        """Tell what came of it."""
        trial.set_user_attr("record", msgspec.json.encode(record).decode())
        trial.set_user_attr("verdict", record.verdict.name)
        if record.peak_bytes is not None:
            trial.set_constraint("excess_bytes", float(record.peak_bytes - record.budget_bytes))
        if record.tokens_per_second is None:
            self.study.tell(trial, state=TrialState.FAIL)
        else:
            self.study.tell(trial, [_value(aim, asked, record) for aim in self.maximize])

    def drop(self, trial: Trial) -> None:
        """The probe was interrupted."""
        self.study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)

    def note(self, name: str, value: Any) -> Any:
        """Remember a value for whoever continues the search; the first that was noted stays."""
        found = self.study.user_attrs.get(name)
        if found is None:
            self.study.set_user_attr(name, value)
        return value if found is None else found

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states or None)


def storage_in(directory: Path) -> str:
    """The storage of a ledger's directory."""
    return f"sqlite:///{directory / STUDY}"


def _masked(text: str) -> str:
    """Without the passwords of the URLs in it: messages end in logs.

    >>> _masked("mysql://me:secret@db/study cannot be opened"), _masked("mysql://db/study?password=secret&x=1")
    ('mysql://me:***@db/study cannot be opened', 'mysql://db/study?password=***&x=1')
    """
    text = re.sub(r"(://[^:/@\s]*:)\S+@", r"\1***@", text)
    return re.sub(r"(?i)(passw(?:or)?d=)[^&\s)]+", r"\1***", text)


def _born(pid: int) -> str:
    """When a process began, by the system's clock; a number can be given to another process later."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]  # starttime, proc(5)
    except (OSError, IndexError):
        return "" if read_status(pid) is None else "alive"


def _value(aim: str, asked: Spec, record: Record) -> float:
    """What a record is worth: sequences of the asked length per second, the microbatch, or the length."""
    if aim == "throughput":
        assert record.seconds_per_step is not None
        return record.spec.batch / record.seconds_per_step * record.spec.steps / asked.steps
    return float(record.candidate.microbatch if aim == "microbatch" else record.spec.steps)


def _params(probe: Probe) -> dict[str, Any]:
    knobs = msgspec.structs.asdict(probe.candidate)
    names = [*_CHOICES, *_LARGEST, "microbatch"]
    return {"seq": probe.spec.steps} | {name: knobs[name] for name in names if knobs[name] is not None}


def _distributions(probe: Probe) -> dict[str, BaseDistribution]:
    found: dict[str, BaseDistribution] = {"seq": IntDistribution(1, MAX_SEQ, log=True)}
    found["microbatch"] = IntDistribution(1, max(2, probe.spec.batch), log=True)
    found |= {name: IntDistribution(1, most, log=True) for name, most in _LARGEST.items()}
    found |= {name: CategoricalDistribution(choices) for name, choices in _CHOICES.items()}
    return {name: found[name] for name in _params(probe)}
