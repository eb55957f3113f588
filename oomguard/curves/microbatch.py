"""What a larger microbatch costs: the peak against the microbatch, for each precision."""

from oomguard.curves import axes
from oomguard.curves.parts import budget_mark, chosen_mark, measured_peaks, pieces_phrase, sizes
from oomguard.curves.value import Curve, Mark, Series
from oomguard.tradeoffs.subject import Predicted, Subject
from oomguard.units import format_bytes


def microbatch(subject: Subject) -> Curve:
    """The peak against the microbatch, for each precision, with the budget."""
    found = {
        name: subject.predict(subject.vary(microbatch=sizes(subject), precision=name)) for name in subject.precisions
    }
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
        x=axes.logarithmic("Microbatch", "sequences per pass", sizes(subject), base=2),
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
        Series(name=f"{name}, margin", kind="band", x=tuple(rows), y=safe, low=peak, slot=slot),
        Series(name=name, x=tuple(rows), y=peak, words=tuple(words), slot=slot),
    ]


def largest(found: Predicted) -> int | None:
    """The largest microbatch that fits; None if none does."""
    sizes_that_fit = found.candidates.microbatch[found.fits]
    return int(sizes_that_fit.max()) if len(sizes_that_fit) else None


def _finding(subject: Subject, found: dict[str, Predicted]) -> tuple[str, str]:
    """The title and the answer."""
    budget, batch = format_bytes(subject.budget_bytes), subject.spec.batch
    best = {name: largest(one) for name, one in found.items()}
    first, size = next(iter(best.items()))
    if size == batch:
        title = f"The whole batch of {batch:,} fits in one pass"
    elif size is None:
        title = "Not even a microbatch of 1 fits" + ("" if subject.candidate.segments > 1 else " in one piece")
    else:
        title = f"Microbatches up to {size:,} fit"
    words = [
        f"in {name} " + (f"up to {one:,} sequences" if one is not None else "not even one sequence")
        for name, one in best.items()
    ]
    needs = format_bytes(int(found[first].safe_bytes[-1]))
    return title, (
        f"Of {budget}, a pass can take {' and '.join(words)}. "
        f"The whole batch of {batch:,} would need {needs} in {first}, margin included."
    )
