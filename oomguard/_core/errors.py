"""The exceptions of oomguard, and the checks of arguments that raise them.

A verdict is a value; an exception means misuse, or that training cannot continue. The fields of a struct declare their
types, bounds and choices once: checks and command-line flags follow from them.
"""

import difflib
from collections.abc import Callable, Iterable
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

MOST_LETTERS = 640  # of a part of a message: eight lines of a terminal
REQUIRED = msgspec.NODEFAULT  # the default of a field that has none


class OomguardError(Exception):
    """Base class of every error that oomguard raises on purpose.

    >>> import oomguard
    >>> try:
    ...     oomguard.Spec(cell="lstm", seq=0)
    ... except oomguard.OomguardError as error:
    ...     print(error)
    --seq must be a whole number from 1 to 1,000,000,000, but got 0. Give --seq a number in that range.
    """


class RuleError(OomguardError):
    """An error of three parts: the rule, what was given instead (empty if the rule says it), what to do.

    Each part is cut to a few lines, whatever was given.
    """

    def __init__(self, *, rule: str, got: str, advice: str) -> None:
        rule, got, advice = map(_shortened, (rule, got, advice))
        super().__init__(f"{rule}, but {got}. {advice}" if got else f"{rule}. {advice}")
        self.rule, self.got, self.advice = rule, got, advice

    def __reduce__(self) -> tuple[Any, ...]:
        # by default, unpickling calls type(*args), which fails for keyword-only arguments
        return partial(type(self), **{name: value for name, value in vars(self).items() if name != "__notes__"}), ()


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 3] + "..."


class MisuseError(RuleError, ValueError):
    """A wrong argument, value or file.

    >>> str(MisuseError(rule="Unknown argument 'hiden'", got="", advice="Did you mean 'hidden'?"))
    "Unknown argument 'hiden'. Did you mean 'hidden'?"
    """


class GuardError(RuleError):
    """Training cannot continue: memory ran out, and there is no smaller candidate. `figures` has the measurements.

    >>> error = GuardError(rule="The last rung must fit", got="it did not", advice="Free memory.", figures={"rung": 3})
    >>> str(error), error.figures
    ('The last rung must fit, but it did not. Free memory.', {'rung': 3})
    """

    def __init__(self, *, rule: str, got: str, advice: str, figures: dict[str, Any] | None = None) -> None:
        super().__init__(rule=rule, got=got, advice=advice)
        self.figures = figures or {}


class TornUpdateError(GuardError):
    """Memory ran out during a weight update, and it is unknown which weights are new: go back to a checkpoint."""


class Bounds(NamedTuple):
    """Annotation of a whole number: the smallest and the largest value that the field takes."""

    low: int
    high: int


class Field(NamedTuple):
    """One field of a struct."""

    name: str  # name in Python and in JSON
    kind: type  # type of its values other than None: int, float, bool, str, tuple or dict
    choices: tuple[str, ...]  # the texts that it takes; empty if it takes any
    bounds: Bounds | None  # bounds of a whole number; None if it has none
    optional: bool  # whether it takes None
    default: Any  # its default, or REQUIRED
    marks: tuple[Any, ...]  # all annotations

    def check(self, value: object) -> None:
        """Raise unless the field takes the value. Values of other types than int, bool and choices are not checked."""
        if value is None and self.optional:
            return
        if self.choices:
            check_choice(self.name, value, self.choices)
        elif self.bounds is not None:
            check_whole(self.name, value, *self.bounds, optional=False)
        elif self.kind is bool and type(value) is not bool:  # JSON would not return 1 and 0 as they were
            raise wrong(self.name, "true or false", value, "Write true or false, without quotes.")


@cache
def fields_of(struct: Callable[..., msgspec.Struct]) -> dict[str, Field]:
    """The fields of a struct by name, as their annotations declare them."""
    fields, hints = {}, get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):  # type: ignore[arg-type]
        hint, marks = hints[field.name], list[Any]()
        if get_origin(hint) is Annotated:
            hint, *marks = get_args(hint)
        optional = get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)
        if optional:
            hint = next(part for part in get_args(hint) if part is not NoneType)
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        kind = str if choices else get_origin(hint) or hint
        bounds = next((mark for mark in marks if isinstance(mark, Bounds)), None)
        fields[field.name] = Field(field.name, kind, choices, bounds, optional, field.default, tuple(marks))
    return fields


def check_fields(value: msgspec.Struct) -> None:
    """Raise unless every field has a value that it takes."""
    for field in fields_of(type(value)).values():
        field.check(getattr(value, field.name))


def check_whole(name: str, value: object, low: int, high: int, *, optional: bool = True) -> None:
    """Raise unless the value is a whole number from low to high (or None, if the field is optional)."""
    if value is None and optional:
        return
    if type(value) is not int or not low <= value <= high:
        advice = f"Give {flag(name)} a number in that range."
        raise wrong(name, f"a whole number from {low:,} to {high:,}", value, advice)


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    if not (isinstance(value, str) and value in choices):
        raise wrong(name, f"one of {', '.join(choices)}", value, nearest(value, list(choices)))


def wrong(name: str, form: str, value: object, advice: str) -> MisuseError:
    """The error for a value that must have another form."""
    return MisuseError(rule=f"{flag(name)} must be {form}", got=f"got {shown(value)}", advice=advice)


def unknown(what: str, name: object, known: Iterable[str]) -> MisuseError:
    return MisuseError(rule=f"Unknown {what} {shown(name)}", got="", advice=nearest(name, list(known), quote="'"))


def check_names(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise unknown(what, name, known)


def conflict(rule: str, first: str, second: str) -> MisuseError:
    """The error for two arguments that exclude each other."""
    return MisuseError(rule=rule, got=f"got {first} and {second}", advice="Leave one of the two out.")


def flag(name: str) -> str:
    """The command-line flag of a field; text with a space in it is returned as the start of a sentence."""
    if " " in name:
        return name[0].upper() + name[1:]
    return "--model" if name == "cell" else "--" + name.replace("_", "-")


def shown(value: object) -> str:
    """A value as messages show it: whole numbers with separators, long text cut."""
    if type(value) is int:
        return f"{value:,}" if abs(value) < 10**18 else "a number of more than 18 digits"
    try:
        text = repr(value)
    except Exception:  # it contains an int that is too long to print, or its class has a faulty __repr__
        text = f"something of type {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def visible(text: str) -> str:
    """Text with its control characters escaped, so that the content of a file cannot control the terminal."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def nearest(word: object, choices: list[str], quote: str = "") -> str:
    """Advice that names the choices most similar to a mistyped word, or all of them if none is similar."""
    close = difflib.get_close_matches(word, choices, n=3, cutoff=0.5) if isinstance(word, str) else []
    *others, last = [f"{quote}{choice}{quote}" for choice in close] or [""]
    if close:
        return f"Did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
    return f"Choose from {', '.join(choices)}."
