"""DataOptions: how the data is read. Frozen, checked when made, and unchanged by a round trip through JSON."""

from collections import Counter
from typing import Annotated, Literal

import msgspec

from oomguard._core.errors import Bounds, MisuseError, check_fields, flag, wrong
from oomguard._spec.spec import MAX_SEQ

Format = Literal["npy", "csv", "parquet", "text"]
Nan = Literal["error", "drop", "zero"]


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
    targets: str | None = None
    """Array file with the targets, a row for each step or for each sequence."""
    stride: Annotated[int | None, Bounds(1, MAX_SEQ)] = None
    """Steps from the start of a window to that of the next; None: one long series is cut into windows that do not
    overlap, and each of many series is one sequence."""
    nan: Nan = "error"
    """What a NaN or an infinite number does: it is an error, its sequence is dropped, or it is read as 0 (not in tokens
    and classes, where 0 has a meaning)."""
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
    normalise: Literal["none", "inputs", "both"] = "inputs"
    """Which numbers get mean 0 and standard deviation 1 over the training part. Tokens and classes never do."""
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
            names = tuple(value) if isinstance(value, tuple | list) else ()
            if not names or not all(isinstance(n, str) for n in names) or len({*names}) < len(names):
                advice = 'Write it as ("open", "close"), and columns of an array as ("0", "3").'
                raise wrong(name, "a list of different columns", value, advice)
            msgspec.structs.force_setattr(self, name, names)  # a list becomes a tuple, as it comes back from JSON
        for name in ("id", "targets", "cache", "vocabulary"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise wrong(name, "text", value, f"Leave {flag(name)} out.")
        share = self.validation
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share < 1:
            form = "a share from 0 up to, not including, 1"
            raise wrong("validation", form, share, "Give --validation a number such as 0.1.")
        twice = [letter for letter, count in Counter(self.vocabulary or "").items() if count > 1]
        if twice:
            raise MisuseError(
                rule="A vocabulary has every character once",
                got=f"{twice[0]!r} comes twice",
                advice="Leave the second out.",
            )


_READ = {
    "npy": ("columns", "target", "ahead", "targets", "stride"),
    "csv": ("columns", "target", "ahead", "id", "stride", "cache"),
    "parquet": ("columns", "target", "ahead", "id", "stride", "cache"),
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
