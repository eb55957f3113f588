"""The plan of a task in words."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from oomguard._core.units import format_bytes, format_seconds
from oomguard._plan.task_value import TaskPlan
from oomguard._report.plan import late_words, unmeasured_words
from oomguard._report.plan_tables import environment
from oomguard._report.tables import Section, Table, printer, show_sections
from oomguard._report.words import (
    NONE,
    chosen_words,
    noise_words,
    pieces_words,
    rows_words,
    speed_words,
    time_words,
    times,
)

if TYPE_CHECKING:
    from rich.console import Console


def explain_task(plan: TaskPlan) -> list[Section]:
    """Everything that the plan of a task says."""
    return [result(plan), _why(plan), _evidence(plan), _fallbacks(plan), _start(plan), environment(plan)]


def show_task_result(plan: TaskPlan, path: Path | None, console: "Console") -> None:
    """Print the summary of a new plan, and where it was written."""
    show_sections([summarize_task(plan)], console)
    if path is not None:
        say = printer(console)
        say("")
        say(f"Written to {path}. Everything about it: oomguard show {shlex.quote(str(path))}")


def summarize_task(plan: TaskPlan) -> Section:
    """The result, what it rests on and its evidence, without tables."""
    first, why, evidence = result(plan), _why(plan), _evidence(plan)
    return Section(title=first.title, sentences=first.sentences + why.sentences[1:] + evidence.sentences)


def result(plan: TaskPlan) -> Section:
    """What was planned, and with which settings, memory and speed."""
    known = "by a trace alone" if plan.record is None else f"measured, {times(plan.record.passes, 'pass', 'es')}"
    parts = [f"Peak {format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)} ({known})"]
    if plan.seconds_per_step is not None:
        parts.append(f"{time_words(plan.seconds_per_step, plan.time_spread)} per step")
        parts.append(speed_words(plan.batch / max(1e-9, plan.seconds_per_step), "rows"))
    fits = "it fits too" if plan.plain_bytes <= plan.budget_bytes else "it does not fit"
    length = "the longest samples" if plan.seq is None else f"T = {plan.seq:,}"
    return Section(
        title=f"Plan for {plan.task}, {length}, batch {plan.batch:,} on {plan.where.device}",
        sentences=(
            *([f"The gradient is not exact: {', '.join(_lossy(plan))}."] if plan.lossy else []),
            chosen_words(plan.candidate),
            ", ".join(parts) + ".",
            f"The whole batch in one pass, without segments, would need {format_bytes(plan.plain_bytes)}: {fits}.",
        ),
    )


def _lossy(plan: TaskPlan) -> list[str]:
    """The knobs that change the gradient, with their values."""
    return [f"{knob.replace('_', ' ')} {getattr(plan.candidate, knob)}" for knob in plan.lossy]


def _why(plan: TaskPlan) -> Section:
    goal = {"throughput": "the fewest passes for the batch", "batch": "the largest batch in one pass"}[plan.maximize]
    sentences = [f"Goal: {goal}."]
    sentences += [f"The knob {knob} changes the gradient of this task. {why}" for knob, why in plan.lossy.items()]
    if not plan.lossy:
        sentences.append("The gradient is that of the whole batch in plain PyTorch, up to rounding.")
    if plan.evaluation_rows is not None:
        sentences.append(f"An evaluation without gradients fits up to {times(plan.evaluation_rows, 'row')} at once.")
    return Section(title="Why", sentences=(*sentences, *plan.notes))


def ended(plan: TaskPlan) -> str:
    """How the search went."""
    return (
        f"{times(len(plan.records), 'probe')} in {format_seconds(plan.seconds)}, {plan.ooms or 'none'} of them failed."
    )


def _evidence(plan: TaskPlan) -> Section:
    sizes = f"Estimate {format_bytes(plan.estimate.total_bytes)} by a trace, predicted "
    sizes += f"{format_bytes(plan.expected.peak_bytes)} (margin {format_bytes(plan.expected.margin_bytes)})."
    rows = tuple(
        (
            rows_words(one.candidate),
            pieces_words(one.candidate),
            NONE if one.peak_bytes is None else format_bytes(one.peak_bytes),
            NONE if one.seconds_per_step is None else format_seconds(one.seconds_per_step),
            one.verdict.name,
        )
        for one in plan.records
    )
    header = ("microbatch", "segments", "peak", "step", "verdict")
    table = Table(header=header, rows=rows, align="rrrrl", caption="Probes") if rows else None
    unmeasured = () if plan.confirmed or plan.unrun else (unmeasured_words(plan),)
    sentences = (ended(plan), sizes, *noise_words(plan.time_spread), *unmeasured, *late_words(plan.records))
    return Section(title="Evidence", sentences=sentences, table=table)


def _fallbacks(plan: TaskPlan) -> Section:
    if not plan.fallbacks:
        return Section(title="Fallbacks", sentences=("There are none: smaller microbatches change the gradient.",))
    rows = tuple((rows_words(one.candidate), format_bytes(one.expected.peak_bytes)) for one in plan.fallbacks)
    table = Table(header=("microbatch", "expected peak"), rows=rows, align="rr", caption="Fallbacks")
    return Section(
        title="Fallbacks", sentences=("If memory gets tight, training goes on with fewer rows.",), table=table
    )


def _start(plan: TaskPlan) -> Section:
    use = "The command trains the task. In your own loop, step(batch) replaces loss.backward() and optimizer.step()."
    exports = [f"export {name}={shlex.quote(value)}" for name, value in plan.exports.items()]
    command = f"oomguard train plan.json --model {shlex.quote(plan.task)}"
    code = 'plan = oomguard.load_plan("plan.json")', "step = oomguard.stepper(plan, model, loss, optimizer)"
    return Section(title="Start", sentences=(use,), lines=(command, *exports, *code))
