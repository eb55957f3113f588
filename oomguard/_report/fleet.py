"""What `oomguard fleet` prints and writes: text, CSV, and one page."""

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from oomguard._core.system import write_file
from oomguard._core.units import format_bytes, format_seconds
from oomguard._fleet.value import Fleet, JobResult
from oomguard._report.tables import Section, from_columns, show_sections
from oomguard._report.words import NONE, pieces_words, rows_words, setting_words, times
from oomguard._spec.candidate import Candidate

if TYPE_CHECKING:
    from rich.console import Console

SHOWN, ON_PAGE = 40, 2000  # jobs in a table of a terminal and of a page; --csv and --json have all
HEADING = "Fleet"


def fleet_sections(fleet: Fleet, most: int = SHOWN) -> list[Section]:
    """The answer, the jobs, what fits nowhere, and how jobs share cards."""
    results = [*islice(fleet.results(), most)]
    fitting = [result for result in results if result.cheapest is not None]
    sections = [_summary(fleet, results)]
    if fitting:
        sections.append(_jobs(fleet, fitting))
    failed = [result for result in results if result.cheapest is None]
    if failed:
        lines = tuple(f"{result.name}: {' Or: '.join(result.advice)}" for result in failed)
        sections.append(Section(title="Jobs that fit no card", sentences=lines))
    if fitting:
        sections.append(_packing(fleet, most))
    return sections


def _summary(fleet: Fleet, results: Sequence[JobResult]) -> Section:
    fitting, total = int(fleet.pairs.fits.any(axis=1).sum()), len(fleet.jobs)
    kinds = times(len(fleet.cards), "kind")
    words = ["Memory is by arithmetic, margin included, and each job has a card for itself."]
    if not any(result.timed for result in results):
        words.append("No time is known: `measured` of a job names plans or ledgers with times on such a card.")
    if len(results) < total:
        words.append(f"The first {len(results):,} jobs are shown; --csv and --json have all.")
    title = f"All {times(total, 'job')} fit" if fitting == total else f"{fitting:,} of {times(total, 'job')} fit"
    return Section(title=f"{title} a card of {kinds}.", sentences=tuple(words))


def _jobs(fleet: Fleet, results: Sequence[JobResult]) -> Section:
    """A row for each job with its cheapest card and what it needs there, and its fastest card if times are known."""
    options = [result.cheapest for result in results if result.cheapest is not None]
    columns = {
        "job": [result.name for result in results],
        "card": [option.card for option in options],
        "microbatch": [rows_words(option.candidate) for option in options],
        "segments": [f"{option.candidate.segments:,}" for option in options],
        "settings": [_settings(option.candidate) for option in options],
        "needs": [format_bytes(option.peak_bytes + option.margin_bytes) for option in options],
    }
    if any(result.timed for result in results):
        columns |= {
            "step": [_time(option.seconds_per_step) for option in options],
            "epoch": [_time(option.seconds_per_epoch) for option in options],
            "cost": [NONE if option.cost_per_epoch is None else f"{option.cost_per_epoch:.2f}" for option in options],
            "fastest": [_fastest(result) for result in results],
        }
    else:
        columns["per hour"] = [f"{option.price:g}" for option in options]
    words = ("job", "card", "settings", "fastest")
    table = from_columns(columns, words, "Jobs with their cards", drops=("settings", "per hour", "segments"))
    return Section(title="Jobs", sentences=_basis(results), table=table)


def _settings(candidate: Candidate) -> str:
    """The precision and what is unusual. The engine is cuDNN on every card."""
    words = [text for name, text in setting_words(candidate).items() if name not in ("engine", "allocator")]
    kept = ["keeps activations"] if candidate.segments > 1 and not candidate.recompute else []
    return ", ".join([*words, *kept, *([pieces_words(candidate)] if candidate.window is not None else [])])


def _basis(results: Sequence[JobResult]) -> tuple[str, ...]:
    """How the cheapest and the fastest were chosen."""
    words = []
    if any(result.by == "price" for result in results):
        words.append("Where times are not known on all cards, the cheapest is that with the lowest price per hour.")
    if any(result.by == "cost" for result in results):
        words.append("Where times are known on all cards that fit, the cheapest is that with the lowest cost.")
    if any(result.timed for result in results):
        words.append("Costs are of an epoch. Times that were not measured are predicted from records (~).")
    return tuple(words)


def _time(seconds: float | None) -> str:
    return NONE if seconds is None else format_seconds(seconds)


def _fastest(result: JobResult) -> str:
    option = result.fastest
    if option is None or option.seconds_per_step is None:
        return NONE
    about = "" if option.measured else "~"
    return f"{option.card} ({about}{format_seconds(option.seconds_per_step)} a step)"


def _packing(fleet: Fleet, most: int) -> Section:
    """How many cards the jobs fill if small ones share one."""
    filled = [packed for packed in fleet.packed if packed.bins]
    columns = {
        "card": [packed.card.name for packed in filled],
        "jobs": [f"{sum(map(len, packed.bins)):,}" for packed in filled],
        "cards filled": [f"{len(packed.bins):,}" for packed in filled],
        "there are": [f"{packed.card.count:,}" for packed in filled],
    }
    lines = [
        f"{packed.card.name}: {', '.join(fleet.jobs[job].name for job in jobs)} ({format_bytes(used)})"
        for packed in filled
        for jobs, used in zip(packed.bins, packed.used_bytes, strict=True)
        if len(jobs) > 1
    ]
    words = [
        "Jobs are put on the first card with room for peak and margin, the largest first.",
        "Jobs that share a card share its speed too: times and costs are those of a job alone.",
    ]
    if any(not packed.enough for packed in filled):
        words.append("Where more cards are filled than there are, jobs wait for others to end.")
    table = from_columns(columns, ["card"], "Cards that the jobs fill")
    return Section(title="Jobs that share cards", sentences=tuple(words), table=table, lines=tuple(lines[:most]))


def show_fleet(fleet: Fleet, written: Sequence[str], console: "Console") -> None:
    """Print all sections, and the files that were written."""
    sections = fleet_sections(fleet)
    if written:
        sections.append(Section(title="Written", lines=tuple(written)))
    show_sections(sections, console, first_style="bold green" if fleet.fits else "bold red")


def save_fleet(fleet: Fleet, path: str, *, page: bool) -> str:
    """Write the table as CSV, or a page about it."""
    if not page:
        return str(write_file(path, fleet.table().to_csv(index=False).encode(), "A table"))
    from oomguard._report.page import text_page

    first, *rest = fleet_sections(fleet, ON_PAGE)
    return str(write_file(path, text_page(HEADING, first, rest).encode(), "A page"))
