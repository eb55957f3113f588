"""Recomputation: the one way in which pieces of a sequence are computed again in the backward pass.

The built-in model (bptt.py), single recurrent calls (calls.py) and loops of any kind (scan.py) say what one of their
pieces is; `Pieces` does the rest. A first pass without a graph keeps only the states at borders. Then each piece, from
the last to the first, runs again with its graph and is differentiated, which frees its graph before the next one is
built. With several levels, only the borders between groups of pieces are kept; those inside a group are recomputed.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain, islice
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oomguard._core.errors import MisuseError
from oomguard._rnn.rng import Restore, remember

Tensors = list[Tensor]
Gradients = list[Tensor | None]
Ends = list[tuple[Tensor, Tensor]]  # tensors that a backward pass starts from, each with its gradient


class _Seed(torch.autograd.Function):
    """A number whose backward pass hands given gradients to given tensors.

    If it is given gradients, torch.autograd imports sympy (35 MiB and 2 s, torch 2.13). For one number it needs none.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Tensors, *ends: Tensor) -> Tensor:
        ctx.gradients = gradients
        return ends[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, []  # let go of them as soon as they are used
        return None, *gradients


def _seed(ends: Ends) -> Tensor:
    """Return a number whose backward pass starts from tensors with their gradients."""
    apply: Callable[..., Tensor] = _Seed.apply
    return apply([gradient.to(end.dtype) for end, gradient in ends], *(end for end, _ in ends))


def accumulate(starts: Tensors, ends: Ends) -> Gradients:
    """Add the gradients of all leaves to their `grad`, one by one; return those of some leaves."""
    if ends:
        torch.autograd.backward(_seed(ends))
    return [start.grad for start in starts]


def gradients_of(starts: Tensors, ends: Ends) -> Gradients:
    """Return the gradients of tensors, and change no `grad`; None for tensors that need none or have none."""
    wanted = [tensor for tensor in starts if tensor.requires_grad]
    if not wanted or not ends:
        return [None for _ in starts]
    found = iter(torch.autograd.grad(_seed(ends), wanted, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in starts]


class Clock:
    """Seconds in which pieces were computed again in this process. On a card: those in which they were issued."""

    seconds = 0.0


spent = Clock()


class Border(NamedTuple):
    """What is kept to compute a group of pieces again."""

    pieces: range
    state: Tensors  # before the first piece
    restore: Restore  # sets the random numbers back to those before the first piece


class Pieces(ABC):
    """Pieces that follow one another, each of which starts from the state after the one before."""

    device: torch.device | None = None  # where pieces run
    home: torch.device | None = None  # where the states at borders wait; None: where they are
    inputs: Sequence[Tensor] = ()  # tensors of all steps that pieces read beside the state
    of_inputs: Sequence[Tensor | None] = ()  # their gradients, which the backward pass adds up; None: not wanted
    others: Sequence[Tensor] = ()  # leaves whose gradients `add` gets too

    @abstractmethod
    def call(self, i: int, state: Tensors, given: Tensors) -> tuple[Tensors, Tensors]:
        """Run piece `i`, with a graph if one is recorded; return the state after it and its outputs.

        `given` is piece `i` of the inputs.
        """

    @abstractmethod
    def of_outputs(self, i: int, outputs: Tensors) -> Gradients:
        """Return the gradients of the outputs of piece `i`."""

    def read(self, whole: Tensor, i: int) -> Tensor:
        """Return piece `i` of a tensor of all steps."""
        raise NotImplementedError

    def write(self, whole: Tensor, i: int, values: Tensor) -> None:
        """Add values to piece `i` of a tensor of all steps."""
        raise NotImplementedError

    def take(self, outputs: Tensors, i: int) -> None:
        """Store the outputs of piece `i` in the first pass."""
        assert not outputs

    def add(self, gradients: Gradients, i: int) -> None:
        """Add up the gradients of what piece `i` read, and of `others`."""
        for total, gradient in zip(self.of_inputs, gradients, strict=True):
            if total is not None and gradient is not None:
                self.write(total, i, gradient)

    def remember(self) -> Restore:
        """Return a function that sets the random numbers that pieces draw back to the present ones."""
        return remember()

    def without_graph(self) -> AbstractContextManager[None]:
        """Return the context of passes that record no graph."""
        return torch.no_grad()

    def gradients_of(self, starts: Tensors, ends: Ends) -> Gradients:
        """Differentiate a piece. All leaves get their `grad`, unless a subclass says otherwise."""
        return accumulate(starts, ends)

    def keep(self, pieces: range, state: Tensors, levels: int = 1, *, whole: bool = False) -> list[Border]:
        """Run pieces without a graph, and return the borders of groups of them.

        With one level, a group is one piece. With more, about `len(pieces) ** (1 / levels)` borders are kept, and as
        many again within one group. `whole`: take the outputs of all pieces. Otherwise, the last group does not run.
        """
        size, borders = math.ceil(len(pieces) ** (1 - 1 / levels)), list[Border]()
        with self.without_graph():
            for group in (pieces[first : first + size] for first in range(0, len(pieces), size)):
                borders.append(Border(group, [part.to(self.home) for part in state], self.remember()))
                for i in group if whole or group[-1] != pieces[-1] else ():
                    state, outputs = self.call(i, state, self._given(i))
                    if whole:
                        self.take(outputs, i)
                    del outputs  # before the next piece makes its own
        return borders

    def differentiate(self, borders: list[Border], of_after: Gradients, levels: int = 1) -> Gradients:
        """Compute pieces again and differentiate them, from the gradient of the state after all of them.

        Returns the gradient of the state before them. Uses up the borders.
        """
        while borders:
            pieces, kept, restore = borders.pop()
            state = [part.to(self.device) for part in kept]
            restore()
            if len(pieces) == 1:
                of_after = self._differentiate_piece(pieces[0], state, of_after)
                del state
            else:
                inner = self.keep(pieces, state, levels - 1)
                del state
                of_after = self.differentiate(inner, of_after, levels - 1)
        return of_after

    def _differentiate_piece(self, i: int, before: Tensors, of_after: Gradients) -> Gradients:
        leaves = [part.detach().requires_grad_(part.is_floating_point()) for part in before]
        given = self._given(i)
        began = perf_counter()
        after, outputs = self.call(i, leaves, given)
        spent.seconds += perf_counter() - began
        # the state after the last piece may have no gradients
        pairs = [*zip(outputs, self.of_outputs(i, outputs), strict=True), *zip(after, of_after, strict=False)]
        ends = [(end, gradient) for end, gradient in pairs if end.requires_grad and gradient is not None]
        del after, outputs, pairs
        found = self.gradients_of([*leaves, *given, *self.others], ends)
        del ends  # free the graph of this piece before the next one is built
        self.add(found[len(leaves) :], i)
        return found[: len(leaves)]

    def _given(self, i: int) -> Tensors:
        """Return piece `i` of the inputs, as leaves of its graph."""
        read = [self.read(whole, i).detach() for whole in self.inputs]
        return [part.requires_grad_(total is not None) for part, total in zip(read, self.of_inputs, strict=True)]


Again = Callable[[list[list[Border]], Gradients, Sequence[bool], Tensors], Gradients]
"""Gets borders, the gradients of results, which tensors need a gradient, and the tensors; returns their gradients."""


def recomputed(again: Again, results: Tensors, borders: list[list[Border]], tensors: Tensors) -> Tensors:
    """Make results those of an autograd function of some tensors, whose backward pass calls `again`."""
    apply: Callable[..., tuple[Tensor, ...]] = _Recomputed.apply
    return [*apply(again, results, borders, *tensors)]


class _Recomputed(torch.autograd.Function):
    """Results of pieces that ran without a graph. They are recomputed in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, again: Again, results: Tensors, borders: list[list[Border]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        states, kind = [border.state for each in borders for border in each], tensors[0].device.type
        ctx.save_for_backward(*tensors, *chain(*states))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.borders = [[border._replace(state=[]) for border in each] for each in borders]
        ctx.again, ctx.sizes = again, [len(state) for state in states]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *of_results: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise MisuseError(
                rule="Gradients of what is recomputed cannot be differentiated again",
                got="the backward pass was called with create_graph=True",
                advice="Run this part of the model without segments.",
            )
        needs, saved, sizes = ctx.needs_input_grad[3:], iter(ctx.saved_tensors), iter(ctx.sizes)
        tensors = [*islice(saved, len(needs))]
        borders = [[b._replace(state=[*islice(saved, next(sizes))]) for b in each] for each in ctx.borders]
        with torch.enable_grad(), torch.autocast(*ctx.autocast):
            return None, None, None, *ctx.again(borders, [*of_results], needs, tensors)
