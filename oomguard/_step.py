"""One optimizer update: the same code in probes and in training."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import get_total_norm
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop

from oomguard._adam8bit import TorchaoAdam8bit, TorchaoAdamW8bit
from oomguard._core.errors import MisuseError
from oomguard._estimate.terms import divide
from oomguard._rnn import Microbatch, backward
from oomguard._rnn.model import Recurrent, build, trainable
from oomguard._rnn.run import autocast
from oomguard._rnn.segmented import segmented
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec
from oomguard._task.task import Task

Chooser = Callable[[Microbatch], Candidate]  # chooses the candidate that runs a microbatch
Run = Callable[[Optimizer, Callable[[], object]], None]
"""Runs the step of an optimizer, which is the second argument: the guard handles failures in it."""
Clip = Callable[[list[Tensor]], object]  # changes the gradients of parameters, once per update
Piece = TypeVar("Piece")
_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    **{"adam": Adam, "adamw": AdamW, "rmsprop": RMSprop, "adagrad": Adagrad, "adafactor": Adafactor},
    **{"sgd": SGD, "sgd-momentum": partial(SGD, momentum=0.9)},
}
_IN_8_BITS = {"adam": "Adam8bit", "adamw": "AdamW8bit", "sgd-momentum": "SGD8bit", "rmsprop": "RMSprop8bit"}
"""The optimizers of bitsandbytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTraining:
    """The state that an update of any model changes, and the candidate that runs it."""

    model: nn.Module
    candidate: Candidate
    optimizer: Optimizer
    scaler: GradScaler | None = None  # scales the loss in fp16
    owned: frozenset[Tensor] | None = None  # weights that this process updates; None: all

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = self.optimizer.param_groups[0]["params"][0].device
        return device


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(TaskTraining):
    """The state that an update of the model of a spec changes, and the candidate that runs it."""

    model: Recurrent


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of an update."""

    loss: Tensor  # the mean loss over the real targets (several outputs are summed), on the model's device
    skipped: bool = False  # whether fp16 gradients overflowed, so that no weight changed and the scale was lowered
    norm: Tensor | None = None  # the gradient's norm before clipping; None without clipping


def prepare(
    spec: Spec,
    candidate: Candidate,
    device: str = "cpu",
    lr: float = 1e-3,
    *,
    model: Recurrent | None = None,
    rank: int = 0,
) -> Training:
    """Make a model (default: a new one) with its optimizer, on a device.

    If several processes share the optimizer's state, it has that of the process `rank`. Process 0 has the largest
    share, so it is what a probe measures.
    """
    model = (build(spec) if model is None else model).to(device)
    optimizer, scaler = make_optimizer(model, candidate, lr), make_scaler(candidate, device)
    owned = None
    if candidate.shards > 1:
        owned = frozenset(weight for weight, owner in owners(model, candidate.shards) if owner == rank)
        for weight in [weight for weight in optimizer.state if weight not in owned]:  # Adagrad makes it at once
            del optimizer.state[weight]
    return Training(model=model, candidate=candidate, optimizer=optimizer, scaler=scaler, owned=owned)


def owners(model: nn.Module, shards: int) -> list[tuple[Tensor, int]]:
    """The trained weights, each with the process that keeps its optimizer state and updates it."""
    parameters = trainable(model)
    return [*zip(parameters, divide([p.numel() for p in parameters], shards), strict=True)]


def make_scaler(candidate: Candidate, device: str) -> GradScaler | None:
    """Make the scaler of the loss that fp16 needs; None for other precisions."""
    return GradScaler(torch.device(device).type) if candidate.precision == "fp16" else None


def make_optimizer(model: Recurrent, candidate: Candidate, lr: float = 1e-3) -> Optimizer:
    """Make the spec's optimizer for the trained parameters, as the candidate runs it."""
    name = model.spec.optimizer
    parameters = trainable(model)
    if name == "adam8bit" or candidate.state_8bit:
        return _in_8_bits("adam" if name == "adam8bit" else name, parameters, lr)
    update = candidate.update
    if update == "fused" and name in ("rmsprop", "adafactor"):  # PyTorch has no fused ones
        update = "foreach" if name == "rmsprop" else "loop"
    how = {"fused": True} if update == "fused" else {"foreach": update == "foreach"}
    return _OPTIMIZERS[name](parameters, lr=lr, **how)


def _in_8_bits(name: str, parameters: list[nn.Parameter], lr: float) -> Optimizer:
    """Make an optimizer of bitsandbytes on a card, if that is installed there, otherwise ours with torchao."""
    try:
        if parameters[0].device.type == "cpu":
            raise ImportError
        from bitsandbytes import optim  # type: ignore[import-not-found]
    except ImportError:
        makers: dict[str, Callable[..., Optimizer]] = {"adam": TorchaoAdam8bit, "adamw": TorchaoAdamW8bit}
    else:
        makers = {name: getattr(optim, of_package) for name, of_package in _IN_8_BITS.items()}
    if name not in makers:
        raise MisuseError(
            rule=f"In 8 bits there are {', '.join(makers)} here",
            got=f"got --optimizer {name}",
            advice="Take one of these, or leave --state-8bit out.",
        )
    momentum = {"momentum": 0.9} if name == "sgd-momentum" else {}
    return makers[name](parameters, lr=lr, **momentum)


def step(training: Training, microbatches: Iterable[Microbatch], targets: int, clip: float | None = None) -> Outcome:
    """Accumulate the gradient of all microbatches, then update once.

    `targets` is the number of real targets in the whole batch (`count_targets`), so that unequal microbatches have
    the right weights. `clip` is the largest norm of the whole batch's gradient.
    """
    with no_gradient_left(training):
        loss = accumulate(training, microbatches, targets)
        return update(training, loss, clip)


def accumulate(
    training: Training, microbatches: Iterable[Microbatch], targets: int, how: Chooser | None = None
) -> Tensor:
    """Add the gradients of all microbatches to the present ones; return the loss.

    `how` chooses a candidate for each microbatch (length buckets); without it, the training's candidate runs all.
    """
    scale, total = 1.0 / max(1, targets), None
    weight: float | Tensor = scale
    if training.scaler is not None:
        weight = training.scaler.scale(torch.tensor(scale, device=training.model.device))
    for batch in microbatches:
        loss = backward(training.model, batch, training.candidate if how is None else how(batch), weight)
        total = loss if total is None else total + loss
        del batch  # free this microbatch before the next one is made
    assert total is not None, "a batch has at least one microbatch"
    return total * scale


@contextmanager
def no_gradient_left(training: TaskTraining) -> Iterator[None]:
    """Clear all gradients after an update, whether it succeeds or fails."""
    done = False
    try:
        yield
        done = True
    finally:
        training.optimizer.zero_grad(set_to_none=True)
        if not done and training.scaler is not None:
            training.scaler.update(training.scaler.get_scale())


def update(training: TaskTraining, loss: Tensor, clip: float | None = None, run: Run | None = None) -> Outcome:
    """Clip the gradient of the whole batch, and update the weights unless fp16 overflowed."""
    step = partial(offloaded_step, training.optimizer) if training.candidate.offload else training.optimizer.step
    step = step if run is None else partial(run, training.optimizer, step)
    step = step if training.owned is None else partial(_step_owned, training.optimizer, training.owned, step)
    skipped, norm = apply_gradient(training.optimizer, step, training.scaler, clip)
    return Outcome(loss=loss, skipped=skipped, norm=norm)


def _step_owned(optimizer: Optimizer, owned: frozenset[Tensor], step: Callable[[], object]) -> None:
    """Update only some weights: PyTorch's optimizers keep no state for parameters that never have a gradient."""
    for parameter in with_gradient(optimizer):
        if parameter not in owned:
            parameter.grad = None
    step()


def apply_gradient(
    optimizer: Optimizer, step: Callable[[], object], scaler: GradScaler | None, clip: float | Clip | None
) -> tuple[bool, Tensor | None]:
    """Clip the gradient and call `step`. Returns whether fp16 overflowed instead, and the norm before clipping.

    Without clipping to a norm, the norm is None.
    """
    replaced, norm = _Replaced(optimizer, step), None
    if scaler is not None:
        scaler.unscale_(replaced)  # type: ignore[arg-type]
    if callable(clip):
        clip(with_gradient(optimizer))
    elif clip is not None:
        norm = _clip(with_gradient(optimizer), clip)
    if scaler is None:
        step()
        return False, norm
    before = scaler.get_scale()
    scaler.step(replaced)  # type: ignore[arg-type]
    scaler.update()
    return scaler.get_scale() < before, norm


def accumulate_pieces(
    pieces: Iterable[tuple[Piece, float]],
    loss_of: Callable[[Piece], tuple[Tensor, float | None]],
    optimizer: Optimizer,
    scaler: GradScaler | None = None,
) -> Tensor:
    """Add up the gradient of the pieces of a batch, each with its share of the rows; returns the loss of the batch.

    `loss_of` returns a mean over the rows and None, or a sum and its weight.
    """
    losses, weights = list[Tensor](), list[float]()
    for piece, share in pieces:
        loss, weight = loss_of(piece)
        # sums are divided by the first weight, so that they stay in the range of fp16, and corrected at the end
        weights += [] if weight is None else [weight]
        loss = loss * share if weight is None else loss / (weights[0] or 1.0)
        (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        del piece, loss
    total = torch.stack(losses).sum()
    if len(weights) > 1:
        correction = (weights[0] or 1.0) / (sum(weights) or 1.0)
        for parameter in with_gradient(optimizer):
            assert parameter.grad is not None
            parameter.grad *= correction
        total *= correction
    return total


def loss_on(
    task: Task, model: nn.Module, candidate: Candidate, device: str, batch: object, *, training: bool = True
) -> tuple[Tensor, float | None]:
    """The loss of a task on a batch, run as a candidate: a mean and None, or a sum and its weight."""
    from oomguard._task.trace import evaluate  # its fake tensors take memory that other trainings do not need

    with as_candidate(candidate, device):
        total, weight = evaluate(task, model, batch, training=training)
    return total, None if weight is None else float(weight)


@contextmanager
def as_candidate(candidate: Candidate, device: str) -> Iterator[None]:
    """Run the forward pass of any model in the segments and the precision of a candidate."""
    pieces = segmented(candidate.segments, recompute=candidate.recompute) if candidate.segments > 1 else nullcontext()
    with autocast(candidate.precision, torch.device(device).type), pieces:
        yield


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise if an optimizer needs a closure, which computes the loss several times in one update."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise MisuseError(
            rule="The optimizer must update once from the gradient",
            got=f"{type(optimizer).__name__} calls a closure several times",
            advice="Take another optimizer, or use oomguard.guard inside the closure.",
        )


def with_gradient(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer that have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _clip(parameters: list[Tensor], most: float) -> Tensor:
    """Scale all gradients, sparse ones too, to a joint norm of at most `most`; return the norm before."""
    gradients = []
    for p in parameters:
        if p.grad is not None:
            p.grad = p.grad.coalesce() if p.grad.is_sparse else p.grad
            gradients.append(p.grad._values() if p.grad.is_sparse else p.grad)
    norm = get_total_norm(gradients)
    for gradient in gradients:
        gradient.mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return norm


class _Replaced:
    """An optimizer whose step is replaced by a function."""

    def __init__(self, optimizer: Optimizer, step: Callable[[], object]) -> None:
        self.step = step
        self.param_groups = optimizer.param_groups  # GradScaler reads it


def offloaded_step(optimizer: Optimizer) -> None:
    """Update with an optimizer state that lives in host memory and is copied to the card for one parameter at a time.

    PyTorch's optimizers skip parameters without a gradient, so each parameter gets its gradient in turn.
    """
    parameters = with_gradient(optimizer)
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
        _move(optimizer.state[p], p.device)
        optimizer.step()
        _move(optimizer.state[p], torch.device("cpu"))
        p.grad = None


def _move(state: dict[str, object], device: torch.device) -> None:
    """Move the tensors of one parameter's state; the step counter stays on the CPU, where the optimizer put it."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            state[name] = value.to(device)
