"""What users read: every public name has an example, the help is true, and what the pages show runs."""

import difflib
import doctest
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import typer
from plans import plan_of

import oomguard
from oomguard._cli.app import app, run

ROOT = Path(__file__).parents[1]
COMMAND: Any = typer.main.get_command(app)
COMMANDS = [*COMMAND.commands]
EXAMPLE = re.compile(r"^- (?:torchrun .* -- )?(oomguard .*?)(?: \[dim\].*)?$", re.MULTILINE)
EXAMPLES = [
    shlex.split(line) for command in (COMMAND, *COMMAND.commands.values()) for line in EXAMPLE.findall(command.help)
]
NAMES = [name for name in oomguard.__all__ if not name.startswith("__")]
CLASSES = [name for name in NAMES if inspect.isclass(getattr(oomguard, name))]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example(name: str) -> None:
    examples = doctest.DocTestParser().get_examples(getattr(oomguard, name).__doc__ or "")
    assert any(example.want for example in examples), "an example shows what comes of it"


@pytest.mark.parametrize("name", CLASSES)
def test_a_public_class_says_what_each_of_its_methods_does(name: str) -> None:
    for method, value in vars(getattr(oomguard, name)).items():
        what: Any = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if not method.startswith("_") and (isinstance(what, property) or inspect.isfunction(what)):
            assert (what.__doc__ or "").strip(), method


# ---- the help


def help_of(words: list[str], width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    assert run([*words, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_three_examples_of_it(name: str) -> None:
    assert len({*EXAMPLE.findall(COMMAND.commands[name].help)}) >= 3


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_the_help_breaks_no_example(
    name: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = help_of([name] if name else [], width, capsys, monkeypatch)
    assert max(map(len, shown.splitlines())) <= width
    assert "<bool>" not in shown
    for example in EXAMPLE.findall((COMMAND.commands[name] if name else COMMAND).help):
        assert f" {example} " in shown


def parsed(words: list[str]) -> set[str]:
    """Parse a command line, which fails if a flag does not exist, and return the names that it gives a value."""
    with COMMAND.commands[words[1]].make_context(words[1], words[2:]) as context:
        return {name for name, value in context.params.items() if value is not None}


def flags_of(words: list[str]) -> set[str]:
    """The names of the flags of a command line. What follows -- is the command of a script."""
    words = words[: words.index("--")] if "--" in words else words
    return {word[2:].replace("-", "_") for word in words if word.startswith("--")}


@pytest.mark.parametrize("words", EXAMPLES, ids=" ".join)
def test_an_example_of_the_help_is_a_command_line_that_parses(words: list[str]) -> None:
    assert parsed(words) >= flags_of(words)


TASK = """
import oomguard, torch
task = oomguard.Task(
    model=lambda: torch.nn.LSTM(2, 3),
    loss=lambda model, batch: model(batch)[0].square().mean(),
    batch=lambda rows, steps: torch.randn(steps, rows, 2),
)
"""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files that examples of the help name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text('cell = "lstm"\nseq = 2000\nhidden = 64\n')
    (tmp_path / "lengths.csv").write_text("100\n100\n2000\n")
    layers = [{"class_name": "LSTM", "config": {"name": "lstm", "units": 8, "batch_input_shape": [None, None, 3]}}]
    with zipfile.ZipFile(tmp_path / "model.keras", "w") as archive:
        archive.writestr("config.json", json.dumps({"class_name": "Sequential", "config": {"layers": layers}}))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(TASK)
    numbers = np.random.default_rng(0).normal(size=(200, 3))
    np.savetxt(tmp_path / "prices.csv", numbers, delimiter=",", header="open,volume,close", comments="")
    oomguard.save_plan(plan_of(), tmp_path / "plan.json")
    (tmp_path / "jobs.toml").write_text('[[job]]\nname = "a"\ncell = "gru"\nseq = [9, 99]\ndata = "prices.csv"\n')
    (tmp_path / "cards.toml").write_text('[[card]]\nname = "t4"\nprice = 0.35\n')
    return tmp_path


CHEAP = [
    *(words for words in EXAMPLES if words[1] in ("estimate", "show", "devices", "tradeoffs", "fleet")),
    *(words for words in EXAMPLES if words[1] == "plan" and "a100-80gb" in words),
    *(words for words in EXAMPLES if words[1] == "train" and "prices.csv" in words),
]


@pytest.mark.parametrize("words", CHEAP, ids=" ".join)
def test_an_example_of_the_help_runs(words: list[str], desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*words[1:], *(["--force"] if words[1] == "plan" else [])]) in (0, 1)  # the desk has a plan
    out, err = capsys.readouterr()
    assert out
    assert "oomguard:" not in err


# ---- the pages


def loaded(name: str) -> ModuleType:
    """Import a script of docs/ by its path."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pictures = loaded("make_pictures")
PAGES: list[Path] = pictures.PAGES
README = (ROOT / "README.md").read_text(encoding="utf-8")
NOTES = ("tested as: ", "not run: ", "shape only", "exit code ")
FIGURE = re.compile(r"\d[\d,.]*(?: [KMGT]?i?B\b| ms\b| s\b| min\b)*")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> list[Any]:
    return [*pictures.blocks_of(page.read_text(encoding="utf-8"))]


def small(block: Any, text: str) -> str:
    """Apply the replacements that a page names for its tests. One that replaces nothing is stale."""
    for pair in (block.note("tested as") or "").split("; "):
        if pair:
            old, new = pair.split(" => ")
            assert old in block.body, f"line {block.line}: nothing to replace: {old}"
            text = text.replace(old, new)
    return text


def shape(screen: str) -> list[str]:
    """Split a screen into words, without its figures and its line breaks."""
    return FIGURE.sub("#", screen).split()


def compare(block: Any, shown: str, printed: str) -> None:
    """Check what a page shows against what the command prints now."""
    if block.note("tested as") is None and block.note("shape only") is None:
        assert shown == printed, f"line {block.line}"
        return
    matching = difflib.SequenceMatcher(None, shape(shown), shape(printed), autojunk=False).ratio()
    assert matching > 0.7, f"line {block.line}: {matching:.2f} of the words match\n{printed}"


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=name_of)
def test_the_code_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OOMGUARD_CACHE", "")
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.note("not run") is not None:
            continue
        if block.file:
            Path(block.file).write_text(small(block, block.body), encoding="utf-8")
        elif block.kind == "python":
            source = small(block, block.body)
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # of allocator settings, as pages say
                exec(compile("\n" * (block.line - 1) + source, name_of(page), "exec"), names)
        else:
            for screen in block.screens:
                done = pictures.run_command(small(block, screen.command))
                assert done.returncode == int(block.note("exit code") or 0), f"line {block.line}: {done.stderr}"
                if screen.output:
                    compare(block, screen.output, pictures.screen_of(done))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_of_a_page_is_of_a_kind_that_is_run(page: Path) -> None:
    for block in blocks_of(page):
        assert block.kind in ("python", "console") or (block.kind == "toml" and block.file), block.line
        assert all(note.startswith(NOTES) for note in block.notes), block.line
        assert block.note("not run") != ""
        if block.kind == "python":
            compile(block.body, name_of(page), "exec")


def oomguard_calls(command: str) -> Iterator[list[str]]:
    """Find the calls of oomguard in a line for the shell, each without what redirects its output."""
    for call in re.split(r"&&|\|\||[;|()]", command):
        words = shlex.split(re.sub(r"\d?>.*", "", call))
        if "oomguard" in words and "pip" not in words:
            yield words[words.index("oomguard") :]


def test_the_calls_of_oomguard_in_a_line_for_the_shell_are_found() -> None:
    line = "timeout 9 oomguard train plan.json --steps 3 2> log; oomguard show runs/a --json > a.json || echo $?"
    assert [" ".join(words) for words in oomguard_calls(line)] == [
        "oomguard train plan.json --steps 3",
        "oomguard show runs/a --json",
    ]
    assert [*oomguard_calls("python words.py")] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_commands_of_a_page_have_no_stale_flag(page: Path) -> None:
    for block in blocks_of(page):
        for screen in block.screens if block.kind == "console" else ():
            for words in oomguard_calls(screen.command):
                assert parsed(words) >= flags_of(words), block.line
            assert all(len(line) <= 80 for line in screen.output.splitlines()), block.line


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_points_to_is_there(page: Path) -> None:
    generated = {ROOT / "docs" / "claims.md", ROOT / "docs" / "reference" / "cli.md"}
    for target in re.findall(r"\]\(((?!https?:)[^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        linked = (page.parent / target).resolve()
        assert linked.exists() or linked in generated, target


def test_only_what_needs_more_than_this_machine_is_not_run() -> None:
    left_out = [block.note("not run") for page in PAGES for block in blocks_of(page) if block.note("not run")]
    assert len(left_out) == 8, left_out


# ---- the README


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_screen_of_a_plan_is_that_of_the_budget_it_was_made_for() -> None:
    screens = [screen for block in blocks_of(ROOT / "README.md") for screen in block.screens if block.kind == "console"]
    plan = next(screen for screen in screens if screen.command.startswith("oomguard plan"))
    assert plan.command == "oomguard plan --model lstm --seq 10000 --budget 700MiB"
    assert plan.output.startswith("Plan for lstm 64 → 256 × 2 layers, T = 10,000, batch 32 on cpu\n")
    assert "of 700.00 MiB" in plan.output
    assert [screen.command.split()[1] for screen in screens] == ["estimate", "plan", "train"]
    assert all(screen.output for screen in screens)


def test_the_picture_has_the_title_of_the_curve_it_shows() -> None:
    title = pictures.curve().title
    assert f"![{title}](docs/segments.png)" in README
    assert f"![{title}](../segments.png)" in (ROOT / "docs" / "guides" / "tradeoffs.md").read_text()
    assert pictures.PICTURE.read_bytes().startswith(b"\x89PNG")
    assert 20_000 < pictures.PICTURE.stat().st_size < 300_000


def test_the_comparison_is_that_of_the_stored_benchmarks() -> None:
    assert pictures.comparison() in README
    assert pictures.with_comparison(README) == README


def test_a_screen_that_is_shown_is_replaced_by_what_the_command_prints(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "before\n```console\n$ oomguard --version\nold\n$ oomguard --version\n```\nafter\n"
    page.write_text(text)
    pictures.refresh_screens(page)
    assert page.read_text() == text.replace("old", f"oomguard {oomguard.__version__}")


# ---- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    home = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(home)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return home


@pytest.mark.timeout(240)
def test_the_site_has_every_page_and_loads_nothing_from_the_network(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//", re.IGNORECASE)
    pages = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in PAGES[1:]]
    for page in [*pages, Path("claims.html"), Path("reference/cli.html"), Path("reference/python.html")]:
        assert not loads.search((site / page).read_text(encoding="utf-8")), page


@pytest.mark.timeout(240)
def test_the_references_have_every_command_flag_and_public_name(site: Path) -> None:
    cli = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    for name, command in COMMAND.commands.items():
        assert f'id="oomguard-{name}"' in cli
        flags = [option.opts[0] for option in command.params if not getattr(option, "hidden", False)]
        assert [flag for flag in flags if f"<code>{flag if flag[0] == '-' else flag.upper()}" not in cli] == []
    python = (site / "reference" / "python.html").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"oomguard.{name}" not in python] == []


CLAIMS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.read_text().startswith('"""Claim:'))


@pytest.mark.timeout(240)
def test_every_claim_is_on_the_page_of_claims_with_the_statements_of_its_newest_run(site: Path) -> None:
    hooks = loaded("hooks")
    page = hooks.claims_page()
    assert hooks.claim_names() == CLAIMS
    for name in CLAIMS:
        assert f'id="{name.replace("_", "-")}"' in (site / "claims.html").read_text(encoding="utf-8")
        assert hooks.claim_sentence(name) in page
        assert all(f"| {statement} |" in page for statement in hooks.newest(name)["passed"])
        failed = [run for run in hooks.runs_of(name) if not all(run["passed"].values())]
        assert all(run["versions"]["commit"] in page for run in failed)


def test_every_claim_has_its_line_in_the_table_of_the_benchmarks() -> None:
    lines = (ROOT / "benchmarks" / "README.md").read_text().splitlines()
    rows = "".join(line for line in lines if line.startswith("| "))
    assert [name for name in CLAIMS if f"{name}.py" not in rows] == []


PACKAGES = sorted({"integrations", *(path.stem for path in (ROOT / "oomguard").glob("_[a-z]*"))})


def test_the_diagram_has_every_package() -> None:
    assert sorted(name for name, _ in loaded("hooks").LAYERS) == PACKAGES
