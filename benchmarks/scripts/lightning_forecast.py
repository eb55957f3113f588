"""Forecast the next value of many series: a LightningModule, a Trainer with clipping, validation."""

import argparse
import logging
import warnings

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Forecast(pl.LightningModule):
    def __init__(self, hidden: int = 112) -> None:
        super().__init__()
        self.gru = nn.GRU(4, hidden, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(series)[0]).squeeze(-1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        series, targets = batch
        loss = nn.functional.smooth_l1_loss(self(series), targets)
        print(f"step {self.global_step} loss {loss.item():.9g}", flush=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        series, targets = batch
        self.log("val", nn.functional.smooth_l1_loss(self(series), targets))

    def on_validation_epoch_end(self) -> None:
        print(f"validation loss {self.trainer.callback_metrics['val'].item():.9g}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def make_data(rows: int, steps: int) -> TensorDataset:
    time = torch.arange(steps + 1) / 50
    phase, speed = torch.rand(rows, 1) * 6, torch.rand(rows, 1) + 0.5
    wave = torch.sin(time * speed + phase) + 0.1 * torch.randn(rows, steps + 1)
    features = torch.stack([wave, wave.roll(1, 1), wave.roll(7, 1), time.expand(rows, -1) / 10], -1)
    return TensorDataset(features[:, :-1], wave[:, 1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=800)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train = DataLoader(make_data(32, args.steps), batch_size=16, shuffle=True)
    trainer.fit(Forecast(), train, DataLoader(make_data(16, args.steps), batch_size=16))


if __name__ == "__main__":
    main()
