"""All curves of a plan or a subject."""

from collections.abc import Callable

from oomguard.curves.lengths import longest_sequence, region
from oomguard.curves.microbatch import microbatch
from oomguard.curves.segments import segments
from oomguard.curves.speed import front, throughput
from oomguard.curves.terms import terms, timeline
from oomguard.curves.value import Curve
from oomguard.plan.value import Plan
from oomguard.tradeoffs.subject import Subject, subject_of

MAKERS: dict[str, Callable[[Subject], Curve]] = {
    "front": front,
    "region": region,
    "segments": segments,
    "microbatch": microbatch,
    "longest": longest_sequence,
    "throughput": throughput,
    "terms": terms,
    "timeline": timeline,
}
"""Every curve by name, in the order in which they are shown."""


def curves_of(about: Plan | Subject) -> list[Curve]:
    """All curves of a plan (with what was measured for it), or of a subject.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> subject, _ = find_subject(cell="lstm", seq=1000, budget="1GiB", device="t4")
    >>> [one.name for one in curves_of(subject)] == [*MAKERS]
    True
    """
    subject = subject_of(about) if isinstance(about, Plan) else about
    return [make(subject) for make in MAKERS.values()]
