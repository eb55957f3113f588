"""A model of Keras 3 on PyTorch, trained by `model.fit`: an LSTM and a GRU that continue a noisy wave.

    pip install 'oomguard[keras]'
    cd examples
    python keras_fit.py --steps 2000 --hidden 64 --epochs 1 --segments 20

Lines that end with "oomguard" are those that differ from plain Keras, and "plain:" shows what was there before. Keras
runs a Python loop over the steps on the CPU; with the callback, PyTorch's kernels run, in segments. With the flags
above, training grows the peak by 6 MiB instead of 305 MiB.
"""

import argparse
import os
import sys

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

from oomguard.integrations.keras import OomGuard  # oomguard


def build(hidden: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.LSTM(hidden, return_sequences=True), keras.layers.GRU(hidden, return_sequences=True)]
    model = keras.Sequential([keras.Input((None, 1)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), loss="mse")
    return model


def train(args: argparse.Namespace) -> list[float]:
    model, draw = build(args.hidden), np.random.default_rng(0)
    times = draw.uniform(0, 9, (args.rows, 1, 1)) + np.linspace(0, args.steps / 10, args.steps + 1)[:, None]
    waves = (np.sin(times) + draw.normal(scale=0.1, size=times.shape)).astype("float32")
    # plain: callbacks = []
    callbacks = [OomGuard(args.budget, segments=args.segments)]  # oomguard
    fitted = model.fit(
        waves[:, :-1], waves[:, 1:], batch_size=args.rows, epochs=args.epochs, verbose=0, callbacks=callbacks
    )
    losses: list[float] = fitted.history["loss"]
    return losses


def main(words: list[str]) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--segments", type=int, default=4, help="pieces of a recurrent call")
    parser.add_argument("--budget", default="4GiB")
    return train(parser.parse_args(words))


if __name__ == "__main__":
    for number, loss in enumerate(main(sys.argv[1:]), 1):
        print(f"epoch {number}: loss {loss:.4f}")
