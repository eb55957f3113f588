"""What the memory consists of: along the sequence length, and over the moments of one step."""

from typing import Any

import numpy as np

from oomguard.curves import axes
from oomguard.curves.parts import budget_mark, pieces_phrase
from oomguard.curves.value import Axis, Curve, Mark, Series
from oomguard.errors import MisuseError
from oomguard.estimate.allocator import reserved_bytes
from oomguard.estimate.breakdown import estimate_step, step_moments
from oomguard.estimate.moments import TERMS, Moments, evaluation_moments
from oomguard.estimate.passes import border_bytes, stays_on_host
from oomguard.plan.phrases import peak_words, times
from oomguard.tradeoffs.subject import Subject, with_seq
from oomguard.units import format_bytes

LENGTHS = 40
"""Lengths that are looked at."""
SMALL = 0.01
"""Terms that are never more than this share of the peak are drawn as one."""
SLOTS = {name: slot for slot, name in enumerate(("activations", "workspace", "logits", "input", "optimizer"))}
SLOTS |= {"runtime": 6, "weights": 5, "gradients": 7, "loader": 8}
"""The look of each term, the same on every curve."""


def terms(subject: Subject) -> Curve:
    """The terms of the peak, stacked, along the sequence length.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> subject, _ = find_subject(cell="lstm", seq=1000, budget="1GiB", device="t4")
    >>> terms(subject).title
    'Activations take 39% of the peak'
    """
    lengths = np.unique(np.linspace(1, 2 * subject.spec.steps, LENGTHS).astype(int)).tolist()
    rows = {steps: found for steps in lengths if (found := _terms_at(subject, steps)) is not None}
    x = tuple(float(steps) for steps in rows)
    columns = {term: [found[term] for found in rows.values()] for term in TERMS}
    totals = [sum(found.values()) for found in rows.values()]
    asked = subject.spec.steps
    here = estimate_step(subject.spec, subject.candidate, subject.place)
    largest = max(TERMS, key=lambda term: here.terms[term])
    share = here.terms[largest] / here.total_bytes
    budget = axes.gib([subject.budget_bytes])[0]
    close = _in_sight(budget, axes.gib([max(totals)])[0])
    return Curve(
        name="terms",
        title=f"{largest.capitalize()} take {share:.0%} of the peak" if largest.endswith("s")
        else f"{largest.capitalize()} takes {share:.0%} of the peak",
        question="What fills the memory as sequences get longer?",
        answer=f"At {times(asked, 'step')}{pieces_phrase(subject.candidate)} and a microbatch of "
        f"{subject.candidate.microbatch:,}, by arithmetic: {_largest_terms(here)}; {format_bytes(here.total_bytes)} in "
        "all.",
        x=axes.linear("Sequence length", "time steps", [x[-1] / 1.08]),
        y=axes.linear("Peak memory", "GiB", [axes.gib([max(totals)])[0], *([budget] if close else [])]),
        series=_stack(x, columns, max(totals)),
        marks=(
            *([budget_mark(subject)] if close else []),
            Mark(text=times(asked, "step"), x=float(asked), role="chosen" if subject.plan else "note"),
        ),
    )  # fmt: skip


def _in_sight(budget: float, top: float) -> bool:
    """Whether the budget can be drawn beside what is drawn."""
    return 0.03 * top < budget < 4 * top


def _terms_at(subject: Subject, steps: int) -> dict[str, int] | None:
    """The terms with sequences of another length; None if they cannot be so long."""
    knobs = {"segments": min(subject.candidate.segments, steps)}
    knobs |= {} if subject.candidate.window is None else {"window": min(subject.candidate.window, steps)}
    try:
        spec = with_seq(subject, steps)
        found = subject.predict(subject.vary(spec, **knobs), spec).estimate
    except MisuseError:
        return None
    return {term: int(np.atleast_1d(found.terms[term])[0]) for term in TERMS}


def _largest_terms(found: Any) -> str:
    order = sorted(TERMS, key=lambda term: -found.terms[term])[:3]
    return ", ".join(f"{term} {format_bytes(int(found.terms[term]))}" for term in order)


def _stack(x: tuple[float, ...], columns: dict[str, list[int]], peak_bytes: int) -> tuple[Series, ...]:
    """Areas, what hardly changes at the bottom; small ones together."""
    large = [term for term in TERMS if max(columns[term]) > SMALL * peak_bytes]
    order = sorted(large, key=lambda term: max(columns[term]) - min(columns[term]))
    found = [_area(term, x, columns[term], SLOTS[term]) for term in order]
    rest = [sum(columns[term][row] for term in TERMS if term not in large) for row in range(len(x))]
    return (_area("all other terms", x, rest, 8), *found) if any(rest) else tuple(found)


def _area(name: str, x: tuple[float, ...], sizes: list[int], slot: int) -> Series:
    words = tuple(f"{name}: {format_bytes(one)}" for one in sizes)
    return Series(name=name, kind="area", x=x, y=axes.gib(sizes), words=words, slot=slot)


def timeline(subject: Subject) -> Curve:
    """What is alive at each moment of a step, in the order in which they come.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> subject, _ = find_subject(cell="lstm", seq=1000, budget="1GiB", device="t4")
    >>> [word for _, word in timeline(subject).x.ticks]
    ['before', 'forward', 'loss', 'head', 'layers', 'optimizer']
    """
    moments, repeated = moments_in_order(subject)
    columns = {term: [found[term] for found in moments.values()] for term in TERMS}
    totals = {name: sum(found.values()) for name, found in moments.items()}
    peak = max(totals, key=lambda name: totals[name])
    x = tuple(map(float, range(len(moments))))
    budget = axes.gib([subject.budget_bytes])[0]
    top = axes.gib([totals[peak]])[0]
    close = _in_sight(budget, top)
    names = tuple((float(place), _short(name)) for place, name in enumerate(moments))
    pieces = subject.candidate.segments
    return Curve(
        name="timeline",
        title=f"{peak_words(peak).removesuffix('.')}: {format_bytes(totals[peak])}",
        question="When in a step is the memory needed?",
        answer=_timeline_answer(subject, totals, repeated),
        x=Axis(label="Moments of a step, in order (not to scale)", low=-0.15, high=len(moments) - 0.85, ticks=names),
        y=axes.linear("Memory in use", "GiB", [top, *([budget] if close else [])]),
        series=_stack(x, columns, totals[peak]),
        marks=(
            *([budget_mark(subject)] if close else []),
            *(
                [
                    Mark(text=f"{pieces:,} times from here", x=repeated[0] - 0.5),
                    Mark(text="to here", x=repeated[1] + 0.5),
                ]
                if repeated is not None
                else []
            ),
            Mark(text="the peak", x=float([*totals].index(peak)), y=top),
        ),
    )


def _short(name: str) -> str:
    return name.removeprefix("backward of ").removeprefix("the ").replace("forward of all segments", "all segments")


def moments_in_order(subject: Subject) -> tuple[dict[str, dict[str, int]], tuple[int, int] | None]:
    """The terms at every moment, and which of them (the first, the last) come once for every segment.

    In segments, a forward pass that keeps only border states comes first.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> subject, _ = find_subject(cell="lstm", seq=1000, segments=10, budget="1GiB", device="t4")
    >>> moments, repeated = moments_in_order(subject)
    >>> [*moments][:3], repeated
    (['before', 'forward of all segments', 'forward'], (2, 5))
    """
    step, found = step_moments(subject.spec, subject.candidate, subject.place)
    standing = {name: found["optimizer"][name] if name in ("runtime", "weights", "optimizer") else 0 for name in TERMS}
    standing |= {"input": found["forward"]["input"], "loader": found["forward"]["loader"]}
    ordered: Moments = {"before": standing}
    pieces = subject.candidate.segments > 1 and subject.candidate.recompute
    if pieces:
        ahead = evaluation_moments(step)
        _, busiest = max(ahead.items(), key=lambda one: sum(one[1].values()) if one[0] != "loss" else -1)
        borders = 0 if stays_on_host(step) else border_bytes(step)
        ordered["forward of all segments"] = busiest | {"activations": busiest["activations"] + borders}
    backward = [name for name in found if name.startswith("backward of ") and "layer" in name]
    first = [
        name for name in ("forward of the frozen layers", "forward", "loss", "backward of the head") if name in found
    ]
    last = [name for name in ("backward of the embedding",) if name in found]
    middle = [*first, *reversed(backward), *last]
    ordered |= {name: found[name] for name in (*middle, "optimizer")}
    rounded = {name: _rounded(subject, parts) for name, parts in ordered.items()}
    start = [*rounded].index(middle[0])
    return rounded, (start, start + len(middle) - 1) if pieces else None


def _rounded(subject: Subject, parts: dict[str, Any]) -> dict[str, int]:
    """As the card would show it: the rest of the segments that blocks are cut from counts as workspace."""
    plain = {name: int(parts[name]) for name in TERMS}
    if not subject.place.cuda:
        return plain
    allocated = sum(plain.values()) - subject.place.runtime_bytes
    reserved = int(reserved_bytes(allocated, expandable=subject.candidate.allocator == "expandable"))
    return plain | {"workspace": plain["workspace"] + reserved - allocated}


def _timeline_answer(subject: Subject, totals: dict[str, int], repeated: tuple[int, int] | None) -> str:
    names = {"forward": "forward pass", "optimizer": "optimizer's step"}
    least = min((name for name in totals if name != "before"), key=lambda name: totals[name])
    said = (
        f"{format_bytes(totals['before'])} are there before a pass begins; the least busy moment is the "
        f"{names.get(least, least)} ({format_bytes(totals[least])})."
    )
    if repeated is not None:
        said += f" What is between the dotted lines comes once for each of {subject.candidate.segments:,} segments, "
        said += "the last first."
    if subject.candidate.accumulation > 1:
        said += f" A step has {subject.candidate.accumulation:,} such passes and one update."
    return said
