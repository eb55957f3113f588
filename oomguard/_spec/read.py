"""Read specs and candidates from presets, TOML files, flags and the arguments of public functions."""

import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from oomguard._core.errors import MisuseError, check_choice, check_names, shown
from oomguard._core.system import read_file
from oomguard._spec.candidate import KNOBS, Candidate, Candidates, check_candidate, make_candidate, serve
from oomguard._spec.spec import Spec

MAX_FILE_BYTES = 1 << 24
"""Largest spec file, enough for a histogram of a million lengths."""

PRESETS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
"""Ready-made specs by name: a `description`, and the fields of the `spec`."""


def preset_fields(name: str) -> dict[str, Any]:
    check_choice("preset", name, PRESETS)
    return {**PRESETS[name]["spec"]}


def make_spec(fields: dict[str, Any]) -> Spec:
    """A spec from a mapping, as it comes from TOML, JSON or flags."""
    check_names("field of a spec:", fields, Spec.__struct_fields__)
    if "cell" not in fields:
        raise MisuseError(
            rule="A spec needs a cell",
            got="it has none",
            advice='Add cell = "lstm" (or "gru", "rnn") to the file, or --model lstm to the command.',
        )
    if isinstance(fields["cell"], str):
        fields = fields | {"cell": fields["cell"].lower()}
    lengths = fields.get("lengths")
    if isinstance(lengths, dict):  # keys in TOML and JSON are text; one that is no number of 18 digits is refused later
        is_number = re.compile(r"\d{1,18}", re.ASCII).fullmatch
        numbers = (int(key) if isinstance(key, str) and is_number(key) else key for key in lengths)
        fields = fields | {"lengths": dict(zip(numbers, lengths.values(), strict=True))}
    return Spec(**fields)


def with_batch(fields: dict[str, Any], knobs: dict[str, Any]) -> dict[str, Any]:
    """The fields of a spec; without a batch, it is the microbatch times the accumulation, if that is given."""
    microbatch, accumulation = knobs.get("microbatch"), knobs.get("accumulation", 1)
    if "batch" in fields or not type(microbatch) is type(accumulation) is int or min(microbatch, accumulation) < 1:
        return fields
    return fields | {"batch": microbatch * accumulation}


def load_fields(path: Path) -> dict[str, Any]:
    """The fields of a spec in a TOML file, for `make_spec`."""
    rule = f"A spec file must be readable TOML, such as {path.stem or 'spec'}.toml"
    try:
        content = read_file(path, MAX_FILE_BYTES)
    except OSError as error:
        got = f"{shown(str(path))} cannot be read ({error.strerror or error})"
        raise MisuseError(rule=rule, got=got, advice="Check the path and the permissions.") from None
    try:
        fields = tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise MisuseError(rule=rule, got=f"{path} is binary", advice="Give a text file.") from None
    except (ValueError, RecursionError) as error:  # wrong syntax, a number that is too long, or too many brackets
        raise MisuseError(rule=rule, got=f"{path} is not ({error})", advice="Correct that line.") from None
    if not fields:
        raise MisuseError(rule=rule, got=f"{path} is empty", advice='Write at least cell = "lstm" and seq = 10000.')
    return fields


def read_spec(spec: Spec | None, fields: dict[str, Any]) -> Spec:
    check_names("argument", fields, [*Spec.__struct_fields__, *KNOBS])
    if spec is None:
        return make_spec(fields)
    if not isinstance(spec, Spec) or fields:
        raise MisuseError(
            rule="The model is given either as a Spec or by the fields of one",
            got=f"got {type(spec).__name__}" + (f" and {', '.join(fields)}" if fields else ""),
            advice="Leave one of the two out.",
        )
    return spec


def read_candidate(
    spec: Spec, candidate: Candidate | Candidates | None, knobs: dict[str, Any]
) -> Candidate | Candidates:
    """One candidate or several, as given or made from knobs (arrays mean several). By default the batch is one pass."""
    if candidate is None:
        if any(isinstance(value, np.ndarray | list | tuple) for value in knobs.values()):
            return serve(spec, Candidates(**{"microbatch": spec.batch} | knobs))
        return make_candidate(spec, **knobs)
    if not isinstance(candidate, Candidate | Candidates) or knobs:
        raise MisuseError(
            rule="The candidate is given either as a Candidate, as Candidates or by knobs",
            got=f"got {type(candidate).__name__}" + (f" and {', '.join(knobs)}" if knobs else ""),
            advice="Leave one of them out.",
        )
    if isinstance(candidate, Candidates):
        return serve(spec, candidate)
    check_candidate(spec, candidate)
    return candidate
