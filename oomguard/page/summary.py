"""The top of the page: whether it fits, as bars against the budget, and the figures that one looks for first."""

from html import escape
from typing import NamedTuple

from oomguard.plan.epoch import epoch_of
from oomguard.plan.phrases import NONE, pieces_words, rows_words, setting_words, speed_words, times
from oomguard.plan.value import Expected, Plan
from oomguard.plan.words import known_words, plain_words
from oomguard.units import format_bytes, format_seconds

LONGEST = 2.5
"""Budgets that a bar may be long: what is longer fades out at the edge."""


PLAIN = "Plain PyTorch"


class Fact(NamedTuple):
    """A figure with its name and a word about it."""

    name: str
    value: str
    note: str


def summary(plan: Plan, sequences: int | None = None) -> list[str]:
    """Whether it fits, the bars, the figures."""
    return [_answer(plan), *_bars(plan), *_facts([*_knobs(plan), *_times(plan, sequences)])]


def _answer(plan: Plan) -> str:
    """What was measured may fill the budget; what is expected must leave room for its margin."""
    spare_bytes = plan.budget_bytes - plan.peak_bytes
    if plan.confirmed:
        said, rest = "It fits", f"with {format_bytes(spare_bytes)} to spare"
    elif spare_bytes >= plan.expected.margin_bytes:
        spare = format_bytes(spare_bytes - plan.expected.margin_bytes)
        said, rest = "It is expected to fit", f"with {spare} to spare beside the margin"
    else:
        said, rest = "It is not sure to fit", "since the margin reaches over the budget"
    return f'<p class="answer"><strong>{said}</strong>, {escape(rest)}.</p>'


def _bars(plan: Plan) -> list[str]:
    """The peak of the plan and that of plain PyTorch, on one scale, with a line at the budget."""
    plain = plan.plain.expected
    scale_bytes = max(plan.budget_bytes, min(_safe(plain), int(LONGEST * plan.budget_bytes)))
    margin_bytes = 0 if plan.confirmed else plan.expected.margin_bytes
    theirs = plain_words(plan).removeprefix(PLAIN).strip()
    bars = [
        _bar(("This plan", known_words(plan)), (plan.peak_bytes, margin_bytes), scale_bytes, fits=True),
        _bar((PLAIN, theirs), (plain.peak_bytes, plain.margin_bytes), scale_bytes, fits=plan.plain.fits),
    ]
    edge = f'<p class="edge"><span>budget {escape(format_bytes(plan.budget_bytes))}</span></p>'
    share = _percent(plan.budget_bytes, scale_bytes)
    return [f'<div class="bars" style="--budget:{share}">', *bars, edge, "</div>"]


def _safe(expected: Expected) -> int:
    return expected.peak_bytes + expected.margin_bytes


def _bar(words: tuple[str, str], sizes: tuple[int, int], scale_bytes: int, *, fits: bool) -> str:
    """A bar of peak and margin, with a name and a note. Its figure stands above it: it is nothing to be read out."""
    (name, note), (peak_bytes, margin_bytes) = words, sizes
    cut = peak_bytes + margin_bytes > scale_bytes
    kind = " ".join(["bar", *([] if fits else ["over"]), *(["cut"] if cut else [])])
    shares = f"--peak:{_percent(peak_bytes, scale_bytes)};--margin:{_percent(margin_bytes, scale_bytes)}"
    said = f"<span>{escape(name)} <small>{escape(note)}</small></span> <b>{escape(format_bytes(peak_bytes))}</b>"
    drawn = f'<div class="track" style="{shares}" aria-hidden="true"><span><i></i><u></u></span></div>'
    return f'<div class="{kind}"><p>{said}</p>{drawn}</div>'


def _percent(size_bytes: int, scale_bytes: int) -> str:
    return f"{100 * min(1.0, size_bytes / max(1, scale_bytes)):.2f}%"


def _knobs(plan: Plan) -> list[Fact]:
    candidate = plan.candidate
    settings = setting_words(candidate)
    precision = settings.pop("precision")
    lossy = [f"{one.knob} {one.value}" for one in plan.bought] or [*candidate.lossy]
    gradient = Fact("Gradient", "exact", "that of plain PyTorch, up to rounding")
    if candidate.lossy:
        gradient = Fact("Gradient", "lossy", ", ".join(lossy))
    return [
        Fact("Microbatch", rows_words(candidate), f"batch {plan.spec.batch:,}"),
        Fact("Segments", pieces_words(candidate), f"T = {plan.spec.steps:,}"),
        Fact("Precision", precision, ", ".join(settings.values())),
        gradient,
    ]


def _times(plan: Plan, sequences: int | None) -> list[Fact]:
    seconds, throughput, epoch = plan.seconds_per_step, plan.throughput, epoch_of(plan, sequences)
    if seconds is None or throughput is None or epoch is None:
        return [Fact("A step", NONE, "nothing was timed"), Fact("An epoch", NONE, "nothing was timed")]
    size = f"{times(epoch.sequences, 'sequence')}, {times(epoch.steps, 'step')}"
    return [
        Fact("A step", format_seconds(seconds), speed_words(throughput, "sequences")),
        Fact("An epoch", format_seconds(epoch.seconds), size),
    ]


def _facts(facts: list[Fact]) -> list[str]:
    inside = [
        f"<div><dt>{escape(one.name)}</dt><dd><b>{escape(one.value)}</b> <small>{escape(one.note)}</small></dd></div>"
        for one in facts
    ]
    return ['<dl class="facts">', *inside, "</dl>"]
