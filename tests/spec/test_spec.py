"""Spec: what the user wants trained, from Python, from a mapping, from a file."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import UNPRINTABLE, attempt, garbage, garbage_for, has_three_beats, spec_fields, specs

from oomguard._core.errors import MisuseError
from oomguard._spec.read import MAX_FILE_BYTES, PRESETS, load_fields, make_spec, preset_fields
from oomguard._spec.spec import Spec, longest_seq

FIELDS = Spec.__struct_fields__
NAN, INF = float("nan"), float("inf")


def without_none(spec: Spec) -> dict[str, Any]:
    """A spec as a TOML file would have it."""
    fields: dict[str, Any] = msgspec.to_builtins(spec, str_keys=True)
    return {name: value for name, value in fields.items() if value is not None}


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def load_spec(path: Path, **changes: Any) -> Spec:
    return make_spec(load_fields(path) | changes)


# -- any valid spec


@given(specs())
def test_a_spec_goes_through_json_and_back(spec: Spec) -> None:
    assert msgspec.json.decode(msgspec.json.encode(spec), type=Spec) == spec


@given(specs())
def test_a_spec_goes_through_a_mapping_and_back(spec: Spec) -> None:
    assert make_spec(without_none(spec)) == spec


@given(specs())
def test_a_spec_goes_through_toml_and_back(spec: Spec) -> None:
    text = "\n".join(f"{name} = {toml(value)}" for name, value in without_none(spec).items())
    assert make_spec(tomllib.loads(text)) == spec


@given(spec_fields())
def test_python_and_a_mapping_make_the_same_spec(fields: dict[str, Any]) -> None:
    assert make_spec(fields) == Spec(**fields)


@given(spec_fields())
def test_what_was_given_is_never_changed(fields: dict[str, Any]) -> None:
    made = Spec(**fields)
    given_frozen = {"frozen": tuple(fields["frozen"])} if "frozen" in fields else {}
    assert {name: getattr(made, name) for name in fields} == fields | given_frozen


@given(specs())
def test_a_spec_reads_either_features_or_tokens(spec: Spec) -> None:
    assert (spec.features is None) == (spec.vocab is not None) == (spec.embedding is not None)


@given(specs())
def test_sizes_that_follow_from_others_are_set(spec: Spec) -> None:
    assert min(spec.steps, spec.inputs, spec.classes, spec.width) >= 1


@given(specs())
def test_the_longest_length_fits_into_the_steps(spec: Spec) -> None:
    assert spec.steps >= max(spec.lengths or {1: 1})


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Spec(cell="lstm", seq=10).seq = 20  # type: ignore[misc]


# -- defaults


def test_features_are_the_default_input() -> None:
    spec = Spec(cell="lstm", seq=10)
    assert (spec.features, spec.vocab, spec.embedding, spec.outputs, spec.loss) == (64, None, None, 1, "mse")


def test_a_vocabulary_sets_embedding_outputs_and_loss() -> None:
    spec = Spec(cell="lstm", seq=10, vocab=1000, hidden=77)
    assert (spec.features, spec.embedding, spec.outputs, spec.loss) == (None, 77, 1000, "cross-entropy")


def test_lengths_set_the_sequence_length() -> None:
    assert Spec(cell="gru", lengths={10: 5, 300: 1}).steps == 300


def test_the_output_of_a_layer_is_as_wide_as_its_directions_and_projection() -> None:
    assert Spec(cell="lstm", seq=10, hidden=100, projection=30, bidirectional=True).width == 60


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_spec(name: str) -> None:
    assert make_spec(preset_fields(name)).steps == PRESETS[name]["spec"]["seq"]


def test_a_preset_takes_changes() -> None:
    assert make_spec(preset_fields("char-lm") | {"seq": 5000, "batch": 8}).batch == 8


def test_a_mistyped_preset_is_answered_by_the_nearest() -> None:
    with pytest.raises(MisuseError, match=r"Did you mean forecast\?"):
        preset_fields("forcast")


# -- anything at all


@given(garbage_for(FIELDS))
def test_any_values_make_a_spec_or_misuse(fields: dict[str, Any]) -> None:
    made = attempt(Spec, **({"cell": "lstm", "seq": 10} | fields))
    assert isinstance(made, Spec) or has_three_beats(made)


@given(garbage_for((*FIELDS, "hiden", "", "model")), st.booleans())
def test_any_mapping_makes_a_spec_or_misuse(fields: dict[str, Any], whole: bool) -> None:
    made = attempt(make_spec, fields=({"cell": "lstm", "seq": 10} if whole else {}) | fields)
    assert isinstance(made, Spec) or has_three_beats(made)


@given(spec_fields(), st.sampled_from(FIELDS), garbage())
def test_one_odd_value_in_a_valid_spec_is_misuse_or_comes_back_from_json(
    fields: dict[str, Any], name: str, value: Any
) -> None:
    made = attempt(Spec, **(fields | {name: value}))
    assert has_three_beats(made) or msgspec.json.decode(msgspec.json.encode(made), type=Spec) == made


@pytest.mark.parametrize("value", UNPRINTABLE.values(), ids=UNPRINTABLE)
@pytest.mark.parametrize("name", FIELDS)
def test_a_value_that_cannot_be_shown_is_refused_with_three_beats(name: str, value: Any) -> None:
    assert has_three_beats(attempt(Spec, **({"cell": "lstm", "seq": 10} | {name: value})))


BAD: list[tuple[str, dict[str, Any], str]] = [
    *((f"zero {name}", {name: 0}, f"--{name} must be") for name in ("seq", "hidden", "layers", "batch", "outputs")),
    *((f"negative {name}", {name: -5}, f"--{name} must be") for name in ("seq", "hidden", "features", "vocab")),
    *((f"nan {name}", {name: NAN}, f"--{name} must be") for name in ("seq", "hidden", "dropout", "lengths")),
    *((f"infinite {name}", {name: INF}, f"--{name} must be") for name in ("seq", "batch", "dropout")),
    *((f"overflowing {name}", {name: 10**30}, "18 digits") for name in ("seq", "hidden", "layers", "batch", "vocab")),
    ("fraction", {"hidden": 2.5}, "--hidden must be a whole number"),
    ("whole number as text", {"seq": "100"}, "--seq must be a whole number"),
    ("true as a number", {"layers": True}, "--layers must be a whole number"),
    ("number as a switch", {"bidirectional": 1}, "--bidirectional must be true or false"),
    ("seq of a trillion", {"seq": 10**12}, "--seq must be a whole number from 1 to 1,000,000,000"),
    ("unknown key", {"hiden": 5}, r"Did you mean 'hidden'\?"),
    ("unknown key unlike any", {"zzzzzzz": 5}, "Choose from cell, seq"),
    ("cell", {"cell": "lstn"}, r"Did you mean lstm\?"),
    ("no cell", {"cell": None}, "--model must be one of"),
    ("optimizer", {"optimizer": "adamv"}, "Did you mean adam"),
    ("vocab of one", {"vocab": 1}, "--vocab must be"),
    ("dropout of one", {"dropout": 1.0}, "--dropout must be"),
    ("dropout below zero", {"dropout": -0.1}, "--dropout must be"),
    ("projection as wide as hidden", {"hidden": 64, "projection": 64}, "--projection must be smaller"),
    ("projection wider than hidden", {"hidden": 64, "projection": 65}, "--projection must be smaller"),
    ("projection of a gru", {"cell": "gru", "projection": 8}, "--model lstm only"),
    ("relu of an lstm", {"nonlinearity": "relu"}, "--model rnn only"),
    ("vocab and features", {"vocab": 100, "features": 5}, "either features or a vocabulary"),
    ("embedding without vocab", {"embedding": 5}, "--embedding needs a vocabulary"),
    ("sparse embedding without vocab", {"sparse_embedding": True}, "--sparse-embedding needs a vocabulary"),
    ("tied without vocab", {"tied": True}, "--tied needs a vocabulary"),
    ("tied with another width", {"tied": True, "vocab": 100, "embedding": 5}, "--tied needs"),
    ("tied but half frozen", {"tied": True, "vocab": 100, "frozen": ["head"]}, "frozen together"),
    ("frozen layer that is not there", {"layers": 2, "frozen": ["layer2"]}, "--frozen must name parts"),
    ("frozen embedding without vocab", {"frozen": ["embedding"]}, "--frozen must name parts"),
    ("everything frozen", {"layers": 1, "frozen": ["layer0", "head"]}, "At least one part must be trained"),
    ("classes of one", {"loss": "cross-entropy"}, "at least two classes"),
    ("empty lengths", {"lengths": {}}, "--lengths must be a histogram"),
    ("length of zero", {"lengths": {0: 5}}, "--lengths must be"),
    ("length that none has", {"lengths": {5: 0}}, "--lengths must be"),
    ("length beyond seq", {"seq": 10, "lengths": {11: 1}}, "--seq must not be shorter"),
    ("too wide", {"seq": 10**9, "batch": 1 << 20, "features": 1 << 20}, "widest tensor"),
]


@pytest.mark.parametrize(("fields", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_spec_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        make_spec({"cell": "lstm", "seq": 10} | fields)


@pytest.mark.parametrize("fields", [case[1] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_spec_is_refused_with_three_beats(fields: dict[str, Any]) -> None:
    with pytest.raises(MisuseError) as caught:
        make_spec({"cell": "lstm", "seq": 10} | fields)
    assert has_three_beats(caught.value)


def test_a_spec_without_any_length_is_refused() -> None:
    with pytest.raises(MisuseError, match="neither --seq nor --lengths"):
        make_spec({"cell": "lstm"})


def test_a_wrong_hidden_size_is_not_blamed_on_the_embedding() -> None:
    with pytest.raises(MisuseError, match=r"^--hidden"):
        Spec(cell="lstm", seq=10, vocab=100, hidden=0)


@pytest.mark.parametrize("name", ["hidden", "layers", "batch", "dropout", "frozen", "cell", "bidirectional"])
def test_a_field_that_must_have_a_value_does_not_take_none(name: str) -> None:
    fields: dict[str, Any] = {"cell": "lstm", "seq": 10, name: None}
    with pytest.raises(MisuseError):
        Spec(**fields)


# -- files


def test_a_toml_file_is_a_spec(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text('cell = "gru"\nseq = 2_000\n[lengths]\n100 = 5\n2000 = 1\n')
    assert load_spec(path) == Spec(cell="gru", seq=2000, lengths={100: 5, 2000: 1})


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text('cell = "gru"\nseq = 2000\n')
    assert load_spec(path, seq=50).seq == 50


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text('cell = "gru"\nseq = 2000\n', encoding="utf-8-sig")
    assert load_spec(path).seq == 2000


FILES: dict[str, tuple[bytes, str]] = {
    "typo in a key": (b'cell = "lstm"\nseq = 10\nhiden = 5\n', r"Did you mean 'hidden'\?"),
    "typo in the syntax": (b'cell = "lstm\nseq = 10\n', r"line 1"),
    "empty": (b"", "is empty"),
    "comments only": (b"# nothing yet\n", "is empty"),
    "binary": (bytes(range(256)), "is binary"),
    "zeros": (b"\0" * 100, "is not"),
    "UTF-16": ('cell = "lstm"'.encode("utf-16"), "is binary"),
    "JSON": (b'{"cell": "lstm"}', "is not"),
    "number of 5,000 digits": (b'cell = "lstm"\nseq = ' + b"1" * 5000, "is not"),
    "100,000 brackets": (b"seq = " + b"[" * 100_000, "is not"),
    "date": (b'cell = "lstm"\nseq = 2020-01-01\n', "--seq must be"),
    "not a number": (b'cell = "lstm"\nseq = nan\n', "--seq must be"),
    "too large": (b"#" * (MAX_FILE_BYTES + 1), "larger than 16.00 MiB"),
}


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "spec.toml"
    path.write_bytes(content)
    with pytest.raises(MisuseError, match=message) as caught:
        load_spec(path)
    assert has_three_beats(caught.value)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="Is a directory"):
        load_spec(tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="No such file"):
        load_spec(tmp_path / "none.toml")


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # not chmod, which does not stop root
    with pytest.raises(MisuseError, match="Permission denied"):
        load_spec(tmp_path / "spec.toml")


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, ""], ids=["null byte", "too long", "empty"])
def test_a_name_that_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(MisuseError):
        load_spec(Path(name))


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(MisuseError, match="it is a pipe or a device"):
        load_spec(Path("/dev/zero"))


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_any_bytes_in_a_file_make_a_spec_or_misuse(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    made = attempt(load_spec, path=path)
    assert isinstance(made, Spec) or has_three_beats(made)


@pytest.mark.parametrize(("fields", "most"), [({}, 10**9), ({"hidden": 1 << 16, "batch": 1 << 10}, 1 << 18)])
def test_the_longest_seq_depends_on_the_other_fields(fields: dict[str, Any], most: int) -> None:
    assert longest_seq(Spec(cell="gru", seq=1, **fields)) == most
