"""Hypothesis strategies over the whole of a spec and of a candidate: anything valid, and anything at all."""

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import numpy as np
from hypothesis import strategies as st

from oomguard._core.errors import MisuseError
from oomguard._spec.candidate import KNOBS, Candidate
from oomguard._spec.spec import MAX_SEQ, MAX_STEP_ELEMENTS, SPARSE_OPTIMIZERS, Optimizer, Spec

T = TypeVar("T")
ABSENT = object()
"""Drawn for a field that is left out."""


def up_to(high: int) -> st.SearchStrategy[int]:
    """Whole numbers from 1, small ones as often as those of any size."""
    return st.integers(1, min(high, 64)) | st.integers(1, high)


def or_absent(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.just(ABSENT) | values


@st.composite
def spec_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of any valid spec, some left out."""
    fields = {
        **draw(_cells()),
        "layers": draw(up_to(1024)),
        "bidirectional": draw(st.booleans()),
        "dropout": draw(or_absent(st.floats(0, 1, exclude_max=True))),
        "layer_norm": draw(or_absent(st.booleans())),
        "head": draw(or_absent(st.sampled_from(["per-step", "last-step"]))),
        "optimizer": draw(or_absent(st.sampled_from(get_args(Optimizer)))),
        "packed": draw(or_absent(st.booleans())),
        "batch_first": draw(or_absent(st.booleans())),
        "batch": draw(up_to(1 << 20)),
    }
    fields |= draw(_inputs_and_outputs(fields))
    fields["frozen"] = draw(or_absent(_frozen(fields)))
    fields |= draw(_steps(fields))
    return {name: value for name, value in fields.items() if value is not ABSENT}


@st.composite
def _cells(draw: st.DrawFn) -> dict[str, Any]:
    cell = draw(st.sampled_from(["rnn", "lstm", "gru"]))
    hidden = draw(up_to(1 << 16))
    fields: dict[str, Any] = {"cell": cell, "hidden": hidden}
    if cell == "rnn":
        fields["nonlinearity"] = draw(or_absent(st.sampled_from(["tanh", "relu"])))
    if cell == "lstm" and hidden > 1:
        fields["projection"] = draw(or_absent(up_to(hidden - 1)))
    return fields


def _width(fields: dict[str, Any]) -> int:
    projection = fields.get("projection", ABSENT)
    size: int = fields["hidden"] if projection is ABSENT else projection
    return size * (2 if fields["bidirectional"] else 1)


@st.composite
def _inputs_and_outputs(draw: st.DrawFn, fields: dict[str, Any]) -> dict[str, Any]:
    if draw(st.booleans()):
        features = draw(or_absent(up_to(1 << 20)))
        outputs = draw(or_absent(up_to(1 << 30)))
        return {"features": features, "outputs": outputs, "loss": draw(or_absent(_losses(outputs)))}
    vocab = draw(st.integers(2, 1 << 30))
    sparse = st.booleans() if fields["optimizer"] in SPARSE_OPTIMIZERS else st.just(False)
    drawn = {"vocab": vocab, "sparse_embedding": draw(or_absent(sparse))}
    if _width(fields) <= 1 << 16 and draw(st.booleans()):
        return {"vocab": vocab, "embedding": _width(fields), "tied": True, "outputs": draw(or_absent(st.just(vocab)))}
    outputs = draw(or_absent(up_to(1 << 30)))
    return drawn | {
        "embedding": draw(or_absent(up_to(1 << 16))),
        "outputs": outputs,
        "loss": draw(_losses(outputs)) if outputs == 1 else draw(or_absent(_losses(vocab))),
    }


def _losses(outputs: object) -> st.SearchStrategy[str]:
    return st.just("mse") if outputs in (1, ABSENT) else st.sampled_from(["mse", "cross-entropy"])


def _frozen(fields: dict[str, Any]) -> st.SearchStrategy[list[str]]:
    """Some parts, but never all; a head tied to the embedding goes with it."""
    layers = [f"layer{layer}" for layer in range(fields["layers"])]
    parts = [["embedding", "head"]] if fields.get("tied") is True else [["head"]]
    if "vocab" in fields and len(parts[0]) == 1:
        parts.append(["embedding"])
    groups = [*parts, *([layer] for layer in (layers[0], layers[-1], layers[len(layers) // 2]))]
    few = st.lists(st.sampled_from(groups), max_size=4).map(lambda chosen: [part for group in chosen for part in group])
    return few.filter(lambda frozen: len(set(frozen)) < len(layers) + sum(map(len, parts)))


@st.composite
def _steps(draw: st.DrawFn, fields: dict[str, Any]) -> dict[str, Any]:
    recurrent = fields["layers"] * _width({**fields, "projection": ABSENT})
    given = [fields.get(name, ABSENT) for name in ("features", "vocab", "embedding", "outputs")]
    widest = max(64, recurrent, *(value for value in given if value is not ABSENT))
    batch = min(fields["batch"], MAX_STEP_ELEMENTS // widest)
    longest = min(MAX_SEQ, MAX_STEP_ELEMENTS // (batch * widest))
    seq = draw(up_to(longest))
    lengths = draw(or_absent(st.dictionaries(up_to(seq), up_to(1 << 40), min_size=1, max_size=5)))
    return {"batch": batch, "seq": seq if lengths is ABSENT else draw(or_absent(st.just(seq))), "lengths": lengths}


def specs() -> st.SearchStrategy[Spec]:
    """Any valid spec."""
    return spec_fields().map(lambda fields: Spec(**fields))


def candidates() -> st.SearchStrategy[Candidate]:
    """Any valid candidate, for whatever spec."""
    values = {name: knob_values(name) for name in KNOBS}
    pieces = st.sampled_from(["segments", "window"])  # a candidate has one of the two
    microbatch = values.pop("microbatch")
    knobs = st.fixed_dictionaries({"microbatch": microbatch}, optional=values)
    return st.builds(
        lambda drawn, left_out: Candidate(**{name: value for name, value in drawn.items() if name != left_out}),
        knobs,
        pieces,
    )


def knob_values(name: str) -> st.SearchStrategy[Any]:
    """Any value that a knob takes, by its row of the table."""
    field = KNOBS[name].field
    values: st.SearchStrategy[Any] = st.booleans()
    if field.choices:
        values = st.sampled_from(field.choices)
    elif field.bounds is not None:
        values = st.integers(field.bounds.low, min(field.bounds.high, 64)) | st.integers(*field.bounds)
    return st.none() | values if field.optional else values


class _Faulty:
    """A value whose repr and comparison fail."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]


UNPRINTABLE = {
    "5,000 digits": 10**5000,
    "minus 5,000 digits": -(10**5000),
    "5,000 digits in a list": [10**5000],
    "5,000 digits in a dict": {10**5000: 10**5000},
    "a faulty class": _Faulty(),
    "an array": np.ones(3),
}
"""Values that Hypothesis cannot show, so it cannot draw them."""


def garbage() -> st.SearchStrategy[Any]:
    """Anything that Python, TOML or JSON can put into a field."""
    scalars = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.sampled_from([0, -1, 10**12, 10**30, -(10**30)])
        | st.floats()
        | st.text(st.characters(exclude_categories=()), max_size=80)
        | st.sampled_from(["lstm", "tanh", "adam", "mse", "layer0", "head", "fp32", "a" * 10**5])
        | st.binary(max_size=8)
        | st.dates()
        | st.complex_numbers()
        | st.sampled_from([object, ABSENT, range(3), ..., {1}])
    )
    keys = st.integers() | st.text(max_size=5) | st.sampled_from([None, (1, 2)])
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )


def garbage_for(fields: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    """A few of the fields, each set to anything."""
    return st.dictionaries(st.sampled_from(fields), garbage(), max_size=4)


def attempt(make: Callable[..., T], **fields: Any) -> T | MisuseError:
    """What comes of the fields; any exception but misuse passes through and fails the test."""
    try:
        return make(**fields)
    except MisuseError as error:
        return error


def has_three_beats(error: object) -> bool:
    """The rule, what was given, what to do: all there, and short enough to read. The rule may say what was given."""
    if isinstance(error, MisuseError) and error.rule.startswith("Unknown "):
        return error.got == "" and str(error) == f"{error.rule}. {error.advice}" and _is_short(error)
    return (
        isinstance(error, MisuseError)
        and all(beat.strip() for beat in (error.rule, error.got, error.advice))
        and str(error) == f"{error.rule}, but {error.got}. {error.advice}"
        and _is_short(error)
    )


def _is_short(error: MisuseError) -> bool:
    return (
        bool(error.advice.strip()) and error.advice[0].isupper() and error.advice[-1] in ".?" and len(str(error)) < 1000
    )
