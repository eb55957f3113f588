"""The parts of a plan that are tables: memory, records, lengths, the front, fallbacks, and the environment."""

from collections.abc import Sequence

from oomguard._core.units import format_bytes, format_seconds
from oomguard._plan.buckets import Bucket
from oomguard._plan.task_value import TaskPlan
from oomguard._plan.value import Plan, Point, Rung
from oomguard._probe.record import Record
from oomguard._report.tables import Section, Table, from_columns
from oomguard._report.words import NONE, figure, peak_words, pieces_words, rows_words, setting_words, times
from oomguard._spec.candidate import Candidate

Columns = dict[str, list[str]]  # columns of text by title
Rows = Sequence[Record] | Sequence[Bucket] | Sequence[Point] | Sequence[Rung]


def shared_words(rows: Rows, chosen: Candidate | None = None) -> tuple[str, ...]:
    """A sentence about the settings that all candidates of a table share, if there are any."""
    shared = _shared(rows, chosen)
    return (f"All of them: {', '.join(shared.values())}.",) if shared and len(rows) > 1 else ()


def _shared(rows: Rows, chosen: Candidate | None) -> dict[str, str]:
    """The settings that all candidates have, the chosen one included. One candidate alone shares none."""
    candidates = [*([] if chosen is None else [chosen]), *(row.candidate for row in rows)]
    first, *others = map(setting_words, candidates)
    return {name: text for name, text in first.items() if others and all(words.get(name) == text for words in others)}


def _table(caption: str, rows: Rows, before: Columns, after: Columns, chosen: Candidate | None = None) -> Table:
    """A table of candidates: microbatch, segments and the settings in which they differ, between other columns."""
    candidates, shared = [row.candidate for row in rows], _shared(rows, chosen)
    other = [
        ", ".join(text for name, text in setting_words(candidate).items() if name not in shared)
        for candidate in candidates
    ]
    columns = before | {"microbatch": [*map(rows_words, candidates)], "segments": [*map(pieces_words, candidates)]}
    columns |= ({"other knobs": other} if any(other) else {}) | after
    return from_columns(columns, ("segments", "other knobs", "verdict"), caption, drops=("other knobs",))


def _predicted(rows: Sequence[Bucket] | Sequence[Point] | Sequence[Rung]) -> Columns:
    """Predicted peaks, and predicted step times if anything was timed."""
    peaks = [format_bytes(row.expected.peak_bytes) for row in rows]
    seconds = [row.expected.seconds_per_step for row in rows]
    times = [NONE if each is None else format_seconds(each) for each in seconds]
    return {"peak": peaks} | ({"step time": times} if any(each is not None for each in seconds) else {})


def memory(plan: Plan) -> Section:
    """The estimate of plain PyTorch beside that of the plan, with prediction, measurement and budget below."""
    plain, ours = plan.plain.estimate, plan.estimate
    names = sorted(plain.terms | ours.terms, key=lambda name: -plain.terms.get(name, 0))
    pairs = [(name, plain.terms.get(name, 0), ours.terms.get(name, 0)) for name in names]
    rows = [(name, format_bytes(theirs), format_bytes(own)) for name, theirs, own in pairs if theirs or own]
    totals = [
        ("estimate", plain.total_bytes, ours.total_bytes),
        ("predicted", plan.plain.expected.peak_bytes, plan.expected.peak_bytes),
        ("margin", plan.plain.expected.margin_bytes, plan.expected.margin_bytes),
        ("measured", None, plan.peak_bytes if plan.confirmed else None),
        ("budget", plan.budget_bytes, plan.budget_bytes),
        ("host memory", plain.host_bytes or None, ours.host_bytes or None),
    ]
    shown = [(name, *map(_size, sizes)) for name, *sizes in totals if any(size is not None for size in sizes)]
    table = Table(
        header=("term", "plain PyTorch", "this plan"),
        rows=(*rows, *shown),
        align="lrr",
        sums=len(shown),
        caption="The terms of the estimate, the predicted and the measured peak, and the budget",
    )
    words = "The runtime is Python and PyTorch themselves. The margin is added to a prediction, since predictions err."
    return Section(title="Memory", sentences=(peak_words(ours.moment), words), table=table)


def _size(size_bytes: int | None) -> str:
    return NONE if size_bytes is None else format_bytes(size_bytes)


def records(plan: Plan) -> Table:
    """Every probe in the order in which they ran; a star marks the record of the chosen candidate."""
    probes = plan.records
    speeds = [NONE if record.tokens_per_second is None else figure(record.tokens_per_second) for record in probes]
    verdicts = [record.verdict.name + (" *" if record == plan.record else "") for record in probes]
    before = {"T": [f"{record.spec.steps:,}" for record in probes]}
    after = {"peak": [_size(record.peak_bytes) for record in probes], "tokens/s": speeds, "verdict": verdicts}
    caption = "Every probe in the order in which they ran, with what was measured"
    return _table(caption, probes, before, after, plan.candidate)


def lengths(plan: Plan) -> Section:
    buckets = plan.buckets
    sentences = [f"Sequences are sorted by length into {times(len(buckets), 'bucket')}, each with its candidate."]
    if plan.padding is not None:
        sentences.append(
            f"{plan.padding.before:.1%} of all computed tokens would be padding if microbatches were drawn at random; "
            f"drawn from one bucket each, {plan.padding.after:.1%} are."
        )
    before = {
        "T up to": [f"{bucket.longest:,}" for bucket in buckets],
        "sequences": [f"{bucket.sequences:,}" for bucket in buckets],
    }
    caption = "The candidate of each length bucket, with its predicted peak"
    table = _table(caption, buckets, before, _predicted(buckets), plan.candidate)
    return Section(title="Lengths", sentences=tuple(sentences), table=table)


def front(plan: Plan) -> Section:
    """The points of the front. Speeds are shown only if something was timed."""
    points, aims = plan.front, " or ".join(plan.maximize)
    better = f"Nothing that fits is better than one of these in {aims} without being worse in another."
    after = _predicted(points)
    if "step time" in after:
        after["tokens/s"] = [figure(point.tokens_per_second) for point in points]
    table = _table("The front, as predicted", points, {"T": [f"{point.seq:,}" for point in points]}, after)
    return Section(title="Front", sentences=(better, *shared_words(points)), table=table)


def fallbacks(plan: Plan) -> Section:
    rungs = plan.fallbacks
    if not rungs:
        return Section(title="Fallbacks", sentences=("There are none: nothing with this gradient needs less memory.",))
    use = "If memory gets tight, training falls back to these in turn. Batch and gradient stay the same."
    before = {"fallback": [f"{number}" for number in range(1, len(rungs) + 1)]}
    caption = "The fallbacks in their order, with their predicted peaks"
    table = _table(caption, rungs, before, _predicted(rungs), plan.candidate)
    return Section(title="Fallbacks", sentences=(use,), table=table)


def environment(plan: Plan | TaskPlan) -> Section:
    made_with = plan.environment
    versions = [
        f"oomguard {made_with.oomguard}",
        f"torch {made_with.torch}" if made_with.torch else "",
        made_with.library or "",
    ]
    versions += [f"driver {made_with.driver}" if made_with.driver else "", f"Python {made_with.python}"]
    rows = [
        (
            "device",
            f"{made_with.device}, {made_with.title}" if made_with.title != made_with.device else made_with.device,
        ),
        ("versions", ", ".join(filter(None, versions))),
        ("system", f"{made_with.system}, {times(made_with.cores, 'core')}"),
    ]
    for limit in made_with.limits:
        sizes = f"{format_bytes(limit.reach_bytes)} of {format_bytes(limit.limit_bytes)}"
        rows.append((limit.name, f"{sizes} ({limit.source})"))
    caption = "The machine on which the plan was made, and its limits of memory"
    return Section(title="Environment", table=Table(header=("", ""), rows=tuple(rows), align="ll", caption=caption))
