"""`oomguard tradeoffs`: a table with one row per candidate, as a DataFrame, JSON, files, and text in a terminal."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pandas as pd

from oomguard._core.errors import MisuseError, check_choice, shown
from oomguard._core.progress import Status, tell
from oomguard._core.system import write_file
from oomguard._core.units import format_bytes
from oomguard._estimate.malloc import default_allocator
from oomguard._estimate.moments import TERMS
from oomguard._predict.speed import NOISY
from oomguard._probe.record import Record
from oomguard._report.curves import MAKERS, curves_of
from oomguard._report.grid import Over, make_grid
from oomguard._report.subject import Subject, for_charts, front_of
from oomguard._report.tables import Section, Table, from_columns, printer, show_sections
from oomguard._report.words import NONE, figure, noisy_words, spec_words, times
from oomguard._spec.candidate import KNOBS
from oomguard._spec.spec import Spec

if TYPE_CHECKING:
    from rich.console import Console

SUFFIXES = (".csv", ".parquet", ".png", ".html")  # the kinds of files that `--output` takes
MOST_LINES = 14  # the most rows of the front that a terminal shows
LAYERS = ("cell", "features", "vocab", "embedding", "hidden", "projection", "layers", "bidirectional")
"""The fields of a spec that the words for its layers name."""
ALWAYS = ("seq", "batch")  # the fields of the spec that every table has as columns
# columns of a table that are predicted, and those that are measured with their types
PREDICTED = ("peak_bytes", "margin_bytes", "fits", "seconds_per_step", "time_factor", "tokens_per_second")
MEASURED = {
    "measured_peak_bytes": "Int64",
    "measured_seconds_per_step": "float64",
    "measured_tokens_per_second": "float64",
    "verdict": "string",
}


def make_table(subject: Subject) -> pd.DataFrame:
    fields = [*ALWAYS, *(name for name in subject.varied if name not in KNOBS and name not in ALWAYS)]
    parts = []
    for spec, candidates in make_grid(subject.spec, subject.candidate, subject.target, subject.varied):
        tell(Status(f"Estimating candidates with {times(spec.steps, 'time step')}", topic="Estimating candidates"))
        part = subject.predict(candidates, spec)
        own = {name: getattr(spec, name) for name in fields} | {"time_factor": np.exp(part["doubt"])}
        parts.append(_with_measured(subject.records, spec, part).assign(**own))
    columns = [*fields, *KNOBS, *(f"{term}_bytes" for term in TERMS), "total_bytes", *PREDICTED, *MEASURED]
    table = pd.concat(parts, ignore_index=True)[columns]
    table.attrs = {"device": subject.target.device, "budget_bytes": subject.budget_bytes}
    return table


def _with_measured(records: Sequence[Record], spec: Spec, table: pd.DataFrame) -> pd.DataFrame:
    """The table with the measured columns: for each candidate, its latest record."""
    knobs = [name for name, knob in KNOBS.items() if knob.searched]
    rows = []
    for record in sorted(records, key=lambda record: record.started):
        if record.spec == spec:
            allocator = record.candidate.allocator or default_allocator(record.device)
            own = msgspec.structs.asdict(record.candidate) | {"engine": record.engine or "", "allocator": allocator}
            values = (record.peak_bytes, record.seconds_per_step, record.tokens_per_second)
            figures = values if record.verdict.ran else (None, None, None)
            rows.append([*(own[name] for name in knobs), *figures, record.verdict.name])
    if not rows:
        return table.assign(**{name: pd.array([None] * len(table), dtype=kind) for name, kind in MEASURED.items()})
    latest = pd.DataFrame(rows, columns=[*knobs, *MEASURED]).drop_duplicates(knobs, keep="last")
    return table.merge(latest.astype(table.dtypes[knobs].to_dict() | MEASURED), how="left", on=knobs)


def check_written(output: str | None, curve: str | None) -> str | None:
    """The curve that was asked for; raises unless the output is of a known kind and can show it."""
    suffix = None if output is None else Path(output).suffix.lower()
    if output is not None and suffix not in SUFFIXES:
        raise MisuseError(
            rule=f"--output must end in one of {', '.join(SUFFIXES)}",
            got=f"got {shown(output)}",
            advice="A table is written to .csv or .parquet, one curve to .png, all curves to .html.",
        )
    if curve is not None:
        check_choice("curve", curve, MAKERS)
    if curve is not None and suffix != ".png":
        raise MisuseError(
            rule="--curve chooses what a .png shows",
            got=f"got --output {output}" if output is not None else "got no --output",
            advice=f"Write it to --output {curve}.png, or leave --curve out.",
        )
    return curve


def save(subject: Subject, table: pd.DataFrame, output: str, curve: str | None) -> Path:
    """Write the table or curves, by the suffix of the file."""
    path = Path(output)
    suffix = path.suffix.lower()
    if suffix in (".csv", ".parquet"):
        content = table.to_csv(index=False).encode() if suffix == ".csv" else table.to_parquet(index=False)
        return write_file(path, content, "A table")
    from oomguard._report.page import save_curves  # imports Matplotlib, for which a table must not wait

    if suffix == ".png":
        return save_curves([MAKERS[curve or default_curve(subject.over or ())](for_charts(subject))], output)
    return save_curves(curves_of(subject), output, title_words(subject), where_words(subject))


def default_curve(over: Iterable[str]) -> str:
    """The curve that shows most of what varies."""
    names = {*over} - {"precision"}
    if "seq" in names:
        return "region"
    return names.pop() if names in ({"microbatch"}, {"segments"}) else "front"


def title_words(subject: Subject) -> str:
    """The model, and the values of its fields that vary. A shape that varies is not named as if it did not."""
    over, model = subject.varied, spec_words(subject.spec)
    fields = [name for name in over if name not in (*KNOBS, *ALWAYS)]
    if {*fields} & {*LAYERS}:
        model = values_words(over.get("cell", [subject.spec.cell]))
    varied = [f"{name.replace('_', ' ')} {values_words(over[name])}" for name in fields if name != "cell"]
    return f"Trade-offs of {', '.join([model, *varied])}"


def where_words(subject: Subject) -> str:
    steps = values_words(subject.varied.get("seq", [subject.spec.steps]))
    batch = values_words(subject.varied.get("batch", [subject.spec.batch]))
    known = times(len(subject.calibration.own), "record") if subject.calibrated else "nothing measured"
    budget = format_bytes(subject.budget_bytes)
    return f"T = {steps}, batch {batch} on {subject.target.device}, budget {budget}, {known}"


def values_words(values: Sequence[Any]) -> str:
    """Values in a few words; of numbers, the smallest and the largest."""
    if all(type(value) in (int, float) for value in values):
        return " to ".join(f"{value:,}" for value in sorted({min(values), max(values)}))
    return " or ".join(map(_word, values))


def table_json(subject: Subject, table: pd.DataFrame) -> dict[str, Any]:
    return {
        "device": subject.target.device,
        "budget_bytes": subject.budget_bytes,
        "spec": msgspec.to_builtins(subject.spec, str_keys=True),
        "over": subject.varied,
        "calibrated": subject.calibrated,
        "rows": json.loads(table.to_json(orient="records", double_precision=15)),
    }


def show_tradeoffs(subject: Subject, table: pd.DataFrame, path: Path | None, console: "Console") -> None:
    """Print the front, and where the whole table is or how to get it."""
    fits = bool(table["fits"].any())
    known = "Peaks are by arithmetic. Speeds are guesses: compare them, but do not rely on the numbers."
    if subject.calibrated:
        known = "Peaks and speeds are predicted from the records; measured figures are in their own column."
    counts = f"{times(len(table), 'candidate')}, {int(table['fits'].sum()):,} fit."
    noisy = subject.calibrated and (table["time_factor"] > 1 + NOISY).any()
    table = table if subject.calibrated else table.assign(time_factor=1.0)  # guesses need no mark
    known += " ± is the standard deviation of a time." if noisy else ""
    head = Section(title=title_words(subject), sentences=(f"{where_words(subject)}.", counts, known))
    rows = _front_section(subject.varied, table) if fits else _shortfall_section(subject.varied, table)
    show_sections([head, rows], console, first_style="bold green" if fits else "bold red")
    more = "All rows: --output tradeoffs.csv. All curves: --output tradeoffs.html."
    say = printer(console)
    say("")
    say(more if path is None else f"Written to {path}.")


def _shortfall_section(over: Over, table: pd.DataFrame) -> Section:
    least = table.loc[[(table["peak_bytes"] + table["margin_bytes"]).idxmin()]]
    need = format_bytes(int(least["peak_bytes"].iloc[0] + least["margin_bytes"].iloc[0]))
    words = f"The smallest of them needs {need} with its margin."
    return Section(title="Nothing fits", sentences=(words,), table=_lines(over, least))


def _front_section(over: Over, table: pd.DataFrame) -> Section:
    """The front, thinned out if it is long, and every row that was measured; the fastest first."""
    front = front_of(table)
    picked = front.iloc[np.unique(np.linspace(0, len(front) - 1, MOST_LINES).round().astype(int))]
    note = f" ({len(picked)} of {len(front)} rows)" if len(picked) < len(front) else ""
    measured = table.index[table["verdict"].notna()].difference(picked.index)
    note += ", with all measured rows" if len(measured) else ""
    rows = table.loc[[*picked.index, *measured]].sort_values("tokens_per_second", ascending=False, kind="stable")
    title = f"The front, fastest first: no other candidate is both faster and smaller{note}"
    return Section(title=title, table=_lines(over, rows))


def _lines(over: Over, rows: pd.DataFrame) -> Table:
    """Rows as a terminal shows them: what varies, the predicted figures, and the measured peaks if there are any."""
    names = [name for name in over if len(over[name]) > 1] or ["microbatch"]
    columns = {name: [*map(_word, rows[name])] for name in names}
    if "microbatch" in columns:
        pairs = zip(rows["microbatch"], rows["accumulation"], strict=True)
        columns["microbatch"] = [f"{size:,} × {passes:,}" for size, passes in pairs]
    columns["peak"] = [*map(format_bytes, rows["peak_bytes"])]
    columns["with margin"] = [*map(format_bytes, rows["peak_bytes"] + rows["margin_bytes"])]
    if {"seq", "batch"} & {*names}:  # steps of different sizes cannot be compared by their time
        columns["tokens/s"] = [*map(figure, rows["tokens_per_second"])]
    else:
        spreads = rows["time_factor"] - 1
        columns["step time"] = [*map(noisy_words, rows["seconds_per_step"], spreads)]
    if rows["verdict"].notna().any():
        columns["measured"] = [*map(_measured_words, rows["measured_peak_bytes"], rows["verdict"])]
    words = [name for name in names if isinstance(over.get(name, [0])[0], str)]
    return from_columns(columns, words, drops=("with margin",))


def _measured_words(peak_bytes: Any, verdict: Any) -> str:
    """The measured peak, with the verdict unless that is FITS."""
    if pd.isna(verdict):
        return NONE
    size = "" if pd.isna(peak_bytes) else format_bytes(int(peak_bytes))
    return " ".join(filter(None, (size, "" if verdict == "FITS" else verdict)))


def _word(value: Any) -> str:
    if pd.isna(value):
        return NONE
    return f"{value:,}" if isinstance(value, int | np.integer) and not isinstance(value, bool) else str(value)
