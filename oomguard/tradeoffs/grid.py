"""The grid: every candidate that some values give, of every spec that they give."""

import itertools
import math
from typing import Any, NamedTuple

import msgspec
import numpy as np

from oomguard.candidate import KNOBS, Candidate, Candidates, is_none, make_candidate, serve
from oomguard.checks import flag, shown
from oomguard.errors import MisuseError
from oomguard.estimate.place import Place, engine_for
from oomguard.spec import Spec
from oomguard.tradeoffs.subject import Subject
from oomguard.tradeoffs.values import Over

MOST_ROWS, MOST_SPECS = 1_000_000, 2_000
"""Of a table: a million candidates take some seconds, and so do two thousand specs."""


class Group(NamedTuple):
    """Candidates of one spec."""

    spec: Spec
    """The spec."""
    candidates: Candidates
    """Its candidates, as arrays."""


def make_groups(subject: Subject, over: Over) -> list[Group]:
    """All candidates, spec by spec. Combinations that no candidate can have are left out.

    A value that is left out everywhere is an error: that of the first combination with it.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> subject, over = find_subject(cell="lstm", seq=1000, budget="1GiB", device="t4")
    >>> [(one.spec.seq, len(one.candidates)) for one in make_groups(subject, {"seq": [2, 9], "segments": [1, 4]})]
    [(2, 1), (9, 2)]
    """
    fields = {name: values for name, values in over.items() if name not in KNOBS}
    knobs = {name: values for name, values in over.items() if name in KNOBS}
    _check_size(over, math.prod(map(len, fields.values())))
    groups, errors = [], []
    for combination in itertools.product(*fields.values()):
        chosen = dict(zip(fields, combination, strict=True))
        try:
            spec = msgspec.structs.replace(subject.spec, **chosen)
        except MisuseError as error:
            errors.append((chosen, error))
            continue
        found = _candidates(subject, spec, knobs)
        if found is not None:
            groups.append(Group(spec, found))
    _check_used(subject, over, groups, errors)
    return groups


def _check_size(over: Over, specs: int) -> None:
    rows = math.prod(map(len, over.values()))
    product = " × ".join(f"{len(values):,} of {flag(name)}" for name, values in over.items())
    longest = max(over, key=lambda name: len(over[name]), default="microbatch")
    advice = f"Take fewer of {flag(longest)}: 1..64*2 doubles, 100..1000+100 goes in steps."
    if rows > MOST_ROWS:
        raise MisuseError(
            rule=f"A table has at most {MOST_ROWS:,} rows", got=f"got {rows:,} ({product})", advice=advice
        )
    if specs > MOST_SPECS:
        raise MisuseError(
            rule=f"A table is of at most {MOST_SPECS:,} specs", got=f"got {specs:,} ({product})", advice=advice
        )


def _candidates(subject: Subject, spec: Spec, knobs: Over) -> Candidates | None:
    """All candidates of a spec that can be; None if none can."""
    index = np.indices([len(values) for values in knobs.values()] or [1])
    index = index.reshape(len(index), -1)
    columns: dict[str, Any] = {name: getattr(subject.candidate, name) for name in KNOBS} | {"accumulation": None}
    if "microbatch" not in knobs:
        columns["microbatch"] = np.full(index.shape[1], min(columns["microbatch"], spec.batch))
    for place, (name, values) in enumerate(knobs.items()):
        columns[name] = _column(values)[index[place]]
    possible = _possible(spec, columns, subject.place)
    if not possible.any():
        return None
    kept = {name: value[possible] if isinstance(value, np.ndarray) else value for name, value in columns.items()}
    return serve(spec, Candidates(**kept))


def _column(values: list[Any]) -> Any:
    kinds = {type(one) for one in values}
    if len(kinds) > 1:
        return np.array([*values, ()], dtype=object)[:-1]  # numbers beside None or words stay what they are
    return np.array(values)


def _possible(spec: Spec, columns: dict[str, Any], place: Place) -> Any:
    """Where a candidate can be: as `check_candidate` and `engine_for` have it, for arrays.

    What is no number at all is left to `Candidates`, which refuses it with a better message.
    """
    rows, several = _numbers(columns["microbatch"]), _numbers(columns["segments"]) > 1
    windows, recompute = ~is_none(columns["window"]), np.asarray(columns["recompute"], dtype=bool)
    found = (rows <= spec.batch) & (_numbers(columns["segments"]) <= spec.steps) & ~(windows & several)
    found = found & (np.where(windows, _numbers(columns["window"]), 1) <= spec.steps)
    deep = _numbers(columns["levels"]) > 1
    if spec.bidirectional:
        found = found & ~windows & ~(several & ~recompute) & ~deep
    found = found & ~(deep & ~recompute)
    for engine in {*np.atleast_1d(np.asarray(columns["engine"], dtype=object)).tolist()}:
        if not _runs(spec, engine, place):
            found = found & (np.asarray(columns["engine"], dtype=object) != engine)
    return np.broadcast_to(found, rows.shape)


def _numbers(values: Any) -> Any:
    """Numbers as they are; what is none counts as 1."""
    array = np.asarray(values)
    if array.dtype.kind in "iu":
        return array
    return np.array([one if type(one) is int else 1 for one in np.atleast_1d(array.astype(object))])


def _runs(spec: Spec, engine: Any, place: Place) -> bool:
    try:
        engine_for(spec, Candidate(microbatch=1, engine=engine), place)
    except MisuseError as error:
        return not error.rule.startswith("On ")  # an engine that nobody has is refused elsewhere
    return True


def _check_used(
    subject: Subject, over: Over, groups: list[Group], errors: list[tuple[dict[str, Any], MisuseError]]
) -> None:
    """Raise if a value is in no row at all."""
    for name, values in over.items():
        if name in KNOBS:
            columns = [np.atleast_1d(np.asarray(getattr(one.candidates, name), dtype=object)) for one in groups]
            used = {value for column in columns for value in {*column.tolist()}}
        else:
            used = {getattr(one.spec, name) for one in groups}
        for value in values:
            if value not in used:
                raise _why(subject, name, value, errors)


def _why(subject: Subject, name: str, value: Any, errors: list[tuple[dict[str, Any], MisuseError]]) -> MisuseError:
    """Why a value is in no row."""
    own = [error for chosen, error in errors if chosen.get(name, errors) == value]
    if own:
        return own[0]
    if name == "microbatch" and type(value) is int and value > subject.spec.batch:
        return MisuseError(
            rule="--microbatch must not be larger than --batch",
            got=f"got {value:,} of {subject.spec.batch:,}",
            advice=f"Lower it, or give a batch of {value:,} too.",
        )
    try:
        if name in KNOBS:
            candidate = make_candidate(subject.spec, **{name: value})
            engine_for(subject.spec, candidate, subject.place)
    except MisuseError as error:
        return error
    return MisuseError(
        rule="Each value must be possible with some values of the others",
        got=f"{flag(name)} {shown(value)} is with none",
        advice="Leave it out, or change what it contradicts.",
    )
