"""What a worker has done, as text and JSON."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from oomguard._report.plan import ENDED
from oomguard._report.tables import printer
from oomguard._report.words import times

if TYPE_CHECKING:
    from rich.console import Console

    from oomguard._search.work import Work

ENDS = {
    **{why: words.partition(", and")[0] for why, words in ENDED.items()},
    "interrupted": "this worker was interrupted",
    "stopped": "the search was interrupted",
}


def work_json(done: "Work") -> dict[str, Any]:
    return asdict(done)


def show_work(done: "Work", console: "Console") -> None:
    why = ENDS.get(done.ended, "the search failed")
    printer(console)(f"{times(done.probes, 'probe')} of {done.all_probes:,} ran here for {done.study}: {why}.")
