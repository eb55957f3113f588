"""Metrics: one row of numbers for each logged step, in `metrics.csv` and, if asked for, in TensorBoard's event files.

Rows survive a kill, and after a resume no step is there twice.
"""

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, SupportsFloat

from oomguard._core.errors import MisuseError
from oomguard._core.system import file_errors, opened, read_lines, replace_content, write_all

if TYPE_CHECKING:  # imported when it is used: it is not installed with oomguard
    from torch.utils.tensorboard import SummaryWriter

    from oomguard._guard.events import Event

CSV = "metrics.csv"  # name of the file
COLUMNS = ("loss", "lr", "norm", "tokens_per_second", "peak_bytes", "epoch", "validation_loss")
"""Columns of the file after `step`."""
SHOWN = ("rung",)  # what event files have besides
_HEADER = ",".join(["step", *COLUMNS])
_RULE = "Metrics need a writable directory"


class Metrics:
    """The metrics of a run, in its directory.

    Rows after `last_step` are dropped: the training continues from a checkpoint and makes those steps again.
    """

    def __init__(self, directory: str | os.PathLike[str], last_step: int = 0, *, tensorboard: bool = False) -> None:
        self.path = Path(directory) / CSV
        self.last_step = last_step
        with file_errors(_RULE, self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._drop_rows_after(last_step)
        self._writer = _open_tensorboard(self.path.parent, last_step) if tensorboard else None

    def write(self, step: int, **values: SupportsFloat | None) -> None:
        """Append a row. A number that is missing or None stays empty. A kill after this call does not lose the row."""
        assert step > self.last_step, f"step {step} after {self.last_step}"
        assert not {*values} - {*COLUMNS, *SHOWN}, values
        numbers = {  # a tensor with one element is a number too
            name: int(value) if isinstance(value, int) else float(value)
            for name, value in values.items()
            if value is not None
        }
        row = ",".join([str(step), *(repr(numbers[name]) if name in numbers else "" for name in COLUMNS)])
        with file_errors(_RULE, self.path), opened(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as file:
            size_bytes = os.fstat(file).st_size
            header = "" if size_bytes else f"{_HEADER}\n"
            try:
                write_all(file, f"{header}{row}\n".encode())
            except OSError:
                os.ftruncate(file, size_bytes)  # the disk is full: the next row must not continue half of this one
                raise
        if self._writer is not None:
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, step)
        self.last_step = step

    def describe(self, plan: str) -> None:
        """Show the plan, in TensorBoard under Text."""
        if self._writer is not None:
            self._writer.add_text("plan", _indented(plan), self.last_step)

    def show(self, event: "Event") -> None:
        """Show an event, in TensorBoard under Text."""
        if self._writer is not None:
            self._writer.add_text("events", _indented(f"{event.kind}: {event.reason}"), event.step)

    def conclude(self, peak_bytes: int) -> None:
        """Show the largest peak, in TensorBoard at the last step: a short training may end before its first reading."""
        if self._writer is not None and peak_bytes:
            self._writer.add_scalar("peak_bytes", peak_bytes, self.last_step)

    def flush(self) -> None:
        """Put all rows on the disk. Called before a checkpoint that relies on them."""
        if self.path.exists():
            with opened(self.path, os.O_RDWR) as file:
                os.fsync(file)
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _drop_rows_after(self, last_step: int) -> None:
        """Continue an existing file without later steps, damaged rows and a half-written last line."""
        try:
            lines, half_line = read_lines(self.path)
        except FileNotFoundError:
            return
        header, *rows = [line.decode(errors="replace") for line in lines] or [""]
        if header and header != _HEADER:
            raise MisuseError(
                rule=f"{self.path} can only be continued with its own columns ({header})",
                got=f"this version of oomguard writes {_HEADER}",
                advice="Give another --run, or move the file away.",
            )
        intact = [row for row in rows if row.partition(",")[0].isdecimal() and row.count(",") == len(COLUMNS)]
        if len(intact) < len(rows):
            warnings.warn(f"{self.path}: dropped {len(rows) - len(intact)} damaged rows.", stacklevel=4)
        kept = [row for row in intact if int(row.partition(",")[0]) <= last_step]
        if half_line or len(kept) < len(rows):
            replace_content(self.path, "".join(f"{line}\n" for line in [header, *kept] if line).encode())


def _indented(text: str) -> str:
    """Text as Markdown shows it unchanged."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def _open_tensorboard(directory: Path, last_step: int) -> "SummaryWriter":
    """A writer of event files. TensorBoard drops what an earlier process wrote after the last step."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MisuseError(
            rule="Event files for TensorBoard need the package tensorboard",
            got=f"it could not be imported ({error})",
            advice='Run pip install "oomguard[tensorboard]", or leave --tensorboard out.',
        ) from None
    return SummaryWriter(str(directory), purge_step=last_step + 1, flush_secs=10)
