"""The guard: runs a step again with a smaller candidate of the plan when memory gets tight, and climbs back later.

Here are the guard and its attempts. `ladder.py` has the rungs and detects memory pressure before it is an error,
`update.py` completes an update that ran out of memory halfway, `events.py` writes down every change.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import msgspec
import torch
from torch.optim import Optimizer

from oomguard._batch import Rows
from oomguard._core.errors import GuardError, MisuseError, check_whole, conflict
from oomguard._core.units import format_bytes, read_budget
from oomguard._device.find import Device, open_device
from oomguard._guard.events import Events
from oomguard._guard.ladder import LadderPosition, LadderRung, Pressure, Watch, make_halvings, make_ladder
from oomguard._guard.update import Updates
from oomguard._plan.task_value import Part, TaskPlan
from oomguard._plan.value import Plan
from oomguard._probe.verdict import Verdict, judge
from oomguard._rnn.rng import remember_all, remember_random
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import MAX_BATCH
from oomguard._task.layout import Axis, Layout, count_rows, split, tensors_of

DONE, OOM, FAILED = 0, 1, 2  # outcome of an attempt; among several processes the largest counts
Agree = Callable[[Sequence[int]], list[int]]  # the largest of each number over all processes
Batch = TypeVar("Batch")


class Guard:
    """Keeps a training loop within memory: `with oomguard.guard(plan) as guard`.

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

    An attempt that runs out of memory ends without an error, and `attempts` yields another one, a rung lower: its
    pieces are smaller, `optimizer.zero_grad` was called (without an optimizer, clear the gradients yourself at the
    start of the attempt), and the random numbers of PyTorch, Python and NumPy repeat. On the last rung, `attempts`
    yields one more attempt after memory was released, then raises `GuardError`. Put the forward and backward pass into
    a function, as above: variables of the loop itself, and their memory, stay alive during the next attempt.

    `split` alone only sizes the pieces: it takes an attempt to run a batch again.
    """

    def __init__(
        self,
        plan: Plan | TaskPlan | None = None,
        *,
        budget_bytes: int | None = None,
        microbatch: int | None = None,
        device: Device | None = None,
        events: Events | None = None,
        position: LadderPosition | None = None,
        agree: Agree = list,
    ) -> None:
        self.plan, self.microbatch, self.events, self.agree = plan, microbatch, events, agree
        self.device = device or open_device("cpu" if plan is None else plan.where.device)
        self.position = position or LadderPosition()
        self.ladder = make_halvings(microbatch or 1) if plan is None else make_ladder(plan)
        self.steps = 0  # steps completed
        if plan is not None:
            budget_bytes = None if plan.asked_budget_bytes is None else plan.budget_bytes
        self.watch = Watch(device=self.device, limit_bytes=budget_bytes)
        self.updates = Updates(self.device.release)
        self._reported_at_bottom = False
        self._reported = 1.0  # how many times as long as those of the plan were the longest rows that were reported
        self._peaks_bytes: dict[int, int] = {}  # without a plan: peaks that were too high, by microbatch

    @property
    def rung(self) -> int:
        """0 is the plan's candidate, 1 its first fallback."""
        return self.position.rung

    @property
    def current(self) -> LadderRung:
        """The rung with its buckets."""
        return self.ladder[self.rung]

    @property
    def candidate(self) -> Candidate:
        """How sequences of full length are run now."""
        return self.current.candidate

    @property
    def rows(self) -> int:
        """Sequences per pass in a loop of your own, which keeps the segments of the plan's candidate.

        Where a rung has more segments, such a loop uses fewer sequences instead.
        """
        segments = self.ladder[0].candidate.segments
        return max(1, self.candidate.microbatch * segments // self.candidate.segments)

    def split(self, batch: Batch, dim: object = 0, steps: int | None = None) -> Iterator[Batch]:
        """Pieces of a batch, of the same form: a tensor, or tuples, lists, dicts or dataclasses of tensors, nested.

        Tensors are cut along `dim`: a number for all, a structure like the batch, or a function of path and tensor;
        None keeps a part whole. Lists are cut by item and packed sequences by sequence; numbers, text and None are kept
        whole. A DataLoader's list of unlike tensors is cut like a tuple. If sequences are longer than the plan's, the
        pieces have fewer rows. Their length is `steps`, or else the largest first dimension beside the rows.

        Python's and NumPy's random numbers repeat in every piece, so that all pieces take the same decisions.
        """
        return (piece for piece, _ in self.pieces(batch, dim, steps))

    def pieces(self, batch: Batch, dim: object = 0, steps: int | None = None) -> Iterator[tuple[Batch, float]]:
        """The pieces of `split`, each with its share of the rows: the weight of a loss that is a mean over rows."""
        repeat_random = remember_random()
        if isinstance(self.plan, TaskPlan) and self.plan.layout and dim == 0:
            layout = layout_of(self.plan.layout)
            count = count_rows(batch, layout)
            row_bytes = sum(tensor.nbytes for tensor in tensors_of(batch)) / count
            size = self._piece_rows(count, row_bytes / max(1, self.plan.row_bytes), steps)
            for piece in split(batch, layout, size):
                repeat_random()
                yield piece, count_rows(piece, layout) / count
            return
        rows = Rows(batch, dim)
        planned = self.plan.spec.steps if isinstance(self.plan, Plan) else rows.steps
        size = self._piece_rows(rows.count, (steps or rows.steps) / planned, steps or rows.steps)
        for start in range(0, rows.count, size):
            repeat_random()
            yield rows.take(slice(start, start + size)), min(size, rows.count - start) / rows.count

    def _piece_rows(self, rows: int, longer: float, steps: int | None) -> int:
        """Rows of a piece of a batch with so many rows, which are so many times as long as those of the plan."""
        if self.plan is None:
            self._lengthen(rows)
            return self.rows
        if longer <= 1:
            return self.rows
        # by the plan's own figures: what a step needs beside the runtime grows at least as rows times time steps
        runtime_bytes, margin_bytes = self.plan.estimate.terms.get("runtime", 0), self.plan.expected.margin_bytes
        growth_bytes = longer * max(1, self.plan.peak_bytes - runtime_bytes)
        if self.device.name == "cpu":  # this process may hold more; on a card, what it caches would count too
            runtime_bytes = max(runtime_bytes, self.device.reading().now_bytes)
        share = min(1.0, (self.watch.available_bytes() - runtime_bytes - margin_bytes) / growth_bytes)
        size = max(1, int(share * self.rows))
        if size < self.rows and longer > self._reported:
            self._reported = longer
            reason = f"Rows are {longer:.2f} times as long as those of the plan: pieces have {size:,} rows."
            self.tell("longer", reason, rows=size, **({} if steps is None else {"steps": steps}))
        return size

    def _lengthen(self, rows: int) -> None:
        """Without a plan and a microbatch, let the ladder begin with the largest batch so far."""
        if self.microbatch is None and rows > self.ladder[0].candidate.microbatch:
            last, self.ladder = self.rows, make_halvings(rows)
            if self.rung:  # memory was short before: pieces must not grow
                rung = next(n for n, step in enumerate(self.ladder) if step.candidate.microbatch <= last)
                self.position = msgspec.structs.replace(self.position, rung=rung)

    def attempts(self, optimizer: Optimizer | None = None) -> Iterator["Attempt"]:
        """Attempts at one step until one succeeds: `for attempt in guard.attempts(optimizer): with attempt: ...`."""
        device, repeated = torch.device(self.device.name), False
        restore_random = remember_all(device)
        while True:
            attempt = Attempt(self, restore_random)
            yield attempt
            if attempt.agreed is None:
                raise MisuseError(
                    rule="An attempt must be entered", got="it was not", advice="Write `with attempt:` around the step."
                )
            status, tight, stay = attempt.agreed
            if status == DONE:
                self._finish_step(attempt.pressure, tight=bool(tight), climb=not stay)
                return
            if status == FAILED:
                raise another_process_failed()
            # only now, after the `with` has ended, no traceback holds the tensors of the failed attempt any more
            if optimizer is not None:
                optimizer.zero_grad(set_to_none=True)
            self.device.release()
            reason = attempt.message or "Another process of this training ran out of memory."
            if self.rung + 1 == len(self.ladder) and not repeated:
                repeated = True  # there is no smaller candidate, but the released memory may suffice
                self.tell("again", reason, **self._memory(), rung=self.rung)
            else:
                self.fall("oom", reason)

    def update(self, optimizer: Optimizer, step: Callable[[], object] | None = None) -> None:
        """`optimizer.step()`, completed even if memory runs out in the middle of it."""
        message = self.updates.run(optimizer, step)
        if message is not None:
            self.tell("update", "Memory ran out in the update. It was completed weight by weight.", error=message)

    def fall(self, kind: str, reason: str, **figures: object) -> None:
        """Go one rung down and log the reason; on the last rung raise `GuardError`."""
        memory, last = self._memory(), self.candidate
        if self.rung + 1 >= len(self.ladder):
            self.tell("bottom", reason, **figures, **memory)
            of_plan = "" if self.plan is None else " of the plan"
            raise GuardError(
                rule=f"The last rung{of_plan} (microbatch {last.microbatch}, {last.segments} segments) must fit",
                got=f"memory ran out with {format_bytes(memory['now_bytes'])} in use and a limit of "
                f"{format_bytes(self.watch.available_bytes())} ({reason})",
                advice="Free memory and continue with --resume, or make a plan for a smaller budget.",
                figures=memory | {"rung": self.rung, "steps": self.steps},
            )
        self.position = self.position.down()
        self.tell(kind, reason, **figures | memory | self._rung_figures(), wait=self.position.wait)

    def tell(self, kind: str, reason: str, **figures: object) -> None:
        if self.events is not None:
            self.events.append(self.steps, kind, reason, **figures)

    def may_climb(self) -> bool:
        """Whether enough steps were quiet and the rung above would fit by its expected peak and margin."""
        if not self.position.after_step().may_climb:
            return False
        above = self.ladder[self.rung - 1]
        measured_bytes = self._peaks_bytes.get(above.candidate.microbatch, 0)
        return max(above.expected.safe_bytes, measured_bytes) <= self.watch.available_bytes()

    def _finish_step(self, pressure: Pressure | None, *, tight: bool, climb: bool) -> None:
        """Count a successful step and choose the rung of the next one."""
        self.steps += 1
        self.position = self.position.after_step()
        if tight:
            pressure = pressure or Pressure("Memory is tight in another process of this training.", {})
            if self.plan is None:
                self._peaks_bytes[self.candidate.microbatch] = int(pressure.figures.get("peak_bytes", 0))
            if self.rung + 1 < len(self.ladder):
                self.fall("tight", pressure.reason, **pressure.figures)
                self.device.release()
                self.device.reset()  # memory reserved so far is not a peak of the next step
            elif not self._reported_at_bottom:  # nothing has failed, so training continues; one report is enough
                self._reported_at_bottom = True
                self.tell("tight", f"{pressure.reason} This is the last rung.", **pressure.figures, rung=self.rung)
        elif climb:
            quiet = self.position.quiet
            self.position, self._reported_at_bottom = self.position.up(), False
            self._enforce()  # more may be free than at the start
            self.tell("climb", f"{quiet} steps were quiet.", **self._rung_figures())

    def _rung_figures(self) -> dict[str, int]:
        candidate = self.candidate
        return {"rung": self.rung, "microbatch": candidate.microbatch, "segments": candidate.segments}

    def _memory(self) -> dict[str, int]:
        free_bytes = self.device.budget().limit_bytes
        budget_bytes = self.watch.limit_bytes or free_bytes if self.plan is None else self.plan.budget_bytes
        now_bytes = self.device.reading().now_bytes
        return {"now_bytes": now_bytes, "free_bytes": free_bytes, "budget_bytes": budget_bytes}

    def _enforce(self) -> None:
        """Let allocations beyond the limit fail, as errors that can be caught, before other processes suffer."""
        limit_bytes, reading, committed_bytes = self.watch.available_bytes(), self.device.reading(), None
        if self.plan is None and reading.committed_bytes is not None:
            # nothing tells how large the first step will be, so on the CPU bytes count as soon as they are asked for
            committed_bytes = reading.committed_bytes + max(0, limit_bytes - reading.now_bytes)
        self.device.enforce(limit_bytes, committed_bytes)

    def __enter__(self) -> "Guard":
        check_room(self.device, self.watch.available_bytes())
        if self.plan is not None:
            self.device.settle(self.candidate)
        self._enforce()
        self.watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.look()
        self.device.unlimit()


class Attempt(AbstractContextManager["Attempt"]):
    """One attempt at a step: `with attempt` ends without an error if memory runs out inside."""

    def __init__(self, guard: Guard, restore_random: Callable[[], None]) -> None:
        self.guard, self.split, self._restore_random = guard, guard.split, restore_random
        self.message: str | None = None  # first line of the error that ended it
        self.pressure: Pressure | None = None  # why memory is tight, though the attempt succeeded
        self.agreed: list[int] | None = None
        """The largest over all processes of: outcome, memory is tight, stay on this rung. None: not entered."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        guard, status = self.guard, DONE
        if error is None:
            self.pressure = guard.watch.check()
        else:
            status = OOM if isinstance(error, Exception) and judge(error) is Verdict.OOM else FAILED
            self.message = str(error).strip().partition("\n")[0][:300] or type(error).__name__
            self._restore_random()  # a checkpoint that is saved now is one from before the attempt
        stay = status != DONE or self.pressure is not None or not guard.may_climb()
        self.agreed = guard.agree([status, int(self.pressure is not None), int(stay)])
        return status == OOM  # any other error is raised here, after the other processes were told


def check_room(device: Device, available_bytes: int) -> None:
    """Raise if this process already uses all that it may: the first step would fail, and oneDNN with it, for good."""
    used_bytes = device.reading().now_bytes
    if used_bytes >= available_bytes:
        raise MisuseError(
            rule="The budget must be more than this process already uses",
            got=f"it uses {format_bytes(used_bytes)}, and may use {format_bytes(available_bytes)}",
            advice="Give a larger budget, free memory, or train in a process of its own: train(isolate=True).",
        )


def layout_of(parts: Iterable[Part]) -> Layout:
    """Where a batch holds its rows or its time steps, by the parts that a plan names."""
    return {part.path: Axis(part.kind, part.dimension, part.lengths) for part in parts}


def another_process_failed(kind: type[GuardError] = GuardError) -> GuardError:
    """The error that ends a process because another one of its training failed."""
    return kind(
        rule="All processes of a training continue together",
        got="another one failed",
        advice="Read the error message of that process.",
    )


def make_guard(
    plan: Plan | TaskPlan | None,
    budget: int | str | None,
    microbatch: int | None,
    device: str | None,
    events: str | None,
) -> Guard:
    """Make the guard of a plan or, without one, of a budget on a device."""
    if plan is not None and (budget is not None or microbatch is not None):
        raise conflict("A plan has its own budget and microbatch", "a plan", "budget or microbatch")
    check_whole("microbatch", microbatch, 1, MAX_BATCH)
    return Guard(
        plan,
        budget_bytes=read_budget(budget),
        microbatch=microbatch,
        device=None if device is None else open_device(device),
        events=None if events is None else Events(events),
    )
