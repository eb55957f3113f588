"""The loop: steps under the guard, validation, checkpoints, metrics. Whatever stops it, it can be taken up again."""

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic, perf_counter
from typing import Any

import msgspec
import torch

from oomguard.bptt import Microbatch
from oomguard.candidate import Candidate
from oomguard.checkpoint import save
from oomguard.data.loader import Batch, Loader
from oomguard.data.order import Bucket
from oomguard.errors import GuardError, MisuseError, TornUpdateError
from oomguard.guard.guard import Guard
from oomguard.metrics import Metrics
from oomguard.step import Outcome, Training, Visiting, accumulate, no_gradient_left, update
from oomguard.train.evaluate import evaluation_candidate, validate
from oomguard.train.job import BEST, CHECKPOINTS, Job, Result, State, Told
from oomguard.train.options import rate_at
from oomguard.train.ranks import Ranks

COLUMNS = ("loss", "lr", "norm", "tokens_per_second", "peak_bytes", "epoch", "validation_loss")


class Trainer:
    """A training that goes on from its state. `start.py` puts one together."""

    def __init__(self, job: Job, training: Training, loader: Loader, guard: Guard, ranks: Ranks) -> None:
        self.job, self.training, self.guard, self.ranks = job, training, guard, ranks
        self.loaders = [replace(loader, buckets=_buckets(one.buckets)) for one in guard.ladder]
        """One for each rung: the same batches, in other microbatches."""
        self.state = State()
        self.metrics: Metrics | None = None
        self.progress: Callable[[Told], None] | None = None
        self.total = job.options.total_steps(len(loader))
        self.validation: float | None = None
        self._saved = (0, monotonic())
        self._stop = self._warned = False

    def run(self) -> Result:
        """All steps that are left, and a checkpoint after the last, or before what it could not do."""
        self._saved = (self.state.step, monotonic())
        with _on_signals(self._ask_to_stop), self.guard:
            try:
                while (ended := self._ended()) is None:
                    self._epoch()
            except TornUpdateError:
                raise  # the weights are half new: the checkpoint before this step is the one to go on from
            except (GuardError, MisuseError):  # memory is short, or something is wrong with the data
                self.save()
                raise
            self.save()
        return self._result(ended)

    def _epoch(self) -> None:
        """Batches from where the data is, until something ends them: the epoch, the training, or another rung."""
        loader = self.loaders[self.guard.rung]
        for batch in loader.batches(self.state.position):
            began = perf_counter()
            outcome = self.step(batch)
            self._count(batch, outcome, batch.steps / (perf_counter() - began))
            if self._save_is_due():
                self.save()
            # who has workers asks them anew: what they prepared is for another rung
            if self._ended() is not None or (loader.workers and loader is not self.loaders[self.guard.rung]):
                return

    def step(self, batch: Batch) -> Outcome:
        """One optimizer step, whatever it takes."""
        training, guard, ranks = self.training, self.guard, self.ranks
        for group in training.optimizer.param_groups:
            group["lr"] = rate_at(self.job.options, self.state.step, self.total)
        with no_gradient_left(training):
            for attempt in guard.attempts(training.optimizer):
                with attempt:
                    loss = self._accumulate(batch)
            loss = ranks.sum_gradients(training.model, loss)
            return update(training, loss, self.job.options.clip, self._update)

    def _accumulate(self, batch: Batch) -> torch.Tensor:
        """The gradient of this process's share of a batch."""
        training, parts = self.training, self._microbatches(batch)
        if not len(self.ranks.share(batch.sequences)):
            return torch.zeros((), device=training.model.device)
        return accumulate(training, parts, batch.targets, self._how)

    def _microbatches(self, batch: Batch) -> Iterator[Microbatch]:
        """As the rung has them: those that workers have prepared, or read here."""
        loader = self.loaders[self.guard.rung]
        if batch.loader is loader and self.ranks.world == 1:
            yield from batch.microbatches()
            return
        for part in loader.order.microbatches(self.ranks.share(batch.sequences)):
            yield loader.read(part)

    def _how(self, batch: Microbatch) -> Candidate:
        return self.guard.footing.candidate_for(batch.inputs.shape[self.training.model.time_dim])

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        visits = self.training.candidate.offload
        self.guard.update(optimizer, Visiting(optimizer).step if visits else None)

    def _count(self, batch: Batch, outcome: Outcome, tokens_per_second: float) -> None:
        """A step was made: validate if it is time, and tell."""
        loss, rate = float(outcome.loss), self.training.optimizer.param_groups[0]["lr"]
        step, standing = self.state.step + 1, self.guard.standing
        self.state = msgspec.structs.replace(self.state, step=step, position=batch.after, standing=standing, loss=loss)
        validated = self._validate(batch) if self._validation_is_due() else None
        every = self.job.options.log_every
        if self.metrics is not None and (step % every == 0 or validated is not None or step == self.total):
            numbers: dict[str, Any] = {"loss": loss, "lr": rate, "norm": outcome.norm, "epoch": batch.position.epoch}
            numbers |= {"tokens_per_second": tokens_per_second, "peak_bytes": self.guard.watch.peak_bytes or None}
            self.metrics.write(step, **numbers, validation_loss=validated)
        if outcome.skipped:
            self.guard.tell("skipped", "Gradients overflowed in fp16: this step was skipped and the scale lowered.")
        if not math.isfinite(loss) and not self._warned:
            self._warned = True
            self.guard.tell("not-finite", "The loss is no number any more: lower --lr, or give --clip.", loss=loss)
        if self.progress is not None:
            self.progress(self._told(loss, tokens_per_second))

    def _validate(self, batch: Batch) -> float:
        """The validation loss; the best weights are kept."""
        source, model = self.job.data.validation, self.training.model
        assert source is not None  # otherwise none is due
        how = evaluation_candidate(model.spec, self.guard.candidate, self.job.plan.where.place)
        found = self.validation = validate(model, source, how, self.ranks)
        better = math.isfinite(found) and (self.state.best is None or found < self.state.best)
        change = {"best": found, "worse": 0} if better else {"worse": self.state.worse + 1}
        self.state = msgspec.structs.replace(self.state, **change)
        if better and self.ranks.first:
            save(self.job.home / BEST, self._now(), self.state, keep=1)
        return found

    def _validation_is_due(self) -> bool:
        if self.job.data.validation is None:
            return False
        every = self.job.options.validate_every
        ends = self.state.position.done == 0 if every is None else self.state.step % every == 0
        return ends or self.state.step == self.total

    def _save_is_due(self) -> bool:
        options, (step, at) = self.job.options, self._saved
        if options.save_steps is not None:
            return self.state.step >= step + options.save_steps
        return monotonic() >= at + (options.save_seconds or 0)

    def save(self) -> None:
        """A checkpoint of now, by the first process."""
        self._saved = (self.state.step, monotonic())
        self.state = msgspec.structs.replace(self.state, standing=self.guard.standing)
        if self.ranks.first:
            if self.metrics is not None:
                self.metrics.flush()
            save(self.job.home / CHECKPOINTS, self._now(), self.state, keep=self.job.options.keep)

    def _now(self) -> Training:
        return replace(self.training, candidate=self.guard.candidate)

    def _ended(self) -> str | None:
        """Why it is over, if it is; all processes say the same."""
        if self.state.step >= self.total:
            return "done"
        patience = self.job.options.patience
        if patience is not None and self.state.worse >= patience:
            return "patience"
        return "interrupted" if self.ranks.agree([int(self._stop)])[0] else None

    def _ask_to_stop(self) -> None:
        self._stop = True

    def _told(self, loss: float, tokens_per_second: float) -> Told:
        return Told(
            step=self.state.step,
            total=self.total,
            loss=loss,
            validation=self.validation,
            tokens_per_second=tokens_per_second,
            peak_bytes=self.guard.watch.peak_bytes,
            budget_bytes=self.job.plan.budget_bytes,
            rung=self.guard.rung,
            events=() if self.guard.events is None else self.guard.events.news(),
        )

    def _result(self, ended: str) -> Result:
        return Result(
            run=self.job.home,
            steps=self.state.step,
            loss=self.state.loss,
            validation_loss=self.state.best,
            ended=ended,
            rung=self.guard.rung,
            peak_bytes=self.guard.watch.peak_bytes,
            model=self.training.model,
            missing=self.job.data.missing,
        )


def _buckets(candidates: tuple[tuple[int, Candidate], ...]) -> tuple[Bucket, ...]:
    return tuple(Bucket(longest=longest, microbatch=candidate.microbatch) for longest, candidate in candidates)


@contextmanager
def _on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the training after the step that is being made; a second Ctrl-C at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def asked(number: int, _: Any) -> None:
        stop()
        signal.signal(number, before[signal.Signals(number)] or signal.SIG_DFL)

    for number in before:
        signal.signal(number, asked)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
