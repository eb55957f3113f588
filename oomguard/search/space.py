"""The space: all candidates that a search may choose from, as arrays.

A candidate is a setting (engine, precision, threads, ...: a few of each) and a shape (microbatch and pieces: ladders
that are fine enough to lose no more than a few percent). Knobs that the user fixed have one value.
"""

import importlib.util
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oomguard.candidate import KNOBS, Candidates, Knob, is_none, serve
from oomguard.checks import nearest, shown
from oomguard.errors import MisuseError
from oomguard.estimate import terms
from oomguard.estimate.place import Place
from oomguard.spec import Spec

ALLOWED = ("precision", "window", "8bit")
"""What `allow` takes: the lossy knobs."""
LEVELS_FROM = {1: 1, 2: 256, 3: 16_384}
"""From so many segments on it is worth while to keep fewer border states."""
MOST_ROWS = 96
"""Microbatches in a grid, at most, if the aim is speed."""
FINE = 1.008
"""The steps between microbatches, if the aim is the largest."""
SHARE = 0.02
"""From this share of the budget on, a term is worth a knob of its own."""
HEAP_FOR = {"native": "pooled", "onednn": "roomy"}
"""CPU: beside `steady`, the allocator setting in which an engine is fastest. PyTorch's own kernels ask for a few blocks
at every step: in a heap that keeps them they are as fast as they come. oneDNN's blocks hold a whole piece, and it is
faster if the heap keeps those too (LSTM 128, T = 400, 2 threads: 63 ms a step in chunks, and 106 with glibc's moving
thresholds), though peaks vary by that. Vanilla RNNs have `steady` alone: elsewhere they creep up by a third. `plain`
is not tried: it is neither fast nor steady, and a process that has run larger blocks is not the one a training has."""
SHORTEST_PIECE, SHORTEST_WINDOW = 8, 32
"""Steps of a segment and of a window: what is shorter takes more time than it saves memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What may be tried."""

    settings: tuple[dict[str, Any], ...]
    """Combinations of the knobs that are names, switches or threads; the first is what PyTorch would do."""
    pieces: bool = True
    """Whether sequences may be gone through in pieces."""
    chunks: bool = True
    """Whether pieces may keep all they computed."""
    windows: bool = False
    """Whether the gradient may be cut, if nothing exact fits."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Knobs that the user fixed."""


def make_space(spec: Spec, place: Place, budget_bytes: int, here: "Here", allow: tuple[str, ...]) -> Space:
    """The space of a spec on a device."""
    check_allow(allow)
    fixed = here.fixed
    choices: dict[str, tuple[Any, ...]] = {
        "engine": _engines(spec, place),
        "precision": _precisions(here.precisions) if "precision" in allow else ("fp32",),
        "threads": (None,) if place.cuda else _threads(here.cores),
        "allocator": _allocators(spec, place, here),
    }
    weights_bytes = terms.weights_bytes(spec)
    if place.cuda and 2 * weights_bytes > SHARE * budget_bytes:
        choices["offload"] = (False, True)
    if weights_bytes > SHARE * budget_bytes:
        choices["update"] = ("foreach", "fused")
    if place.cuda and spec.steps * spec.batch * spec.inputs > SHARE * budget_bytes:
        choices["keep"] = ("device", "host")
    for name in {*choices, *fixed} - {"microbatch", "accumulation", "segments", "recompute", "levels", "window"}:
        choices[name] = (fixed[name],) if name in fixed else choices[name]
    if "8bit" in allow and importlib.util.find_spec("bitsandbytes") is not None and "state_8bit" not in fixed:
        choices["state_8bit"] = (False, True)
    settings = [dict(zip(choices, one, strict=True)) for one in itertools.product(*choices.values())]
    if not place.cuda and "allocator" not in fixed:
        settings = [one for one in settings if one["allocator"] in ("steady", HEAP_FOR.get(one["engine"]))]
    return Space(
        settings=tuple(settings),
        pieces=True,
        chunks=not spec.bidirectional,
        windows="window" in allow and not spec.bidirectional,
        fixed=fixed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """What of a device decides on the space."""

    precisions: tuple[str, ...] = ("fp32",)
    """What its hardware computes in."""
    cores: int = 1
    """Processors that this process may use."""
    expandable: bool = False
    """CUDA: whether expandable segments are worth a try."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Knobs that the user fixed."""


def check_allow(allow: tuple[str, ...]) -> None:
    """Raise unless these are lossy knobs."""
    for name in allow:
        if name not in ALLOWED:
            raise MisuseError(
                rule=f"--allow takes {', '.join(ALLOWED)}, or none",
                got=f"got {shown(name)}",
                advice=nearest(name, [*ALLOWED, "none"]),
            )


def check_fixed(fixed: dict[str, Any], allow: tuple[str, ...]) -> None:
    """Raise if a lossy knob is fixed to what is not allowed."""
    words = {"precision": "precision", "window": "window", "state_8bit": "8bit"}
    harmless = {"precision": "fp32", "window": None, "state_8bit": False}
    for name, value in fixed.items():
        if KNOBS[name] is Knob.LOSSY and value != harmless[name] and words[name] not in allow:
            raise MisuseError(
                rule="A lossy knob is turned only if it is allowed",
                got=f"got --{name.replace('_', '-')} and not --allow {words[name]}",
                advice=f"Add {words[name]} to --allow, or leave it out.",
            )


def _engines(spec: Spec, place: Place) -> tuple[str, ...]:
    if place.cuda:  # PyTorch's own kernels keep several times as much there: only if they are asked for
        return ("cudnn",)
    return ("onednn", "native") if spec.cell == "lstm" and spec.projection is None else ("native",)


def _allocators(spec: Spec, place: Place, here: Here) -> tuple[str, ...]:
    """For any engine; on the CPU the first is that of all of them."""
    if place.cuda:
        return ("plain", "expandable") if here.expandable else ("plain",)
    return ("steady",) if spec.cell == "rnn" else ("steady", *HEAP_FOR.values())


def _precisions(own: tuple[str, ...]) -> tuple[str, ...]:
    """fp32 and one of the others: bf16 if there is one, since it needs no scaling of the loss."""
    half = [name for name in ("bf16", "fp16") if name in own]
    return ("fp32", *half[:1])


def _threads(cores: int) -> tuple[int, ...]:
    """All cores, one, and a half of them if there are many."""
    return tuple(dict.fromkeys([cores, *([cores // 2] if cores >= 8 else []), 1]))


def microbatches(batch: int, *, finest: bool = False) -> list[int]:
    """Sizes worth trying. For speed, of those that take equally many passes, the smallest: it wastes nothing.

    >>> microbatches(32)
    [1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 32]
    """
    if finest:
        count = math.ceil(math.log(batch) / math.log(FINE)) if batch > 1 else 0
        return sorted({min(batch, math.floor(FINE**power)) for power in range(count + 1)} | {batch})
    some = range(1, batch + 1) if batch <= 4096 else {round(FINE**power) for power in range(2500)} & {*range(1, batch)}
    sizes = sorted({-(-batch // -(-batch // size)) for size in some} | {batch})
    if len(sizes) <= MOST_ROWS:
        return sizes
    picked = np.unique(np.round(np.geomspace(1, len(sizes), MOST_ROWS)).astype(int) - 1)
    return [sizes[index] for index in picked] + ([] if sizes[picked[-1]] == batch else [batch])


def segment_counts(steps: int) -> list[int]:
    """From 2 to pieces of a few steps, each about a fifth more than the last up to 64, and by half from there.

    >>> segment_counts(80)
    [2, 3, 4, 5, 6, 7, 8, 10]
    """
    powers = [*(power / 4 for power in range(4, 25)), *(6 + power / 2 for power in range(1, 60))]
    most = max(2, steps // SHORTEST_PIECE)
    counts = {min(most, round(2**power)) for power in powers}
    return sorted(one for one in counts if 2 <= one <= steps)


Shape = tuple[int, bool, int, int | None]
"""segments, recompute, levels, window."""


def shapes(spec: Spec, space: Space) -> list[Shape]:
    """The ways of going through a sequence."""
    # what the user fixed for long sequences goes as far as it can for the short ones of a bucket
    fixed = {name: min(value, spec.steps) if _is_length(name, value) else value for name, value in space.fixed.items()}
    found: list[Shape] = [(1, True, 1, None)]
    if space.pieces:
        for count in segment_counts(spec.steps):
            found += [
                (count, True, levels, None)
                for levels, least in LEVELS_FROM.items()
                if count >= least and (levels == 1 or not spec.bidirectional)
            ]
        if space.chunks:
            found += [(4**power, False, 1, None) for power in range(1, 15) if 4**power <= spec.steps // 8]
    if space.windows:
        found += [(1, True, 1, 2**n) for n in range(5, 31) if SHORTEST_WINDOW <= 2**n < spec.steps]
    return [one for one in found if _agrees(one, fixed)] or [_fixed_shape(fixed)]


def _is_length(name: str, value: Any) -> bool:
    return name in ("segments", "window") and value is not None


def _agrees(shape: Shape, fixed: dict[str, Any]) -> bool:
    names = ("segments", "recompute", "levels", "window")
    wanted = dict(zip(names, shape, strict=True))
    return all(fixed.get(name, wanted[name]) == wanted[name] for name in names)


def _fixed_shape(fixed: dict[str, Any]) -> Shape:
    """What the user fixed and no ladder has."""
    return fixed.get("segments", 1), fixed.get("recompute", True), fixed.get("levels", 1), fixed.get("window")


def grid(spec: Spec, space: Space, *, finest: bool = False) -> Candidates:
    """All candidates of the space, as arrays."""
    ways = shapes(spec, space)
    rows = [space.fixed["microbatch"]] if "microbatch" in space.fixed else microbatches(spec.batch, finest=finest)
    index = np.indices((len(space.settings), len(ways), len(rows))).reshape(3, -1)
    columns: dict[str, Any] = {"microbatch": np.array(rows)[index[2]]}
    for place, name in enumerate(("segments", "recompute", "levels", "window")):
        values = [way[place] for way in ways]
        columns[name] = _column(values, index[1])
    for name in space.settings[0]:
        columns[name] = _column([setting[name] for setting in space.settings], index[0])
    return serve(spec, Candidates(**columns))


def _column(values: list[Any], index: Any) -> Any:
    """One value for all, or an array of one for each."""
    if all(value == values[0] for value in values):
        return values[0]
    array = np.array(values, dtype=object) if None in values else np.array(values)
    return array[index]


def pick(candidates: Candidates, rows: Any) -> Candidates:
    """Those of some rows (a mask, or numbers)."""
    return Candidates(**candidates.knobs | {name: values[rows] for name, values in candidates.arrays.items()})


def lossy(candidates: Candidates) -> Any:
    """Where the gradient is cut or the optimizer's state is in 8 bits: what is taken only if nothing else fits."""
    return np.broadcast_to(~is_none(candidates.window) | np.asarray(candidates.state_8bit, dtype=bool), len(candidates))
