"""The estimate of many candidates at once: a million of one spec in less than a second.

The arithmetic takes arrays for the knobs that are numbers. The other knobs (precision, engine, ...) have one value in a
group, so candidates are sorted into groups that agree on those, and each group goes in chunks that fit the cache.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from oomguard._estimate.breakdown import Estimate, estimate_step, margin_bytes
from oomguard._estimate.call import Count, Ints
from oomguard._estimate.target import Target
from oomguard._spec.candidate import Candidates, is_none
from oomguard._spec.spec import Spec

CHUNK_ROWS = 1 << 15
"""Ints of a chunk: a few dozen arrays of this length fit a core's cache (in one piece it takes twice as long)."""
_NAME = "U32"
"""Room for the name of any moment or engine."""
_FIGURES = ("total_bytes", "host_bytes", "steps", "allocated_bytes", "reserved_bytes")
"""Figures of an estimate, beside its margin; None where a device does not have them."""
_NUMERIC = ("window", "threads")
"""Knobs whose columns can hold None beside numbers."""


def estimate_batch(spec: Spec, candidates: Candidates, target: Target, *, training: bool = True) -> Estimate:
    """Estimate all candidates, in their order: the figures of each are those that it has alone.

    >>> from oomguard._spec.candidate import serve
    >>> from oomguard._estimate.target import CPU
    >>> spec = Spec(cell="lstm", seq=1000)
    >>> found = estimate_batch(spec, serve(spec, Candidates(microbatch=[32, 4])), CPU)
    >>> found.moment.tolist(), bool(found.total_bytes[0] > found.total_bytes[1])
    (['backward of layer 2', 'backward of layer 2'], True)
    """
    length = len(candidates)
    figures: dict[str, Any] = {}
    terms: dict[str, Ints] = {}
    moments: dict[str, Ints] = {}
    moment, engine = np.empty(length, dtype=_NAME), np.empty(length, dtype=_NAME)
    for rows, group in _groups(spec, candidates):
        found = estimate_step(spec, group, target, training=training)
        margin = margin_bytes(spec, found.growth_bytes, group, target)
        _fill(figures, rows, {"margin_bytes": margin} | {name: getattr(found, name) for name in _FIGURES}, length)
        _fill(terms, rows, found.terms, length)
        _fill(moments, rows, found.moments, length)
        moment[rows], engine[rows] = found.moment, found.engine
    return Estimate(
        **figures,
        terms=dict(terms),
        moment=moment,
        moments=dict(moments),
        engine=str(engine[0]) if (engine == engine[0]).all() else engine,
        device=target.device,
        candidate=candidates,
    )


def _fill(columns: dict[str, Ints], rows: Ints, values: Mapping[str, Count | None], length: int) -> None:
    """Write the rows of one group into columns. A moment that a group does not have stays 0."""
    for name, value in values.items():
        if value is not None:
            columns.setdefault(name, np.zeros(length, dtype=np.int64))[rows] = value


def _groups(spec: Spec, candidates: Candidates) -> Iterator[tuple[Ints, Candidates]]:
    """Ints, and the candidates there: numbers as arrays, everything else one value."""
    key = _key(spec, candidates)
    order = np.argsort(key, kind="stable")
    borders = np.flatnonzero(np.diff(key[order])) + 1
    for group in np.split(order, borders):
        for start in range(0, len(group), CHUNK_ROWS):
            rows = group[start : start + CHUNK_ROWS]
            yield rows, _pick(candidates, rows)


def _key(spec: Spec, candidates: Candidates) -> Ints:
    """A number for every row, equal for rows of one group."""
    key = np.zeros(len(candidates), dtype=np.int64)
    for name, values in candidates.arrays.items():
        digits = [is_none(values)] if values.dtype == object else []
        if values.dtype.kind not in "iu":
            digits += [values == choice for choice in {*values.tolist()} - {None}] if name not in _NUMERIC else []
        elif name == "segments" and spec.bidirectional:  # plain and in pieces, it consists of different calls
            digits += [values > 1]
        for digit in digits:
            key = 2 * key + digit
    return key


def _pick(candidates: Candidates, rows: Ints) -> Candidates:
    knobs = candidates.knobs
    for name, values in candidates.arrays.items():
        some = values[rows]
        if some.dtype.kind in "iu":
            knobs[name] = some
        elif name in _NUMERIC:
            knobs[name] = None if some[0] is None else some.astype(np.int64)
        else:
            knobs[name] = some[:1].tolist()[0]
    return Candidates(**knobs)
