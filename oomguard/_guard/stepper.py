"""The stepper: one update of any model in an own loop, in pieces that fit, under the guard."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from oomguard._core.errors import MisuseError
from oomguard._guard import Guard, layout_of, make_guard
from oomguard._plan.task_value import TaskPlan
from oomguard._plan.value import Plan
from oomguard._step import Clip, accumulate_pieces, apply_gradient, as_candidate, check_optimizer
from oomguard._task.task import is_piecewise
from oomguard._task.times import in_pieces

Loss = Callable[..., Any]
"""Loss of a model on a batch: its mean over the rows, or a sum and the weight to divide it by. With a state as third
argument, it returns a sum, its weight and the state after the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepper(AbstractContextManager["Stepper"]):
    """Makes one update per call; `oomguard.stepper` says how. Leaving its `with` block lifts the limit on memory."""

    guard: Guard
    model: nn.Module
    loss: Loss
    optimizer: Optimizer
    segments: int  # of recurrent calls
    clip: float | Clip | None
    scaler: GradScaler | None
    dim: object

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)

    def __call__(self, batch: object) -> Tensor:
        """Update the weights once by the gradient of a whole batch; returns its loss, detached.

        The gradient, clipped, stays in the parameters until the next call.
        """
        self.optimizer.zero_grad(set_to_none=True)
        for attempt in self.guard.attempts(self.optimizer):
            with attempt:
                pieces = self.guard.pieces(batch, self.dim)
                loss = accumulate_pieces(pieces, self._loss_of, self.optimizer, self.scaler)
        apply_gradient(self.optimizer, partial(self.guard.update, self.optimizer), self.scaler, self.clip)
        return loss

    def _loss_of(self, piece: object) -> tuple[Tensor, float | None]:
        """The loss of a piece: its mean and None, or a sum and its weight."""
        first = self.guard.ladder[0].candidate  # lower rungs have fewer rows, see Guard.rows
        with as_candidate(msgspec.structs.replace(first, segments=self.segments), self.guard.device.name):
            result = self.loss(self.model, piece)
        loss, weight = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            form = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise MisuseError(
                rule="loss(model, batch) must return a scalar tensor with a gradient, or (sum, weight)",
                got=f"it returned {form}",
                advice="Return the mean over the rows, or the sum and the number that it is divided by.",
            )
        return loss.reshape(()), None if weight is None else float(weight)

    def __exit__(self, *error: object) -> None:
        self.guard.__exit__(*error)


def stepper(
    plan: Plan | TaskPlan | int | str | None,
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizer,
    *,
    clip: float | Clip | None = None,
    scaler: GradScaler | None = None,
    dim: object = 0,
    microbatch: int | None = None,
    device: str | None = None,
    events: str | None = None,
) -> Stepper:
    """Train any model in your own loop within memory: `step(batch)` replaces backward and `optimizer.step`.

    The first argument is a plan, or a budget in bytes or text such as "6GiB" (None: the free memory). `loss(model,
    batch)` returns the mean over the rows of a batch, or a tuple (sum, weight), such as the summed loss of all tokens
    and their number. It is called for pieces of the batch, as `guard.split` cuts them along `dim`, and the gradients
    add up to that of the whole batch. If memory runs out, the batch runs again in smaller pieces. A loss that adds up
    over time may be `loss(model, batch, state)`, as `oomguard.piecewise_loss` takes it: where the plan of a task has
    segments, each is a piece of the batch along time.

    `clip` is the largest norm of the whole gradient, or a function that is called with the parameters after the
    backward passes. A `torch.amp.GradScaler` is given as `scaler`. Schedulers and moving averages follow `step(batch)`
    in the loop. To go on with another optimizer, such as ASGD after SGD, write `step = dataclasses.replace(step,
    optimizer=asgd)`. `device` is that of the model unless it is given; `microbatch` and `events` are those of `guard`.

    >>> import torch
    >>> model = torch.nn.LSTM(3, 4, batch_first=True)
    >>> def loss(model, batch):
    ...     return model(batch)[0].square().mean()
    >>> with stepper("6GiB", model, loss, torch.optim.SGD(model.parameters(), lr=0.1), microbatch=2) as step:
    ...     losses = [step(torch.ones(8, 5, 3)) for _ in range(3)]
    >>> losses[2] < losses[0], step.guard.steps
    (tensor(True), 3)
    """
    check_optimizer(optimizer)  # before memory is limited
    device = device or str(optimizer.param_groups[0]["params"][0].device)
    own, budget = (plan, None) if isinstance(plan, Plan | TaskPlan) else (None, plan)
    segments, time = 1 if own is None else own.candidate.segments, own.time if isinstance(own, TaskPlan) else ()
    if is_piecewise(loss):
        loss, segments = in_pieces(loss, segments if time else 1, layout_of(time)), 1
    guard = make_guard(own, budget, microbatch, device, events).__enter__()
    return Stepper(
        guard=guard,
        model=model,
        loss=loss,
        optimizer=optimizer,
        segments=segments,
        clip=clip,
        scaler=scaler,
        dim=dim,
    )
