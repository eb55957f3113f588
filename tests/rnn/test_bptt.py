"""Every exact way through a sequence gives the gradient of the plain pass, and every lossy way says what it loses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from oomguard._rnn import Microbatch, backward, count_targets
from oomguard._rnn.model import Recurrent, build, trainable
from oomguard._spec.candidate import make_candidate
from oomguard._spec.spec import Spec

STEPS, ROWS = 23, 4
CELLS: dict[str, dict[str, Any]] = {
    "rnn": {"cell": "rnn"},
    "relu": {"cell": "rnn", "nonlinearity": "relu"},
    "gru": {"cell": "gru"},
    "lstm": {"cell": "lstm"},
    "projected": {"cell": "lstm", "projection": 3},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "one layer": {"layers": 1},
    "deep": {"layers": 3},
    "dropout": {"dropout": 0.3},
    "normalised": {"layer_norm": True},
    "last step": {"head": "last-step"},
    "batch first": {"batch_first": True},
    "tokens": {"vocab": 11, "features": None},
    "frozen": {"frozen": ("layer0",)},
    "head alone": {"frozen": ("layer0", "layer1")},
    "head alone at the end": {"frozen": ("layer0", "layer1"), "head": "last-step"},
    "tied": {"vocab": 11, "features": None, "tied": True, "projection": None},
    "sparse": {"vocab": 11, "features": None, "sparse_embedding": True, "optimizer": "sgd"},
    "all at once": {"dropout": 0.3, "layer_norm": True, "head": "last-step"},
}
WAYS: dict[str, dict[str, Any]] = {
    "2 segments": {"segments": 2},
    "5 segments": {"segments": 5},
    "a segment for each step": {"segments": STEPS},
    "2 levels": {"segments": 12, "levels": 2},
    "3 levels": {"segments": STEPS, "levels": 3},
    "borders on the host": {"segments": 5, "keep": "host"},
    "chunks": {"segments": 5, "recompute": False},
}
BOTH_WAYS = ["2 segments", "5 segments", "a segment for each step", "borders on the host"]
LENGTHS = {"whole": None, "padded": (STEPS, 14, 1, 8)}
Example = tuple[Recurrent, Microbatch]


def example(cell: str, variant: str, lengths: tuple[int, ...] | None = None, **fields: Any) -> Example:
    """A model and a microbatch in double precision."""
    base: dict[str, Any] = {"seq": STEPS, "features": 5, "hidden": 6, "layers": 2, "batch": ROWS}
    asked = base | CELLS[cell] | VARIANTS[variant] | fields
    if asked.get("tied"):
        asked["embedding"] = asked["hidden"] * (2 if asked.get("bidirectional") else 1)
    spec = Spec(**asked)
    torch.manual_seed(0)
    shape = (ROWS, STEPS) if spec.batch_first else (STEPS, ROWS)
    inputs = torch.randn(*shape, spec.inputs).double() if spec.vocab is None else torch.randint(spec.vocab, shape)
    wanted = shape if spec.head == "per-step" else (ROWS,)
    if spec.loss == "mse":
        targets = torch.randn(*wanted, spec.classes).double()
    else:
        targets = torch.randint(spec.classes, wanted)
    return build(spec).double(), Microbatch(inputs, targets, None if lengths is None else torch.tensor(lengths))


def gradients(model: Recurrent, batch: Microbatch, **knobs: Any) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = backward(model, batch, make_candidate(model.spec, **knobs), scale=0.1)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable(model)]
    found = [gradient.to_dense() if gradient.is_sparse else gradient.clone() for gradient in grads]
    return loss, found


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(ours, theirs, strict=True))


def unequal(example_: Example, ways: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The ways whose loss or gradient is not that of the plain pass, and how far they are off."""
    plain_loss, plain = gradients(*example_)
    assert any(float(gradient.norm()) > 0 for gradient in plain)
    found: dict[str, float] = {}
    for way, knobs in ways.items():
        loss, ours = gradients(*example_, **knobs)
        error = max(furthest(ours, plain), 100 * abs(float(loss / plain_loss) - 1))
        found |= {way: error} if error > 1e-10 else {}
    return found


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cell", CELLS)
def test_every_exact_way_gives_the_gradient_of_the_plain_pass(cell: str, variant: str, lengths: str) -> None:
    assert not unequal(example(cell, variant, LENGTHS[lengths]), WAYS)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm", "projected"])
def test_segments_give_the_gradient_of_a_bidirectional_model(cell: str, variant: str, lengths: str) -> None:
    example_ = example(cell, variant, LENGTHS[lengths], bidirectional=True)
    assert not unequal(example_, {way: WAYS[way] for way in BOTH_WAYS})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cell", CELLS)
def test_packed_sequences_give_the_gradient_of_padded_ones(cell: str, way: str) -> None:
    padded = gradients(*example(cell, "as it comes", LENGTHS["padded"]))[1]
    packed = gradients(*example(cell, "as it comes", LENGTHS["padded"], packed=True), **WAYS[way])[1]
    assert furthest(packed, padded) < 1e-10


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("head", ["per-step", "last-step"])
@pytest.mark.parametrize("cell", CELLS)
def test_padding_weighs_nothing(cell: str, head: str, bidirectional: bool) -> None:
    """Each sequence alone, without padding, gives the same gradients in sum."""
    model, batch = example(cell, "as it comes", LENGTHS["padded"], head=head, bidirectional=bidirectional)
    padded = gradients(model, batch)[1]
    assert batch.lengths is not None
    alone = []
    for row, length in enumerate(batch.lengths.tolist()):
        inputs = batch.inputs[:length, row : row + 1]
        targets = batch.targets[:length, row : row + 1] if head == "per-step" else batch.targets[row : row + 1]
        alone.append(gradients(model, Microbatch(inputs, targets))[1])
    assert furthest(padded, [torch.stack(parts).sum(0) for parts in zip(*alone, strict=True)]) < 1e-10


@pytest.mark.parametrize("fields", [{}, {"bidirectional": True}, {"packed": True}, {"batch_first": True}], ids=str)
def test_what_stands_in_the_padding_does_not_matter(fields: dict[str, Any]) -> None:
    model, batch = example("lstm", "as it comes", LENGTHS["padded"], **fields)
    clean = gradients(model, batch)[1]
    assert batch.lengths is not None
    for row, length in enumerate(batch.lengths.tolist()):
        for tensor in (batch.inputs, batch.targets):
            (tensor[row, length:] if model.spec.batch_first else tensor[length:, row]).fill_(float("nan"))
    assert furthest(gradients(model, batch)[1], clean) < 1e-10
    assert furthest(gradients(model, batch, segments=5)[1], clean) < 1e-10


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "chunks"])
def test_recomputation_drops_out_what_the_first_pass_dropped_out(cell: str, way: str) -> None:
    """Chunks draw the same numbers in the same order and recompute nothing: autograd has seen all of it at once."""
    example_ = example(cell, "dropout", layers=4, batch_first=cell == "gru")
    segments = {name: value for name, value in WAYS[way].items() if name == "segments"}
    kept = gradients(*example_, **segments, recompute=False)[1]
    assert furthest(gradients(*example_, **WAYS[way])[1], kept) < 1e-10


@pytest.mark.parametrize("way", WAYS)
def test_every_way_leaves_the_random_numbers_where_a_plain_pass_leaves_them(way: str) -> None:
    """Otherwise the next microbatch would drop out what this one has already dropped out."""
    example_ = example("gru", "dropout")
    gradients(*example_)
    plain = torch.get_rng_state()
    gradients(*example_, **WAYS[way])
    assert torch.equal(torch.get_rng_state(), plain)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_in_single_precision_the_gradients_agree_to_rounding(
    cell: str, variant: str, bidirectional: bool, lengths: str
) -> None:
    model, batch = example(cell, variant, LENGTHS[lengths], bidirectional=bidirectional)
    single = [part.float() if part.is_floating_point() else part for part in (batch.inputs, batch.targets)]
    example_ = model.float(), Microbatch(single[0], single[1], batch.lengths)
    plain = gradients(*example_)[1]
    for way in ["5 segments"] if bidirectional else ["5 segments", "3 levels", "chunks"]:
        assert furthest(gradients(*example_, **WAYS[way])[1], plain) < 1e-5


def test_a_failed_pass_puts_the_random_numbers_back() -> None:
    model, batch = example("gru", "dropout")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises((RuntimeError, IndexError)):
        backward(model, batch._replace(targets=batch.targets[:5]), make_candidate(model.spec, segments=5))
    assert torch.equal(torch.get_rng_state(), before)


def test_targets_that_are_to_be_ignored_count_for_nothing() -> None:
    model, batch = example("gru", "tokens")
    batch.targets[5:] = -100
    assert count_targets(model.spec, batch) == 5 * ROWS
    short = Microbatch(batch.inputs[:5], batch.targets[:5])
    assert furthest(gradients(model, batch, segments=3)[1], gradients(model, short)[1]) < 1e-10


def test_a_window_as_long_as_the_sequence_cuts_nothing() -> None:
    assert not unequal(example("lstm", "as it comes"), {"window": {"window": STEPS}})


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("head", ["per-step", "last-step"])
def test_a_shorter_window_changes_the_gradient_but_not_the_loss(head: str, lengths: str) -> None:
    example_ = example("gru", "as it comes", LENGTHS[lengths], head=head)
    loss, windowed = gradients(*example_, window=5)
    plain_loss, plain = gradients(*example_)
    assert furthest(windowed, plain) > 1e-3
    assert float(loss) == pytest.approx(float(plain_loss), rel=1e-12)


@pytest.mark.parametrize("knobs", [{"window": 5}, {"segments": 2, "recompute": False}])
def test_what_two_directions_do_not_allow_is_refused(knobs: dict[str, Any]) -> None:
    spec = Spec(cell="gru", seq=10, features=3, hidden=4, bidirectional=True, batch=2)
    with pytest.raises(ValueError, match="bidirectional"):
        make_candidate(spec, **knobs)


def test_no_piece_ever_gives_the_logits_of_the_whole_sequence() -> None:
    model, batch = example("gru", "tokens")
    seen: list[int] = []
    model.head.register_forward_hook(lambda *args: seen.append(args[2].shape[0]))
    for way in ("5 segments", "chunks"):
        gradients(model, batch, **WAYS[way])
    assert max(seen) == -(-STEPS // 5)


@pytest.mark.parametrize(
    ("knobs", "lengths"),
    [
        ({"segments": 3}, [2, 4, 4, 4, 2]),  # forward up to the last, then each with its graph, from the last on
        ({"segments": 3, "recompute": False}, [2, 4, 4]),
        ({"window": 4}, [4, 4, 2]),
    ],
    ids=["segments", "chunks", "window"],
)
def test_of_pieces_that_cannot_be_equal_the_shorter_one_is_differentiated_last(
    knobs: dict[str, Any], lengths: list[int]
) -> None:
    """Otherwise it leaves a card's allocator with blocks too small for the others. Windows begin at the start."""
    spec = Spec(cell="gru", seq=10, features=3, hidden=4, batch=2)
    model, seen = build(spec), list[int]()
    model.calls[0].register_forward_hook(lambda call, given, found: seen.append(given[0].shape[0]))
    backward(model, Microbatch(torch.randn(10, 2, 3), torch.randn(10, 2, 1)), make_candidate(spec, **knobs))
    assert seen == lengths
