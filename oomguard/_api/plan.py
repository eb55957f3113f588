"""Plans, and the search for them. Packages are imported when they are needed."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

import msgspec

from oomguard._api.arguments import (
    Fields,
    PlanCall,
    PlanFields,
    split,
    takes,
)
from oomguard._core.errors import MisuseError, check_whole, flag, shown
from oomguard._core.progress import tell
from oomguard._core.units import parse_seconds, read_budget
from oomguard._data.options import DataOptions
from oomguard._report.progress import following, search_status, showing
from oomguard._spec.read import read_spec
from oomguard._spec.spec import MAX_SEQ, Spec
from oomguard._task.task import Task

if TYPE_CHECKING:
    from oomguard._data.options import PlanData
    from oomguard._plan.find import Question
    from oomguard._plan.task_value import TaskPlan
    from oomguard._plan.value import Plan
    from oomguard._search.run import Progress
    from oomguard._search.sampler import Sampler


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
    on: str | None = None,
    progress: "Callable[[Progress], None] | bool" = True,
    **fields: Unpack[PlanFields],
) -> "Plan | TaskPlan":
    """Search for the fastest (or largest, or longest) candidate that fits, with real probes, and return a `Plan`.

    Fields of the spec may be given by name, and knobs to fix them. `budget` is bytes or text such as "6GiB", `timeout`
    seconds or text such as "5min". `maximize` and `allow` take the words of `--maximize` and `--allow`. With "batch",
    and without `batch`, the plan has the largest batch that fits in one pass; with "seq", the longest sequences of
    which a step takes at most `step_time` (default: a minute) and that can be run within `timeout`.
    Several devices, "cuda:0,cuda:1", search together, and with `storage` also workers that `oomguard work` starts. With
    `on`, "ray" or "ray://host:10001", the nodes of a Ray cluster run the probes. With `data`, as `train` takes it,
    features, outputs, vocabulary, head, loss and lengths are those of the data, and the plan keeps how it is read
    (`id`, `target`, `stride`, ...).
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
        spec_only = {"data": data, "ledger": ledger, "storage": storage, "step_time": step_time, "on": on}
        for name, value in spec_only.items():
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
    more: dict[str, Any] = {"limits": limits, "sampler": sampler, "ledger": ledger, "storage": storage, "on": on}
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

    own, knobs = split(fields)
    aims = tuple("microbatch" if word == "batch" else word for word in _words("maximize", maximize))
    open_batch = spec is None and "batch" not in own and "microbatch" in aims and "microbatch" not in knobs
    if spec is None and aims[:1] == ("seq",):
        own = {"seq": 1} | own
    return Question(
        spec=read_spec(spec, own),
        devices=_words("device", device),
        budget_bytes=read_budget(budget),
        maximize=aims,
        allow=tuple(word for word in _words("allow", allow) if word != "none"),
        fixed={name: value for name, value in knobs.items() if value is not None},
        open_batch=open_batch and "seq" not in aims,
        **more,
    )


def _with_data(spec: Spec | None, data: Any, fields: dict[str, Any]) -> tuple[dict[str, Any], "PlanData"]:
    """The fields of the spec with what the data says, and the knobs; and how the data is read."""
    from oomguard._data.infer import spec_from_data
    from oomguard._data.options import CUTTING

    options = DataOptions(**{name: value for name, value in fields.items() if name in CUTTING})
    own, knobs = split({name: value for name, value in fields.items() if name not in CUTTING})
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
