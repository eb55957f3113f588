"""Where specs come from besides Python: presets named for what people do, and TOML files."""

import tomllib
from pathlib import Path
from typing import Any

from oomguard.checks import nearest, shown
from oomguard.errors import MisuseError
from oomguard.spec import Spec

MAX_FILE_BYTES = 1 << 24
"""Largest spec file: a histogram of a million lengths. Without it, naming /dev/zero would fill the memory."""

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "char-lm": (
        "next-character language model on long text",
        {"cell": "lstm", "seq": 2000, "vocab": 256, "embedding": 128, "hidden": 512, "layers": 2, "batch": 64},
    ),
    "forecast": (
        "forecast of a multivariate series from a long history",
        {"cell": "gru", "seq": 10_000, "features": 16, "hidden": 128, "layers": 2, "head": "last-step", "batch": 64},
    ),
    "speech": (
        "frame-wise phonemes from 80 mel bands, bidirectional",
        {
            **{"cell": "lstm", "seq": 1500, "features": 80, "hidden": 320, "layers": 4, "bidirectional": True},
            **{"outputs": 48, "loss": "cross-entropy", "dropout": 0.1, "batch": 32},
        },
    ),
    "sentiment": (
        "one label for a text of up to 1,000 words",
        {
            **{"cell": "gru", "seq": 1000, "vocab": 30_000, "embedding": 300, "hidden": 256, "layers": 1},
            **{"head": "last-step", "outputs": 2, "bidirectional": True, "batch": 128},
        },
    ),
}
"""Specs named for what people do: a sentence, and the fields."""


def preset(name: str, **changes: Any) -> Spec:
    """A preset, with some fields changed.

    >>> preset("char-lm", seq=5000).seq
    5000
    """
    if name not in PRESETS:
        raise MisuseError(
            rule=f"--preset must be one of {', '.join(PRESETS)}",
            got=f"got {shown(name)}",
            advice=nearest(name, list(PRESETS)),
        )
    return make_spec(PRESETS[name][1] | changes)


def make_spec(fields: dict[str, Any]) -> Spec:
    """A spec from a mapping, as TOML, JSON or flags give it; unknown keys and wrong types are named.

    >>> make_spec({"cell": "gru", "seq": 100, "lengths": {"50": 3, "100": 1}}).lengths
    {50: 3, 100: 1}
    """
    names = list(Spec.__struct_fields__)
    for key in fields:
        if key not in names:
            raise MisuseError(
                rule="A spec has only keys that it knows", got=f"got {shown(key)}", advice=nearest(key, names)
            )
    if "cell" not in fields:
        raise MisuseError(
            rule="A spec needs its cell",
            got="it has none",
            advice='Add cell = "lstm" (or "gru", "rnn"), or --model lstm.',
        )
    lengths = fields.get("lengths")
    if isinstance(lengths, dict):  # TOML and JSON have only text as keys
        fields = fields | {"lengths": {_whole(length): count for length, count in lengths.items()}}
    return Spec(**fields)


def _whole(text: object) -> object:
    """The number that a text of at most 18 digits is; anything else as it came."""
    return int(text) if isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) <= 18 else text


def load_spec(path: Path, **changes: Any) -> Spec:
    """Read a spec from a TOML file; every way a file can be wrong has its message."""
    return make_spec(_read_toml(path) | changes)


def _read_toml(path: Path) -> dict[str, Any]:
    rule = f"A spec file must be readable TOML, such as {path.stem or 'spec'}.toml"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise MisuseError(rule=rule, got=f"{path} is binary", advice="Give a text file.") from None
    except IsADirectoryError:
        raise MisuseError(rule=rule, got=f"{path} is a directory", advice="Name a file in it.") from None
    except OSError as error:
        raise MisuseError(
            rule=rule, got=f"{path} cannot be read ({error.strerror})", advice="Check the path and the permissions."
        ) from None
    except ValueError as error:
        raise MisuseError(rule=rule, got=f"{shown(str(path))} is no path ({error})", advice="Check the path.") from None
    if len(content) > MAX_FILE_BYTES:
        raise MisuseError(rule=rule, got=f"{path} is larger than 16 MiB", advice="Give a spec, not data.")
    try:
        fields = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML; a number too long to read; brackets nested too deep
        raise MisuseError(rule=rule, got=f"{path} is not ({error})", advice="Mend that line.") from None
    if not fields:
        raise MisuseError(rule=rule, got=f"{path} is empty", advice='Write at least cell = "lstm" and seq = 10000.')
    return fields
