"""A callback for Lightning: `Trainer(callbacks=[OomGuard(budget="6GiB")])` plans a training and keeps it within memory.

It serves the packages `lightning` and `pytorch_lightning`. Before the training it plans, in child processes. Then it
takes the place of the module's `training_step`: a batch runs in pieces, forward and backward, inside a guard, and
Lightning gets a loss whose gradient is known already. Everything after that is Lightning's own: the scale of the loss,
accumulation, the exchange between processes, clipping, hooks and the update.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oomguard._core.errors import GuardError, MisuseError, check_choice, check_whole
from oomguard._core.units import MIB, read_budget
from oomguard._device.find import open_device
from oomguard._guard import Guard
from oomguard._guard.events import Event, Events
from oomguard._guard.ladder import LadderPosition
from oomguard._plan.task_value import TaskPlan
from oomguard._rnn.rng import remember_all
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import MAX_BATCH
from oomguard._step import as_candidate
from oomguard._task.task import Task
from oomguard._train.ranks import Ranks
from oomguard.integrations import _lightning as own
from oomguard.integrations._fit import detached, in_halves, in_pieces, joined, mean, plan_here, remember_state

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
EVENTS = "oomguard-events.jsonl"


def _bases() -> tuple[type, ...]:
    """The classes of callbacks of the packages that are imported; without one, of the first that is installed."""
    if not any(package in sys.modules for package in PACKAGES):
        package = next((name for name in PACKAGES if find_spec(name.partition(".")[0]) is not None), None)
        if package is None:
            raise ImportError(
                "oomguard.integrations.lightning needs the package lightning or pytorch-lightning, but neither is "
                "installed. Install it with: pip install 'oomguard[lightning]'",
                name="lightning",
            )
        import_module(package)
    return tuple(sys.modules[package].Callback for package in PACKAGES if package in sys.modules)


if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
else:
    Callback = type("Callback", _bases(), {})


class OomGuard(Callback):
    """Plans a training of Lightning before it begins, and keeps it within memory: `callbacks=[OomGuard("6GiB")]`.

    `budget` is the bytes that each process may use on its device, as a number or text; None means the free memory. The
    plan is made from the module and its training loader, in child processes, and keeps the batch of the loader: if it
    does not fit at once, each step runs it in microbatches or in segments. Numbers that `training_step` logs are means
    over the microbatches. If memory runs out nevertheless, the batch runs again in smaller ones, in all processes.

    `batch` is the number of rows of an update in each process. It sets `batch_size`, if the module or the datamodule
    has one, and `accumulate_grad_batches` otherwise. With `maximize="batch"`, the loader gets the largest batch that
    fits in one pass; with both, the largest that divides `batch`, and `accumulate_grad_batches` makes up for it.
    `allow` takes "precision" (bf16, if it is faster), "microbatch" and "segments", for modules whose gradient these
    change. `weight(batch)` is the weight of a batch, such as the number of its tokens, if the loss is a mean over
    something other than rows. `dim` says where batches hold their rows, as for `oomguard.stepper`.

    `plan` is True, a plan that was made before, or False for a guard with a budget alone. `timeout` limits the search.
    `events` is the file of events, in the log directory unless it is given. After the training, `plan`, `rung`,
    `peak_bytes` and `events` tell what happened.

    >>> OomGuard(budget="6GiB").rung
    0
    """

    def __init__(
        self,
        budget: int | str | None = None,
        *,
        batch: int | None = None,
        maximize: str = "throughput",
        allow: str | tuple[str, ...] = (),
        weight: own.Weight | None = None,
        dim: object = 0,
        plan: TaskPlan | bool = True,
        timeout: float | str = 55.0,
        events: str | None = None,
    ) -> None:
        read_budget(budget)
        check_whole("batch", batch, 1, MAX_BATCH)
        check_choice("maximize", maximize, ("throughput", "batch"))
        self.budget, self.batch, self.maximize, self.weight, self.dim = budget, batch, maximize, weight, dim
        self.allow = tuple(word for word in allow.split(",") if word) if isinstance(allow, str) else tuple(allow)
        self.timeout, self.path = timeout, events
        self.plan: TaskPlan | None = plan if isinstance(plan, TaskPlan) else None
        self.peak_bytes = 0
        self.events: list[Event] = []
        self._plans = plan is True
        self._position = LadderPosition()
        self._steps: _Steps | None = None

    @property
    def rung(self) -> int:
        """0 is the plan's candidate, 1 its first fallback. Without a plan, each rung halves the microbatch."""
        return self._position.rung

    # ---- hooks of Lightning

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Plan, set what was planned, and take the place of the module's steps."""
        self._close()
        optimizer = own.check(trainer, pl_module)
        restore_random = remember_all(trainer.strategy.root_device)
        if self.batch is not None and self.maximize == "throughput":
            self._set_batch(trainer, pl_module, self.batch if own.has_batch_size(trainer, pl_module) else None)
        if self._plans and not trainer.fast_dev_run:
            self.plan = self._agree_on_plan(trainer, pl_module, optimizer)
            own.package_of(trainer, "utilities.rank_zero").rank_zero_info(f"OomGuard: {self.plan}")
        if self.maximize == "batch" and self.plan is not None:
            most, batch = self.plan.batch, self.batch
            divides = (rows for rows in range(min(most, batch or most), 0, -1) if not (batch or rows) % rows)
            self._set_batch(trainer, pl_module, next(divides))
        restore_random()
        self._steps = _Steps(self, trainer, pl_module)
        for logger in trainer.loggers:
            logger.log_hyperparams({f"oomguard/{name}": value for name, value in self._knobs().items()})

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the peak, the rung and the number of events: as often as Lightning logs, and after every event."""
        if self._steps is None:
            return
        before = len(self.events)
        self._read(self._steps)
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if len(self.events) > before or step % max(1, trainer.log_every_n_steps) == 0:
            figures = {"rung": self.rung, "peak_mib": self.peak_bytes / MIB, "events": len(self.events)}
            for logger in trainer.loggers:
                logger.log_metrics({f"oomguard/{name}": float(value) for name, value in figures.items()}, step=step)

    def on_fit_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Give the module its steps back, and lift the limit on memory."""
        self._close()

    def on_exception(self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException) -> None:
        """Do the same if the training ends with an error."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """The plan and the rung, for Lightning's checkpoints."""
        if self.plan is None:
            return {}
        return {"plan": msgspec.json.encode(self.plan).decode(), "position": msgspec.to_builtins(self._position)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the plan and the rung of a checkpoint, unless another budget is given now."""
        plan = msgspec.json.decode(state_dict["plan"], type=TaskPlan)
        if self._plans and (self.budget is None or plan.asked_budget_bytes == read_budget(self.budget)):
            self.plan, self._plans = plan, False
            self._position = msgspec.convert(state_dict["position"], LadderPosition)

    # ---- what the hooks do

    def __getstate__(self) -> dict[str, Any]:
        """The callback without the training that it is in: a copy guards nothing until it is in one itself."""
        return vars(self) | {"_steps": None}

    def _read(self, steps: "_Steps") -> None:
        """Take over what the guard has done."""
        guard = steps.guard
        self._position = guard.position
        self.events += steps.events.take_new()
        self.peak_bytes = max(self.peak_bytes, guard.watch.peak_bytes, guard.device.reading().peak_bytes)

    def _close(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            self._read(steps)
            steps.close()

    def _knobs(self) -> dict[str, Any]:
        """What the plan has chosen, for loggers."""
        if self.plan is None:
            return {"budget": str(self.budget)}
        chosen = {name: getattr(self.plan.candidate, name) for name in ("microbatch", "segments", "precision")}
        return chosen | {"batch": self.plan.batch, "budget_bytes": self.plan.budget_bytes}

    def _set_batch(self, trainer: "Trainer", module: "LightningModule", rows: int | None) -> None:
        """Let the loader make batches of so many rows (None: as it does), and an update have `batch` rows."""
        if rows is not None and rows != own.rows_of(trainer):
            own.set_rows(trainer, module, rows)
        found = own.rows_of(trainer)
        if self.batch is None:
            return
        if found is None or self.batch % found:
            raise MisuseError(
                rule="An update must consist of whole batches of the training loader",
                got=f"batch is {self.batch:,} and those have {found or 'unknown'} rows",
                advice="Give a multiple, or give the module or the datamodule a batch_size that its loaders use.",
            )
        trainer.accumulate_grad_batches = self.batch // found

    def _agree_on_plan(self, trainer: "Trainer", module: "LightningModule", optimizer: Optimizer) -> TaskPlan:
        """The plan that the first process makes, for all of them."""
        answer, error = "", None
        if trainer.is_global_zero:
            try:
                answer = msgspec.json.encode(self._find_plan(trainer, module, optimizer)).decode()
            except Exception as failure:
                error = failure
        answer = trainer.strategy.broadcast(answer)
        if error is not None:
            raise error
        if not answer:
            advice = "Read the error message of the first process."
            raise GuardError(rule="All processes train by one plan", got="the first one has found none", advice=advice)
        return msgspec.json.decode(answer, type=TaskPlan)

    def _find_plan(self, trainer: "Trainer", module: "LightningModule", optimizer: Optimizer) -> TaskPlan:
        device = str(trainer.strategy.root_device)
        data, rows, steps = own.data_of(trainer, module, self.dim)
        task = Task(
            model=own.TrainedModule(module, optimizer, trainer),
            loss=partial(own.loss_of, weight=self.weight),
            optimizer=own.optimizer_of,
            **data,
        )
        mixed = {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(str(trainer.precision))
        lossy = {"precision"} if mixed or self._may_be_bf16(trainer) else set[str]()
        weights_bytes = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        accumulates = self.maximize == "batch" or trainer.accumulate_grad_batches > 1
        return plan_here(
            task,
            device,
            self.budget,
            module=module,
            share=getattr(trainer, "num_devices", 1) if device == "cpu" else 1,
            held_bytes=weights_bytes if accumulates else 0,
            timeout=self.timeout,
            steps=steps,
            maximize=self.maximize,
            allow=[*lossy, *(word for word in self.allow if word != "precision")] or "none",
            precision=mixed,
            batch=None if self.maximize == "batch" else rows,
        )

    def _may_be_bf16(self, trainer: "Trainer") -> bool:
        """Whether fp32 may become bf16. It may not become fp16, which needs a scale that the trainer does not have."""
        precisions = open_device(str(trainer.strategy.root_device)).precisions()
        return "precision" in self.allow and str(trainer.precision) == "32-true" and "bf16" in precisions


class _Steps:
    """The steps of a module during a training: in pieces, inside a guard."""

    def __init__(self, callback: OomGuard, trainer: "Trainer", module: "LightningModule") -> None:
        device, plan = str(trainer.strategy.root_device), callback.plan
        self.weight, self.dim, self.trainer = callback.weight, callback.dim, trainer
        self.events = Events(callback.path or Path(trainer.log_dir or trainer.default_root_dir, EVENTS))
        self.guard = Guard(
            plan,
            budget_bytes=read_budget(callback.budget),
            device=open_device(device),
            events=self.events if trainer.is_global_zero else None,
            position=callback._position if plan is not None else None,
            agree=Ranks(rank=trainer.global_rank, world=trainer.world_size, device=device).agree,
        )
        self.rows = None if plan is None else plan.evaluation_rows  # of a piece in validation
        # a precision of the trainer is set by Lightning
        self.way = None if plan is None or str(trainer.precision) != "32-true" else plan.candidate
        if plan is not None and self.way is None:
            self.way = msgspec.structs.replace(plan.candidate, precision="fp32")
        with ExitStack() as stack:
            stack.enter_context(self.guard)
            for name, run in (("training_step", self._train), ("validation_step", self._validate)):
                stack.enter_context(_replaced(module, name, _Step(partial(run, module), getattr(module, name))))
            if getattr(trainer.precision_plugin, "scaler", None) is None:
                stack.enter_context(_replaced(trainer.strategy, "optimizer_step", self._update))
            self.close = stack.pop_all().close

    def _train(self, module: nn.Module, step: Callable[..., Any], batch: Any, *index: Any) -> Any:
        """Run the forward and the backward passes of a batch, and return a loss that has their gradient."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
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
            with self._as_planned():
                output = step(piece, *index)
            loss = own.loss_in(output)
            if loss is not None:
                with torch.autocast(loss.device.type, enabled=False):
                    (loss * (share * scale)).backward()  # type: ignore[no-untyped-call]
            return detached(output), share

        with _replaced(module, "log", log.record):
            results = in_pieces(self.guard, batch, run, undo=undo, dim=self.dim)
        log.replay(module)
        given = _take_gradients(parameters)
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = gradient
        return _returned([result for result in results if own.loss_in(result[0]) is not None], parameters, given, scale)

    def _validate(self, module: nn.Module, step: Callable[..., Any], batch: Any, *index: Any) -> Any:
        """Run a batch of the validation in pieces of its own size."""
        restore, log = remember_state(module), _Log()

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

    def _share(self, batch: Any, piece: Any, share: float) -> float:
        """The share that a piece has in the loss of the batch."""
        return share if self.weight is None else float(self.weight(piece)) / (float(self.weight(batch)) or 1.0)

    @contextmanager
    def _as_planned(self) -> Iterator[None]:
        """Run a forward pass in the segments and the precision of the plan."""
        with as_candidate(self.way or Candidate(microbatch=1), self.guard.device.name):
            yield


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
        return self.__wrapped__.__code__  # type: ignore[attr-defined]


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
            value = _reduced([value for value, _ in values], [share for _, share in values], named.get("reduce_fx", "mean"))
            module.log(name, value, *positional, **named)


def _reduced(values: list[Any], shares: list[float], how: Any) -> Any:
    """One value of several pieces, as Lightning would reduce them. A metric has seen all pieces itself."""
    if isinstance(values[0], Mapping):
        return {key: _reduced([value[key] for value in values], shares, how) for key in values[0]}
    if len(values) == 1 or not isinstance(values[0], Tensor | int | float):
        return values[-1]
    simple = {"sum": sum, "max": max, "min": min}.get(getattr(how, "__name__", how))
    return mean(values, shares) if simple is None else simple(values)


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
    total = torch.stack([own.loss_in(output) * share for output, share in results]).sum()
    trained = [parameter for parameter, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
    loss = _Given.apply(total, [gradient for gradient in gradients if gradient is not None], scale, *trained)
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
