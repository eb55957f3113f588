"""Losses in pieces: `chunked_loss` for a head and its loss, `piecewise_loss` for one that adds up over time.

Each piece is computed again in the backward pass, so that no more than the logits of one piece ever exist.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from oomguard._core.errors import MisuseError, check_whole, shown
from oomguard._rnn.recompute import Tensors
from oomguard._rnn.rng import remember_all
from oomguard._rnn.scan import SAME, flattened, run_loop, unflattened

SAMPLES = 16  # rows on which a loss is checked for being a sum
Batch = TypeVar("Batch")
Count = TypeVar("Count", bound=Tensor | float)


def chunked_loss(
    head: Callable[[Tensor], Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    chunks: int,
) -> Tensor:
    """Return `loss(head(hidden), targets)`, computed in chunks, so that the logits never exist as a whole.

    The last dimension of `hidden` holds features. All others are flattened to rows, as are those of `targets`, and each
    chunk has some of the rows. `head` must treat rows independently, as nn.Linear does. `loss` must return the sum over
    its rows (`reduction="sum"`), because means of chunks do not add up: divide the result by the number of targets.
    The backward pass computes each chunk again.

    >>> import oomguard, torch
    >>> head, loss = torch.nn.Linear(4, 1000), torch.nn.CrossEntropyLoss(reduction="sum")
    >>> hidden, targets = torch.randn(50, 2, 4, requires_grad=True), torch.randint(1000, (50, 2))
    >>> total = oomguard.chunked_loss(head, loss, hidden, targets, chunks=8)
    >>> (total / targets.numel()).backward()
    >>> hidden.grad.shape
    torch.Size([50, 2, 4])
    """
    check_whole("chunks", chunks, 1, 1_000_000_000, optional=False)
    if hidden.dim() < 2 or targets.shape[: hidden.dim() - 1] != hidden.shape[:-1] or not hidden.numel():
        raise MisuseError(
            rule="Targets need the dimensions of the hidden states, except the last one",
            got=f"got {tuple(targets.shape)} for {tuple(hidden.shape)}",
            advice="Give one target for each step of each sequence.",
        )
    rows, wanted = hidden.flatten(0, -2), targets.flatten(0, hidden.dim() - 2)
    _check_sum(head, loss, rows, wanted)

    def run_piece(before: Tensors, given: Tensors) -> tuple[Tensors, Tensors]:
        return [before[0] + loss(head(given[0]), given[1])], []

    size = -(-len(rows) // chunks)
    spans = [(start, min(size, len(rows) - start)) for start in range(0, len(rows), size)]
    zero = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    return run_loop(run_piece, spans, [zero], [rows, wanted])[0][0]


def _check_sum(
    head: Callable[[Tensor], Tensor], loss: Callable[[Tensor, Tensor], Tensor], rows: Tensor, targets: Tensor
) -> None:
    """Raise unless the loss of some rows is the sum of the losses of its two halves."""
    some = torch.linspace(0, len(rows) - 1, min(SAMPLES, len(rows)), device=rows.device).long()
    restore_random = remember_all(rows.device)
    with torch.no_grad():
        logits, wanted = head(rows[some]), targets[some]
        whole = loss(logits, wanted)
        parts = zip(logits.tensor_split(2), wanted.tensor_split(2), strict=True)
        halves = [loss(*pair).sum().item() for pair in parts if len(pair[0])]
    restore_random()
    if whole.dim() or not (whole.isnan() or math.isclose(whole.item(), sum(halves), rel_tol=SAME, abs_tol=1e-6)):
        raise MisuseError(
            rule="The loss of chunks must be a sum over rows",
            got=f"it has the shape {tuple(whole.shape)}" if whole.dim() else "it is not",
            advice='Use reduction="sum", and divide the result by the number of targets.',
        )


def piecewise_loss(
    loss: Callable[[nn.Module, Batch, Any], tuple[Tensor, Count, Any]],
    model: nn.Module,
    pieces: Iterable[Batch],
    state: object = None,
    *,
    levels: int = 1,
) -> tuple[Tensor, Count, Any]:
    """Run a loss over the pieces of a batch, one after another in time: the sum and count of all, and the last state.

    `loss(model, piece, state)` returns the sum of the losses of a piece, the number to divide it by, and the state
    after the piece: None, a tensor, or nested tuples, lists and dicts of tensors. The first piece gets `state`. The
    gradient is that of the whole batch. The forward pass keeps the states alone, and the backward pass computes each
    piece again, so that the activations and logits of only one piece exist at a time. `levels` is that of `scan`.

    >>> import oomguard, torch
    >>> model = torch.nn.ModuleDict({"rnn": torch.nn.GRU(3, 4), "head": torch.nn.Linear(4, 1000)})
    >>> def loss(model, piece, state):
    ...     hidden, state = model["rnn"](piece[0], state)
    ...     logits, targets = model["head"](hidden).flatten(0, 1), piece[1].flatten()
    ...     return torch.nn.functional.cross_entropy(logits, targets, reduction="sum"), len(targets), state
    >>> inputs, targets = torch.randn(100, 2, 3), torch.randint(1000, (100, 2))
    >>> pieces = zip(inputs.split(25), targets.split(25))
    >>> total, count, state = oomguard.piecewise_loss(loss, model, pieces)
    >>> (total / count).backward()
    >>> count, state.shape
    (200, torch.Size([1, 2, 4]))
    """
    check_whole("levels", levels, 1, 3, optional=False)
    batches, counts = [*pieces], list[Count]()
    if not batches:
        raise MisuseError(rule="A loss needs pieces", got="got none", advice="Give at least one piece of a batch.")
    given_state = flattened("state of a loss", state)
    trees = [given_state[1]]  # the structure of the state before each piece, and after the last

    def run_piece(before: Tensors, given: Tensors) -> tuple[Tensors, Tensors]:
        index = int(given[0])
        total, count, after = _checked(loss(model, batches[index], unflattened(before[1:], trees[index])))
        state_after = flattened("state of a loss", after)
        if len(counts) == index:  # in the forward pass
            counts.append(count)
            trees.append(state_after[1])
        return [before[0] + total, *state_after[0]], []

    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    zero, spans = torch.zeros((), device=device), [(i, 1) for i in range(len(batches))]
    results = run_loop(run_piece, spans, [zero, *given_state[0]], [torch.arange(len(batches))], levels)[0]
    whole: Any = sum(counts[1:], start=counts[0])
    return results[0], whole, unflattened(results[1:], trees[-1])


def _checked(result: Any) -> tuple[Tensor, Any, object]:
    """Return sum, count and state of a piece; raise if the loss returned anything else."""
    if isinstance(result, tuple | list) and len(result) == 3 and isinstance(result[0], Tensor) and not result[0].dim():
        return result[0], result[1], result[2]
    advice = "Return the sum as a tensor without dimensions, the number to divide it by, and the state."
    raise MisuseError(rule="The loss of a piece must be (sum, count, state)", got=f"got {shown(result)}", advice=advice)
