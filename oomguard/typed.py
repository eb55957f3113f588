"""What was typed, as what it means: a spec, knobs, a size, a duration, a number."""

import errno
import os
import re
import tempfile
from pathlib import Path
from typing import Any, get_args

from oomguard.candidate import Candidate, make_candidate
from oomguard.checks import check_whole, flag, shown
from oomguard.errors import MisuseError
from oomguard.flags import CANDIDATE, CUT, FIXED, SPEC, Flag
from oomguard.presets import load_spec, make_spec, preset
from oomguard.spec import Cell, Spec
from oomguard.units import parse_bytes, parse_seconds

MAX_COUNT = 10**15


def read(values: dict[str, Any]) -> tuple[Spec, Candidate]:
    """The spec and the candidate that the flags describe; flags override a spec file and a preset."""
    spec, knobs = _read(values, CANDIDATE)
    return spec, make_candidate(spec, **knobs)


def read_fixed(values: dict[str, Any]) -> tuple[Spec, dict[str, Any]]:
    """The spec, and the knobs that a search is to leave as they are."""
    return _read(values, FIXED)


def read_planned(values: dict[str, Any]) -> tuple[Spec, dict[str, Any]]:
    """The spec, its lengths those of --data if that is given, and the knobs that a search is to leave as they are."""
    options = _values(CUT[1:], values)
    if "data" not in values:
        for name in options:
            raise MisuseError(
                rule=f"{flag(name)} says how data is read", got="there is no --data", advice="Add --data with a file."
            )
        return read_fixed(values)
    from oomguard.data.lengths import UNKNOWN, spec_for
    from oomguard.data.options import DataOptions

    spec, fixed = read_fixed({"lengths": ",".join(f"{one}:{n}" for one, n in UNKNOWN.items())} | values)
    return spec_for(spec, values["data"], DataOptions(**options)), fixed


def _read(values: dict[str, Any], flags: list[Flag]) -> tuple[Spec, dict[str, Any]]:
    fields, knobs = _values(SPEC[2:], values), _values(flags, values)
    pair = [knobs.get(name) for name in ("microbatch", "accumulation")]
    if "batch" not in fields and all(type(one) is int and one > 0 for one in pair):
        fields["batch"] = pair[0] * pair[1]  # type: ignore[operator]
    if "features" in fields and "vocab" not in fields:
        fields |= {"vocab": None, "embedding": fields.get("embedding")}
    elif "vocab" in fields and "features" not in fields:
        fields["features"] = None
    spec = _spec(values.get("model"), values.get("preset"), fields)
    if type(pair[0]) is int and pair[0] > spec.batch:
        raise MisuseError(
            rule="--microbatch must not be larger than --batch",
            got=f"got {shown(pair[0])} of {shown(spec.batch)}",
            advice=f"Lower it, or give --batch {pair[0]} too.",
        )
    return spec, knobs


def read_table(values: dict[str, Any]) -> tuple[Spec | None, dict[str, Any], dict[str, Any] | None]:
    """What a table is of: the spec (None: the plan's), the knobs that are fixed, and what varies (None: the usual)."""
    from oomguard.tradeoffs.values import check_own_spec, fields_for, read_text

    pairs = [read_text(text) for text in values.get("over", ())]
    over = dict(pairs)
    if len(over) < len(pairs):
        raise MisuseError(
            rule="--over takes each name once",
            got=f"got {shown([name for name, _ in pairs])}",
            advice="Put all values of a name into one, such as 1..8,16,32.",
        )
    names = [one.name.replace("-", "_") for one in SPEC]
    given = [one for name in names for one in (name, f"no_{name}") if one in values]
    if values.get("plan") is not None:
        check_own_spec(given)
        return None, _values(FIXED, values), over or None
    described = values.get("preset") is not None or values.get("model") not in get_args(Cell)
    follows = {} if described else fields_for(over, given)
    spec, fixed = read_fixed(values | {name: str(value) for name, value in follows.items()})
    return spec, fixed, over or None


def read_source(values: dict[str, Any]) -> str | None:
    """Where what was measured is read from."""
    if "plan" in values and "ledger" in values:
        raise MisuseError(
            rule="What was measured comes from a plan or from a ledger",
            got="got --plan and --ledger",
            advice="Leave one of the two out.",
        )
    return values.get("plan") or values.get("ledger")


def read_number(name: str, text: str) -> int:
    """A count that is neither a field of a spec nor a knob."""
    found = _number(text)
    check_whole(name, found, 1, MAX_COUNT, optional=False)
    assert isinstance(found, int)
    return found


def read_options(values: dict[str, Any], *groups: list[Flag]) -> dict[str, Any]:
    """What was given of these flags, by field, for whoever checks them."""
    return _values([one for group in groups for one in group], values)


def read_path(values: dict[str, Any], command: str) -> str:
    """The file of --data."""
    if "data" not in values:
        raise MisuseError(
            rule=f"{command} needs data", got="got none", advice="Add --data with a .npy, .csv, .parquet or .txt file."
        )
    return str(values["data"])


def _spec(model: str | None, name: str | None, fields: dict[str, Any]) -> Spec:
    if model is not None and re.fullmatch(r"[A-Za-z_][\w.]*:[\w.]+", model):
        raise MisuseError(
            rule="A model is described by a spec",
            got=f"got {shown(model)}, a model that is code",
            advice="Describe its layers by flags (--model lstm --hidden 256) or in a TOML file.",
        )
    if model is None or model in get_args(Cell) or not _is_path(model):
        fields = fields if model is None else fields | {"cell": model}
        return make_spec(fields) if name is None else preset(name, **fields)
    if name is not None:
        raise MisuseError(
            rule="A spec comes from a file or from a preset",
            got=f"got --model {shown(model)} and --preset {shown(name)}",
            advice="Leave one of the two out.",
        )
    return load_spec(Path(model), **fields)


def _is_path(model: str) -> bool:
    return any(sign in model for sign in "./\\") or (model != "" and os.path.exists(model))


def read_budget(text: str) -> int:
    """The bytes of --budget."""
    try:
        return parse_bytes(text)
    except MisuseError as error:
        raise MisuseError(rule=error.rule.replace("A size", "--budget"), got=error.got, advice=error.advice) from None


def read_seconds(text: str) -> float:
    """The seconds of --timeout."""
    try:
        return parse_seconds(text)
    except MisuseError as error:
        rule = error.rule.replace("A duration", "--timeout")
        raise MisuseError(rule=rule, got=error.got, advice=error.advice) from None


def check_output(text: str, usual: str = "plan.json") -> None:
    """Raise unless a file can be written there: better before a search than after it. `usual`: what one would give."""
    target = Path(text)
    folder = next(one for one in (target.absolute().parent, *target.absolute().parents) if one.exists())
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise MisuseError(
            rule="--output must be a file that can be written",
            got=f"{shown(text)} cannot ({getattr(error, 'strerror', None) or error})",
            advice=f"Give another --output, such as {usual}.",
        ) from None


def check_other(name: str, text: str, source: str) -> None:
    """Raise if what is written would take the place of what it is made of."""
    if os.path.exists(text) and os.path.samefile(text, source):
        raise MisuseError(
            rule=f"{flag(name)} must be another file than the plan",
            got=f"got {shown(text)}",
            advice=f"Write it as {flag(name)} report.html.",
        )


def _values(flags: list[Flag], values: dict[str, Any]) -> dict[str, Any]:
    """What was given of these flags, by field."""
    found: dict[str, Any] = {}
    for one in flags:
        name = one.name.removeprefix("no-").replace("-", "_")
        if not one.kind and name in values and f"no_{name}" in values:
            raise MisuseError(
                rule=f"{flag(name)} is turned on or off",
                got=f"got both {flag(name)} and {flag(f'no_{name}')}",
                advice="Leave one of the two out.",
            )
        if not one.kind and f"no_{name}" in values:
            found[name] = False
        elif name in values:
            found[name] = _value(one, values[name])
    return found


def _value(one: Flag, text: Any) -> Any:
    """What was typed as what the field takes; as it was typed if it cannot be that, for the field to refuse."""
    if one.kind == "N":
        return _number(text)
    if one.kind == "P":
        try:
            return float(text)
        except ValueError:
            return text
    if one.name == "frozen" or one.kind == "COLUMNS":
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return _histogram(text) if one.name == "lengths" else text


def _number(text: str) -> int | str:
    plain = text.replace("_", "")
    return int(plain) if re.fullmatch(r"-?\d{1,18}", plain, re.ASCII) else text


def _histogram(text: str) -> Any:
    """`100:5000,2000:40` as a dict, or what a file has; a length that comes twice counts twice."""
    pairs = [part.split(":") for part in text.split(",")]
    if not all(re.fullmatch(r"\s*\d{1,18}:\d{1,18}\s*", part, re.ASCII) for part in text.split(",")):
        if not os.path.exists(text) and Path(text).suffix not in (".npy", ".csv", ".tsv", ".txt"):
            return text
        from oomguard.data.lengths import read_lengths

        return read_lengths(text)
    found: dict[int, int] = {}
    for length, count in pairs:
        found[int(length)] = found.get(int(length), 0) + int(count)
    return found
