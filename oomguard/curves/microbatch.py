"""What a larger microbatch costs: the peak against the microbatch, for each precision."""

import numpy as np

from oomguard.curves import axes
from oomguard.curves.parts import budget_mark, by_precision, chosen_mark, measured_peaks, pieces_phrase
from oomguard.curves.value import Curve, Mark, Series
from oomguard.estimate.engines import cudnn
from oomguard.plan.phrases import times
from oomguard.tradeoffs.subject import Predicted, Subject
from oomguard.units import format_bytes

MOST = 1 << 16
"""Larger microbatches are not looked for."""


def microbatch(subject: Subject) -> Curve:
    """The peak against the microbatch, for each precision, with the budget.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> subject, _ = find_subject(cell="lstm", seq=1000, budget="1GiB", device="t4")
    >>> microbatch(subject).title
    'Microbatches of up to 26 fit'
    """
    found = by_precision(subject, "peak_bytes")
    series: list[Series] = []
    marks: list[Mark] = [budget_mark(subject)]
    for slot, (name, one) in enumerate(found.items()):
        series += _lines(name, one, slot)
    series += measured_peaks(subject, "microbatch", fixed=("segments", "recompute", "levels", "window"))
    marks += chosen_mark(subject, subject.candidate.microbatch)
    peaks = [peak for one in series for peak in one.y]
    title, answer = _finding(subject, found)
    return Curve(
        name="microbatch",
        title=title,
        question=f"What does a larger microbatch cost{pieces_phrase(subject.candidate)}?",
        answer=answer,
        x=axes.logarithmic("Microbatch", "sequences per pass", subject.microbatches, base=2),
        y=axes.memory("Peak memory", peaks, axes.gib([subject.budget_bytes])[0]),
        series=tuple(series),
        marks=tuple(marks),
    )


def _lines(name: str, found: Predicted, slot: int) -> list[Series]:
    rows = [float(one) for one in found.candidates.microbatch]
    peak, safe = axes.gib(found.peak_bytes), axes.gib(found.safe_bytes)
    words = [
        f"{name}, microbatch {size:,}: {format_bytes(peak)}, with margin {format_bytes(least)}"
        for size, peak, least in zip(found.candidates.microbatch, found.peak_bytes, found.safe_bytes, strict=True)
    ]
    return [
        Series(name="margin, what it may err by", kind="band", x=tuple(rows), y=safe, low=peak, slot=slot),
        Series(name=name, x=tuple(rows), y=peak, words=tuple(words), slot=slot),
    ]


def largest(subject: Subject, precision: str) -> int | None:
    """The largest microbatch that fits; None if none does.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> subject, _ = find_subject(cell="lstm", seq=1000, budget="1GiB", device="t4")
    >>> largest(subject, "fp32")
    26
    """
    every = np.arange(1, min(subject.spec.batch, MOST) + 1)
    found = subject.predict(subject.vary(microbatch=every, precision=precision))
    return int(every[found.fits].max()) if found.fits.any() else None


def _finding(subject: Subject, found: dict[str, Predicted]) -> tuple[str, str]:
    """The title and the answer."""
    budget, batch = format_bytes(subject.budget_bytes), subject.spec.batch
    best = {name: largest(subject, name.split()[0]) for name in found}
    first, size = next(iter(best.items()))
    if not np.any(found[first].estimate.runs):
        said = f"cuDNN takes at most {cudnn.MAX_STEPS:,} steps at once, whatever the memory"
        return said, f"{said}: {times(subject.spec.steps, 'step')} need segments."
    if size == batch:
        title = f"The whole batch of {batch:,} fits in one pass"
    elif size is None:
        title = "Not even a microbatch of 1 fits" + ("" if subject.candidate.segments > 1 else " in one piece")
    else:
        title = f"Microbatches of up to {size:,} fit"
    words = [
        (f"up to {times(one, 'sequence')}" if one is not None else "not even one sequence")
        + f" in {' and '.join(name for name in best if best[name] == one)}"
        for one in dict.fromkeys(best.values())
    ]
    needs = format_bytes(int(found[first].safe_bytes[-1]))
    return title, (
        f"Of {budget}, a pass can take {', '.join(words)}. "
        f"The whole batch of {batch:,} needs {needs} in {first}, margin included."
    )
