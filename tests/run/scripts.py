"""Scripts for the tests of `oomguard run`, and a function that runs them with it, as a shell would."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

TRAIN = """
import sys
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
steps, updates = int(sys.argv[1]), int(sys.argv[2])
model = torch.nn.LSTM(8, 32, 2)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(updates):
    loss = model(torch.randn(steps, 8, 8))[0].square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.9g}", flush=True)
"""
"""Trains an LSTM on sequences of so many steps, for so many updates, and prints the losses."""


class Ran(NamedTuple):
    """What came of a run."""

    code: int
    out: str
    err: str
    report: dict[str, Any]  # what --json has written; empty if it has not


def environment(**changes: str) -> dict[str, str]:
    """The variables of this process without heap settings, which a test runner may have."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return kept | {"COLUMNS": "120"} | changes


def command(folder: Path, *words: str, flags: tuple[str, ...] = ()) -> list[str]:
    """The command line of `oomguard run` for a command."""
    report = str(folder / "run.json")
    return [sys.executable, "-m", "oomguard", "run", "--json", report, "--force", *flags, "--", *words]


def run(
    folder: Path,
    *words: str,
    flags: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    limit_bytes: int | None = None,
    **streams: Any,
) -> Ran:
    """Run a command with `oomguard run`, if asked for under a limit of committed bytes (RLIMIT_DATA)."""
    line = command(folder, *words, flags=flags)
    if limit_bytes is not None:
        line = ["prlimit", f"--data={limit_bytes}", *line]
    env = environment() if env is None else env
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=110, env=env, cwd=cwd, **streams)
    path = folder / "run.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    return Ran(done.returncode, done.stdout, done.stderr, report)


def write(folder: Path, text: str, name: str = "train.py") -> str:
    """Write a script; returns its path."""
    path = folder / name
    path.write_text(text)
    return str(path)
