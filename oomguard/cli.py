"""The command `oomguard`: one subcommand per verb.

Exit codes: 0 fits, 1 does not fit, 2 misuse. With `--json` stdout has one JSON document; messages go to stderr.
"""

import io
import json as json_
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from oomguard.checks import nearest, shown
from oomguard.errors import MisuseError
from oomguard.flags import (
    CANDIDATE,
    HERE,
    JSON,
    LEDGER,
    PROBED,
    SPEC,
    TIMEOUT,
    WHERE,
    Command,
    Flag,
    Group,
    read,
    read_budget,
    read_seconds,
    with_flags,
)
from oomguard.presets import PRESETS

if TYPE_CHECKING:  # imported where it is used: with --json nobody waits for it
    from rich.console import Console

FITS, DOES_NOT_FIT, MISUSE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141
"""Exit codes; the last two as the shell has them, 128 and the number of the signal."""
# the base class of all that typer says of a command line: typer's own or click's, as the version has it
UsageError: Any = typer.BadParameter.__bases__[0]

PRESET_LINES = "\n".join(f"- [bold]{name}[/bold]: {sentence}" for name, (sentence, _) in PRESETS.items())
ESTIMATE_HELP = f"""Predict the peak memory of one candidate by arithmetic: no run, no GPU, no torch.

[bold]Examples[/bold]

- oomguard estimate --model lstm --seq 10000
- oomguard estimate --preset char-lm --device rtx-4090 --precision bf16
- oomguard estimate --model spec.toml --segments 100 --budget 6GiB --json

[bold]Presets[/bold]

{PRESET_LINES}

Flags override a preset and a spec file; --no-packed and the like turn a switch of theirs off."""

PROBE_HELP = """Run one candidate for a few real steps in a child process, and print its record beside its estimate.

The child is held to the budget: a candidate that is too large ends in a verdict, not in a crash.

[bold]Examples[/bold]

- oomguard probe --model lstm --seq 2000 --batch 8
- oomguard probe --model gru --seq 10000 --segments 50 --threads 1
- oomguard probe --model spec.toml --device cuda --precision bf16 --budget 6GiB --json"""

EVALUATE = Flag("evaluate", "", "An evaluation pass, without gradients.")
CARDS = Flag("cards", "", "The cards that --device takes by name.")

app = typer.Typer(
    name="oomguard",
    cls=Group,
    help="Train LSTM, GRU and RNN models on long sequences without running out of memory.",
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,  # what should not happen is shown plainly (__main__.py)
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
    """What a subcommand has found."""

    text: str
    """For stdout."""
    code: int = FITS
    """The exit code."""


@app.command("estimate", cls=Command, help=ESTIMATE_HELP)
@with_flags(Spec=SPEC, Candidate=[*CANDIDATE, EVALUATE], Where=WHERE, Output=[JSON])
def _estimate(*, device: str = "cpu", budget: str | None = None, json: bool = False, **values: Any) -> Answer:
    from oomguard.api import estimate, find_budget, find_place
    from oomguard.report import show_estimate, to_json

    limit, limit_bytes = "--budget", None if budget is None else read_budget(budget)
    spec, candidate = read(values)
    if limit_bytes is None:
        free = find_budget(device)
        limit, limit_bytes = free.binding.name, free.limit_bytes
    found = estimate(
        spec, candidate, device=device, budget_bytes=limit_bytes, training=not values.get("evaluate", False)
    )
    code = FITS if found.fits else DOES_NOT_FIT
    if json:
        return Answer(_json(to_json(found)), code)
    from oomguard.advice import advise

    advice = advise(spec, found, find_place(device))
    return Answer(_screen(lambda console: show_estimate(spec, found, limit, advice, console)), code)


@app.command("probe", cls=Command, help=PROBE_HELP)
@with_flags(Spec=SPEC, Candidate=PROBED, Where=HERE, Output=[TIMEOUT, LEDGER, JSON])
def _probe(*, device: str = "cpu", budget: str | None = None, json: bool = False, **values: Any) -> Answer:
    from oomguard.api import estimate
    from oomguard.probe.ledger import open_ledger
    from oomguard.probe.runner import TIMEOUT_SECONDS, Runner
    from oomguard.report import record_json, show_record

    limit_bytes = None if budget is None else read_budget(budget)
    spec, candidate = read(values)
    runner = Runner(device, timeout=read_seconds(values["timeout"]) if "timeout" in values else TIMEOUT_SECONDS)
    found = estimate(spec, candidate, device=device, budget_bytes=limit_bytes)
    ledger = open_ledger(values["ledger"]) if "ledger" in values else None
    with runner:
        record = runner.probe(spec, candidate, budget_bytes=limit_bytes)
    if ledger is not None:
        ledger.append(record)
    code = FITS if record.verdict.ran else DOES_NOT_FIT
    if json:
        return Answer(_json(record_json(record, found)), code)
    return Answer(_screen(lambda console: show_record(record, found, console)), code)


@app.command("devices", cls=Command, help="Show what memory this process may use here, and who says so.")
@with_flags(Output=[CARDS, JSON])
def _devices(*, cards: bool = False, json: bool = False, **_: Any) -> Answer:
    from oomguard.device.survey import survey
    from oomguard.estimate import gpus
    from oomguard.report import card_json, devices_json, show_cards, show_devices

    if cards:
        known = [gpus.card(name) for name in gpus.names()]
        if json:
            return Answer(_json({"cards": [card_json(card) for card in known]}))
        return Answer(_screen(lambda console: show_cards(known, console)))
    found = survey()
    if json:
        return Answer(_json(devices_json(found)))
    return Answer(_screen(lambda console: show_devices(found, console)))


def main() -> None:
    """Run the command line that the process was started with, and end the process with the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a letter that the terminal does not have is no reason to fail
    sys.exit(run(sys.argv[1:]))


def run(words: list[str]) -> int:
    """Run a command line and return its exit code. Whatever is wrong with it becomes one message on stderr."""
    try:
        found = app(words, prog_name="oomguard", standalone_mode=False)
        answer = found if isinstance(found, Answer) else Answer("", found or FITS)
        print(answer.text, end="", flush=True)  # noqa: T201
        return answer.code
    except MisuseError as error:
        return _refuse(error)
    except UsageError as error:
        return _refuse(_usage(error, words))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # whoever read it has enough; Python must not try once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        rule = "The answer must be written somewhere"
        return _refuse(MisuseError(rule=rule, got=f"that failed ({error})", advice="Check where the output goes."))


def _refuse(error: MisuseError) -> int:
    _say(str(error))
    return MISUSE


def _say(text: str) -> None:
    print(f"oomguard: {text}", file=sys.stderr)  # noqa: T201


def _usage(error: Any, words: list[str]) -> MisuseError:
    """What typer says of a command line, in three beats."""
    kind, message, option = type(error).__name__, error.format_message(), getattr(error, "option_name", "")
    context = error.ctx
    command = context.command_path if context is not None else f"oomguard {words[0]}"
    if kind == "NoSuchOption" and command == "oomguard":
        advice = f"Write it as in oomguard estimate {option}."
        return MisuseError(
            rule="oomguard takes a command before its options", got=f"got {shown(option)}", advice=advice
        )
    if kind == "NoSuchOption":
        known = [name for one in context.command.params for name in one.opts if not one.hidden]
        rule, advice = f"{command} takes only options that it knows", nearest(option, known)
        advice = advice if advice.startswith("Did") else f"See {command} --help."
        return MisuseError(rule=rule, got=f"got {shown(option)}", advice=advice)
    if kind == "BadOptionUsage" and "requires" in message:
        return MisuseError(rule=f"{option} takes a value", got="got none", advice=f"See {command} --help.")
    if kind == "BadOptionUsage":
        return MisuseError(rule=f"{option} takes no value", got="got one", advice="Leave the value out.")
    if "No such command" in message:
        first = next((word for word in words if not word.startswith("-")), "")
        commands = [*getattr(context.command, "commands", {})]
        rule = f"oomguard has the commands {', '.join(commands)}"
        return MisuseError(rule=rule, got=f"got {shown(first)}", advice=nearest(first, commands))
    if "extra argument" in message:
        extra = message.partition("(")[2].partition("(")[2].rstrip(").") or message
        return MisuseError(
            rule=f"{command} takes options only", got=f"got {shown(extra)}", advice="Put a flag before it."
        )
    return MisuseError(rule=f"{command} must be called as its help says", got=message, advice=f"See {command} --help.")


def _json(document: dict[str, Any]) -> str:
    return json_.dumps(document, indent=2) + "\n"


def _screen(show: "Callable[[Console], None]") -> str:
    """What `show` prints, as it suits the terminal (or the pipe) behind stdout."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        show(console)
    return captured.get()
