"""What segments save and cost: peak and time against their number, with the knee."""

from dataclasses import dataclass

import numpy as np

from oomguard.curves import axes
from oomguard.curves.parts import budget_mark, chosen_mark, measured_peaks
from oomguard.curves.value import Axis, Curve, Mark, Series, Side
from oomguard.plan.phrases import times
from oomguard.search.space import LEVELS_FROM
from oomguard.tradeoffs.subject import Predicted, Subject
from oomguard.units import format_bytes, format_seconds

ENOUGH = 0.95
"""The knee: the fewest segments that save so much of all that segments can save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """Where more segments no longer save much."""

    segments: int
    """How many."""
    peak_bytes: int
    """The peak there."""
    plain_bytes: int
    """The peak in one piece."""
    least_bytes: int
    """The least that any number of them needs."""
    slower: float
    """The time there, as a multiple of that in one piece."""


def knee_of(found: Predicted) -> Knee:
    """The knee of what is predicted for ever more segments, from 1 on.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> subject, _ = find_subject(cell="lstm", seq=1000, budget="1GiB", device="t4")
    >>> knee_of(sweep(subject)).segments
    13
    """
    peaks, seconds = np.asarray(found.peak_bytes), np.asarray(found.seconds_per_step)
    saved = peaks[0] - peaks
    row = int(np.argmax(saved >= ENOUGH * saved.max()))
    return Knee(
        segments=int(found.candidates.segments[row]),
        peak_bytes=int(peaks[row]),
        plain_bytes=int(peaks[0]),
        least_bytes=int(peaks.min()),
        slower=float(seconds[row] / seconds[0]),
    )


def sweep(subject: Subject, levels: int = 1) -> Predicted:
    """All numbers of segments that are worth a look, from 1 on; with more levels, from where those are worth it.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> subject, _ = find_subject(cell="lstm", seq=1000, budget="1GiB", device="t4")
    >>> sweep(subject).candidates.segments[:5].tolist()
    [1, 2, 3, 4, 5]
    """
    counts = [one for one in subject.segments if one >= LEVELS_FROM[levels]]
    return subject.predict(subject.vary(segments=counts, levels=levels, recompute=True, window=None))


def segments(subject: Subject) -> Curve:
    """Peak and time against the number of segments.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> subject, _ = find_subject(cell="lstm", seq=1000, budget="1GiB", device="t4")
    >>> segments(subject).question
    'What do segments save, and what do they cost?'
    """
    found = {1: sweep(subject)}
    most = int(found[1].candidates.segments[-1])
    if most >= 2 * LEVELS_FROM[2] and not subject.spec.bidirectional:
        found[2] = sweep(subject, levels=2)
    plain_seconds = float(found[1].seconds_per_step[0])
    knee = knee_of(found[1])
    series = [one for levels, some in found.items() for one in _lines(subject, levels, some, plain_seconds)]
    series += measured_peaks(subject, "segments", fixed=("microbatch", "precision"))
    peaks = [y for one in series if not one.panel for y in one.y]
    counts = axes.logarithmic("Segments", "", [1, most], base=2)
    memory = axes.memory("Peak", peaks, axes.gib([subject.budget_bytes])[0])
    at_knee = knee.slower * (plain_seconds if subject.calibrated else 1)
    marks = [
        budget_mark(subject, side="right"),
        _knee_mark(knee, counts, memory),
        Mark(text="", x=knee.segments, y=at_knee, panel=1),
        *(chosen_mark(subject, subject.candidate.segments) if subject.candidate.window is None else []),
    ]
    title, answer = _finding(subject, knee, found[1])
    return Curve(
        name="segments",
        title=title,
        question="What do segments save, and what do they cost?",
        answer=answer,
        x=counts,
        y=memory,
        below=_time_axis(subject, [y for one in series if one.panel for y in one.y]),
        series=tuple(series),
        marks=tuple(marks),
    )


def _knee_mark(knee: Knee, counts: Axis, memory: Axis) -> Mark:
    """Below the line and left of it nothing else is, unless it is at the bottom; above and right, if there is room."""
    y = axes.gib([knee.peak_bytes])[0]
    side: Side = "above right" if counts.share(knee.segments) < 0.6 else "above left"
    side = "below left" if memory.share(y) > 0.18 and knee.segments > 8 else side
    return Mark(text=f"knee: {knee.segments:,} segments", x=knee.segments, y=y, side=side)


def _time_axis(subject: Subject, values: list[float]) -> Axis:
    if subject.calibrated:
        return axes.linear("Time", "s per step", values)
    return axes.linear("Time", "× plain", values)


def _lines(subject: Subject, levels: int, found: Predicted, plain_seconds: float) -> list[Series]:
    counts = tuple(float(one) for one in found.candidates.segments)
    slot, name = levels - 1, "in 2 levels" if levels == 2 else "segments"
    said = [times(int(count), "segment") + (" in 2 levels" if levels == 2 else "") for count in counts]
    needs = tuple(f"{one}: {format_bytes(peak)}" for one, peak in zip(said, found.peak_bytes, strict=True))
    seconds = found.seconds_per_step / (1.0 if subject.calibrated else plain_seconds)
    took = [format_seconds(one) if subject.calibrated else f"{one:.2f} times as long as plain" for one in seconds]
    takes = tuple(f"{one}: {time}" for one, time in zip(said, took, strict=True))
    return [
        Series(name=name, x=counts, y=axes.gib(found.peak_bytes), words=needs, slot=slot),
        Series(name=name, x=counts, y=tuple(map(float, seconds)), words=takes, slot=slot, panel=1),
    ]


def _finding(subject: Subject, knee: Knee, found: Predicted) -> tuple[str, str]:
    plain, there, least = (format_bytes(one) for one in (knee.plain_bytes, knee.peak_bytes, knee.least_bytes))
    if knee.segments == 1:
        return (
            "Segments save nothing here",
            f"In one piece a step needs {plain}, and no number of segments lowers that.",
        )
    fewest = found.candidates.segments[found.fits]
    pieces = found.seconds_per_step[1:]
    fastest = int(found.candidates.segments[1:][pieces.argmin()])
    quick = float(pieces.min() / found.seconds_per_step[0])
    enough = (
        f"The budget of {format_bytes(subject.budget_bytes)} needs {_at_least(int(fewest.min()))}."
        if len(fewest)
        else f"No number of them fits {format_bytes(subject.budget_bytes)} with a microbatch of "
        f"{subject.candidate.microbatch:,}."
    )
    costs = f"{knee.slower:.2f} times as long"
    if quick < 0.95 * knee.slower:
        costs += f" ({fastest:,} segments: {quick:.2f} times)"
    return f"{knee.segments:,} segments cut the peak from {plain} to {there}", (
        f"That is {ENOUGH:.0%} of what segments can save (the least is {least}); a step takes {costs}. {enough}"
    )


def _at_least(count: int) -> str:
    return "no segments" if count == 1 else f"at least {count:,} of them"
