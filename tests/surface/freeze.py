"""The surface of oomguard: flags, JSON keys, exit codes, files and public names, as the golden files here record it.

`tests/test_surface.py` compares the present surface with the golden files. An addition passes; a change or a removal
fails. If a change is meant, add a line to CHANGELOG.md that tells users about it, then write the golden files again:

    python tests/surface/freeze.py              # cards, exit_codes, files, flags, json_keys, names (.json)

The other files (plan_0_1.json, plan_0_1_lengths.json, records_0_1.jsonl, run_0_1/) were written by oomguard 0.1.0.
They are never written again: they show that later versions still read what 0.1.0 wrote.
"""

import contextlib
import csv
import enum
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PLANS = ("plan_0_1.json", "plan_0_1_lengths.json")
RECORDS, RUN = "records_0_1.jsonl", "run_0_1"
CPU_NAME = "the processor of the golden files"
"""Stands for the processor's name in the golden plans. `train` refuses a plan that was made on another processor."""
RUN_DATA = "waves.npy"
"""The data of the golden run, made by `write_waves`. A run is resumed only on the data that it was trained on."""


# ---- the command line ------------------------------------------------------------------------------------------------


def _command_line() -> Any:
    """The module with the typer app (`app`) and with `run(words) -> exit code`: the only private name used here."""
    from oomguard._cli import app

    return app


class Ran(NamedTuple):
    """What one command line gave."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The JSON document on stdout."""
        assert self.code in (0, 1), self.err
        return json.loads(self.out)


def run(line: str, **names: object) -> Ran:
    """Run a command line in this process. `{plan}` in it is replaced by the name `plan`, as one word."""
    out, err = io.StringIO(), io.StringIO()
    words = [word.format(**names) for word in line.split()]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("default")
        code = _command_line().run(words)
    return Ran(code, out.getvalue(), err.getvalue())


def run_alone(line: str, **names: object) -> Ran:
    """Run a command line in a process of its own, which may start again with other environment variables."""
    words = [sys.executable, "-m", "oomguard", *(word.format(**names) for word in line.split())]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    return Ran(ran.returncode, ran.stdout, ran.stderr)


# ---- flags -----------------------------------------------------------------------------------------------------------

TYPES = {
    "N": "integer",
    "P": "number",
    "SIZE": "size",
    "SECONDS": "duration",
    "WHEN": "integer or duration",
    "HISTOGRAM": "histogram",
    "NAME=VALUES": "values",
}
"""The type of a flag's value, by its placeholder in the help. Any other placeholder stands for text."""


def flags() -> dict[str, Any]:
    """Every command's flags and arguments, without their help texts."""
    import typer

    app: Any = typer.main.get_command(_command_line().app)
    context = app.context_class(app, info_name="oomguard", **app.context_settings)
    commands = {name: app.get_command(context, name) for name in app.list_commands(context)}
    return {"oomguard": _parameters(app, context)} | {
        name: _parameters(command, command.context_class(command, info_name=name, parent=context))
        for name, command in commands.items()
    }


def _parameters(command: Any, context: Any) -> dict[str, Any]:
    arguments, options = [], {}
    for parameter in command.get_params(context):
        if parameter.param_type_name == "argument":
            arguments.append({"name": parameter.name, "required": parameter.required})
        else:
            names = sorted([*parameter.opts, *parameter.secondary_opts], key=len)
            options[names[-1]] = _option(parameter, context) | ({"short": names[:-1]} if names[:-1] else {})
    return {"arguments": arguments, "flags": options}


def _option(parameter: Any, context: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"default": parameter.default, "repeatable": parameter.multiple}
    if parameter.is_flag or parameter.count:
        return facts | {"type": "switch", "default": bool(parameter.default)}
    choices = sorted(item.value for item in parameter.shell_complete(context, ""))
    if parameter.name == "device":  # completion offers every card; `devices --cards` is frozen elsewhere
        return facts | {"type": "device"}
    if choices:
        return facts | {"type": "choice", "choices": choices}
    return facts | {"type": TYPES.get(parameter.metavar, "text")}


# ---- JSON documents --------------------------------------------------------------------------------------------------

JSON_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
DATA_KEYS = ("lengths", "exports")
"""Objects whose keys are data (lengths, variables of the chosen allocator), not part of a format."""


def paths(document: Any) -> dict[str, str]:
    """Every path in a JSON document with the types of its values.

    >>> paths({"rows": [{"a": 1}, {"a": None}], "lengths": {"20": 3}})
    {'': 'object', 'lengths': 'object', 'lengths.*': 'number', 'rows': 'array', 'rows[]': 'object', 'rows[].a': 'null|number'}
    """  # noqa: E501
    types: dict[str, set[str]] = {}
    for path, value in _walk("", document):
        types.setdefault(path, set()).add("null" if value is None else JSON_TYPES[type(value)])
    return {path: "|".join(sorted(types[path])) for path in sorted(types)}


def _walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield path, value
    if isinstance(value, dict):
        generic = path.rpartition(".")[2] in DATA_KEYS
        for key, inner in value.items():
            yield from _walk(f"{path}.{'*' if generic else key}".removeprefix("."), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(f"{path}[]", inner)


ARITHMETIC = {
    "estimate": "estimate --model lstm --seq 100 --budget 4GiB --json",
    "estimate for a card": "estimate --model lstm --seq 100 --device t4 --json",
    "tradeoffs": "tradeoffs --model gru --seq 100 --hidden 8 --device t4 --json",
    "tradeoffs of a plan": "tradeoffs --plan {plan} --json",
    "plan for a card": "plan --model lstm --lengths 200:90,900:40,9000:9 --hidden 64 --device t4"
    " --budget 2GiB --batch 32 --maximize throughput,microbatch --allow precision,window --threads 1"
    " --output {home}/card.json --json",
    "plan, nothing fits": "plan --model lstm --seq 20000 --device t4 --budget 2GiB --segments 1 --microbatch 32 --json",
    "show": "show {plan} --json",
    "show with lengths": "show {lengths} --json",
    "check": "check {plan} --json",
    "fleet": "fleet {jobs} --cards {cards} --json",
    "devices": "devices --json",
    "devices --cards": "devices --cards --json",
}
"""Commands that print JSON without running anything."""
TINY = "--model gru --seq 12 --features 3 --hidden 4 --layers 1 --batch 4 --threads 1"
PROBE = f"probe {TINY} --ledger {{ledger}} --json"
PLAN = f"plan {TINY} --max-probes 1 --ledger {{ledger}} --output {{home}}/plan.json --json"
WORK = "work --storage sqlite:///{ledger}/study.db --json"  # the search has ended: nothing is left to run
TRAIN = "train {unlimited} --data {data} --steps 2 --run {run} --json"


AFTER = {"compare": "compare {run} --json", "clean": "clean {home} --json"}
"""Commands that look at what the others have left."""


FILES = ("home", "ledger", "plan", "lengths", "unlimited", "data", "run", "jobs", "cards")
"""Names that a command line of a session may use."""


class Session:
    """A directory in which every command has been run once."""

    def __init__(self, home: Path) -> None:
        self.home, self.ledger, self.cache = home, home / "ledger", home / "cache"
        self.plan, self.lengths = (adopt(HERE / name, home / name) for name in PLANS)
        self.unlimited = adopt(HERE / PLANS[0], home / "unlimited.json", limited=False)
        self.data, self.run = write_waves(home / "data.npy", steps=2000), home / "run"
        self.jobs, self.cards = write_fleet(home)
        self.ledger.mkdir()
        adopt(HERE / RECORDS, self.ledger / "records.jsonl")
        self.ran = {name: self(line) for name, line in ARITHMETIC.items()}
        with variables(OOMGUARD_CACHE=str(self.cache)):
            self.ran |= {"plan": self(PLAN), "work": self(WORK)}
            self(PLAN.replace("--hidden 4", "--hidden 5"))  # the golden ledger may have all records of the other model
        self.ran |= {"probe": self(PROBE), "train": self(TRAIN, start=run_alone)}
        self.resumed = adopt(HERE / RUN, home / RUN)
        adopt(HERE / RUN / "plan.json", self.resumed / "plan.json", limited=False)
        write_waves(home / RUN_DATA)
        with contextlib.chdir(home):
            self.ran["train --resume"] = self(RESUME)
        with variables(OOMGUARD_CACHE=str(self.cache)):  # where the plan's search has left its calibration
            self.ran |= {name: self(line) for name, line in AFTER.items()}

    def document(self, name: str) -> Any:
        """The JSON document that a command printed."""
        document = self.ran[name].document
        return _steady_part(document) if name == "plan" else document

    def __call__(self, line: str, start: Callable[..., Ran] = run, **names: object) -> Ran:
        """Run a command line with this session's files."""
        files = {name: getattr(self, name, None) for name in FILES}
        return start(line, **files | names)


RESUME = f"train {RUN}/plan.json --data {RUN_DATA} --steps 4 --run {RUN} --resume --json"
"""The golden run was made by the same line with `--steps 3` and without `--resume`."""


@contextlib.contextmanager
def variables(**values: str) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _steady_part(plan: dict[str, Any]) -> dict[str, Any]:
    """A measured plan without the insides of what may be empty, as the measured speeds have it."""
    unsteady = ("record", "fallbacks", "bought", "buckets", "padding", "front", "enough_rows")
    return {key: None if key in unsteady else value for key, value in plan.items()}


def json_keys(session: Session) -> dict[str, Any]:
    """The paths of every command's JSON document."""
    return {name: paths(session.document(name)) for name in session.ran}


# ---- golden plans, records and runs ----------------------------------------------------------------------------------


def adopt(source: Path, copy: Path, *, limited: bool = True) -> Path:
    """Copy a golden plan, ledger or run; in plans and records, put in the name of this processor and this torch.

    Without `limited`, the plan does not say that the user asked for a budget, so that training does not enforce it:
    the process of the tests, or another build of PyTorch, may need more than that by itself.
    """
    if source.is_dir():
        return Path(shutil.copytree(source, copy))
    name = run("devices --json").document["devices"][0]["name"]
    text = source.read_text().replace(json.dumps(CPU_NAME), json.dumps(name))
    text = re.sub(r'("torch": ?)"[^"]+"', rf'\1"{metadata.version("torch")}"', text)
    copy.write_text(text if limited else re.sub(r'("asked_budget_bytes": )\d+', r"\1null", text))
    return copy


def write_waves(path: Path, rows: int = 20, steps: int = 40) -> Path:
    """Write sequences of 3 inputs and a target. They are exact fractions, so that every machine writes the same."""
    import numpy as np

    numbers = np.arange(rows * steps * 4, dtype=np.int64)
    np.save(path, ((numbers * numbers + 7 * numbers) % 31 / 16 - 1).astype(np.float32).reshape(rows, steps, 4))
    return path


def write_fleet(home: Path) -> tuple[Path, Path]:
    """Write a list of jobs, of which one fits no card, and a list of cards."""
    jobs, cards = home / "jobs.toml", home / "cards.toml"
    fields = 'cell = "lstm"\nseq = 100\n'
    jobs.write_text(f'[[job]]\nname = "a"\n{fields}\n[[job]]\nname = "b"\n{fields}hidden = 20_000\n')
    cards.write_text('[[card]]\nname = "t4"\nprice = 0.35\n')
    return jobs, cards


def write_tokens(path: Path) -> Path:
    """Write token sequences of the lengths of the golden plan with lengths, as a table: a series and a token a row."""
    rows = [
        f"{series},{(series + step * step) % 11}" for series in range(24) for step in range((20, 60, 300)[series % 3])
    ]
    path.write_text("\n".join(["series,token", *rows]) + "\n")
    return path


# ---- exit codes ------------------------------------------------------------------------------------------------------

EXIT_LINES = (
    "--version",
    "--help",
    "no-such-command",
    "estimate --model lstm --seq 100 --device t4",
    "estimate --model lstm --seq 100 --budget 10MiB",
    "estimate --model lstm",
    "estimate --model lstm --seq 100 --no-such-flag",
    f"probe {TINY} --budget 1MiB",
    "probe --model lstm",
    "plan --model lstm --seq 100 --device t4 --output {home}/p.json",
    "plan --model lstm --seq 100 --device t4 --budget 10MiB --output {home}/none.json",
    "plan --model lstm",
    "show {plan}",
    "show {home}/nowhere.json",
    "show",
    "train {tiny} --data {waves} --steps 1 --run {home}/run1",
    "train {tiny} --data {waves} --steps 1 --run {home}/run2 --model surface_failing_model:build",
    "train {tiny} --data {home}/nowhere.npy",
    "train {tiny}",
    "predict {home}/run1 --data {waves} --output {home}/p.npy",
    "predict {home}/nowhere --data {waves}",
    "predict",
    "tradeoffs --model lstm --seq 100 --device t4",
    "tradeoffs --model lstm --seq 100 --device t4 --budget 10MiB",
    "tradeoffs --model lstm",
    "check {plan}",
    "check {home}/nowhere.json",
    "check {plan} --device cuda",
    "fleet {jobs} --cards {cards}",
    "fleet {jobs}",
    "fleet {jobs} --cards {jobs}",
    "devices",
    "devices surplus",
    "compare",
    "compare {home}/nowhere",
    "compare {home}/run1",
    "clean {home}/nowhere",
)
"""Command lines that end with 0 (fits, done), 1 (does not fit) and 2 (misuse), for each command."""


def exit_codes(session: Session) -> dict[str, Any]:
    """The exit code of each of the lines, and of what the session ran."""
    tiny = adopt(HERE / RUN / "plan.json", session.home / "tiny.json", limited=False)
    files: dict[str, Any] = {"tiny": tiny, "waves": write_waves(session.home / "tiny.npy")}
    with failing_model():
        codes = {line: session(line, **files).code for line in EXIT_LINES}
    return codes | {f"{name} --json": ran.code for name, ran in session.ran.items()}


@contextlib.contextmanager
def failing_model() -> Iterator[None]:
    """A module `surface_failing_model` whose function `build` makes a model that never has enough memory."""
    from types import ModuleType

    import torch

    module: Any = ModuleType("surface_failing_model")

    def build(spec: Any) -> Any:
        model = trained_model_class()(spec)

        def refuse(*_: Any, **__: Any) -> Any:
            raise torch.OutOfMemoryError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

        for call in model.children():
            call.forward = refuse
        return model

    module.build = build
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        del sys.modules[module.__name__]


_RESULT: list[Any] = []


def trained_model_class() -> Any:
    """The class of the built-in model, from the result of a training: its module is private."""
    assert _RESULT, "call small_training first"
    return type(_RESULT[0].model)


# ---- files -----------------------------------------------------------------------------------------------------------


def files(session: Session) -> dict[str, Any]:
    """What the commands write: names of files, columns of tables, paths of JSON."""
    session("tradeoffs --plan {plan} --output {home}/tradeoffs.csv")
    old = (HERE / RECORDS).read_text().count("\n")
    return {
        "run directory": _names(session.resumed),
        "ledger directory": _names(session.ledger),
        "OOMGUARD_CACHE directory": sorted({f"*{path.suffix}" for path in session.cache.iterdir()}),
        "columns of metrics.csv": _columns(session.run / "metrics.csv"),
        "columns of tradeoffs --output FILE.csv": _columns(session.home / "tradeoffs.csv"),
        "keys of events.jsonl": _lines_paths(session.resumed / "events.jsonl"),
        "keys of records.jsonl": _lines_paths(session.ledger / "records.jsonl", old),
    }


def _names(directory: Path) -> list[str]:
    """The files below a directory, with N for the numbers in their names."""
    names = [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]
    return sorted({re.sub(r"\d{2,}", "N", name) for name in names})


def _columns(table: Path) -> list[str]:
    with table.open() as file:
        return next(csv.reader(file))


def _lines_paths(path: Path, start: int = 0) -> dict[str, str]:
    """The paths of a file of JSON lines, from one of them on."""
    lines = path.read_text().splitlines()[start:]
    assert lines, f"{path} has no new lines"
    keys = paths([json.loads(line) for line in lines])
    return {name.removeprefix("[]").removeprefix("."): kind for name, kind in keys.items() if name}


# ---- public names ----------------------------------------------------------------------------------------------------


def names(home: Path) -> dict[str, Any]:
    """The public names of `oomguard` with their signatures and members, and those of the values that they return."""
    import oomguard

    plan = oomguard.load_plan(adopt(HERE / PLANS[0], home / "named.json"))
    assert isinstance(plan, oomguard.Plan)
    progress, result = small_training(home)
    returned = {
        "guard()": type(oomguard.guard(plan, device="cpu")),
        "curves()[0]": type(oomguard.curves(plan)[0]),
        "train()": type(result),
        "train(progress=) is called with": type(progress),
    }
    public = {name: _described(getattr(oomguard, name)) for name in oomguard.__all__ if name != "__version__"}
    return public | {name: _described(kind) for name, kind in returned.items()}


def small_training(home: Path) -> tuple[Any, Any]:
    """Train a plan for the processor in Python: what `progress` was called with last, and the result."""
    import torch

    import oomguard

    torch.set_num_threads(1)
    reports: list[Any] = []
    home.mkdir(exist_ok=True)
    plan = adopt(HERE / RUN / "plan.json", home / "small.json", limited=False)
    data = write_waves(home / "small.npy")
    with warnings.catch_warnings(action="ignore"):
        _RESULT[:] = [oomguard.train(plan, str(data), steps=1, run=str(home / "small"), progress=reports.append)]
    return reports[-1], _RESULT[0]


def _described(value: Any) -> dict[str, Any]:
    if not inspect.isclass(value):
        return {"kind": "function", **_signature(value)}
    bases = sorted(base.__name__ for base in value.__mro__[1:] if base.__module__ in ("builtins", "enum"))
    facts: dict[str, Any] = {"kind": "class", "is a": bases, "members": _members(value)}
    if issubclass(value, enum.Enum):
        return facts | {"values": {member.name: member.value for member in value}}
    if "__init__" not in {name for base in value.__mro__ if base.__module__ != "builtins" for name in vars(base)}:
        return facts  # an exception that takes whatever an exception takes
    return facts | _signature(value)


def _members(kind: type) -> dict[str, Any]:
    """Public methods with their signatures, and properties and fields by name."""
    inherited = {name for base in kind.__mro__ if base.__module__ == "builtins" for name in vars(base)}
    own = sorted(name for name in dir(kind) if not name.startswith("_") and name not in inherited)
    members: dict[str, Any] = {}
    for name in own:
        value = inspect.getattr_static(kind, name)
        function: Callable[..., Any] | None = value if inspect.isfunction(value) else getattr(value, "__func__", None)
        members[name] = {"method": _signature(function)} if function else "attribute"
    return members


def _signature(function: Callable[..., Any]) -> dict[str, Any]:
    """Parameters with their defaults; the order of those that can be given by position."""
    empty = inspect.Parameter.empty
    parameters = [
        parameter for parameter in inspect.signature(function).parameters.values() if parameter.name != "self"
    ]
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {
        "positional": [parameter.name for parameter in parameters if parameter.kind in by_position],
        "parameters": {
            parameter.name: _default(parameter.default) if parameter.default is not empty else ""
            for parameter in parameters
        },
        "takes any name": any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters),
    }


def _default(value: Any) -> str:
    text = f"={value!r}"
    return "=..." if " at 0x" in text or "<" in text else text


# ---- golden files ----------------------------------------------------------------------------------------------------


def golden(name: str) -> Any:
    """What a golden file holds."""
    return json.loads((HERE / f"{name}.json").read_text())


def _write(name: str, value: Any) -> None:
    (HERE / f"{name}.json").write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """Write the golden files of the present surface."""
    import tempfile

    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    os.environ["OOMGUARD_CACHE"] = ""
    with tempfile.TemporaryDirectory() as directory:
        session = Session(Path(directory))
        _write("cards", sorted(card["name"] for card in session.document("devices --cards")["cards"]))
        _write("flags", flags())
        _write("names", names(session.home))
        _write("json_keys", json_keys(session))
        _write("files", files(session))
        _write("exit_codes", exit_codes(session))


if __name__ == "__main__":
    main()
