"""Guard: a step that runs out of memory is run again one rung down, as if nothing had happened."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oomguard.candidate import Candidate
from oomguard.device import Device, open_device
from oomguard.errors import GuardError, MisuseError
from oomguard.guard.ladder import Footing, Standing, make_footings
from oomguard.guard.update import Updates
from oomguard.guard.watch import Tight, Watch
from oomguard.metrics import Events
from oomguard.plan.value import Plan
from oomguard.probe.verdict import Verdict, judge
from oomguard.units import format_bytes

FINE, OOM, BROKEN = 0, 1, 2
"""What came of an attempt."""
Agree = Callable[[Sequence[int]], list[int]]
"""The largest of each number over all processes that train together."""


def alone(numbers: Sequence[int]) -> list[int]:
    """What a process agrees on with itself."""
    return [*numbers]


class Guard:
    """Keeps a loop within memory: `with oomguard.guard(plan) as guard`.

    In a loop of your own:

    >>> import oomguard
    >>> plan = oomguard.find_feasible_config(cell="gru", seq=8, hidden=8, batch=4, features=3, device="t4")
    >>> model, loss_of = torch.nn.Linear(3, 1), torch.nn.MSELoss(reduction="sum")
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> def learn(inputs, targets, rows):
    ...     (loss_of(model(inputs), targets) / rows).backward()
    >>> with oomguard.guard(plan, device="cpu") as guard:
    ...     for inputs, targets in [(torch.randn(4, 3), torch.randn(4, 1))]:
    ...         for attempt in guard.attempts(optimizer):
    ...             with attempt:
    ...                 for piece in guard.split((inputs, targets)):
    ...                     learn(*piece, rows=len(inputs))
    ...         guard.update(optimizer)
    ...         optimizer.zero_grad()
    >>> guard.steps, guard.rung
    (1, 0)

    An attempt that runs out of memory ends quietly, and `attempts` gives another one, a rung lower: pieces are smaller
    then, the gradients are gone (it calls `optimizer.zero_grad`; without an optimizer that is yours to do, first thing
    in the attempt), and the random numbers of PyTorch fall as before. On the last rung it gives one more attempt, since
    memory was released, and then raises `GuardError`. Let the pass be a function of its own, as above:
    the variables of the loop itself stay alive while the next attempt is made, and with them their memory.

    `split` alone sizes the pieces; what the body of a `for` raises never reaches a generator, so only an attempt can
    run the batch again.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        device: Device | None = None,
        events: Events | None = None,
        standing: Standing | None = None,
        agree: Agree = alone,
    ) -> None:
        self.plan, self.events, self.agree = plan, events, agree
        self.device = device or open_device(plan.where.device)
        self.ladder = make_footings(plan)
        self.standing = standing or Standing()
        self.steps = 0
        """Steps that were done."""
        asked = plan.asked_budget_bytes
        self.watch = Watch(device=self.device, limit_bytes=None if asked is None else plan.budget_bytes)
        self.updates = Updates(self.device.release)
        self._at_bottom = False

    @property
    def rung(self) -> int:
        """0 is the plan's candidate, 1 its first fallback."""
        return self.standing.rung

    @property
    def footing(self) -> Footing:
        """The rung with its buckets."""
        return self.ladder[self.rung]

    @property
    def candidate(self) -> Candidate:
        """How a sequence of full length is run now."""
        return self.footing.candidate

    @property
    def rows(self) -> int:
        """Sequences per pass in a loop that has no more segments than the plan's candidate.

        What a rung does by more segments is done by fewer sequences instead.
        """
        first = self.ladder[0].candidate
        return max(1, self.candidate.microbatch * first.segments // self.candidate.segments)

    def split(self, batch: Any, dim: int = 0) -> Iterator[Any]:
        """A tensor, or a tuple, list or dict of tensors, in pieces of at most `rows` sequences along a dimension."""
        if isinstance(batch, Tensor):
            yield from torch.split(batch, self.rows, dim)
        elif isinstance(batch, Mapping):
            for piece in self.split([*batch.values()], dim):
                yield dict(zip(batch, piece, strict=True))
        else:
            yield from zip(*(torch.split(part, self.rows, dim) for part in batch), strict=True)

    def attempts(self, optimizer: Optimizer | None = None) -> Iterator["Attempt"]:
        """Attempts at one step, `for attempt in guard.attempts(optimizer): with attempt: ...`, until one succeeds."""
        dice, again = _dice(self.device), False
        while True:
            attempt = Attempt(self)
            yield attempt
            if attempt.agreed is None:
                raise MisuseError(
                    rule="An attempt is made inside it", got="it was not entered", advice="Write `with attempt:`."
                )
            status, down, stay = attempt.agreed
            if status == FINE:
                self._done(attempt.tight, down=bool(down), up=not stay)
                return
            if status == BROKEN:
                raise _others_failed(self.steps)
            # the `with` of the attempt has ended, so that no traceback holds its tensors any more
            if optimizer is not None:
                optimizer.zero_grad(set_to_none=True)
            self.device.release()
            _throw_again(self.device, dice)
            why = attempt.why or "Another process of this training ran out of memory."
            if self.rung + 1 == len(self.ladder) and not again:
                again = True  # there is nothing smaller, but what was released may be just enough
                self.tell("again", why, **self._figures(), rung=self.rung)
            else:
                self.fall("oom", why)

    def update(self, optimizer: Optimizer, step: Callable[[], None] | None = None) -> None:
        """`optimizer.step()`, done as a whole even if memory runs out in the middle of it."""
        failure = self.updates.run(optimizer, step)
        if failure is not None:
            self.tell("update", "Memory ran out in the update, which was finished weight by weight.", error=failure)

    def fall(self, kind: str, reason: str, **figures: Any) -> None:
        """One rung down, with its reason; raises `GuardError` at the bottom."""
        figures |= self._figures()
        if self.rung + 1 >= len(self.ladder):
            self.tell("bottom", reason, **figures)
            raise _bottom(self, reason, figures)
        self.standing = self.standing.down()
        self.tell(kind, reason, **figures, rung=self.rung, **_knobs(self.candidate), wait=self.standing.wait)

    def tell(self, kind: str, reason: str, **figures: Any) -> None:
        """An event, if anybody keeps them."""
        if self.events is not None:
            self.events.append(self.steps, kind, reason, **figures)

    def _done(self, tight: Tight | None, *, down: bool, up: bool) -> None:
        """A step was done. The next one may be on another rung."""
        self.steps += 1
        self.standing = self.standing.after_step()
        if down:
            tight = tight or Tight(reason="Memory is tight in another process of this training.", figures={})
            if self.rung + 1 < len(self.ladder):
                self.fall("tight", tight.reason, **tight.figures)
                self.device.release()
                self.device.reset()  # what was reserved until now is no peak of the next step
            elif not self._at_bottom:  # nothing failed yet, so it goes on; once is enough to say so
                self._at_bottom = True
                self.tell("tight", f"{tight.reason} This is the last rung.", **tight.figures, rung=self.rung)
        elif up:
            quiet = self.standing.quiet
            self.standing, self._at_bottom = self.standing.up(), False
            self._enforce()  # more may be free than was at the beginning
            self.tell("climb", f"{quiet} steps were quiet.", rung=self.rung, **_knobs(self.candidate))

    def wants_up(self) -> bool:
        """Whether it has been quiet for long, and the rung above would fit by what is expected of it."""
        if not self.standing.after_step().may_climb:
            return False
        above = self.ladder[self.rung - 1].expected
        return self.watch.room_for(above.peak_bytes + above.margin_bytes)

    def _figures(self) -> dict[str, Any]:
        reading = self.device.reading()
        return {
            "now_bytes": reading.now_bytes,
            "free_bytes": self.device.budget().limit_bytes,
            "budget_bytes": self.plan.budget_bytes,
        }

    def __enter__(self) -> "Guard":
        self.device.settle(self.candidate)
        self._enforce()
        self.watch.start()
        return self

    def _enforce(self) -> None:
        """Let allocations fail, as errors that are caught here, before another process has to suffer."""
        free_bytes = self.device.budget().limit_bytes
        self.device.enforce(min(free_bytes, self.watch.limit_bytes or free_bytes))

    def __exit__(self, *_: object) -> None:
        self.watch.end()
        self.device.unlimit()


@dataclass(slots=True)
class Attempt:
    """One attempt at a step: `with attempt` ends quietly if memory runs out inside."""

    guard: Guard
    why: str | None = None
    """What the out-of-memory error said."""
    tight: Tight | None = None
    """Why memory is tight, though there was no error."""
    agreed: list[int] | None = None
    """What came of it in all processes: status, whether to go down, whether to stay."""

    def split(self, batch: Any, dim: int = 0) -> Iterator[Any]:
        """As `Guard.split`."""
        return self.guard.split(batch, dim)

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        guard, status = self.guard, FINE
        if error is not None:
            status = OOM if isinstance(error, Exception) and judge(error) is Verdict.OOM else BROKEN
            self.why = _first_line(error)
        else:
            self.tight = guard.watch.look()
        stay = status != FINE or self.tight is not None or not guard.wants_up()
        self.agreed = guard.agree([status, int(self.tight is not None), int(stay)])
        return status == OOM  # the others know of what is broken; here it goes its way


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _knobs(candidate: Candidate) -> dict[str, int]:
    return {"microbatch": candidate.microbatch, "segments": candidate.segments}


def _dice(device: Device) -> list[Tensor]:
    """Where the random numbers are that a step draws."""
    found = [torch.get_rng_state()]
    if device.name != "cpu":
        found.append(torch.cuda.get_rng_state(device.torch_device))
    return found


def _throw_again(device: Device, dice: list[Tensor]) -> None:
    torch.set_rng_state(dice[0])
    if len(dice) > 1:
        torch.cuda.set_rng_state(dice[1], device.torch_device)


def _others_failed(steps: int) -> GuardError:
    return GuardError(
        rule="All processes of a training go on together",
        got=f"another one failed in step {steps + 1:,}",
        advice="Read what that one says.",
    )


def _bottom(guard: Guard, reason: str, figures: dict[str, Any]) -> GuardError:
    least = guard.candidate
    return GuardError(
        rule=f"The last rung of the plan (microbatch {least.microbatch}, {least.segments} segments) must fit",
        got=f"memory ran out with {format_bytes(figures['now_bytes'])} in use and "
        f"{format_bytes(figures['free_bytes'])} within reach ({reason})",
        advice="Free memory and go on with --resume, or make a plan for a smaller budget.",
        figures=figures | {"rung": guard.rung, "steps": guard.steps},
    )
