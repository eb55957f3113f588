"""Candidate: one value for every knob. A knob is exact (the same gradient up to rounding) or lossy."""

from enum import Enum
from typing import Annotated, Any, Literal, get_args

import msgspec

from oomguard.errors import MisuseError
from oomguard.spec import Spec, check_switch, check_whole, flag, nearest, shown

Precision = Literal["fp32", "bf16", "fp16"]
Engine = Literal["cudnn", "onednn", "native"]
Update = Literal["foreach", "fused", "loop"]
Allocator = Literal["plain", "steady", "expandable"]


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
    """`steady` (CPU): fixed glibc thresholds. `expandable` (CUDA): expandable segments. `plain`: as it comes.
    None takes `steady` on the CPU, where it lowers the peak and makes it repeatable, and `plain` on CUDA."""
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
    ("window", 1, 10**9),
    ("threads", 1, 4096),
    ("workers", 0, 1024),
    ("prefetch", 1, 1024),
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "precision": get_args(Precision),
    "engine": get_args(Engine),
    "update": get_args(Update),
    "allocator": get_args(Allocator),
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
    passes = -(-spec.batch // candidate.microbatch)
    if candidate.accumulation != passes:
        raise MisuseError(
            rule="Microbatch x accumulation must give the batch (the last microbatch may be smaller)",
            got=f"{candidate.microbatch} x {candidate.accumulation} does not give {spec.batch}",
            advice=f"With --microbatch {candidate.microbatch} use --accumulation {passes}, or change --batch.",
        )
    for name in ("segments", "window"):
        check_whole(name, getattr(candidate, name), 1, spec.steps)
