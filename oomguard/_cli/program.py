"""What all subcommands share: the program that they belong to, their answers and exit codes, and a new start."""

import json as json_
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from oomguard._cli.flags import Group, add_command, flowing
from oomguard._core.errors import visible
from oomguard._core.progress import Status, tell

if TYPE_CHECKING:  # imported where it is used, since --json does not need it
    from rich.console import Console

FITS, DOES_NOT_FIT, MISUSE, BROKEN, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 70, 130, 141
"""Exit codes. The last two are those of the shell: 128 plus the number of the signal."""
EXIT_CODES = {
    FITS: "It fits, or it is done.",
    DOES_NOT_FIT: "It does not fit, or memory ran out on the last fallback of a plan (there is a checkpoint).",
    MISUSE: "Wrong usage: a flag, a file or data. The message on stderr says what to do.",
    BROKEN: "An internal error of oomguard, with a traceback. Please report it.",
    INTERRUPTED: "Ended by Ctrl-C or SIGTERM. A training has saved a checkpoint.",
    BROKEN_PIPE: "The reader of stdout has closed the pipe, as head does.",
}
"""The meaning of every exit code. Other codes come from the system: 137 is a process that was killed (SIGKILL)."""
app = typer.Typer(
    name="oomguard",
    cls=Group,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,  # an internal error is printed by __main__.py
    help=flowing("""\
Train LSTM, GRU and RNN models on long sequences without running out of memory.

[bold]Start here[/bold]

- oomguard estimate --model lstm --seq 10000 [dim]  Will it fit?[/dim]
- oomguard plan --model lstm --seq 10000 [dim]      What should I run?[/dim]
- oomguard train plan.json --data FILE [dim]        Run it.[/dim]"""),
    epilog="\n\n".join(["[bold]Exit codes[/bold]", *(f"- {code}: {text}" for code, text in EXIT_CODES.items())]),
)


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version.", show_default=False),
) -> None:
    if version:
        print(f"oomguard {import_module('oomguard').__version__}")  # noqa: T201
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        print(context.get_help())  # noqa: T201
        raise typer.Exit(0)


class Answer(NamedTuple):
    """The result of a subcommand: text for stdout, and the exit code."""

    text: str
    code: int = FITS


command = partial(add_command, app)
started_with: list[str] | None = None  # the arguments of this process, if it was started by the command


class Restart(BaseException):
    """Asks for this process to start again. It is raised, so that all that is shown and open is closed before."""

    def __init__(self, words: list[str], exports: dict[str, str]) -> None:
        super().__init__(words, exports)
        self.words, self.exports = words, exports

    def do(self) -> None:
        """Replace this process."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, "-m", "oomguard", *self.words], os.environ | self.exports)


def restart_with(exports: dict[str, str], plan: Path | None = None) -> None:
    """Replace this process by the same command with these variables: allocators read them when a process starts.

    `plan` is the file of a plan that was made since the command began.
    """
    if started_with is None or all(os.environ.get(name) == value for name, value in exports.items()):
        return
    words = [started_with[0], *([] if plan is None else [str(plan)]), *started_with[1:]]
    tell(Status("Starting again with the heap settings of the plan", milestone=True))
    raise Restart(words, exports)


def say(text: str) -> None:
    print(f"oomguard: {visible(text)}", file=sys.stderr)  # noqa: T201


def answer(
    json: bool, document: Callable[[], dict[str, Any] | str], show: "Callable[[Console], None]", code: int = FITS
) -> Answer:
    """The JSON document, or the text that `show` prints for the terminal or the pipe behind stdout."""
    if json:
        content = document()
        return Answer(content if isinstance(content, str) else json_.dumps(content, indent=2) + "\n", code)
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        show(console)
    return Answer(captured.get(), code)
