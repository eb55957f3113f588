"""Segments: keep the states at the borders, then recompute and differentiate each piece from the last to the first."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from oomguard.bptt.run import Run, keeping_nothing, start_from
from oomguard.model import State


class Track(Protocol):
    """Something recurrent that can be differentiated piece by piece."""

    def ends(self, i: int, state: State | None) -> tuple[list[tuple[Tensor, Tensor]], State]:
        """Run piece `i` with its graph: what backward starts from (tensors with gradients), and the state after it."""

    def done(self, i: int) -> None:
        """Piece `i` has been differentiated."""


@dataclass(slots=True)
class Stack:
    """The whole model, loss included."""

    run: Run

    def advance(self, i: int, state: State | None) -> State:
        """The state after piece `i`."""
        run = self.run
        with run.computing():
            return run.model.advance(run.inputs(i), state, run.lengths(i))[1]

    def ends(self, i: int, state: State | None) -> tuple[list[tuple[Tensor, Tensor]], State]:
        run = self.run
        with run.computing():
            hidden, after = run.model.advance(run.inputs(i), state, run.lengths(i))
            loss = run.loss(i, hidden)
        if i == run.pieces - 1:
            run.dice.end()
        if loss is None:
            return [], after
        run.total.add_(loss.detach())
        return [(loss * run.scale, torch.ones_like(loss))] if loss.requires_grad else [], after

    def done(self, i: int) -> None:
        pass


def descend(
    track: Stack, pieces: range, before: State | None, after_gradients: list[Tensor | None], levels: int
) -> list[Tensor | None]:
    """Differentiate some pieces, given the gradient of the state after them; returns that of the state before.

    With one level, the states at all borders are kept. With more, the pieces go in groups, and only the states at the
    borders of groups are kept: about `pieces ** (1 / levels)` of them, and as many again within one group.
    """
    if len(pieces) == 1:
        return differentiate_piece(track, pieces[0], before, after_gradients)
    size = math.ceil(len(pieces) ** (1 - 1 / levels)) if levels > 1 else 1
    groups = [pieces[first : first + size] for first in range(0, len(pieces), size)]
    dice = track.run.dice
    borders, state = [(before, dice.mark())], before
    with keeping_nothing(track.run.model):
        for group in groups[:-1]:
            for i in group:
                state = track.advance(i, state)
            borders.append((moved(state, track.run.home), dice.mark()))
    del state, before
    for group in reversed(groups):
        border, mark = borders.pop()
        dice.back_to(mark)
        after_gradients = descend(
            track, group, moved(border, track.run.model.device), after_gradients, max(1, levels - 1)
        )
    return after_gradients


def differentiate_piece(
    track: Track, i: int, before: State | None, after_gradients: list[Tensor | None]
) -> list[Tensor | None]:
    """Recompute and differentiate one piece."""
    leaves = None if before is None else [tuple(part.detach().requires_grad_() for part in call) for call in before]
    ends, after = track.ends(i, leaves)
    pairs = zip(_flat(after), after_gradients)  # noqa: B905 (the last piece's state goes nowhere: no gradients)
    ends += [(end, gradient) for end, gradient in pairs if end.requires_grad and gradient is not None]
    del after
    start_from(ends)
    del ends  # the graph of this piece goes before the next one comes
    track.done(i)
    return [part.grad for part in _flat(leaves)]


def _flat(state: State | None) -> list[Tensor]:
    return [] if state is None else [part for call in state for part in call]


def moved(state: State | None, device: torch.device) -> State | None:
    """The state on that device."""
    return None if state is None else [tuple(part.to(device) for part in call) for call in state]
