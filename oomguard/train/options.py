"""TrainOptions: how long, how fast and where to, checked at birth; and the learning rate that follows from them."""

import math
from typing import Literal, get_args

import msgspec

from oomguard.checks import check_switch, check_whole, flag, nearest, shown
from oomguard.errors import MisuseError
from oomguard.units import parse_seconds

Schedule = Literal["constant", "cosine", "linear", "step"]


class TrainOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a plan is executed.

    >>> TrainOptions(steps=500, schedule="cosine", warmup=50).save_seconds
    600.0
    """

    run: str | None = None
    """Directory of checkpoints, metrics and events; None: runs/ and the model's name."""
    resume: bool = False
    """Go on from the newest checkpoint there; without one, from the beginning."""
    epochs: int | None = None
    """Times through the data; None: once, or as many as the steps need."""
    steps: int | None = None
    """Optimizer steps; None: as many as the epochs have."""
    lr: float = 1e-3
    """The learning rate, at its highest."""
    schedule: Schedule = "constant"
    """How it falls: not at all, along half a cosine or a straight line to 0 at the last step, or by a factor now and
    then."""
    warmup: int = 0
    """Steps over which it first rises to `lr`, in a straight line."""
    decay_every: int | None = None
    """With `step`: steps between two falls; None: a third of all."""
    decay: float = 0.1
    """With `step`: the factor of each fall."""
    clip: float | None = None
    """The largest norm of the gradient."""
    patience: int | None = None
    """Stop after so many validations without a new best; None: never."""
    validate_every: int | None = None
    """Steps between two validations; None: after each epoch."""
    save_every: str = "10min"
    """Between two checkpoints: steps, or a duration such as 10min."""
    keep: int = 3
    """Checkpoints that are kept."""
    log_every: int = 1
    """Steps between two rows of the metrics."""
    tensorboard: bool = False
    """Event files for TensorBoard, beside the CSV."""

    def __post_init__(self) -> None:
        for name, low in _COUNTS.items():
            check_whole(name, getattr(self, name), low, 10**15, optional=name in _OPTIONAL)
        for name in ("resume", "tensorboard"):
            check_switch(name, getattr(self, name))
        for name in ("lr", "decay", "clip"):
            _check_positive(name, getattr(self, name), optional=name == "clip")
        if self.schedule not in get_args(Schedule):
            raise MisuseError(
                rule=f"--schedule must be one of {', '.join(get_args(Schedule))}",
                got=f"got {shown(self.schedule)}",
                advice=nearest(self.schedule, [*get_args(Schedule)]),
            )
        if self.save_steps is None and self.save_seconds is None:
            raise MisuseError(
                rule="--save-every must be a number of steps, or a duration",
                got=f"got {shown(self.save_every)}",
                advice="Write it as 500 or 10min.",
            )

    @property
    def save_steps(self) -> int | None:
        """Steps between two checkpoints, if they are counted."""
        text = str(self.save_every)
        return int(text) if text.isdecimal() and 0 < int(text) <= 10**15 else None

    @property
    def save_seconds(self) -> float | None:
        """Seconds between two checkpoints, if those are."""
        try:
            return None if str(self.save_every).isdecimal() else parse_seconds(str(self.save_every))
        except MisuseError:
            return None

    def total_steps(self, per_epoch: int) -> int:
        """All steps, if an epoch has so many."""
        if self.steps is not None and self.epochs is not None:
            return min(self.steps, self.epochs * per_epoch)
        return self.steps if self.steps is not None else (self.epochs or 1) * per_epoch


_COUNTS = {
    **{"epochs": 1, "steps": 1, "warmup": 0, "decay_every": 1, "patience": 1, "validate_every": 1},
    **{"keep": 1, "log_every": 1},
}
_OPTIONAL = ("epochs", "steps", "decay_every", "patience", "validate_every")


def _check_positive(name: str, value: object, *, optional: bool) -> None:
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    if not fine and not (optional and value is None):
        raise MisuseError(
            rule=f"{flag(name)} must be a number above 0", got=f"got {shown(value)}", advice="Write it as 0.001."
        )


def rate_at(options: TrainOptions, step: int, total: int) -> float:
    """The learning rate of a step, from 0, of so many. It follows from these alone, so a resume needs no more.

    >>> options = TrainOptions(lr=1.0, schedule="cosine", warmup=2)
    >>> [round(rate_at(options, step, 6), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
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
