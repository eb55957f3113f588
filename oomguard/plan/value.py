"""Plan: what to run, why, and what to fall back to. Data alone: nothing in a plan is ever executed."""

from typing import Annotated, Any, Literal

import msgspec

from oomguard.candidate import Candidate, make_candidate
from oomguard.device.budget import Limit
from oomguard.estimate.breakdown import Estimate
from oomguard.estimate.engines.cudnn import Platform
from oomguard.estimate.place import Place
from oomguard.probe.record import Record
from oomguard.spec import Spec
from oomguard.units import MAX_BYTES

VERSION = 1
"""Of the file's format."""
Aim = Literal["throughput", "microbatch", "seq"]
Allowed = Literal["precision", "window", "8bit"]
Ended = Literal["done", "max-probes", "timeout", "interrupted", "estimate"]
# a file may have been changed by hand: what no plan can have is refused where it is read, with its place
Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Some = Annotated[int, msgspec.Meta(ge=1, le=1 << 60)]
"""Of what there is at least one."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class Where(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The device, as far as arithmetic cares: an estimate can be checked on any machine."""

    device: str
    """As `--device` takes it."""
    cuda: bool
    """Whether it is a card."""
    runtime_bytes: Size
    """What is there before any model."""
    cublas_bytes: Size = 0
    """One cuBLAS workspace."""
    capability: tuple[int, int] | None = None
    """The card's compute capability."""
    multiprocessors: Some | None = None
    """The card's."""

    @classmethod
    def of(cls, place: Place) -> "Where":
        """The same as a plan has it."""
        platform = place.platform
        return cls(
            device=place.device,
            cuda=place.cuda,
            runtime_bytes=place.runtime_bytes,
            cublas_bytes=place.cublas_bytes,
            capability=None if platform is None else platform.capability,
            multiprocessors=None if platform is None else platform.multiprocessors,
        )

    @property
    def place(self) -> Place:
        """The same as an estimate takes it."""
        platform = None
        if self.capability is not None and self.multiprocessors is not None:
            platform = Platform(capability=self.capability, multiprocessors=self.multiprocessors)
        return Place(
            device=self.device,
            cuda=self.cuda,
            runtime_bytes=self.runtime_bytes,
            cublas_bytes=self.cublas_bytes,
            platform=platform,
        )


class Figures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An estimate, as a plan keeps it: by arithmetic alone, before any calibration."""

    total_bytes: Size
    """The peak."""
    terms: dict[str, Size]
    """Its summands."""
    moment: str
    """When it happens."""
    engine: str
    """The kernel that runs the cell."""
    host_bytes: Size = 0
    """CUDA: of the host's memory, beside that."""


def figures(estimate: Estimate) -> Figures:
    """An estimate of one candidate, as a plan keeps it."""
    return Figures(
        total_bytes=int(estimate.total_bytes),
        terms={name: int(size) for name, size in estimate.terms.items()},
        moment=str(estimate.moment),
        engine=str(estimate.engine),
        host_bytes=int(estimate.host_bytes),
    )


class Expected(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is expected of a candidate, by what was measured of others."""

    peak_bytes: Size
    """The calibrated peak."""
    margin_bytes: Size
    """What is added because it may err. Peak and margin are within the budget."""
    seconds_per_step: Seconds | None
    """An optimizer step of the whole batch; None if nothing has been timed."""


class Rung(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step of the ladder: a candidate to fall back to."""

    candidate: Candidate
    """Same batch, same gradient."""
    estimate: Figures
    """Its estimate."""
    expected: Expected
    """What is expected of it."""


class Bucket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How sequences up to some length are run."""

    longest: Some
    """Steps of the longest sequence in it."""
    sequences: Some
    """How many of the data are in it."""
    candidate: Candidate
    """Its microbatch and its segments, in the setting of the plan's candidate."""
    expected: Expected
    """What is expected of it; the time is for a step of the whole batch from this bucket."""


class Padding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The share of all computed tokens that is padding."""

    before: Share
    """If microbatches are drawn at random."""
    after: Share
    """If each is drawn from one bucket."""


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A point of the front: nothing that fits is better in one aim without being worse in another."""

    seq: Some
    """Steps of its sequences."""
    candidate: Candidate
    """The candidate."""
    expected: Expected
    """What is expected of it."""
    throughput: Amount
    """Sequences of that length per second."""
    tokens_per_second: Amount
    """Time steps of sequences per second."""


class Bought(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a lossy knob bought."""

    knob: str
    """Its name."""
    value: str
    """What it was turned to."""
    exact: Candidate | None
    """The best candidate without it; None if none fits, or if it was fixed."""
    speedup: Amount | None
    """How many times faster it is than that; None if that is not known, or there is none."""
    saved_bytes: Annotated[int, msgspec.Meta(ge=-MAX_BYTES, le=MAX_BYTES)] | None
    """How much lower its peak is."""


class Plain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What PyTorch would do by itself: the whole batch in one pass, in fp32."""

    estimate: Figures
    """Its estimate."""
    expected: Expected
    """What is expected of it."""
    fits: bool
    """Whether that is within the budget."""


def plain_candidate(spec: Spec, *, cuda: bool, cores: int) -> Candidate:
    """What PyTorch would do by itself: all cores, and the allocator as it comes.

    >>> plain_candidate(Spec(cell="gru", seq=9), cuda=False, cores=2).threads
    2
    """
    return make_candidate(spec, allocator="plain", threads=None if cuda else cores)


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the plan was made."""

    oomguard: str
    """Versions: of oomguard, ..."""
    torch: str | None
    """... torch, ..."""
    library: str | None
    """... cuDNN or oneDNN, ..."""
    driver: str | None
    """... the card's driver, ..."""
    python: str
    """... Python."""
    system: str
    """Operating system and C library."""
    device: str
    """As `--device` takes it."""
    title: str
    """The processor's or the card's name."""
    cores: Some
    """Processors that the process may use."""
    limits: tuple[Limit, ...]
    """Everything that limits memory there, as it was found."""


class Calibrated(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the records corrected."""

    records: Count
    """Of this model, in this search."""
    cached: Count
    """Records of earlier searches that helped."""
    stale: bool
    """Whether records of earlier searches contradicted the new ones and were dropped."""
    ratio: Amount
    """The calibrated peak over the estimate, both without the runtime."""


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
    """Of this format."""
    spec: Spec
    """What is to be trained. With `maximize` seq, its sequences are the longest that fit."""
    candidate: Candidate
    """How."""
    where: Where
    """On what."""
    budget_bytes: Size
    """What the training process may use there."""
    asked_budget_bytes: Size | None = None
    """What the user said it may use, if so; less was free if this is more."""
    maximize: Annotated[tuple[Aim, ...], msgspec.Meta(min_length=1)]
    """What is best."""
    allow: tuple[Allowed, ...]
    """The lossy knobs that were allowed."""
    fixed: dict[str, bool | int | str | None] = {}
    """Knobs that the user fixed: they were not searched."""
    estimate: Figures
    """By arithmetic alone."""
    expected: Expected
    """By the records of other candidates and of shorter sequences: made before the record below."""
    record: Record | None
    """The run of this candidate with the longest sequences that there was time for; None if there was none."""
    calibration: Calibrated
    """What the records corrected."""
    fallbacks: tuple[Rung, ...]
    """Ever smaller peaks, ending in the smallest possible."""
    plain: Plain
    """What PyTorch would do by itself."""
    bought: tuple[Bought, ...] = ()
    """What lossy knobs bought, if any is turned."""
    enough_rows: Some | None = None
    """The microbatch beyond which speed grows by less than 2 %."""
    buckets: tuple[Bucket, ...] = ()
    """With a histogram of lengths: how each bucket is run."""
    padding: Padding | None = None
    """With a histogram of lengths."""
    front: tuple[Point, ...] = ()
    """With several aims."""
    probes: Count
    """How many were run."""
    ooms: Count
    """How many ran out of memory."""
    records: tuple[Record, ...]
    """All of them."""
    ended: Ended
    """Why the search ended: done, max-probes, timeout, interrupted; `estimate` if nothing was run."""
    seconds: Amount
    """What the search took (the last time it was started)."""
    environment: Environment
    """Where it was made."""
    exports: dict[str, str]
    """Environment variables to start the training process with: the allocator's settings."""

    @property
    def confirmed(self) -> bool:
        """Whether this very candidate ran, with sequences of full length."""
        return self.record is not None and self.record.verdict.ran and self.record.spec.steps == self.spec.steps

    @property
    def peak_bytes(self) -> int:
        """Measured, if it was confirmed; otherwise expected."""
        if self.confirmed and self.record is not None and self.record.peak_bytes is not None:
            return self.record.peak_bytes
        return self.expected.peak_bytes

    @property
    def seconds_per_step(self) -> float | None:
        """Measured, if it was; otherwise expected. For shorter sequences than asked for, in proportion."""
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
        """As JSON has it."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        from oomguard.plan.html import to_html
        from oomguard.plan.words import explain

        return to_html(explain(self))
