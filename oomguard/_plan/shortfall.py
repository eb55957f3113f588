"""Shortfall: why there is no plan, and what would make one: every figure is that of a screen of the changed problem."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from oomguard._core.errors import OomguardError, flag
from oomguard._core.units import format_bytes
from oomguard._estimate.breakdown import estimate_step
from oomguard._plan.advice import Case, change_spec, in_flags
from oomguard._plan.value import figures
from oomguard._probe.record import Record
from oomguard._search.lengths import longest_that_fits, with_steps
from oomguard._search.screen import screen
from oomguard._search.space import ALLOWED, Problem, make_space
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec

MOST = 0.9
"""Share of the budget from which on the runtime alone fills it."""
WORTH_STEPS = 16
"""Shorter sequences than this are not advised."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """A change that would lower the least that is needed."""

    change: str
    """The change as flags, `--allow window`, or in words: `sequences cut to 4,000 steps`."""
    needed_bytes: int
    """The least that would then be needed, margin included."""
    fits: bool
    """Whether that is within the budget."""
    allowed: bool
    """Whether the change was already allowed (and is not enough)."""


class Shortfall(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no plan."""

    needed_bytes: int
    """The least that any candidate needs, margin included."""
    budget_bytes: int
    """The budget."""
    candidate: Candidate
    """The candidate that needs least."""
    terms: dict[str, int]
    """The terms of its estimate."""
    term: str
    """The largest of these terms."""
    ways: tuple[Way, ...]
    """Changes that would help; those that make it fit come first."""
    records: tuple[Record, ...]
    """The records of all probes that were run."""

    @property
    def message(self) -> str:
        """What is wrong, what was given, what to do."""
        failed = [record for record in self.records if not record.verdict.ran]
        if failed and self.needed_bytes <= self.budget_bytes:  # memory is not the reason
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


def explain(problem: Problem, records: Sequence[Record]) -> Shortfall:
    """Why nothing fits: the least that is needed, the largest term of it, and what would lower it."""
    table = screen(problem, records)
    row = table.smallest
    candidate, needed_bytes = table.candidates[row], int(table.expected.safe_bytes[row])
    estimate = estimate_step(problem.spec, candidate, problem.target)
    terms = figures(estimate).terms
    # the runtime is named only if it fills most of the budget by itself
    named = [name for name in terms if name != "runtime" or terms[name] > MOST * problem.budget_bytes]
    case = Case(spec=problem.spec, estimate=estimate, candidate=candidate, target=problem.target)
    ways = [way for way in _ways(problem, records, case) if way.needed_bytes < needed_bytes]
    return Shortfall(
        needed_bytes=needed_bytes,
        budget_bytes=problem.budget_bytes,
        candidate=candidate,
        terms=terms,
        term=max(named, key=lambda name: terms[name]),
        ways=tuple(sorted(ways, key=lambda way: not way.fits)),
        records=tuple(records),
    )


def _ways(problem: Problem, records: Sequence[Record], case: Case) -> Iterator[Way]:
    """Each lossy knob by itself and all of them; each fixed knob left to the search; another spec."""

    def way(change: str, *, spec: Spec = problem.spec, allowed: bool = False, **choices: Any) -> Way:
        own = replace(problem.space.choices, **choices)
        space = make_space(spec, problem.target, problem.budget_bytes, own) if choices else problem.space
        table = screen(replace(problem, spec=spec, space=space), records)
        needed = int(table.expected.safe_bytes[table.smallest])
        return Way(change=change, needed_bytes=needed, fits=needed <= problem.budget_bytes, allowed=allowed)

    allowed, fixed = problem.space.choices.allow, problem.space.choices.fixed
    for words in [*((word,) for word in ALLOWED), ALLOWED]:
        if "8bit" not in words or importlib.util.find_spec("bitsandbytes") is not None:
            allow = tuple(dict.fromkeys([*allowed, *words]))
            yield way(in_flags(allow=",".join(allow)), allow=allow, allowed={*words} <= {*allowed})
    for name in fixed:
        rest = {key: value for key, value in fixed.items() if key != name}
        yield way(f"leaving {flag(name)} to the search", fixed=rest)

    def fits(steps: int) -> bool:
        return bool(screen(replace(problem, spec=with_steps(problem.spec, steps)), records).eligible.any())

    steps = longest_that_fits(fits, 0, problem.spec.steps, parts=100)
    if steps >= WORTH_STEPS:
        # --seq does not cut a histogram; data can be cut while it is read
        cut = f"sequences cut to {steps:,} steps (of --data: {in_flags(seq=steps, truncate=True)})"
        shorter = in_flags(seq=steps) if problem.spec.lengths is None else cut
        yield way(shorter, spec=with_steps(problem.spec, steps))
    for change in change_spec(case):
        yield way(in_flags(**change.fields), spec=msgspec.structs.replace(problem.spec, **change.fields))
