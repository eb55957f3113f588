"""The flags of all subcommands, and how typer gets them: a flag is the same wherever it occurs."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from oomguard.candidate import Allocator, Engine, Keep, Precision, Update
from oomguard.data.options import Format, Nan, Normalise, Split
from oomguard.presets import PRESETS
from oomguard.spec import Cell, Head, Loss, Nonlinearity, Optimizer
from oomguard.train.options import Schedule


class Flag(NamedTuple):
    """One option. Its value reaches us as it was typed: whoever owns the field checks it, with the better message."""

    name: str
    """Of the field: `layer_norm`."""
    kind: str
    """Metavar of the value; empty for a switch."""
    text: str
    """Of the help."""
    choices: tuple[str, ...] = ()
    """What it takes, for the help and the shell."""
    many: bool = False
    """Whether it may be given several times."""


SPEC = [
    Flag("model", "NAME", "Or a spec file, such as spec.toml.", get_args(Cell)),
    Flag("preset", "NAME", "Start from a spec named for what people do.", tuple(PRESETS)),
    Flag("seq", "N", "Time steps of the longest sequence."),
    Flag("batch", "N", "Sequences per optimizer step (32)."),
    Flag("features", "N", "Numbers per time step (64)."),
    Flag("vocab", "N", "Tokens instead: size of the vocabulary."),
    Flag("embedding", "N", "Width of a token's embedding (as hidden)."),
    Flag("hidden", "N", "Hidden size of one direction (256)."),
    Flag("layers", "N", "Recurrent layers (2)."),
    Flag("bidirectional", "", "Two directions in every layer."),
    Flag("projection", "N", "LSTM: size of the projected state."),
    Flag("nonlinearity", "NAME", "Of the rnn cell.", get_args(Nonlinearity)),
    Flag("dropout", "P", "Dropout between the layers (0)."),
    Flag("layer-norm", "", "Normalisation after every layer."),
    Flag("head", "NAME", "A prediction for every step, or one at the end.", get_args(Head)),
    Flag("outputs", "N", "Numbers or classes per prediction (the vocabulary, or 1)."),
    Flag("loss", "NAME", "The first with a vocabulary, else the second.", get_args(Loss)),
    Flag("optimizer", "NAME", "As PyTorch has them (adam).", get_args(Optimizer)),
    Flag("frozen", "PARTS", "Parts not trained: embedding,layer0,head."),
    Flag("tied", "", "The head shares the embedding's weights."),
    Flag("sparse-embedding", "", "Sparse gradient of the embedding."),
    Flag("packed", "", "Packed sequences: padding is not computed."),
    Flag("batch-first", "", "Tensors are batch x time, which costs copies."),
    Flag("lengths", "HISTOGRAM", "Sequences of each length, 100:5000,2000:40, or a file of lengths: .npy, .csv, .txt."),
]
CANDIDATE = [
    Flag("microbatch", "N", "Sequences per pass (the batch)."),
    Flag("accumulation", "N", "Passes per optimizer step."),
    Flag("precision", "NAME", "What the layers compute in.", get_args(Precision)),
    Flag("segments", "N", "Pieces to go through the sequence in; exact (1)."),
    Flag("no-recompute", "", "Segments keep all they computed."),
    Flag("levels", "N", "Of segments: 2 keeps fewer border states (1)."),
    Flag("keep", "NAME", "Where a microbatch and border states stay.", get_args(Keep)),
    Flag("window", "N", "Cut the gradient every N steps; lossy."),
    Flag("engine", "NAME", "The kernel (PyTorch's choice).", get_args(Engine)),
    Flag("threads", "N", "CPU threads."),
    Flag("update", "NAME", "How the optimizer runs.", get_args(Update)),
    Flag("allocator", "NAME", "Of memory (steady on the CPU, plain on CUDA).", get_args(Allocator)),
    Flag("offload", "", "The optimizer's state in host memory."),
    Flag("state-8bit", "", "The optimizer's state in 8 bits; lossy."),
    Flag("workers", "N", "Processes that load data (0)."),
    Flag("prefetch", "N", "Microbatches that each prepares ahead (2)."),
]
WHERE = [
    Flag("device", "NAME", "cpu, cuda, cuda:1, or a card such as a100-80gb (cpu)."),
    Flag("budget", "SIZE", "What it may use, such as 6GiB (what is free)."),
]
PROBED = [one for one in CANDIDATE if one.name not in ("workers", "prefetch")]
"""A probe makes its data itself."""
HERE = [Flag("device", "NAME", "cpu, cuda or cuda:1 (cpu)."), *WHERE[1:]]
ANYWHERE = [Flag("device", "NAME", "cpu, cuda, cuda:0,cuda:1 or a card such as a100-80gb (cpu)."), *WHERE[1:]]
FIXED = [
    one._replace(text=one.text.partition(" (")[0].rstrip(".") + ".") for one in PROBED if one.name != "accumulation"
]
"""Knobs that a search can be given (the accumulation follows from the microbatch), without what is there otherwise."""
# written out, since the help and the shell's completion should not wait for the search; the tests compare
SEARCH = [
    Flag(
        "maximize",
        "LIST",
        "What is best; the first decides, more give a front too (throughput).",
        ("throughput", "microbatch", "seq"),
    ),
    Flag("allow", "LIST", "Lossy knobs that may be turned (precision).", ("precision", "window", "8bit", "none")),
    Flag("max-probes", "N", "Probes in all (24)."),
    Flag("timeout", "SECONDS", "Of the whole search, such as 90s or 5min (100s)."),
    Flag("ledger", "DIR", "Keep all records there, and go on with those that are there."),
    Flag("storage", "URL", "Optuna's storage, for machines that search together."),
]
DATA = [
    Flag("data", "FILE", "What to train on: .npy, .csv, .parquet or text."),
    Flag("format", "NAME", "Of the file (by its suffix).", get_args(Format)),
    Flag("columns", "COLUMNS", "Inputs, by name or number: open,close (all others)."),
    Flag("target", "COLUMNS", "Targets (the last columns, or the inputs one step ahead)."),
    Flag("ahead", "N", "Steps that a target lies ahead of its inputs."),
    Flag("id", "COLUMN", "Which series a row of a table belongs to."),
    Flag("targets", "FILE", "Targets in an array of their own."),
    Flag("stride", "N", "Steps from window to window of long series (no overlap)."),
    Flag("nan", "NAME", "What to do with NaN (error).", get_args(Nan)),
    Flag("characters", "", "Text: tokens are characters, not bytes."),
    Flag("vocabulary", "TEXT", "Text: the characters in the order of their tokens."),
    Flag("truncate", "", "Cut sequences that are longer than the plan's."),
    Flag("validation", "P", "Share that is kept for validation (0.1)."),
    Flag("split", "NAME", "How that share is chosen.", get_args(Split)),
    Flag("normalise", "NAME", "Numbers brought to mean 0 and deviation 1 (inputs).", get_args(Normalise)),
    Flag("cache", "DIR", "For what is converted once (beside the file)."),
    Flag("workers", "N", "Processes that load data (as the plan says)."),
    Flag("seed", "N", "Of weights, order and split (0)."),
]
CUT = [
    Flag("data", "FILE", "What will be trained on: its lengths, as train would cut it."),
    *(one for one in DATA[1:] if one.name not in ("validation", "split", "normalise", "workers", "seed")),
]
"""Data, as far as it says what sequences there are."""
READ = [Flag("data", "FILE", "What to predict, in the form of the training data."), *DATA[1:]]
TRAINED = [
    Flag("run", "DIR", "For checkpoints, metrics and events (runs/ and the model's name)."),
    Flag("resume", "", "Go on from the newest checkpoint there."),
    Flag("epochs", "N", "Times through the data (1)."),
    Flag("steps", "N", "Optimizer steps, instead or at most."),
    Flag("lr", "P", "The learning rate, at its highest (0.001)."),
    Flag("schedule", "NAME", "How it falls.", get_args(Schedule)),
    Flag("warmup", "N", "Steps over which it first rises (0)."),
    Flag("decay-every", "N", "With step: steps between two falls (a third of all)."),
    Flag("decay", "P", "With step: the factor of each fall (0.1)."),
    Flag("clip", "P", "The largest norm of the gradient."),
    Flag("patience", "N", "Stop after so many validations without a new best."),
    Flag("validate-every", "N", "Steps between two validations (an epoch)."),
    Flag("save-every", "WHEN", "Checkpoints: steps, or a duration (10min)."),
    Flag("keep", "N", "Checkpoints that are kept (3)."),
    Flag("log-every", "N", "Steps between two rows of the metrics (1)."),
    Flag("tensorboard", "", "Event files for TensorBoard too."),
    Flag("model", "NAME", "A function that builds the model: package.module:function."),
]
PREDICTED = [
    Flag("output", "FILE", "Where to: .npy or .csv (predictions.npy)."),
    Flag("probabilities", "", "Of classes: those of all, not the likeliest."),
    Flag("device", "NAME", "cpu, cuda or cuda:1 (the plan's)."),
]
TABLE = [
    Flag(
        "over",
        "NAME=VALUES",
        "What varies: microbatch=1..64, segments=1,4,16, seq=1000..64000*2. Again for more.",
        many=True,
    ),
    Flag("plan", "FILE", "A plan: what was measured for it, its model, device and budget."),
    Flag("ledger", "DIR", "A ledger: what was measured."),
]
# written out, since the help should not wait for the curves; the tests compare
CURVES = ("front", "region", "segments", "microbatch", "longest", "throughput", "terms", "timeline")
TABLE_OUTPUT = [
    Flag("output", "FILE", "All of it: .csv or .parquet, .png (one curve), .html (all curves)."),
    Flag("curve", "NAME", "What a .png shows (what tells most).", CURVES),
]
OUTPUT = Flag("output", "FILE", "Where the plan is written (plan.json).")
SEQUENCES = Flag("sequences", "N", "Of an epoch (as the plan's histogram of lengths has them).")
HTML = Flag("html", "FILE", "Write one page about it, with curves, that needs no other file.")
TIMEOUT = Flag("timeout", "SECONDS", "Give up after so long, such as 90s or 5min (10min).")
LEDGER = Flag("ledger", "DIR", "Add the record to the ledger in that directory.")
JSON = Flag("json", "", "One JSON document on stdout.")


class AsTyped:
    """Values stay as they were typed.

    typer 0.29 imports pydantic to turn a text into a text, which takes as long as all the rest of an estimate.
    Where a version has no such attribute, setting it changes nothing.
    """

    def get_params(self, context: Any) -> Any:
        """All options, with us in the place of what would convert their values."""
        params = super().get_params(context)  # type: ignore[misc]
        for param in params:
            param._runtime_param = self
            if getattr(param, "is_flag", False):
                param.metavar = ""  # of a switch, the help would say <bool>
        return params

    def coerce(self, value: Any, **_: Any) -> Any:
        """What typer asks for a value."""
        return value


class Command(AsTyped, TyperCommand):
    """A subcommand."""

    def get_help_option(self, context: Any) -> Any:
        """`--help`, in the last panel: otherwise it would have the first one to itself."""
        option: Any = super().get_help_option(context)
        option.rich_help_panel = "Output"
        return option


class Group(AsTyped, TyperGroup):
    """The command that has them."""


def with_flags(*arguments: Flag, **panels: list[Flag]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a subcommand flags, in panels of its help; it gets those that were set, by name, as they were typed.

    Arguments have no flag before them, and are given in this order.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def run(**values: Any) -> Any:
            return command(**{name: value for name, value in values.items() if value is not None})

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        shown_flags = [_parameter(one, panel) for panel, flags in panels.items() for one in flags]
        switches = [one for flags in panels.values() for one in flags if not one.kind]
        flags_ = [*map(_argument, arguments), *shown_flags, *map(_opposite, switches)]
        run.__signature__ = inspect.Signature(flags_)  # type: ignore[attr-defined]
        return run

    return decorate


def _argument(one: Flag) -> inspect.Parameter:
    argument = typer.Argument(help=one.text, metavar=one.kind, show_default=False)
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[str, argument])


def _parameter(one: Flag, panel: str, *, hidden: bool = False) -> inspect.Parameter:
    text = f"{', '.join(one.choices)}. {one.text}" if one.choices else one.text
    option = typer.Option(
        f"--{one.name}",
        help=text,
        metavar=one.kind or " ",
        rich_help_panel=panel,
        autocompletion=_completion(one) if one.kind else None,
        show_default=False,
        hidden=hidden,
    )
    kind: Any = list[str] if one.many else str if one.kind else bool
    annotation: Any = Annotated[kind | None, option]
    name = one.name.replace("-", "_")
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _opposite(one: Flag) -> inspect.Parameter:
    """The flag that turns a switch of a spec file off again; not shown, or it would take half of the help's width."""
    name = one.name.removeprefix("no-") if one.name.startswith("no-") else f"no-{one.name}"
    return _parameter(Flag(name, "", one.text), "", hidden=True)


def _completion(one: Flag) -> Callable[[str], list[str]]:
    """What the shell offers for a flag's value."""

    def complete(incomplete: str) -> list[str]:
        choices = [*one.choices]
        if one.name == "device":
            from oomguard.estimate import gpus

            choices = ["cpu", "cuda", *gpus.names()]
        before, comma, word = incomplete.rpartition(",") if one.kind == "LIST" else ("", "", incomplete)
        new = [choice for choice in choices if choice not in before.split(",")]
        return [before + comma + choice for choice in new if choice.startswith(word)]

    return complete
