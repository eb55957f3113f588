"""A speech model: convolutions, packed bidirectional layers and CTC. One recording is far longer than the others.

    python examples/speech.py --longest 8000 --hidden 128 --budget 900MiB

Lines that end with "oomguard" are those that differ from plain PyTorch. Recurrent calls that fit into the budget run as
they are. Only the one long recording goes in segments, so the usual updates take no longer than in plain PyTorch.
"""

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import ctc_loss
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import oomguard  # oomguard

BANDS, LETTERS, FRAMES_PER_LETTER = 40, 28, 20
Recording = tuple[Tensor, Tensor]


class SpeechModel(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(BANDS, 32, 5, stride=2, padding=2), nn.ReLU())
        self.rnn = nn.LSTM(32, hidden, 2, bidirectional=True)
        self.head = nn.Linear(2 * hidden, LETTERS)

    def forward(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of every second frame, time first, and the number of them for each recording."""
        lengths = (lengths + 1) // 2
        hidden = self.conv(frames.transpose(1, 2)).permute(2, 0, 1)
        hidden, _ = self.rnn(pack_padded_sequence(hidden, lengths, enforce_sorted=False))
        return self.head(pad_packed_sequence(hidden)[0]).log_softmax(-1), lengths


def make_recordings(count: int, usual: int, longest: int) -> list[Recording]:
    """Noisy frames that show the letter that is spoken, and the letters."""
    pictures = torch.randn(LETTERS, BANDS)
    recordings = []
    for frames in [*torch.randint(usual // 2, usual + 1, (count - 1,)).tolist(), longest]:
        letters = torch.randint(1, LETTERS, (frames // FRAMES_PER_LETTER,))
        shown = pictures[letters].repeat_interleave(FRAMES_PER_LETTER, 0)
        recordings.append((shown + torch.randn_like(shown), letters))
    return recordings


def loss_of(model: nn.Module, recordings: list[Recording]) -> Tensor:
    frames, letters = zip(*recordings, strict=True)
    sizes = [torch.tensor([len(one) for one in parts]) for parts in (frames, letters)]
    scores, steps = model(pad_sequence(frames, batch_first=True), sizes[0])
    return ctc_loss(scores, torch.cat(letters), steps, sizes[1])


def train(args: argparse.Namespace) -> list[float]:
    torch.manual_seed(0)
    model = SpeechModel(args.hidden)
    oomguard.segment(model, budget=args.budget)  # oomguard
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    recordings = make_recordings(args.recordings, args.usual, args.longest)
    losses = []
    for start in range(0, len(recordings), args.rows):
        loss = loss_of(model, recordings[start : start + args.rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(words: list[str]) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=int, default=9)
    parser.add_argument("--usual", type=int, default=100, help="frames of most recordings, at most")
    parser.add_argument("--longest", type=int, default=1000, help="frames of the longest recording")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--budget", default="400MiB")
    return train(parser.parse_args(words))


if __name__ == "__main__":
    for number, loss in enumerate(main(sys.argv[1:]), 1):
        print(f"update {number}: loss {loss:.4f}")
