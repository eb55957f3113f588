"""If nothing fits: the least that would be needed, what stands in the way, and which knob would make it fit."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from oomguard.candidate import Candidate
from oomguard.errors import OomguardError
from oomguard.probe.record import Record
from oomguard.search.problem import Problem
from oomguard.search.screen import Screened, screen
from oomguard.search.shorten import with_steps
from oomguard.search.space import Here, make_space
from oomguard.units import format_bytes

MOST = 0.9
"""Of the budget: what fills it by itself."""
WORTH_STEPS = 16
"""Sequences shorter than this are no way out."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """What would lower the least that is needed."""

    change: str
    """As flags, `--allow window`, or in words where no flag alone does it: `sequences cut to 4,000 steps`."""
    needed_bytes: int
    """The least that would then be needed, margin included."""
    fits: bool
    """Whether that is within the budget."""
    allowed: bool
    """Whether it was allowed (and is not enough)."""


class Shortfall(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no plan."""

    needed_bytes: int
    """The least that any candidate needs, margin included."""
    budget_bytes: int
    """What there is."""
    candidate: Candidate
    """The candidate that needs least."""
    terms: dict[str, int]
    """Of its estimate."""
    term: str
    """The largest of them: what stands in the way."""
    ways: tuple[Way, ...]
    """What would help, what fits first."""
    records: tuple[Record, ...]
    """What was run."""

    @property
    def message(self) -> str:
        """The rule, what was got, what to do."""
        failed = [one for one in self.records if not one.verdict.ran]
        if failed and self.needed_bytes <= self.budget_bytes:  # memory is not what stands in the way
            words = f"A candidate must run before it is planned, but none did: {failed[-1].verdict.name}, "
            return words + f"{failed[-1].message} See what happens with oomguard probe and the same flags."
        words = f"The smallest candidate must fit the budget, but needs {format_bytes(self.needed_bytes)} of "
        words += f"{format_bytes(self.budget_bytes)} ({format_bytes(self.terms[self.term])} of it {self.term}). "
        enough = [way for way in self.ways if way.fits]
        if not enough:
            return words + f"No knob would make it fit: raise the budget to {format_bytes(self.needed_bytes)}."
        return words + " Or: ".join(f"{way.change} would need {format_bytes(way.needed_bytes)}." for way in enough[:3])


class NothingFitsError(OomguardError):
    """There is no plan: not even the smallest candidate fits. `shortfall` has the figures.

    >>> import oomguard
    >>> try:
    ...     oomguard.find_feasible_config(cell="lstm", seq=10_000, hidden=4096, device="t4", budget="2GiB")
    ... except oomguard.NothingFitsError as error:
    ...     print(error.shortfall.term, error.shortfall.needed_bytes > 2 << 30)
    weights True
    """

    def __init__(self, shortfall: Shortfall) -> None:
        super().__init__(shortfall.message)
        self.shortfall = shortfall


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a problem was made of, so that it can be made otherwise."""

    here: Here
    allow: tuple[str, ...]


def explain(problem: Problem, records: Sequence[Record], asked: Asked) -> Shortfall:
    """What to say if nothing fits."""
    view = screen(problem, records)
    row = _smallest(view)
    terms = {name: int(np.broadcast_to(size, len(view.fits))[row]) for name, size in view.estimate.terms.items()}
    ways = [*_knobs(problem, records, asked), *_unfixed(problem, records, asked), *_shorter(problem, records)]
    needed = int(view.safe_bytes[row])
    return Shortfall(
        needed_bytes=needed,
        budget_bytes=problem.budget_bytes,
        candidate=view.candidates[row],
        terms=terms,
        term=_obstacle(terms, problem.budget_bytes),
        ways=tuple(sorted((way for way in ways if way.needed_bytes < needed), key=lambda way: not way.fits)),
        records=tuple(records),
    )


def _obstacle(terms: dict[str, int], budget_bytes: int) -> str:
    """The largest term; the runtime only if it fills most of the budget by itself."""
    own = {name: size for name, size in terms.items() if name != "runtime" or size > MOST * budget_bytes}
    return max(own, key=lambda name: own[name])


def _smallest(view: Screened) -> int:
    runs = np.broadcast_to(view.estimate.runs, len(view.fits))
    return int(np.argmin(np.where(runs, view.safe_bytes, np.iinfo(np.int64).max)))


def _way(problem: Problem, records: Sequence[Record], change: str, *, allowed: bool) -> Way:
    view = screen(problem, records)
    needed = int(view.safe_bytes[_smallest(view)])
    return Way(change=change, needed_bytes=needed, fits=needed <= problem.budget_bytes, allowed=allowed)


def _knobs(problem: Problem, records: Sequence[Record], asked: Asked) -> list[Way]:
    """Each lossy knob by itself, and all of them."""
    choices = [("precision",), ("window",), ("8bit",), ("precision", "window", "8bit")]
    found = []
    for names in choices:
        allow = tuple(dict.fromkeys([*asked.allow, *names]))
        if "8bit" in names and importlib.util.find_spec("bitsandbytes") is None:
            continue
        given = {*names} <= {*asked.allow}
        space = make_space(problem.spec, problem.place, problem.budget_bytes, asked.here, allow)
        found.append(_way(replace(problem, space=space), records, f"--allow {','.join(allow)}", allowed=given))
    return found


def _unfixed(problem: Problem, records: Sequence[Record], asked: Asked) -> list[Way]:
    """Without the knobs that the user fixed."""
    found: list[Way] = []
    for name in asked.here.fixed:
        rest: dict[str, Any] = {key: value for key, value in asked.here.fixed.items() if key != name}
        space = make_space(
            problem.spec, problem.place, problem.budget_bytes, replace(asked.here, fixed=rest), asked.allow
        )
        change = f"leaving --{name.replace('_', '-')} to the search"
        found.append(_way(replace(problem, space=space), records, change, allowed=False))
    return found


def _shorter(problem: Problem, records: Sequence[Record]) -> list[Way]:
    """The longest sequences that would fit, to two digits."""
    low, high = 0, problem.spec.steps
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        shorter = replace(problem, spec=with_steps(problem.spec, middle))
        low, high = (middle, high) if screen(shorter, records).eligible.any() else (low, middle)
    if low < WORTH_STEPS:
        return []
    shorter = replace(problem, spec=with_steps(problem.spec, low))
    # --seq does not cut a histogram; data can be cut while it is read
    cut = f"sequences cut to {low:,} steps (of --data: --seq {low} --truncate)"
    return [_way(shorter, records, f"--seq {low}" if problem.spec.lengths is None else cut, allowed=False)]
