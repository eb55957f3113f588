"""A loop written by hand, with a GradScaler, a schedule, clipping and a moving average of the weights, under the guard.

    cd examples
    python hand_loop.py --budget 1GiB

Lines that end with "oomguard" are those that differ from plain PyTorch, and "plain:" shows what was there before. The
stepper makes the update: it cuts a batch that needs more than the budget into pieces, scales and clips the gradient of
the whole batch, and runs the batch again in smaller pieces if memory runs out. What follows an update stays below it.
"""

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import oomguard  # oomguard


class Sensor(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, readings: Tensor) -> Tensor:
        levels: Tensor = self.head(self.rnn(readings)[0]).squeeze(-1)
        return levels


def make_loader(sensors: int, rows: int, steps: int) -> DataLoader[tuple[Tensor, ...]]:
    """Readings of noisy sensors. The level to be told is a running sum of one reading."""
    torch.manual_seed(0)
    readings = torch.randn(sensors, steps, 6)
    levels = readings[..., 0].cumsum(1) / torch.arange(1, steps + 1).sqrt()
    return DataLoader(TensorDataset(readings, levels), rows)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    readings, levels = batch
    return nn.functional.smooth_l1_loss(model(readings), levels)


def train(args: argparse.Namespace) -> list[float]:
    loader = make_loader(args.sensors, args.rows, args.steps)
    torch.manual_seed(1)
    model = Sensor(args.hidden)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    scaler = torch.amp.GradScaler("cpu")
    step = oomguard.stepper(args.budget, model, loss_of, optimizer, clip=1.0, scaler=scaler)  # oomguard
    losses = []
    for readings, levels in (batch for _ in range(args.epochs) for batch in loader):
        # plain: loss = loss_of(model, (readings, levels))
        # plain: optimizer.zero_grad()
        # plain: scaler.scale(loss).backward()
        # plain: scaler.unscale_(optimizer)
        # plain: nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # plain: scaler.step(optimizer)
        # plain: scaler.update()
        loss = step((readings, levels))  # oomguard
        schedule.step()
        average.update_parameters(model)
        losses.append(loss.item())
    parts = [*zip(readings.split(8), levels.split(8), strict=True)]
    with torch.no_grad():  # the averaged weights on the last batch
        losses.append(sum(loss_of(average, part).item() for part in parts) / len(parts))
    return losses


def main(words: list[str]) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--sensors", type=int, default=64)
    parser.add_argument("--rows", type=int, default=32, help="sensors of an update")
    parser.add_argument("--steps", type=int, default=50, help="readings of a sensor")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--budget", default="2GiB")
    return train(parser.parse_args(words))


if __name__ == "__main__":
    *losses, average = main(sys.argv[1:])
    for number, loss in enumerate(losses, 1):
        print(f"update {number}: loss {loss:.4f}")
    print(f"averaged weights: loss {average:.4f}")
