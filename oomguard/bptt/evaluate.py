"""Evaluation: the loss or the outputs of one microbatch, piece by piece, without a graph."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from oomguard.bptt.run import Microbatch, Run
from oomguard.candidate import Candidate
from oomguard.model import Recurrent, State


def evaluate(model: Recurrent, batch: Microbatch, candidate: Candidate) -> Tensor:
    """The sum of the losses over real steps and sequences, where the model is."""
    run = _run(model, batch, candidate)
    with _evaluating(model):
        for i, hidden in _pieces(run):
            with run.computing():
                loss = run.loss(i, hidden)
            if loss is not None:
                run.total.add_(loss)
    return run.total


def outputs(model: Recurrent, batch: Microbatch, candidate: Candidate) -> Tensor:
    """What the head gives, on the CPU in float32: sequences x steps x outputs, or sequences x outputs at the end.

    >>> from oomguard.spec import Spec
    >>> from oomguard.model import build
    >>> model = build(Spec(cell="gru", seq=5, features=3, hidden=4))
    >>> batch = Microbatch(torch.zeros(5, 2, 3), torch.zeros(5, 2, 1))
    >>> outputs(model, batch, Candidate(microbatch=2, segments=2)).shape
    torch.Size([2, 5, 1])
    """
    run, found = _run(model, batch, candidate), []
    rows = batch.inputs.shape[1 - model.time_dim]
    ends = torch.zeros(rows, model.spec.classes)
    with _evaluating(model):
        for i, hidden in _pieces(run):
            with run.computing():
                if model.spec.head == "per-step":
                    made = model.head(hidden).float().cpu()
                    found.append(made if model.spec.batch_first else made.transpose(0, 1))
                else:
                    _put_ends(run, i, hidden, ends)
    return ends if model.spec.head == "last-step" else torch.cat(found, 1)


def _put_ends(run: Run, i: int, hidden: Tensor, ends: Tensor) -> None:
    """The outputs of the sequences whose last step is in this piece."""
    model, (start, steps) = run.model, run.span(i)
    lengths = run.batch.lengths
    if lengths is None:
        lengths = torch.full((len(ends),), run.steps)
    here = ((lengths > start) & (lengths <= start + steps)).nonzero().flatten()
    if len(here):
        chosen = hidden.index_select(1 - model.time_dim, here.to(hidden.device))
        ends[here] = model.head(model.last_steps(chosen, lengths[here] - start)).float().cpu()


def _run(model: Recurrent, batch: Microbatch, candidate: Candidate) -> Run:
    """Pieces as the candidate has them; two directions need the whole, since the second reads from the end."""
    steps = batch.inputs.shape[model.time_dim]
    length = candidate.window or -(-steps // candidate.segments)
    return Run(
        model=model,
        batch=batch,
        length=steps if model.spec.bidirectional else length,
        candidate=candidate,
        scale=1.0,
    )


def _pieces(run: Run) -> Iterator[tuple[int, Tensor]]:
    """The outputs of the last layer, a piece at a time."""
    state: State | None = None
    for i in range(run.pieces):
        with run.computing():
            hidden, state = run.model.advance(run.inputs(i), state, run.lengths(i))
        yield i, hidden
        del hidden


@contextmanager
def _evaluating(model: Recurrent) -> Iterator[None]:
    """No graph and no dropout, and training mode again after it."""
    before = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(before)
