"""Runs beside one another, and the options of a run, in words and as rows."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomguard._core.errors import MisuseError, flag
from oomguard._core.units import format_bytes, format_seconds
from oomguard._report.tables import Section, Table, show_sections
from oomguard._report.words import NONE, figure, times
from oomguard._train.runs import RunSummary, given_options, read_run
from oomguard._train.settings import read_settings

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.console import Console

NAME_WIDTH, RUN_WIDTH = 18, 14
"""Characters of the names of rows and of a run. More runs than fit beside one another are in further tables."""
PLAN = ("microbatch", "segments", "precision", "planned_peak_bytes")  # shown even if all runs have the same


def compare(*runs: str | os.PathLike[str]) -> "DataFrame":
    """Compare runs of `train`: a DataFrame with one row per run.

    Columns are what a run has reached (`steps`, `loss`, the best `validation_loss`, the median of `tokens_per_second`,
    `peak_bytes`), its plan (`batch`, the knobs, `planned_peak_bytes`, ...) and its options (`lr`, `epochs`, ...). Runs
    of specs and of tasks can be mixed. Nothing is run, and no code of a task is imported.

    >>> import numpy as np, oomguard, tempfile, warnings
    >>> plan = oomguard.find_feasible_config(cell="gru", seq=8, features=2, hidden=8, batch=4, threads=1, max_probes=1)
    >>> numbers = np.random.default_rng(0).normal(size=(40, 8, 3)).astype(np.float32)
    >>> with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
    ...     for lr in (0.1, 0.01):
    ...         result = oomguard.train(plan, numbers, steps=2, lr=lr, run=f"{directory}/{lr}")
    ...     compare(f"{directory}/0.1", f"{directory}/0.01")[["steps", "lr"]].values.tolist()
    [[2.0, 0.1], [2.0, 0.01]]
    """
    from pandas import DataFrame

    return DataFrame([summary.row() for summary in read_runs(runs)])


def read_runs(runs: Sequence[str | os.PathLike[str]]) -> list[RunSummary]:
    if not runs:
        raise MisuseError(rule="compare takes runs", got="got none", advice="Give directories such as runs/lstm-1000.")
    return [read_run(run) for run in runs]


def comparison_json(runs: Sequence[RunSummary]) -> dict[str, Any]:
    return {"runs": [run.row() for run in runs]}


def show_comparison(runs: Sequence[RunSummary], console: "Console") -> None:
    """Print what the runs have reached, their plans, and the settings in which they differ, a column for each run."""
    differing = [name for name in runs[0].settings | runs[-1].settings if _differs(name, runs)]
    note = "All settings are the same." if not differing else f"They differ in {times(len(differing), 'setting')}."
    beside = max(1, (console.width - NAME_WIDTH) // RUN_WIDTH)
    sections = []
    for start in range(0, len(runs), beside):
        part = runs[start : start + beside]
        title = times(len(runs), "run") if len(part) == len(runs) else f"Runs {start + 1} to {start + len(part)}"
        sections.append(Section(title=title, sentences=() if start else (note,), table=_table(part, runs, differing)))
    show_sections(sections, console)


def _differs(name: str, runs: Sequence[RunSummary]) -> bool:
    return len({repr(run.settings.get(name)) for run in runs}) > 1


def _table(part: Sequence[RunSummary], runs: Sequence[RunSummary], differing: Sequence[str]) -> Table:
    names = [name for name in runs[0].reached if any(run.reached[name] is not None for run in runs)]
    rows = [(_words(name), *(_figure(name, run.reached[name]) for run in part)) for name in names]
    shown = dict.fromkeys([*PLAN, *differing])
    rows += [(_words(name), *(_figure(name, run.settings.get(name)) for run in part)) for name in shown]
    header = ("", *_labels([run.run for run in runs])[runs.index(part[0]) :][: len(part)])
    return Table(header=header, rows=tuple(rows), align="l" + "r" * len(part))


def _labels(runs: Sequence[str]) -> list[str]:
    """The last parts of the paths of runs, or whole paths if two runs had the same name."""
    names = [Path(os.path.abspath(run)).name for run in runs]
    return names if len({*names}) == len(names) else [*runs]


def _words(name: str) -> str:
    return {"tokens_per_second": "tokens/s", "planned_seconds_per_step": "planned step"}.get(
        name, name.removesuffix("_bytes").replace("_", " ")
    )


def _figure(name: str, value: Any) -> str:
    if value is None:
        return NONE
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name == "planned_seconds_per_step":
        return format_seconds(value)
    if name == "tokens_per_second":
        return figure(value)
    if name == "data":
        return Path(value).name
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_section(run: str, *, is_spec: bool) -> list[Section]:
    """What a run has reached, and the options that were given to its training; none for a plan file without a run."""
    if not Path(run).is_dir():
        return []
    summary, settings = read_run(run), read_settings(Path(run))
    reached = [f"{_words(name)} {_figure(name, value)}" for name, value in summary.reached.items() if value is not None]
    given = {} if settings is None else given_options(settings, is_spec=is_spec)
    flags = [f"{flag(name.removeprefix('asked_'))} {value}" for name, value in given.items() if value is not None]
    options = f"Options: {', '.join(flags)}." if flags else "All options are at their defaults."
    options = "Its options are not known: version 0.1 did not keep them." if settings is None else options
    return [Section(title=f"Run {run}", sentences=(f"Reached: {', '.join(reached)}.", options))]
