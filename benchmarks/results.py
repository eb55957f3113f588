"""What the benchmarks of searches and plans have in common: a table, PASS or FAIL for every claim, one JSON line.

Every run but a smoke run appends its line to results/NAME.jsonl; `whole` says whether it had all cases that the claim
speaks of, or was a smaller one.
Importing this turns the cache of calibrations off, here and in child processes: every search starts from nothing.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import psutil

import oomguard
from oomguard._core.units import GIB
from oomguard._device.cpu import cores, cpu_name

RESULTS = Path(__file__).parent / "results"

os.environ["OOMGUARD_CACHE"] = ""


def versions(*packages: str) -> dict[str, str]:
    """Of oomguard (and its commit), torch and what else was measured."""
    return {name: version(name) for name in ("oomguard", "torch", *packages)} | {"commit": commit()}


def commit() -> str:
    """The commit of the package that was imported, with a `+` if it has been changed since; `unknown` without git."""
    package = Path(oomguard.__file__).parent
    ask = ["git", "-C", str(package)]
    try:
        found = subprocess.run([*ask, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*ask, "status", "--porcelain", "."], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip() + "+" * bool(changes.stdout.strip())


def machine() -> dict[str, Any]:
    """What the figures were measured on, and how busy it was."""
    memory = round(psutil.virtual_memory().total / GIB, 1)
    return {"cpu": cpu_name(), "cores": cores(), "memory_gib": memory, "load": round(os.getloadavg()[0], 2)}


def print_row(cells: Iterable[object], widths: Iterable[int]) -> None:
    """A line of a table: the first column to the left, the others to the right."""
    texts = [
        f"{cell!s:<{width}}" if not i else f"{cell!s:>{width}}"
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    print("  ".join(texts), flush=True)


def publish(
    name: str, result: dict[str, Any], claims: dict[str, bool], *, whole: bool, packages: tuple[str, ...] = ()
) -> NoReturn:
    """Print what came of every claim and the JSON line, keep the line, and exit with 1 on a FAIL."""
    print()
    for claim, kept in claims.items():
        print(f"{'PASS' if kept else 'FAIL'}  {claim}")
    line = {"claim": name, "date": datetime.now(UTC).isoformat(timespec="seconds"), "whole": whole}
    line |= {"passed": claims, **result, "machine": machine(), "versions": versions(*packages)}
    text = json.dumps(line)
    if "--smoke" not in sys.argv:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    print(text)
    sys.exit(not all(claims.values()))
