"""DataOptions: how the data is read. Frozen, checked when made, and unchanged by a round trip through JSON.

Also the columns that are inputs and targets, which follow from the options and the spec.
"""

from collections import Counter
from collections.abc import Collection
from typing import Annotated, Literal

import msgspec

from oomguard._core.errors import Bounds, MisuseError, check_fields, conflict, flag, nearest, wrong
from oomguard._spec.spec import MAX_SEQ, Spec

Format = Literal["npy", "csv", "parquet", "text"]
Nan = Literal["error", "drop", "cut", "zero"]
Fill = Literal["forward", "mean", "zero", "drop"]
CUTTING = (
    *("format", "columns", "target", "ahead", "id", "time", "targets", "stride", "nan", "fill", "categories"),
    *("characters", "vocabulary", "truncate", "limit", "cache"),
)
"""Options of data that decide which sequences it has."""


class DataOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the data is read. What is not given follows from the file and the spec."""

    format: Format | None = None
    """Format of the file; None: by its suffix."""
    columns: tuple[str, ...] | None = None
    """Input columns by name (by number, from 0, in an array); None: all columns without another role."""
    target: tuple[str, ...] | None = None
    """Target columns; None: the columns after the inputs if the head gives as many numbers, otherwise the inputs
    themselves, some steps ahead."""
    ahead: Annotated[int | None, Bounds(0, MAX_SEQ)] = None
    """Steps that a target lies ahead of its inputs; None: 1 for a column that is an input too, otherwise 0."""
    id: str | None = None
    """Column of a table that says which series a row belongs to; None: all rows are one series."""
    time: str | None = None
    """Column of a table by which rows are sorted; None: the column with dates, if there is one."""
    categories: dict[str, tuple[str, ...]] = {}
    """Values of each text column, in the order of their numbers. They are found when the data is first read."""
    targets: str | None = None
    """Array file with the targets, a row for each step or for each sequence."""
    stride: Annotated[int | None, Bounds(1, MAX_SEQ)] = None
    """Steps from the start of a window to that of the next; None: one long series is cut into windows that do not
    overlap, and each of many series is one sequence."""
    nan: Nan = "error"
    """Handling of NaN and infinite numbers: an error, its sequence is dropped, sequences are cut around its row, or 0.
    Tokens and classes are never 0 instead."""
    fill: Fill | None = None
    """Fill missing inputs with the last value before, the mean of the training part, or 0, or drop their sequences;
    None: `nan` decides. Sequences are cut around a row whose target is missing."""
    characters: bool = False
    """Whether the tokens of text are characters (of UTF-8) instead of bytes."""
    vocabulary: str | None = None
    """Characters of text in the order of their tokens; None: all characters of the file, sorted."""
    truncate: bool = False
    """Whether sequences longer than the spec's are cut (a last-step head keeps their last steps, otherwise the first
    are kept). Without it they are an error."""
    validation: float = 0.1
    """Share of the data that is kept for validation; 0: none."""
    split: Literal["series", "time"] | None = None
    """How that share is chosen: whole series at random, or the last steps of every series; None: by time for one long
    series, otherwise by series. One long series is split by series in blocks."""
    normalise: Literal["none", "inputs", "both"] = "both"
    """Which numbers get mean 0 and standard deviation 1 over the training part: inputs, or targets as well. Tokens and
    classes never do, and predictions are in the units of the data."""
    limit: Annotated[int | None, Bounds(1, 1 << 40)] = None
    """Most pairs that are taken of an iterable; None: all, so it must end."""
    cache: str | None = None
    """Directory for data that is converted once (CSV, Parquet, characters, pairs); None: beside the file."""
    workers: Annotated[int | None, Bounds(0, 128)] = None
    """Processes that load data; None: as many as the plan says."""
    seed: Annotated[int, Bounds(0, (1 << 63) - 1)] = 0
    """Seed of the split and of the order."""
    inputs_only: bool = False
    """Whether targets are ignored if there are any, as `predict` does; the inputs are read in their place."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("columns", "target"):
            if (value := getattr(self, name)) is None:
                continue
            if isinstance(value, str | int) and not isinstance(value, bool):  # one column, by name or number
                value = (str(value),)
            names = tuple(value) if isinstance(value, tuple | list) else ()
            names = tuple(str(name) if type(name) is int else name for name in names)
            if not names or not all(isinstance(n, str) for n in names) or len({*names}) < len(names):
                advice = 'Write it as ("open", "close"), and columns of an array as ("0", "3").'
                raise wrong(name, "a list of different columns", value, advice)
            msgspec.structs.force_setattr(self, name, names)  # a list becomes a tuple, as it comes back from JSON
        for name in ("id", "time", "targets", "cache", "vocabulary"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise wrong(name, "text", value, f"Leave {flag(name)} out.")
        share = self.validation
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share < 1:
            form = "a share from 0 up to, not including, 1"
            raise wrong("validation", form, share, "Give --validation a number such as 0.1.")
        self._check_fill()
        repeated = [letter for letter, count in Counter(self.vocabulary or "").items() if count > 1]
        if repeated:
            raise MisuseError(
                rule="A vocabulary has every character once",
                got=f"{repeated[0]!r} comes twice",
                advice="Leave the second out.",
            )

    def _check_fill(self) -> None:
        if self.fill == "drop" and self.nan in ("error", "drop"):  # the same by its other name
            msgspec.structs.force_setattr(self, "nan", "drop")
            msgspec.structs.force_setattr(self, "fill", None)
        if self.fill is not None and self.nan != "error":
            raise conflict("Missing values are filled or left out", f"--fill {self.fill}", f"--nan {self.nan}")
        if self.fill == "mean" and self.normalise == "none":
            raise conflict("The mean is that of the normaliser", "--fill mean", "--normalise none")


class PlanData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The data that a plan was made for."""

    path: str | None = None
    """File of the data, as it was given; None: it was in memory."""
    options: DataOptions = DataOptions()
    """How it is read, with all that was inferred."""
    notes: tuple[str, ...] = ()
    """Sentences that say what was inferred from it."""


_TABLE = ("columns", "target", "ahead", "id", "time", "stride", "cache", "fill", "categories")
_READ = {
    "npy": ("columns", "target", "ahead", "targets", "stride", "fill"),
    "csv": _TABLE,
    "parquet": _TABLE,
    "text": ("characters", "vocabulary", "stride", "cache"),
    "pairs": ("limit", "stride", "cache"),
    "Dataset": (),
}
"""Options that only some kinds of data have, by kind. All kinds have the others."""


def check_used(kind: str, options: DataOptions) -> None:
    """Raise if an option is given that this kind of data does not have, instead of ignoring it."""
    defaults = DataOptions()
    for name in (name for names in _READ.values() for name in names if name not in _READ[kind]):
        if getattr(options, name) != getattr(defaults, name):
            raise MisuseError(
                rule=f"{flag(name)} is for {', '.join(k for k, names in _READ.items() if name in names)}",
                got=f"this data is {kind}",
                advice=f"Leave {flag(name)} out, or give the data in that form.",
            )


def from_the_end(options: DataOptions, count: int) -> DataOptions:
    """The options for an array with so many columns: -1 is the last one, as in NumPy."""

    def counted(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        numbers = {str(-back): str(count - back) for back in range(1, count + 1)}
        return None if names is None else tuple(numbers.get(name, name) for name in names)

    if not any(name.startswith("-") for name in (*(options.columns or ()), *(options.target or ()))):
        return options
    return msgspec.structs.replace(options, columns=counted(options.columns), target=counted(options.target))


def choose_columns(
    names: list[str], spec: Spec, options: DataOptions, path: object
) -> tuple[list[str], list[str], int]:
    """The columns that are inputs, those that are targets, and the steps that a target lies ahead.

    With targets in another file, both are the inputs.
    """
    width = 1 if spec.vocab is not None else spec.inputs
    inputs_alone = options.inputs_only or options.targets is not None
    inputs = list(options.columns or _usual_inputs(names, width, spec, options))
    known = dict.fromkeys(names)  # there may be a million
    for name in (*inputs, *(() if inputs_alone else options.target or ())):
        check_column(name, known, path)
    if len(inputs) != width:
        raise MisuseError(
            rule=f"There must be as many input columns as the spec has features ({width})",
            got=f"{path} has {len(inputs)}: {_listed(inputs)}",
            advice=f"Set --features {len(inputs)}, or name the inputs as --columns.",
        )
    if inputs_alone:
        return inputs, inputs, options.ahead or 0
    targets = list(options.target or _usual_targets(names, inputs, spec, path))
    if len(targets) != target_width(spec):
        raise MisuseError(
            rule=f"There must be as many target columns as the head gives ({target_width(spec)})",
            got=f"{path} has {len(targets)}: {_listed(targets)}",
            advice="Change --target or --outputs.",
        )
    return inputs, targets, int(not {*inputs}.isdisjoint(targets)) if options.ahead is None else options.ahead


def _usual_inputs(names: list[str], width: int, spec: Spec, options: DataOptions) -> list[str]:
    """The inputs if they are not named: the columns that are not targets, or all if only those are enough."""
    targets = {*(options.target or ())}
    rest = [name for name in names if name not in targets]
    if options.inputs_only:
        return (rest if len(rest) >= width else names)[:width]
    if targets:
        return names if len(rest) != width and len(names) == width else rest
    has_targets = options.targets is None and len(names) == width + target_width(spec)
    return names[:width] if has_targets else names


def _usual_targets(names: list[str], inputs: list[str], spec: Spec, path: object) -> list[str]:
    """The targets if they are not named: the columns that are not inputs, or the inputs of the next step."""
    taken = {*inputs}
    rest = [name for name in names if name not in taken]
    if len(rest) == target_width(spec):
        return rest
    if forecasts(spec):
        return inputs
    raise MisuseError(
        rule="Without --target the head must give as much as there is in the input, to predict the next step",
        got=f"{path} has {len(inputs)} input columns, and the head gives {spec.classes}",
        advice=f"Name a column as --target, or set --outputs {spec.vocab or spec.inputs}.",
    )


def forecasts(spec: Spec) -> bool:
    """Whether the head gives what the input holds, so that the targets can be the next inputs."""
    if spec.vocab is not None:
        return spec.loss == "cross-entropy" and spec.classes == spec.vocab
    return spec.loss == "mse" and spec.classes == spec.inputs


def target_width(spec: Spec) -> int:
    """Numbers of one target: one class, or all that the head gives."""
    return 1 if spec.loss == "cross-entropy" else spec.classes


def check_column(name: str, names: Collection[str], path: object) -> None:
    if name not in names:
        raise MisuseError(
            rule="A column that is named must be in the file",
            got=f"{path} has no column {name!r}",
            advice=nearest(name, [*names][:50]),
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
