"""What a training is made of: Job (what was asked), State (where it is), Result (what came of it)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from oomguard.data.normalise import Normaliser
from oomguard.data.open import Data, Missing
from oomguard.data.options import DataOptions
from oomguard.data.order import Position
from oomguard.guard.ladder import Standing
from oomguard.metrics import Event
from oomguard.model import Recurrent
from oomguard.plan.value import Plan
from oomguard.train.options import TrainOptions

CHECKPOINTS, BEST, EVENTS = "checkpoints", "best", "events.jsonl"
"""Names in the directory of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What was asked."""

    plan: Plan
    options: TrainOptions
    data_options: DataOptions
    data: Data
    home: Path
    """The directory of the run."""


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a training is: with weights, optimizer and random numbers, all that a checkpoint needs."""

    step: int = 0
    """Optimizer steps made."""
    position: Position = Position()
    """In the data."""
    standing: Standing = Standing()
    """On the plan's ladder: sums of other pieces are rounded otherwise, so a resumed run goes on as it was."""
    loss: float | None = None
    """Of the last step."""
    best: float | None = None
    """The lowest validation loss."""
    worse: int = 0
    """Validations since."""
    data: dict[str, Any] = {}
    """What is trained on, as the source describes it."""
    data_options: DataOptions = DataOptions()
    """How it was read."""
    normaliser: Normaliser | None = None
    """How its numbers were scaled."""
    model: str | None = None
    """What built the model, as package.module:function; None: it is the one of the spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a progress bar shows."""

    step: int
    """Steps made."""
    total: int
    """Of so many."""
    loss: float
    """Of the last step."""
    validation: float | None
    """The last validation loss."""
    tokens_per_second: float
    """Of the last step."""
    peak_bytes: int
    """The largest so far."""
    budget_bytes: int
    """Of so many."""
    rung: int
    """On the ladder."""
    events: tuple[Event, ...] = ()
    """What was changed since the last time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a training."""

    run: Path
    """Its directory."""
    steps: int
    """Optimizer steps made, those before a resume included."""
    loss: float | None
    """Of the last step."""
    validation_loss: float | None
    """The lowest."""
    ended: str
    """Why: `done`, `patience`, `interrupted`."""
    rung: int
    """Where on the plan's ladder it ended; 0 is the plan's candidate."""
    peak_bytes: int
    """The largest that was seen, in this process."""
    model: Recurrent
    """What was trained, as it is after the last step."""
    missing: Missing
    """What of the data was cut or left out."""
