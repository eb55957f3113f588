"""Writes the model of a run as a file for other programs, and checks that the file gives what `predict` gives."""

import importlib.util
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oomguard._core.errors import MisuseError
from oomguard._core.progress import tell
from oomguard._core.system import file_errors
from oomguard._data.rows import Normaliser
from oomguard._plan.store import load_spec_plan
from oomguard._rnn import Microbatch, outputs
from oomguard._rnn.model import Recurrent
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._train.checkpoint import Model, build_model, load_weights
from oomguard._train.evaluate import find_checkpoint
from oomguard._train.results import Exported

TOLERANCE = 1e-4  # largest difference of an output, as a share of the largest output (at least 1)
OPSET = 17  # version of the operators of ONNX: all of torch's exporter for recurrent layers are in it
CHECKED = ((3, 11), (1, 5))  # rows and steps of what a file is checked with; both differ from those of the export
EXPORTED = (2, 7)  # rows and steps of the example that ONNX is exported with
Run = Callable[..., Any]  # a model that was read from its file


class Network(nn.Module):
    """The model of a run with its scaling. Inputs are numbers or tokens as in the data: rows x steps (x features)."""

    mean: Tensor
    std: Tensor
    target_mean: Tensor
    target_std: Tensor

    def __init__(self, model: Recurrent, normaliser: Normaliser | None, *, fills: bool) -> None:
        super().__init__()
        spec = model.spec
        self.embedding = nn.Identity() if model.embedding is None else model.embedding
        self.calls, self.head = model.calls, model.head
        self.norms = nn.ModuleList(model.norms if len(model.norms) else [nn.Identity() for _ in model.calls])
        self.time_first, self.last = not spec.batch_first, spec.head == "last-step"
        self.scales = normaliser is not None
        self.fills = fills and self.scales
        given = normaliser or Normaliser(mean=(0.0,), std=(1.0,), steps=0)
        self.restores = given.target_mean is not None
        self.register_buffer("mean", torch.tensor(given.mean, dtype=torch.float64))
        self.register_buffer("std", torch.tensor(given.std, dtype=torch.float64))
        self.register_buffer("target_mean", torch.tensor(given.target_mean or (0.0,)))
        self.register_buffer("target_std", torch.tensor(given.target_std or (1.0,)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Predictions in the units of the data, or the logits of classes."""
        if self.scales:
            inputs = ((inputs.double() - self.mean) / self.std).float()
        if self.fills:
            inputs = torch.where(torch.isnan(inputs), torch.zeros_like(inputs), inputs)
        hidden = self.embedding(inputs)
        if self.time_first:
            hidden = hidden.transpose(0, 1)
        for call, norm in zip(self.calls, self.norms):  # noqa: B905 (TorchScript knows no strict)
            made, _ = call(hidden)
            hidden = norm(made)
        if self.last:
            hidden = hidden[-1] if self.time_first else hidden[:, -1]
        predicted: Tensor = self.head(hidden)
        if self.time_first and not self.last:
            predicted = predicted.transpose(0, 1)
        if self.restores:
            predicted = predicted * self.target_std + self.target_mean
        return predicted


def export_spec_run(run: Path, to: str, path: Path, model: Model = None) -> Exported:
    """Export the run of a spec."""
    checkpoint = find_checkpoint(run)
    state, spec = checkpoint.state, checkpoint.spec or load_spec_plan(run / "plan.json").spec
    tell("Building the model")
    network = build_model(model or state.model, spec).eval()
    load_weights(checkpoint, network)
    normaliser, fills = state.normaliser, state.data_options.fill == "mean"
    candidate = make_candidate(spec)
    values = [_inputs(network, normaliser, rows, steps) for rows, steps in CHECKED]
    expected = [_predicted(network, normaliser, candidate, value) for value in values]
    if to == "onnx" and spec.projection is not None:
        advice = "Take --to torchscript."
        raise MisuseError(rule="ONNX has no LSTM with a projection", got="this run has one", advice=advice)
    whole, how = (
        Network(network, normaliser, fills=fills).eval(),
        "Its outputs are those of predict for other rows and steps too",
    )
    with written(path) as file:
        if to == "state_dict":
            torch.save(network.state_dict(), file)
            read = build_model(model or state.model, spec).eval()
            read.load_state_dict(torch.load(file, weights_only=True))
            check: Run = Network(read, normaliser, fills=fills).eval()
        elif to == "torchscript":
            check = script(whole, file)
        else:
            example = _inputs(network, normaliser, *EXPORTED)
            axes = {"inputs": {0: "rows", 1: "steps"}, "outputs": {0: "rows"} | ({} if whole.last else {1: "steps"})}
            write_onnx(whole, (example,), file, ["inputs"], axes)
            check = onnx_run(file)
        with torch.no_grad():
            difference = largest_difference(
                [(check(value), other) for value, other in zip(values, expected, strict=True)]
            )
    classes = spec.loss == "cross-entropy"
    notes = [_form(network, to, classes=classes), _scaling(normaliser, to)]
    return exported(path, to, difference, how, notes)


def exported(path: Path, to: str, difference: float | None, how: str, notes: list[str]) -> Exported:
    if difference is None:
        how = 'The outputs were not checked, since onnxruntime is not installed: pip install "oomguard[onnx]"'
    else:
        how = f"{how} (largest difference {difference:.2g})"
    notes = [f"{how}.", *filter(None, notes)]
    size_bytes = path.stat().st_size
    return Exported(path=str(path), format=to, size_bytes=size_bytes, difference=difference, notes=tuple(notes))


def _form(model: Recurrent, to: str, *, classes: bool) -> str:
    if to == "state_dict":
        return "Load it with model.load_state_dict(torch.load(file, weights_only=True)), into oomguard.Recurrent(spec)."
    inputs = "rows x steps of tokens" if model.embedding is not None else "rows x steps x features"
    logits = " (logits: the predicted class is the largest)" if classes else ""
    predicted = "rows x outputs" if model.spec.head == "last-step" else "rows x steps x outputs"
    return f"Inputs: {inputs}, any number of rows and steps, without padding. Outputs: {predicted}{logits}."


def _scaling(normaliser: Normaliser | None, to: str) -> str:
    if normaliser is None:
        return ""
    if to != "state_dict":
        return "Scaling is part of it: inputs and outputs are in the units of the data."
    return (
        "Scaling is not part of it: the inputs of the model have mean 0 and standard deviation 1"
        + (", and so have its outputs" if normaliser.target_mean is not None else "")
        + ". --to torchscript and --to onnx include it."
    )


def _inputs(model: Recurrent, normaliser: Normaliser | None, rows: int, steps: int) -> Tensor:
    """Random inputs in the units of the data, the same every time."""
    numbers, spec = torch.Generator().manual_seed(rows), model.spec
    if spec.vocab is not None:
        return torch.randint(spec.vocab, (rows, steps), generator=numbers)
    drawn = torch.randn(rows, steps, spec.inputs, generator=numbers)
    if normaliser is None:
        return drawn
    return (drawn.double() * torch.tensor(normaliser.std) + torch.tensor(normaliser.mean)).float()


def _predicted(model: Recurrent, normaliser: Normaliser | None, candidate: Candidate, values: Tensor) -> Tensor:
    """The outputs of the code that `predict` runs, in fp32."""
    if normaliser is not None:
        values = torch.from_numpy(normaliser.applied((values.numpy(), values.numpy()[..., :1]))[0])
    batch = values if model.spec.batch_first else values.transpose(0, 1)
    made = outputs(model, Microbatch(batch, torch.zeros(0)), candidate)
    return made if normaliser is None else torch.from_numpy(normaliser.restored(made.numpy()))


def largest_difference(pairs: list[tuple[Any, Any]]) -> float | None:
    """The largest difference of outputs; raises if it is more than rounding. None if there is nothing to compare."""
    if any(made is None for made, _ in pairs):
        return None
    most, bound = 0.0, 0.0
    for made, expected in pairs:
        if made.shape != expected.shape:
            raise _differs(f"their shape is {tuple(made.shape)} and not {tuple(expected.shape)}")
        same = (made == expected) | (made.isnan() & expected.isnan())
        gap = torch.where(same, 0.0, (made - expected).abs()).nan_to_num(nan=math.inf)
        most = max(most, float(gap.max()))
        bound = max(bound, TOLERANCE * max(1.0, float(expected.abs().nan_to_num(nan=0.0).max())))
    if most > bound:
        raise _differs(f"they differ by up to {most:.3g}")
    return most


def _differs(got: str) -> MisuseError:
    advice = "Nothing was written. Take --to state_dict, which is the weights alone."
    return MisuseError(rule="An exported model must give the outputs of predict", got=got, advice=advice)


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A file that gets its name once it is complete and was checked."""
    with file_errors("An exported model needs a writable file", path, "Give another --output.", use="written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unfinished-") as folder:
            file = Path(folder) / path.name
            yield file
            os.replace(file, path)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide that torch calls TorchScript and its exporter old: the newer one fails for recurrent layers (torch 2.13)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def script(model: nn.Module, file: Path, example: tuple[Any, ...] | None = None) -> Run:
    """Write a module as TorchScript, traced if there is an example, and read it."""
    with _without_warnings():
        if example is None:
            made = torch.jit.script(model)
        else:
            made = torch.jit.trace(model, example)  # type: ignore[no-untyped-call]
        torch.jit.save(made, str(file))
        loaded: Run = torch.jit.load(str(file))  # type: ignore[no-untyped-call]
    return loaded


def write_onnx(
    model: nn.Module, example: tuple[Any, ...], file: Path, names: list[str], axes: dict[str, dict[int, str]]
) -> None:
    """Write a module as ONNX.

    With torch 2.13, the exporter by torch.export fixes the number of steps of recurrent layers, so it is the older one.
    """
    if importlib.util.find_spec("onnx") is None:
        rule, advice = "--to onnx needs the package onnx", 'Run pip install "oomguard[onnx]".'
        raise MisuseError(rule=rule, got="it is not installed", advice=advice)
    with _without_warnings():
        torch.onnx.export(
            model,
            example,
            str(file),
            dynamo=False,
            input_names=names,
            output_names=["outputs"],
            dynamic_axes=axes,
            opset_version=OPSET,
        )


def onnx_run(file: Path) -> Run:
    """A function that runs an ONNX file and returns its first output; None if onnxruntime is not installed."""
    if importlib.util.find_spec("onnxruntime") is None:
        return lambda *values: None
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def run(*values: Tensor) -> Tensor:
        given = dict(zip(names, (value.numpy() for value in values), strict=True))
        return torch.from_numpy(session.run(None, given)[0])

    return run
