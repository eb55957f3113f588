"""The search as a sampler for Optuna, and Optuna's own samplers for comparison."""

import math
import threading
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

with warnings.catch_warnings():  # in a notebook tqdm, which Optuna imports, warns that it has no widgets
    warnings.filterwarnings("ignore", message="IProgress not found")
    from optuna import Study, create_study
    from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
    from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
    from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from oomguard._core.errors import MisuseError
from oomguard._predict.fit import FAR
from oomguard._probe.record import Record
from oomguard._search.propose import Probe, State, choose, make_probe, propose
from oomguard._search.screen import CandidateTable, rows_of, screen
from oomguard._search.space import Problem
from oomguard._spec.candidate import KNOBS
from oomguard._spec.spec import MAX_SEQ, Spec


class Sampler(BaseSampler):
    """Chooses the candidate of every trial by oomguard's rule (propose.py), for any study.

    `suggest` gives the candidate of a trial, `report` stores its record and returns the values of the trial.
    """

    def __init__(self, problem: Problem, name: str = "auto") -> None:
        """`name`: `auto`, or the sampler of Optuna that explores instead of the rule."""
        self.problem, self.name = problem, name
        self.decided = dict[int, Probe]()  # by thread: a worker may decide before its trial begins
        self._lock = threading.Lock()

    def propose(self, study: Study, **limits: Any) -> Probe | None:
        """The next probe; None if none is worth it. `limits` are fields of `State`."""
        pending = [*pending_in(study), *self.decided.values()]
        known: dict[str, Any] = {"problem": self.problem, "records": records_in(study), "pending": pending} | limits
        if self.name != "auto":
            known["draw"] = lambda table: draw(self.name, table, known["records"])
        return propose(State(**known))

    def suggest(self, trial: Trial) -> Probe:
        """The candidate of a trial, with the spec to run it with, perhaps of shorter sequences."""
        probe = self._decide(trial.study)
        for name, distribution in distributions(probe).items():
            _suggest(trial, name, distribution)
        trial.set_user_attr("probe", msgspec.json.encode(probe).decode())  # other workers see it
        return self.decided.pop(threading.get_ident())

    def report(self, trial: Trial | FrozenTrial, record: Record) -> list[float]:
        """Store the record of a trial. Return its values, which are no numbers if it did not run: the trial fails."""
        trial.set_user_attr("record", msgspec.json.encode(record).decode())
        trial.set_user_attr("verdict", record.verdict.name)
        if record.peak_bytes is not None:
            trial.set_constraint("excess_bytes", float(record.peak_bytes - record.budget_bytes))
        if record.tokens_per_second is None:
            return [math.nan] * len(self.problem.maximize)
        return [_value(aim, self.problem.spec, record) for aim in self.problem.maximize]

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The knobs of the next probe."""
        return distributions(self._decide(study))

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Their values."""
        return parameters(self._decide(study))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A value of a parameter that is no knob: at random."""
        return RandomSampler().sample_independent(study, trial, param_name, param_distribution)

    def _decide(self, study: Study) -> Probe:
        """The probe of this thread's trial, decided once."""
        thread = threading.get_ident()
        with self._lock:
            if thread not in self.decided:
                self.decided[thread] = self.propose(study) or self._best(study)
            return self.decided[thread]

    def _best(self, study: Study) -> Probe:
        """The best candidate known, whole: for a study that goes on though nothing more is to be learned."""
        state = State(problem=self.problem, records=records_in(study))
        table = screen(self.problem, state.records)
        row = choose(table)
        return make_probe(state, table, table.smallest if row is None else row, "confirm", table.spec.steps)


def records_in(study: Study) -> list[Record]:
    """The records of all trials."""
    return [msgspec.json.decode(text, type=Record) for text in _attributes(study, "record")]


def pending_in(study: Study) -> list[Probe]:
    """The probes that workers are running."""
    return [msgspec.json.decode(text, type=Probe) for text in _attributes(study, "probe", TrialState.RUNNING)]


def _attributes(study: Study, name: str, *states: TrialState) -> list[Any]:
    trials = study.get_trials(deepcopy=False, states=states or None)
    return [trial.user_attrs[name] for trial in trials if name in trial.user_attrs]


def _value(aim: str, asked: Spec, record: Record) -> float:
    """The value of a record: sequences of the asked length per second, the microbatch, or the sequence length."""
    if aim == "throughput":
        assert record.seconds_per_step is not None
        return record.spec.batch / record.seconds_per_step * record.spec.steps / asked.steps
    return float(record.candidate.microbatch if aim == "microbatch" else record.spec.steps)


def parameters(probe: Probe) -> dict[str, Any]:
    """Every knob that has a value, and the sequence length."""
    knobs = msgspec.structs.asdict(probe.candidate)
    return {"seq": probe.spec.steps} | {name: value for name, value in knobs.items() if value is not None}


def distributions(probe: Probe) -> dict[str, BaseDistribution]:
    """The distribution of each parameter of a probe."""
    ranges: dict[str, BaseDistribution] = {
        "seq": IntDistribution(1, MAX_SEQ, log=True),
        "microbatch": IntDistribution(1, max(2, probe.spec.batch), log=True),
    }
    for name in parameters(probe).keys() - ranges.keys():
        field = KNOBS[name].field
        ranges[name] = (
            CategoricalDistribution(field.choices or (field.default, not field.default))
            if field.bounds is None
            else IntDistribution(*field.bounds, log=field.bounds.low > 0)
        )
    return ranges


def _suggest(trial: Trial, name: str, distribution: BaseDistribution) -> Any:
    """The value of a parameter, which Optuna stores with the trial."""
    if isinstance(distribution, IntDistribution):
        return trial.suggest_int(name, distribution.low, distribution.high, log=distribution.log)
    assert isinstance(distribution, CategoricalDistribution)
    return trial.suggest_categorical(name, distribution.choices)


def draw(name: str, table: CandidateTable, records: Sequence[Record]) -> int:
    """The row that one of Optuna's own samplers runs next, among those that fit; arithmetic's best comes first."""
    best = choose(table)
    assert best is not None
    study, ranges = create_study(direction="maximize", sampler=_optunas_own(name, len(records))), _ranges_of(table)
    for record in records:
        rows = np.flatnonzero(rows_of(record, table))
        if record.seconds_per_step is not None and len(rows):
            excess = float((record.peak_bytes or 0) - record.budget_bytes)
            value, params = _value("throughput", table.spec, record), _params_of(table, int(rows[0]), ranges)
            trial = create_trial(value=value, params=params, distributions=ranges, constraints={"excess_bytes": excess})
            study.add_trial(trial)
    try:
        drawn = study.ask(ranges).params if study.trials else _params_of(table, best, ranges)
    except ImportError as error:  # GPSampler needs scipy
        raise MisuseError(
            rule=f"--sampler {name} needs a package that is not installed",
            got=f"got {error}",
            advice=f"Run `pip install 'oomguard[{name}]'`, or leave --sampler out.",
        ) from None
    away = np.where(table.eligible, 0.0, np.inf)
    for knob, value in drawn.items():  # the nearest number, of the rows with the most equal choices
        values = table.candidates.arrays[knob]
        away += np.abs(np.log2(values / value)) if values.dtype.kind in "iu" else FAR * (values != value)
    return int(np.argmin(away))


def _optunas_own(name: str, seed: int) -> BaseSampler:
    """A sampler of Optuna. It begins with arithmetic's best, not with random trials, since a search has few probes."""
    if name == "random":
        return RandomSampler(seed=seed)
    own: dict[str, Any] = {"gp": GPSampler, "tpe": TPESampler}
    sampler: BaseSampler = own[name](seed=seed, n_startup_trials=1)
    return sampler


def _ranges_of(table: CandidateTable) -> dict[str, BaseDistribution]:
    """The space as parameters of Optuna's own samplers."""
    ranges: dict[str, BaseDistribution] = {}
    for name, values in table.candidates.arrays.items():
        choices = [*dict.fromkeys(values.tolist())]
        if name != "accumulation":
            numbers = values.dtype.kind in "iu" and min(choices) < max(choices)
            ranges[name] = (
                IntDistribution(min(choices), max(choices), log=True) if numbers else CategoricalDistribution(choices)
            )
    return ranges


def _params_of(table: CandidateTable, row: int, ranges: Iterable[str]) -> dict[str, Any]:
    return {name: table.candidates.arrays[name][row].item() for name in ranges}
