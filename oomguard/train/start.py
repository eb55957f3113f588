"""From a plan and data to a training, new or taken up again."""

import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch

from oomguard.checkpoint import Checkpoint, load, restore
from oomguard.checks import shown
from oomguard.data.loader import Loader, prefetch_within, size_loader
from oomguard.data.open import open_data
from oomguard.data.options import DataOptions
from oomguard.data.order import Bucket
from oomguard.device import Device, open_device
from oomguard.device.cpu import cores
from oomguard.errors import MisuseError, TornUpdateError
from oomguard.guard.guard import Guard
from oomguard.guard.ladder import Standing
from oomguard.metrics import Events, Metrics
from oomguard.model import Recurrent
from oomguard.plan.store import check_device, save_plan
from oomguard.plan.value import Plan
from oomguard.step import Training, make_optimizer, prepare
from oomguard.train.job import CHECKPOINTS, EVENTS, Job, Result, State, Told
from oomguard.train.loop import COLUMNS, Trainer
from oomguard.train.options import TrainOptions
from oomguard.train.ranks import Ranks, join

Model = Callable[..., Any] | str | None
Progress = Callable[[Told], None] | None
SHARED = Path("/dev/shm")
"""Where processes share memory on Linux."""


def run_training(
    plan: Plan, data: Any, asked: tuple[TrainOptions, DataOptions], model: Model = None, progress: Progress = None
) -> Result:
    """Execute a plan on data; with `resume`, from where its run was left."""
    options, data_options = asked
    home = Path(options.run or f"runs/{plan.spec.cell}-{plan.spec.steps}")
    _warn_of_exports(plan)
    with join(plan.where.device, plan.spec) as ranks:
        last = _last(home, options)
        ranks.agree([0])  # nobody writes a checkpoint before everybody has looked for one
        kept = None if last is None else _state_of(last).normaliser
        opened = open_data(data, plan.spec, data_options, kept)
        job = Job(plan=plan, options=options, data_options=data_options, data=opened, home=home)
        torn = False
        while True:
            trainer = _trainer(job, ranks, last, model)
            trainer.progress = progress if ranks.first else None
            trainer.guard.updates.careful = torn
            try:
                return trainer.run()
            except TornUpdateError:
                if torn:  # a second time
                    raise
                torn, last = True, _last(home, msgspec.structs.replace(options, resume=True))
            finally:
                if trainer.metrics is not None:
                    trainer.metrics.close()


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
    state = _begun(job) if last is None else _taken_up(job, last)
    training = _training(job, device, model)
    if last is not None:
        restore(last, training)
    events = Events(job.home / EVENTS) if ranks.first else None
    guard = Guard(plan, device=device, events=events, standing=state.standing, agree=ranks.agree)
    guard.steps = state.step
    trainer = Trainer(job, training, _loader(job, device, ranks), guard, ranks)
    trainer.state = state
    if ranks.first:
        trainer.metrics = _metrics(job.home, options, state.step)
        if last is None:
            save_plan(plan, job.home / "plan.json")
            trainer.save()
        else:
            guard.tell("resume", f"The run was taken up at step {state.step:,}.", rung=guard.rung)
    return trainer


def _begun(job: Job) -> State:
    return State(
        data=job.data.train.describe(),
        data_options=job.data_options,
        normaliser=job.data.normaliser,
    )


def _taken_up(job: Job, last: Checkpoint) -> State:
    """The state of a checkpoint, if the data is what it was then."""
    state = _state_of(last)
    was, now = _plain(state.data), _plain(job.data.train.describe())
    for name in [*was, *(one for one in now if one not in was)]:
        if was.get(name) != now.get(name) and name != "path":
            raise MisuseError(
                rule="A run goes on with the data that it began with",
                got=f"its {name} was {shown(was.get(name))} and is {shown(now.get(name))}",
                advice="Give the same --data and its options, or another --run.",
            )
    rungs = [job.plan.candidate, *(rung.candidate for rung in job.plan.fallbacks)]
    if last.candidate in rungs[state.standing.rung : state.standing.rung + 1]:
        return state
    return msgspec.structs.replace(state, standing=Standing())  # another plan: its ladder is begun at the top


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
    own = _build(model)(plan.spec)
    if not isinstance(own, Recurrent) or own.spec != plan.spec:
        raise MisuseError(
            rule="A model of your own must be an oomguard.model.Recurrent with the plan's spec: the plan's figures, "
            "segments and checkpoints are for that",
            got=f"{shown(model)} gave {type(own).__name__}",
            advice="Change what it builds, or train any other module in a loop of your own with oomguard.guard.",
        )
    own = own.to(device.torch_device)
    return replace(training, model=own, optimizer=make_optimizer(own, plan.candidate, lr))


def _build(model: Callable[..., Any] | str) -> Callable[..., Any]:
    """A function that builds a model, also by its name `package.module:function`."""
    if not isinstance(model, str):
        return model
    module, _, name = model.partition(":")
    try:
        found: Callable[..., Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise MisuseError(
            rule="A model of your own is a function, named as package.module:function",
            got=f"{shown(model)} cannot be imported ({error})",
            advice="Check the name, and that Python finds the package.",
        ) from None
    return found


def _loader(job: Job, device: Device, ranks: Ranks) -> Loader:
    """Batches of the training data; workers as asked, as the plan says or, for a card, as many as fit.

    Workers that were asked for prepare no more ahead than there is memory for. Several processes that train together
    have none: each reads its share itself.
    """
    plan, options = job.plan, job.data_options
    candidate, cuda = plan.candidate, device.name != "cpu"
    workers, prefetch = candidate.workers if options.workers is None else options.workers, candidate.prefetch
    if ranks.world > 1:
        workers = 0
    elif cuda and options.workers is None and not workers:
        workers, prefetch = size_loader(plan.spec, candidate, _room_bytes(plan), cores=cores(), pinned=True)
    elif options.workers:
        asked = msgspec.structs.replace(candidate, workers=workers)
        prefetch = prefetch_within(plan.spec, asked, _room_bytes(plan), pinned=cuda) or 1
    return Loader(
        source=job.data.train,
        spec=plan.spec,
        buckets=(Bucket(longest=plan.spec.steps, microbatch=candidate.microbatch),),
        seed=options.seed,
        workers=workers,
        prefetch=prefetch,
        pinned=cuda,
    )


def _room_bytes(plan: Plan) -> int:
    """Host memory for workers and what they prepare, which comes over in /dev/shm: 64 MiB in many a container."""
    room_bytes = open_device("cpu").budget().left_bytes
    if not plan.where.cuda:  # what training itself will take
        room_bytes -= plan.expected.peak_bytes
    return min(room_bytes, shutil.disk_usage(SHARED).free) if SHARED.is_dir() else room_bytes


def _metrics(home: Path, options: TrainOptions, step: int) -> Metrics:
    metrics = Metrics(home, COLUMNS, tensorboard=options.tensorboard)
    metrics.rewind(step)
    return metrics
