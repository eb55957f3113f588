"""The page of a run: the summary, the calls, and the memory in use over time."""

import shlex
from pathlib import Path

from oomguard._core.system import write_file
from oomguard._core.units import GIB, MIB, format_bytes, format_seconds
from oomguard._report.curve import Axis, Curve, Mark, make_series
from oomguard._report.page import make_page
from oomguard._report.run import PAGE, explain_run, result_words
from oomguard._report.tables import check_ending, macros
from oomguard._run.result import RunResult


def save_run(result: RunResult, path: str) -> Path:
    """Write the page of a run to an .html file."""
    return write_file(check_ending(path, *PAGE), run_page(result).encode(), "A page")


def run_page(result: RunResult) -> str:
    sections = explain_run(result)
    summary, others = sections[0], sections[1:]
    about = macros().about(" ".join([result_words(result), *summary.sentences]))
    titled = [type(summary)(title="Summary", table=summary.table), *others]
    curves = [{"": timeline(result)}] if len(result.samples) > 1 else []
    return make_page(f"Run of {shlex.join(result.command)}", about, titled, curves)


def timeline(result: RunResult) -> Curve:
    """The memory of all processes of a script over time, with the budget if there is one process."""
    most_bytes = max(sample.resident_bytes for sample in result.samples)
    alone = result.processes[0] if len(result.processes) == 1 and result.processes[0].device == "cpu" else None
    high_bytes = max(most_bytes, result.peak_bytes)
    marks = [Mark(text=f"peak {format_bytes(result.peak_bytes)}", y=0.0, role="note")] if alone else []
    if alone is not None and alone.budget_bytes < 2 * high_bytes:
        high_bytes = max(high_bytes, alone.budget_bytes)
        marks.append(
            Mark(text=f"budget {format_bytes(alone.budget_bytes)}", y=float(alone.budget_bytes), role="budget")
        )
    size, unit = (GIB, "GiB") if high_bytes >= GIB else (MIB, "MiB")
    marks = [Mark(text=m.text, y=(m.y or result.peak_bytes) / size, role=m.role) for m in marks]
    seconds = [sample.seconds for sample in result.samples]
    used = [sample.resident_bytes / size for sample in result.samples]
    tips = [f"{format_seconds(s.seconds)}: {format_bytes(s.resident_bytes)}" for s in result.samples]
    return Curve(
        name="timeline",
        title="Memory over time",
        question="How much memory did the processes of the script use?",
        answer=f"They used at most {format_bytes(most_bytes)} at the moments at which they were looked at.",
        x=Axis(label="time since the start", unit="s", low=0.0, high=max(seconds)),
        y=Axis(label="resident memory", unit=unit, low=0.0, high=1.08 * high_bytes / size),
        series=(make_series("resident", seconds, used, tips=tips),),
        marks=tuple(marks),
    )
