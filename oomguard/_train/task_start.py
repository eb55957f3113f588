"""Starts the training of a task: finds its plan and its run, and checks that they belong to the task."""

import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomguard._core.errors import MisuseError, check_names, check_whole, flag, shown
from oomguard._core.units import format_bytes, read_budget
from oomguard._data.options import DataOptions
from oomguard._plan.store import load_plan, save_plan
from oomguard._plan.task import TaskQuestion, find_task_plan
from oomguard._plan.task_value import TaskPlan
from oomguard._plan.value import Plan
from oomguard._spec.spec import MAX_SEQ
from oomguard._task.task import NAME, Task, goes_by, name_of, resolve
from oomguard._train import TrainOptions
from oomguard._train.checkpoint import Model
from oomguard._train.loop import TaskResult, TrainProgress
from oomguard._train.settings import settle_task
from oomguard._train.start import check_environment, find_start, run_from, run_training

if TYPE_CHECKING:
    from oomguard._train.ranks import Ranks

PLANNING = ("budget", "device", "batch", "seq")
"""Options for the plan of a task that has none. With a plan, they must say what it says."""
_OF_SPECS = {*DataOptions.__struct_fields__} - {"seed"}
_INSTEAD = {"lr": "optimizer", "validation": "validation"} | dict.fromkeys(
    ("schedule", "warmup", "decay_every", "decay"), "scheduler"
)
"""Options of the model of a spec, and the part of a task that has their place."""


def start_training(
    plan: Plan | TaskPlan | None,
    data: Any,
    model: Model,
    options: dict[str, Any],
    progress: Callable[[TrainProgress], None] | None,
) -> TaskResult:
    """Train the model of a spec, or a task."""
    if isinstance(plan, Plan):
        return run_training(plan, data, options, model, progress)
    return run_task_training(plan, data, options, progress)


def run_task_training(
    plan: TaskPlan | None,
    task: Task | str,
    options: Mapping[str, Any],
    progress: Callable[[TrainProgress], None] | None = None,
) -> TaskResult:
    """Train a task by its plan; without one, plan it first, or take the plan of the run that is resumed."""
    asked = _read(options)
    if not isinstance(task, Task) and not (isinstance(task, str) and NAME.fullmatch(task)):
        advice = "Give the Task, or its name package.module:task, in the place of data; on the command line --model."
        raise MisuseError(rule="The plan of a task is trained with the task", got=f"got {shown(task)}", advice=advice)
    name = plan.task if plan is not None else name_of(task)
    directory = run_directory(name, asked)
    checkpoint = find_start(directory, resume=asked.resume)
    settings = settle_task(name, directory, options)
    train_options = settings.train
    known = resolve(task) if isinstance(task, str) else task
    if plan is None:
        _check_options(known, train_options)  # before a search
        plan = plan_of_run(task, options)[0]
    _check_planned(plan, options)

    def is_named(name: str) -> bool:
        return name == task or goes_by(known, name)

    if not is_named(plan.task):
        raise MisuseError(
            rule="A plan is trained with its own task",
            got=f"it is for {plan.task}, and the task is {name_of(task)}",
            advice=f"Give {plan.task} by its name, or make a plan for this task.",
        )
    _check_options(known, train_options)
    check_environment(plan)
    from oomguard._train.plans import join_plans
    from oomguard._train.ranks import join
    from oomguard._train.task import TaskConfig, make_trainer

    began = None if checkpoint is None else checkpoint.state.task or None
    with join(plan.where.device, sparse=False) as alike:
        ranks, plan = join_plans(alike, plan, train_options)
        ranks.agree([0])  # no process writes a checkpoint before all have looked for one
        _warn_of_shares(plan, ranks)
        config = TaskConfig(
            plan=plan,
            options=train_options,
            directory=directory,
            ranks=ranks,
            progress=progress,
            task=known,
            name=began if began is not None and is_named(began) else plan.task,
            settings=settings,
        )
        return run_from(config, checkpoint, make_trainer)


def _warn_of_shares(plan: TaskPlan, ranks: "Ranks") -> None:
    """Warn if shares of a batch are not known to add up to its gradient."""
    exact = plan.fallbacks or plan.candidate.accumulation > 1 or plan.batch == 1
    if ranks.world > 1 and ranks.first and not exact:
        warnings.warn(
            "Each process computes its share of the batch, and parts of a batch are not known to add up to the "
            f"gradient of the task {plan.task}. Train it in one process if that matters.",
            stacklevel=4,
        )


def run_directory(name: str, options: TrainOptions) -> Path:
    """The directory of the run of a task."""
    return Path(options.run or f"runs/{re.sub(r'[^A-Za-z0-9_.]+', '-', name).strip('-')}")


def plan_of_run(task: Task | str, options: Mapping[str, Any]) -> tuple[TaskPlan, Path]:
    """The plan of the run that is resumed, or a new one, and its file in the directory of the run."""
    train_options = _read(options)
    directory = run_directory(name_of(task), train_options)
    path = directory / "plan.json"
    if find_start(directory, resume=train_options.resume) is not None or (train_options.resume and path.exists()):
        plan = load_plan(path)
        if isinstance(plan, TaskPlan):
            return plan, path
        advice = "Give another --run."
        raise MisuseError(
            rule="A run continues with its own task", got=f"{directory} is a run of a spec", advice=advice
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        advice = "Make it first with oomguard plan, and give it to each process: oomguard train plan.json."
        raise MisuseError(rule="Several processes train by one plan", got="there is none yet", advice=advice)
    check_whole("seq", options.get("seq"), 1, MAX_SEQ)
    question = TaskQuestion(
        task=task,
        device=options.get("device") or "cpu",
        budget_bytes=read_budget(options.get("budget")),
        batch=options.get("batch"),
        steps=options.get("seq"),
    )
    plan = find_task_plan(question)
    return plan, save_plan(plan, path)


def _read(options: Mapping[str, Any]) -> TrainOptions:
    """The options of the training that are given."""
    for name in options:
        if name in _INSTEAD or name in _OF_SPECS:
            part = _INSTEAD.get(name)
            rule = f"{flag(name)} is for the model of a spec"
            advice = "Leave it out." if part is None else f"Give the task {part}= instead."
            raise MisuseError(rule=rule, got="this is a task", advice=advice)
    check_names("option", options, (*TrainOptions.__struct_fields__, "seed", *PLANNING))
    given = {name: value for name, value in options.items() if name in TrainOptions.__struct_fields__}
    return TrainOptions(**given)


def _check_planned(plan: TaskPlan, options: Mapping[str, Any]) -> None:
    """Raise if options for a plan do not agree with the one that there is."""
    asked_bytes = plan.asked_budget_bytes
    budget = None if asked_bytes is None else format_bytes(asked_bytes)
    planned = {"budget": budget, "device": plan.where.device, "batch": plan.batch, "seq": plan.seq}
    for name in PLANNING:
        value = options.get(name)
        same = read_budget(value) == asked_bytes if name == "budget" else value == planned[name]
        if value is not None and not same:
            raise MisuseError(
                rule=f"A plan has its own {name}",
                got=f"that is {planned[name] or 'not set'}, and {flag(name)} is {shown(value)}",
                advice=f"Leave {flag(name)} out, or make another plan.",
            )


def _check_options(task: Task, options: TrainOptions) -> None:
    for name in ("patience", "validate_every"):
        if getattr(options, name) is not None and task.validation is None:
            got, advice = "the task has none", f"Leave {flag(name)} out, or give the task validation=."
            raise MisuseError(rule=f"{flag(name)} needs data for validation", got=got, advice=advice)
    if task.batch is not None and (options.steps is None or options.epochs is not None):
        got, advice = "its batches have no end", "Give --steps instead of --epochs."
        raise MisuseError(rule="A task with batch= is trained for a number of steps", got=got, advice=advice)
