"""Segments of a bidirectional model: each direction of each layer on its own, whole outputs between the layers."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from oomguard.bptt.run import Run
from oomguard.bptt.segments import differentiate_piece, moved
from oomguard.model import Recurrent, State, trainable


@dataclass(slots=True)
class Direction:
    """One direction of one layer of a bidirectional model: it reads the whole outputs of the layer below."""

    run: Run
    layer: int
    direction: int
    below: Tensor | None
    """Outputs of the layer below; None below the first layer."""
    gradients: Tensor
    """Of this layer's outputs."""
    below_gradients: Tensor
    """Of the outputs below, if there are any: filled as pieces are done."""
    leaf: Tensor | None = None

    def ends(self, i: int, state: State | None) -> tuple[list[tuple[Tensor, Tensor]], State]:
        outputs, after = self.advance(i, state)
        width = outputs.shape[-1]
        gradient = self.run.cut(self.gradients, i)[..., self.direction * width :][..., :width]
        return [(outputs, gradient.to(outputs.dtype))] if outputs.requires_grad else [], after

    def done(self, i: int) -> None:
        if self.leaf is not None and self.leaf.grad is not None:
            self.below_gradients.narrow(self.run.model.time_dim, *self.run.span(i)).add_(
                self.leaf.grad.to(self.run.home)
            )
        self.leaf = None

    def advance(self, i: int, state: State | None) -> tuple[Tensor, State]:
        """Outputs of piece `i`, and the state after it."""
        run, model, lengths = self.run, self.run.model, self.run.lengths(i)
        with run.computing(), run.dice.roll((self.layer, i)):
            if self.below is None:
                entering = model.enter(run.inputs(i))
            else:
                self.leaf = run.cut(self.below, i).detach().requires_grad_(torch.is_grad_enabled())
                entering = model.dropout(model.normalise(self.layer - 1, self.leaf))
            entering = _turned(entering, lengths, model.time_dim) if self.direction else entering
            call = model.direction(self.layer, self.direction)
            outputs, after = model.run(call, entering, None if state is None else state[0], lengths)
            return _turned(outputs, lengths, model.time_dim) if self.direction else outputs, [after]


def by_layer(run: Run) -> None:
    """A bidirectional model: layer by layer, since each direction reads all that both directions below it gave."""
    with warnings.catch_warnings():
        # cuDNN wants the weights of a call side by side; one direction's are not, and are copied for each call
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        _all_layers(run)


def _all_layers(run: Run) -> None:
    outputs, borders = _outputs_by_layer(run)
    gradients = outputs.pop()
    for i in range(run.pieces):
        leaf = run.cut(gradients, i).detach().requires_grad_()
        with run.computing():
            loss = run.loss(i, run.model.normalise(run.model.spec.layers - 1, leaf))
        run.differentiate(loss)
        # what was an output is not needed any more: its gradient takes its place
        piece = gradients.narrow(run.model.time_dim, *run.span(i))
        piece.zero_() if leaf.grad is None else piece.copy_(leaf.grad)
        del leaf, loss
    for layer in reversed(range(run.model.spec.layers)):
        if _trains_up_to(run.model, layer):
            # nothing here holds on to what is popped: it goes with the layer that read it
            gradients = _layer_backward(run, layer, outputs.pop() if outputs else None, gradients, borders)


Borders = dict[tuple[int, int, int], State | None]
"""The state before a piece, by layer, direction and piece."""


def _layer_backward(run: Run, layer: int, below: Tensor | None, gradients: Tensor, borders: Borders) -> Tensor:
    """Differentiate one layer, given the gradients of its outputs; returns those of the outputs below it."""
    below_gradients = torch.empty(0) if below is None else torch.zeros_like(below)
    for direction in (0, 1):
        track = Direction(run, layer, direction, below, gradients, below_gradients)
        after_gradients: list[Tensor | None] = []
        for i in reversed(_order(run, direction)):
            border = moved(borders.pop((layer, direction, i)), run.model.device)
            after_gradients = differentiate_piece(track, i, border, after_gradients)
    return below_gradients


def _outputs_by_layer(run: Run) -> tuple[list[Tensor], Borders]:
    """The whole outputs of every layer, and the states at all borders."""
    model, borders = run.model, Borders()
    outputs: list[Tensor] = []
    for layer in range(model.spec.layers):
        whole: Tensor | None = None
        below = outputs[-1] if outputs else None
        for direction in (0, 1):
            track = Direction(run, layer, direction, below, torch.empty(0), torch.empty(0))
            state: State | None = None
            for i in _order(run, direction):
                borders[layer, direction, i] = moved(state, run.home)
                with torch.no_grad():
                    piece, state = track.advance(i, state)
                if whole is None:
                    shape = (*run.batch.inputs.shape[:2], model.spec.width)
                    whole = torch.empty(shape, dtype=piece.dtype, device=run.home)
                width = piece.shape[-1]
                whole.narrow(model.time_dim, *run.span(i))[..., direction * width :][..., :width].copy_(piece)
        assert whole is not None  # a sequence has a step
        outputs.append(whole)
    return outputs, borders


def _order(run: Run, direction: int) -> range:
    """The pieces in the order in which a direction goes through them."""
    return range(run.pieces) if direction == 0 else range(run.pieces - 1, -1, -1)


def _trains_up_to(model: Recurrent, layer: int) -> bool:
    """Whether anything is trained in this layer or below."""
    parts = [model.part(f"layer{i}") if len(model.calls) > 1 else model.calls for i in range(layer + 1)]
    parts += [model.norms[i] for i in range(min(layer, len(model.norms)))]
    parts += [] if model.embedding is None else [model.embedding]
    return any(trainable(part) for part in parts)


def _turned(piece: Tensor, lengths: Tensor | None, time_dim: int) -> Tensor:
    """A piece with its real steps in reverse order; padding stays at the end."""
    if lengths is None:
        return piece.flip(time_dim)
    steps = torch.arange(piece.shape[time_dim])[:, None]
    index = torch.where(steps < lengths, lengths - 1 - steps, steps)
    index = (index.T if time_dim else index).to(piece.device).unsqueeze(-1)
    return piece.take_along_dim(index.expand_as(piece), time_dim)
