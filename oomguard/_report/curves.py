"""All curves: of a plan, of a subject, and of a plan with one knob changed."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec

from oomguard._plan.value import Plan
from oomguard._report.curve import Curve
from oomguard._report.curves_fit import front, region
from oomguard._report.curves_memory import microbatch, segments, terms, timeline
from oomguard._report.subject import Subject, for_charts, subject_of
from oomguard._report.words import rows_words, times
from oomguard._spec.candidate import make_candidate

MAKERS: dict[str, Callable[[Subject], Curve]] = {
    "front": front,
    "region": region,
    "segments": segments,
    "microbatch": microbatch,
    "terms": terms,
    "timeline": timeline,
}
"""Every curve by name, in the order in which they are shown."""
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


def curves_of(subject: Subject) -> list[Curve]:
    charted = for_charts(subject)
    return [make(charted) for make in MAKERS.values()]


def redrawn_curves(plan: Plan) -> list[dict[str, Curve]]:
    """Every curve of a plan, by what it is drawn for: the plan first, then one knob changed if that looks different."""
    subject = subject_of(plan)
    choices = {name: {"the plan": make(subject)} for name, make in MAKERS.items()}
    for knob, words, changed in _changed_subjects(subject):
        for name in (name for name, knobs in CHANGED_KNOBS.items() if knob in knobs):
            curve = MAKERS[name](changed)
            looks = [(other.series, other.x, other.y, other.below) for other in choices[name].values()]
            if (curve.series, curve.x, curve.y, curve.below) not in looks:
                choices[name][words] = curve
    return [*choices.values()]


def _changed_subjects(subject: Subject) -> Iterator[tuple[str, str, Subject]]:
    """Each knob, its new value in words, and the subject with it; without the plan, whose peak would be wrong there."""
    spec, own = subject.spec, subject.candidate
    for count in SEGMENTS:
        if count <= spec.steps and (count, None) != (own.segments, own.window):
            changed = msgspec.structs.replace(own, segments=count, window=None, levels=1, recompute=True)
            yield "segments", times(count, "segment"), replace(subject, candidate=changed, plan=None)
    for passes in PASSES:
        rows = -(-spec.batch // passes)
        if passes <= spec.batch and rows != own.microbatch:
            accumulation = make_candidate(spec, microbatch=rows).accumulation
            changed = msgspec.structs.replace(own, microbatch=rows, accumulation=accumulation)
            yield "microbatch", f"microbatch {rows_words(changed)}", replace(subject, candidate=changed, plan=None)
    for precision in subject.precisions if len(subject.precisions) > 1 else ():
        changed = msgspec.structs.replace(own, precision=precision)
        yield "precision", precision, replace(subject, candidate=changed, precisions=(precision,), plan=None)
