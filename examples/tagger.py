"""A bidirectional tagger of packed sentences, trained in pieces that fit the memory.

    cd examples
    oomguard estimate --model tagger:task --budget 1GiB
    oomguard plan --model tagger:task --budget 1GiB
    python tagger.py --plan plan.json

Lines that end with "oomguard" are those that differ from plain PyTorch, and "plain:" shows what was there before.
`--plan` takes the plan that the second command writes. Without it, a batch is run whole, and in smaller pieces if it
needs more than `--budget`.
"""

import argparse
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

import oomguard  # oomguard

WORDS, TAGS, NONE = 1000, 12, -100


class Tagger(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.rnn = nn.LSTM(width, width, 2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * width, TAGS)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=words.shape[1])
        scores: Tensor = self.head(hidden)
        return scores


def make_sentences(count: int, longest: int) -> list[tuple[Tensor, Tensor]]:
    """Sentences of unequal length. The tag of a word depends on the words before and after it."""
    torch.manual_seed(0)
    sentences = []
    for length in torch.randint(longest // 10, longest + 1, (count,)).tolist():
        words = torch.randint(WORDS, (length + 2,))
        sentences.append((words[1:-1], (words[:-2] + words[2:]) % TAGS))
    return sentences


def collate(sentences: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    words, tags = zip(*sentences, strict=True)
    lengths = torch.tensor([len(one) for one in words])
    return {"words": pad_sequence(words, True), "tags": pad_sequence(tags, True, NONE), "lengths": lengths}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The summed loss of a batch, and the number of words."""
    scores, tags = model(batch["words"], batch["lengths"]), batch["tags"]
    return cross_entropy(scores.flatten(0, 1), tags.flatten(), reduction="sum"), (tags != NONE).sum()


def make_loader(count: int = 128, longest: int = 60, rows: int = 32) -> DataLoader[Any]:
    return DataLoader(make_sentences(count, longest), rows, shuffle=True, collate_fn=collate)


task = oomguard.Task(model=Tagger, loss=loss_of, data=make_loader())  # oomguard


def train(args: argparse.Namespace) -> list[float]:
    loader = make_loader(args.sentences, args.longest, args.rows)
    torch.manual_seed(1)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    plan = oomguard.load_plan(args.plan) if args.plan else args.budget  # oomguard
    step = oomguard.stepper(plan, model, loss_of, optimizer)  # oomguard
    losses = []
    for batch in loader:
        # plain: total, words = loss_of(model, batch)
        # plain: loss = total / words
        # plain: optimizer.zero_grad()
        # plain: loss.backward()
        # plain: optimizer.step()
        loss = step(batch)  # oomguard
        losses.append(loss.item())
    return losses


def main(words: list[str]) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=128)
    parser.add_argument("--longest", type=int, default=60, help="words of the longest sentence")
    parser.add_argument("--rows", type=int, default=32, help="sentences of an update")
    parser.add_argument("--budget", default="2GiB")
    parser.add_argument("--plan", help="file of a plan, instead of a budget")
    return train(parser.parse_args(words))


if __name__ == "__main__":
    for number, loss in enumerate(main(sys.argv[1:]), 1):
        print(f"update {number}: loss {loss:.4f}")
