"""All curves of a plan or a subject. The two about what fits are made here, the front and the region."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from oomguard._core.errors import MisuseError
from oomguard._core.progress import tell
from oomguard._core.units import GIB, format_bytes
from oomguard._plan.value import Plan
from oomguard._report.curve import Curve, Mark, Series, budget_mark, linear_axis, log_axis, make_series
from oomguard._report.curves_memory import microbatch, segments, terms, timeline
from oomguard._report.subject import Subject, for_charts, front_of, subject_of
from oomguard._report.words import candidate_words, figure, pieces_words, rows_words, times
from oomguard._search.space import LEVELS_FROM
from oomguard._spec.candidate import KNOBS, Candidate, make_candidate
from oomguard._spec.lengths import longest_that_fits
from oomguard._spec.spec import Spec

NEAR = 0.9  # a speed is near the highest one from this share on
MICROBATCHES = 10  # microbatches along a border of the region
CHANGED_KNOBS = {
    "front": ("precision",),
    "segments": ("microbatch", "precision"),
    "microbatch": ("segments", "precision"),
    "terms": ("segments", "microbatch", "precision"),
    "timeline": ("segments", "microbatch", "precision"),
}
"""The knobs that a page can redraw each curve for. A curve's own axes are not among them."""
SEGMENTS = (1, 8, 64)  # numbers of segments that a page redraws curves for
PASSES = (1, 4)  # passes per step whose microbatches a page redraws curves for


def front(subject: Subject) -> Curve:
    """Speed against peak memory: all candidates, and those that no other beats in both."""
    sweep = _all_candidates(subject)
    best = front_of(sweep)
    marks = [
        Mark(text=row.words, x=row.peak_bytes / GIB, y=row.tokens_per_second)
        for row in _notable(sweep, best).itertuples()
    ]
    plan = subject.planned
    if plan is not None:  # about the same as the fastest, which would be the second mark
        del marks[1:]
    if plan is not None and plan.seconds_per_step is not None:
        speed = subject.spec.steps * subject.spec.batch / plan.seconds_per_step
        marks.append(Mark(text=subject.star, x=plan.peak_bytes / GIB, y=speed, role="chosen"))
    groups = [
        ("fits", "dots", sweep[sweep.fits], 5),
        ("does not fit", "dots", sweep[~sweep.fits], 6),
        ("front: nothing is faster with less memory", "line", best, 0),
    ]
    title, answer = _front_finding(subject, sweep, best)
    return Curve(
        name="front",
        title=title,
        question="How much memory does speed need?",
        answer=answer,
        x=log_axis("Peak memory", "GiB", [*sweep.peak_bytes / GIB, subject.budget_bytes / GIB], pad=1.12),
        y=linear_axis(
            "Throughput",
            "tokens/s" if subject.calibrated else "tokens/s, guessed",
            [*sweep.tokens_per_second, *(mark.y or 0 for mark in marks)],
        ),
        series=tuple(
            make_series(name, rows.peak_bytes / GIB, rows.tokens_per_second, kind=kind, tips=rows.tip, slot=slot)
            for name, kind, rows, slot in groups
            if len(rows)
        ),
        marks=(budget_mark(subject, vertical=True), *marks),
    )


def _all_candidates(subject: Subject) -> pd.DataFrame:
    """Predictions for all microbatches, segments and precisions; `words` has the knobs that vary, `tip` has all."""
    counts = subject.segments if subject.candidate.window is None else [1]
    product = itertools.product(subject.precisions, counts, subject.microbatches)
    precisions, segments, rows = map(list, zip(*product, strict=True))
    sweep = subject.chart(
        subject.vary(precision=precisions, segments=segments, microbatch=rows, levels=1, recompute=True)
    )
    knobs = sweep[[*KNOBS]].astype(object)
    candidates = [Candidate(**values) for values in knobs.where(knobs.notna(), None).to_dict("records")]
    tips = (
        f"{candidate_words(candidate)}: {format_bytes(peak)}, {figure(speed)} tokens/s"
        for candidate, peak, speed in zip(candidates, sweep.peak_bytes, sweep.tokens_per_second, strict=True)
    )
    return sweep.assign(words=[*map(_knob_words, candidates)], tip=[*tips])


def _knob_words(candidate: Candidate) -> str:
    """The knobs that the front varies, with no line break inside a product."""
    pieces = f", {pieces_words(candidate)} segments" if candidate.segments > 1 else ""
    return f"{rows_words(candidate)}{pieces}, {candidate.precision}".replace(" × ", "\u00a0×\u00a0")


def _notable(sweep: pd.DataFrame, best: pd.DataFrame) -> pd.DataFrame:
    """One or two rows of the front: the one near the highest speed with the least memory, and the fastest.

    The plan is the fastest, though predictions may say that of another candidate.
    """
    if not len(best):
        return best
    fastest = sweep.planned.idxmax() if sweep.planned.any() else best.tokens_per_second.idxmax()
    near = best[best.tokens_per_second >= NEAR * sweep.tokens_per_second[fastest]]
    return sweep.loc[[*dict.fromkeys((*near.index[:1], fastest))]]


def _front_finding(subject: Subject, sweep: pd.DataFrame, best: pd.DataFrame) -> tuple[str, str]:
    budget = format_bytes(subject.budget_bytes)
    if not len(best):
        least = format_bytes(sweep.safe_bytes.min())
        return "Nothing fits", f"The least that any of these candidates needs is {least} of {budget}, margin included."
    thrifty, *others = _notable(sweep, best).itertuples()
    least = format_bytes(thrifty.peak_bytes)
    tail = "." if subject.calibrated else ". Nothing has been measured, so compare speeds only with one another."
    if not others:
        return f"The fastest candidate that fits needs {least}", (
            f"Within {budget}, it has a microbatch of {thrifty.words}. Any candidate with less memory is "
            f"more than {1 - NEAR:.0%} slower{tail}"
        )
    (fastest,) = others
    share = thrifty.tokens_per_second / fastest.tokens_per_second
    return f"{share:.0%} of the speed needs {least} instead of {format_bytes(fastest.peak_bytes)}", (
        f"Within {budget}, the fastest candidate has a microbatch of {fastest.words}; nearly as fast is "
        f"one of {thrifty.words}{tail}"
    )


def region(subject: Subject) -> Curve:
    wanted = np.geomspace(subject.microbatches[0], subject.microbatches[-1], MICROBATCHES)
    rows = sorted({min(subject.microbatches, key=lambda size: abs(size - float(goal))) for goal in wanted})
    whole, divided = (_ends(subject, rows, segments) for segments in (False, True))
    best = [*map(max, whole, divided)]
    asked = subject.spec.steps
    lengths = [asked, *filter(None, whole + divided)]
    least, most = max(1, min(lengths) // 3), 2 * max(lengths)
    axis = log_axis("Microbatch", "sequences per pass", rows, base=2)
    x = (axis.low, *rows, axis.high)
    border, top_border = (np.pad(np.maximum(ends, least), 1, mode="edge") for ends in (whole, best))
    bands = [
        make_series("fits without segments", x, border, kind="band", low=[least] * len(x), slot=2),
        make_series("fits with segments", x, top_border, kind="band", low=border, slot=0),
        make_series("does not fit", x, [most] * len(x), kind="band", low=top_border, slot=1),
    ]
    borders = [
        make_series("", x, border, tips=_border_tips(rows, whole, "without segments"), slot=2),
        make_series("", x, top_border, tips=_border_tips(rows, best, "with segments"), slot=0),
    ]
    place = Mark(text="asked for", x=float(subject.candidate.microbatch), y=float(asked))
    if subject.planned is not None:
        place = msgspec.structs.replace(place, text=subject.star, role="chosen")
    title, answer = _region_finding(subject, rows, whole, divided)
    return Curve(
        name="region",
        title=title,
        question="Which microbatches and sequence lengths fit?",
        answer=answer,
        x=axis,
        y=log_axis("Sequence length", "time steps", [least, most], pad=1.0),
        series=(*bands, *borders),
        marks=(*(mark for band in bands for mark in _band_name(band)), place),
    )


def _ends(subject: Subject, sizes: Sequence[int], segments: bool) -> list[int]:
    """The longest sequence that fits for each microbatch: half the microbatch allows about twice the length."""
    ends: list[int] = []
    for number, rows in enumerate(sizes):
        guess = ends[-1] * sizes[number - 1] // rows if ends else None
        ends.append(longest_steps(subject, rows, segments, guess))
    return ends


def longest_steps(subject: Subject, rows: int, segments: bool, guess: int | None = None) -> int:
    """The most time steps (to 0.1 %) at which a microbatch of `rows` fits, or 0 if not even one step does."""

    def fits(steps: int) -> bool:
        try:
            return bool(predict_ways(subject, subject.with_seq(steps), rows, segments).fits.any())
        except MisuseError:  # longer than a spec allows
            return False

    start = guess or subject.spec.steps
    low, high = (start, None) if fits(start) else (0, start)
    if guess is not None:  # the end is most likely near the guess
        near = int(start * 1.1) + 1 if low else int(start / 1.1)
        low, high = (near, high) if near and fits(near) else (low, near)
    return longest_that_fits(fits, low, high, parts=1000)


def predict_ways(subject: Subject, spec: Spec, rows: int, segments: bool) -> pd.DataFrame:
    """Predictions for every number of segments and levels that is considered, or for whole sequences.

    Whole sequences may also run as in plain PyTorch, whose heap and precision can need less.
    """
    own = subject.candidate
    if not segments:
        settings = {"allocator": [own.allocator, "system"], "precision": [own.precision, "fp32"]}
        varied = subject.vary(spec, microbatch=rows, segments=1, levels=1, recompute=True, window=None, **settings)
        return subject.predict(varied, spec)
    ways = [
        (count, levels)
        for levels, least in LEVELS_FROM.items()
        for count in subject.segments_for(spec.steps)
        if count >= least and (levels == 1 or not spec.bidirectional)
    ]
    counts, levels = np.array(ways).T
    varied = subject.vary(spec, microbatch=rows, segments=counts, levels=levels, recompute=True, window=None)
    return subject.predict(varied, spec)


def rounded_down(steps: int) -> str:
    """A length to three digits, rounded down: an estimate cannot vouch for more."""
    unit = 10 ** max(0, len(str(steps)) - 3)
    return f"{steps // unit * unit:,}"


def _border_tips(rows: list[int], ends: list[int], way: str) -> tuple[str, ...]:
    """The tips of a border, which has one more point at each edge of the panel."""
    reached = [f"up to {rounded_down(end)} steps" if end else "not even one step" for end in ends]
    tips = [f"microbatch {size:,}: {steps} {way}" for size, steps in zip(rows, reached, strict=True)]
    return tips[0], *tips, tips[-1]


def _band_name(band: Series) -> list[Mark]:
    """The name of a band inside it, unless the band is too thin for words."""
    place = len(band.x) // 3
    x, low, high = band.x[place], band.low[place], band.y[place]
    return [Mark(text=band.name, x=x, y=math.sqrt(low * high), role="words")] if high >= 1.6 * low else []


def _region_finding(subject: Subject, rows: list[int], whole: list[int], divided: list[int]) -> tuple[str, str]:
    asked, steps = subject.spec.steps, times(subject.spec.steps, "step")
    plain, largest = (
        max((size for size, end in zip(rows, ends, strict=True) if end >= asked), default=None)
        for ends in (whole, divided)
    )
    if plain == subject.spec.batch:
        title = f"{steps} fit without segments, with the whole batch in one pass"
    elif plain is None and largest is None:
        title = f"{steps} do not fit, whatever the microbatch"
    elif largest == subject.spec.batch:
        title = f"{steps} fit with segments and the whole batch in one pass"
    else:
        title = f"{steps} fit with a smaller microbatch" + (" and segments" if plain is None else "")
    budget = format_bytes(subject.budget_bytes)
    if not max(divided):
        return title, f"Not even one step fits {budget}, with or without segments."
    limits = f"a microbatch of {rows[-1]:,} up to {rounded_down(divided[-1])} steps"
    limits += f" and one of {rows[0]:,} up to {rounded_down(divided[0])}" if len(rows) > 1 else ""
    return title, f"Within {budget}, segments allow {limits}, with the same gradient as without them."


MAKERS: dict[str, Callable[[Subject], Curve]] = {
    "front": front,
    "region": region,
    "segments": segments,
    "microbatch": microbatch,
    "terms": terms,
    "timeline": timeline,
}
"""Every curve by name, in the order in which they are shown."""


def curves_of(subject: Subject) -> list[Curve]:
    charted, found = for_charts(subject), list[Curve]()
    for number, make in enumerate(MAKERS.values()):
        tell(f"Estimating chart {number + 1} of {len(MAKERS)}", number / len(MAKERS))
        found.append(make(charted))
    return found


def redrawn_curves(plan: Plan) -> list[dict[str, Curve]]:
    """Every curve of a plan, by what it is drawn for: the plan first, then one knob changed if that looks different."""
    subject = subject_of(plan)
    choices = {name: {"the plan": make(subject)} for name, make in MAKERS.items()}
    for knob, words, values in _changes(subject):
        candidate = msgspec.structs.replace(subject.candidate, **values)
        precisions = (candidate.precision,) if knob == "precision" else subject.precisions
        changed = replace(subject, candidate=candidate, precisions=precisions)
        for name in (name for name, knobs in CHANGED_KNOBS.items() if knob in knobs):
            curve = MAKERS[name](changed)
            looks = [(other.series, other.x, other.y, other.below) for other in choices[name].values()]
            if (curve.series, curve.x, curve.y, curve.below) not in looks:
                choices[name][words] = curve
    return [*choices.values()]


def _changes(subject: Subject) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each knob that a page changes, its new value in words, and the values of all knobs that change with it."""
    spec, own = subject.spec, subject.candidate
    for count in SEGMENTS:
        if count <= spec.steps and (count, None) != (own.segments, own.window):
            values = {"segments": count, "window": None, "levels": 1, "recompute": True}
            yield "segments", times(count, "segment"), values
    for passes in PASSES:
        rows = -(-spec.batch // passes)
        if passes <= spec.batch and rows != own.microbatch:
            changed = make_candidate(spec, microbatch=rows)
            values = {"microbatch": rows, "accumulation": changed.accumulation}
            yield "microbatch", f"microbatch {rows_words(changed)}", values
    for precision in subject.precisions if len(subject.precisions) > 1 else ():
        yield "precision", precision, {"precision": precision}
