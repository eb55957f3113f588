"""DataOptions: how the data is read. Frozen, checked at birth, and through JSON and back unchanged."""

from typing import Any, Literal, get_args

import msgspec

from oomguard.checks import check_switch, check_whole, flag, nearest, shown
from oomguard.errors import MisuseError
from oomguard.spec import MAX_SEQ

Format = Literal["npy", "csv", "parquet", "text"]
Nan = Literal["error", "drop", "zero"]
Split = Literal["series", "time"]
Normalise = Literal["none", "inputs", "both"]


class DataOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the data is read. What is left out follows from the file and the spec.

    >>> DataOptions(target=("price",), id="shop").split is None
    True
    """

    format: Format | None = None
    """What the file is; None: by its suffix."""
    columns: tuple[str, ...] | None = None
    """Columns that are inputs, by name (by number, from 0, in an array); None: all that are nothing else."""
    target: tuple[str, ...] | None = None
    """Columns that are targets; None: the last ones, if there are as many more than the inputs as the head gives, or
    the inputs themselves, some steps ahead."""
    ahead: int | None = None
    """Steps that a target lies ahead of its inputs; None: 1 for a column that is an input too, otherwise 0."""
    id: str | None = None
    """Column of a table that says which series a row belongs to; None: all rows are one series."""
    targets: str | None = None
    """Array file with the targets, a row for each step or for each sequence."""
    stride: int | None = None
    """Steps from the start of one window to that of the next; None: one long series is cut into windows that do not
    overlap, and many series are sequences as they are."""
    nan: Nan = "error"
    """What happens to a NaN or an infinite number: an error, the sequence that holds it is left out, or 0 instead
    (not of a token or a class: 0 is one)."""
    characters: bool = False
    """Text: tokens are characters (of UTF-8), not bytes."""
    vocabulary: str | None = None
    """Text: the characters in the order of their tokens; None: all that the file has, sorted."""
    truncate: bool = False
    """Sequences longer than the spec's are cut: their last steps are kept for a last-step head, otherwise their
    first. Without it they are an error."""
    validation: float = 0.1
    """Share of the data that is kept for validation; 0: none."""
    split: Split | None = None
    """How that share is chosen: whole series at random, or the last steps of every series; None: by time if there is
    one long series, otherwise by series. One long series is split by series in blocks."""
    normalise: Normalise = "inputs"
    """Which numbers are brought to mean 0 and deviation 1, by the training part. Tokens and classes never are."""
    limit: int | None = None
    """Pairs that are taken of an iterable at most; None: all, so it must end."""
    cache: str | None = None
    """Directory for what is converted once (CSV, Parquet, characters, pairs); None: beside the file."""
    workers: int | None = None
    """Processes that load data; None: as many as the plan says."""
    seed: int = 0
    """Of the split and of the order."""
    inputs_only: bool = False
    """Whether targets are left alone, if there are any, as `predict` does: what is read as targets are the inputs."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), get_args(choices))
        for name, low, high in _BOUNDS:
            check_whole(name, getattr(self, name), low, high, optional=name != "seed")
        for name in ("characters", "truncate", "inputs_only"):
            check_switch(name, getattr(self, name))
        for name in ("columns", "target"):
            _check_names(name, getattr(self, name))
            if getattr(self, name) is not None:  # one form for one meaning
                msgspec.structs.force_setattr(self, name, tuple(getattr(self, name)))
        for name in ("id", "targets", "cache", "vocabulary"):
            _check_text(name, getattr(self, name))
        _check_share(self.validation)
        if self.vocabulary is not None and len(set(self.vocabulary)) < len(self.vocabulary):
            twice = next(one for one in self.vocabulary if self.vocabulary.count(one) > 1)
            raise MisuseError(
                rule="A vocabulary has every character once",
                got=f"{twice!r} comes twice",
                advice="Leave the second out.",
            )


_CHOICES: dict[str, Any] = {"format": Format, "nan": Nan, "split": Split, "normalise": Normalise}
_BOUNDS = (
    ("ahead", 0, MAX_SEQ),
    ("stride", 1, MAX_SEQ),
    ("limit", 1, 1 << 40),
    ("workers", 0, 128),
    ("seed", 0, (1 << 63) - 1),
)
_READ = {
    "npy": ("columns", "target", "ahead", "targets", "stride"),
    "csv": ("columns", "target", "ahead", "id", "stride", "cache"),
    "parquet": ("columns", "target", "ahead", "id", "stride", "cache"),
    "text": ("characters", "vocabulary", "stride", "cache"),
    "pairs": ("limit", "stride", "cache"),
    "Dataset": (),
}
"""Options that not all kinds of data have, by kind. The others go with all."""


def check_used(kind: str, options: DataOptions) -> None:
    """Raise if something is asked that this kind of data does not have: silently ignored, it would be missed late."""
    special = {name for names in _READ.values() for name in names}
    for field in msgspec.structs.fields(options):
        unused = field.name in special and field.name not in _READ[kind]
        if unused and getattr(options, field.name) != field.default:
            raise MisuseError(
                rule=f"{flag(field.name)} is for {', '.join(k for k, names in _READ.items() if field.name in names)}",
                got=f"this data is {kind}",
                advice=f"Leave {flag(field.name)} out, or give the data in that form.",
            )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value is None and name in ("format", "split"):
        return
    if not (isinstance(value, str) and value in choices):
        raise MisuseError(
            rule=f"{flag(name)} must be one of {', '.join(choices)}",
            got=f"got {shown(value)}",
            advice=nearest(value, list(choices)),
        )


def _check_names(name: str, value: object) -> None:
    if value is None:
        return
    names = value if isinstance(value, tuple | list) else ()
    if not names or not all(isinstance(one, str) for one in names) or len(set(names)) < len(names):
        raise MisuseError(
            rule=f"{flag(name)} must be a list of different columns",
            got=f"got {shown(value)}",
            advice='Write it as ("open", "close"), and columns of an array as ("0", "3").',
        )


def _check_text(name: str, value: object) -> None:
    if value is not None and not (isinstance(value, str) and value):
        raise MisuseError(
            rule=f"{flag(name)} must be text", got=f"got {shown(value)}", advice=f"Leave {flag(name)} out."
        )


def _check_share(value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise MisuseError(
            rule="--validation must be a share from 0 up to, not including, 1",
            got=f"got {shown(value)}",
            advice="Give --validation a number such as 0.1.",
        )
