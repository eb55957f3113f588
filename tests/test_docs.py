"""What users read: every public name has an example, and the help says what is true."""

import doctest
import inspect
from typing import Any

import pytest

import oomguard

NAMES = [name for name in oomguard.__all__ if not name.startswith("__")]
CLASSES = [name for name in NAMES if inspect.isclass(getattr(oomguard, name))]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example(name: str) -> None:
    examples = doctest.DocTestParser().get_examples(getattr(oomguard, name).__doc__ or "")
    assert any(example.want for example in examples), "an example shows what comes of it"


@pytest.mark.parametrize("name", CLASSES)
def test_a_public_class_says_what_each_of_its_methods_does(name: str) -> None:
    for method, value in vars(getattr(oomguard, name)).items():
        what: Any = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if not method.startswith("_") and (isinstance(what, property) or inspect.isfunction(what)):
            assert (what.__doc__ or "").strip(), method
