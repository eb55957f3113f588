"""What users read: every public name has an example, and the help says what is true."""

import doctest
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from plans import plan_of

import oomguard
from oomguard.cli import app, run

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
