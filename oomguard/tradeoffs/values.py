"""What varies: names of knobs and of fields of a spec, and the values of each."""

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from oomguard.candidate import KNOBS
from oomguard.checks import flag, nearest, shown
from oomguard.errors import MisuseError
from oomguard.spec import Spec

Over = dict[str, list[Any]]
"""The values of everything that varies, by name."""
NAMES = tuple(name for name in (*KNOBS, *Spec.__struct_fields__) if name not in ("accumulation", "lengths", "frozen"))
"""What can vary: knobs (the accumulation follows from the microbatch), and fields of a spec."""
MOST_VALUES = 1_000_000
"""Of one name."""
_RANGE = re.compile(r"(\d{1,15})\.\.(\d{1,15})(?:([*+])(\d{1,15}))?", re.ASCII)


def read_over(over: Any) -> Over:
    """What varies, checked: each name with its values, as a list, a range, an array, or as text.

    >>> read_over({"microbatch": range(1, 4), "segments": "1..64*4", "precision": ["fp32", "bf16"]})
    {'microbatch': [1, 2, 3], 'segments': [1, 4, 16, 64], 'precision': ['fp32', 'bf16']}
    """
    if not isinstance(over, dict):
        raise MisuseError(
            rule="What varies is a dict, name -> values",
            got=f"got {shown(over)}",
            advice='Write it as {"microbatch": [1, 2, 4]}.',
        )
    return {_name(name): _values(name, values) for name, values in over.items()}


def read_text(text: str) -> tuple[str, list[Any]]:
    """What `--over` takes: a name and its values, as `microbatch=1..64` or `precision=fp32,bf16`.

    >>> read_text("hidden=128,256"), read_text("seq=1000..5000+2000")
    (('hidden', [128, 256]), ('seq', [1000, 3000, 5000]))
    """
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
            rule="What varies is a knob (the accumulation follows from the microbatch) or a field of the spec",
            got=f"got {shown(name)}",
            advice=nearest(name, [*NAMES]),
        )
    return str(name)


def _values(name: str, values: Any) -> list[Any]:
    if isinstance(values, str):
        found = [one for part in values.split(",") for one in _part(name, part.strip())]
    elif isinstance(values, Iterable):
        found = [one.item() if isinstance(one, np.generic) else one for one in values]
    else:
        found = [values]
    if not found or len(found) > MOST_VALUES:
        raise MisuseError(
            rule=f"{flag(name)} must vary over 1 to {MOST_VALUES:,} values",
            got=f"got {'none' if not found else f'{len(found):,}'}",
            advice="Write it as 1..64, 1..64*2 (doublings), 100..1000+100 or 1,4,16.",
        )
    return [*dict.fromkeys(found)]


def _part(name: str, text: str) -> Iterable[Any]:
    """One value, or a range: `1..64` (all), `1..64*2` (times 2), `100..1000+100` (and 100 more)."""
    match = _RANGE.fullmatch(text.replace("_", ""))
    if match is None:
        if ".." in text or not text:
            raise MisuseError(
                rule=f"The values of {flag(name)} are whole numbers, words, or a range",
                got=f"got {shown(text)}",
                advice="Write it as 1..64, 1..64*2 (doublings), 100..1000+100 or 1,4,16.",
            )
        return [_value(text)]
    low, high, how, step = int(match[1]), int(match[2]), match[3] or "+", int(match[4] or 1)
    if low > high or step < (2 if how == "*" else 1) or (how == "*" and not low):
        raise MisuseError(
            rule=f"A range of {flag(name)} goes up, by steps of at least 1 or by a factor of at least 2",
            got=f"got {shown(text)}",
            advice="Write it as 1..64, 1..64*2 (doublings) or 100..1000+100.",
        )
    if how == "+":
        return range(low, high + 1, step)
    found = [low]
    while found[-1] * step <= high:
        found.append(found[-1] * step)
    return found


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    plain = text.replace("_", "")
    if re.fullmatch(r"-?\d{1,18}", plain, re.ASCII):
        return int(plain)
    return float(plain) if re.fullmatch(r"\d*\.\d+", plain, re.ASCII) else text


def check_own_spec(given: Iterable[str]) -> None:
    """Raise if fields of a spec are given beside a plan: it is not another model's.

    >>> check_own_spec([])
    """
    flags = [*map(flag, given)]
    if flags:
        model = "" if "--model" in flags else " and give --model"
        raise MisuseError(
            rule="A plan has its own spec",
            got=f"got {' and '.join(flags)}",
            advice=f"Leave {'it' if len(flags) == 1 else 'them'} out, or leave --plan out{model}.",
        )


def fields_for(over: Over, given: Iterable[str]) -> dict[str, int]:
    """Fields of a spec that nobody gave and that follow from what varies: the longest sequences are those of the
    largest `seq`, and a batch holds the largest microbatch.

    >>> fields_for({"microbatch": [1, 64], "seq": [100, 200]}, given=())
    {'seq': 200, 'batch': 64}
    """
    known = {name: [one for one in over.get(name, ()) if type(one) is int] for name in ("seq", "microbatch")}
    found = {"seq": max(known["seq"], default=0), "batch": max(known["microbatch"], default=0)}
    usual = {"seq": 0, "batch": 32}
    return {name: value for name, value in found.items() if value > usual[name] and name not in given}
