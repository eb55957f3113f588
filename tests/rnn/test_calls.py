"""Every recurrent call in segments or in chunks returns what the plain call returns, and has its gradients."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import oomguard
from oomguard._rnn.pieces import DENSE_STEPS, PACKED_STEPS, cut, reversed_tokens

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning")
FEATURES, HIDDEN, PROJECTION = 3, 5, 2
CELLS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *args, **more: nn.RNN(*args, nonlinearity="relu", **more),
}


class Case(NamedTuple):
    """A recurrent module and what it is given."""

    cell: str = "lstm"
    layers: int = 1
    both: bool = False
    batch_first: bool = False
    bias: bool = True
    projected: bool = False
    dropout: float = 0.0
    lengths: tuple[int, ...] = (23, 23, 23)
    packed: bool = False
    states: bool = False  # whether initial states are given
    input_gradient: bool = True
    frozen: bool = False
    reads: str = "all"  # the results that the loss reads: all, outputs or states
    autocast: bool = False
    single: bool = False  # whether it runs in single precision, which autocast lowers, and not in double

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.single else torch.float64

    def module(self) -> nn.RNNBase:
        options: dict[str, Any] = {"num_layers": self.layers, "bidirectional": self.both, "bias": self.bias}
        options |= {"batch_first": self.batch_first, "dropout": self.dropout if self.layers > 1 else 0.0}
        if self.projected and self.cell == "lstm":
            options["proj_size"] = PROJECTION
        module = CELLS[self.cell](FEATURES, HIDDEN, **options).to(self.dtype)
        return module.requires_grad_(not self.frozen)


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=6) | st.lists(
    st.integers(1, 60), min_size=10, max_size=24, unique=True
)
cases = st.builds(
    Case,
    cell=st.sampled_from([*CELLS]),
    layers=st.integers(1, 3),
    both=st.booleans(),
    batch_first=st.booleans(),
    bias=st.booleans(),
    projected=st.booleans(),
    dropout=st.sampled_from([0.0, 0.4, 1.0]),
    lengths=lengths.map(tuple),
    packed=st.booleans(),
    states=st.booleans(),
    input_gradient=st.booleans(),
    frozen=st.booleans(),
    reads=st.sampled_from(["all", "outputs", "states"]),
    autocast=st.booleans(),
    single=st.just(False),
)


def tensors(value: Any) -> list[Tensor]:
    """All tensors of a nested tuple."""
    if isinstance(value, PackedSequence):
        return [value.data]
    return [value] if isinstance(value, Tensor) else [tensor for part in value for tensor in tensors(part)]


def run(case: Case, way: AbstractContextManager[Any]) -> list[Tensor]:
    """Results, gradients, and the state of the random numbers after one forward and backward pass."""
    torch.manual_seed(0)
    module, rows, steps = case.module(), len(case.lengths), max(case.lengths)
    shape = (rows, steps, FEATURES) if case.batch_first else (steps, rows, FEATURES)
    leaf = torch.randn(shape, dtype=case.dtype, requires_grad=case.input_gradient or case.frozen)
    widths = [PROJECTION if case.projected and case.cell == "lstm" else HIDDEN, HIDDEN][
        : 2 if case.cell == "lstm" else 1
    ]
    slots = case.layers * (2 if case.both else 1)
    states = [torch.randn(slots, rows, width, dtype=case.dtype, requires_grad=True) for width in widths]
    before = (tuple(states) if case.cell == "lstm" else states[0]) if case.states else None
    given: Any = leaf
    if case.packed:
        given = pack_padded_sequence(leaf, torch.tensor(case.lengths), case.batch_first, enforce_sorted=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast), way:
        outputs, after = module(given, before)
    read = {"all": (outputs, after), "outputs": (outputs,), "states": (after,)}[case.reads]
    loss = sum((part * torch.arange(part.numel()).view_as(part).sin()).sum() for part in tensors(read))
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    leaves = [leaf, *module.parameters(), *(states if case.states else [])]
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [*(part.detach() for part in tensors((outputs, after))), *gradients, torch.get_rng_state().double()]


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(ours, theirs, strict=True))


@settings(deadline=None)
@given(case=cases, segments=st.integers(2, 70), recompute=st.booleans())
def test_a_call_in_pieces_is_the_plain_call(case: Case, segments: int, recompute: bool) -> None:
    """Dropout uses the plain call's random numbers, and leaves them where that leaves them."""
    plain = run(case, nullcontext())
    assert furthest(run(case, oomguard.segmented(segments, recompute=recompute)), plain) < 1e-10


@settings(deadline=None)
@given(case=cases.map(lambda case: case._replace(dropout=0.0, frozen=False)), rows=st.integers(1, 8), data=st.data())
def test_microbatches_in_pieces_add_up_to_the_gradient_of_the_plain_batch(
    case: Case, rows: int, data: st.DataObject
) -> None:
    torch.manual_seed(0)
    module, time, slots = case.module(), int(case.batch_first), case.layers * (2 if case.both else 1)
    inputs: Any = torch.randn(len(case.lengths), max(case.lengths), FEATURES, dtype=torch.float64)
    inputs = inputs if time else inputs.transpose(0, 1).contiguous()
    if case.packed:
        inputs = pack_padded_sequence(inputs, torch.tensor(case.lengths), case.batch_first, enforce_sorted=False)
    widths = [PROJECTION if case.projected and case.cell == "lstm" else HIDDEN, HIDDEN]
    states = [torch.randn(slots, len(case.lengths), width).double() for width in widths[: 1 + (case.cell == "lstm")]]

    def squares(module: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inputs, states = batch
        outputs, after = module(inputs, (states if len(states) > 1 else states[0]) if case.states else None)
        return sum(part.square().sum() for part in tensors((outputs, after))), states[0].shape[1]  # type: ignore[return-value]

    batch = inputs, tuple(states)
    total, weight = squares(module, batch)
    plain = torch.autograd.grad(total / weight, [*module.parameters()])
    way = oomguard.segmented(data.draw(st.integers(2, 70)), recompute=data.draw(st.booleans()))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    dim = 1 - time, (1,) * len(states)
    with oomguard.stepper("64GiB", module, way(squares), optimizer, microbatch=rows, dim=dim) as step:
        step(batch)
    assert furthest([weight.grad for weight in module.parameters() if weight.grad is not None], [*plain]) < 1e-10


@settings(deadline=None)
@given(case=cases, segments=st.integers(2, 70), recompute=st.booleans())
def test_under_autocast_a_call_in_segments_is_the_plain_call_to_rounding(
    case: Case, segments: int, recompute: bool
) -> None:
    """The gradients together are compared, since single ones may vanish up to rounding."""
    case = case._replace(autocast=True, single=True)
    plain, ours = run(case, nullcontext()), run(case, oomguard.segmented(segments, recompute=recompute))
    assert [tensor.dtype for tensor in ours] == [tensor.dtype for tensor in plain]
    together = [torch.cat([tensor.float().flatten() for tensor in found[:-1]]) for found in (ours, plain)]
    assert furthest(together[:1], together[1:]) < 0.05
    assert torch.equal(ours[-1], plain[-1])


def test_a_plain_call_after_segments_in_one_autocast_block_still_trains_the_weights() -> None:
    """Autocast must not have stored a cast of the weights that has no graph."""
    module, inputs = nn.RNN(3, 4), torch.randn(8, 2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        with oomguard.segmented(4):
            module(inputs)
        outputs, _ = module(inputs)
    outputs.float().sum().backward()
    assert module.weight_hh_l0.grad is not None


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_single_precision_agrees_to_rounding(cell: str) -> None:
    """oneDNN runs an LSTM in single precision, and returns one gradient for both of its biases."""
    found = []
    for way in (nullcontext(), oomguard.segmented(5), oomguard.segmented(5, recompute=False)):
        torch.manual_seed(0)
        module = Case(cell, 2).module().float()
        with way:
            outputs, _ = module(torch.randn(40, 3, FEATURES))
        outputs.square().sum().backward()
        found.append([weight.grad for weight in module.parameters() if weight.grad is not None])
    assert furthest(found[1], found[0]) < 1e-5
    assert furthest(found[2], found[0]) < 1e-5


def test_a_call_by_keywords_is_the_same_call() -> None:
    module, inputs, state = nn.GRU(3, 4), torch.randn(9, 2, 3), torch.zeros(1, 2, 4)
    weights: list[Tensor] = [*module.parameters()]
    rest: dict[str, Any] = {"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": True, "bidirectional": False}
    plain = torch.gru(inputs, state, weights, batch_first=False, **rest)
    with oomguard.segmented(3):
        padded = torch.gru(input=inputs, hx=state, params=weights, batch_first=False, **rest)
        packed = torch.gru(
            data=inputs.flatten(0, 1), batch_sizes=torch.tensor([2] * 9), hx=state, params=weights, **rest
        )
    assert "_Recomputed" in type(padded[0].grad_fn).__name__
    torch.testing.assert_close(padded[0], plain[0])
    torch.testing.assert_close(packed[0].view_as(plain[0]), plain[0])


def test_without_gradients_a_call_runs_as_it_is() -> None:
    module, seen = nn.LSTM(3, 4), list[int]()
    with torch.no_grad(), oomguard.segmented(4), counting(seen):
        module(torch.randn(8, 2, 3))
    frozen = nn.LSTM(3, 4).requires_grad_(False)
    with oomguard.segmented(4), counting(seen):
        frozen(torch.randn(8, 2, 3))
    assert seen == [8, 8]


class counting(torch.overrides.TorchFunctionMode):  # noqa: N801
    """Records the steps of the calls that pass on to PyTorch."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.lstm:
            self.seen.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def test_a_second_backward_pass_adds_the_same_gradient() -> None:
    module = nn.LSTM(3, 4, 2, dropout=0.3)
    with oomguard.segmented(4):
        outputs, _ = module(torch.randn(20, 2, 3))
    outputs.sum().backward(retain_graph=True)
    once = [weight.grad.clone() for weight in module.parameters() if weight.grad is not None]
    outputs.sum().backward()
    twice = [weight.grad for weight in module.parameters() if weight.grad is not None]
    assert furthest(twice, [2 * gradient for gradient in once]) < 1e-6
    with pytest.raises(RuntimeError, match="second time"):
        outputs.sum().backward()


def test_a_gradient_of_a_gradient_is_refused() -> None:
    module, inputs = nn.GRU(3, 4), torch.randn(8, 2, 3, requires_grad=True)
    with oomguard.segmented(4):
        outputs, _ = module(inputs)
    with pytest.raises(oomguard.MisuseError, match="create_graph"):
        torch.autograd.grad(outputs.sum(), inputs, create_graph=True)


def test_weights_that_changed_before_the_backward_pass_are_refused() -> None:
    module = nn.GRU(3, 4)
    with oomguard.segmented(4):
        outputs, _ = module(torch.randn(8, 2, 3))
    with torch.no_grad():
        next(module.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


def test_one_module_may_be_called_several_times() -> None:
    def gradients(way: AbstractContextManager[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.LSTM(4, 4).double()
        with way:
            first, state = module(torch.randn(12, 2, 4).double())
            second, _ = module(first, state)
        second.square().sum().backward()
        return [weight.grad for weight in module.parameters() if weight.grad is not None]

    assert furthest(gradients(oomguard.segmented(3)), gradients(nullcontext())) < 1e-10


# ---- where sequences are cut


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40), segments=st.integers(1, 50), dense=st.booleans())
def test_pieces_cover_every_token_once(lengths: list[int], segments: int, dense: bool) -> None:
    sizes = [sum(length > step for length in lengths) for step in range(max(lengths))]
    pieces = cut(sizes, segments, dense=dense)
    assert [size for piece in pieces for size in piece.sizes] == sizes
    assert [piece.first for piece in pieces] == [sum(piece.tokens for piece in pieces[:i]) for i in range(len(pieces))]
    assert all(piece.tokens == sum(piece.sizes) and piece.steps == len(piece.sizes) for piece in pieces)
    assert max(piece.tokens for piece in pieces) <= -(-sum(sizes) // segments) + max(sizes) * (
        1 + (len(set(lengths)) == 1)
    )
    if dense:
        assert all(piece.dense or piece.steps <= PACKED_STEPS for piece in pieces)


def test_many_different_lengths_do_not_become_many_calls() -> None:
    """1,000 sequences of 1 to 1,000 steps: a call for each length would be 1,000 calls."""
    pieces = cut(list(range(1000, 0, -1)), 1, dense=True)
    assert len(pieces) <= 1000 // (PACKED_STEPS - DENSE_STEPS)
    assert len(cut(list(range(1000, 0, -1)), 4, dense=False)) == 4


def test_the_order_of_the_second_direction_turns_every_sequence() -> None:
    lengths = [7, 3, 3, 1]
    padded = torch.arange(28).view(7, 4, 1)
    packed = pack_padded_sequence(padded, torch.tensor(lengths))
    order = reversed_tokens(packed.batch_sizes.tolist(), padded.device)
    turned, _ = pad_packed_sequence(packed._replace(data=packed.data[order]))
    for row, length in enumerate(lengths):
        assert turned[:length, row].tolist() == padded[:length, row].flip(0).tolist()
    assert order[order].tolist() == list(range(sum(lengths)))
