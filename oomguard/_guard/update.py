"""Completes an optimizer's update that runs out of memory halfway, so that no weight is updated twice or left out.

An update changes weights and optimizer state in place, and PyTorch's optimizers allocate in between. Therefore:

1. The memory that the update will need is allocated and freed first. If memory is short, this fails before anything
   has changed.
2. If the update itself fails, the counters that PyTorch keeps of in-place changes (`Tensor._version`) tell which
   parameters are done (they changed as in a complete update) and which are untouched. The untouched ones are updated
   one by one, each with a copy of itself to go back to.
3. A parameter that is neither (its state is new, its weights are old) cannot be repaired: `TornUpdateError`. The
   trainer then goes back to its last checkpoint, and from there updates one parameter at a time.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oomguard._core.errors import TornUpdateError
from oomguard._probe.verdict import Verdict, judge
from oomguard._step import with_gradient

Versions = dict[str, int]  # in-place changes of a parameter (under the empty name) and of the tensors of its state


class Updates:
    """Runs updates and completes those that run out of memory. `release` frees caches."""

    def __init__(self, release: Callable[[], None]) -> None:
        self.release = release
        self.careful = False
        """Update one parameter at a time from the start: slower, but torn only if not even one parameter fits twice."""
        self._complete: dict[Tensor, Versions] = {}  # changes by the last successful update, by parameter

    def run(self, optimizer: Optimizer, step: Callable[[], object] | None = None) -> str | None:
        """Update every parameter exactly once by `step`. Returns the error message if memory ran out on the way."""
        before, message = _changes(optimizer, {}), None
        if not self.careful:
            message = _oom_message(lambda: _rehearse(optimizer)) or _oom_message(step or optimizer.step)
            if message is None:
                self._complete = _changes(optimizer, before)
                return None
            self.release()  # after the error was handled: until then its traceback held the tensors
        for parameter, gradient in self._take_remaining(optimizer, before, message):
            _update_alone(optimizer, parameter, gradient)
        return message

    def _take_remaining(
        self, optimizer: Optimizer, before: dict[Tensor, Versions], message: str | None
    ) -> list[tuple[Tensor, Tensor | None]]:
        """The parameters still to be updated, with their gradients. All gradients are detached from the parameters."""
        changes = _changes(optimizer, before)
        remaining: list[tuple[Tensor, Tensor | None]] = []
        for parameter in with_gradient(optimizer):
            changed, old = changes[parameter], before[parameter]
            if not any(changed.get(name) for name in old):
                if len(old) == 1:  # no state before: the failed update may have made half of it
                    optimizer.state.pop(parameter, None)
                remaining.append((parameter, parameter.grad))
            elif changed != self._complete.get(parameter):
                raise _torn(message or "")
        for parameter in with_gradient(optimizer):
            parameter.grad = None
        return remaining


def _update_alone(optimizer: Optimizer, parameter: Tensor, gradient: Tensor | None) -> None:
    """Update one parameter, or restore it and raise `TornUpdateError`."""
    saved: list[tuple[Tensor, dict[str, Any]]] = []

    def update() -> None:
        state = optimizer.state.get(parameter, {})
        copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
        saved.append((parameter.detach().clone(), copies))
        parameter.grad = gradient
        optimizer.step()

    message = _oom_message(update)
    parameter.grad = None
    if message is not None:
        for weights, state in saved:
            with torch.no_grad():
                parameter.copy_(weights)
            optimizer.state[parameter] = state
        raise _torn(message)


def _oom_message(run: Callable[[], object]) -> str | None:
    """The message of the out-of-memory error that the call raised; None if it succeeded. Other errors are raised."""
    try:
        run()
    except Exception as error:
        if judge(error) is not Verdict.OOM:
            raise
        return str(error)
    return None


def _rehearse(optimizer: Optimizer) -> None:
    """Allocate and free what the update will need: for all parameters at once, or for the largest."""
    dense = [p for p in with_gradient(optimizer) if p.grad is not None and not p.grad.is_sparse]
    group = optimizer.param_groups[0]
    if group.get("fused") or not dense:
        return
    if not group.get("foreach"):
        dense = [max(dense, key=lambda p: p.numel())]
    del [torch.empty_like(p) for p in dense][:]


def _changes(optimizer: Optimizer, before: Mapping[Tensor, Versions]) -> dict[Tensor, Versions]:
    """How far each counter went up; a tensor that was not there before counts from 0."""
    changes = {}
    for parameter in with_gradient(optimizer):
        state, old = {"": parameter} | optimizer.state.get(parameter, {}), before.get(parameter, {})
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        changes[parameter] = {name: tensor._version - old.get(name, 0) for name, tensor in tensors.items()}
    return changes


def _torn(message: str) -> TornUpdateError:
    first_line = message.strip().partition("\n")[0][:200] or "without a message"
    return TornUpdateError(
        rule="An update must change all weights or none",
        got=f"memory ran out in the middle of it ({first_line})",
        advice="Go back to the last checkpoint, with a plan for a smaller budget.",
    )
