"""Claim: the explorer answers every move of a slider within 100 ms, also for a space of a million candidates.

    python benchmarks/the_explorer_answers_at_once.py [--smoke]

An answer has the estimate, the advice, the region of microbatches and lengths, and the front of speed and memory. Its
time is compared with that of one `oomguard.estimate` in the same run. The space is what the page can be set to: all
microbatches up to the batch, times all numbers of segments up to one for each time step.

Of a task, answers are timed that lie between traced steps, once the traces are made; the time of one trace is beside
them. No ratio is taken, since `oomguard.estimate` of a task starts a process.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from results import print_row, publish
from tasks import CASES

import oomguard
from oomguard._explore.answers import answer
from oomguard._explore.task import TaskExplorer

MOST_SECONDS, TURNS, SMOKE_TURNS = 0.1, 50, 3
SETTINGS: dict[str, dict[str, Any]] = {
    "lstm, 1,024 × 10,000": {"cell": "lstm", "seq": 10_000, "batch": 1024, "budget": "8GiB"},
    "gru, 64 × 1,000,000, A100": {"cell": "gru", "seq": 1_000_000, "batch": 64, "device": "a100-80gb"},
    "lstm, 30,000 words, 4 layers": {"cell": "lstm", "seq": 5000, "batch": 256, "vocab": 30_000, "layers": 4},
    "rnn, both directions, T4": {"cell": "rnn", "seq": 50_000, "batch": 32, "bidirectional": True, "device": "t4"},
}
WIDTHS = (30, 12, 12, 12, 8)


TASK = "word model"
"""The task, of benchmarks/tasks.py."""


def seconds_of(call: Callable[[], object], turns: int) -> list[float]:
    call()
    times = []
    for _ in range(turns):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def task_row(turns: int) -> dict[str, Any]:
    """Answers of a task at settings that were not traced."""
    case = CASES[TASK]
    explorer = TaskExplorer(case.task(), {"seq": case.steps, "microbatch": case.rows, "device": "a100-80gb"})
    explorer.whole_answer(explorer.settings)
    times = []
    for turn in range(turns):
        moved = explorer.settings | {"microbatch": case.rows + 1 + turn, "segments": 1}
        began = time.perf_counter()
        assert "interpolated" in explorer.answer(moved)["moment"]
        times.append(time.perf_counter() - began)
    explorer.close()
    found = {"name": f"task: {TASK}", "seconds": median(times), "slowest": sorted(times)[int(0.95 * (turns - 1))]}
    cells = "", *(f"{1000 * found[name]:.1f} ms" for name in ("seconds", "slowest")), ""
    print_row((found["name"], *cells), WIDTHS)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="time each answer three times")
    turns = SMOKE_TURNS if parser.parse_args().smoke else TURNS
    rows = []
    print_row(("settings", "candidates", "answer", "slowest", "ratio"), WIDTHS)
    for name, settings in SETTINGS.items():
        assert "error" not in answer(settings), answer(settings)
        answers = seconds_of(lambda given=settings: answer(given), turns)
        estimates = seconds_of(lambda given=settings: oomguard.estimate(**given), turns)
        row = {
            "name": name,
            "candidates": settings["batch"] * settings["seq"],
            "seconds": median(answers),
            "slowest": sorted(answers)[int(0.95 * (turns - 1))],
            "ratio": median(answers) / median(estimates),
        }
        cells = (
            f"{row['candidates']:,}",
            f"{1000 * row['seconds']:.1f} ms",
            f"{1000 * row['slowest']:.1f} ms",
            f"{row['ratio']:.0f}",
        )
        print_row((name, *cells), WIDTHS)
        rows.append(row)
    rows.append(task_row(turns))
    longest = max(row["seconds"] for row in rows)
    ratio = max(row["ratio"] for row in rows if "ratio" in row)
    statement = f"an answer takes at most {1000 * MOST_SECONDS:.0f} ms (median of the slowest settings: "
    statement += f"{1000 * longest:.0f} ms, {ratio:.0f} estimates)"
    publish("the_explorer_answers_at_once", {"rows": rows}, {statement: longest <= MOST_SECONDS}, whole=True)


if __name__ == "__main__":
    main()
