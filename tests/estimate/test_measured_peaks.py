"""The estimate against the peaks measured on the CPU: the rows that benchmarks/estimates_track_peaks.py stored."""

import csv
import json
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest

from oomguard._core.units import GIB, MIB
from oomguard._estimate.breakdown import Estimate, estimate_step, margin_bytes
from oomguard._estimate.target import CPU, CPU_RUNTIME_BYTES
from oomguard._spec.candidate import make_candidate
from oomguard._spec.read import make_spec

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
STORED = RESULTS / "cpu_peaks.csv"
ROWS = [
    row for row in csv.DictReader(STORED.read_text().splitlines()) if 50 * MIB <= int(row["growth_bytes"]) <= 2 * GIB
]


def estimated(row: dict[str, str]) -> Estimate:
    spec = make_spec(json.loads(row["spec"]))
    return estimate_step(spec, make_candidate(spec, **json.loads(row["candidate"])))


def errors(rows: list[dict[str, str]]) -> list[float]:
    return [int(estimated(row).growth_bytes) / int(row["growth_bytes"]) - 1 for row in rows]


def values(field: str, key: str) -> set[Any]:
    return {json.loads(row[field]).get(key) for row in ROWS}


def test_there_are_at_least_eighty_rows_and_each_says_where_it_comes_from() -> None:
    assert len(ROWS) >= 80
    assert all(row["torch"] and row["cpu"] and row["date"] for row in ROWS)


def test_the_rows_span_what_people_train() -> None:
    assert values("spec", "cell") == {"rnn", "lstm", "gru"}
    assert values("spec", "layers") == {1, 2, 3}
    assert values("spec", "bidirectional") == {False, True}
    assert values("spec", "head") == {"per-step", "last-step"}
    assert values("spec", "optimizer") == {"adam", "sgd"}
    assert values("spec", "vocab") >= {None, 50, 50_000}
    assert values("candidate", "segments") >= {1, 10, 100}
    assert values("candidate", "microbatch") >= {1, 256}


def test_half_of_the_estimates_err_by_at_most_4_percent() -> None:
    assert median(map(abs, errors(ROWS))) <= 0.04


def test_95_of_100_estimates_err_by_at_most_10_percent() -> None:
    assert quantiles(map(abs, errors(ROWS)), n=100)[94] <= 0.10


def test_no_measured_peak_exceeds_estimate_and_margin() -> None:
    for row in ROWS:
        spec, estimate = make_spec(json.loads(row["spec"])), estimated(row)
        safe_bytes = estimate.growth_bytes + margin_bytes(spec, estimate, CPU)
        assert int(row["growth_bytes"]) <= safe_bytes, row


@pytest.mark.parametrize("engine", ["onednn", "native"])
def test_no_engine_is_estimated_low_or_high_on_the_whole(engine: str) -> None:
    own = errors([row for row in ROWS if estimated(row).engine == engine])
    assert abs(sum(own) / len(own)) <= 0.03


def test_the_runtime_is_what_processes_start_with() -> None:
    assert min(int(row["runtime_bytes"]) for row in ROWS) > 0.95 * CPU_RUNTIME_BYTES
    assert max(int(row["runtime_bytes"]) for row in ROWS) <= CPU_RUNTIME_BYTES


# an ordinary process, with glibc's own thresholds and all threads

SYSTEM = [*csv.DictReader((RESULTS / "system_peaks.csv").read_text().splitlines())]
JUDGED = [row for row in SYSTEM if row["set"] == "judge"]


def test_ordinary_processes_are_judged_by_other_models_than_those_that_the_constants_come_from() -> None:
    assert len(JUDGED) >= 15
    assert not {row["spec"] for row in JUDGED} & {row["spec"] for row in SYSTEM if row["set"] == "tune"}


def test_estimates_of_ordinary_processes_err_by_at_most_5_percent_and_20_at_worst() -> None:
    misses = [*map(abs, errors(JUDGED))]
    assert median(misses) <= 0.05
    assert max(misses) <= 0.20


def test_no_ordinary_process_that_was_judged_exceeds_estimate_and_margin() -> None:
    for row in JUDGED:
        estimate = estimated(row)
        margin = margin_bytes(make_spec(json.loads(row["spec"])), estimate, CPU)
        assert int(row["growth_bytes"]) <= estimate.growth_bytes + margin, row
