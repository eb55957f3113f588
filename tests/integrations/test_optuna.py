"""Optuna studies do not run out of memory: trials are judged before they are built, or run in other processes."""

import os
import threading
import time
from typing import Any

import optuna
import pytest
import torch
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import GridSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import FixedTrial, Trial

from oomguard import MisuseError, Spec, Task
from oomguard._device.cpu import Cpu
from oomguard.integrations.optuna import EXCESS, FeasibleSampler, constraints_func, feasible, run_trial

pytestmark = pytest.mark.timeout(300)
SPACE: dict[str, BaseDistribution] = {
    "hidden": IntDistribution(8, 2048, log=True),
    "seq": IntDistribution(10, 1_000_000, log=True),
}
CARD, BUDGET = "t4", "1GiB"


@pytest.fixture(autouse=True)
def quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def spec_of(params: dict[str, Any]) -> Spec:
    return Spec(cell="lstm", batch=16, **params)


def suggested(trial: Any) -> dict[str, Any]:
    ranges = {name: kind for name, kind in SPACE.items() if isinstance(kind, IntDistribution)}
    return {name: trial.suggest_int(name, kind.low, kind.high, log=True) for name, kind in ranges.items()}


def trial_of(**params: int) -> optuna.trial.FrozenTrial:
    return optuna.trial.create_trial(value=0.0, params=params, distributions=SPACE)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = torch.nn.GRU(4, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.rnn(x)[0]
        return outputs


TASK = Task(
    model=Model,
    loss=lambda model, batch: model(batch).square().mean(),
    batch=lambda rows, steps: torch.randn(steps, rows, 4),
)


# ---- feasible


def test_what_fits_runs_as_it_is() -> None:
    found = feasible(FixedTrial({}), spec_of({"hidden": 8, "seq": 10}), BUDGET, device=CARD)
    assert (found.candidate.microbatch, found.candidate.segments) == (16, 1)


def test_what_fits_in_pieces_gets_the_knobs_for_that() -> None:
    spec = spec_of({"hidden": 256, "seq": 20_000})
    found = feasible(FixedTrial({}), spec, BUDGET, device=CARD)
    assert found.fits
    assert found.candidate.microbatch < 16 or found.candidate.segments > 1
    alone = feasible(FixedTrial({}), spec, "2GiB", device=CARD, segments=1).candidate
    assert alone.segments == 1
    assert alone.microbatch < 16


def test_a_trial_that_does_not_fit_is_pruned_with_the_figures() -> None:
    study = optuna.create_study(sampler=RandomSampler(seed=0))

    def objective(trial: Trial) -> float:
        feasible(trial, spec_of({"hidden": 2048, "seq": 1_000_000}), "300MiB", device=CARD)
        raise AssertionError("it fits")

    study.optimize(objective, n_trials=1)
    (trial,) = study.trials
    assert trial.state.name == "PRUNED"
    assert trial.user_attrs[EXCESS] > 0
    assert trial.constraints[EXCESS] == trial.user_attrs[EXCESS]
    with pytest.raises(optuna.TrialPruned, match=r"smallest candidate \(microbatch 1, .* needs .* of 300.00 MiB"):
        feasible(FixedTrial({}), spec_of({"hidden": 2048, "seq": 1_000_000}), "300MiB", device=CARD)


def test_what_this_process_holds_is_not_promised_to_the_model() -> None:
    spec, now_bytes = spec_of({"hidden": 64, "seq": 1000}), Cpu().reading().now_bytes
    budget, held = now_bytes + (600 << 20), torch.ones(300 << 18)  # 300 MiB
    with_held = feasible(FixedTrial({}), spec, budget).budget_bytes
    del held
    assert feasible(FixedTrial({}), spec, budget).budget_bytes - with_held > 100 << 20  # type: ignore[operator]


def test_a_task_is_traced() -> None:
    plain = feasible(FixedTrial({}), TASK, "6GiB", device=CARD, steps=500)
    assert (plain.candidate.microbatch, plain.candidate.segments, plain.fits) == (32, 1, True)
    pieces = feasible(FixedTrial({}), TASK, "600MiB", device=CARD, steps=20_000).candidate
    assert (pieces.microbatch < 32) or (pieces.segments > 1)
    with pytest.raises(optuna.TrialPruned):
        feasible(FixedTrial({}), TASK, "1MiB", device=CARD, steps=20_000)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"budget": "6"}, "Did you mean 6GiB"),
        ({"model": 7}, "Only a Spec or a Task"),
        ({"steps": 5}, "A Spec has its own length"),
        ({"segmens": 4}, "Did you mean 'segments'"),
        ({"device": "nothing"}, "nothing"),
    ],
)
def test_misuse_is_told(arguments: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"model": spec_of({"hidden": 8, "seq": 10}), "budget": BUDGET} | arguments
    with pytest.raises(MisuseError, match=words):
        feasible(FixedTrial({}), **given)


def test_what_no_kernel_can_run_is_pruned_too() -> None:
    with pytest.raises(optuna.TrialPruned, match="cudnn cannot run 100,000 steps at once"):
        feasible(FixedTrial({}), spec_of({"hidden": 8, "seq": 100_000}), "14GiB", device=CARD, segments=1)


# ---- sampling


@pytest.mark.parametrize("sampler", [RandomSampler(seed=1), TPESampler(seed=1), None], ids=["random", "tpe", "usual"])
def test_the_wrapped_sampler_draws_only_what_fits(sampler: Any) -> None:
    wrapped = FeasibleSampler(sampler, spec_of, BUDGET, space=SPACE, device=CARD, segments=1)
    study = optuna.create_study(sampler=wrapped)
    study.optimize(
        lambda trial: float(feasible(trial, spec_of(suggested(trial)), BUDGET, device=CARD, segments=1).total_bytes),
        n_trials=25,
    )
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}
    assert wrapped.redrawn > 0
    assert all(SPACE[name]._contains(value) for trial in study.trials for name, value in trial.params.items())


def test_without_a_space_it_is_learned_from_the_first_trials() -> None:
    wrapped = FeasibleSampler(RandomSampler(seed=3), spec_of, BUDGET, device=CARD, segments=1)
    study = optuna.create_study(sampler=wrapped)
    study.optimize(
        lambda trial: float(feasible(trial, spec_of(suggested(trial)), BUDGET, device=CARD, segments=1).total_bytes),
        n_trials=15,
    )
    states = [trial.state.name for trial in study.trials]
    assert states[2:] == ["COMPLETE"] * 13


def test_other_parameters_are_left_to_the_sampler() -> None:
    wrapped = FeasibleSampler(RandomSampler(seed=0), spec_of, BUDGET, space=SPACE, device=CARD)
    study = optuna.create_study(sampler=wrapped)
    study.optimize(lambda trial: trial.suggest_float("lr", 0, 1) + 0 * suggested(trial)["seq"], n_trials=5)
    assert len({trial.params["lr"] for trial in study.trials}) == 5


def test_if_no_draw_fits_the_least_too_large_is_taken() -> None:
    space: dict[str, BaseDistribution] = {
        "hidden": CategoricalDistribution((2048, 512)),
        "seq": CategoricalDistribution((1_000_000, 100_000)),
    }
    wrapped = FeasibleSampler(RandomSampler(seed=0), spec_of, "200MiB", space=space, draws=40, device=CARD, segments=1)
    trial = optuna.create_study(sampler=wrapped).ask(space)
    assert trial.params == {"hidden": 512, "seq": 100_000}
    assert wrapped.redrawn == 40


def test_parameters_that_describe_no_model_are_drawn_again() -> None:
    space: dict[str, BaseDistribution] = {"hidden": IntDistribution(8, 16), "seq": IntDistribution(-5, 5)}
    wrapped = FeasibleSampler(RandomSampler(seed=0), spec_of, BUDGET, space=space, device=CARD)
    study = optuna.create_study(sampler=wrapped)
    assert all(study.ask(space).params["seq"] >= 1 for _ in range(8))


def test_an_error_in_the_function_of_parameters_is_raised() -> None:
    def broken(params: dict[str, Any]) -> Spec:
        return spec_of({"hidden": params["hiden"]})

    wrapped = FeasibleSampler(RandomSampler(seed=0), broken, BUDGET, space=SPACE, device=CARD)
    with pytest.raises(KeyError, match="hiden"):
        optuna.create_study(sampler=wrapped).ask(SPACE)


def test_a_constraint_tells_by_how_many_bytes_a_trial_is_too_large() -> None:
    of = constraints_func(spec_of, BUDGET, device=CARD, segments=1)
    (small,), (large,) = of(trial_of(hidden=8, seq=10)), of(trial_of(hidden=2048, seq=1_000_000))
    assert small < 0 < large
    assert of(trial_of(hidden=8, seq=10)) == (small,)


def test_a_sampler_with_constraints_takes_it() -> None:
    of = constraints_func(spec_of, BUDGET, device=CARD, segments=1)
    with pytest.warns(FutureWarning, match="constraints_func"):
        sampler = NSGAIISampler(seed=0, population_size=4, constraints_func=of)
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=sampler)
    study.optimize(lambda trial: (1.0, float(suggested(trial)["hidden"])), n_trials=12)
    best = study.best_trials
    assert best
    assert all(of(trial)[0] <= 0 for trial in best)


# ---- trials in processes of their own


def fails(kind: str) -> Any:
    if kind == "oom":
        return torch.ones(1 << 34)
    if kind == "over":
        kept = []
        while True:
            kept.append(torch.ones(1 << 20))
    if kind == "killed":
        os.kill(os.getpid(), 9)
    if kind == "crash":
        import ctypes

        ctypes.string_at(0)
    if kind == "late":
        time.sleep(100)
    if kind == "pruned":
        raise optuna.TrialPruned("by the objective")
    return None


def objective(trial: Any) -> Any:
    kind = trial.suggest_categorical("kind", ["oom", "over", "killed", "crash", "late", "pruned", "done"])
    trial.report(0.5, 0)
    trial.set_user_attr("pid", os.getpid())
    fails(kind)
    return trial.suggest_float("x", 0, 1) + trial.number


def test_whatever_happens_to_a_trial_the_study_goes_on() -> None:
    kinds = ["oom", "over", "killed", "crash", "late", "pruned", "done"]
    study = optuna.create_study(sampler=GridSampler({"kind": kinds, "x": [0.25]}, seed=0))

    def within_a_time(trial: Trial) -> Any:
        kind = trial.suggest_categorical("kind", kinds)
        return run_trial(objective, trial, "800MiB", timeout=7 if kind == "late" else 60)

    study.optimize(within_a_time)
    ended = {trial.params["kind"]: trial for trial in study.trials}
    states = {kind: trial.state.name for kind, trial in ended.items()}
    assert states == dict.fromkeys(["oom", "over", "pruned"], "PRUNED") | dict.fromkeys(
        ["killed", "crash", "late"], "FAIL"
    ) | {"done": "COMPLETE"}
    verdicts = {kind: trial.user_attrs.get("oomguard_verdict") for kind, trial in ended.items()}
    expected = {"oom": "OOM", "over": "OVER", "killed": "KILLED", "crash": "CRASHED", "late": "TIMEOUT"}
    assert verdicts == expected | {"pruned": None, "done": None}
    assert ended["done"].value == 0.25 + ended["done"].number
    assert all(trial.user_attrs["pid"] != os.getpid() for trial in ended.values())
    assert ended["over"].constraints[EXCESS] > 0
    assert all(trial.intermediate_values == {0: 0.5} for trial in ended.values())


def test_an_error_of_the_objective_is_raised() -> None:
    study = optuna.create_study()
    with pytest.raises(ZeroDivisionError):
        study.optimize(lambda trial: run_trial(lambda trial: 1 / 0, trial, "800MiB"), n_trials=1)


def test_the_trial_of_a_child_says_what_it_has() -> None:
    study = optuna.create_study()
    with pytest.raises(AttributeError, match=r"has no 'study'\. It has suggest_float"):
        study.optimize(lambda trial: run_trial(lambda trial: trial.study, trial, "800MiB"), n_trials=1)


def test_a_pruner_sees_what_a_child_reports() -> None:
    def reporting(trial: Any) -> float:
        for step in range(5):
            trial.report(float(trial.number), step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return float(trial.number)

    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=0.5))
    study.optimize(lambda trial: run_trial(reporting, trial, "800MiB"), n_trials=2)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]


def test_what_cannot_be_sent_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(MisuseError, match="Open files and connections inside"):
        run_trial(lambda trial: float(lock.locked()), FixedTrial({}), "800MiB")


def test_several_objectives_fail_as_one() -> None:
    study = optuna.create_study(directions=["minimize", "minimize"])
    study.optimize(lambda trial: run_trial(lambda trial: fails("killed"), trial, "800MiB"), n_trials=1)
    assert [trial.state.name for trial in study.trials] == ["FAIL"]
