"""Whole models of many kinds have the gradients of the plain pass, in segments, in chunks and within a budget."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from rnn import architectures
from torch import Tensor, nn

import oomguard

pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning"),
    pytest.mark.filterwarnings("ignore:The model has no LSTM:UserWarning"),
]
WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "segments": lambda: oomguard.segmented(segments=5),
    "a segment for each step": lambda: oomguard.segmented(segments=1000),
    "chunks": lambda: oomguard.segmented(segments=5, recompute=False),
    "a budget that nothing fits": lambda: oomguard.segmented(budget=1),
    "a budget that all fits": lambda: oomguard.segmented(budget="900GiB"),
}


def gradients(name: str, way: AbstractContextManager[Any], change: Callable[[nn.Module], Any] = id) -> list[Tensor]:
    """The loss and all gradients of an architecture."""
    made = architectures.build(name)
    change(made.model)
    torch.manual_seed(1)
    random.seed(1)
    with way:
        loss = made.loss()
    torch.autograd.backward(loss)
    found = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in made.model.parameters()]
    return [loss.detach(), *found]


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", architectures.ALL)
def test_an_architecture_has_the_gradients_of_the_plain_pass(name: str, way: str) -> None:
    plain = gradients(name, nullcontext())
    assert all(gradient.any() for gradient in plain)
    assert furthest(gradients(name, WAYS[way]()), plain) < 1e-10


@pytest.mark.parametrize("name", architectures.ALL)
def test_an_architecture_keeps_its_gradients_when_its_modules_run_in_segments(name: str) -> None:
    plain = gradients(name, nullcontext())
    assert furthest(gradients(name, nullcontext(), lambda model: oomguard.segment(model, segments=4)), plain) < 1e-10


def test_a_decoder_loop_can_be_a_scan() -> None:
    """The loop of a decoder with attention and teacher forcing, written as a step."""
    torch.manual_seed(0)
    encoder, cell, words, head = nn.GRU(5, 6), nn.GRUCell(11, 6), nn.Embedding(9, 5), nn.Linear(6, 9)
    modules = nn.ModuleList([encoder, cell, words, head]).double()
    source, target = torch.randint(9, (20, 4)), torch.randint(9, (12, 4))

    def run(scan: Callable[..., tuple[Any, Tensor]]) -> list[Tensor]:
        random.seed(1)
        modules.zero_grad()
        memory, last = encoder(words(source))

        def step(state: tuple[Tensor, Tensor], word: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
            hidden, given = state
            context = ((memory * hidden).sum(-1).softmax(0)[..., None] * memory).sum(0)
            hidden = cell(torch.cat([words(given), context], -1), hidden)
            logits = head(hidden)
            return (hidden, word if random.random() < 0.5 else logits.argmax(-1)), logits

        _, logits = scan(step, (last[0], target[0]), target[1:])
        torch.autograd.backward(nn.functional.cross_entropy(logits.flatten(0, 1), target[1:].flatten()))
        return [logits.detach(), *(weight.grad.clone() for weight in modules.parameters() if weight.grad is not None)]

    def plainly(step: Any, state: Any, inputs: Tensor) -> tuple[Any, Tensor]:
        made = []
        for word in inputs:
            state, logits = step(state, word)
            made.append(logits)
        return state, torch.stack(made)

    assert furthest(run(oomguard.scan), run(plainly)) < 1e-10
