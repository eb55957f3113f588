"""CSV and Parquet: columns, series, the cache, and every way in which a table can be wrong."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from data.making import inputs_of, spec, targets_of, tokens, written
from pyarrow import parquet

from oomguard._core.errors import MisuseError
from oomguard._data import parse, series, source, tables
from oomguard._data.open import open_source
from oomguard._data.options import DataOptions

TABLE: dict[str, list[Any]] = {
    "shop": ["a", "b", "a", "c", "b", "a"],
    "x": [1, 2, 3, 4, 5, 6],
    "y": [10, 20, 30, 40, 50, 60],
    "price": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
}
KINDS = pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])


def saved(path: Path, columns: dict[str, list[Any]], kind: str) -> Path:
    path = path / f"t.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.table(columns), path, row_group_size=2)
        return path
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    mark = "\t" if kind == "tsv" else ","
    return written(path, "".join(mark.join("" if v is None else str(v) for v in row) + "\n" for row in rows))


@KINDS
def test_a_table_without_an_id_is_one_long_series(tmp_path: Path, kind: str) -> None:
    path = saved(tmp_path, {name: TABLE[name] for name in ("x", "y", "price")}, kind)
    opened = open_source(path, spec())
    assert opened.lengths.tolist() == [4, 2]
    np.testing.assert_array_equal(opened[1][0], [[5, 50], [6, 60]])
    np.testing.assert_array_equal(opened[1][1], np.array([[0.5], [0.6]], np.float32))


@KINDS
def test_rows_of_one_id_are_one_series_wherever_they_stand(tmp_path: Path, kind: str) -> None:
    opened = open_source(saved(tmp_path, TABLE, kind), spec(), DataOptions(id="shop"))
    assert inputs_of(opened) == [[[1, 10], [3, 30], [6, 60]], [[2, 20], [5, 50]], [[4, 40]]]


def test_rows_are_brought_together_over_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse, "BLOCK_BYTES", 200)
    monkeypatch.setattr(parse, "ROWS_PER_BLOCK", 1)
    monkeypatch.setattr(series, "CHUNK_ROWS", 16)
    monkeypatch.setattr(source, "CHUNK_ELEMENTS", 16)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 7, 500)
    columns = {"id": ids.tolist(), "a": np.arange(500).tolist(), "b": [0] * 500, "y": (np.arange(500) * 2).tolist()}
    opened = open_source(saved(tmp_path, columns, "csv"), spec(seq=500), DataOptions(id="id"))
    firsts = list(dict.fromkeys(ids.tolist()))
    for index, each in enumerate(firsts):
        rows = np.flatnonzero(ids == each)
        np.testing.assert_array_equal(opened[index][0][:, 0], rows)
        np.testing.assert_array_equal(opened[index][1][:, 0], rows * 2)


@KINDS
def test_named_columns_and_targets(tmp_path: Path, kind: str) -> None:
    options = DataOptions(id="shop", columns=("price", "y"), target=("x",))
    opened = open_source(saved(tmp_path, TABLE, kind), spec(), options)
    assert (opened[2][0].tolist(), opened[2][1].tolist()) == ([[pytest.approx(0.4), 40]], [[4]])


def test_a_target_that_is_an_input_lies_ahead(tmp_path: Path) -> None:
    options = DataOptions(id="shop", columns=("x", "y"), target=("y",))
    opened = open_source(saved(tmp_path, TABLE, "csv"), spec(), options)
    assert inputs_of(opened) == [[[1, 10], [3, 30]], [[2, 20]]]  # c has no second row
    assert targets_of(opened) == [[[30], [60]], [[50]]]
    assert opened.describe()["short"] == 1


def test_the_last_row_of_a_series_is_the_target_of_a_last_step_head(tmp_path: Path) -> None:
    options = DataOptions(id="shop", columns=("x", "y"), target=("price",))
    opened = open_source(saved(tmp_path, TABLE, "csv"), spec(head="last-step"), options)
    assert [each[0] for each in targets_of(opened)] == [pytest.approx(0.6), pytest.approx(0.5), pytest.approx(0.4)]


@KINDS
def test_tokens_in_a_column(tmp_path: Path, kind: str) -> None:
    path = saved(tmp_path, {"doc": [1, 1, 1, 2, 2], "token": [3, 4, 5, 6, 7]}, kind)
    opened = open_source(path, tokens(), DataOptions(id="doc"))
    assert (inputs_of(opened), targets_of(opened)) == ([[3, 4], [6]], [[4, 5], [7]])


def test_classes_in_a_column(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": [1, 2], "b": [3, 4], "kind": [0, 2]}, "csv")
    opened = open_source(path, spec(loss="cross-entropy", outputs=3))
    assert (opened[0][1].tolist(), opened[0][1].dtype.name) == ([0, 2], "int64")


def test_a_csv_of_numbers_alone_needs_no_header(tmp_path: Path) -> None:
    opened = open_source(written(tmp_path / "t.csv", "1,2,3\n4,5,6\n"), spec())
    assert inputs_of(opened) == [[[1, 2], [4, 5]]]


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_the_header_shows_what_stands_between_columns(tmp_path: Path, mark: str) -> None:
    path = written(tmp_path / "t.csv", "a,b,y\n1,2,3\n".replace(",", mark))
    assert inputs_of(open_source(path, spec())) == [[[1, 2]]]


def test_two_processes_may_convert_at_once(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "a,b,y\n" + "1,2,3\n" * 20_000)
    code = (
        "import sys; from oomguard._data.open import open_source; from oomguard._spec.spec import Spec\n"
        "source = open_source(sys.argv[1], Spec(cell='gru', seq=10, features=2))\n"
        "assert len(source) == 2000 and source[1999][0].sum() == 30"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, path]) for _ in range(2)]
    assert [each.wait() for each in both] == [0, 0]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_table_is_converted_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "t.csv", "a,b,y\n1,2,3\n")
    assert inputs_of(open_source(path, spec())) == [[[1, 2]]]
    with monkeypatch.context() as patch:
        patch.delattr(tables, "read_batches")  # nothing is read anew
        assert inputs_of(open_source(path, spec())) == [[[1, 2]]]
    written(path, "a,b,y\n7,8,9\n5,5,5\n")
    assert inputs_of(open_source(path, spec())) == [[[7, 8], [5, 5]]]
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_converted_goes_where_the_user_says(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "a,b,y\n1,2,3\n")
    open_source(path, spec(), DataOptions(cache=str(tmp_path / "deep" / "cache")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "t.csv"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "a,b,y\n1,2,3\n")
    tmp_path.chmod(0o500)
    with pytest.raises(MisuseError, match=r"cannot be used.*--cache"):
        open_source(path, spec())


def test_a_cache_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "a,b,y\n1,2,3\n")
    with pytest.raises(MisuseError, match=r"cannot be used \(Not a directory\).*--cache"):
        open_source(path, spec(), DataOptions(cache=str(path / "below a file")))


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "a,b,y\n1,2,3\n4,x,6\n")
    with pytest.raises(MisuseError):
        open_source(path, spec())
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b,y\n1,2,3\n4,x,6\n", r"t\.csv, row 3, column 'b' is 'x'.*--columns"),
        ("a,b,y\n1,2,3\n4,5\n6,7,8\n", r"first \(3\), but .*t\.csv, row 3 has 2"),
        ("a,b,y\n1,2,3\n4,5,6,7\n", r"t\.csv, row 3 has 4"),
        ("a,b,y\n1,2,3\n4,,6\n", r"finite, but .*t\.csv, row 3, column 'b' is empty or NaN"),
        ("a,b,y\n1,2,3\n4,inf,6\n", r"row 3, column 'b' is inf"),
        ("a,b,y\n1,2,3\n4,1e300,6\n", r"finite, but .*t\.csv, row 3, column 'b' is 1e\+300"),
        ("1,2,3\n4,nan,6\n", r"row 2, column '1' is empty or NaN"),
        ("a,b,y\n", r"t\.csv has none"),
        ("a" * 200_000, r"t\.csv is not \(field larger than field limit"),
        ("\n1,2,3\n", r"features \(2\), but .*t\.csv has 0"),
        ("", r"t\.csv has none"),
        ("a,a,y\n1,2,3\n", "has 'a' more than once"),
        ("a,y\n1,2\n", r"Without --target.*t\.csv has 2 input columns"),
        ("a,b,c,d,y\n1,2,3,4,5\n", r"features \(2\), but .*t\.csv has 5: a, b, c, d, y"),
    ],
)
def test_what_is_wrong_with_a_csv_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path / "t.csv", text)
    with pytest.raises(MisuseError, match=message):
        open_source(path, spec())


@pytest.mark.parametrize("text", ["id,é,b,y\na,1,2,3\n", "id,a,b,y\né,1,2,3\n"])
def test_a_table_in_another_encoding_is_refused_with_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(MisuseError, match=r"UTF-8, but .*t\.csv.* has other bytes.*iconv"):
        open_source(path, spec(), DataOptions(id="id"))


def test_rows_are_counted_over_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse, "BLOCK_BYTES", 100)
    monkeypatch.setattr(parse, "ROWS_PER_BLOCK", 1)
    path = written(tmp_path / "t.csv", "a,b,y\n" + "1,2,3\n" * 98 + "1,word,3\n")
    with pytest.raises(MisuseError, match=r"row 100, column 'b' is 'word'"):
        open_source(path, spec())
    written(path, "a,b,y\n" + "1,2,3\n" * 98 + "1,,3\n")
    with pytest.raises(MisuseError, match=r"row 100, column 'b' is empty or NaN"):
        open_source(path, spec())
    written(path, "a,b,y\n" + "1,2,3\n" * 98 + "1,2\n")
    with pytest.raises(MisuseError, match=r"row 100 has 2"):
        open_source(path, spec())


@KINDS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": ("prize",)}, "no column 'prize'.*Did you mean price"),
        ({"columns": ("x", "z")}, "no column 'z'"),
        ({"id": "store"}, "no column 'store'"),
        ({"targets": "y.npy"}, "--targets is for npy"),
    ],
)
def test_a_missing_column_is_named(tmp_path: Path, kind: str, options: dict[str, Any], message: str) -> None:
    path = saved(tmp_path, TABLE, kind)
    with pytest.raises(MisuseError, match=message):
        open_source(path, spec(), DataOptions(**options))


def test_text_in_a_column_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": ["1", "2", "word"], "b": [1, 2, 3], "y": [1, 2, 3]}, "parquet")
    with pytest.raises(MisuseError, match=r"t\.parquet, row 3, column 'a' is 'word'"):
        open_source(path, spec())


@KINDS
def test_a_null_is_a_nan(tmp_path: Path, kind: str) -> None:
    path = saved(tmp_path, {"a": [1, None, 3], "b": [1, 2, 3], "y": [1, 2, 3]}, kind)
    row = 2 if kind == "parquet" else 3
    with pytest.raises(MisuseError, match=rf"row {row}, column 'a' is empty or NaN"):
        open_source(path, spec())
    assert inputs_of(open_source(path, spec(), DataOptions(nan="zero"))) == [[[1, 1], [0, 2], [3, 3]]]


def test_series_with_a_nan_are_dropped(tmp_path: Path) -> None:
    columns = TABLE | {"x": [1, 2, None, 4, 5, 6]}
    opened = open_source(saved(tmp_path, columns, "csv"), spec(), DataOptions(id="shop", nan="drop"))
    assert inputs_of(opened) == [[[2, 20], [5, 50]], [[4, 40]]]


@pytest.mark.parametrize(
    ("columns", "wanted", "message"),
    [
        ({"token": [1, 2, 10]}, tokens(), r"0 to 9, but .*t\.csv, row 4, column 'token' is 10"),
        ({"token": [1, "nan", 3]}, tokens(), r"row 3, column 'token' is empty or NaN"),
        (
            {"a": [1, 2], "b": [1, 2], "y": [0, 3]},
            spec(loss="cross-entropy", outputs=3),
            r"0 to 2, but .*row 3, column 'y' is 3",
        ),
        (
            {"a": [1, 2], "b": [1, 2], "y": [0, 0.5]},
            spec(loss="cross-entropy", outputs=3),
            r"row 3, column 'y' is 0\.5",
        ),
    ],
)
def test_a_token_or_class_out_of_range_is_named(tmp_path: Path, columns: Any, wanted: Any, message: str) -> None:
    path = saved(tmp_path, columns, "csv")
    with pytest.raises(MisuseError, match=message):
        open_source(path, wanted)


@KINDS
def test_series_without_a_class_are_dropped(tmp_path: Path, kind: str) -> None:
    columns = TABLE | {"price": [0, 1, None, 2, 1, 0]}
    path, wanted = saved(tmp_path, columns, kind), spec(loss="cross-entropy", outputs=3)
    opened = open_source(path, wanted, DataOptions(id="shop", nan="drop"))
    assert (targets_of(opened), opened.describe()["dropped"]) == ([[1, 1], [2]], 1)
    for nan in ("error", "zero"):
        with pytest.raises(MisuseError, match=r"0 to 2, but .*, row \d, column 'price' is empty or NaN.*--nan drop"):
            open_source(path, wanted, DataOptions(id="shop", nan=nan))


def test_windows_without_a_token_are_dropped(tmp_path: Path) -> None:
    path = saved(tmp_path, {"token": [1, 2, 3, 4, 5, "nan", 7, 8, 9, 1, 2]}, "csv")
    assert inputs_of(open_source(path, tokens(seq=2), DataOptions(nan="drop"))) == [[1, 2], [3, 4], [7, 8], [9, 1]]


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_row_without_an_id_is_named(tmp_path: Path, kind: str) -> None:
    columns = TABLE | {"shop": [1, 1, None, 2, 2, 2]}
    path = saved(tmp_path, columns, kind)
    with pytest.raises(MisuseError, match=rf"row {3 if kind == 'parquet' else 4}, column 'shop' is empty"):
        open_source(path, spec(), DataOptions(id="shop"))


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "t.parquet", "a,b\n1,2\n")
    with pytest.raises(MisuseError, match=r"t\.parquet is not"):
        open_source(path, spec())


def test_a_series_longer_than_the_spec_is_cut_only_if_asked(tmp_path: Path) -> None:
    path = saved(tmp_path, TABLE, "csv")
    with pytest.raises(MisuseError, match=r"series 0 of .*t\.csv has 3 steps \(1 are too long\)"):
        open_source(path, spec(seq=2), DataOptions(id="shop"))
    opened = open_source(path, spec(seq=2), DataOptions(id="shop", truncate=True))
    assert (opened.describe()["truncated"], opened.lengths.tolist()) == (1, [2, 2, 1])
