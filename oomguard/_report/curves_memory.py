"""Peak memory over the microbatch and over the number of segments, and what memory consists of."""

from collections.abc import Iterable
from contextlib import suppress

import numpy as np
import pandas as pd

from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB, format_bytes, format_seconds
from oomguard._estimate.breakdown import estimate_step, step_moments
from oomguard._estimate.engines import cudnn
from oomguard._estimate.malloc import reserved_bytes
from oomguard._estimate.moments import TERMS, Moments, Terms, evaluation_moments
from oomguard._estimate.passes import border_bytes, stays_on_host
from oomguard._report.curve import Axis, Curve, Mark, Series, budget_mark, linear_axis, log_axis, make_series
from oomguard._report.subject import Subject
from oomguard._report.words import candidate_words, peak_words, pieces_phrase, times
from oomguard._search.space import LEVELS_FROM
from oomguard._spec.lengths import same_model

FAR = 5  # memory has a logarithmic axis if the budget is this many times the largest peak, or the reverse
ALIKE = 0.01  # precisions whose peaks differ by at most this share are drawn as one line
LARGEST = 1 << 16  # the largest microbatch that is considered
ENOUGH = 0.95  # the knee is the smallest number of segments that saves this share of all that segments can save
LENGTHS = 30  # sequence lengths along the axis
SMALL = 0.01  # terms that are never more than this share of the peak are drawn as one
SLOTS = {name: slot for slot, name in enumerate(("activations", "workspace", "logits", "input", "optimizer"))}
SLOTS |= {"runtime": 6, "weights": 5, "gradients": 7, "loader": 8}  # slot of each term, the same in all curves
MEASURED = 8  # slot of measured points, which no line has


def microbatch(subject: Subject) -> Curve:
    """Peak memory over the microbatch, for each precision, with the budget."""
    sweeps = _precision_sweeps(subject)
    series = [line for slot, (name, sweep) in enumerate(sweeps.items()) for line in _peak_lines(name, sweep, slot)]
    series += _measured_peaks(subject, "microbatch", fixed=("segments", "recompute", "levels", "window"))
    title, answer = _microbatch_finding(subject, sweeps)
    return Curve(
        name="microbatch",
        title=title,
        question=f"How much memory does a larger microbatch need{pieces_phrase(subject.candidate)}?",
        answer=answer,
        x=log_axis("Microbatch", "sequences per pass", subject.microbatches, base=2),
        y=memory_axis("Peak memory", [y for line in series for y in line.y], subject.budget_bytes / GIB),
        series=tuple(series),
        marks=(budget_mark(subject), *_plan_mark(subject, subject.candidate.microbatch)),
    )


def _precision_sweeps(subject: Subject) -> dict[str, pd.DataFrame]:
    """Predictions for every microbatch, by precision. Precisions that come out alike are one entry: `fp32 and bf16`."""
    groups: list[tuple[list[str], pd.DataFrame]] = []
    for precision in subject.precisions:
        sweep = subject.chart(subject.vary(microbatch=subject.microbatches, precision=precision))
        alike = [names for names, other in groups if np.allclose(other.peak_bytes, sweep.peak_bytes, ALIKE, 0)]
        if alike:
            alike[0].append(precision)
        else:
            groups.append(([precision], sweep))
    return {" and ".join(names): sweep for names, sweep in groups}


def _peak_lines(name: str, sweep: pd.DataFrame, slot: int) -> list[Series]:
    """The predicted peak as a line, with a band above it for the margin."""
    rows, peaks = sweep.microbatch, sweep.peak_bytes / GIB
    tips = (
        f"{name}, microbatch {size:,}: {format_bytes(peak)}, with margin {format_bytes(safe)}"
        for size, peak, safe in zip(rows, sweep.peak_bytes, sweep.safe_bytes, strict=True)
    )
    return [
        make_series("margin for error", rows, sweep.safe_bytes / GIB, kind="band", low=peaks, slot=slot),
        make_series(name, rows, peaks, tips=tips, slot=slot),
    ]


def _measured_peaks(subject: Subject, knob: str, fixed: Iterable[str]) -> list[Series]:
    """Peaks measured at full length over one knob, of candidates that share the `fixed` knobs with the subject's.

    The plan itself is left out: its star is there.
    """
    records = [
        record
        for record in subject.records
        if record.verdict.ran
        and record.spec.steps == subject.spec.steps
        and same_model(record.spec, subject.spec)
        and all(getattr(record.candidate, name) == getattr(subject.candidate, name) for name in fixed)
        and not (subject.planned is not None and record.candidate == subject.planned.candidate)
    ]
    sizes = [getattr(record.candidate, knob) for record in records]
    peaks = [record.peak_bytes or 0 for record in records]
    words = [f"measured: {candidate_words(r.candidate)}: {format_bytes(r.peak_bytes or 0)}" for r in records]
    points = make_series("measured", sizes, np.divide(peaks, GIB), kind="points", tips=words, slot=MEASURED)
    return [points] if records else []


def memory_axis(label: str, values: Iterable[float], budget: float) -> Axis:
    """An axis in GiB that includes the budget: logarithmic if the budget is far from all values."""
    sizes = [value for value in values if value > 0]
    if max(sizes) * FAR < budget or max(sizes) > FAR * budget:
        return log_axis(label, "GiB", [*sizes, budget], pad=1.25)
    return linear_axis(label, "GiB", [*sizes, budget])


def _plan_mark(subject: Subject, x: float) -> list[Mark]:
    """The peak of the plan's candidate at a position along the x axis. Empty without a plan."""
    plan = subject.planned
    return [] if plan is None else [Mark(text=subject.star, x=x, y=plan.peak_bytes / GIB, role="chosen")]


def largest_microbatch(subject: Subject, precision: str) -> int | None:
    sizes = np.arange(1, min(subject.spec.batch, LARGEST) + 1)
    fits = subject.predict(subject.vary(microbatch=sizes, precision=precision)).fits
    return int(sizes[fits].max()) if fits.any() else None


def _microbatch_finding(subject: Subject, sweeps: dict[str, pd.DataFrame]) -> tuple[str, str]:
    budget, batch = format_bytes(subject.budget_bytes), subject.spec.batch
    largest = {name: largest_microbatch(subject, name.split()[0]) for name in sweeps}
    first = next((name for name in sweeps if subject.candidate.precision in name.split()), next(iter(sweeps)))
    size = largest[first]
    if not np.any(sweeps[first].runs):
        limit = f"cuDNN takes at most {cudnn.MAX_STEPS:,} steps at once"
        return limit, f"{limit}, whatever the memory: {times(subject.spec.steps, 'step')} need segments."
    if size == batch:
        title = f"The whole batch of {batch:,} fits in one pass"
    elif size is None:
        title = "Not even a microbatch of 1 fits" + ("" if subject.candidate.segments > 1 else " without segments")
    else:
        title = f"Microbatches of up to {size:,} fit"
    phrases = [
        (f"up to {times(rows, 'sequence')}" if rows is not None else "not even one sequence")
        + f" in {' and '.join(name for name in largest if largest[name] == rows)}"
        for rows in dict.fromkeys(largest.values())
    ]
    needed = format_bytes(int(sweeps[first].safe_bytes.iloc[-1]))
    return title, (
        f"Within {budget}, a pass can take {', '.join(phrases)}. "
        f"The whole batch of {batch:,} needs {needed} in {first}, margin included."
    )


def segments(subject: Subject) -> Curve:
    """Peak memory and time per step over the number of segments."""
    sweep = segments_sweep(subject)
    sweeps, most = {1: sweep}, int(sweep.segments.iloc[-1])
    if most >= 2 * LEVELS_FROM[2] and not subject.spec.bidirectional:
        sweeps[2] = segments_sweep(subject, levels=2)
    unit_seconds = 1.0 if subject.calibrated else float(sweep.seconds_per_step[0])
    series = [line for levels in sweeps for line in _segment_lines(subject, levels, sweeps[levels], unit_seconds)]
    if not subject.candidate.recompute and subject.candidate.segments > 1:
        series += _segment_lines(subject, 1, segments_sweep(subject, recompute=False), unit_seconds)
    series += _measured_peaks(subject, "segments", fixed=("microbatch", "precision"))
    knee = knee_row(sweep)
    count = int(sweep.segments[knee])
    title, answer = _segments_finding(subject, sweep)
    peaks, durations = ([y for line in series if line.panel == panel for y in line.y] for panel in (0, 1))
    return Curve(
        name="segments",
        title=title,
        question="How much memory do segments save, and how much time do they cost?",
        answer=answer,
        x=log_axis("Segments", "", [1, most], base=2),
        y=memory_axis("Peak", peaks, subject.budget_bytes / GIB),
        below=linear_axis("Time", "s per step" if subject.calibrated else "× one piece", durations),
        series=tuple(series),
        marks=(
            budget_mark(subject),
            *_plain_mark(subject, sweep),
            _knee_mark(subject, count, float(sweep.peak_bytes[knee]) / GIB),
            Mark(text="", x=count, y=float(sweep.seconds_per_step[knee]) / unit_seconds, panel=1),
            *(_plan_mark(subject, subject.candidate.segments) if subject.candidate.window is None else []),
        ),
    )


def _knee_mark(subject: Subject, count: int, peak: float) -> Mark:
    """The knee as a ring, or only as a label where the star of the plan is."""
    is_plan = subject.planned is not None and subject.candidate.segments == count
    text = f"knee: {count:,} segments"
    return Mark(text=text, x=count, y=peak, role="label" if is_plan else "note")


def _plain_mark(subject: Subject, sweep: pd.DataFrame) -> list[Mark]:
    """The peak of plain PyTorch, if that is on the chart and not where the line begins."""
    plain, whole = subject.plain_bytes, int(sweep.peak_bytes[0])
    shown = plain < (1 - ALIKE) * whole
    return [Mark(text=f"plain PyTorch {format_bytes(plain)}", y=plain / GIB)] if shown else []


def segments_sweep(subject: Subject, levels: int = 1, *, recompute: bool = True) -> pd.DataFrame:
    """Predictions for numbers of segments from 1 on; with two levels, from where a second level can save memory."""
    counts = [count for count in subject.segments if count >= LEVELS_FROM[levels]]
    return subject.chart(subject.vary(segments=counts, levels=levels, recompute=recompute, window=None))


def knee_row(sweep: pd.DataFrame) -> int:
    """The row of the knee in predictions for a rising number of segments: beyond it, more segments save little."""
    saved = sweep.peak_bytes[0] - np.asarray(sweep.peak_bytes)
    return int(np.argmax(saved >= ENOUGH * saved.max()))


def _segment_lines(subject: Subject, levels: int, sweep: pd.DataFrame, unit_seconds: float) -> list[Series]:
    slot, suffix = levels - 1, " in 2 levels" if levels == 2 else ""
    if not sweep.recompute.all():
        slot, suffix = 2, " without recomputation"
    counts, durations = sweep.segments, sweep.seconds_per_step / unit_seconds
    words = [
        format_seconds(time) if subject.calibrated else f"{time:.2f} times as long as in one piece"
        for time in durations
    ]
    tips = [
        [f"{times(count, 'segment')}{suffix}: {phrase}" for count, phrase in zip(counts, phrases, strict=True)]
        for phrases in (map(format_bytes, sweep.peak_bytes), words)
    ]
    name = suffix.strip() or "segments"
    return [
        make_series(name, counts, sweep.peak_bytes / GIB, tips=tips[0], slot=slot),
        make_series(name, counts, durations, tips=tips[1], slot=slot, panel=1),
    ]


def _segments_finding(subject: Subject, sweep: pd.DataFrame) -> tuple[str, str]:
    knee, counts = knee_row(sweep), sweep.segments
    whole, there, least = map(format_bytes, (sweep.peak_bytes[0], sweep.peak_bytes[knee], sweep.peak_bytes.min()))
    plain, microbatch = format_bytes(subject.plain_bytes), subject.candidate.microbatch
    if not knee:
        answer = (
            f"In one piece a pass of {times(microbatch, 'sequence')} needs {whole}; no number of segments lowers that."
        )
        return "Segments save nothing here", answer
    slower = sweep.seconds_per_step / sweep.seconds_per_step[0]
    quickest = 1 + int(slower[1:].argmin())
    costs = f"{slower[knee]:.2f} times as long as in one piece"
    if slower[quickest] < 0.95 * slower[knee]:
        costs += f" ({counts[quickest]:,} segments: {slower[quickest]:.2f} times)"
    budget = format_bytes(subject.budget_bytes)
    if not sweep.fits.any():
        needed = f"No number of segments fits {budget} with a microbatch of {microbatch:,}."
    elif (fewest := int(counts[sweep.fits].min())) == 1:
        needed = f"The budget of {budget} needs no segments."
    else:
        needed = f"The budget of {budget} needs at least {fewest:,} segments."
    if subject.plain_bytes <= sweep.peak_bytes[knee]:
        title = f"{counts[knee]:,} segments need {there}, and plain PyTorch {plain}"
    else:
        title = f"{counts[knee]:,} segments cut the peak from {plain} to {there}"
    saved = f"{ENOUGH:.0%} of what segments can save (the least is {least})"
    settings = "" if whole == plain else f" In one piece, these settings need {whole}."
    return title, f"That is {saved}; a step takes {costs}. {needed}{settings}"


def terms(subject: Subject) -> Curve:
    """The terms of the peak, stacked, over the sequence length."""
    sizes: dict[int, Terms] = {}
    for steps in np.unique(np.linspace(1, 2 * subject.spec.steps, LENGTHS).astype(int)).tolist():
        with suppress(MisuseError):  # longer than a spec allows
            sizes[steps] = estimate_step(*subject.at_length(steps), subject.target).terms
    rows = pd.DataFrame.from_dict(sizes, orient="index", columns=TERMS)
    top_bytes = int(rows.sum(axis=1).max())
    asked = subject.spec.steps
    estimate = estimate_step(subject.spec, subject.candidate, subject.target)
    order = sorted(TERMS, key=lambda term: -estimate.terms[term])
    parts = ", ".join(f"{term} {format_bytes(int(estimate.terms[term]))}" for term in order[:3])
    share = estimate.terms[order[0]] / estimate.total_bytes
    visible = _budget_in_sight(subject, top_bytes)
    return Curve(
        name="terms",
        title=f"{order[0].capitalize()} {'take' if order[0].endswith('s') else 'takes'} {share:.0%} of the peak",
        question="What fills the memory as sequences get longer?",
        answer=f"At {times(asked, 'step')}{pieces_phrase(subject.candidate)} and a microbatch of "
        f"{subject.candidate.microbatch:,}, by arithmetic: {parts}; {format_bytes(int(estimate.total_bytes))} in all.",
        x=linear_axis("Sequence length", "time steps", [rows.index[-1] / 1.08]),
        y=linear_axis("Peak memory", "GiB", [top_bytes / GIB, *(mark.y or 0 for mark in visible)]),
        series=_stack(rows, [times(steps, "step") for steps in rows.index]),
        marks=(*visible, Mark(text=times(asked, "step"), x=float(asked), role="chosen" if subject.planned else "note")),
    )


def _budget_in_sight(subject: Subject, top_bytes: int) -> list[Mark]:
    """The mark of the budget, if it can be drawn on the same scale as the memory."""
    return [budget_mark(subject)] if 0.03 * top_bytes < subject.budget_bytes < 4 * top_bytes else []


def _stack(rows: pd.DataFrame, names: list[str]) -> tuple[Series, ...]:
    """One area for each term over the index of the rows, the steadiest at the bottom, with all small terms in one."""
    large = rows.columns[rows.max() > SMALL * rows.sum(axis=1).max()]
    large = sorted(large, key=lambda term: rows[term].max() - rows[term].min())
    rest = rows.drop(columns=large).sum(axis=1)
    areas = [("all other terms", rest, 8)] if rest.any() else []
    areas += [(term, rows[term], SLOTS[term]) for term in large]
    return tuple(
        make_series(
            term,
            rows.index,
            sizes / GIB,
            kind="area",
            tips=(f"{name}: {term} {format_bytes(size)}" for name, size in zip(names, sizes, strict=True)),
            slot=slot,
        )
        for term, sizes, slot in areas
    )


def timeline(subject: Subject) -> Curve:
    """The memory in use at each moment of a step, in order."""
    moments, repeated = moments_in_order(subject)
    totals = {name: sum(sizes.values()) for name, sizes in moments.items()}
    peak = max(totals, key=lambda name: totals[name])
    visible = _budget_in_sight(subject, totals[peak])
    marks = [*visible, Mark(text="the peak", x=float([*totals].index(peak)), y=totals[peak] / GIB)]
    if repeated is not None:
        first, last = repeated
        marks.append(Mark(text=f"{subject.candidate.segments:,} times from here", x=first - 0.5))
        marks.append(Mark(text="to here", x=last + 0.5))
    names = [name.removeprefix("backward of ").removeprefix("the ") for name in moments]
    names = ["all segments" if name == "forward of all segments" else name for name in names]
    return Curve(
        name="timeline",
        title=f"{peak_words(peak).removesuffix('.')}: {format_bytes(totals[peak])} by arithmetic",
        question="When in a step is the memory needed?",
        answer=_timeline_answer(subject, totals, repeated),
        x=Axis(label="Moments of a step, not to scale", low=-0.15, high=len(moments) - 0.85, names=tuple(names)),
        y=linear_axis("Memory in use", "GiB", [totals[peak] / GIB, *(mark.y or 0 for mark in visible)]),
        series=_stack(pd.DataFrame([*moments.values()]), [*moments]),
        marks=tuple(marks),
    )


def moments_in_order(subject: Subject) -> tuple[dict[str, dict[str, int]], tuple[int, int] | None]:
    """The terms at every moment in order, and the first and last moment that are repeated for every segment."""
    step, moments_of_step = step_moments(subject.spec, subject.candidate, subject.target)
    before = {
        name: moments_of_step["optimizer"][name] if name in ("runtime", "weights", "optimizer") else 0 for name in TERMS
    }
    ordered: Moments = {"before": before | {name: moments_of_step["forward"][name] for name in ("input", "loader")}}
    in_segments = subject.candidate.segments > 1 and subject.candidate.recompute
    if in_segments:
        passes = [sizes for name, sizes in evaluation_moments(step).items() if name != "loss"]
        largest = max(passes, key=lambda sizes: sum(sizes.values()))
        borders = 0 if stays_on_host(step) else border_bytes(step)
        ordered["forward of all segments"] = largest | {"activations": largest["activations"] + borders}
    layers = [name for name in moments_of_step if name.startswith("backward of ") and "layer" in name]
    order = ["forward of the frozen layers", "forward", "loss", "backward of the head"]
    repeated = [name for name in [*order, *reversed(layers), "backward of the embedding"] if name in moments_of_step]
    ordered |= {name: moments_of_step[name] for name in (*repeated, "optimizer")}
    start = len(ordered) - len(repeated) - 1
    moments = {name: _as_reserved(subject, sizes) for name, sizes in ordered.items()}
    return moments, (start, start + len(repeated) - 1) if in_segments else None


def _as_reserved(subject: Subject, sizes: Terms) -> dict[str, int]:
    """The terms as the device shows them: on a card, memory that is reserved but not allocated counts as workspace."""
    allocated = {name: int(sizes[name]) for name in TERMS}
    if not subject.target.cuda:
        return allocated
    total_bytes = sum(allocated.values()) - subject.target.runtime_bytes
    reserved = int(reserved_bytes(total_bytes, expandable=subject.candidate.allocator == "expandable"))
    return allocated | {"workspace": allocated["workspace"] + reserved - total_bytes}


def _timeline_answer(subject: Subject, totals: dict[str, int], repeated: tuple[int, int] | None) -> str:
    names = {"forward": "forward pass", "optimizer": "optimizer's step"}
    least = min((name for name in totals if name != "before"), key=lambda name: totals[name])
    before, after = format_bytes(totals["before"]), format_bytes(totals[least])
    count, passes = subject.candidate.segments, subject.candidate.accumulation
    answer = f"By arithmetic, {before} are in use before a pass begins. The least after that is {after}, in the "
    answer += f"{names.get(least, least)}."
    if repeated is not None:
        answer += f" The moments between the dotted lines come once for each of {count:,} segments, last one first."
    return answer + (f" A step has {passes:,} such passes and one update." if passes > 1 else "")
