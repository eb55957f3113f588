"""From a question to its subject: what is varied by default, and which knobs all candidates share."""

from dataclasses import replace
from typing import Any

import msgspec

from oomguard.candidate import KNOBS, Candidate, make_candidate
from oomguard.checks import flag, shown
from oomguard.device.cpu import cpu_precisions
from oomguard.errors import MisuseError
from oomguard.estimate.place import Place
from oomguard.plan.value import Plan
from oomguard.search.space import SHORTEST_PIECE
from oomguard.spec import Spec
from oomguard.tradeoffs.measured import Evidence, of_device, usual_settings
from oomguard.tradeoffs.subject import SHAPE, Subject, card_precisions, subject_of, with_seq
from oomguard.tradeoffs.values import Over

DRAWN = ("microbatch", "segments", "precision", "seq")
"""What a curve shows several values of."""


def make_subject(spec: Spec, place: Place, budget_bytes: int, evidence: Evidence, fixed: dict[str, Any]) -> Subject:
    """A model on a device, with what was measured of it. Knobs that are not fixed are as the plan has them (or as most
    records do), otherwise as PyTorch would.

    >>> from oomguard.estimate.place import CPU
    >>> subject = make_subject(Spec(cell="gru", seq=64, batch=6), CPU, 1 << 30, Evidence(), {"segments": 4})
    >>> subject.candidate.microbatch, subject.candidate.segments
    (6, 4)
    """
    plan = _same_plan(evidence.plan, spec, place, budget_bytes)
    if plan is not None and not fixed:
        return subject_of(plan)
    records = of_device(evidence.records, place)
    return Subject(
        spec=spec,
        place=place,
        budget_bytes=budget_bytes,
        candidate=_candidate(spec, evidence, fixed),
        precisions=_precisions(place),
        records=records,
        plan=plan,
    )


def look_at(subject: Subject, over: Over) -> Subject:
    """The subject, so that its curves show the values that were asked for; of lengths, the longest.

    >>> from oomguard.tradeoffs.find import find_subject
    >>> subject, over = find_subject(cell="lstm", seq=1000, budget="1GiB", device="t4")
    >>> look_at(subject, {"microbatch": [1, 32]}).microbatches
    [1, 32]
    """
    check_drawn(over)
    knobs = {name: values for name, values in over.items() if name in ("microbatch", "segments")}
    own = replace(subject, over=knobs, precisions=tuple(over.get("precision", subject.precisions)))
    longest = max((with_seq(subject, steps) for steps in over.get("seq", ())), key=lambda one: one.steps, default=None)
    return own if longest in (None, subject.spec) else _as_long(own, longest)


def check_drawn(over: Over) -> None:
    """Raise if something varies that no curve would show: its picture would be one of a model that nobody asked for.

    >>> check_drawn({"microbatch": [1, 2], "seq": [100, 200]})
    """
    odd = [name for name in over if name not in DRAWN]
    if odd:
        names = " and ".join(flag(name).removeprefix("--") for name in odd)
        raise MisuseError(
            rule="Curves are of one model, over its microbatch, segments, precision or seq",
            got=f"got --over {names}",
            advice=f"Write .csv, or give one {' and one '.join(map(flag, odd))}.",
        )


def _as_long(subject: Subject, spec: Spec) -> Subject:
    """The same with sequences of another length, which a plan is no answer to."""
    own, most = subject.candidate, spec.steps
    window = None if own.window is None else min(own.window, most)
    fitting = msgspec.structs.replace(own, segments=min(own.segments, most), window=window)
    return replace(subject, spec=spec, candidate=fitting, plan=None)


def _same_plan(plan: Plan | None, spec: Spec, place: Place, budget_bytes: int) -> Plan | None:
    """The plan, if it is an answer to the same question."""
    if plan is None or (plan.spec, plan.where.place, plan.budget_bytes) != (spec, place, budget_bytes):
        return None
    return plan


def _candidate(spec: Spec, evidence: Evidence, fixed: dict[str, Any]) -> Candidate:
    plan = evidence.plan
    if plan is not None and plan.spec == spec:
        knobs = msgspec.structs.asdict(plan.candidate) | {"accumulation": None}
    elif plan is not None:
        knobs = {name: getattr(plan.candidate, name) for name in KNOBS if name not in SHAPE}
    else:
        knobs = usual_settings(evidence.records, spec)
    return make_candidate(spec, **knobs | fixed)


def _precisions(place: Place) -> tuple[str, ...]:
    """fp32, and half precision if the device has one that is worth a look."""
    if place.cuda:
        return card_precisions(place)
    half = [name for name in ("bf16", "fp16") if name in cpu_precisions()]
    return ("fp32", *half[:1])


def usual_over(subject: Subject, fixed: dict[str, Any]) -> Over:
    """What varies if nobody says: doublings of microbatch and segments, with those that were measured; the precision.

    >>> from oomguard.estimate.place import CPU
    >>> subject = Subject(
    ...     spec=Spec(cell="gru", seq=64, batch=6), place=CPU, budget_bytes=1 << 30, candidate=Candidate(microbatch=6)
    ... )
    >>> usual_over(subject, {})
    {'microbatch': [1, 2, 4, 6], 'segments': [1, 2, 4, 8], 'precision': ['fp32']}
    """
    spec = subject.spec
    known = [subject.candidate, *(one.candidate for one in subject.records if one.spec == spec)]
    rows = {1 << power for power in range(spec.batch.bit_length())} | {spec.batch}
    pieces = {1 << power for power in range(max(1, (spec.steps // SHORTEST_PIECE).bit_length()))}
    over: Over = {
        "microbatch": sorted(rows | {one.microbatch for one in known}),
        "segments": sorted(pieces | {one.segments for one in known}),
        "precision": [*subject.precisions],
    }
    if subject.candidate.window is not None:
        del over["segments"]
    return {name: values for name, values in over.items() if name not in fixed}


def check_apart(over: Over, fixed: dict[str, Any]) -> None:
    """Raise if something both varies and is fixed.

    >>> check_apart({"microbatch": [1, 2]}, {"segments": 4})
    """
    for name in over:
        if name in fixed:
            raise MisuseError(
                rule="A knob is either fixed or varied",
                got=f"got {flag(name)} {shown(fixed[name])} and values of it to vary over",
                advice="Leave one of the two out.",
            )
