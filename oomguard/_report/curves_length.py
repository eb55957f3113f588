"""How long sequences can be: over the microbatch, and over the budget; without segments and with them."""

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from oomguard._core.errors import MisuseError
from oomguard._core.units import GIB, format_bytes
from oomguard._estimate.engines import cudnn
from oomguard._report.curve import Curve, Mark, Series, budget_mark, log_axis, make_series
from oomguard._report.subject import Subject
from oomguard._report.words import times
from oomguard._search.lengths import longest_that_fits
from oomguard._search.space import LEVELS_FROM
from oomguard._spec.spec import Spec

LENGTHS = 28
"""Sequence lengths along a line."""
MICROBATCHES = 10
"""Microbatches along a border of the region."""
SHORTEST = 8
"""Time steps of the shortest sequences that are drawn."""

Way = Callable[[Subject, Spec, int], pd.DataFrame]
"""Predictions for a subject with another spec and microbatch, for one way to divide the sequence."""


def without_segments(subject: Subject, spec: Spec, rows: int) -> pd.DataFrame:
    """The prediction for whole sequences."""
    return _divided(subject, spec, rows, [(1, 1)])


def with_segments(subject: Subject, spec: Spec, rows: int) -> pd.DataFrame:
    """Predictions for every number of segments that is considered, and for every number of levels."""
    ways = [
        (count, levels)
        for levels, least in LEVELS_FROM.items()
        for count in subject.segments_for(spec.steps)
        if count >= least and (levels == 1 or not spec.bidirectional)
    ]
    return _divided(subject, spec, rows, ways)


def _divided(subject: Subject, spec: Spec, rows: int, ways: list[tuple[int, int]]) -> pd.DataFrame:
    """Predictions for pairs of a number of segments and a number of levels."""
    segments, levels = np.array(ways).T
    varied = subject.vary(spec, microbatch=rows, segments=segments, levels=levels, recompute=True, window=None)
    return subject.predict(varied, spec)


WAYS: dict[str, Way] = {"without segments": without_segments, "with segments": with_segments}
"""The two ways to divide a sequence, by name."""


def longest_steps(subject: Subject, way: Way, rows: int, guess: int | None = None) -> int:
    """The most time steps (to 0.1 %) at which a microbatch of `rows` fits, or 0 if not even one step does."""

    def fits(steps: int) -> bool:
        try:
            return bool(way(subject, subject.with_seq(steps), rows).fits.any())
        except MisuseError:  # longer than a spec allows
            return False

    start = guess or subject.spec.steps
    low, high = (start, None) if fits(start) else (0, start)
    if guess is not None:  # the end is most likely near the guess
        near = int(start * 1.1) + 1 if low else int(start / 1.1)
        low, high = (near, high) if near and fits(near) else (low, near)
    return longest_that_fits(fits, low, high, parts=1000)


def rounded_down(steps: int) -> str:
    """A length to three digits, rounded down: an estimate cannot vouch for more.

    >>> rounded_down(661_852), rounded_down(42)
    ('661,000', '42')
    """
    unit = 10 ** max(0, len(str(steps)) - 3)
    return f"{steps // unit * unit:,}"


def longest(subject: Subject) -> Curve:
    """The longest sequence that fits, over the budget."""
    rows, asked = subject.candidate.microbatch, subject.spec.steps
    ends = {name: longest_steps(subject, way, rows) for name, way in WAYS.items()}
    start = max(SHORTEST, min([asked, *filter(None, ends.values())]) // 8)
    lengths = np.unique(np.geomspace(start, 2 * max(asked, *ends.values()), LENGTHS).astype(int))
    series = [_needed_budgets(subject, name, lengths, slot) for slot, name in enumerate(WAYS)]
    budget = subject.budget_bytes / GIB
    # The axis reaches far enough for the budget, twice the length asked for, and one of the two lines as a whole.
    reached = [x for line in series for x, y in zip(line.x, line.y, strict=True) if y <= 2 * asked]
    farthest = max(4 * budget, *reached, min(line.x[-1] for line in series if line.x))
    axis = log_axis("Memory budget", "GiB", [min(budget, *(x for line in series for x in line.x)), farthest])
    marks = [Mark(text=f"{name}: {rounded_down(end)}", x=budget, y=float(end)) for name, end in ends.items() if end]
    if asked >= lengths[0]:
        marks.append(Mark(text=f"asked for: {asked:,} steps", y=float(asked)))
    title, answer = _longest_finding(subject, ends)
    return Curve(
        name="longest",
        title=title,
        question="How long can sequences be?",
        answer=answer,
        x=axis,
        y=log_axis("Longest sequence", "time steps", [float(lengths[0]), float(lengths[-1])]),
        series=tuple(_extended(line, axis.high) for line in series),
        marks=(budget_mark(subject, vertical=True), *marks),
    )


def _needed_budgets(subject: Subject, name: str, lengths: NDArray[np.int_], slot: int) -> Series:
    """The smallest budget for each length: read from the other axis, the longest sequence for each budget."""
    points: list[tuple[float, int]] = []
    limit = [cudnn.MAX_STEPS] if lengths[0] < cudnn.MAX_STEPS < lengths[-1] else []
    for steps in sorted({*lengths.tolist(), *limit}):
        try:
            sweep = WAYS[name](subject, subject.with_seq(steps), subject.candidate.microbatch)
        except MisuseError:  # longer than a spec allows
            break
        runs = sweep.runs
        if not runs.any():  # more steps than cuDNN takes at once
            break
        points.append((float(sweep.safe_bytes[runs].min()) / GIB, steps))
    tips = (f"{steps:,} steps {name} need {size:,.2f} GiB" for size, steps in points)
    sizes = np.maximum.accumulate([size for size, _ in points])
    return make_series(name, sizes, [steps for _, steps in points], tips=tips, slot=slot)


def _extended(line: Series, end: float) -> Series:
    """A line that ends at cuDNN's largest number of steps goes on at that height: no budget allows more."""
    if not line.y or line.y[-1] != cudnn.MAX_STEPS or line.x[-1] >= end:
        return line
    tips = (*line.tips, f"cuDNN takes at most {cudnn.MAX_STEPS:,} steps at once")
    return msgspec.structs.replace(line, x=(*line.x, end), y=(*line.y, line.y[-1]), tips=tips)


def _longest_finding(subject: Subject, ends: dict[str, int]) -> tuple[str, str]:
    whole, divided = ends["without segments"], ends["with segments"]
    rows, budget, best = subject.candidate.microbatch, format_bytes(subject.budget_bytes), max(ends.values())
    if not best:
        return "Not even one step fits", f"A microbatch of {rows:,} does not fit {budget}."
    gain = f", {best / whole:,.0f} times as long as without segments" if whole and best >= 1.5 * whole else ""
    return f"Sequences of up to {rounded_down(best)} steps fit{gain}", (
        f"With a microbatch of {rows:,} and {budget}: {rounded_down(whole)} steps without segments, "
        f"{rounded_down(divided)} with segments and the same gradient. {subject.spec.steps:,} are asked for."
    )


def region(subject: Subject) -> Curve:
    """A map of the sequence lengths that fit, over the microbatch."""
    wanted = np.geomspace(subject.microbatches[0], subject.microbatches[-1], MICROBATCHES)
    rows = sorted({min(subject.microbatches, key=lambda size: abs(size - float(goal))) for goal in wanted})
    ends = {name: _ends(subject, way, rows) for name, way in WAYS.items()}
    asked = subject.spec.steps
    lengths = [asked, *(end for some in ends.values() for end in some if end)]
    least, most = max(1, min(lengths) // 3), 2 * max(lengths)
    best = [max(pair) for pair in zip(*ends.values(), strict=True)]
    axis = log_axis("Microbatch", "sequences per pass", rows, base=2)
    x = (axis.low, *rows, axis.high)
    border, top_border = (
        np.pad(np.maximum(sizes, least), 1, mode="edge") for sizes in (ends["without segments"], best)
    )
    floor, top = np.full(len(x), least), np.full(len(x), most)
    bands = [
        make_series("fits without segments", x, border, kind="band", low=floor, slot=2),
        make_series("fits with segments", x, top_border, kind="band", low=border, slot=0),
        make_series("does not fit", x, top, kind="band", low=top_border, slot=1),
    ]
    borders = [
        make_series("", x, border, tips=_border_tips(rows, ends["without segments"], "without segments"), slot=2),
        make_series("", x, top_border, tips=_border_tips(rows, best, "with segments"), slot=0),
    ]
    place = Mark(text="asked for", x=float(subject.candidate.microbatch), y=float(asked))
    if subject.plan is not None:
        place = msgspec.structs.replace(place, text="the plan", role="chosen")
    title, answer = _region_finding(subject, rows, ends)
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


def _ends(subject: Subject, way: Way, sizes: list[int]) -> list[int]:
    """The longest sequence that fits for each microbatch: half the microbatch allows about twice the length."""
    ends: list[int] = []
    for number, rows in enumerate(sizes):
        guess = ends[-1] * sizes[number - 1] // rows if ends else None
        ends.append(longest_steps(subject, way, rows, guess))
    return ends


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


def _region_finding(subject: Subject, rows: list[int], ends: dict[str, list[int]]) -> tuple[str, str]:
    asked, steps = subject.spec.steps, times(subject.spec.steps, "step")
    largest = {
        name: max((size for size, end in zip(rows, reached, strict=True) if end >= asked), default=None)
        for name, reached in ends.items()
    }
    whole, divided = largest["without segments"], largest["with segments"]
    if whole == subject.spec.batch:
        title = f"{steps} fit without segments, with the whole batch in one pass"
    elif whole is None and divided is None:
        title = f"{steps} do not fit, whatever the microbatch"
    elif divided == subject.spec.batch:
        title = f"{steps} fit with segments and the whole batch in one pass"
    else:
        title = f"{steps} fit with a smaller microbatch" + (" and segments" if whole is None else "")
    budget, reached = format_bytes(subject.budget_bytes), ends["with segments"]
    if not max(reached):
        return title, f"Not even one step fits {budget}, with or without segments."
    limits = f"a microbatch of {rows[-1]:,} up to {rounded_down(reached[-1])} steps"
    limits += f" and one of {rows[0]:,} up to {rounded_down(reached[0])}" if len(rows) > 1 else ""
    return title, f"Within {budget}, segments allow {limits}, with the same gradient as without them."
