"""Exported models give what `predict` gives, in any number of rows and steps, and files are not replaced by mistake."""

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train.ready import run_of

import oomguard
from oomguard._cli.app import run as command
from oomguard._cli.flags import EXPORTED
from oomguard._core.errors import MisuseError
from oomguard._train import export as export_module
from oomguard._train.results import FORMATS

torch.set_num_threads(1)
KINDS: dict[str, dict[str, Any]] = {
    "lstm": {},
    "gru, both directions, batch first": {"cell": "gru", "bidirectional": True, "batch_first": True},
    "rnn, last step, normalised layers": {"cell": "rnn", "head": "last-step", "layer_norm": True},
    "lstm of tokens, dropout": {"vocab": 11, "features": None, "embedding": 4, "dropout": 0.3},
    "lstm of tokens, tied": {"vocab": 11, "features": None, "embedding": 8, "tied": True},
    "lstm with a projection": {"projection": 5},
}


def inputs_of(data: Any, vocab: int | None) -> torch.Tensor:
    return torch.from_numpy(data[:, :-1] if vocab else data[..., :3])


def of_file(to: str, path: Path, spec: oomguard.Spec) -> Any:
    """A function that runs the file as somebody without oomguard would."""
    if to == "torchscript":
        return torch.jit.load(str(path))  # type: ignore[no-untyped-call]
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda values: torch.from_numpy(session.run(["outputs"], {"inputs": values.numpy()})[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_gives_the_predictions_of_the_run(tmp_path: Path, kind: str) -> None:
    fields = KINDS[kind]
    last = fields.get("head") == "last-step"
    options = {"target": "3", "normalise": "both"} if last else {}
    run, data = run_of(tmp_path, options=options, **fields)
    spec = oomguard.load_plan(run / "plan.json").spec  # type: ignore[union-attr]
    values = inputs_of(data, spec.vocab)
    expected = torch.from_numpy(oomguard.predict(run, values.numpy(), progress=False, probabilities=bool(spec.vocab)))
    for to in ("torchscript", "onnx"):
        if to == "onnx" and spec.projection:
            with pytest.raises(MisuseError, match="ONNX has no LSTM with a projection"):
                oomguard.export(run, to, output=str(tmp_path / to), progress=False)
            continue
        done = oomguard.export(run, to, output=str(tmp_path / to), progress=False)
        assert done.difference is not None
        assert done.difference < 1e-4
        model = of_file(to, tmp_path / to, spec)
        made = model(values).detach()
        made = made.softmax(-1) if spec.vocab else made
        assert made.shape == expected.shape
        assert float((made - expected).abs().max()) < 1e-4 * float(expected.abs().max())
        assert model(values[:1, :2]).shape[0] == 1, "other rows and steps"


def test_a_state_dict_is_that_of_the_built_in_model(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path)
    done = oomguard.export(run, output=str(tmp_path / "model.pt"), progress=False)
    model = oomguard.Recurrent(oomguard.load_plan(run / "plan.json").spec)  # type: ignore[union-attr]
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    plain = oomguard.load_weights(run, oomguard.Recurrent(model.spec))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert done.difference is not None
    assert "Scaling is not part of it" in str(done)


@pytest.mark.parametrize("to", FORMATS)
def test_a_file_that_is_there_stays_unless_forced(tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = run_of(tmp_path, hidden=4, layers=1)
    target = tmp_path / "a file"
    target.write_text("precious")
    assert command(["export", str(run), "--to", to, "--output", str(target), "--quiet"]) == 2
    assert "exists. Add --force to replace it" in capsys.readouterr().err
    assert target.read_text() == "precious"
    assert command(["export", str(run), "--to", to, "--output", str(target), "--quiet", "--force"]) == 0
    assert "(largest difference" in " ".join(capsys.readouterr().out.split())
    assert target.stat().st_size > 100
    assert {path.name for path in tmp_path.iterdir()} == {"a file", "run", "data.npy"}


def test_a_model_that_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = run_of(tmp_path, hidden=4, layers=1)
    usual = export_module.script
    monkeypatch.setattr(export_module, "script", lambda *given: lambda values: usual(*given)(values) + 0.1)
    with pytest.raises(MisuseError, match=r"must give the outputs of predict, but they differ by up to 0\.1"):
        oomguard.export(run, "torchscript", output=str(tmp_path / "model.ts"), progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "data.npy"}


@pytest.mark.parametrize(
    ("made", "expected", "fits"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1e6, 2.0], [1e6 + 10, 2.0], True),  # rounding of the largest
        ([1.0, 2.0], [1.0, 2.001], False),
        ([float("nan"), 2.0], [float("nan"), 2.0], True),
        ([float("nan"), 2.0], [1.0, 2.0], False),
        ([float("inf"), 2.0], [float("inf"), 2.0], True),
        ([float("inf"), 2.0], [-float("inf"), 2.0], False),
        ([1.0], [1.0, 2.0], False),
    ],
)
def test_outputs_are_equal_up_to_rounding(made: list[float], expected: list[float], fits: bool) -> None:
    pairs = [(torch.tensor(made), torch.tensor(expected))]
    if fits:
        assert export_module.largest_difference(pairs) is not None
    else:
        with pytest.raises(MisuseError, match="must give the outputs of predict"):
            export_module.largest_difference(pairs)


def test_without_onnxruntime_the_file_is_written_and_said_to_be_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = run_of(tmp_path, hidden=4, layers=1)
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxruntime" else find(name))
    done = oomguard.export(run, "onnx", output=str(tmp_path / "model.onnx"), progress=False)
    assert done.difference is None
    assert "not checked, since onnxruntime is not installed" in str(done)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "onxx"], "--to must be one of state_dict, torchscript, onnx"),
        (["--output", "."], "--output must be a file"),
    ],
)
def test_bad_input_is_told(tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = run_of(tmp_path, hidden=4, layers=1)
    assert command(["export", str(run), *words, "--quiet"]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["export", str(tmp_path), "--quiet"]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err


def test_the_flag_has_all_formats() -> None:
    assert next(flag for flag in EXPORTED if flag.name == "to").choices == FORMATS


# ---- tasks


class Tagger(nn.Module):
    """It decides in Python, so TorchScript can only trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, *values: torch.Tensor) -> Any:
        return self.head(self.rnn(values[0])[0])


def task_of(model: Any = Tagger) -> oomguard.Task:
    return oomguard.Task(
        model=model,
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda rows, steps: torch.randn(rows, steps, 3),
    )


@pytest.fixture(scope="module")
def task_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, oomguard.Task]:
    run, task = tmp_path_factory.mktemp("task") / "run", task_of()
    plan = oomguard.find_feasible_config(
        task, batch=2, steps=5, threads=1, max_probes=1, timeout="5min", progress=False
    )
    with warnings.catch_warnings(action="ignore"):
        oomguard.train(plan, task, steps=2, run=str(run), progress=False)
    return run, task


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("to", FORMATS)
def test_the_model_of_a_task_is_exported(task_run: tuple[Path, oomguard.Task], tmp_path: Path, to: str) -> None:
    run, task = task_run
    done = oomguard.export(run, to, output=str(tmp_path / "m"), model=task, progress=False)
    model = oomguard.load_weights(run, Tagger()).eval()
    values = torch.randn(4, 9, 3)
    if to == "state_dict":
        read = Tagger().eval()
        read.load_state_dict(torch.load(tmp_path / "m", weights_only=True))
        made = read(values)
    elif to == "torchscript":
        assert "traced with one batch" in str(done)
        made = torch.jit.load(str(tmp_path / "m"))(values)  # type: ignore[no-untyped-call]
    else:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(tmp_path / "m"), providers=["CPUExecutionProvider"])
        made = torch.from_numpy(session.run(None, {"input0": values.numpy()})[0])
    assert torch.allclose(made, model(values), atol=1e-5)


def test_the_run_of_a_task_needs_the_task(task_run: tuple[Path, oomguard.Task], tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="one of the task"):
        oomguard.export(task_run[0], output=str(tmp_path / "m"), progress=False)


def test_the_usual_name_of_a_file_is_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_of(tmp_path, hidden=4, layers=1)
    monkeypatch.chdir(tmp_path)
    assert oomguard.export("run", progress=False).path == "model.pt"
    assert Path("model.pt").exists()
