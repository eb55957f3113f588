"""Runs that were trained for a few steps, as `oomguard train` writes them."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from plans import plan_of

import oomguard

SEQ, ROWS = 9, 24
GIVEN: dict[str, Any] = {"cell": "lstm", "seq": SEQ, "features": 3, "hidden": 8, "layers": 2, "batch": 4}


def data_of(spec: oomguard.Spec) -> Any:
    """Data with means and deviations far from 0 and 1, or tokens."""
    numbers = np.random.default_rng(0)
    if spec.vocab is not None:
        return numbers.integers(spec.vocab, size=(ROWS, SEQ + 1))
    return (20.0 + 3.0 * numbers.normal(size=(ROWS, SEQ, spec.inputs + spec.classes))).astype(np.float32)


def run_of(folder: Path, *, steps: int = 3, options: dict[str, Any] | None = None, **fields: Any) -> tuple[Path, Any]:
    """A run on a file of its own, and the data in it."""
    plan = plan_of(((4, 1), (2, 1)), **GIVEN | fields)
    data = data_of(plan.spec)
    np.save(folder / "data.npy", data)
    given: dict[str, Any] = {"run": str(folder / "run"), "steps": steps, "lr": 0.02, "progress": False} | (
        options or {}
    )
    with warnings.catch_warnings(action="ignore"):
        oomguard.train(plan, str(folder / "data.npy"), **given)
    return folder / "run", data
