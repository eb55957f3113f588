"""A study of Optuna over the size of a model and the length of its sequences, whose trials fit a budget.

    cd examples
    python optuna_study.py --longest 12000 --trials 2 --budget 650MiB

Lines that end with "oomguard" are those that differ from a plain study. Before a trial builds its model, arithmetic
tells whether it fits, and in how many segments its LSTM has to run; what does not fit at all is pruned. With the flags
above, the study grows the peak by 144 MiB instead of 553 MiB.
"""

import argparse
import sys

import optuna
import torch
from torch import nn

import oomguard  # oomguard
from oomguard.integrations.optuna import feasible  # oomguard


class Model(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(features, hidden, 2)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.rnn(x)[0])
        return outputs


def study_of(args: argparse.Namespace) -> optuna.Study:
    def objective(trial: optuna.Trial) -> float:
        hidden = trial.suggest_int("hidden", args.hidden // 4, args.hidden)
        seq = trial.suggest_int("seq", args.longest // 4, args.longest)
        spec = oomguard.Spec(cell="lstm", seq=seq, features=8, hidden=hidden, batch=args.rows)  # oomguard
        knobs = feasible(trial, spec, args.budget, microbatch=args.rows).candidate  # oomguard
        torch.manual_seed(0)
        model = Model(8, hidden)
        oomguard.segment(model, segments=knobs.segments)  # oomguard
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(args.updates):
            inputs = torch.randn(seq, args.rows, 8)
            loss = nn.functional.mse_loss(model(inputs), inputs.cumsum(0).mean(2, keepdim=True) / seq**0.5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=args.trials)
    return study


def main(words: list[str]) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--longest", type=int, default=200, help="time steps of the longest sequences")
    parser.add_argument("--hidden", type=int, default=64, help="the largest hidden size")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--budget", default="4GiB")
    study = study_of(parser.parse_args(words))
    return sorted((trial.value for trial in study.trials if trial.value is not None), reverse=True)


if __name__ == "__main__":
    for loss in main(sys.argv[1:]):
        print(f"loss {loss:.4f}")  # the best trial comes last
