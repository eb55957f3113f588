"""The largest there is: the largest microbatch that fits, or the longest sequences, in memory and in time."""

import math
from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np

from oomguard._core.errors import MisuseError
from oomguard._predict.fit import Floats
from oomguard._probe.record import Record
from oomguard._search.screen import CandidateTable, Ints, Mask, screen
from oomguard._search.space import WORTH_LOSSY, Problem
from oomguard._spec.candidate import make_candidate
from oomguard._spec.lengths import longest_that_fits, same_model
from oomguard._spec.spec import Spec


def longest_run(problem: Problem, records: Sequence[Record]) -> int:
    """The steps of the longest sequences that ran within budget and time; 0 if none of the asked length did."""
    own = [record for record in records if record.verdict.ran and same_model(record.spec, problem.spec)]
    lengths = sorted({record.spec.steps for record in own if record.spec.batch == problem.spec.batch}, reverse=True)
    for steps in lengths:
        if steps < problem.spec.steps:
            break
        table = screen(problem, records, with_length(problem.spec, steps))
        if np.any(table.eligible & (table.longest >= steps) & table.in_time(problem.step_seconds)):
            return steps
    return 0


def with_length(spec: Spec, steps: int) -> Spec:
    """The spec with sequences of one length."""
    return spec if spec.steps == steps else msgspec.structs.replace(spec, seq=steps, lengths=None)


def sizes_of(table: CandidateTable, aim: str) -> Ints:
    """What is to be as large as possible: the microbatch of each candidate, or the steps."""
    return table.microbatches if aim == "microbatch" else np.full(len(table), table.spec.steps)


def _worth(table: CandidateTable, aim: str) -> Floats:
    """The sizes, of which half precision must exceed others by a stated share."""
    return sizes_of(table, aim) / np.where(table.exact, 1.0, WORTH_LOSSY)


def largest(
    problem: Problem, records: Sequence[Record], aim: str, pass_seconds: float = math.inf
) -> tuple[CandidateTable, int | None]:
    """The table, at the longest sequences that fit if that is the aim, and the row of the largest and fastest.

    A step of the longest sequences takes no longer than the problem says, and a pass at most `pass_seconds`.
    """
    table = screen(problem, records)
    if aim == "seq" and table.eligible.any():
        table = _longest(problem, records, table, pass_seconds)
    if not table.eligible.any():
        return table, None
    usable = table.eligible
    for rows in (_in_time(problem, table, pass_seconds), table.exact) if aim == "seq" else ():
        usable = usable & rows if (usable & rows).any() else usable
    return table, int(np.lexsort((table.costs, -_worth(table, aim), ~usable))[0])


def _in_time(problem: Problem, table: CandidateTable, pass_seconds: float) -> Mask:
    """Where a step of long sequences takes no longer than it may, and a pass no longer than there is time for."""
    return table.in_time(problem.step_seconds) & (table.pass_seconds <= pass_seconds)


def _longest(problem: Problem, records: Sequence[Record], table: CandidateTable, pass_seconds: float) -> CandidateTable:
    """The table at the longest sequences of which some candidate fits in memory and time, to a part in 200.

    Half precision counts only if it allows sequences that are longer by a stated share.
    """
    tables, low = {problem.spec.steps: table}, problem.spec.steps

    def fits(steps: int, *, exact: bool = False) -> bool:
        try:
            spec = with_length(problem.spec, steps)
            make_candidate(spec, microbatch=1, segments=problem.space.choices.fixed.get("segments"))
            tables[steps] = screen(problem, records, spec)
        except MisuseError:  # a length that no spec can have, or fewer steps than fixed segments
            return False
        rows = tables[steps].eligible & _in_time(problem, tables[steps], pass_seconds)
        return bool((rows & (tables[steps].exact | (not exact))).any())

    longest = longest_that_fits(fits, low, parts=200)
    nearly, fits_exactly = max(low, math.ceil(longest / WORTH_LOSSY)), partial(fits, exact=True)
    if longest > low and not tables[longest].exact.all() and fits_exactly(nearly):
        longest = longest_that_fits(fits_exactly, nearly, longest + 1, parts=200)
    return tables[longest]
