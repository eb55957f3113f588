"""Plan: what to run, why, and what to fall back to. Data alone: nothing in a plan is ever executed."""

from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from oomguard._core.errors import OomguardError
from oomguard._core.units import MAX_BYTES, format_bytes
from oomguard._data.options import PlanData
from oomguard._device.budget import Limit
from oomguard._estimate.breakdown import Estimate
from oomguard._estimate.target import Target
from oomguard._plan.buckets import Bucket, Positive
from oomguard._predict.calibration import Prediction, Size
from oomguard._probe.record import Probed, Record
from oomguard._spec.candidate import Candidate, renew
from oomguard._spec.spec import Spec

VERSION = 1  # the version of the file's format
USUAL_SEQUENCES = 1000  # sequences of an epoch if the size of the data is not known
Aim = Literal["throughput", "microbatch", "seq"]
Allowed = Literal["precision", "window", "8bit"]
Known = Literal["measured", "predicted", "by arithmetic"]
Ended = Literal["done", "max-probes", "timeout", "interrupted", "storage", "estimate"]
# a file may have been changed by hand: a value that no plan can have is refused when it is read, with its place
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class Figures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The estimate of one candidate, as a plan keeps it: by arithmetic alone, before any calibration."""

    total_bytes: Size  # the peak
    terms: dict[str, Size]  # the summands of the peak
    moment: str  # when the peak occurs
    engine: str  # the kernel that runs the cell
    host_bytes: Size = 0  # CUDA: bytes of the host's memory in addition


def figures(estimate: Estimate) -> Figures:
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
    estimate: Figures
    expected: Prediction


class Padding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The share of all computed tokens that is padding."""

    before: Share  # the share if microbatches are drawn at random
    after: Share  # the share if each microbatch is drawn from one bucket


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A point of the front: nothing that fits is better in one aim without being worse in another."""

    seq: Positive  # steps of the sequences
    candidate: Candidate
    expected: Prediction
    throughput: Amount  # sequences of that length per second
    tokens_per_second: Amount  # time steps of sequences per second


class Reach(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far sequences can grow by prediction, and what ends that."""

    steps: Positive  # steps of the longest sequences that are predicted to fit, in memory and in time
    bound: Literal["memory", "step-time"]  # what longer sequences would exceed
    step_seconds: Amount  # seconds that a step was allowed to take


class LossyGain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gain of the plan by a lossy knob."""

    knob: str
    value: str  # the value of the knob in the plan
    exact: Candidate | None  # the best candidate without it; None if none fits, or if the knob was fixed
    speedup: Amount | None  # how many times faster the plan is than that; None if that is not known
    saved_bytes: Annotated[int, msgspec.Meta(ge=-MAX_BYTES, le=MAX_BYTES)] | None
    """How much lower the plan's peak is."""


class Plain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PyTorch without oomguard: the whole batch in one pass, in fp32."""

    estimate: Figures
    expected: Prediction
    fits: bool  # whether that is within the budget


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine and the software that the plan was made with."""

    oomguard: str  # its version
    torch: str | None  # its version
    library: str | None  # name and version of cuDNN or oneDNN
    driver: str | None  # version of the card's driver
    python: str  # its version
    system: str  # operating system and C library
    device: str  # the device as `--device` takes it
    title: str  # the processor's or the card's name
    cores: Positive  # processors that the process may use
    limits: tuple[Limit, ...]  # everything that limits memory there, as it was when the plan was made


class Calibrated(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the records corrected the estimate."""

    records: Count  # records of this search that measured a step
    cached: Count  # records of earlier searches that were used
    stale: bool  # whether records of earlier searches contradicted the new ones and were dropped
    ratio: Amount  # the calibrated peak over the estimated one, both without the runtime


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
    time_spread: Amount | None = None
    """Standard deviation of the time of a step, as a share of it, by how much records differ; None if not timed."""
    fallbacks: tuple[Rung, ...]
    """Fallbacks with smaller and smaller peaks, down to the smallest possible."""
    plain: Plain
    """PyTorch without oomguard, for comparison."""
    data: PlanData | None = None
    """The data that the plan was made for; `train` reads it if no other is given."""
    bought: tuple[LossyGain, ...] = ()
    """The gain by each lossy knob that the plan uses."""
    enough_rows: Positive | None = None
    """The microbatch beyond which the speed grows by less than 2 %."""
    buckets: tuple[Bucket, ...] = ()
    """How each length bucket is run, if the spec has a histogram of lengths."""
    padding: Padding | None = None
    """Padding with and without buckets, if the spec has a histogram of lengths."""
    reach: Reach | None = None
    """With the aim seq: the longest sequences by prediction, which may not have been run."""
    front: tuple[Point, ...] = ()
    """The front, if there are several aims."""
    probes: Count
    """The number of probes that were run."""
    ooms: Count
    """The number of probes that ran out of memory."""
    records: tuple[Record, ...]
    """The records of all probes."""
    ended: Ended
    """Why the search ended: done, max-probes, timeout, interrupted, storage; `estimate` if nothing was run."""
    seconds: Amount
    """Seconds that the search took, since it was last started."""
    environment: Environment
    """The machine and the software that the plan was made with."""
    exports: dict[str, str]
    """Environment variables to start the training process with: the allocator's settings."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "fixed", {name: renew(name, value) for name, value in self.fixed.items()})

    @property
    def confirmed(self) -> bool:
        """Whether this very candidate ran with sequences of full length."""
        return self.record is not None and self.record.verdict.ran and self.record.spec.steps == self.spec.steps

    @property
    def known(self) -> Known:
        """How the peak is known: measured at full length, predicted from records, or by arithmetic alone."""
        if self.confirmed:
            return "measured"
        return "predicted" if self.calibration.records or self.calibration.cached else "by arithmetic"

    @property
    def margin_bytes(self) -> int:
        """Bytes by which the peak may err: none if it was measured."""
        return 0 if self.confirmed else self.expected.margin_bytes

    @property
    def peak_bytes(self) -> int:
        """The peak: measured if the plan is confirmed, otherwise expected."""
        measured = self.record.peak_bytes if self.record is not None and self.confirmed else None
        return self.expected.peak_bytes if measured is None else measured

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds of an optimizer step: the median of its probes (in proportion, if they were shorter), or expected."""
        record = self.record
        if record is None or record.seconds_per_step is None:
            return self.expected.seconds_per_step
        turns = [turn for turn in self.records if (turn.candidate, turn.spec) == (record.candidate, record.spec)]
        seconds = [turn.seconds_per_step for turn in turns if turn.seconds_per_step is not None]
        return median(seconds or [record.seconds_per_step]) * self.spec.steps / record.spec.steps

    @property
    def throughput(self) -> float | None:
        """Sequences per second."""
        seconds = self.seconds_per_step
        return None if seconds is None else self.spec.batch / seconds

    def to_dict(self) -> dict[str, Any]:
        """The plan as its JSON has it."""
        return dict(msgspec.to_builtins(self))

    def __repr__(self) -> str:
        from oomguard._report.notebook import plan_line

        return f"<Plan {plan_line(self)}>"

    def __str__(self) -> str:
        """The result in five lines."""
        from oomguard._report.notebook import plan_lines

        return plan_lines(self)

    def _repr_html_(self) -> str:
        """The plan as a notebook shows it."""
        from oomguard._report.notebook import plan_html

        return plan_html(self)


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """A change that would lower the least that is needed."""

    change: str  # the change as flags, `--allow window`, or in words: `sequences cut to 4,000 steps`
    needed_bytes: int  # the least that would then be needed, margin included
    fits: bool  # whether that is within the budget
    allowed: bool  # whether the change was already allowed (and is not enough)


class Shortfall(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no plan."""

    needed_bytes: int  # the least that any candidate needs, margin included
    budget_bytes: int
    candidate: Candidate  # the candidate that needs least
    terms: dict[str, int]  # the terms of its estimate
    term: str  # the largest of these terms
    ways: tuple[Way, ...]  # changes that would help; those that make it fit come first
    records: tuple[Probed, ...]  # the records of all probes that were run

    @property
    def message(self) -> str:
        """The rule, the figures and the advice in one text."""
        failed = [record for record in self.records if not record.verdict.ran]
        if failed and self.needed_bytes <= self.budget_bytes:  # memory is not the reason
            words = f"A candidate must run before it is planned, but none did: {failed[-1].verdict.name}, "
            return words + f"{failed[-1].message} See what happens with oomguard probe and the same flags."
        needed, budget, size = map(format_bytes, (self.needed_bytes, self.budget_bytes, self.terms[self.term]))
        words = (
            f"The smallest candidate must fit the budget, but needs {needed} of {budget} ({size} of it {self.term})."
        )
        enough = [f"{way.change} would need {format_bytes(way.needed_bytes)}." for way in self.ways if way.fits]
        return f"{words} {' Or: '.join(enough[:3]) or f'No knob would make it fit: raise the budget to {needed}.'}"


class NothingFitsError(OomguardError):
    """There is no plan: not even the smallest candidate fits. `shortfall` has the figures.

    >>> import oomguard
    >>> try:
    ...     oomguard.find_feasible_config(cell="lstm", seq=10_000, hidden=4096, device="t4", budget="2GiB")
    ... except oomguard.NothingFitsError as error:
    ...     print(error.shortfall.term, error.shortfall.needed_bytes > 2 << 30)
    weights True
    """

    def __init__(self, shortfall: Shortfall) -> None:
        super().__init__(shortfall.message)
        self.shortfall = shortfall


class Epoch(NamedTuple):
    """The expected time of an epoch, with its sequences and optimizer steps."""

    sequences: int
    steps: int
    seconds: float
    known: bool  # whether the number of sequences is that of the data; otherwise it is `USUAL_SEQUENCES`


def epoch_of(plan: Plan, sequences: int | None = None) -> Epoch | None:
    """The expected time of an epoch of `sequences` (default: as the spec's histogram); None if nothing was timed."""
    seconds_per_step, batch = plan.seconds_per_step, plan.spec.batch
    if seconds_per_step is None:
        return None
    each, buckets = seconds_per_step / batch, plan.buckets
    if buckets and all(bucket.expected.seconds_per_step is not None for bucket in buckets):
        total = sum(bucket.sequences * (bucket.expected.seconds_per_step or 0.0) for bucket in buckets)
        each = total / (batch * sum(bucket.sequences for bucket in buckets))
    known = sequences or sum((plan.spec.lengths or {}).values())
    count = known or USUAL_SEQUENCES
    return Epoch(sequences=count, steps=-(-count // batch), seconds=each * count, known=bool(known))
