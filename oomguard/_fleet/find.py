"""From jobs and cards to a fleet."""

from collections.abc import Hashable, Sequence

import numpy as np

from oomguard._core.units import format_bytes
from oomguard._estimate import cards
from oomguard._estimate.target import on_card
from oomguard._fleet.fit import Request, fit_all
from oomguard._fleet.measured import correct
from oomguard._fleet.pairs import NEVER_BYTES, Ints, Pairs
from oomguard._fleet.read import FleetCard, Job
from oomguard._fleet.tasks import fit_task
from oomguard._fleet.value import Fleet
from oomguard._plan.advice import explain
from oomguard._search.space import Choices, Problem, make_space
from oomguard._task.task import Task

MOST_ADVISED = 3
"""Jobs that fit nowhere for which changes are looked for: that takes seconds for each, unlike everything else here."""


def find_fleet(jobs: Sequence[Job], cards_: Sequence[FleetCard]) -> Fleet:
    """Fit all jobs to all cards. Jobs that ask for the same are fitted once."""
    known, pairs = [card.card for card in cards_], Pairs(len(jobs), len(cards_))
    sources = _sources(jobs)
    first = [number for number, source in enumerate(sources) if number == source]
    batches = np.array([1 if job.request is None else job.request.spec.batch for job in jobs])
    specs = [number for number in first if jobs[number].request is not None]
    requests = [request for number in specs if (request := jobs[number].request) is not None]
    fit_all(requests, known, pairs, specs)
    for number in first:
        if jobs[number].task is not None:
            batches[number] = fit_task(jobs[number], number, known, pairs)
    pairs.copy_rows(np.array(sources))
    batches = batches[sources]
    if any(job.measured for job in jobs):
        correct(jobs, cards_, pairs)
    sequences = np.array([_sequences(job) for job in jobs])
    return Fleet(
        jobs=jobs, cards=cards_, pairs=pairs, batches=batches, sequences=sequences, advice=_advice(jobs, known, pairs)
    )


def _sources(jobs: Sequence[Job]) -> list[int]:
    """For each job the first one that asks for the same."""
    seen = dict[Hashable, int]()
    return [seen.setdefault(_question(job), number) for number, job in enumerate(jobs)]


def _question(job: Job) -> Hashable:
    if job.request is not None:
        return job.request.model, job.request.spec.steps, job.request.spec.batch
    task = id(job.task) if isinstance(job.task, Task) else job.task
    return task, job.seq, job.batch, job.allow


def _sequences(job: Job) -> int:
    """The sequences of an epoch: as the job says, or as the histogram of lengths has them; 0 if nobody says."""
    lengths = {} if job.request is None else job.request.spec.lengths or {}
    return job.sequences or sum(lengths.values())


def _advice(jobs: Sequence[Job], known: list[cards.Card], pairs: Pairs) -> dict[int, tuple[str, ...]]:
    """What would make the jobs fit that fit nowhere: another card and, for the first few, a change of the job."""
    advice, asked = dict[int, tuple[str, ...]](), dict[Hashable, tuple[str, ...]]()
    largest = max(known, key=lambda card: card.usable_bytes)
    for number in np.flatnonzero(~pairs.fits.any(axis=1)).tolist():
        changes: tuple[str, ...] = ()
        job = jobs[number]
        if job.request is not None and (_question(job) in asked or len(asked) < MOST_ADVISED):
            changes = asked.setdefault(_question(job), asked.get(_question(job)) or _changes(job.request, largest))
        advice[number] = (*_other_card(pairs.needed_bytes[number]), *changes)
    return advice


def _other_card(needed: Ints) -> tuple[str, ...]:
    """The smallest card of all that would have room."""
    needed_bytes = int(needed[needed > 0].min()) if (needed > 0).any() else NEVER_BYTES
    if needed_bytes >= NEVER_BYTES:
        return ("No knob makes it run on a card, whatever the memory: cuDNN takes at most 65,535 steps at a time.",)
    all_cards = sorted(map(cards.card, cards.names()), key=lambda card: card.usable_bytes)
    larger = [card for card in all_cards if card.usable_bytes >= needed_bytes and not card.shared_memory]
    size = format_bytes(needed_bytes)
    return (f"It needs {size}, as {larger[0].name} has." if larger else f"It needs {size}: more than any card has.",)


def _changes(request: Request, card: cards.Card) -> tuple[str, ...]:
    """Changes of a job that make it fit the largest card of the list."""
    target = on_card(card)
    choices = Choices(precisions=target.card_precisions, allow=request.allow, fixed=request.fixed)
    space = make_space(request.spec, target, card.usable_bytes, choices)
    problem = Problem(spec=request.spec, target=target, space=space, budget_bytes=card.usable_bytes)
    ways = [way for way in explain(problem, ()).ways if way.fits]
    return tuple(f"{way.change} would need {format_bytes(way.needed_bytes)}, and fit {card.name}." for way in ways[:3])
