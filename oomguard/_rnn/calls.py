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
from typing import Any, TypeVar

import torch
from torch import Tensor

from oomguard._core.errors import MisuseError
from oomguard._rnn.pieces import Order, Piece, cut, reversed_tokens
from oomguard._rnn.seed import Tensors, gradients_of

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
            run = _Segments.apply if recompute else _in_chunks
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

    def walk(
        self, direction: int, inputs: Tensor, states: Tensors, masks: Tensors, weights: Tensors, *, train: bool
    ) -> Iterator[tuple[Piece, Tensors, Tensor, Tensors]]:
        """Run one direction; yield each piece, the state before it, its outputs, and the state of all rows after it.

        Sequences that have ended keep their state.
        """
        order, state = self.orders[direction], self.states_of(direction, states)
        own = self.weights_of(direction, weights)
        for piece in self.pieces:
            before = [part[:, : piece.rows].contiguous() for part in state]
            some = [order.read(mask, piece) for mask in masks]
            out, after = self.run(piece, order.read(inputs, piece), before, some, own, train=train)
            state = with_rows(state, after)
            yield piece, before, out, state

    def run(
        self, piece: Piece, hidden: Tensor, state: Tensors, masks: Tensors, weights: Tensors, *, train: bool
    ) -> tuple[Tensor, Tensors]:
        """Run one piece of one direction; return its outputs and the state after it. Masks are those of the piece."""
        if not masks:
            return self._call(piece, hidden, state, weights, self.layers, train=train)
        each, after = len(weights) // self.layers, list[Tensors]()
        for layer in range(self.layers):
            hidden = hidden * masks[layer - 1] * self.scale if layer else hidden
            before, own = [part[layer : layer + 1] for part in state], weights[layer * each : (layer + 1) * each]
            hidden, new = self._call(piece, hidden, before, own, 1, train=train)
            after.append(new)
        return hidden, [torch.cat(parts) for parts in zip(*after, strict=True)]

    def _call(
        self, piece: Piece, hidden: Tensor, state: Tensors, weights: Tensors, layers: int, *, train: bool
    ) -> tuple[Tensor, Tensors]:
        hx = state if len(state) == 2 else state[0]
        settings = (self.biases, layers, 0.0, train, False)
        if piece.dense:
            out, *after = self.kernel(hidden, hx, weights, *settings, False)
        else:
            out, *after = self.kernel(hidden, torch.tensor(piece.sizes), hx, weights, *settings)
        return out, after

    def states_of(self, direction: int, states: Tensors) -> Tensors:
        return [part[direction * self.layers : (direction + 1) * self.layers] for part in states]

    def weights_of(self, direction: int, weights: list[T]) -> list[T]:
        each = len(weights) // len(self.orders)
        return weights[direction * each : (direction + 1) * each]

    def outputs_of(self, direction: int, outputs: Tensor) -> Tensor:
        return outputs.chunk(len(self.orders), -1)[direction]


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


def with_rows(old: Tensors, new: Tensors) -> Tensors:
    """Replace the first rows of a state."""
    pairs = zip(old, new, strict=True)
    return [b if a.shape[1] == b.shape[1] else torch.cat([b, a[:, b.shape[1] :]], 1) for a, b in pairs]


def _in_chunks(block: _Block, n_states: int, n_masks: int, inputs: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """Run a block piece by piece under autograd, which keeps the graph of every piece."""
    states, masks, weights = _split(rest, n_states, n_masks)
    sides, finals, after = list[Tensor](), list[Tensors](), states
    for direction, order in enumerate(block.orders):
        made = list[Tensor]()
        for _, _, out, after in block.walk(direction, inputs, states, masks, weights, train=True):  # noqa: B007
            made.append(out.flatten(0, -2) if order.packed else out)
        sides.append(order.turned(torch.cat(made)))
        finals.append(after)
    ends = [torch.cat(parts) for parts in zip(*finals, strict=True)] if block.both else finals[0]
    return torch.cat(sides, -1) if block.both else sides[0], *ends


def _split(rest: Sequence[Tensor], n_states: int, n_masks: int) -> tuple[Tensors, Tensors, Tensors]:
    """Return the states, the masks and the weights of a block."""
    return list(rest[:n_states]), list(rest[n_states : n_states + n_masks]), list(rest[n_states + n_masks :])


class _Segments(torch.autograd.Function):
    """A block whose pieces are recomputed in the backward pass, from the states at their borders."""

    @staticmethod
    def forward(
        ctx: Any, block: _Block, n_states: int, n_masks: int, inputs: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        states, masks, weights = _split(rest, n_states, n_masks)
        weights = [weight.detach() for weight in weights]  # autocast must not store a cast that has no graph
        whole, borders, finals, after = None, list[Tensor](), list[Tensors](), states
        for direction, order in enumerate(block.orders):
            for piece, before, out, after in block.walk(direction, inputs, states, masks, weights, train=False):  # noqa: B007
                borders += before
                if whole is None:
                    shape = (*inputs.shape[:-1], out.shape[-1] * len(block.orders))
                    whole = torch.zeros(shape, dtype=out.dtype, device=out.device)
                order.add(block.outputs_of(direction, whole), piece, out)
            finals.append(after)
        assert whole is not None  # a call has a step
        ctx.save_for_backward(inputs, *rest, *borders)
        ctx.set_materialize_grads(False)
        ctx.block, ctx.counts, ctx.autocast = (
            block,
            (n_states, n_masks, len(rest)),
            autocast_setting(inputs.device.type),
        )
        return whole, *([torch.cat(parts) for parts in zip(*finals, strict=True)] if block.both else finals[0])

    @staticmethod
    def backward(ctx: Any, of_outputs: Tensor | None, *of_ends: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        block, (n_states, n_masks, n_rest) = ctx.block, ctx.counts
        inputs, *saved = ctx.saved_tensors
        states, masks, weights = _split(saved[:n_rest], n_states, n_masks)
        borders, needs = saved[n_rest:], ctx.needs_input_grad
        leaves = [w.detach().requires_grad_(n) for w, n in zip(weights, needs[4 + n_states + n_masks :], strict=True)]
        of_inputs = torch.zeros_like(inputs) if needs[3] else None
        of_weights = [torch.zeros_like(leaf) if leaf.requires_grad else None for leaf in leaves]
        of_states = [torch.zeros_like(a) if b is None else b for a, b in zip(states, of_ends, strict=True)]
        sides = list[Tensors]()
        with _alone(inputs.device), torch.enable_grad(), torch.autocast(*ctx.autocast):
            for direction, order in reversed([*enumerate(block.orders)]):
                own, sums = block.weights_of(direction, leaves), block.weights_of(direction, of_weights)
                after = block.states_of(direction, of_states)
                given = None if of_outputs is None else block.outputs_of(direction, of_outputs)
                for piece in reversed(block.pieces):
                    leaf = order.read(inputs, piece).detach().requires_grad_(needs[3])
                    before = [borders.pop().detach().requires_grad_() for _ in states][::-1]
                    some = [order.read(mask, piece) for mask in masks]
                    out, states_after = block.run(piece, leaf, before, some, own, train=True)
                    tops = [*zip(states_after, [part[:, : piece.rows] for part in after], strict=True)]
                    tops += [] if given is None else [(out, order.read(given, piece))]
                    of_leaf, *found = gradients_of([leaf, *before, *own], tops)
                    del out, states_after, tops  # free the graph of this piece before the next one is built
                    after = with_rows(after, [gradient for gradient in found[:n_states] if gradient is not None])
                    if of_inputs is not None and of_leaf is not None:
                        order.add(of_inputs, piece, of_leaf)
                    for total, gradient in zip(sums, found[n_states:], strict=True):
                        if total is not None and gradient is not None:
                            total.add_(gradient)
                sides.insert(0, after)
        starts = [torch.cat(parts).to(state.dtype) for *parts, state in zip(*sides, states, strict=True)]
        return None, None, None, of_inputs, *starts, *(None for _ in masks), *of_weights


def refuse_double_backward() -> None:
    """Raise if the gradients of a backward pass are to be differentiated again (`create_graph=True`)."""
    if torch.is_grad_enabled():
        raise MisuseError(
            rule="Gradients of what is recomputed cannot be differentiated again",
            got="the backward pass was called with create_graph=True",
            advice="Run this part of the model without segments.",
        )


def autocast_setting(kind: str) -> tuple[str, torch.dtype, bool]:
    """Return the present setting of autocast on a kind of device, as torch.autocast takes it."""
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
