"""Spec: what the user wants trained. oomguard never changes it.

A spec comes from flags, from a TOML file or a preset (presets.py), or from Python (`Spec(...)`), and goes through JSON
and back unchanged.
"""

from typing import Any, Literal, get_args

import msgspec

from oomguard.checks import check_switch, check_whole, flag, nearest, shown
from oomguard.errors import MisuseError

Cell = Literal["rnn", "lstm", "gru"]
Nonlinearity = Literal["tanh", "relu"]
Head = Literal["per-step", "last-step"]
Loss = Literal["cross-entropy", "mse"]
Optimizer = Literal["sgd", "sgd-momentum", "adam", "adamw", "rmsprop", "adagrad", "adafactor", "adam8bit"]

SPARSE_OPTIMIZERS = ("sgd", "sgd-momentum", "adagrad")
"""Those of PyTorch's optimizers among ours that take sparse gradients."""
MAX_SEQ = 10**9
"""Longest sequence: a billion steps. Beyond it one border state per segment no longer fits any machine."""
MAX_STEP_ELEMENTS = 1 << 45
"""Elements of the widest tensor of one step: keeps every byte count far inside an int64."""

_BOUNDS = {
    "seq": (1, MAX_SEQ),
    "batch": (1, 1 << 20),
    "features": (1, 1 << 20),
    "vocab": (2, 1 << 30),
    "embedding": (1, 1 << 16),
    "hidden": (1, 1 << 16),
    "layers": (1, 1024),
    "projection": (1, 1 << 16),
    "outputs": (1, 1 << 30),
}
_REQUIRED = ("hidden", "layers", "batch")
_CHOICES = {"cell": Cell, "nonlinearity": Nonlinearity, "head": Head, "loss": Loss, "optimizer": Optimizer}
_SWITCHES = ("bidirectional", "layer_norm", "tied", "sparse_embedding", "packed", "batch_first")


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be trained. Checked at birth; what is left out gets a sensible default.

    >>> spec = Spec(cell="lstm", seq=10_000)
    >>> spec.features, spec.hidden, spec.outputs, spec.loss
    (64, 256, 1, 'mse')
    """

    cell: Cell
    """The recurrent cell."""
    seq: int | None = None
    """Time steps of the longest sequence (default: the longest of `lengths`)."""
    nonlinearity: Nonlinearity = "tanh"
    """Of the `rnn` cell."""
    features: int | None = None
    """Numbers per time step of the input (default 64, unless there is a vocabulary)."""
    vocab: int | None = None
    """Tokens instead of features: size of the vocabulary."""
    embedding: int | None = None
    """Width of a token's embedding (default: the hidden size)."""
    hidden: int = 256
    """Hidden size of one direction of a layer."""
    layers: int = 2
    """Recurrent layers."""
    bidirectional: bool = False
    """Two directions in every layer."""
    projection: int | None = None
    """LSTM only: size of the projected hidden state (`proj_size` in PyTorch)."""
    dropout: float = 0.0
    """Dropout between the layers."""
    layer_norm: bool = False
    """Layer normalisation after every layer."""
    head: Head = "per-step"
    """A prediction for every step, or one after the last."""
    outputs: int | None = None
    """Numbers (or classes) the head gives (default: the vocabulary, or 1)."""
    loss: Loss | None = None
    """Default: cross-entropy with a vocabulary, otherwise mean squared error."""
    optimizer: Optimizer = "adam"
    """The optimizer, as PyTorch has it; `adam8bit` keeps its state in 8 bits."""
    frozen: tuple[str, ...] = ()
    """Parts that are not trained: `embedding`, `layer0`, `layer1`, ..., `head`."""
    tied: bool = False
    """The head shares the embedding's weights."""
    sparse_embedding: bool = False
    """Sparse gradient of the embedding (`nn.Embedding(sparse=True)`)."""
    packed: bool = False
    """Batches are packed sequences: padding is not computed."""
    batch_first: bool = False
    """Tensors come as batch x time (as many models have it), which costs copies; time x batch does not."""
    lengths: dict[int, int] | None = None
    """Histogram of sequence lengths in the data: length -> how many."""
    batch: int = 32
    """Sequences per optimizer step."""

    def __post_init__(self) -> None:
        _check_types(self)
        for name, (low, high) in _BOUNDS.items():
            check_whole(name, getattr(self, name), low, high, optional=name not in _REQUIRED)
        _check_lengths(self)
        # one form for one meaning, so that a spec equals what comes back from its JSON
        msgspec.structs.force_setattr(self, "dropout", float(self.dropout))
        msgspec.structs.force_setattr(self, "frozen", tuple(self.frozen))
        for name, value in _defaults(self).items():
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, value)
        _check_together(self)

    @property
    def steps(self) -> int:
        """Time steps of the longest sequence, as a plain int."""
        assert self.seq is not None  # set at birth
        return self.seq

    @property
    def directions(self) -> int:
        """1, or 2 when bidirectional."""
        return 2 if self.bidirectional else 1

    @property
    def inputs(self) -> int:
        """Width of what the first layer reads."""
        width = self.features if self.vocab is None else self.embedding
        assert width is not None  # set at birth
        return width

    @property
    def classes(self) -> int:
        """Width of what the head gives, as a plain int."""
        assert self.outputs is not None  # set at birth
        return self.outputs

    @property
    def width(self) -> int:
        """Width of what one layer gives: all its directions."""
        return self.directions * (self.projection or self.hidden)

    @property
    def packs(self) -> bool:
        """Whether kernels read packed sequences: if asked, and wherever the second direction would read padding."""
        return self.packed or (self.bidirectional and self.lengths is not None)

    @property
    def one_call(self) -> bool:
        """Whether the layers run as one call of the kernel, which cuDNN runs fastest.

        Not if something happens between them: dropout (outside the kernel, so that recomputation replays it), layer
        normalisation, or only some of them being trained.
        """
        return self.layers == 1 or not (self.dropout or self.layer_norm or self.frozen)


def _defaults(spec: Spec) -> dict[str, Any]:
    return {
        "seq": max(spec.lengths) if spec.lengths else None,
        "features": 64 if spec.vocab is None else None,
        "embedding": None if spec.vocab is None else spec.hidden,
        "outputs": spec.vocab or 1,
        "loss": "mse" if spec.vocab is None else "cross-entropy",
    }


def _check_types(spec: Spec) -> None:
    for name, choices in _CHOICES.items():
        value = getattr(spec, name)
        if not (isinstance(value, str) and value in get_args(choices)) and not (name == "loss" and value is None):
            raise MisuseError(
                rule=f"{flag(name)} must be one of {', '.join(get_args(choices))}",
                got=f"got {shown(value)}",
                advice=nearest(value, list(get_args(choices))),
            )
    for name in _SWITCHES:
        check_switch(name, getattr(spec, name))
    if not isinstance(spec.frozen, tuple | list) or not all(isinstance(part, str) for part in spec.frozen):
        raise MisuseError(
            rule="--frozen must be a list of the names of parts",
            got=f"got {shown(spec.frozen)}",
            advice='Write it as ["embedding", "layer0"].',
        )
    _check_dropout(spec.dropout)


def _check_dropout(dropout: object) -> None:
    if not isinstance(dropout, int | float) or isinstance(dropout, bool) or not 0 <= dropout < 1:
        raise MisuseError(
            rule="--dropout must be a probability from 0 up to, not including, 1",
            got=f"got {shown(dropout)}",
            advice="Give --dropout a number such as 0.2.",
        )


def _check_lengths(spec: Spec) -> None:
    if spec.lengths is None:
        if spec.seq is None:
            raise MisuseError(
                rule="A spec needs the length of its sequences",
                got="neither --seq nor --lengths was given",
                advice="Give --seq 10000, or a histogram of lengths.",
            )
        return
    if not isinstance(spec.lengths, dict) or not spec.lengths:
        raise MisuseError(
            rule="--lengths must be a histogram, length -> how many",
            got=f"got {shown(spec.lengths)}",
            advice="Write it as 100:5000,2000:40.",
        )
    for length, count in spec.lengths.items():
        check_whole("a length in --lengths", length, 1, MAX_SEQ, optional=False)
        check_whole("a count in --lengths", count, 1, 1 << 40, optional=False)
    if spec.seq is not None and spec.seq < max(spec.lengths):
        raise MisuseError(
            rule="--seq must not be shorter than the longest of --lengths",
            got=f"got {shown(spec.seq)} and {shown(max(spec.lengths))}",
            advice="Leave --seq out, or cut the data.",
        )


Rule = tuple[bool, str, str, str]
"""Whether it is broken, the rule, what was got, what to do."""


def _check_together(spec: Spec) -> None:
    """The rules that tie several fields together."""
    for broken, rule, got, advice in (*_data_rules(spec), *_cell_rules(spec), *_frozen_rules(spec)):
        if broken:
            raise MisuseError(rule=rule, got=got, advice=advice)


def _data_rules(spec: Spec) -> list[Rule]:
    """Inputs, outputs and sizes."""
    return [
        (
            spec.vocab is not None and spec.features is not None,
            "The input is either features or a vocabulary",
            f"got --features {spec.features} and --vocab {spec.vocab}",
            "Leave one of the two out.",
        ),
        (
            spec.vocab is None and spec.embedding is not None,
            "--embedding needs a vocabulary",
            f"got --embedding {spec.embedding} without --vocab",
            "Add --vocab, or use --features.",
        ),
        (
            spec.vocab is None and spec.sparse_embedding,
            "--sparse-embedding needs a vocabulary",
            "there is no --vocab",
            "Add --vocab, or leave --sparse-embedding out.",
        ),
        (
            spec.sparse_embedding and spec.tied,
            "Tied weights have a dense gradient",
            "got --tied and --sparse-embedding",
            "Leave one of the two out.",
        ),
        (
            spec.sparse_embedding and spec.optimizer not in SPARSE_OPTIMIZERS,
            f"A sparse gradient needs one of the optimizers {', '.join(SPARSE_OPTIMIZERS)}",
            f"got --optimizer {spec.optimizer}",
            "Change --optimizer, or leave --sparse-embedding out.",
        ),
        (
            spec.tied and (spec.vocab is None or spec.outputs != spec.vocab or spec.embedding != spec.width),
            "--tied needs a vocabulary, as many outputs, and an embedding as wide as the last layer's output",
            f"got vocab {spec.vocab}, outputs {spec.outputs}, embedding {spec.embedding}, output {spec.width}",
            "Set --embedding to that width, or leave --tied out.",
        ),
        (
            spec.loss == "cross-entropy" and spec.outputs == 1,
            "Cross-entropy needs at least two classes",
            "got --outputs 1",
            "Raise --outputs, or take --loss mse.",
        ),
        (
            _widest(spec) > MAX_STEP_ELEMENTS,
            f"The widest tensor of a step must have at most {MAX_STEP_ELEMENTS:,} elements",
            f"seq x batch x width is {_widest(spec):,}",
            "Lower --seq, --batch or the widths.",
        ),
    ]


def _cell_rules(spec: Spec) -> list[Rule]:
    """What only some cells have."""
    return [
        (
            spec.projection is not None and spec.cell != "lstm",
            "--projection is for --model lstm only",
            f"got --model {spec.cell}",
            "Leave --projection out, or take --model lstm.",
        ),
        (
            spec.projection is not None and spec.projection >= spec.hidden,
            "--projection must be smaller than --hidden",
            f"got {spec.projection} and {spec.hidden}",
            "Lower --projection, or leave it out.",
        ),
        (
            spec.nonlinearity != "tanh" and spec.cell != "rnn",
            "--nonlinearity is for --model rnn only",
            f"got --model {spec.cell}",
            "Leave --nonlinearity out, or take --model rnn.",
        ),
    ]


def _frozen_rules(spec: Spec) -> list[Rule]:
    """What may be frozen."""
    trainable_parts = [*(["embedding"] if spec.vocab else []), *(f"layer{i}" for i in range(spec.layers)), "head"]
    unknown = [part for part in spec.frozen if part not in trainable_parts]
    return [
        (
            bool(unknown),
            f"--frozen must name parts of the model ({trainable_parts[0]} to {trainable_parts[-1]})",
            f"got {shown(unknown[0])}" if unknown else "",
            nearest(unknown[0], [*trainable_parts[:8], "head"]) if unknown else "",
        ),
        (
            set(spec.frozen) >= set(trainable_parts),
            "At least one part must be trained",
            "all of them are in --frozen",
            "Leave one part out of --frozen.",
        ),
        (
            spec.tied and ("embedding" in spec.frozen) != ("head" in spec.frozen),
            "Tied weights are frozen together",
            f"got --frozen {','.join(spec.frozen)}",
            "Name both embedding and head, or neither.",
        ),
    ]


def _widest(spec: Spec) -> int:
    return spec.steps * spec.batch * _width(spec)


def _width(spec: Spec) -> int:
    return max(spec.inputs, spec.layers * spec.directions * spec.hidden, spec.classes)


def longest_seq(spec: Spec) -> int:
    """Time steps of the longest sequences that such a spec may have.

    >>> longest_seq(Spec(cell="gru", seq=1)), longest_seq(Spec(cell="gru", seq=1, hidden=1 << 16, batch=1 << 10))
    (1000000000, 262144)
    """
    return min(MAX_SEQ, MAX_STEP_ELEMENTS // (spec.batch * _width(spec)))
