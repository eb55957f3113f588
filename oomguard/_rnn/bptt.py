"""Backpropagation through time: one microbatch, forward and backward, in one of four ways.

- plain: the whole sequence at once, as PyTorch users write it. It is one window as long as the sequence.
- segmented (exact): recompute.py runs the segments without a graph, and again from the last to the first. In a
  bidirectional model, each direction of each layer runs in segments of its own.
- chunked (exact): the segments keep their graphs and are not recomputed, which saves only workspace and logits.
- windowed (lossy): the gradient is cut at the start of every window.

Each adds `scale x sum of the losses over real steps and sequences` to the gradients and returns that sum, detached. The
loss is computed piece by piece, so the logits of the whole sequence never exist (except in the plain pass).

This code calls recompute.py without an autograd function around it: gradients go straight into `grad`, without a second
copy of all weight gradients, and the head and the last group of segments run once instead of twice. For the same
reason, a bidirectional model does not run through calls.py, which needs whole embeddings, norms and dropout masks.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from oomguard._rnn.model import Recurrent, State, trainable, turned
from oomguard._rnn.recompute import Border, Ends, Gradients, Pieces, Tensors, accumulate
from oomguard._rnn.rng import Restore
from oomguard._rnn.run import Microbatch, Run, without_graph
from oomguard._spec.candidate import Candidate


def backward(model: Recurrent, batch: Microbatch, candidate: Candidate, scale: float | Tensor = 1.0) -> Tensor:
    """Add the gradients of one microbatch, run as the candidate says, and return its summed loss."""
    run = Run(model, batch, candidate, scale)
    restore = run.remember()
    try:
        if candidate.window is not None or run.pieces == 1:
            _windowed(run)
        elif model.spec.bidirectional:
            _by_layer(run)
        elif candidate.recompute:
            _segmented(run)
        else:
            _chunked(run)
    except BaseException:
        restore()
        raise
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
    accumulate([], ends)


def _segmented(run: Run) -> None:
    """Run in segments: first without a graph, then again from the last to the first."""
    sequence = _Sequence(run)
    borders = sequence.keep(range(run.pieces), [], run.candidate.levels)
    sequence.differentiate(borders, [], run.candidate.levels)
    sequence.go_on()


class _Sequence(Pieces):
    """The pieces of a whole model in one direction. With a graph, their outputs are their losses."""

    def __init__(self, run: Run) -> None:
        self.run, self.device, self.home = run, run.model.device, run.home
        self.go_on: Restore = run.remember()
        """Sets random numbers to those after all pieces ran in order, as a plain pass leaves them."""

    def call(self, i: int, state: Tensors, given: Tensors) -> tuple[Tensors, Tensors]:
        run, each = self.run, len(state) // len(self.run.model.calls)
        with run.computing():
            before = [tuple(state[j : j + each]) for j in range(0, len(state), each)] if state else None
            hidden, calls = run.advance(i, before)
            after = [part for call in calls for part in call]
            if not torch.is_grad_enabled():
                return after, []
            loss = run.loss(i, hidden)
        if i == run.pieces - 1:
            self.go_on = run.remember()
        if loss is None:
            return after, []
        run.total.add_(loss.detach())
        return after, [loss * run.scale]

    def of_outputs(self, i: int, outputs: Tensors) -> Gradients:
        return [torch.ones_like(output) for output in outputs]

    def without_graph(self) -> AbstractContextManager[None]:
        return without_graph(self.run.model.calls)

    def remember(self) -> Restore:
        return self.run.remember()


class _Direction(Pieces):
    """The pieces of one direction of a layer, which reads the whole outputs of both directions below it."""

    def __init__(self, run: Run, layer: int, direction: int, below: Tensor | None, marks: dict[int, Restore]) -> None:
        self.run, self.device, self.home = run, run.model.device, run.home
        self.layer, self.direction = layer, direction
        self.inputs = [] if below is None else [below]  # outputs of the layer below
        self.of_inputs: Gradients = [None for _ in self.inputs]
        self.marks = marks  # set random numbers back to those before a piece: both directions use the same masks
        self.borders = list[Border]()
        self.whole: Tensor | None = None  # outputs of both directions of the layer, and later their gradients

    def call(self, i: int, state: Tensors, given: Tensors) -> tuple[Tensors, Tensors]:
        run, model, lengths = self.run, self.run.model, self.run.lengths(i)
        self.marks.setdefault(i, run.remember())()
        with run.computing():
            if given:
                entering = model.dropout(model.normalise(self.layer - 1, given[0]))
            else:
                entering = model.enter(run.inputs(i))
            entering = turned(entering, lengths, model.time_dim) if self.direction else entering
            call = model.direction(self.layer, self.direction)
            outputs, after = model.run(call, entering, tuple(state) or None, lengths, ends=self.direction == 1)
            return [*after], [turned(outputs, lengths, model.time_dim) if self.direction else outputs]

    def of_outputs(self, i: int, outputs: Tensors) -> Gradients:
        assert self.whole is not None
        return [self.read(self.whole.chunk(2, -1)[self.direction], i)]

    def take(self, outputs: Tensors, i: int) -> None:
        if self.whole is None:
            shape = (*self.run.batch.inputs.shape[:2], self.run.model.spec.width)
            self.whole = torch.empty(shape, dtype=outputs[0].dtype, device=self.home)
        self.run.narrow(self.whole, i).chunk(2, -1)[self.direction].copy_(outputs[0])

    def read(self, whole: Tensor, i: int) -> Tensor:
        return self.run.cut(whole, i)

    def write(self, whole: Tensor, i: int, values: Tensor) -> None:
        self.run.narrow(whole, i).add_(values.to(self.home))


def _by_layer(run: Run) -> None:
    """Run a bidirectional model layer by layer, since each direction reads the outputs of both directions below it."""
    with warnings.catch_warnings():
        # cuDNN wants the weights of a call side by side; one direction's are not, and are copied for each call
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        layers, outputs = list[list[_Direction]](), None
        for index in range(run.model.spec.layers):
            marks = dict[int, Restore]()
            layers.append([_Direction(run, index, direction, outputs, marks) for direction in (0, 1)])
            outputs = _layer_forward(layers[-1])
        assert outputs is not None  # a model has a layer
        go_on = run.remember()
        gradients = _loss_backward(run, outputs)
        del outputs  # its memory holds the gradients now
        while layers and _trains_up_to(run.model, layers[-1][0].layer):
            # a layer that is popped frees the outputs that it read
            gradients = _layer_backward(layers.pop(), gradients)
        go_on()


def _layer_forward(layer: list[_Direction]) -> Tensor:
    """Return the whole outputs of a layer, and keep the states at its borders."""
    (first, second), pieces = layer, range(layer[0].run.pieces)
    first.borders = first.keep(pieces, [], whole=True)
    go_on, second.whole = first.run.remember(), first.whole
    second.borders = second.keep(pieces[::-1], [], whole=True)
    go_on()  # the second direction repeated the first one's masks: the next layer continues from here
    outputs, first.whole, second.whole = first.whole, None, None
    assert outputs is not None  # a sequence has a step
    return outputs


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


def _layer_backward(layer: list[_Direction], gradients: Tensor) -> Tensor:
    """Differentiate one layer. Takes the gradients of its outputs, returns those of the outputs below it."""
    of_below = [torch.zeros_like(below) for below in layer[0].inputs]
    for direction in layer:
        direction.whole, direction.of_inputs = gradients, [*of_below]
        direction.differentiate(direction.borders, [])
    return of_below[0] if of_below else gradients


def _trains_up_to(model: Recurrent, layer: int) -> bool:
    parts = [model.part(f"layer{i}") if len(model.calls) > 1 else model.calls for i in range(layer + 1)]
    parts += [model.norms[i] for i in range(min(layer, len(model.norms)))]
    parts += [] if model.embedding is None else [model.embedding]
    return any(trainable(part) for part in parts)
