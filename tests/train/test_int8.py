"""Predictions with weights in 8 bits: nearly the same, smaller, and what they change is told."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train.ready import run_of

import oomguard
from oomguard._cli.app import run as command
from oomguard._core.errors import MisuseError
from oomguard._core.progress import Status, listening
from oomguard._rnn import Microbatch, outputs
from oomguard._rnn.model import Recurrent
from oomguard._spec.candidate import make_candidate
from oomguard._train.quantise import measure_effect, quantise

torch.set_num_threads(1)
TOLD = (
    r"int8: weights \S+ KiB instead of \S+ KiB, [\d.]+ of the time, validation loss \S+ instead of \S+ \([+-]\S+%\)\."
)


def model_of(**fields: Any) -> Recurrent:
    torch.manual_seed(0)
    given: dict[str, Any] = {"cell": "lstm", "seq": 12, "features": 8, "hidden": 64, "layers": 2, "batch": 4}
    return Recurrent(oomguard.Spec(**given | fields)).eval()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"cell": "gru", "dropout": 0.2, "layer_norm": True},
        {"bidirectional": True, "batch_first": True},
        {"vocab": 50, "features": None, "embedding": 16, "head": "last-step"},
    ],
    ids=str,
)
@pytest.mark.parametrize("padded", [False, True])
def test_the_outputs_are_nearly_those_of_the_model(fields: dict[str, Any], padded: bool) -> None:
    model = model_of(**fields)
    spec = model.spec
    shape = (5, 12) if spec.batch_first else (12, 5)
    inputs = torch.randint(50, shape) if spec.vocab else torch.randn(*shape, 8)
    lengths = torch.tensor([12, 4, 9, 1, 7]) if padded else None
    batch, candidate = Microbatch(inputs, torch.zeros(0), lengths), make_candidate(spec)
    made, expected = outputs(quantise(model), batch, candidate), outputs(model, batch, candidate)
    if lengths is not None and spec.head == "per-step":
        real = torch.arange(12)[None] < lengths[:, None]
        made, expected = made[real], expected[real]
    error = float((made - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    assert 0 < error < 0.05


def test_the_weights_take_about_a_quarter() -> None:
    model = model_of(hidden=128)
    batch = Microbatch(torch.randn(12, 4, 8), torch.zeros(0))
    effect = measure_effect(model, quantise(model), batch, make_candidate(model.spec), (1.1, 1.0))
    assert 0.24 < effect.size_bytes / effect.size_before_bytes < 0.35
    assert effect.seconds > 0
    assert effect.seconds_before > 0
    assert "validation loss 1.1 instead of 1 (+10.00%)" in str(effect)


def test_the_command_writes_predictions_and_tells_what_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data = run_of(tmp_path, steps=20, hidden=32)
    output = str(tmp_path / "predictions.npy")
    assert command(["predict", str(run), "--precision", "int8", "--output", output]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{output}\n"
    assert re.search(TOLD, " ".join(printed.err.split()))
    plain = oomguard.predict(run, progress=False)
    made = np.load(output)
    assert made.shape == plain.shape
    assert 0 < np.abs(made - plain).max() < 0.2 * data.std()


def test_without_validation_data_the_loss_is_said_to_be_unknown(tmp_path: Path) -> None:
    run, data = run_of(tmp_path, options={"validation": 0})
    notes = list[str]()
    with listening(lambda status: notes.extend(status.notes if isinstance(status, Status) else ())):
        oomguard.predict(run, data[..., :3], precision="int8")
    assert "the validation loss is not known" in notes[0]


@pytest.mark.parametrize("fields", [{"cell": "rnn"}, {"projection": 16}], ids=str)
def test_layers_without_int8_kernels_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(MisuseError, match="PyTorch has int8 kernels for LSTM and GRU"):
        quantise(model_of(**fields))


def test_other_precisions_and_prompts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["predict", str(tmp_path), "--precision", "int4", "--quiet"]) == 2
    assert "--precision must be one of int8" in capsys.readouterr().err
    assert command(["predict", str(tmp_path), "--prompt", "a", "--precision", "int8", "--quiet"]) == 2
    assert "--precision" in capsys.readouterr().err
