"""The space: all candidates that a search may choose from, as arrays.

A candidate is a setting (engine, precision, threads, ...: a few of each) and a shape (microbatch and segments: grids
fine enough to lose no more than a few percent). Knobs that the user fixed have one value.
"""

import importlib.util
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from oomguard._estimate import terms
from oomguard._estimate.target import Target
from oomguard._probe.record import Record
from oomguard._spec.candidate import ALLOW_WORDS, KNOBS, Candidates, check_allow, serve
from oomguard._spec.spec import Spec

LEVELS_FROM = {1: 1, 2: 256, 3: 16_384}  # the number of segments from which on each number of levels is worth its time
FINE = 1.004  # the ratio of neighbouring microbatches if the aim is the largest; its eighth power if it is speed
WORTH = 0.02  # share of the time of a step that is worth a probe, and of the budget that is worth a knob
WORTH_LOSSY = 1.1  # a setting that changes the gradient must be so many times as fast as what keeps it
STEP_SECONDS = 60.0  # with the longest sequences, a step takes no longer unless `--step-time` says so
HEAPS = ("tight", "fast")
"""CPU: the allocators worth trying. `fast` keeps the blocks of a step (PyTorch's own kernels) or of a whole segment
(oneDNN; LSTM 128, T = 400, 2 threads: 63 ms a step in chunks, and 106 with glibc's moving thresholds; its peaks then
vary). Vanilla RNNs have `tight` alone: elsewhere they creep up by a third. `system` is neither fast nor repeatable,
since its thresholds depend on what the process freed before."""
SHORTEST_PIECE = 8  # steps of a segment, at least: shorter ones take more time than they save memory
WHOLE = {"segments": 1, "recompute": True, "levels": 1, "window": None}
"""The shape of a candidate that goes through a sequence in one piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the device offers and the user permits."""

    precisions: tuple[str, ...] = ("fp32",)  # the precisions that the device's hardware computes in
    cores: int = 1  # processors that this process may use
    expandable: bool = False  # CUDA: whether expandable segments may be tried
    allow: tuple[str, ...] = ()  # the lossy knobs that may be turned, as `--allow` takes them
    fixed: dict[str, Any] = field(default_factory=dict)  # knobs that the user fixed, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All candidates that a search may choose from."""

    settings: tuple[dict[str, Any], ...]
    """Combinations of the knobs that are names, switches or threads; the first is PyTorch's default."""
    choices: Choices = field(default_factory=Choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a search is to solve."""

    spec: Spec
    target: Target
    space: Space
    budget_bytes: int  # bytes that the training process may use on the device
    host_bytes: int | None = None  # on a card: bytes that it may use of the host's memory; None if that is not known
    cached: tuple[Record, ...] = ()  # records of earlier searches for models with the same cell on this device
    maximize: tuple[str, ...] = ("throughput",)
    """The aims: the first decides on the plan, the others add points to the front."""
    step_seconds: float = STEP_SECONDS  # seconds of a step at most, if long sequences are the aim
    open_batch: bool = False
    """Whether every microbatch is a batch of its own, in one pass: the largest batch is looked for."""

    def spec_of(self, microbatch: int, spec: Spec) -> Spec:
        """The spec that a candidate of a spec's table is run with."""
        return msgspec.structs.replace(spec, batch=microbatch) if self.open_batch else spec

    @property
    def timed(self) -> bool:
        """Whether the time of a step decides on what is best."""
        return "throughput" in self.maximize


def make_space(spec: Spec, target: Target, budget_bytes: int, choices: Choices) -> Space:
    """The space of a spec on a device."""
    check_allow(choices.allow)
    fixed, allow = choices.fixed, choices.allow
    values = _settings(spec, target, choices)
    worth: dict[str, bool] = worth_trying(spec, target, budget_bytes)
    worth["state_8bit"] = has_8bit(spec, target)
    for name in dict.fromkeys([*worth, *KNOBS]):
        role = KNOBS[name].role
        if role.tries and worth.get(name, True) and (role.lossy is None or role.lossy in allow):
            values[name] = role.tries
    values |= {name: (value,) for name, value in fixed.items() if KNOBS[name].role.group != "shape"}
    settings = [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]
    return Space(settings=tuple(settings), choices=choices)


def has_8bit(spec: Spec, target: Target) -> bool:
    """Whether the optimizer's state can be kept in 8 bits with the packages that are installed here."""
    if target.cuda and importlib.util.find_spec("bitsandbytes") is not None:
        return True
    return spec.optimizer in ("adam", "adamw", "adam8bit") and importlib.util.find_spec("torchao") is not None


def worth_trying(spec: Spec, target: Target, budget_bytes: int) -> dict[str, Any]:
    """Which knobs could save a share of the budget that is worth it; arrays for the rows of a `SpecRows`."""
    weights_bytes = terms.weights_bytes(spec)
    return {
        "offload": target.cuda and 2 * weights_bytes > WORTH * budget_bytes,
        "update": weights_bytes > WORTH * budget_bytes,
        "keep": target.cuda and spec.steps * spec.batch * spec.inputs > WORTH * budget_bytes,
    }


def _settings(spec: Spec, target: Target, choices: Choices) -> dict[str, tuple[Any, ...]]:
    """The values of the knobs that depend on the cell and the device; the CPU's first allocator suits any engine."""
    # one half precision: bf16 if the device has it, since it needs no scaling of the loss
    half = [name for name in ("bf16", "fp16") if name in choices.precisions and "precision" in choices.allow]
    precisions = ("fp32", *half[:1])
    if target.cuda:  # PyTorch's own kernels keep several times as much there: only if the user fixes them
        allocators = ("system", "expandable") if choices.expandable else ("system",)
        return {"engine": ("cudnn",), "precision": precisions, "threads": (None,), "allocator": allocators}
    cores = choices.cores
    return {
        "engine": ("onednn", "native") if spec.cell == "lstm" and spec.projection is None else ("native",),
        "precision": precisions,
        "threads": tuple(dict.fromkeys([cores, *([cores // 2] if cores >= 8 else []), 1])),
        "allocator": HEAPS[:1] if spec.cell == "rnn" else HEAPS,
    }


def microbatches(batch: int, *, finest: bool = False) -> list[int]:
    """Sizes worth trying: nearly all if `finest`, else of those that take equally many passes the smallest."""
    ratio = FINE if finest else FINE**8
    sizes = {min(batch, math.floor(ratio**power)) for power in range(math.ceil(math.log(batch, ratio)) + 1)} | {batch}
    return sorted(sizes if finest else {-(-batch // -(-batch // size)) for size in sizes})


def segment_counts(steps: int) -> list[int]:
    """Numbers of segments worth trying: each about a fifth more than the last up to 64, and by half from there."""
    powers = np.r_[1:6:0.25, 6:36:0.5]
    most = max(2, steps // SHORTEST_PIECE)
    return sorted({min(most, round(2**power)) for power in powers.tolist()}) if steps > 1 else []


def shapes(spec: Spec, space: Space) -> list[dict[str, Any]]:
    """The ways of going through a sequence: whole, in segments, in chunks, in windows."""
    # lengths that the user fixed for long sequences are cut to the short ones of a bucket
    fixed = {
        name: min(value, spec.steps) if name in ("segments", "window") and value is not None else value
        for name, value in space.choices.fixed.items()
        if name in WHOLE
    }
    ways = [WHOLE]
    deepest = 1 if spec.bidirectional else max(LEVELS_FROM)
    for count in segment_counts(spec.steps):
        levels = [number for number, fewest in LEVELS_FROM.items() if count >= fewest and number <= deepest]
        ways += [WHOLE | {"segments": count, "levels": number} for number in levels]
    if not spec.bidirectional:
        chunks = [4**power for power in range(1, 15) if 4**power <= spec.steps // SHORTEST_PIECE]
        ways += [WHOLE | {"segments": count, "recompute": False} for count in chunks]
        windows = [2**power for power in range(5, 31) if 2**power < spec.steps]
        ways += [WHOLE | {"window": steps} for steps in windows if "window" in space.choices.allow]
    return [way for way in ways if fixed.items() <= way.items()] or [WHOLE | fixed]


def grid(spec: Spec, space: Space, *, finest: bool = False, one_pass: bool = False) -> Candidates:
    """All candidates of the space, as arrays; with `one_pass`, each runs its microbatch alone."""
    ways, fixed = shapes(spec, space), space.choices.fixed
    rows = [fixed["microbatch"]] if "microbatch" in fixed else microbatches(spec.batch, finest=finest)
    index = np.indices((len(space.settings), len(ways), len(rows))).reshape(3, -1)
    columns: dict[str, Any] = {"microbatch": np.array(rows)[index[2]]}
    for place, choices in enumerate((space.settings, ways)):
        for name in choices[0]:
            columns[name] = _column([choice[name] for choice in choices], index[place])
    return Candidates(**columns, accumulation=1) if one_pass else serve(spec, Candidates(**columns))


def _column(values: list[Any], index: NDArray[np.int64]) -> Any:
    """One value for all candidates, or an array with one for each."""
    if all(value == values[0] for value in values):
        return values[0]
    return np.array(values, dtype=object if None in values else None)[index]


def lossy(candidates: Candidates) -> NDArray[np.bool_]:
    """Where a lossy knob other than precision is turned: chosen only if nothing else fits."""
    rows = np.zeros(len(candidates), dtype=bool)
    for name in ALLOW_WORDS.keys() - {"precision"}:
        rows |= np.asarray(getattr(candidates, name) != KNOBS[name].field.default)
    return rows
