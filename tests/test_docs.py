"""What users read: every public name has an example, and the help says what is true."""

import doctest
import importlib.util
import inspect
import io
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import typer
from plan.making import measured
from plans import plan_of
from rich.console import Console

import oomguard
from oomguard.cli import app, run
from oomguard.report.plan import show_result
from oomguard.units import format_bytes, parse_bytes

ROOT = Path(__file__).parents[1]
COMMAND: Any = typer.main.get_command(app)
COMMANDS = [*COMMAND.commands]
EXAMPLE = re.compile(r"^- (?:torchrun .* -- )?(oomguard .*?)(?: \[dim\].*)?$", re.MULTILINE)
EXAMPLES = [shlex.split(line) for one in (COMMAND, *COMMAND.commands.values()) for line in EXAMPLE.findall(one.help)]
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


@pytest.mark.parametrize("words", EXAMPLES, ids=" ".join)
def test_an_example_of_the_help_is_a_command_line_that_parses(words: list[str]) -> None:
    command = COMMAND.commands[words[1]]
    with command.make_context(words[1], [*words[2:]]) as context:
        given = {name for name, value in context.params.items() if value is not None}
    assert given >= {word[2:].replace("-", "_") for word in words if word.startswith("--")}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files that examples speak of."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text('cell = "lstm"\nseq = 2000\nhidden = 64\n')
    (tmp_path / "lengths.csv").write_text("100\n100\n2000\n")
    numbers = np.random.default_rng(0).normal(size=(200, 3))
    np.savetxt(tmp_path / "prices.csv", numbers, delimiter=",", header="open,volume,close", comments="")
    oomguard.save_plan(plan_of(), tmp_path / "plan.json")
    return tmp_path


CHEAP = [
    *(words for words in EXAMPLES if words[1] in ("estimate", "show", "devices", "tradeoffs")),
    *(words for words in EXAMPLES if words[1] == "plan" and "a100-80gb" in words),
    *(words for words in EXAMPLES if words[1] == "train" and "prices.csv" in words),
]


@pytest.mark.parametrize("words", CHEAP, ids=" ".join)
def test_an_example_of_the_help_runs(words: list[str], desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words[1:]) in (0, 1)
    out, err = capsys.readouterr()
    assert out
    assert "oomguard:" not in err


# ---- the README


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    """docs/make_pictures.py, which makes what the README shows."""
    found = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs" / "make_pictures.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURE = re.compile(r"\d[\d,.]*")


def parsed(command: str) -> dict[str, Any]:
    """What a command line gives to its flags; raises if it has one that is not there."""
    words = shlex.split(command)
    with COMMAND.commands[words[1]].make_context(words[1], words[2:]) as context:
        return {name: value for name, value in context.params.items() if value is not None}


def shape(screen: str) -> list[str]:
    """The words of a screen, without its figures and its line breaks."""
    return FIGURE.sub("#", re.sub(r"\b[KMGT]?i?B\b", "B", screen)).split()


def test_the_screen_of_a_plan_is_that_of_the_command_above_it(pictures: ModuleType) -> None:
    fence, command, *screen, end = pictures.block_in(README, "plan").splitlines()
    assert (fence, command, end) == ("```", f"$ {pictures.PLAN}", "```")
    given = parsed(pictures.PLAN)
    title = f"Plan for {given['model']} 64 → 256 × 2 layers, T = {int(given['seq']):,}, batch 32 on cpu"
    assert screen[0] == title
    assert f"of {format_bytes(parse_bytes(given['budget']))}" in " ".join(screen)
    assert max(map(len, screen)) <= 80


def test_the_screen_of_a_plan_has_the_words_that_a_plan_has_now(pictures: ModuleType) -> None:
    console = Console(file=io.StringIO(), width=80, highlight=False, markup=False, record=True)
    show_result(measured(), Path("plan.json"), console)
    now, stored = (" ".join(shape(text)) for text in (console.export_text(), pictures.block_in(README, "plan")))
    for words in (
        "Peak # B of # B (",
        "Plain PyTorch would need # B: it",
        "# probes in #",
        "none ran out of memory; the search ended since",
        "Estimate # B by arithmetic, expected # B (margin # B) after calibration",
        "Written to plan.json. Everything about it: oomguard show plan.json",
    ):
        assert words in now
        assert words in stored


def test_the_picture_is_of_the_curve_that_the_command_draws(pictures: ModuleType) -> None:
    given = parsed(pictures.CURVE)
    assert (given["model"], given["seq"], given["budget"], given["curve"]) == ("lstm", "10000", "6GiB", "segments")
    assert pictures.block_in(README, "curve") == f"![{pictures.curve_title()}](docs/{given['output']})"
    assert pictures.PICTURE.read_bytes().startswith(b"\x89PNG")
    assert 20_000 < pictures.PICTURE.stat().st_size < 300_000


def test_another_screen_takes_the_place_of_the_one_that_is_there(pictures: ModuleType) -> None:
    text = "before\n<!-- plan: by docs/make_pictures.py -->\nold\n<!-- end of plan -->\nafter"
    changed = pictures.with_block(text, "plan", "new \\1")
    assert changed == text.replace("old", "new \\1")
    assert pictures.block_in(changed, "plan") == "new \\1"


@pytest.mark.parametrize("command", sorted({*re.findall(r"^\$ (oomguard .*)$", README, re.MULTILINE)}))
def test_a_command_of_the_readme_has_no_stale_flag(command: str) -> None:
    assert parsed(command)


def test_what_the_readme_points_to_is_there() -> None:
    for target in re.findall(r"\]\(((?!https?:)[^)#]+)\)", README):
        assert (ROOT / target).exists(), target


CLAIMS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py") if path.read_text().startswith('"""Claim:'))


@pytest.mark.parametrize("readme", ["README.md", "benchmarks/README.md"])
def test_every_claim_has_its_line_in_the_tables(readme: str) -> None:
    rows = "".join(line for line in (ROOT / readme).read_text().splitlines() if line.startswith("| "))
    assert [name for name in CLAIMS if name not in rows] == []
