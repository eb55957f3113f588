"""The command `oomguard`: one subcommand per verb.

Exit codes: 0 fits, 1 does not fit, 2 misuse. With `--json` stdout has one JSON document; messages go to stderr.
"""

import io
import json as json_
import os
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import typer

from oomguard.checks import visible
from oomguard.errors import GuardError, MisuseError
from oomguard.flags import (
    ANYWHERE,
    CANDIDATE,
    CUT,
    DATA,
    FIXED,
    HERE,
    HTML,
    JSON,
    LEDGER,
    OUTPUT,
    PREDICTED,
    PROBED,
    READ,
    SEARCH,
    SEQUENCES,
    SPEC,
    TABLE,
    TABLE_OUTPUT,
    TIMEOUT,
    TRAINED,
    WHERE,
    Command,
    Flag,
    Group,
    with_flags,
)
from oomguard.typed import (
    check_other,
    check_output,
    read,
    read_budget,
    read_number,
    read_options,
    read_path,
    read_planned,
    read_seconds,
    read_source,
    read_table,
)
from oomguard.usage import (
    DEVICES_HELP,
    ESTIMATE_HELP,
    HELP,
    PLAN_HELP,
    PREDICT_HELP,
    PROBE_HELP,
    SHOW_HELP,
    TRADEOFFS_HELP,
    TRAIN_HELP,
    usage_error,
)

if TYPE_CHECKING:  # imported where it is used: with --json nobody waits for it
    from rich.console import Console

FITS, DOES_NOT_FIT, MISUSE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141
"""Exit codes; the last two as the shell has them, 128 and the number of the signal."""
# the base class of all that typer says of a command line: typer's own or click's, as the version has it
UsageError: Any = typer.BadParameter.__bases__[0]

EVALUATE = Flag("evaluate", "", "An evaluation pass, without gradients.")
PLAN = Flag("plan", "PLAN", "A file that oomguard plan has written.")
RUN = Flag("run", "RUN", "The directory that oomguard train has written to.")
CARDS = Flag("cards", "", "The cards that --device takes by name.")

app = typer.Typer(
    name="oomguard",
    cls=Group,
    help=HELP,
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
    from oomguard.api import estimate
    from oomguard.asked import find_budget, find_place
    from oomguard.report.estimate import show_estimate, to_json

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
    from oomguard.report.record import record_json, show_record

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


@app.command("plan", cls=Command, help=PLAN_HELP)
@with_flags(
    Spec=SPEC, Data=CUT, **{"Knobs (fixed if given)": FIXED}, Where=ANYWHERE, Search=SEARCH, Output=[OUTPUT, JSON]
)
def _plan(*, device: str = "cpu", output: str = "plan.json", json: bool = False, **values: Any) -> Answer:
    from oomguard.api import find_feasible_config
    from oomguard.plan.shortfall import NothingFitsError
    from oomguard.plan.store import save_plan
    from oomguard.report.plan import plan_json, shortfall_json, show_result, show_shortfall
    from oomguard.report.progress import live

    spec, fixed = read_planned(values)
    asked = read_options(values, SEARCH)
    asked |= {"budget": read_budget(values["budget"])} if "budget" in values else {}
    asked |= {"timeout": read_seconds(values["timeout"])} if "timeout" in values else {}
    check_output(output)
    try:
        with live(quiet=json) as progress:
            plan = find_feasible_config(spec, device=device, progress=progress, **asked, **fixed)
    except NothingFitsError as error:
        found = error.shortfall
        if json:
            return Answer(_json(shortfall_json(found)), DOES_NOT_FIT)
        return Answer(_screen(lambda console: show_shortfall(found, spec, device, console)), DOES_NOT_FIT)
    try:
        path, code = save_plan(plan, output), FITS
    except MisuseError as error:  # what was found is shown all the same
        path, code = None, _refuse(error)
    return Answer(plan_json(plan) if json else _screen(lambda console: show_result(plan, path, console)), code)


@app.command("train", cls=Command, help=TRAIN_HELP)
@with_flags(PLAN, Data=DATA, Training=TRAINED, Output=[JSON])
def _train(*, plan: str, json: bool = False, **values: Any) -> Answer:
    from oomguard.plan.store import load_plan
    from oomguard.report.train import follow, result_json, show_training

    data, options = read_path(values, "oomguard train"), read_options(values, DATA[1:], TRAINED)
    found = load_plan(plan)
    _start_again(found.exports)
    from oomguard.api import train

    first = os.environ.get("RANK", "0") == "0"  # of several processes that torchrun started, one speaks
    with follow(quiet=json or not first) as progress:
        result = train(found, data, progress=progress, **options)
    code = INTERRUPTED if result.ended == "interrupted" else FITS
    if not first:
        return Answer("", code)
    if json:
        return Answer(_json(result_json(result)), code)
    return Answer(_screen(lambda console: show_training(result, console)), code)


@app.command("predict", cls=Command, help=PREDICT_HELP)
@with_flags(RUN, Data=READ, Output=PREDICTED)
def _predict(*, run: str, **values: Any) -> Answer:
    from oomguard.api import predict

    data, options = read_path(values, "oomguard predict"), read_options(values, READ[1:], PREDICTED)
    options = {"output": "predictions.npy"} | options
    check_output(options["output"], "predictions.npy")
    path = predict(run, data, **options)
    return Answer(f"{path}\n")


@app.command("tradeoffs", cls=Command, help=TRADEOFFS_HELP)
@with_flags(Spec=SPEC, **{"Knobs (fixed if given)": FIXED}, Where=WHERE, Table=TABLE, Output=[*TABLE_OUTPUT, JSON])
def _tradeoffs(*, output: str | None = None, json: bool = False, **values: Any) -> Answer:
    from oomguard.report.tradeoffs import check_written, save, show_table, table_json
    from oomguard.tradeoffs.find import find_subject
    from oomguard.tradeoffs.table import make_table

    measured = read_source(values)
    spec, fixed, over = read_table(values)
    asked = {"budget": read_budget(values["budget"])} if "budget" in values else {}
    curve = check_written(output, values.get("curve"))
    if output is not None:
        check_output(output, f"tradeoffs{Path(output).suffix}")
    subject, varied = find_subject(spec, over=over, device=values.get("device"), measured=measured, **asked, **fixed)
    table = make_table(subject, varied)
    code = FITS if table["fits"].any() else DOES_NOT_FIT
    path = None if output is None else save(subject, None if over is None else varied, table, output, curve)
    if json:
        return Answer(_json(table_json(subject, varied, table)), code)
    return Answer(_screen(lambda console: show_table(subject, varied, table, path, console)), code)


@app.command("show", cls=Command, help=SHOW_HELP)
@with_flags(PLAN, Output=[SEQUENCES, HTML, JSON])
def _show(*, plan: str, html: str | None = None, json: bool = False, **values: Any) -> Answer:
    from oomguard.plan.store import load_plan
    from oomguard.report.plan import plan_json, show_plan

    sequences = read_number("sequences", values["sequences"]) if "sequences" in values else None
    found = load_plan(plan)
    if html is not None:
        from oomguard.page.make import save_page

        check_other("html", html, plan)
        path = save_page(found, html, sequences)
        return Answer(plan_json(found) if json else f"{path}\n")
    return Answer(plan_json(found) if json else _screen(lambda console: show_plan(found, sequences, console)))


@app.command("devices", cls=Command, help=DEVICES_HELP)
@with_flags(Output=[CARDS, JSON])
def _devices(*, cards: bool = False, json: bool = False, **_: Any) -> Answer:
    from oomguard.device.survey import survey
    from oomguard.estimate import gpus
    from oomguard.report.devices import card_json, devices_json, show_cards, show_devices

    if cards:
        known = [gpus.card(name) for name in gpus.names()]
        if json:
            return Answer(_json({"cards": [card_json(card) for card in known]}))
        return Answer(_screen(lambda console: show_cards(known, console)))
    found = survey()
    if json:
        return Answer(_json(devices_json(found)))
    return Answer(_screen(lambda console: show_devices(found, console)))


_started_with: list[str] | None = None
"""The command line of this process, if it is one of ours."""


def _start_again(exports: dict[str, str]) -> None:
    """Become the same command with these variables set: allocators read them when a process starts."""
    if _started_with is None or all(os.environ.get(name) == value for name, value in exports.items()):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-m", "oomguard", *_started_with], os.environ | exports)


def main() -> None:
    """Run the command line that the process was started with, and end the process with the exit code."""
    global _started_with
    _started_with = sys.argv[1:]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a letter that the terminal does not have is no reason to fail
    sys.exit(run(sys.argv[1:]))


def run(words: list[str]) -> int:
    """Run a command line and return its exit code. Whatever is wrong with it becomes one message on stderr."""
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        return _run(words)


def _run(words: list[str]) -> int:
    try:
        found = app(words, prog_name="oomguard", standalone_mode=False)
        answer = found if isinstance(found, Answer) else Answer("", found or FITS)
        print(answer.text, end="", flush=True)  # noqa: T201
        return answer.code
    except MisuseError as error:
        return _refuse(error)
    except GuardError as error:
        _say(str(error))
        return DOES_NOT_FIT
    except UsageError as error:
        return _refuse(usage_error(error, words))
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


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning of ours as a message; others as Python shows them, since who is told must know by whom."""
    if Path(filename).is_relative_to(Path(__file__).parent):
        _say(str(message))
    else:
        (file or sys.stderr).write(warnings.formatwarning(message, category, filename, lineno, line))


def _say(text: str) -> None:
    print(f"oomguard: {visible(text)}", file=sys.stderr)  # noqa: T201


def _json(document: dict[str, Any]) -> str:
    return json_.dumps(document, indent=2) + "\n"


def _screen(show: "Callable[[Console], None]") -> str:
    """What `show` prints, as it suits the terminal (or the pipe) behind stdout."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        show(console)
    return captured.get()
