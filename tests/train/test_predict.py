"""Predictions are the model's outputs in the units of the data, in every format."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plans import numbers, plan_of

import oomguard
from oomguard._core.errors import MisuseError
from oomguard._rnn import Microbatch, evaluate, outputs
from oomguard._rnn.model import Recurrent, build
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import Spec
from oomguard._train import evaluate as predict_file


def trained(run: Path, data: Any = None, plan: Any = None, **options: Any) -> Any:
    usual: dict[str, Any] = {"validation": 0, "epochs": 2, "run": str(run), "lr": 0.01}
    return oomguard.train(plan or plan_of(), numbers() if data is None else data, **usual | options)


def test_predictions_are_the_outputs_of_the_model(tmp_path: Path) -> None:
    result = trained(tmp_path, normalise="none")
    data = numbers(rows=7, seed=1)
    with torch.no_grad():
        own, _ = result.model(torch.from_numpy(data[..., :2]).transpose(0, 1), None)
    assert np.allclose(oomguard.predict(str(tmp_path), data), own.transpose(0, 1).numpy(), atol=1e-6)


def test_predictions_are_in_the_units_of_the_targets(tmp_path: Path) -> None:
    data = numbers(rows=60)
    data[..., 2] = data[..., 2] * 1000 + 50_000
    trained(tmp_path, data, normalise="both", epochs=1)
    predictions = oomguard.predict(str(tmp_path), data)
    assert 45_000 < predictions.mean() < 55_000


def test_new_data_needs_no_targets(tmp_path: Path) -> None:
    trained(tmp_path, normalise="both")
    data = numbers(rows=7, seed=1)
    assert np.array_equal(oomguard.predict(str(tmp_path), data[..., :2]), oomguard.predict(str(tmp_path), data))


@pytest.mark.parametrize("columns", ["a,b", "a,y,b", "b,extra,a"])
def test_a_table_needs_no_target_column(tmp_path: Path, columns: str) -> None:
    data = numbers(rows=8).reshape(-1, 3)
    whole, new = tmp_path / "whole.csv", tmp_path / "new.csv"
    np.savetxt(whole, data, delimiter=",", header="a,b,y", comments="")
    values = {"a": data[:, 0], "b": data[:, 1], "y": 0 * data[:, 2], "extra": data[:, 2]}
    np.savetxt(
        new,
        np.stack([values[column] for column in columns.split(",")], axis=1),
        delimiter=",",
        header=columns,
        comments="",
    )
    trained(tmp_path / "run", str(whole), columns=("a", "b"), target=("y",))
    wanted = oomguard.predict(str(tmp_path / "run"), str(whole))
    assert np.allclose(oomguard.predict(str(tmp_path / "run"), str(new)), wanted, atol=1e-6)


def test_the_last_step_of_a_series_gets_a_prediction(tmp_path: Path) -> None:
    series = np.cumsum(np.random.default_rng(0).normal(size=(120, 2)), axis=0).astype(np.float32)
    trained(tmp_path, series, plan=plan_of(outputs=2))
    predictions = oomguard.predict(str(tmp_path), series)
    assert int(np.isfinite(predictions[..., 0]).sum()) == 120


@pytest.mark.parametrize("output", ["predictions.npy", "predictions.csv"])
def test_predictions_in_a_file_equal_those_in_memory(tmp_path: Path, output: str) -> None:
    trained(tmp_path / "run")
    data = numbers(rows=9, seed=1)
    wanted = oomguard.predict(str(tmp_path / "run"), data)
    path = oomguard.predict(str(tmp_path / "run"), data, output=str(tmp_path / output))
    if output.endswith("npy"):
        assert np.array_equal(np.load(path), wanted)
    else:
        lines = np.loadtxt(path, delimiter=",", skiprows=1)
        assert np.array_equal(lines[:, :2], [[n, t] for n in range(9) for t in range(6)])
        assert np.allclose(lines[:, 2], wanted.ravel())


def test_predictions_of_a_table_name_the_series_and_its_first_row(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    rows = [("é" if i % 3 == 0 else '"x, y"', i) for i in range(12)]
    path.write_text("shop,a,b,y\n" + "".join(f"{shop},{i},{i},{i}\n" for shop, i in rows), encoding="utf-8")
    trained(tmp_path / "run", str(path), id="shop", stride=6)
    output = oomguard.predict(str(tmp_path / "run"), str(path), output=str(tmp_path / "new" / "p.csv"))
    with open(output, newline="", encoding="utf-8") as file:
        lines = [*csv.DictReader(file)]
    firsts = {(line["sequence"], line["id"], line["first_row"]) for line in lines}
    # rows as an editor shows them, with the header as row 1
    assert sorted(firsts) == [("0", "é", "2"), ("1", "x, y", "3"), ("2", "x, y", "12")]
    assert [line["step"] for line in lines] == [str(step) for steps in (4, 6, 2) for step in range(steps)]


def test_predictions_of_a_long_series_name_the_first_row_of_each_window(tmp_path: Path) -> None:
    trained(tmp_path / "run", numbers(rows=5).reshape(-1, 3))
    output = oomguard.predict(str(tmp_path / "run"), numbers(rows=2).reshape(-1, 3), output=str(tmp_path / "p.csv"))
    with open(output, newline="") as file:
        assert [line["first_row"] for line in csv.DictReader(file)] == ["0"] * 6 + ["6"] * 6


def test_predictions_after_the_end_of_a_short_sequence_are_missing(tmp_path: Path) -> None:
    pairs = [(sequence[: 2 + i % 5, :2], sequence[: 2 + i % 5, 2:]) for i, sequence in enumerate(numbers())]
    trained(tmp_path, pairs)
    predictions = oomguard.predict(str(tmp_path), pairs[:7])
    assert [int(np.isfinite(row).sum()) for row in predictions] == [2, 3, 4, 5, 6, 2, 3]


def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("so we beat on, boats against the current. " * 20)
    return str(path)


def test_predictions_of_text_are_tokens_or_probabilities(tmp_path: Path) -> None:
    plan = plan_of(vocab=40, features=None, seq=10)
    trained(tmp_path / "run", text(tmp_path), plan=plan, characters=True)
    likeliest = oomguard.predict(str(tmp_path / "run"), text(tmp_path))
    shares = oomguard.predict(str(tmp_path / "run"), text(tmp_path), probabilities=True)
    real = likeliest >= 0
    assert np.allclose(shares[real].sum(-1), 1, atol=1e-5)
    assert np.array_equal(shares[real].argmax(-1), likeliest[real])


def test_new_text_uses_the_vocabulary_of_the_training(tmp_path: Path) -> None:
    old, new = tmp_path / "old.txt", tmp_path / "new.txt"
    old.write_text("abcd" * 400)
    new.write_text("bcd" * 40)
    plan = plan_of(vocab=4, features=None, seq=10)
    result = trained(tmp_path / "run", str(old), plan=plan, characters=True)
    tokens = torch.tensor([("abcd".index(character)) for character in "bcd" * 40]).reshape(12, 10)
    with torch.no_grad():
        own, _ = result.model(tokens.T, None)
    assert np.array_equal(oomguard.predict(str(tmp_path / "run"), str(new)), own.argmax(-1).T.numpy())


def test_an_unknown_character_is_named_in_the_error(tmp_path: Path) -> None:
    old, new = tmp_path / "old.txt", tmp_path / "new.txt"
    old.write_text("abcd" * 40)
    new.write_text("abxd")
    trained(tmp_path / "run", str(old), plan=plan_of(vocab=9, features=None), characters=True)
    with pytest.raises(MisuseError, match=r"new\.txt, character 2 is 'x'.*trained without it"):
        oomguard.predict(str(tmp_path / "run"), str(new))


def test_predictions_use_the_best_checkpoint_by_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from oomguard._train import loop

    losses = iter([1.0, 2.0])
    monkeypatch.setattr(loop, "validate", lambda *_: next(losses))
    trained(tmp_path, validation=0.2, normalise="none")
    best = predict_file.find_checkpoint(tmp_path)
    assert best.step == 4
    assert best.state.best == 1.0


def test_running_out_of_memory_halves_the_microbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path)
    data, rows = numbers(rows=9, seed=1), []
    wanted = oomguard.predict(str(tmp_path), data)

    def failing(model: Any, batch: Microbatch, candidate: Candidate) -> Any:
        rows.append(batch.inputs.shape[1])
        if rows[-1] > 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return outputs(model, batch, candidate)

    monkeypatch.setattr(predict_file, "outputs", failing)
    assert np.allclose(oomguard.predict(str(tmp_path), data), wanted, atol=1e-6)
    assert max(rows[-3:]) <= 4


@pytest.mark.parametrize("segments", [1, 3, 5])
@pytest.mark.parametrize("lengths", [None, [5, 3, 4]])
@pytest.mark.parametrize(
    "fields", [{}, {"head": "last-step"}, {"bidirectional": True}, {"batch_first": True, "cell": "lstm"}], ids=str
)
def test_an_evaluation_in_segments_equals_the_whole(
    fields: dict[str, Any], lengths: list[int] | None, segments: int
) -> None:
    usual: dict[str, Any] = {"cell": "gru", "seq": 5, "features": 2, "hidden": 4, "batch": 3}
    spec = Spec(**usual | fields)
    model = build(spec).eval()
    inputs, shape = torch.randn(3, 5, 2), (3, 5, 1) if spec.head == "per-step" else (3, 1)
    targets = torch.randn(shape)
    if not spec.batch_first:
        inputs = inputs.transpose(0, 1)
        targets = targets.transpose(0, 1) if spec.head == "per-step" else targets
    batch = Microbatch(inputs, targets, None if lengths is None else torch.tensor(lengths))
    with torch.no_grad():
        whole, _ = model(inputs, None, batch.lengths)
    if spec.head == "per-step" and not spec.batch_first:
        whole, targets = whole.transpose(0, 1), targets.transpose(0, 1)
    in_segments = outputs(model, batch, Candidate(microbatch=3, segments=segments))
    squares = (whole - targets) ** 2
    if lengths is not None and spec.head == "per-step":
        mask = torch.arange(5) < torch.tensor(lengths)[:, None]
        squares, whole, in_segments = squares[mask], whole[mask], in_segments[mask]
    assert torch.allclose(in_segments, whole, atol=1e-6)
    total = evaluate(model, batch, Candidate(microbatch=3, segments=segments))
    assert float(total) == pytest.approx(float(squares.sum()), rel=1e-5)


class Doubled(Recurrent):
    """A custom model with the weights of the spec's own, but other outputs."""

    def forward(self, *given: Any) -> Any:
        values, state = super().forward(*given)
        return 2 * values, state

    def advance(self, *given: Any) -> Any:
        hidden, state = super().advance(*given)
        return hidden * 0, state


def test_a_custom_model_is_built_again_by_its_name(tmp_path: Path) -> None:
    trained(tmp_path, model=Doubled)
    predictions = oomguard.predict(str(tmp_path), numbers(rows=3))
    assert np.ptp(predictions) < 1e-6  # its head does not see the inputs


def test_a_custom_model_without_a_name_must_be_passed_again(tmp_path: Path) -> None:
    trained(tmp_path, model=lambda spec: Doubled(spec))
    with pytest.raises(MisuseError, match=r"<lambda>.*cannot be imported.*as model="):
        oomguard.predict(str(tmp_path), numbers(rows=3))
    assert np.ptp(oomguard.predict(str(tmp_path), numbers(rows=3), model=Doubled)) < 1e-6


def test_predicting_without_a_trained_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="no checkpoint"):
        oomguard.predict(str(tmp_path), numbers())


def test_an_unknown_suffix_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"\.npy or \.csv"):
        oomguard.predict(str(tmp_path), numbers(), output="predictions.xlsx")
