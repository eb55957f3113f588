"""What plans and ledgers know of jobs: peaks and times that were measured on the same kind of card."""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np

from oomguard._core.errors import MisuseError
from oomguard._estimate import cards
from oomguard._estimate.target import on_card
from oomguard._fleet.pairs import Pairs
from oomguard._fleet.read import FleetCard, Job
from oomguard._plan.store import load_plan
from oomguard._plan.task_value import TaskPlan
from oomguard._plan.value import Plan
from oomguard._probe.record import Record, open_ledger
from oomguard._search.propose import choose
from oomguard._search.screen import record_of, screen
from oomguard._search.space import Choices, Problem, make_space
from oomguard._spec.lengths import same_model
from oomguard._task.task import name_of


def correct(jobs: Sequence[Job], cards_: Sequence[FleetCard], pairs: Pairs) -> None:
    """Choose again by records, for each pair of a job and a card of which there are some."""
    for number, job in enumerate(jobs):
        plans, records = _evidence(job.measured)
        by_card = defaultdict[str | None, list[Record]](list)
        for record in records:
            by_card[_card_name(record.title)].append(record)
        for column, card in enumerate(cards_):
            if job.request is not None:
                own = [record for record in by_card[card.name] if same_model(record.spec, job.request.spec)]
                if own:
                    _choose(job, own, card, pairs, (number, column))
            for plan in plans:
                if job.task is not None and _card_name(plan.environment.title) == card.name:
                    _take(job, plan, card, pairs, (number, column))


def _evidence(paths: Iterable[str]) -> tuple[list[TaskPlan], list[Record]]:
    """The plans of tasks, and the records of plans and ledgers."""
    plans, records = list[TaskPlan](), list[Record]()
    for path in paths:
        found = _read(path)
        if isinstance(found, TaskPlan):
            plans.append(found)
        else:
            records += found
    return plans, records


@cache
def _read(path: str) -> TaskPlan | tuple[Record, ...]:
    """The plan of a task, or the records of a plan of a spec or of a ledger."""
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "plan.json")):
        ledger = open_ledger(path)
        if not ledger.path.exists():
            advice = "Give a plan file, the directory of a run, or a ledger."
            raise MisuseError(rule=f"measured names plans and ledgers, and {path} is neither", got="", advice=advice)
        return tuple(record for record in ledger.read() if isinstance(record, Record))
    plan = load_plan(path)
    return plan.records if isinstance(plan, Plan) else plan


@cache
def _card_name(title: str | None) -> str | None:
    """The card of that name; None if it is a processor, or a card that is not known."""
    try:
        return None if title is None else cards.card(title).name
    except MisuseError:
        return None


def _choose(job: Job, records: list[Record], card: FleetCard, pairs: Pairs, place: tuple[int, int]) -> None:
    """Choose as a search does that has these records."""
    assert job.request is not None
    request, target, budget_bytes = job.request, on_card(card.card), card.card.usable_bytes
    choices = Choices(precisions=target.card_precisions, allow=request.allow, fixed=request.fixed)
    space = make_space(request.spec, target, budget_bytes, choices)
    problem = Problem(spec=request.spec, target=target, space=space, budget_bytes=budget_bytes)
    table = screen(problem, records)
    row = choose(table)
    least_bytes = int(table.expected.safe_bytes[table.smallest])
    if row is None:
        pairs.put(*place, None, least_bytes=least_bytes)
        return
    record, timed = record_of(records, table, row), any(one.seconds_per_pass for one in records)
    expected = table.expected[row]
    pairs.put(
        *place,
        table.candidates[row],
        peak_bytes=expected.peak_bytes,
        margin_bytes=expected.margin_bytes,
        host_bytes=int(np.broadcast_to(table.estimate.host_bytes, len(table))[row]),
        seconds=expected.seconds_per_step if timed else np.nan,
        measured=record is not None and record.spec.steps == request.spec.steps,
    )


def _take(job: Job, plan: TaskPlan, card: FleetCard, pairs: Pairs, place: tuple[int, int]) -> None:
    """Take the candidate of a task's plan for such a card, if it is for the same batch."""
    if plan.task != name_of(job.task) or plan.seq != job.seq or plan.batch != (job.batch or plan.batch):
        return
    margin_bytes = 0 if plan.confirmed else plan.expected.margin_bytes
    if plan.peak_bytes + margin_bytes <= card.card.usable_bytes:
        seconds = np.nan if plan.seconds_per_step is None else plan.seconds_per_step
        sizes = {"peak_bytes": plan.peak_bytes, "margin_bytes": margin_bytes}
        pairs.put(*place, plan.candidate, **sizes, seconds=seconds, measured=plan.confirmed)
