"""What `over` and `--over` take."""

from typing import Any

import numpy as np
import pytest

from oomguard._core.errors import MisuseError
from oomguard._report.grid import fields_for, read_over, read_text


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("microbatch=1..4", "microbatch", [1, 2, 3, 4]),
        ("microbatch=1..100*3", "microbatch", [1, 3, 9, 27, 81]),
        ("seq=1_000..2_000+500", "seq", [1000, 1500, 2000]),
        ("segments=1..3, 8,8", "segments", [1, 2, 3, 8]),
        ("precision=fp32,bf16", "precision", ["fp32", "bf16"]),
        ("window=none,100", "window", [None, 100]),
        ("recompute=true,false", "recompute", [True, False]),
        ("dropout=0.1,.5", "dropout", [0.1, 0.5]),
        ("layer-norm=true", "layer_norm", [True]),
        ("model=lstm,gru", "cell", ["lstm", "gru"]),
        ("allocator=steady,pooled,fast", "allocator", ["tight", "fast"]),
    ],
)
def test_a_text_gives_a_name_and_its_values(text: str, name: str, values: list[Any]) -> None:
    assert read_text(text) == (name, values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("microbatch", "a name and its values"),
        ("micro=1", "Did you mean microbatch"),
        ("accumulation=2", "follows from the microbatch"),
        ("lengths=1", "a knob"),
        ("microbatch=", "got ''"),
        ("microbatch=1,,2", "got ''"),
        ("microbatch=4..1", "goes up"),
        ("microbatch=1..8*1", "goes up"),
        ("microbatch=0..8*2", "goes up"),
        ("microbatch=1..8+0", "goes up"),
        ("microbatch=1...8", "a range"),
        ("microbatch=-3..8", "a range"),
        ("seq=1..2000000", "got 2,000,000"),
    ],
)
def test_what_is_no_range_is_refused_with_an_example(text: str, message: str) -> None:
    with pytest.raises(MisuseError, match="but ") as error:
        read_text(text)
    assert message in str(error.value)


def test_lists_ranges_arrays_and_single_values_are_taken() -> None:
    over = read_over({"microbatch": np.array([2, 1]), "segments": range(2), "seq": 5, "precision": ("fp32",)})
    assert over == {"microbatch": [2, 1], "segments": [0, 1], "seq": [5], "precision": ["fp32"]}
    assert {type(each) for each in over["microbatch"]} == {int}


@pytest.mark.parametrize("over", [{"microbatch": []}, {"microbatch": range(5, 5)}, [1], {"nothing": [1]}, {1: [1]}])
def test_an_empty_range_an_unknown_name_and_what_is_no_dict_are_refused(over: Any) -> None:
    with pytest.raises(MisuseError):
        read_over(over)


def test_a_batch_that_nobody_gave_holds_the_largest_microbatch() -> None:
    assert fields_for({"microbatch": [1, 100]}, given=()) == {"batch": 100}
    assert fields_for({"microbatch": [1, 100]}, given=("batch",)) == {}
    assert fields_for({"microbatch": [1, 8]}, given=()) == {}
