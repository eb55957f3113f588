"""`oomguard tradeoffs` of a task: the peaks of microbatches, segments, precisions and lengths, by traces."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from oomguard._core.errors import MisuseError, check_whole, flag, nearest, shown
from oomguard._core.system import write_file
from oomguard._core.units import format_bytes
from oomguard._device.find import find_budget, find_target
from oomguard._plan.task import SEGMENTS, TRACE_ERROR
from oomguard._plan.task_curve import Curves, Shape
from oomguard._report.grid import Over, read_over
from oomguard._report.tables import Section, from_columns, printer, show_sections
from oomguard._report.words import rows_words, times
from oomguard._spec.candidate import Candidate
from oomguard._spec.spec import MAX_BATCH
from oomguard._task.ask import Asker
from oomguard._task.task import Task, name_of

if TYPE_CHECKING:
    from rich.console import Console

VARIED = ("seq", "microbatch", "segments", "precision")  # what can vary
FIXED = ("microbatch", "segments", "precision", "allocator")  # knobs whose effect is counted
SUFFIXES = (".csv", ".parquet")


def make_task_table(
    task: Task | str,
    *,
    over: dict[str, Any] | None = None,
    device: str = "cpu",
    budget_bytes: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    **knobs: Any,
) -> pd.DataFrame:
    """A table with one row per candidate. By default, the microbatch and the segments vary."""
    check_whole("batch", batch, 1, MAX_BATCH)
    for name in knobs:
        if name not in FIXED:
            rule = "The table of a task counts some knobs"
            raise MisuseError(rule=rule, got=f"got {shown(name)}", advice=nearest(name, [*FIXED]))
    varied, target = read_over(over or {}), find_target(device)
    for name in varied:
        if name not in VARIED or name in knobs or (name == "seq" and steps is not None):
            rule = f"Of a task, {', '.join(map(flag, VARIED))} can vary if they are not fixed"
            raise MisuseError(rule=rule, got=f"got values of {flag(name)}", advice="Leave them out.")
    varied = {name: [value] for name, value in knobs.items() if name in VARIED} | varied
    budget_bytes = find_budget(device).limit_bytes if budget_bytes is None else budget_bytes
    base, rows = Shape(allocator=knobs.get("allocator", None if target.cuda else "tight")), list[dict[str, Any]]()
    for length in varied.get("seq", [steps]):
        with Asker(task, target, steps=length, allocator=base.allocator) as asker:
            rows += _rows(Curves(asker, target, base, budget_bytes, batch), length, varied)
    table = pd.DataFrame(rows)
    table.attrs = {"task": name_of(task), "device": target.device, "budget_bytes": budget_bytes}
    return table


def _rows(curves: Curves, length: int | None, varied: Over) -> Iterator[dict[str, Any]]:
    """The rows of one length."""
    batch, longest, base = curves.batch, curves.usual.step.steps, next(iter(curves.made))
    sizes = varied.get("microbatch", sorted({*(1 << power for power in range(batch.bit_length())), batch}))
    pieces = varied.get("segments", [1, *(count for count in SEGMENTS if 2 * count <= longest)])
    for segments, precision, microbatch in itertools.product(pieces, varied.get("precision", ["fp32"]), sizes):
        passes = -(-batch // microbatch)
        shape = base._replace(segments=segments, accumulates=passes > 1, precision=precision)
        knobs = {"microbatch": microbatch, "accumulation": passes, "segments": segments, "precision": precision}
        Candidate(**knobs)  # checks the values
        peak, safe = curves[shape].peak_bytes(microbatch), curves[shape].safe_bytes(microbatch, TRACE_ERROR)
        sizes_bytes = {"peak_bytes": peak, "margin_bytes": safe - peak, "fits": safe <= curves.budget_bytes}
        yield {"seq": length or longest, "batch": max(batch, microbatch)} | knobs | sizes_bytes


def task_table_json(table: pd.DataFrame) -> dict[str, Any]:
    return {**table.attrs, "rows": json.loads(table.to_json(orient="records"))}


def check_task_output(output: str | None) -> None:
    """Raise if the file is no table."""
    if output is not None and Path(output).suffix.lower() not in SUFFIXES:
        rule = f"The table of a task is written to {' or '.join(SUFFIXES)}"
        raise MisuseError(rule=rule, got=f"got {shown(output)}", advice="Write it as --output tradeoffs.csv.")


def save_task_table(table: pd.DataFrame, output: str) -> Path:
    """Write the table, by the suffix of the file."""
    is_csv = Path(output).suffix.lower() == ".csv"
    content = table.to_csv(index=False).encode() if is_csv else table.to_parquet(index=False)
    return write_file(output, content, "A table")


def show_task_table(table: pd.DataFrame, path: Path | None, console: "Console") -> None:
    """Print the whole table: its peaks with few segments first."""
    where = f"{table.attrs['device']}, budget {format_bytes(table.attrs['budget_bytes'])}"
    counts = f"{times(len(table), 'candidate')} on {where}: {int(table['fits'].sum()):,} fit with a margin."
    known = "Peaks are by traces: nothing was run at full size. A plan checks which knobs keep the gradient."
    columns = {name: [f"{value:,}" for value in table[name]] for name in ("seq", "segments")}
    candidates = [
        Candidate(microbatch=a, accumulation=b) for a, b in zip(table["microbatch"], table["accumulation"], strict=True)
    ]
    columns["microbatch"] = [rows_words(candidate) for candidate in candidates]
    columns["precision"] = [*table["precision"]]
    columns["peak"] = [*map(format_bytes, table["peak_bytes"])]
    columns["with margin"] = [*map(format_bytes, table["peak_bytes"] + table["margin_bytes"])]
    columns["fits"] = ["yes" if fits else "no" for fits in table["fits"]]
    shown_columns = {name: cells for name, cells in columns.items() if name not in VARIED or len({*cells}) > 1}
    title, rows = (
        f"Trade-offs of {table.attrs['task']}",
        from_columns(shown_columns, ("precision", "fits"), drops=("with margin",)),
    )
    style = "bold green" if table["fits"].any() else "bold red"
    show_sections([Section(title=title, sentences=(counts, known), table=rows)], console, first_style=style)
    if path is not None:
        printer(console)(f"Written to {path}.")
