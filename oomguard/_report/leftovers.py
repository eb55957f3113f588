"""What `oomguard clean` finds: as a table and as JSON."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from oomguard._core.units import format_bytes
from oomguard._report.tables import Section, from_columns, show_sections
from oomguard._report.words import times
from oomguard._train.leftovers import Leftover

if TYPE_CHECKING:
    from rich.console import Console


def leftovers_json(found: Sequence[Leftover], *, removed: bool) -> dict[str, Any]:
    return {"removed": removed, "bytes": _total(found), "leftovers": msgspec.to_builtins([*found])}


def show_leftovers(found: Sequence[Leftover], console: "Console", *, removed: bool) -> None:
    """Print the sum of each kind, then every path on a line of its own, so that it can be copied."""
    if not found:
        show_sections([Section(title="There is nothing to remove.")], console)
        return
    counts = Counter(leftover.kind for leftover in found)
    sizes = {kind: sum(leftover.bytes for leftover in found if leftover.kind == kind) for kind in counts}
    columns = {
        "kind": [*counts],
        "number": [str(count) for count in counts.values()],
        "size": [format_bytes(size) for size in sizes.values()],
    }
    what = f"{times(len(found), 'item')}, {format_bytes(_total(found))}"
    done = f"Removed {what}." if removed else f"{what[0].upper()}{what[1:]} can be removed."
    advice = () if removed else ("Nothing was removed. To remove all of it, add --yes.",)
    result = Section(title=done, sentences=advice, table=from_columns(columns, ["kind"]))
    show_sections([result, Section(title="Paths", lines=tuple(leftover.path for leftover in found))], console)


def _total(found: Sequence[Leftover]) -> int:
    return sum(leftover.bytes for leftover in found)
