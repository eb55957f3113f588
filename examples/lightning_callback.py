"""A training of Lightning within a budget: an LSTM finds how long a wave is, from a long and noisy piece of it.

    pip install 'oomguard[lightning]'
    python lightning_callback.py --steps 2000 --hidden 64 --budget 700MiB

Lines that end with "oomguard" are those that differ from plain Lightning. Before the training, the callback plans in
child processes. If the batch does not fit at once, it runs in microbatches, and the losses stay the same.
"""

import argparse
import logging
import sys
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from oomguard.integrations.lightning import OomGuard  # oomguard


class Waves(lightning.LightningModule):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(1, hidden, batch_first=True), nn.Linear(hidden, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        series, lengths = batch
        loss = nn.functional.mse_loss(self.head(self.rnn(series)[0].mean(1)), lengths)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Losses(lightning.Callback):
    """Keeps the loss of every batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())


def make_data(series: int, steps: int) -> TensorDataset:
    lengths = 20 + 80 * torch.rand(series, 1)
    waves = (torch.arange(steps) * 2 * torch.pi / lengths).sin() + 0.1 * torch.randn(series, steps)
    return TensorDataset(waves[..., None], lengths / 50)


def train(args: argparse.Namespace) -> list[float]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    module, losses = Waves(args.hidden), Losses()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=args.epochs,
        callbacks=[
            losses,
            OomGuard(args.budget),  # oomguard
        ],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(make_data(2 * args.rows, args.steps), batch_size=args.rows))
    return losses.losses


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
        print(f"batch {number}: loss {loss:.4f}")
