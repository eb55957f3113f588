"""Fleets: many jobs on many cards."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oomguard._report.progress import showing

if TYPE_CHECKING:
    from oomguard._fleet.value import Fleet


def fleet(
    jobs: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
    cards: str | os.PathLike[str] | Sequence[str | Mapping[str, Any]],
    *,
    progress: bool = True,
) -> "Fleet":
    """Find the cheapest and the fastest card for each of many jobs, with the knobs with which it fits.

    `jobs` is a TOML file with `[[job]]` tables, or a list of dicts with the same fields: `name` and the fields of a
    `Spec`, or `task` with the name of a task, and knobs that are fixed. A list of values is a grid. `cards` is a TOML
    file with `[[card]]` tables, or a list of names or of dicts with `name`, `count` and `price` (per hour).

    Memory is by arithmetic. Times and costs are known where `measured` of a job names plans or ledgers with records of
    such a card; nothing else is told of them.

    >>> jobs = [{"name": "words", "cell": "lstm", "seq": [1000, 100_000], "hidden": 512}]
    >>> found = fleet(jobs, [{"name": "t4", "price": 0.35}, {"name": "a100-80gb", "price": 1.8}], progress=False)
    >>> [(job.name, job.cheapest.card, job.cheapest.candidate.segments) for job in found.results()]
    [('words-seq1000', 't4-16gb', 1), ('words-seq100000', 't4-16gb', 16)]
    >>> found.table().groupby("card")["fits"].all().to_dict()
    {'a100-80gb': True, 't4-16gb': True}
    """
    from oomguard._fleet.find import find_fleet
    from oomguard._fleet.read import read_cards, read_jobs

    with showing(progress):
        return find_fleet(read_jobs(jobs), read_cards(cards))
