"""The exception tree."""

import copy
import pickle

import pytest

from oomguard._core.errors import MisuseError, OomguardError

ERROR = MisuseError(rule="--hidden must be at least 1", got="got 0", advice="Give a size such as 128.")


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
