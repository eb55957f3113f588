"""A training of skorch within a budget: a GRU tells rising from falling series.

    pip install 'oomguard[skorch]'
    python skorch_callback.py --steps 2000 --hidden 64 --budget 700MiB

Lines that end with "oomguard" are those that differ from plain skorch. Before the training, the callback plans in child
processes. If the batch does not fit at once, it runs in microbatches, and the losses stay the same.
"""

import argparse
import sys

import numpy as np
import torch
from skorch import NeuralNetClassifier
from torch import Tensor, nn

from oomguard.integrations.skorch import OomGuard  # oomguard


class Trend(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(1, hidden, batch_first=True), nn.Linear(hidden, 2)

    def forward(self, series: Tensor) -> Tensor:
        scores: Tensor = self.head(self.rnn(series)[0].mean(1))
        return scores.softmax(-1)


def make_data(series: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    labels = random.integers(2, size=series)
    slopes = (2 * labels - 1) * random.uniform(0.5, 2, size=series) / steps
    values = slopes[:, None] * np.arange(steps) + random.normal(scale=0.3, size=(series, steps))
    return values[..., None].astype("float32"), labels


def train(args: argparse.Namespace) -> list[float]:
    torch.manual_seed(0)
    net = NeuralNetClassifier(
        Trend,
        module__hidden=args.hidden,
        optimizer=torch.optim.Adam,
        lr=0.01,
        batch_size=args.rows,
        max_epochs=args.epochs,
        train_split=None,
        verbose=0,
        callbacks=[OomGuard(args.budget, timeout="3min")],  # oomguard
    )
    net.fit(*make_data(2 * args.rows, args.steps))
    return [float(loss) for loss in net.history[:, "train_loss"]]


def main(words: list[str]) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--budget", default="4GiB")
    return train(parser.parse_args(words))


if __name__ == "__main__":
    for number, loss in enumerate(main(sys.argv[1:]), 1):
        print(f"epoch {number}: loss {loss:.4f}")
