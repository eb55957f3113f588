"""Section and Table: what is said, before anybody decides how it looks."""

import msgspec

from oomguard.errors import MisuseError


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Cells of text. Checked at birth."""

    header: tuple[str, ...]
    """A word for each column; all empty if the first column says what each row is."""
    rows: tuple[tuple[str, ...], ...]
    """The cells."""
    align: str
    """For each column, `l` (words) or `r` (figures)."""
    sums: int = 0
    """So many of the last rows are no rows like the others: sums of them, and what these are compared with."""
    caption: str = ""
    """What the rows are: for a page, and for who has it read out. On a screen the section's title is enough."""

    def __post_init__(self) -> None:
        widths = {len(self.header), len(self.align), *map(len, self.rows)}
        if len(widths) > 1 or {*self.align} - {"l", "r"}:
            raise MisuseError(
                rule="A table has as many cells in each row as in its header",
                got=f"got {sorted(widths)}",
                advice="Give every row all of its cells.",
            )


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One part of an explanation: a title, sentences, perhaps a table or lines for the shell."""

    title: str
    """What it is about."""
    sentences: tuple[str, ...] = ()
    """What there is to say."""
    table: Table | None = None
    """Figures that belong beside one another."""
    lines: tuple[str, ...] = ()
    """To be copied as they are."""
