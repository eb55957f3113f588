"""`oomguard run`."""

import json as json_
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from oomguard._cli import flags, parsing
from oomguard._cli.flags import Flag
from oomguard._cli.program import Answer, command, say

if TYPE_CHECKING:  # imported where it is used, since --json does not need it
    from collections.abc import Callable

    from rich.console import Console

    from oomguard._run.result import RunResult


WORDS = Flag("command", "COMMAND...", "The command of a script, with its arguments.", many=True, optional=True)


@command("run", WORDS, flags_first=True, Where=[flags.BUDGET], Script=flags.RAN, Output=flags.RUN_OUTPUT)
def _run(*, command: list[str] | None = None, quiet: bool = False, **values: Any) -> Answer:
    """Run an unmodified training script with less memory, and say what it needed.

    The script starts with settings of the heap that lower its peak. Calls of LSTM, GRU and RNN layers that would not
    fit into the budget run in segments, with the same gradient. Lines on stderr say how near the limit it is. Exit
    code, signals, input and output are those of the script.

    [bold]Examples[/bold]

    - oomguard run -- python train.py --epochs 3
    - oomguard run --budget 6GiB --html run.html -- python -m package.train
    - oomguard run --dry-run 3 --json run.json -- torchrun train.py

    Exit codes: that of the script (128 and the number of a signal that ended it), 2 wrong usage.
    """
    from oomguard._report.run import PAGE, RunNews, show_run
    from oomguard._report.tables import check_ending
    from oomguard._run.parent import run_script
    from oomguard._run.settings import RunOptions

    for name, usual in (("json", "run.json"), ("html", "run.html")):
        if name in values:
            parsing.check_output(values[name], values, usual, name)
    if "html" in values:
        check_ending(values["html"], *PAGE)
    options = RunOptions(**parsing.read_options(values, [flags.BUDGET, *flags.RAN]))
    if quiet:
        result = run_script(command or [], options)
    else:
        news = RunNews(say, options)
        result = run_script(command or [], options, news.begin, news.take)
        show_on_stderr(partial(show_run, result))
    _write_run(result, values)
    return Answer("", result.exit_code)


def _write_run(result: "RunResult", values: dict[str, Any]) -> None:
    """Write the files of a run, as far as they were asked for."""
    from oomguard._core.system import write_file

    if "json" in values:
        content = json_.dumps(msgspec.to_builtins(result), indent=2) + "\n"
        write_file(values["json"], content.encode(), "A summary")
    if "html" in values:
        from oomguard._report.run_page import save_run

        save_run(result, values["html"])


def show_on_stderr(show: "Callable[[Console], None]") -> None:
    """Print for the terminal or the file behind stderr."""
    from rich.console import Console

    show(Console(file=sys.stderr, highlight=False, markup=False, emoji=False))
