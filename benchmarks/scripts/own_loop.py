"""Classify sequences of very different lengths: a loop written by hand, with clipping, a schedule and padding."""

import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence


class Classifier(nn.Module):
    def __init__(self, features: int = 12, hidden: int = 96, classes: int = 5) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, series: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        hidden = self.lstm(series)[0]
        return self.head(hidden[torch.arange(len(series)), lengths - 1])


def make_data(count: int, longest: int) -> list[tuple[torch.Tensor, int]]:
    """Make series whose class is in the slope of their first feature. One of them is the longest by far."""
    data = []
    for number in range(count):
        length = longest if number == count // 2 else int(torch.randint(longest // 30, longest // 10, ()))
        label = int(torch.randint(5, ()))
        series = torch.randn(length, 12) * 0.3
        series[:, 0] += torch.linspace(0, label / 2, length)
        data.append((series, label))
    return data


def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    series, labels = zip(*samples, strict=True)
    return pad_sequence(series, batch_first=True), torch.tensor([len(s) for s in series]), torch.tensor(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--longest", type=int, default=3000)
    args = parser.parse_args()
    torch.manual_seed(0)
    data = make_data(32, args.longest)
    loader = torch.utils.data.DataLoader(data, batch_size=8, collate_fn=collate)
    model, loss_function = Classifier(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    for epoch in range(args.epochs):
        for series, lengths, labels in loader:
            loss = loss_function(model(series, lengths), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            print(f"epoch {epoch} loss {loss.item():.9g}", flush=True)


if __name__ == "__main__":
    main()
