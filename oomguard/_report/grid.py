"""Names and values that vary in a table, as text or as lists, and all candidates that they give."""

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
from oomguard._spec.candidate import KNOBS, Candidate, Candidates, is_none, make_candidate, refusals, renew, serve
from oomguard._spec.spec import Spec

Over = dict[str, list[Any]]  # the values of everything that varies, by name
NAMES = tuple(name for name in (*KNOBS, *Spec.__struct_fields__) if name not in ("accumulation", "lengths", "frozen"))
"""The knobs and fields of a spec that can vary. (The accumulation follows from the microbatch.)"""
MOST_VALUES, MOST_ROWS, MOST_SPECS = 1_000_000, 1_000_000, 2_000
"""The most values of one name, rows of a table and specs in a table. The largest table takes some seconds."""
EXAMPLES = "Write it as 1..64, 1..64*2 (doublings), 100..1000+100 or 1,4,16."
_RANGE = re.compile(r"(\d{1,15})\.\.(\d{1,15})(?:([*+])(\d{1,15}))?", re.ASCII)


def read_over(over: Any) -> Over:
    """Check the names and the values that vary. Values are a list, a range, an array, or text."""
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
        result = [value for part in values.split(",") for value in _part(name, part.strip())]
    elif isinstance(values, Iterable):
        result = [value.item() if isinstance(value, np.generic) else value for value in values]
    else:
        result = [values]
    if not result or len(result) > MOST_VALUES:
        count = f"{len(result):,}" if result else "none"
        rule = f"{flag(name)} must vary over 1 to {MOST_VALUES:,} values"
        raise MisuseError(rule=rule, got=f"got {count}", advice=EXAMPLES)
    return [*dict.fromkeys(renew(name, value) for value in result)]


def _part(name: str, text: str) -> Iterable[Any]:
    """One value, or the values of a range: `1..64` (all), `1..64*2` (doublings), `100..1000+100` (steps of 100)."""
    match = _RANGE.fullmatch(text.replace("_", ""))
    if match is None:
        if ".." in text or not text:
            rule = f"The values of {flag(name)} must be whole numbers, words, or a range"
            raise MisuseError(rule=rule, got=f"got {shown(text)}", advice=EXAMPLES)
        return [_value(text)]
    low, high, how, step = int(match[1]), int(match[2]), match[3] or "+", int(match[4] or 1)
    if low > high or step < (2 if how == "*" else 1) or (how == "*" and not low):
        rule = f"A range of {flag(name)} goes up, by steps of at least 1 or by a factor of at least 2"
        raise MisuseError(rule=rule, got=f"got {shown(text)}", advice=EXAMPLES)
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
    """All possible combinations of the values, as candidates of each spec; raises if a value is in none of them."""
    fields = {name: values for name, values in over.items() if name not in KNOBS}
    _check_size(over, math.prod(map(len, fields.values())))
    knobs = {  # `Candidates` checks the values
        name: getattr(Candidates(**{"microbatch": 1} | {name: values}), name)
        for name, values in over.items()
        if name in KNOBS
    }
    groups, errors = list[tuple[Spec, Candidates]](), dict[tuple[str, Any], MisuseError]()
    for combination in itertools.product(*fields.values()):
        chosen = dict(zip(fields, combination, strict=True))
        try:
            own = msgspec.structs.replace(spec, **chosen)
        except MisuseError as error:
            for value in chosen.items():
                errors.setdefault(value, error)
            continue
        groups += [(own, candidates) for candidates in _candidates(own, candidate, target, knobs)]
    for name, values in over.items():
        used = _used(name, groups)
        for value in values:
            if value not in used:
                raise errors.get((name, value)) or _error_of(spec, target, name, value)
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


def _candidates(spec: Spec, candidate: Candidate, target: Target, knobs: dict[str, NDArray[Any]]) -> list[Candidates]:
    columns: dict[str, Any] = {name: getattr(candidate, name) for name in KNOBS} | {"accumulation": None}
    columns["microbatch"] = np.full(math.prod(map(len, knobs.values())), min(candidate.microbatch, spec.batch))
    columns |= dict(zip(knobs, map(np.ravel, np.meshgrid(*knobs.values(), indexing="ij")), strict=True))
    possible = _possible(spec, {name: np.asarray(column) for name, column in columns.items()}, target)
    if not possible.any():
        return []
    kept = {name: column[possible] if isinstance(column, np.ndarray) else column for name, column in columns.items()}
    return [serve(spec, Candidates(**kept))]


def _possible(spec: Spec, columns: dict[str, NDArray[Any]], target: Target) -> NDArray[np.bool_]:
    """Where a candidate is possible by the rules of `check_candidate` and `engine_for`."""
    possible: NDArray[np.bool_] = columns["microbatch"] <= spec.batch
    possible = possible & (is_none(columns["window"]) | (columns["segments"] == 1))
    for refused, _ in refusals(spec, columns):
        possible = possible & ~refused
    for engine in {*np.atleast_1d(columns["engine"]).tolist()}:
        try:
            engine_for(spec, Candidate(microbatch=1, engine=engine), target)
        except MisuseError:
            possible = possible & (columns["engine"] != engine)
    return possible


def _used(name: str, groups: list[tuple[Spec, Candidates]]) -> set[Any]:
    """The values of a knob or field that are in some row."""
    if name not in KNOBS:
        return {getattr(spec, name) for spec, _ in groups}
    return {value for _, candidates in groups for value in np.atleast_1d(getattr(candidates, name)).tolist()}


def _error_of(spec: Spec, target: Target, name: str, value: Any) -> MisuseError:
    """The reason why a value is in no row."""
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
