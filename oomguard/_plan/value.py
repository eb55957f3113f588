"""Plan: what to run, why, and what to fall back to. Data alone: nothing in a plan is ever executed."""

from typing import Annotated, Any, Literal

import msgspec

from oomguard._core.units import MAX_BYTES
from oomguard._device.budget import Limit
from oomguard._estimate.breakdown import Estimate
from oomguard._estimate.target import Target
from oomguard._predict.calibration import Prediction, Size
from oomguard._probe.record import Record
from oomguard._search.lengths import Bucket, Some
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.spec import Spec

VERSION = 1
"""The version of the file's format."""
USUAL_SEQUENCES = 1000
"""Sequences of an epoch if the size of the data is not known."""
Aim = Literal["throughput", "microbatch", "seq"]
Allowed = Literal["precision", "window", "8bit"]
Ended = Literal["done", "max-probes", "timeout", "interrupted", "estimate"]
# a file may have been changed by hand: a value that no plan can have is refused when it is read, with its place
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class Figures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The estimate of one candidate, as a plan keeps it: by arithmetic alone, before any calibration."""

    total_bytes: Size
    """The peak."""
    terms: dict[str, Size]
    """The summands of the peak."""
    moment: str
    """When the peak occurs."""
    engine: str
    """The kernel that runs the cell."""
    host_bytes: Size = 0
    """CUDA: bytes of the host's memory in addition."""


def figures(estimate: Estimate) -> Figures:
    """The estimate of one candidate, as a plan keeps it."""
    return Figures(
        total_bytes=int(estimate.total_bytes),
        terms={name: int(size) for name, size in estimate.terms.items()},
        moment=str(estimate.moment),
        engine=str(estimate.engine),
        host_bytes=int(estimate.host_bytes),
    )


class Rung(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fallback: a smaller candidate with the same batch and the same gradient."""

    candidate: Candidate
    """The candidate to fall back to."""
    estimate: Figures
    """Its estimate."""
    expected: Prediction
    """What it is expected to need."""


class Padding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The share of all computed tokens that is padding."""

    before: Share
    """The share if microbatches are drawn at random."""
    after: Share
    """The share if each microbatch is drawn from one bucket."""


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A point of the front: nothing that fits is better in one aim without being worse in another."""

    seq: Some
    """Steps of the sequences."""
    candidate: Candidate
    """The candidate."""
    expected: Prediction
    """What it is expected to need."""
    throughput: Amount
    """Sequences of that length per second."""
    tokens_per_second: Amount
    """Time steps of sequences per second."""


class LossyGain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the plan gains by a lossy knob."""

    knob: str
    """The knob's name."""
    value: str
    """The value of the knob in the plan."""
    exact: Candidate | None
    """The best candidate without it; None if none fits, or if the knob was fixed."""
    speedup: Amount | None
    """How many times faster the plan is than that; None if that is not known, or there is none."""
    saved_bytes: Annotated[int, msgspec.Meta(ge=-MAX_BYTES, le=MAX_BYTES)] | None
    """How much lower the plan's peak is."""


class Plain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PyTorch without oomguard: the whole batch in one pass, in fp32."""

    estimate: Figures
    """Its estimate."""
    expected: Prediction
    """What it is expected to need."""
    fits: bool
    """Whether that is within the budget."""


def plain_candidate(spec: Spec, *, cuda: bool, cores: int) -> Candidate:
    """The candidate of PyTorch without oomguard: all cores, the default allocator."""
    return make_candidate(spec, allocator="plain", threads=None if cuda else cores)


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine and the software that the plan was made with."""

    oomguard: str
    """Version of oomguard."""
    torch: str | None
    """Version of torch."""
    library: str | None
    """Name and version of cuDNN or oneDNN."""
    driver: str | None
    """Version of the card's driver."""
    python: str
    """Version of Python."""
    system: str
    """Operating system and C library."""
    device: str
    """The device as `--device` takes it."""
    title: str
    """The processor's or the card's name."""
    cores: Some
    """Processors that the process may use."""
    limits: tuple[Limit, ...]
    """Everything that limits memory there, as it was when the plan was made."""


class Calibrated(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the records corrected the estimate."""

    records: Count
    """Records of this search that measured a step."""
    cached: Count
    """Records of earlier searches that were used."""
    stale: bool
    """Whether records of earlier searches contradicted the new ones and were dropped."""
    ratio: Amount
    """The calibrated peak over the estimated one, both without the runtime."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to run, why, and what to fall back to.

    `oomguard show` and a notebook explain it; `oomguard.load_plan` reads it back, and checks it.

    >>> import oomguard
    >>> plan = oomguard.find_feasible_config(cell="lstm", seq=100_000, device="t4")
    >>> plan.plain.fits, plan.peak_bytes <= plan.budget_bytes, plan.confirmed
    (False, True, False)
    >>> plan.fallbacks[0].expected.peak_bytes < plan.peak_bytes
    True
    """

    version: Literal[1] = 1
    """The version of this format."""
    spec: Spec
    """The model and data to train. With `maximize` seq, its sequences are the longest that fit."""
    candidate: Candidate
    """The chosen candidate."""
    where: Target
    """The device."""
    budget_bytes: Size
    """Bytes that the training process may use there."""
    asked_budget_bytes: Size | None = None
    """The budget that the user gave, if any; if it is larger than `budget_bytes`, less was free."""
    maximize: Annotated[tuple[Aim, ...], msgspec.Meta(min_length=1)]
    """The aims of the search, the first of which decided on the candidate."""
    allow: tuple[Allowed, ...]
    """The lossy knobs that were allowed."""
    fixed: dict[str, bool | int | str | None] = {}
    """Knobs that the user fixed: they were not searched."""
    estimate: Figures
    """The estimate, by arithmetic alone."""
    expected: Prediction
    """The prediction by the records of other candidates and of shorter sequences, without the record below."""
    record: Record | None
    """The run of this candidate with the longest sequences that there was time for; None if there was none."""
    calibration: Calibrated
    """How the records corrected the estimate."""
    fallbacks: tuple[Rung, ...]
    """Fallbacks with smaller and smaller peaks, down to the smallest possible."""
    plain: Plain
    """PyTorch without oomguard, for comparison."""
    bought: tuple[LossyGain, ...] = ()
    """The gain by each lossy knob that is turned."""
    enough_rows: Some | None = None
    """The microbatch beyond which the speed grows by less than 2 %."""
    buckets: tuple[Bucket, ...] = ()
    """How each length bucket is run, if the spec has a histogram of lengths."""
    padding: Padding | None = None
    """Padding with and without buckets, if the spec has a histogram of lengths."""
    front: tuple[Point, ...] = ()
    """The front, if there are several aims."""
    probes: Count
    """The number of probes that were run."""
    ooms: Count
    """The number of probes that ran out of memory."""
    records: tuple[Record, ...]
    """The records of all probes."""
    ended: Ended
    """Why the search ended: done, max-probes, timeout, interrupted; `estimate` if nothing was run."""
    seconds: Amount
    """Seconds that the search took, since it was last started."""
    environment: Environment
    """The machine and the software that the plan was made with."""
    exports: dict[str, str]
    """Environment variables to start the training process with: the allocator's settings."""

    @property
    def confirmed(self) -> bool:
        """Whether this very candidate ran with sequences of full length."""
        return self.record is not None and self.record.verdict.ran and self.record.spec.steps == self.spec.steps

    @property
    def peak_bytes(self) -> int:
        """The peak: measured if the plan is confirmed, otherwise expected."""
        if self.confirmed and self.record is not None and self.record.peak_bytes is not None:
            return self.record.peak_bytes
        return self.expected.peak_bytes

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds of an optimizer step: measured (in proportion, for shorter sequences), otherwise expected."""
        record = self.record
        if record is None or record.seconds_per_step is None:
            return self.expected.seconds_per_step
        return record.seconds_per_step * self.spec.steps / record.spec.steps

    @property
    def throughput(self) -> float | None:
        """Sequences per second."""
        seconds = self.seconds_per_step
        return None if seconds is None else self.spec.batch / seconds

    def to_dict(self) -> dict[str, Any]:
        """The plan as its JSON has it."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        return content

    def _repr_html_(self) -> str:
        """The plan as a notebook shows it."""
        from oomguard._report.plan import explain
        from oomguard._report.tables import to_html

        return to_html(explain(self))


class Epoch(msgspec.Struct, frozen=True, kw_only=True):
    """The expected time of an epoch."""

    sequences: int
    """Sequences of the epoch."""
    steps: int
    """Optimizer steps of the epoch."""
    seconds: float
    """Seconds of the epoch."""
    known: bool
    """Whether the number of sequences is that of the data; otherwise it is `USUAL_SEQUENCES`."""


def epoch_of(plan: Plan, sequences: int | None = None) -> Epoch | None:
    """The expected time of an epoch of so many sequences (default: as many as the spec's histogram has).

    None if nothing was timed. With buckets, each sequence takes the time of its bucket.
    """
    seconds_per_step, batch = plan.seconds_per_step, plan.spec.batch
    if seconds_per_step is None:
        return None
    each = seconds_per_step / batch
    timed = [(bucket.sequences, bucket.expected.seconds_per_step) for bucket in plan.buckets]
    if timed and all(seconds is not None for _, seconds in timed):
        each = sum(count * (seconds or 0.0) for count, seconds in timed) / (batch * sum(count for count, _ in timed))
    known = sequences or sum((plan.spec.lengths or {}).values())
    count = known or USUAL_SEQUENCES
    return Epoch(sequences=count, steps=-(-count // batch), seconds=each * count, known=bool(known))
