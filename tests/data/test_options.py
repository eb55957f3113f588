"""Options are checked at birth, and come back from JSON as they went."""

from typing import Any

import msgspec
import pytest
from data.making import numbers, spec

from oomguard._core.errors import MisuseError
from oomguard._data.open import open_source
from oomguard._data.options import DataOptions, check_used


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "xls"}, "--format must be one of npy, csv, parquet, text, but got 'xls'"),
        ({"nan": "ignore"}, "--nan must be one of error, drop, cut, zero"),
        ({"nan": None}, "--nan must be one of"),
        ({"split": "random"}, "--split must be one of series, time"),
        ({"normalise": True}, "--normalise must be one of"),
        ({"columns": ()}, "--columns must be a list of different columns, but got ()"),
        ({"columns": ("a", "a")}, "--columns must be a list of different"),
        ({"target": (1.5,)}, r"--target must be a list .*\(\"0\", \"3\"\)"),
        ({"stride": 0}, "--stride must be a whole number from 1"),
        ({"ahead": -1}, "--ahead must be a whole number from 0"),
        ({"limit": 0}, "--limit must be"),
        ({"workers": -1}, "--workers must be"),
        ({"seed": -1}, "--seed must be"),
        ({"seed": None}, "--seed must be"),
        ({"truncate": 1}, "--truncate must be true or false"),
        ({"characters": "yes"}, "--characters must be true or false"),
        ({"id": ""}, "--id must be text"),
        ({"vocabulary": "abca"}, "every character once, but 'a' comes twice"),
        ({"validation": 1}, "--validation must be a share"),
        ({"validation": -0.1}, "--validation must be a share"),
        ({"validation": float("nan")}, "--validation must be a share"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        DataOptions(**fields)


@pytest.mark.parametrize(
    "options",
    [DataOptions(), DataOptions(columns=["a", "b"], target=("c",), id="i", stride=3, nan="drop")],  # type: ignore[arg-type]
)
def test_options_come_back_from_json_as_they_went(options: DataOptions) -> None:
    assert msgspec.json.decode(msgspec.json.encode(options), type=DataOptions) == options


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("npy", {"id": "a"}),
        ("npy", {"characters": True}),
        ("csv", {"targets": "y.npy"}),
        ("text", {"columns": ("a",)}),
        ("pairs", {"target": ("a",)}),
        ("Dataset", {"stride": 3}),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(kind: str, fields: dict[str, Any]) -> None:
    with pytest.raises(MisuseError, match=f"this data is {kind}"):
        check_used(kind, DataOptions(**fields))


def test_targets_are_columns_or_a_file() -> None:
    with pytest.raises(MisuseError, match="got --target 0 and --targets"):
        open_source(numbers(3, 4, 2), spec(), DataOptions(target=("0",), targets=__file__))
