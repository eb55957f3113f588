"""Trains a task: its own model, loss, data, optimizer and scheduler, with the knobs of its plan, under the guard."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from oomguard._core.errors import MisuseError, shown
from oomguard._data.options import DataOptions
from oomguard._data.order import Position
from oomguard._data.source import Ints
from oomguard._device.find import open_device
from oomguard._guard import Guard, layout_of
from oomguard._plan.store import check_device
from oomguard._plan.task_value import TaskPlan
from oomguard._rnn.rng import remember_all, remember_random
from oomguard._step import Outcome, TaskTraining, accumulate_pieces, check_optimizer, loss_on, make_scaler
from oomguard._task.child import seed
from oomguard._task.layout import mapped, take
from oomguard._task.task import Task, user_code
from oomguard._task.times import in_segments
from oomguard._task.trace import build, make_optimizer
from oomguard._train.checkpoint import Checkpoint, TrainState, restore
from oomguard._train.evaluate import in_microbatches
from oomguard._train.loop import RunConfig, Trainer
from oomguard._train.ranks import check_dense
from oomguard._train.settings import RunSettings, write_settings
from oomguard._train.start import begin, make_guard, resumed_state
from oomguard._train.task_data import MadeBatches, TaskBatch, TaskLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig(RunConfig):
    """The parts of the training of a task that stay the same."""

    plan: TaskPlan
    task: Task
    name: str  # the name of the task, as the run began with it
    settings: RunSettings

    @property
    def seed(self) -> int:
        return self.settings.options.seed


class TaskTrainer(Trainer):
    """The training of a task."""

    config: TaskConfig

    def __init__(
        self,
        config: TaskConfig,
        training: TaskTraining,
        scheduler: LRScheduler | None,
        loader: TaskLoader | MadeBatches,
        guard: Guard,
        state: TrainState,
    ) -> None:
        per_epoch = len(loader) if isinstance(loader, TaskLoader) else config.options.steps or 1
        super().__init__(config, training, guard, state, per_epoch)
        self.scheduler, self._loader = scheduler, loader
        self.validation = None if config.task.validation is None else _loader_of(config, config.task.validation, None)
        if isinstance(self.validation, TaskLoader):
            self.validation.order(0)  # finds its errors before the training
        self.layout = layout_of(config.plan.layout)
        segments, time = config.plan.candidate.segments, layout_of(config.plan.time)
        self.task, self._segments = in_segments(config.task, segments, time)

    @property
    def loader(self) -> TaskLoader | MadeBatches:
        """The loader of the training data."""
        return self._loader

    def _lose_worker(self) -> int:
        self._loader = replace(self._loader, workers=self._loader.workers - 1)
        return self._loader.workers

    def _accumulate(self, batch: TaskBatch) -> Tensor:
        training, self._weight = self.training, 0.0
        if not batch.rows:  # fewer rows than processes
            return torch.zeros((), device=training.device)
        first = self.guard.ladder[0].candidate  # lower rungs have fewer rows, see Guard.rows
        candidate = msgspec.structs.replace(first, segments=self._segments)
        loss_of = partial(loss_on, self.task, training.model, candidate, str(training.device))
        weights = list[float]()

        def weighed(piece: Any) -> tuple[Tensor, float | None]:
            loss, weight = loss_of(piece)
            weights.extend([] if weight is None else [weight])
            return loss, weight

        with user_code("A step of the task must run", self.task.loss, "Correct that line."):
            loss = accumulate_pieces(self._pieces(batch), weighed, training.optimizer, training.scaler)
        self._weight = sum(weights) if weights else float(batch.rows)
        return loss

    def _exchange(self, loss: Tensor) -> Tensor:
        return self.ranks.sum_shares(self.training.model, loss, self._weight)

    def _pieces(self, batch: TaskBatch) -> Iterator[tuple[Any, float]]:
        """The microbatches of a batch, each with its share of the rows."""
        if self.layout and batch.collate is None:
            yield from self.guard.pieces(self._on_device(batch.content))
            return
        repeat_random, size = remember_random(), self.guard.rows
        for start in range(0, batch.rows, size):
            stop = min(start + size, batch.rows)
            repeat_random()
            yield self._take(batch, start, stop), (stop - start) / batch.rows

    def _take(self, batch: TaskBatch, start: int, stop: int) -> Any:
        """Some rows of a batch on the device."""
        if batch.collate is not None:
            part = batch.collate(batch.content[start:stop])
        else:
            part = batch.content if stop - start == batch.rows else take(batch.content, self.layout, start, stop)
        return self._on_device(part)

    def _on_device(self, batch: Any) -> Any:
        return mapped(lambda tensor: tensor.to(self.training.device), batch)

    def _begin_step(self) -> None:
        """Give each of several processes its own random numbers, and the same ones again after a resume."""
        if self.ranks.world > 1:
            entropy = self.config.seed, self.ranks.rank, self.state.step
            seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))

    def _report(self, outcome: Outcome, loss: float, tokens_per_second: float | None, rows_per_second: float) -> None:
        super()._report(outcome, loss, tokens_per_second, rows_per_second * self.ranks.world)

    def _end_step(self, outcome: Outcome) -> None:
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau) and not outcome.skipped:
            with user_code("The scheduler must step after every update", self.config.task.scheduler, "Correct it."):
                self.scheduler.step()

    def _for_checkpoint(self) -> TrainState:
        if self.scheduler is None:
            return self.state
        return msgspec.structs.replace(self.state, schedule=_plain(self.scheduler.state_dict()))

    def _evaluate(self) -> float | None:
        """The mean loss of the validation data. It draws its own random numbers."""
        if self.validation is None:
            return None
        count = None if isinstance(self.validation, TaskLoader) else 1
        # such as those of BatchNorm, as DDP does
        self.ranks.spread((buffer, 0) for buffer in self.training.model.buffers())
        with self.ranks.together(), self._as_evaluated(), torch.no_grad():
            losses = [
                loss for batch in islice(self.validation.batches(Position()), count) for loss in self._losses(batch)
            ]
        total, weight = self.ranks.sums([sum(column) for column in zip((0.0, 0.0), *losses, strict=True)])
        loss = total / (weight or 1.0)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)
        return loss

    @contextmanager
    def _as_evaluated(self) -> Iterator[None]:
        """Put all layers into evaluation mode, with random numbers of its own, and then back as they were."""
        modes = {module: module.training for module in self.training.model.modules()}
        restore_random = remember_all(self.training.device)
        seed(self.config.seed)
        self.training.model.eval()
        try:
            yield
        finally:
            for module, training in modes.items():
                module.training = training
            restore_random()

    def _losses(self, batch: TaskBatch) -> Iterator[tuple[float, float]]:
        """Sum and weight of the loss of each microbatch of an evaluation. A mean counts as often as it has rows."""
        task, training = self.task, self.training
        candidate = msgspec.structs.replace(self.guard.candidate, segments=1)

        def loss_of(rows: Ints) -> tuple[float, float]:
            piece = self._take(batch, int(rows[0]), int(rows[-1]) + 1)
            total, weight = loss_on(task, training.model, candidate, str(training.device), piece, training=False)
            return (float(total) * len(rows), len(rows)) if weight is None else (float(total), weight)

        rows = self.config.plan.evaluation_rows or self.guard.rows
        for _, loss in in_microbatches(np.arange(batch.rows), rows, loss_of):
            yield loss


def make_trainer(config: TaskConfig, checkpoint: Checkpoint | None) -> TaskTrainer:
    """A trainer of a task at its first step, or where the checkpoint was saved."""
    plan, task = config.plan, config.task
    ranks = config.ranks
    device = open_device(ranks.device if ranks.world > 1 else plan.where.device)
    loader = _loader_of(config, task.batch if task.data is None else task.data, plan.batch)
    state = TrainState(task=config.name, data=_describe(loader), data_options=DataOptions(seed=config.seed))
    if checkpoint is None:
        check_device(plan, device.title(), device.budget().limit_bytes)
    else:
        state = resumed_state(checkpoint, state, config)
    ranks.check_same(state.data)
    seed(config.seed)
    model = build(task).to(device.name).train()
    check_dense(sparse=ranks.world > 1 and any(getattr(module, "sparse", False) for module in model.modules()))
    # a model that is given has other weights in each process
    ranks.spread((tensor, 0) for tensor in (*model.parameters(), *model.buffers()))
    optimizer = make_optimizer(task, model)
    _check_parameters(optimizer, model)
    scheduler = _make_scheduler(task, optimizer)
    scaler = make_scaler(plan.candidate, device.name)
    training = TaskTraining(model=model, candidate=plan.candidate, optimizer=optimizer, scaler=scaler)
    if checkpoint is not None:
        if scheduler is not None and state.schedule:
            scheduler.load_state_dict(_formed_like(scheduler.state_dict(), state.schedule))
        restore(checkpoint, training)  # last, since it restores the random numbers
    guard = make_guard(config, device, state)
    trainer = TaskTrainer(config, training, scheduler, loader, guard, state)
    if config.ranks.first:
        write_settings(config.directory, config.settings)
    begin(trainer, resumed=checkpoint is not None)
    return trainer


def _check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    check_optimizer(optimizer)
    own = {*model.parameters()}
    if not all(parameter in own for group in optimizer.param_groups for parameter in group["params"]):
        raise MisuseError(
            rule="The optimizer of a task must update parameters of its model",
            got=f"this {type(optimizer).__name__} has others",
            advice="Make the other parameters part of the model: then checkpoints have them too.",
        )


def _make_scheduler(task: Task, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    if task.scheduler is None:
        return None
    with user_code("scheduler(optimizer) must make a scheduler", task.scheduler, "Correct that line."):
        scheduler = task.scheduler(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau) and task.validation is None:
        got, advice = "the task has none", "Give the task validation=, or take another scheduler."
        raise MisuseError(rule="ReduceLROnPlateau needs a validation loss", got=got, advice=advice)
    return scheduler


def _loader_of(config: TaskConfig, data: Any, rows: int | None) -> TaskLoader | MadeBatches:
    """The loader of the data of a task, or of its validation data, with its own batches or with so many rows."""
    plan = config.plan
    if not callable(data):
        workers = getattr(data, "num_workers", 0)
        # the layout is that of batches of the training data; others are collated microbatch by microbatch
        known = bool(plan.layout) and data.collate_fn is getattr(config.task.data, "collate_fn", None)
        return TaskLoader(data=data, rows=rows, seed=config.seed, workers=workers, collates=known, ranks=config.ranks)
    assert plan.seq is not None, "the plan of a task whose batches are made has a length"
    layout = layout_of(plan.layout)
    if config.ranks.world > 1 and not layout:
        got, advice = "these cannot be split", "Give the task data=, a DataLoader, or train in one process."
        raise MisuseError(rule="Several processes share the rows of a batch", got=got, advice=advice)
    return MadeBatches(make=data, rows=plan.batch, seq=plan.seq, seed=config.seed, layout=layout, ranks=config.ranks)


def _describe(loader: TaskLoader | MadeBatches) -> dict[str, Any]:
    """Describe the data of a run. A resumed run must have the same description."""
    if isinstance(loader, MadeBatches):
        return {"batch": loader.rows, "length": loader.seq}
    return {"batch": loader.rows, "number of samples": len(loader.data.dataset)}  # type: ignore[arg-type]


def _plain(state: Any) -> Any:
    """The state of a scheduler as JSON has it."""
    if isinstance(state, dict):
        return {str(key): _plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [*map(_plain, state)]
    if state is None or isinstance(state, str | bool):
        return state
    if isinstance(state, int):
        return int(state)
    try:
        return float(state)
    except (TypeError, ValueError):
        advice = "Keep only numbers, text and lists of them in its state_dict."
        raise MisuseError(rule="A scheduler must be storable", got=f"it has {shown(state)}", advice=advice) from None


def _formed_like(fresh: Any, state: Any) -> Any:
    """A stored state with the types and the keys that it has in a fresh scheduler."""
    if isinstance(fresh, dict) and isinstance(state, dict):
        keys = {str(key): key for key in fresh}
        read = {keys.get(key, key): _formed_like(fresh.get(keys.get(key, key)), value) for key, value in state.items()}
        return read if type(fresh) is dict else type(fresh)(read)
    if isinstance(fresh, list | tuple) and isinstance(state, list):
        parts = [_formed_like(old, new) for old, new in zip(fresh, state, strict=False)] + state[len(fresh) :]
        return type(fresh)(parts)
    return state
