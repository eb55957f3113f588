"""A plan remembers its data and a run its options, so that nothing has to be given twice."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas
import pytest
from plans import plan_of

import oomguard
from oomguard._cli.app import run
from oomguard._data.infer import spec_from_data
from oomguard._data.options import DataOptions
from oomguard._plan.value import Plan

WORDS = "--hidden 8 --layers 1 --batch 2 --threads 1 --max-probes 1 --precision fp32 --allocator system"


def plan_for(data: Any, fields: dict[str, Any] | None = None, **options: Any) -> Plan:
    """A plan for some data, without a search."""
    given = {"cell": "gru", "hidden": 8, "layers": 1, "batch": 2} | (fields or {})
    spec, read = spec_from_data(given, data, DataOptions(**options))
    return msgspec.structs.replace(plan_of([(2, 1), (1, 1)], **msgspec.structs.asdict(spec)), data=read)


def frame(rows: int = 12) -> Any:
    rng = np.random.default_rng(0)
    days = pandas.date_range("2024-01-01", periods=rows)
    shops = [
        {"date": day, "shop": shop, "price": rng.random(), "mood": rng.choice(["good", "bad"]), "sales": rng.random()}
        for shop in "abcd"
        for day in days
    ]
    return pandas.DataFrame(shops)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a table, its rows in a random order."""
    frame().sample(frac=1, random_state=0).to_csv(tmp_path / "sales.csv", index=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_plan_train_resume_and_predict_need_the_data_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"plan --model gru --data sales.csv --id shop --target sales {WORDS}".split()) == 0
    printed = capsys.readouterr().out
    assert "Data: sales.csv" in printed
    assert "4 series by shop of 12 steps." in printed
    assert "Run it: oomguard train plan.json\n" in printed
    assert run(["train", "plan.json", "--epochs", "2", "--run", "r"]) == 0
    assert "Inputs and targets were scaled" in capsys.readouterr().out
    assert run(["resume", "r", "--epochs", "3"]) == 0
    assert "Trained after 6 steps" in capsys.readouterr().out
    assert run(["predict", "r", "--output", "p.csv"]) == 0
    table = pandas.read_csv("p.csv")
    assert list(table.columns) == ["sequence", "id", "first_row", "step", "sales"]
    assert sorted(set(table.id)) == ["a", "b", "c", "d"]
    assert len(table) == 48


def test_a_run_resumes_from_another_directory(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for("sales.csv", id="shop", target="sales")
    oomguard.train(plan, steps=1, lr=0.5, run="r", validation=0)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert oomguard.resume(here / "r", steps=3).steps == 3
    last = pandas.read_csv(here / "r" / "metrics.csv").iloc[-1]
    assert last.lr == 0.5


def test_predicted_classes_have_their_names(here: Path) -> None:
    plan = plan_for("sales.csv", id="shop", target="mood")
    oomguard.train(plan, steps=1, run="r")
    oomguard.predict("r", output="p.csv")
    assert set(pandas.read_csv("p.csv")["class"]) <= {"good", "bad"}
    oomguard.predict("r", output="q.csv", probabilities=True)
    assert list(pandas.read_csv("q.csv").columns[-2:]) == ["bad", "good"]


def test_predictions_need_no_target_column(here: Path) -> None:
    plan = plan_for("sales.csv", id="shop", target="mood")
    oomguard.train(plan, steps=1, run="r")
    frame().drop(columns="mood").to_csv("new.csv", index=False)
    assert oomguard.predict("r", "new.csv").shape == (4, 12)


def test_predicted_text_is_characters(here: Path) -> None:
    (here / "t.txt").write_text("abcabcab" * 20)
    plan = plan_for("t.txt", {"seq": 10}, characters=True)
    oomguard.train(plan, steps=1, run="r")
    oomguard.predict("r", output="p.csv")
    assert set(pandas.read_csv("p.csv")["class"]) <= {"a", "b", "c"}


def test_a_frame_is_planned_trained_and_predicted(here: Path) -> None:
    table, device = frame(), "rtx-4090"
    plan = oomguard.find_feasible_config(cell="gru", data=table, id="shop", target="sales", device=device, hidden=8)
    assert plan.data is not None
    assert (plan.spec.features, plan.spec.lengths) == (3, {12: 4})
    assert plan.data.notes[-1] == "A step has at most 4 sequences, since there are fewer than the batch of 32."
    plan = plan_for(table, id="shop", target="sales")
    oomguard.train(plan, table, steps=1, run="r")
    assert oomguard.resume("r", table, steps=2).steps == 2
    assert oomguard.predict("r", table).shape == (4, 12, 1)


def test_targets_are_scaled_and_predictions_are_in_their_units(here: Path) -> None:
    series = np.random.default_rng(0).normal(size=(8, 6, 2)).astype(np.float32)
    series[..., 1] = series[..., 1] * 0.01 + 1000
    plan = plan_for(series, target=1)
    result = oomguard.train(plan, series, epochs=2, run="r", validation=0)
    assert result.scaled
    assert (result.loss or 0) < 10
    assert abs(oomguard.predict("r", series) - 1000).max() < 1


def test_missing_inputs_are_filled_in_training_and_prediction(here: Path) -> None:
    table = frame()
    table.loc[[1, 5, 13], "price"] = np.nan
    for fill in ("forward", "mean", "zero"):
        plan = plan_for(table, id="shop", target="sales", fill=fill)
        oomguard.train(plan, table, steps=1, run=fill)
        assert np.isfinite(oomguard.predict(fill, table)).all()


def test_a_table_is_completed_for_a_plan_without_data(here: Path) -> None:
    plan = plan_of(seq=12, features=3)
    oomguard.train(plan, "sales.csv", id="shop", target=["sales"], steps=1, run="r")
    assert oomguard.predict("r").shape == (4, 12, 1)
    oomguard.train(plan, frame(), id="shop", target=["sales"], steps=1, run="f")
    assert oomguard.predict("f", frame()).shape == (4, 12, 1)
