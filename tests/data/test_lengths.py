"""Histograms of lengths: bounded, rounded up, from sources and from files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.making import numbers, saved, spec, written
from hypothesis import given
from hypothesis import strategies as st

from oomguard._cli.flags import CUT
from oomguard._core.errors import MisuseError
from oomguard._data.infer import spec_from_data
from oomguard._data.open import MAX_LENGTHS, histogram, open_source, read_lengths
from oomguard._data.options import CUTTING, DataOptions
from oomguard._spec.spec import Spec


def test_a_source_has_a_histogram_that_a_spec_takes() -> None:
    source = open_source(numbers(11, 3), spec())
    lengths = histogram(*np.unique(source.lengths, return_counts=True))
    assert lengths == {3: 1, 4: 2}
    assert Spec(cell="gru", lengths=lengths).steps == 4


@pytest.mark.parametrize("data", [[np.zeros((n, 3)) for n in (3, 9)], numbers(2, 9, 3)], ids=["pairs", "array"])
def test_data_from_python_gives_a_spec_its_lengths(data: Any) -> None:
    given = data if isinstance(data, np.ndarray) else [(each[:, :2], each[:, 2]) for each in data]
    fields = {"cell": "gru", "features": 2, "hidden": 4, "batch": 4}
    planned, _ = spec_from_data(fields, given, DataOptions())
    assert planned == spec(seq=9, lengths={9: 2} if isinstance(data, np.ndarray) else {3: 1, 9: 1})


def test_options_that_decide_on_the_sequences_are_flags_of_a_plan() -> None:
    assert {*CUTTING} <= {*DataOptions.__struct_fields__}
    assert {flag.name for flag in CUT[1:]} == {*CUTTING} - {"limit", "categories"}


def test_close_lengths_are_counted_together() -> None:
    assert histogram(np.array([1, 2, 3, 10]), np.array([5, 1, 1, 2]), most=2) == {5: 7, 10: 2}


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=400), st.integers(1, 300))
def test_lengths_are_rounded_up_never_down_and_none_is_lost(lengths: list[int], most: int) -> None:
    distinct, counts = np.unique(lengths, return_counts=True)
    grouped = histogram(distinct, counts, most)
    assert len(grouped) <= most
    assert sum(grouped.values()) == len(lengths)
    assert max(grouped) == max(lengths)
    rounded = np.repeat(list(grouped), list(grouped.values()))
    assert (rounded >= np.sort(lengths)).all()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("l.txt", "3\n4\n3\n", {3: 2, 4: 1}),
        ("l.txt", "3\n\n4", {3: 1, 4: 1}),
        ("l.csv", "length\n3\n4\n", {3: 1, 4: 1}),
        ("l.csv", '"length","count"\n3,10\n4,2\n', {3: 10, 4: 2}),
        ("l.txt", "100:5000\n2000:40\n100:1\n", {100: 5001, 2000: 40}),
        ("l.tsv", "7\t2\r\n8\t1\r\n", {7: 2, 8: 1}),
    ],
)
def test_lines_of_lengths(tmp_path: Path, name: str, text: str, expected: dict[int, int]) -> None:
    assert read_lengths(written(tmp_path / name, text)) == expected


def test_an_array_of_lengths(tmp_path: Path) -> None:
    assert read_lengths(saved(tmp_path / "l.npy", np.array([5, 6, 5], np.int32))) == {5: 2, 6: 1}


def test_many_lengths_are_bounded(tmp_path: Path) -> None:
    lengths = read_lengths(saved(tmp_path / "l.npy", np.arange(1, 10_000)))
    assert (len(lengths) <= MAX_LENGTHS, sum(lengths.values()), max(lengths)) == (True, 9_999, 9_999)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"l\.txt has none"),
        ("length\n", r"l\.txt has none"),
        ("3\nfour\n", r"l\.txt, row 2 is 'four'"),
        ("3\n4.5\n", r"row 2 is '4\.5'"),
        ("3\n0\n", r"row 2 is '0'"),
        ("3:0\n", r"row 1 is '3:0'"),
        ("-3\n", r"row 1 is '-3'"),
        ("3\n9999999999\n", r"row 2 is '9999999999'"),
        ("x" * 5000, r"row 2 is"),
    ],
)
def test_lines_that_are_no_lengths_are_named(tmp_path: Path, content: str, message: str) -> None:
    path = written(tmp_path / "l.txt", content)
    with pytest.raises(MisuseError, match=message):
        read_lengths(path)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([[1, 2]]), "is 1 x 2 of int64"),
        (np.array([1.0, 2.0]), "is 2 of float64"),
        (np.array([3, 0]), r"l\.npy, row 1 is 0"),
        (np.array([], dtype=np.int64), r"l\.npy has none"),
    ],
)
def test_arrays_that_are_no_lengths_are_named(tmp_path: Path, array: Any, message: str) -> None:
    path = saved(tmp_path / "l.npy", array)
    with pytest.raises(MisuseError, match=message):
        read_lengths(path)


def test_a_file_of_lengths_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"gone\.txt is not \(No such file"):
        read_lengths(tmp_path / "gone.txt")
