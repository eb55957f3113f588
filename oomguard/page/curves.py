"""The end of the page: every curve of the plan, and how it would look with other knobs than the plan's."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from oomguard.candidate import make_candidate
from oomguard.curves.drawing import Choices
from oomguard.curves.make import MAKERS
from oomguard.curves.value import Curve
from oomguard.plan.phrases import rows_words, times
from oomguard.plan.value import Plan
from oomguard.tradeoffs.subject import Subject, subject_of

TURNED = {
    "front": ("precision",),
    "segments": ("microbatch", "precision"),
    "microbatch": ("segments", "precision"),
    "longest": ("microbatch", "precision"),
    "throughput": ("segments", "precision"),
    "terms": ("segments", "microbatch", "precision"),
    "timeline": ("segments", "microbatch", "precision"),
}
"""The knobs that a curve can be drawn for; those that it is drawn over are not among them."""
SEGMENTS = (1, 8, 64)
"""Other segments that can be chosen."""
PASSES = (1, 4)
"""Other numbers of passes per step that can be chosen, by their microbatch."""


def curves(plan: Plan) -> list[Choices]:
    """Every curve of a plan, and how it would look with one knob turned. What looks the same is no choice."""
    subject = subject_of(plan)
    found: dict[str, Choices] = {name: {"the plan": make(subject)} for name, make in MAKERS.items()}
    for knob, words, other in _others(subject):
        for name in (name for name, knobs in TURNED.items() if knob in knobs):
            curve = MAKERS[name](other)
            if _drawn(curve) not in map(_drawn, found[name].values()):
                found[name][words] = curve
    return [*found.values()]


def _drawn(curve: Curve) -> tuple[Any, ...]:
    return curve.series, curve.x, curve.y, curve.below


def _others(subject: Subject) -> Iterator[tuple[str, str, Subject]]:
    """Each knob, what it is turned to, and the subject with it. The plan's own peak is for its own knobs: left out."""
    spec, own = subject.spec, subject.candidate
    for count in SEGMENTS:
        if count <= spec.steps and (count, None) != (own.segments, own.window):
            turned = msgspec.structs.replace(own, segments=count, window=None, levels=1, recompute=True)
            yield "segments", times(count, "segment"), replace(subject, candidate=turned, plan=None)
    for passes in PASSES:
        rows = -(-spec.batch // passes)
        if passes <= spec.batch and rows != own.microbatch:
            fitting = make_candidate(spec, microbatch=rows)
            turned = msgspec.structs.replace(own, microbatch=rows, accumulation=fitting.accumulation)
            yield "microbatch", f"microbatch {rows_words(turned)}", replace(subject, candidate=turned, plan=None)
    for precision in subject.precisions if len(subject.precisions) > 1 else ():
        turned = msgspec.structs.replace(own, precision=precision)
        yield "precision", precision, replace(subject, candidate=turned, precisions=(precision,), plan=None)
