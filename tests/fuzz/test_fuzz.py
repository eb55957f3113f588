"""No input makes a reader fail in a way of its own: it is read, or refused with a short message.

A few hundred changed inputs here; `make fuzz` tries for an hour. What once failed is in `corpus`, and is tried first.
"""

from pathlib import Path
from random import Random

import pytest
from fuzz.readers import READERS, fault_of

CORPUS = Path(__file__).parent / "corpus"
COUNT = 60
each_reader = pytest.mark.parametrize("name", READERS)


@each_reader
def test_good_input_is_read(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    for content in reader.good():
        path = tmp_path / f"good{reader.suffix}"
        path.write_bytes(content)
        reader.read(path)


@each_reader
def test_what_once_failed_does_not_fail_again(name: str, tmp_path: Path) -> None:
    for path in sorted((CORPUS / name).glob("*")):
        assert fault_of(READERS[name], path.read_bytes(), tmp_path) is None, path.name


@each_reader
def test_changed_input_is_read_or_refused(name: str, tmp_path: Path) -> None:
    rng = Random(name)
    for _ in range(COUNT):
        content = READERS[name].change(rng)
        assert fault_of(READERS[name], content, tmp_path) is None, content[:2000]
