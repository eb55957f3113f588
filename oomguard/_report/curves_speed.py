"""Speed: against peak memory (the front), and over the microbatch (the throughput)."""

import itertools
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from oomguard._core.units import GIB, format_bytes
from oomguard._predict.fit import pareto_front
from oomguard._probe.record import Record
from oomguard._report.curve import (
    MEASURED,
    Curve,
    Kind,
    Mark,
    Series,
    budget_mark,
    completed,
    linear_axis,
    log_axis,
    make_series,
    precision_sweeps,
    share_knobs,
)
from oomguard._report.subject import Subject
from oomguard._report.words import candidate_words, figure, pieces_words, rows_words
from oomguard._spec.candidate import KNOBS, Candidate

NEAR = 0.9
"""A speed is near the highest one from this share on."""
GUESSED = "Nothing has been measured, so compare speeds only with one another."


def front(subject: Subject) -> Curve:
    """Speed against peak memory: all candidates, and those that no other beats in both."""
    sweep = _all_candidates(subject)
    peaks, speeds, fits = (sweep[name].to_numpy() for name in ("peak_bytes", "tokens_per_second", "fits"))
    fitting = np.flatnonzero(fits)
    best = fitting[pareto_front(peaks[fits], -speeds[fits])]
    best = best[np.argsort(peaks[best], kind="stable")]
    marks = [
        Mark(text=_knob_words(sweep, row), x=float(peaks[row]) / GIB, y=float(speeds[row]))
        for row in _notable_rows(sweep, best)
    ]
    if subject.plan is not None:  # about the same as the fastest, which would be the second mark
        marks = [*marks[:1], *_speed_mark(subject, subject.plan.peak_bytes / GIB)]
    groups: list[tuple[str, Kind, NDArray[np.intp], int]] = [
        ("fits", "dots", fitting, 5),
        ("does not fit", "dots", np.flatnonzero(~fits), 6),
        ("front: nothing is faster with less memory", "line", best, 0),
    ]
    title, answer = _front_finding(subject, sweep, best)
    return Curve(
        name="front",
        title=title,
        question="How much memory does speed need?",
        answer=answer,
        x=log_axis("Peak memory", "GiB", [*peaks / GIB, subject.budget_bytes / GIB], pad=1.12),
        y=linear_axis("Throughput", _speed_unit(subject), [*speeds, *(mark.y or 0 for mark in marks)]),
        series=tuple(
            make_series(
                name,
                peaks[rows] / GIB,
                speeds[rows],
                kind=kind,
                tips=(_candidate_tip(sweep, int(row)) for row in rows),
                slot=slot,
            )
            for name, kind, rows, slot in groups
            if len(rows)
        ),
        marks=(budget_mark(subject, vertical=True), *marks),
    )


def _all_candidates(subject: Subject) -> pd.DataFrame:
    """Predictions for all microbatches, segments and precisions, with the other knobs of the subject's candidate."""
    counts = subject.segments if subject.candidate.window is None else [1]
    product = itertools.product(subject.precisions, counts, subject.microbatches)
    precisions, segments, rows = map(list, zip(*product, strict=True))
    return subject.predict(
        subject.vary(precision=precisions, segments=segments, microbatch=rows, levels=1, recompute=True)
    )


def _notable_rows(sweep: pd.DataFrame, best: NDArray[np.intp]) -> list[int]:
    """Two rows of the front: the one near the highest speed with the least memory, and the fastest."""
    if not len(best):
        return []
    speeds = sweep.tokens_per_second.to_numpy()[best]
    return [*dict.fromkeys((int(best[np.argmax(speeds >= NEAR * speeds.max())]), int(best[speeds.argmax()])))]


def _candidate_at(sweep: pd.DataFrame, row: int) -> Candidate:
    values = {name: sweep[name].iat[row] for name in KNOBS}  # a row of the whole frame would copy it
    knobs: dict[str, Any] = {name: None if pd.isna(value) else value for name, value in values.items()}
    return Candidate(
        **{name: value.item() if isinstance(value, np.generic) else value for name, value in knobs.items()}
    )


def _knob_words(sweep: pd.DataFrame, row: int) -> str:
    """The knobs that the front varies, with no line break inside a product."""
    candidate = _candidate_at(sweep, row)
    pieces = f", {pieces_words(candidate)} segments" if candidate.segments > 1 else ""
    return f"{rows_words(candidate)}{pieces}, {candidate.precision}".replace(" × ", "\u00a0×\u00a0")


def _candidate_tip(sweep: pd.DataFrame, row: int) -> str:
    speed = figure(float(sweep.tokens_per_second[row]))
    return f"{candidate_words(_candidate_at(sweep, row))}: {format_bytes(sweep.peak_bytes[row])}, {speed} tokens/s"


def _front_finding(subject: Subject, sweep: pd.DataFrame, best: NDArray[np.intp]) -> tuple[str, str]:
    budget = format_bytes(subject.budget_bytes)
    if not len(best):
        least = format_bytes(int(np.min(sweep.safe_bytes)))
        return "Nothing fits", f"The least that any of these candidates needs is {least} of {budget}, margin included."
    thrifty, *others = _notable_rows(sweep, best)
    least, tail = format_bytes(int(sweep.peak_bytes[thrifty])), "." if subject.calibrated else f". {GUESSED}"
    if not others:
        return f"The fastest candidate that fits needs {least}", (
            f"Within {budget}, it has a microbatch of {_knob_words(sweep, thrifty)}. Any candidate with less memory is "
            f"more than {1 - NEAR:.0%} slower{tail}"
        )
    (fastest,) = others
    share = sweep.tokens_per_second[thrifty] / sweep.tokens_per_second[fastest]
    return f"{share:.0%} of the speed needs {least} instead of {format_bytes(int(sweep.peak_bytes[fastest]))}", (
        f"Within {budget}, the fastest candidate has a microbatch of {_knob_words(sweep, fastest)}; nearly as fast is "
        f"one of {_knob_words(sweep, thrifty)}{tail}"
    )


def _speed_unit(subject: Subject) -> str:
    return "tokens/s" if subject.calibrated else "tokens/s, guessed"


def _speed_mark(subject: Subject, x: float) -> list[Mark]:
    """The speed of the plan at a position along the x axis. Empty without a plan or without its speed."""
    if subject.plan is None or subject.plan.seconds_per_step is None:
        return []
    speed = subject.spec.steps * subject.spec.batch / subject.plan.seconds_per_step
    return [Mark(text="the plan", x=x, y=speed, role="chosen")]


def throughput(subject: Subject) -> Curve:
    """Speed over the microbatch: predicted, and as far as it was measured."""
    sweeps = precision_sweeps(subject, "seconds_per_step")
    series = [
        line for slot, (name, sweep) in enumerate(sweeps.items()) for line in _speed_lines(subject, name, sweep, slot)
    ]
    series += _measured_speeds(subject)
    own = next(sweep for name, sweep in sweeps.items() if subject.candidate.precision in name.split())
    speeds, sizes = own.tokens_per_second, own.microbatch
    near = int(np.argmax(speeds >= NEAR * speeds.max()))
    marks = _speed_mark(subject, float(subject.candidate.microbatch))
    if sizes[near] == 1:
        title = "The microbatch hardly changes the speed"
    elif sizes[near] == subject.spec.batch:
        title = "The larger the microbatch, the faster, up to the whole batch"
    else:
        title = f"A microbatch of {sizes[near]:,} reaches {NEAR:.0%} of the highest speed"
        text = f"{NEAR:.0%} of the highest speed"
        marks = [Mark(text=text, x=float(sizes[near]), y=float(speeds[near])), *marks]
    return Curve(
        name="throughput",
        title=title,
        question="How much faster is a larger microbatch?",
        answer=_throughput_answer(subject, own, near),
        x=log_axis("Microbatch", "sequences per pass", subject.microbatches, base=2),
        y=linear_axis(
            "Throughput", _speed_unit(subject), [y for line in series if line.kind != "band" for y in line.y]
        ),
        series=tuple(series),
        marks=tuple(marks),
    )


def _speed_lines(subject: Subject, name: str, sweep: pd.DataFrame, slot: int) -> list[Series]:
    """The predicted speed as a line; for the candidate's own precision, with a band of one standard deviation."""
    x, speeds, doubt = sweep.microbatch, sweep.tokens_per_second, sweep.doubt
    tips = (f"{name}, microbatch {size:,}: {figure(y)} tokens/s" for size, y in zip(x, speeds, strict=True))
    line = make_series(f"{name}, predicted", x, speeds, tips=tips, slot=slot)
    if not subject.calibrated or subject.candidate.precision not in name.split():
        return [line]
    low, high = speeds * np.exp(-doubt), speeds * np.exp(doubt)
    return [make_series("likely error", x, high, kind="band", low=low, slot=slot), line]


def _measured_speeds(subject: Subject) -> list[Series]:
    """Measured speeds: with the line's settings at full length or with shorter sequences, and with other settings."""
    groups: dict[tuple[str, int], list[Record]] = {
        ("measured", MEASURED): [],
        ("measured, shorter sequences", 2): [],
        ("measured, other settings", 3): [],
    }
    whole, shorter, other = groups.values()
    for record in (record for record in completed(subject) if record.tokens_per_second):
        same = share_knobs(record.candidate, subject.candidate, ("precision", "engine", "threads"))
        if not same or (record.candidate.segments > 1) != (subject.candidate.segments > 1):
            other.append(record)
        else:
            (whole if record.spec.steps == subject.spec.steps else shorter).append(record)
    return [
        make_series(
            name,
            [record.candidate.microbatch for record in records],
            [record.tokens_per_second or 0 for record in records],
            kind="points",
            tips=(
                f"measured with {record.spec.steps:,} steps, {candidate_words(record.candidate)}: "
                f"{figure(record.tokens_per_second or 0)} tokens/s"
                for record in records
            ),
            slot=slot,
        )
        for (name, slot), records in groups.items()
        if records
    ]


def _throughput_answer(subject: Subject, sweep: pd.DataFrame, near: int) -> str:
    speeds, sizes = sweep.tokens_per_second, sweep.microbatch
    best = int(speeds.argmax())
    answer = f"A microbatch of {sizes[best]:,} is {speeds[best] / speeds[0]:.1f} times as fast as one of 1"
    answer += f", and {sizes[near]:,} reaches {NEAR:.0%} of that." if sizes[near] < sizes[best] else "."
    if not subject.calibrated:
        return f"{answer} {GUESSED}"
    return f"{answer} The fastest is predicted at {figure(float(speeds[best]))} tokens/s, if nothing else runs."
