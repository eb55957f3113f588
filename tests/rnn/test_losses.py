"""`chunked_loss` and `piecewise_loss` have the results and gradients of the plain loss."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import oomguard

Piece = tuple[Tensor, Tensor]
STEPS = 24


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(
        float((a - b).detach().norm() / b.detach().norm().clamp_min(1e-30)) for a, b in zip(ours, theirs, strict=True)
    )


def doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)


# ---- head and loss in chunks


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[tuple[int, ...]], Tensor]]] = {
    "cross-entropy": (nn.CrossEntropyLoss(reduction="sum"), lambda shape: torch.randint(7, shape)),
    "a function": (lambda a, b: functional.cross_entropy(a, b, reduction="sum"), lambda shape: torch.randint(7, shape)),
    "mse": (nn.MSELoss(reduction="sum"), lambda shape: torch.randn(*shape, 7).double()),
}


@pytest.mark.parametrize("chunks", [1, 3, 100])
@pytest.mark.parametrize("shape", [(13,), (5, 3), (2, 4, 3)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_a_chunked_loss_is_the_loss(name: str, shape: tuple[int, ...], chunks: int) -> None:
    loss, make = LOSSES[name]
    torch.manual_seed(0)
    head, hidden, targets = nn.Linear(4, 7).double(), doubles(*shape, 4), make(shape)
    plain = loss(head(hidden).flatten(0, -2), targets.flatten(0, len(shape) - 1))
    expected = torch.autograd.grad(plain, [hidden, *head.parameters()])
    total = oomguard.chunked_loss(head, loss, hidden, targets, chunks)
    assert total.item() == pytest.approx(plain.item(), rel=1e-12)
    assert furthest([*torch.autograd.grad(total, [hidden, *head.parameters()])], [*expected]) < 1e-10


def test_the_logits_never_exist_as_a_whole() -> None:
    head, seen = nn.Linear(4, 7), list[int]()
    head.register_forward_hook(lambda *args: seen.append(len(args[2])))
    hidden = torch.randn(100, 2, 4, requires_grad=True)
    loss = nn.CrossEntropyLoss(reduction="sum")
    torch.autograd.backward(oomguard.chunked_loss(head, loss, hidden, torch.zeros(100, 2).long(), 8))
    assert max(seen) == 25


def test_dropout_in_a_head_draws_the_same_numbers_twice() -> None:
    linear, hidden = nn.Linear(4, 7, bias=False).double(), doubles(60, 4)
    head = nn.Sequential(nn.Dropout(0.5), linear)
    total = oomguard.chunked_loss(head, lambda logits, _: logits.sum(), hidden, torch.zeros(60), 5)
    (found,) = torch.autograd.grad(total, hidden)
    kept = found != 0
    assert (hidden.detach() * found).sum().item() == pytest.approx(total.item(), rel=1e-10)
    assert 0 < int(kept.sum()) < kept.numel()


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="none")], ids=["mean", "none"])
def test_a_loss_that_is_no_sum_is_refused(loss: nn.Module) -> None:
    with pytest.raises(oomguard.MisuseError, match='reduction="sum"'):
        oomguard.chunked_loss(nn.Linear(4, 7), loss, torch.randn(9, 4), torch.zeros(9).long(), 3)


def test_targets_of_another_shape_are_refused() -> None:
    with pytest.raises(oomguard.MisuseError, match="one target for each step"):
        oomguard.chunked_loss(nn.Linear(4, 7), nn.MSELoss(reduction="sum"), torch.randn(9, 2, 4), torch.zeros(9), 3)


# ---- losses that add up over time


class Words(nn.Module):
    def __init__(self, cell: str, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(11, 5), getattr(nn, cell)(5, 6, num_layers=layers)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(6, 11))

    def forward(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        hidden, state = self.rnn(self.words(tokens), state)
        return self.head(hidden), state


def next_word(model: nn.Module, piece: Piece, state: Any) -> tuple[Tensor, Tensor, Any]:
    """The summed loss of the words that count, how many count, and the state."""
    logits, state = model(piece[0], state)
    total = functional.cross_entropy(logits.flatten(0, 1), piece[1].flatten(), reduction="sum", ignore_index=0)
    return total, (piece[1] != 0).sum(), state


def make(cell: str = "LSTM", layers: int = 1, dropout: float = 0.0) -> tuple[nn.Module, Piece]:
    torch.manual_seed(0)
    tokens = torch.randint(11, (STEPS + 1, 3))
    return Words(cell, layers, dropout).double(), (tokens[:-1], tokens[1:])


def pieces_of(batch: Piece, steps: int) -> list[Piece]:
    return [*zip(*(torch.split(part, steps) for part in batch), strict=True)]


def gradient(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(loss, [*model.parameters()])]


@given(cell=st.sampled_from(["LSTM", "GRU", "RNN"]), layers=st.integers(1, 2), steps=st.integers(1, STEPS + 1))
def test_a_piecewise_loss_is_the_loss_of_the_whole_batch(cell: str, layers: int, steps: int) -> None:
    model, batch = make(cell, layers)
    total, count, last = next_word(model, batch, None)
    ours, ours_count, ours_last = oomguard.piecewise_loss(next_word, model, pieces_of(batch, steps))
    assert int(ours_count) == int(count)
    assert furthest([ours, *_parts(ours_last)], [total, *_parts(last)]) < 1e-10
    assert furthest(gradient(model, ours / ours_count), gradient(model, total / count)) < 1e-10


def _parts(state: Any) -> list[Tensor]:
    return [*state] if isinstance(state, tuple) else [state]


def test_a_given_state_and_the_last_one_carry_gradients() -> None:
    model, batch = make()
    state = doubles(1, 3, 6), doubles(1, 3, 6)
    found = []
    for run in (
        next_word,
        lambda model, batch, state: oomguard.piecewise_loss(next_word, model, pieces_of(batch, 7), state),
    ):
        total, _, last = run(model, batch, state)
        loss = total + last[0].square().sum() + last[1].sin().sum()
        found.append([*torch.autograd.grad(loss, [*state, *model.parameters()])])
    assert furthest(*found) < 1e-10


@pytest.mark.parametrize("levels", [1, 2])
def test_pieces_with_dropout_are_recomputed_with_the_same_masks(levels: int) -> None:
    model, batch = make(dropout=0.5)
    torch.manual_seed(1)
    state, total = None, torch.zeros(())
    for piece in pieces_of(batch, 5):
        value, _, state = next_word(model, piece, state)
        total = total + value
    after = torch.rand(1)
    torch.manual_seed(1)
    ours, _, _ = oomguard.piecewise_loss(next_word, model, pieces_of(batch, 5), levels=levels)
    found = gradient(model, ours)
    assert torch.equal(torch.rand(1), after)
    assert furthest(found, gradient(model, total)) < 1e-10


def test_the_logits_of_one_piece_exist_at_a_time() -> None:
    model, batch = make()
    alive, most = set[int](), list[int]()

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        key = len(most)
        alive.add(key)
        weakref.finalize(output, alive.discard, key)
        most.append(len(alive))

    model.get_submodule("head.1").register_forward_hook(watch)
    total, _, _ = oomguard.piecewise_loss(next_word, model, pieces_of(batch, 4))
    torch.autograd.backward(total)
    assert len(most) == 2 * STEPS // 4
    assert max(most) == 1


def test_a_loss_without_a_state_and_counts_as_numbers_may_be_run_in_pieces() -> None:
    head, inputs = nn.Linear(4, 2), torch.randn(10, 4)

    def loss(model: nn.Module, piece: Tensor, state: None) -> tuple[Tensor, int, None]:
        return model(piece).square().sum(), len(piece), state

    total, count, state = oomguard.piecewise_loss(loss, head, torch.split(inputs, 3))
    assert (count, state) == (10, None)
    assert furthest(gradient(head, total), gradient(head, loss(head, inputs, None)[0])) < 1e-5


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.ones(()), "must be \\(sum, count, state\\)"),
        ((torch.ones(3), 3, None), "must be \\(sum, count, state\\)"),
        ((torch.ones(()), 3, "state"), "state of a loss must be tensors"),
    ],
)
def test_a_loss_of_another_form_is_refused(result: Any, message: str) -> None:
    with pytest.raises(oomguard.MisuseError, match=message):
        oomguard.piecewise_loss(lambda model, piece, state: result, nn.Linear(1, 1), [torch.ones(1)])


def test_a_loss_without_pieces_is_refused() -> None:
    with pytest.raises(oomguard.MisuseError, match="at least one piece"):
        oomguard.piecewise_loss(next_word, nn.Linear(1, 1), [])
