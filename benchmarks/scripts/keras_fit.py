"""Classify sequences of tokens with Keras on PyTorch: an Embedding, a bidirectional LSTM, a GRU, model.fit."""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    tokens = random.integers(1, 500, (64, args.steps))
    labels = (tokens < 250).mean(1) > 0.5
    model = keras.Sequential(
        [
            keras.layers.Embedding(500, 32),
            keras.layers.Bidirectional(keras.layers.LSTM(48, return_sequences=True)),
            keras.layers.GRU(48),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(1),
        ]
    )
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(3e-3, clipnorm=1.0), loss=loss)
    history = model.fit(tokens, labels, batch_size=32, epochs=args.epochs, shuffle=False, verbose=0)
    for epoch, value in enumerate(history.history["loss"]):
        print(f"epoch {epoch} loss {value:.9g}", flush=True)


if __name__ == "__main__":
    main()
