"""Exact recurrent calls: any call of torch.lstm, gru, rnn_tanh or rnn_relu, in segments or in chunks.

The layers of a call run in blocks: all layers of one direction together, or one layer of both directions, since each
direction reads the whole outputs of both directions below it. A block goes through the sequences piece by piece.

- In segments, only its input, the states at the borders of pieces and the dropout masks are kept. The backward pass
  recomputes each piece, from the last to the first.
- In chunks, autograd keeps what every piece needs, as in the plain call. Only the workspace of the kernel is smaller.

Dropout masks are drawn before the layers run, from the random numbers of a plain call on the CPU, so that a piece that
is recomputed uses the same ones. (In a plain call on a card, cuDNN draws its own.)
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from oomguard._rnn.pieces import Order, Piece, cut, reversed_tokens
from oomguard._rnn.recompute import Border, Gradients, Pieces, Tensors, recomputed

T = TypeVar("T")
Kernel = Callable[..., tuple[Tensor, ...]]
CELLS: dict[Kernel, str] = {torch.lstm: "lstm", torch.gru: "gru", torch.rnn_tanh: "rnn", torch.rnn_relu: "rnn"}
"""The functions that all recurrent layers of PyTorch call, with the cell that each runs."""
_REST = ("params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_PADDED = ("input", "hx", *_REST, "batch_first")
_PACKED = ("data", "batch_sizes", "hx", *_REST)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentCall:
    """The arguments of one call, in one form for all cells, padded or packed, whichever dimension comes first."""

    kernel: Kernel
    inputs: Tensor  # padded: steps x rows x features; packed: tokens x features
    sizes: tuple[int, ...]  # the number of sequences that are still running, at each step
    packed: bool
    batch_first: bool  # whether the caller's tensors are rows x steps x features
    states: tuple[Tensor, ...]  # the hidden state and, for LSTM, the cell state: (layers x directions) x rows x width
    weights: tuple[Tensor, ...]  # of every layer and direction, in PyTorch's order
    biases: bool
    layers: int
    directions: int
    dropout: float  # probability that an output between two layers is dropped; 0 outside of training

    @property
    def needs_gradient(self) -> bool:
        """Whether the call is part of a graph that can be differentiated."""
        wanted = any(tensor.requires_grad for tensor in (self.inputs, *self.states, *self.weights))
        return torch.is_grad_enabled() and wanted and not torch._C._are_functorch_transforms_active()


def read_call(kernel: Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> RecurrentCall:
    """Read the arguments of a call of one of `CELLS`."""
    packed = "batch_sizes" in kwargs or (
        len(args) > 1 and isinstance(args[1], Tensor) and not args[1].is_floating_point()
    )
    given = dict(zip(_PACKED if packed else _PADDED, args, strict=False)) | kwargs
    first = bool(given.get("batch_first"))
    inputs: Tensor = given["data"] if packed else given["input"]
    inputs = inputs.transpose(0, 1) if first else inputs
    return RecurrentCall(
        kernel=kernel,
        inputs=inputs,
        sizes=tuple(given["batch_sizes"].tolist()) if packed else (inputs.shape[1],) * inputs.shape[0],
        packed=packed,
        batch_first=first,
        states=(given["hx"],) if isinstance(given["hx"], Tensor) else tuple(given["hx"]),
        weights=tuple(given["params"]),
        biases=given["has_biases"],
        layers=given["num_layers"],
        directions=2 if given["bidirectional"] else 1,
        dropout=given["dropout"] if given["train"] and given["num_layers"] > 1 else 0.0,
    )


def run_in_pieces(call: RecurrentCall, segments: int, *, recompute: bool = True) -> tuple[Tensor, ...]:
    """Run a call in segments or, if nothing is to be recomputed, in chunks. Returns what the plain call returns."""
    with _alone(call.inputs.device):
        hidden, finals, masks = call.inputs, list[Sequence[Tensor]](), _masks(call)
        for block, states, weights in _blocks(call, segments):
            if block.both and finals and masks:
                hidden = (hidden * masks.pop(0)).mul_(block.scale)
            inside = [] if block.both else masks
            run = _in_segments if recompute else _in_chunks
            hidden, *after = run(block, len(states), len(inside), hidden, *states, *inside, *weights)
            finals.append(after)
        ends = [torch.cat(parts) if len(finals) > 1 else parts[0] for parts in zip(*finals, strict=True)]
        return hidden.transpose(0, 1) if call.batch_first else hidden, *ends


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """Hide the pieces of a call from function modes, and the warning that cuDNN copies the weights of single layers."""
    with torch._C.DisableTorchFunction(), warnings.catch_warnings() if device.type == "cuda" else nullcontext():
        if device.type == "cuda":
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        yield


def _masks(call: RecurrentCall) -> list[Tensor]:
    """Draw the dropout masks between layers: true where an output stays."""
    if not call.dropout:
        return []
    width = call.states[0].shape[-1] * call.directions
    made = [call.inputs.new_empty((*call.inputs.shape[:-1], width), dtype=torch.bool) for _ in range(call.layers - 1)]
    return [mask.bernoulli_(1 - call.dropout) if call.dropout < 1 else mask.zero_() for mask in made]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """All layers of one direction, or one layer of both directions."""

    kernel: Kernel
    pieces: list[Piece]
    orders: tuple[Order, ...]  # one for each direction
    layers: int
    biases: bool
    scale: float  # the factor of outputs between layers that are not dropped

    @property
    def both(self) -> bool:
        """Whether it has both directions."""
        return len(self.orders) == 2

    @property
    def uneven(self) -> bool:
        """Whether sequences end before the last step."""
        return self.pieces[0].sizes[0] != self.pieces[-1].sizes[-1]

    def run(
        self, piece: Piece, hidden: Tensor, state: Tensors, masks: Tensors, weights: Tensors
    ) -> tuple[Tensor, Tensors]:
        """Run one piece of one direction; return its outputs and the state after it. Masks are those of the piece."""
        if not masks:
            return self._call(piece, hidden, state, weights, self.layers)
        each, after = len(weights) // self.layers, list[Tensors]()
        for layer in range(self.layers):
            hidden = hidden * masks[layer - 1] * self.scale if layer else hidden
            before, own = [part[layer : layer + 1] for part in state], weights[layer * each : (layer + 1) * each]
            hidden, new = self._call(piece, hidden, before, own, 1)
            after.append(new)
        return hidden, [torch.cat(parts) for parts in zip(*after, strict=True)]

    def _call(
        self, piece: Piece, hidden: Tensor, state: Tensors, weights: Tensors, layers: int
    ) -> tuple[Tensor, Tensors]:
        hx = state if len(state) == 2 else state[0]
        settings = (self.biases, layers, 0.0, torch.is_grad_enabled(), False)
        if piece.dense:
            out, *after = self.kernel(hidden, hx, weights, *settings, False)
            whole = self.kernel is torch.lstm and state[0].shape == state[1].shape  # without projection: oneDNN runs it
            if whole and self.uneven and hidden.device.type == "cpu":
                # autocast lowers what oneDNN returns, but not what the plain call returns, which oneDNN does not run
                out, *after = (part.to(state[0].dtype) for part in (out, *after))
        else:
            out, *after = self.kernel(hidden, torch.tensor(piece.sizes), hx, weights, *settings)
        return out, after

    def states_of(self, direction: int, states: Tensors) -> Tensors:
        return [part[direction * self.layers : (direction + 1) * self.layers].contiguous() for part in states]

    def weights_of(self, direction: int, weights: list[T]) -> list[T]:
        each = len(weights) // len(self.orders)
        return weights[direction * each : (direction + 1) * each]


def _blocks(call: RecurrentCall, segments: int) -> Iterator[tuple[_Block, Tensors, Tensors]]:
    """Yield the blocks of a call, from the first layer up, with their states and weights."""
    device, steps = call.inputs.device, len(call.sizes)
    orders = [Order(call.packed, steps)]
    if call.directions == 2:
        index = reversed_tokens(call.sizes, device) if call.packed else None
        orders.append(Order(call.packed, steps, backwards=True, reversal=index))
    count = call.layers if call.directions == 2 else 1
    block = _Block(
        kernel=call.kernel,
        pieces=cut(call.sizes, min(segments, steps), dense=device.type == "cpu"),
        orders=tuple(orders),
        layers=call.layers // count,
        biases=call.biases,
        scale=1 / (1 - call.dropout) if call.dropout < 1 else 0.0,
    )
    states, each = [part.chunk(count) for part in call.states], len(call.weights) // count
    for i in range(count):
        yield block, [part[i] for part in states], list(call.weights[i * each : (i + 1) * each])


def _in_chunks(block: _Block, n_states: int, n_masks: int, inputs: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """Run a block piece by piece under autograd, which keeps the graph of every piece."""
    states, masks, weights = _split(rest, n_states, n_masks)
    outputs, finals = list[Tensors](), list[Tensors]()
    for direction, order in enumerate(block.orders):
        side, made, state = _Side(block, direction, inputs, masks, weights), [], block.states_of(direction, states)
        for i in range(len(block.pieces)):
            state, (out, *ended) = side.call(i, state, [side.read(inputs, i)])
            made.append(out.flatten(0, -2) if order.packed else out)
            side.ended += [ended] if ended else []
        outputs.append([order.turned(torch.cat(made))])
        finals.append(side.ends())
    return *_joined(outputs, -1), *_joined(finals)


def _split(rest: Sequence[Tensor], n_states: int, n_masks: int) -> tuple[Tensors, Tensors, Tensors]:
    """Return the states, the masks and the weights of a block."""
    return list(rest[:n_states]), list(rest[n_states : n_states + n_masks]), list(rest[n_states + n_masks :])


def _joined(parts: list[Tensors], dim: int = 0) -> Tensors:
    """Join tensors of the same kind, such as the states of all directions."""
    return [torch.cat(same, dim) for same in zip(*parts, strict=True)] if len(parts) > 1 else parts[0]


class _Side(Pieces):
    """The pieces of one direction of a block.

    The state before a piece has the rows of that piece. Rows that end with it give their last state as an output.
    """

    def __init__(self, block: _Block, direction: int, inputs: Tensor, masks: Tensors, weights: Tensors) -> None:
        self.block, self.direction, self.order = block, direction, block.orders[direction]
        self.inputs, self.masks, self.weights = [inputs], masks, block.weights_of(direction, weights)
        self.of_inputs: Gradients = [None]
        self.whole: Tensor | None = None  # the outputs of both directions; in the backward pass, their gradients
        self.ended = list[Tensors]()  # the last states of rows, the shortest first
        self.of_ends = Tensors()

    def call(self, i: int, state: Tensors, given: Tensors) -> tuple[Tensors, Tensors]:
        piece, on = self.block.pieces[i], self._rows_after(i)
        masks = [self.order.read(mask, piece) for mask in self.masks]
        out, after = self.block.run(piece, given[0], state, masks, self.weights)
        if on in (0, piece.rows):
            return (after, [out]) if on else ([], [out, *after])
        return [part[:, :on].contiguous() for part in after], [out, *(part[:, on:] for part in after)]

    def of_outputs(self, i: int, outputs: Tensors) -> Gradients:
        of_out = None if self.whole is None else self.read(self._own(self.whole), i)
        on, rows = self._rows_after(i), self.block.pieces[i].rows
        return [of_out, *(part[:, on:rows] for part in self.of_ends if on < rows)]

    def take(self, outputs: Tensors, i: int) -> None:
        out, *ended = outputs
        self.ended += [ended] if ended else []
        if self.whole is None:
            shape = (*self.inputs[0].shape[:-1], out.shape[-1] * len(self.block.orders))
            self.whole = torch.zeros(shape, dtype=out.dtype, device=out.device)
        self.write(self._own(self.whole), i, out)

    def read(self, whole: Tensor, i: int) -> Tensor:
        return self.order.read(whole, self.block.pieces[i])

    def write(self, whole: Tensor, i: int, values: Tensor) -> None:
        self.order.add(whole, self.block.pieces[i], values)

    def ends(self) -> Tensors:
        return _joined(self.ended[::-1], 1)

    def _rows_after(self, i: int) -> int:
        return self.block.pieces[i + 1].rows if i + 1 < len(self.block.pieces) else 0

    def _own(self, whole: Tensor) -> Tensor:
        return whole.chunk(len(self.block.orders), -1)[self.direction]


def _in_segments(block: _Block, n_states: int, n_masks: int, inputs: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """Run a block piece by piece without a graph. Its backward pass recomputes the pieces."""
    states, masks, weights = _split(rest, n_states, n_masks)
    weights = [weight.detach() for weight in weights]  # autocast must not store a cast that has no graph
    sides, borders = list[_Side](), list[list[Border]]()
    with torch.no_grad():
        for direction in range(len(block.orders)):
            side = _Side(block, direction, inputs, masks, weights)
            side.whole = sides[0].whole if sides else None
            borders.append(side.keep(range(len(block.pieces)), block.states_of(direction, states), whole=True))
            sides.append(side)
        assert side.whole is not None  # a call has a step
        results = [side.whole, *_joined([side.ends() for side in sides])]
    return tuple(recomputed(partial(_again, block, n_states, n_masks), results, borders, [inputs, *rest]))


def _again(
    block: _Block,
    n_states: int,
    n_masks: int,
    borders: list[list[Border]],
    of_results: Gradients,
    needs: Sequence[bool],
    tensors: Tensors,
) -> Gradients:
    """Return the gradients of the inputs, states, masks and weights of a block."""
    (inputs, *rest), (of_outputs, *of_ends) = tensors, of_results
    states, masks, weights = _split(rest, n_states, n_masks)
    leaves = [w.detach().requires_grad_(n) for w, n in zip(weights, needs[1 + n_states + n_masks :], strict=True)]
    of_inputs = torch.zeros_like(inputs) if needs[0] else None
    of_states = [torch.zeros_like(a) if b is None else b for a, b in zip(states, of_ends, strict=True)]
    found = list[Gradients]()
    with _alone(inputs.device):
        for direction, own in enumerate(borders):
            side = _Side(block, direction, inputs, masks, leaves)
            side.whole, side.of_inputs, side.of_ends = of_outputs, [of_inputs], block.states_of(direction, of_states)
            found.append(side.differentiate(own, []))
    starts = [torch.cat(parts).to(state.dtype) for *parts, state in zip(*found, states, strict=True)]
    return [of_inputs, *starts, *(None for _ in masks), *(leaf.grad for leaf in leaves)]
