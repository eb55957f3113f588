"""Write oomguard/_estimate/residuals.csv, the errors of estimates from which margins are computed.

    python benchmarks/residuals.py

The errors are those of the rows of the sets `tune` and `repeat` in results/probe_peaks.csv, which measure_peaks.py
measures, and of the set `tune` in results/system_peaks.csv, of ordinary processes.
"""

import csv
import json
import math
from pathlib import Path
from typing import Any

from models import is_judged

import oomguard
from oomguard._core.units import MIB
from oomguard._estimate import cards
from oomguard._estimate.breakdown import estimate_step, is_fragile, split
from oomguard._estimate.margins import OFFSET_BYTES, Residual
from oomguard._estimate.target import CPU, on_card
from oomguard._spec.candidate import make_candidate
from oomguard._spec.read import make_spec

ROWS = Path(__file__).parent / "results" / "probe_peaks.csv"
SYSTEM_ROWS = Path(__file__).parent / "results" / "system_peaks.csv"
FIRST_SYSTEM_MODEL = 10_000
RESIDUALS = Path(oomguard.__file__).parent / "_estimate" / "residuals.csv"


def residuals(rows: list[dict[str, Any]], kinds: tuple[str, ...] = ("tune", "repeat")) -> list[Residual]:
    """Compute the errors of the rows of some sets.

    Shorter versions of a candidate have its number: recomputed segments are told apart by their length, chunks, which
    all stay in memory, by their number.
    """
    places: dict[tuple[Any, ...], int] = {}
    errors = []
    for row in rows:
        spec = make_spec(json.loads(row["spec"]))
        if row["set"] in kinds and not is_judged({"hidden": spec.hidden, "vocab": spec.vocab}):
            candidate = make_candidate(spec, **json.loads(row["candidate"]))
            target = CPU if row["device"] == "cpu" else on_card(cards.card("a100-40gb"))
            estimate = estimate_step(spec, candidate, target)
            known, rest = split(estimate)
            piece = -(-spec.steps // candidate.segments) if candidate.recompute else -candidate.segments
            shape = candidate.microbatch, piece if candidate.segments > 1 else 0, candidate.offload, candidate.keep
            place = (row["device"], int(row["model"]), *shape)
            if "rest_bytes" in row:
                measured = int(row["gradients_bytes"]) + int(row["rest_bytes"])
            else:
                measured = int(row["growth_bytes"]) - int(known[0])
            errors.append(
                Residual(
                    device=row["device"],
                    engine=str(estimate.engine),
                    allocator=str(candidate.allocator),
                    precision=candidate.precision,
                    fragile=bool(is_fragile(spec, estimate)),
                    model=int(row["model"]),
                    candidate=places.setdefault(place, len(places)),
                    turn=int(row["turn"]),
                    passes=int(row["passes"]),
                    steps=round(math.log2(spec.steps), 3),
                    mib=round(measured / MIB, 2),
                    error=round(math.log((measured + OFFSET_BYTES) / (rest[0] + OFFSET_BYTES)), 4),
                )
            )
    return errors


def read_rows() -> list[dict[str, Any]]:
    """Read the measured rows."""
    with ROWS.open(newline="") as file, SYSTEM_ROWS.open(newline="") as system:
        ordinary = [
            row | {"device": "cpu", "turn": "0", "passes": "2", "model": str(FIRST_SYSTEM_MODEL + number)}
            for number, row in enumerate(csv.DictReader(system))
        ]
        return [*csv.DictReader(file), *ordinary]


def write(errors: list[Residual], path: Path = RESIDUALS) -> None:
    """Write the errors as CSV, switches as 0 and 1."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Residual._fields)
        writer.writerows([int(value) if isinstance(value, bool) else value for value in row] for row in errors)


if __name__ == "__main__":
    write(residuals(read_rows()))
