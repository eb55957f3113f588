"""Array files: which numbers come as inputs and which as targets, and what is refused."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.making import inputs_of, numbers, saved, spec, targets_of, tokens
from hypothesis import given
from hypothesis import strategies as st

from oomguard._core.errors import MisuseError
from oomguard._data.open import check_source, open_data, open_source
from oomguard._data.options import DataOptions
from oomguard._data.order import Cuts, whole
from oomguard._data.rows import Source
from oomguard._data.source import as_values, fingerprint


def test_numbers_whose_squares_overflow_are_numbers_all_the_same() -> None:
    block = np.array([[1e30, -3e38], [0.0, 1e-30]], dtype=np.float32)
    assert as_values(block, None, "error", lambda row, column: f"{row}, {column}").tolist() == block.tolist()


def test_the_last_columns_are_the_targets(tmp_path: Path) -> None:
    whole = numbers(3, 4, 3)
    source = open_source(saved(tmp_path / "x.npy", whole), spec())
    assert (len(source), source.lengths.tolist()) == (3, [4, 4, 4])
    np.testing.assert_array_equal(source[1][0], whole[1, :, :2])
    np.testing.assert_array_equal(source[1][1], whole[1, :, 2:])


def test_without_targets_the_next_step_is_predicted(tmp_path: Path) -> None:
    whole = numbers(3, 5, 2)
    source = open_source(saved(tmp_path / "x.npy", whole), spec(outputs=2))
    np.testing.assert_array_equal(source[2][0], whole[2, :4])
    np.testing.assert_array_equal(source[2][1], whole[2, 1:])


def test_a_chosen_column_is_predicted_ahead(tmp_path: Path) -> None:
    whole = numbers(3, 6, 2)
    source = open_source(saved(tmp_path / "x.npy", whole), spec(), DataOptions(target=("1",), ahead=2))
    np.testing.assert_array_equal(source[0][0], whole[0, :4])
    np.testing.assert_array_equal(source[0][1], whole[0, 2:, 1:])


def test_chosen_columns_come_in_the_order_asked_for(tmp_path: Path) -> None:
    whole = numbers(3, 4, 5)
    options = DataOptions(columns=("4", "1"), target=("0",))
    source = open_source(saved(tmp_path / "x.npy", whole), spec(), options)
    np.testing.assert_array_equal(source[0][0], whole[0][:, [4, 1]])
    np.testing.assert_array_equal(source[0][1], whole[0][:, [0]])


@pytest.mark.parametrize(
    ("shape", "head", "expected"),
    [
        ((3, 4, 1), "per-step", [[4], [5], [6], [7]]),
        ((3, 4), "per-step", [[4], [5], [6], [7]]),
        ((3, 1), "last-step", [1]),
        ((3,), "last-step", [1]),
        ((3, 4, 1), "last-step", [7]),
    ],
)
def test_targets_in_a_file_of_their_own(tmp_path: Path, shape: tuple[int, ...], head: str, expected: Any) -> None:
    inputs = saved(tmp_path / "x.npy", numbers(3, 4, 2))
    targets = saved(tmp_path / "y.npy", numbers(*shape))
    source = open_source(inputs, spec(head=head), DataOptions(targets=str(targets)))
    assert source[1][1].tolist() == expected


def test_classes_for_each_sequence(tmp_path: Path) -> None:
    inputs = saved(tmp_path / "x.npy", numbers(3, 4, 2))
    targets = saved(tmp_path / "y.npy", [2, 0, 1])
    wanted = spec(head="last-step", loss="cross-entropy", outputs=3)
    source = open_source(inputs, wanted, DataOptions(targets=str(targets)))
    assert [int(source[i][1]) for i in range(3)] == [2, 0, 1]
    assert source[0][1].dtype == np.int64


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("part", [slice(None), slice(1, None), slice(None, None, 2)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_map_gives_what_it_holds_whole_or_in_part(tmp_path: Path, mode: Any, part: slice, order: Any) -> None:
    given = np.load(saved(tmp_path / "x.npy", np.asarray(numbers(4, 4, 3), order=order)), mmap_mode=mode)
    if mode != "r":
        given[2, 0, 0] = 77
    given = given if part == slice(None) else given[part]
    source = open_source(given, spec())
    assert [source[i][0].tolist() for i in range(len(source))] == given[..., :2].tolist()


def test_a_map_whose_file_is_gone_is_read_all_the_same(tmp_path: Path) -> None:
    given = np.load(saved(tmp_path / "x.npy", numbers(3, 4, 3)), mmap_mode="r")
    (tmp_path / "x.npy").unlink()
    np.testing.assert_array_equal(open_source(given, spec())[1][0], numbers(3, 4, 3)[1, :, :2])


def test_a_long_series_is_cut_into_windows(tmp_path: Path) -> None:
    source = open_source(saved(tmp_path / "x.npy", numbers(11, 3)), spec())
    assert source.lengths.tolist() == [4, 4, 3]
    np.testing.assert_array_equal(source[2][0], numbers(11, 3)[8:, :2])


def test_windows_overlap_by_the_stride(tmp_path: Path) -> None:
    source = open_source(saved(tmp_path / "x.npy", numbers(8, 3)), spec(), DataOptions(stride=2))
    assert [sequence[0][0] for sequence in inputs_of(source)] == [0, 6, 12]


def test_series_are_cut_into_windows_of_their_own_if_a_stride_is_given(tmp_path: Path) -> None:
    source = open_source(saved(tmp_path / "x.npy", numbers(2, 6, 3)), spec(), DataOptions(stride=4))
    assert source.lengths.tolist() == [4, 2, 4, 2]
    assert [sequence[0][0] for sequence in inputs_of(source)] == [0, 12, 18, 30]


def test_tokens_predict_the_next_token(tmp_path: Path) -> None:
    source = open_source(saved(tmp_path / "x.npy", np.arange(10) % 10), tokens())
    assert inputs_of(source) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert targets_of(source) == [[1, 2, 3, 4], [5, 6, 7, 8], [9]]


def test_tokens_of_many_sequences(tmp_path: Path) -> None:
    source = open_source(saved(tmp_path / "x.npy", [[1, 2, 3], [4, 5, 6]]), tokens())
    assert (inputs_of(source), targets_of(source)) == ([[1, 2], [4, 5]], [[2, 3], [5, 6]])


def test_one_number_per_step_needs_no_axis(tmp_path: Path) -> None:
    source = open_source(saved(tmp_path / "x.npy", numbers(5)), spec(features=1))
    assert (inputs_of(source), targets_of(source)) == ([[[0], [1], [2], [3]]], [[[1], [2], [3], [4]]])


@pytest.mark.parametrize("shape", [(3, 4, 3), (9, 3)])
def test_the_order_of_an_array_in_its_file_does_not_matter(tmp_path: Path, shape: tuple[int, ...]) -> None:
    rows = open_source(saved(tmp_path / "x.npy", numbers(*shape)), spec())
    columns = open_source(saved(tmp_path / "y.npy", np.asfortranarray(numbers(*shape))), spec())
    assert inputs_of(rows) == inputs_of(columns)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int16, np.uint8, ">f4"])
def test_any_kind_of_number_comes_as_float32(tmp_path: Path, dtype: Any) -> None:
    source = open_source(saved(tmp_path / "x.npy", numbers(3, 4, 3).astype(dtype)), spec())
    assert source[0][0].dtype == np.float32
    np.testing.assert_array_equal(source[1][0], numbers(3, 4, 3)[1, :, :2])


def test_an_array_in_memory_is_a_source_too() -> None:
    assert inputs_of(open_source(numbers(1, 2, 3), spec())) == [[[0, 1], [3, 4]]]


def test_a_pickled_source_holds_a_path_and_no_data(tmp_path: Path) -> None:
    source = open_source(saved(tmp_path / "x.npy", numbers(100, 50, 3)), spec(seq=50))
    assert source[99][0][0, 0] == 99 * 150
    content = pickle.dumps(source)
    assert len(content) < 100 * 50 * 3 * 4 / 5  # a few numbers for each series
    assert inputs_of(pickle.loads(content)) == inputs_of(source)


def test_a_source_describes_itself_in_plain_values(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", numbers(3, 4, 3))
    described = open_source(path, spec()).describe()
    assert len(described.pop("content")) == 16
    assert described == {
        "kind": "npy",
        "path": str(path),
        "shape": [3, 4, 3],
        "bytes": 144,
        "sequences": 3,
        "steps": 12,
        "truncated": 0,
        "dropped": 0,
        "short": 0,
    }


def test_a_sequence_longer_than_the_spec_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", numbers(3, 6, 3))
    with pytest.raises(MisuseError, match=r"series 0 of .*x\.npy has 6 steps \(3 are too long\).*--truncate"):
        open_source(path, spec())


@pytest.mark.parametrize(("head", "first"), [("per-step", 0), ("last-step", 2)])
def test_a_truncated_sequence_keeps_what_its_targets_are_for(tmp_path: Path, head: str, first: int) -> None:
    source = open_source(saved(tmp_path / "x.npy", numbers(3, 6, 3)), spec(head=head), DataOptions(truncate=True))
    assert (source.describe()["truncated"], source.lengths.tolist()) == (3, [4, 4, 4])
    np.testing.assert_array_equal(source[0][0], numbers(3, 6, 3)[0, first : first + 4, :2])


def broken(value: float, dtype: Any = np.float32) -> Any:
    array = numbers(3, 4, 3).astype(dtype)
    array[1, 2, 1] = value
    return array


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_a_nan_is_named_by_file_row_and_column(tmp_path: Path, value: float) -> None:
    source = open_source(saved(tmp_path / "x.npy", broken(value, np.float64)), spec())
    assert len(source[0][0]) == 4
    with pytest.raises(
        MisuseError, match=r"x\.npy, sequence 1, step 2, column 1 is .*--fill forward, mean, zero or drop"
    ):
        source[1]


def test_a_nan_can_be_zero(tmp_path: Path) -> None:
    source = open_source(saved(tmp_path / "x.npy", broken(np.nan)), spec(), DataOptions(nan="zero"))
    assert source[1][0][2].tolist() == [18, 0]


def test_sequences_with_a_nan_can_be_dropped(tmp_path: Path) -> None:
    source = open_source(saved(tmp_path / "x.npy", broken(np.nan)), spec(), DataOptions(nan="drop"))
    assert [sequence[0][0] for sequence in inputs_of(source)] == [0, 24]
    assert source.describe()["dropped"] == 1


def test_windows_whose_targets_hold_a_nan_are_dropped(tmp_path: Path) -> None:
    series = numbers(13, 2)
    series[4] = np.nan  # the target of the first window's last step, and the first input of the second
    source = open_source(saved(tmp_path / "x.npy", series), spec(outputs=2), DataOptions(nan="drop"))
    assert [sequence[0][0] for sequence in inputs_of(source)] == [16]


def test_a_series_whose_only_target_is_a_nan_is_dropped(tmp_path: Path) -> None:
    inputs = saved(tmp_path / "x.npy", numbers(3, 4, 2))
    targets = saved(tmp_path / "y.npy", [1, np.nan, 3])
    options = DataOptions(targets=str(targets), nan="drop")
    assert targets_of(open_source(inputs, spec(head="last-step"), options)) == [[1], [3]]


def test_a_nan_in_a_column_that_nobody_reads_drops_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", broken(np.nan))
    source = open_source(path, spec(), DataOptions(columns=("0", "2"), nan="drop", target=("2",)))
    assert len(source) == 3


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npy").touch()
    with pytest.raises(MisuseError, match=r"x\.npy has none"):
        open_source(tmp_path / "x.npy", spec())


@pytest.mark.parametrize("content", [b"abc", b"a,b,y\n1,2,3\n"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(MisuseError, match=r"np\.save has written, but .*x\.npy does not begin like one"):
        open_source(tmp_path / "x.npy", spec())


@pytest.mark.parametrize("shape", [(0, 4, 3), (3, 0, 3), (0, 3)])
def test_an_array_of_nothing_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(MisuseError, match=r"x\.npy has none"):
        open_source(saved(tmp_path / "x.npy", np.zeros(shape)), spec())


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", numbers(3, 4, 3))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(MisuseError, match=r"x\.npy is not \(mmap length is greater than file size\)"):
        open_source(path, spec())


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"gone\.npy is not \(there is no such file\)"):
        open_source(tmp_path / "gone.npy", spec())


def test_objects_are_refused_and_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{}, 1], dtype=object), allow_pickle=True)
    with pytest.raises(MisuseError, match="Python objects in dtype"):
        open_source(tmp_path / "x.npy", spec())


@pytest.mark.parametrize(
    ("array", "wanted", "message"),
    [
        (numbers(3, 4, 7), spec(), r"features \(2\), but .*x\.npy has 7: 0, 1, 2.*--features 7"),
        (numbers(3, 4, 2), spec(), r"Without --target.*x\.npy has 2 input columns, and the head gives 1"),
        (numbers(2, 3, 4, 5), spec(), r"x\.npy is 2 x 3 x 4 x 5"),
        (numbers(3, 4, 2), tokens(), r"must be N x T, or T"),
        (np.array([1, 2, 10, 3]), tokens(), r"token must be .* 0 to 9, but .*x\.npy, row 2 is 10"),
        (np.array([1, 2, -1, 3]), tokens(), r"row 2 is -1"),
        (np.array([1, 2, 2.5, 3]), tokens(), r"row 2 is 2\.5"),
        (np.array([1, 2, np.nan, 3]), tokens(), r"row 2 is nan"),
    ],
)
def test_an_array_that_does_not_fit_the_spec_is_refused(tmp_path: Path, array: Any, wanted: Any, message: str) -> None:
    path = saved(tmp_path / "x.npy", array)
    with pytest.raises(MisuseError, match=message):
        inputs_of(open_source(path, wanted))


def test_a_class_out_of_range_is_named(tmp_path: Path) -> None:
    whole = numbers(3, 4, 3)
    whole[:, :, 2] = 0
    whole[2, 1, 2] = 3
    source = open_source(saved(tmp_path / "x.npy", whole), spec(loss="cross-entropy", outputs=3))
    with pytest.raises(MisuseError, match=r"0 to 2, but .*x\.npy, sequence 2, step 1, column 2 is 3.*--outputs"):
        targets_of(source)


def test_sequences_without_a_class_can_be_dropped_but_are_never_of_class_zero(tmp_path: Path) -> None:
    inputs, targets = saved(tmp_path / "x.npy", numbers(3, 4, 2)), saved(tmp_path / "y.npy", [2, np.nan, 1])
    wanted = spec(head="last-step", loss="cross-entropy", outputs=3)
    drop = open_source(inputs, wanted, DataOptions(targets=str(targets), nan="drop"))
    assert targets_of(drop) == [2, 1]
    zero = open_source(inputs, wanted, DataOptions(targets=str(targets), nan="zero"))
    with pytest.raises(MisuseError, match=r"y\.npy, row 1 is nan.*--nan drop"):
        targets_of(zero)


def test_a_class_out_of_range_is_never_dropped(tmp_path: Path) -> None:
    inputs, targets = saved(tmp_path / "x.npy", numbers(3, 4, 2)), saved(tmp_path / "y.npy", [2, -1, 1])
    wanted = spec(head="last-step", loss="cross-entropy", outputs=3)
    with pytest.raises(MisuseError, match="row 1 is -1"):
        targets_of(open_source(inputs, wanted, DataOptions(targets=str(targets), nan="drop")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ("0", "9")}, "no column '9'"),
        ({"target": ("x",)}, "no column 'x'"),
        ({"target": ("0", "1")}, r"as the head gives \(1\), but .* has 2"),
        ({"columns": ("0",)}, r"features \(2\), but .* has 1"),
        ({"id": "0"}, "--id is for csv, parquet, but this data is npy"),
    ],
)
def test_columns_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = saved(tmp_path / "x.npy", numbers(3, 4, 4))
    with pytest.raises(MisuseError, match=message):
        open_source(path, spec(), DataOptions(**options))


@pytest.mark.parametrize("shape", [(3, 5, 1), (2, 4), (3, 4, 2), (12,)])
def test_targets_of_another_shape_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    inputs = saved(tmp_path / "x.npy", numbers(3, 4, 2))
    targets = saved(tmp_path / "y.npy", numbers(*shape))
    with pytest.raises(MisuseError, match=r"must be 3 x 4 x 1, but .*y\.npy is"):
        open_source(inputs, spec(), DataOptions(targets=str(targets)))


def test_training_without_targets_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", numbers(3, 4, 2))
    with pytest.raises(MisuseError, match="Training needs targets"):
        open_data(path, spec(), DataOptions(inputs_only=True))


def test_a_whole_source_can_be_checked_before_training(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", broken(np.nan))
    with pytest.raises(MisuseError, match="sequence 1, step 2"):
        check_source(open_source(path, spec()))
    assert check_source(open_source(path, spec(), DataOptions(nan="zero"))) == 12


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(0, 3), st.integers(1, 9), st.integers(1, 12))
def test_windows_cover_every_step_once_or_as_often_as_they_overlap(
    series: list[int], ahead: int, seq: int, stride: int
) -> None:
    cuts = Cuts(pieces=whole(np.cumsum([0, *series])), ahead=ahead, seq=seq, stride=stride)
    starts = np.cumsum([0, *series])
    seen = [list(range(start, start + steps)) for start, steps, _ in (cuts[i] for i in range(len(cuts)))]
    assert [len(rows) for rows in seen] == cuts.lengths().tolist()
    covered = {row for rows in seen for row in rows}
    usable = {row for i, rows in enumerate(series) for row in range(starts[i], starts[i] + rows - ahead)}
    assert covered <= usable
    assert all(seen)
    if stride <= seq:
        assert covered == usable
    if stride >= seq:
        assert len(covered) == sum(map(len, seen))


def sources(tmp_path: Path) -> Source:
    return open_source(saved(tmp_path / "x.npy", numbers(3, 4, 3)), spec())


def test_a_source_can_be_gone_through_like_a_list(tmp_path: Path) -> None:
    source = sources(tmp_path)
    assert len(list(source)) == 3  # type: ignore[call-overload]
    with pytest.raises(IndexError):
        source[3]


def test_a_fingerprint_tells_arrays_apart_by_their_content() -> None:
    assert fingerprint(np.zeros(3)) == fingerprint(np.zeros(3)) != fingerprint(np.ones(3))
