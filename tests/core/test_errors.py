"""The exception tree."""

import copy
import pickle
from typing import Annotated

import msgspec
import pytest

from oomguard._core.errors import Bounds, MisuseError, OomguardError, fields_of, flag, unknown, visible

ERROR = MisuseError(rule="--hidden must be at least 1", got="got 0", advice="Give a size such as 128.")


class Sizes(msgspec.Struct):
    rows: Annotated[int | None, Bounds(1, 9)] = None


def test_a_message_is_the_rule_what_was_got_and_what_to_do() -> None:
    assert str(ERROR) == "--hidden must be at least 1, but got 0. Give a size such as 128."


@pytest.mark.parametrize("kind", [OomguardError, ValueError])
def test_misuse_is_caught_as_an_error_of_ours_and_as_a_value_error(kind: type[Exception]) -> None:
    assert isinstance(ERROR, kind)


@pytest.mark.parametrize("twin", [pickle.loads(pickle.dumps(ERROR)), copy.copy(ERROR)], ids=["pickle", "copy"])
def test_an_error_crosses_from_one_process_to_another_whole(twin: MisuseError) -> None:
    assert (type(twin), str(twin), twin.rule, twin.got, twin.advice) == (
        *(MisuseError, str(ERROR), ERROR.rule, ERROR.got, ERROR.advice),
    )


@pytest.mark.parametrize(
    ("name", "word"), [("cell", "--model"), ("layer_norm", "--layer-norm"), ("a count", "A count")]
)
def test_a_field_is_told_by_its_flag(name: str, word: str) -> None:
    assert flag(name) == word


@pytest.mark.parametrize(("text", "safe"), [("T4\x1b[2J", "T4\\x1b[2J"), ("64 → 256\n", "64 → 256\n")])
def test_control_characters_are_written_out(text: str, safe: str) -> None:
    assert visible(text) == safe


def test_a_name_that_does_not_exist_is_answered_by_the_nearest() -> None:
    assert str(unknown("argument", "hiden", ["hidden", "seq"])) == "Unknown argument 'hiden'. Did you mean 'hidden'?"


def test_the_fields_of_a_struct_have_bounds_and_may_be_none() -> None:
    field = fields_of(Sizes)["rows"]
    assert (field.bounds, field.optional) == (Bounds(low=1, high=9), True)
