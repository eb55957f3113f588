"""The table: one row per candidate, with its knobs, its terms, what is expected of it, and what was measured."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from oomguard.candidate import KNOBS, Candidates
from oomguard.estimate.moments import TERMS
from oomguard.probe.record import Record
from oomguard.tradeoffs.front import front_rows
from oomguard.tradeoffs.grid import Group, make_groups
from oomguard.tradeoffs.subject import Predicted, Subject
from oomguard.tradeoffs.values import Over

ALWAYS = ("seq", "batch")
"""Fields of the spec that every table has."""
WHOLE_OR_NONE = ("window", "threads", "measured_peak_bytes")
"""Columns of whole numbers that may be missing."""
NOT_PROBED = ("accumulation", "workers", "prefetch")
"""Knobs that follow from others, or that a probe, which makes its data itself, does not turn."""


def make_table(subject: Subject, over: Over) -> pd.DataFrame:
    """The table of all candidates that the values give.

    >>> from oomguard.candidate import Candidate
    >>> from oomguard.estimate.place import CPU
    >>> from oomguard.spec import Spec
    >>> spec = Spec(cell="lstm", seq=1000)
    >>> subject = Subject(spec=spec, place=CPU, budget_bytes=1 << 30, candidate=Candidate(microbatch=32))
    >>> make_table(subject, {"microbatch": [8, 32]})[["microbatch", "accumulation", "fits"]].values.tolist()
    [[8, 4, True], [32, 1, False]]
    """
    names = [*ALWAYS, *(name for name in over if name not in KNOBS and name not in ALWAYS)]
    parts = [_part(subject, group, names) for group in make_groups(subject, over)]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    table = pd.DataFrame({name: _typed(name, column) for name, column in columns.items()}, copy=False)
    table.attrs = {"device": subject.place.device, "budget_bytes": subject.budget_bytes}
    return table


def _typed(name: str, column: Any) -> Any:
    """Numbers that may be missing stay whole numbers, and a verdict that is missing is not a word."""
    if name in WHOLE_OR_NONE:
        return pd.array(column, dtype="Int64")
    return pd.array(column, dtype="string") if name == "verdict" else column


def _part(subject: Subject, group: Group, names: Sequence[str]) -> dict[str, Any]:
    """The rows of one spec, as columns of equal length."""
    found = subject.predict(group.candidates, group.spec)
    columns: dict[str, Any] = {name: getattr(group.spec, name) for name in names}
    columns |= _knobs(subject, found)
    columns |= {f"{term}_bytes": found.estimate.terms[term] for term in TERMS}
    columns |= {
        "total_bytes": found.estimate.total_bytes,
        "peak_bytes": found.peak_bytes,
        "margin_bytes": found.margin_bytes,
        "fits": found.fits,
        "seconds_per_step": found.seconds_per_step,
        "time_factor": np.exp(found.doubt),
        "tokens_per_second": found.tokens_per_second,
    }
    columns |= _measured(subject.records, group, columns["engine"], columns["allocator"])
    length = len(group.candidates)
    return {name: np.broadcast_to(_array(value), length) for name, value in columns.items()}


def _array(value: Any) -> Any:
    """A value as an array; None, and what may be, as an object."""
    return np.asarray(value, dtype=object if value is None else None)


def _knobs(subject: Subject, found: Predicted) -> dict[str, Any]:
    """Every knob; what was left to PyTorch is what it would take, as far as that is known."""
    knobs = found.candidates.knobs
    usual = "plain" if subject.place.cuda else "steady"
    allocator = np.asarray(knobs["allocator"], dtype=object)
    knobs["engine"] = found.estimate.engine
    knobs["allocator"] = np.where(allocator == np.array(None), usual, allocator).astype(str)
    return knobs


def _measured(records: Sequence[Record], group: Group, engine: Any, allocator: Any) -> dict[str, Any]:
    """What was measured of each candidate: the latest of its records."""
    length = len(group.candidates)
    peaks, verdicts = (np.full(length, None, dtype=object) for _ in range(2))
    seconds, speeds = (np.full(length, np.nan) for _ in range(2))
    for record in sorted(records, key=lambda one: one.started):
        if record.spec == group.spec:
            rows, ran = _rows_of(record, group.candidates, engine, allocator), record.verdict.ran
            peaks[rows] = record.peak_bytes if ran else None
            seconds[rows] = record.seconds_per_step if ran else np.nan
            speeds[rows] = record.tokens_per_second if ran else np.nan
            verdicts[rows] = record.verdict.name
    return {
        "measured_peak_bytes": peaks,
        "measured_seconds_per_step": seconds,
        "measured_tokens_per_second": speeds,
        "verdict": verdicts,
    }


def _rows_of(record: Record, candidates: Candidates, engine: Any, allocator: Any) -> Any:
    """The candidates that a record is of."""
    knobs = record.candidate
    usual = "steady" if record.device == "cpu" else "plain"
    rows = (np.asarray(engine) == (record.engine or "")) & (np.asarray(allocator) == (knobs.allocator or usual))
    for name in KNOBS:
        if name not in (*NOT_PROBED, "engine", "allocator"):
            rows = rows & np.asarray(getattr(candidates, name) == getattr(knobs, name))
    return np.broadcast_to(rows, len(candidates))


def front_of(table: pd.DataFrame) -> pd.DataFrame:
    """Of what fits, the rows that nothing beats in both memory and speed, from the least memory on.

    >>> figures = {"fits": [True, True, False], "peak_bytes": [2, 3, 1], "tokens_per_second": [5, 4, 9]}
    >>> front_of(pd.DataFrame(figures)).index.tolist()
    [0]
    """
    fitting = table[table["fits"]]
    return fitting.iloc[front_rows(fitting["peak_bytes"], fitting["tokens_per_second"])]
