"""Generate the pages of the site that must not be typed: the references, the claims and the diagram of the layers.

MkDocs calls `on_files` and `on_page_markdown` when it builds the site (`make docs`).
"""

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File

import oomguard
from oomguard._cli.app import app
from oomguard._cli.program import EXIT_CODES

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
LAYERS = [
    ("_core", "errors and checks, units, files and processes"),
    ("_spec", "Spec, presets, Candidate, the table of knobs"),
    ("_estimate", "the peak of a step by arithmetic: engines, terms, moments, cards"),
    ("_device", "memory of this machine, and budgets"),
    ("_batch", "nested batches: walk through them, cut them by rows"),
    ("_rnn", "exact recurrent calls: plain, in segments, in chunks"),
    ("_task", "your own model, loss and data: batches, estimate, check of knobs"),
    ("_keras", "models of Keras as tasks, read from their files"),
    ("_adam8bit", "Adam with a state in 8 bits, with torchao"),
    ("_step", "one optimizer update of a candidate"),
    ("_probe", "real steps in a child process: records, verdicts, ledger"),
    ("_predict", "estimate and records give peak, margin and seconds"),
    ("_search", "which candidate to probe next"),
    ("_data", "sources read lazily, windows, length buckets"),
    ("_plan", "the plan, its file and its advice"),
    ("_fleet", "many jobs on many cards, and files for schedulers"),
    ("_guard", "fall back when memory gets tight, climb back later"),
    ("_train", "loop, checkpoints, metrics, predictions"),
    ("_run", "unmodified scripts: how they start, a look inside, their summary"),
    ("_report", "everything that shows: text, tables, charts, pages"),
    ("_explore", "a page and a widget with sliders"),
    ("_api", "the public functions, and their arguments"),
    ("_cli", "commands, flags, messages"),
    ("integrations", "Lightning, skorch, Keras, Optuna and Ray Tune, each on its own"),
]
"""The packages in import order: each may import only those before it."""
WITHOUT_TORCH = ("_core", "_spec", "_estimate")


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    pages = {"reference/cli.md": cli_page, "reference/python.md": python_page, "claims.md": claims_page}
    for path, make in pages.items():
        files.append(File.generated(config, path, content=make()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the diagram where a page asks for it, and drop the comments that only the tests read."""
    return re.sub(r"^<!-- .*? -->\n", "", markdown.replace("<!-- layers -->", layers_svg()), flags=re.MULTILINE)


# ---- the command line


def cli_page() -> str:
    """Make the reference of every command, with its flags in the groups that the help shows."""
    group: Any = typer.main.get_command(app)
    parts = ["# Command line", "This page is generated from the program. `oomguard COMMAND --help` prints the same."]
    rows = "\n".join(f"| {code} | {text} |" for code, text in EXIT_CODES.items())
    killed = "Other codes come from the system. 137, for example, is a process that was killed (SIGKILL)."
    parts += ["## Exit codes", f"| code | meaning |\n|---|---|\n{rows}", killed]
    for name, command in group.commands.items():
        parts += [f"## oomguard {name}", _help_markdown(command.help)]
        panels: dict[str, list[str]] = {}
        for option in command.params:
            if not getattr(option, "hidden", False):
                panel = getattr(option, "rich_help_panel", None) or "Arguments"
                panels.setdefault(panel, []).append(_option_row(option))
        for panel, rows in panels.items():
            parts.append("\n".join([f"| {panel} | value | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _help_markdown(text: str) -> str:
    """Turn the help, which has rich's markup, into Markdown: lists of command lines become code blocks."""
    text = re.sub(r"\[bold\](.*?)\[/bold\]", r"**\1**", text)
    text = re.sub(r" *\[dim\].*?\[/dim\]", "", text)
    blocks = []
    for block in text.split("\n\n"):
        lines = [line.removeprefix("- ") for line in block.splitlines()]
        commands = all(line.startswith(("oomguard ", "torchrun ")) for line in lines)
        blocks.append("```console\n" + "\n".join(f"$ {line}" for line in lines) + "\n```" if commands else block)
    return "\n\n".join(blocks)


def _option_row(option: Any) -> str:
    flag = option.name.upper() if option.param_type_name == "argument" else ", ".join(option.opts)
    value = "" if option.param_type_name == "argument" else (option.metavar or "").strip()
    return f"| `{flag}` | {f'`{value}`' if value else ''} | {(option.help or '').replace('|', chr(92) + '|')} |"


# ---- the Python reference


def python_page() -> str:
    """Make the reference of every public name, from its signature and its docstring."""
    names = [name for name in oomguard.__all__ if not name.startswith("__")]
    values = {name: getattr(oomguard, name) for name in names}
    errors = [name for name, value in values.items() if inspect.isclass(value) and issubclass(value, Exception)]
    classes = [name for name, value in values.items() if inspect.isclass(value) and name not in errors]
    functions = [name for name in names if name not in errors and name not in classes]
    parts = ["# Python", "All public names of `oomguard`. This page is generated from their docstrings."]
    for title, members in (("Functions", functions), ("Types", classes), ("Errors", errors)):
        parts.append(f"## {title}")
        for name in members:
            path = f"{values[name].__module__}.{values[name].__qualname__}"
            parts.append(f"::: {path}\n    options:\n      heading: oomguard.{name}\n      toc_label: oomguard.{name}")
    parts.append("## Integrations")
    for file in sorted((ROOT / "oomguard" / "integrations").glob("[!_]*.py")):
        for name in public_names(file):
            path = f"oomguard.integrations.{file.stem}.{name}"
            parts.append(f"::: {path}\n    options:\n      heading: {path}\n      toc_label: {file.stem}.{name}")
    return "\n\n".join(parts) + "\n"


def public_names(file: Path) -> list[str]:
    """Read `__all__` of a module without importing it, since its package may be missing."""
    assigned = (node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.Assign))
    lists = [node.value for node in assigned if getattr(node.targets[0], "id", "") == "__all__"]
    return [str(name) for value in lists for name in ast.literal_eval(value)]


# ---- the claims


def claim_names() -> list[str]:
    """List the benchmarks: the files that begin with a claim."""
    return sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.read_text("utf-8").startswith('"""Claim:'))


def claim_sentence(name: str) -> str:
    """Read the claim from the first paragraph of its benchmark."""
    text = ast.get_docstring(ast.parse((BENCHMARKS / f"{name}.py").read_text("utf-8"))) or ""
    sentence = " ".join(text.split("\n\n")[0].removeprefix("Claim:").split())
    return sentence[0].upper() + sentence[1:]


def runs_of(name: str) -> list[dict[str, Any]]:
    """Read all stored runs of a benchmark, oldest first."""
    lines = (BENCHMARKS / "results" / f"{name}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def newest(name: str) -> dict[str, Any]:
    """Pick the newest run of the whole benchmark, or the newest smaller one if it never ran whole."""
    runs = runs_of(name)
    return ([run for run in runs if run["whole"]] or runs)[-1]


def claims_page() -> str:
    """Make the page of claims from benchmarks/results/*.jsonl: the newest whole run of each, and every failed run."""
    introduction = (
        "Each claim has a program in `benchmarks/` that measures it and appends one line to `benchmarks/results/`. "
        "This page is generated from those lines when the site is built; no figure is typed. It shows the newest run "
        "with all cases of the claim (a *whole* run), or the newest smaller run where there is no whole one, and it "
        "lists every run in which a statement did not hold. `make bench` measures them again on your machine."
    )
    head = "| claim | newest run holds | stored runs | of these, all statements held in |\n|---|---|---|---|\n"
    parts = ["# Claims", introduction, head + "\n".join(_claim_row(name) for name in claim_names())]
    for name in claim_names():
        parts += _claim_section(name)
    return "\n\n".join(parts) + "\n"


def _claim_row(name: str) -> str:
    runs, run = runs_of(name), newest(name)
    held = sum(all(stored["passed"].values()) for stored in runs)
    anchor = _title(name).lower().replace(" ", "-")
    return f"| [{_title(name)}](#{anchor}) | {_yes(all(run['passed'].values()))} | {len(runs)} | {held} |"


def _claim_section(name: str) -> list[str]:
    run = newest(name)
    machine, versions = run["machine"], ", ".join(f"{package} {text}" for package, text in run["versions"].items())
    origin = (
        f"{'Whole' if run['whole'] else 'Smaller'} run of {run['date'][:10]} on {machine['cpu']} with "
        f"{machine['cores']} cores and {machine['memory_gib']} GiB (load {machine['load']}); {versions}. "
        f"Program: `benchmarks/{name}.py`."
    )
    statements = [f"| {statement} | {_yes(holds)} |" for statement, holds in run["passed"].items()]
    table = "\n".join(["| statement | holds |", "|---|---|", *statements])
    parts = [f"## {_title(name)}", claim_sentence(name), origin, table]
    figures = {key: value for key, value in run.items() if key not in _HEAD}
    scalars = {key: value for key, value in figures.items() if isinstance(value, int | float | str)}
    if scalars:
        parts.append(", ".join(f"{_words(key)}: {_figure(key, value)}" for key, value in scalars.items()) + ".")
    parts += [table for table in _tables(figures) if table]
    return parts + _failures(name)


_HEAD = ("claim", "date", "whole", "passed", "machine", "versions")


def _tables(figures: dict[str, Any]) -> list[str]:
    """Show what is tabular in a run: rows of plain figures, under their names."""
    own = {key: value for key, value in figures.items() if _is_flat(value) and isinstance(value, dict)}
    tables = [_table(own)] if len({frozenset(row) for row in own.values()}) == 1 else []
    for value in figures.values():
        if isinstance(value, dict) and value and all(_is_flat(row) for row in value.values()):
            tables.append(_table(value))
        elif isinstance(value, list) and 0 < len(value) <= 40 and all(_is_flat(row) for row in value):
            tables.append(_table({str(number): row for number, row in enumerate(value, 1)}))
    return tables


def _is_flat(row: Any) -> bool:
    """Tell whether a row fits a table: it is not nested, and no text in it is long."""
    if not isinstance(row, dict) or not row:
        return False
    return not any(isinstance(value, dict | list) or len(str(value)) > 40 for value in row.values())


def _table(rows: dict[str, dict[str, Any]]) -> str:
    columns = [*dict.fromkeys(key for row in rows.values() for key in row)]
    lines = ["| | " + " | ".join(map(_words, columns)) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(_figure(key, row.get(key)) for key in columns) + " |")
    return "\n".join(lines)


def _failures(name: str) -> list[str]:
    """List the runs in which a statement did not hold."""
    failed = [run for run in runs_of(name) if not all(run["passed"].values())]
    if not failed:
        return []
    lines = ["| date | commit | machine | did not hold |", "|---|---|---|---|"]
    for run in failed:
        statements = "; ".join(statement for statement, holds in run["passed"].items() if not holds)
        lines.append(f"| {run['date'][:10]} | {run['versions']['commit']} | {run['machine']['cpu']} | {statements} |")
    return [f"It did not hold in {len(failed)} of {len(runs_of(name))} stored runs:", "\n".join(lines)]


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _words(key: str) -> str:
    return key.removesuffix("_bytes").replace("_", " ")


def _yes(holds: bool) -> str:
    return "yes" if holds else "**no**"


def _figure(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return _yes(value)
    if isinstance(value, int) and key.endswith("_bytes"):
        return f"{value / (1 << 20):,.1f} MiB"
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


# ---- the diagram


def layers_svg() -> str:
    """Draw the packages from the lowest to the highest, with the colours of the page."""
    height, width = 30, 700
    rows = []
    for number, (name, text) in enumerate(LAYERS):
        y = (len(LAYERS) - 1 - number) * height
        opacity = 0.10 if name in WITHOUT_TORCH else 0.22
        rows.append(
            f'<rect x="0.5" y="{y + 0.5}" width="{width - 1}" height="{height - 4}" rx="4" '
            f'fill="var(--md-primary-fg-color)" fill-opacity="{opacity}" stroke="var(--md-primary-fg-color)"/>'
            f'<text x="12" y="{y + 18}" font-family="monospace" font-size="13" fill="currentColor">{name}</text>'
            f'<text x="120" y="{y + 18}" font-size="13" fill="currentColor">{text}</text>'
        )
    total = len(LAYERS) * height
    label = "Packages of oomguard. Each imports only packages below it; the three lowest do not import torch."
    return (
        f'<svg viewBox="0 0 {width} {total}" role="img" aria-label="{label}" '
        f'style="width: 100%; max-width: {width}px; height: auto">{"".join(rows)}</svg>'
    )
