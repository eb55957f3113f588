"""Training and what follows it. Packages are imported when they are needed."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from oomguard._api.arguments import (
    DataFields,
    ResumeFields,
    TrainArguments,
    TrainCall,
    takes,
)
from oomguard._core.errors import MisuseError, check_choice, check_names, conflict, flag, shown
from oomguard._core.progress import tell
from oomguard._data.options import DataOptions
from oomguard._report.progress import following, showing, train_statuses
from oomguard._report.screens import in_notebook
from oomguard._task.task import Task
from oomguard._train import TrainOptions
from oomguard._train.apart import is_apart, packed, train_apart
from oomguard._train.plans import PlanOrPath, own_plan, plans_of
from oomguard._train.settings import settle

if TYPE_CHECKING:
    from torch import nn

    Model = TypeVar("Model", bound=nn.Module)

    from oomguard._guard import Guard
    from oomguard._plan.task_value import TaskPlan
    from oomguard._plan.value import Plan
    from oomguard._train.loop import Result, TaskResult, TrainProgress


def guard(
    plan: "Plan | TaskPlan | None" = None,
    *,
    budget: int | str | None = None,
    microbatch: int | None = None,
    device: str | None = None,
    events: str | None = None,
) -> "Guard":
    """Keep your own training loop within memory: `with oomguard.guard(plan) as guard`. `Guard` has an example.

    Without a plan, `budget` is bytes or text such as "6GiB" (default: the free memory). Then a step starts with the
    whole batch, or with `microbatch` sequences in a pass, and every fallback halves them. `device` is that of the plan,
    or `cpu`, unless it is given. `events` is a file to which every change is appended as JSON.

    >>> import oomguard
    >>> plan = oomguard.find_feasible_config(cell="gru", seq=8, hidden=8, batch=4, device="t4")
    >>> with guard(plan, device="cpu") as kept:
    ...     kept.rung, kept.rows
    (0, 4)
    >>> with guard(budget="6GiB", microbatch=12) as kept:
    ...     [rung.candidate.microbatch for rung in kept.ladder]
    [12, 6, 3, 2, 1]
    """
    from oomguard._guard import make_guard

    return make_guard(plan, budget, microbatch, device, events)


@overload
def train(
    plan: "TaskPlan | str | os.PathLike[str] | Sequence[PlanOrPath] | None",
    data: Task,
    model: None = None,
    **options: Unpack[TrainCall],
) -> "TaskResult": ...


@overload
def train(plan: "TaskPlan | None", data: str, model: None = None, **options: Unpack[TrainCall]) -> "TaskResult": ...


@overload
def train(
    plan: "Plan | str | os.PathLike[str] | Sequence[PlanOrPath]",
    data: Any = None,
    model: Callable[..., Any] | str | None = None,
    **options: Unpack[TrainCall],
) -> "Result": ...


@takes(TrainOptions, DataOptions)
def train(
    plan: "PlanOrPath | Sequence[PlanOrPath] | None",
    data: Any = None,
    model: Callable[..., Any] | str | None = None,
    *,
    progress: "Callable[[TrainProgress], None] | bool" = True,
    isolate: bool | None = None,
    **options: Unpack[TrainArguments],
) -> "TaskResult":
    """Train a plan, or the plan in a file, on data: a path, an array, a DataFrame, a Dataset, or pairs.

    Without data, it is that of the plan or of the run that is resumed, read in the same way; options change that.
    Options are the fields of `TrainOptions` (`epochs`, `steps`, `lr`, `run`, `resume`, ...) and of `DataOptions`
    (`target`, `validation`, `seed`, ...). `progress` shows how far the training is; a function takes a `TrainProgress`
    after every step instead. Raises `GuardError` if memory runs out on the last fallback.

    With `isolate`, the training runs in a process of its own, which starts with the settings of the heap that the plan
    was made for: then it peaks where the plan says. The result is the same. It is the default in notebooks.

    Of several plans, each of the processes that torchrun has started takes the one for its card, or else the one with
    its number. It then takes rows of every batch in proportion to its speed.

    A `Task`, or its name "package.module:task", takes the place of data. It has its own optimizer, scheduler and
    validation data, so options are `seed` and those of `TrainOptions` without the learning rate. If plan is None, the
    task is planned first, for `budget`, `device`, `batch` and `seq`.

    >>> import numpy as np, oomguard, tempfile, warnings
    >>> plan = oomguard.find_feasible_config(cell="gru", seq=8, features=2, hidden=8, batch=4, threads=1, max_probes=1)
    >>> numbers = np.random.default_rng(0).normal(size=(40, 8, 3)).astype(np.float32)
    >>> with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
    ...     result = train(plan, numbers, epochs=2, validation=0, run=directory)
    >>> result.steps, result.ended
    (20, 'done')
    """
    given: dict[str, Any] = {**options}
    from oomguard._plan.task_value import TaskPlan

    loaded = None if plan is None else own_plan(plan)
    if loaded is None or isinstance(loaded, TaskPlan):
        if model is not None:
            raise conflict("A task has its own model", "a task", "model")
    else:
        _check_training(loaded, data, model, given)
    with following(progress, train_statuses()) as follow:
        tell("Starting PyTorch")
        if loaded is None and (isolate or (isolate is None and in_notebook())):
            from oomguard._train.task_start import plan_of_run

            loaded, _ = plan_of_run(data, given)
        if loaded is not None and is_apart(loaded, isolate, in_notebook()):
            with packed(loaded, data, model, given, required=isolate is True) as content:
                if content is not None:
                    result: TaskResult = train_apart(loaded, content, follow)
                    return result
        from oomguard._train.task_start import start_training

        return start_training(loaded, data, model, given, follow)


def _check_training(plan: object, data: Any, model: Callable[..., Any] | str | None, options: dict[str, Any]) -> None:
    """Raise if the model of a spec cannot be trained in this way, before PyTorch is imported."""
    from oomguard._plan.value import Plan

    check_names("option", options, [*TrainOptions.__struct_fields__, *DataOptions.__struct_fields__])
    if isinstance(data, Task):
        rule, advice = "A task is trained with the plan of a task", "Make one: oomguard.find_feasible_config(task)."
        raise MisuseError(rule=rule, got="this plan is for a spec", advice=advice)
    if not isinstance(plan, Plan):
        raise MisuseError(
            rule="train takes a plan or the path of a plan file",
            got=f"got {shown(plan)}",
            advice="Give what find_feasible_config or load_plan returns, or the path of plan.json.",
        )
    settle(plan, data, model if isinstance(model, str) else None, options)


@takes()
def resume(
    run: str | os.PathLike[str],
    data: Any = None,
    model: Callable[..., Any] | str | None = None,
    *,
    progress: "Callable[[TrainProgress], None] | bool" = True,
    isolate: bool | None = None,
    **options: Unpack[ResumeFields],
) -> "Result":
    """Go on with a run from its newest checkpoint, with its own plan, data and options.

    `options` change those of the run, such as `epochs`. Data that was in memory has to be given again.

    >>> import numpy as np, oomguard, tempfile, warnings
    >>> plan = oomguard.find_feasible_config(cell="gru", seq=8, features=2, hidden=8, batch=4, threads=1, max_probes=1)
    >>> numbers = np.random.default_rng(0).normal(size=(40, 8, 3)).astype(np.float32)
    >>> with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
    ...     result = train(plan, numbers, steps=2, run=directory)
    ...     resume(directory, numbers, steps=5).steps
    5
    """
    given: dict[str, Any] = {**options}
    given |= {"run": os.fspath(run), "resume": True}
    return train(plans_of(run), data, model, progress=progress, isolate=isolate, **given)


@takes()
def predict(
    run: str | os.PathLike[str],
    data: Any = None,
    *,
    prompt: str | None = None,
    length: int | None = None,
    temperature: float | None = None,
    output: str | None = None,
    probabilities: bool = False,
    device: str | None = None,
    model: Callable[..., Any] | str | None = None,
    precision: Literal["int8"] | None = None,
    progress: bool = True,
    **options: Unpack[DataFields],
) -> Any:
    """Predict every sequence of some data with the model of a run: the best by validation, otherwise the last.

    The data (default: that of the training) must have the form of the training data. It is read with the options of the
    training, unless `options` (fields of `DataOptions`) change them. Numbers are in the units of the targets; for
    classes the result is the likeliest, or the `probabilities` of all. With `output` (.npy or .csv) predictions are
    streamed to that file and its path is returned; otherwise they are an array, padded with NaN or -100. A CSV has the
    names of columns and classes. A model of your own is found by the name of its function, unless `model` gives it.

    With `precision` "int8", the weights of recurrent layers and head have 8 bits (LSTM and GRU, on the CPU). The
    progress says what that changes: size, speed and validation loss.

    The run of a `Task` is predicted with the task, or its name, in the place of data: its `predict` gets the samples of
    its data in order, in the microbatches of the plan, without gradients. The result is a list of what it returned, or
    a file: .npy if that is one tensor with a row for each sample, .pt (`torch.load`) for anything else.

    A model of text goes on with a `prompt` instead of data: the result is the prompt and `length` characters (or bytes,
    default 200), drawn one by one by `seed` with a `temperature` (default 1; 0: always the likeliest). The state of the
    model is carried from one to the next.

    >>> import numpy as np, oomguard, tempfile, warnings
    >>> plan = oomguard.find_feasible_config(cell="gru", seq=8, features=2, hidden=8, batch=4, threads=1, max_probes=1)
    >>> numbers = np.random.default_rng(0).normal(size=(40, 8, 3)).astype(np.float32)
    >>> with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
    ...     result = train(plan, numbers, validation=0, run=directory)
    ...     predict(directory, numbers[:5]).shape
    (5, 8, 1)
    """
    given: dict[str, Any] = {**options}
    if precision is not None:
        check_choice("precision", precision, ("int8",))
    drawn = {"prompt": prompt, "length": length, "temperature": temperature}
    if asked := {name: value for name, value in drawn.items() if value is not None}:
        if precision is not None:
            raise conflict("A text is drawn in the precision of the training", "--prompt", "--precision")
        return _predict_text(run, asked | given, data, output, probabilities, device, model)
    from oomguard._train.settings import check_predicted, is_task_run

    check_names("option", given, DataOptions.__struct_fields__)
    if is_task_run(run):
        for name in (*given, *(["probabilities"] * probabilities), *(["precision"] * (precision is not None))):
            rule, advice = f"{flag(name)} is for the run of a spec", "Leave it out."
            raise MisuseError(rule=rule, got=f"{run} is the run of a task", advice=advice)
        with showing(progress):
            tell("Starting PyTorch")
            from oomguard._train.task_predict import run_task_prediction

            return run_task_prediction(run, model if data is None else data, output=output, device=device)  # type: ignore[arg-type]
    if isinstance(data, Task):
        advice = "Give the run of a task, or data."
        raise MisuseError(rule="A task is predicted with its own run", got=f"{run} is none", advice=advice)
    check_predicted(Path(run), data, output, given)
    with showing(progress):
        tell("Starting PyTorch")
        from oomguard._train.evaluate import run_prediction

        more: dict[str, Any] = {"output": output, "probabilities": probabilities, "device": device, "model": model}
        more["precision"] = precision
        return run_prediction(run, data, given, **more)


def _predict_text(
    run: str | os.PathLike[str],
    given: dict[str, Any],
    data: Any,
    output: str | None,
    probabilities: bool,
    device: str | None,
    model: Callable[..., Any] | str | None,
) -> str:
    from pathlib import Path

    from oomguard._train.settings import check_run, read_request

    others = {"data": data, "output": output, "probabilities": probabilities or None}
    request = read_request({"prompt": None} | given | {name: v for name, v in others.items() if v is not None})
    check_run(Path(run))
    from oomguard._train.text import run_text

    return run_text(Path(run), request, device=device, model=model)


def load_weights(run: str | os.PathLike[str], model: "Model") -> "Model":
    """Give a model the weights of a run, the best by validation or else the last, and return it.

    The model is one that was built as that of the training. Its weights stay on the device where they are.

    >>> import oomguard, tempfile, torch, warnings
    >>> task = Task(model=lambda: torch.nn.GRU(3, 4), loss=lambda model, batch: model(batch)[0].mean(),
    ...             batch=lambda rows, steps: torch.randn(steps, rows, 3))
    >>> plan = oomguard.find_feasible_config(task, batch=4, steps=5, threads=1)
    >>> with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
    ...     result = train(plan, task, steps=2, run=directory)
    ...     model = load_weights(directory, torch.nn.GRU(3, 4))
    >>> torch.equal(model.weight_hh_l0, result.model.weight_hh_l0)
    True
    """
    from oomguard._train.checkpoint import load_weights as load_into
    from oomguard._train.evaluate import find_checkpoint

    load_into(find_checkpoint(Path(run)), model)
    return model
