"""A word language model that carries its state from one window of a text to the next.

    python examples/language_model.py --window 1000 --words 10000 --segments 20 --chunks 20

Lines that end with "oomguard" are those that differ from plain PyTorch, and "plain:" shows what was there before.
With the flags above, an update grows the peak by 62 MiB instead of 944 MiB; the losses are the same.
"""

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

import oomguard  # oomguard

State = tuple[Tensor, Tensor]


class LanguageModel(nn.Module):
    def __init__(self, words: int, width: int, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=0.2)
        self.head = nn.Linear(width, words)
        self.head.weight = self.embedding.weight

    def forward(self, text: Tensor, state: State | None) -> tuple[Tensor, State]:
        hidden, state = self.rnn(dropout(self.embedding(text), 0.2, self.training), state)
        return hidden, state


def make_text(words: int, steps: int, rows: int) -> Tensor:
    """Columns of text in which a word mostly follows from the two before it."""
    text = torch.randint(words, (steps, rows))
    for step in range(2, steps):
        follows = torch.rand(rows) < 0.9
        text[step] = torch.where(follows, (text[step - 1] + text[step - 2]) % words, text[step])
    return text


def train(args: argparse.Namespace) -> list[float]:
    torch.manual_seed(0)
    model = LanguageModel(args.words, args.width)
    oomguard.segment(model, segments=args.segments)  # oomguard
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    summed = nn.CrossEntropyLoss(reduction="sum")
    text = make_text(args.words, args.updates * args.window + 1, args.rows)
    state, losses = None, []
    for start in range(0, args.updates * args.window, args.window):
        words, targets = text[start : start + args.window], text[start + 1 : start + args.window + 1]
        hidden, state = model(words, state)
        # plain: total = summed(model.head(hidden).flatten(0, 1), targets.flatten())
        total = oomguard.chunked_loss(model.head, summed, hidden, targets, chunks=args.chunks)  # oomguard
        loss = total / targets.numel()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state = (state[0].detach(), state[1].detach())
        losses.append(loss.item())
    return losses


def main(words: list[str]) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=500)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--window", type=int, default=100, help="time steps of an update")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--segments", type=int, default=10, help="pieces of a recurrent call")
    parser.add_argument("--chunks", type=int, default=10, help="pieces of the logits")
    return train(parser.parse_args(words))


if __name__ == "__main__":
    for number, loss in enumerate(main(sys.argv[1:]), 1):
        print(f"update {number}: loss {loss:.4f}")
