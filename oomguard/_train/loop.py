"""The training loop: steps under the guard, validation, checkpoints, metrics. It can be resumed whatever stops it."""

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import msgspec
import torch

from oomguard._core.errors import GuardError, MisuseError
from oomguard._data.loader import Batch, Loader
from oomguard._data.open import Data, Missing
from oomguard._data.options import DataOptions
from oomguard._guard import Guard
from oomguard._guard.events import Event
from oomguard._plan.value import Plan
from oomguard._rnn import Microbatch
from oomguard._rnn.model import Recurrent
from oomguard._spec.candidate import Candidate
from oomguard._step import Outcome, Training, accumulate, no_gradient_left, update
from oomguard._train import TrainOptions, learning_rate
from oomguard._train.checkpoint import Model, TrainState, save
from oomguard._train.evaluate import evaluation_candidate, validate
from oomguard._train.metrics import Metrics
from oomguard._train.ranks import Ranks
from oomguard._train.settings import BEST, CHECKPOINTS, RunSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The parts of a training that stay the same: plan, options, data, directory, processes."""

    plan: Plan
    settings: RunSettings
    data: Data
    directory: Path
    ranks: Ranks
    model: Model = None
    progress: "Callable[[TrainProgress], None] | None" = None

    @property
    def options(self) -> TrainOptions:
        return self.settings.train

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
    tokens_per_second: float  # time steps of sequences per second in the last step
    peak_bytes: int  # largest peak so far
    budget_bytes: int
    rung: int  # rung of the plan; 0 is its candidate
    events: tuple[Event, ...] = ()  # events since the last report


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a training."""

    run: Path  # directory of the run
    steps: int  # optimizer steps made, including those before a resume
    loss: float | None  # loss of the last step
    validation_loss: float | None  # lowest validation loss
    ended: str  # why it ended: `done`, `patience` or `interrupted`
    rung: int  # rung of the plan at the end; 0 is its candidate
    peak_bytes: int  # largest peak of this process
    model: Recurrent  # the model after the last step
    missing: Missing  # how many sequences were cut or left out
    scaled: bool = False  # whether targets, and so losses, have mean 0 and standard deviation 1


class Trainer:
    """A training that continues from its state. `start.py` makes one."""

    def __init__(
        self, config: TrainConfig, training: Training, loader: Loader, guard: Guard, state: TrainState
    ) -> None:
        self.config, self.training, self.guard, self.state = config, training, guard, state
        self.ranks, guard.steps = config.ranks, state.step
        buckets = [{longest: c.microbatch for longest, c in rung.buckets} for rung in guard.ladder]
        self.loaders = [replace(loader, buckets=of_rung) for of_rung in buckets]
        """One for each rung: the same batches in other microbatches."""
        self.metrics: Metrics | None = None  # only the first process writes them
        if self.ranks.first:
            self.metrics = Metrics(config.directory, state.step, tensorboard=config.options.tensorboard)
        self.total = config.options.total_steps(len(loader))
        self.validation_loss: float | None = None
        self._warned, self._signals = False, list[int]()

    def run(self) -> Result:
        """Make all remaining steps, and save a checkpoint after the last or before one that failed."""
        self._saved_step, self._saved_at = self.state.step, monotonic()
        with _collect_signals(self._signals), self.guard:
            try:
                while (ended := self._ended()) is None:
                    self._run_batches()
            except (GuardError, MisuseError):  # memory is short, or the data has an error
                if self.guard.steps == self.state.step:  # otherwise some weights may be updated and others not
                    self.save()
                raise
            self.save()
        return Result(
            run=self.config.directory,
            steps=self.state.step,
            loss=self.state.loss,
            validation_loss=self.state.best,
            ended=ended,
            rung=self.guard.rung,
            peak_bytes=self.guard.watch.peak_bytes,
            model=self.training.model,
            missing=self.config.data.missing,
            scaled=self.state.normaliser is not None and self.state.normaliser.target_mean is not None,
        )

    def _run_batches(self) -> None:
        """Train until the epoch or the training ends, or until the workers have to be started again."""
        loader, options = self.loaders[self.guard.rung], self.config.options
        for batch in loader.batches(self.state.position):
            began = perf_counter()
            outcome = self.step(batch)
            self._finish_step(batch, outcome, batch.steps / (perf_counter() - began))
            if batch.lost is not None:  # one worker less: memory is probably short, and the next would be killed too
                self.loaders = [replace(loader, workers=loader.workers - 1) for loader in self.loaders]
                left = self.loaders[0].workers
                reason = f"A process that loads data was lost ({batch.lost}). Its work was done here; {left} are left."
                self.guard.tell("worker", reason, workers=left)
            most_steps, most_seconds = options.save_interval
            if self.state.step - self._saved_step >= most_steps or monotonic() - self._saved_at >= most_seconds:
                self.save()
            # workers are started again if one was lost, or if they prepare microbatches of another rung
            if self._ended() is not None or (loader.workers and loader is not self.loaders[self.guard.rung]):
                return

    def step(self, batch: Batch) -> Outcome:
        """Make one optimizer step; the guard repeats it on a lower rung if memory runs out."""
        training, guard, ranks = self.training, self.guard, self.ranks
        ranks.seed_step(self.config.data_options.seed, self.state.step)
        for group in training.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.options, self.state.step, self.total)
        with no_gradient_left(training):
            for attempt in guard.attempts(training.optimizer):
                with attempt:
                    loss = self._accumulate(batch)
            with ranks.together():
                loss = ranks.sum_gradients(training.model, loss)
                return update(training, loss, self.config.options.clip, guard.update)

    def _accumulate(self, batch: Batch) -> torch.Tensor:
        """Add up the gradient of this process's share of a batch; returns the loss."""
        training, loader, share = self.training, self.loaders[self.guard.rung], self.ranks.share(batch.sequences)
        if batch.loader is loader and self.ranks.world == 1:  # then workers may have prepared the microbatches
            microbatches = batch.microbatches()
        else:
            microbatches = map(loader.read, loader.order.microbatches(share))
        loss = torch.zeros((), device=training.model.device)
        if len(share):
            loss = accumulate(training, microbatches, batch.targets, self._candidate_for)
        self.ranks.complete_gradients(training.model)
        return loss

    def _candidate_for(self, batch: Microbatch) -> Candidate:
        return self.guard.current.candidate_for(batch.inputs.shape[self.training.model.time_dim])

    def _finish_step(self, batch: Batch, outcome: Outcome, tokens_per_second: float) -> None:
        loss, step = float(outcome.loss), self.state.step + 1
        self.state = msgspec.structs.replace(
            self.state, step=step, position=batch.after, ladder=self.guard.position, loss=loss
        )
        validated = self._validate()
        is_due = step % self.config.options.log_every == 0 or step == self.total or validated is not None
        if self.metrics is not None and is_due:
            self.metrics.write(
                step,
                loss=loss,
                lr=self.training.optimizer.param_groups[0]["lr"],
                norm=outcome.norm,
                tokens_per_second=tokens_per_second,
                peak_bytes=self.guard.watch.peak_bytes or None,
                epoch=batch.position.epoch,
                validation_loss=validated,
            )
        self._report(outcome, loss, tokens_per_second)

    def _report(self, outcome: Outcome, loss: float, tokens_per_second: float) -> None:
        if outcome.skipped:
            self.guard.tell("skipped", "Gradients overflowed in fp16. The step was skipped and the loss scale lowered.")
        if not math.isfinite(loss) and not self._warned:
            self._warned = True
            self.guard.tell(
                "not-finite", "The loss is no longer a finite number. Lower --lr, or set --clip.", loss=loss
            )
        if self.config.progress is not None and self.ranks.first:
            self.config.progress(
                TrainProgress(
                    step=self.state.step,
                    total=self.total,
                    loss=loss,
                    validation=self.validation_loss,
                    tokens_per_second=tokens_per_second,
                    peak_bytes=self.guard.watch.peak_bytes,
                    budget_bytes=self.config.plan.budget_bytes,
                    rung=self.guard.rung,
                    events=() if self.guard.events is None else self.guard.events.take_new(),
                )
            )

    def _validate(self) -> float | None:
        """Compute the validation loss if it is due; the best weights so far are saved."""
        source, model, every = self.config.data.validation, self.training.model, self.config.options.validate_every
        is_due = self.state.position.done == 0 if every is None else self.state.step % every == 0
        if source is None or not (is_due or self.state.step == self.total):
            return None
        candidate = evaluation_candidate(model.spec, self.guard.candidate, self.config.plan.where)
        loss = self.validation_loss = validate(model, source, candidate, self.ranks)
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
        if self.ranks.first:
            training = replace(self.training, candidate=self.guard.candidate)
            save(self.config.directory / name, training, self.state, keep)

    def _ended(self) -> str | None:
        """Why the training is over, or None; the same in all processes."""
        if self.state.step >= self.total:
            return "done"
        patience = self.config.options.patience
        if patience is not None and self.state.worse >= patience:
            return "patience"
        return "interrupted" if self.ranks.agree([len(self._signals)])[0] else None


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
