"""What a plan says, in sections: the one source of the words of a terminal, a notebook and a page.

`summarize` says the result first, in a few sentences; `explain` says everything; `explain_shortfall` why there is none.
"""

import shlex

from oomguard.plan import tables
from oomguard.plan.epoch import Epoch, epoch_of
from oomguard.plan.phrases import candidate_words, peak_words, spec_words, speed_words, times
from oomguard.plan.section import Section
from oomguard.plan.shortfall import Shortfall
from oomguard.plan.value import Bought, Plan
from oomguard.spec import Spec
from oomguard.units import format_bytes, format_seconds

ENDED = {
    "done": "the search ended since more probes would not change the plan",
    "max-probes": "the search ended with the last probe that it was allowed",
    "timeout": "the search ended with its time",
    "interrupted": "the search was interrupted, and this is the best plan known then",
    "estimate": "nothing was run: a plan for a device that is not here is made by arithmetic alone",
}
"""Why a search ended."""
AIMS = {"throughput": "fastest", "microbatch": "largest microbatch", "seq": "longest sequences"}
"""What is looked for."""


def explain(plan: Plan, sequences: int | None = None) -> list[Section]:
    """Everything that a plan says. An epoch has so many sequences (default: as many as the spec's histogram)."""
    sections = [
        _result(plan),
        _why(plan),
        Section(title="Memory", sentences=(peak_words(plan.estimate.moment),), table=tables.terms(plan)),
        _evidence(plan),
        _time(plan, sequences),
    ]
    sections += [_lengths(plan)] if plan.buckets else []
    sections += [_front(plan)] if plan.front else []
    sections += [_fallbacks(plan), _start(plan)]
    return [*sections, Section(title="Environment", table=tables.environment(plan.environment))]


def summarize(plan: Plan) -> list[Section]:
    """The result and what it rests on, without tables."""
    return [_result(plan), Section(title="Evidence", sentences=_basis(plan))]


def _result(plan: Plan) -> Section:
    spec = plan.spec
    what = f"{spec_words(spec)}, T = {spec.steps:,}, batch {spec.batch:,} on {plan.where.device}"
    peak = f"Peak {format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)} ({known_words(plan)})"
    return Section(
        title=f"Plan for {what}",
        sentences=(
            f"{_upper(candidate_words(plan.candidate))}.",
            ", ".join([peak, *_speed(plan)]) + ".",
            plain_words(plan),
        ),
    )


def known_words(plan: Plan) -> str:
    """How the peak is known."""
    record = plan.record
    if plan.confirmed and record is not None:
        return f"measured, {times(record.passes, 'pass', 'es')} at full length"
    if record is not None:
        return f"expected; it ran with {_length_words(plan, record.spec.steps)}"
    longest = max((one.spec.steps for one in plan.records if one.verdict.ran), default=plan.spec.steps)
    if plan.calibration.records:
        words = f"expected by {times(plan.calibration.records, 'probe')} of other candidates"
        return f"{words}, the longest with {_length_words(plan, longest)}" if longest < plan.spec.steps else words
    return "expected by earlier searches" if plan.calibration.cached else "by arithmetic alone"


def _length_words(plan: Plan, steps: int) -> str:
    """A length that ran, beside the one that is planned: it may be far from it."""
    percent = round(100 * steps / plan.spec.steps)
    return f"T = {steps:,}, {percent if percent else 'less than 1'} % of that"


def _speed(plan: Plan) -> list[str]:
    seconds, throughput = plan.seconds_per_step, plan.throughput
    if seconds is None or throughput is None:
        return []
    about = "" if plan.confirmed else "about "
    return [f"{about}{format_seconds(seconds)} a step", speed_words(throughput, "sequences")]


def plain_words(plan: Plan) -> str:
    """What PyTorch would need by itself, and whether it would have fitted."""
    expected = plan.plain.expected
    words = f"Plain PyTorch would need {format_bytes(expected.peak_bytes)}"
    safe_bytes = expected.peak_bytes + expected.margin_bytes
    if plan.plain.fits:
        return f"{words}: it fits too."
    if safe_bytes <= plan.budget_bytes:
        return f"{words}, but {plan.plain.estimate.engine} does not take {plan.spec.steps:,} steps at once."
    if expected.peak_bytes <= plan.budget_bytes:
        return f"{words}, or {format_bytes(safe_bytes)} with the margin of error: it is not sure to fit."
    return f"{words}: it does not fit."


def _why(plan: Plan) -> Section:
    first, *others = plan.maximize
    also = f", with a front to the {' and the '.join(AIMS.get(one, one) for one in others)}" if others else ""
    allowed = ", ".join(plan.allow) or "none"
    said = [f"Looked for: the {AIMS.get(first, first)} that fits{also}. Lossy knobs that were allowed: {allowed}."]
    if plan.asked_budget_bytes is not None and plan.asked_budget_bytes > plan.budget_bytes:
        said.append(
            f"Of the {format_bytes(plan.asked_budget_bytes)} of the budget only {format_bytes(plan.budget_bytes)} "
            "were free."
        )
    said += [_bought(one, given=plan.plain.fits) for one in plan.bought]
    if not plan.candidate.lossy:
        said.append("All knobs that are turned are exact: the gradient is that of plain PyTorch, up to rounding.")
    if plan.candidate.segments > 1:
        said.append(
            "A segment that is left is recomputed in the backward pass: only the states at the borders are kept."
            if plan.candidate.recompute
            else "Segments keep all that they computed: nothing is recomputed, and only workspace is saved."
        )
    said += _rows(plan)
    seconds, plain = plan.seconds_per_step, plan.plain.expected.seconds_per_step
    if plan.plain.fits and seconds is not None and plain is not None and plain > 1.05 * seconds:
        said.append(f"Plain PyTorch would take about {format_seconds(plain)} a step instead.")
    return Section(title="Why", sentences=tuple(said))


def _rows(plan: Plan) -> list[str]:
    """Where speed stops growing."""
    if plan.enough_rows is None:
        return []
    if plan.enough_rows >= plan.spec.batch > 1:
        return [f"Speed grows with the microbatch up to the whole batch of {plan.spec.batch:,}."]
    return [f"From a microbatch of {plan.enough_rows:,} on, speed grows by less than 2 %."]


def _bought(one: Bought, *, given: bool) -> str:
    """What a lossy knob bought. Where plain PyTorch fits, there is nothing without it only if the user wanted it so."""
    words = {"precision": one.value, "window": f"A window of {one.value} steps"}.get(one.knob, "8-bit optimizer state")
    if one.exact is None:
        why = "Nothing was searched without it" if given else "Nothing that was searched fits without it"
        return f"{words} is lossy. {why}."
    bought = [] if one.speedup is None else [f"{one.speedup:.2f} times the speed"]
    if one.saved_bytes is not None:
        way = "lower" if one.saved_bytes >= 0 else "higher"
        bought.append(f"a peak that is {format_bytes(abs(one.saved_bytes))} {way}")
    best = f"the best without it ({candidate_words(one.exact)})"
    return f"{words} is lossy. Against {best} it bought {' and '.join(bought)}."


def _evidence(plan: Plan) -> Section:
    said = (*_basis(plan), *_calibrated(plan))
    if not plan.records:
        return Section(title="Evidence", sentences=said)
    star = ("The star is at the chosen candidate.",) if plan.record is not None and len(plan.records) > 1 else ()
    shared = tables.in_all(plan.records, plan.candidate)
    return Section(title="Evidence", sentences=(*said, *star, *shared), table=tables.records(plan))


def _calibrated(plan: Plan) -> tuple[str, ...]:
    """By how much the records corrected the estimate."""
    ratio = plan.calibration.ratio
    if ratio == 1:
        return ()
    return (f"Calibration multiplies the estimate, without its runtime, by {ratio:.3f}.",)


def _basis(plan: Plan) -> tuple[str, ...]:
    """What a plan rests on."""
    calibration, expected = plan.calibration, plan.expected
    ended = ENDED.get(plan.ended, plan.ended)
    if plan.probes:
        out = f"{plan.ooms or 'none'} ran out of memory"
        ended = f"{times(plan.probes, 'probe')} in {format_seconds(plan.seconds)}, {out}; {ended}"
    sizes = [f"Estimate {format_bytes(plan.estimate.total_bytes)} by arithmetic"]
    corrected = " after calibration" if calibration.ratio != 1 else ""
    sizes.append(
        f"expected {format_bytes(expected.peak_bytes)} (margin {format_bytes(expected.margin_bytes)}){corrected}"
    )
    if plan.confirmed:
        sizes.append(f"measured {format_bytes(plan.peak_bytes)}")
    said = [f"{_upper(ended)}.", ", ".join(sizes) + "."]
    if plan.record is None and plan.ended != "estimate":
        said.append("The chosen candidate itself has not run: its figures are expected.")
    elif not plan.confirmed and plan.record is not None:
        said.append(f"The chosen candidate ran with T = {plan.record.spec.steps:,}, and not at full length.")
    if plan.record is not None and plan.record.verdict.name == "STRAINED":
        said.append(plan.record.verdict.advice)
    if calibration.cached:
        said.append(f"{times(calibration.cached, 'record')} of earlier searches helped.")
    if calibration.stale:
        said.append("Records of earlier searches contradicted the new ones and were dropped.")
    return tuple(said)


def _time(plan: Plan, sequences: int | None) -> Section:
    seconds, throughput, epoch = plan.seconds_per_step, plan.throughput, epoch_of(plan, sequences)
    if seconds is None or throughput is None or epoch is None:
        return Section(title="Time", sentences=("Nothing was run on such a device: no time is known.",))
    about = "takes" if plan.confirmed else "takes about"
    step = f"A step of {times(plan.spec.batch, 'sequence')} {about} {format_seconds(seconds)}"
    tokens = plan.record.tokens_per_second if plan.record is not None else None
    more = [speed_words(throughput, "sequences"), *([] if tokens is None else [speed_words(tokens, "tokens")])]
    return Section(title="Time", sentences=(f"{step}: {', '.join(more)}.", _epoch(epoch)))


def _epoch(epoch: Epoch) -> str:
    what = f"An epoch of {times(epoch.sequences, 'sequence')}" if epoch.known else f"{epoch.sequences:,} sequences"
    verb = "takes" if epoch.known else "take"
    return f"{what} ({times(epoch.steps, 'step')}) {verb} about {format_seconds(epoch.seconds)}."


def _lengths(plan: Plan) -> Section:
    said = [f"Sequences are sorted into {times(len(plan.buckets), 'bucket')} by length; each is run in its own way."]
    if plan.padding is not None:
        said.append(
            f"Of all computed tokens {plan.padding.before:.1%} would be padding if microbatches were drawn at random, "
            f"and {plan.padding.after:.1%} are if each is drawn from one bucket."
        )
    return Section(title="Lengths", sentences=tuple(said), table=tables.buckets(plan))


def _front(plan: Plan) -> Section:
    aims = " or ".join(plan.maximize)
    said = f"Nothing that fits beats one of these in {aims} without being worse in another."
    shared = tables.in_all(plan.front)
    return Section(title="Front", sentences=(said, *shared), table=tables.front(plan))


def _fallbacks(plan: Plan) -> Section:
    if not plan.fallbacks:
        return Section(title="Fallbacks", sentences=("There are none: nothing with this gradient needs less.",))
    said = "If memory gets tight, the guard goes down these rungs. Batch and gradient stay the same."
    return Section(title="Fallbacks", sentences=(said,), table=tables.fallbacks(plan))


def _start(plan: Plan) -> Section:
    """The command last: it needs no variables, as it sets them itself, but a loop of one's own does."""
    said = ["This trains by the plan in plan.json, on the data in FILE."]
    if plan.exports:
        said.append("The variables set the allocator: a loop of your own needs them, oomguard train sets them itself.")
    lines = [f"export {name}={shlex.quote(value)}" for name, value in plan.exports.items()]
    return Section(title="Start", sentences=tuple(said), lines=(*lines, "oomguard train plan.json --data FILE"))


def explain_shortfall(shortfall: Shortfall, spec: Spec, device: str) -> list[Section]:
    """Why there is no plan, and what would help."""
    needed, term = format_bytes(shortfall.needed_bytes), shortfall.term
    smallest = f"{needed} of {format_bytes(shortfall.budget_bytes)}, margin included"
    total, size = sum(shortfall.terms.values()), shortfall.terms[term]
    said = [
        f"The smallest candidate needs {smallest}: {candidate_words(shortfall.candidate)}.",
        f"What stands in the way is the term {term}: {format_bytes(size)} of {format_bytes(total)} by arithmetic.",
    ]
    if shortfall.records:
        said.append(f"Run: {times(len(shortfall.records), 'probe')}.")
    what = f"{spec_words(spec)}, T = {spec.steps:,}, batch {spec.batch:,} on {device}"
    ways = [one for one in shortfall.ways if one.fits]
    if ways:
        advice = f"It would fit with {' or '.join(one.change for one in ways)}."
    else:
        rest = "None of these is enough" if shortfall.ways else "No knob lowers it"
        advice = f"{rest}: raise the budget above {needed}, or make the model smaller."
    found = [Section(title=f"NOTHING FITS: {what}", sentences=tuple(said))]
    table = tables.ways(shortfall) if shortfall.ways else None
    return [*found, Section(title="What would help", sentences=(advice,), table=table)]


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
