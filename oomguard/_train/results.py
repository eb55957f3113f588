"""What `export` and `shrink` return, and their checks that come before PyTorch is imported."""

from pathlib import Path

import msgspec

from oomguard._core.errors import MisuseError, check_choice, flag, shown
from oomguard._core.units import format_bytes
from oomguard._train.settings import check_run

FORMATS = ("state_dict", "torchscript", "onnx")
USUAL_FILES = {"state_dict": "model.pt", "torchscript": "model.ts", "onnx": "model.onnx"}


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """A model that was written for other programs."""

    path: str
    format: str
    size_bytes: int
    difference: float | None  # largest difference from the outputs of `predict`; None: it could not be checked
    notes: tuple[str, ...]  # how it was checked, what goes in and comes out, and what the file lacks

    def __str__(self) -> str:
        return "\n".join([f"{self.path}: {self.format}, {format_bytes(self.size_bytes)}.", *self.notes])


class Shrunk(msgspec.Struct, frozen=True, kw_only=True):
    """A run with a smaller model, which can be resumed to fine-tune it."""

    run: str
    hidden: int  # hidden size of a direction of a layer now
    hidden_before: int
    parameters: int  # number of weights now
    parameters_before: int
    peak_bytes: int  # estimated peak of a training step now
    peak_before_bytes: int
    loss: float | None  # validation loss before fine-tuning; None: the run names no data for validation
    loss_before: float | None
    notes: tuple[str, ...]

    def __str__(self) -> str:
        weights = f"{self.parameters:,} weights instead of {self.parameters_before:,}"
        peaks = f"{format_bytes(self.peak_bytes)} instead of {format_bytes(self.peak_before_bytes)}"
        lines = [
            f"{self.run}: hidden {self.hidden:,} instead of {self.hidden_before:,}, {weights}.",
            f"Estimated peak of a training step: {peaks}.",
        ]
        if self.loss is not None:
            lines.append(f"Validation loss before fine-tuning: {self.loss:.6g} instead of {self.loss_before:.6g}.")
        return "\n".join([*lines, *self.notes])


def check_export(run: Path, to: str, output: str | None, *, force: bool) -> Path:
    """The file to write; raises if the run, the format or the file is not as it must be."""
    check_choice("to", to, FORMATS)
    check_run(run)
    path = Path(output or USUAL_FILES[to])
    if path.is_dir():
        advice = f"Give a file, such as {path / USUAL_FILES[to]}."
        raise MisuseError(rule="--output must be a file", got=f"{shown(str(path))} is a directory", advice=advice)
    if path.exists() and not force:
        advice = "Add --force to replace it, or give another --output."
        raise MisuseError(rule="--output must be a new file", got=f"{path} exists", advice=advice)
    return path


def check_shrink(run: Path, hidden: object, output: str | None) -> tuple[float, Path]:
    """The share of hidden units to keep and the directory of the new run; raises if one is not as it must be."""
    share = hidden
    if isinstance(share, str):
        try:
            share = float(share)
        except ValueError:
            share = None
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share < 1:
        rule, got = f"{flag('hidden')} is the share of hidden units to keep, between 0 and 1", f"got {shown(hidden)}"
        raise MisuseError(rule=rule, got=got, advice="Write it as 0.75.")
    check_run(run)
    path = Path(output or f"{run}-{share:g}")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        advice = "Give another --output."
        raise MisuseError(rule="A smaller run needs a new directory", got=f"{path} exists", advice=advice)
    return float(share), path
