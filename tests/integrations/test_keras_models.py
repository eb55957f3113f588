"""Files of Keras are read without Keras, and the same model in PyTorch is estimated."""

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import oomguard
from oomguard import MisuseError
from oomguard._cli.app import run
from oomguard._keras.read import MAX_CONFIG_BYTES
from oomguard._keras.task import KerasModel, read_model, read_task

pytestmark = pytest.mark.timeout(300)
STEPS = 12


@pytest.fixture(scope="module")
def keras() -> Any:
    os.environ["KERAS_BACKEND"] = "torch"
    pytest.importorskip("keras", reason="keras is not installed (extra keras)")
    import keras

    return keras


@pytest.fixture(scope="module")
def save(keras: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Writes a model of some layers with an input of `shape`, and returns the path."""
    home = tmp_path_factory.mktemp("keras models")

    def write(*layers: Any, shape: tuple[int | None, ...] = (None, 6), suffix: str = "keras", **compiled: Any) -> str:
        model = keras.Sequential([keras.Input(shape), *layers])
        if compiled:
            model.compile(**compiled)
        path = home / f"model {len([*home.iterdir()])}.{suffix}"
        path.write_text(model.to_json()) if suffix == "json" else model.save(path)
        return str(path)

    return write


def parameters_of(model: KerasModel) -> int:
    return sum(parameter.numel() for parameter in model().parameters())


def refused(path: str, steps: int | None = STEPS) -> str:
    with pytest.raises(MisuseError) as caught:
        read_model(path, steps)
    assert len(str(caught.value)) < 900
    return str(caught.value)


# ---- what is read


def test_a_model_has_the_parameters_of_keras_in_every_format(keras: Any, save: Any) -> None:
    la = keras.layers
    layers = [la.LSTM(8, return_sequences=True), la.Bidirectional(la.GRU(5)), la.Dense(3, activation="softmax")]
    expected = keras.Sequential([keras.Input((None, 6)), *layers]).count_params()
    for suffix in ("keras", "json", "h5"):
        model = read_model(save(*layers, suffix=suffix), STEPS)
        assert model.parameters == expected, suffix
        assert model.own_parameters == parameters_of(model) == expected + 4 * 8  # the second bias of PyTorch's LSTM


def test_loss_and_optimizer_are_those_of_compile(keras: Any, save: Any) -> None:
    la, sgd = keras.layers, keras.optimizers.SGD(0.1, momentum=0.9)
    for suffix in ("keras", "h5"):
        path = save(la.LSTM(4), la.Dense(3), suffix=suffix, optimizer=sgd, loss="sparse_categorical_crossentropy")
        model = read_model(path, STEPS)
        assert (model.loss, model.optimizer, model.momentum) == ("cross-entropy", "SGD", 0.9)
        assert model.notes == ()


@pytest.mark.parametrize(
    ("activation", "loss"), [("softmax", "cross-entropy"), ("sigmoid", "binary"), ("linear", "mse")]
)
def test_without_compile_the_last_activation_tells_the_loss(keras: Any, save: Any, activation: str, loss: str) -> None:
    model = read_model(save(keras.layers.GRU(4), keras.layers.Dense(3, activation=activation)), STEPS)
    assert model.loss == loss
    assert "it was not compiled" in model.notes[0]


def test_the_module_computes_what_keras_computes(keras: Any, save: Any) -> None:
    la = keras.layers
    layers = [la.Bidirectional(la.LSTM(4, return_sequences=True)), la.GRU(3), la.Dense(2, activation="tanh")]
    model = keras.Sequential([keras.Input((None, 6)), *layers])
    module, inputs = read_model(save(*layers), STEPS)().eval(), torch.randn(2, STEPS, 6)
    both, gru, dense = module.children()

    def put(name: str, ours: Any, order: list[int], weights: list[Any]) -> None:
        kernel, recurrent, bias = (torch.as_tensor(w.numpy()) for w in weights)
        parts = [[x.T.chunk(len(order))[i] for i in order] for x in (kernel, recurrent)]
        biases = bias if bias.dim() == 2 else torch.stack([bias, torch.zeros_like(bias)])
        halves = [torch.cat([half.chunk(len(order))[i] for i in order]) for half in biases]
        for kind, value in zip(
            ("weight_ih", "weight_hh", "bias_ih", "bias_hh"), [*map(torch.cat, parts), *halves], strict=True
        ):
            getattr(ours, f"{kind}_l0{name}").data.copy_(value)

    put("", both, [0, 1, 2, 3], layers[0].forward_layer.weights)
    put("_reverse", both, [0, 1, 2, 3], layers[0].backward_layer.weights)
    put("", gru, [1, 0, 2], layers[1].weights)
    dense.weight.data.copy_(torch.as_tensor(layers[2].weights[0].numpy()).T)  # type: ignore[operator]
    dense.bias.data.copy_(torch.as_tensor(layers[2].weights[1].numpy()))  # type: ignore[operator]
    assert torch.allclose(module(inputs), torch.as_tensor(model(inputs).detach()), atol=1e-6)


def test_what_pytorch_does_not_have_is_noted_by_name(keras: Any, save: Any) -> None:
    la = keras.layers
    layer = la.LSTM(4, activation="relu", recurrent_activation="hard_sigmoid", recurrent_dropout=0.1, name="odd")
    notes = " ".join(read_model(save(layer, la.Dense(1), optimizer="adam", loss="mse"), STEPS).notes)
    assert notes.count("'odd'") == 3
    assert all(word in notes for word in ("relu", "hard_sigmoid", "recurrent_dropout"))


def test_keras_2_writes_the_nodes_in_another_way() -> None:
    """An encoder and a decoder in the form of Keras 2.15, where states are given by position."""
    model = read_model(str(Path(__file__).with_name("keras_2.json")), STEPS)
    assert model.parameters == 4 * 8 * (6 + 8 + 1) + 4 * 8 * (5 + 8 + 1) + (8 + 1) * 5
    made = model()(torch.randn(3, STEPS, 6), torch.randn(3, STEPS, 5))
    assert made.shape == (3, STEPS, 5)


def test_a_length_of_the_file_needs_no_seq_and_may_be_replaced(keras: Any, save: Any) -> None:
    la = keras.layers
    free = save(la.LSTM(4, return_sequences=True), la.GlobalMaxPooling1D(), la.Dense(1), shape=(30, 6))
    assert (read_model(free).steps, read_model(free, 50).steps) == (30, 50)
    bound = save(la.LSTM(4, return_sequences=True), la.Flatten(), la.Dense(1), shape=(30, 6))
    assert not read_model(bound).flexible
    assert read_model(bound, 50).parameters > read_model(bound).parameters
    assert "depend on the length" in " ".join(read_model(bound, 50).notes)


# ---- what is refused


@pytest.mark.parametrize("suffix", ["json", "h5"])
def test_code_in_a_file_is_never_run(keras: Any, save: Any, suffix: str, tmp_path: Path) -> None:
    mark = tmp_path / "was run"
    layer = keras.layers.Lambda(lambda x, path=str(mark): [x, Path(path).write_text("")][0], name="evil")
    path = save(layer, keras.layers.LSTM(4), suffix=suffix)
    mark.unlink(missing_ok=True)  # keras itself has run it
    try:
        read_model(path, STEPS)
    except MisuseError as error:
        assert "'evil' (Lambda)" in str(error)  # noqa: PT017
    assert not mark.exists()


def test_an_unknown_layer_that_keeps_the_shape_is_left_out_by_name(keras: Any, save: Any) -> None:
    path = save(keras.layers.Lambda(lambda x: 2 * x, name="twice"), keras.layers.LSTM(4))
    assert "'twice' (Lambda) is not known and is left out" in " ".join(read_model(path, STEPS).notes)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is no JSON"),
        (b"[1, 2]", "no class_name and config"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"class_name": "Sequential", "config": {"layers": []}}', "no list of layers"),
        (
            b'{"class_name": "Sequential", "config": {"layers": [{"class_name": "LSTM", "config": {}}]}}',
            "before it was",
        ),
        (b'{"class_name": "Own", "config": {"units": 3}}', "neither a Sequential nor a Functional"),
        (b'{"class_name": "Functional", "config": {"layers": [7]}}', "have a class_name and a config"),
        (b'{"class_name": "Functional", "config": {"layers": []}}', "no input_layers or no output_layers"),
    ],
)
def test_a_damaged_configuration_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content)
    assert words in refused(str(path))


def sequential(*layers: tuple[str, dict[str, Any]], shape: tuple[int | None, ...] = (None, None, 6)) -> bytes:
    listed = [{"class_name": "InputLayer", "config": {"batch_shape": shape, "name": "in"}}]
    listed += [{"class_name": kind, "config": {"name": f"own_{n}"} | more} for n, (kind, more) in enumerate(layers)]
    return json.dumps({"class_name": "Sequential", "config": {"name": "m", "layers": listed}}).encode()


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (("LSTM", {}), "units must be a whole number from 1, not None"),
        (("LSTM", {"units": "8"}), "not '8'"),
        (("LSTM", {"units": 10**30}), "more than 18 digits"),
        (("LSTM", {"units": 1 << 39}), "cannot be read"),
        (("GRU", {"units": 2, "use_bias": 1}), "use_bias must be true or false"),
        (("Dropout", {"rate": 7}), "rate must be a number from 0 to 1"),
        (("Bidirectional", {"layer": 3}), "have a class_name and a config"),
        (("TimeDistributed", {}), "have a class_name and a config"),
        (("RNN", {"cell": {"class_name": "Evil", "config": {}}}), "'Evil'"),
        (("Conv1D", {"filters": 2, "kernel_size": [1, 2]}), "1 whole numbers"),
        (("Reshape", {"target_shape": [7, 11]}), "does not take inputs of shape"),
        (("Dense\x1b[31m", {}), "Dense\\x1b[31m"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_name_of_the_layer(
    layer: tuple[str, dict[str, Any]], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(sequential(layer))
    message = refused(str(path))
    assert words in message
    assert "\x1b" not in message


def test_models_in_models_without_end_are_refused(tmp_path: Path) -> None:
    inner: dict[str, Any] = {"class_name": "Dense", "config": {"units": 1, "name": "d"}}
    for depth in range(60):
        first = {"class_name": "InputLayer", "config": {"batch_shape": [None, None, 6], "name": f"in{depth}"}}
        inner = {"class_name": "Sequential", "config": {"name": f"m{depth}", "layers": [first, inner]}}
    path = tmp_path / "model.json"
    path.write_text(json.dumps(inner))
    assert "nested" in refused(str(path))


def test_a_layer_that_needs_its_own_output_is_refused(tmp_path: Path) -> None:
    nodes = [("in", []), ("a", [[["b", 0, 0, {}]]]), ("b", [[["a", 0, 0, {}]]])]
    layers = [
        {"class_name": "InputLayer" if name == "in" else "Dense", "inbound_nodes": calls}
        | {"config": {"name": name, "units": 2, "batch_input_shape": [None, 3]}}
        for name, calls in nodes
    ]
    config = {"name": "m", "layers": layers, "input_layers": [["in", 0, 0]], "output_layers": [["b", 0, 0]]}
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"class_name": "Functional", "config": config}))
    assert "needs its own output" in refused(str(path))


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.keras"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("config.json", "w") as member:
        for _ in range(MAX_CONFIG_BYTES // (1 << 22) + 1):
            member.write(b" " * (1 << 22))
    assert "larger than 64.00 MiB" in refused(str(path))


def archives() -> Iterator[tuple[str, bytes, str]]:
    yield "no zip", b"PK\x03\x04 and nothing else", "damaged"
    yield "hdf5", b"\x89HDF\r\n\x1a\n" + bytes(100), "damaged"
    yield "pickle", b"\x80\x04\x95" + bytes(20), "no JSON"


@pytest.mark.parametrize(("name", "content", "words"), [*archives()], ids=lambda value: str(value)[:9])
def test_a_damaged_archive_is_refused(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.keras"
    path.write_bytes(content)
    assert words in refused(str(path))


def test_weights_alone_are_refused(keras: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.weights.h5"
    keras.Sequential([keras.Input((None, 6)), keras.layers.LSTM(4)]).save_weights(path)
    assert "weights only" in refused(str(path))


def test_an_archive_without_a_configuration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other.json", "{}")
    assert "no config.json" in refused(str(path))


def test_without_h5py_the_message_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "h5py.py").write_text("raise ImportError('no h5py')")
    code = "from oomguard._keras.read import read_attributes; read_attributes('m.h5')"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "pip install 'oomguard[keras]'" in done.stderr.splitlines()[-1]


# ---- the estimate


def test_a_keras_model_is_a_task(keras: Any, save: Any) -> None:
    path = save(keras.layers.LSTM(16), keras.layers.Dense(1))
    task = read_task(path, 40)
    small, large = (oomguard.estimate(task, microbatch=rows, steps=40, progress=False) for rows in (2, 64))
    assert small.total_bytes < large.total_bytes
    assert "lstm" in " ".join(large.parts)


def test_the_command_says_what_the_model_needs_and_which_knob_helps(
    keras: Any, save: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    path = save(keras.layers.LSTM(64, return_sequences=True), keras.layers.Dense(1), optimizer="adam", loss="mse")
    code = run(["estimate", "--model", path, "--seq", "8000", "--batch", "16", "--budget", "500MiB", "--quiet"])
    out, err = capsys.readouterr()
    assert (code, err) == (1, "")
    assert "DOES NOT FIT" in out
    assert "18,241 parameters in Keras" in " ".join(out.split())
    assert re.search(r"--segments \d+, the same gradient", out)
    assert max(map(len, out.splitlines())) <= 60


def test_the_document_has_parameters_and_advice(keras: Any, save: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(keras.layers.GRU(4), keras.layers.BatchNormalization(), keras.layers.Dense(1))
    assert run(["estimate", "--model", path, "--seq", "50", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["keras"]["parameters"] == read_model(path, 50).parameters
    assert "BatchNormalization looks at the whole batch" in " ".join(found["notes"])
    assert found["advice"] == []


def test_weights_that_this_machine_cannot_hold_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(sequential(("LSTM", {"units": 1 << 20})))
    assert run(["estimate", "--model", str(path), "--seq", "9", "--quiet"]) == 2
    assert "16.00 TiB, and" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("estimate --model {path}", "Give --seq 1000"),
        ("estimate --model {path} --seq 9 --hidden 4", "--hidden describes a built-in model"),
        ("estimate --model {path} --seq abc", "--seq must be a whole number"),
        ("estimate --model {path} --seq 9 --batch 0", "--batch must be a whole number"),
        ("estimate --model {path}x.keras --seq 9", "cannot be read"),
        ("plan --model {path} --seq 9", "a model of Keras"),
    ],
)
def test_misuse_ends_with_a_message_and_exit_2(
    line: str, words: str, keras: Any, save: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(keras.layers.GRU(4), keras.layers.Dense(1))
    words_of_line = [word.format(path=path) for word in line.split()]
    assert run([*words_of_line, "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert (out, words in err) == ("", True), err
