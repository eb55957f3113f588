"""The flags that describe a spec, a candidate and a place, and what they say: the same for every subcommand."""

import inspect
import os.path
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from oomguard.candidate import Allocator, Candidate, Engine, Keep, Precision, Update, make_candidate
from oomguard.checks import flag, shown
from oomguard.errors import MisuseError
from oomguard.presets import PRESETS, load_spec, make_spec, preset
from oomguard.spec import Cell, Head, Loss, Nonlinearity, Optimizer, Spec
from oomguard.units import parse_bytes, parse_seconds


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
    Flag("lengths", "HISTOGRAM", "How many sequences of which length: 100:5000,2000:40."),
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
        return params

    def coerce(self, value: Any, **_: Any) -> Any:
        """What typer asks for a value."""
        return value


class Command(AsTyped, TyperCommand):
    """A subcommand."""


class Group(AsTyped, TyperGroup):
    """The command that has them."""


def with_flags(**panels: list[Flag]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a subcommand flags, in panels of its help; it gets those that were set, by name, as they were typed."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def run(**values: Any) -> Any:
            return command(**{name: value for name, value in values.items() if value is not None})

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        shown_flags = [_parameter(one, panel) for panel, flags in panels.items() for one in flags]
        switches = [one for flags in panels.values() for one in flags if not one.kind]
        run.__signature__ = inspect.Signature([*shown_flags, *map(_opposite, switches)])  # type: ignore[attr-defined]
        return run

    return decorate


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
    annotation: Any = Annotated[str | None, option] if one.kind else Annotated[bool | None, option]
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
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete


def read(values: dict[str, Any]) -> tuple[Spec, Candidate]:
    """The spec and the candidate that the flags describe; flags override a spec file and a preset."""
    fields, knobs = _values(SPEC[2:], values), _values(CANDIDATE, values)
    pair = [knobs.get(name) for name in ("microbatch", "accumulation")]
    if "batch" not in fields and all(type(one) is int and one > 0 for one in pair):
        fields["batch"] = pair[0] * pair[1]  # type: ignore[operator]
    if "features" in fields and "vocab" not in fields:
        fields |= {"vocab": None, "embedding": fields.get("embedding")}
    elif "vocab" in fields and "features" not in fields:
        fields["features"] = None
    spec = _spec(values.get("model"), values.get("preset"), fields)
    if type(pair[0]) is int and pair[0] > spec.batch:
        raise MisuseError(
            rule="--microbatch must not be larger than --batch",
            got=f"got {shown(pair[0])} of {shown(spec.batch)}",
            advice=f"Lower it, or give --batch {pair[0]} too.",
        )
    return spec, make_candidate(spec, **knobs)


def _spec(model: str | None, name: str | None, fields: dict[str, Any]) -> Spec:
    if model is not None and re.fullmatch(r"[A-Za-z_][\w.]*:[\w.]+", model):
        raise MisuseError(
            rule="A model is described by a spec",
            got=f"got {shown(model)}, a model that is code",
            advice="Describe its layers by flags (--model lstm --hidden 256) or in a TOML file.",
        )
    if model is None or model in get_args(Cell) or not _is_path(model):
        fields = fields if model is None else fields | {"cell": model}
        return make_spec(fields) if name is None else preset(name, **fields)
    if name is not None:
        raise MisuseError(
            rule="A spec comes from a file or from a preset",
            got=f"got --model {shown(model)} and --preset {shown(name)}",
            advice="Leave one of the two out.",
        )
    return load_spec(Path(model), **fields)


def _is_path(model: str) -> bool:
    return any(sign in model for sign in "./\\") or (model != "" and os.path.exists(model))


def read_budget(text: str) -> int:
    """The bytes of --budget."""
    try:
        return parse_bytes(text)
    except MisuseError as error:
        raise MisuseError(rule=error.rule.replace("A size", "--budget"), got=error.got, advice=error.advice) from None


def read_seconds(text: str) -> float:
    """The seconds of --timeout."""
    try:
        return parse_seconds(text)
    except MisuseError as error:
        rule = error.rule.replace("A duration", "--timeout")
        raise MisuseError(rule=rule, got=error.got, advice=error.advice) from None


def _values(flags: list[Flag], values: dict[str, Any]) -> dict[str, Any]:
    """What was given of these flags, by field."""
    found: dict[str, Any] = {}
    for one in flags:
        name = one.name.removeprefix("no-").replace("-", "_")
        if not one.kind and name in values and f"no_{name}" in values:
            raise MisuseError(
                rule=f"{flag(name)} is turned on or off",
                got=f"got both {flag(name)} and {flag(f'no_{name}')}",
                advice="Leave one of the two out.",
            )
        if not one.kind and f"no_{name}" in values:
            found[name] = False
        elif name in values:
            found[name] = _value(one, values[name])
    return found


def _value(one: Flag, text: Any) -> Any:
    """What was typed as what the field takes; as it was typed if it cannot be that, for the field to refuse."""
    if one.kind == "N":
        plain = text.replace("_", "")
        return int(plain) if re.fullmatch(r"-?\d{1,18}", plain, re.ASCII) else text
    if one.kind == "P":
        try:
            return float(text)
        except ValueError:
            return text
    if one.name == "frozen":
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return _histogram(text) if one.name == "lengths" else text


def _histogram(text: str) -> Any:
    """`100:5000,2000:40` as a dict; a length that comes twice counts twice."""
    pairs = [part.split(":") for part in text.split(",")]
    if not all(re.fullmatch(r"\s*\d{1,18}:\d{1,18}\s*", part, re.ASCII) for part in text.split(",")):
        return text
    found: dict[int, int] = {}
    for length, count in pairs:
        found[int(length)] = found.get(int(length), 0) + int(count)
    return found
