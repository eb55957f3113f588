"""After an update that runs out of memory halfway, every weight is updated exactly once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from oomguard._core.errors import TornUpdateError
from oomguard._guard.update import Updates

SHORT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "sgd": lambda p, lr, foreach: torch.optim.SGD(p, lr=lr, momentum=0.9, foreach=foreach),
}


def weights_after(name: str, foreach: bool, fails: int | None) -> list[Tensor]:
    """Weights after four updates; in the last one memory runs out after `fails` parameters."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(n + 2)) for n in range(4)]
    optimizer, updates = OPTIMIZERS[name](weights, lr=0.1, foreach=foreach), Updates(lambda: None)
    for number in range(4):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        step = None
        if fails is not None and number == 3:
            step = fail_after(optimizer, weights, fails)
        assert (updates.run(optimizer, step) is not None) == (step is not None)
    return [weight.detach() for weight in weights]


def fail_after(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter], updated: int) -> Callable[[], None]:
    """An update that runs out of memory after the first `some` parameters."""

    def step() -> None:
        hidden = [weight.grad for weight in weights[updated:]]
        for weight in weights[updated:]:
            weight.grad = None
        optimizer.step()
        for weight, gradient in zip(weights[updated:], hidden, strict=True):
            weight.grad = gradient
        raise RuntimeError(SHORT)

    return step


@pytest.mark.parametrize("updated", [0, 1, 3])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_ran_out_of_memory_halfway_is_completed(name: str, foreach: bool, updated: int) -> None:
    for whole, mended in zip(weights_after(name, foreach, None), weights_after(name, foreach, updated), strict=True):
        assert torch.equal(whole, mended)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_failed_first_update_creates_its_state_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, left = weights_after(name, True, None), [2]
    like = torch.zeros_like

    def zeros_like(*args: Any, **kwargs: Any) -> Tensor:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError(SHORT)
        return like(*args, **kwargs)

    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(n + 2)) for n in range(4)]
    optimizer, updates = OPTIMIZERS[name](weights, lr=0.1, foreach=True), Updates(lambda: None)
    monkeypatch.setattr(torch, "zeros_like", zeros_like)
    for _ in range(4):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        updates.run(optimizer)
    for expected, weight in zip(whole, weights, strict=True):
        assert torch.equal(expected, weight)


def test_an_update_whose_temporaries_do_not_fit_is_done_by_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, like, calls = weights_after("adam", True, None), torch.empty_like, [0]

    def empty_like(*args: Any, **kwargs: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError(SHORT)
        return like(*args, **kwargs)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(n + 2)) for n in range(4)]
    optimizer, updates = torch.optim.Adam(weights, lr=0.1, foreach=True), Updates(lambda: None)
    messages = []
    for _ in range(4):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        messages.append(updates.run(optimizer))
    assert [message is not None for message in messages] == [True, False, False, False]
    for expected, weight in zip(whole, weights, strict=True):
        assert torch.equal(expected, weight)


def test_a_parameter_with_a_new_state_and_old_weights_is_a_torn_update(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    optimizer, updates = torch.optim.Adam(weights, foreach=True), Updates(lambda: None)
    for number in range(2):
        for weight in weights:
            weight.grad = torch.randn(3)
        if number:
            monkeypatch.setattr(torch, "_foreach_sqrt", lambda *_: (_ for _ in ()).throw(RuntimeError(SHORT)))
            with pytest.raises(TornUpdateError, match="in the middle"):
                updates.run(optimizer)
        else:
            updates.run(optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_careful_update_gives_the_same_weights(name: str) -> None:
    whole = weights_after(name, True, None)
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(n + 2)) for n in range(4)]
    optimizer, updates = OPTIMIZERS[name](weights, lr=0.1, foreach=True), Updates(lambda: None)
    updates.careful = True
    for _ in range(4):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        assert updates.run(optimizer) is None
    for expected, weight in zip(whole, weights, strict=True):
        assert torch.equal(expected, weight)


def test_another_error_in_the_update_is_raised() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)

    def step() -> None:
        raise RuntimeError("shapes do not agree")

    with pytest.raises(RuntimeError, match="shapes"):
        Updates(lambda: None).run(torch.optim.SGD([weight]), step)
