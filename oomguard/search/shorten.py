"""Shorter and smaller versions of a candidate: a probe must not cost a whole step."""

import msgspec

from oomguard.candidate import Candidate, make_candidate
from oomguard.spec import Spec


def shorten(spec: Spec, candidate: Candidate, steps: int, *, fewer: bool = True) -> tuple[Spec, Candidate]:
    """The spec with sequences of about so many steps, and the candidate with fewer pieces of the same length.

    Or, if not `fewer`, with as many shorter pieces: what chunks reserve on a card depends on their number.

    If not even two pieces (with more levels, twice as many) are so short, they are cut.

    >>> spec = Spec(cell="lstm", seq=10_000)
    >>> short, candidate = shorten(spec, make_candidate(spec, segments=100), 450)
    >>> short.seq, candidate.segments
    (400, 4)
    >>> short, candidate = shorten(spec, make_candidate(spec, segments=99), 450)
    >>> short.seq, candidate.segments  # a first piece of 99 steps, the others of 102
    (405, 4)
    """
    steps = max(1, min(steps, spec.steps))
    if steps == spec.steps:
        return spec, candidate
    pieces, piece = candidate.segments, -(-spec.steps // candidate.segments)
    if pieces > 1 and fewer:
        least = min(pieces, 2 * candidate.levels)
        pieces = max(least, min(pieces, steps // piece))
        short, odd = piece, spec.steps - (-(-spec.steps // piece) - 1) * piece  # the first piece may be shorter
        if steps < pieces * piece:
            short = odd = max(1, steps // pieces)
        steps = (pieces - 1) * short + max(odd, short - pieces + 1)  # or the pieces would come out shorter
    shorter = with_steps(spec, steps)
    window = candidate.window if candidate.window is None else min(candidate.window, steps)
    knobs = msgspec.structs.asdict(candidate) | {"segments": min(pieces, steps), "window": window}
    return shorter, make_candidate(shorter, **knobs)


def with_steps(spec: Spec, steps: int) -> Spec:
    """The spec with sequences of at most so many steps: longer ones are cut."""
    if spec.lengths is None:
        return msgspec.structs.replace(spec, seq=steps)
    lengths: dict[int, int] = {}
    for length, count in spec.lengths.items():
        lengths[min(length, steps)] = lengths.get(min(length, steps), 0) + count
    return msgspec.structs.replace(spec, seq=steps, lengths=lengths)
