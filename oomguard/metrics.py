"""What a training tells while it runs: metrics as CSV and for TensorBoard, and events as JSON lines.

Metrics are numbers of a step, one row each; after a resume no step is there twice. Events are what was changed, when
and why. Both survive a kill.
"""

import math
import os
import warnings
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from oomguard.checks import check_whole, nearest, shown
from oomguard.errors import MisuseError
from oomguard.files import append_line, opened, read_lines, read_values, replace_content, write_all

CSV = "metrics.csv"
"""The file's name in the directory."""
_LAST = 10**15
"""The largest number of a step."""


class Metrics:
    """Numbers of each step, in `metrics.csv` of a directory and, if asked, as event files for TensorBoard beside it.

    The columns are fixed at birth: those given, those of a file that is continued, or those of the first row.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory, Metrics(directory, ["loss", "norm"]) as metrics:
    ...     metrics.write(1, loss=0.5, norm=float("inf"))
    ...     metrics.write(2, loss=0.25)
    ...     print(metrics.path.read_text())
    step,loss,norm
    1,0.5,inf
    2,0.25,
    <BLANKLINE>
    """

    def __init__(
        self, directory: str | os.PathLike[str], columns: Sequence[str] | None = None, *, tensorboard: bool = False
    ) -> None:
        self.path = Path(directory) / CSV
        self.columns = None if columns is None else _checked(columns)
        self._writer_class = _writer_class() if tensorboard else None
        self._writer: Any = None
        self._step: int | None = None  # of the last row
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._take_up(_LAST)
        except OSError as error:
            raise self._misuse(error) from None

    def write(self, step: int, **values: Any) -> None:
        """Add a row. A number that is left out, or None, stays empty; the file is the system's when this returns."""
        check_whole("the step of a row", step, 0 if self._step is None else self._step + 1, _LAST, optional=False)
        columns = _checked([*values]) if self.columns is None else self.columns
        for name in values:
            if name not in columns:
                raise MisuseError(
                    rule=f"The columns of {self.path} are {', '.join(columns)}",
                    got=f"got {shown(name)}",
                    advice=nearest(name, [*columns]),
                )
        numbers = {name: _number(name, values[name]) for name in columns if values.get(name) is not None}
        row = ",".join([str(step), *(repr(numbers[name]) if name in numbers else "" for name in columns)])
        try:
            self._append(columns, row)
        except OSError as error:
            raise self._misuse(error) from None
        self.columns = columns
        self._show(step, numbers)
        self._step = step

    def rewind(self, step: int) -> None:
        """Forget what came after a step, before it is done again: a training was taken up from a checkpoint."""
        check_whole("the step to go back to", step, 0, _LAST, optional=False)
        self.close()
        try:
            self._take_up(step)
        except OSError as error:
            raise self._misuse(error) from None
        self._step = step  # for TensorBoard too, which may have shown more than the rows that were left

    def flush(self) -> None:
        """Return once all rows are on the disk. To be called before a checkpoint that relies on them."""
        if self.path.exists():
            with opened(self.path, os.O_RDWR) as file:
                os.fsync(file)
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Give the event file of TensorBoard back. The next row begins another one."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_up(self, until: int) -> None:
        """Continue a file that is there, without its torn last line and the rows after a step."""
        try:
            lines, torn = read_lines(self.path)
        except FileNotFoundError:
            return
        header, *rows = [line.decode(errors="replace") for line in lines] or [""]
        if header:
            self._continue(header)
        whole = [row for row in rows if _is_row(row, header)]
        if len(whole) < len(rows):
            warnings.warn(f"{self.path}: {len(rows) - len(whole)} damaged rows are dropped.", stacklevel=4)
        kept = [row for row in whole if int(row.split(",")[0]) <= until]
        if torn or len(kept) < len(rows):
            replace_content(self.path, "".join(f"{line}\n" for line in [header, *kept] if line).encode())
        self._step = int(kept[-1].split(",")[0]) if kept else None

    def _continue(self, header: str) -> None:
        columns = tuple(header.split(",")[1:])
        if self.columns is not None and self.columns != columns:
            raise MisuseError(
                rule=f"{self.path} is continued with its columns ({', '.join(columns)})",
                got=f"got {', '.join(self.columns)}",
                advice="Give the same columns again, or another directory.",
            )
        self.columns = columns

    def _append(self, columns: tuple[str, ...], row: str) -> None:
        """All of the row in one call, or nothing of it."""
        with opened(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as file:
            size_bytes = os.fstat(file).st_size
            header = "" if size_bytes else ",".join(["step", *columns]) + "\n"
            try:
                write_all(file, f"{header}{row}\n".encode())
            except OSError:
                os.ftruncate(file, size_bytes)  # the disk is full: the next row must not begin in the middle of this
                raise

    def _show(self, step: int, numbers: dict[str, float]) -> None:
        """The row for TensorBoard, which is told to forget what an earlier process has shown after the last row."""
        if self._writer_class is None:
            return
        if self._writer is None:
            purge_step = None if self._step is None else self._step + 1
            self._writer = self._writer_class(str(self.path.parent), purge_step=purge_step, flush_secs=10)
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def _misuse(self, error: OSError) -> MisuseError:
        return MisuseError(
            rule="Metrics must go to a directory that can be written",
            got=f"{self.path} cannot be ({error.strerror})",
            advice="Make room there, or give a directory of yours.",
        )


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What was changed in a training, and why."""

    time: datetime
    """When."""
    step: int
    """Optimizer steps made before."""
    kind: str
    """What, in a word."""
    reason: str
    """Why, as a sentence for the user."""
    figures: dict[str, Any] = {}
    """The numbers behind the reason; those that JSON does not have are text (`nan`, `inf`)."""


class Events:
    """A file of events, one JSON line each, only ever appended to. It survives a kill at any moment.

    >>> Events("/tmp/oomguard-has-never-been-here/events.jsonl").read()
    []
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._news: deque[Event] = deque(maxlen=100)  # nobody may ask

    def append(self, step: int, kind: str, reason: str, **figures: Any) -> Event:
        """Write one event, and return it once it is on the disk."""
        plain = {name: _shown_figure(value) for name, value in figures.items()}
        event = Event(time=datetime.now(UTC), step=step, kind=kind, reason=reason, figures=plain)
        try:
            append_line(self.path, msgspec.json.encode(event))
        except OSError as error:
            raise self._misuse(error) from None
        self._news.append(event)
        return event

    def news(self) -> tuple[Event, ...]:
        """What was written since this was last asked."""
        found = tuple(self._news)
        self._news.clear()
        return found

    def read(self) -> list[Event]:
        """All events, the first first. A line that cannot be read is left out, with a warning that names it."""
        try:
            return read_values(self.path, Event)
        except OSError as error:
            raise self._misuse(error) from None

    def _misuse(self, error: OSError) -> MisuseError:
        return MisuseError(
            rule="Events must go to a file that can be read and written",
            got=f"{self.path} cannot be ({error.strerror})",
            advice="Give a file in a directory of yours.",
        )


def _writer_class() -> Any:
    """The writer that PyTorch has for TensorBoard, which is not installed with oomguard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MisuseError(
            rule="Event files for TensorBoard need the package tensorboard",
            got=f"it could not be imported ({error})",
            advice='Run pip install "oomguard[tensorboard]", or go without.',
        ) from None
    return SummaryWriter


def _checked(columns: Sequence[str]) -> tuple[str, ...]:
    wrong = [name for name in columns if not name or name == "step" or any(c in name for c in ',"\r\n')]
    if wrong or len({*columns}) < len(columns) or not columns:
        raise MisuseError(
            rule="The columns of metrics have different names without commas, quotes and line ends, none of them step",
            got=f"got {shown([*columns])}",
            advice="Name them like loss, norm, tokens_per_second.",
        )
    return tuple(columns)


def _number(name: str, value: Any) -> float:
    """A plain number; a tensor of one element is one."""
    try:
        return int(value) if isinstance(value, int) else float(value)
    except (TypeError, ValueError, RuntimeError):
        raise MisuseError(
            rule="Metrics are numbers",
            got=f"{name} is {shown(value)}",
            advice="Write what is not a number as an event.",
        ) from None


def _is_row(row: str, header: str) -> bool:
    """Whether it has a step, and as many fields as the header."""
    first, *rest = row.split(",")
    return first.isdecimal() and len(rest) == header.count(",")


def _shown_figure(value: Any) -> Any:
    """A figure as JSON has it."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(float(value))
    try:
        return msgspec.to_builtins(value, str_keys=True)
    except TypeError:
        return _shown_figure(float(value)) if hasattr(value, "__float__") else shown(value)
