"""Estimates, probes and trade-offs. Packages are imported when they are needed."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack, overload

from oomguard._api.arguments import (
    Fields,
    ProbeCall,
    budget_bytes_of,
    read_candidates,
    takes,
)
from oomguard._core.errors import MisuseError, check_names, check_whole, shown
from oomguard._core.progress import tell
from oomguard._core.units import format_bytes, parse_seconds, read_budget
from oomguard._device.find import find_budget, find_target
from oomguard._estimate.breakdown import Estimate, estimate_batch, estimate_step, margin_bytes
from oomguard._estimate.target import Target
from oomguard._probe.record import Record, TaskRecord
from oomguard._probe.runner import TIMEOUT_SECONDS, Runner
from oomguard._report.progress import showing
from oomguard._report.screens import in_notebook
from oomguard._report.words import spec_words
from oomguard._spec.candidate import KNOBS, Candidate, Candidates
from oomguard._spec.spec import MAX_SEQ, Spec
from oomguard._task.ask import SECONDS
from oomguard._task.task import USUAL_ROWS, Task

if TYPE_CHECKING:
    from pandas import DataFrame

    from oomguard._explore.explorer import Explorer
    from oomguard._explore.widget import ExplorerWidget
    from oomguard._keras.task import KerasModel
    from oomguard._plan.value import Plan
    from oomguard._report.curve import Curve


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
        given_bytes = budget_bytes_of(budget, budget_bytes)
        how: dict[str, Any] = {"training": training, "steps": steps, "seconds": seconds}
        with showing(progress):
            traced = _estimate_task(spec, candidate, target, given, **how)
        return replace(traced, budget_bytes=find_budget(device).limit_bytes if given_bytes is None else given_bytes)
    if steps is not None:
        given["steps"] = steps
    spec, candidate, limit_bytes = read_candidates(spec, candidate, given, budget, budget_bytes)
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


def estimate_keras(
    path: str, device: str, budget_bytes: int, *, training: bool, steps: int | None = None,
    timeout: float | str = SECONDS, **knobs: Any,
) -> "tuple[KerasModel, Estimate, list[str]]":  # fmt: skip
    """Read a Keras model from a file, estimate the same model in PyTorch, and say which knob helps."""
    from oomguard._keras.task import as_task, read_model
    from oomguard._plan.task_advice import estimate_and_advise
    from oomguard._report.keras import notes_of

    check_names("knob", knobs, KNOBS)
    check_whole("steps", steps, 1, MAX_SEQ)
    target, seconds, model = find_target(device), parse_seconds(timeout, "timeout"), read_model(path, steps)
    weights_bytes, here_bytes = 4 * model.own_parameters, find_budget("cpu").left_bytes
    if weights_bytes > here_bytes:
        got = f"those of {path} need {format_bytes(weights_bytes)}, and {format_bytes(here_bytes)} are free"
        rule, hint = "A model is built to be traced, so its weights must fit here", "Estimate a smaller one."
        raise MisuseError(rule=rule, got=got, advice=hint)
    how: dict[str, Any] = {"steps": model.steps, "training": training, "splits": not model.normalises}
    found, advice = estimate_and_advise(as_task(model), knobs, target, budget_bytes, **how, seconds=seconds)
    return model, replace(found, notes=(*notes_of(model), *found.notes)), advice


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
        limit_bytes = budget_bytes_of(budget, budget_bytes)
        with showing(progress):
            tell("Reading the task")
            return _probe_task(spec, candidate, device, limit_bytes, parse_seconds(timeout, "timeout"), steps, given)
    if steps is not None:
        given["steps"] = steps
    spec, chosen, limit_bytes = read_candidates(spec, candidate, given, budget, budget_bytes)
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
    progress: bool = True,
    **fields: Unpack[Fields],
) -> "list[Curve]":
    """Charts of a plan, or of a model as `tradeoffs` takes it. Each answers one question.

    They show one model: `over` takes values of microbatch, segments, precision and seq (the longest is shown).
    A notebook displays a curve; `.figure()` returns a Matplotlib figure, `.save("front.png")` writes it to a file.
    `progress` shows what is done meanwhile.

    >>> [curve.name for curve in curves(cell="gru", seq=100, device="t4", hidden=8, layers=1)][:3]
    ['front', 'region', 'segments']
    """
    given: dict[str, Any] = {**fields}
    with showing(progress):
        tell("Estimating what the charts show")
        from oomguard._plan.value import Plan
        from oomguard._report.curves import curves_of
        from oomguard._report.subject import find_subject

        if isinstance(about, Plan):
            about, measured = None, about
        found = curves_of(find_subject(about, over=over, device=device, budget=budget, measured=measured, **given))
        if in_notebook():
            tell("Loading Matplotlib, which draws the charts")
            from oomguard._report import draw  # noqa: F401
        return found


@takes(Spec)
def explore(
    about: "Plan | Spec | Task | str | None" = None,
    *,
    device: str | None = None,
    budget: int | str | None = None,
    measured: Any = None,
    allow_probes: bool = False,
    steps: int | None = None,
    progress: bool = True,
    **fields: Unpack[Fields],
) -> "ExplorerWidget":
    """Explore trade-offs in a notebook: sliders for the model, its knobs, the device and the budget.

    Every move is answered at once by arithmetic. Arguments are those of `curves`; a plan or records that are `measured`
    show measured peaks beside estimates. With `allow_probes`, a button runs a few real steps on this machine.
    Outside of notebooks, use the command `oomguard explore`.

    A `Task`, or its name "package.module:task", is traced in a child process, first with `steps` time steps, or with
    the longest samples of its data. `measured` is its plan. `progress` shows what is done before the widget appears.

    >>> explorer = explore(cell="lstm", seq=10_000, device="rtx-4090")
    >>> explorer.answer["verdict"]
    'Fits with 13.90 GiB to spare'
    """
    from oomguard._explore.widget import ExplorerWidget

    given: dict[str, Any] = {"device": device, "budget": budget, "measured": measured, "allow_probes": allow_probes}
    given |= {**fields} if steps is None else {**fields, "steps": steps}
    with showing(progress):
        return ExplorerWidget(make_explorer(about, **given))


def make_explorer(
    about: "Plan | Spec | Task | str | None" = None, *, measured: Any = None, allow_probes: bool = False, **given: Any
) -> "Explorer":
    """The explorer of a spec, a plan or a task. Arguments are those of `explore`."""
    from oomguard._explore.answers import SpecExplorer, settings_of
    from oomguard._explore.task import TaskExplorer, check_has_task, task_settings
    from oomguard._plan.value import Plan
    from oomguard._report.subject import find_subject

    if isinstance(about, Task | str):
        settings, records = task_settings(about, measured, given)
        return TaskExplorer(about, settings, records, probes=allow_probes)
    if isinstance(about, Plan):
        about, measured = None, about
    check_has_task(measured)
    subject = find_subject(about, measured=measured, **given)
    return SpecExplorer(settings_of(subject, given.get("budget")), subject.records, probes=allow_probes)
