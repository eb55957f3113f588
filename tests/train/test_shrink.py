"""Pruned models: units that are not used change nothing, the rest is cut in the right places, and training goes on."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train.ready import run_of

import oomguard
from oomguard._cli.app import run as command
from oomguard._core.errors import MisuseError
from oomguard._rnn import Microbatch
from oomguard._rnn.model import Recurrent
from oomguard._train.shrink import measure_activity, pruned, usage

torch.set_num_threads(1)


def silence(model: Recurrent, units: dict[tuple[int, int], list[int]]) -> None:
    """Let nothing read some hidden units of a layer and direction."""
    spec = model.spec
    with torch.no_grad():
        for (layer, direction), numbers in units.items():
            own = model.direction(layer, direction)
            if spec.projection:
                own.get_parameter("weight_hr_l0")[:, numbers] = 0
                continue
            own.get_parameter("weight_hh_l0")[:, numbers] = 0
            columns = [direction * spec.hidden + number for number in numbers]
            if layer + 1 == spec.layers:
                model.head.weight[:, columns] = 0
            else:
                for other in range(spec.directions):
                    model.direction(layer + 1, other).get_parameter("weight_ih_l0")[:, columns] = 0


def model_of(**fields: Any) -> Recurrent:
    given: dict[str, Any] = {"cell": "lstm", "seq": 7, "features": 3, "hidden": 6, "layers": 3}
    return Recurrent(oomguard.Spec(**given | fields)).double().eval()


def inputs_of(model: Recurrent) -> torch.Tensor:
    shape = (4, 7) if model.spec.batch_first else (7, 4)
    if model.spec.vocab is not None:
        return torch.randint(model.spec.vocab, shape)
    return torch.randn(*shape, model.spec.inputs, dtype=torch.float64)


SHAPES: list[dict[str, Any]] = [
    {"cell": "lstm"},
    {"cell": "gru"},
    {"cell": "rnn"},
    {"cell": "rnn", "nonlinearity": "relu", "layers": 1},
    {"cell": "lstm", "bidirectional": True},
    {"cell": "gru", "bidirectional": True, "dropout": 0.2, "batch_first": True},  # a call for each layer
    {"cell": "lstm", "projection": 2},
    {"cell": "lstm", "projection": 2, "bidirectional": True, "layers": 2},
    {"cell": "gru", "vocab": 9, "features": None, "embedding": 5, "head": "last-step"},
]


@pytest.mark.parametrize("fields", SHAPES, ids=str)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1000))
def test_units_that_nothing_reads_can_go_without_a_change(fields: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    model = model_of(**fields)
    spec = model.spec
    unused = {(i, d): torch.randperm(6)[:2].tolist() for i in range(spec.layers) for d in range(spec.directions)}
    silence(model, unused)
    smaller = pruned(model, 4).double().eval()
    assert smaller.spec.hidden == 4
    inputs = inputs_of(model)
    assert torch.allclose(smaller(inputs, None)[0], model(inputs, None)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fields", SHAPES, ids=str)
def test_units_that_are_read_do_count(fields: dict[str, Any]) -> None:
    """Otherwise the test above could not fail."""
    torch.manual_seed(0)
    model = model_of(**fields)
    smaller, inputs = pruned(model, 4).double().eval(), inputs_of(model)
    assert not torch.allclose(smaller(inputs, None)[0], model(inputs, None)[0], atol=1e-6)


def test_units_that_are_never_active_go_first() -> None:
    torch.manual_seed(0)
    model = model_of(cell="gru", layers=1)
    with torch.no_grad():  # the new value of units 1 and 4 is 0 at every step
        for name, weight in model.direction(0, 0).named_parameters():
            weight[[12 + 1, 12 + 4]] = 0
            weight[[12 + 0]] += 0.5 if name == "bias_ih_l0" else 0
    activity = measure_activity(model, Microbatch(inputs_of(model), torch.zeros(0)))
    assert activity[0, 0][[1, 4]].tolist() == [0.0, 0.0]
    inputs = inputs_of(model)
    smaller = pruned(model, 4, activity).double()
    assert torch.allclose(smaller(inputs, None)[0], model(inputs, None)[0], atol=1e-12)
    assert usage(model, None)[0, 0].min() > 0


@pytest.mark.parametrize("both", [False, True])
def test_activity_does_not_count_padding(both: bool) -> None:
    torch.manual_seed(0)
    model = model_of(bidirectional=both)
    inputs = inputs_of(model)
    lengths = torch.tensor([7, 3, 2, 5])
    other = inputs.clone()
    for row, length in enumerate(lengths.tolist()):
        other[length:, row] = 9.0
    found = [measure_activity(model, Microbatch(values, torch.zeros(0), lengths)) for values in (inputs, other)]
    assert found[0].keys() == {(layer, side) for layer in range(3) for side in range(2 if both else 1)}
    assert all(torch.equal(found[0][place], found[1][place]) for place in found[0])


# ---- runs


def test_a_shrunk_run_is_fine_tuned_by_resuming_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = run_of(tmp_path, steps=30, hidden=12)
    assert command(["shrink", str(run), "--hidden", "0.5", "--output", str(tmp_path / "a half"), "--quiet"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "hidden 6 instead of 12" in said
    assert "Estimated peak of a training step:" in said
    assert "Validation loss before fine-tuning:" in said
    resumed = f"oomguard resume '{tmp_path / 'a half'}' --epochs 1"
    assert resumed.replace(" ", "") in said.replace(" ", "")  # a long path is wrapped
    plan = oomguard.load_plan(tmp_path / "a half" / "plan.json")
    assert isinstance(plan, oomguard.Plan)
    assert plan.spec.hidden == 6
    assert plan.records == ()
    with warnings.catch_warnings(action="ignore"):
        result = oomguard.resume(tmp_path / "a half", steps=30, progress=False)
    assert result.steps == 30
    assert result.model.spec.hidden == 6


def test_a_shrunk_model_begins_with_the_weights_of_the_larger(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, steps=30)
    done = oomguard.shrink(run, 0.75, output=str(tmp_path / "new"), progress=False)
    spec = oomguard.load_plan(run).spec  # type: ignore[union-attr]
    larger = oomguard.load_weights(run, oomguard.Recurrent(spec))
    smaller = oomguard.Recurrent(oomguard.load_plan(tmp_path / "new").spec)  # type: ignore[union-attr]
    oomguard.load_weights(tmp_path / "new", smaller)
    assert torch.equal(smaller.head.bias, larger.head.bias)
    rows = {tuple(row) for row in larger.direction(0, 0).get_parameter("weight_ih_l0").tolist()}
    assert all(tuple(row) in rows for row in smaller.direction(0, 0).get_parameter("weight_ih_l0").tolist())
    assert done.parameters == sum(weight.numel() for weight in smaller.parameters())
    assert done.peak_bytes < done.peak_before_bytes
    assert done.loss is not None
    assert done.loss_before is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hidden", "1.5"], "--hidden is the share of hidden units to keep, between 0 and 1, but got '1.5'"),
        (["--hidden", "half"], "--hidden is the share"),
        (["--hidden", "0.99"], "must leave fewer units"),
        (["--hidden", "0.01"], "must leave fewer units"),
        (["--output", "{run}"], "needs a new directory"),
    ],
)
def test_bad_input_is_told(tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = run_of(tmp_path, hidden=4, layers=1)
    assert command(["shrink", str(run), *(word.format(run=run) for word in words), "--quiet"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert {path.name for path in tmp_path.iterdir()} == {"run", "data.npy"}


def test_tied_weights_and_too_small_layers_are_refused(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, vocab=11, features=None, embedding=8, tied=True)
    with pytest.raises(MisuseError, match="keeps its width"):
        oomguard.shrink(run, 0.5, progress=False)
