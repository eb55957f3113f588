"""Candidate: one value for every knob. A knob is exact (the same gradient up to rounding) or lossy."""

from dataclasses import dataclass, fields
from enum import Enum
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np

from oomguard.checks import check_switch, check_whole, flag, nearest, shown
from oomguard.errors import MisuseError
from oomguard.spec import Spec

Precision = Literal["fp32", "bf16", "fp16"]
Engine = Literal["cudnn", "onednn", "native"]
Update = Literal["foreach", "fused", "loop"]
Allocator = Literal["plain", "steady", "pooled", "roomy", "expandable"]
Keep = Literal["device", "host"]


class Knob(Enum):
    """What turning a knob does to the gradient."""

    EXACT = "exact"
    LOSSY = "lossy"


def _knob(kind: Knob) -> msgspec.Meta:
    return msgspec.Meta(extra={"knob": kind})


_EXACT, _LOSSY = _knob(Knob.EXACT), _knob(Knob.LOSSY)


class Candidate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One value for every knob, checked at birth.

    >>> Candidate(microbatch=8, accumulation=4, segments=100).lossy
    ()
    >>> Candidate(microbatch=8, precision="bf16", window=500).lossy
    ('precision', 'window')
    """

    microbatch: Annotated[int, _EXACT]
    """Sequences per forward and backward pass."""
    accumulation: Annotated[int, _EXACT] = 1
    """Passes per optimizer step."""
    precision: Annotated[Precision, _LOSSY] = "fp32"
    """What the recurrent layers and the head compute in; weights stay in fp32."""
    segments: Annotated[int, _EXACT] = 1
    """Pieces in which the sequence is gone through; 1 is the plain pass."""
    recompute: Annotated[bool, _EXACT] = True
    """Segments keep border states only and are recomputed; False keeps everything and saves only workspace."""
    levels: Annotated[int, _EXACT] = 1
    """Levels of segments: with 2, only every so many borders are kept, and those between are made anew when their turn
    comes. For sequences so long that even one state per segment is too much; each level costs another forward pass."""
    keep: Annotated[Keep, _EXACT] = "device"
    """Where a microbatch and the states at the borders of its segments stay until their piece is gone through."""
    window: Annotated[int | None, _LOSSY] = None
    """Steps after which the gradient is cut (truncated backpropagation)."""
    engine: Annotated[Engine | None, _EXACT] = None
    """The kernel that runs the cell; None takes what PyTorch would take."""
    threads: Annotated[int | None, _EXACT] = None
    """CPU threads; None leaves PyTorch's choice."""
    offload: Annotated[bool, _EXACT] = False
    """The optimizer's state lives in host memory and visits the card parameter by parameter."""
    update: Annotated[Update, _EXACT] = "foreach"
    """How the optimizer runs: over lists of tensors, in one fused kernel, or one tensor after the other."""
    state_8bit: Annotated[bool, _LOSSY] = False
    """The optimizer's state in 8 bits."""
    allocator: Annotated[Allocator | None, _EXACT] = None
    """`steady` (CPU): fixed glibc thresholds; what is freed goes back to the system. `pooled` (CPU): fixed too, but
    what is freed stays for later, blocks of 4 MiB and more apart; `roomy` (CPU): of 32 MiB and more. `expandable`
    (CUDA): expandable segments. `plain`: as it comes. None takes `steady` on the CPU, where it lowers the peak and
    makes it repeatable, and `plain` on CUDA. A setting of the other device does nothing."""
    workers: Annotated[int, _EXACT] = 0
    """Processes that load data."""
    prefetch: Annotated[int, _EXACT] = 2
    """Microbatches that each of them prepares ahead."""

    def __post_init__(self) -> None:
        for name, low, high in _BOUNDS:
            check_whole(name, getattr(self, name), low, high, optional=name in _OPTIONAL)
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not (isinstance(value, str) and value in choices) and not (value is None and name in _OPTIONAL):
                raise MisuseError(
                    rule=f"{flag(name)} must be one of {', '.join(choices)}",
                    got=f"got {shown(value)}",
                    advice=nearest(value, list(choices)),
                )
        for name in _SWITCHES:
            check_switch(name, getattr(self, name))
        if self.window is not None and self.segments > 1:
            raise MisuseError(
                rule="A candidate has either segments or a window",
                got=f"got --segments {self.segments} and --window {self.window}",
                advice="Leave one of the two out.",
            )

    @property
    def lossy(self) -> tuple[str, ...]:
        """The lossy knobs that this candidate turns."""
        return tuple(
            field.name
            for field in msgspec.structs.fields(self)
            if KNOBS[field.name] is Knob.LOSSY and getattr(self, field.name) != field.default
        )


_BOUNDS = (
    ("microbatch", 1, 1 << 20),
    ("accumulation", 1, 1 << 20),
    ("segments", 1, 10**9),
    ("levels", 1, 3),
    ("window", 1, 10**9),
    ("threads", 1, 4096),
    ("workers", 0, 128),
    ("prefetch", 1, 32),
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "precision": get_args(Precision),
    "engine": get_args(Engine),
    "update": get_args(Update),
    "allocator": get_args(Allocator),
    "keep": get_args(Keep),
}
_SWITCHES = ("recompute", "offload", "state_8bit")
_OPTIONAL = ("window", "engine", "threads", "allocator")

KNOBS: dict[str, Knob] = {
    field.name: field.type.extra["knob"]
    for field in msgspec.inspect.type_info(Candidate).fields  # type: ignore[attr-defined]
}
"""Every knob by name, and whether it is exact or lossy."""


def make_candidate(spec: Spec, **knobs: Any) -> Candidate:
    """A candidate for a spec: what is left out of microbatch and accumulation follows from the batch.

    >>> spec = Spec(cell="gru", seq=100, batch=32)
    >>> make_candidate(spec).microbatch, make_candidate(spec, microbatch=7).accumulation
    (32, 5)
    """
    given = {name: value for name, value in knobs.items() if value is not None}
    for name in ("microbatch", "accumulation"):
        check_whole(name, given.get(name), 1, spec.batch)
    if "microbatch" not in given:
        given["microbatch"] = -(-spec.batch // given.get("accumulation", 1))
    if "accumulation" not in given:
        given["accumulation"] = -(-spec.batch // given["microbatch"])
    candidate = Candidate(**given)
    check_candidate(spec, candidate)
    return candidate


def check_candidate(spec: Spec, candidate: Candidate) -> None:
    """Raise unless the candidate can serve the spec: the batch comes out, and no piece is shorter than a step."""
    check_whole("microbatch", candidate.microbatch, 1, spec.batch)
    passes = -(-spec.batch // candidate.microbatch)
    if candidate.accumulation != passes:
        raise MisuseError(
            rule="Microbatch x accumulation must give the batch (the last microbatch may be smaller)",
            got=f"{candidate.microbatch} x {candidate.accumulation} does not give {spec.batch}",
            advice=f"With --microbatch {candidate.microbatch} use --accumulation {passes}, or change --batch.",
        )
    for name in ("segments", "window"):
        check_whole(name, getattr(candidate, name), 1, spec.steps)
    kept = candidate.segments > 1 and not candidate.recompute
    _check_directions(spec, window=candidate.window is not None, kept=kept)
    _check_levels(spec, levels=candidate.levels > 1, kept=not candidate.recompute)


def _check_directions(spec: Spec, *, window: bool, kept: bool) -> None:
    """Of two directions, the second reads from the end: there is no gradient to cut, and no order for all layers."""
    if spec.bidirectional and (window or kept):
        raise MisuseError(
            rule="The segments of a bidirectional model are recomputed, and it has no windows",
            got=f"got {'--window' if window else '--no-recompute'} with --bidirectional",
            advice="Give --segments alone, or train one direction.",
        )


def _check_levels(spec: Spec, *, levels: bool, kept: bool) -> None:
    """Levels are of segments whose borders are what is kept."""
    if levels and (spec.bidirectional or kept):
        raise MisuseError(
            rule="--levels is for segments of one direction that are recomputed",
            got=f"got it with {'--bidirectional' if spec.bidirectional else '--no-recompute'}",
            advice="Leave --levels out.",
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """Many candidates at once. Each knob, as `Candidate` has it, is one value for all or a 1-D array of one for each.

    Checked at birth. Without an accumulation, it follows from the batch (`serve`). `[i]` is the i-th candidate.

    >>> some = Candidates(microbatch=[8, 16, 32], precision="bf16", window=[None, 100, None])
    >>> len(some), some[1].window, some[2].window
    (3, 100, None)
    """

    microbatch: Any
    accumulation: Any = None
    precision: Any = "fp32"
    segments: Any = 1
    recompute: Any = True
    levels: Any = 1
    keep: Any = "device"
    window: Any = None
    engine: Any = None
    threads: Any = None
    offload: Any = False
    update: Any = "foreach"
    state_8bit: Any = False
    allocator: Any = None
    workers: Any = 0
    prefetch: Any = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _column(field.name, getattr(self, field.name)))
        lengths = {name: len(value) for name, value in self.arrays.items()}
        if len(set(lengths.values())) > 1:
            raise MisuseError(
                rule="The arrays of several candidates must be equally long",
                got="got " + " and ".join(f"{length:,} of {flag(name)}" for name, length in lengths.items()),
                advice="Repeat or cut them to one length.",
            )
        both = ~is_none(self.window) & np.greater(self.segments, 1)
        if both.any():
            raise MisuseError(
                rule="A candidate has either segments or a window",
                got=f"candidate {int(both.argmax()):,} has both",
                advice="Set its segments to 1, or its window to None.",
            )

    @property
    def knobs(self) -> dict[str, Any]:
        """All knobs by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def arrays(self) -> dict[str, Any]:
        """The knobs that are arrays."""
        return {name: value for name, value in self.knobs.items() if isinstance(value, np.ndarray)}

    def __len__(self) -> int:
        return max((len(value) for value in self.arrays.values()), default=1)

    def __getitem__(self, index: int) -> Candidate:
        ones = {name: value[index] for name, value in self.arrays.items()}
        knobs = self.knobs | {name: one.item() if isinstance(one, np.generic) else one for name, one in ones.items()}
        if knobs["accumulation"] is None:
            del knobs["accumulation"]
        return Candidate(**knobs)


def _column(name: str, values: Any) -> Any:
    """A knob's values, checked by `Candidate` itself: the least and the largest number, or every distinct value."""
    if isinstance(values, np.generic) or (isinstance(values, np.ndarray) and not values.ndim):
        values = values.item()
    if not isinstance(values, np.ndarray | list | tuple):
        if not (name == "accumulation" and values is None):
            _check(name, values)
        return values
    try:
        array = np.asarray(values)
        given = array[~is_none(array)]
        typed = np.array(given.tolist()) if given.dtype == object and given.size else given
        whole = typed.dtype.kind in "iu" and typed.size
        distinct = {int(typed.min()), int(typed.max())} if whole else {*typed.tolist()}
    except (TypeError, ValueError, OverflowError):  # ragged, or of something that cannot be counted
        array, distinct = np.empty(0), set()
    if array.ndim != 1 or not array.size:
        raise MisuseError(
            rule=f"{flag(name)} must be one value, or a 1-D array of at least one",
            got=f"got {shown(values)}",
            advice="Flatten it, or leave it out.",
        )
    mixed = len(given) < len(array)
    for value in [*distinct, *([None] if mixed else [])]:
        _check(name, value)
    if mixed:
        return array
    return typed.astype(np.int64) if typed.dtype.kind in "iu" else typed


def _check(name: str, value: Any) -> None:
    knobs: dict[str, Any] = {"microbatch": 1, name: value}
    Candidate(**knobs)


def is_none(values: Any) -> Any:
    """Where a knob has no value.

    >>> bool(is_none(None)), is_none(np.array([1, None])).tolist()
    (True, [False, True])
    """
    if not isinstance(values, np.ndarray):
        return np.array(values is None)
    if values.dtype != object:
        return np.zeros(values.shape, dtype=bool)
    return np.asarray(values == np.array(None)).astype(bool)


def serve(spec: Spec, candidates: Candidates) -> Candidates:
    """The candidates with their accumulation, once it is certain that they can serve the spec (as `check_candidate`).

    >>> serve(Spec(cell="gru", seq=100, batch=32), Candidates(microbatch=[7, 32])).accumulation.tolist()
    [5, 1]
    """
    passes = -(-spec.batch // candidates.microbatch)
    if candidates.accumulation is None:
        candidates = Candidates(**candidates.knobs | {"accumulation": passes})
    wrong = np.asarray(candidates.accumulation != passes)
    if wrong.any():
        raise MisuseError(
            rule="Microbatch x accumulation must give the batch (the last microbatch may be smaller)",
            got=f"that of candidate {int(wrong.argmax()):,} does not give {spec.batch}",
            advice="Leave the accumulation out, or change --batch.",
        )
    for name in ("segments", "window"):
        values = np.atleast_1d(getattr(candidates, name))
        given = values[~is_none(values)]
        check_whole(name, int(given.max()) if given.size else None, 1, spec.steps)
    kept = np.greater(candidates.segments, 1) & ~np.asarray(candidates.recompute, dtype=bool)
    _check_directions(spec, window=not is_none(candidates.window).all(), kept=bool(kept.any()))
    deep = np.greater(candidates.levels, 1)
    stored = deep & ~np.asarray(candidates.recompute, dtype=bool)
    _check_levels(spec, levels=bool(deep.any()), kept=bool(stored.any()))
    return candidates
