"""Prepares a training from a plan and data, new or resumed from a checkpoint, and runs it."""

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from oomguard._core.errors import MisuseError, TornUpdateError, flag, shown
from oomguard._core.progress import tell
from oomguard._data.infer import complete
from oomguard._data.loader import Loader, size_loader
from oomguard._data.open import check_data, open_data
from oomguard._device.cpu import cores
from oomguard._device.find import Device, open_device
from oomguard._guard import Guard
from oomguard._guard.events import Events
from oomguard._guard.ladder import LadderPosition
from oomguard._plan.store import check_device
from oomguard._plan.task_value import TaskPlan
from oomguard._plan.value import Plan
from oomguard._step import Training, prepare
from oomguard._train.checkpoint import Checkpoint, DamagedError, Model, TrainState, build_model, load, name_of, restore
from oomguard._train.loop import Result, RunConfig, SpecTrainer, TaskResult, TrainConfig, Trainer, TrainProgress
from oomguard._train.plans import join_plans, save_plans
from oomguard._train.ranks import join
from oomguard._train.settings import CHECKPOINTS, settle, write_settings

SHARED_MEMORY = Path("/dev/shm")  # where processes share memory on Linux
_MAY_CHANGE = {"--workers", "--cache", "--format", "--nan", "--targets", "path", "targets", "predicts"}
"""Data options and descriptions that may differ after a resume. A description shows what such an option changes, and
files may have moved."""
Config = TypeVar("Config", bound=RunConfig)


def run_training(
    plan: Plan,
    data: Any,
    given: dict[str, Any],
    model: Model = None,
    progress: Callable[[TrainProgress], None] | None = None,
) -> Result:
    """Run a plan on data (None: that of the plan), with some fields of `TrainOptions` and `DataOptions`.

    With `resume`, it goes on from the newest checkpoint of the run.
    """
    settings = settle(plan, data, name_of(model), given)
    data, options, data_options = settings.data if data is None else data, settings.train, settings.options
    directory = Path(str(options.run))
    if not settings.known:
        data_options = complete(data, data_options)
    model = settings.model if model is None else model
    check_environment(plan)
    with join(plan.where.device, sparse=plan.spec.sparse_embedding) as alike:
        ranks, plan = join_plans(alike, plan, options)
        checkpoint = load(directory / CHECKPOINTS)
        tell("Reading the data")
        ranks.agree([0])  # no process writes a checkpoint before all have looked for one
        opened = open_data(data, plan.spec, data_options, None if checkpoint is None else checkpoint.state.normaliser)
        if checkpoint is None:  # otherwise the data was checked at the start of the run
            check_data(opened)
        config = TrainConfig(
            plan=plan,
            options=options,
            data=opened,
            directory=directory,
            ranks=ranks,
            model=model,
            settings=msgspec.structs.replace(
                settings,
                data=None if settings.data is None else os.path.abspath(settings.data),
                options=data_options,
                known=True,
            ),
            progress=progress,
        )
        result = run_from(config, checkpoint, _trainer)
    assert isinstance(result, Result), "the trainer of a spec has a model of a spec"
    return result


def find_start(directory: Path, *, resume: bool) -> Checkpoint | None:
    """The newest checkpoint of a run that is resumed; None for a new one, which must have its directory for itself."""
    checkpoint = load(directory / CHECKPOINTS)
    if checkpoint is not None and not resume:
        raise MisuseError(
            rule="A new run needs a directory of its own",
            got=f"{directory} has a run at step {checkpoint.step:,}",
            advice="Add --resume to continue it, or give another --run.",
        )
    return checkpoint


def run_from(
    config: Config, checkpoint: Checkpoint | None, make: Callable[[Config, Checkpoint | None], Trainer]
) -> TaskResult:
    """Train. After a torn update, go back to the last checkpoint once and update one parameter at a time."""
    careful = False
    while True:
        name = None if checkpoint is None else Path(checkpoint.directory).name
        config.ranks.check_same({"the newest checkpoint in the directory of the run": name})
        try:
            trainer = make(config, checkpoint)
        except DamagedError as error:
            older = load(config.directory / CHECKPOINTS, before=checkpoint)
            if older is None:
                raise
            warnings.warn(f"{error.rule}, but {error.got}. Looking for an older checkpoint.", stacklevel=3)
            checkpoint = older
            continue
        trainer.guard.updates.careful = careful
        try:
            return trainer.run()
        except TornUpdateError:
            if careful:
                raise
            careful, checkpoint = True, load(config.directory / CHECKPOINTS)
        finally:
            if trainer.metrics is not None:
                trainer.metrics.close()
        del trainer  # frees its weights before new ones are made, since memory is short


def check_environment(plan: Plan | TaskPlan) -> None:
    """Warn if the process was not started with the settings of the allocator that the plan relies on."""
    missing = [f"{name}={value}" for name, value in plan.exports.items() if os.environ.get(name) != value]
    if missing:
        warnings.warn(
            f"The plan's peak was measured with {' '.join(missing)} in the environment, which a process reads when it "
            "starts. Give train isolate=True, use the command oomguard train, or start Python with these variables.",
            stacklevel=5,
        )


def _trainer(config: TrainConfig, checkpoint: Checkpoint | None) -> Trainer:
    """A trainer at its first step, or where the checkpoint was saved."""
    plan, ranks, data = config.plan, config.ranks, config.data
    device = open_device(ranks.device if ranks.world > 1 else plan.where.device)
    state = TrainState(
        data=data.train.describe(),
        data_options=config.data_options,
        normaliser=data.normaliser,
        model=name_of(config.model),
    )
    if checkpoint is None:
        check_device(plan, device.title(), device.budget().limit_bytes)
    else:
        state = resumed_state(checkpoint, state, config)
    ranks.check_same(_sequences(state))
    tell("Building the model, and making the first step")
    training = _training(config, device)
    if checkpoint is not None:
        restore(checkpoint, training)
    if ranks.first:
        write_settings(config.directory, config.settings)
    trainer = SpecTrainer(config, training, _loader(config, device), make_guard(config, device, state), state)
    begin(trainer, resumed=checkpoint is not None)
    if checkpoint is None and any(data.missing):
        trainer.guard.tell("data", f"Of all sequences, {data.missing.words()}.", **data.missing._asdict())
    return trainer


def make_guard(config: RunConfig, device: Device, state: TrainState) -> Guard:
    """The guard of a training, on the rung that it was on."""
    events = Events(config.directory / "events.jsonl") if config.ranks.first else None
    guard = Guard(config.plan, device=device, events=events, position=state.ladder, agree=config.ranks.agree)
    [rungs] = config.ranks.agree([len(guard.ladder)])
    # all processes fall together: one with fewer fallbacks stays on its last rung meanwhile
    guard.ladder += guard.ladder[-1:] * (rungs - len(guard.ladder))
    return guard


def begin(trainer: Trainer, *, resumed: bool) -> None:
    """Log that a run was resumed, or store the plan and the first checkpoint of a new one."""
    if resumed:
        reason = f"The run was resumed at step {trainer.state.step:,}."
        trainer.guard.tell("resume", reason, rung=trainer.guard.rung)
        return
    save_plans(trainer.ranks, trainer.config.plan, trainer.config.directory)
    trainer.save()


def resumed_state(checkpoint: Checkpoint, new: TrainState, config: RunConfig) -> TrainState:
    """The state of a checkpoint. Model, data and the way the data is read must be those of a new run."""
    state, plan = checkpoint.state, config.plan
    if state.task != new.task:
        raise MisuseError(
            rule="A run continues with its own task",
            got=f"that was {state.task or 'the model of a spec'} and is {new.task or 'the model of a spec'}",
            advice="Give another --run.",
        )
    if state.model != new.model:
        raise MisuseError(
            rule="A run continues with its own model",
            got=f"that was {state.model or 'the one of the spec'} and is {new.model or 'the one of the spec'}",
            advice="Give the same --model, or another --run.",
        )
    before, now = _sequences(state), _sequences(new)
    for name in before | now:  # after another split, the run would be validated on data it was trained on
        if before.get(name) != now.get(name):
            raise MisuseError(
                rule="A run continues with its own data",
                got=f"its {name} was {shown(before.get(name))} and is {shown(now.get(name))}",
                advice="Give the same data and options, or another --run.",
            )
    candidates = [plan.candidate, *(fallback.candidate for fallback in plan.fallbacks)]
    is_known = checkpoint.candidate == candidates[min(state.ladder.rung, len(candidates) - 1)]
    # it is the candidate of the first process, which therefore knows it for all
    rungs, changed = config.ranks.agree([len(candidates), int(config.ranks.first and not is_known)])
    if not changed and state.ladder.rung < rungs:
        return state
    return msgspec.structs.replace(state, ladder=LadderPosition())  # another plan: start at the top of its ladder


def _sequences(state: TrainState) -> dict[str, Any]:
    """All that determines the sequences: options by their flags, then the description of the data, which follows."""
    values = {flag(name): value for name, value in msgspec.structs.asdict(state.data_options).items()} | state.data
    kept = {name: value for name, value in values.items() if name not in _MAY_CHANGE}
    return msgspec.json.decode(msgspec.json.encode(kept), type=dict[str, Any])


def _training(config: TrainConfig, device: Device) -> Training:
    plan, rank = config.plan, config.ranks.rank
    torch.manual_seed(config.data_options.seed)
    own = None if config.model is None else build_model(config.model, plan.spec)
    return prepare(plan.spec, plan.candidate, device.name, config.options.lr, model=own, rank=rank)


def _loader(config: TrainConfig, device: Device) -> Loader:
    """The loader of the training data, with the user's workers, the plan's or, for a card, as many as fit.

    Workers that the user asked for prepare no more ahead than there is memory for. Several processes that train
    together have no workers: each reads its own share.
    """
    plan, options = config.plan, config.data_options
    candidate, cuda = plan.candidate, device.name != "cpu"
    workers, prefetch = candidate.workers if options.workers is None else options.workers, candidate.prefetch
    if config.ranks.world > 1:
        workers = 0
    elif options.workers or (cuda and options.workers is None and not workers):
        room_bytes, asked = _loader_room_bytes(plan), options.workers
        workers, prefetch = size_loader(plan.spec, candidate, room_bytes, cores=cores(), pinned=cuda, asked=asked)
    return Loader(
        source=config.data.train,
        spec=plan.spec,
        buckets={plan.spec.steps: candidate.microbatch},
        seed=options.seed,
        workers=workers,
        prefetch=prefetch,
        pinned=cuda,
    )


def _loader_room_bytes(plan: Plan) -> int:
    """Host memory for workers and their microbatches, which pass through /dev/shm (64 MiB in many containers)."""
    room_bytes = open_device("cpu").budget().left_bytes
    if not plan.where.cuda:  # the training itself needs its share
        room_bytes -= plan.expected.peak_bytes
    return min(room_bytes, shutil.disk_usage(SHARED_MEMORY).free) if SHARED_MEMORY.is_dir() else room_bytes
