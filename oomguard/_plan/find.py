"""From a question to a plan: by a search on a device of this machine, by arithmetic alone for one only named."""

import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from oomguard._core.errors import MisuseError, check_choice, check_whole, conflict, nearest, shown
from oomguard._core.units import format_bytes
from oomguard._device.budget import Budget
from oomguard._device.cpu import cores
from oomguard._device.find import Device, card_index, find_budget, find_target, open_device
from oomguard._estimate.target import Target
from oomguard._plan.advice import explain
from oomguard._plan.make import best, make_plan
from oomguard._plan.value import Environment, NothingFitsError, Plan
from oomguard._probe.cache import Cache, user_directory
from oomguard._probe.record import check_seconds, open_ledger, torch_version
from oomguard._probe.runner import Free, Runner
from oomguard._search.largest import largest
from oomguard._search.propose import MEASURE_SECONDS
from oomguard._search.run import Limits, Progress, Search, SearchResult, measured_on, usable_bytes
from oomguard._search.space import STEP_SECONDS, Choices, Problem, make_space
from oomguard._spec.candidate import ALLOWED, KNOBS, check_allow, check_fixed, make_candidate, renew
from oomguard._spec.lengths import same_model
from oomguard._spec.spec import MAX_BATCH, Spec

if TYPE_CHECKING:
    from oomguard._probe.ray import Cluster, RayDevice, RayRunner
    from oomguard._search.sampler import Sampler

AIMS = ("throughput", "microbatch", "seq")  # what `--maximize` takes
SAMPLERS = ("auto", "gp", "tpe", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The question that a plan answers. Its fields are checked when it is made."""

    spec: Spec
    devices: tuple[str, ...] = ("cpu",)  # each gets a worker, and they must be of one kind
    budget_bytes: int | None = None  # bytes that the training process may use; None for what is free
    maximize: tuple[str, ...] = ("throughput",)
    allow: tuple[str, ...] = ("precision",)  # the lossy knobs that may be turned
    fixed: dict[str, Any] = field(default_factory=dict)  # knobs that are fixed and not searched
    limits: Limits = field(default_factory=Limits)
    ledger: str | None = None  # a directory from which the search can be continued
    storage: str | None = None  # a storage of Optuna's, in which several machines can search together
    sampler: str = "auto"
    """The sampler that chooses the probes: `auto` is ours; `gp`, `tpe` and `random` are Optuna's, for comparison."""
    open_batch: bool = False  # whether the batch is to be as large as fits in one pass, whatever the spec says
    step_seconds: float | None = None  # seconds of a step at most, with the aim `seq`; None: `STEP_SECONDS`
    on: str | None = None  # a Ray cluster whose nodes run the probes; None: this machine does

    def __post_init__(self) -> None:
        if not self.devices or (len(self.devices) + bool(self.on) > 1 and not all(map(is_here, self.devices))):
            raise MisuseError(
                rule="--device takes one device, or several that are here",
                got=f"got {shown(','.join(self.devices))}",
                advice="Write it as cpu, cuda, a100-80gb or cuda:0,cuda:1.",
            )
        check_maximize(self.maximize)
        check_allow(self.allow)
        check_choice("sampler", self.sampler, SAMPLERS)
        _check_knobs(self.spec, self.fixed)
        object.__setattr__(self, "fixed", {name: renew(name, value) for name, value in self.fixed.items()})
        check_fixed(self.fixed, self.allow)
        check_whole("max_probes", self.limits.max_probes, 1, 100_000, optional=False)
        check_seconds("The time limit of a search", self.limits.seconds)
        if self.step_seconds is not None:
            check_seconds("The time of a step", self.step_seconds)
            if "seq" not in self.maximize:
                raise conflict("The time of a step limits the longest sequences", "--step-time", "no --maximize seq")


def check_maximize(maximize: tuple[str, ...]) -> None:
    """Raise unless these are aims, each once."""
    for name in maximize:
        check_choice("maximize", name, ("batch", *AIMS))  # the caller has turned `batch` into `microbatch`
    if not maximize or len({*maximize}) < len(maximize):
        raise MisuseError(
            rule="--maximize takes one aim or several different ones",
            got=f"got {shown(','.join(maximize))}",
            advice="Write it as throughput or throughput,seq.",
        )


def is_here(device: str) -> bool:
    """Whether the name means a device of this machine, not a card by its model name."""
    return device == "cpu" or card_index(device) is not None


def _check_knobs(spec: Spec, fixed: dict[str, Any]) -> None:
    """Raise unless a candidate of the spec can have these knobs."""
    known = [name for name in KNOBS if name != "accumulation"]
    for name in fixed:
        if name not in known:
            raise MisuseError(
                rule="A knob can be fixed by its name (the accumulation follows from the microbatch)",
                got=f"got {shown(name)}",
                advice=nearest(name, known),
            )
    make_candidate(spec, **{"microbatch": 1} | fixed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a search runs: the devices, of one kind, and what one of them offers."""

    target: Target
    budget: Budget
    devices: "Sequence[Device | RayDevice]" = ()  # none: the target is only named
    free: tuple[Free, ...] = ()  # what is free on each
    cores: int = field(default_factory=lambda: cores())
    workers: "Mapping[str, RayRunner] | None" = None  # the nodes of a cluster, by device


def make_sampler(question: Question) -> "Sampler":
    """A sampler for a study of the user's own."""
    from oomguard._search.sampler import Sampler

    for name in question.devices:
        open_device(name)  # raises unless it is here
    return Sampler(_problem(question, _site(question, None)))


def find_plan(question: Question, progress: Callable[[Progress], None] | None = None) -> Plan:
    """The plan; raises `NothingFitsError` if there is none."""
    if question.on is None:
        return _find_plan(question, progress, None)
    from oomguard._probe.ray import Cluster

    with Cluster(question.on, question.devices, MEASURE_SECONDS) as cluster:
        return _find_plan(question, progress, cluster)


def _find_plan(question: Question, progress: Callable[[Progress], None] | None, cluster: "Cluster | None") -> Plan:
    if question.open_batch and len(question.maximize) > 1:  # first how large the batch can be, then the other aims
        first = _find_plan(replace(question, maximize=("microbatch",)), progress, cluster)
        if first.ended == "interrupted":
            return first
        question = replace(question, spec=first.spec, open_batch=False, limits=_limits_after(first, question.limits))
    site = _site(question, cluster)
    title = _title(site.devices) if site.devices else site.target.device
    problem = _problem(question, site)
    result = SearchResult(problem=problem, records=(), ended="estimate", seconds=0.0)
    if site.devices:
        result = _search(question, problem, title, progress, site)
    if problem.open_batch:
        result = _in_one_pass(result)
    libraries = [record.library for record in result.records if record.library is not None]
    device = site.devices[0] if site.devices else None
    environment = make_environment(site.target, device, site.budget, libraries)
    plan = make_plan(result, environment, None if device is None else device.environment, question.budget_bytes)
    if plan is None:
        raise NothingFitsError(explain(result.problem, result.evidence))
    return plan


def _site(question: Question, cluster: "Cluster | None") -> Site:
    """Where the search of a question runs: here, on a cluster, or nowhere."""
    if cluster is not None:
        place, free = cluster.devices[0].place, tuple(runner.free() for runner in cluster.workers.values())
        more: dict[str, Any] = {"devices": cluster.devices, "cores": place.cores, "workers": cluster.workers}
        return Site(target=place.target, budget=place.budget, free=free, **more)
    devices = [open_device(name) for name in question.devices] if is_here(question.devices[0]) else []
    free = tuple(Runner(device.name).free() for device in devices)
    target, budget = find_target(question.devices[0]), find_budget(question.devices[0])
    return Site(target=target, budget=budget, devices=devices, free=free)


def _limits_after(plan: Plan, limits: Limits) -> Limits:
    """What a search has left of its limits after another one, but at least a probe and a second."""
    return Limits(max_probes=max(1, limits.max_probes - plan.probes), seconds=max(1.0, limits.seconds - plan.seconds))


def plan_again(plan: Plan, spec: Spec) -> Plan:
    """The plan of another spec with the candidate of a plan, by arithmetic: nothing is run.

    If that candidate is not sure to fit, the arithmetic chooses another.
    """
    given = {name: getattr(plan.candidate, name) for name, knob in KNOBS.items() if knob.searched}
    budget = find_budget(plan.where.device)
    environment = make_environment(plan.where, None, budget, [])
    for fixed in (given, {}):
        question = Question(
            spec=spec, devices=(plan.where.device,), budget_bytes=plan.asked_budget_bytes, allow=ALLOWED, fixed=fixed
        )
        problem = _problem(question, Site(target=plan.where, budget=budget))
        result = SearchResult(problem=problem, records=(), ended="estimate", seconds=0.0)
        made = make_plan(result, environment, None, plan.asked_budget_bytes)
        if made is not None:
            return msgspec.structs.replace(made, exports=plan.exports, allow=plan.allow, fixed={}, data=plan.data)
    raise MisuseError(
        rule="A plan needs a candidate that fits",
        got=f"none fits in {format_bytes(problem.budget_bytes)}, by arithmetic",
        advice="Free memory, and try again.",
    )


def make_environment(
    target: Target, device: "Device | RayDevice | None", budget: Budget, libraries: list[str]
) -> Environment:
    """The machine and the software; without a device, the target is only named."""
    return Environment(
        oomguard=str(import_module("oomguard").__version__),
        torch=torch_version(),
        library=libraries[-1] if libraries else None,
        driver=None if device is None else device.driver(),
        python=platform.python_version(),
        system=" ".join((platform.system(), platform.machine(), *platform.libc_ver())).strip(),
        device=target.device,
        title=target.device if device is None else device.title(),
        cores=cores(),
        limits=budget.limits,
    )


def _unreachable_batch(problem: Problem) -> int:
    """A batch that is too large for one pass: a power of two, at least twice what fits by arithmetic.

    A continued search finds the same one, though a little more or less memory is free.
    """
    batch = 1
    while batch < MAX_BATCH:
        spec = msgspec.structs.replace(problem.spec, batch=batch)
        table, row = largest(replace(problem, spec=spec), (), "microbatch")
        if row is None or table.microbatches[row] < batch:
            break
        batch *= 2
    return min(2 * batch, MAX_BATCH)


def _in_one_pass(result: SearchResult) -> SearchResult:
    """The result of the search for the largest batch, with that batch in its spec."""
    table, row = best(result.problem, result.evidence)
    if row is None:
        return result
    spec = msgspec.structs.replace(table.spec, batch=int(table.microbatches[row]))
    return replace(result, problem=replace(result.problem, spec=spec, open_batch=False))


def _problem(question: Question, site: Site) -> Problem:
    """The problem, with the budget that is free on all devices."""
    target = site.target
    free_bytes = min(map(usable_bytes, site.free), default=site.budget.limit_bytes)
    budget_bytes = min(free_bytes, question.budget_bytes or free_bytes)
    choices = Choices(
        precisions=tuple(site.devices[0].precisions()) if site.devices else target.card_precisions,
        cores=site.cores,
        expandable=target.cuda and bool(site.devices),
        allow=question.allow,
        fixed=question.fixed,
    )
    problem = Problem(
        spec=question.spec,
        target=target,
        space=make_space(question.spec, target, budget_bytes, choices),
        budget_bytes=budget_bytes,
        host_bytes=min(free.host_bytes for free in site.free) if target.cuda and site.free else None,
        maximize=question.maximize,
        step_seconds=question.step_seconds or STEP_SECONDS,
    )
    if not question.open_batch or len(question.maximize) > 1:
        return problem
    spec = msgspec.structs.replace(question.spec, batch=_unreachable_batch(problem))
    return replace(problem, spec=spec, open_batch=True)


def _search(
    question: Question, problem: Problem, title: str, progress: Callable[[Progress], None] | None, site: Site
) -> SearchResult:
    from oomguard._search.study import TrialStore, storage_in
    from oomguard._search.work import shared

    ledger = None if question.ledger is None else open_ledger(question.ledger)
    storage = question.storage
    if storage is None and ledger is not None:
        storage = storage_in(ledger.path.parent.absolute())
    trials = TrialStore(_study_name(question, title), problem, storage, question.sampler)
    cache = Cache(user_directory(), title)
    earlier = [] if ledger is None else ledger.read()
    # a continued search keeps the budget that it began with, if that is still free
    budget_bytes = min(problem.budget_bytes, trials.note("budget_bytes", problem.budget_bytes))
    cached = measured_on(title, cache.read(question.spec), known=earlier)
    search = Search(
        problem=replace(problem, budget_bytes=budget_bytes, cached=tuple(cached)),
        trials=trials,
        ledger=ledger,
        cache=cache,
        limits=question.limits,
        progress=progress,
        workers=site.workers,
        records=[record for record in measured_on(title, earlier) if same_model(record.spec, question.spec)],
    )
    with shared(search):
        return search.run([device.name for device in site.devices])


def _study_name(question: Question, title: str) -> str:
    """The name of a question's study: the same for the same question on the same kind of device."""
    parts: list[object] = [question.spec, title, question.budget_bytes, question.maximize, question.allow]
    parts.append(KNOBS["allocator"].field.choices)  # Optuna refuses other choices of a parameter in one study
    parts.append(torch_version())  # records of another version count nothing
    parts += [question.fixed, "open batch"] if question.open_batch else [question.fixed]
    content = msgspec.json.encode(msgspec.to_builtins(parts, str_keys=True), order="deterministic")
    return f"{question.spec.cell}-{question.spec.steps}-{hashlib.sha256(content).hexdigest()[:12]}"


def _title(devices: "Sequence[Device | RayDevice]") -> str:
    """The name that all devices have."""
    titles = {device.title() for device in devices}
    if len(titles) > 1 or len({device.name for device in devices}) < len(devices):
        raise MisuseError(
            rule="Devices that search together must be different ones of one kind",
            got=f"got {', '.join(f'{device.name} ({device.title()})' for device in devices)}",
            advice="Plan for each kind by itself.",
        )
    return titles.pop()
