"""From a plan and data to a training, new or taken up again."""

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from oomguard.checkpoint import Checkpoint, load, restore
from oomguard.checks import flag, shown
from oomguard.data.loader import Loader, size_loader
from oomguard.data.open import check_data, open_data
from oomguard.data.options import DataOptions
from oomguard.data.order import Bucket
from oomguard.device import Device, open_device
from oomguard.device.cpu import cores
from oomguard.errors import MisuseError, TornUpdateError
from oomguard.guard.guard import Guard
from oomguard.guard.ladder import Standing
from oomguard.metrics import Events, Metrics
from oomguard.plan.store import check_device, save_plan
from oomguard.plan.value import Plan
from oomguard.step import Training, make_optimizer, prepare
from oomguard.train.job import CHECKPOINTS, EVENTS, Job, Result, State, Told
from oomguard.train.loop import COLUMNS, Trainer
from oomguard.train.options import TrainOptions
from oomguard.train.own import Model, build_own, name_of
from oomguard.train.ranks import Ranks, join

Progress = Callable[[Told], None] | None


def run_training(
    plan: Plan, data: Any, asked: tuple[TrainOptions, DataOptions], model: Model = None, progress: Progress = None
) -> Result:
    """Execute a plan on data; with `resume`, from where its run was left."""
    options, data_options = asked
    home = Path(options.run or f"runs/{plan.spec.cell}-{plan.spec.steps}")
    _check_validated(options, data_options)
    _warn_of_exports(plan)
    with join(plan.where.device, plan.spec) as ranks:
        last = _last(home, options)
        ranks.agree([0])  # nobody writes a checkpoint before everybody has looked for one
        kept = None if last is None else _state_of(last).normaliser
        opened = open_data(data, plan.spec, data_options, kept)
        if last is None:  # otherwise it was checked then
            check_data(opened)
        job = Job(plan=plan, options=options, data_options=data_options, data=opened, home=home)
        torn = False
        while True:
            trainer = _trainer(job, ranks, last, model)
            trainer.progress = progress if ranks.first else None
            trainer.guard.updates.careful = torn
            try:
                return trainer.run()
            except TornUpdateError:
                if torn or ranks.world > 1:  # a second time, or the others have gone on
                    raise
                torn, last = True, _last(home, msgspec.structs.replace(options, resume=True))
            finally:
                if trainer.metrics is not None:
                    trainer.metrics.close()
            del trainer  # its weights go before others come: memory is short


def _check_validated(options: TrainOptions, data_options: DataOptions) -> None:
    for name in ("patience", "validate_every"):
        if getattr(options, name) is not None and not data_options.validation:
            raise MisuseError(
                rule=f"{flag(name)} needs data that is kept for validation",
                got=f"got --validation {data_options.validation:g}",
                advice=f"Leave {flag(name)} out, or give --validation a share such as 0.1.",
            )


def missing_exports(plan: Plan) -> dict[str, str]:
    """What of a plan's environment this process was not started with."""
    return {name: value for name, value in plan.exports.items() if os.environ.get(name) != value}


def _warn_of_exports(plan: Plan) -> None:
    missing = missing_exports(plan)
    if missing:
        words = " ".join(f"{name}={value}" for name, value in missing.items())
        warnings.warn(
            f"The plan's peak was measured with {words} in the environment, which is read when a process starts. "
            "Start Python with it, or train by the command oomguard train.",
            stacklevel=4,
        )


def _last(home: Path, options: TrainOptions) -> Checkpoint | None:
    """The checkpoint to go on from. A run that is there must not be overwritten by accident."""
    last = load(home / CHECKPOINTS)
    if last is not None and not options.resume:
        raise MisuseError(
            rule="A run needs a directory of its own",
            got=f"{home} has one that is at step {last.step:,}",
            advice="Say --resume to go on with it, or give another --run.",
        )
    return last


def _state_of(checkpoint: Checkpoint) -> State:
    try:
        return msgspec.convert(checkpoint.facts, State)
    except msgspec.ValidationError as error:
        raise MisuseError(
            rule="A run is taken up from a checkpoint that oomguard train has written",
            got=f"{checkpoint.path} is none ({error})",
            advice="Give another --run.",
        ) from None


def _trainer(job: Job, ranks: Ranks, last: Checkpoint | None, model: Model) -> Trainer:
    """A trainer at its beginning, or where the checkpoint was saved."""
    plan, options = job.plan, job.options
    device = open_device(ranks.device if ranks.world > 1 else plan.where.device)
    if last is None:
        check_device(plan, device.title(), device.budget().limit_bytes)
    state = _begun(job, model) if last is None else _taken_up(job, last, model)
    training = _training(job, device, model)
    if last is not None:
        restore(last, training)
    if ranks.world > 1:  # each draws dropout of its own
        torch.manual_seed(job.data_options.seed + ranks.rank + ranks.world * (state.step + 1))
    events = Events(job.home / EVENTS) if ranks.first else None
    guard = Guard(plan, device=device, events=events, standing=state.standing, agree=ranks.agree)
    guard.steps = state.step
    trainer = Trainer(job, training, _loader(job, device), guard, ranks)
    trainer.state = state
    if ranks.first:
        trainer.metrics = _metrics(job.home, options, state.step)
        if last is None:
            save_plan(plan, job.home / "plan.json")
            trainer.save()
            if any(job.data.missing):
                guard.tell("data", f"Of all sequences, {job.data.missing.words()}.", **job.data.missing._asdict())
        else:
            guard.tell("resume", f"The run was taken up at step {state.step:,}.", rung=guard.rung)
    return trainer


def _begun(job: Job, model: Model) -> State:
    return State(
        data=job.data.train.describe(),
        data_options=job.data_options,
        normaliser=job.data.normaliser,
        model=name_of(model),
    )


def _taken_up(job: Job, last: Checkpoint, model: Model) -> State:
    """The state of a checkpoint, if the model and the data are what they were then, and are read as they were."""
    state = _state_of(last)
    if state.model != name_of(model):
        raise MisuseError(
            rule="A run goes on with the model that it began with",
            got=f"that was {state.model or 'the one of the spec'} and is {name_of(model) or 'the one of the spec'}",
            advice="Give the same --model, or another --run.",
        )
    _check_same(_by_flag(state.data_options), _by_flag(job.data_options))  # first: the rest follows from them
    _check_same(_plain(state.data), _plain(job.data.train.describe()))
    rungs = [job.plan.candidate, *(rung.candidate for rung in job.plan.fallbacks)]
    if last.candidate in rungs[state.standing.rung : state.standing.rung + 1]:
        return state
    return msgspec.structs.replace(state, standing=Standing())  # another plan: its ladder is begun at the top


def _check_same(was: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise if a run would go on with something else: of another split it has seen what it is validated on."""
    for name in [*was, *(one for one in now if one not in was)]:
        if was.get(name) != now.get(name) and name not in ("path", "targets"):  # files may be elsewhere by now
            raise MisuseError(
                rule="A run goes on with the data that it began with",
                got=f"its {name} was {shown(was.get(name))} and is {shown(now.get(name))}",
                advice="Give the same --data and its options, or another --run.",
            )


def _by_flag(options: DataOptions) -> dict[str, Any]:
    """The options that say which sequences there are; of the others, what they do is in the source's description."""
    given = _plain(options).items()
    return {flag(name): value for name, value in given if name not in ("workers", "cache", "format", "nan", "targets")}


def _plain(value: Any) -> dict[str, Any]:
    """As it comes back from JSON."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return found


def _training(job: Job, device: Device, model: Model) -> Training:
    """The model with its optimizer: the spec's, or what a function of the user's builds."""
    plan, lr = job.plan, job.options.lr
    torch.manual_seed(job.data_options.seed)
    training = prepare(plan.spec, plan.candidate, device.torch_device, lr)
    if model is None:
        return training
    own = build_own(model, plan.spec).to(device.torch_device)
    return replace(training, model=own, optimizer=make_optimizer(own, plan.candidate, lr))


def _loader(job: Job, device: Device) -> Loader:
    """Batches of the training data; workers as asked, as the plan says or, for a card, as many as fit."""
    plan, options = job.plan, job.data_options
    candidate, cuda = plan.candidate, device.name != "cpu"
    workers, prefetch = candidate.workers if options.workers is None else options.workers, candidate.prefetch
    if cuda and options.workers is None and not workers:
        host_bytes = open_device("cpu").budget().left_bytes
        workers, prefetch = size_loader(plan.spec, candidate, host_bytes, cores=cores(), pinned=True)
    return Loader(
        source=job.data.train,
        spec=plan.spec,
        buckets=(Bucket(longest=plan.spec.steps, microbatch=candidate.microbatch),),
        seed=options.seed,
        workers=workers,
        prefetch=prefetch,
        pinned=cuda,
    )


def _metrics(home: Path, options: TrainOptions, step: int) -> Metrics:
    metrics = Metrics(home, COLUMNS, tensorboard=options.tensorboard)
    metrics.rewind(step)
    return metrics
