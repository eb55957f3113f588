"""Backpropagation through time: one microbatch, forward and backward, in one of three ways.

- plain: the whole sequence at once, as PyTorch users write it.
- segmented (exact): forward once keeping only the states at the segments' borders; then, from the last segment to the
  first, each is recomputed with its graph and differentiated. The loss is computed inside the segment, so the logits
  of the whole sequence never exist.
- windowed (lossy): the gradient is cut at every window's start.

All add `scale x sum of the losses over steps and sequences` to the gradients and return that sum, detached.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from oomguard.candidate import Candidate
from oomguard.errors import MisuseError
from oomguard.model import Recurrent, State


def backward(model: Recurrent, inputs: Tensor, targets: Tensor, candidate: Candidate, scale: float = 1.0) -> Tensor:
    """One microbatch's loss and gradients, the way the candidate says."""
    if model.spec.bidirectional and (candidate.window is not None or candidate.segments > 1):
        raise MisuseError(
            rule="The second direction of a bidirectional model must see the whole sequence",
            got=f"got segments {candidate.segments} and window {candidate.window}",
            advice="Take segments 1, or a model of one direction.",
        )
    if candidate.segments > 1 and not candidate.recompute:
        raise MisuseError(
            rule="Segments are recomputed in the backward pass",
            got="got recompute false, which can only be estimated",
            advice="Leave --no-recompute out.",
        )
    if candidate.window is not None:
        return _windowed(model, inputs, targets, candidate.window, scale)
    if candidate.segments > 1:
        length = -(-inputs.shape[model.time_dim] // candidate.segments)
        return _segmented(model, inputs, targets, length, scale)
    outputs, _ = model(inputs, None)
    loss = summed_loss(model.spec.loss, outputs, targets)
    del outputs  # the graph keeps what it needs; a second reference would keep the logits through the backward pass
    (loss * scale).backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def summed_loss(kind: str | None, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss, summed over steps and sequences."""
    if kind == "cross-entropy":
        return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum")
    return functional.mse_loss(outputs, targets, reduction="sum")


def _pieces(model: Recurrent, inputs: Tensor, targets: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Inputs and targets piece by piece; with a last-step head only the last piece has targets."""
    starts = range(0, inputs.shape[model.time_dim], length)
    per_step = model.spec.head == "per-step"
    for start, piece in zip(starts, torch.split(inputs, length, dim=model.time_dim), strict=True):
        if per_step:
            yield piece, targets.narrow(model.time_dim, start, piece.shape[model.time_dim])
        else:
            yield piece, targets if start == starts[-1] else None


def _segmented(model: Recurrent, inputs: Tensor, targets: Tensor, length: int, scale: float) -> Tensor:
    pieces = list(_pieces(model, inputs, targets, length))
    borders: list[State | None] = [None]
    rng_states = [torch.get_rng_state()]  # dropout has to fall the same way when a segment is recomputed
    with torch.no_grad(), _keeping_nothing(model):
        for piece, _ in pieces[:-1]:
            borders.append(model.advance(piece, borders[-1])[1])
            rng_states.append(torch.get_rng_state())
    total = torch.zeros((), device=inputs.device, dtype=_dtype(model))
    after_grads: list[Tensor | None] = []  # the last segment's end state goes nowhere
    for piece, piece_targets in reversed(pieces):
        before = _leaves(borders.pop())
        torch.set_rng_state(rng_states.pop())
        loss, ends = _ends(model, piece, piece_targets, before)
        if not after_grads:
            rng_end = torch.get_rng_state()  # what a plain pass would leave, so that the next one drops out anew
        seeds = [(end, grad) for end, grad in zip(ends, after_grads) if end.requires_grad and grad is not None]  # noqa: B905
        if loss is not None:
            seeds.append((loss * scale, torch.ones_like(loss)))
            total += loss.detach()
        if seeds:  # with every layer frozen and one loss at the end, earlier segments have none
            torch.autograd.backward([end for end, _ in seeds], [grad for _, grad in seeds])
        after_grads = [part.grad for part in _flat(before)]
        del loss, ends, seeds  # the graph of this segment goes before the next one comes
    torch.set_rng_state(rng_end)
    return total


def _windowed(model: Recurrent, inputs: Tensor, targets: Tensor, window: int, scale: float) -> Tensor:
    before: State | None = None
    total = torch.zeros((), device=inputs.device, dtype=_dtype(model))
    for piece, piece_targets in _pieces(model, inputs, targets, window):
        if piece_targets is None:
            with torch.no_grad(), _keeping_nothing(model):
                before = model.advance(piece, before)[1]
            continue
        outputs, after = model(piece, before)
        loss = summed_loss(model.spec.loss, outputs, piece_targets)
        before = [tuple(part.detach() for part in call) for call in after]
        del outputs, after
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def _ends(
    model: Recurrent, piece: Tensor, targets: Tensor | None, before: State | None
) -> tuple[Tensor | None, list[Tensor]]:
    """What the backward pass of one segment starts from: its loss, if it has targets, and the state at its end."""
    if targets is None:
        return None, _flat(model.advance(piece, before)[1])
    outputs, after = model(piece, before)
    return summed_loss(model.spec.loss, outputs, targets), _flat(after)


def _dtype(model: Recurrent) -> torch.dtype:
    return model.head.weight.dtype


def _flat(state: State | None) -> list[Tensor]:
    return [] if state is None else [part for call in state for part in call]


def _leaves(state: State | None) -> State | None:
    """The state as a new start of the graph, so that its gradient can be handed to the segment before."""
    return None if state is None else [tuple(part.detach().requires_grad_() for part in call) for call in state]


@contextmanager
def _keeping_nothing(model: Recurrent) -> Iterator[None]:
    """Recurrent kernels in evaluation mode: in training mode they fill their reserve even without a graph."""
    model.calls.train(False)
    try:
        yield
    finally:
        model.calls.train(model.training)
