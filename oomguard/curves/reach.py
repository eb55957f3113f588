"""How long sequences can be: the longest that fits, in one piece and in segments."""

from collections.abc import Callable
from typing import Any

import numpy as np

from oomguard.errors import MisuseError
from oomguard.search.space import LEVELS_FROM, segment_counts
from oomguard.spec import Spec
from oomguard.tradeoffs.subject import Predicted, Subject, with_seq


def in_one_piece(subject: Subject, spec: Spec, rows: int) -> Predicted:
    """What a plain pass needs.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> subject, _ = find_subject(cell="lstm", seq=1000, budget="1GiB", device="t4")
    >>> in_one_piece(subject, subject.spec, 32).fits.tolist()
    [False]
    """
    return subject.predict(subject.vary(spec, microbatch=[rows], **_plain(1)), spec)


def in_segments(subject: Subject, spec: Spec, rows: int) -> Predicted:
    """What every number of segments that was asked for or is worth a try needs, also with fewer border states kept.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> subject, _ = find_subject(cell="lstm", seq=1000, budget="1GiB", device="t4")
    >>> bool(in_segments(subject, subject.spec, 32).fits.any())
    True
    """
    asked = subject.over.get("segments", segment_counts(spec.steps))
    counts = [one for one in asked if one <= spec.steps] or [1]
    ways = [
        (count, levels)
        for levels, least in LEVELS_FROM.items()
        for count in counts
        if count >= least and (levels == 1 or not spec.bidirectional)
    ]
    segments, levels = np.array(ways).T
    return subject.predict(subject.vary(spec, microbatch=rows, **_plain(segments) | {"levels": levels}), spec)


Way = Callable[[Subject, Spec, int], Predicted]
"""One of the two above."""


def _plain(segments: Any) -> dict[str, Any]:
    return {"segments": segments, "levels": 1, "recompute": True, "window": None}


def longest(subject: Subject, way: Way, rows: int, guess: int | None = None) -> int:
    """The most steps (to 0.1 %) that sequences can have so that `rows` of them fit; 0 if not even one step does.

    >>> from oomguard.candidate import Candidate
    >>> from oomguard.estimate.place import CPU
    >>> spec = Spec(cell="lstm", seq=1000)
    >>> subject = Subject(spec=spec, place=CPU, budget_bytes=1 << 30, candidate=Candidate(microbatch=32))
    >>> longest(subject, in_one_piece, 32) < longest(subject, in_segments, 32)
    True
    """

    def fits(steps: int) -> bool:
        try:
            return bool(way(subject, with_seq(subject, steps), rows).fits.any())
        except MisuseError:  # longer than a spec can be
            return False

    return _last(fits, guess or subject.spec.steps)


def borders(subject: Subject, way: Way, sizes: list[int]) -> list[int]:
    """The longest for each of some microbatches: half as many sequences can be about twice as long.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> subject, _ = find_subject(cell="lstm", seq=1000, budget="1GiB", device="t4")
    >>> few, many = borders(subject, in_one_piece, [1, 32])
    >>> few > many
    True
    """
    found: list[int] = []
    for rows in sizes:
        guess = found[-1] * sizes[len(found) - 1] // rows if found else None
        found.append(longest(subject, way, rows, guess))
    return found


def _last(fits: Callable[[int], bool], start: int) -> int:
    """The last number (to 0.1 %) for which it holds, if it holds up to some number and for none beyond."""
    low, high, factor = (start, None, 1.1) if fits(start) else (0, start, 1.1)
    while high is None:
        probe, factor = int(low * factor) + 1, factor * factor
        low, high = (probe, None) if fits(probe) else (low, probe)
    while not low and high > 1:
        probe, factor = max(1, int(high / factor)), factor * factor
        low, high = (probe, high) if fits(probe) else (0, probe)
    while low and high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
