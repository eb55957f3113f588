"""Claim: a study of 60 trials over hidden size, layers, sequence length and batch does not run out of memory under a
hard limit with the integration of Optuna, where the plain study does, and its best value is no worse.

    python benchmarks/studies_do_not_run_out.py [TRIALS] [--smoke]

Each study runs in a process of its own with a limit of committed memory (RLIMIT_DATA): what the process has after
PyTorch was imported, and 512 MiB. Both have the same sampler (TPE) and the same seed, and train the same models on the
same waves with one thread. The plain study prunes a trial that runs out of memory. (After the first one, oneDNN keeps
failing in that process where it would make a new kernel, so further trials fail.) The other one asks `feasible` in
every trial, runs its LSTM in the segments and microbatches that it returns, and wraps the sampler in `FeasibleSampler`.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from results import print_row, publish

LIMIT_BYTES = 512 << 20
SEED, UPDATES, FEATURES = 0, 6, 4
WIDTHS = (12, 9, 9, 9, 9, 11, 11, 12)
SAME = 1.01  # a best value up to this many times the other is no worse: the studies draw other parameters


def make_waves(seq: int, rows: int, seed: int) -> Any:
    """Sums of waves with noise: steps, rows, features."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    pace, phase = torch.rand(2, 1, rows, FEATURES, generator=draw)
    times = torch.arange(seq + 1.0)[:, None, None]
    return (times * (0.05 + 0.3 * pace) + 6 * phase).sin() + 0.1 * torch.randn(seq + 1, rows, FEATURES, generator=draw)


def train(hidden: int, layers: int, seq: int, batch: int, rows: int, segments: int) -> float:
    """Train a few updates, in microbatches and segments, and return the loss of waves that were not seen."""
    import torch
    from torch import nn

    import oomguard

    torch.manual_seed(SEED)
    model = nn.ModuleList([nn.LSTM(FEATURES, hidden, layers), nn.Linear(hidden, FEATURES)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss_of(waves: Any) -> Any:
        return nn.functional.mse_loss(model[1](model[0](waves[:-1])[0]), waves[1:])

    for update in range(UPDATES):
        waves = make_waves(seq, batch, update)
        optimizer.zero_grad()
        with oomguard.segmented(segments=segments):
            for piece in waves.split(rows, 1):
                (loss_of(piece) * (piece.shape[1] / batch)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(make_waves(200, 16, 10**6)))


def suggested(trial: Any, name: str, kind: Any) -> Any:
    """A parameter of a trial."""
    if hasattr(kind, "choices"):
        return trial.suggest_categorical(name, kind.choices)
    return trial.suggest_int(name, kind.low, kind.high, log=kind.log)


def study(guarded: bool, trials: int, small: bool) -> dict[str, Any]:
    """Run a study under the limit, in this process."""
    import resource

    import optuna
    import torch
    from optuna.distributions import CategoricalDistribution, IntDistribution

    from oomguard import Spec
    from oomguard._device.proc import read_status
    from oomguard._probe.verdict import Verdict, judge
    from oomguard.integrations.optuna import FeasibleSampler, feasible

    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.ones(8).sum()
    now = read_status()
    assert now is not None
    data_bytes = now.committed_bytes or 0
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + LIMIT_BYTES,) * 2)
    space = {
        "hidden": IntDistribution(16, 32 if small else 256, log=True),
        "layers": IntDistribution(1, 3),
        "seq": IntDistribution(50, 200 if small else 2000, log=True),
        "batch": CategoricalDistribution((8, 16, 32, 64)),
    }
    ooms, knobs_used = list[int](), list[int]()

    def model_of(params: dict[str, Any]) -> Spec:
        return Spec(cell="lstm", features=FEATURES, outputs=FEATURES, **params)

    def objective(trial: Any) -> float:
        params = {name: suggested(trial, name, kind) for name, kind in space.items()}
        rows, segments = params["batch"], 1
        if guarded:
            knobs = feasible(trial, model_of(params)).candidate
            rows, segments = knobs.microbatch, knobs.segments
            knobs_used.append(rows < params["batch"] or segments > 1)
        try:
            return train(**params, rows=rows, segments=segments)
        except (RuntimeError, MemoryError) as error:
            if judge(error) is not Verdict.OOM:
                raise
            ooms.append(trial.number)
        raise optuna.TrialPruned("out of memory")

    plain = optuna.samplers.TPESampler(seed=SEED)
    sampler = FeasibleSampler(plain, model_of, space=space) if guarded else plain
    made, began = optuna.create_study(sampler=sampler), time.monotonic()
    made.optimize(objective, n_trials=trials)
    states = [trial.state.name for trial in made.trials]
    return {
        "trials": trials,
        "ooms": len(ooms),
        "pruned": states.count("PRUNED") - len(ooms),
        "done": states.count("COMPLETE"),
        "in_pieces": sum(knobs_used),
        "redrawn": sampler.redrawn if isinstance(sampler, FeasibleSampler) else 0,
        "seconds": time.monotonic() - began,
        "best": made.best_value,
        "best_params": made.best_params,
    }


def run(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a study in a process of its own. One that dies is a result too."""
    command = [sys.executable, __file__, str(args.trials), "--study", kind, *(["--smoke"] if args.smoke else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
    died = {"trials": args.trials, "ooms": 0, "pruned": 0, "done": 0, "in_pieces": 0, "redrawn": 0, "seconds": 0.0}
    row = died | {"best": None} if line is None else json.loads(line)
    return {"study": kind, "died": line is None, "error": done.stderr[-1500:] if line is None else ""} | row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", type=int, nargs="?", default=60)
    parser.add_argument("--smoke", action="store_true", help="4 trials of small models")
    parser.add_argument("--study", choices=["plain", "integration"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.study:
        print(json.dumps(study(args.study == "integration", 4 if args.smoke else args.trials, args.smoke)))
        return
    rows = []
    print_row(("study", "done", "OOM", "pruned", "pieces", "redrawn", "seconds", "best"), WIDTHS)
    for kind in ("plain", "integration"):
        rows.append(row := run(kind, args))
        best = "died" if row["best"] is None else f"{row['best']:.5f}"
        counts = [row[name] for name in ("done", "ooms", "pruned", "in_pieces", "redrawn")]
        print_row((kind, *counts, f"{row['seconds']:.1f}", best), WIDTHS)
    plain, ours = rows
    claims = {f"no trial of {ours['trials']} runs out of memory with the integration ({ours['ooms']}, plain "
              f"{'died' if plain['died'] else plain['ooms']})": not ours["died"] and not ours["ooms"]}  # fmt: skip
    if not args.smoke:
        claims["the plain study runs out of memory"] = plain["died"] or plain["ooms"] > 0
        no_worse = ours["best"] is not None and (plain["died"] or ours["best"] <= SAME * plain["best"])
        claims[f"the best value is no worse ({ours['best']:.5f}, plain {plain['best'] or 0:.5f})"] = no_worse
    result = {"limit_bytes": LIMIT_BYTES, "seed": SEED, "rows": rows}
    publish("studies_do_not_run_out", result, claims, whole=args.trials >= 60, packages=("optuna",))


if __name__ == "__main__":
    main()
