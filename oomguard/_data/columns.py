"""The columns of a table: what they hold, and which of them are inputs, targets and the time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import msgspec

from oomguard._core.errors import MisuseError, conflict
from oomguard._data.options import DataOptions, check_column

LISTED = 8  # names that a sentence lists at most
MAX_VALUES = 1000  # different values of a text column at most: one with more holds names or notes
Kind = Literal["number", "time", "text", "other"]


class Column(NamedTuple):
    """A column of a table."""

    name: str
    kind: Kind
    values: tuple[str, ...] = ()  # different values of text, sorted; none if there are more than `MAX_VALUES`
    largest: float = 0.0  # largest number, if it was asked for


@dataclass(frozen=True, kw_only=True)
class Inferred:
    """Fields of a spec and options of data, with sentences that say what was inferred."""

    fields: dict[str, Any]
    options: DataOptions
    notes: tuple[str, ...] = ()

    def with_fields(self, **found: Any) -> "Inferred":
        """Return a copy with these fields, except those that the user gave."""
        return replace(self, fields=found | self.fields)


def check_kind(columns: list[Column], name: str) -> Column:
    """The column of that name; raise if a model cannot read or predict it."""
    column = next(column for column in columns if column.name == name)
    if column.kind in ("time", "other") or (column.kind == "text" and not column.values):
        what = {"time": "dates", "text": f"text with more than {MAX_VALUES:,} different values"}
        raise MisuseError(
            rule="Inputs and targets must be numbers, or text with few different values",
            got=f"column {name!r} has {what.get(column.kind, 'neither')}",
            advice="Leave it out, or turn it into numbers.",
        )
    return column


def read_columns(given: Inferred, columns: list[Column], path: str) -> Inferred:
    """Numbers and text are inputs, unless they are targets; the column with dates is the time."""
    options, known = given.options, {column.name: column for column in columns}
    named = [*(options.columns or ()), *(options.target or ())]
    for name in named if options.time is None else [*named, options.time]:
        check_column(name, known, path)
    dates = [column.name for column in columns if column.kind == "time" and column.name not in named]
    time = options.time or (dates[0] if len(dates) == 1 else None)
    usable = [c.name for c in columns if c.name != time and (c.kind == "number" or c.values)]
    inputs, targets = _roles(given, known, usable)
    for name in {*inputs, *targets}:
        check_kind(columns, name)
    found, notes = _with_targets(_with_inputs(given, [known[name] for name in inputs]), inputs, targets, known)
    left_out = [name for name in known if name not in {*inputs, *targets, time, *usable}]
    if left_out:
        what = "dates, names or notes" if len(dates) < 2 else "dates (--time names those to sort by), names or notes"
        notes = (*notes, f"Left out, as {what}: {listed(left_out)}.")
    values = {name: known[name].values for name in dict.fromkeys([*inputs, *targets]) if known[name].values}
    given_features = options.columns is None and {"features", "vocab"} & given.fields.keys() and not values
    chosen = {} if given_features and options.target is None else {"columns": tuple(inputs), "target": tuple(targets)}
    return replace(found, options=msgspec.structs.replace(options, time=time, categories=values, **chosen), notes=notes)


def _roles(given: Inferred, known: dict[str, Column], usable: list[str]) -> tuple[list[str], list[str]]:
    """The columns that are inputs, and those that are targets."""
    options, width = given.options, given.fields.get("features")
    if options.target is not None:
        rest = [name for name in usable if name not in options.target]
        text = any(known[name].values for name in options.target)
        whole = not text and width is not None and _width(rest, known) != width == _width(usable, known)
        return [*(options.columns or (usable if whole else rest) or options.target)], [*options.target]
    inputs = [*(options.columns or usable)]
    outputs = given.fields.get("outputs", 1)
    if options.columns is None and width is not None and _width(usable, known) == width + outputs:
        inputs = usable[: len(usable) - outputs]
    rest = [name for name in usable if name not in inputs]
    if len(rest) == outputs:
        return inputs, rest
    numbers = [name for name in inputs if not known[name].values]
    return inputs, numbers or inputs


def _width(names: list[str], known: dict[str, Column]) -> int:
    """Features that these columns give: one for a number, and one for each value of text."""
    return sum(max(1, len(known[name].values)) for name in names)


def _with_inputs(given: Inferred, inputs: list[Column]) -> Inferred:
    """The features of the inputs, or the vocabulary if they are a single column of text."""
    if "vocab" in given.fields or "features" in given.fields:
        return given
    if len(inputs) == 1 and inputs[0].values:
        return given.with_fields(vocab=max(2, len(inputs[0].values)))
    return given.with_fields(features=_width([c.name for c in inputs], {c.name: c for c in inputs}))


def _with_targets(
    found: Inferred, inputs: list[str], targets: list[str], known: dict[str, Column]
) -> tuple[Inferred, tuple[str, ...]]:
    """The loss and the outputs of the targets, and the sentences that say which columns have which role."""
    loss, text = found.fields.get("loss"), [name for name in targets if known[name].values]
    tokens = "vocab" in found.fields
    if text and (len(targets) > 1 or loss == "mse"):
        rule, second = "Text is predicted as classes, in one column", "--loss mse" if loss == "mse" else "others"
        raise conflict(rule, f"--target {text[0]}", second)
    if text:
        classes = max(2, len(known[text[0]].values))
        if found.fields.get("outputs", classes) < classes:
            got = f"--outputs is {found.fields['outputs']} and {text[0]!r} has {classes}"
            raise MisuseError(rule="Every class needs an output", got=got, advice="Leave --outputs out.")
        found = found.with_fields(loss="cross-entropy", outputs=classes)
    elif loss == "cross-entropy" and known[targets[0]].largest:
        found = found.with_fields(outputs=int(known[targets[0]].largest) + 1)
    elif not tokens:
        found = found.with_fields(outputs=len(targets))
    described = [_described(known[name], "embedded" if tokens else "one-hot") for name in inputs]
    ahead = " one step ahead" if {*inputs} & {*targets} else ""
    aims = [_described(known[name], "classes") for name in targets]
    other = " (--loss cross-entropy: as classes)" if len(targets) == 1 else ""
    numbers = "" if text or loss or tokens else f", as numbers{other}"
    return found, (f"Inputs: {listed(described)}.", f"Targets: {listed(aims)}{ahead}{numbers}.")


def _described(column: Column, what: str) -> str:
    return f"{column.name} (text, {len(column.values)} values, {what})" if column.values else column.name


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: the first ones, if there are many."""
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED:,} more" if len(names) > LISTED else "")
