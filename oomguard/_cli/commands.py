"""The subcommands of `oomguard`. Each imports the code that it needs, so that the others start fast."""

import json as json_
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import typer

from oomguard._cli import flags, parsing
from oomguard._cli.flags import JSON, LOUDNESS, SPEC, Flag, Group, add_command, flowing
from oomguard._core.errors import MisuseError, check_choice, check_whole, conflict, visible, wrong
from oomguard._core.progress import Status, tell
from oomguard._core.units import parse_seconds, read_budget
from oomguard._keras.read import is_keras
from oomguard._spec.read import PRESETS
from oomguard._task.task import NAME

if TYPE_CHECKING:  # imported where it is used, since --json does not need it
    from rich.console import Console

    from oomguard._run.result import RunResult

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

PLAN = Flag("plan", "PLAN", "Plan file, written by oomguard plan, or the directory of a run.")
RUN = Flag("run", "RUN", "Directory of a training run, written by oomguard train.")
FOLDER = Flag("folder", "DIR", "Folder of data and runs (default: the current one).", optional=True)
WORDS = Flag("command", "COMMAND...", "The command of a script, with its arguments.", many=True, optional=True)
RUNS = Flag("runs", "RUN", "Directories of training runs.", many=True)
JOBS = Flag("jobs", "JOBS", "TOML file of jobs.")
CARDS = Flag("cards", "", "List the cards that --device knows by name.", bool)

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


_command = partial(add_command, app)
_ESTIMATED = [*flags.CANDIDATE, Flag("evaluate", "", "Estimate an evaluation pass, without gradients.", bool)]
_PRESETS = "\n\n".join(
    ["[bold]Presets[/bold]", *(f"- {name}: {preset['description']}" for name, preset in PRESETS.items())]
)


@_command(
    "estimate",
    epilog=_PRESETS,
    Spec=SPEC,
    Candidate=_ESTIMATED,
    Where=flags.WHERE,
    Output=[flags.TRACED, *LOUDNESS, JSON],
)
def _estimate(*, device: str = "cpu", budget: str | None = None, json: bool = False, **values: Any) -> Answer:
    """Estimate the peak memory of one candidate by arithmetic: no run, no GPU, no torch.

    Flags override a preset and a spec file. --no-packed and the like turn off a switch of a spec file. A model of your
    own is named by its oomguard.Task: one step of it is traced in a child process, which takes a few seconds. A file of
    Keras (.keras, .json or .h5) is read without Keras, and the same model in PyTorch is traced.

    [bold]Examples[/bold]

    - oomguard estimate --model lstm --seq 10000
    - oomguard estimate --preset char-lm --device rtx-4090 --precision bf16
    - oomguard estimate --model spec.toml --segments 100 --budget 6GiB --json
    - oomguard estimate --model package.module:task --seq 1000 --microbatch 8
    - oomguard estimate --model model.keras --seq 1000 --batch 32

    Exit codes: 0 it fits, 1 it does not fit, 2 wrong usage.
    """
    from oomguard._api.measure import estimate
    from oomguard._device.find import find_budget, find_target
    from oomguard._report.estimate import show_estimate, show_task_estimate, to_json

    limit, limit_bytes = "--budget", read_budget(budget)
    limited = parsing.read_options(values, [flags.TRACED])
    keras = is_keras(values.get("model"))
    name, knobs = parsing.read_keras(values) if keras else parsing.read_task(values)
    if name is None:
        spec, candidate = parsing.read(values)
    if limit_bytes is None:
        free = find_budget(device)
        limit, limit_bytes = free.binding.name, free.limit_bytes
    training = not values.get("evaluate", False)
    if keras:
        return _estimate_keras(str(name), device, (limit, limit_bytes), json, training, knobs | limited)
    if name is not None:
        found = estimate(name, device=device, budget_bytes=limit_bytes, **limited, **knobs)
        text = partial(show_task_estimate, name, found, limit)
        return _answer(json, lambda: to_json(found), text, FITS if found.fits else DOES_NOT_FIT)
    result = estimate(spec, candidate, device=device, budget_bytes=limit_bytes, training=training, **limited)

    def show(console: "Console") -> None:
        from oomguard._plan.advice import advise

        show_estimate(spec, result, limit, advise(spec, result, find_target(device)), console)

    return _answer(json, lambda: to_json(result), show, FITS if result.fits else DOES_NOT_FIT)


def _estimate_keras(
    path: str, device: str, limit: tuple[str, int], json: bool, training: bool, options: dict[str, Any]
) -> Answer:
    from oomguard._api.measure import estimate_keras
    from oomguard._report.keras import keras_json, show_keras

    tell("Reading the model")
    model, found, advice = estimate_keras(path, device, limit[1], training=training, **options)
    show = partial(show_keras, model, found, limit[0], advice)
    return _answer(json, lambda: keras_json(model, found, advice), show, FITS if found.fits else DOES_NOT_FIT)


_PROBED = [flags.TIMEOUT, flags.LEDGER, *LOUDNESS, JSON]


@_command("probe", Spec=SPEC, Candidate=flags.PROBED, Where=flags.HERE, Output=_PROBED)
def _probe(*, device: str = "cpu", budget: str | None = None, json: bool = False, **values: Any) -> Answer:
    """Run a few real steps of one candidate in a child process, and compare them with the estimate.

    The child is limited to the budget: a candidate that is too large ends in a verdict, not in a crash.

    [bold]Examples[/bold]

    - oomguard probe --model lstm --seq 2000 --batch 8
    - oomguard probe --model gru --seq 10000 --segments 50 --threads 1
    - oomguard probe --model spec.toml --device cuda --precision bf16 --json
    - oomguard probe --model package.module:task --microbatch 8

    Exit codes: 0 it fits, 1 it does not fit, 2 wrong usage.
    """
    from oomguard._api.measure import estimate, probe
    from oomguard._probe.record import open_ledger
    from oomguard._report.estimate import record_json, show_record
    from oomguard._task.estimate import COUNTED

    options = parsing.read_options(values, [flags.TIMEOUT])
    name, knobs = parsing.read_task(values)
    if name is not None:
        counted = {knob: value for knob, value in knobs.items() if knob in (*COUNTED, "steps")}
        traced = estimate(name, device=device, budget=budget, **options, **counted)
        knobs["microbatch"] = traced.candidate.microbatch  # that of the loader, unless it was given
        found = probe(name, device=device, budget=budget, **options, **knobs)
        show = partial(show_record, found, traced)
        return _answer(json, lambda: record_json(found, traced), show, FITS if found.verdict.ran else DOES_NOT_FIT)
    spec, candidate = parsing.read(values)
    estimated = estimate(spec, candidate, device=device, budget=budget)
    ledger = open_ledger(values["ledger"]) if "ledger" in values else None
    record = probe(spec, candidate, device=device, budget=budget, **options)
    if ledger is not None:
        ledger.append(record)
    code = FITS if record.verdict.ran else DOES_NOT_FIT
    text = partial(show_record, record, estimated)
    return _answer(json, lambda: record_json(record, estimated), text, code)


_FIXED: dict[str, Any] = {"Knobs (fixed if given)": flags.FIXED}


@_command("plan", Spec=SPEC, Data=flags.CUT, **_FIXED, Where=flags.ANYWHERE, Search=flags.SEARCH, Output=flags.PLANNED)
def _plan(*, device: str = "cpu", output: str = "plan.json", json: bool = False, **values: Any) -> Answer:
    """Find the fastest candidate that fits, by a few real probes, and write it to a plan file with its evidence.

    Probes run in child processes that are limited to the budget. Ctrl-C ends the search with the best plan so far.
    For a card that this machine does not have, the plan is made by arithmetic alone. With --storage, workers (oomguard
    work) take part, and with --on, the nodes of a Ray cluster run the probes.

    [bold]Examples[/bold]

    - oomguard plan --model lstm --seq 10000
    - oomguard plan --preset char-lm --device a100-80gb --maximize throughput,seq
    - oomguard plan --model lstm --data sales.csv --id shop --target sales
    - oomguard plan --model package.module:task --budget 6GiB

    Exit codes: 0 a plan was written, 1 nothing fits (with advice) or --require-measured is not met, 2 wrong usage.
    """
    from oomguard._api.plan import find_feasible_config
    from oomguard._plan.store import save_plan
    from oomguard._plan.task_value import TaskPlan
    from oomguard._plan.value import NothingFitsError, Plan
    from oomguard._report.plan import explain_shortfall, plan_json, shortfall_json, show_result, unmeasured_words
    from oomguard._report.tables import show_sections
    from oomguard._report.task import show_task_result

    parsing.check_output(output, values)
    name, knobs = parsing.read_task(values, ("batch",))
    spec, fixed, data = parsing.read_planned(values) if name is None else (name, knobs, None)
    options = parsing.read_options(values, [flags.BUDGET, *flags.SEARCH])
    plan: Plan | TaskPlan
    try:
        asked: dict[str, Any] = {"device": device} | options | fixed
        plan = find_feasible_config(**asked) if name is None else find_feasible_config(name, **asked)
    except NothingFitsError as error:
        shortfall = error.shortfall
        text = partial(show_sections, explain_shortfall(shortfall, spec, device), first_style="bold red")
        return _answer(json, lambda: shortfall_json(shortfall), text, DOES_NOT_FIT)
    if data is not None:
        plan = msgspec.structs.replace(plan, data=data)
    try:
        path, code = save_plan(plan, output), FITS
    except MisuseError as error:  # the plan is shown even if it cannot be saved
        say(str(error))
        path, code = None, MISUSE
    if code == FITS and values.get("require_measured") and not plan.confirmed:
        say(f"--require-measured is not met. {unmeasured_words(plan)}")
        code = DOES_NOT_FIT
    show = partial(show_task_result, plan, path) if isinstance(plan, TaskPlan) else partial(show_result, plan, path)
    return _answer(json, lambda: plan_json(plan), show, code)


@_command("work", Where=[flags.PRESENT], Search=flags.WORKED, Output=[*LOUDNESS, JSON])
def _work(*, storage: str | None = None, device: str = "cpu", json: bool = False, **values: Any) -> Answer:
    """Run probes for a search that oomguard plan has begun with the same --storage, until the search ends.

    Start one worker per card or machine, of the kind that the search is for. A worker that is killed loses nothing:
    another one runs its probe again. The storage is a file for workers of one machine, and PostgreSQL for several.

    [bold]Examples[/bold]

    - oomguard work --storage sqlite:///search.db
    - oomguard work --storage postgresql://me@host/searches --device cuda:0
    - oomguard work --storage postgresql://me@host/searches --wait 10min

    Exit codes: 0 the search has ended, 2 wrong usage, 130 interrupted.
    """
    from oomguard._report.progress import following, search_status
    from oomguard._report.work import show_work, work_json

    if not storage:
        advice = "Write it as oomguard work --storage sqlite:///search.db."
        raise MisuseError(rule="oomguard work needs the storage of a search", got="got no --storage", advice=advice)
    wait = parse_seconds(values.get("wait", 0.0), "wait")
    with following(True, search_status) as follow:
        tell("Looking for a search")
        from oomguard._search.work import work

        done = work(storage, device, values.get("study"), wait, follow)
    code = INTERRUPTED if done.ended == "interrupted" else FITS
    return _answer(json, lambda: work_json(done), partial(show_work, done), code)


_TRAINING = [*LOUDNESS, JSON]
_TASK: dict[str, Any] = {"Plan of a task (if there is none yet)": flags.TASK_PLANNED}


@_command("train", PLAN._replace(optional=True), Data=flags.DATA, Training=flags.TRAINED, **_TASK, Output=_TRAINING)
def _train(*, plan: str | None = None, json: bool = False, **values: Any) -> Answer:
    """Train a plan on data. If memory gets tight, the guard falls back to a smaller candidate and loses nothing.

    A task of your own has its data with it. Without a plan file, it is planned first.

    The process restarts itself with the allocator settings of the plan. Ctrl-C ends training after the current step,
    with a checkpoint. Several processes train together if torchrun starts them.

    [bold]Examples[/bold]

    - oomguard train plan.json
    - oomguard train plan.json --data prices.csv --target close --epochs 20
    - oomguard train plan.json --data book.txt --steps 9000 --run book
    - oomguard train plan.json --data book.txt --steps 9000 --run book --resume
    - torchrun --nproc-per-node 2 -m -- oomguard train plan.json --data waves.npy
    - oomguard train --model package.module:task --budget 6GiB --epochs 20

    Exit codes: 0 done, 1 out of memory on the last fallback (with a checkpoint), 2 wrong usage.
    """
    from oomguard._plan.store import load_plan
    from oomguard._plan.value import Plan
    from oomguard._report.progress import result_json, show_training
    from oomguard._train.settings import settle

    loaded = None if plan is None else load_plan(plan)
    data, options = parsing.read_training(values, loaded)
    if loaded is None:
        tell("Starting PyTorch")
        from oomguard._train.task_start import plan_of_run

        loaded, path = plan_of_run(data, options)
        if not json:
            say(str(loaded))
        _restart_with(loaded.exports, path)
    elif isinstance(loaded, Plan):
        settle(loaded, data, values.get("model"), options)  # misuse is told before torch is imported
    _restart_with(loaded.exports)
    from oomguard._api.train import train

    first = os.environ.get("RANK", "0") == "0"  # of several processes that torchrun started, one prints
    result = train(loaded, data, **options)
    code = INTERRUPTED if result.ended == "interrupted" else FITS
    if not first:
        return Answer("", code)
    return _answer(json, lambda: result_json(result), partial(show_training, result), code)


@_command("resume", RUN, Data=flags.DATA, Training=flags.RESUMED, Output=[*LOUDNESS, JSON])
def _resume(*, run: str, **values: Any) -> Answer:
    """Go on with a training run, with its own plan, data and options.

    [bold]Examples[/bold]

    - oomguard resume runs/lstm-1000
    - oomguard resume runs/lstm-1000 --epochs 40
    - oomguard resume runs/lstm-1000 --data moved/prices.csv

    Exit codes: 0 done, 1 out of memory on the last fallback (with a checkpoint), 2 wrong usage.
    """
    answer: Answer = _train(plan=os.path.join(run, "plan.json"), **values | {"run": run, "resume": True})
    return answer


@_command("predict", RUN, Data=flags.READ, Text=flags.DRAWN, Task=flags.PREDICTING, Output=flags.PREDICTED)
def _predict(*, run: str, **values: Any) -> Answer:
    """Predict every sequence of some data with the model of a run: the best by validation, otherwise the last.

    The data (default: that of the training) must have the form of the training data. It is read with the options of
    the training, unless flags change them. A model of text goes on with a prompt instead, and the text is printed. A
    task of your own has its data with it, and a function predict.

    [bold]Examples[/bold]

    - oomguard predict runs/lstm-1000 --data new.csv --output predictions.csv
    - oomguard predict book --data more.txt --probabilities
    - oomguard predict book --prompt Once --length 200 --temperature 0.8 --seed 0
    - oomguard predict book --data more.txt --device cpu --output next.npy
    - oomguard predict runs/tagger --model package.module:task
    """
    from oomguard._api.train import predict
    from oomguard._train.settings import check_predicted, check_task_predicted, is_task_run, read_request

    if any(option.name in values for option in flags.DRAWN):
        asked = parsing.read_options(values, [*flags.READ, *flags.DRAWN, *flags.PREDICTED])
        read_request({"prompt": None} | asked)
        return Answer(f"{predict(run, **asked)}\n")
    usual = "predictions.npy"
    written = [flag for flag in flags.PREDICTED if flag is not flags.FORCE]
    options = {"output": usual} | parsing.read_options(values, [*flags.READ[1:], *written])
    if is_task_run(run):
        check_task_predicted(Path(run), values.get("model"), options["output"])
        if "data" in values:
            raise conflict("A task has its own data", "the run of a task", "--data")
        parsing.check_output(options["output"], values, usual)
        return Answer(f"{predict(run, values.get('model'), **options)}\n")
    if "model" in values:
        raise conflict("The run of a spec has its own model", "such a run", "--model")
    check_predicted(Path(run), values.get("data"), options["output"], options)
    parsing.check_output(options["output"], values, usual)
    return Answer(f"{predict(run, values.get('data'), **options)}\n")


@_command("run", WORDS, flags_first=True, Where=[flags.BUDGET], Script=flags.RAN, Output=flags.RUN_OUTPUT)
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


@_command("export", RUN, Output=flags.EXPORTED)
def _export(*, run: str, json: bool = False, **values: Any) -> Answer:
    """Write the model of a run as a file for other programs, and check that it gives what predict gives.

    TorchScript and ONNX include the scaling of the data, and take any number of rows and steps. A state_dict is the
    weights alone. If the outputs differ by more than rounding, nothing is written.

    [bold]Examples[/bold]

    - oomguard export runs/lstm-1000 --to onnx --output prices.onnx
    - oomguard export runs/lstm-1000 --to torchscript
    - oomguard export runs/tagger --model package.module:task
    """
    from oomguard._api.files import export

    done = export(run, **parsing.read_options(values, flags.EXPORTED))
    return _answer(json, lambda: msgspec.to_builtins(done), lambda console: _print_lines(str(done), console))


@_command("shrink", RUN, Output=flags.SHRUNK)
def _shrink(*, run: str, json: bool = False, **values: Any) -> Answer:
    """Prune the least used hidden units of every layer into a smaller run, to be fine-tuned by oomguard resume.

    A unit is used as much as the weights that read it are large, times its activity on the validation data. The smaller
    run has a plan of its own, by arithmetic.

    [bold]Examples[/bold]

    - oomguard shrink runs/lstm-1000 --hidden 0.75
    - oomguard shrink runs/lstm-1000 --hidden 0.5 --output runs/half
    - oomguard shrink book --json
    """
    from oomguard._api.files import shrink

    done = shrink(run, **parsing.read_options(values, flags.SHRUNK))
    return _answer(json, lambda: msgspec.to_builtins(done), lambda console: _print_lines(str(done), console))


def _print_lines(text: str, console: "Console") -> None:
    """Print lines that the terminal wraps."""
    for line in text.splitlines():
        console.print(line)


@_command("tradeoffs", Spec=SPEC, **_FIXED, Where=flags.WHERE, Table=flags.TABLE, Output=flags.TABLE_OUTPUT)
def _tradeoffs(*, output: str | None = None, json: bool = False, **values: Any) -> Answer:
    """Compare candidates: what each needs in memory and how fast it is, as a table or as charts.

    Figures come from arithmetic, for any device; with a plan or a ledger, measurements correct them. By default,
    microbatch, segments and precision vary. A range is 1..64 (all), 1..64*2 (doublings) or 100..1000+100 (steps).

    [bold]Examples[/bold]

    - oomguard tradeoffs --model lstm --seq 10000 --device a100-80gb
    - oomguard tradeoffs --plan plan.json --output tradeoffs.html
    - oomguard tradeoffs --model gru --over seq=1000..64000*2 --over segments=1,16
    - oomguard tradeoffs --model package.module:task --seq 1000

    Exit codes: 0 something fits, 1 nothing fits, 2 wrong usage.
    """
    name, knobs = parsing.read_task(values, ("batch",))
    if name is not None:
        return _task_tradeoffs(name, knobs, values, output, json=json)
    from oomguard._report.subject import find_subject
    from oomguard._report.tradeoffs import check_written, make_table, save, show_tradeoffs, table_json

    arguments = parsing.read_table(values)
    budget_bytes = read_budget(values.get("budget"))
    curve = check_written(output, values.get("curve"))
    if output is not None:
        parsing.check_output(output, values, f"tradeoffs{Path(output).suffix}")
    subject = find_subject(**arguments, budget=budget_bytes)
    table = make_table(subject)
    code = FITS if table["fits"].any() else DOES_NOT_FIT
    path = None if output is None else save(subject, table, output, curve)
    text = partial(show_tradeoffs, subject, table, path)
    return _answer(json, lambda: table_json(subject, table), text, code)


def _task_tradeoffs(
    name: str, knobs: dict[str, Any], values: dict[str, Any], output: str | None, *, json: bool
) -> Answer:
    from oomguard._api.measure import tradeoffs
    from oomguard._report.task_table import check_task_output, save_task_table, show_task_table, task_table_json

    for other in ("plan", "ledger", "curve"):
        if other in values:
            raise conflict("The table of a task is traced", f"--model {name}", f"--{other}")
    check_task_output(output)
    if output is not None:
        parsing.check_output(output, values, "tradeoffs.csv")
    where = {key: values[key] for key in ("device", "budget") if key in values}
    table = tradeoffs(name, over=parsing.read_varied(values), **where, **knobs)
    path = None if output is None else save_task_table(table, output)
    code = FITS if table["fits"].any() else DOES_NOT_FIT
    return _answer(json, lambda: task_table_json(table), partial(show_task_table, table, path), code)


@_command(
    "explore", PLAN._replace(optional=True), Spec=SPEC, **_FIXED, Where=flags.WHERE, Page=flags.EXPLORED, Output=[JSON]
)
def _explore(*, plan: str | None = None, json: bool = False, **values: Any) -> Answer:
    """Explore trade-offs in a browser: sliders for model, knobs, device and budget, answered at once by arithmetic.

    The page is served on this machine alone, under an address that nobody can guess, until Ctrl-C. With a plan or a
    ledger, measured peaks stand beside estimates. --json prints the answer for the given settings, and serves nothing.

    [bold]Examples[/bold]

    - oomguard explore --model lstm --seq 10000 --budget 6GiB
    - oomguard explore plan.json
    - oomguard explore --preset char-lm --device rtx-4090 --port 8000
    - oomguard explore --model gru --seq 2000 --allow-probes
    """
    name = values.get("model", "")
    if NAME.fullmatch(name):
        rule = "The explorer answers at once, which tracing a task does not"
        advice = f"Compare settings of a task with oomguard tradeoffs --model {name}."
        raise MisuseError(rule=rule, got=f"got --model {name}", advice=advice)
    from oomguard._explore.answers import answer, settings_of
    from oomguard._report.subject import find_subject

    options = parsing.read_options(values, flags.EXPLORED)
    check_whole("port", options.get("port"), 0, 65_535)
    arguments = parsing.read_table(values | ({} if plan is None else {"plan": plan}))
    subject = find_subject(**arguments, budget=read_budget(values.get("budget")))
    settings = settings_of(subject, values.get("budget"))
    if json:
        return Answer(json_.dumps(answer(settings, subject.records), indent=2) + "\n")
    from oomguard._explore.server import Explorer, serve

    explorer = Explorer(settings, subject.records, probes=options.get("allow_probes", False))
    serve(explorer, options.get("port", 0), lambda address: say(f"Serving {address} until Ctrl-C"))
    return Answer("")


@_command("show", PLAN, Output=[flags.SEQUENCES, flags.HTML, flags.FORCE, *LOUDNESS, JSON])
def _show(*, plan: str, html: str | None = None, json: bool = False, **values: Any) -> Answer:
    """Explain a plan: the choice and its reasons, the evidence, what to expect, and the fallbacks.

    For the directory of a run, also what it has reached and the options that it was trained with.

    [bold]Examples[/bold]

    - oomguard show plan.json
    - oomguard show plan.json --html report.html --sequences 50000
    - oomguard show plan.json --json
    """
    from oomguard._plan.store import load_plan
    from oomguard._plan.task_value import TaskPlan
    from oomguard._report.plan import explain, plan_json
    from oomguard._report.runs import run_section
    from oomguard._report.tables import show_sections
    from oomguard._report.task import explain_task

    sequences = parsing.read_options(values, [flags.SEQUENCES]).get("sequences")
    check_whole("sequences", sequences, 1, 10**15)
    loaded = load_plan(plan)
    run = run_section(plan, is_spec=not isinstance(loaded, TaskPlan))
    if isinstance(loaded, TaskPlan):
        if html is not None or sequences is not None:
            rule, advice = "The plan of a task is shown as text or JSON", "Leave --html and --sequences out."
            raise MisuseError(rule=rule, got="got another form", advice=advice)
        return _answer(json, lambda: plan_json(loaded), partial(show_sections, [*explain_task(loaded), *run]))
    if html is not None:
        from oomguard._report.page import save_page

        if os.path.exists(html) and os.path.samefile(html, plan):
            raise wrong("html", "another file than the plan", html, "Write it as --html report.html.")
        parsing.check_output(html, values, "report.html", "html")
        path = save_page(loaded, html, sequences)
        return Answer(plan_json(loaded) if json else f"{path}\n")
    text = partial(show_sections, [*explain(loaded, sequences), *run])
    return _answer(json, lambda: plan_json(loaded), text)


@_command("check", PLAN, Where=[flags.CHECKED], Output=[JSON])
def _check(*, plan: str, device: str | None = None, json: bool = False, **_: Any) -> Answer:
    """Check at the start of a job whether this is the machine that a plan was made for: card, free memory, software.

    Driver, card and free memory are read through NVML, and versions from installed packages. Nothing is run and torch
    is not imported, so the answer takes less than two seconds. If something differs, it is named, with the first
    fallback of the plan that fits what is free.

    [bold]Examples[/bold]

    - oomguard check plan.json
    - oomguard check runs/lstm-1000 --json
    - oomguard check plan.json --device cuda:1

    Exit codes: 0 all is as planned, 1 something differs, 2 wrong usage.
    """
    from oomguard._plan.check import check_plan
    from oomguard._plan.store import load_plan
    from oomguard._report.check import check_json, show_check

    found = check_plan(load_plan(plan), device)
    show = partial(show_check, found, plan)
    return _answer(json, lambda: check_json(found, plan), show, FITS if found.ok else DOES_NOT_FIT)


@_command("fleet", JOBS, Cards=[flags.CARD_LIST], Output=flags.FLEET_OUTPUT)
def _fleet(*, jobs: str, cards: str | None = None, json: bool = False, **values: Any) -> Answer:
    """Find the cheapest and the fastest card for each of many jobs, with the knobs with which it fits.

    A jobs file has \\[\\[job]] tables with a name and the fields of a spec, or the name of a task; lists are grids. A
    cards file has \\[\\[card]] tables with name, count and price (per hour). Memory is by arithmetic; times and costs
    are known where `measured` of a job names plans or ledgers.

    [bold]Examples[/bold]

    - oomguard fleet jobs.toml --cards cards.toml
    - oomguard fleet jobs.toml --cards cards.toml --html fleet.html
    - oomguard fleet jobs.toml --cards cards.toml --emit slurm --output slurm

    Exit codes: 0 every job fits a card, 1 some job fits none (with advice), 2 wrong usage.
    """
    from oomguard._fleet.emit import emit
    from oomguard._fleet.find import find_fleet
    from oomguard._fleet.read import read_cards, read_jobs
    from oomguard._report.fleet import save_fleet, show_fleet

    if cards is None:
        advice = "Write it as oomguard fleet jobs.toml --cards cards.toml."
        raise MisuseError(rule="oomguard fleet needs a list of cards", got="got no --cards", advice=advice)
    for name in ("csv", "html"):
        if name in values:
            parsing.check_output(values[name], values, f"fleet.{name}", name)
    scheduler, folder = values.get("emit"), values.get("output")
    if (scheduler is None) != (folder is None):
        rule = "--emit and --output are given together"
        raise MisuseError(rule=rule, got="got one", advice="Write it as --emit slurm --output jobs.")
    if scheduler is not None:
        check_choice("emit", scheduler, flags.SCHEDULERS)
    found = find_fleet(read_jobs(jobs), read_cards(cards))
    written = [save_fleet(found, values[name], page=name == "html") for name in ("csv", "html") if name in values]
    if scheduler is not None and folder is not None:
        how = {name: bool(values.get(name)) for name in ("fastest", "force")}
        written += emit(found, scheduler, folder, **how)
    show = partial(show_fleet, found, written)
    return _answer(json, found.to_dict, show, FITS if found.fits else DOES_NOT_FIT)


@_command("compare", RUNS, Output=[JSON])
def _compare(*, runs: list[str], json: bool = False, **_: Any) -> Answer:
    """Compare training runs: losses, speed, peak, and the settings of plan and training in which they differ.

    [bold]Examples[/bold]

    - oomguard compare runs/lstm-1000 runs/gru-1000
    - oomguard compare runs/lstm-1000
    - oomguard compare runs/a runs/b runs/c --json
    """
    from oomguard._report.runs import comparison_json, read_runs, show_comparison

    found = read_runs(runs)
    return _answer(json, lambda: comparison_json(found), partial(show_comparison, found))


@_command("clean", FOLDER, Output=[flags.YES, JSON])
def _clean(*, folder: str = ".", yes: bool = False, json: bool = False, **_: Any) -> Answer:
    """List what oomguard has stored and what killed processes have left, and remove it with --yes.

    That is: calibrations of earlier searches, data that was converted once (beside its file, or in the folder of
    --cache), temporary files of processes that have ended, and conversions and checkpoints that were not finished and
    have not changed for a day. Plans, runs and data stay. Do not remove converted data that a training is reading.

    [bold]Examples[/bold]

    - oomguard clean
    - oomguard clean --yes
    - oomguard clean runs --json
    """
    from oomguard._report.leftovers import leftovers_json, show_leftovers
    from oomguard._train.leftovers import find_leftovers, remove

    found = find_leftovers(Path(folder))
    problems = remove(found) if yes else []
    for problem in problems:
        say(problem)
    code = MISUSE if problems else FITS
    show = partial(show_leftovers, found, removed=yes)
    return _answer(json, lambda: leftovers_json(found, removed=yes and not problems), show, code)


@_command("devices", Output=[CARDS, JSON])
def _devices(*, cards: bool = False, json: bool = False, **_: Any) -> Answer:
    """Show the devices of this machine, and the memory that this process may use on each.

    [bold]Examples[/bold]

    - oomguard devices
    - oomguard devices --cards
    - oomguard devices --json
    """
    from oomguard._device.find import present_devices
    from oomguard._estimate.cards import card, names
    from oomguard._report.estimate import card_json, devices_json, show_cards, show_devices

    if cards:
        known = [card(name) for name in names()]
        return _answer(json, lambda: {"cards": [*map(card_json, known)]}, partial(show_cards, known))
    devices, note = present_devices()
    return _answer(json, lambda: devices_json(devices, note), partial(show_devices, devices, note))


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


def _restart_with(exports: dict[str, str], plan: Path | None = None) -> None:
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


def _answer(
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
