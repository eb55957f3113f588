"""A plan in words and as JSON. A terminal, a notebook and a page show the same sections.

`summarize` gives the result in a few sentences, `explain` everything, `explain_shortfall` why there is no plan.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from oomguard._core.units import format_bytes, format_seconds
from oomguard._plan.task_value import TaskPlan
from oomguard._plan.value import LossyGain, Plan, Shortfall, epoch_of
from oomguard._predict.belief import doubted
from oomguard._probe.record import Probed
from oomguard._probe.verdict import Verdict
from oomguard._report import plan_tables
from oomguard._report.tables import Section, Table, printer, show_sections
from oomguard._report.words import (
    candidate_words,
    chosen_words,
    noise_words,
    sentence,
    speed_words,
    task_words,
    time_words,
    times,
)
from oomguard._search.space import WORTH
from oomguard._spec.spec import Spec

if TYPE_CHECKING:
    from rich.console import Console

ENDED = {
    "done": "the search ended because more probes would not change the plan",
    "max-probes": "the search ended after the number of probes it was allowed (--max-probes)",
    "timeout": "the search ended after the time it was allowed (--timeout)",
    "interrupted": "the search was interrupted, and this is the best plan known at that time",
    "storage": "the storage did not answer any more, and this is the best plan known at that time",
    "estimate": "nothing was run: a plan for a device that is not present is made by arithmetic alone",
}
HEAPS = {
    "tight": "Allocator tight: freed memory returns to the system at once, for the lowest peak.",
    "fast": "Allocator fast: freed memory is kept and used again, which is faster and may raise the peak a little.",
    "expandable": "Allocator expandable: PyTorch's blocks of memory can grow, so that less is lost between them.",
}
"""What the allocators of a plan do, for readers who have not met them."""
AIMS = {"throughput": "fastest candidate", "microbatch": "largest microbatch", "seq": "longest sequences"}
"""The goal that each value of `--maximize` stands for."""
PLURAL = ("seq",)  # aims that are several things


def plan_json(plan: Plan | TaskPlan) -> str:
    """The plan as its file has it, in ASCII."""
    text = msgspec.json.format(msgspec.json.encode(plan), indent=2).decode() + "\n"
    return text if text.isascii() else json.dumps(plan.to_dict(), indent=2) + "\n"


def shortfall_json(shortfall: Shortfall) -> dict[str, Any]:
    return {"fits": False, "message": shortfall.message, **msgspec.to_builtins(shortfall)}


def show_result(plan: Plan, path: Path | None, console: "Console") -> None:
    """Print the result in a few lines, where the plan was written, and how to see more."""
    first, evidence = summarize(plan)
    first = msgspec.structs.replace(first, sentences=first.sentences + evidence.sentences)
    show_sections([first, *_data(plan)], console)
    if path is not None:
        say = printer(console)
        say("")
        say(f"Written to {path}. Everything about it: oomguard show {shlex.quote(str(path))}")
        if plan.data is not None:
            say(f"Run it: {train_command(plan, str(path))}")


def explain(plan: Plan, sequences: int | None = None) -> list[Section]:
    """Everything that a plan says. `sequences` is the size of an epoch (default: as the spec's histogram)."""
    sections = [
        result(plan),
        *_data(plan),
        _why(plan),
        plan_tables.memory(plan),
        _evidence(plan),
        _time(plan, sequences),
    ]
    sections += [plan_tables.lengths(plan)] if plan.buckets else []
    sections += [plan_tables.front(plan)] if plan.front else []
    return [*sections, plan_tables.fallbacks(plan), _start(plan), plan_tables.environment(plan)]


def summarize(plan: Plan) -> list[Section]:
    """The result and its evidence, without tables."""
    return [result(plan), Section(title="Evidence", sentences=_basis(plan))]


def result(plan: Plan) -> Section:
    """What was planned, and with which settings, memory and speed."""
    lossy = [f"{knob.replace('_', ' ')} {getattr(plan.candidate, knob)}" for knob in plan.candidate.lossy]
    peak = f"Peak {format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)} ({known_words(plan)})"
    return Section(
        title=f"Plan for {task_words(plan.spec, plan.where.device)}",
        sentences=(
            *([f"The gradient is not exact: {', '.join(lossy)}."] if lossy else []),
            chosen_words(plan.candidate),
            ", ".join([peak, *_speed(plan)]) + ".",
            plain_words(plan),
        ),
    )


def _data(plan: Plan) -> list[Section]:
    """What was inferred from the data, if the plan was made for some."""
    data = plan.data
    if data is None:
        return []
    return [Section(title="Data" if data.path is None else f"Data: {data.path}", sentences=data.notes)]


def train_command(plan: Plan, path: str) -> str:
    """The command that trains the plan in a file: with as many processes as it is for, and with data if it has none."""
    known = plan.data is not None and plan.data.path is not None
    shards = plan.candidate.shards
    several = f"torchrun --nproc-per-node {shards} -m -- " * (shards > 1)
    return f"{several}oomguard train {shlex.quote(path)}" + ("" if known else " --data FILE")


def known_words(plan: Plan) -> str:
    """How the peak is known: measured, predicted from probes, or by arithmetic."""
    record = plan.record
    if plan.confirmed and record is not None:
        return f"{plan.known}, {times(record.passes, 'pass', 'es')} at full length"
    if record is not None:
        return f"{plan.known}; measured only with {_length_words(plan, record.spec.steps)}"
    if plan.calibration.records:
        words = f"{plan.known} from {times(plan.calibration.records, 'probe')} of other candidates"
        longest = max((other.spec.steps for other in plan.records if other.verdict.ran), default=plan.spec.steps)
        return f"{words}, the longest with {_length_words(plan, longest)}" if longest < plan.spec.steps else words
    return f"{plan.known} {'from earlier searches' if plan.calibration.cached else 'alone'}"


def _length_words(plan: Plan, steps: int) -> str:
    """A length that ran, and its share of the planned length."""
    percent = round(100 * steps / plan.spec.steps)
    return f"T = {steps:,}, {percent if percent else 'less than 1'} % of the full length"


def _speed(plan: Plan) -> list[str]:
    seconds, throughput = plan.seconds_per_step, plan.throughput
    if seconds is None or throughput is None:
        return []
    words = time_words(seconds, plan.time_spread, about=not plan.confirmed)
    return [f"{words} per step", speed_words(throughput, "sequences")]


def plain_words(plan: Plan) -> str:
    """The memory that plain PyTorch would need, and whether it fits."""
    expected = plan.plain.expected
    words = f"Plain PyTorch would need {format_bytes(expected.peak_bytes)}"
    if plan.plain.fits:
        return f"{words}: it fits too."
    if expected.safe_bytes <= plan.budget_bytes:
        return f"{words}, but {plan.plain.estimate.engine} cannot run {plan.spec.steps:,} steps at once."
    if expected.peak_bytes <= plan.budget_bytes:
        return f"{words}, or {format_bytes(expected.safe_bytes)} with the margin of error: it may not fit."
    return f"{words}: it does not fit."


def _why(plan: Plan) -> Section:
    first, *others = plan.maximize
    also = f", and a front towards the {' and the '.join(AIMS.get(aim, aim) for aim in others)}" if others else ""
    sentences = [f"Goal: the {AIMS.get(first, first)} that {'fit' if first in PLURAL else 'fits'}{also}."]
    sentences.append(f"Lossy knobs allowed: {', '.join(plan.allow) or 'none'}.")
    if plan.asked_budget_bytes is not None and plan.asked_budget_bytes > plan.budget_bytes:
        asked, free = format_bytes(plan.asked_budget_bytes), format_bytes(plan.budget_bytes)
        sentences.append(f"Only {free} of the budget of {asked} were free.")
    sentences += [_bought(gain, plain_fits=plan.plain.fits) for gain in plan.bought]
    if not plan.candidate.lossy:
        sentences.append("Every knob used is exact: the gradient is that of plain PyTorch, up to rounding.")
    if plan.candidate.allocator in HEAPS:
        sentences.append(HEAPS[plan.candidate.allocator])
    if plan.candidate.segments > 1:
        sentences.append(
            "The forward pass keeps only the states at the borders of segments; the backward pass recomputes the rest."
            if plan.candidate.recompute
            else "Segments keep everything they computed: nothing is recomputed, and only workspace is saved."
        )
    sentences += _speed_limit(plan)
    seconds, plain = plan.seconds_per_step, plan.plain.expected.seconds_per_step
    if plan.plain.fits and seconds is not None and plain is not None and plain > 1.05 * seconds:
        sentences.append(f"Plain PyTorch would take about {format_seconds(plain)} per step.")
    return Section(title="Why", sentences=tuple(sentences))


def _reach_words(plan: Plan) -> list[str]:
    """What ends the growth of sequences, if they are to be as long as possible."""
    reach = plan.reach
    if reach is None:
        return []
    limit = format_seconds(reach.step_seconds)
    over = {"memory": "need too much memory", "step-time": f"take more than {limit} per step (--step-time)"}
    longer = f"Longer sequences are predicted to {over[reach.bound]}."
    if plan.ended == "estimate":
        longer += " The time is a guess: nothing was run." if reach.bound == "step-time" else ""
    if reach.steps * (1 - WORTH / 2) <= plan.spec.steps:
        return [longer]
    return [f"These are the longest that ran. Up to T = {reach.steps:,} may fit: raise --timeout to try."]


def _speed_limit(plan: Plan) -> list[str]:
    if plan.enough_rows is None:
        return []
    if plan.enough_rows >= plan.spec.batch > 1:
        return [f"Speed grows with the microbatch up to the whole batch of {plan.spec.batch:,}."]
    return [f"Beyond a microbatch of {plan.enough_rows:,}, speed grows by less than 2 %."]


def _bought(bought: LossyGain, *, plain_fits: bool) -> str:
    """The gain by a lossy knob. If plain PyTorch fits, only the user's choice can rule out everything else."""
    names = {"precision": bought.value, "window": f"A window of {bought.value} steps"}
    words = names.get(bought.knob, "8-bit optimizer state")
    if bought.exact is None:
        why = "Nothing was searched without it" if plain_fits else "Nothing that was searched fits without it"
        return f"{words} is lossy. {why}."
    gains = [] if bought.speedup is None else [f"{bought.speedup:.2f} times the speed"]
    if bought.saved_bytes is not None:
        way = "lower" if bought.saved_bytes >= 0 else "higher"
        gains.append(f"a peak that is {format_bytes(abs(bought.saved_bytes))} {way}")
    best = f"the best candidate without it ({candidate_words(bought.exact)})"
    return f"{words} is lossy. Compared with {best} it brings {' and '.join(gains)}."


def _evidence(plan: Plan) -> Section:
    sentences, ratio = [*_basis(plan)], plan.calibration.ratio
    if ratio != 1:
        sentences.append(f"Calibration multiplies the estimate, without its runtime, by {ratio:.3f}.")
    if plan.record is not None and len(plan.records) > 1:
        sentences.append("A star marks the chosen candidate.")
    sentences += plan_tables.shared_words(plan.records, plan.candidate)
    table = plan_tables.records(plan) if plan.records else None
    return Section(title="Evidence", sentences=tuple(sentences), table=table)


def ended(plan: Plan) -> str:
    """How the search went."""
    why = ENDED.get(plan.ended, plan.ended)
    if not plan.probes:
        return sentence(why)
    out = f"{plan.ooms or 'none'} ran out of memory"
    return sentence(f"{times(plan.probes, 'probe')} in {format_seconds(plan.seconds)}, {out}; {why}")


def _basis(plan: Plan) -> tuple[str, ...]:
    """How the search went, the three figures for the peak, and what limits their worth."""
    calibration, expected = plan.calibration, plan.expected
    source = " after calibration" if calibration.ratio != 1 else ""
    sizes = [
        f"Estimate {format_bytes(plan.estimate.total_bytes)} by arithmetic",
        f"predicted {format_bytes(expected.peak_bytes)} (margin {format_bytes(expected.margin_bytes)}){source}",
        *([f"measured {format_bytes(plan.peak_bytes)}"] if plan.confirmed else []),
    ]
    sentences = [ended(plan), ", ".join(sizes) + "."]
    sentences += _reach_words(plan)
    if not plan.confirmed and plan.ended != "estimate":
        sentences.append(unmeasured_words(plan))
    sentences += late_words(plan.records)
    low = len(doubted(plan.records, plan.where))
    if low:
        them = "They do" if low > 1 else "It does"
        sentences.append(f"{times(low, 'measured peak')} far below the estimate did not repeat. {them} not count.")
    if plan.record is not None and plan.record.verdict.name == "STRAINED":
        sentences.append(plan.record.verdict.advice)
    if calibration.cached:
        sentences.append(f"{times(calibration.cached, 'record')} of earlier searches improved the prediction.")
    if calibration.stale:
        sentences.append("Records of earlier searches contradicted the new ones and were not used.")
    return tuple(sentences)


def unmeasured_words(plan: Plan | TaskPlan) -> str:
    """Why the chosen candidate was not run at full length, and what to do to have it run."""
    if isinstance(plan, TaskPlan):
        return plan.unrun or "Nothing was run: the device is not here."
    if plan.ended == "estimate":
        return "Nothing was run: the device is not here."
    ways = {
        "max-probes": "The search had run all its probes: raise --max-probes to have it measured.",
        "interrupted": "The search was interrupted: run it again to have it measured.",
    }
    why = ways.get(plan.ended, "There was no time for that: raise --timeout to have it measured.")
    if plan.record is None:
        return f"The chosen candidate itself was not run: its figures are predicted. {why}"
    return f"The chosen candidate was run with T = {plan.record.spec.steps:,}, not at full length. {why}"


def late_words(records: Sequence[Probed]) -> tuple[str, ...]:
    """What to do about probes that took too long, if any did."""
    late = sum(record.verdict is Verdict.TIMEOUT for record in records)
    words = f"{times(late, 'probe')} took too long and {'were' if late > 1 else 'was'} ended"
    return (f"{words}: raise --timeout to let {'them' if late > 1 else 'it'} finish.",) if late else ()


def _time(plan: Plan, sequences: int | None) -> Section:
    seconds, throughput, epoch = plan.seconds_per_step, plan.throughput, epoch_of(plan, sequences)
    if seconds is None or throughput is None or epoch is None:
        return Section(title="Time", sentences=("Nothing was run on such a device: no time is known.",))
    words = time_words(seconds, plan.time_spread, about=not plan.confirmed)
    step = f"A step of {times(plan.spec.batch, 'sequence')} takes {words}"
    tokens = plan.record.tokens_per_second if plan.record is not None else None
    more = [speed_words(throughput, "sequences"), *([] if tokens is None else [speed_words(tokens, "tokens")])]
    what = f"An epoch of {times(epoch.sequences, 'sequence')}" if epoch.known else f"{epoch.sequences:,} sequences"
    verb = "takes" if epoch.known else "take"
    whole = f"{what} ({times(epoch.steps, 'step')}) {verb} about {format_seconds(epoch.seconds)}."
    return Section(title="Time", sentences=(f"{step}: {', '.join(more)}.", *noise_words(plan.time_spread), whole))


def _start(plan: Plan) -> Section:
    command = train_command(plan, "plan.json")
    where = "the data in FILE" if command.endswith("FILE") else "its data"
    sentences = [f"The command executes the plan in plan.json on {where}."]
    if plan.exports:
        sentences.append("Your own training loop needs these variables for its allocator. oomguard train sets them.")
    lines = [f"export {name}={shlex.quote(value)}" for name, value in plan.exports.items()]
    return Section(title="Start", sentences=tuple(sentences), lines=(*lines, command))


def explain_shortfall(shortfall: Shortfall, spec: Spec | str, device: str) -> list[Section]:
    """Why nothing fits, for a spec or for the task of that name."""
    needed, term, ways = format_bytes(shortfall.needed_bytes), shortfall.term, shortfall.ways
    total, size = sum(shortfall.terms.values()), shortfall.terms[term]
    smallest = f"The smallest candidate needs {needed} with its margin, of {format_bytes(shortfall.budget_bytes)}"
    sentences = [
        f"{smallest}: {candidate_words(shortfall.candidate)}.",
        f"The largest obstacle is the term {term}: {format_bytes(size)} of {format_bytes(total)} by arithmetic.",
    ]
    if shortfall.records:
        sentences.append(f"Probes that were run: {len(shortfall.records)}.")
    enough = [way.change for way in ways if way.fits]
    if enough:
        advice = f"It would fit with {' or '.join(enough)}."
    else:
        rest = "None of these changes is enough" if ways else "No change that was tried lowers it"
        advice = f"{rest}: raise the budget above {needed}."
    yes = {True: "yes", False: "no"}
    table = Table(
        header=("change", "would need", "fits", "allowed"),
        rows=tuple((way.change, format_bytes(way.needed_bytes), yes[way.fits], yes[way.allowed]) for way in ways),
        align="lrll",
        caption="Changes that would lower the memory that is needed",
    )
    subject = f"{spec} on {device}" if isinstance(spec, str) else task_words(spec, device)
    return [
        Section(title=f"NOTHING FITS: {subject}", sentences=tuple(sentences)),
        Section(title="What would help", sentences=(advice,), table=table if ways else None),
    ]
