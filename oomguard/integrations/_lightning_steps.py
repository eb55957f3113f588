"""The steps of a LightningModule during a training: in pieces, inside a guard."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from oomguard._device.find import open_device
from oomguard._guard import Guard
from oomguard._guard.events import Events
from oomguard._guard.ladder import LadderPosition
from oomguard._plan.task_value import TaskPlan
from oomguard._spec.candidate import Candidate
from oomguard._step import as_candidate
from oomguard._train.ranks import Ranks
from oomguard.integrations._fit import detached, in_halves, in_pieces, joined, mean, remember_state
from oomguard.integrations._lightning_task import Weight, loss_in

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Steps:
    """Takes the place of the steps of a module, until `close`."""

    def __init__(
        self,
        trainer: "Trainer",
        module: "LightningModule",
        *,
        plan: TaskPlan | None,
        budget_bytes: int | None,
        position: LadderPosition,
        path: Path,
        weight: Weight | None,
        dim: object,
    ) -> None:
        device = str(trainer.strategy.root_device)
        self.weight, self.dim, self.trainer, self.events = weight, dim, trainer, Events(path)
        self.guard = Guard(
            plan,
            budget_bytes=budget_bytes,
            device=open_device(device),
            events=self.events if trainer.is_global_zero else None,
            position=None if plan is None else position,
            agree=Ranks(rank=trainer.global_rank, world=trainer.world_size, device=device).agree,
        )
        self.rows = None if plan is None else plan.evaluation_rows  # of a piece in validation
        self.way = Candidate(microbatch=1) if plan is None else plan.candidate
        if str(trainer.precision) != "32-true":  # then Lightning sets the precision
            self.way = msgspec.structs.replace(self.way, precision="fp32")
        with ExitStack() as stack:
            stack.enter_context(self.guard)
            for name, run in (("training_step", self._train), ("validation_step", self._validate)):
                stack.enter_context(_replaced(module, name, _Step(partial(run, module), getattr(module, name))))
            if getattr(trainer.precision_plugin, "scaler", None) is None:
                stack.enter_context(_replaced(trainer.strategy, "optimizer_step", self._update))
            self.close = stack.pop_all().close

    def _train(self, module: nn.Module, step: Callable[..., Any], batch: Any, *index: Any) -> Any:
        """Run the forward and the backward passes of a batch, and return a loss that has their gradient."""
        batch, scaler = self._parts(batch), getattr(self.trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        held = _take_gradients(parameters)  # of earlier batches, if Lightning accumulates
        restore, log = remember_state(module), _Log()

        def undo() -> None:
            _take_gradients(parameters)
            restore()
            log.calls.clear()

        def run(piece: Any, share: float) -> tuple[Any, float]:
            share = self._share(batch, piece, share)
            log.shares.append(share)
            with as_candidate(self.way, self.guard.device.name):
                output = step(piece, *index)
            loss = loss_in(output)
            if loss is not None:
                with torch.autocast(loss.device.type, enabled=False):
                    (loss * (share * scale)).backward()
            return detached(output), share

        with _replaced(module, "log", log.record):
            results = in_pieces(self.guard, batch, run, undo=undo, dim=self.dim)
        log.replay(module)
        given = _take_gradients(parameters)
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = gradient
        return _returned([result for result in results if loss_in(result[0]) is not None], parameters, given, scale)

    def _validate(self, module: nn.Module, step: Callable[..., Any], batch: Any, *index: Any) -> Any:
        """Run a batch of the validation in pieces of its own size."""
        batch, restore, log = self._parts(batch), remember_state(module), _Log()

        def undo() -> None:
            restore()
            log.calls.clear()

        def run(piece: Any, share: float) -> tuple[Any, float]:
            share = self._share(batch, piece, share)
            log.shares.append(share)
            return step(piece, *index), share

        with _replaced(module, "log", log.record):
            results, self.rows = in_halves(self.guard, batch, self.rows, run, undo=undo, dim=self.dim)
        log.replay(module)
        return joined([output for output, _ in results], [share for _, share in results])

    def _update(self, optimizer: Optimizer, closure: Callable[[], Any], *more: Any, **others: Any) -> Any:
        """Run the closure, then the update, which is completed if memory runs out in the middle of it."""
        loss, results = closure(), list[Any]()
        strategy = self.trainer.strategy

        def step() -> None:
            results.append(type(strategy).optimizer_step(strategy, optimizer, lambda: loss, *more, **others))

        self.guard.update(optimizer, step)
        return results[-1] if results else loss

    def _parts(self, batch: Any) -> Any:
        """A batch that PyTorch collated: its list of inputs and targets must not be taken for a list of sequences."""
        collate = getattr(self.trainer.train_dataloader, "collate_fn", None)
        return tuple(batch) if isinstance(batch, list) and collate is default_collate else batch

    def _share(self, batch: Any, piece: Any, share: float) -> float:
        """The share that a piece has in the loss of the batch."""
        return share if self.weight is None else float(self.weight(piece)) / (float(self.weight(batch)) or 1.0)


class _Step:
    """A function in the place of a step of a module. Copies of the module have the step itself again."""

    def __init__(self, run: Callable[..., Any], step: Callable[..., Any]) -> None:
        self._run, self.__wrapped__ = run, step

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._run(self.__wrapped__, *arguments, *named.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return deepcopy(self.__wrapped__, memo)

    @property
    def __code__(self) -> Any:
        """The code of the step: by it, Lightning tells whether a module has one."""
        return self.__wrapped__.__code__


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Give an object another method for a while."""
    before = {name: vars(owner)[name]} if name in vars(owner) else {}
    vars(owner)[name] = value
    try:
        yield
    finally:
        del vars(owner)[name]
        vars(owner).update(before)


class _Log:
    """What a module logs while a batch runs in pieces, to be logged once when all of them are done."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[list[Any], tuple[Any, ...], dict[str, Any]]] = {}
        self.shares: list[float] = []

    def record(self, name: str, value: Any, *positional: Any, **named: Any) -> None:
        """Take the place of `self.log`."""
        values, _, before = self.calls.setdefault(name, ([], positional, {}))
        values.append((detached(value), self.shares[-1]))
        sizes = {"batch_size": before.get("batch_size", 0) + named["batch_size"]} if named.get("batch_size") else {}
        before.update(named | sizes)

    def replay(self, module: Any) -> None:
        """Log every name once, with the value for the whole batch."""
        for name, (values, positional, named) in self.calls.items():
            value = _reduced(
                [value for value, _ in values], [share for _, share in values], named.get("reduce_fx", "mean")
            )
            module.log(name, value, *positional, **named)


def _reduced(values: list[Any], shares: list[float], how: Any) -> Any:
    """One value of several pieces, as Lightning would reduce them. A metric has seen all pieces itself."""
    if isinstance(values[0], Mapping):
        return {key: _reduced([value[key] for value in values], shares, how) for key in values[0]}
    if len(values) == 1 or not isinstance(values[0], Tensor | int | float):
        return values[-1]
    simple: dict[str, Callable[[list[Any]], Any]] = {"sum": sum, "max": max, "min": min}
    name = getattr(how, "__name__", how)
    return simple[name](values) if name in simple else mean(values, shares)


def _take_gradients(parameters: list[nn.Parameter]) -> list[Tensor | None]:
    """The gradients of parameters, which have none then."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def _returned(
    results: list[tuple[Any, float]], parameters: list[nn.Parameter], gradients: list[Tensor | None], scale: float
) -> Any:
    """What the training step returns for the whole batch; None if all pieces were skipped."""
    if not results:
        return None
    outputs, shares = [output for output, _ in results], [share for _, share in results]
    total = mean([loss_in(output) for output in outputs], shares) * sum(shares)
    trained = [parameter for parameter, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
    known: Any = _Given
    loss = known.apply(total, [gradient for gradient in gradients if gradient is not None], scale, *trained)
    gradients.clear()
    return joined(outputs, shares) | {"loss": loss} if isinstance(outputs[0], Mapping) else loss


class _Given(torch.autograd.Function):
    """A loss whose gradient, times a scale, is known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], scale: float, *parameters: Tensor) -> Tensor:
        ctx.gradients, ctx.scale = gradients, scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        factor = upstream[0] / ctx.scale
        return None, None, None, *[gradient.mul_(factor.to(gradient)) for gradient in gradients]
