"""How long an epoch takes by a plan."""

import msgspec

from oomguard.plan.value import Plan

USUAL_SEQUENCES = 1000
"""What an epoch is reckoned for if nobody says how many sequences there are."""


class Epoch(msgspec.Struct, frozen=True, kw_only=True):
    """So many sequences, and their time."""

    sequences: int
    """How many."""
    steps: int
    """Optimizer steps for them."""
    seconds: float
    """For all of them."""
    known: bool
    """Whether the data has so many; otherwise it is a usual number."""


def epoch_of(plan: Plan, sequences: int | None = None) -> Epoch | None:
    """An epoch of so many sequences (default: as many as the spec's histogram); None if nothing was timed.

    With buckets, each sequence takes the time of its bucket.
    """
    seconds_per_step, batch = plan.seconds_per_step, plan.spec.batch
    if seconds_per_step is None:
        return None
    each = seconds_per_step / batch
    if plan.buckets and all(one.expected.seconds_per_step is not None for one in plan.buckets):
        all_sequences = sum(one.sequences for one in plan.buckets)
        each = sum(one.sequences * (one.expected.seconds_per_step or 0.0) for one in plan.buckets)
        each /= batch * all_sequences
    known = sequences or sum((plan.spec.lengths or {}).values())
    count = known or USUAL_SEQUENCES
    return Epoch(sequences=count, steps=-(-count // batch), seconds=each * count, known=bool(known))
