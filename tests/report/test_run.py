"""What `oomguard run` says: few lines while a script runs, and a summary that fits every terminal."""

import io
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from rich.console import Console

from oomguard._report import run as report
from oomguard._report.run import RunNews, explain_run, result_words, show_run
from oomguard._report.run_page import run_page
from oomguard._run.notes import CallNotes, Failure, ProcessNotes
from oomguard._run.result import RunResult, Sample, judge_run, outlook
from oomguard._run.settings import RunOptions, Start

MIB = 1 << 20
START = Start(
    words=("python", "train.py", "--name", "a b"), allocator="fast", exports={"MALLOC_ARENA_MAX": "1"}, threads=None
)


def notes(**changes: Any) -> ProcessNotes:
    """The notes of a process with two kinds of calls, one of them in segments."""
    call = CallNotes(where="model.py:42", device="cpu", cell="lstm", inputs=64, hidden=256, layers=2, directions=2)
    large = msgspec.structs.replace(
        call, calls=30, in_segments=3, segments=12, steps=10_000, rows=32, plain_bytes=4000 * MIB, used_bytes=400 * MIB
    )
    small = msgspec.structs.replace(call, where="model.py:50", calls=30, steps=10, rows=32, plain_bytes=MIB)
    values: dict[str, Any] = {
        **{"pid": 7, "budget_bytes": 1000 * MIB, "budget_name": "--budget", "base_bytes": 300 * MIB, "updates": 30},
        **{"lasting_bytes": 100 * MIB, "now_bytes": 500 * MIB, "peak_bytes": 700 * MIB, "training_bytes": 700 * MIB},
        **{"seconds": 58.0, "recomputed_seconds": 5.8, "calls": [small, large], "ended": True},
    }
    return ProcessNotes(**values | changes)


def result(code: int = 0, *processes: ProcessNotes, **changes: Any) -> RunResult:
    samples = (Sample(seconds=0.0, resident_bytes=MIB), Sample(seconds=60.0, resident_bytes=700 * MIB))
    made = judge_run(START, code, 61.0, [*processes], {}, 700 * MIB, samples)
    return msgspec.structs.replace(made, **changes)


def text_of(value: RunResult, width: int = 100) -> str:
    out = io.StringIO()
    show_run(value, Console(file=out, width=width, highlight=False, markup=False))
    return out.getvalue()


def test_larger_batches_are_judged_by_what_a_batch_adds() -> None:
    """Of 700 MiB, 300 were there before and 100 stay: 300 are of the batch, and 600 are left for it."""
    found = outlook(notes())
    assert found is not None
    assert (found.batch_bytes, found.twice_bytes, found.times) == (300 * MIB, 1000 * MIB, 2.0)
    assert outlook(notes(updates=0)) is None
    assert outlook(notes(calls=[])) is None


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def news(lines: list[str]) -> RunNews:
    return RunNews(lines.append, RunOptions())


def test_what_was_said_is_not_said_again(news: RunNews, lines: list[str]) -> None:
    for _ in range(5):
        news.take([notes(), notes(pid=8)], {"/usr/bin/python3": "ImportError: no msgspec"})
    assert len(lines) == 3, lines
    assert "/usr/bin/python3 -m pip install oomguard" in lines[0]
    assert "lstm 64 → 256 × 2 layers × 2 directions (model.py:42) needs 3.91 GiB at once" in lines[1]
    assert "12 segments" in lines[1]
    assert "A batch twice as large would need about 1,000.00 MiB, which fits." in lines[2]


def test_it_is_told_when_the_limit_comes_near_and_again_only_when_it_is_nearer(
    news: RunNews, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(report, "monotonic", lambda: clock[0])
    use: Callable[[int], None] = lambda used: news.take([notes(updates=0, calls=[], now_bytes=used * MIB)], {})  # noqa: E731
    for seconds, used, said in (
        (99, 800, 0),
        (100, 910, 1),
        (200, 920, 1),
        (201, 950, 2),
        (202, 990, 2),
        (300, 990, 3),
    ):
        clock[0] = float(seconds)
        use(used)
        assert len(lines) == said, (seconds, used, lines)
    assert "91 % of the budget is in use, 910.00 MiB of 1,000.00 MiB (--budget)." in lines[0]


OOM = Failure(verdict="OOM", message="MemoryError: no more")
ENDS = {
    "well": (result(0, notes()), "FITS", "ended with exit code 0"),
    "over the budget": (result(0, notes(peak_bytes=1001 * MIB)), "OVER", "It went over the budget."),
    "over what is free now": (result(0, notes(peak_bytes=1001 * MIB, budget_name="free RAM")), "FITS", "exit code 0"),
    "without training": (result(0), None, "No training with PyTorch was seen."),
    "an error": (result(3, notes(failure=Failure(verdict="BROKEN", message="KeyError: 1"))), None, "exit code 3"),
    "no memory": (result(1, notes(failure=OOM)), "OOM", "MemoryError: no more. Calls ran in segments already"),
    "no memory before": (result(1, notes(failure=OOM, calls=[])), "OOM", "Its recurrent calls, if any, had not begun."),
    "killed": (result(-9, notes(ended=False)), "KILLED", "was killed after 1 min 1 s (SIGKILL, exit code 137)"),
    "killed below a shell": (result(137, notes()), "KILLED", "exit code 137"),
    "a crash": (result(-11, notes()), "CRASHED", "ended by SIGSEGV after 1 min 1 s (exit code 139)"),
    "a crash at the limit": (
        result(-6, notes(committed_bytes=99, committed_budget_bytes=100)),
        "OOM",
        "ran out of memory",
    ),
    "ended from outside": (result(-15, notes()), None, "ended by SIGTERM"),
    "a dry run": (result(0, notes(dry=True)), "FITS", "The dry run ended"),
}


@pytest.mark.parametrize("end", ENDS)
def test_every_end_has_its_verdict_and_words(end: str) -> None:
    value, verdict, words = ENDS[end]
    assert value.verdict == verdict
    assert words in " ".join(text_of(value).split())


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("end", ENDS)
def test_a_summary_fits_the_terminal(end: str, width: int) -> None:
    assert max(len(line) for line in text_of(ENDS[end][0], width).splitlines()) <= width


def test_a_summary_has_the_figures_of_the_first_process() -> None:
    ranks = [notes(rank=rank, pid=rank, peak_bytes=(700 + rank) * MIB) for rank in range(2)]
    text = " ".join(text_of(result(0, *ranks)).split())
    for words in (
        "python train.py --name 'a b'",
        "peak 700.00 MiB, 70 % of 1,000.00 MiB (--budget)",
        "updates 30, 2.0 s each",
        "in segments 3 of 60 calls",
        "recomputed 5.8 s, 10 % of the time",
        "twice the rows would need about 1,000.00 MiB; the budget is full at about 2.0 times the rows",
        "rank 1 701.00 MiB",
    ):
        assert words in text, text


def test_the_page_has_the_summary_and_the_memory_over_time() -> None:
    value = result(0, notes())
    page = run_page(value)
    assert result_words(value) in page
    for section in explain_run(value):
        for row in section.table.rows if section.table else ():
            assert all(str(cell).replace("'", "&#39;") in page for cell in row), row
    assert "Memory over time" in page
    assert "<svg" in page


def test_a_page_without_samples_has_no_curves() -> None:
    page = run_page(result(0, notes(), samples=()))
    assert "curves" not in page.partition("<main>")[2].partition("<script>")[0]
