"""What varies in a table, as text or as lists, and all candidates that the values give."""

import itertools
import math
import re
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from oomguard._core.errors import MisuseError, flag, nearest, shown
from oomguard._estimate.target import Target, engine_for
from oomguard._spec.candidate import KNOBS, Candidate, Candidates, is_none, make_candidate, serve
from oomguard._spec.spec import Spec

Over = dict[str, list[Any]]
"""The values of everything that varies, by name."""
NAMES = tuple(name for name in (*KNOBS, *Spec.__struct_fields__) if name not in ("accumulation", "lengths", "frozen"))
"""The knobs and fields of a spec that can vary. (The accumulation follows from the microbatch.)"""
MOST_VALUES, MOST_ROWS, MOST_SPECS = 1_000_000, 1_000_000, 2_000
"""The most values of one name, rows of a table and specs in a table. The largest table takes some seconds."""
EXAMPLES = "Write it as 1..64, 1..64*2 (doublings), 100..1000+100 or 1,4,16."
_RANGE = re.compile(r"(\d{1,15})\.\.(\d{1,15})(?:([*+])(\d{1,15}))?", re.ASCII)


def read_over(over: Any) -> Over:
    """What varies, checked: each name with its values, given as a list, a range, an array, or text."""
    if not isinstance(over, dict):
        raise MisuseError(
            rule="over must be a dict of names and values",
            got=f"got {shown(over)}",
            advice='Write it as {"microbatch": [1, 2, 4]}.',
        )
    return {_name(name): _values(name, values) for name, values in over.items()}


def read_text(text: str) -> tuple[str, list[Any]]:
    """The name and the values that `--over` is given, as in `microbatch=1..64` or `precision=fp32,bf16`."""
    name, equals, values = text.partition("=")
    if not equals:
        raise MisuseError(
            rule="--over takes a name and its values",
            got=f"got {shown(text)}",
            advice="Write it as --over microbatch=1..64 or --over segments=1,4,16.",
        )
    name = "cell" if name == "model" else name.strip().replace("-", "_")
    return _name(name), _values(name, values)


def _name(name: Any) -> str:
    if name not in NAMES:
        raise MisuseError(
            rule="Only a knob (except accumulation, which follows from the microbatch) or a field of the spec can vary",
            got=f"got {shown(name)}",
            advice=nearest(name, [*NAMES]),
        )
    return str(name)


def _values(name: str, values: Any) -> list[Any]:
    if isinstance(values, str):
        found = [value for part in values.split(",") for value in _part(name, part.strip())]
    elif isinstance(values, Iterable):
        found = [value.item() if isinstance(value, np.generic) else value for value in values]
    else:
        found = [values]
    if not found or len(found) > MOST_VALUES:
        raise MisuseError(
            rule=f"{flag(name)} must vary over 1 to {MOST_VALUES:,} values",
            got=f"got {'none' if not found else f'{len(found):,}'}",
            advice=EXAMPLES,
        )
    return [*dict.fromkeys(found)]


def _part(name: str, text: str) -> Iterable[Any]:
    """One value, or the values of a range: `1..64` (all), `1..64*2` (doublings), `100..1000+100` (steps of 100)."""
    match = _RANGE.fullmatch(text.replace("_", ""))
    if match is None:
        if ".." in text or not text:
            raise MisuseError(
                rule=f"The values of {flag(name)} must be whole numbers, words, or a range",
                got=f"got {shown(text)}",
                advice=EXAMPLES,
            )
        return [_value(text)]
    low, high, how, step = int(match[1]), int(match[2]), match[3] or "+", int(match[4] or 1)
    if low > high or step < (2 if how == "*" else 1) or (how == "*" and not low):
        raise MisuseError(
            rule=f"A range of {flag(name)} goes up, by steps of at least 1 or by a factor of at least 2",
            got=f"got {shown(text)}",
            advice=EXAMPLES,
        )
    if how == "+":
        return range(low, high + 1, step)
    return itertools.takewhile(lambda value: value <= high, (low * step**power for power in itertools.count()))


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    plain = text.replace("_", "")
    if re.fullmatch(r"-?\d{1,18}", plain, re.ASCII):
        return int(plain)
    return float(plain) if re.fullmatch(r"\d*\.\d+", plain, re.ASCII) else text


def check_own_spec(given: Iterable[str]) -> None:
    """Raise if fields of a spec are given beside a plan, which has its own spec."""
    flags = [*map(flag, given)]
    if flags:
        model = "" if "--model" in flags else " and give --model"
        raise MisuseError(
            rule="A plan has its own spec",
            got=f"got {' and '.join(flags)}",
            advice=f"Leave {'it' if len(flags) == 1 else 'them'} out, or leave --plan out{model}.",
        )


def fields_for(over: Over, given: Iterable[str]) -> dict[str, int]:
    """Fields of the spec that were not given and follow from what varies: the longest `seq`, the largest microbatch."""
    whole = {name: [value for value in over.get(name, ()) if type(value) is int] for name in ("seq", "microbatch")}
    largest = {"seq": max(whole["seq"], default=0), "batch": max(whole["microbatch"], default=0)}
    usual = {"seq": 0, "batch": 32}
    return {name: value for name, value in largest.items() if value > usual[name] and name not in given}


def make_grid(spec: Spec, candidate: Candidate, target: Target, over: Over) -> list[tuple[Spec, Candidates]]:
    """All combinations of the values, as candidates of each spec; `spec` and `candidate` have what does not vary.

    Combinations that are impossible are left out. A value that is in no combination is an error.
    """
    fields = {name: values for name, values in over.items() if name not in KNOBS}
    knobs = {name: values for name, values in over.items() if name in KNOBS}
    _check_size(over, math.prod(map(len, fields.values())))
    groups, errors = list[tuple[Spec, Candidates]](), list[tuple[dict[str, Any], MisuseError]]()
    for combination in itertools.product(*fields.values()):
        chosen = dict(zip(fields, combination, strict=True))
        try:
            own = msgspec.structs.replace(spec, **chosen)
        except MisuseError as error:
            errors.append((chosen, error))
            continue
        candidates = _candidates(own, candidate, target, knobs)
        groups += [] if candidates is None else [(own, candidates)]
    for name, values in over.items():
        used = _used(name, groups)
        for value in values:
            if value not in used:
                raise _error_of(spec, target, name, value, errors)
    return groups


def _check_size(over: Over, specs: int) -> None:
    rows = math.prod(map(len, over.values()))
    product = " × ".join(f"{len(values):,} of {flag(name)}" for name, values in over.items())
    longest = max(over, key=lambda name: len(over[name]), default="microbatch")
    for what, count, most in (("rows", rows, MOST_ROWS), ("specs", specs, MOST_SPECS)):
        if count > most:
            raise MisuseError(
                rule=f"A table has at most {most:,} {what}",
                got=f"got {count:,} ({product})",
                advice=f"Take fewer values of {flag(longest)}: 1..64*2 doubles, 100..1000+100 goes in steps of 100.",
            )


def _candidates(spec: Spec, candidate: Candidate, target: Target, knobs: Over) -> Candidates | None:
    """All possible candidates of a spec; None if there are none."""
    index = np.indices([len(values) for values in knobs.values()] or [1])
    index = index.reshape(len(index), -1)
    columns: dict[str, Any] = {name: getattr(candidate, name) for name in KNOBS} | {"accumulation": None}
    if "microbatch" not in knobs:
        columns["microbatch"] = np.full(index.shape[1], min(columns["microbatch"], spec.batch))
    for number, (name, values) in enumerate(knobs.items()):
        columns[name] = _column(values)[index[number]]
    possible = _possible(spec, columns, target)
    if not possible.any():
        return None
    kept = {name: value[possible] if isinstance(value, np.ndarray) else value for name, value in columns.items()}
    return serve(spec, Candidates(**kept))


def _column(values: list[Any]) -> NDArray[Any]:
    if len({type(value) for value in values}) == 1:
        return np.array(values)
    return np.array([*values, ()], dtype=object)[:-1]  # the tuple keeps numbers beside None or words as they are


def _possible(spec: Spec, columns: dict[str, Any], target: Target) -> NDArray[np.bool_]:
    """Where a candidate is possible by the rules of `check_candidate` and `engine_for`.

    Values of a wrong type count as possible here: `Candidates` refuses them with a better message.
    """
    rows, segments = _numbers(columns["microbatch"]), _numbers(columns["segments"])
    several, deep = segments > 1, _numbers(columns["levels"]) > 1
    windows, recompute = ~is_none(columns["window"]), np.asarray(columns["recompute"], dtype=bool)
    possible = (rows <= spec.batch) & (segments <= spec.steps) & ~(windows & several) & ~(deep & ~recompute)
    possible = possible & (np.where(windows, _numbers(columns["window"]), 1) <= spec.steps)
    if spec.bidirectional:
        possible = possible & ~windows & ~(several & ~recompute) & ~deep
    engines = np.asarray(columns["engine"], dtype=object)
    for engine in {*np.atleast_1d(engines).tolist()}:
        if not _runs(spec, engine, target):
            possible = possible & (engines != engine)
    return np.broadcast_to(possible, rows.shape)


def _numbers(values: Any) -> NDArray[Any]:
    """Whole numbers as they are, and 1 for everything else."""
    array = np.asarray(values)
    if array.dtype.kind in "iu":
        return array
    return np.array([value if type(value) is int else 1 for value in np.atleast_1d(array.astype(object))])


def _runs(spec: Spec, engine: Any, target: Target) -> bool:
    try:
        engine_for(spec, Candidate(microbatch=1, engine=engine), target)
    except MisuseError as error:
        return not error.rule.startswith("On ")  # `Candidates` refuses an engine that does not exist
    return True


def _used(name: str, groups: list[tuple[Spec, Candidates]]) -> set[Any]:
    """The values of a knob or field that are in some row."""
    if name not in KNOBS:
        return {getattr(spec, name) for spec, _ in groups}
    columns = [np.atleast_1d(np.asarray(getattr(candidates, name), dtype=object)) for _, candidates in groups]
    return {value for column in columns for value in {*column.tolist()}}


def _error_of(
    spec: Spec, target: Target, name: str, value: Any, errors: list[tuple[dict[str, Any], MisuseError]]
) -> MisuseError:
    """The reason why a value is in no row."""
    own = [error for chosen, error in errors if name in chosen and chosen[name] == value]
    if own:
        return own[0]
    if name == "microbatch" and type(value) is int and value > spec.batch:
        return MisuseError(
            rule="--microbatch must not be larger than --batch",
            got=f"got {value:,} of {spec.batch:,}",
            advice=f"Lower it, or give a batch of {value:,} too.",
        )
    try:
        if name in KNOBS:
            engine_for(spec, make_candidate(spec, **{name: value}), target)
    except MisuseError as error:
        return error
    return MisuseError(
        rule="Each value must be possible with some values of the others",
        got=f"{flag(name)} {shown(value)} is possible with none",
        advice="Leave it out, or change what it contradicts.",
    )
