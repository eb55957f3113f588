"""Plain text as tokens: bytes or characters."""

from pathlib import Path
from typing import Any

import pytest
from data.making import inputs_of, spec, targets_of, tokens, written
from hypothesis import given
from hypothesis import strategies as st

from oomguard._core.errors import MisuseError
from oomguard._data import files
from oomguard._data.open import open_source
from oomguard._data.options import DataOptions


def test_bytes_are_tokens_as_they_are(tmp_path: Path) -> None:
    source = open_source(written(tmp_path / "t.txt", "abcdé"), tokens(vocab=256))
    assert inputs_of(source) == [[97, 98, 99, 100], [0xC3]]
    assert targets_of(source) == [[98, 99, 100, 0xC3], [0xA9]]


def test_bytes_are_not_copied(tmp_path: Path) -> None:
    open_source(written(tmp_path / "t.txt", "abcde"), tokens(vocab=256))
    assert [path.name for path in tmp_path.iterdir()] == ["t.txt"]


def test_characters_are_tokens_by_a_sorted_vocabulary(tmp_path: Path) -> None:
    source = open_source(written(tmp_path / "t.txt", "badé😀"), tokens(), DataOptions(characters=True))
    assert (inputs_of(source), targets_of(source)) == ([[1, 0, 2, 3]], [[0, 2, 3, 4]])
    assert source.describe()["vocabulary"] == "abdé😀"


def test_a_given_vocabulary_keeps_its_order(tmp_path: Path) -> None:
    options = DataOptions(characters=True, vocabulary="zyxba")
    assert inputs_of(open_source(written(tmp_path / "t.txt", "abab"), tokens(), options)) == [[4, 3, 4]]


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=2, max_size=60), st.integers(1, 7))
def test_characters_can_be_read_back_whatever_the_chunks(
    tmp_path_factory: pytest.TempPathFactory, content: str, characters: int
) -> None:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "CHUNK_CHARACTERS", characters)
        source = open_source(path, tokens(vocab=100, seq=7), DataOptions(characters=True))
    vocabulary = source.describe()["vocabulary"]
    read = [token for sequence in inputs_of(source) for token in sequence] + [targets_of(source)[-1][-1]]
    assert "".join(vocabulary[token] for token in read) == content


@pytest.mark.parametrize("before", [0, 1, 8191, 8192, 20_000])
def test_the_place_of_a_byte_that_is_not_utf8_is_counted_from_the_start(tmp_path: Path, before: int) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes("é".encode() * before + b"\xff" + b"a" * 9000)
    with pytest.raises(MisuseError, match=f"byte {2 * before:,} is not UTF-8"):
        open_source(path, tokens(), DataOptions(characters=True))


def test_a_last_step_head_predicts_the_token_after_the_window(tmp_path: Path) -> None:
    source = open_source(written(tmp_path / "t.txt", "abcdefghi"), tokens(vocab=256, head="last-step"))
    assert targets_of(source) == [ord("e"), ord("i")]


@pytest.mark.parametrize(
    ("content", "wanted", "options", "message"),
    [
        (b"", tokens(vocab=256), {}, r"t\.txt has none"),
        (b"a", tokens(vocab=256), {}, r"t\.txt has none"),
        (b"abc", spec(), {}, "needs --vocab"),
        (b"abc", tokens(vocab=256, outputs=5), {}, "--outputs of the same size"),
        (b"abc", tokens(), {"vocabulary": "abc"}, "Add --characters"),
        (b"ab\xffc", tokens(), {"characters": True}, r"t\.txt is not \(byte 2 is not UTF-8"),
        (b"ab\xc3", tokens(), {"characters": True}, r"byte 2 is not UTF-8"),
        (b"abcdefghijk", tokens(), {"characters": True}, r"t\.txt has 11, and --vocab is 10.*--vocab 11"),
        (b"abcx", tokens(), {"characters": True, "vocabulary": "abc"}, r"t\.txt, character 3 is 'x'"),
        (b"abc\x80", tokens(vocab=128), {}, r"0 to 127, but .*t\.txt, byte 3 is 128"),
    ],
)
def test_text_that_cannot_be_learned_is_refused(
    tmp_path: Path, content: bytes, wanted: Any, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(content)
    with pytest.raises(MisuseError, match=message):
        targets_of(open_source(path, wanted, DataOptions(**options)))


def test_a_file_of_unknown_kind_must_be_named(tmp_path: Path) -> None:
    path = written(tmp_path / "t.bin", "abcde")
    with pytest.raises(MisuseError, match=r"t\.bin does not say which by its suffix.*--format"):
        open_source(path, tokens(vocab=256))
    assert len(open_source(path, tokens(vocab=256), DataOptions(format="text"))) == 1
