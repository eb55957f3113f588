"""The shell completes subcommands, flags and what flags take: asked as each shell asks, in a process of its own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from oomguard._cli.app import app
from oomguard._cli.flags import CANDIDATE, SPEC
from oomguard._estimate import cards
from oomguard._spec.candidate import Precision
from oomguard._spec.spec import Optimizer

SHELLS = ("bash", "zsh", "fish")
COMMANDS = {
    "estimate",
    "probe",
    "resume",
    "run",
    "plan",
    "train",
    "export",
    "predict",
    "tradeoffs",
    "show",
    "shrink",
    "devices",
    "compare",
    "clean",
    "check",
    "explore",
    "fleet",
    "work",
}


def oomguard(*words: str, **settings: str) -> str:
    """What the command says, with these environment variables."""
    command = [sys.executable, "-m", "oomguard", *words]
    env = os.environ | {"TERM": "dumb"} | settings
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=100)
    assert not done.stderr, done.stderr
    return done.stdout


def offered(typed: str, shell: str = "bash") -> set[str]:
    """The words that a shell gets for what was typed so far; the last word is the one to be completed."""
    line = f"oomguard {typed}"
    if shell == "bash":
        target = str(len(line.split()) - (not line.endswith(" ")))
        out = oomguard(_OOMGUARD_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=target)
        return {*out.split()}
    out = oomguard(
        _OOMGUARD_COMPLETE=f"complete_{shell}", _TYPER_COMPLETE_ARGS=line, _TYPER_COMPLETE_FISH_ACTION="get-args"
    )
    if shell == "fish":  # a word a line, its help after a tab
        return {line.partition("\t")[0] for line in out.splitlines() if line.strip() and not line.startswith(" ")}
    return {*re.findall(r'(?:^|\(\()"([^"]+)"', out, re.MULTILINE)}  # "word":"its help", in double parentheses


@pytest.mark.parametrize("shell", SHELLS)
def test_the_subcommands_are_offered(shell: str) -> None:
    assert offered("", shell) == COMMANDS


@pytest.mark.parametrize("shell", SHELLS)
def test_a_subcommand_is_completed(shell: str) -> None:
    assert offered("tra", shell) == {"train", "tradeoffs"}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_value_is_completed(shell: str) -> None:
    assert offered("estimate --precision b", shell) == {"bf16"}


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("estimate", {flag.word for flag in (*SPEC, *CANDIDATE)}),
        ("plan", {"--maximize", "--allow", "--ledger", "--output"}),
        ("train", {"--data", "--resume", "--epochs", "--tensorboard"}),
    ],
)
def test_the_flags_of_a_subcommand_are_offered(command: str, flags: set[str]) -> None:
    assert offered(f"{command} --") >= flags


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("estimate --device ", {"cpu", "cuda", *cards.names()}),
        ("plan --device a100", {name for name in cards.names() if name.startswith("a100")}),
        ("probe --precision ", {*get_args(Precision)}),
        ("estimate --optimizer ad", {name for name in get_args(Optimizer) if name.startswith("ad")}),
        ("plan --maximize ", {"throughput", "batch", "microbatch", "seq"}),
        ("plan --maximize throughput,", {"throughput,batch", "throughput,microbatch", "throughput,seq"}),
        ("plan --allow n", {"none"}),
        ("estimate --model ", {"rnn", "lstm", "gru"}),
        ("train plan.json --schedule c", {"constant", "cosine"}),
    ],
)
def test_the_values_of_a_choice_are_offered(typed: str, words: set[str]) -> None:
    assert words
    assert offered(typed) == words


def test_what_is_hidden_is_not_offered() -> None:
    assert offered("estimate --no-") == {"--no-recompute"}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_a_shell_is_shown(shell: str) -> None:
    shown = oomguard("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert f"_OOMGUARD_COMPLETE=complete_{shell}" in shown


@pytest.mark.parametrize("shell", SHELLS)
def test_it_is_installed_for_a_shell(shell: str, tmp_path: Path) -> None:
    installed = oomguard(
        *("--install-completion", shell), HOME=str(tmp_path), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )
    assert "installed" in installed
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(f"complete_{shell}" in path.read_text() for path in written)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_itself_completes_with_the_script_that_is_shown(tmp_path: Path) -> None:
    (tmp_path / "oomguard").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m oomguard "$@"\n')
    (tmp_path / "oomguard").chmod(0o755)
    script = oomguard("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    typed = "COMP_WORDS=(oomguard plan --device a100-8); COMP_CWORD=3; _oomguard_completion oomguard"
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["bash", "-c", f"{script}\n{typed}\necho ${{COMPREPLY[@]}}"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=100)
    assert (done.stdout.split(), done.stderr) == (["a100-80gb"], "")


def test_every_command_is_among_those_that_are_offered() -> None:
    assert {command.name for command in app.registered_commands} == COMMANDS
