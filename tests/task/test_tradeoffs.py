"""The table of a task: microbatches, segments and lengths, with peaks by traces."""

from pathlib import Path

import pandas as pd
import pytest
from surface import freeze

import oomguard

VARIED = {"microbatch": [2, 8], "segments": [1, 4], "seq": [30, 200]}


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return oomguard.tradeoffs("task.sized:regression", over=VARIED, batch=8, budget="1GiB")


def test_a_table_of_a_task_has_a_row_for_each_candidate(table: pd.DataFrame) -> None:
    found = {(*row,) for row in table[["seq", "segments", "microbatch", "accumulation"]].itertuples(index=False)}
    assert found == {(n, s, m, 8 // m) for n in (30, 200) for s in (1, 4) for m in (2, 8)}
    assert table["fits"].all()


def test_peaks_of_a_table_are_those_of_the_estimate(table: pd.DataFrame) -> None:
    row = table.query("seq == 200 and segments == 4 and microbatch == 8").iloc[0]
    estimate = oomguard.estimate("task.sized:regression", microbatch=8, steps=200, segments=4, allocator="tight")
    growth_bytes = row["peak_bytes"] - estimate.terms["runtime"]
    assert growth_bytes == pytest.approx(estimate.total_bytes - estimate.terms["runtime"], rel=0.25)  # runtimes differ
    longest = table.query("segments == 1 and microbatch == 8")["peak_bytes"]
    assert longest.is_monotonic_increasing


def test_a_table_of_a_task_is_written_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = "tradeoffs --model task.sized:regression --seq 30 --over microbatch=2,8 --segments 1 --budget 1GiB"
    ran = freeze.run(f"{words} --output table.csv")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("Trade-offs of task.sized:regression")
    assert [*pd.read_csv("table.csv")["microbatch"]] == [2, 8]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--plan plan.json", "--model task.sized:regression and --plan"),
        ("--output table.html", "The table of a task is written to .csv or .parquet"),
        ("--over hidden=3", "can vary if they are not fixed, but got values of --hidden"),
        ("--over seq=3", "can vary if they are not fixed, but got values of --seq"),
        ("--engine native", "The table of a task counts some knobs, but got 'engine'"),
    ],
)
def test_wrong_flags_of_a_table_end_with_exit_code_2(flags: str, message: str) -> None:
    ran = freeze.run(f"tradeoffs --model task.sized:regression --seq 30 {flags}")
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
