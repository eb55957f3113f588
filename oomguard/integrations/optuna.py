"""Optuna studies that do not run out of memory.

- `feasible` answers by arithmetic whether a trial fits, and with which knobs, before anything is built.
- `FeasibleSampler` wraps any sampler and draws again what cannot fit.
- `constraints_func` tells samplers that take constraints by how many bytes a trial is too large.
- `run_trial` runs an objective in a process of its own within a budget: if that runs out of memory or crashes, the
  trial ends, and the study goes on.
"""

import math
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import cloudpickle
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.search_space import IntersectionSearchSpace
from optuna.study import Study
from optuna.trial import BaseTrial, FrozenTrial, TrialState

from oomguard._core.errors import MisuseError, check_whole, shown
from oomguard._core.system import Elsewhere, ask_parent
from oomguard._core.units import format_bytes, parse_seconds, read_budget
from oomguard._device.find import find_budget, open_device
from oomguard._device.proc import read_status
from oomguard._estimate.breakdown import Estimate
from oomguard._plan.fit import fit, left_bytes, needed_bytes, shortage
from oomguard._probe.verdict import Verdict, judge
from oomguard._spec.spec import Spec
from oomguard._task.task import Task

__all__ = ["FeasibleSampler", "constraints_func", "feasible", "run_trial"]

Model = Spec | Task | str
"""What is trained: a spec, a task, or the name of a task."""
ModelOf = Callable[[dict[str, Any]], Model]
"""A function of the parameters of a trial."""
Constraint = Callable[[FrozenTrial], tuple[float]]
"""Tells the bytes beyond the budget; at most 0 if the trial fits."""
EXCESS = "oomguard_excess_bytes"
"""The user attribute and the constraint of a trial: the bytes that it needs beyond the budget; at most 0 if it fits."""
KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "24")
"""oneDNN keeps the last 1024 kernels that it made, and every length and size of a study makes new ones: 18 trials of a
benchmark committed 500 MiB for them. It reads this variable when it makes the first one; a step uses at most 22."""
POLL_SECONDS = 0.05  # between readings of the memory of a trial's process


def feasible(
    trial: BaseTrial,
    model: Model,
    budget: int | str | None = None,
    *,
    device: str = "cpu",
    steps: int | None = None,
    **knobs: Any,
) -> Estimate:
    """Whether a trial fits a budget, by arithmetic: the estimate of the candidate to run it with.

    That is the plain step if it fits, otherwise the fastest of smaller microbatches and segments, which keep the
    gradient. If none fits, `optuna.TrialPruned` says what is missing. `budget` is bytes or text such as "6GiB"
    (default: what is free); what this process holds already is subtracted. Knobs that the objective does not turn are
    fixed by name, for example `segments=1`. A task is traced in a child process, with `steps` time steps; that takes
    seconds. Called before anything is trained, it also lets oneDNN keep fewer kernels (see `KERNELS`).

    >>> import oomguard
    >>> def objective(trial):
    ...     hidden, seq = trial.suggest_int("hidden", 16, 512), trial.suggest_int("seq", 100, 10_000)
    ...     spec = oomguard.Spec(cell="lstm", hidden=hidden, seq=seq, batch=16)
    ...     knobs = feasible(trial, spec, "500MiB", device="rtx-4090").candidate
    ...     return knobs.microbatch  # train with knobs.microbatch and knobs.segments
    >>> optuna.logging.set_verbosity(optuna.logging.ERROR)
    >>> study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    >>> study.optimize(objective, n_trials=3)
    >>> {trial.state.name for trial in study.trials}
    {'PRUNED'}
    """
    os.environ.setdefault(*KERNELS)
    found = fit(model, read_budget(budget), device, steps=steps, **knobs)
    _note(trial, excess_bytes(found))
    if not found.fits:
        raise optuna.TrialPruned(shortage(found))
    return found


def excess_bytes(estimate: Estimate) -> int:
    """The bytes that a candidate needs beyond its budget, with the margin; at least 1 if it cannot run at all."""
    excess = needed_bytes(estimate) - int(estimate.budget_bytes or 0)
    return excess if estimate.fits else max(1, excess)


def _note(trial: BaseTrial, excess: int) -> None:
    trial.set_user_attr(EXCESS, excess)
    with suppress(NotImplementedError, AttributeError):  # a FixedTrial has no constraints
        trial.set_constraint(EXCESS, float(excess))


def constraints_func(
    model_of: ModelOf, budget: int | str | None = None, *, device: str = "cpu", **knobs: Any
) -> Constraint:
    """A constraint for samplers such as `NSGAIISampler(constraints_func=...)`: bytes beyond the budget.

    `model_of` makes a spec or a task of the parameters of a trial. A trial that `feasible` has judged is not estimated
    again. One whose parameters describe no model counts as infeasible.

    >>> def model_of(params):
    ...     return Spec(cell="gru", seq=params["seq"], batch=1)
    >>> of = constraints_func(model_of, "1GiB", device="t4")
    >>> trial = optuna.trial.create_trial(
    ...     value=0.0, params={"seq": 10}, distributions={"seq": optuna.distributions.IntDistribution(1, 10**6)})
    >>> of(trial)[0] < 0
    True
    """
    budget_bytes = read_budget(budget)

    def constraint(trial: FrozenTrial) -> tuple[float]:
        if EXCESS in trial.user_attrs:
            return (float(trial.user_attrs[EXCESS]),)
        try:
            return (float(excess_bytes(fit(model_of(trial.params), budget_bytes, device, **knobs))),)
        except MisuseError:
            return (math.inf,)

    return constraint


class FeasibleSampler(BaseSampler):
    """Wraps a sampler: parameters of which no candidate fits the budget are drawn again, before the trial begins.

    `model_of` makes a spec or a task of the parameters of a trial. `space` has the distributions of the parameters it
    reads; without it, they are learned from finished trials, and the first trials are not checked. If none of `draws`
    draws fits, the one is taken that is least too large: let `feasible` prune it in the objective.

    >>> space = {"seq": optuna.distributions.IntDistribution(10, 10**6, log=True)}
    >>> def model_of(params):
    ...     return Spec(cell="lstm", seq=params["seq"], batch=64)
    >>> sampler = FeasibleSampler(optuna.samplers.RandomSampler(seed=0), model_of, "2GiB", space=space, device="t4")
    >>> study = optuna.create_study(sampler=sampler)
    >>> study.optimize(lambda trial: feasible(trial, model_of({"seq": trial.suggest_int("seq", 10, 10**6, log=True)}),
    ...                                       "2GiB", device="t4").total_bytes, n_trials=8)
    >>> {trial.state.name for trial in study.trials}
    {'COMPLETE'}
    """

    def __init__(
        self,
        sampler: BaseSampler | None,
        model_of: ModelOf,
        budget: int | str | None = None,
        *,
        space: Mapping[str, BaseDistribution] | None = None,
        draws: int = 100,
        device: str = "cpu",
        **knobs: Any,
    ) -> None:
        check_whole("draws", draws, 1, 1_000_000, optional=False)
        self.sampler = TPESampler() if sampler is None else sampler
        self.space = None if space is None else dict(space)
        self.draws, self.redrawn = draws, 0  # `redrawn`: draws that did not fit, so far
        self._budget_bytes, self._device = read_budget(budget), device
        self._constraint = partial(constraints_func, model_of, device=device, here=False, **knobs)
        self._known = IntersectionSearchSpace(include_pruned=True)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All parameters that decide whether a trial fits, so that they are drawn together."""
        return dict(self._known.calculate(study) if self.space is None else self.space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Draw until the parameters fit."""
        if not search_space:
            return {}
        best, least = dict[str, Any](), math.inf
        constraint = self._constraint(budget=left_bytes(self._budget_bytes, self._device))  # once: readings are slow
        for _ in range(self.draws):
            params = self._draw(study, trial, search_space)
            excess = self._excess(constraint, params, search_space)
            if excess <= 0:
                return params
            self.redrawn += 1
            if not best or excess < least:
                best, least = params, excess
        return best

    def _excess(self, constraint: Constraint, params: dict[str, Any], space: dict[str, BaseDistribution]) -> float:
        """The bytes beyond the budget; 0 if parameters that were learned so far do not suffice to tell."""
        try:
            trial = optuna.trial.create_trial(state=TrialState.RUNNING, params=params, distributions=space)
            return constraint(trial)[0]
        except KeyError:
            if self.space is not None:
                raise
            return 0.0

    def _draw(self, study: Study, trial: FrozenTrial, space: dict[str, BaseDistribution]) -> dict[str, Any]:
        together = self.sampler.infer_relative_search_space(study, trial)
        together = {name: kind for name, kind in together.items() if name in space}
        params = dict(self.sampler.sample_relative(study, trial, together)) if together else {}
        for name in (name for name in space if name not in params):
            params[name] = self.sampler.sample_independent(study, trial, name, space[name])
        return {name: params[name] for name in space}

    def sample_independent(self, study: Study, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        """A parameter that does not decide whether a trial fits."""
        return self.sampler.sample_independent(study, trial, name, distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Tell the wrapped sampler."""
        self.sampler.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        """Tell the wrapped sampler."""
        self.sampler.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        """Reseed the wrapped sampler."""
        self.sampler.reseed_rng()


# ---- an objective in a process of its own


def run_trial(
    objective: Callable[[Any], Any],
    trial: BaseTrial,
    budget: int | str | None = None,
    *,
    device: str = "cpu",
    timeout: float | str | None = None,
) -> Any:
    """Run an objective in a process of its own within a budget, and return its value.

    Use it in the objective of the study: `study.optimize(lambda trial: run_trial(objective, trial, "6GiB"))`. The trial
    that the objective gets there suggests, reports and prunes as usual: each call is answered by this process.

    If memory runs out, or the process grows over the budget, the trial is pruned. If the process crashes or is killed,
    or takes longer than `timeout`, the value is NaN, with which Optuna marks the trial as failed. In both cases the
    study goes on, and the user attribute `oomguard_verdict` says what happened. Other errors of the objective are
    raised here. The objective is sent by cloudpickle, so it may be defined in a script or a notebook.

    >>> def objective(trial):
    ...     size = trial.suggest_categorical("mebibytes", [1, 4000])
    ...     return len(bytearray(size << 20))
    >>> study = optuna.create_study(sampler=optuna.samplers.GridSampler({"mebibytes": [1, 4000]}))
    >>> study.optimize(lambda trial: run_trial(objective, trial, "1GiB"))
    >>> sorted(trial.state.name for trial in study.trials)
    ['COMPLETE', 'PRUNED']
    """
    budget_bytes = read_budget(budget) or find_budget(device).left_bytes
    seconds = None if timeout is None else parse_seconds(timeout, "timeout")
    try:
        content = cloudpickle.dumps(objective)
    except Exception as error:
        got, advice = f"it cannot be pickled ({str(error)[:200]})", "Open files and connections inside of it."
        raise MisuseError(rule="The objective is sent to a process of its own", got=got, advice=advice) from None
    with Elsewhere() as child, _Watch(child, budget_bytes if device == "cpu" else None) as watch:
        try:
            answer = partial(_answer, trial)
            return child.call(__name__, "_run", content, device, budget_bytes, seconds=seconds, news=answer)
        except MemoryError as error:
            verdict, message = Verdict.OOM, str(error)
        except TimeoutError:
            verdict, message = Verdict.TIMEOUT, f"It was not done after {timeout}."
        except ChildProcessError as error:
            over = watch.reached_bytes
            verdict = Verdict.OVER if over else Verdict.KILLED if "exit code -9" in str(error) else Verdict.CRASHED
            message = f"It grew to {format_bytes(over)} of {format_bytes(budget_bytes)}." if over else str(error)
    trial.set_user_attr("oomguard_verdict", verdict.name)
    trial.set_user_attr("oomguard_message", message)
    if verdict in (Verdict.OOM, Verdict.OVER):
        _note(trial, max(1, watch.reached_bytes - budget_bytes))
        raise optuna.TrialPruned(f"{verdict.name}: {message}")
    return math.nan


class _Watch(threading.Thread):
    """Ends a child that grows over its budget: Linux has no limit of resident bytes."""

    def __init__(self, child: Elsewhere, budget_bytes: int | None) -> None:
        super().__init__(daemon=True)
        self.child, self.budget_bytes, self.reached_bytes = child, budget_bytes, 0
        self._done = threading.Event()

    def run(self) -> None:
        """Look until the end."""
        while self.budget_bytes is not None and not self._done.wait(POLL_SECONDS):
            now = read_status(self.child.pid)
            if now is not None and now.resident_bytes > self.budget_bytes:
                self.reached_bytes = now.resident_bytes
                self.child.kill()
                return

    def __enter__(self) -> "_Watch":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()


METHODS = (
    *("suggest_float", "suggest_int", "suggest_categorical"),
    *("report", "should_prune", "set_user_attr", "set_constraint"),
)
VALUES = ("number", "params", "distributions", "user_attrs", "datetime_start", "relative_params")


def _answer(trial: BaseTrial, question: tuple[str, tuple[Any, ...], dict[str, Any]]) -> tuple[Any, Exception | None]:
    """What the trial returns or raises for a call in the child."""
    name, arguments, named = question
    try:
        found = getattr(trial, name)
        return (found(*arguments, **named) if name in METHODS else found), None
    except Exception as error:
        return None, error


class ChildTrial:
    """The trial that an objective gets in its own process: everything is asked of the process of the study."""

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            return lambda *arguments, **named: self._ask(name, arguments, named)
        if name in VALUES:
            return self._ask(name, (), {})
        known = ", ".join((*METHODS, *VALUES))
        raise AttributeError(f"A trial in a process of its own has no {shown(name)}. It has {known}.")

    def _ask(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        value, error = ask_parent((name, arguments, named))
        if error is not None:
            raise error
        return value


def _run(content: bytes, device: str, budget_bytes: int) -> Any:
    """In the child: run the objective within the budget. A lack of memory becomes a MemoryError."""
    here = open_device(device)
    try:
        objective = cloudpickle.loads(content)
        here.enforce(budget_bytes)
        return objective(ChildTrial())
    except Exception as error:
        here.unlimit()  # the message needs memory too
        if judge(error) is Verdict.OOM:
            words = str(error).strip().partition("\n")[0][:300] or type(error).__name__
            raise MemoryError(words) from None
        raise
