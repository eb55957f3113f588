"""On a card, calls in segments have the results of the plain calls, and reserve less."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import oomguard
from oomguard._device.cuda import Cuda

pytestmark = pytest.mark.gpu
LENGTHS = torch.tensor([60, 41, 41, 7])
MODULES: dict[str, dict[str, Any]] = {
    "one layer": {},
    "layers": {"num_layers": 3},
    "both directions": {"num_layers": 2, "bidirectional": True},
    "batch first": {"batch_first": True},
    "without biases": {"num_layers": 2, "bias": False},
}


def run(module: nn.RNNBase, packed: bool, way: AbstractContextManager[Any]) -> list[Tensor]:
    """The outputs and all gradients."""
    torch.manual_seed(0)
    shape = (4, 60, 8) if module.batch_first else (60, 4, 8)
    leaf = torch.randn(shape, device="cuda", requires_grad=True)
    given: Any = leaf
    if packed:
        given = pack_padded_sequence(leaf, LENGTHS, module.batch_first)
    module.zero_grad()
    with way:
        outputs, state = module(given)
    outputs = pad_packed_sequence(outputs, module.batch_first)[0] if packed else outputs
    states = [state] if isinstance(state, Tensor) else [*state]
    torch.autograd.backward(sum((part.square().sum() for part in (outputs, *states)), torch.zeros((), device="cuda")))
    return [outputs.detach().cpu(), *(x.grad.cpu() for x in (leaf, *module.parameters()) if x.grad is not None)]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("options", MODULES)
@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_a_call_in_pieces_is_the_plain_call(cell: str, options: str, packed: bool) -> None:
    module = getattr(nn, cell)(8, 16, **MODULES[options]).cuda()
    plain = run(module, packed, nullcontext())
    for recompute in (True, False):
        ours = run(module, packed, oomguard.segmented(5, recompute=recompute))
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("both", [False, True])
def test_dropout_runs_outside_of_the_kernel_and_repeats_its_masks(both: bool) -> None:
    """A second backward pass recomputes everything once more, with the same masks."""
    module, inputs = nn.LSTM(8, 16, 3, dropout=0.4, bidirectional=both).cuda(), torch.randn(60, 4, 8, device="cuda")
    with oomguard.segmented(5):
        outputs, _ = module(inputs)
    once = torch.autograd.grad(outputs.sum(), [*module.parameters()], retain_graph=True)
    state = torch.cuda.get_rng_state()
    twice = torch.autograd.grad(outputs.sum(), [*module.parameters()])
    torch.testing.assert_close([gradient.cpu() for gradient in once], [gradient.cpu() for gradient in twice])
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_types(dtype: torch.dtype) -> None:
    module, types = nn.LSTM(8, 16, 2).cuda(), []
    for way in (nullcontext(), oomguard.segmented(5)):
        with torch.autocast("cuda", dtype), way:
            outputs, (hidden, cell) = module(torch.randn(60, 4, 8, device="cuda"))
        types.append((outputs.dtype, hidden.dtype, cell.dtype))
        torch.autograd.backward(outputs.float().sum())
        assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in module.parameters())
    assert types[0] == types[1]


def reserved(module: nn.LSTM, way: AbstractContextManager[Any]) -> int:
    """The bytes that the card reserves for one forward and backward pass of 4,000 steps."""
    module.zero_grad()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with way:
        outputs, _ = module(torch.zeros(4_000, 16, 32, device="cuda"))
    torch.autograd.backward(outputs.sum())
    return torch.cuda.max_memory_reserved()


def test_segments_reserve_less_and_a_budget_is_kept() -> None:
    module = nn.LSTM(32, 128, 2).cuda()
    plain = reserved(module, nullcontext())
    assert reserved(module, oomguard.segmented(32)) < plain / 3
    context_bytes = Cuda(0).reading().runtime_bytes
    within = reserved(module, oomguard.segmented(budget=context_bytes + plain * 2 // 3))
    assert within <= plain * 2 // 3
    assert reserved(module, oomguard.segmented(budget=context_bytes + 4 * plain)) == plain


def test_a_scan_on_a_card_draws_the_same_random_numbers_again() -> None:
    cell = nn.GRUCell(8, 16).cuda()

    def step(state: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        state = cell(nn.functional.dropout(inputs, 0.5), state)
        return state, state

    inputs = torch.randn(30, 4, 8, device="cuda")
    _, outputs = oomguard.scan(step, torch.zeros(4, 16, device="cuda"), inputs, segments=5)
    torch.autograd.backward(outputs.sum())
    assert cell.weight_hh.grad is not None
