"""Request, Answer, Record: what is asked of a child, what it answers, and the frozen result of the probe. No torch."""

from datetime import UTC, datetime
from functools import cache
from importlib import metadata

import msgspec

from oomguard.candidate import Candidate, check_candidate
from oomguard.checks import check_whole, shown
from oomguard.errors import MisuseError
from oomguard.estimate.place import CPU, Place, engine_for
from oomguard.probe.verdict import Verdict
from oomguard.spec import Spec
from oomguard.units import MAX_BYTES

MAX_SECONDS = 30 * 86_400


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked of a child: one candidate, and what it may use. Checked at birth."""

    spec: Spec
    """What is to be trained."""
    candidate: Candidate
    """How."""
    device: str
    """Where, as `Device.name` has it."""
    budget_bytes: int
    """What the process may use there, interpreter and libraries (CPU) or context (CUDA) included."""
    committed_bytes: int | None = None
    """CPU: what the process may commit; None if nothing limits that."""
    seconds: float = 3.0
    """Once the measured steps have taken so long, no further one begins (but `passes` are always measured)."""
    steps: int = 3
    """Steps to measure, if there is time."""
    passes: int = 2
    """Passes of a measured step, and the least that are measured. One is enough to see whether a long one fits."""
    seed: int = 0
    """Of weights and data: the same request gives the same numbers."""

    def __post_init__(self) -> None:
        check_candidate(self.spec, self.candidate)
        check_whole("budget", self.budget_bytes, 1, MAX_BYTES, optional=False)
        check_whole("a budget of committed bytes", self.committed_bytes, 1, MAX_BYTES)
        check_seconds("The seconds to measure", self.seconds)
        check_whole("steps", self.steps, 1, 1000, optional=False)
        check_whole("passes", self.passes, 1, 2, optional=False)
        check_whole("seed", self.seed, 0, (1 << 63) - 1, optional=False)

    @property
    def engine(self) -> str:
        """The kernel that runs the cell; raises if the device does not have the one asked for."""
        place = CPU if self.device == "cpu" else Place(device=self.device, cuda=True, runtime_bytes=0)
        return engine_for(self.spec, self.candidate, place)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a probe, in figures. None: not known."""

    verdict: Verdict
    """What came of it; `verdict.advice` says what to do."""
    message: str
    """One sentence for people: what happened."""
    error: str | None = None
    """The traceback, or the last words of the process."""
    peak_bytes: int | None = None
    """The peak: resident bytes of the whole process (CPU), what the card showed for it (CUDA). If no step was measured
    it is only how far it got: a lower bound."""
    committed_bytes: int | None = None
    """CPU: the most that was committed (VmData), touched or not."""
    runtime_bytes: int | None = None
    """Of the peak, what was there before the model: interpreter and libraries (CPU), context (CUDA)."""
    allocated_bytes: int | None = None
    """CUDA: `torch.cuda.max_memory_allocated`."""
    reserved_bytes: int | None = None
    """CUDA: `torch.cuda.max_memory_reserved`."""
    terms: dict[str, int] | None = None
    """Summands of the peak, by the sizes of tensors: runtime, weights, gradients, optimizer, input, and the rest."""
    seconds_per_step: float | None = None
    """An optimizer step of the whole batch: its passes and one update."""
    tokens_per_second: float | None = None
    """Real time steps of real sequences (padding not counted) per second of training."""
    seconds_per_pass: float | None = None
    """Forward and backward of one full microbatch (median)."""
    fastest_pass_seconds: float | None = None
    """The fastest pass: how much faster it was than the median tells how much a time is to be trusted."""
    seconds_per_update: float | None = None
    """The optimizer's part of a step (median)."""
    passes: int = 0
    """Passes measured."""
    steps: int = 0
    """Steps measured. 0: every figure is of an attempt."""
    retries: int = 0
    """CUDA: how often the allocator had to empty its cache and ask again."""
    library: str | None = None
    """What the kernels come from, such as `oneDNN 3.7.1` or `cuDNN 9.10.2`."""
    skipped: int = 0
    """fp16: measured steps that updated nothing, since gradients overflowed."""


class Answer(Measured, frozen=True, kw_only=True):
    """What a child answers."""

    fresh: bool = False
    """Whether the child is as good as new: the next probe in it measures what it would in a new one."""


class Record(Measured, frozen=True, kw_only=True):
    """The frozen result of a probe. Checked at birth; goes through JSON and back unchanged.

    `oomguard.probe` makes them; this one is made by hand, since it is of a probe that ran out of memory.

    >>> asked = {"spec": Spec(cell="gru", seq=20), "candidate": Candidate(microbatch=32), "device": "cpu"}
    >>> found = {"engine": "native", "budget_bytes": 300 << 20, "started": "2026-01-31T12:00:00", "seconds": 1.5}
    >>> record = Record(verdict=Verdict.OOM, message="An allocation was refused.", **asked, **found)
    >>> record.verdict.ran, record.peak_bytes, record.verdict.advice.partition(":")[0]
    (False, None, 'Memory ran out')
    >>> msgspec.json.decode(msgspec.json.encode(record), type=Record) == record
    True
    """

    spec: Spec
    """What was to be trained."""
    candidate: Candidate
    """How."""
    device: str
    """Where: `cpu`, `cuda:0`."""
    title: str | None = None
    """The processor's or the card's name."""
    engine: str | None
    """The kernel that ran the cell; None if the device does not have the one asked for."""
    budget_bytes: int
    """What the process was allowed to use."""
    committed_budget_bytes: int | None = None
    """CPU: what it was allowed to commit; None: anything."""
    torch: str | None = None
    """The version of torch; None if it does not tell."""
    started: str
    """When the probe began, in UTC (ISO 8601)."""
    seconds: float
    """What the whole probe took, the start of a child included."""

    def __post_init__(self) -> None:
        if self.verdict.ran and (self.peak_bytes is None or self.seconds_per_step is None or not self.steps):
            raise MisuseError(
                rule=f"A record of {self.verdict.name} has a peak and a time, of at least one step",
                got=f"got {self.peak_bytes}, {self.seconds_per_step} and {self.steps}",
                advice="Measure a step first.",
            )
        if self.verdict is Verdict.BROKEN and not self.error:
            raise MisuseError(rule="A record of BROKEN has its error", got="got none", advice="Add the traceback.")


def make_record(request: Request, measured: Measured, began: datetime, title: str | None = None) -> Record:
    """The record of a request that began at that time and has just been answered."""
    found = {name: getattr(measured, name) for name in Measured.__struct_fields__}
    return Record(
        **found,
        spec=request.spec,
        candidate=request.candidate,
        device=request.device,
        title=title,
        engine=engine_of(request),
        budget_bytes=request.budget_bytes,
        committed_budget_bytes=request.committed_bytes,
        torch=torch_version(),
        started=began.isoformat(timespec="milliseconds"),
        seconds=(datetime.now(UTC) - began).total_seconds(),
    )


def engine_of(request: Request) -> str | None:
    """The kernel that runs the cell; None if the device does not have the one asked for."""
    try:
        return request.engine
    except MisuseError:
        return None


def check_seconds(name: str, seconds: object) -> None:
    """Raise unless it is a number of seconds, more than none and not endless."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds <= MAX_SECONDS:
        raise MisuseError(
            rule=f"{name} must be more than 0 and at most {MAX_SECONDS:,} s",
            got=f"got {shown(seconds)}",
            advice="Give a number of seconds such as 60.",
        )


@cache
def torch_version() -> str | None:
    """By its package: the process that asks does not import torch."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
