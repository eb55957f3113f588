"""`scan` has the results and gradients of the plain loop."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import oomguard

Step = Callable[[Any, Any], tuple[Any, Any]]


def loop(step: Step, state: Any, inputs: Tensor) -> tuple[Any, Tensor]:
    """The plain loop."""
    outputs = []
    for part in inputs:
        state, output = step(state, part)
        outputs.append(output)
    return state, torch.stack(outputs)


def in_segments(segments: int | None) -> Callable[..., tuple[Any, Any]]:
    return partial(oomguard.scan, segments=segments)


def gradients(run: Callable[..., tuple[Any, Tensor]], step: Step, leaves: list[Tensor], *args: Any) -> list[Tensor]:
    """The outputs, and the gradients of leaves from the outputs and the last state."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    for leaf in leaves:
        leaf.grad = None
    state, outputs = run(step, *args)
    total: Tensor = outputs.square().sum() + sum(
        part.sin().sum() for part in (state if isinstance(state, tuple) else [state])
    )
    torch.autograd.backward(total)
    return [outputs.detach(), *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone() for leaf in leaves)]


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(ours, theirs, strict=True))


def doubles(*shape: int, requires_grad: bool = True) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=requires_grad
    )


# ---- loops


@given(
    steps=st.integers(1, 30),
    segments=st.none() | st.integers(1, 40),
    levels=st.integers(1, 3),
    learns_input=st.booleans(),
    dropout=st.booleans(),
)
def test_a_scan_is_the_loop(steps: int, segments: int | None, levels: int, learns_input: bool, dropout: bool) -> None:
    cell = nn.LSTMCell(3, 4).double()

    def step(state: tuple[Tensor, Tensor], inputs: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        state = cell(functional.dropout(inputs, 0.3) if dropout else inputs, state)
        return state, state[0] * random.random() * np.random.rand()

    state, inputs = (doubles(2, 4), doubles(2, 4)), doubles(steps, 2, 3, requires_grad=learns_input)
    leaves = [*cell.parameters(), *state, *([inputs] if learns_input else [])]
    plain = gradients(loop, step, leaves, state, inputs)
    ours = gradients(partial(oomguard.scan, segments=segments, levels=levels), step, leaves, state, inputs)
    assert furthest(ours, plain) < 1e-10


@pytest.mark.parametrize(("levels", "states", "runs"), [(1, 16, 2), (2, 4, 3), (3, 3, 4)])
def test_levels_keep_fewer_states_and_run_the_loop_more_often(levels: int, states: int, runs: int) -> None:
    weight, seen, kept = torch.ones((), requires_grad=True), list[int](), list[Tensor]()

    def step(state: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(1)
        return state * weight, given

    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        state, _ = oomguard.scan(step, torch.zeros(7), torch.ones(16, 1), segments=16, levels=levels)
    borders = sum(tensor.shape == (7,) for tensor in kept) - 1  # the first state is an argument too
    torch.autograd.backward(state.sum())
    assert borders == states
    assert (runs - 1) * 16 < len(seen) <= runs * 16


def test_states_inputs_and_outputs_may_be_nested() -> None:
    cell = nn.GRUCell(3, 4)

    def step(state: dict[str, Any], inputs: list[Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        hidden = cell(inputs[0] * inputs[1], state["hidden"])
        # the keys in another order than at the start
        return {"count": [state["count"][0] + 1], "hidden": hidden}, {"best": hidden.argmax(-1), "hidden": hidden}

    start = {"hidden": torch.zeros(2, 4), "count": [torch.tensor(0)]}
    inputs = [torch.randn(9, 2, 3), torch.ones(9, 1, 1, requires_grad=True)]
    state, outputs = in_segments(3)(step, start, inputs)
    assert int(state["count"][0]) == 9
    assert outputs["best"].shape == (9, 2)
    assert not outputs["best"].requires_grad
    assert torch.equal(outputs["hidden"][-1], state["hidden"])
    outputs["hidden"].sum().backward()
    assert inputs[1].grad is not None


def test_a_step_without_outputs_returns_none() -> None:
    state, outputs = oomguard.scan(lambda state, given: (state + given, None), torch.zeros(2), torch.ones(5, 2))
    assert outputs is None
    assert state.tolist() == [5, 5]


def test_gradients_reach_tensors_that_are_not_leaves() -> None:
    """As in attention: every step reads the outputs of an encoder, which has a graph of its own."""
    encoder, cell = nn.Linear(3, 4).double(), nn.GRUCell(4, 4).double()
    series, inputs = doubles(6, 2, 3, requires_grad=False), doubles(11, 2, 4)

    def run(way: Callable[..., tuple[Any, Tensor]]) -> list[Tensor]:
        memory = torch.tanh(encoder(series))

        def step(state: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
            weights = torch.einsum("tbh,bh->tb", memory, state).softmax(0)
            state = cell(given + torch.einsum("tb,tbh->bh", weights, memory), state)
            return state, state

        leaves = [*encoder.parameters(), *cell.parameters(), inputs]
        return gradients(way, step, leaves, doubles(2, 4), inputs)

    assert furthest(run(in_segments(4)), run(loop)) < 1e-10


def test_torch_autograd_grad_works_and_touches_no_other_gradient() -> None:
    cell, inputs = nn.GRUCell(3, 4), torch.randn(10, 2, 3, requires_grad=True)
    _, outputs = oomguard.scan(lambda s, x: (cell(x, s), s), torch.zeros(2, 4), inputs, segments=3)
    (found,) = torch.autograd.grad(outputs.sum(), inputs, retain_graph=True)
    assert found.any()
    assert all(weight.grad is None for weight in cell.parameters())
    with pytest.raises(oomguard.MisuseError, match="create_graph"):
        torch.autograd.grad(outputs.sum(), inputs, create_graph=True)


def test_a_weight_that_only_some_steps_use_gets_its_gradient() -> None:
    early, late = doubles(2), doubles(2)

    def step(state: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        state = state * (early if given < 2 else late).cos()
        return state, state

    inputs = torch.arange(8)
    plain = gradients(loop, step, [early, late], torch.ones(2).double(), inputs)
    ours = gradients(in_segments(4), step, [early, late], torch.ones(2).double(), inputs)
    assert furthest(ours, plain) < 1e-10


def test_segments_may_be_inside_a_scan() -> None:
    rnn, inputs = nn.GRU(3, 4).double(), doubles(4, 6, 2, 3)

    @oomguard.segmented(segments=2)
    def step(state: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        outputs, state = rnn(given, state)
        return state, outputs

    leaves = [*rnn.parameters(), inputs]
    plain = gradients(loop, step, leaves, doubles(1, 2, 4), inputs)
    assert furthest(gradients(in_segments(2), step, leaves, doubles(1, 2, 4), inputs), plain) < 1e-10


def test_function_modes_of_the_forward_pass_see_the_recomputation_too() -> None:
    cell, seen = nn.GRUCell(3, 4), list[Callable[..., Any]]()

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        _, outputs = oomguard.scan(lambda s, x: (cell(x, s),) * 2, torch.zeros(2, 4), torch.randn(7, 2, 3), 2)
    torch.autograd.backward(outputs.sum())
    assert seen.count(torch.gru_cell) == 14


def test_a_step_that_gives_something_else_the_second_time_is_refused() -> None:
    count = iter(range(1000))
    weight = torch.ones((), requires_grad=True)
    _, outputs = oomguard.scan(
        lambda s, x: ((s + next(count)) * weight, s), torch.zeros(1), torch.ones(9, 1), segments=3
    )
    with pytest.raises(oomguard.MisuseError, match="same state"):
        torch.autograd.backward(outputs.sum())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_weight_that_is_used_out_of_sight_is_refused_instead_of_left_untrained() -> None:
    model = torch.jit.script(nn.Linear(2, 2))
    _, outputs = in_segments(2)(lambda s, x: (model(s + x), s), torch.ones(2), torch.ones(6, 2, requires_grad=True))
    with pytest.raises(oomguard.MisuseError, match="out of sight"):
        outputs.sum().backward()


class Product(torch.autograd.Function):
    """A custom function, which function modes do not see."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(state, weight)
        return state * weight

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        state, weight = ctx.saved_tensors
        return gradient * weight, gradient * state


def test_an_autograd_function_may_use_a_weight_but_no_tensor_with_a_graph_of_its_own() -> None:
    weight, apply = doubles(2), cast(Callable[..., Tensor], Product.apply)
    inputs = doubles(6, 2)

    def step(state: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        state = apply(state + given, weight)
        return state, state

    leaves = [weight, inputs]
    plain = gradients(loop, step, leaves, doubles(2), inputs)
    assert furthest(gradients(in_segments(3), step, leaves, doubles(2), inputs), plain) < 1e-10
    memory = weight.exp()
    _, outputs = in_segments(3)(lambda s, x: (apply(s + x, memory), s * memory), doubles(2), inputs)
    with pytest.raises(oomguard.MisuseError, match="out of sight"):
        outputs.sum().backward()


def test_autocast_is_on_again_when_steps_are_recomputed() -> None:
    cell, seen = nn.Linear(4, 4), list[torch.dtype]()

    def step(state: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        made = cell(state + given)
        seen.append(made.dtype)
        return made, made

    with torch.autocast("cpu", torch.bfloat16):
        _, outputs = in_segments(2)(step, torch.zeros(2, 4, dtype=torch.bfloat16), torch.randn(6, 2, 4))
    outputs.float().sum().backward()
    assert set(seen) == {torch.bfloat16}
    assert len(seen) == 12
    assert cell.weight.grad is not None


def test_without_gradients_every_step_runs_once() -> None:
    seen = list[int]()

    def step(state: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(1)
        return state, given

    with torch.no_grad():
        oomguard.scan(step, torch.zeros(1), torch.ones(7))
    assert len(seen) == 7


@pytest.mark.parametrize(
    ("state", "inputs", "message"),
    [
        (1.0, torch.ones(3), "state of a scan must be tensors"),
        (torch.ones(1), [1], "inputs of a scan must be tensors"),
        (torch.ones(1), [torch.ones(3), torch.ones(4)], "same number of steps"),
        (torch.ones(1), torch.ones(0, 2), "at least one step"),
        (torch.ones(1), [], "got no tensor"),
    ],
)
def test_a_scan_over_something_else_is_refused(state: Any, inputs: Any, message: str) -> None:
    with pytest.raises(oomguard.MisuseError, match=message):
        oomguard.scan(lambda s, x: (s, s), state, inputs)


def test_a_step_must_return_the_state_that_it_got() -> None:
    with pytest.raises(oomguard.MisuseError, match="a state like the one"):
        in_segments(2)(lambda s, x: ((s, s), s), torch.ones(1), torch.ones(3))
