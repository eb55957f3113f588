"""Run: one microbatch in pieces, with their loss, precision and random numbers; and the pass without a graph."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from oomguard._rnn.model import Recurrent, State
from oomguard._rnn.rng import Restore, generators_of, remember
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec

IGNORED = -100  # the target that marks a step without one, as in PyTorch's cross-entropy
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, kind: str) -> AbstractContextManager[Any]:
    """Return a context that computes in a precision on a kind of device."""
    return torch.autocast(kind, DTYPES[precision]) if precision in DTYPES else nullcontext()


class Microbatch(NamedTuple):
    """The sequences of one pass, padded to one length. They may stay in host memory: pieces are copied one by one."""

    inputs: Tensor  # time x sequences (or the other way round with batch_first) x features, or tokens
    targets: Tensor  # one target for each step, or one for each sequence
    lengths: Tensor | None = None  # real steps of each sequence, on the CPU; None if there is no padding


def count_targets(spec: Spec, batch: Microbatch) -> int:
    """Count the real targets: neither padding nor `IGNORED`."""
    steps = batch.inputs.shape[1 if spec.batch_first else 0]
    real = None if spec.head == "last-step" else _real(spec, batch, 0, steps)
    if spec.loss == "cross-entropy":
        wanted = batch.targets != IGNORED
        return int((wanted if real is None else wanted & real.to(wanted.device)).sum())
    if real is not None:
        return int(real.sum())
    return batch.targets.shape[:-1].numel()


class Run:
    """One microbatch that runs through the model in the candidate's pieces, or as a whole."""

    def __init__(
        self,
        model: Recurrent,
        batch: Microbatch,
        candidate: Candidate,
        scale: float | Tensor = 1.0,
        *,
        whole: bool = False,
    ) -> None:
        self.model, self.batch, self.candidate, self.scale = model, batch, candidate, scale
        self.steps = batch.inputs.shape[model.time_dim]
        length = candidate.window or -(-self.steps // candidate.segments)
        self.length = self.steps if whole else length  # steps of a piece
        self.pieces = -(-self.steps // self.length)
        self.total = torch.zeros((), device=model.device, dtype=model.dtype)  # sum of the losses so far
        random = model.spec.dropout and model.training and len(model.calls) > 1
        self.generators = generators_of(model.device)[-1:] if random else []  # those that dropout draws from
        self.home = torch.device("cpu") if candidate.keep == "host" else model.device
        """The device of tensors that span the whole sequence."""

    def span(self, i: int) -> tuple[int, int]:
        """Return the first step of piece `i` and its number of steps.

        If pieces cannot be equal, the first is shorter. It is differentiated last (except in the reverse direction), in
        blocks that longer pieces have left. A short piece that came first would leave a card's allocator with blocks
        that are too small for all others. Windows start at the first step.
        """
        short = 0 if self.candidate.window is not None else self.pieces * self.length - self.steps
        start = max(0, i * self.length - short)
        return start, min((i + 1) * self.length - short, self.steps) - start

    def narrow(self, whole: Tensor, i: int) -> Tensor:
        return whole.narrow(self.model.time_dim, *self.span(i))

    def cut(self, whole: Tensor, i: int) -> Tensor:
        """Return piece `i` of a tensor of all steps, on the device of the weights."""
        return self.narrow(whole, i).to(self.model.device, non_blocking=True)

    def inputs(self, i: int) -> Tensor:
        """Return piece `i` of the inputs. Padding is set to zero, since NaN times 0 is NaN."""
        piece, spec = self.cut(self.batch.inputs, i), self.model.spec
        real = None if spec.vocab is not None else _real(spec, self.batch, *self.span(i))
        return piece if real is None else piece.masked_fill(~real.to(piece.device).unsqueeze(-1), 0)

    def advance(self, i: int, state: State | None) -> tuple[Tensor, State]:
        """Run piece `i` up to the head; return the outputs of the last layer and the state after the piece."""
        return self.model.advance(self.inputs(i), state, self.lengths(i))

    def lengths(self, i: int) -> Tensor | None:
        """Real steps of each sequence within piece `i`."""
        start, steps = self.span(i)
        return None if self.batch.lengths is None else (self.batch.lengths - start).clamp(0, steps)

    def remember(self) -> Restore:
        """Return a function that sets random numbers back, for the same dropout masks when a piece is recomputed."""
        return remember(*self.generators)

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context that computes in the candidate's precision."""
        return autocast(self.candidate.precision, self.model.device.type)

    def loss(self, i: int, hidden: Tensor) -> Tensor | None:
        """Return the loss of piece `i`; None if it has no targets."""
        model, spec = self.model, self.model.spec
        if spec.head == "per-step":
            real = _real(spec, self.batch, *self.span(i))
            return summed_loss(spec.loss, model.head(hidden), self.cut(self.batch.targets, i), real)
        rows, last = self.last_steps(i, hidden)
        if not len(rows):
            return None
        targets = self.batch.targets.index_select(0, rows.to(self.batch.targets.device))
        return summed_loss(spec.loss, model.head(last), targets.to(model.device, non_blocking=True))

    def last_steps(self, i: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sequences whose last step is in piece `i`, and the outputs of that step."""
        model, lengths, (start, steps) = self.model, self.batch.lengths, self.span(i)
        if lengths is None:
            rows = hidden.shape[1 - model.time_dim] if start + steps == self.steps else 0
            return torch.arange(rows), model.last_steps(hidden, None)
        here = ((lengths > start) & (lengths <= start + steps)).nonzero().flatten()
        ending = hidden.index_select(1 - model.time_dim, here.to(hidden.device))
        return here, model.last_steps(ending, lengths[here] - start)

    def differentiate(self, loss: Tensor | None) -> None:
        """Run backward from a loss, and add it to the total."""
        if loss is not None and loss.requires_grad:
            (loss * self.scale).backward()  # type: ignore[no-untyped-call]
        if loss is not None:
            self.total.add_(loss.detach())


def summed_loss(kind: str | None, outputs: Tensor, targets: Tensor, real: Tensor | None = None) -> Tensor:
    """The loss, summed over the steps and sequences that are `real`."""
    real = None if real is None else real.to(outputs.device, non_blocking=True)
    if kind == "cross-entropy":
        targets = targets if real is None else targets.masked_fill(~real, IGNORED)
        return functional.cross_entropy(
            outputs.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=IGNORED
        )
    if real is not None:  # where nothing is real, the outputs are their own targets: no loss and no gradient
        targets = torch.where(real.unsqueeze(-1), targets, outputs.detach().to(targets.dtype))
    return functional.mse_loss(outputs, targets, reduction="sum")


def _real(spec: Spec, batch: Microbatch, start: int, steps: int) -> Tensor | None:
    """Return a mask of the steps that are not padding, in the layout of the inputs; None if none is padding."""
    if batch.lengths is None or int(batch.lengths.min()) >= start + steps:
        return None
    real = torch.arange(start, start + steps)[:, None] < batch.lengths
    return real.T if spec.batch_first else real


def evaluate(model: Recurrent, batch: Microbatch, candidate: Candidate) -> Tensor:
    """Return the sum of the losses over real steps and sequences, on the model's device."""
    run = Run(model, batch, candidate, whole=model.spec.bidirectional)
    with without_graph(model):
        for i, hidden in _pieces(run):
            with run.computing():
                loss = run.loss(i, hidden)
            if loss is not None:
                run.total.add_(loss)
    return run.total


def outputs(model: Recurrent, batch: Microbatch, candidate: Candidate) -> Tensor:
    """Return the outputs on the CPU in float32: sequences x steps x outputs, or sequences x outputs at the last."""
    run, made = Run(model, batch, candidate, whole=model.spec.bidirectional), []
    ends = torch.zeros(batch.inputs.shape[1 - model.time_dim], model.spec.classes)
    with without_graph(model):
        for i, hidden in _pieces(run):
            with run.computing():
                if model.spec.head == "per-step":
                    made.append(model.head(hidden).float().cpu())
                else:
                    rows, last = run.last_steps(i, hidden)
                    if len(rows):
                        ends[rows] = model.head(last).float().cpu()
    if model.spec.head == "last-step":
        return ends
    return torch.cat([piece if model.spec.batch_first else piece.transpose(0, 1) for piece in made], 1)


def _pieces(run: Run) -> Iterator[tuple[int, Tensor]]:
    """Yield the outputs of the last layer, one piece at a time."""
    state: State | None = None
    for i in range(run.pieces):
        with run.computing():
            hidden, state = run.advance(i, state)
        yield i, hidden
        del hidden


@contextmanager
def without_graph(module: nn.Module) -> Iterator[None]:
    """Record no graph, with a module in evaluation mode: kernels in training mode fill their reserve even so."""
    before = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(before)
