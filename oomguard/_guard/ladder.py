"""The ladder of a plan (its candidate and its fallbacks), the rung that a training is on, and when it has to leave it.

`Watch` detects between steps that memory gets tight, before an allocation fails.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple

import msgspec

from oomguard._core.units import MIB, format_bytes
from oomguard._device.budget import Limit, Reading
from oomguard._device.find import Device
from oomguard._estimate.breakdown import estimate_step
from oomguard._plan.buckets import Bucket
from oomguard._plan.task_value import TaskPlan, TaskRung
from oomguard._plan.value import Plan, Rung
from oomguard._predict.calibration import Prediction
from oomguard._spec.candidate import Candidate
from oomguard._spec.lengths import with_steps

FIRST_WAIT, LONGEST_WAIT = 100, 12_800
"""Quiet steps before the first climb, and at most. The number doubles after each climb that failed."""
PAUSE_SECONDS = {"cpu": 1.0, "cuda": 0.1}
"""Least time between two checks: on the CPU one takes 2 ms, since it reads files of the kernel. Nothing is missed in
between, because peaks and retries are counted since the last check."""
SWAPPED_BYTES = 16 * MIB
"""How much of this process may be swapped out before it counts: idle pages of libraries are swapped out anyway."""
SPARE_BYTES = 64 * MIB  # free memory of a card below which the driver may refuse PyTorch its next block


class LadderPosition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rung that a training is on. A checkpoint stores it, so that a resumed run continues on the same rung."""

    rung: int = 0  # 0 is the plan's candidate, 1 its first fallback
    quiet: int = 0  # steps without memory pressure on this rung
    wait: int = FIRST_WAIT  # quiet steps before a climb is tried
    climbed: bool = False  # whether the rung was reached by a climb that has not yet held for `wait` steps

    def down(self) -> "LadderPosition":
        """One rung down. The wait doubles if the last climb did not hold."""
        wait = min(LONGEST_WAIT, 2 * self.wait) if self.climbed else self.wait
        return LadderPosition(rung=self.rung + 1, wait=wait)

    def up(self) -> "LadderPosition":
        """One rung up, on trial."""
        return LadderPosition(rung=self.rung - 1, wait=self.wait, climbed=True)

    def after_step(self) -> "LadderPosition":
        quiet = self.quiet + 1
        return LadderPosition(rung=self.rung, quiet=quiet, wait=self.wait, climbed=self.climbed and quiet < self.wait)

    @property
    def may_climb(self) -> bool:
        return self.rung > 0 and self.quiet >= self.wait


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRung:
    """One rung: the candidate for sequences of full length, and one for each bucket of shorter ones."""

    candidate: Candidate
    expected: Prediction
    buckets: tuple[tuple[int, Candidate], ...]
    """The longest sequence of each bucket and its candidate, shortest bucket first."""

    def candidate_for(self, steps: int) -> Candidate:
        """The candidate for a microbatch whose longest sequence has this many time steps."""
        return next((candidate for longest, candidate in self.buckets if steps <= longest), self.candidate)


def make_ladder(plan: Plan | TaskPlan) -> tuple[LadderRung, ...]:
    """The plan's candidate and its fallbacks, each with its buckets."""
    if isinstance(plan, TaskPlan):
        chosen = TaskRung(candidate=plan.candidate, expected=plan.expected)
        rungs_of_task = (chosen, *plan.fallbacks)
        return tuple(LadderRung(candidate=r.candidate, expected=r.expected, buckets=()) for r in rungs_of_task)
    runtime_bytes = int(estimate_step(plan.spec, plan.candidate, plan.where).terms["runtime"])
    growth_bytes = max(1, plan.estimate.total_bytes - runtime_bytes)
    by_length = sorted(plan.buckets, key=lambda bucket: bucket.longest)
    rungs: list[Plan | Rung] = [plan, *plan.fallbacks]
    ladder = []
    for rung in rungs:
        share = (rung.estimate.total_bytes - runtime_bytes) / growth_bytes
        buckets = tuple((bucket.longest, _shrink(plan, bucket, share)) for bucket in by_length)
        full = ((plan.spec.steps, rung.candidate),)
        ladder.append(LadderRung(candidate=rung.candidate, expected=rung.expected, buckets=buckets or full))
    return tuple(ladder)


def make_halvings(rows: int) -> tuple[LadderRung, ...]:
    """The rungs without a plan: so many rows in a pass, then half of them again and again, down to one."""
    unknown = Prediction(peak_bytes=0, margin_bytes=0, seconds_per_step=None)
    sizes = [-(-rows >> n) for n in range((rows - 1).bit_length() + 1)]
    return tuple(LadderRung(candidate=Candidate(microbatch=n), expected=unknown, buckets=()) for n in sizes)


def _shrink(plan: Plan, bucket: Bucket, share: float) -> Candidate:
    """The bucket's candidate on a rung whose growth over the runtime is this share of the plan's.

    By arithmetic, since fallbacks of buckets are not measured: the microbatch is halved down to 1, then the segments
    are doubled, until the estimated growth is at most the same share of the bucket's own, or nothing is left to do.
    """
    spec, candidate = with_steps(plan.spec, bucket.longest), bucket.candidate
    limit_bytes = share * int(estimate_step(spec, candidate, plan.where).growth_bytes)
    while int(estimate_step(spec, candidate, plan.where).growth_bytes) > limit_bytes:
        if candidate.microbatch > 1:
            rows = candidate.microbatch // 2
            passes = -(-plan.spec.batch // rows)
            candidate = msgspec.structs.replace(candidate, microbatch=rows, accumulation=passes)
        elif candidate.window is None and candidate.recompute and 2 * candidate.segments <= bucket.longest:
            candidate = msgspec.structs.replace(candidate, segments=2 * candidate.segments)
        else:
            break
    return candidate


class Pressure(NamedTuple):
    """Why memory is tight: a sentence for the user, and the numbers behind it."""

    reason: str
    figures: Mapping[str, int | str]


@dataclass(slots=True, kw_only=True)
class Watch:
    """Compares from time to time what this process uses with what it may use."""

    device: Device
    limit_bytes: int | None = None  # the user's own budget; None: only the device's limits count
    peak_bytes: int = 0  # the largest peak so far
    _checked_at: float = -math.inf
    _swapped_bytes: int = 0  # how much of this process was swapped out when it last counted
    _others_bytes: int | None = None  # memory of the card that others held at the last report, or less since

    def start(self) -> None:
        """Begin to watch: what happened before does not count."""
        self._swapped_bytes = self.device.reading().swapped_bytes
        self._taken_by_others(self.device.budget().binding)
        self.device.reset()
        self._checked_at = monotonic()

    def look(self) -> None:
        """Read the peak, without judging it."""
        self.peak_bytes = max(self.peak_bytes, self.device.reading().peak_bytes)

    def check(self) -> Pressure | None:
        """Why memory is tight; None if it is not, or if the last check was too recent."""
        now = monotonic()
        if now < self._checked_at + PAUSE_SECONDS[self.device.name.partition(":")[0]]:
            return None
        self._checked_at = now
        reading = self.device.reading()
        self.peak_bytes = max(self.peak_bytes, reading.peak_bytes)
        self.device.reset()
        return self._judge(reading)

    def available_bytes(self) -> int:
        """The largest peak that a step may have now."""
        free_bytes = self.device.budget().limit_bytes
        return min(free_bytes, self.limit_bytes or free_bytes)

    def _judge(self, reading: Reading) -> Pressure | None:
        peak_bytes, swapped_bytes = reading.peak_bytes, reading.swapped_bytes - self._swapped_bytes
        peak, figures = f"The peak was {format_bytes(peak_bytes)}", {"peak_bytes": peak_bytes}
        if reading.retries:
            times = "once" if reading.retries == 1 else f"{reading.retries} times"
            reason = f"PyTorch's allocator had to empty its cache and ask the driver again, {times}."
            return Pressure(reason, figures | {"retries": reading.retries})
        if swapped_bytes > SWAPPED_BYTES:
            self._swapped_bytes = reading.swapped_bytes  # reported once: the same pages are no reason to fall again
            reason = f"The system swapped out {format_bytes(swapped_bytes)} of this process."
            return Pressure(reason, figures | {"swapped_bytes": reading.swapped_bytes})
        if self.limit_bytes is not None and peak_bytes > self.limit_bytes:
            reason = f"{peak}, over the budget of {format_bytes(self.limit_bytes)}."
            return Pressure(reason, figures | {"budget_bytes": self.limit_bytes})
        limit = self.device.budget().binding
        taken = self._taken_by_others(limit)
        if taken is not None:
            return Pressure(taken, figures | {"others_bytes": limit.used_bytes - limit.held_bytes})
        if peak_bytes > limit.reach_bytes:
            reason = f"{peak}, and {limit.name} now leaves only {format_bytes(limit.reach_bytes)}."
            return Pressure(reason, {**figures, "limit": limit.name, "limit_bytes": limit.reach_bytes})
        return None

    def _taken_by_others(self, limit: Limit) -> str | None:
        """A sentence if other processes have filled the card since the last report: it has no block left to give."""
        if self.device.name == "cpu":
            return None
        others_bytes, free_bytes = limit.used_bytes - limit.held_bytes, limit.limit_bytes - limit.used_bytes
        before_bytes = others_bytes if self._others_bytes is None else min(self._others_bytes, others_bytes)
        self._others_bytes = before_bytes
        if free_bytes >= SPARE_BYTES or others_bytes <= before_bytes + SPARE_BYTES:
            return None
        self._others_bytes = others_bytes
        taken = format_bytes(others_bytes - before_bytes)
        return f"Other processes took {taken} of the card, and {format_bytes(free_bytes)} of it are free."
