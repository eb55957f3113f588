"""The estimate of many candidates at once: a million of one spec in less than a second.

The arithmetic takes arrays for the knobs that are numbers. What the others choose (precision, engine, ...) is chosen
once for a whole group, so candidates are sorted into groups that agree on those, and each group goes in chunks that
fit the cache.
"""

from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from oomguard.candidate import Candidate, Candidates, is_none
from oomguard.estimate.breakdown import Estimate, estimate_step
from oomguard.estimate.margin import margin_bytes
from oomguard.estimate.place import Place
from oomguard.spec import Spec

CHUNK_ROWS = 1 << 15
"""A few dozen arrays of this length fit a core's cache (measured: half as fast in one piece)."""
_FIGURES = ("total_bytes", "margin_bytes", "allocated_bytes", "reserved_bytes", "host_bytes", "steps")
_NAME = "U32"
"""Room for the name of any moment or engine."""

Rows = Any
"""A slice, or an array of row numbers."""


def estimate_batch(spec: Spec, candidates: Candidates, place: Place, *, training: bool = True) -> Estimate:
    """The estimates of all candidates, in their order: arrays in the place of numbers, and the same figures.

    >>> from oomguard.candidate import serve
    >>> from oomguard.estimate.place import CPU
    >>> spec = Spec(cell="lstm", seq=1000)
    >>> found = estimate_batch(spec, serve(spec, Candidates(microbatch=[32, 4])), CPU)
    >>> found.moment.tolist(), bool(found.total_bytes[0] > found.total_bytes[1])
    (['backward of layer 2', 'backward of layer 2'], True)
    """
    whole, engines = _Columns(len(candidates)), []
    for rows, group in _groups(spec, candidates):
        # the arithmetic reads knobs and never asks which of the two classes has them
        same = cast(Candidate, group)
        found = estimate_step(spec, same, place, training=training)
        figures = {name: getattr(found, name) for name in _FIGURES if name != "margin_bytes"}
        figures["margin_bytes"] = margin_bytes(spec, found.growth_bytes, same, place)
        whole.put("figures", rows, {name: value for name, value in figures.items() if value is not None})
        whole.put("terms", rows, found.terms)
        whole.put("moments", rows, found.moments)
        whole.put("names", rows, {"moment": found.moment}, dtype=_NAME)
        engines.append((rows, found.engine))
    parts = whole.parts
    return Estimate(
        **parts["figures"],
        terms=parts["terms"],
        moment=parts["names"]["moment"],
        moments=parts["moments"],
        engine=_engine(engines, len(candidates)),
        device=place.device,
        candidate=candidates,
    )


def _engine(engines: list[tuple[Rows, str]], length: int) -> Any:
    """The engine of all candidates, or an array if they have several."""
    if len({engine for _, engine in engines}) == 1:
        return engines[0][1]
    column = np.empty(length, dtype=_NAME)
    for rows, engine in engines:
        column[rows] = engine
    return column


class _Columns:
    """Columns of a table that is filled group by group. A moment that a group does not have stays 0."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.parts: dict[str, dict[str, Any]] = {}

    def put(self, part: str, rows: Rows, values: dict[str, Any], dtype: Any = np.int64) -> None:
        columns = self.parts.setdefault(part, {})
        for name, value in values.items():
            if name not in columns:
                columns[name] = np.zeros(self.length, dtype=dtype)
            columns[name][rows] = value


def _groups(spec: Spec, candidates: Candidates) -> Iterator[tuple[Rows, Candidates]]:
    """Rows, and the candidates there: numbers as arrays, everything else one value."""
    key = _key(spec, candidates)
    if key is None:
        for start in range(0, len(candidates), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            yield rows, _pick(candidates, rows)
        return
    order = np.argsort(key, kind="stable")
    borders = np.flatnonzero(np.diff(key[order])) + 1
    for group in np.split(order, borders):
        for start in range(0, len(group), CHUNK_ROWS):
            chunk = group[start : start + CHUNK_ROWS]
            yield chunk, _pick(candidates, chunk)


def _key(spec: Spec, candidates: Candidates) -> Any:
    """A number for every row, equal for rows of one group; None if all are one group."""
    key, size = None, 1
    for name, values in candidates.arrays.items():
        digits = [is_none(values)] if values.dtype == object else []
        if values.dtype.kind not in "iu":
            digits += [values == choice for choice in {*values.tolist()} - {None}] if not _numeric(name) else []
        elif name == "segments" and spec.bidirectional:  # plain and in pieces, it consists of different calls
            digits += [values > 1]
        for digit in digits:
            if digit.any() and not digit.all():
                key = digit * size if key is None else key + digit * size
                size *= 2
    return key


def _numeric(name: str) -> bool:
    return name in ("window", "threads")


def _pick(candidates: Candidates, rows: Rows) -> Candidates:
    knobs = candidates.knobs
    for name, values in candidates.arrays.items():
        some = values[rows]
        if some.dtype.kind in "iu":
            knobs[name] = some
        elif _numeric(name):
            knobs[name] = None if some[0] is None else some.astype(np.int64)
        else:
            knobs[name] = some[:1].tolist()[0]
    return Candidates(**knobs)
