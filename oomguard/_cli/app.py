"""The command `oomguard`: runs a command line and turns every error into one message and an exit code.

`EXIT_CODES` has the exit codes. With `--json`, stdout is one JSON document; messages go to stderr.
"""

import gc
import io
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import typer

from oomguard._cli import program
from oomguard._cli.commands import app
from oomguard._cli.program import BROKEN_PIPE, DOES_NOT_FIT, FITS, INTERRUPTED, MISUSE, Answer, Restart, say
from oomguard._core.errors import GuardError, MisuseError, nearest, shown, unknown
from oomguard._core.system import thread_variables

__all__ = ["app", "main", "run"]

# the base class of typer's errors about a command line; its module depends on the version of typer
UsageError: Any = typer.BadParameter.__bases__[0]


def main() -> None:
    """Run the command line of this process, and exit with its code."""
    program.started_with = sys.argv[1:]
    os.environ.update(thread_variables())  # before PyTorch is imported
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal cannot show is no error
    code = run(sys.argv[1:])
    gc.freeze()  # otherwise Python ends by looking for cycles among PyTorch's objects, which takes a second
    sys.exit(code)


def run(words: list[str]) -> int:
    """Run a command line and return its exit code. An error becomes one message on stderr."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            result = app(words, prog_name="oomguard", standalone_mode=False)
        answer = result if isinstance(result, Answer) else Answer("", result or FITS)
        print(answer.text, end="", flush=True)  # noqa: T201
        return answer.code
    except (MisuseError, GuardError) as error:
        say(str(error))
        return MISUSE if isinstance(error, MisuseError) else DOES_NOT_FIT
    except UsageError as error:
        say(str(_usage_error(error, words)))
        return MISUSE
    except Restart as restart:
        restart.do()
        raise
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe; Python must not write to it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        say(f"The output cannot be written ({error}). Check where it goes.")
        return MISUSE


def _warn(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
    """Print a warning of oomguard as a message, and others as Python does, with their origin."""
    if Path(filename).is_relative_to(Path(__file__).parents[1]):
        say(str(message))
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))


def _usage_error(error: Any, words: list[str]) -> MisuseError:
    """An error of typer about a command line, as a message that says what to do."""
    kind, message, option = type(error).__name__, error.format_message(), getattr(error, "option_name", "")
    command = error.ctx.command_path if error.ctx is not None else f"oomguard {words[0]}"
    see = f"See {command} --help."
    if kind == "NoSuchOption" and command == "oomguard":
        rule, advice = "oomguard takes a command before its options", f"Write it as in oomguard estimate {option}."
        return MisuseError(rule=rule, got=f"got {shown(option)}", advice=advice)
    if kind == "NoSuchOption":
        known = [name for param in error.ctx.command.params for name in param.opts if not param.hidden]
        advice = nearest(option, known)
        return MisuseError(rule=f"Unknown option {option}", got="", advice=advice if advice.startswith("Did") else see)
    if kind == "BadOptionUsage" and "requires" in message:
        return MisuseError(rule=f"{option} takes a value", got="got none", advice=see)
    if kind == "BadOptionUsage":
        return MisuseError(rule=f"{option} takes no value", got="got one", advice="Leave the value out.")
    if "No such command" in message:
        first = next((word for word in words if not word.startswith("-")), "")
        return unknown("command", first, getattr(error.ctx.command, "commands", {}))
    if "extra argument" in message:
        extra = message.partition("(")[2].partition("(")[2].rstrip(").") or message
        arguments = [param.metavar for param in error.ctx.command.params if param.param_type_name == "argument"]
        what = f"one {' and one '.join(arguments)} and options" if arguments else "options only"
        return MisuseError(rule=f"{command} takes {what}", got=f"got {shown(extra)}", advice="Put a flag before it.")
    if kind == "MissingParameter":
        run = command.endswith(("predict", "resume", "compare", "export", "shrink"))
        what, name = ("the directory of a run", "runs/lstm-1000") if run else ("a plan file", "plan.json")
        return MisuseError(rule=f"{command} needs {what}", got="got none", advice=f"Write it as {command} {name}.")
    return MisuseError(rule=f"{command} was called in a wrong way", got=message, advice=see)
