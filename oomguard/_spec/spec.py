"""Spec: the model to train, its data shape, optimizer and batch. oomguard never changes it.

A spec comes from flags, from a TOML file or a preset (read.py), or from Python (`Spec(...)`), and survives a round trip
through JSON unchanged.
"""

from typing import Annotated, Literal

import msgspec

from oomguard._core.errors import Bounds, MisuseError, check_fields, check_whole, conflict, flag, nearest, shown, wrong

Cell = Literal["rnn", "lstm", "gru"]
Nonlinearity = Literal["tanh", "relu"]
Head = Literal["per-step", "last-step"]
Loss = Literal["cross-entropy", "mse"]
Optimizer = Literal["sgd", "sgd-momentum", "adam", "adamw", "rmsprop", "adagrad", "adafactor", "adam8bit"]

SPARSE_OPTIMIZERS = ("sgd", "sgd-momentum", "adagrad")  # optimizers that take sparse gradients in PyTorch
MAX_SEQ = 10**9
"""Longest sequence: a billion steps. Beyond it, one border state per segment no longer fits any machine."""
MAX_BATCH = 1 << 20  # largest batch, in sequences
MAX_STEP_ELEMENTS = 1 << 45
"""Most elements of the widest tensor of an optimizer step: every byte count stays well within an int64."""
_WIDTH = Bounds(1, 1 << 16)


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model to train. Wrong values raise MisuseError; fields that are left out get a default.

    >>> spec = Spec(cell="lstm", seq=10_000)
    >>> spec.features, spec.hidden, spec.outputs, spec.loss
    (64, 256, 1, 'mse')
    """

    cell: Cell
    """Recurrent cell."""
    seq: Annotated[int | None, Bounds(1, MAX_SEQ)] = None
    """Time steps of the longest sequence (default: the longest of `lengths`)."""
    nonlinearity: Nonlinearity = "tanh"
    """Nonlinearity of the rnn cell."""
    features: Annotated[int | None, Bounds(1, 1 << 20)] = None
    """Input features per time step (default: 64 without `vocab`)."""
    vocab: Annotated[int | None, Bounds(2, 1 << 30)] = None
    """Vocabulary size, for an input of tokens instead of features."""
    embedding: Annotated[int | None, _WIDTH] = None
    """Width of the token embedding (default: as `hidden`)."""
    hidden: Annotated[int, _WIDTH] = 256
    """Hidden size of one direction of a layer."""
    layers: Annotated[int, Bounds(1, 1024)] = 2
    """Recurrent layers."""
    bidirectional: bool = False
    """Run every layer in both directions."""
    projection: Annotated[int | None, _WIDTH] = None
    """Size of the projected hidden state (lstm only). It is `proj_size` in PyTorch."""
    dropout: float = 0.0
    """Dropout probability between layers."""
    layer_norm: bool = False
    """Normalise the output of every layer."""
    head: Head = "per-step"
    """Predict at every time step, or once after the last."""
    outputs: Annotated[int | None, Bounds(1, 1 << 30)] = None
    """Numbers or classes per prediction (default: as `vocab`, else 1)."""
    loss: Loss | None = None
    """Loss (default: cross-entropy with `vocab`, otherwise mse)."""
    optimizer: Optimizer = "adam"
    """Optimizer, as in PyTorch. `adam8bit` keeps its state in 8 bits."""
    frozen: tuple[str, ...] = ()
    """Parts that are not trained: embedding, layer0, layer1, ..., head."""
    tied: bool = False
    """Share the weights of the embedding and the head."""
    sparse_embedding: bool = False
    """Use a sparse gradient for the embedding. It is `nn.Embedding(sparse=True)` in PyTorch."""
    packed: bool = False
    """Pack sequences, so that padding is not computed."""
    batch_first: bool = False
    """Pass tensors as batch x time instead of time x batch, which costs copies."""
    lengths: dict[int, int] | None = None
    """Histogram of the sequence lengths in the data: the number of sequences of each length."""
    batch: Annotated[int, Bounds(1, MAX_BATCH)] = 32
    """Sequences per optimizer step."""

    def __post_init__(self) -> None:
        check_fields(self)
        _check_values(self)
        # one form for one meaning, so that a spec equals its copy from JSON
        msgspec.structs.force_setattr(self, "dropout", float(self.dropout))
        msgspec.structs.force_setattr(self, "frozen", tuple(self.frozen))
        defaults = {
            "seq": max(self.lengths) if self.lengths else None,
            "features": 64 if self.vocab is None else None,
            "embedding": None if self.vocab is None else self.hidden,
            "outputs": self.vocab or 1,
            "loss": "mse" if self.vocab is None else "cross-entropy",
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, value)
        _check_data(self)
        _check_cell(self)
        _check_frozen(self)

    @property
    def steps(self) -> int:
        """Time steps of the longest sequence; never None."""
        assert self.seq is not None
        return self.seq

    @property
    def directions(self) -> int:
        """Directions of a layer: 2 if the model is bidirectional, else 1."""
        return 2 if self.bidirectional else 1

    @property
    def inputs(self) -> int:
        """Width of the first layer's input."""
        width = self.features if self.vocab is None else self.embedding
        assert width is not None
        return width

    @property
    def classes(self) -> int:
        """Width of the head's output; never None."""
        assert self.outputs is not None
        return self.outputs

    @property
    def width(self) -> int:
        """Width of a layer's output, both directions included."""
        return self.directions * (self.projection or self.hidden)

    @property
    def packs(self) -> bool:
        """Whether kernels read packed sequences: if asked for, or if a second direction would read padding."""
        return self.packed or (self.bidirectional and self.lengths is not None)

    @property
    def one_call(self) -> bool:
        """Whether all layers run in one call of the kernel, which is fastest with cuDNN.

        They do not if something happens between them: dropout (it stays outside the kernel, so that recomputation can
        repeat it), layer normalisation, or frozen layers.
        """
        return self.layers == 1 or not (self.dropout or self.layer_norm or self.frozen)


def longest_seq(spec: Spec) -> int:
    """The largest `seq` that the other fields of the spec permit."""
    return min(MAX_SEQ, MAX_STEP_ELEMENTS // (spec.batch * _width(spec)))


def _width(spec: Spec) -> int:
    return max(spec.inputs, spec.layers * spec.directions * spec.hidden, spec.classes)


def _check_values(spec: Spec) -> None:
    """Check the fields that are neither whole numbers, switches nor choices."""
    dropout: object = spec.dropout
    if not isinstance(dropout, int | float) or isinstance(dropout, bool) or not 0 <= dropout < 1:
        form = "a probability from 0 up to, not including, 1"
        raise wrong("dropout", form, dropout, "Give --dropout a number such as 0.2.")
    if not isinstance(spec.frozen, tuple | list) or not all(isinstance(part, str) for part in spec.frozen):
        advice = 'Write it as ["embedding", "layer0"].'
        raise wrong("frozen", "a list of the names of parts", spec.frozen, advice)
    if spec.lengths is not None and not (isinstance(spec.lengths, dict) and spec.lengths):
        form = "a histogram: the number of sequences of each length"
        raise wrong("lengths", form, spec.lengths, "Write it as 100:5000,2000:40.")
    for length, count in (spec.lengths or {}).items():
        check_whole("a length in --lengths", length, 1, MAX_SEQ, optional=False)
        check_whole("a count in --lengths", count, 1, 1 << 40, optional=False)
    if spec.seq is None and spec.lengths is None:
        rule, got = "A spec needs the length of its sequences", "neither --seq nor --lengths was given"
        raise MisuseError(rule=rule, got=got, advice="Give --seq 10000, or a histogram of lengths.")
    if spec.seq is not None and spec.lengths and spec.seq < max(spec.lengths):
        rule = "--seq must not be shorter than the longest of --lengths"
        got = f"got {shown(spec.seq)} and {shown(max(spec.lengths))}"
        raise MisuseError(rule=rule, got=got, advice="Leave --seq out, or cut the data.")


def _check_data(spec: Spec) -> None:
    """Check the inputs, the outputs and the sizes."""
    if spec.vocab is not None and spec.features is not None:
        rule = "The input is either features or a vocabulary"
        raise conflict(rule, f"--features {spec.features}", f"--vocab {spec.vocab}")
    if spec.sparse_embedding and spec.tied:
        raise conflict("Tied weights have a dense gradient", "--tied", "--sparse-embedding")
    needs_vocab = [flag(name) for name in ("embedding", "sparse_embedding", "tied") if getattr(spec, name)]
    if spec.vocab is None and needs_vocab:
        advice = f"Add --vocab, or leave {' and '.join(needs_vocab)} out."
        raise MisuseError(rule=f"{needs_vocab[0]} needs a vocabulary", got="there is no --vocab", advice=advice)
    if spec.sparse_embedding and spec.optimizer not in SPARSE_OPTIMIZERS:
        rule = f"A sparse gradient needs one of the optimizers {', '.join(SPARSE_OPTIMIZERS)}"
        advice = "Change --optimizer, or leave --sparse-embedding out."
        raise MisuseError(rule=rule, got=f"got --optimizer {spec.optimizer}", advice=advice)
    if spec.tied and (spec.outputs != spec.vocab or spec.embedding != spec.width):
        rule = "--tied needs as many outputs as tokens, and an embedding as wide as the last layer's output"
        got = f"got vocab {spec.vocab}, outputs {spec.outputs}, embedding {spec.embedding}, output {spec.width}"
        raise MisuseError(rule=rule, got=got, advice="Set --embedding to that width, or leave --tied out.")
    if spec.loss == "cross-entropy" and spec.outputs == 1:
        rule, advice = "Cross-entropy needs at least two classes", "Raise --outputs, or use --loss mse."
        raise MisuseError(rule=rule, got="got --outputs 1", advice=advice)
    elements = spec.steps * spec.batch * _width(spec)
    if elements > MAX_STEP_ELEMENTS:
        rule = f"The widest tensor of a step must have at most {MAX_STEP_ELEMENTS:,} elements"
        got, advice = f"seq x batch x width is {elements:,}", "Lower --seq, --batch or the widths."
        raise MisuseError(rule=rule, got=got, advice=advice)


def _check_cell(spec: Spec) -> None:
    """Check the fields that only some cells have."""
    given = {"projection": spec.projection is not None, "nonlinearity": spec.nonlinearity != "tanh"}
    for name, cell in (("projection", "lstm"), ("nonlinearity", "rnn")):
        if given[name] and spec.cell != cell:
            rule, advice = f"--{name} is for --model {cell} only", f"Leave --{name} out, or use --model {cell}."
            raise MisuseError(rule=rule, got=f"got --model {spec.cell}", advice=advice)
    if spec.projection is not None and spec.projection >= spec.hidden:
        got, advice = f"got {spec.projection} and {spec.hidden}", "Lower --projection, or leave it out."
        raise MisuseError(rule="--projection must be smaller than --hidden", got=got, advice=advice)


def _check_frozen(spec: Spec) -> None:
    """Check the frozen parts."""
    parts = [*(["embedding"] if spec.vocab else []), *(f"layer{i}" for i in range(spec.layers)), "head"]
    for part in spec.frozen:
        if part not in parts:
            rule = f"--frozen must name parts of the model ({parts[0]} to {parts[-1]})"
            raise MisuseError(rule=rule, got=f"got {shown(part)}", advice=nearest(part, [*parts[:8], "head"]))
    if set(spec.frozen) >= set(parts):
        got, advice = "all of them are in --frozen", "Leave one part out of --frozen."
        raise MisuseError(rule="At least one part must be trained", got=got, advice=advice)
    if spec.tied and ("embedding" in spec.frozen) != ("head" in spec.frozen):
        got, advice = f"got --frozen {','.join(spec.frozen)}", "Name both embedding and head, or neither."
        raise MisuseError(rule="Tied weights are frozen together", got=got, advice=advice)
