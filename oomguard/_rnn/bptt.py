"""Backpropagation through time: one microbatch, forward and backward, in one of four ways.

- plain: the whole sequence at once, as PyTorch users write it. It is one window as long as the sequence.
- segmented (exact): a first forward pass keeps only the states at the segments' borders; then each segment, from the
  last to the first, is recomputed with its graph and differentiated. With two levels, only the borders between groups
  of segments are kept, and those inside a group are recomputed. In a bidirectional model, each direction of each layer
  runs in segments of its own.
- chunked (exact): the segments keep their graphs and are not recomputed, which saves only workspace and logits.
- windowed (lossy): the gradient is cut at the start of every window.

Each adds `scale x sum of the losses over real steps and sequences` to the gradients and returns that sum, detached. The
loss is computed piece by piece, so the logits of the whole sequence never exist (except in the plain pass).
"""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from oomguard._rnn.model import Recurrent, State, trainable, turned
from oomguard._rnn.run import Mark, Microbatch, Run, without_graph
from oomguard._rnn.seed import Ends, seed
from oomguard._spec.candidate import Candidate


def backward(model: Recurrent, batch: Microbatch, candidate: Candidate, scale: float | Tensor = 1.0) -> Tensor:
    """Add the gradients of one microbatch, run as the candidate says, and return its summed loss."""
    run = Run(model, batch, candidate, scale)
    with run.rng.continuing():
        if candidate.window is not None or run.pieces == 1:
            _windowed(run)
        elif model.spec.bidirectional:
            _by_layer(run)
        elif candidate.recompute:
            _segmented(run, range(run.pieces), None, [], candidate.levels)
        else:
            _chunked(run)
    return run.total


def _windowed(run: Run) -> None:
    """Run in windows: each starts from the state of the one before, without its graph."""
    state: State | None = None
    for i in range(run.pieces):
        predicts = run.model.spec.head == "per-step" or run.batch.lengths is not None or i == run.pieces - 1
        with run.computing(), nullcontext() if predicts else without_graph(run.model.calls):
            hidden, after = run.advance(i, state)
            loss = run.loss(i, hidden)
        state = [tuple(part.detach() for part in call) for call in after]
        del hidden, after  # the graph keeps what it needs
        run.differentiate(loss)
        del loss


def _chunked(run: Run) -> None:
    """Run in chunks that keep their graphs. Each chunk's head is differentiated at once, which frees its logits."""
    state: State | None = None
    ends: Ends = []
    for i in range(run.pieces):
        with run.computing():
            hidden, state = run.advance(i, state)
            cut = hidden.detach().requires_grad_(hidden.requires_grad)
            loss = run.loss(i, cut)
        run.differentiate(loss)
        if cut.grad is not None:
            ends.append((hidden, cut.grad))
        del hidden, cut, loss
    del state
    _start_from(ends)


def _start_from(ends: Ends) -> None:
    if ends:
        torch.autograd.backward(seed(ends))


def _segmented(
    run: Run, pieces: range, before: State | None, after_gradients: list[Tensor | None], levels: int
) -> list[Tensor | None]:
    """Differentiate some pieces. Takes the gradient of the state after them, returns that of the state before them.

    With one level, the states at all borders are kept. With more, the pieces go in groups, and only the states at the
    borders of groups are kept: about `pieces ** (1 / levels)` of them, and as many again within one group.
    """
    if len(pieces) == 1:
        return _differentiate_piece(partial(_piece_ends, run, pieces[0]), before, after_gradients)
    size = math.ceil(len(pieces) ** (1 - 1 / levels)) if levels > 1 else 1
    groups = [pieces[first : first + size] for first in range(0, len(pieces), size)]
    borders, state = [(before, run.rng.read())], before
    with without_graph(run.model.calls):
        for group in groups[:-1]:
            for i in group:
                with run.computing():
                    state = run.advance(i, state)[1]
            borders.append((_moved(state, run.home), run.rng.read()))
    del state, before
    for group in reversed(groups):
        border, mark = borders.pop()
        run.rng.restore(mark)
        after_gradients = _segmented(run, group, _moved(border, run.model.device), after_gradients, max(1, levels - 1))
    return after_gradients


def _piece_ends(run: Run, i: int, state: State | None) -> tuple[Ends, State]:
    """Run piece `i` of the whole model with its graph; return where backward starts, and the state after the piece."""
    with run.computing():
        hidden, after = run.advance(i, state)
        loss = run.loss(i, hidden)
    if i == run.pieces - 1:
        run.rng.end = run.rng.read()
    if loss is None:
        return [], after
    run.total.add_(loss.detach())
    return [(loss * run.scale, torch.ones_like(loss))] if loss.requires_grad else [], after


def _differentiate_piece(
    run_piece: Callable[[State | None], tuple[Ends, State]],
    before: State | None,
    after_gradients: list[Tensor | None],
) -> list[Tensor | None]:
    """Recompute one piece from the state before it, and differentiate it. Returns the gradient of that state."""
    leaves = None if before is None else [tuple(part.detach().requires_grad_() for part in call) for call in before]
    ends, after = run_piece(leaves)
    pairs = zip(_flat(after), after_gradients)  # noqa: B905 (the last piece's state has no gradients)
    ends += [(end, gradient) for end, gradient in pairs if end.requires_grad and gradient is not None]
    del after
    _start_from(ends)
    del ends  # free the graph of this piece before the next one is built
    return [part.grad for part in _flat(leaves)]


def _flat(state: State | None) -> list[Tensor]:
    return [] if state is None else [part for call in state for part in call]


def _moved(state: State | None, device: torch.device) -> State | None:
    return None if state is None else [tuple(part.to(device) for part in call) for call in state]


@dataclass(slots=True)
class _Layer:
    """A layer of a bidirectional model. It reads the whole outputs below; each direction runs piece by piece."""

    run: Run
    index: int
    below: Tensor | None  # outputs of the layer below; None below the first layer
    borders: dict[tuple[int, int], State | None] = field(default_factory=dict)  # by direction and piece
    marks: dict[int, Mark] = field(default_factory=dict)
    """The random generator's state before a piece: both directions use the same masks."""

    def advance(self, direction: int, i: int, state: State | None, below: Tensor | None) -> tuple[Tensor, State]:
        """Return one direction's outputs for piece `i` and the state after it, from that piece of the outputs below."""
        run, model, lengths = self.run, self.run.model, self.run.lengths(i)
        run.rng.restore(self.marks.setdefault(i, run.rng.read()))
        with run.computing():
            if below is None:
                entering = model.enter(run.inputs(i))
            else:
                entering = model.dropout(model.normalise(self.index - 1, below))
            entering = turned(entering, lengths, model.time_dim) if direction else entering
            call = model.direction(self.index, direction)
            before = None if state is None else state[0]
            outputs, after = model.run(call, entering, before, lengths, ends=direction == 1)
            return turned(outputs, lengths, model.time_dim) if direction else outputs, [after]

    def piece_below(self, i: int) -> Tensor | None:
        return None if self.below is None else self.run.cut(self.below, i).detach()

    def ends(
        self, direction: int, i: int, leaf: Tensor | None, gradients: Tensor, state: State | None
    ) -> tuple[Ends, State]:
        """Run piece `i` of one direction with its graph; return where backward starts, and the state after the piece.

        `leaf` is that piece of the outputs below, `gradients` those of all outputs of this layer.
        """
        outputs, after = self.advance(direction, i, state, leaf)
        gradient = self.run.cut(gradients, i).chunk(2, -1)[direction]
        return [(outputs, gradient.to(outputs.dtype))] if outputs.requires_grad else [], after


def _by_layer(run: Run) -> None:
    """Run a bidirectional model layer by layer, since each direction reads the outputs of both directions below it."""
    with warnings.catch_warnings():
        # cuDNN wants the weights of a call side by side; one direction's are not, and are copied for each call
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        layers: list[_Layer] = []
        outputs: Tensor | None = None
        for index in range(run.model.spec.layers):
            layers.append(_Layer(run, index, outputs))
            outputs = _layer_forward(layers[-1])
        assert outputs is not None  # a model has a layer
        run.rng.end = run.rng.read()
        gradients = _loss_backward(run, outputs)
        del outputs  # its memory holds the gradients now
        while layers and _trains_up_to(run.model, layers[-1].index):
            # a layer that is popped frees the outputs that it read
            gradients = _layer_backward(layers.pop(), gradients)


def _layer_forward(layer: _Layer) -> Tensor:
    """Return the whole outputs of a layer, and keep the states at its borders."""
    run, whole = layer.run, None
    for direction in (0, 1):
        state: State | None = None
        for i in _order(run, direction):
            layer.borders[direction, i] = _moved(state, run.home)
            with torch.no_grad():
                piece, state = layer.advance(direction, i, state, layer.piece_below(i))
            if whole is None:
                shape = (*run.batch.inputs.shape[:2], run.model.spec.width)
                whole = torch.empty(shape, dtype=piece.dtype, device=run.home)
            run.narrow(whole, i).chunk(2, -1)[direction].copy_(piece)
        if direction == 0:
            front = run.rng.read()
    run.rng.restore(front)  # the second direction repeated the first one's masks: the next layer continues from here
    assert whole is not None  # a sequence has a step
    return whole


def _loss_backward(run: Run, outputs: Tensor) -> Tensor:
    """Run head and loss piece by piece. The gradients overwrite the outputs, which are no longer needed."""
    for i in range(run.pieces):
        leaf = run.cut(outputs, i).detach().requires_grad_()
        with run.computing():
            loss = run.loss(i, run.model.normalise(run.model.spec.layers - 1, leaf))
        run.differentiate(loss)
        piece = run.narrow(outputs, i)
        piece.zero_() if leaf.grad is None else piece.copy_(leaf.grad)
        del leaf, loss
    return outputs


def _layer_backward(layer: _Layer, gradients: Tensor) -> Tensor:
    """Differentiate one layer. Takes the gradients of its outputs, returns those of the outputs below it."""
    run, below_gradients = layer.run, None if layer.below is None else torch.zeros_like(layer.below)
    for direction in (0, 1):
        after_gradients: list[Tensor | None] = []
        for i in reversed(_order(run, direction)):
            border = _moved(layer.borders.pop((direction, i)), run.model.device)
            leaf = layer.piece_below(i)
            leaf = None if leaf is None else leaf.requires_grad_()
            run_piece = partial(layer.ends, direction, i, leaf, gradients)
            after_gradients = _differentiate_piece(run_piece, border, after_gradients)
            if leaf is not None and leaf.grad is not None and below_gradients is not None:
                run.narrow(below_gradients, i).add_(leaf.grad.to(run.home))
            del leaf, run_piece  # free them before the next piece is run
    return gradients if below_gradients is None else below_gradients


def _order(run: Run, direction: int) -> range:
    return range(run.pieces)[:: -1 if direction else 1]


def _trains_up_to(model: Recurrent, layer: int) -> bool:
    parts = [model.part(f"layer{i}") if len(model.calls) > 1 else model.calls for i in range(layer + 1)]
    parts += [model.norms[i] for i in range(min(layer, len(model.norms)))]
    parts += [] if model.embedding is None else [model.embedding]
    return any(trainable(part) for part in parts)
