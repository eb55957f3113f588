"""How long sequences can be: against the budget, and against the microbatch."""

import msgspec
import numpy as np

from oomguard.curves import axes
from oomguard.curves.look import along
from oomguard.curves.parts import budget_mark
from oomguard.curves.reach import Way, borders, in_one_piece, in_segments, longest
from oomguard.curves.value import Curve, Mark, Series
from oomguard.errors import MisuseError
from oomguard.estimate.engines import cudnn
from oomguard.plan.phrases import times
from oomguard.tradeoffs.subject import Subject, with_seq
from oomguard.units import format_bytes

WAYS: dict[str, Way] = {"in one piece": in_one_piece, "in segments": in_segments}
"""How sequences can be gone through, in words."""
LENGTHS = 28
"""Lengths that are looked at."""
WIDTHS = 10
"""Microbatches that are looked at."""
FEWEST = 8
"""Steps of the shortest sequences that are looked at."""


def longest_sequence(subject: Subject) -> Curve:
    """The longest sequence that fits against the budget: in one piece, and in segments.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> subject, _ = find_subject(cell="lstm", seq=1000, budget="1GiB", device="t4")
    >>> [one.name for one in longest_sequence(subject).series]
    ['in one piece', 'in segments']
    """
    rows = subject.candidate.microbatch
    ends = {name: longest(subject, way, rows) for name, way in WAYS.items()}
    asked, reached = subject.spec.steps, max(ends.values())
    start = max(FEWEST, min([asked, *filter(None, ends.values())]) // 8)
    lengths = np.unique(np.geomspace(start, 2 * max(asked, reached), LENGTHS).astype(int))
    series = [_line(subject, name, rows, lengths.tolist(), slot) for slot, name in enumerate(WAYS)]
    budget = axes.gib([subject.budget_bytes])[0]
    needed = [x for one in series for x in one.x]
    axis = axes.logarithmic("Memory budget", "GiB", [min(*needed, budget), _farthest(subject, series, budget)])
    marks = [budget_mark(subject, upright=True)]
    marks += [
        Mark(text=f"{name}: {about(end)}", x=budget, y=float(end), side=along(axis, budget))
        for name, end in ends.items()
        if end
    ]
    marks += [Mark(text=f"asked for: {asked:,} steps", y=float(asked))]
    series = [_to_the_end(one, axis.high) for one in series]
    title, answer = _longest_finding(subject, ends)
    return Curve(
        name="longest",
        title=title,
        question="How long can sequences be?",
        answer=answer,
        x=axis,
        y=axes.logarithmic("Longest sequence", "time steps", [float(lengths[0]), float(lengths[-1])]),
        series=tuple(series),
        marks=tuple(marks),
    )


def _farthest(subject: Subject, series: list[Series], budget: float) -> float:
    """As far as the budget that is there and what is asked for are in sight."""
    asked = [x for one in series for x, y in zip(one.x, one.y, strict=True) if y <= 2 * subject.spec.steps]
    return max(4 * budget, *asked, min(one.x[-1] for one in series if one.x))


def _to_the_end(line: Series, end: float) -> Series:
    """A line that stops at the most steps that cuDNN takes goes on at that height, whatever the budget."""
    if not line.y or line.y[-1] != cudnn.MAX_STEPS or line.x[-1] >= end:
        return line
    words = (*line.words, f"cuDNN takes at most {cudnn.MAX_STEPS:,} steps at once")
    return msgspec.structs.replace(line, x=(*line.x, end), y=(*line.y, line.y[-1]), words=words)


def _line(subject: Subject, name: str, rows: int, lengths: list[int], slot: int) -> Series:
    """The least budget that each length needs: the same line, read from the other axis."""
    points: list[tuple[float, float]] = []
    for steps in sorted({*lengths, *([cudnn.MAX_STEPS] if lengths[0] < cudnn.MAX_STEPS < lengths[-1] else [])}):
        try:
            found = WAYS[name](subject, with_seq(subject, steps), rows)
        except MisuseError:  # longer than a spec can be
            break
        runs = np.broadcast_to(found.estimate.runs, len(found.candidates))
        if not runs.any():  # more steps than cuDNN takes at once
            break
        points.append((axes.gib([found.safe_bytes[runs].min()])[0], float(steps)))
    x, y = zip(*points, strict=True) if points else ((), ())
    words = tuple(f"{int(steps):,} steps {name} need {size:,.2f} GiB" for size, steps in points)
    return Series(name=name, x=tuple(np.maximum.accumulate(x).tolist()), y=y, words=words, slot=slot)


def _longest_finding(subject: Subject, ends: dict[str, int]) -> tuple[str, str]:
    plain, pieces = ends["in one piece"], max(ends.values())
    budget = format_bytes(subject.budget_bytes)
    if not pieces:
        return "Not even one step fits", f"A microbatch of {subject.candidate.microbatch:,} does not fit {budget}."
    gain = f", {pieces / plain:,.0f} times as long as in one piece" if plain and pieces >= 1.5 * plain else ""
    return f"Sequences of up to {about(pieces)} steps fit{gain}", (
        f"With a microbatch of {subject.candidate.microbatch:,} and {budget}: {about(plain)} steps in one piece, "
        f"{about(ends['in segments'])} in segments, with the same gradient. {subject.spec.steps:,} are asked for."
    )


def about(steps: int) -> str:
    """A length without figures that an estimate cannot vouch for: three digits, rounded down.

    >>> about(661_852), about(42)
    ('661,000', '42')
    """
    unit = 10 ** max(0, len(str(steps)) - 3)
    return f"{steps // unit * unit:,}"


def region(subject: Subject) -> Curve:
    """What fits, as a map over microbatch and sequence length.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> subject, _ = find_subject(cell="lstm", seq=1000, budget="1GiB", device="t4")
    >>> region(subject).title
    '1,000 steps fit with the whole batch in one pass, in segments'
    """
    rows = _few(subject.microbatches)
    found = {name: borders(subject, way, rows) for name, way in WAYS.items()}
    asked, ends = subject.spec.steps, [one for some in found.values() for one in some if one]
    least, most = max(1, min([asked, *ends]) // 3), 2 * max([asked, *ends])
    plain = np.maximum(found["in one piece"], least).astype(float)
    pieces = np.maximum(np.maximum(found["in segments"], least), plain)
    axis = axes.logarithmic("Microbatch", "sequences per pass", rows, base=2)
    x = (axis.low, *map(float, rows), axis.high)
    floor, one, several, top = (
        tuple(map(float, np.pad(some, 1, mode="edge")))
        for some in ([least] * len(rows), plain, pieces, [most] * len(rows))
    )
    most_steps = [max(ends) for ends in zip(*found.values(), strict=True)]
    bands = [
        Series(name="fits in one piece", kind="band", x=x, y=one, low=floor, slot=2),
        Series(name="fits in segments", kind="band", x=x, y=several, low=one, slot=0),
        Series(name="does not fit", kind="band", x=x, y=top, low=several, slot=1),
        Series(name="", x=x, y=one, words=_reached(rows, found["in one piece"], "in one piece"), slot=2),
        Series(name="", x=x, y=several, words=_reached(rows, most_steps, "in segments"), slot=0),
    ]
    words = [_inside(band) for band in bands[:3]]
    chosen = subject.plan is not None
    mark = Mark(
        text="the plan" if chosen else "asked for",
        x=float(subject.candidate.microbatch),
        y=float(asked),
        role="chosen" if chosen else "note",
    )
    title, answer = _region_finding(subject, rows, found)
    return Curve(
        name="region",
        title=title,
        question="Which microbatches and sequence lengths fit?",
        answer=answer,
        x=axis,
        y=axes.logarithmic("Sequence length", "time steps", [least, most], pad=1.0),
        series=tuple(bands),
        marks=(*filter(None, words), mark),
    )


def _reached(rows: list[int], ends: list[int], way: str) -> tuple[str, ...]:
    """What is said of each point of a border, which goes on to the edges of the picture."""
    said = [f"up to {about(end)} steps" if end else "not even one step" for end in ends]
    words = [f"microbatch {size:,}: {one} {way}" for size, one in zip(rows, said, strict=True)]
    return words[0], *words, words[-1]


def _few(rows: list[int]) -> list[int]:
    """Enough of them for a border, the first and the last among them."""
    wanted = np.geomspace(rows[0], rows[-1], WIDTHS)
    return sorted({min(rows, key=lambda one: abs(one - float(size))) for size in wanted})


def _inside(band: Series) -> Mark | None:
    """The name of a band, in its middle; None where it is too thin for words."""
    place = len(band.x) // 3
    low, high = band.low[place], band.y[place]
    if high < 1.6 * low:
        return None
    return Mark(text=band.name, x=band.x[place], y=float(np.sqrt(low * high)), role="words")


def _region_finding(subject: Subject, rows: list[int], found: dict[str, list[int]]) -> tuple[str, str]:
    asked, budget = subject.spec.steps, format_bytes(subject.budget_bytes)
    largest = {name: max((one for one, end in zip(rows, ends, strict=True) if end >= asked), default=None)
               for name, ends in found.items()}  # fmt: skip
    plain, pieces = largest["in one piece"], largest["in segments"]
    said = times(asked, "step")
    if plain == subject.spec.batch:
        title = f"{said} fit in one piece, with the whole batch in one pass"
    elif plain is None and pieces is None:
        title = f"{said} do not fit, whatever the microbatch"
    elif pieces == subject.spec.batch:
        title = f"{said} fit with the whole batch in one pass, in segments"
    else:
        title = f"{said} fit with a smaller microbatch" + (", in segments" if plain is None else "")
    if not max(found["in segments"]):
        return title, f"Within {budget} not even one step fits, in whatever pieces."
    few, many = about(found["in segments"][0]), about(found["in segments"][-1])
    ends = f"a microbatch of {rows[-1]:,} to {many} steps"
    ends += f" and one of {rows[0]:,} to {few}" if len(rows) > 1 else ""
    return title, f"Within {budget}, segments take {ends}, with the same gradient as in one piece."
