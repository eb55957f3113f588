"""A callback for skorch: `NeuralNet(..., callbacks=[OomGuard(budget="6GiB")])` plans a training and guards its memory.

Before the first epoch it plans, in child processes. Then it takes the place of the steps of the net: a batch runs in
pieces, forward and backward, inside a guard. Everything else is skorch's own.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from oomguard._core.errors import MisuseError
from oomguard._core.units import MIB, read_budget
from oomguard._device.find import open_device
from oomguard._guard import Guard
from oomguard._guard.events import Events
from oomguard._plan.task_value import TaskPlan
from oomguard._rnn.rng import remember_all
from oomguard._spec.candidate import Candidate
from oomguard._step import as_candidate, check_optimizer
from oomguard._task.task import Task
from oomguard.integrations._fit import (
    Batch,
    Parameters,
    check_options,
    detached,
    in_halves,
    in_pieces,
    joined,
    optimizer_of,
    plan_here,
    remember_state,
)

try:
    from skorch import NeuralNet
    from skorch.callbacks import Callback
    from skorch.dataset import unpack_data
except ImportError as error:
    raise ImportError(
        f"oomguard.integrations.skorch needs the package skorch, but it cannot be imported ({error}). "
        "Install it with: pip install 'oomguard[skorch]'",
        name="skorch",
    ) from None

STEPS = {"train_step_single": "_train", "validation_step": "_validate", "_step_optimizer": "_update"}
"""The methods of a net whose place the callback takes, and its own."""


class OomGuard(Callback):  # type: ignore[misc]
    """Plans the training of a net of skorch, and keeps it within memory: `callbacks=[OomGuard("6GiB")]`.

    `budget` is the bytes that the process may use on the net's device, as a number or text; None means the free memory.
    The plan is made from the module, the criterion and the data, in child processes, and keeps the batch of the net. If
    memory runs out nevertheless, the batch runs again in smaller microbatches.

    `allow` takes "microbatch" and "segments", for nets whose gradient these change. `weight(batch)` is the weight of a
    batch if the loss is a mean over something other than rows. `segments` is the number of segments of recurrent calls,
    if it is not to be planned. `plan` is True, a plan that was made before, or False
    for a guard with a budget alone. `timeout` limits the search. `events` is a file of events.

    The history of the net gets `oomguard_rung`, `oomguard_peak_mib` and `oomguard_events` of every epoch. After the
    training, `plan_`, `rung_`, `peak_bytes_` and `events_` tell what happened.

    >>> OomGuard(budget="6GiB").budget
    '6GiB'
    """

    def __init__(
        self,
        budget: int | str | None = None,
        allow: str | tuple[str, ...] = "none",
        weight: Callable[[Batch], Any] | None = None,
        dim: object = 0,
        segments: int | None = None,
        plan: TaskPlan | bool = True,
        timeout: float | str = 120.0,
        events: str | None = None,
    ) -> None:
        self.budget, self.allow, self.weight, self.dim = budget, allow, weight, dim
        self.segments, self.plan, self.timeout, self.events = segments, plan, timeout, events
        self.guard_: Guard | None = None

    def initialize(self) -> "OomGuard":
        """Begin anew, with the plan that was given."""
        check_options(self.budget, self.segments, self.allow)
        self.plan_ = self.plan if isinstance(self.plan, TaskPlan) else None
        self.rung_, self.peak_bytes_, self.events_ = 0, 0, list[Any]()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """The callback without the training that it is in."""
        return vars(self) | {"guard_": None}

    # ---- hooks of skorch

    def on_train_begin(self, net: NeuralNet, **_: Any) -> None:
        """Check the net, whatever an earlier training has left."""
        self._close(net)
        if net._optimizers != ["optimizer"]:
            names, advice = ", ".join(net._optimizers), "Train the net with one optimizer, or leave OomGuard out."
            raise MisuseError(rule="OomGuard needs one optimizer", got=f"this net has {names}", advice=advice)
        check_optimizer(net.optimizer_)

    def on_epoch_begin(self, net: NeuralNet, dataset_train: Any = None, dataset_valid: Any = None, **_: Any) -> None:
        """Before the first epoch, plan, and take the place of the net's steps."""
        if self.guard_ is not None:
            return
        if self.plan_ is None and self.plan is True:
            restore_random = remember_all(next(net.module_.parameters()).device)
            self.plan_ = self._find_plan(net, dataset_train)
            restore_random()
            if net.verbose:
                print(f"OomGuard: {self.plan_}")  # noqa: T201, as skorch's own callbacks do
        device = open_device(str(net.device))
        events = None if self.events is None else Events(Path(self.events))
        self.guard_ = Guard(self.plan_, budget_bytes=read_budget(self.budget), device=device, events=events).__enter__()
        self.way_ = Candidate(microbatch=1) if self.plan_ is None else self.plan_.candidate
        self.rows_ = None if self.plan_ is None else self.plan_.evaluation_rows
        vars(net).update({name: _Step(self, net, name) for name in STEPS})

    def on_epoch_end(self, net: NeuralNet, dataset_train: Any = None, dataset_valid: Any = None, **_: Any) -> None:
        """Write into the history what the guard has done."""
        self._read()
        figures = {"rung": self.rung_, "peak_mib": round(self.peak_bytes_ / MIB, 1), "events": len(self.events_)}
        for name, value in figures.items():
            net.history.record(f"oomguard_{name}", value)

    def on_train_end(self, net: NeuralNet, **_: Any) -> None:
        """Give the net its steps back, and lift the limit on memory."""
        self._close(net)

    # ---- what the hooks do

    def _read(self) -> None:
        guard = self.guard_
        if guard is not None:
            self.rung_ = guard.rung
            self.events_ += [] if guard.events is None else guard.events.take_new()
            self.peak_bytes_ = max(self.peak_bytes_, guard.watch.peak_bytes, guard.device.reading().peak_bytes)

    def _close(self, net: NeuralNet) -> None:
        self._read()
        for name in STEPS:
            vars(net).pop(name, None)
        guard, self.guard_ = self.guard_, None
        if guard is not None:
            guard.__exit__()

    def _find_plan(self, net: NeuralNet, dataset: Any) -> TaskPlan:
        loader = net.get_iterator(dataset, training=True)
        loss = partial(loss_of, weight=self.weight)
        task = Task(model=TrainedNet(net), loss=loss, optimizer=optimizer_of, data=loader)
        return plan_here(
            task,
            str(net.device),
            self.budget,
            module=net.module_,
            allow=self.allow,
            segments=self.segments,
            timeout=self.timeout,
        )

    def _train(self, net: NeuralNet, step: Callable[..., Any], batch: Any, **parameters: Any) -> dict[str, Any]:
        """Run the forward and the backward passes of a batch, whose gradients add up."""
        assert self.guard_ is not None
        batch, restore = _parts(batch), remember_state(_modules(net))
        device = self.guard_.device.name

        def undo() -> None:
            net._zero_grad_optimizer()
            restore()

        def run(piece: Any, share: float) -> tuple[dict[str, Any], float]:
            share = self._share(batch, piece, share)
            vars(net)["get_loss"] = lambda *values, **named: share * type(net).get_loss(net, *values, **named)
            try:
                with as_candidate(self.way_, device):
                    return detached(step(piece, **parameters)), share
            finally:
                del vars(net)["get_loss"]

        results = in_pieces(self.guard_, batch, run, undo=undo, dim=self.dim)
        loss = sum(found["loss"] for found, _ in results)  # each is scaled already
        return {"loss": loss, "y_pred": joined([found["y_pred"] for found, _ in results], [s for _, s in results])}

    def _validate(self, net: NeuralNet, step: Callable[..., Any], batch: Any, **parameters: Any) -> dict[str, Any]:
        """Run a batch of the validation in pieces of its own size."""
        assert self.guard_ is not None
        batch, undo = _parts(batch), remember_state(_modules(net))

        def run(piece: Any, share: float) -> tuple[Any, float]:
            return step(piece, **parameters), self._share(batch, piece, share)

        results, self.rows_ = in_halves(self.guard_, batch, self.rows_, run, undo=undo, dim=self.dim)
        found: dict[str, Any] = joined([output for output, _ in results], [share for _, share in results])
        return found

    def _update(self, net: NeuralNet, step: Callable[..., Any], closure: Callable[[], Any]) -> None:
        """Run the passes of a batch, then the update, which is completed if memory runs out in the middle of it."""
        assert self.guard_ is not None
        loss = closure()
        self.guard_.update(net.optimizer_, lambda: step(lambda: loss))

    def _share(self, batch: Any, piece: Any, share: float) -> float:
        """The share that a piece has in the loss of the batch."""
        return share if self.weight is None else float(self.weight(piece)) / (float(self.weight(batch)) or 1.0)


class _Step:
    """A function in the place of a method of a net. Copies and pickles of the net have the method again."""

    def __init__(self, callback: OomGuard, net: NeuralNet, name: str) -> None:
        self._callback, self._net, self._method = callback, net, getattr(type(net), name)
        self._run = getattr(callback, STEPS[name])

    def __call__(self, *values: Any, **named: Any) -> Any:
        try:
            return self._run(self._net, partial(self._method, self._net), *values, **named)
        except BaseException:  # skorch calls no hook when a training ends with an error
            self._callback._close(self._net)
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (self._method, self._net)


class TrainedNet(nn.Module):
    """The module, the criterion and the optimizer of a net, so that copies have all three."""

    def __init__(self, net: NeuralNet) -> None:
        super().__init__()
        self.module, self.criterion, self.optimizer, self.net = net.module_, net.criterion_, net.optimizer_, _Bare(net)
        self.__module__, self.__qualname__ = type(net.module_).__module__, type(net.module_).__qualname__

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of the module and the criterion."""
        return Parameters(self, super().parameters(recurse))


class _Bare:
    """A net without its modules and what they were trained with. Copies share it."""

    def __init__(self, net: NeuralNet) -> None:
        left_out = ("module_", "criterion_", "optimizer_", "callbacks_", "callbacks", "history_", *STEPS)
        self.net = object.__new__(type(net))
        vars(self.net).update({name: value for name, value in vars(net).items() if name not in left_out})
        vars(self.net).update(callbacks=None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Bare":
        return self


def loss_of(model: TrainedNet, batch: Batch, weight: Callable[[Batch], Any] | None = None) -> Any:
    """The loss of a net on a batch; with a weight, the sum and the weight."""
    net = model.net.net
    vars(net).update(module_=model.module, criterion_=model.criterion)
    inputs, targets = unpack_data(batch)
    loss = net.get_loss(net.infer(inputs), targets, X=inputs, training=True)
    return loss if weight is None else (loss * weight(batch), weight(batch))


def _modules(net: NeuralNet) -> nn.Module:
    return nn.ModuleList([net.module_, net.criterion_])


def _parts(batch: Batch) -> Batch:
    """A batch whose list of inputs and targets cannot be taken for a list of sequences."""
    return tuple(batch) if isinstance(batch, list) else batch
