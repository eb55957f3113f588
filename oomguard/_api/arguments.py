"""The arguments by name of the public functions: fields of specs, knobs, and options of data and of training.

The structs `Spec`, `Candidate`, `DataOptions` and `TrainOptions` say what there is. `takes` makes the signature that
`help()` and completion show from their fields. Type checkers need the names in writing: those are here, once.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from oomguard._core.errors import REQUIRED, check_whole, conflict, fields_of
from oomguard._core.units import MAX_BYTES, read_budget
from oomguard._data.options import Fill, Format, Nan
from oomguard._spec.candidate import (
    KNOBS,
    Allocator,
    Candidate,
    Candidates,
    Engine,
    Keep,
    OldAllocator,
    Precision,
    Update,
)
from oomguard._spec.read import read_candidate, read_spec
from oomguard._spec.spec import Spec
from oomguard._train import Schedule

Function = TypeVar("Function", bound=Callable[..., Any])
T = TypeVar("T")
Many: TypeAlias = T | Sequence[T] | NDArray[np.generic]  # of a knob: `estimate` takes arrays of them
Count: TypeAlias = int | Sequence[int | None] | NDArray[np.generic] | None


class SpecFields(TypedDict, total=False):
    """Fields of `oomguard.Spec`, which say what they mean."""

    cell: str
    seq: int | None
    nonlinearity: Literal["tanh", "relu"]
    features: int | None
    vocab: int | None
    embedding: int | None
    hidden: int
    layers: int
    bidirectional: bool
    projection: int | None
    dropout: float
    layer_norm: bool
    head: Literal["per-step", "last-step"]
    outputs: int | None
    loss: Literal["cross-entropy", "mse"] | None
    optimizer: str
    frozen: Sequence[str]
    tied: bool
    sparse_embedding: bool
    packed: bool
    batch_first: bool
    lengths: dict[int, int] | None
    batch: int | None


class Knobs(TypedDict, total=False):
    """The knobs of `oomguard.Candidate`."""

    microbatch: Count
    accumulation: Count
    precision: Many[Precision | None]
    segments: Count
    recompute: Many[bool | None]
    levels: Count
    keep: Many[Keep | None]
    window: Count
    engine: Many[Engine | None]
    threads: Count
    offload: Many[bool | None]
    update: Many[Update | None]
    state_8bit: Many[bool | None]
    allocator: Many[Allocator | OldAllocator | None]
    workers: Count
    prefetch: Count


class Cutting(TypedDict, total=False):
    """Options of data that decide which sequences it has."""

    format: Format | None
    columns: str | int | Sequence[str] | None
    target: str | int | Sequence[str] | None
    ahead: int | None
    id: str | None
    time: str | None
    targets: str | None
    stride: int | None
    nan: Nan
    fill: Fill | None
    categories: dict[str, tuple[str, ...]]
    characters: bool
    vocabulary: str | None
    truncate: bool
    limit: int | None
    cache: str | None


class DataFields(Cutting, total=False):
    """All options of data."""

    validation: float
    split: Literal["series", "time"] | None
    normalise: Literal["none", "inputs", "both"]
    workers: int | None
    seed: int
    inputs_only: bool


class ResumeFields(DataFields, total=False):
    """Options of a training that goes on."""

    epochs: int | None
    steps: int | None
    lr: float
    schedule: Schedule
    warmup: int
    decay_every: int | None
    decay: float
    clip: float | None
    patience: int | None
    validate_every: int | None
    save_every: int | str
    keep: int
    log_every: int
    tensorboard: bool
    log: str | Sequence[str]


class TrainFields(ResumeFields, total=False):
    """Options of a training."""

    run: str | os.PathLike[str] | None
    resume: bool


class Fields(SpecFields, Knobs, total=False):
    """A model and its knobs."""


class PlanFields(Fields, Cutting, total=False):
    """A model, its fixed knobs, and the data that it is for."""


class TaskPlanning(TypedDict, total=False):
    """Options of the plan that `train` makes of a task that has none."""

    budget: int | str | None
    device: str | None
    batch: int | None
    seq: int | None


class TrainArguments(TrainFields, TaskPlanning, total=False):
    """Options of a training of either kind."""


Progress: TypeAlias = Callable[[Any], None] | bool


class ProbeCall(Fields, total=False):
    """All that `probe` takes by name, for its overloads."""

    device: str
    budget: int | str | None
    budget_bytes: int | None
    timeout: float | str
    progress: bool


class PlanCall(PlanFields, total=False):
    """All that `find_feasible_config` takes by name, for its overloads."""

    data: Any
    budget: int | str | None
    device: str
    maximize: str | Sequence[str]
    allow: str | Sequence[str]
    max_probes: int
    timeout: float | str
    sampler: str
    ledger: str | None
    storage: str | None
    on: str | None
    step_time: float | str | None
    progress: Progress


class TrainCall(TrainArguments, total=False):
    """All that `train` takes by name, for its overloads."""

    progress: Progress
    isolate: bool | None


def takes(*structs: type[msgspec.Struct]) -> Callable[[Function], Function]:
    """Show the names of `**fields: Unpack[...]` in the signature of a function, with the defaults of these structs.

    A name that none of them has, and a knob that a search varies, have the default None.
    """
    defaults = {name: field.default for struct in structs for name, field in fields_of(struct).items()}

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        *named, rest = signature.parameters.values()
        (fields,) = get_args(rest.annotation)
        own = (
            rest.replace(name=name, kind=rest.KEYWORD_ONLY, annotation=kind, default=_shown(defaults.get(name)))
            for name, kind in fields.__annotations__.items()
        )
        function.__signature__ = signature.replace(parameters=[*named, *own])  # type: ignore[attr-defined]
        return function

    return decorate


def _shown(default: Any) -> Any:
    return None if default is REQUIRED else default


def split(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split arguments by name into fields of a spec (with options of data) and knobs."""
    knobs = {name: value for name, value in fields.items() if name in KNOBS}
    return {name: value for name, value in fields.items() if name not in KNOBS}, knobs


def read_candidates(
    spec: Spec | None,
    candidate: Candidate | Candidates | None,
    fields: dict[str, Any],
    budget: int | str | None,
    budget_bytes: int | None,
) -> tuple[Spec, Candidate | Candidates, int | None]:
    """The spec, the candidate or candidates, and the budget in bytes; None without a budget."""
    limit_bytes = budget_bytes_of(budget, budget_bytes)
    own, knobs = split(fields)
    spec = read_spec(spec, own)
    return spec, read_candidate(spec, candidate, knobs), limit_bytes


def budget_bytes_of(budget: int | str | None, budget_bytes: int | None) -> int | None:
    """The budget in bytes, given in one of two ways; None if it is not."""
    if budget is not None and budget_bytes is not None:
        raise conflict("The budget is given once", "budget", "budget_bytes")
    check_whole("budget", budget_bytes, 0, MAX_BYTES)
    return read_budget(budget) if budget_bytes is None else budget_bytes
