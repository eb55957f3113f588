"""Request, Answer, Record: a question to a child, its answer, the result of the probe; and the Ledger, all records of a
search, one JSON line each. Does not import torch.

Lines of a ledger are only appended, whole and under a lock, so it survives a kill at any moment. A writer killed in the
middle leaves a torn line; the next one ends it, and readers drop it with a warning.
"""

import os
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import msgspec

from oomguard._core.errors import MisuseError, check_whole, wrong
from oomguard._core.system import append_line, file_errors, opened, read_values
from oomguard._core.units import MAX_BYTES
from oomguard._estimate.margins import SETTLED
from oomguard._estimate.target import CPU, Target, engine_for
from oomguard._probe.verdict import Verdict
from oomguard._spec.candidate import Candidate, check_candidate
from oomguard._spec.spec import Spec

MAX_SECONDS, MAX_STEPS = 30 * 86_400, 1000  # of a probe
SAME = ("engine", "allocator", "precision")  # knobs in which a candidate and its rival agree
RECORDS = "records.jsonl"  # the file's name in the directory that `--ledger` takes


Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
Amount = Annotated[float, msgspec.Meta(gt=0, le=1e30)]  # JSON comes from files, which anybody may have changed
TERMS = ("runtime", "weights", "gradients", "optimizer", "input", "rest")


class Limited(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part that all requests to a child have: one candidate and its limits. Checked when it is made."""

    candidate: Candidate
    device: str  # the device: `cpu`, `cuda:0`
    budget_bytes: int  # with interpreter and libraries (CPU) or the context (CUDA)
    committed_bytes: int | None = None  # CPU: bytes that the process may commit; None without a limit
    seconds: float = 3.0  # time after which no further step begins (`passes` are always measured)
    steps: int = 3  # steps to measure, if there is time
    passes: int = 2
    """Passes to measure, at least, of which a step has one or two. One is enough to see whether a long one fits."""
    seed: int = 0  # seed of weights and data: the same request gives the same numbers

    def __post_init__(self) -> None:
        check_whole("budget", self.budget_bytes, 1, MAX_BYTES, optional=False)
        check_whole("a budget of committed bytes", self.committed_bytes, 1, MAX_BYTES)
        check_seconds("The seconds to measure", self.seconds)
        check_whole("steps", self.steps, 1, MAX_STEPS, optional=False)
        check_whole("passes", self.passes, 1, MAX_STEPS, optional=False)
        check_whole("seed", self.seed, 0, (1 << 63) - 1, optional=False)


class Request(Limited, frozen=True, kw_only=True, tag=True):
    """A request to run steps of a spec."""

    spec: Spec
    rival: Candidate | None = None  # a candidate for the same child: the two run by turns, and their times are compared

    def __post_init__(self) -> None:
        check_candidate(self.spec, self.candidate)
        if self.rival is not None:
            check_candidate(self.spec, self.rival)
            for name in SAME:
                if getattr(self.rival, name) != getattr(self.candidate, name):
                    raise MisuseError(
                        rule=f"A candidate and its rival run in one process, so they need the same {name}",
                        got=f"got {getattr(self.candidate, name)} and {getattr(self.rival, name)}",
                        advice="Probe them one after the other.",
                    )
        super().__post_init__()

    @property
    def engine(self) -> str:
        """The kernel that runs the cell; raises if the device does not have the one asked for."""
        target = CPU if self.device == "cpu" else Target(device=self.device, cuda=True, runtime_bytes=0)
        return engine_for(self.spec, self.candidate, target)


class TaskRequest(Limited, frozen=True, kw_only=True, tag=True):
    """A request to run steps of a task."""

    name: str  # the name of the task
    content: bytes | None  # the task itself; None if the child can import it by its name
    rows: int | None  # rows of the whole batch; None for the microbatches of the candidate
    seq: int | None  # time steps of the batch; None for the longest samples of the task's data
    steps: int = SETTLED  # the kernels are not known, so each step may raise the peak until it has settled

    @property
    def engine(self) -> str:
        """The engine that decides on the heap; which kernels run is up to the model."""
        return "native"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a probe. A figure that is not known is None."""

    verdict: Verdict
    """The verdict; `verdict.advice` says what to do."""
    message: str
    """One sentence that says what happened."""
    error: str | None = None
    """The traceback, or the last output of the process."""
    peak_bytes: Size | None = None
    """The peak: resident bytes of the whole process (CPU), or the bytes that the card showed (CUDA). Only a lower bound
    if no step was measured."""
    committed_bytes: Size | None = None
    """CPU: the most bytes that were committed (VmData), touched or not."""
    runtime_bytes: Size | None = None
    """The part of the peak before the model: interpreter and libraries (CPU), context (CUDA)."""
    allocated_bytes: Size | None = None
    """CUDA: `torch.cuda.max_memory_allocated`."""
    reserved_bytes: Size | None = None
    """CUDA: `torch.cuda.max_memory_reserved`."""
    terms: dict[str, int] | None = None
    """Summands of the peak, by the sizes of tensors: runtime, weights, gradients, optimizer, input, and the rest."""
    seconds_per_step: Amount | None = None
    """Seconds of an optimizer step of the whole batch: its passes and one update."""
    tokens_per_second: Amount | None = None
    """Real time steps of real sequences (padding not counted) per second of training."""
    seconds_per_pass: Amount | None = None
    """Seconds of forward and backward of one full microbatch (median)."""
    fastest_pass_seconds: Amount | None = None
    """Seconds of the fastest pass. Its distance from the median shows how noisy the times are."""
    seconds_per_update: Annotated[float, msgspec.Meta(ge=0, le=1e30)] | None = None
    """Seconds of the optimizer's part of a step (median)."""
    passes: Size = 0
    """Passes measured."""
    steps: Size = 0
    """Steps measured. 0: the figures are those of an attempt that failed."""
    retries: Size = 0
    """CUDA: how often the allocator had to empty its cache and ask again."""
    library: str | None = None
    """The library of the kernels, such as `oneDNN 3.7.1` or `cuDNN 9.10.2`."""
    skipped: Size = 0
    """fp16: measured steps without an update, because gradients overflowed."""


class Answer(Measured, frozen=True, kw_only=True):
    """The answer of a child."""

    ratio: Amount | None = None  # seconds of a step over those of the rival
    fresh: bool = False  # whether the next probe in this child would measure the same as in a new one
    misuse: dict[str, str] | None = None  # the parts of a MisuseError: what the user has to correct


class Probed(Measured, frozen=True, kw_only=True):
    """The figures of a probe, and the circumstances in which they were measured."""

    candidate: Candidate
    """The knobs."""
    device: str
    """The device: `cpu`, `cuda:0`."""
    title: str | None = None
    """The processor's or the card's name."""
    engine: str | None
    """The kernel that ran the cell; None if the device does not have the one asked for."""
    budget_bytes: Size
    """Bytes that the process was allowed to use."""
    committed_budget_bytes: Size | None = None
    """CPU: bytes that it was allowed to commit; None without a limit."""
    torch: str | None = None
    """The version of torch; None if it is unknown."""
    started: str
    """Start of the probe, in UTC (ISO 8601)."""
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e30)]
    """Seconds of the whole probe, the start of a child included."""

    def __post_init__(self) -> None:
        if self.verdict.ran and (self.peak_bytes is None or self.seconds_per_step is None or not self.steps):
            raise MisuseError(
                rule=f"A record of {self.verdict.name} has a peak and a time, of at least one step",
                got=f"got {self.peak_bytes}, {self.seconds_per_step} and {self.steps}",
                advice="Measure a step first.",
            )
        if self.terms is not None and (missing := {*TERMS} - self.terms.keys()):
            raise MisuseError(
                rule="The terms of a record are all summands of its peak",
                got=f"{min(missing)} is missing",
                advice="Leave the record out.",
            )
        if self.verdict is Verdict.BROKEN and not self.error:
            raise MisuseError(rule="A record of BROKEN has its error", got="got none", advice="Add the traceback.")

    @property
    def time_spread(self) -> float | None:
        """By which share the median pass took longer than the fastest one; None if no pass was timed."""
        if not self.seconds_per_pass or not self.fastest_pass_seconds:
            return None
        return max(0.0, self.seconds_per_pass / self.fastest_pass_seconds - 1)


class Record(Probed, frozen=True, kw_only=True):
    """The result of a probe. Checked when it is made; JSON keeps it unchanged.

    `oomguard.probe` makes them; this one is made by hand, since it is of a probe that ran out of memory.

    >>> request = {"spec": Spec(cell="gru", seq=20), "candidate": Candidate(microbatch=32), "device": "cpu"}
    >>> result = {"engine": "native", "budget_bytes": 300 << 20, "started": "2026-01-31T12:00:00", "seconds": 1.5}
    >>> record = Record(verdict=Verdict.OOM, message="An allocation was refused.", **request, **result)
    >>> record.verdict.ran, record.peak_bytes, record.verdict.advice.partition(":")[0]
    (False, None, 'Memory ran out')
    """

    spec: Spec
    """The model, its data and optimizer."""
    rival: Candidate | None = None
    """The candidate that ran by turns with this one; None if it ran alone."""
    ratio: Amount | None = None
    """Seconds of a step over those of the rival: the median of neighbouring turns. None if one of the two failed,
    and then the verdict is of that one."""

    def __repr__(self) -> str:
        from oomguard._report.notebook import record_line

        return f"<Record {record_line(self)}>"

    def _repr_html_(self) -> str:
        """The record as a notebook shows it."""
        from oomguard._report.notebook import record_html

        return record_html(self)


class TaskRecord(Probed, frozen=True, kw_only=True):
    """The result of a probe of a task.

    >>> import oomguard, torch
    >>> task = oomguard.Task(model=lambda: torch.nn.GRU(3, 4), loss=lambda model, batch: model(batch)[0].mean(),
    ...                      batch=lambda rows, steps: torch.randn(steps, rows, 3))
    >>> record = oomguard.probe(task, microbatch=2, steps=5, threads=1)
    >>> record.verdict.name, record.batch, record.seq
    ('FITS', 2, 5)
    """

    task: str
    """The name of the task."""
    batch: int
    """Rows of the batch."""
    seq: int | None
    """Time steps that were asked for; None for the longest samples of the task's data."""

    def __repr__(self) -> str:
        from oomguard._report.notebook import record_line

        return f"<TaskRecord {record_line(self)}>"

    def _repr_html_(self) -> str:
        """The record as a notebook shows it."""
        from oomguard._report.notebook import record_html

        return record_html(self)


def make_record(request: Request, measured: Measured, began: datetime, title: str | None = None) -> Record:
    engine: str | None = None
    with suppress(MisuseError):  # the device does not have the one asked for
        engine = request.engine
    paired: dict[str, Any] = {"rival": request.rival, "ratio": measured.ratio if isinstance(measured, Answer) else None}
    return Record(spec=request.spec, engine=engine, **paired, **_circumstances(request, measured, began, title))


def make_task_record(request: TaskRequest, measured: Measured, began: datetime, title: str | None) -> TaskRecord:
    knobs = request.candidate
    rows = request.rows or knobs.microbatch * knobs.accumulation
    own: dict[str, Any] = {"task": request.name, "batch": rows, "seq": request.seq, "engine": None}
    return TaskRecord(**own, **_circumstances(request, measured, began, title))


def _circumstances(request: Limited, measured: Measured, began: datetime, title: str | None) -> dict[str, Any]:
    return {name: getattr(measured, name) for name in Measured.__struct_fields__} | {
        "candidate": request.candidate,
        "device": request.device,
        "title": title,
        "budget_bytes": request.budget_bytes,
        "committed_budget_bytes": request.committed_bytes,
        "torch": torch_version(),
        "started": began.isoformat(timespec="milliseconds"),
        "seconds": (datetime.now(UTC) - began).total_seconds(),
    }


def check_seconds(name: str, seconds: object) -> None:
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds <= MAX_SECONDS:
        form = f"more than 0 and at most {MAX_SECONDS:,} s"
        raise wrong(name, form, seconds, "Give a number of seconds such as 60.")


@cache
def torch_version() -> str | None:
    """Read torch's version from its package, without importing torch."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


class Ledger:
    """A file of records. Its directories are created; an existing file is continued.

    >>> Ledger("nowhere/records.jsonl").read()
    []
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def append(self, record: Record) -> None:
        """Write one record, and return once it is on the disk."""
        with self._file_errors():
            append_line(self.path, msgspec.json.encode(record))

    def read(self) -> list[Record]:
        """Return all records in order. A line that cannot be read is left out, with a warning that names it."""
        with self._file_errors():
            return read_values(self.path, Record)

    def _file_errors(self) -> AbstractContextManager[None]:
        rule = "A ledger must be a file that can be read and written"
        return file_errors(rule, self.path, "Give a directory of yours.", use="")


def open_ledger(directory: str) -> Ledger:
    """The ledger of a directory. It is made now, so that a directory that cannot be written is known before a probe."""
    if not directory:
        raise MisuseError(
            rule="--ledger takes a directory", got="got nothing", advice="Name one, such as --ledger runs."
        )
    ledger = Ledger(Path(directory) / RECORDS)
    with ledger._file_errors():
        ledger.path.parent.mkdir(parents=True, exist_ok=True)
        with opened(ledger.path, os.O_RDWR | os.O_APPEND | os.O_CREAT):
            return ledger
