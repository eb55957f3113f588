"""Candidate: one value for every knob, and Candidates: many at once.

The body of `Candidate` is the table of knobs: one field is one knob. A field has the knob's name, type, default and
`Bounds`. Its docstring is the help text of the flag. Its `Role` says what the search and the reports do with it.
Everything else follows: flags, checks, arrays of candidates, JSON, columns of tables, parameters in Optuna. A new knob
is a new field, plus its effect on the estimate and on the step.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from oomguard._core.errors import (
    Bounds,
    Field,
    MisuseError,
    check_fields,
    check_names,
    check_whole,
    conflict,
    fields_of,
    flag,
    nearest,
    shown,
    wrong,
)
from oomguard._spec.spec import MAX_BATCH, MAX_SEQ, Spec

Precision = Literal["fp32", "bf16", "fp16"]
Engine = Literal["cudnn", "onednn", "native"]
Update = Literal["foreach", "fused", "loop"]
Allocator = Literal["system", "tight", "fast", "expandable"]
OldAllocator = Literal["plain", "steady", "pooled", "roomy"]
OLD_NAMES = {"plain": "system", "steady": "tight", "pooled": "fast", "roomy": "fast"}
"""Names that allocators had in version 0.1, which are still read: every candidate has the present ones."""
Keep = Literal["device", "host"]

Group = Literal["shape", "setting", "loading"]
"""`shape`: in what pieces an optimizer step is run. `setting`: how a piece is run. `loading`: how data is loaded."""


class Role(NamedTuple):
    """Annotation of a knob: what the search and the reports do with it."""

    group: Group = "setting"
    """Shapes are varied together by the search, settings one by one; data loading is neither searched nor probed."""
    lossy: str | None = None
    """Word by which `--allow` permits this knob; None if it is exact: the same gradient up to rounding."""
    tries: tuple[Any, ...] = ()  # values that the search tries if it is worth it; the first is the default
    words: Callable[[Any], str] | None = None
    """Words for a value in reports, empty if there is nothing to say; None: the name and the value unless default."""


class Knob(NamedTuple):
    """One row of the table."""

    field: Field  # name, type, bounds and default
    role: Role  # use in the search and in reports

    @property
    def searched(self) -> bool:
        """Whether the search may vary or fix it. The accumulation follows from the microbatch."""
        return self.role.group != "loading" and self.field.name != "accumulation"

    def in_words(self, value: Any) -> str:
        """A value as reports write it; empty if it is not worth mentioning."""
        if self.role.words is not None:
            return self.role.words(value)
        if value is None or value == self.field.default:
            return ""
        name = self.field.name.replace("_", " ")
        if isinstance(value, bool):
            return name if value else f"no {name}"
        return f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"


_SHAPE, _LOADING = Role("shape"), Role("loading")


class Candidate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One value for every knob. Wrong values raise MisuseError.

    >>> Candidate(microbatch=8, accumulation=4, segments=100).lossy
    ()
    >>> Candidate(microbatch=8, precision="bf16", window=500).lossy
    ('precision', 'window')
    """

    microbatch: Annotated[int, Bounds(1, MAX_BATCH), _SHAPE]
    """Sequences per forward and backward pass (default: the batch)."""
    accumulation: Annotated[int, Bounds(1, MAX_BATCH), _SHAPE] = 1
    """Passes per optimizer step (default: batch / microbatch)."""
    precision: Annotated[Precision, Role(lossy="precision", words=str)] = "fp32"
    """Precision of the recurrent layers and the head; weights stay in fp32."""
    segments: Annotated[int, Bounds(1, MAX_SEQ), _SHAPE] = 1
    """Pieces into which the sequence is split, with exact gradients."""
    recompute: Annotated[bool, _SHAPE] = True
    """Recompute segments in the backward pass. Otherwise they keep their activations, which saves workspace only."""
    levels: Annotated[int, Bounds(1, 3), _SHAPE] = 1
    """Levels of nested segments; 2 or 3 keep fewer border states. Each level costs another forward pass. It is for
    sequences so long that one border state per segment is too much."""
    keep: Annotated[
        Keep,
        Role(
            tries=("device", "host"),
            words=lambda keep: "microbatch and border states in host memory" * (keep == "host"),
        ),
    ] = "device"
    """Memory in which microbatches and border states wait."""
    window: Annotated[int | None, Bounds(1, MAX_SEQ), Role("shape", lossy="window")] = None
    """Time steps after which the gradient is cut (truncated backpropagation); lossy."""
    engine: Annotated[Engine | None, Role(words=lambda engine: f"engine {engine}" if engine else "")] = None
    """Kernel that runs the cell (default: PyTorch's choice)."""
    threads: Annotated[
        int | None,
        Bounds(1, 4096),
        Role(words=lambda count: "" if count is None else f"{count:,} thread{'s' * (count > 1)}"),
    ] = None
    """CPU threads (default: PyTorch's choice)."""
    offload: Annotated[bool, Role(tries=(False, True), words=lambda on: "optimizer state in host memory" * on)] = False
    """Keep the optimizer's state in host memory. Each parameter's state visits the card for its update."""
    update: Annotated[Update, Role(tries=("foreach", "fused"))] = "foreach"
    """How the optimizer runs: over lists of tensors, in one fused kernel, or tensor by tensor."""
    state_8bit: Annotated[
        bool, Role(lossy="8bit", tries=(False, True), words=lambda on: "8-bit optimizer state" * on)
    ] = False
    """Keep the optimizer's state in 8 bits; lossy."""
    shards: Annotated[
        int,
        Bounds(1, 4096),
        Role(words=lambda count: f"optimizer state shared by {count:,} processes" * (count > 1)),
    ] = 1
    """Processes that share the optimizer's state: each keeps and updates that of some weights. Train with as many."""
    allocator: Annotated[Allocator | OldAllocator | None, Role()] = None
    """Memory allocator (default: tight on the CPU, system on CUDA). `tight` (CPU) has fixed glibc thresholds: freed
    memory returns to the system, which lowers the peak and makes it repeatable. `fast` (CPU) has fixed thresholds too,
    but keeps freed blocks of less than 4 MiB, or with oneDNN 32 MiB. `expandable` (CUDA) uses expandable segments.
    `system` changes nothing. A setting of the other device has no effect."""
    workers: Annotated[int, Bounds(0, 128), _LOADING] = 0
    """Processes that load data."""
    prefetch: Annotated[int, Bounds(1, 32), _LOADING] = 2
    """Microbatches that each loading process prepares ahead."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "allocator", renew("allocator", self.allocator))
        check_fields(self)
        if self.window is not None and self.segments > 1:
            rule = "A candidate has either segments or a window"
            raise conflict(rule, f"--segments {self.segments}", f"--window {self.window}")

    @property
    def lossy(self) -> tuple[str, ...]:
        """Names of the lossy knobs that differ from their exact default."""
        return tuple(
            name
            for name, knob in KNOBS.items()
            if knob.role.lossy is not None and getattr(self, name) != knob.field.default
        )


KNOBS = {
    name: Knob(field, next(mark for mark in field.marks if type(mark) is Role))
    for name, field in fields_of(Candidate).items()
}


ALLOW_WORDS = {name: knob.role.lossy for name, knob in KNOBS.items() if knob.role.lossy is not None}
"""The lossy knobs, each with the word by which `--allow` takes it."""
ALLOWED = tuple(ALLOW_WORDS.values())  # the words that `--allow` takes


def make_candidate(spec: Spec, **knobs: Any) -> Candidate:
    """A candidate for a spec. A microbatch or an accumulation that is left out is computed from the batch."""
    given = {name: value for name, value in knobs.items() if value is not None}
    _check_microbatch(spec, given.get("microbatch", 1))
    check_whole("accumulation", given.get("accumulation"), 1, spec.batch)
    if "microbatch" not in given:
        given["microbatch"] = -(-spec.batch // given.get("accumulation", 1))
    if "accumulation" not in given:
        given["accumulation"] = -(-spec.batch // given["microbatch"])
    candidate = Candidate(**given)
    check_candidate(spec, candidate)
    return candidate


def _check_microbatch(spec: Spec, microbatch: int) -> None:
    check_whole("microbatch", microbatch, 1, MAX_BATCH)
    if microbatch > spec.batch:
        raise MisuseError(
            rule="--microbatch must not be larger than --batch",
            got=f"got {microbatch:,} of {spec.batch:,}",
            advice=f"Lower it, or give --batch {microbatch} too.",
        )


def check_candidate(spec: Spec, candidate: "Candidate | Candidates") -> None:
    """Raise unless the candidate, or each of several, can run the spec."""
    columns = {name: np.atleast_1d(getattr(candidate, name)) for name in KNOBS}
    if isinstance(candidate, Candidate):
        _check_microbatch(spec, candidate.microbatch)
    microbatch, accumulation = np.broadcast_arrays(columns["microbatch"], columns["accumulation"])
    passes = -(-spec.batch // microbatch)
    mismatched = accumulation != passes
    if mismatched.any():
        row = int(mismatched.argmax())
        raise MisuseError(
            rule="Microbatch x accumulation must give the batch (the last microbatch may be smaller)",
            got=f"{microbatch[row]} x {accumulation[row]} does not give {spec.batch}",
            advice=f"With --microbatch {microbatch[row]} use --accumulation {passes[row]}, or change --batch.",
        )
    for refused, error in refusals(spec, columns):
        if refused.any():
            raise error


def refusals(spec: Spec, columns: dict[str, NDArray[Any]]) -> Iterator[tuple[NDArray[np.bool_], MisuseError]]:
    """Each rule about segments and windows: the rows of knobs that break it, and the error.

    In a bidirectional model the second direction starts at the end of the sequence: a gradient cannot be cut there, and
    no order of stored segments serves all layers.
    """
    segments, window = columns["segments"], np.where(is_none(columns["window"]), 0, columns["window"]).astype(int)
    stored, nested = ~columns["recompute"].astype(bool), columns["levels"] > 1
    for name, steps in (("segments", segments), ("window", window)):
        form, advice = f"a whole number from 1 to {spec.steps:,}", f"Give {flag(name)} a number in that range."
        yield steps > spec.steps, wrong(name, form, int(steps.max()), advice)
    if spec.bidirectional:
        rule = "The segments of a bidirectional model are recomputed, and it has no windows"
        got = f"got {'--window' if window.any() else '--no-recompute'} with --bidirectional"
        error = MisuseError(rule=rule, got=got, advice="Give --segments alone, or train one direction.")
        yield (window > 0) | (stored & (segments > 1)), error
    rule = "--levels is for segments of one direction that are recomputed"
    got = f"got it with {'--bidirectional' if spec.bidirectional else '--no-recompute'}"
    yield nested & (stored | spec.bidirectional), MisuseError(rule=rule, got=got, advice="Leave --levels out.")


def check_allow(allow: tuple[str, ...]) -> None:
    """Raise unless these are words that `--allow` takes."""
    for name in allow:
        if name not in ALLOWED:
            raise MisuseError(
                rule=f"--allow takes {', '.join(ALLOWED)}, or none",
                got=f"got {shown(name)}",
                advice=nearest(name, [*ALLOWED, "none"]),
            )


def check_fixed(fixed: dict[str, Any], allow: tuple[str, ...]) -> None:
    """Raise if a lossy knob is fixed to a lossy value that is not allowed."""
    for name, value in fixed.items():
        word = ALLOW_WORDS.get(name)
        if word is not None and value != KNOBS[name].field.default and word not in allow:
            raise MisuseError(
                rule="A lossy knob is turned only if it is allowed",
                got=f"got {flag(name)} and not --allow {word}",
                advice=f"Add {word} to --allow, or leave it out.",
            )


class Candidates:
    """Many candidates. Each knob of `Candidate` is one value for all of them, or a 1-D array with a value for each.

    An accumulation that is left out is computed from the batch by `serve`. `candidates[i]` is one `Candidate`.

    >>> candidates = Candidates(microbatch=[8, 16, 32], precision="bf16", window=[None, 100, None])
    >>> len(candidates), candidates[1].window, candidates[2].window, candidates.precision
    (3, 100, None, 'bf16')
    """

    if TYPE_CHECKING:

        def __getattr__(self, knob: str) -> Any: ...

    def __init__(self, *, microbatch: Any, **knobs: Any) -> None:
        check_names("knob", knobs, KNOBS)
        given = {"microbatch": microbatch, "accumulation": None} | knobs
        for name, knob in KNOBS.items():
            vars(self)[name] = _column(name, given.get(name, knob.field.default))
        lengths = {name: len(value) for name, value in self.arrays.items()}
        if len(set(lengths.values())) > 1:
            raise MisuseError(
                rule="The arrays of several candidates must be equally long",
                got="got " + " and ".join(f"{length:,} of {flag(name)}" for name, length in lengths.items()),
                advice="Repeat or cut them to one length.",
            )
        both = ~is_none(self.window) & np.greater(self.segments, 1)
        if both.any():
            rule, got = "A candidate has either segments or a window", f"candidate {int(both.argmax()):,} has both"
            raise MisuseError(rule=rule, got=got, advice="Set its segments to 1, or its window to None.")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"candidates cannot be changed: {name}")

    def __repr__(self) -> str:
        return f"Candidates({', '.join(f'{name}={value!r}' for name, value in self.knobs.items())})"

    @property
    def knobs(self) -> dict[str, Any]:
        """All knobs by name: one value for all candidates, or an array."""
        return {**vars(self)}

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The knobs that are arrays."""
        return {name: value for name, value in self.knobs.items() if isinstance(value, np.ndarray)}

    def __len__(self) -> int:
        return max((len(value) for value in self.arrays.values()), default=1)

    def __getitem__(self, index: int) -> Candidate:
        knobs = self.knobs | {name: values.item(index) for name, values in self.arrays.items()}
        if knobs["accumulation"] is None:
            del knobs["accumulation"]
        return Candidate(**knobs)


def _column(name: str, values: Any) -> Any:
    """The values of a knob, checked by its row: the smallest and the largest number, or every distinct value."""
    if isinstance(values, np.generic) or (isinstance(values, np.ndarray) and not values.ndim):
        values = values.item()
    check = KNOBS[name].field.check
    if not isinstance(values, np.ndarray | list | tuple):
        values = renew(name, values)
        if not (name == "accumulation" and values is None):
            check(values)
        return values
    try:
        array = np.asarray(values)
        given = array[~is_none(array)]
        typed = np.array(given.tolist()) if given.dtype == object and given.size else given
        whole = typed.dtype.kind in "iu" and typed.size
        distinct = {int(typed.min()), int(typed.max())} if whole else {*typed.tolist()}
    except (TypeError, ValueError, OverflowError):  # a ragged array, or values that cannot be compared
        array, distinct = np.empty(0), set()
    if array.ndim != 1 or not array.size:
        raise wrong(name, "one value or a 1-D array of at least one", values, "Flatten it, or leave it out.")
    if name == "allocator" and distinct & OLD_NAMES.keys():
        return _column(name, [renew(name, value) for value in array.tolist()])
    mixed = len(given) < len(array)
    for value in [*distinct, *([None] if mixed else [])]:
        check(value)
    if mixed:
        return array
    return typed.astype(np.int64) if typed.dtype.kind in "iu" else typed


def renew(name: str, value: Any) -> Any:
    """A value of a knob, with the present name if it is an allocator with a name of version 0.1."""
    return OLD_NAMES.get(value, value) if name == "allocator" and isinstance(value, str) else value


def is_none(values: Any) -> NDArray[np.bool_]:
    array = np.asarray(values)
    return (array == np.array(None)).astype(bool) if array.dtype == object else np.zeros(array.shape, dtype=bool)


def serve(spec: Spec, candidates: Candidates) -> Candidates:
    """The candidates with their accumulation, once it is clear that all can run the spec."""
    if candidates.accumulation is None:
        passes = -(-spec.batch // candidates.microbatch)
        candidates = Candidates(**candidates.knobs | {"accumulation": passes})
    check_candidate(spec, candidates)
    return candidates
