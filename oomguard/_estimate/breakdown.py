"""Estimate: the peak of one optimizer step, as the largest of its moments, with the terms of that moment.

A step is a sequence of moments: forward, the loss, the backward of each call, the optimizer. Different tensors are in
use at each moment, and the peak is the moment with the largest sum. Estimates err, so a margin is added.

A million candidates of one spec take less than a second: the arithmetic takes arrays for the knobs that are numbers.
The other knobs (precision, engine, ...) have one value in a group, so candidates are sorted into groups that agree on
those, and each group goes in chunks that fit the cache.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oomguard._estimate import terms
from oomguard._estimate.call import Count, Flag, Ints, Knobs, where
from oomguard._estimate.engines import cudnn
from oomguard._estimate.malloc import heap_limit, reserved_bytes
from oomguard._estimate.margins import OFFSET_BYTES, allocator_on, bare
from oomguard._estimate.moments import TERMS, Moments, Terms, evaluation_moments, in_system_heap, training_moments
from oomguard._estimate.passes import Pass, border_bytes, by_layer_bytes, make_pass, piece_steps, stays_on_host
from oomguard._estimate.target import CPU, Target
from oomguard._spec.candidate import Candidate, Candidates, is_none
from oomguard._spec.rows import pick
from oomguard._spec.spec import Spec

Name = str | NDArray[np.str_]  # a name, or an array of them

KNOWN = ("runtime", "weights", "optimizer", "input")
"""Terms that are sizes of tensors: a probe measures them apart from the rest, and nothing corrects them."""
CHUNK_ROWS = 1 << 15
"""Rows of a chunk: a few dozen arrays of this length fit a core's cache (in one piece it takes twice as long)."""
_NAME = "U32"  # room for the name of any moment or engine
_FIGURES = ("total_bytes", "host_bytes", "steps", "allocated_bytes", "reserved_bytes")
"""Figures of an estimate, beside its margin; None where a device does not have them."""
_NUMERIC = ("window", "threads")  # knobs whose columns can hold None beside numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The predicted peak of one candidate, whose figures are ints, or of many, whose figures are arrays.

    >>> import oomguard
    >>> estimate = oomguard.estimate(cell="lstm", seq=10_000, device="t4")
    >>> estimate.fits, estimate.moment, max(estimate.terms, key=estimate.terms.get)
    (True, 'backward of the layers', 'activations')
    >>> estimate.total_bytes == sum(estimate.terms.values())
    True
    """

    total_bytes: Count
    """The peak: resident bytes of the process (CPU), or the bytes that the card shows for it (CUDA)."""
    terms: dict[str, Count]
    """The summands of the peak."""
    moment: Name
    """The moment of the peak, such as `forward` or `backward of layer 2`."""
    moments: dict[str, Count] = field(repr=False)
    """The total of every moment, in the unit of `total_bytes`."""
    engine: Name
    """The kernel that runs the cell."""
    device: str
    """The device as `--device` takes it."""
    candidate: Candidate | Candidates
    """The candidate or candidates that were estimated."""
    allocated_bytes: Count | None = None
    """CUDA: the figure that `torch.cuda.max_memory_allocated` would give."""
    reserved_bytes: Count | None = None
    """CUDA: the figure that `torch.cuda.max_memory_reserved` would give."""
    host_bytes: Count = 0
    """CUDA: host memory of the input pipeline, of an offloaded optimizer state, of a microbatch that stays there."""
    steps: Count = 0
    """Time steps that one call of the kernel takes."""
    budget_bytes: int | None = None
    """Bytes that the process may use on the device; None if nobody asked whether it fits."""
    margin_bytes: Count = 0
    """Bytes added before the comparison with the budget, because estimates err."""
    parts: dict[str, int] = field(default_factory=dict, repr=False)
    """The bytes of the parts of a task at the peak, by the names of its modules; empty for a spec."""
    notes: tuple[str, ...] = ()
    """How the estimate of a task was made, in sentences."""

    @property
    def runs(self) -> Flag:
        """Whether the engine can run the steps of one call: cuDNN refuses more than 65,535, whatever the memory."""
        return (self.engine != "cudnn") | (self.steps <= cudnn.MAX_STEPS)

    @property
    def fits(self) -> Flag | None:
        """Whether it runs, with total and margin within the budget; None without a budget."""
        if self.budget_bytes is None:
            return None
        return self.runs & (self.total_bytes + self.margin_bytes <= self.budget_bytes)

    @property
    def growth_bytes(self) -> Count:
        """The peak over the runtime: the bytes that the model itself costs."""
        return self.total_bytes - self.terms["runtime"]

    def __repr__(self) -> str:
        from oomguard._report.notebook import estimate_line

        return f"<Estimate {estimate_line(self)}>"

    def _repr_html_(self) -> str:
        """The estimate as a notebook shows it."""
        from oomguard._report.notebook import estimate_html

        return estimate_html(self)


def estimate_step(spec: Spec, candidate: Knobs, target: Target = CPU, *, training: bool = True) -> Estimate:
    """Estimate one optimizer step or, with `training=False`, one evaluation pass without gradients."""
    step, moments = step_moments(spec, candidate, target, training=training)
    totals: dict[str, Count] = {name: sum(parts.values()) for name, parts in moments.items()}
    terms_of_peak, moment = _largest(moments, totals)
    on_card: dict[str, Any] = {}
    if target.cuda:  # the rest of the segments that the blocks are cut from counts as workspace
        runtime, expandable = target.runtime_bytes, candidate.allocator == "expandable"
        allocated = sum(terms_of_peak.values()) - runtime
        reserved = reserved_bytes(allocated, expandable=expandable)
        terms_of_peak = terms_of_peak | {"workspace": terms_of_peak["workspace"] + reserved - allocated}
        totals = {name: runtime + reserved_bytes(n - runtime, expandable=expandable) for name, n in totals.items()}
        on_card = {"allocated_bytes": allocated, "reserved_bytes": reserved, "host_bytes": _host_bytes(step)}
    return Estimate(
        total_bytes=sum(terms_of_peak.values()),
        terms=terms_of_peak,
        moment=moment,
        moments=totals,
        engine=step.engine,
        device=target.device,
        candidate=candidate,
        steps=step.calls[0].steps,
        **on_card,
    )


def step_moments(spec: Spec, candidate: Knobs, target: Target = CPU, *, training: bool = True) -> tuple[Pass, Moments]:
    """Return the pass that a step consists of, and its moments with the bytes in use at each, before an allocator
    rounds them."""
    step = make_pass(spec, candidate, target, steps=piece_steps(spec, candidate))
    if not training:
        return step, evaluation_moments(step)
    whole = not candidate.recompute and candidate.window is None
    kept = make_pass(spec, candidate, target, steps=spec.steps) if whole else step
    moments = training_moments(step, kept)
    own = candidate.allocator == "system" and not target.cuda
    return step, in_system_heap(step, kept, moments) if own else moments


def _largest(moments: Moments, totals: dict[str, Count]) -> tuple[Terms, Name]:
    """Find the moment with the largest total, element by element: its terms and its name."""
    index = np.argmax(np.stack(np.broadcast_arrays(*totals.values())), axis=0)  # the first of equal moments
    names = np.array([*moments])
    if not index.ndim:
        return moments[str(names[index])], str(names[index])
    sizes: dict[str, list[Any]] = {term: [parts[term] for parts in moments.values()] for term in TERMS}
    return {term: np.choose(index, sizes[term]) for term in TERMS}, names[index]


def _host_bytes(step: Pass) -> Count:
    spec, candidate = step.spec, step.candidate
    host = terms.loader_bytes(spec, candidate, pinned=True)
    host = host + (terms.optimizer_bytes(spec, candidate) if candidate.offload else 0)
    stays = terms.input_bytes(spec, candidate) + border_bytes(step) + by_layer_bytes(step)
    return host + (stays if stays_on_host(step) else 0)


def is_fragile(spec: Spec, estimate: Estimate) -> Flag:
    """CPU: whether peaks vary, since the blocks of a step (PyTorch's own kernels) or of a piece live in the C heap.

    Freed blocks leave gaps between those that stay, and later blocks do not fit all of them.
    """
    if estimate.device != "cpu":
        return False
    knobs, engine = estimate.candidate, np.asarray(estimate.engine)
    piece = np.where(engine == "onednn", 4 * np.asarray(estimate.steps), 1)  # oneDNN has one block for all its gates
    block = 4 * spec.hidden * np.asarray(knobs.microbatch) * piece
    return np.asarray(block < heap_limit(knobs.allocator, engine))


def split(estimate: Estimate) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The known part of the peak without the runtime, and the rest, which records correct (at least a page)."""
    parts = (estimate.total_bytes, *(estimate.terms[term] for term in KNOWN))
    total, runtime, *others = np.broadcast_arrays(*map(np.atleast_1d, parts))
    known = np.sum(others, axis=0, dtype=float)
    return known, np.maximum(total - runtime - known, 4096.0)


def margin_bytes(spec: Spec, estimate: Estimate, target: Target) -> Count:
    """Bytes to add to the estimate of candidates of one group that no record has calibrated (margins.py).

    Calibration by the records of this machine replaces it.
    """
    knobs, device = estimate.candidate, "cuda" if target.cuda else "cpu"
    kind = device, str(estimate.engine), allocator_on(device, knobs.allocator), str(knobs.precision)
    shares = [math.ceil(1024 * bare(*kind, fragile)) for fragile in (True, False)]
    rest = estimate.total_bytes - sum(estimate.terms[term] for term in KNOWN) + OFFSET_BYTES
    return -(-rest // 1024) * where(is_fragile(spec, estimate), *shares)  # an int64 is nearly full: divide first


def estimate_batch(spec: Spec, candidates: Candidates, target: Target, *, training: bool = True) -> Estimate:
    """Estimate all candidates, in their order: the figures of each are those that it has alone."""
    length = len(candidates)
    figures, terms, moments = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    moment, engine = np.empty(length, dtype=_NAME), np.empty(length, dtype=_NAME)
    for rows, group in _groups(spec, candidates):
        own_spec = pick(spec, rows)
        estimate = estimate_step(own_spec, group, target, training=training)
        own = {name: getattr(estimate, name) for name in _FIGURES if getattr(estimate, name) is not None}
        own["margin_bytes"] = margin_bytes(own_spec, estimate, target)
        for columns, values in ((figures, own), (terms, estimate.terms), (moments, estimate.moments)):
            for name, value in values.items():  # a moment that a group does not have stays 0
                columns.setdefault(name, np.zeros(length, dtype=np.int64))[rows] = value
        moment[rows], engine[rows] = estimate.moment, estimate.engine
    return Estimate(
        **figures,
        terms=terms,
        moment=moment,
        moments=moments,
        engine=str(engine[0]) if (engine == engine[0]).all() else engine,
        device=target.device,
        candidate=candidates,
    )


def _groups(spec: Spec, candidates: Candidates) -> Iterator[tuple[Ints, Candidates]]:
    """Row numbers, and the candidates there: numbers as arrays, everything else one value."""
    key = _key(spec, candidates)
    order = np.argsort(key, kind="stable")
    borders = np.flatnonzero(np.diff(key[order])) + 1
    for group in np.split(order, borders):
        for start in range(0, len(group), CHUNK_ROWS):
            rows = group[start : start + CHUNK_ROWS]
            yield rows, _pick(candidates, rows)


def _key(spec: Spec, candidates: Candidates) -> Ints:
    """A number for every row, equal for rows of one group."""
    key = np.zeros(len(candidates), dtype=np.int64)
    for name, values in candidates.arrays.items():
        digits = [is_none(values)] if values.dtype == object else []
        if values.dtype.kind not in "iu":
            digits += [values == choice for choice in {*values.tolist()} - {None}] if name not in _NUMERIC else []
        elif name == "segments" and spec.bidirectional:  # plain and in pieces, it consists of different calls
            digits += [values > 1]
        for digit in digits:
            key = 2 * key + digit
    return key


def _pick(candidates: Candidates, rows: Ints) -> Candidates:
    knobs = candidates.knobs
    for name, values in candidates.arrays.items():
        chosen = values[rows]
        if chosen.dtype.kind in "iu":
            knobs[name] = chosen
        elif name in _NUMERIC:
            knobs[name] = None if chosen[0] is None else chosen.astype(np.int64)
        else:
            knobs[name] = chosen[:1].tolist()[0]
    return Candidates(**knobs)
