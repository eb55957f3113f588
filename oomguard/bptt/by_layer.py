"""Segments of a bidirectional model: each direction of each layer on its own, whole outputs between the layers."""

import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oomguard.bptt.run import Mark, Run
from oomguard.bptt.segments import differentiate_piece, moved
from oomguard.model import Recurrent, State, trainable, turned


@dataclass(slots=True)
class Layer:
    """One layer, which reads the whole outputs of the layer below. Either direction goes through it piece by piece."""

    run: Run
    index: int
    below: Tensor | None
    """Outputs of the layer below; None below the first layer."""
    borders: dict[tuple[int, int], State | None] = field(default_factory=dict)
    """The state before a piece, by direction and piece."""
    marks: dict[int, Mark] = field(default_factory=dict)
    """Where dropout's random numbers are before a piece: both directions read the same."""

    def advance(self, direction: int, i: int, state: State | None, below: Tensor | None) -> tuple[Tensor, State]:
        """Outputs of one direction for piece `i`, and the state after it, given that piece of the outputs below."""
        run, model, lengths = self.run, self.run.model, self.run.lengths(i)
        if i in self.marks:
            run.dice.back_to(self.marks[i])
        else:
            self.marks[i] = run.dice.mark()
        with run.computing():
            if below is None:
                entering = model.enter(run.inputs(i))
            else:
                entering = model.dropout(model.normalise(self.index - 1, below))
            entering = turned(entering, lengths, model.time_dim) if direction else entering
            call = model.direction(self.index, direction)
            outputs, after = model.run(
                call, entering, None if state is None else state[0], lengths, ends=direction == 1
            )
            return turned(outputs, lengths, model.time_dim) if direction else outputs, [after]

    def piece_below(self, i: int) -> Tensor | None:
        """Piece `i` of the outputs below."""
        return None if self.below is None else self.run.cut(self.below, i).detach()


@dataclass(slots=True)
class Direction:
    """One direction of a layer on the way back."""

    layer: Layer
    direction: int
    gradients: Tensor
    """Of the layer's outputs."""
    below_gradients: Tensor | None
    """Of the outputs below: filled as pieces are done; None below the first layer."""
    leaf: Tensor | None = None

    def ends(self, i: int, state: State | None) -> tuple[list[tuple[Tensor, Tensor]], State]:
        self.leaf = self.layer.piece_below(i)
        if self.leaf is not None:
            self.leaf.requires_grad_()
        outputs, after = self.layer.advance(self.direction, i, state, self.leaf)
        width = outputs.shape[-1]
        gradient = self.layer.run.cut(self.gradients, i)[..., self.direction * width :][..., :width]
        return [(outputs, gradient.to(outputs.dtype))] if outputs.requires_grad else [], after

    def done(self, i: int) -> None:
        run = self.layer.run
        if self.leaf is not None and self.leaf.grad is not None and self.below_gradients is not None:
            self.below_gradients.narrow(run.model.time_dim, *run.span(i)).add_(self.leaf.grad.to(run.home))
        self.leaf = None


def by_layer(run: Run) -> None:
    """A bidirectional model: layer by layer, since each direction reads all that both directions below it gave."""
    with warnings.catch_warnings():
        # cuDNN wants the weights of a call side by side; one direction's are not, and are copied for each call
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        layers, outputs = _all_forward(run)
        gradients = _loss_backward(run, outputs)
        del outputs  # its memory holds the gradients now
        while layers and _trains_up_to(run.model, layers[-1].index):
            # nothing holds on to a layer that is popped: what it read goes with it
            gradients = _layer_backward(layers.pop(), gradients)


def _all_forward(run: Run) -> tuple[list[Layer], Tensor]:
    """All layers with what they read and the states at their borders, and the outputs of the last one."""
    layers: list[Layer] = []
    outputs: Tensor | None = None
    for index in range(run.model.spec.layers):
        layers.append(Layer(run, index, outputs))
        outputs = _layer_forward(layers[-1])
    assert outputs is not None  # a model has a layer
    run.dice.end()
    return layers, outputs


def _layer_forward(layer: Layer) -> Tensor:
    """The whole outputs of a layer; the states at the borders are kept."""
    run, whole = layer.run, None
    for direction in (0, 1):
        state: State | None = None
        for i in _order(run, direction):
            layer.borders[direction, i] = moved(state, run.home)
            with torch.no_grad():
                piece, state = layer.advance(direction, i, state, layer.piece_below(i))
            if whole is None:
                shape = (*run.batch.inputs.shape[:2], run.model.spec.width)
                whole = torch.empty(shape, dtype=piece.dtype, device=run.home)
            width = piece.shape[-1]
            whole.narrow(run.model.time_dim, *run.span(i))[..., direction * width :][..., :width].copy_(piece)
        if direction == 0:
            front = run.dice.mark()
    run.dice.back_to(front)  # the second direction read what the first had dropped out: the next layer goes on
    assert whole is not None  # a sequence has a step
    return whole


def _loss_backward(run: Run, outputs: Tensor) -> Tensor:
    """Head and loss piece by piece. What was an output is not needed any more: its gradient takes its place."""
    for i in range(run.pieces):
        leaf = run.cut(outputs, i).detach().requires_grad_()
        with run.computing():
            loss = run.loss(i, run.model.normalise(run.model.spec.layers - 1, leaf))
        run.differentiate(loss)
        piece = outputs.narrow(run.model.time_dim, *run.span(i))
        piece.zero_() if leaf.grad is None else piece.copy_(leaf.grad)
        del leaf, loss
    return outputs


def _layer_backward(layer: Layer, gradients: Tensor) -> Tensor:
    """Differentiate one layer, given the gradients of its outputs; returns those of the outputs below it."""
    below_gradients = None if layer.below is None else torch.zeros_like(layer.below)
    for direction in (0, 1):
        track = Direction(layer, direction, gradients, below_gradients)
        after_gradients: list[Tensor | None] = []
        for i in reversed(_order(layer.run, direction)):
            border = moved(layer.borders.pop((direction, i)), layer.run.model.device)
            after_gradients = differentiate_piece(track, i, border, after_gradients)
    return gradients if below_gradients is None else below_gradients


def _order(run: Run, direction: int) -> range:
    """The pieces in the order in which a direction goes through them."""
    return range(run.pieces) if direction == 0 else range(run.pieces - 1, -1, -1)


def _trains_up_to(model: Recurrent, layer: int) -> bool:
    """Whether anything is trained in this layer or below."""
    parts = [model.part(f"layer{i}") if len(model.calls) > 1 else model.calls for i in range(layer + 1)]
    parts += [model.norms[i] for i in range(min(layer, len(model.norms)))]
    parts += [] if model.embedding is None else [model.embedding]
    return any(trainable(part) for part in parts)
