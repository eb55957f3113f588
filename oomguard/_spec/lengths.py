"""Sequence lengths: shorter sequences for probes, the longest that fit, and models apart from their sequences."""

from collections import Counter
from collections.abc import Callable

import msgspec

from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.spec import MAX_SEQ, Spec


def shorten(spec: Spec, candidate: Candidate, steps: int, *, fewer: bool = True) -> tuple[Spec, Candidate]:
    """The spec with sequences of about so many steps, and the candidate with fewer segments of the same length.

    Without `fewer`, the candidate keeps its number of segments, and they become shorter: what chunks reserve on a card
    depends on their number. If two segments (with more levels, twice as many) are still too long, they are cut.
    """
    steps = max(1, min(steps, spec.steps))
    if steps == spec.steps:
        return spec, candidate
    pieces, piece = candidate.segments, -(-spec.steps // candidate.segments)
    if pieces > 1 and fewer:
        least = min(pieces, 2 * candidate.levels)
        pieces = max(least, min(pieces, steps // piece))
        short, odd = piece, spec.steps - (-(-spec.steps // piece) - 1) * piece  # the first segment may be shorter
        if steps < pieces * piece:
            short = odd = max(1, steps // pieces)
        steps = (pieces - 1) * short + max(odd, short - pieces + 1)  # otherwise the segments would come out shorter
    shorter = with_steps(spec, steps)
    window = candidate.window if candidate.window is None else min(candidate.window, steps)
    knobs = msgspec.structs.asdict(candidate) | {"segments": min(pieces, steps), "window": window}
    return shorter, make_candidate(shorter, **knobs)


def with_steps(spec: Spec, steps: int) -> Spec:
    """The spec with sequences of at most so many steps: longer ones are cut."""
    lengths = Counter[int]()
    for length, count in (spec.lengths or {}).items():
        lengths[min(length, steps)] += count
    return msgspec.structs.replace(spec, seq=steps, lengths=dict(lengths) or None)


def longest_that_fits(fits: Callable[[int], bool], low: int, high: int | None = None, *, parts: int) -> int:
    """The most steps that fit, by bisection to one part in `parts`.

    `low` steps fit (or are 0), `high` steps do not; without `high`, lengths are doubled until one does not fit.
    """
    while high is None or high - low > max(1, low // parts):
        middle = min(2 * low, MAX_SEQ) if high is None else (low + high) // 2
        if middle == low:  # the longest that a spec can have
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def model_of(spec: Spec) -> Spec:
    """The spec with one sequence of one step: equal for specs that differ only in number and length of sequences."""
    return msgspec.structs.replace(spec, seq=1, batch=1, lengths=None, packed=spec.packs)


def same_model(spec: Spec, other: Spec) -> bool:
    """Whether two specs differ only in the number and length of their sequences."""
    return model_of(spec) == model_of(other)


def few_notes(spec: Spec) -> list[str]:
    """A sentence if the data of a spec have fewer sequences than its batch."""
    count = sum((spec.lengths or {}).values())
    if not 0 < count < spec.batch:
        return []
    return [f"A step has at most {count:,} sequences, since there are fewer than the batch of {spec.batch:,}."]
