"""Exact recomputation for loops in Python: `scan` for loops over cells, `run_loop` for any loop in pieces.

A loop runs in pieces. Its forward pass keeps the state before each piece; its backward pass recomputes the pieces, from
the last to the first. A loop may use any tensors of the code around it, such as weights: a function mode notes those
that need gradients, so that they become inputs of the autograd function.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from oomguard._batch import leaves_of, map_leaves
from oomguard._core.errors import MisuseError, check_whole, shown
from oomguard._rnn.calls import autocast_setting, refuse_double_backward
from oomguard._rnn.rng import remember_all
from oomguard._rnn.seed import Ends, Gradients, Tensors, gradients_of

S = TypeVar("S")
X = TypeVar("X")
Y = TypeVar("Y")
RunPiece = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]
"""Takes the state before a piece and its inputs; returns the state after it and its outputs, one for each step."""
SAME = 0.01  # relative difference up to which a recomputed state is the first one: kernels of cards may add differently


def scan(step: Callable[[S, X], tuple[S, Y]], state: S, inputs: X, segments: int | None = None) -> tuple[S, Y]:
    """Run a loop over time in segments: `state, output = step(state, input)` for every step of the inputs.

    State, inputs and outputs are tensors, or nested tuples, lists and dicts of tensors. Time is the first dimension of
    the inputs, and of the outputs that are returned with the last state. Gradients reach the state, the inputs, and
    every tensor that `step` uses, such as the weights of its cells. By default there are as many segments as a segment
    has steps.

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
    after, outputs = run_loop(run_piece, spans, parts, series)
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


class _Loop(NamedTuple):
    """A loop in pieces, as its backward pass needs it."""

    run_piece: RunPiece
    spans: list[tuple[int, int]]  # the first step of each piece, and its number of steps
    random: list[Callable[[], None]]  # set the random numbers back to those before each piece
    others: Tensors  # tensors that the loop uses beside its state and its inputs, and that need gradients
    sizes: list[int]  # tensors of the state before each piece, and after the last
    inputs: int  # tensors of the inputs
    autocast: tuple[str, torch.dtype, bool]
    modes: list[TorchFunctionMode]  # such as that of `segmented`; backward passes run without them


def run_loop(
    run_piece: RunPiece, spans: list[tuple[int, int]], state: Tensors, inputs: Tensors
) -> tuple[Tensors, Tensors]:
    """Run a loop without a graph; return the last state and the outputs, as results of an autograd function."""
    before, series = [part.detach() for part in state], [part.detach() for part in inputs]
    used, marks, borders, made = _UsedTensors(), list[Callable[[], None]](), list[Tensors](), list[Tensors]()
    device = (state + inputs)[0].device
    with torch.no_grad(), used:
        for span in spans:
            borders.append(before)
            marks.append(remember_all(device))
            before, outputs = run_piece(before, [part.narrow(0, *span) for part in series])
            made.append(outputs)
        results = [part.clone() for part in before] + [torch.cat(parts) for parts in zip(*made, strict=True)]
    if torch.is_grad_enabled():
        others, sizes = [*used.found.values()], [len(state) for state in (*borders, before)]
        setting = autocast_setting(device.type)
        modes: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        loop = _Loop(run_piece, spans, marks, others, sizes, len(inputs), setting, modes)
        apply: Callable[..., tuple[Tensor, ...]] = _Recomputed.apply
        results = [*apply(loop, results, *state, *inputs, *others, *itertools.chain(*borders))]
    return results[: len(before)], results[len(before) :]


class _Recomputed(torch.autograd.Function):
    """The results of a loop. Its pieces are recomputed in the backward pass, from the states before them."""

    @staticmethod
    def forward(ctx: Any, loop: _Loop, results: Tensors, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        ctx.loop = loop
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *of_results: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        loop: _Loop = ctx.loop
        n, last, saved = loop.sizes[0], loop.sizes[-1], [*ctx.saved_tensors]
        middle = n + loop.inputs
        inputs, borders = saved[n:middle], saved[middle + len(loop.others) :]
        wanted = ctx.needs_input_grad[2 + n : 2 + middle]
        of_inputs: Gradients = [torch.zeros_like(x) if y else None for x, y in zip(inputs, wanted, strict=True)]
        of_others: Gradients = [None for _ in loop.others]
        of_state, after = [*of_results[:last]], Tensors()
        # tensors with a graph of their own become leaves, so that a piece's backward pass ends there
        others = [tensor if tensor.is_leaf else tensor.detach().requires_grad_() for tensor in loop.others]
        instead = _Replaced({id(a): b for a, b in zip(loop.others, others, strict=True) if a is not b})
        with torch.enable_grad(), torch.autocast(*loop.autocast), ExitStack() as stack:
            for mode in (*loop.modes, instead):
                stack.enter_context(mode)
            for i, (start, steps) in reversed([*enumerate(loop.spans)]):
                size = loop.sizes[i]
                first = [borders.pop() for _ in range(size)][::-1]
                before = [part.detach().requires_grad_(part.is_floating_point()) for part in first]
                cuts = [part.narrow(0, start, steps).detach() for part in inputs]
                given = [cut.requires_grad_(need) for cut, need in zip(cuts, wanted, strict=True)]
                with _repeated_random(loop.random[i], saved[0].device):
                    ends, made = loop.run_piece(before, given)
                _check_same(ends, after)
                of_made = [None if g is None else g.narrow(0, start, steps) for g in of_results[last:]]
                pairs = zip([*ends, *made], [*of_state, *of_made], strict=True)
                tops = [(end, gradient) for end, gradient in pairs if gradient is not None]
                if i == len(loop.spans) - 1:
                    _check_known(tops, [*before, *given, *others], loop.others)
                found = gradients_of([*before, *given, *others], tops)
                del ends, made, tops, pairs  # free the graph of this piece before the next one is built
                of_state, after = found[:size], first
                for total, gradient in zip(of_inputs, found[size : size + loop.inputs], strict=True):
                    if total is not None and gradient is not None:
                        total.narrow(0, start, steps).copy_(gradient)
                for j, gradient in enumerate(found[size + loop.inputs :]):
                    if gradient is not None:
                        total = of_others[j]
                        of_others[j] = gradient if total is None else total + gradient
        return None, None, *of_state, *of_inputs, *of_others, *(None for _ in saved[middle + len(loop.others) :])


def _check_same(recomputed: Tensors, first: Tensors) -> None:
    """Raise unless a recomputed state is the one that the forward pass had at that border."""
    for ours, theirs in zip(recomputed, first, strict=False):  # after the last piece, there is no border
        a, b = ours.detach().double().cpu(), theirs.double().cpu()
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


@contextmanager
def _repeated_random(repeat: Callable[[], None], device: torch.device) -> Iterator[None]:
    """Draw the random numbers of the forward pass, and go on afterwards with those that would have come."""
    restore = remember_all(device)
    repeat()
    try:
        yield
    finally:
        restore()
