"""The public functions. Each imports the packages that it needs when it is called."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

import msgspec

from oomguard._arguments import (
    DataFields,
    Fields,
    PlanCall,
    PlanFields,
    ProbeCall,
    ResumeFields,
    TrainArguments,
    TrainCall,
    takes,
)
from oomguard._core.errors import MisuseError, check_names, check_whole, conflict, flag, shown
from oomguard._core.progress import tell
from oomguard._core.units import MAX_BYTES, parse_seconds, read_budget
from oomguard._data.options import DataOptions
from oomguard._device.find import find_budget, find_target
from oomguard._estimate.breakdown import Estimate, estimate_batch, estimate_step, margin_bytes
from oomguard._estimate.target import Target
from oomguard._probe.record import Record, TaskRecord
from oomguard._probe.runner import TIMEOUT_SECONDS, Runner
from oomguard._report.progress import following, search_status, showing, train_statuses
from oomguard._report.screens import in_notebook
from oomguard._report.words import spec_words
from oomguard._spec.candidate import KNOBS, Candidate, Candidates
from oomguard._spec.read import read_candidate, read_spec
from oomguard._spec.spec import MAX_SEQ, Spec
from oomguard._task.ask import SECONDS
from oomguard._task.task import USUAL_ROWS, Task
from oomguard._train import TrainOptions
from oomguard._train.apart import is_apart, packed, train_apart
from oomguard._train.settings import settle

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import nn

    Model = TypeVar("Model", bound=nn.Module)

    from oomguard._data.options import PlanData
    from oomguard._guard import Guard
    from oomguard._plan.find import Question
    from oomguard._plan.task_value import TaskPlan
    from oomguard._plan.value import Plan
    from oomguard._report.curve import Curve
    from oomguard._search.run import Progress
    from oomguard._search.sampler import Sampler
    from oomguard._train.loop import Result, TaskResult, TrainProgress


@takes(Spec, Candidate)
def estimate(
    spec: Spec | Task | str | None = None,
    candidate: Candidate | Candidates | None = None,
    *,
    device: str = "cpu",
    budget: int | str | None = None,
    budget_bytes: int | None = None,
    training: bool = True,
    steps: int | None = None,
    timeout: float | str = SECONDS,
    progress: bool = True,
    **fields: Unpack[Fields],
) -> Estimate:
    """Estimate the peak memory of one optimizer step by arithmetic, or of an evaluation pass with `training=False`.

    Fields of the spec and knobs may be given by name instead of as `Spec` and `Candidate`. Without a candidate, the
    whole batch is one pass. Arrays of knobs, or `Candidates`, give arrays of figures.

    `device` is `cpu`, `cuda`, `cuda:1` or the name of any known card. `budget` is bytes or text such as "6GiB"; by
    default it is the free memory of the device. `budget_bytes` is the same, in bytes only.

    A `Task`, or its name "package.module:task", is traced in a child process, with `steps` time steps, or with the
    longest samples of its data. `parts` of the result are its modules. It takes a few seconds, at most `timeout`, which
    is seconds or text such as "5min"; `progress` shows what is done meanwhile.

    >>> estimate(cell="lstm", seq=1000, device="a100-80gb", budget="6GiB").fits
    True
    >>> estimate(Spec(cell="lstm", seq=1000), microbatch=[1, 32], device="a100-80gb").fits.tolist()
    [True, True]
    """
    given: dict[str, Any] = {**fields}
    target, seconds = find_target(device), parse_seconds(timeout, "timeout")
    if isinstance(spec, Task | str):
        given_bytes = _budget_bytes(budget, budget_bytes)
        how: dict[str, Any] = {"training": training, "steps": steps, "seconds": seconds}
        with showing(progress):
            traced = _estimate_task(spec, candidate, target, given, **how)
        return replace(traced, budget_bytes=find_budget(device).limit_bytes if given_bytes is None else given_bytes)
    if steps is not None:
        given["steps"] = steps
    spec, candidate, limit_bytes = _read(spec, candidate, given, budget, budget_bytes)
    if limit_bytes is None:
        limit_bytes = find_budget(device).limit_bytes
    if isinstance(candidate, Candidates):
        return replace(estimate_batch(spec, candidate, target, training=training), budget_bytes=limit_bytes)
    result = estimate_step(spec, candidate, target, training=training)
    margin = margin_bytes(spec, result, target)
    return replace(result, budget_bytes=limit_bytes, margin_bytes=margin)


def _estimate_task(
    task: Task | str, candidate: object, target: Target, fields: dict[str, Any], *, steps: int | None, **how: Any
) -> Estimate:
    from oomguard._task.estimate import estimate_task

    check_names("knob", fields, KNOBS)
    check_whole("steps", steps, 1, MAX_SEQ)
    if candidate is not None:
        advice = "Give them as estimate(task, microbatch=8, segments=4)."
        raise MisuseError(rule="The knobs of a task are given by name", got="got a Candidate", advice=advice)
    return estimate_task(task, fields, target, steps=steps, **how)


@overload
def probe(spec: Task | str, *, steps: int | None = None, **fields: Unpack[ProbeCall]) -> TaskRecord: ...


@overload
def probe(spec: Spec | None = None, candidate: Candidate | None = None, **fields: Unpack[ProbeCall]) -> Record: ...


@takes(Spec, Candidate)
def probe(
    spec: Spec | Task | str | None = None,
    candidate: Candidate | None = None,
    *,
    device: str = "cpu",
    budget: int | str | None = None,
    budget_bytes: int | None = None,
    timeout: float | str = TIMEOUT_SECONDS,
    steps: int | None = None,
    progress: bool = True,
    **fields: Unpack[Fields],
) -> Record | TaskRecord:
    """Run a few real steps of one candidate in a child process that is limited to the budget, and record the result.

    Arguments are those of `estimate`, but the device must be present. Whatever happens to the child is a verdict.
    Several probes are faster in one `oomguard.Runner`, which keeps its child process.

    A `Task`, or its name "package.module:task", runs with its knobs and, as in `estimate`, with `steps` time steps, or
    with the longest samples of its data. Errors of your own code are raised with the line that caused them.

    >>> record = probe(cell="gru", seq=20, hidden=8, batch=2, threads=1)
    >>> record.verdict.name, record.steps
    ('FITS', 3)
    """
    given: dict[str, Any] = {**fields}
    if isinstance(spec, Task | str):
        limit_bytes = _budget_bytes(budget, budget_bytes)
        with showing(progress):
            tell("Reading the task")
            return _probe_task(spec, candidate, device, limit_bytes, parse_seconds(timeout, "timeout"), steps, given)
    if steps is not None:
        given["steps"] = steps
    spec, chosen, limit_bytes = _read(spec, candidate, given, budget, budget_bytes)
    if isinstance(chosen, Candidates):
        raise MisuseError(
            rule="A probe runs one candidate", got="got several", advice="Probe them one by one in a Runner."
        )
    with showing(progress), Runner(device, timeout=parse_seconds(timeout, "timeout")) as runner:
        tell(f"Running a few steps of {spec_words(spec)} in a process of its own")
        return runner.probe(spec, chosen, budget_bytes=limit_bytes)


def _probe_task(
    task: Task | str,
    candidate: Candidate | None,
    device: str,
    budget_bytes: int | None,
    timeout: float,
    steps: int | None,
    knobs: dict[str, Any],
) -> TaskRecord:
    from oomguard._task.ask import send
    from oomguard._task.task import name_of

    check_names("knob", knobs, KNOBS)
    check_whole("steps", steps, 1, MAX_SEQ)
    if candidate is None:
        rows = (task.data.batch_size if isinstance(task, Task) and task.data is not None else None) or USUAL_ROWS
        candidate = Candidate(**{"microbatch": rows} | knobs)
    source = send(task, candidate.microbatch * candidate.accumulation, steps)
    asked: dict[str, Any] = {"name": name_of(task), "content": source if isinstance(source, bytes) else None}
    tell(f"Running a few steps of {name_of(task)} in a process of its own")
    asked |= {"candidate": candidate, "rows": None, "seq": steps, "budget_bytes": budget_bytes}
    with Runner(device, timeout=timeout) as runner:
        return runner.probe_task(**asked)


@overload
def find_feasible_config(spec: Task | str, *, steps: int | None = None, **fields: Unpack[PlanCall]) -> "TaskPlan": ...


@overload
def find_feasible_config(spec: Spec | None = None, **fields: Unpack[PlanCall]) -> "Plan": ...


@takes(Spec, DataOptions)
def find_feasible_config(
    spec: Spec | Task | str | None = None,
    *,
    data: Any = None,
    budget: int | str | None = None,
    device: str = "cpu",
    maximize: str | Sequence[str] = "throughput",
    allow: str | Sequence[str] = "precision",
    max_probes: int = 24,
    timeout: float | str = 55.0,
    step_time: float | str | None = None,
    steps: int | None = None,
    sampler: str = "auto",
    ledger: str | None = None,
    storage: str | None = None,
    progress: "Callable[[Progress], None] | bool" = True,
    **fields: Unpack[PlanFields],
) -> "Plan | TaskPlan":
    """Search for the fastest (or largest, or longest) candidate that fits, with real probes, and return a `Plan`.

    Fields of the spec may be given by name, and knobs to fix them. `budget` is bytes or text such as "6GiB", `timeout`
    seconds or text such as "5min". `maximize` and `allow` take the words of `--maximize` and `--allow`. With "batch",
    and without `batch`, the plan has the largest batch that fits in one pass; with "seq", the longest sequences of
    which a step takes at most `step_time` (default: a minute) and that can be run within `timeout`.
    Several devices, "cuda:0,cuda:1", search together. With `data`, as `train` takes it, features, outputs, vocabulary,
    head, loss and lengths are those of the data, and the plan keeps how it is read (`id`, `target`, `stride`, ...).
    With `sampler` "gp", "tpe" or "random" one of Optuna's samplers explores, for comparison. `progress` shows how far
    the search is, on a terminal, in a notebook or as lines of a log; a function takes a `Progress` before and after
    every probe instead. Raises `NothingFitsError` if nothing fits.

    A `Task`, or its name "package.module:task", is traced and then probed at most 3 times with its worst batch: of
    `steps` time steps, or of the longest samples of its data. The batch, that of its loader unless
    `batch` is given, is kept. Microbatches and segments are used if they keep the gradient of this task, or if `allow`
    names them. Until `timeout`, further probes try one thread, the heap `fast` and half precision. With `maximize`
    "batch", the plan has the largest batch that fits in one pass.

    >>> plan = find_feasible_config(cell="gru", seq=50, hidden=16, batch=4, threads=1, max_probes=2)
    >>> plan.ooms, plan.candidate.microbatch * plan.candidate.accumulation >= 4
    (0, True)
    """
    given: dict[str, Any] = {**fields}
    if isinstance(spec, Task | str):
        for name, value in (("data", data), ("ledger", ledger), ("storage", storage), ("step_time", step_time)):
            if value is not None:
                rule = f"The plan of a task does not take {name}"
                raise MisuseError(rule=rule, got=f"got {shown(value)}", advice="Leave it out.")
        most = {"max_probes": max_probes, "seconds": parse_seconds(timeout, "timeout")}
        with showing(bool(progress)):
            return _plan_task(spec, given, budget, device, maximize, allow, steps, most)
    from oomguard._plan.find import find_plan
    from oomguard._search.run import Limits

    if steps is not None:
        given["steps"] = steps
    limits = Limits(max_probes=max_probes, seconds=parse_seconds(timeout, "timeout"))
    more = {"limits": limits, "sampler": sampler, "ledger": ledger, "storage": storage}
    if step_time is not None:
        more["step_seconds"] = parse_seconds(step_time, "step_time")
    read = None
    if data is not None:
        (given, read), spec = _with_data(spec, data, given), None
    question = _question(spec, given, budget, device, maximize, allow, **more)
    with following(progress, search_status) as follow:
        tell("Estimating what fits")
        plan = find_plan(question, follow)
    return plan if read is None else msgspec.structs.replace(plan, data=read)


def _plan_task(
    task: Task | str,
    fields: dict[str, Any],
    budget: int | str | None,
    device: str,
    maximize: str | Sequence[str],
    allow: str | Sequence[str],
    steps: int | None,
    limits: dict[str, Any],
) -> "TaskPlan":
    from oomguard._plan.task import TaskQuestion, find_task_plan

    check_whole("steps", steps, 1, MAX_SEQ)
    question = TaskQuestion(
        task=task,
        device=device,
        budget_bytes=read_budget(budget),
        maximize=",".join(_words("maximize", maximize)),
        allow=tuple(word for word in _words("allow", allow) if word != "none"),
        fixed={name: value for name, value in fields.items() if name != "batch" and value is not None},
        batch=fields.get("batch"),
        steps=steps,
        **limits,
    )
    return find_task_plan(question)


@takes(Spec)
def sampler(
    spec: Spec | None = None,
    *,
    budget: int | str | None = None,
    device: str = "cpu",
    maximize: str | Sequence[str] = "throughput",
    allow: str | Sequence[str] = "precision",
    **fields: Unpack[Fields],
) -> "Sampler":
    """The sampler of `find_feasible_config`, an `optuna.samplers.BaseSampler`, for a study of your own.

    Its `suggest(trial)` gives the spec and the candidate to run, its `report(trial, record)` stores the record and
    returns the values of the trial.

    >>> import optuna
    >>> chosen = sampler(cell="gru", seq=50, hidden=16, batch=4, threads=1)
    >>> trial = optuna.create_study(direction="maximize", sampler=chosen).ask()
    >>> chosen.suggest(trial).candidate.threads
    1
    """
    given: dict[str, Any] = {**fields}
    from oomguard._plan.find import make_sampler

    return make_sampler(_question(spec, given, budget, device, maximize, allow))


def _question(
    spec: Spec | None,
    fields: dict[str, Any],
    budget: int | str | None,
    device: str,
    maximize: str | Sequence[str],
    allow: str | Sequence[str],
    **more: Any,
) -> "Question":
    """The question that the arguments of `find_feasible_config` or `sampler` describe."""
    from oomguard._plan.find import Question

    own, knobs = _split(fields)
    aims = tuple("microbatch" if word == "batch" else word for word in _words("maximize", maximize))
    open_batch = spec is None and "batch" not in own and aims == ("microbatch",) and "microbatch" not in knobs
    if spec is None and aims[:1] == ("seq",):
        own = {"seq": 1} | own
    return Question(
        spec=read_spec(spec, own),
        devices=_words("device", device),
        budget_bytes=read_budget(budget),
        maximize=aims,
        allow=tuple(word for word in _words("allow", allow) if word != "none"),
        fixed={name: value for name, value in knobs.items() if value is not None},
        open_batch=open_batch,
        **more,
    )


@takes(Spec)
def tradeoffs(
    spec: Spec | Task | str | None = None,
    *,
    over: dict[str, Any] | None = None,
    device: str | None = None,
    budget: int | str | None = None,
    measured: Any = None,
    steps: int | None = None,
    progress: bool = True,
    **fields: Unpack[Fields],
) -> "DataFrame":
    """Compare candidates in memory and speed: a DataFrame with one row per candidate.

    `over` says which knobs and fields of the spec vary: `{"microbatch": range(1, 65), "seq": "1000..8000*2"}`.
    Without it, microbatch, segments and precision vary. `measured` is a plan, a ledger or records, or the
    path of one: predictions are calibrated by them, and columns show what was measured. A plan also gives spec, device,
    budget and the other knobs. `total_bytes` is the estimate, the sum of the terms; `peak_bytes` is the prediction.

    The candidates of a `Task`, or of its name "package.module:task", are traced with `steps` time steps, or with the
    longest samples of its data. Their microbatch, segments, precision and seq can vary. There are no speeds.
    `progress` shows what is done meanwhile.

    >>> table = tradeoffs(cell="lstm", seq=1000, over={"microbatch": [8, 32], "segments": [1, 10]}, budget="1GiB")
    >>> table[["microbatch", "segments", "fits"]].values.tolist()
    [[8, 1, True], [8, 10, True], [32, 1, False], [32, 10, True]]
    """
    given: dict[str, Any] = {**fields}
    if isinstance(spec, Task | str):
        from oomguard._report.task_table import make_task_table

        if measured is not None:
            rule = "The table of a task is traced"
            raise MisuseError(rule=rule, got=f"got measured {shown(measured)}", advice="Leave it out.")
        check_whole("steps", steps, 1, MAX_SEQ)
        where: dict[str, Any] = {"device": device or "cpu", "budget_bytes": read_budget(budget)}
        with showing(progress):
            return make_task_table(spec, over=over, steps=steps, **where, **given)
    from oomguard._report.subject import find_subject
    from oomguard._report.tradeoffs import make_table

    if steps is not None:
        given["steps"] = steps
    with showing(progress):
        return make_table(find_subject(spec, over=over, device=device, budget=budget, measured=measured, **given))


@takes(Spec)
def curves(
    about: "Plan | Spec | None" = None,
    *,
    over: dict[str, Any] | None = None,
    device: str | None = None,
    budget: int | str | None = None,
    measured: Any = None,
    **fields: Unpack[Fields],
) -> "list[Curve]":
    """Charts of a plan, or of a model as `tradeoffs` takes it. Each answers one question.

    They show one model: `over` takes values of microbatch, segments, precision and seq (the longest is shown).
    A notebook displays a curve; `.figure()` returns a Matplotlib figure, `.save("front.png")` writes it to a file.

    >>> [curve.name for curve in curves(cell="gru", seq=100, device="t4", hidden=8, layers=1)][:3]
    ['front', 'region', 'segments']
    """
    given: dict[str, Any] = {**fields}
    from oomguard._plan.value import Plan
    from oomguard._report.curves import curves_of
    from oomguard._report.subject import find_subject

    if isinstance(about, Plan):
        about, measured = None, about
    return curves_of(find_subject(about, over=over, device=device, budget=budget, measured=measured, **given))


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

    >>> plan = find_feasible_config(cell="gru", seq=8, hidden=8, batch=4, device="t4")
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
    plan: "TaskPlan | str | os.PathLike[str] | None", data: Task, model: None = None, **options: Unpack[TrainCall]
) -> "TaskResult": ...


@overload
def train(plan: "TaskPlan | None", data: str, model: None = None, **options: Unpack[TrainCall]) -> "TaskResult": ...


@overload
def train(
    plan: "Plan | str | os.PathLike[str]",
    data: Any = None,
    model: Callable[..., Any] | str | None = None,
    **options: Unpack[TrainCall],
) -> "Result": ...


@takes(TrainOptions, DataOptions)
def train(
    plan: "Plan | TaskPlan | str | os.PathLike[str] | None",
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

    A `Task`, or its name "package.module:task", takes the place of data. It has its own optimizer, scheduler and
    validation data, so options are `seed` and those of `TrainOptions` without the learning rate. If plan is None, the
    task is planned first, for `budget`, `device`, `batch` and `seq`.

    >>> import numpy as np, tempfile, warnings
    >>> plan = find_feasible_config(cell="gru", seq=8, features=2, hidden=8, batch=4, threads=1, max_probes=1)
    >>> numbers = np.random.default_rng(0).normal(size=(40, 8, 3)).astype(np.float32)
    >>> with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
    ...     result = train(plan, numbers, epochs=2, validation=0, run=directory)
    >>> result.steps, result.ended
    (20, 'done')
    """
    given: dict[str, Any] = {**options}
    from oomguard._plan.store import load_plan
    from oomguard._plan.task_value import TaskPlan

    loaded = load_plan(plan) if isinstance(plan, str | os.PathLike) else plan
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

    >>> import numpy as np, tempfile, warnings
    >>> plan = find_feasible_config(cell="gru", seq=8, features=2, hidden=8, batch=4, threads=1, max_probes=1)
    >>> numbers = np.random.default_rng(0).normal(size=(40, 8, 3)).astype(np.float32)
    >>> with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
    ...     result = train(plan, numbers, steps=2, run=directory)
    ...     resume(directory, numbers, steps=5).steps
    5
    """
    given: dict[str, Any] = {**options}
    plan = os.path.join(run, "plan.json")
    return train(
        plan, data, model, progress=progress, isolate=isolate, **given | {"run": os.fspath(run), "resume": True}
    )


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
    progress: bool = True,
    **options: Unpack[DataFields],
) -> Any:
    """Predict every sequence of some data with the model of a run: the best by validation, otherwise the last.

    The data (default: that of the training) must have the form of the training data. It is read with the options of the
    training, unless `options` (fields of `DataOptions`) change them. Numbers are in the units of the targets; for
    classes the result is the likeliest, or the `probabilities` of all. With `output` (.npy or .csv) predictions are
    streamed to that file and its path is returned; otherwise they are an array, padded with NaN or -100. A CSV has the
    names of columns and classes. A model of your own is found by the name of its function, unless `model` gives it.

    The run of a `Task` is predicted with the task, or its name, in the place of data: its `predict` gets the samples of
    its data in order, in the microbatches of the plan, without gradients. The result is a list of what it returned, or
    a file: .npy if that is one tensor with a row for each sample, .pt (`torch.load`) for anything else.

    A model of text goes on with a `prompt` instead of data: the result is the prompt and `length` characters (or bytes,
    default 200), drawn one by one by `seed` with a `temperature` (default 1; 0: always the likeliest). The state of the
    model is carried from one to the next.

    >>> import numpy as np, tempfile, warnings
    >>> plan = find_feasible_config(cell="gru", seq=8, features=2, hidden=8, batch=4, threads=1, max_probes=1)
    >>> numbers = np.random.default_rng(0).normal(size=(40, 8, 3)).astype(np.float32)
    >>> with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
    ...     result = train(plan, numbers, validation=0, run=directory)
    ...     predict(directory, numbers[:5]).shape
    (5, 8, 1)
    """
    given: dict[str, Any] = {**options}
    drawn = {"prompt": prompt, "length": length, "temperature": temperature}
    if asked := {name: value for name, value in drawn.items() if value is not None}:
        return _predict_text(run, asked | given, data, output, probabilities, device, model)
    from oomguard._train.settings import check_predicted, is_task_run

    check_names("option", given, DataOptions.__struct_fields__)
    if is_task_run(run):
        for name in (*given, *(["probabilities"] if probabilities else [])):
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

    >>> import tempfile, torch, warnings
    >>> task = Task(model=lambda: torch.nn.GRU(3, 4), loss=lambda model, batch: model(batch)[0].mean(),
    ...             batch=lambda rows, steps: torch.randn(steps, rows, 3))
    >>> plan = find_feasible_config(task, batch=4, steps=5, threads=1)
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


def _split(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split arguments by name into fields of a spec (with options of data) and knobs."""
    knobs = {name: value for name, value in fields.items() if name in KNOBS}
    return {name: value for name, value in fields.items() if name not in KNOBS}, knobs


def _read(
    spec: Spec | None,
    candidate: Candidate | Candidates | None,
    fields: dict[str, Any],
    budget: int | str | None,
    budget_bytes: int | None,
) -> tuple[Spec, Candidate | Candidates, int | None]:
    """The spec, the candidate or candidates, and the budget in bytes; None without a budget."""
    limit_bytes = _budget_bytes(budget, budget_bytes)
    own, knobs = _split(fields)
    spec = read_spec(spec, own)
    return spec, read_candidate(spec, candidate, knobs), limit_bytes


def _budget_bytes(budget: int | str | None, budget_bytes: int | None) -> int | None:
    """The budget in bytes, given in one of two ways; None if it is not."""
    if budget is not None and budget_bytes is not None:
        raise conflict("The budget is given once", "budget", "budget_bytes")
    check_whole("budget", budget_bytes, 0, MAX_BYTES)
    return read_budget(budget) if budget_bytes is None else budget_bytes


def _with_data(spec: Spec | None, data: Any, fields: dict[str, Any]) -> tuple[dict[str, Any], "PlanData"]:
    """The fields of the spec with what the data says, and the knobs; and how the data is read."""
    from oomguard._data.infer import spec_from_data
    from oomguard._data.options import CUTTING

    options = DataOptions(**{name: value for name, value in fields.items() if name in CUTTING})
    own, knobs = _split({name: value for name, value in fields.items() if name not in CUTTING})
    given = own if spec is None else msgspec.structs.asdict(read_spec(spec, own))
    found, read = spec_from_data(given, data, options)
    fields = msgspec.structs.asdict(found)
    if "batch" not in given:
        del fields["batch"]
    return fields | knobs, read


def _words(name: str, text: str | Sequence[str]) -> tuple[str, ...]:
    """The words of an argument: `throughput,seq`, or a list of them."""
    words = text.split(",") if isinstance(text, str) else [*text] if isinstance(text, Iterable) else [text]
    if not all(isinstance(word, str) for word in words):
        raise MisuseError(
            rule=f"{flag(name)} takes a name, or several",
            got=f"got {shown(text)}",
            advice=f"Leave {name} out, or give it text.",
        )
    return tuple(word.strip() for word in words if word.strip())
