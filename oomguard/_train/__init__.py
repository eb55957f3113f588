"""The trainer: runs a plan on data under the guard. It can be killed at any moment and resumed.

Here are its options. `start.py` prepares a training, `loop.py` runs it, `checkpoint.py` and `tensors.py` save it,
`metrics.py` and `trackers.py` log it, `ranks.py` connects several processes, `plans.py` gives each its plan,
`shards.py` puts their shares of the optimizer's state together, `evaluate.py` validates and predicts.
Tasks share all of that: `task_start.py` prepares one, `task.py` has its steps and `task_data.py` its batches.
"""

import math
from contextlib import suppress
from typing import Annotated, Literal

import msgspec

from oomguard._core.errors import Bounds, MisuseError, check_fields, nearest, shown, wrong
from oomguard._core.units import parse_seconds

Schedule = Literal["constant", "cosine", "linear", "step"]
TRACKERS = ("mlflow", "wandb", "tensorboard")
_COUNT = Bounds(1, 10**15)


class TrainOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a plan is trained."""

    run: str | None = None
    """Directory of checkpoints, metrics and events; None: runs/ and the model's name."""
    resume: bool = False
    """Continue from the newest checkpoint in the directory; without one, start anew."""
    epochs: Annotated[int | None, _COUNT] = None
    """Passes over the data; None: one, or as many as `steps` needs."""
    steps: Annotated[int | None, _COUNT] = None
    """Optimizer steps; None: as many as the epochs have."""
    lr: float = 1e-3
    """Highest learning rate."""
    schedule: Schedule = "constant"
    """How the learning rate falls: not at all, along a cosine or a straight line to 0 at the last step, or in steps."""
    warmup: Annotated[int, Bounds(0, 10**15)] = 0
    """Optimizer steps over which the learning rate rises to `lr` in a straight line."""
    decay_every: Annotated[int | None, _COUNT] = None
    """With schedule `step`: optimizer steps between two falls; None: a third of all."""
    decay: float = 0.1
    """With schedule `step`: factor of each fall."""
    clip: float | None = None
    """Largest norm of the gradient; None: no clipping."""
    patience: Annotated[int | None, _COUNT] = None
    """Stop after this many validations without a new best; None: never."""
    validate_every: Annotated[int | None, _COUNT] = None
    """Optimizer steps between two validations; None: validate after each epoch."""
    save_every: str = "10min"
    """Interval between two checkpoints: optimizer steps, or a duration such as 10min."""
    keep: Annotated[int, _COUNT] = 3
    """Number of checkpoints to keep."""
    log_every: Annotated[int, _COUNT] = 1
    """Optimizer steps between two rows of the metrics."""
    tensorboard: bool = False
    """Write event files for TensorBoard as well as the CSV. It is the same as `log` with tensorboard."""
    log: tuple[str, ...] = ()
    """Trackers that show the training as well: mlflow, wandb, tensorboard, or none. They write to local files only."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("lr", "decay", "clip"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 < value < math.inf) and not (name == "clip" and value is None):
                raise wrong(name, "a number above 0", value, "Write it as 0.001.")
        msgspec.structs.force_setattr(self, "log", _tracker_names(self.log))
        if self.save_interval == (math.inf, math.inf):
            raise wrong("save_every", "a number of steps or a duration", self.save_every, "Write it as 500 or 10min.")

    @property
    def trackers(self) -> tuple[str, ...]:
        """All trackers by name, each once."""
        return tuple(dict.fromkeys([*self.log, *(["tensorboard"] if self.tensorboard else [])]))

    @property
    def save_interval(self) -> tuple[float, float]:
        """Optimizer steps and seconds between two checkpoints: the one that `save_every` does not say is infinite."""
        text = str(self.save_every)
        if text.isdecimal():
            return int(text) if 0 < int(text) <= _COUNT.high else math.inf, math.inf
        with suppress(MisuseError):
            return math.inf, parse_seconds(text)
        return math.inf, math.inf

    def total_steps(self, per_epoch: int) -> int:
        """Optimizer steps in all, given those of one epoch."""
        if self.steps is not None and self.epochs is not None:
            return min(self.steps, self.epochs * per_epoch)
        return self.steps if self.steps is not None else (self.epochs or 1) * per_epoch


def _tracker_names(value: object) -> tuple[str, ...]:
    """The trackers that are asked for, by one name or several; "none" alone means no tracker."""
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, tuple | list) else (value,)
    for name in names:
        if name not in TRACKERS and names != ("none",):
            rule = f"--log takes {', '.join(TRACKERS)}, or none"
            raise MisuseError(rule=rule, got=f"got {shown(name)}", advice=nearest(name, [*TRACKERS, "none"]))
    return () if names == ("none",) else tuple(dict.fromkeys(map(str, names)))


def learning_rate(options: TrainOptions, step: int, total: int) -> float:
    """The learning rate of a step, counted from 0. It depends on nothing else, so a resume needs no scheduler state."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    done = min(1.0, (step - options.warmup) / max(1, total - options.warmup))
    if options.schedule == "cosine":
        return options.lr * (1 + math.cos(math.pi * done)) / 2
    if options.schedule == "linear":
        return options.lr * (1 - done)
    if options.schedule == "step":
        every = options.decay_every or max(1, -(-total // 3))
        return options.lr * options.decay ** (step // every)
    return options.lr
