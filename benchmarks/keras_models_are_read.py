"""Claim: models written with Keras 3 are read without Keras, or refused with the name of the layer. The numbers of
parameters of those that are read equal Keras's own.

    python benchmarks/keras_models_are_read.py [--smoke]

Keras writes 12 models, stacked, bidirectional, encoder and decoder, masked, time-distributed, convolutional, with
shared layers and attention, and 4 with a layer that is not known. Each is written as .keras, as .json and as .h5. Every
file is read in a process that cannot import Keras. Parameters and the shapes of the outputs are compared with what
Keras says.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results import print_row, publish

STEPS, SUFFIXES = 40, ("keras", "json", "h5")
WIDTHS = (18, 10, 10, 7, 10)
READ = """
import json, sys
sys.modules["keras"] = sys.modules["tensorflow"] = None  # an import of either fails
import torch
from oomguard._keras.task import read_model
from oomguard._keras.network import Network, first_shapes
from oomguard._core.errors import OomguardError
found = {}
for path in sys.argv[2:]:
    try:
        model = read_model(path, int(sys.argv[1]))
        with torch.device("meta"):
            shapes = Network(model.graph, first_shapes(model.graph, model.steps), []).shapes
        found[path] = {"parameters": model.parameters, "shapes": shapes, "notes": model.notes}
    except OomguardError as error:
        found[path] = {"refused": str(error)}
print(json.dumps(found))
"""


def models() -> dict[str, Callable[[], Any]]:
    """Functions that build the models, by name. Keras is imported here."""
    import keras
    from keras import layers as la

    def words() -> Any:
        return keras.Input((None,), dtype="int32")

    def numbers(width: int = 6) -> Any:
        return keras.Input((None, width))

    def stacked() -> Any:
        layers = [numbers(), la.LSTM(32, return_sequences=True), la.Dropout(0.2), la.GRU(24), la.Dense(1)]
        return keras.Sequential(layers)

    def vanilla() -> Any:
        return keras.Sequential([numbers(), la.SimpleRNN(20, activation="relu"), la.Dense(3, activation="softmax")])

    def both_ways() -> Any:
        tagger = [keras.Input((None,), dtype="int32"), la.Embedding(500, 16)]
        tagger += [la.Bidirectional(la.LSTM(12, return_sequences=True)), la.Bidirectional(la.GRU(7), merge_mode="sum")]
        return keras.Sequential([*tagger, la.Dense(1, activation="sigmoid")])

    def encoder_decoder() -> Any:
        source, target = numbers(5), numbers(4)
        _, hidden, cell = la.LSTM(16, return_state=True)(source)
        decoded = la.LSTM(16, return_sequences=True)(target, initial_state=[hidden, cell])
        return keras.Model([source, target], la.Dense(9, activation="softmax")(decoded))

    def with_attention() -> Any:
        source, target = words(), words()
        states, *ends = la.LSTM(16, return_sequences=True, return_state=True)(la.Embedding(90, 8)(source))
        decoded = la.LSTM(16, return_sequences=True)(la.Embedding(70, 8)(target), initial_state=ends)
        context = la.Attention()([decoded, states])
        return keras.Model([source, target], la.Dense(70, activation="softmax")(la.Concatenate()([decoded, context])))

    def masked() -> Any:
        i = numbers()
        return keras.Model(i, la.Dense(2)(la.LSTM(10)(la.Masking()(i))))

    def masked_words() -> Any:
        i = words()
        x = la.Bidirectional(la.LSTM(9, return_sequences=True))(la.Embedding(200, 12, mask_zero=True)(i))
        return keras.Model(i, la.TimeDistributed(la.Dense(5, activation="softmax"))(x))

    def distributed() -> Any:
        video = keras.Input((None, 16, 16, 3))
        frames = [la.Conv2D(4, 3, padding="same", activation="relu"), la.MaxPooling2D(), la.Flatten()]
        x = video
        for layer in frames:
            x = la.TimeDistributed(layer)(x)
        return keras.Model(video, la.Dense(2)(la.LSTM(8)(x)))

    def convolutional() -> Any:
        layers = [numbers(), la.Conv1D(16, 5, padding="causal", activation="relu"), la.BatchNormalization()]
        layers += [la.MaxPooling1D(2), la.LSTM(12, return_sequences=True), la.GlobalAveragePooling1D()]
        return keras.Sequential([*layers, la.LayerNormalization(), la.Dense(4)])

    def residual() -> Any:
        i = numbers(16)
        x = la.Add()([i, la.GRU(16, return_sequences=True, reset_after=False)(i)])
        x = la.MultiHeadAttention(2, 8)(x, x)
        return keras.Model(i, la.Dense(1)(x + 1.0))

    def shared() -> Any:
        a, b = words(), words()
        encode = keras.Sequential([keras.Input((None,), dtype="int32"), la.Embedding(50, 8), la.LSTM(6)])
        return keras.Model([a, b], la.Dense(1, activation="sigmoid")(la.Concatenate()([encode(a), encode(b)])))

    def frame_by_frame() -> Any:
        frame = keras.Sequential([keras.Input((12,)), la.Dense(8, activation="relu"), la.Dense(4)])
        layers = [keras.Input((STEPS, 12)), la.TimeDistributed(frame), la.LSTM(5, return_sequences=True)]
        return keras.Sequential([*layers, la.Flatten(), la.Dense(2)])

    def with_lambda() -> Any:
        return keras.Sequential([numbers(), la.LSTM(4), la.Lambda(lambda x: x * 2, name="twice"), la.Dense(1)])

    def picture_cells() -> Any:
        return keras.Sequential([keras.Input((None, 8, 8, 1)), la.ConvLSTM2D(4, 3, name="clouds"), la.Flatten()])

    @keras.saving.register_keras_serializable("own")
    class Halves(la.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x[..., ::2]

    def own_layer() -> Any:
        return keras.Sequential([numbers(), Halves(name="halves"), la.LSTM(4)])

    def unequal() -> Any:
        back = la.LSTM(4, go_backwards=True, return_sequences=True)
        layer = la.Bidirectional(la.LSTM(8, return_sequences=True), backward_layer=back, name="unequal_ways")
        return keras.Sequential([numbers(), layer])

    read = (stacked, vanilla, both_ways, encoder_decoder, with_attention, masked, masked_words, distributed)
    read += (convolutional, residual, shared, frame_by_frame)
    return {make.__name__: make for make in (*read, with_lambda, picture_cells, own_layer, unequal)}


UNKNOWN = {"with_lambda": "twice", "picture_cells": "clouds", "own_layer": "halves", "unequal": "unequal_ways"}
"""Models with a layer that is not known, and its name. Where the file shows that it keeps the shape, it is left out."""


def write(directory: Path) -> None:
    """Write all models and what Keras says of them."""
    facts = {}
    for name, make in models().items():
        model = make()
        model.compile("adam", "mse")
        model.save(directory / f"{name}.keras")
        model.save(directory / f"{name}.h5")
        (directory / f"{name}.json").write_text(model.to_json())
        shape = [size or STEPS for size in model.output_shape[1:]]
        facts[name] = {"parameters": model.count_params(), "shapes": [shape]}
    (directory / "facts.txt").write_text(json.dumps(facts))


def compare(name: str, keras: dict[str, Any], found: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare what was read of the files of one model with what Keras says."""
    counts = [one.get("parameters") for one in found]
    words = [" ".join([one.get("refused", ""), *one.get("notes", [])]) for one in found]
    equal = all(count == keras["parameters"] for count in counts if count is not None)
    outcome = "equal" if equal and all(one.get("shapes") == keras["shapes"] for one in found) else "WRONG"
    if name in UNKNOWN:
        named = equal and all(UNKNOWN[name] in text and len(text) < 700 for text in words)
        outcome = "named" if named else "WRONG"
    return {"model": name, "keras": keras["parameters"], "read": counts, "outcome": outcome, "words": words}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="the same, since it takes seconds; nothing is stored")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write(args.write)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        quiet: dict[str, Any] = {"check": True, "env": os.environ | {"KERAS_BACKEND": "torch"}}
        subprocess.run([sys.executable, __file__, "--write", folder], stderr=subprocess.DEVNULL, **quiet)
        facts = json.loads((here / "facts.txt").read_text())
        paths = [str(here / f"{name}.{suffix}") for name in facts for suffix in SUFFIXES]
        done = subprocess.run([sys.executable, "-c", READ, str(STEPS), *paths], stdout=subprocess.PIPE, check=True)
        found = json.loads(done.stdout)
    print_row(("model", "Keras", "read", "files", "outcome"), WIDTHS)
    for name, keras in facts.items():
        own = [one for path, one in found.items() if Path(path).stem == name]
        rows.append(row := compare(name, keras, own))
        print_row((name, row["keras"], row["read"][0] or "", len(own), row["outcome"]), WIDTHS)
    equal, named = (sum(row["outcome"] == what for row in rows) for what in ("equal", "named"))
    known = len(rows) - len(UNKNOWN)
    claims = {
        f"{known} models in {len(SUFFIXES)} formats are read, with Keras's number of parameters and shapes of outputs "
        f"({equal})": equal == known,
        f"{len(UNKNOWN)} models with an unknown layer are refused, or read without it, and it is named ({named})": named
        == len(UNKNOWN),
    }
    publish("keras_models_are_read", {"rows": rows}, claims, whole=True, packages=("keras", "h5py"))


if __name__ == "__main__":
    main()
