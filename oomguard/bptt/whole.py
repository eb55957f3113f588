"""Passes that go through the sequence once: plain, in chunks with their graphs, in windows that cut the gradient."""

from contextlib import nullcontext

from torch import Tensor

from oomguard.bptt.run import Run, keeping_nothing, start_from
from oomguard.model import State


def plain(run: Run) -> None:
    """The whole sequence at once."""
    with run.computing():
        hidden, _ = run.model.advance(run.inputs(0), None, run.lengths(0))
        loss = run.loss(0, hidden)
    del hidden  # the graph keeps what it needs
    run.differentiate(loss)


def windowed(run: Run) -> None:
    """Each piece starts from the state of the one before, but not from its graph."""
    state: State | None = None
    for i in range(run.pieces):
        predicts = run.model.spec.head == "per-step" or run.batch.lengths is not None or i == run.pieces - 1
        with run.computing(), nullcontext() if predicts else keeping_nothing(run.model):
            hidden, after = run.model.advance(run.inputs(i), state, run.lengths(i))
            loss = run.loss(i, hidden)
        state = [tuple(part.detach() for part in call) for call in after]
        del hidden, after
        run.differentiate(loss)
        del loss


def chunked(run: Run) -> None:
    """All pieces keep their graphs. The head is differentiated at once, so that its outputs need not be kept."""
    state: State | None = None
    ends: list[tuple[Tensor, Tensor]] = []
    for i in range(run.pieces):
        with run.computing():
            hidden, state = run.model.advance(run.inputs(i), state, run.lengths(i))
            cut = hidden.detach().requires_grad_(hidden.requires_grad)
            loss = run.loss(i, cut)
        run.differentiate(loss)
        if cut.grad is not None:
            ends.append((hidden, cut.grad))
        del hidden, cut, loss
    del state
    start_from(ends)
