"""`oomguard tradeoffs`: the front on a terminal, the table as JSON, and files of tables and curves."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd

from oomguard.candidate import KNOBS
from oomguard.checks import nearest, shown
from oomguard.curves.make import MAKERS, curves_of
from oomguard.curves.save import save_curves
from oomguard.errors import MisuseError
from oomguard.plan.phrases import NONE, figure, spec_words, times
from oomguard.plan.section import Section, Table
from oomguard.report.common import printer
from oomguard.report.plan import show_sections
from oomguard.tradeoffs.make import look_at
from oomguard.tradeoffs.save import save_table
from oomguard.tradeoffs.subject import Subject
from oomguard.tradeoffs.table import ALWAYS, front_of
from oomguard.tradeoffs.values import Over
from oomguard.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

SUFFIXES = (".csv", ".parquet", ".png", ".html")
"""What `--output` takes."""
MOST_LINES = 14
"""Rows of the front on a terminal."""
LAYERS = ("cell", "features", "vocab", "embedding", "hidden", "projection", "layers", "bidirectional")
"""Fields of a spec that the words for its layers name."""


def check_written(output: str | None, curve: str | None) -> str | None:
    """The curve that was asked for; raises unless the output can be written, and has one."""
    suffix = None if output is None else Path(output).suffix.lower()
    if output is not None and suffix not in SUFFIXES:
        raise MisuseError(
            rule=f"--output must end in one of {', '.join(SUFFIXES)}",
            got=f"got {shown(output)}",
            advice="A table goes to .csv or .parquet, a curve to .png, all curves to .html.",
        )
    if curve is not None and curve not in MAKERS:
        raise MisuseError(
            rule=f"--curve must be one of {', '.join(MAKERS)}",
            got=f"got {shown(curve)}",
            advice=nearest(curve, [*MAKERS]),
        )
    if curve is not None and suffix != ".png":
        raise MisuseError(
            rule="--curve says what a .png shows",
            got=f"got --output {output}" if output is not None else "got no --output",
            advice=f"Write it to --output {curve}.png, or leave --curve out.",
        )
    return curve


def save(subject: Subject, over: Over | None, table: pd.DataFrame, output: str, curve: str | None) -> Path:
    """Write the table, or curves of the same subject, as the file's ending says. `over` is what was asked for."""
    path = Path(output)
    if path.suffix.lower() in (".csv", ".parquet"):
        return save_table(table, path)
    own, varied = subject if over is None else look_at(subject, over), over or {}
    if path.suffix.lower() == ".png":
        return save_curves([MAKERS[curve or telling(varied)](own)], output)
    return save_curves(curves_of(own), output, title_words(subject, varied), where_words(subject, varied))


def telling(over: Over) -> str:
    """The curve that tells most of what varies.

    >>> telling({"microbatch": [1, 2]}), telling({"seq": [10], "microbatch": [1]}), telling({"segments": [1, 2]})
    ('microbatch', 'region', 'segments')
    """
    names = {*over} - {"precision"}
    if "seq" in names:
        return "region"
    return names.pop() if names in ({"microbatch"}, {"segments"}) else "front"


def title_words(subject: Subject, over: Over) -> str:
    """The model, in words, and the values of what varies of it. A shape that varies is not named as if it did not."""
    fields = [name for name in over if name not in (*KNOBS, *ALWAYS)]
    model = spec_words(subject.spec)
    if {*fields} & {*LAYERS}:
        model = values_words(over.get("cell", [subject.spec.cell]))
    varied = [f"{name.replace('_', ' ')} {values_words(over[name])}" for name in fields if name != "cell"]
    return f"Trade-offs of {', '.join([model, *varied])}"


def where_words(subject: Subject, over: Over) -> str:
    """The length, the batch, the device and the budget, in words."""
    spec = subject.spec
    steps, batch = (values_words(over.get(name, [one])) for name, one in (("seq", spec.steps), ("batch", spec.batch)))
    budget = format_bytes(subject.budget_bytes)
    known = times(len(subject.calibration.own), "record") if subject.calibrated else "nothing measured"
    return f"T = {steps}, batch {batch} on {subject.place.device}, budget {budget}, {known}"


def values_words(values: Sequence[Any]) -> str:
    """Values in a few words: of numbers, from where to where.

    >>> values_words([512, 1024]), values_words([7]), values_words(["adam", "sgd"])
    ('512 to 1,024', '7', 'adam or sgd')
    """
    if all(type(one) in (int, float) for one in values):
        return " to ".join(f"{one:,}" for one in sorted({min(values), max(values)}))
    return " or ".join(map(_word, values))


def table_json(subject: Subject, over: Over, table: pd.DataFrame) -> dict[str, Any]:
    """The whole table as one JSON object."""
    rows = json.loads(table.to_json(orient="records", double_precision=15))
    return {
        "device": subject.place.device,
        "budget_bytes": subject.budget_bytes,
        "spec": msgspec.to_builtins(subject.spec, str_keys=True),
        "over": over,
        "calibrated": subject.calibrated,
        "rows": rows,
    }


def show_table(subject: Subject, over: Over, table: pd.DataFrame, path: Path | None, console: "Console") -> None:
    """Print the front, and where the whole table is or could be."""
    show_sections(_sections(subject, over, table), console, first="bold green" if table["fits"].any() else "bold red")
    say = printer(console)
    say("")
    if path is not None:
        say(f"Written to {path}.")
    else:
        say("All rows: --output tradeoffs.csv. All curves: --output tradeoffs.html.")


def _sections(subject: Subject, over: Over, table: pd.DataFrame) -> list[Section]:
    fitting = int(table["fits"].sum())
    title = title_words(subject, over)
    said = [f"{where_words(subject, over)}.", f"{times(len(table), 'candidate')}, {fitting:,} fit."]
    if not subject.calibrated:
        said.append("Speeds are guesses before anything is measured: only their proportions say something.")
    head = Section(title=title, sentences=tuple(said))
    if not fitting:
        least = table.loc[table["peak_bytes"].idxmin()]
        need = format_bytes(int(least["peak_bytes"] + least["margin_bytes"]))
        words = f"The least that any of them needs is {need}, margin included."
        return [head, Section(title="Nothing fits", sentences=(words,), table=_lines(over, least.to_frame().T))]
    front = front_of(table).iloc[::-1]
    picked = front.iloc[[*dict.fromkeys(round(i * (len(front) - 1) / (MOST_LINES - 1)) for i in range(MOST_LINES))]]
    some = f" ({len(picked)} of {len(front)} rows)" if len(picked) < len(front) else ""
    known = table[table["verdict"].notna()].index.difference(picked.index)
    picked = table.loc[[*picked.index, *known]].sort_values("tokens_per_second", ascending=False, kind="stable")
    some += ", and what was measured" if len(known) else ""
    return [
        head,
        Section(title=f"The front, fastest first: nothing else is faster with less{some}", table=_lines(over, picked)),
    ]


def _lines(over: Over, rows: pd.DataFrame) -> Table:
    """Rows as a terminal shows them: what varies, what it costs, what it brings, what was measured."""
    measured = bool(rows["verdict"].notna().any())
    names = [name for name in over if len(over[name]) > 1] or ["microbatch"]
    header = [*names, "peak", "with margin", "a step", "tokens/s", *(["measured", "verdict"] if measured else [])]
    cells = []
    for _, row in rows.iterrows():
        said = [_rows(row) if name == "microbatch" else _word(row[name]) for name in names]
        said += [format_bytes(row["peak_bytes"]), format_bytes(row["peak_bytes"] + row["margin_bytes"])]
        said += [format_seconds(row["seconds_per_step"]), figure(row["tokens_per_second"])]
        if measured:
            peak = row["measured_peak_bytes"]
            said += [NONE if pd.isna(peak) else format_bytes(int(peak)), _word(row["verdict"])]
        cells.append(tuple(said))
    words = [name for name in names if name in KNOBS and isinstance(over.get(name, [0])[0], str)]
    align = "".join("l" if name in words or name == "verdict" else "r" for name in header)
    return Table(header=tuple(header), rows=tuple(cells), align=align)


def _rows(row: Any) -> str:
    return f"{row['microbatch']:,} × {row['accumulation']:,}"


def _word(value: Any) -> str:
    if pd.isna(value):
        return NONE
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
