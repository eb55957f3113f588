"""The tables of an explanation: terms, records, buckets, the front, fallbacks, the environment, and ways to fit."""

from collections.abc import Iterable, Sequence

from oomguard.candidate import Candidate
from oomguard.plan.phrases import NONE, common, figure, pieces_words, rows_words, setting_words, times
from oomguard.plan.section import Table
from oomguard.plan.shortfall import Shortfall
from oomguard.plan.value import Bucket, Environment, Expected, Plan, Point, Rung
from oomguard.probe.record import Record
from oomguard.units import format_bytes, format_seconds

Columns = list[tuple[str, list[str]]]
"""Each with its head."""
Rows = Sequence[Record] | Sequence[Bucket] | Sequence[Point] | Sequence[Rung]


def in_all(rows: Rows, chosen: Candidate | None = None) -> tuple[str, ...]:
    """The settings that all candidates of a table share: a sentence before it."""
    shared = _shared(rows, chosen)
    return (f"In all of them: {', '.join(shared.values())}.",) if shared and len(rows) > 1 else ()


def _shared(rows: Rows, chosen: Candidate | None) -> dict[str, str]:
    """What need not be said of each candidate: what all have, and the chosen one too. (One alone is told whole.)"""
    candidates = [*([] if chosen is None else [chosen]), *(one.candidate for one in rows)]
    return common(candidates) if len(candidates) > 1 else {}


def _table(caption: str, rows: Rows, before: Columns, after: Columns, chosen: Candidate | None = None) -> Table:
    """Columns around those that tell candidates apart: microbatch, segments, and other knobs where they differ."""
    candidates, shared = [one.candidate for one in rows], _shared(rows, chosen)
    rest = [_short(text for name, text in setting_words(one).items() if name not in shared) for one in candidates]
    middle = [("microbatch", [*map(rows_words, candidates)]), ("segments", [*map(pieces_words, candidates)])]
    columns = [*before, *middle, *([("other knobs", rest)] if any(rest) else []), *after]
    return Table(
        header=tuple(name for name, _ in columns),
        rows=tuple(zip(*(cells for _, cells in columns), strict=True)),
        align="".join("l" if name in ("segments", "other knobs", "verdict") else "r" for name, _ in columns),
        caption=caption,
    )


def _short(words: Iterable[str]) -> str:
    """For a narrow column: an allocator's name says by itself what it is."""
    return ", ".join(text.removeprefix("allocator ") for text in words)


def _sizes(expected: Sequence[Expected]) -> Columns:
    """What is expected of each, in two columns (or one, if nothing was timed)."""
    peaks = ("peak", [format_bytes(one.peak_bytes) for one in expected])
    timed = [one.seconds_per_step for one in expected]
    if all(one is None for one in timed):
        return [peaks]
    return [peaks, ("a step", [NONE if one is None else format_seconds(one) for one in timed])]


def terms(plan: Plan) -> Table:
    """The estimate of the plan beside that of plain PyTorch, and what became of it."""
    plain, ours = plan.plain.estimate, plan.estimate
    names = sorted({*plain.terms, *ours.terms}, key=lambda name: -plain.terms.get(name, 0))
    sizes = [(name, plain.terms.get(name, 0), ours.terms.get(name, 0)) for name in names]
    rows = [(name, format_bytes(theirs), format_bytes(own)) for name, theirs, own in sizes if theirs or own]
    summands = len(rows)
    rows.append(("estimate", format_bytes(plain.total_bytes), format_bytes(ours.total_bytes)))
    for label, key in (("expected", "peak_bytes"), ("margin", "margin_bytes")):
        pair = (getattr(one.expected, key) for one in (plan.plain, plan))
        rows.append((label, *map(format_bytes, pair)))  # type: ignore[arg-type]
    if plan.confirmed:
        rows.append(("measured", NONE, format_bytes(plan.peak_bytes)))
    rows.append(("budget", format_bytes(plan.budget_bytes), format_bytes(plan.budget_bytes)))
    if ours.host_bytes or plain.host_bytes:
        rows.append(("of the host", format_bytes(plain.host_bytes), format_bytes(ours.host_bytes)))
    caption = "The terms of the estimate, and what became of it"
    header, sums = ("term", "plain PyTorch", "this plan"), len(rows) - summands
    return Table(header=header, rows=tuple(rows), align="lrr", sums=sums, caption=caption)


def records(plan: Plan) -> Table:
    """All that was run, in the order in which it was; a star at the record of the chosen candidate."""
    found = plan.records
    peaks = [NONE if one.peak_bytes is None else format_bytes(one.peak_bytes) for one in found]
    speeds = [NONE if one.tokens_per_second is None else figure(one.tokens_per_second) for one in found]
    verdicts = [one.verdict.name + (" *" if one == plan.record else "") for one in found]
    before = [("T", [f"{one.spec.steps:,}" for one in found])]
    after = [("peak", peaks), ("tokens/s", speeds), ("verdict", verdicts)]
    return _table("All that was run, the first first", found, before, after, plan.candidate)


def buckets(plan: Plan) -> Table:
    """How sequences of each length are run."""
    found = plan.buckets
    before = [
        ("T up to", [f"{one.longest:,}" for one in found]),
        ("sequences", [f"{one.sequences:,}" for one in found]),
    ]
    return _table("How each bucket is run", found, before, _sizes([one.expected for one in found]), plan.candidate)


def front(plan: Plan) -> Table:
    """What can be had for what."""
    found = plan.front
    sizes = _sizes([one.expected for one in found])
    timed = [one.expected.seconds_per_step is not None for one in found]
    if any(timed):  # otherwise speeds are nobody's measurements
        sizes += [("tokens/s", [figure(one.tokens_per_second) for one in found])]
    return _table("The points of the front", found, [("T", [f"{one.seq:,}" for one in found])], sizes)


def fallbacks(plan: Plan) -> Table:
    """The ladder."""
    found = plan.fallbacks
    before = [("rung", [f"{place}" for place in range(1, len(found) + 1)])]
    caption = "The ladder of fallbacks"
    return _table(caption, found, before, _sizes([one.expected for one in found]), plan.candidate)


def environment(found: Environment) -> Table:
    """Where the plan was made."""
    versions = [f"oomguard {found.oomguard}", f"torch {found.torch}" if found.torch else "", found.library or ""]
    versions += [f"driver {found.driver}" if found.driver else "", f"Python {found.python}"]
    rows = [
        ("device", f"{found.device}, {found.title}" if found.title != found.device else found.device),
        ("versions", ", ".join(filter(None, versions))),
        ("system", f"{found.system}, {times(found.cores, 'core')}"),
    ]
    for limit in found.limits:
        sizes = f"{format_bytes(limit.reach_bytes)} of {format_bytes(limit.limit_bytes)}"
        rows.append((limit.name, f"{sizes} ({limit.source})"))
    caption = "Where the plan was made, and what limited memory there"
    return Table(header=("", ""), rows=tuple(rows), align="ll", caption=caption)


def ways(shortfall: Shortfall) -> Table:
    """What would lower the least that is needed."""
    rows = [
        (
            way.change,
            format_bytes(way.needed_bytes),
            "yes" if way.fits else "no",
            "yes" if way.allowed else "no",
        )
        for way in shortfall.ways
    ]
    header = ("change", "would need", "fits", "allowed")
    return Table(header=header, rows=tuple(rows), align="lrll", caption="What would lower the least that is needed")
