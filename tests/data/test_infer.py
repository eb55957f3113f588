"""What the data says of the model, and the options that a plan keeps."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from data.making import inputs_of, numbers, saved, targets_of, written
from torch.utils.data import TensorDataset

from oomguard._core.errors import MisuseError
from oomguard._data.frames import uniform
from oomguard._data.infer import complete, spec_from_data
from oomguard._data.open import open_source
from oomguard._data.options import DataOptions, PlanData
from oomguard._spec.spec import Spec

SALES = """date,shop,price,weather,sales
2024-01-02,a,2,sun,20
2024-01-01,a,1,rain,10
2024-01-01,b,4,snow,40
2024-01-03,a,3,sun,30
2024-01-02,b,5,rain,50
"""


def read(data: Any, fields: dict[str, Any] | None = None, **options: Any) -> tuple[Spec, PlanData]:
    return spec_from_data({"cell": "gru", "hidden": 4} | (fields or {}), data, DataOptions(**options))


def facts(spec: Spec) -> tuple[object, ...]:
    return spec.features, spec.vocab, spec.outputs, spec.loss, spec.head, spec.seq


def sales(tmp_path: Path) -> Path:
    return written(tmp_path / "sales.csv", SALES)


def test_a_table_says_features_outputs_loss_and_length(tmp_path: Path) -> None:
    spec, data = read(sales(tmp_path), id="shop", target=("sales",))
    assert facts(spec) == (4, None, 1, "mse", "per-step", 3)
    assert data.options.columns == ("price", "weather")
    assert (data.options.time, data.options.categories) == ("date", {"weather": ("rain", "snow", "sun")})
    assert data.notes[:3] == (
        "2 series by shop of 2 to 3 steps.",
        "Inputs: price, weather (text, 3 values, one-hot).",
        "Targets: sales, as numbers (--loss cross-entropy: as classes).",
    )


def test_rows_are_sorted_by_date_and_text_is_one_hot(tmp_path: Path) -> None:
    spec, data = read(sales(tmp_path), id="shop", target=("sales",))
    source = open_source(sales(tmp_path), spec, data.options)
    assert inputs_of(source) == [
        [[1, 1, 0, 0], [2, 0, 0, 1], [3, 0, 0, 1]],
        [[4, 0, 1, 0], [5, 1, 0, 0]],
    ]
    assert targets_of(source) == [[[10], [20], [30]], [[40], [50]]]
    assert "Rows are sorted by date; in the file they are not." in data.notes


def test_a_text_column_as_target_gives_classes(tmp_path: Path) -> None:
    spec, data = read(sales(tmp_path), id="shop", target=("weather",))
    assert facts(spec) == (2, None, 3, "cross-entropy", "per-step", 3)
    assert targets_of(open_source(sales(tmp_path), spec, data.options)) == [[0, 2, 2], [1, 0]]


def test_a_single_text_column_is_embedded_and_predicts_the_next(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "user,page\n" + "u,home\nu,cart\nu,home\n" + "v,pay\nv,home\n")
    spec, data = read(path, id="user")
    assert facts(spec) == (None, 3, 3, "cross-entropy", "per-step", 2)
    source = open_source(path, spec, data.options)
    assert inputs_of(source) == [[1, 0], [2]]
    assert targets_of(source) == [[0, 1], [1]]


def test_without_a_target_all_numbers_are_predicted_one_step_ahead(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "id,a,b\n" + "".join(f"1,{n},{n * n}\n" for n in range(5)))
    spec, data = read(path, id="id")
    assert facts(spec) == (2, None, 2, "mse", "per-step", 4)
    assert data.notes[2] == "Targets: a, b one step ahead, as numbers."


def test_what_is_given_is_kept_and_checked(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"features \(9\), but .* has 4: price, weather=rain"):
        read(sales(tmp_path), {"features": 9}, id="shop", target=("sales",))
    with pytest.raises(MisuseError, match="Every class needs an output, but --outputs is 2"):
        read(sales(tmp_path), {"outputs": 2}, id="shop", target=("weather",))
    with pytest.raises(MisuseError, match="has no column 'sails'"):
        read(sales(tmp_path), id="shop", target=("sails",))


def test_text_with_a_value_that_the_plan_does_not_know_is_refused(tmp_path: Path) -> None:
    spec, data = read(sales(tmp_path), id="shop", target=("sales",))
    other = written(tmp_path / "new.csv", SALES.replace("snow", "hail"))
    with pytest.raises(MisuseError, match=r"one of the 3 values .* row 4, column 'weather' is 'hail'"):
        open_source(other, spec, data.options)


def test_text_with_many_values_and_other_dates_are_left_out(tmp_path: Path) -> None:
    rows = [f"2024-01-01,2024-02-01,note {n},{n},{n}" for n in range(1200)]
    path = written(tmp_path / "t.csv", "a,b,note,x,y\n" + "\n".join(rows))
    spec, data = read(path, {"seq": 100}, target=("y",), time="a")
    assert spec.features == 1
    assert any("Left out, as dates (--time names those to sort by), names or notes: b, note." in n for n in data.notes)
    assert any(note.startswith("1,199 rows have the same a") for note in data.notes)


def test_gaps_in_time_are_told(tmp_path: Path) -> None:
    days = [1, 2, 3, 9, 10, 20]
    path = written(tmp_path / "t.csv", "day,x\n" + "\n".join(f"2024-01-{day:02},{day}" for day in days))
    _, data = read(path, {"seq": 2})
    assert data.notes[-1] == "There are 2 gaps of more than 1 day, the longest 10 days."


@pytest.mark.parametrize("day", ["31.01.2024", "2024/01/31", "2024-01-31 10:00:00", "2024-01-31T10:00:00Z"])
def test_dates_may_be_written_in_several_ways(tmp_path: Path, day: str) -> None:
    _, data = read(written(tmp_path / "t.csv", f"day,x\n{day},1\n{day},2\n"), {"seq": 1})
    assert data.options.time == "day"


def test_a_row_without_a_time_is_refused_with_its_place(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "day,x\n2024-01-01,1\n,2\n")
    with pytest.raises(MisuseError, match=r"t\.csv, row 3, column 'day' is empty"):
        read(path, {"seq": 1})


@pytest.mark.parametrize(
    ("shape", "fields", "options", "expected"),
    [
        ((6, 5, 3), {}, {}, (3, None, 3, "mse", "per-step", 4)),
        ((6, 5, 3), {}, {"target": ("2",)}, (2, None, 1, "mse", "per-step", 5)),
        ((6, 5, 3), {"features": 2}, {}, (2, None, 1, "mse", "per-step", 5)),
        ((20, 3), {"seq": 5}, {}, (3, None, 3, "mse", "per-step", 5)),
        ((20,), {"seq": 5}, {}, (1, None, 1, "mse", "per-step", 5)),
    ],
)
def test_an_array_says_features_and_outputs(
    shape: tuple[int, ...], fields: dict[str, Any], options: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    for data in (numbers(*shape), torch.from_numpy(numbers(*shape))):
        assert facts(read(data, fields, **options)[0]) == expected


def test_targets_in_an_array_of_their_own_say_head_and_loss(tmp_path: Path) -> None:
    inputs = saved(tmp_path / "x.npy", numbers(4, 5, 2))
    classes = saved(tmp_path / "c.npy", np.array([0, 1, 2, 1]))
    steps = saved(tmp_path / "s.npy", numbers(4, 5, 3))
    assert facts(read(inputs, targets=str(classes))[0]) == (2, None, 3, "cross-entropy", "last-step", 5)
    assert facts(read(inputs, targets=str(steps))[0]) == (2, None, 3, "mse", "per-step", 5)


def test_text_says_its_vocabulary(tmp_path: Path) -> None:
    path = written(tmp_path / "t.txt", "abacab" * 5)
    assert read(path, {"seq": 5})[0].vocab == 256
    spec, data = read(path, {"seq": 5}, characters=True)
    assert (spec.vocab, spec.outputs, data.options.vocabulary) == (3, 3, "abc")


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ((torch.zeros(4, 5, 2), torch.zeros(4, 5, 3)), (2, None, 3, "mse", "per-step", 5)),
        ((torch.zeros(4, 5, 2), torch.tensor([0, 1, 2, 1])), (2, None, 3, "cross-entropy", "last-step", 5)),
        ((torch.tensor([[1, 2], [6, 0]]), torch.tensor([0, 1])), (None, 7, 2, "cross-entropy", "last-step", 2)),
    ],
)
def test_a_dataset_says_all_of_it(pairs: tuple[torch.Tensor, ...], expected: tuple[Any, ...]) -> None:
    assert facts(read(TensorDataset(*pairs))[0]) == expected


def test_frames_tensors_and_dicts_are_read_like_their_file(tmp_path: Path) -> None:
    frame = pandas.read_csv(sales(tmp_path))
    expected = read(sales(tmp_path), id="shop", target=("sales",))
    for data in (frame, frame.to_dict("list"), frame.assign(date=pandas.to_datetime(frame.date)).set_index("date")):
        spec, about = read(data, id="shop", target=("sales",))
        assert (spec, about.options.columns, about.path) == (expected[0], expected[1].options.columns, None)


def test_a_dict_of_series_has_a_column_for_each_number_of_a_step() -> None:
    arrays = {"x": np.arange(24.0).reshape(2, 4, 3), "load": np.arange(8.0).reshape(2, 4), "kind": np.array([1, 0])}
    spec, data = read(arrays, target="load")
    assert data.notes[:2] == ("2 series of 4 steps.", "Inputs: x.0, x.1, x.2, kind.")
    assert data.notes[2] == "Targets: load, as numbers (--loss cross-entropy: as classes)."
    source = open_source(arrays, spec, data.options)
    np.testing.assert_array_equal(source[1][0][:, :3], arrays["x"][1])
    np.testing.assert_array_equal(source[1][0][:, 3], 0)
    np.testing.assert_array_equal(source[1][1][:, 0], arrays["load"][1])


def test_a_value_for_each_series_of_a_dict_is_predicted_at_its_last_step() -> None:
    arrays = {"x": np.arange(24.0).reshape(2, 4, 3), "y": torch.tensor([1, 0])}
    spec, data = read(arrays, {"loss": "cross-entropy"}, target="y")
    assert facts(spec) == (3, None, 2, "cross-entropy", "last-step", 4)
    source = open_source(arrays, spec, data.options)
    assert [int(source[number][1]) for number in range(2)] == [1, 0]
    spec, data = read({"x": np.ones((2, 4, 3)), "y": np.ones((2, 4, 2))}, target="y")
    assert (spec.outputs, spec.head, data.options.target) == (2, "per-step", ("y.0", "y.1"))


def test_text_of_every_kind_of_arrow_is_text() -> None:
    plain = pa.array(["2024-01-02", "2024-01-01"]), pa.array(["rain", "sun"])
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        dates, words = (column.cast(kind) for column in plain)
        coded = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.uint32()), words)
        table = uniform(pa.table({"day": dates, "weather": words, "coded": coded}))
        assert table.schema.types == [pa.timestamp("us"), pa.string(), pa.string()]
        assert table["coded"].to_pylist() == ["rain", "sun"]


def test_a_polars_frame_is_read_like_its_file(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars", reason="Polars is not installed")
    frame, (spec, expected) = polars.read_csv(sales(tmp_path)), read(sales(tmp_path), id="shop", target=("sales",))
    categories = frame.with_columns(polars.col("weather").cast(polars.Categorical), polars.col("date").str.to_date())
    for data in (frame, categories):
        found, about = read(data, id="shop", target=("sales",))
        assert (found, about.options.columns, about.notes) == (spec, expected.options.columns, expected.notes)


def test_errors_about_a_table_in_memory_name_no_file() -> None:
    with pytest.raises(MisuseError, match="must be finite, but the table, row 2, column 'x' is empty or NaN"):
        read(pandas.DataFrame({"x": [1.0, float("nan")], "y": [1.0, 2.0]}), {"seq": 2}, target="y")


@pytest.mark.parametrize("target", [2, -1, "2", (2,), ["2"]], ids=repr)
def test_the_target_of_an_array_is_named_by_its_number(target: Any) -> None:
    array = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
    spec, data = read(array, target=target)
    assert (spec.inputs, spec.outputs, data.options.target) == (2, 1, ("2",))
    assert data.notes[1:] == ("Input columns: 0, 1 (by number).", "Target columns: 2 (by number).")


def test_a_table_of_numbers_needs_no_completion_and_others_get_their_columns(tmp_path: Path) -> None:
    plain = written(tmp_path / "t.csv", "a,b\n1,2\n")
    assert complete(plain, DataOptions()) == DataOptions()
    assert complete(sales(tmp_path), DataOptions(id="shop", target=("sales",))).time == "date"


# ---- missing values ------------------------------------------------------------------------------------------------

GAPS = "id,x,y\n1,,1\n1,2,2\n1,,3\n1,4,\n1,5,5\n2,,1\n2,7,2\n"


def missing(tmp_path: Path, **options: Any) -> tuple[list[Any], list[Any]]:
    path = written(tmp_path / "gaps.csv", GAPS)
    spec, data = read(path, id="id", target=("y",), **options)
    source = open_source(path, spec, data.options)
    return [[step[0] for step in row] for row in inputs_of(source)], [[s[0] for s in row] for row in targets_of(source)]


def test_missing_inputs_are_filled_forward_and_cut_around_missing_targets(tmp_path: Path) -> None:
    assert missing(tmp_path, fill="forward") == ([[2, 2, 2], [5], [7, 7]], [[1, 2, 3], [5], [1, 2]])
    assert missing(tmp_path, fill="zero") == ([[0, 2, 0], [5], [0, 7]], [[1, 2, 3], [5], [1, 2]])


def test_sequences_are_cut_around_missing_values(tmp_path: Path) -> None:
    assert missing(tmp_path, nan="cut") == ([[2], [5], [7]], [[2], [5], [2]])


def test_if_every_series_has_a_gap_dropping_says_how_many(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"each of 2 has one \(4 of 7 rows\).*--nan cut"):
        missing(tmp_path, nan="drop")


@pytest.mark.parametrize("options", [{"fill": "drop"}, {"nan": "drop"}], ids=str)
def test_what_was_left_out_for_missing_values_is_told(options: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", GAPS + "3,1,1\n3,2,2\n3,3,3\n")
    spec, data = read(path, id="id", target=("y",), **options)
    assert (data.options.fill, data.options.nan) == (None, "drop")
    assert data.notes[0] == "1 series by id of 3 steps."
    assert "Of all sequences, 2 were left out for missing values (7 steps)." in data.notes
    assert open_source(path, spec, data.options).describe()["dropped_steps"] == 7


def test_what_was_cut_around_missing_values_is_told(tmp_path: Path) -> None:
    _, data = read(written(tmp_path / "t.csv", GAPS), id="id", target=("y",), fill="forward")
    assert data.notes[0] == "2 series by id, in 3 sequences of 1 to 3 steps."
    assert "Of all sequences, some were cut around 1 row with missing values." in data.notes


def test_a_missing_value_is_an_error_with_ways_out(tmp_path: Path) -> None:
    with pytest.raises(
        MisuseError, match=r"row 2, column 'x' is empty or NaN.*--fill forward, mean, zero or drop, or --nan cut"
    ):
        missing(tmp_path)


def test_the_mean_that_fills_is_that_of_the_known_numbers(tmp_path: Path) -> None:
    from oomguard._data.open import open_data

    path = written(tmp_path / "gaps.csv", GAPS)
    spec, about = read(path, id="id", target=("y",), fill="mean")
    data = open_data(path, spec, about.options)
    assert data.normaliser is not None
    assert data.train[0][0][0] == 0
    assert not np.isnan(np.concatenate([data.train[index][0] for index in range(len(data.train))])).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fill": "zero", "nan": "drop"}, "Missing values are filled or left out"),
        ({"fill": "drop", "nan": "cut"}, "Missing values are filled or left out"),
        ({"fill": "mean", "normalise": "none"}, "The mean is that of the normaliser"),
    ],
)
def test_options_of_filling_that_contradict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        DataOptions(**options)
