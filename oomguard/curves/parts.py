"""What several curves have in common: the budget, the chosen candidate, measured points, microbatches to look at."""

from collections.abc import Iterable

import numpy as np

from oomguard.calibrate import same_model
from oomguard.candidate import Candidate
from oomguard.curves import axes
from oomguard.curves.value import Mark, Series, Side
from oomguard.plan.phrases import candidate_words
from oomguard.probe.record import Record
from oomguard.tradeoffs.subject import Predicted, Subject
from oomguard.units import format_bytes

MEASURED = 8
"""The slot of what was measured: one that no line has."""
ALIKE = 0.01
"""Lines that differ by no more than this share are drawn as one."""


def by_precision(subject: Subject, figure: str) -> dict[str, Predicted]:
    """What every microbatch needs in each precision; those that come out alike (`fp32 and bf16`) are one."""
    found: dict[str, Predicted] = {}
    for name in subject.precisions:
        one = subject.predict(subject.vary(microbatch=subject.microbatches, precision=name))
        same = next((old for old in found if _close(found[old], one, figure)), None)
        if same is None:
            found[name] = one
        else:
            found = {f"{old} and {name}" if old == same else old: some for old, some in found.items()}
    return found


def _close(one: Predicted, other: Predicted, figure: str) -> bool:
    return bool(np.allclose(getattr(one, figure), getattr(other, figure), rtol=ALIKE, atol=0))


def budget_mark(subject: Subject, *, upright: bool = False, side: Side | None = None) -> Mark:
    """The budget, as a line."""
    where, text = axes.gib([subject.budget_bytes])[0], f"budget {format_bytes(subject.budget_bytes)}"
    if upright:
        return Mark(text=text, x=where, role="budget")
    return Mark(text=text, y=where, role="budget", side=side)


def chosen_mark(subject: Subject, x: float) -> list[Mark]:
    """The plan's candidate with its peak, if there is a plan."""
    if subject.plan is None:
        return []
    return [Mark(text="the plan", x=x, y=axes.gib([subject.plan.peak_bytes])[0], role="chosen")]


def pieces_phrase(candidate: Candidate) -> str:
    """In what pieces the sequence is gone through, to end a sentence with.

    >>> pieces_phrase(Candidate(microbatch=1)), pieces_phrase(Candidate(microbatch=1, segments=1024))
    ('', ' with 1,024 segments')
    >>> pieces_phrase(Candidate(microbatch=1, segments=4, recompute=False))
    ' with 4 segments that keep all'
    """
    if candidate.window is not None:
        return f" with a window of {candidate.window:,} steps"
    kept = "" if candidate.recompute else " that keep all"
    return f" with {candidate.segments:,} segments{kept}" if candidate.segments > 1 else ""


def measured_peaks(subject: Subject, knob: str, fixed: Iterable[str]) -> list[Series]:
    """Peaks that were measured at full length, where some knobs are as the candidate has them."""
    own = [one for one in full_length(subject) if alike(one.candidate, subject.candidate, fixed)]
    if not own:
        return []
    return [
        Series(
            name="measured",
            kind="points",
            x=tuple(float(getattr(one.candidate, knob)) for one in own),
            y=axes.gib(one.peak_bytes or 0 for one in own),
            words=tuple(f"measured: {candidate_words(one.candidate)}: {format_bytes(_peak(one))}" for one in own),
            slot=MEASURED,
        )
    ]


def full_length(subject: Subject) -> list[Record]:
    """What ran with sequences of full length."""
    return [one for one in ran(subject) if one.spec.steps == subject.spec.steps]


def ran(subject: Subject) -> list[Record]:
    """What ran of this model, whatever the length."""
    return [one for one in subject.records if one.verdict.ran and same_model(one.spec, subject.spec)]


def _peak(record: Record) -> int:
    return record.peak_bytes or 0


def alike(one: Candidate, other: Candidate, knobs: Iterable[str]) -> bool:
    """Whether some knobs have the same values."""
    return all(getattr(one, name) == getattr(other, name) for name in knobs)
