"""Sequence to sequence: a bidirectional encoder, and a decoder that attends to it, a loop over a cell.

    python examples/translation.py --steps 200 --segments 14

Lines that end with "oomguard" are those that differ from plain PyTorch, and "plain:" shows what was there before. The
body of the loop became a function of state and input, so that it can run again in the backward pass.
"""

import argparse
import random
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import oomguard  # oomguard

State = tuple[Tensor, Tensor]


class Translator(nn.Module):
    def __init__(self, words: int, width: int, segments: int, taught: float = 0.5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.encoder = nn.GRU(width, width, bidirectional=True)
        self.bridge = nn.Linear(2 * width, width)
        self.keys = nn.Linear(2 * width, width)
        self.match = nn.Linear(width, 1)
        self.cell = nn.GRUCell(3 * width, width)
        self.head = nn.Linear(3 * width, words)
        self.segments, self.taught = segments, taught

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(self.embedding(source))
        keys = self.keys(memory)

        def step(state: State, word: Tensor) -> tuple[State, Tensor]:
            hidden, given = state
            weights = self.match((keys + hidden).tanh()).softmax(0)
            context = (weights * memory).sum(0)
            hidden = self.cell(torch.cat([self.embedding(given), context], -1), hidden)
            scores = self.head(torch.cat([hidden, context], -1))
            given = word if random.random() < self.taught else scores.argmax(-1)
            return (hidden, given), scores

        state = self.bridge(torch.cat([*last], -1)).tanh(), target[0]
        # plain: made = []
        # plain: for word in target[1:]:
        # plain:     state, scores = step(state, word)
        # plain:     made.append(scores)
        # plain: scores = torch.stack(made)
        state, scores = oomguard.scan(step, state, target[1:], segments=self.segments)  # oomguard
        return scores


def make_pairs(words: int, steps: int, rows: int) -> tuple[Tensor, Tensor]:
    """Sentences, and the same backwards, with another number for each word."""
    source = torch.randint(words, (steps, rows))
    return source, (source.flip(0) + 1) % words


def train(args: argparse.Namespace) -> list[float]:
    torch.manual_seed(0)
    random.seed(0)
    model = Translator(args.words, args.width, args.segments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(args.updates):
        source, target = make_pairs(args.words, args.steps, args.rows)
        loss = cross_entropy(model(source, target).flatten(0, 1), target[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(words: list[str]) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=100)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30, help="words of a sentence")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--segments", type=int, default=5, help="pieces of the decoder's loop")
    return train(parser.parse_args(words))


if __name__ == "__main__":
    for number, loss in enumerate(main(sys.argv[1:]), 1):
        print(f"update {number}: loss {loss:.4f}")
