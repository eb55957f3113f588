"""Claim: if one process of a training is killed, stopped or out of memory, the others end or go on within 30 s.

    python benchmarks/processes_end_together.py [CASES] [--seed S] [--smoke]

Two and four processes train together with gloo. In each case, one of them gets SIGKILL or SIGSTOP, or runs out of
memory, in a phase of the training: the forward pass, the backward pass, the exchange of gradients, the update, or a
checkpoint. The seconds are counted from that moment. Where the training ended, all processes are started again with
`resume`. In every case, the final weights must be those of one process alone, up to rounding (1e-5).

All 78 cases take about twenty minutes. With CASES, so many are drawn at random.
"""

import argparse
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from results import print_row, publish

import oomguard
from oomguard import _step as step_file
from oomguard._train import loop
from oomguard._train.ranks import Ranks

WORLDS, MOST_SECONDS, TOLERANCE = (2, 4), 30.0, 1e-5
PHASES: dict[str, tuple[Any, str]] = {
    "forward": (step_file, "backward"),
    "backward": (torch.Tensor, "backward"),
    "exchange": (Ranks, "sum_gradients"),
    "update": (torch, "_foreach_sqrt"),
    "checkpoint": (loop, "save"),
}
"""The function of each phase before which something happens."""
ENDS = ("killed", "stopped", "out of memory")
SHORT = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"
SPEC: dict[str, Any] = {"cell": "gru", "seq": 12, "features": 3, "hidden": 16, "batch": 8, "outputs": 1}
GIVE_UP_SECONDS = 90.0
WIDTHS = (44, 9, 9, 11)


class Case(NamedTuple):
    """One process of several, and what happens to it."""

    world: int
    victim: int
    phase: str
    end: str

    def __str__(self) -> str:
        return f"{self.world} processes, {self.victim} {self.end}, {self.phase}"


def cases() -> list[Case]:
    """All cases. Only the first process writes checkpoints."""
    found = [Case(*values) for values in product(WORLDS, range(max(WORLDS)), PHASES, ENDS)]
    return [case for case in found if case.victim < (1 if case.phase == "checkpoint" else case.world)]


def prepare(case: Case, moment: Path) -> None:
    """Let it happen to this process, once, some calls into the training."""
    owner, name = PHASES[case.phase]
    real, calls = getattr(owner, name), [0]

    def failing(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == (2 if case.phase == "checkpoint" else 6):
            moment.write_text(str(time.time()))
            if case.end == "out of memory":
                raise RuntimeError(SHORT)
            os.kill(os.getpid(), signal.SIGKILL if case.end == "killed" else signal.SIGSTOP)
        return real(*given, **named)

    setattr(owner, name, failing)


def train(run: Path, *, resume: bool = False) -> torch.Tensor:
    """Train the model; returns its weights."""
    data = np.random.default_rng(0).normal(size=(40, SPEC["seq"], 4)).astype(np.float32)
    plan = oomguard.load_plan(run.parent / "plan.json")
    options: dict[str, Any] = {"validation": 0.2, "epochs": 3, "save_every": "2", "progress": False}
    result = oomguard.train(plan, data, run=str(run), resume=resume, **options)
    return torch.cat([parameter.detach().flatten() for parameter in result.model.parameters()])


def child(rank: int, world: int, port: int, run: Path, case: Case | None) -> None:
    """One process of a training."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the errors of the others are expected
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if case is not None and rank == case.victim:
        prepare(case, run.parent / "moment")
    torch.save(train(run, resume=case is None), run.parent / f"{rank}.pt")
    sys.stdout.flush()
    os._exit(0)


def start(world: int, run: Path, case: Case | None = None) -> tuple[bool, bool]:
    """Run all processes. Returns whether all but the victim have ended, and whether all of them have finished."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=child, args=(rank, world, port, run, case)) for rank in range(world)]
    for process in children:
        process.start()
    until, waits = time.monotonic() + GIVE_UP_SECONDS, case is None or case.end != "stopped"
    awaited = [process for rank, process in enumerate(children) if waits or case is None or rank != case.victim]
    for process in awaited:
        process.join(max(0.0, until - time.monotonic()))
    codes = [process.exitcode for process in awaited]
    for process in children:
        process.kill()
        process.join()
    return None not in codes, len(codes) == world and not any(codes)


def try_out(case: Case, plan: oomguard.Plan, wanted: torch.Tensor) -> dict[str, Any]:
    """Run one case, resume it if it ended, and compare the weights."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        oomguard.save_plan(plan, home / "plan.json")
        ended, finished = start(case.world, home / "run", case)
        seconds = time.time() - float((home / "moment").read_text())
        if not finished:
            start(case.world, home / "run")
        weights = [torch.load(home / f"{rank}.pt") for rank in range(case.world) if (home / f"{rank}.pt").exists()]
        errors = [float((each - wanted).norm() / wanted.norm()) for each in weights]
    right = len(errors) == case.world and max(errors) < TOLERANCE
    return {**case._asdict(), "seconds": seconds, "ended": ended, "went_on": finished, "right": right}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="?", type=int, default=len(cases()), help="number of cases (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of cases (default: 0)")
    parser.add_argument("--smoke", action="store_true", help="run a single case")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = random.Random(args.seed).sample(cases(), min(1 if args.smoke else args.cases, len(cases())))
    fixed: dict[str, Any] = {"threads": 1, "precision": "fp32", "allocator": "system", "microbatch": 8, "segments": 1}
    plan = oomguard.find_feasible_config(**SPEC, **fixed, max_probes=1, progress=False)
    with tempfile.TemporaryDirectory() as directory:
        oomguard.save_plan(plan, Path(directory) / "plan.json")
        wanted = train(Path(directory) / "run")
    rows = []
    print_row(("case", "seconds", "goes on", "weights"), WIDTHS)
    for case in chosen:
        row = try_out(case, plan, wanted)
        answers = "yes" if row["went_on"] else "resumed", "right" if row["right"] else "WRONG"
        print_row((case, f"{row['seconds']:.1f}", *answers), WIDTHS)
        rows.append(row)
    slow = [row for row in rows if not row["ended"] or row["seconds"] > MOST_SECONDS]
    wrong = [row for row in rows if not row["right"]]
    longest = max(row["seconds"] for row in rows)
    statements = {
        f"in {len(rows)} cases the others end or go on within {MOST_SECONDS:.0f} s (longest: {longest:.0f})": not slow,
        f"the weights are always those of one process ({len(wrong)} wrong)": not wrong,
    }
    if args.smoke:
        statements = {name: holds for name, holds in statements.items() if "weights" in name}
    publish("processes_end_together", {"rows": rows}, statements, whole=len(chosen) == len(cases()))


if __name__ == "__main__":
    main()
