"""Jobs, cards, and records of a card that is not here."""

from pathlib import Path
from typing import Any

import oomguard
from oomguard._estimate import cards
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.target import on_card
from oomguard._fleet.value import Fleet
from oomguard._spec.candidate import make_candidate
from oomguard._spec.spec import Spec

T4: dict[str, Any] = {"name": "t4", "price": 0.35, "count": 4}
A100: dict[str, Any] = {"name": "a100-80gb", "price": 1.8}
LARGE: dict[str, Any] = {"name": "large", "cell": "lstm", "seq": 20_000, "hidden": 1024, "batch": 64}
SMALL: dict[str, Any] = {"name": "small", "cell": "gru", "seq": 100, "batch": 8}
JOBS = """
[[job]]
name = "words"
cell = "lstm"
vocab = 5000
seq = [100, 3000]
data = "words.txt"

[[job]]
name = "long"
cell = "gru"
seq = 90_000
hidden = 640
data = "long.npy"
time = "4h"
"""
CARDS = """
[[card]]
name = "t4"
count = 4
price = 0.35
label = "Tesla-T4"

[[card]]
name = "a100-80gb"
price = 1.8
"""


def fleet_of(*jobs: dict[str, Any], on: Any = (T4, A100)) -> Fleet:
    return oomguard.fleet(jobs, on, progress=False)


def files(folder: Path, jobs: str = JOBS, cards_: str = CARDS) -> tuple[str, str]:
    """Write both files, and return their paths."""
    paths = folder / "my jobs.toml", folder / "cards.toml"
    for path, text in zip(paths, (jobs, cards_), strict=True):
        path.write_text(text)
    return str(paths[0]), str(paths[1])


def record_on(title: str, spec: Spec, seconds: float, **knobs: Any) -> oomguard.Record:
    """A record of a card as a probe would make it: the peak that is estimated, and this time of a step."""
    candidate = make_candidate(spec, **{"engine": "cudnn", "allocator": "system"} | knobs)
    estimate = estimate_step(spec, candidate, on_card(cards.card(title), "cuda"))
    parts = {name: int(estimate.terms[name]) for name in ("runtime", "weights", "optimizer", "input", "gradients")}
    total = int(estimate.total_bytes)
    return oomguard.Record(
        verdict=oomguard.Verdict.FITS, message="It ran.", spec=spec, candidate=candidate, device="cuda", title=title,
        torch="2.13.0", engine="cudnn", budget_bytes=1 << 40, started="2026-01-01T00:00:00", seconds=9.0,
        terms=parts | {"rest": total - sum(parts.values())}, peak_bytes=total, runtime_bytes=parts["runtime"],
        seconds_per_step=seconds, tokens_per_second=1.0, seconds_per_pass=seconds / candidate.accumulation,
        fastest_pass_seconds=seconds / candidate.accumulation, seconds_per_update=1e-4, passes=8, steps=8,
    )  # fmt: skip
