"""Plans for this processor without a search, and data to train them on."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from plan.making import reckoned

from oomguard._core.units import GIB
from oomguard._device.cpu import cpu_name
from oomguard._device.find import find_target, open_device
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.target import CPU, Target
from oomguard._plan.value import Plan, Rung, figures
from oomguard._predict.calibration import Prediction
from oomguard._spec.candidate import make_candidate
from oomguard._spec.spec import Spec

SMALL: dict[str, Any] = {"cell": "gru", "seq": 6, "features": 2, "hidden": 5, "layers": 1, "batch": 8}
LADDER = ((8, 1), (4, 1), (2, 1), (1, 1), (1, 2), (1, 6))
"""Microbatch and segments of each rung."""


@cache
def _any_plan() -> Plan:
    return reckoned(seq=10, hidden=8)


def plan_of(rungs: Sequence[tuple[int, int]] = LADDER, knobs: dict[str, Any] | None = None, **fields: Any) -> Plan:
    """A plan for the CPU with these rungs, each expected to need what the estimate says."""
    spec = Spec(**SMALL | fields)
    return _plan([rung_of(spec, rows, segments, {"threads": 1} | (knobs or {})) for rows, segments in rungs], spec, CPU)


def card_plan(rungs: Sequence[tuple[int, int]], **fields: Any) -> Plan:
    """The same for the first card."""
    spec, target = Spec(**SMALL | fields), find_target("cuda")
    card = open_device("cuda")
    knobs = {"engine": "cudnn", "allocator": "system"}
    plan = _plan([rung_of(spec, rows, segments, knobs, target) for rows, segments in rungs], spec, target)
    environment = msgspec.structs.replace(plan.environment, device="cuda", title=card.title())
    return msgspec.structs.replace(plan, budget_bytes=card.budget().limit_bytes, environment=environment)


def _plan(made: list[Rung], spec: Spec, target: Target) -> Plan:
    first, *fallbacks = made
    any_plan = _any_plan()
    return msgspec.structs.replace(
        any_plan,
        spec=spec,
        candidate=first.candidate,
        where=target,
        budget_bytes=4 * GIB,
        allow=("precision", "window", "8bit"),
        estimate=first.estimate,
        expected=first.expected,
        fallbacks=tuple(fallbacks),
        buckets=(),
        padding=None,
        environment=msgspec.structs.replace(any_plan.environment, device="cpu", title=cpu_name()),
        exports={},
    )


def rung_of(spec: Spec, rows: int, segments: int, knobs: dict[str, Any], target: Target = CPU) -> Rung:
    candidate = make_candidate(spec, microbatch=rows, segments=segments, **knobs)
    estimate = figures(estimate_step(spec, candidate, target))
    peak = Prediction(peak_bytes=estimate.total_bytes, margin_bytes=0, seconds_per_step=None)
    return Rung(candidate=candidate, estimate=estimate, expected=peak)


def numbers(rows: int = 40, steps: int = 6, features: int = 2, seed: int = 0) -> NDArray[np.float32]:
    """Inputs and, in the last column, a target that can be learned from them."""
    inputs = np.random.default_rng(seed).normal(size=(rows, steps, features)).astype(np.float32)
    target = np.cumsum(inputs.sum(axis=2, keepdims=True), axis=1) / steps
    return np.concatenate([inputs, target], axis=2).astype(np.float32)


def saved(path: Path, **options: Any) -> str:
    """The same in a file."""
    np.save(path, numbers(**options))
    return str(path)
