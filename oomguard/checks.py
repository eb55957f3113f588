"""Checks that end in a message a user can act on: shared by specs, candidates and the command line."""

import difflib

from oomguard.errors import MisuseError


def check_whole(name: str, value: object, low: int, high: int, *, optional: bool = True) -> None:
    """Raise unless the value is a whole number from low to high (or None: an optional field that is not set)."""
    if value is None and optional:
        return
    if type(value) is not int or not low <= value <= high:
        raise MisuseError(
            rule=f"{flag(name)} must be a whole number from {low:,} to {high:,}",
            got=f"got {shown(value)}",
            advice=f"Give {flag(name)} a number in that range.",
        )


def check_switch(name: str, value: object) -> None:
    """Raise unless the value is True or False: 1 and 0 would not come back from JSON as they went."""
    if type(value) is not bool:
        raise MisuseError(
            rule=f"{flag(name)} must be true or false",
            got=f"got {shown(value)}",
            advice="Write true or false, without quotes.",
        )


def flag(name: str) -> str:
    """The flag a user knows a field by.

    >>> flag("cell"), flag("layer_norm")
    ('--model', '--layer-norm')
    """
    if " " in name:  # words already
        return name[0].upper() + name[1:]
    return "--model" if name == "cell" else "--" + name.replace("_", "-")


def shown(value: object) -> str:
    """A value for a message, short: ints with separators, long text cut."""
    if type(value) is int:
        return f"{value:,}" if abs(value) < 10**18 else "a number of more than 18 digits"
    try:
        text = repr(value)
    except Exception:  # somewhere inside is an int too long to print, or a class whose repr fails
        text = f"something of type {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def visible(text: str) -> str:
    """Text with its control characters written out: what is in a file must not steer the terminal.

    >>> visible("T4\\x1b[2J"), visible("64 → 256\\n")
    ('T4\\\\x1b[2J', '64 → 256\\n')
    """
    return "".join(one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text)


def nearest(word: object, choices: list[str]) -> str:
    """Advice that names the likeliest choices for a mistyped word."""
    close = difflib.get_close_matches(word, choices, n=3, cutoff=0.5) if isinstance(word, str) else []
    return f"Did you mean {' or '.join(close)}?" if close else f"Choose from {', '.join(choices)}."
