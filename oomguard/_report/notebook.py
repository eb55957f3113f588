"""Values as a notebook shows them: a bar chart first, and details that open with a click. And in a line or five."""

from typing import NamedTuple

from oomguard._core.units import format_bytes, format_seconds
from oomguard._estimate.breakdown import Estimate
from oomguard._plan.task_value import TaskPlan
from oomguard._plan.value import Plan
from oomguard._probe.record import Probed, Record, TaskRecord
from oomguard._report import plan as plan_words
from oomguard._report import task as task_words
from oomguard._report.estimate import WORDS
from oomguard._report.tables import Section, Table, macros
from oomguard._report.words import candidate_words, peak_words, sentence, spec_words, times
from oomguard._spec.candidate import Candidate, Candidates

NAMES = {"runtime": "runtime (Python and PyTorch)"}  # terms whose names a newcomer may not know
LONGEST = 12  # the longest bar in budgets; a longer one is cut off there


class Bar(NamedTuple):
    """One bar: a size, and perhaps the margin after it."""

    name: str
    size_bytes: int
    margin_bytes: int = 0
    fits: bool = True

    @property
    def end_bytes(self) -> int:
        return self.size_bytes + self.margin_bytes


class Drawn(NamedTuple):
    """One bar for the template: its texts, and its lengths in percent."""

    name: str
    size: str
    length: float
    margin: float
    fits: bool
    is_cut: bool


def to_html(bars: list[Bar], budget_bytes: int | None, sections: list[Section]) -> str:
    """A title, bars beside the budget, and sections, of which all but the first are folded."""
    longest = max((bar.end_bytes for bar in bars), default=1)
    whole = longest if budget_bytes is None else max(budget_bytes, min(longest, LONGEST * budget_bytes))

    def share(size_bytes: int, room: float = 100.0) -> float:
        return round(min(room, 100 * size_bytes / max(1, whole)), 2)

    drawn = []
    for name, size, margin, fits in bars:
        length = share(size)
        is_cut = size + margin > whole
        drawn.append(Drawn(name, format_bytes(size), length, share(margin, 100 - length), fits, is_cut))
    budget = None if budget_bytes is None else (format_bytes(budget_bytes), share(budget_bytes))
    return str(macros().notebook(sections, drawn, budget))


def plan_html(plan: Plan) -> str:
    margin_bytes = 0 if plan.confirmed else plan.expected.margin_bytes
    plain = plan.plain.expected
    bars = [
        Bar("this plan", plan.peak_bytes, margin_bytes),
        Bar("plain PyTorch", plain.peak_bytes, plain.margin_bytes, plan.plain.fits),
    ]
    return to_html(bars, plan.budget_bytes, plan_words.explain(plan))


def task_plan_html(plan: TaskPlan) -> str:
    margin_bytes = 0 if plan.record is not None else plan.expected.margin_bytes
    bars = [
        Bar("this plan", plan.peak_bytes, margin_bytes),
        Bar("the whole batch at once", plan.plain_bytes, 0, plan.plain_bytes <= plan.budget_bytes),
    ]
    return to_html(bars, plan.budget_bytes, task_words.explain_task(plan))


def estimate_html(estimate: Estimate) -> str:
    """One estimate, or how many of several fit."""
    if isinstance(estimate.candidate, Candidates):
        return to_html([], None, [Section(title=estimate_line(estimate))])
    total, margin = int(estimate.total_bytes), int(estimate.margin_bytes)
    fits = estimate.budget_bytes is None or bool(estimate.fits)
    first = Section(
        title=f"{_answer(estimate)} on {estimate.device}",
        sentences=(sentence(candidate_words(estimate.candidate)), peak_words(str(estimate.moment)), *estimate.notes),
    )
    terms = sorted(((int(size), name) for name, size in estimate.terms.items() if size), reverse=True)
    rows = tuple((name, format_bytes(size), f"{size / max(1, total):.1%}", WORDS.get(name, "")) for size, name in terms)
    rows += (("total", format_bytes(total), "", ""), ("margin", format_bytes(margin), "", "since estimates err"))
    table = Table(header=("",) * 4, rows=rows, align="lrrl", sums=2)
    sections = [first, Section(title="What needs the memory", table=table)]
    if estimate.parts:
        parts = tuple((name, format_bytes(size)) for name, size in estimate.parts.items())
        sections.append(Section(title="Parts of the model", table=Table(header=("", ""), rows=parts, align="lr")))
    bars = [Bar("peak", total, margin, fits), *(Bar(NAMES.get(name, name), size) for size, name in terms[:4])]
    return to_html(bars, estimate.budget_bytes, sections)


def record_html(record: Record | TaskRecord) -> str:
    first = Section(
        title=f"{record.verdict.name}: {record.message}",
        sentences=(_subject(record) + ".", sentence(candidate_words(record.candidate)), *_speed(record)),
    )
    bars = [] if record.peak_bytes is None else [Bar("peak", record.peak_bytes, 0, record.verdict.ran)]
    sections = [first]
    if record.terms:
        rows = tuple((name, format_bytes(size)) for name, size in record.terms.items() if size)
        sections.append(Section(title="What needed the memory", table=Table(header=("", ""), rows=rows, align="lr")))
    about = [record.verdict.advice, f"The probe took {format_seconds(record.seconds)}."]
    sections.append(Section(title="About this probe", sentences=(*about, *([record.error] if record.error else []))))
    return to_html(bars, record.budget_bytes, sections)


def _subject(record: Probed) -> str:
    if isinstance(record, Record):
        return f"{spec_words(record.spec)}, T = {record.spec.steps:,}, batch {record.spec.batch:,} on {record.device}"
    assert isinstance(record, TaskRecord)
    return f"{record.task}, batch {record.batch:,} on {record.device}"


def _speed(record: Probed) -> list[str]:
    if record.seconds_per_step is None:
        return []
    return [f"A step takes {format_seconds(record.seconds_per_step)}, over {times(record.passes, 'pass', 'es')}."]


def _answer(estimate: Estimate) -> str:
    total = format_bytes(int(estimate.total_bytes))
    if estimate.budget_bytes is None:
        return total
    return f"{'Fits' if estimate.fits else 'Does not fit'}: {total} of {format_bytes(estimate.budget_bytes)}"


# ---- in one line, and in five


def estimate_line(estimate: Estimate) -> str:
    if isinstance(estimate.candidate, Candidate):
        return f"{_answer(estimate)} on {estimate.device}"
    import numpy as np

    totals = np.atleast_1d(estimate.total_bytes)
    fits = "" if estimate.fits is None else f", {int(np.sum(estimate.fits)):,} fit"
    sizes = f"{format_bytes(int(totals.min()))} to {format_bytes(int(totals.max()))}"
    return f"{times(totals.size, 'candidate')} on {estimate.device}{fits}: {sizes}"


def record_line(record: Record | TaskRecord) -> str:
    peak = "" if record.peak_bytes is None else f", {format_bytes(record.peak_bytes)}"
    return f"{record.verdict.name}, {_subject(record)}{peak} of {format_bytes(record.budget_bytes)}"


def plan_line(plan: Plan | TaskPlan) -> str:
    what = plan.task if isinstance(plan, TaskPlan) else spec_words(plan.spec)
    sizes = f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)}"
    return f"{what}: {candidate_words(plan.candidate)}, {sizes}"


def plan_lines(plan: Plan | TaskPlan) -> str:
    """A plan in five lines: the question, the settings, the memory and the speed, plain PyTorch, and the evidence."""
    if isinstance(plan, TaskPlan):
        result, ended = task_words.result(plan), task_words.ended(plan)
    else:
        result, ended = plan_words.result(plan), plan_words.ended(plan)
    *settings, memory, plain = result.sentences
    return "\n".join([result.title, " ".join(settings), memory, plain, ended])
