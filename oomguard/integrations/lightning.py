"""A callback for Lightning: `Trainer(callbacks=[OomGuard(budget="6GiB")])` plans a training and keeps it within memory.

It serves the packages `lightning` and `pytorch_lightning`. Before the training it plans, in child processes. Then it
takes the place of the module's `training_step`: a batch runs in pieces, forward and backward, inside a guard, and
Lightning gets a loss whose gradient is known already. Everything after that is Lightning's own: the scale of the loss,
accumulation, the exchange between processes, clipping, hooks and the update.
"""

import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch.optim import Optimizer

from oomguard._core.errors import GuardError, MisuseError, check_choice, check_whole
from oomguard._core.units import MIB, read_budget
from oomguard._device.find import open_device
from oomguard._guard.events import Event
from oomguard._guard.ladder import LadderPosition
from oomguard._plan.task_value import TaskPlan
from oomguard._rnn.rng import remember_all
from oomguard._spec.spec import MAX_BATCH
from oomguard._task.task import Task
from oomguard.integrations import _lightning_task as own
from oomguard.integrations._fit import check_options, optimizer_of, plan_here
from oomguard.integrations._lightning_steps import Steps

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
    makes the loader with one, and `accumulate_grad_batches` otherwise. With `maximize="batch"`, the loader gets the
    largest batch that fits in one pass; with both, the largest that divides `batch`, and `accumulate_grad_batches`
    makes up for it. `allow` takes "precision" (bf16, if it is faster), "microbatch" and "segments", for modules whose
    gradient these change. `weight(batch)` is the weight of a batch, such as the number of its tokens, if the loss is a
    mean over something other than rows. `dim` says where batches hold their rows, as for `oomguard.stepper`.

    `segments` is the number of segments of recurrent calls, if it is not to be planned; 1 runs them as they are. `plan`
    is True, a plan that was made before, or False for a guard with a budget alone. `timeout` limits the search.
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
        segments: int | None = None,
        plan: TaskPlan | bool = True,
        timeout: float | str = 120.0,
        events: str | None = None,
    ) -> None:
        self.allow = check_options(budget, segments, allow)
        check_whole("batch", batch, 1, MAX_BATCH)
        check_choice("maximize", maximize, ("throughput", "batch"))
        self.budget, self.batch, self.maximize, self.weight, self.dim = budget, batch, maximize, weight, dim
        self.segments = segments
        self.timeout, self.path = timeout, events
        self.plan: TaskPlan | None = plan if isinstance(plan, TaskPlan) else None
        self.peak_bytes = 0
        self.events: list[Event] = []
        self._plans = plan is True
        self._position = LadderPosition()
        self._steps: Steps | None = None

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
            self._set_batch(trainer, pl_module, self.batch if own.takes_batch_size(trainer, pl_module) else None)
        if self._plans and not getattr(trainer, "fast_dev_run", False):
            self.plan = self._agree_on_plan(trainer, pl_module, optimizer)
            own.package_of(trainer, "utilities.rank_zero").rank_zero_info(f"OomGuard: {self.plan}")
        if self.maximize == "batch" and self.plan is not None:
            most, batch = self.plan.batch, self.batch
            divides = (rows for rows in range(min(most, batch or most), 0, -1) if not (batch or rows) % rows)
            self._set_batch(trainer, pl_module, next(divides))
        restore_random()
        self._steps = Steps(
            trainer,
            pl_module,
            plan=self.plan,
            budget_bytes=read_budget(self.budget),
            position=self._position,
            path=Path(self.path or Path(trainer.log_dir or trainer.default_root_dir, EVENTS)),
            weight=self.weight,
            dim=self.dim,
        )
        for logger in trainer.loggers:
            logger.log_hyperparams({f"oomguard/{name}": value for name, value in self._knobs().items()})

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the peak, the rung and the number of events: as often as Lightning logs, and after every event."""
        if self._steps is None:
            return
        before = len(self.events)
        self._follow(self._steps)
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if len(self.events) > before or step % (getattr(trainer, "log_every_n_steps", 0) or 1) == 0:
            self._measure(self._steps)
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

    def _follow(self, steps: Steps) -> None:
        """Take over what the guard has done."""
        self._position = steps.guard.position
        self.events += steps.events.take_new()

    def _measure(self, steps: Steps) -> None:
        """Take over the peak. On the CPU, it is read from files of the kernel, which takes milliseconds."""
        guard = steps.guard
        self.peak_bytes = max(self.peak_bytes, guard.watch.peak_bytes, guard.device.reading().peak_bytes)

    def _close(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            self._follow(steps)
            self._measure(steps)
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
            optimizer=optimizer_of,
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
            segments=self.segments,
            batch=None if self.maximize == "batch" else rows,
        )

    def _may_be_bf16(self, trainer: "Trainer") -> bool:
        """Whether fp32 may become bf16. It may not become fp16, which needs a scale that the trainer does not have."""
        precisions = open_device(str(trainer.strategy.root_device)).precisions()
        return "precision" in self.allow and str(trainer.precision) == "32-true" and "bf16" in precisions
