"""From a question to a plan: by search where the device is here, by arithmetic alone where it is not."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from oomguard.calibrate import same_model
from oomguard.candidate import KNOBS, Candidate, check_candidate
from oomguard.checks import check_whole, nearest, shown
from oomguard.device import Device, card_index, open_device
from oomguard.device.budget import Budget
from oomguard.device.cpu import cores
from oomguard.errors import MisuseError
from oomguard.estimate.place import Place
from oomguard.plan.make import Facts, make_plan
from oomguard.plan.shortfall import Asked, NothingFitsError, explain
from oomguard.plan.value import Plan
from oomguard.probe.ledger import Ledger, open_ledger
from oomguard.probe.record import check_seconds
from oomguard.probe.runner import Runner
from oomguard.search.cache import Cache, user_directory
from oomguard.search.problem import Problem, check_maximize
from oomguard.search.run import Found, Limits, Progress, Search, free_for, ours
from oomguard.search.space import Here, check_allow, check_fixed, make_space
from oomguard.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a plan is asked for. Checked at birth."""

    spec: Spec
    """What is to be trained."""
    devices: tuple[str, ...] = ("cpu",)
    """Where: each gets a worker, and they must be alike."""
    budget_bytes: int | None = None
    """What the training process may use; None: what is free."""
    maximize: tuple[str, ...] = ("throughput",)
    """What is best."""
    allow: tuple[str, ...] = ("precision",)
    """Lossy knobs that may be turned."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Knobs that are not searched."""
    limits: Limits = field(default_factory=Limits)
    """When to stop."""
    ledger: str | None = None
    """A directory: the search can be continued there."""
    storage: str | None = None
    """A storage of Optuna's: several machines can search together."""

    def __post_init__(self) -> None:
        if not self.devices or (len(self.devices) > 1 and not all(map(is_here, self.devices))):
            raise MisuseError(
                rule="--device takes one device, or several that are here",
                got=f"got {shown(','.join(self.devices))}",
                advice="Write it as cpu, cuda, a100-80gb or cuda:0,cuda:1.",
            )
        check_maximize(self.maximize)
        check_allow(self.allow)
        _check_knobs(self.spec, self.fixed)
        check_fixed(self.fixed, self.allow)
        check_whole("max_probes", self.limits.max_probes, 1, 100_000, optional=False)
        check_seconds("The time limit of a search", self.limits.seconds)


def is_here(device: str) -> bool:
    """Whether the name means a device of this machine, not a card by its name."""
    return device == "cpu" or card_index(device) is not None


def _check_knobs(spec: Spec, fixed: dict[str, Any]) -> None:
    """Raise unless a candidate could have these knobs."""
    for name in fixed:
        if name not in KNOBS or name == "accumulation":
            known = [one for one in KNOBS if one != "accumulation"]
            raise MisuseError(
                rule="A knob can be fixed by its name (the accumulation follows from the microbatch)",
                got=f"got {shown(name)}",
                advice=nearest(name, known),
            )
    rows = fixed.get("microbatch", 1)
    check_whole("microbatch", rows, 1, spec.batch)
    check_candidate(spec, Candidate(**{"microbatch": rows, "accumulation": -(-spec.batch // rows)} | fixed))


def find_plan(
    question: Question,
    place: Place,
    budget: Budget,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """The plan; raises `NothingFitsError` if there is none. `budget`: the limits of the first device."""
    here = is_here(question.devices[0])
    devices = [open_device(name) for name in question.devices] if here else []
    title = _title(devices) if devices else place.device
    free_bytes = min((free_for(Runner(one.name)) for one in devices), default=budget.limit_bytes)
    budget_bytes = min(free_bytes, question.budget_bytes or free_bytes)
    known = Here(
        precisions=tuple(devices[0].precisions()) if devices else _precisions(place),
        cores=cores(),
        expandable=place.cuda and bool(devices),
        fixed=question.fixed,
    )
    problem = Problem(
        spec=question.spec,
        place=place,
        space=make_space(question.spec, place, budget_bytes, known, question.allow),
        budget_bytes=budget_bytes,
        host_bytes=_host_bytes() if place.cuda and devices else None,
        maximize=question.maximize,
    )
    found = _search(question, problem, title, progress) if devices else _by_arithmetic(problem)
    facts = Facts(
        version=_version(),
        title=title,
        driver=devices[0].driver() if devices else None,
        cores=known.cores,
        budget=budget,
        asked_budget_bytes=question.budget_bytes,
        allow=question.allow,
        fixed=question.fixed,
    )
    plan = make_plan(found, facts, devices[0].environment if devices else _no_exports)
    if plan is None:
        raise NothingFitsError(explain(found.problem, found.records, Asked(here=known, allow=question.allow)))
    return plan


def _search(question: Question, problem: Problem, title: str, progress: Callable[[Progress], None] | None) -> Found:
    from oomguard.search.loop import Book, storage_in

    ledger = None if question.ledger is None else open_ledger(question.ledger)
    storage = question.storage
    if storage is None and ledger is not None:
        storage = storage_in(ledger.path.parent.absolute())
    book = Book(_name(question, title), question.maximize, storage)
    cache = Cache(user_directory(), title)
    # a continued search goes on with the budget that it began with, if that is still free
    budget_bytes = min(problem.budget_bytes, book.note("budget_bytes", problem.budget_bytes))
    search = Search(
        problem=replace(problem, budget_bytes=budget_bytes, cached=_cached(cache, question.spec, ledger)),
        book=book,
        ledger=ledger,
        cache=cache,
        limits=question.limits,
        progress=progress,
        records=_earlier(ledger, question.spec, title),
    )
    return search.run(question.devices)


def _earlier(ledger: Ledger | None, spec: Spec, title: str) -> list[Any]:
    """What the ledger has of this model, here."""
    return [] if ledger is None else [one for one in ours(ledger.read(), title) if same_model(one.spec, spec)]


def _cached(cache: Cache, spec: Spec, ledger: Ledger | None) -> tuple[Any, ...]:
    """What earlier searches measured, without what this one did before it was interrupted."""
    own = set() if ledger is None else {(one.started, one.candidate) for one in ledger.read()}
    return tuple(one for one in ours(cache.read(spec), cache.title) if (one.started, one.candidate) not in own)


def _name(question: Question, title: str) -> str:
    """The study of a question: the same for the same question, whoever asks it."""
    asked = (question.spec, title, question.budget_bytes, question.maximize, question.allow, question.fixed)
    content = msgspec.json.encode(msgspec.to_builtins(asked, str_keys=True), order="deterministic")
    return f"{question.spec.cell}-{question.spec.steps}-{hashlib.sha256(content).hexdigest()[:12]}"


def _title(devices: list[Device]) -> str:
    """The name that all devices have."""
    titles = {one.title() for one in devices}
    if len(titles) > 1 or len({one.name for one in devices}) < len(devices):
        raise MisuseError(
            rule="Devices that search together must be different ones of one kind",
            got=f"got {', '.join(f'{one.name} ({one.title()})' for one in devices)}",
            advice="Plan for each kind by itself.",
        )
    return titles.pop()


def _precisions(place: Place) -> tuple[str, ...]:
    """Of a card that is not here."""
    capability = place.platform.capability if place.platform else (0, 0)
    return ("fp32", *(("bf16",) if capability >= (8, 0) else ()), *(("fp16",) if capability >= (7, 0) else ()))


def _host_bytes() -> int:
    return open_device("cpu").budget().left_bytes


def _by_arithmetic(problem: Problem) -> Found:
    return Found(problem=problem, records=(), ended="estimate", seconds=0.0)


def _no_exports(candidate: Candidate) -> dict[str, str]:
    return {}


def _version() -> str:
    from importlib import import_module

    return str(import_module("oomguard").__version__)
