"""The ladder: a plan's candidate and its fallbacks with their buckets, and where on it a training stands."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from oomguard.candidate import Candidate
from oomguard.estimate.breakdown import estimate_step
from oomguard.plan.value import Bucket, Expected, Plan
from oomguard.search.shorten import with_steps

FIRST_WAIT, LONGEST_WAIT = 100, 12_800
"""Quiet steps before a climb: at first, and at most. After each climb that failed they are twice as many."""


class Standing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a training stands on the ladder. A checkpoint keeps it, so that a resumed run goes on from the same rung.

    >>> standing = Standing().down().down()
    >>> standing.rung, standing.up().down().wait
    (2, 200)
    """

    rung: int = 0
    """0 is the plan's candidate, 1 its first fallback."""
    quiet: int = 0
    """Steps without trouble on this rung."""
    wait: int = FIRST_WAIT
    """Quiet steps before a climb is tried."""
    climbed: bool = False
    """It came up to this rung, and has not been quiet here for as long as it waited."""

    def down(self) -> "Standing":
        """One rung further down; who had only just climbed waits longer before the next time."""
        wait = min(LONGEST_WAIT, 2 * self.wait) if self.climbed else self.wait
        return Standing(rung=self.rung + 1, wait=wait)

    def up(self) -> "Standing":
        """One rung up, on trial."""
        return Standing(rung=self.rung - 1, wait=self.wait, climbed=True)

    def after_step(self) -> "Standing":
        """A step without trouble more."""
        quiet = self.quiet + 1
        return Standing(rung=self.rung, quiet=quiet, wait=self.wait, climbed=self.climbed and quiet < self.wait)

    @property
    def may_climb(self) -> bool:
        """Whether it has been quiet for long enough."""
        return self.rung > 0 and self.quiet >= self.wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Footing:
    """One rung with its buckets."""

    candidate: Candidate
    """How sequences of full length are run."""
    expected: Expected
    """What the plan expects of it."""
    buckets: tuple[tuple[int, Candidate], ...]
    """The longest sequence of each bucket and how it is run, the shortest bucket first."""

    def candidate_for(self, steps: int) -> Candidate:
        """How a microbatch is run whose longest sequence has so many steps."""
        return next((candidate for longest, candidate in self.buckets if steps <= longest), self.candidate)


def make_footings(plan: Plan) -> tuple[Footing, ...]:
    """The plan's candidate and its fallbacks, each with its buckets."""
    chosen = estimate_step(plan.spec, plan.candidate, plan.where.place)
    rungs = [(plan.candidate, plan.estimate.total_bytes, plan.expected)]
    rungs += [(one.candidate, one.estimate.total_bytes, one.expected) for one in plan.fallbacks]
    runtime_bytes = int(chosen.terms["runtime"])
    found = []
    for candidate, total_bytes, expected in rungs:
        share = (total_bytes - runtime_bytes) / max(1, plan.estimate.total_bytes - runtime_bytes)
        buckets = [(one.longest, shrunk(plan, one, share)) for one in plan.buckets]
        made = tuple(sorted(buckets, key=lambda pair: pair[0])) or ((plan.spec.steps, candidate),)
        found.append(Footing(candidate=candidate, expected=expected, buckets=made))
    return tuple(found)


def shrunk(plan: Plan, bucket: Bucket, share: float) -> Candidate:
    """How a bucket is run on a rung: what it grows by over the runtime falls to the share that the rung's falls to.

    By arithmetic, since nobody has measured it: the microbatch is halved and, once it is 1, the segments are doubled,
    until the estimate is that small (or nothing smaller is left).
    """
    spec = with_steps(plan.spec, bucket.longest)
    candidate, first_bytes = bucket.candidate, None
    for candidate in _ever_smaller(plan, bucket):
        growth_bytes = int(estimate_step(spec, candidate, plan.where.place).growth_bytes)
        first_bytes = growth_bytes if first_bytes is None else first_bytes
        if growth_bytes <= share * first_bytes:
            break
    return candidate


def _ever_smaller(plan: Plan, bucket: Bucket) -> Iterator[Candidate]:
    candidate = bucket.candidate
    yield candidate
    while candidate.microbatch > 1:
        rows = candidate.microbatch // 2
        passes = -(-plan.spec.batch // rows)
        candidate = msgspec.structs.replace(candidate, microbatch=rows, accumulation=passes)
        yield candidate
    if candidate.window is not None or not candidate.recompute:
        return
    while 2 * candidate.segments <= bucket.longest:
        candidate = msgspec.structs.replace(candidate, segments=2 * candidate.segments)
        yield candidate
