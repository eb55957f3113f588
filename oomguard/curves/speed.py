"""What is fast: throughput against the microbatch, and speed against memory."""

import itertools
from typing import Any

import numpy as np

from oomguard.curves import axes
from oomguard.curves.look import along
from oomguard.curves.parts import MEASURED, alike, budget_mark, by_precision, full_length, ran
from oomguard.curves.value import Axis, Curve, Mark, Series
from oomguard.plan.phrases import candidate_words, figure, pieces_words, rows_words
from oomguard.probe.record import Record
from oomguard.tradeoffs.front import front_rows
from oomguard.tradeoffs.subject import Predicted, Subject
from oomguard.units import format_bytes

NEAR = 0.9
"""The share of the highest speed that is called near it."""


def throughput(subject: Subject) -> Curve:
    """Throughput against the microbatch: predicted, and what was measured.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> subject, _ = find_subject(cell="lstm", seq=1000, budget="1GiB", device="t4")
    >>> throughput(subject).title
    'The larger the microbatch, the faster, up to the whole batch'
    """
    found = by_precision(subject, "seconds_per_step")
    series = [one for slot, (name, some) in enumerate(found.items()) for one in _line(subject, name, some, slot)]
    series += _measured(subject)
    own = next(some for name, some in found.items() if subject.candidate.precision in name.split())
    near = _near(own)
    axis = axes.logarithmic("Microbatch", "sequences per pass", subject.microbatches, base=2)
    title = f"Beyond a microbatch of {near:,}, more brings less than {1 - NEAR:.0%}"
    if near == 1:
        title = "The microbatch hardly changes the speed"
    elif near == subject.spec.batch:
        title = "The larger the microbatch, the faster, up to the whole batch"
    return Curve(
        name="throughput",
        title=title,
        question="How much faster is a larger microbatch?",
        answer=_throughput_answer(subject, own, near),
        x=axis,
        y=axes.linear("Throughput", _unit(subject), [y for one in series if one.kind != "band" for y in one.y]),
        series=tuple(series),
        marks=_speed_marks(subject, own, near, axis),
    )


def _unit(subject: Subject) -> str:
    return "tokens/s" if subject.calibrated else "tokens/s, guessed"


def _line(subject: Subject, name: str, found: Predicted, slot: int) -> list[Series]:
    x, y = tuple(map(float, found.candidates.microbatch)), found.tokens_per_second
    line = Series(
        name=f"{name}, predicted",
        x=x,
        y=tuple(map(float, y)),
        words=tuple(f"{name}, microbatch {size:,.0f}: {figure(one)} tokens/s" for size, one in zip(x, y, strict=True)),
        slot=slot,
    )
    if not subject.calibrated or subject.candidate.precision not in name.split():
        return [line]
    low, high = (tuple(map(float, y * np.exp(sign * found.doubt))) for sign in (-1, 1))
    return [Series(name="what it may err by", kind="band", x=x, y=high, low=low, slot=slot), line]


def _measured(subject: Subject) -> list[Series]:
    """Measured speeds: in the setting of the line at full length, with shorter sequences, and in other settings."""
    own = [one for one in ran(subject) if one.tokens_per_second]
    same = [one for one in own if alike(one.candidate, subject.candidate, ("precision", "engine", "threads"))
            and (one.candidate.segments > 1) == (subject.candidate.segments > 1)]  # fmt: skip
    whole = [one for one in same if one in full_length(subject)]
    groups = {
        "measured": (whole, MEASURED),
        "measured, shorter sequences": ([one for one in same if one not in whole], 2),
        "measured, other settings": ([one for one in own if one not in same], 3),
    }
    return [_points(name, some, slot) for name, (some, slot) in groups.items() if some]


def _points(name: str, records: list[Record], slot: int) -> Series:
    return Series(
        name=name,
        kind="points",
        x=tuple(float(one.candidate.microbatch) for one in records),
        y=tuple(float(one.tokens_per_second or 0) for one in records),
        words=tuple(
            f"measured with {one.spec.steps:,} steps, {candidate_words(one.candidate)}: "
            f"{figure(one.tokens_per_second or 0)} tokens/s"
            for one in records
        ),
        slot=slot,
    )


def _near(found: Predicted) -> int:
    """The smallest microbatch that is near the highest speed."""
    speeds = found.tokens_per_second
    return int(found.candidates.microbatch[np.argmax(speeds >= NEAR * speeds.max())])


def _speed_marks(subject: Subject, found: Predicted, near: int, axis: Axis) -> tuple[Mark, ...]:
    speeds = dict(zip(found.candidates.microbatch.tolist(), found.tokens_per_second.tolist(), strict=True))
    text, y = f"{NEAR:.0%} of the highest speed", float(speeds[near])
    marks = [Mark(text=text, x=near, y=y, side=along(axis, near))] if 1 < near < subject.spec.batch else []
    return (*marks, *_plan_mark(subject, float(subject.candidate.microbatch)))


def _plan_mark(subject: Subject, x: float) -> list[Mark]:
    """The plan with its speed, if there is a plan and it has one."""
    if subject.plan is None or subject.plan.seconds_per_step is None:
        return []
    speed = subject.spec.steps * subject.spec.batch / subject.plan.seconds_per_step
    return [Mark(text="the plan", x=x, y=speed, role="chosen")]


def _throughput_answer(subject: Subject, found: Predicted, near: int) -> str:
    speeds = found.tokens_per_second
    times = speeds.max() / speeds[0]
    best = int(found.candidates.microbatch[speeds.argmax()])
    said = f"A microbatch of {best:,} is {times:.1f} times as fast as one of 1" + (
        f", and {near:,} reaches {NEAR:.0%} of that." if near < best else "."
    )
    if not subject.calibrated:
        return said + " Nothing has been measured: proportions say more than the figures themselves."
    return said + f" The fastest is predicted at {figure(float(speeds.max()))} tokens/s, if nothing else runs."


def front(subject: Subject) -> Curve:
    """Speed against memory: all candidates, and those that nothing beats in both.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> subject, _ = find_subject(cell="lstm", seq=1000, budget="1GiB", device="t4")
    >>> front(subject).question
    'What does speed cost in memory?'
    """
    found = _everything(subject)
    peaks, speeds, fits = np.asarray(found.peak_bytes), found.tokens_per_second, np.asarray(found.fits)
    best = front_rows(peaks[fits], speeds[fits])
    rows = np.flatnonzero(fits)[best]
    series = [
        _cloud("fits", found, np.flatnonzero(fits), 5),
        _cloud("does not fit", found, np.flatnonzero(~fits), 6),
    ]
    series = [one for one in series if one.x]
    if len(rows):
        series.append(_front_line(found, rows))
    budget = axes.gib([subject.budget_bytes])[0]
    axis = axes.logarithmic("Peak memory", "GiB", [*axes.gib(peaks), budget], pad=1.12)
    marks = [budget_mark(subject, upright=True)]
    marks += [_named_point(found, row, axis) for row in _notable(found, rows)]
    if subject.plan is not None:  # which is about the fastest
        marks = [*marks[:2], *_plan_mark(subject, axes.gib([subject.plan.peak_bytes])[0])]
    title, answer = _front_finding(subject, found, rows)
    return Curve(
        name="front",
        title=title,
        question="What does speed cost in memory?",
        answer=answer,
        x=axis,
        y=axes.linear("Throughput", _unit(subject), [*speeds, *(one.y or 0 for one in marks)]),
        series=tuple(series),
        marks=tuple(marks),
    )


def _notable(found: Predicted, rows: "np.typing.NDArray[np.intp]") -> list[int]:
    """Of the front, the row that needs the least and is near the highest speed, and the fastest."""
    if not len(rows):
        return []
    speeds = found.tokens_per_second[rows]
    near = int(np.argmax(speeds >= NEAR * speeds.max()))
    return [*dict.fromkeys((int(rows[near]), int(rows[speeds.argmax()])))]


def _named_point(found: Predicted, row: int, axis: Axis) -> Mark:
    x, y = axes.gib([found.peak_bytes[row]])[0], float(found.tokens_per_second[row])
    return Mark(text=_named(found, row), x=x, y=y, side=along(axis, x))


def _everything(subject: Subject) -> Predicted:
    """Microbatches, segments and precisions, with the candidate's other knobs."""
    counts = subject.segments if subject.candidate.window is None else [1]
    product = [*itertools.product(subject.precisions, counts, subject.microbatches)]
    names, segments, rows = zip(*product, strict=True)
    shape: dict[str, Any] = {"segments": [*segments], "microbatch": [*rows], "levels": 1, "recompute": True}
    return subject.predict(subject.vary(precision=[*names], **shape))


def _cloud(name: str, found: Predicted, rows: "np.typing.NDArray[np.intp]", slot: int) -> Series:
    speeds = found.tokens_per_second
    return Series(
        name=name,
        kind="dots",
        x=axes.gib(found.peak_bytes[rows]),
        y=tuple(map(float, speeds[rows])),
        words=tuple(_said(found, int(row)) for row in rows),
        slot=slot,
    )


def _front_line(found: Predicted, rows: "np.typing.NDArray[np.intp]") -> Series:
    return Series(
        name="the front: nothing is faster with less",
        x=axes.gib(found.peak_bytes[rows]),
        y=tuple(map(float, found.tokens_per_second[rows])),
        words=tuple(_said(found, int(row)) for row in rows),
        slot=0,
    )


def _named(found: Predicted, row: int) -> str:
    """What distinguishes a candidate from the others, in words that no line breaks in the middle of a product."""
    knobs = found.candidates[row]
    pieces = f", {pieces_words(knobs)} segments" if knobs.segments > 1 else ""
    return f"{rows_words(knobs)}{pieces}, {knobs.precision}".replace(" × ", "\u00a0×\u00a0")


def _said(found: Predicted, row: int) -> str:
    speed = figure(float(found.tokens_per_second[row]))
    return f"{candidate_words(found.candidates[row])}: {format_bytes(found.peak_bytes[row])}, {speed} tokens/s"


def _front_finding(subject: Subject, found: Predicted, rows: "np.typing.NDArray[np.intp]") -> tuple[str, str]:
    budget = format_bytes(subject.budget_bytes)
    if not len(rows):
        least = format_bytes(int(np.min(found.safe_bytes)))
        return "Nothing fits", f"The least that any of these candidates needs is {least} of {budget}, margin included."
    thrifty, *others = _notable(found, rows)
    fastest = others[0] if others else thrifty
    speeds = found.tokens_per_second
    share, least = speeds[thrifty] / speeds[fastest], format_bytes(int(found.peak_bytes[thrifty]))
    tail = "" if subject.calibrated else " (speeds are guesses: nothing has been measured)"
    if not others:
        return f"The fastest that fits takes {least}", (
            f"Within {budget} that is a microbatch of {_named(found, fastest)}; less memory means more than "
            f"{1 - NEAR:.0%} less speed{tail}."
        )
    most = format_bytes(int(found.peak_bytes[fastest]))
    return f"{share:.0%} of the speed takes {least} instead of {most}", (
        f"Within {budget} the fastest is a microbatch of {_named(found, fastest)}; nearly as fast is one of "
        f"{_named(found, thrifty)}{tail}."
    )
