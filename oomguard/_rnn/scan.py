"""Exact recomputation for loops in Python: `scan` for loops over cells, `run_loop` for any loop in pieces.

A loop runs in pieces. Its forward pass keeps the state before each piece; its backward pass recomputes the pieces, from
the last to the first. A loop may use any tensors of the code around it, such as weights: a function mode notes those
that need gradients, so that they become inputs of the autograd function.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from oomguard._batch import leaves_of, map_leaves
from oomguard._core.errors import MisuseError, check_whole, shown
from oomguard._rnn.recompute import Border, Ends, Gradients, Pieces, Tensors, gradients_of, recomputed
from oomguard._rnn.rng import Restore, remember_all

S = TypeVar("S")
X = TypeVar("X")
Y = TypeVar("Y")
Spans = list[tuple[int, int]]  # the first step of each piece, and its number of steps
RunPiece = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]
"""Takes the state before a piece and its inputs; returns the state after it and its outputs, one for each step."""
SAME = 0.01  # relative difference up to which a recomputed state is the first one: kernels of cards may add differently


def scan(
    step: Callable[[S, X], tuple[S, Y]], state: S, inputs: X, segments: int | None = None, *, levels: int = 1
) -> tuple[S, Y]:
    """Run a loop over time in segments: `state, output = step(state, input)` for every step of the inputs.

    State, inputs and outputs are tensors, or nested tuples, lists and dicts of tensors. Time is the first dimension of
    the inputs, and of the outputs that are returned with the last state. Gradients reach the state, the inputs, and
    every tensor that `step` uses, such as the weights of its cells. By default there are as many segments as a segment
    has steps. With 2 or 3 `levels`, only about `segments ** (1 / levels)` states are kept, and each level runs the loop
    once more.

    The backward pass calls `step` again with the same random numbers (of PyTorch, Python and NumPy). So `step` must
    depend on nothing else that changes, and must not change tensors in place.

    >>> import oomguard, torch
    >>> cell = torch.nn.GRUCell(3, 4)
    >>> def step(state, inputs):
    ...     state = cell(inputs, state)
    ...     return state, state
    >>> state, outputs = oomguard.scan(step, torch.zeros(2, 4), torch.randn(100, 2, 3), segments=10)
    >>> outputs.sum().backward()
    >>> outputs.shape, cell.weight_hh.grad.shape
    (torch.Size([100, 2, 4]), torch.Size([12, 4]))
    """
    parts, state_tree = flattened("state of a scan", state)
    series, inputs_tree = flattened("inputs of a scan", inputs)
    if not series or len({part.shape[:1] for part in series}) != 1 or not series[0].shape or not len(series[0]):
        sizes = ", ".join(str(tuple(part.shape)) for part in series) or "no tensor"
        advice = "Put time first, and give at least one step."
        raise MisuseError(rule="All inputs of a scan need the same number of steps", got=f"got {sizes}", advice=advice)
    steps, trees = len(series[0]), dict[str, object]()
    check_whole("segments", segments, 1, 1_000_000_000)
    check_whole("levels", levels, 1, 3, optional=False)

    def run_piece(before: Tensors, given: Tensors) -> tuple[Tensors, Tensors]:
        made = list[Tensors]()
        for i in range(len(given[0])):
            now = unflattened(before, state_tree)
            after, output = step(now, unflattened([part[i] for part in given], inputs_tree))
            before, after_tree = flattened("state of a scan", after)
            if after_tree != state_tree:
                got = f"it returned {shown(after_tree)} for {shown(state_tree)}"
                advice = "Return (state, output), with the state as it came in."
                raise MisuseError(rule="A step must return a state like the one it is given", got=got, advice=advice)
            leaves, trees["outputs"] = flattened("output of a scan", output)
            made.append(leaves)
        return before, [torch.stack(column) for column in zip(*made, strict=True)]

    size = -(-steps // min(steps, segments or round(math.sqrt(steps))))
    spans = [(start, min(size, steps - start)) for start in range(0, steps, size)]
    after, outputs = run_loop(run_piece, spans, parts, series, levels)
    return unflattened(after, state_tree), unflattened(outputs, trees["outputs"])


def flattened(what: str, value: object) -> tuple[Tensors, object]:
    """Return the tensors of a nested structure in the order of their paths, and the structure without them.

    None has no tensors.
    """
    if value is None:
        return [], None
    leaves = leaves_of(value)
    for leaf in leaves.values():
        if not isinstance(leaf, Tensor):
            advice = "Use tensors, or nested tuples, lists and dicts of them."
            raise MisuseError(rule=f"The {what} must be tensors", got=f"got {shown(leaf)}", advice=advice)
    return [leaves[path] for path in sorted(leaves)], map_leaves(lambda path, leaf: "tensor", value)


def unflattened(tensors: Tensors, structure: Any) -> Any:
    """Put tensors back into the structure that `flattened` took them from."""
    if structure is None:
        return None
    by_path = dict(zip(sorted(leaves_of(structure)), tensors, strict=True))
    return map_leaves(lambda path, leaf: by_path[path], structure)


class _UsedTensors(TorchFunctionMode):
    """Notes the tensors that need gradients among the arguments of all functions, while no graph is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.found = dict[int, Tensor]()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for arg in (*args, *kwargs.values()) if kwargs else args:
            for value in arg if isinstance(arg, list | tuple) else (arg,):
                if isinstance(value, Tensor) and value.requires_grad:
                    self.found[id(value)] = value
        return func(*args, **(kwargs or {}))


class _Replaced(TorchFunctionMode):
    """Gives functions other tensors in the place of some."""

    def __init__(self, instead: dict[int, Tensor]) -> None:
        super().__init__()
        self.instead = instead

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*map(self._replace, args), **{name: self._replace(value) for name, value in (kwargs or {}).items()})

    def _replace(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(self._replace, value))
        return self.instead.get(id(value), value)


class _Loop(Pieces):
    """The pieces of a loop: in the forward pass, and with the gradients of results in the backward pass."""

    def __init__(self, run_piece: RunPiece, spans: Spans, inputs: Tensors, device: torch.device) -> None:
        self.run_piece, self.spans, self.inputs, self.draws_on = run_piece, spans, inputs, device
        self.last, self.before = Tensors(), Tensors()  # the last state that was computed; the last one before a graph
        self.made = list[Tensors]()  # the outputs of each piece, in the forward pass
        self.of_inputs = [None for _ in inputs]
        self.of_made, self.of_others = Gradients(), Gradients()
        self.replaced: Tensors | None = None  # `others` as the code around the loop has them, until they are checked

    def call(self, i: int, state: Tensors, given: Tensors) -> tuple[Tensors, Tensors]:
        after, made = self.run_piece(state, given)
        if torch.is_grad_enabled():
            _check_same(after, self.before)
            self.before = state
        else:
            self.last = after
        return after, made

    def read(self, whole: Tensor, i: int) -> Tensor:
        return whole.narrow(0, *self.spans[i])

    def write(self, whole: Tensor, i: int, values: Tensor) -> None:
        whole.narrow(0, *self.spans[i]).copy_(values)

    def of_outputs(self, i: int, outputs: Tensors) -> Gradients:
        return [None if total is None else self.read(total, i) for total in self.of_made]

    def gradients_of(self, starts: Tensors, ends: Ends) -> Gradients:
        if self.replaced is not None:
            _check_known(ends, starts, self.replaced)
        self.replaced = None
        return gradients_of(starts, ends)  # users' weights keep their `grad`

    def take(self, outputs: Tensors, i: int) -> None:
        self.made.append(outputs)

    def add(self, gradients: Gradients, i: int) -> None:
        super().add(gradients[: len(self.inputs)], i)
        for j, gradient in enumerate(gradients[len(self.inputs) :]):
            if gradient is not None:
                total = self.of_others[j]
                self.of_others[j] = gradient if total is None else total + gradient

    def remember(self) -> Restore:
        return remember_all(self.draws_on)


def run_loop(
    run_piece: RunPiece, spans: Spans, state: Tensors, inputs: Tensors, levels: int = 1
) -> tuple[Tensors, Tensors]:
    """Run a loop without a graph; return the last state and the outputs, as results of an autograd function."""
    before, series = [part.detach() for part in state], [part.detach() for part in inputs]
    loop, used = _Loop(run_piece, spans, series, (state + inputs)[0].device), _UsedTensors()
    with torch.no_grad(), used:
        borders = loop.keep(range(len(spans)), before, levels, whole=True)
        results = [part.clone() for part in loop.last]
        results += [torch.cat(parts) for parts in zip(*loop.made, strict=True)]
    n = len(loop.last)
    if torch.is_grad_enabled():
        others = [*used.found.values()]
        modes: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        again = partial(_again, run_piece, spans, levels, modes, others, n)
        results = recomputed(again, results, [borders], [*state, *inputs, *others])
    return results[:n], results[n:]


def _again(
    run_piece: RunPiece,
    spans: Spans,
    levels: int,
    modes: list[TorchFunctionMode],  # such as that of `segmented`; backward passes run without them
    replaced: Tensors,  # tensors that the loop uses beside its state and its inputs, and that need gradients
    last: int,  # tensors of the last state
    borders: list[list[Border]],
    of_results: Gradients,
    needs: Sequence[bool],
    tensors: Tensors,
) -> Gradients:
    """Return the gradients of the first state, of the inputs, and of the other tensors that a loop uses."""
    part = slice(len(borders[0][0].state), len(tensors) - len(replaced))
    loop = _Loop(run_piece, spans, tensors[part], tensors[0].device)
    pairs = zip(loop.inputs, needs[part], strict=True)
    loop.of_inputs = [torch.zeros_like(whole) if need else None for whole, need in pairs]
    loop.of_made, loop.of_others, loop.replaced = of_results[last:], [None for _ in replaced], replaced
    # tensors with a graph of their own become leaves, so that a piece's backward pass ends there
    loop.others = [tensor if tensor.is_leaf else tensor.detach().requires_grad_() for tensor in replaced]
    instead = _Replaced({id(a): b for a, b in zip(replaced, loop.others, strict=True) if a is not b})
    with ExitStack() as stack:
        stack.callback(loop.remember())  # go on afterwards with the random numbers that would have come
        for mode in (*modes, instead):
            stack.enter_context(mode)
        of_state = loop.differentiate(borders[0], of_results[:last], levels)
    return [*of_state, *loop.of_inputs, *loop.of_others]


def _check_same(recomputed: Tensors, first: Tensors) -> None:
    """Raise unless a recomputed state is the one that the forward pass had at that border."""
    for ours, theirs in zip(recomputed, first, strict=False):  # after the last piece, there is no border
        a, b = ours.detach().double().cpu(), theirs.detach().double().cpu()
        limit = SAME * b.nan_to_num().abs().amax() if theirs.is_floating_point() and b.numel() else 0.0
        if a.shape != b.shape or not torch.allclose(a, b, rtol=0.0, atol=float(limit), equal_nan=True):
            raise MisuseError(
                rule="A step must give the same state when it is computed again",
                got="it gave another one",
                advice="Let it depend only on its arguments and on tensors that stay, and change nothing in place.",
            )


def _check_known(tops: Ends, known: Tensors, replaced: Tensors) -> None:
    """Raise if results depend on a leaf that no function has shown, or on a tensor that was to be replaced."""
    leaves, outside = {id(tensor) for tensor in known}, {tensor.grad_fn for tensor in replaced}
    seen, waiting = set[Node](), [top.grad_fn for top, _ in tops]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if node in outside or (leaf is not None and id(leaf) not in leaves):
            raise MisuseError(
                rule="A loop must use tensors of the code around it in functions of PyTorch",
                got="it uses one out of sight, as in TorchScript or in an autograd function",
                advice="Pass that tensor as part of the state or of the inputs.",
            )
        waiting += [source for source, _ in node.next_functions]
