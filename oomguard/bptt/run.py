"""One microbatch on its way through the model: its pieces, their loss, their precision, their random numbers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from oomguard.candidate import Candidate
from oomguard.model import Recurrent
from oomguard.spec import Spec

IGNORED = -100
"""The target of a step that has none, as PyTorch's cross-entropy has it."""
Mark = Tensor | None
"""The state of a generator of random numbers; None: nothing is random."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Microbatch(NamedTuple):
    """The sequences of one pass, padded to one length. It may stay in host memory: pieces come over one by one."""

    inputs: Tensor
    """Time x sequences (or the other way round with batch_first) x features, or tokens."""
    targets: Tensor
    """For each step, or for each sequence."""
    lengths: Tensor | None = None
    """Real steps of each sequence, on the CPU; None: there is no padding."""


def count_targets(spec: Spec, batch: Microbatch) -> int:
    """How many targets are real: padding and `IGNORED` ones are not.

    >>> spec = Spec(cell="gru", seq=5, features=3, batch=2)
    >>> count_targets(spec, Microbatch(torch.zeros(5, 2, 3), torch.zeros(5, 2, 1), torch.tensor([5, 2])))
    7
    """
    real = real_steps(spec, batch, 0, batch.inputs.shape[1 if spec.batch_first else 0])
    if spec.loss == "cross-entropy":
        wanted = batch.targets != IGNORED
        return int((wanted if real is None else wanted & real.to(wanted.device)).sum())
    if real is not None:
        return int(real.sum())
    return batch.targets.shape[:-1].numel()


class Dice:
    """The random numbers of dropout: a piece that is gone through again must drop out what it dropped out before.

    `mark()` before a piece, `back_to(mark)` before it is gone through again. The first time through all pieces is in
    order, and `end()` notes where it ended: there the numbers go on after the pass, as after a plain one.
    """

    def __init__(self, model: Recurrent) -> None:
        self.generator: torch.Generator | None = None
        if model.spec.dropout and model.training and len(model.calls) > 1:
            cuda = model.device.type == "cuda"
            self.generator = torch.cuda.default_generators[model.device.index or 0] if cuda else torch.default_generator
        self.last: Mark = None

    def mark(self) -> Mark:
        """Where the numbers are."""
        return None if self.generator is None else self.generator.get_state()

    def back_to(self, mark: Mark) -> None:
        """Let them fall again as they fell from there."""
        if self.generator is not None and mark is not None:
            self.generator.set_state(mark)

    def end(self) -> None:
        """All pieces have been gone through; what follows is repetition."""
        if self.last is None:
            self.last = self.mark()

    @contextmanager
    def put_down(self) -> Iterator[None]:
        """After it the numbers go on as after a plain pass, or as before if the pass failed."""
        start = self.mark()
        try:
            yield
        except BaseException:
            self.back_to(start)
            raise
        self.back_to(self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One microbatch on its way through the model in pieces of `length` steps."""

    model: Recurrent
    batch: Microbatch
    length: int
    candidate: Candidate
    scale: float | Tensor
    total: Tensor = field(init=False)
    dice: Dice = field(init=False)

    def __post_init__(self) -> None:
        weight = self.model.head.weight
        object.__setattr__(self, "total", torch.zeros((), device=weight.device, dtype=weight.dtype))
        object.__setattr__(self, "dice", Dice(self.model))

    @property
    def steps(self) -> int:
        return self.batch.inputs.shape[self.model.time_dim]

    @property
    def pieces(self) -> int:
        return -(-self.steps // self.length)

    @property
    def home(self) -> torch.device:
        """Where what spans the whole sequence stays."""
        return torch.device("cpu") if self.candidate.keep == "host" else self.model.device

    def span(self, i: int) -> tuple[int, int]:
        """First step of piece `i`, and how many.

        If they cannot be equal, the first is shorter: it is differentiated last (but for the direction that goes the
        other way), in blocks that longer pieces have left. Done first, it would leave a card's allocator with blocks
        that are too small for all others. Windows begin where the sequence does, as everywhere.
        """
        short = 0 if self.candidate.window is not None else self.pieces * self.length - self.steps
        start = max(0, i * self.length - short)
        return start, min((i + 1) * self.length - short, self.steps) - start

    def cut(self, whole: Tensor, i: int) -> Tensor:
        """Piece `i` of a tensor of all steps, where the weights are."""
        return whole.narrow(self.model.time_dim, *self.span(i)).to(self.model.device, non_blocking=True)

    def inputs(self, i: int) -> Tensor:
        """Piece `i` of the inputs. Padding that would be computed with is zeroed: NaN times 0 is NaN."""
        piece, spec = self.cut(self.batch.inputs, i), self.model.spec
        real = None if spec.vocab is not None else _real(self.batch, *self.span(i))
        if real is None:
            return piece
        real = (real.T if spec.batch_first else real).to(piece.device)
        return piece.masked_fill(~real.unsqueeze(-1), 0)

    def lengths(self, i: int) -> Tensor | None:
        """Real steps of each sequence within piece `i`."""
        start, steps = self.span(i)
        return None if self.batch.lengths is None else (self.batch.lengths - start).clamp(0, steps)

    def computing(self) -> AbstractContextManager[Any]:
        """The candidate's precision."""
        if self.candidate.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.model.device.type, DTYPES[self.candidate.precision])

    def loss(self, i: int, hidden: Tensor) -> Tensor | None:
        """Head and loss of piece `i`; None if nothing is to be predicted there."""
        model, spec = self.model, self.model.spec
        start, steps = self.span(i)
        if spec.head == "per-step":
            real = real_steps(spec, self.batch, start, steps)
            return summed_loss(spec.loss, model.head(hidden), self.cut(self.batch.targets, i), real)
        lengths = self.batch.lengths
        if lengths is None:
            if start + steps < self.steps:
                return None
            targets = self.batch.targets.to(model.device, non_blocking=True)
            return summed_loss(spec.loss, model.head(model.last_steps(hidden, None)), targets)
        here = ((lengths > start) & (lengths <= start + steps)).nonzero().flatten()
        if not len(here):
            return None
        ends = model.last_steps(hidden.index_select(1 - model.time_dim, here.to(hidden.device)), lengths[here] - start)
        targets = self.batch.targets.index_select(0, here.to(self.batch.targets.device)).to(model.device)
        return summed_loss(spec.loss, model.head(ends), targets)

    def differentiate(self, loss: Tensor | None) -> None:
        """Backward of a loss that is all its graph leads to."""
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


def real_steps(spec: Spec, batch: Microbatch, start: int, steps: int) -> Tensor | None:
    """Which of these steps have real targets, in the layout of the targets; None: all."""
    real = None if spec.head == "last-step" else _real(batch, start, steps)
    return real.T if real is not None and spec.batch_first else real


def _real(batch: Microbatch, start: int, steps: int) -> Tensor | None:
    """Which of these steps are no padding, time x sequences; None: all."""
    if batch.lengths is None or int(batch.lengths.min()) >= start + steps:
        return None
    return torch.arange(start, start + steps)[:, None] < batch.lengths


def start_from(ends: list[tuple[Tensor, Tensor]]) -> None:
    """Backward from several tensors at once, each with its gradient."""
    if ends:
        torch.autograd.backward([end for end, _ in ends], [gradient for _, gradient in ends])


@contextmanager
def keeping_nothing(model: Recurrent) -> Iterator[None]:
    """No graph, and kernels in evaluation mode: in training mode they fill their reserve even without one."""
    model.calls.train(False)
    try:
        with torch.no_grad():
            yield
    finally:
        model.calls.train(model.training)
