"""A probabilistic forecast of many series: a GRU with covariates gives a normal distribution for every hour.

    cd examples
    oomguard estimate --model forecast:task --seq 2000 --budget 1GiB
    python forecast.py --hours 2000 --hidden 128 --segments 20

Lines that end with "oomguard" are those that differ from plain PyTorch, and "plain:" shows what was there before. With
the flags above, an update grows the peak by 18 MiB instead of 345 MiB. If memory gets tight nevertheless, the stepper
runs the batch again in smaller pieces.
"""

import argparse
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import gaussian_nll_loss, softplus

import oomguard  # oomguard

HOURS_OF_WEEK = 168


class Forecaster(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.hour = nn.Embedding(HOURS_OF_WEEK, 8)
        self.rnn = nn.GRU(1 + 8, hidden, 2, batch_first=True)
        self.head = nn.Linear(hidden, 2)

    def forward(self, series: Tensor, hours: Tensor) -> tuple[Tensor, Tensor]:
        scale = 1 + series.abs().mean(1, keepdim=True)
        features = torch.cat([(series / scale)[..., None], self.hour(hours % HOURS_OF_WEEK)], -1)
        mean, spread = self.head(self.rnn(features)[0]).unbind(-1)
        return mean * scale, (softplus(spread) * scale).square() + 1e-4


def make_batch(rows: int, hours: int) -> tuple[Tensor, Tensor]:
    """Series with a rhythm of a day and of a week, and the hours that they are of."""
    start = torch.randint(HOURS_OF_WEEK, (rows, 1))
    when = start + torch.arange(hours + 1)
    height, day, week = torch.rand(3, rows, 1) * 10
    series = height + day * (when * 2 * torch.pi / 24).sin() + week * (when * 2 * torch.pi / HOURS_OF_WEEK).sin()
    return series + torch.randn(rows, hours + 1), when


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    series, hours = batch
    mean, variance = model(series[:, :-1], hours[:, 1:])
    return gaussian_nll_loss(mean, series[:, 1:], variance)


task = oomguard.Task(model=Forecaster, loss=loss_of, batch=make_batch)  # oomguard


def batches(args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(args.updates):
        yield make_batch(args.rows, args.hours)


def train(args: argparse.Namespace) -> list[float]:
    torch.manual_seed(0)
    model = Forecaster(args.hidden)
    oomguard.segment(model, segments=args.segments)  # oomguard
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = oomguard.stepper(args.budget, model, loss_of, optimizer)  # oomguard
    losses = []
    for batch in batches(args):
        # plain: loss = loss_of(model, batch)
        # plain: optimizer.zero_grad()
        # plain: loss.backward()
        # plain: optimizer.step()
        loss = step(batch)  # oomguard
        losses.append(loss.item())
    return losses


def main(words: list[str]) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--hours", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--segments", type=int, default=8, help="pieces of a recurrent call")
    parser.add_argument("--budget", default="4GiB")
    return train(parser.parse_args(words))


if __name__ == "__main__":
    for number, loss in enumerate(main(sys.argv[1:]), 1):
        print(f"update {number}: loss {loss:.4f}")
