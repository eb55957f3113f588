"""An optimizer's update that may run out of memory halfway, and what is done so that no weight is updated twice.

An update touches weights and states in place, and PyTorch's optimizers allocate in between. So:

1. What it will allocate is allocated and given back first. If memory is short, that fails, and nothing was touched.
2. If the update itself fails, the counters that PyTorch keeps of in-place changes (`Tensor._version`) tell which
   parameters are done (they changed as in a whole update) and which are untouched. Those are updated one by one, each
   with a copy of itself to go back to.
3. A parameter that is neither (its state is new, its weights are old) cannot be told apart from a sound one any more:
   `TornUpdateError`. The trainer then goes back to its last checkpoint, and from there updates weight by weight.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oomguard.errors import TornUpdateError
from oomguard.probe.verdict import Verdict, judge

Versions = dict[str, int]
"""In-place changes of a parameter (under the empty name) and of the tensors of its state."""


class Updates:
    """Runs updates, and makes good those that fail for want of memory. `release` gives back what is free."""

    def __init__(self, release: Callable[[], None]) -> None:
        self.release = release
        self.careful = False
        """Update weight by weight from the start: slower, but never torn unless not even one weight fits twice."""
        self._whole: dict[Tensor, Versions] = {}
        """What the last update that succeeded changed, by parameter."""

    def run(self, optimizer: Optimizer, step: Callable[[], None] | None = None) -> str | None:
        """The update, once and whole. Returns what went wrong on the way, if anything did.

        `step` is called instead of the optimizer's own.
        """
        before, failure = _versions(optimizer), None
        if not self.careful:
            failure = _failure(lambda: _rehearse(optimizer)) or _failure(step or optimizer.step)
            if failure is None:
                self._whole = _changes(optimizer, before)
                return None
            self.release()  # here, not where it was caught: there the traceback still held the tensors
        for parameter, gradient in self._left(optimizer, before, failure):
            self._one(optimizer, parameter, gradient)
        return failure

    def _left(
        self, optimizer: Optimizer, before: dict[Tensor, Versions], why: str | None
    ) -> list[tuple[Tensor, Tensor]]:
        """The parameters still to be updated, with their gradients, which are taken off them."""
        changes, left = _changes(optimizer, before), []
        for parameter in _active(optimizer):
            touched, old = changes[parameter], before[parameter]
            if not any(touched.get(name) for name in old):
                if len(old) == 1:  # what the failed update made for it may be half of what it needs
                    optimizer.state.pop(parameter, None)
                left.append(parameter)
            elif touched != self._whole.get(parameter):
                raise _torn(why or "")
        gradients = [(parameter, parameter.grad) for parameter in left]
        for parameter in _active(optimizer):
            parameter.grad = None
        return [(parameter, gradient) for parameter, gradient in gradients if gradient is not None]

    def _one(self, optimizer: Optimizer, parameter: Tensor, gradient: Tensor) -> None:
        """Update one parameter; its gradient goes with it."""
        saved: list[Any] = []

        def update() -> None:
            state = optimizer.state.get(parameter, {})
            saved[:] = [parameter.detach().clone(), {k: _copy(v) for k, v in state.items()}]
            parameter.grad = gradient
            optimizer.step()

        failure = _failure(update)
        parameter.grad = None
        if failure is not None:
            if len(saved) == 2:
                with torch.no_grad():
                    parameter.copy_(saved[0])
                optimizer.state[parameter] = saved[1]
            raise _torn(failure)


def _failure(run: Callable[[], Any]) -> str | None:
    """What an out-of-memory error said; None if there was none. Other errors are not ours."""
    try:
        run()
    except Exception as error:
        if judge(error) is not Verdict.OOM:
            raise
        return str(error)
    return None


def _rehearse(optimizer: Optimizer) -> None:
    """Allocate what the update will, all at once or for the largest parameter, and give it back."""
    dense = [p for p in _active(optimizer) if p.grad is not None and not p.grad.is_sparse]
    group = optimizer.param_groups[0]
    if group.get("fused") or not dense:
        return
    if not group.get("foreach"):
        dense = [max(dense, key=lambda p: p.numel())]
    del [torch.empty_like(p) for p in dense][:]


def _active(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _versions(optimizer: Optimizer) -> dict[Tensor, Versions]:
    found = {}
    for parameter in _active(optimizer):
        state = optimizer.state.get(parameter, {})
        kept = {name: value._version for name, value in state.items() if isinstance(value, Tensor)}
        found[parameter] = {"": parameter._version} | kept
    return found


def _changes(optimizer: Optimizer, before: dict[Tensor, Versions]) -> dict[Tensor, Versions]:
    """By how much the counters went up; of what is new, from 0."""
    now = _versions(optimizer)
    return {p: {name: count - before[p].get(name, 0) for name, count in one.items()} for p, one in now.items()}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _torn(why: str) -> TornUpdateError:
    return TornUpdateError(
        rule="An update of the weights must be done as a whole",
        got=f"memory ran out in the middle of it ({why.strip().splitlines()[0][:200] if why.strip() else 'no reason'})",
        advice="Go back to the last checkpoint, with a plan for a smaller budget.",
    )
