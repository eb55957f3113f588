"""Print and store the result of a benchmark: table rows, PASS or FAIL for every statement, and one JSON line.

Every run except a smoke run appends its line to results/NAME.jsonl. The field `whole` says whether the run had all
cases of the claim. Importing this module turns off the cache of calibrations for this process and its children, so that
every search starts without records.
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
    """Return the versions of oomguard, torch and `packages`, and the commit of oomguard."""
    return {name: version(name) for name in ("oomguard", "torch", *packages)} | {"commit": commit()}


def commit() -> str:
    """Return the commit of the imported package, with a `+` if files have changed since, or `unknown` without git."""
    package = Path(oomguard.__file__).parent
    git = ["git", "-C", str(package)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain", "."], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + "+" * bool(changes.stdout.strip())


def machine() -> dict[str, Any]:
    """Describe this machine: processor, cores, memory, and the load of the last minute."""
    memory = round(psutil.virtual_memory().total / GIB, 1)
    return {"cpu": cpu_name(), "cores": cores(), "memory_gib": memory, "load": round(os.getloadavg()[0], 2)}


def print_row(cells: Iterable[object], widths: Iterable[int]) -> None:
    """Print one line of a table. The first column is aligned to the left, the others to the right."""
    texts = [
        f"{cell!s:<{width}}" if not i else f"{cell!s:>{width}}"
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    print("  ".join(texts), flush=True)


def publish(
    name: str, result: dict[str, Any], claims: dict[str, bool], *, whole: bool, packages: tuple[str, ...] = ()
) -> NoReturn:
    """Print PASS or FAIL for every statement, print and store the JSON line, and exit with 1 if one failed.

    `claims` maps each statement to whether it holds. `packages` are further packages whose versions are stored.
    """
    print()
    for statement, holds in claims.items():
        print(f"{'PASS' if holds else 'FAIL'}  {statement}")
    line = {"claim": name, "date": datetime.now(UTC).isoformat(timespec="seconds"), "whole": whole}
    line |= {"passed": claims, **result, "machine": machine(), "versions": versions(*packages)}
    text = json.dumps(line)
    if "--smoke" not in sys.argv:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    print(text)
    sys.exit(not all(claims.values()))
