"""The training loop: steps under the guard, validation, checkpoints, metrics. It can be resumed whatever stops it.

`Trainer` is the loop of every training, `SpecTrainer` that of the model of a spec; `task.py` has that of a task.
"""

import math
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import msgspec
import torch
from torch import nn

from oomguard._core.errors import GuardError, MisuseError
from oomguard._data.loader import Batch, Loader
from oomguard._data.open import Data, Missing
from oomguard._data.options import DataOptions
from oomguard._guard import Guard
from oomguard._guard.events import Event
from oomguard._plan.task_value import TaskPlan
from oomguard._plan.value import Plan
from oomguard._rnn import Microbatch
from oomguard._rnn.model import Recurrent
from oomguard._spec.candidate import Candidate
from oomguard._step import Outcome, TaskTraining, Training, accumulate, no_gradient_left, owners, update
from oomguard._train import TrainOptions, learning_rate
from oomguard._train.checkpoint import Model, TrainState, save
from oomguard._train.evaluate import evaluation_candidate, validate
from oomguard._train.metrics import Metrics
from oomguard._train.ranks import Ranks
from oomguard._train.settings import BEST, CHECKPOINTS, RunSettings
from oomguard._train.shards import SharedState
from oomguard._train.task_data import MadeBatches, TaskBatch, TaskLoader
from oomguard._train.trackers import Trackers


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The parts of every training that stay the same: plan, options, directory, processes."""

    plan: Plan | TaskPlan
    options: TrainOptions
    directory: Path
    ranks: Ranks = Ranks()  # noqa: RUF009 (it is frozen)
    progress: "Callable[[TrainProgress], None] | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(RunConfig):
    """The parts of the training of a spec that stay the same, with its data."""

    plan: Plan
    settings: RunSettings
    data: Data
    model: Model = None

    @property
    def data_options(self) -> DataOptions:
        return self.settings.options


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainProgress:
    """The figures of a progress bar, after each step."""

    step: int  # optimizer steps made
    total: int  # optimizer steps in all
    loss: float  # loss of the last step
    validation: float | None  # last validation loss; None: there was none yet
    tokens_per_second: float | None  # time steps of sequences per second in the last step; None: not known
    peak_bytes: int  # largest peak so far
    budget_bytes: int
    rung: int  # rung of the plan; 0 is its candidate
    events: tuple[Event, ...] = ()  # events since the last report
    rows_per_second: float = 0.0  # sequences per second in the last step


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """The result of the training of any model."""

    run: Path  # directory of the run
    steps: int  # optimizer steps made, including those before a resume
    loss: float | None  # loss of the last step
    validation_loss: float | None  # lowest validation loss
    ended: str  # why it ended: `done`, `patience` or `interrupted`
    rung: int  # rung of the plan at the end; 0 is its candidate
    peak_bytes: int  # largest peak of this process
    model: nn.Module  # the model after the last step
    missing: Missing  # how many sequences were cut or left out
    scaled: bool = False  # whether targets, and so losses, have mean 0 and standard deviation 1
    log: tuple[str, ...] = ()  # the trackers that show the training


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(TaskResult):
    """The result of a training of the model of a spec."""

    model: Recurrent


class Trainer(ABC):
    """A training that continues from its state."""

    result: type[TaskResult] = TaskResult

    def __init__(
        self, config: RunConfig, training: TaskTraining, guard: Guard, state: TrainState, per_epoch: int
    ) -> None:
        self.config, self.training, self.guard, self.state = config, training, guard, state
        self.ranks, guard.steps = config.ranks, state.step
        self.metrics: Metrics | None = None  # only the first process writes them
        if self.ranks.first:
            with_events = "tensorboard" in config.options.trackers
            self.metrics = Metrics(config.directory, state.step, tensorboard=with_events)
            if guard.events is not None:
                guard.events.listener = self.metrics.show
        self.total = config.options.total_steps(per_epoch)
        self.missing = Missing()
        self.validation_loss: float | None = None
        self._warned, self._signals = False, list[int]()

    @property
    @abstractmethod
    def loader(self) -> Loader | TaskLoader | MadeBatches:
        """The loader of the batches now: another one if they are to be prepared in another way."""

    @abstractmethod
    def _accumulate(self, batch: Any) -> torch.Tensor:
        """Add up the gradient of this process's share of a batch; returns the loss."""

    @abstractmethod
    def _evaluate(self) -> float | None:
        """The validation loss now; None if there is no data for validation."""

    @abstractmethod
    def _lose_worker(self) -> int:
        """Go on with one worker process less; returns how many are left."""

    @abstractmethod
    def _begin_step(self) -> None:
        """Do what comes before a step."""

    @abstractmethod
    def _end_step(self, outcome: Outcome) -> None:
        """Do what comes after a step."""

    def _exchange(self, loss: torch.Tensor) -> torch.Tensor:
        """Sum the gradients and the losses of all processes."""
        return self.ranks.sum_gradients(self.training.model, loss)

    def _for_checkpoint(self) -> TrainState:
        """The state as a checkpoint stores it."""
        return self.state

    def run(self) -> TaskResult:
        """Make all remaining steps, and save a checkpoint after the last or before one that failed."""
        self._saved_step, self._saved_at = self.state.step, monotonic()
        if self.metrics is not None and self.state.step == 0:
            self.metrics.describe(str(self.config.plan))
        names = self.config.options.trackers if self.ranks.first else ()
        # trackers begin before the guard limits the memory of this process and of those that it starts
        with Trackers(self.config.directory, names) as trackers:
            with _collect_signals(self._signals), self.guard:
                try:
                    while (ended := self._ended()) is None:
                        self._run_batches()
                except (GuardError, MisuseError):  # memory is short, or the data has an error
                    if self.guard.steps == self.state.step:  # otherwise some weights may be updated and others not
                        self.save()
                    raise
                self.save()
            trackers.ended, trackers.peak_bytes = ended, self.guard.watch.peak_bytes
        if self.metrics is not None:
            self.metrics.conclude(self.guard.watch.peak_bytes)
        return self._result(ended)

    def _result(self, ended: str) -> TaskResult:
        return self.result(
            run=self.config.directory,
            steps=self.state.step,
            loss=self.state.loss,
            validation_loss=self.state.best,
            ended=ended,
            rung=self.guard.rung,
            peak_bytes=self.guard.watch.peak_bytes,
            model=self.training.model,
            missing=self.missing,
            scaled=self.state.normaliser is not None and self.state.normaliser.target_mean is not None,
            log=self.config.options.trackers,
        )

    def _run_batches(self) -> None:
        """Train until the epoch or the training ends, or until the workers have to be started again."""
        loader = self.loader
        for batch in loader.batches(self.state.position):
            began = perf_counter()
            outcome = self.step(batch)
            self._finish_step(batch, outcome, perf_counter() - began)
            if batch.lost is not None:  # one worker less: memory is probably short, and the next would be killed too
                left = self._lose_worker()
                reason = f"A process that loads data was lost ({batch.lost}). Its work was done here; {left} are left."
                self.guard.tell("worker", reason, workers=left)
            if self._must_save():
                self.save()
            # workers are started again if one was lost, or if they prepare microbatches of another rung
            if self._ended() is not None or (loader.workers and loader is not self.loader):
                return

    def _must_save(self) -> bool:
        """Whether a checkpoint is due. If all processes have a part in it, the clock of the first decides."""
        most_steps, most_seconds = self.config.options.save_interval
        is_due = self.state.step - self._saved_step >= most_steps or monotonic() - self._saved_at >= most_seconds
        if self.training.owned is None:
            return is_due
        return bool(self.ranks.agree([int(is_due and self.ranks.first)])[0])

    def step(self, batch: Any) -> Outcome:
        """Make one optimizer step; the guard repeats it on a lower rung if memory runs out."""
        training, guard, ranks = self.training, self.guard, self.ranks
        self._begin_step()
        with no_gradient_left(training):
            for attempt in guard.attempts(training.optimizer):
                with attempt:
                    loss = self._accumulate(batch)
            with ranks.together():
                outcome = update(training, self._exchange(loss), self.config.options.clip, guard.update)
            if training.owned is not None:
                ranks.spread(owners(training.model, ranks.world))
            return outcome

    def _finish_step(self, batch: Batch | TaskBatch, outcome: Outcome, seconds: float) -> None:
        loss, step, lr = float(outcome.loss), self.state.step + 1, self.training.optimizer.param_groups[0]["lr"]
        tokens_per_second = None if batch.steps is None else batch.steps / seconds
        self._end_step(outcome)
        self.state = msgspec.structs.replace(
            self.state, step=step, position=batch.after, ladder=self.guard.position, loss=loss
        )
        validated = self._validate()
        is_due = step % self.config.options.log_every == 0 or self._is_done() or validated is not None
        if self.metrics is not None and is_due:
            if self._is_done() or not self.guard.watch.peak_bytes:  # between them, the guard looks now and then
                self.guard.watch.look()
            self.metrics.write(
                step,
                loss=loss,
                lr=lr,
                norm=outcome.norm,
                tokens_per_second=tokens_per_second,
                peak_bytes=self.guard.watch.peak_bytes or None,
                epoch=batch.position.epoch,
                validation_loss=validated,
                rung=self.guard.rung,
            )
        self._report(outcome, loss, tokens_per_second, batch.rows / seconds)

    def _report(self, outcome: Outcome, loss: float, tokens_per_second: float | None, rows_per_second: float) -> None:
        if outcome.skipped:
            self.guard.tell("skipped", "Gradients overflowed in fp16. The step was skipped and the loss scale lowered.")
        if not math.isfinite(loss) and not self._warned:
            self._warned = True
            self.guard.tell(
                "not-finite",
                "The loss is no longer a finite number. Lower the learning rate, or set --clip.",
                loss=loss,
            )
        if self.config.progress is not None and self.ranks.first:
            self.config.progress(
                TrainProgress(
                    step=self.state.step,
                    total=self.total,
                    loss=loss,
                    validation=self.validation_loss,
                    tokens_per_second=tokens_per_second,
                    rows_per_second=rows_per_second,
                    peak_bytes=self.guard.watch.peak_bytes,
                    budget_bytes=self.config.plan.budget_bytes,
                    rung=self.guard.rung,
                    events=() if self.guard.events is None else self.guard.events.take_new(),
                )
            )

    def _validate(self) -> float | None:
        """Compute the validation loss if it is due; the best weights so far are saved."""
        every = self.config.options.validate_every
        is_due = self.state.position.done == 0 if every is None else self.state.step % every == 0
        loss = self._evaluate() if is_due or self._is_done() else None
        if loss is None:
            return None
        self.validation_loss = loss
        better = math.isfinite(loss) and (self.state.best is None or loss < self.state.best)
        change = {"best": loss, "worse": 0} if better else {"worse": self.state.worse + 1}
        self.state = msgspec.structs.replace(self.state, **change)
        if better:
            self._save_in(BEST, keep=1)
        return loss

    def save(self) -> None:
        """Save a checkpoint; only the first process writes it."""
        self._saved_step, self._saved_at = self.state.step, monotonic()
        self.state = msgspec.structs.replace(self.state, ladder=self.guard.position)
        if self.metrics is not None:
            self.metrics.flush()
        self._save_in(CHECKPOINTS, keep=self.config.options.keep)

    def _save_in(self, name: str, keep: int) -> None:
        training = replace(self.training, candidate=self.guard.candidate)
        write = partial(save, self.config.directory / name, training, self._for_checkpoint(), keep)
        if self.training.owned is None:
            if self.ranks.first:
                write()
            return
        shared = SharedState(self.ranks, training)
        with self.ranks.together():
            try:
                if self.ranks.first:
                    write(shared)
            finally:
                shared.lend()

    def _is_done(self) -> bool:
        """Whether all steps are made, or all epochs: a sampler may give epochs of unequal length."""
        options, epoch = self.config.options, self.state.position.epoch
        epochs = options.epochs or (None if options.steps else 1)
        return (options.steps is not None and self.state.step >= options.steps) or (
            epochs is not None and epoch >= epochs
        )

    def _ended(self) -> str | None:
        """Why the training is over, or None; the same in all processes."""
        if self._is_done():
            return "done"
        patience = self.config.options.patience
        if patience is not None and self.state.worse >= patience:
            return "patience"
        return "interrupted" if self.ranks.agree([len(self._signals)])[0] else None


class SpecTrainer(Trainer):
    """The training of the model of a spec. `start.py` makes one."""

    config: TrainConfig
    training: Training
    result = Result

    def __init__(
        self, config: TrainConfig, training: Training, loader: Loader, guard: Guard, state: TrainState
    ) -> None:
        super().__init__(config, training, guard, state, len(loader))
        self.missing = config.data.missing
        buckets = [{longest: c.microbatch for longest, c in rung.buckets} for rung in guard.ladder]
        self.loaders = [replace(loader, buckets=of_rung) for of_rung in buckets]
        """One for each rung: the same batches in other microbatches."""

    @property
    def loader(self) -> Loader:
        """The loader of the rung that the training is on."""
        return self.loaders[self.guard.rung]

    def _lose_worker(self) -> int:
        self.loaders = [replace(loader, workers=loader.workers - 1) for loader in self.loaders]
        return self.loader.workers

    def _begin_step(self) -> None:
        self.ranks.seed_step(self.config.data_options.seed, self.state.step)
        for group in self.training.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.options, self.state.step, self.total)

    def _end_step(self, outcome: Outcome) -> None:
        """The learning rate follows from the number of the step."""

    def _accumulate(self, batch: Batch) -> torch.Tensor:
        training, loader, share = self.training, self.loader, self.ranks.share(batch.sequences)
        if batch.loader is loader and self.ranks.world == 1:  # then workers may have prepared the microbatches
            microbatches = batch.microbatches()
        else:
            microbatches = map(loader.read, loader.order.microbatches(share))
        loss = torch.zeros((), device=training.device)
        if len(share):
            loss = accumulate(training, microbatches, batch.targets, self._candidate_for)
        self.ranks.complete_gradients(training.model)
        return loss

    def _candidate_for(self, batch: Microbatch) -> Candidate:
        return self.guard.current.candidate_for(batch.inputs.shape[self.training.model.time_dim])

    def _evaluate(self) -> float | None:
        source, model = self.config.data.validation, self.training.model
        if source is None:
            return None
        candidate = evaluation_candidate(model.spec, self.guard.candidate, self.config.plan.where)
        return validate(model, source, candidate, self.ranks)


@contextmanager
def _collect_signals(received: list[int]) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the training after the current step; a second signal ends it at once."""
    can_handle = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if can_handle}

    def handle(number: int, _: Any) -> None:
        received.append(number)
        signal.signal(number, before[signal.Signals(number)] or signal.SIG_DFL)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
