"""Command-line flags. Those of a spec, a candidate and of options are generated from the fields of their structs."""

import ast
import inspect
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup

from oomguard._core.errors import REQUIRED, conflict, fields_of
from oomguard._core.errors import flag as flag_word
from oomguard._data.options import CUTTING, DataOptions
from oomguard._report.progress import showing
from oomguard._run.settings import RunOptions
from oomguard._spec.candidate import KNOBS, Candidate
from oomguard._spec.read import PRESETS
from oomguard._spec.spec import Spec
from oomguard._train import TrainOptions

Struct = type[msgspec.Struct]


class Flag(NamedTuple):
    """One flag or argument. Its value reaches a command as text; the field that takes it checks it."""

    name: str  # name of the field, such as `layer_norm`
    metavar: str  # placeholder of the value in the help; empty for a switch
    text: str = ""  # help text; empty if it comes from the docstring of the field
    kind: type = str
    choices: tuple[str, ...] = ()  # values that it takes; empty if there are others
    many: bool = False  # whether it may be given several times
    negative: bool = False  # whether a switch is on by default, so that the help shows the flag that turns it off
    struct: Struct | None = None  # the struct that has the field
    fixes: bool = False  # whether it fixes a knob of a search, which has no default then
    optional: bool = False  # whether an argument may be left out

    @property
    def word(self) -> str:
        """The flag as the help shows it, such as `--layer-norm`."""
        return "--" + (f"no_{self.name}" if self.negative else self.name).replace("_", "-")


_METAVARS: dict[type | str, str] = {
    **{int: "N", float: "P", bool: "", dict: "HISTOGRAM", tuple: "COLUMNS", str: "TEXT"},
    **{
        "frozen": "PARTS",
        "id": "COLUMN",
        "time": "COLUMN",
        "targets": "FILE",
        "cache": "DIR",
        "log": "LIST",
        "run": "DIR",
        "save_every": "WHEN",
    },
}
"""Metavars by type, and by name for fields whose type does not show what they hold."""
_HELP = {
    "lengths": "Histogram of sequence lengths, such as 100:5000,2000:40, or a file of lengths: .npy, .csv, .txt.",
    "frozen": "Parts that are not trained, such as embedding,layer0,head.",
}
"""Help of fields that are written differently in Python."""


def flags_of(struct: Struct, leave_out: Iterable[str] = (), *, fixes: bool = False) -> list[Flag]:
    return [
        Flag(
            name=name,
            metavar="NAME" if field.choices else _METAVARS.get(name, _METAVARS[field.kind]),
            text=_HELP.get(name, ""),
            kind=field.kind,
            choices=field.choices,
            negative=field.default is True,
            struct=struct,
            fixes=fixes,
        )
        for name, field in fields_of(struct).items()
        if name not in leave_out
    ]


_CELLS = fields_of(Spec)["cell"].choices
MODEL = Flag(
    "model",
    "NAME",
    "Cell (rnn, lstm or gru), a spec file, a task of your own (package.module:task) or a .keras file.",
    choices=_CELLS,
)
PRESET = Flag("preset", "NAME", "Start from a ready-made spec: " + ", ".join(PRESETS) + ".", choices=tuple(PRESETS))
SPEC_FIELDS = sorted(flags_of(Spec, ["cell"]), key=lambda flag: flag.name not in ("seq", "batch"))
"""Flags of the fields of a spec, the most important first."""
SPEC = [MODEL, PRESET, *SPEC_FIELDS]
CANDIDATE = flags_of(Candidate)
PROBED = [flag for flag in CANDIDATE if KNOBS[flag.name].role.group != "loading"]
"""Knobs of a probe, which generates its data itself."""
FIXED = flags_of(Candidate, [name for name, knob in KNOBS.items() if not knob.searched], fixes=True)
"""Knobs that the user can fix before a search."""
PLAN = Flag("plan", "PLAN", "Plan file, written by oomguard plan, or the directory of a run.")
RUN = Flag("run", "RUN", "Directory of a training run, written by oomguard train.")
FIXED_KNOBS: dict[str, Any] = {"Knobs (fixed if given)": FIXED}
JSON = Flag("json", "", "Print one JSON document.", bool)
QUIET = Flag("quiet", "", "Show no progress.", bool)
VERBOSE = Flag("verbose", "", "Write every step of the progress as a line, with its time.", bool)
LOUDNESS = [QUIET, VERBOSE]
"""Flags of all commands that may take longer than a moment."""
FORCE = Flag("force", "", "Replace the output file if there is one.", bool)
BUDGET = Flag("budget", "SIZE", "Memory that may be used, such as 6GiB (default: what is free).")
WHERE = [Flag("device", "NAME", "cpu, cuda, cuda:1, or a card such as a100-80gb (default: cpu)."), BUDGET]
PRESENT = Flag("device", "NAME", "cpu, cuda or cuda:1 (default: cpu).")
HERE = [PRESENT, BUDGET]
ANYWHERE = [Flag("device", "NAME", "cpu, cuda, cuda:0,cuda:1 or a card such as a100-80gb (default: cpu)."), BUDGET]
CHECKED = Flag("device", "NAME", "The device to check: cpu, cuda or cuda:1 (default: that of the plan).")
LOSSY = [knob.role.lossy for knob in KNOBS.values() if knob.role.lossy is not None]
# aims and defaults are written out, so that the help need not import the search; a test compares them
AIMS = ("throughput", "batch", "microbatch", "seq")
SAMPLERS = ("auto", "gp", "tpe", "random")
_AIM = "Aim of the search. The first of several decides, and the plan shows their front (default: throughput)."
SEARCH = [
    Flag("maximize", "LIST", _AIM, choices=AIMS),
    Flag(
        "allow",
        "LIST",
        "Lossy knobs that may change (default: precision), for a task also microbatch, segments.",
        choices=(*LOSSY, "none"),
    ),
    Flag("max_probes", "N", "Probes at most (default: 24).", int),
    Flag("timeout", "SECONDS", "Time limit of the search, such as 90s or 5min (default: 55s)."),
    Flag("step_time", "SECONDS", "Longest time of a step with --maximize seq (default: 1min)."),
    Flag(
        "sampler",
        "NAME",
        "Sampler of the probes; all but auto are Optuna's (default: auto).",
        choices=SAMPLERS,
    ),
    Flag("ledger", "DIR", "Store all records there, and continue with those that it has."),
    Flag("storage", "URL", "Optuna storage, for several machines that search together (see oomguard work)."),
    Flag("on", "ADDRESS", "Run the probes on a Ray cluster: ray, or ray://host:10001."),
]
WORKED = [
    Flag("storage", "URL", "Optuna storage of the search, as oomguard plan has it."),
    Flag("study", "NAME", "Study of the search, if the storage has several."),
    Flag("wait", "SECONDS", "Wait so long for a search to begin, such as 10min (default: not at all)."),
]
DATA = [
    Flag("data", "FILE", "Data: .npy, .csv, .parquet or text (default: that of the plan or the run)."),
    *flags_of(DataOptions, ["limit", "inputs_only", "categories"]),
]
CUT = [
    Flag("data", "FILE", "Training data: features, outputs, loss and lengths are inferred, and the plan keeps it."),
    *(flag for flag in DATA[1:] if flag.name in CUTTING),
]
"""Data options that decide which sequences there are."""
READ = [Flag("data", "FILE", "Data in the form of the training data (default: that)."), *DATA[1:]]
TRAINED = [
    *flags_of(TrainOptions),
    Flag("model", "NAME", "A task of your own, package.module:task, or a function that builds the model of a spec."),
]
TASK_PLANNED = [*HERE, *(flag for flag in SPEC_FIELDS if flag.name in ("seq", "batch"))]
"""Flags for the plan that `train` makes of a task that has none."""
RESUMED = [flag for flag in TRAINED if flag.name not in ("run", "resume")]
PREDICTING = [Flag("model", "NAME", "The task of a run of a task: package.module:task.")]
PREDICTED = [
    Flag("output", "FILE", "File for the predictions, .npy or .csv, of a task .npy or .pt (default: predictions.npy)."),
    FORCE,
    Flag("probabilities", "", "Write the probabilities of all classes, not the likeliest class.", bool),
    Flag("device", "NAME", "cpu, cuda or cuda:1 (default: as the plan)."),
    Flag("precision", "NAME", "Precision of the weights (default: as trained).", choices=("int8",)),
    *LOUDNESS,
]
_TO = "Format of the file (default: state_dict)."
EXPORTED = [  # the choices are written out, so that the help need not import the training; a test compares
    Flag("to", "NAME", _TO, choices=("state_dict", "torchscript", "onnx")),
    Flag("output", "FILE", "File to write (default: model.pt, model.ts or model.onnx)."),
    FORCE,
    Flag("model", "NAME", "The task of a run of a task: package.module:task."),
    *LOUDNESS,
    JSON,
]
SHRUNK = [
    Flag("hidden", "P", "Share of the hidden units of every layer to keep (default: 0.75)."),
    Flag("output", "DIR", "Directory of the smaller run (default: the name of the run, and the share)."),
    *LOUDNESS,
    JSON,
]
DRAWN = [
    Flag("prompt", "TEXT", "Text that a model of text goes on with, in the place of data."),
    Flag("length", "N", "Characters, or bytes, to draw (default: 200).", int),
    Flag("temperature", "P", "Below 1 likelier, above 1 more varied; 0: always the likeliest (default: 1).", float),
]
_OVER = "Values to compare, such as microbatch=1..64, segments=1,4,16 or seq=1000..64000*2. Repeat it for more names."
TABLE = [
    Flag("over", "NAME=VALUES", _OVER, many=True),
    Flag("plan", "FILE", "Take model, device, budget and measurements from a plan."),
    Flag("ledger", "DIR", "Take measurements from a ledger."),
]
# written out, so that the help need not import the charts; a test compares
CURVES = ("front", "region", "segments", "microbatch", "terms", "timeline")
TABLE_OUTPUT = [
    Flag("output", "FILE", "Write the table (.csv, .parquet), one chart (.png) or all charts (.html)."),
    Flag("curve", "NAME", "Chart for a .png (default: the one that fits --over).", choices=CURVES),
    FORCE,
    *LOUDNESS,
    JSON,
]
_MEASURED = "Exit with code 1 unless the planned candidate was run at full length."
REQUIRE = Flag("require_measured", "", _MEASURED, bool)
PLANNED = [Flag("output", "FILE", "File for the plan (default: plan.json)."), FORCE, REQUIRE, *LOUDNESS, JSON]
SEQUENCES = Flag("sequences", "N", "Sequences per epoch (default: those of the plan's histogram of lengths).", int)
RAN = flags_of(RunOptions, ["budget"])
RUN_OUTPUT = [
    Flag("json", "FILE", "Write the summary to a JSON file."),
    Flag("html", "FILE", "Write the summary as a page with charts, in one file."),
    FORCE,
    Flag("quiet", "", "Print nothing beside what the script prints.", bool),
]
HTML = Flag("html", "FILE", "Write a report page with charts, in one file.")
SCHEDULERS = ("slurm", "sky", "k8s", "kai", "ray", "submitit")  # written out; a test compares
CARD_LIST = Flag("cards", "FILE", "TOML file of cards, with their count and their price per hour.")
FLEET_OUTPUT = [
    Flag("csv", "FILE", "Write a table with a row for each job on each card."),
    Flag("html", "FILE", "Write a page with the jobs and their cards."),
    Flag("emit", "NAME", "Write a file for each job, for a scheduler.", choices=SCHEDULERS),
    Flag("output", "DIR", "Folder for the files of --emit."),
    Flag("fastest", "", "Emit each job for its fastest card where that is known, not for its cheapest.", bool),
    FORCE,
    *LOUDNESS,
    JSON,
]
YES = Flag("yes", "", "Remove everything that is listed.", bool)
TIMEOUT = Flag("timeout", "SECONDS", "Time limit, such as 90s or 5min (default: 10min).")
TRACED = Flag("timeout", "SECONDS", "Time limit of the trace of a task, such as 90s or 5min (default: 3min).")
EXPLORED = [
    Flag("ledger", "DIR", "Show the records of the ledger in this directory beside their estimates."),
    Flag("port", "N", "Port on 127.0.0.1 (default: any that is free).", int),
    Flag("allow_probes", "", "Let the page run a few real steps on this machine, to measure.", bool),
]
LEDGER = Flag("ledger", "DIR", "Add the record to the ledger in this directory.")


@cache
def docs_of(struct: Struct) -> dict[str, str]:
    """The docstrings of the fields of a struct. They are read from its source, since Python does not keep them."""
    tree = ast.parse(Path(inspect.getfile(struct)).read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == struct.__name__)
    return {
        field.target.id: " ".join(str(doc.value.value).split())
        for field, doc in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
    }


def help_of(flag: Flag) -> str:
    """The help text of a flag: its own, or the first sentence of the field's docstring, with choices and default."""
    text, default = flag.text, None
    if flag.struct is not None:
        fields = fields_of(flag.struct)
        default = fields[flag.name].default
        text = text or _sentence(docs_of(flag.struct)[flag.name], fields)
    if flag.fixes:
        text, default = re.sub(r" \(default: .*\)", "", text), None
    if flag.negative:
        text = f"Do not {text[0].lower()}{text[1:]}"
    if flag.choices and (flag.struct is not None or not all(choice in text for choice in flag.choices)):
        choices = [f"{choice} (default)" if choice == default else choice for choice in flag.choices]
        return f"{text} {'Any' if flag.metavar == 'LIST' else 'One'} of {', '.join(choices)}."
    if default in (None, (), REQUIRED) or isinstance(default, bool) or "(default" in text:
        return text
    return f"{text.rstrip('.')} (default: {default})."


def _sentence(doc: str, names: Iterable[str]) -> str:
    """The first sentence of a docstring as a help text: names of fields become flags, and None is the default."""
    sentence = re.split(r"(?<=\.) (?=[A-Z`])", doc)[0]
    sentence = re.sub(r"[;,] None(?::| is| means) (.+)\.$", r" (default: \1).", sentence)
    return re.sub(r"`([^`]+)`", lambda match: flag_word(match[1]) if match[1] in names else match[1], sentence)


class AsTyped:
    """Commands whose values stay text.

    typer 0.29 imports pydantic to convert text to text, which takes as long as the rest of an estimate. In a version
    without this attribute, setting it changes nothing.
    """

    def get_params(self, context: Any) -> Any:
        """All options, with this object in place of typer's converter."""
        params = super().get_params(context)  # type: ignore[misc]
        for param in params:
            param._runtime_param = self
            if getattr(param, "is_flag", False):
                param.metavar = ""  # otherwise the help would show <bool>
        return params

    def coerce(self, value: Any, **_: Any) -> Any:
        """Called by typer for a value."""
        return value


class Command(AsTyped, TyperCommand):
    """A subcommand. Help texts of its flags are read from docstrings only when they are shown."""

    def get_help_option(self, context: Any) -> Any:
        """`--help`, in the last panel instead of one of its own."""
        option: Any = super().get_help_option(context)
        option.rich_help_panel = "Output"
        return option

    def format_help(self, context: Any, formatter: Any) -> None:
        self._add_help()
        super().format_help(context, formatter)

    def shell_complete(self, context: Any, incomplete: str) -> Any:
        self._add_help()
        return super().shell_complete(context, incomplete)

    def _add_help(self) -> None:
        flags = {flag.name: flag for flag in getattr(self.callback, "flags", ())}
        for param in self.params:
            if param.name is not None and (flag := flags.get(param.name.removeprefix("no_"))):
                param.help = help_of(flag)  # type: ignore[attr-defined]


class Group(AsTyped, TyperGroup):
    """The main command."""


def flowing(text: str) -> str:
    """A help text whose paragraphs the terminal wraps; lists keep their lines."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(part if part.startswith("- ") else part.replace("\n", " ") for part in paragraphs)


def add_command(
    app: typer.Typer,
    name: str,
    *arguments: Flag,
    epilog: str | None = None,
    flags_first: bool = False,
    **panels: list[Flag],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a command with its arguments and its flags, in panels of the help. It gets those that were given.

    With `flags_first`, whatever follows the first argument is an argument, even if it looks like a flag.
    """
    flags = [flag for panel in panels.values() for flag in panel]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def run(**values: Any) -> Any:
            given = {name: value for name, value in values.items() if value is not None}
            with _progress(given) if QUIET in flags else nullcontext():
                return command(**given)

        run.__doc__ = flowing(inspect.getdoc(command) or "")
        run.flags = flags  # type: ignore[attr-defined]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                *map(_argument, arguments),
                *(_option(flag, panel) for panel, group in panels.items() for flag in group),
                *(_option(flag._replace(negative=not flag.negative), None) for flag in flags if flag.kind is bool),
            ]
        )
        settings = {"allow_interspersed_args": not flags_first}
        return app.command(name, cls=Command, epilog=epilog, context_settings=settings)(run)

    return decorate


def _progress(given: dict[str, Any]) -> AbstractContextManager[None]:
    """Show the progress of a command, on stderr, also with --json. The flags are taken out."""
    off = [given.pop(f"no_{flag.name}", False) for flag in LOUDNESS]
    quiet, verbose = (given.pop(flag.name, False) and not no for flag, no in zip(LOUDNESS, off, strict=True))
    if quiet and verbose:
        raise conflict("A command is quiet or verbose", "--quiet", "--verbose")
    return showing(not quiet, verbose=verbose)


def _argument(flag: Flag) -> inspect.Parameter:
    argument = typer.Argument(help=flag.text, metavar=flag.metavar, show_default=False)
    kind: Any = list[str] if flag.many else str
    kind = kind | None if flag.optional else kind
    default = None if flag.optional else inspect.Parameter.empty
    annotation: Any = Annotated[kind, argument]
    return inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option(flag: Flag, panel: str | None) -> inspect.Parameter:
    """The parameter of a flag. Without a panel it is hidden, like the opposite of every switch."""
    option = typer.Option(
        flag.word,
        metavar=flag.metavar or " ",
        rich_help_panel=panel or "",
        autocompletion=None if flag.kind is bool else _completion(flag),
        show_default=False,
        hidden=panel is None,
    )
    kind: Any = list[str] if flag.many else bool if flag.kind is bool else str
    name, annotation = flag.word[2:].replace("-", "_"), Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _completion(flag: Flag) -> Callable[[str], list[str]]:
    """Values that the shell offers for a flag."""

    def complete(incomplete: str) -> list[str]:
        choices = [*flag.choices]
        if flag.name == "device":
            from oomguard._estimate.cards import names

            choices = ["cpu", "cuda", *names()]
        before, comma, word = incomplete.rpartition(",") if flag.metavar == "LIST" else ("", "", incomplete)
        new = [choice for choice in choices if choice not in before.split(",")]
        return [before + comma + choice for choice in new if choice.startswith(word)]

    return complete
