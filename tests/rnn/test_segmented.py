"""`segmented` reaches every recurrent call of a block of code, `segment` those of one model, and both can be undone."""

import copy
import io
import pickle
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import oomguard
from oomguard._device.proc import read_resident
from oomguard._estimate.call import Call
from oomguard._rnn.room import Request, choose_segments, plain_bytes, segmented_bytes
from oomguard._rnn.segmented import _warn_of

INPUTS = torch.randn(24, 2, 3, generator=torch.Generator().manual_seed(0))


class Tagger(nn.Module):
    """An embedding of features, two recurrent layers of different kinds, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.head = nn.LSTM(3, 4), nn.GRU(4, 5, bidirectional=True), nn.Linear(10, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.gru(self.lstm(inputs)[0])[0])
        return outputs


class Own(nn.LSTM):
    """A user's subclass, with an argument of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(3, width)
        self.width = width


def in_segments(outputs: Tensor) -> bool:
    """Whether the outputs of a recurrent call came from segments."""
    return "_Recomputed" in type(outputs.grad_fn).__name__


def gradients(model: nn.Module, inputs: Tensor = INPUTS, *, mean: bool = False) -> list[Tensor]:
    outputs = model(inputs)
    model.zero_grad()
    squares = (outputs if isinstance(outputs, Tensor) else outputs[0]).square()
    (squares.mean() if mean else squares.sum()).backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def agree(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    pairs = [*zip(ours, theirs, strict=True)]
    return len(pairs) > 0 and all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


# ---- blocks of code


def test_a_function_can_be_decorated_and_may_call_itself() -> None:
    lstm, seen = nn.LSTM(3, 3), list[bool]()

    @oomguard.segmented(segments=4)
    def run(hidden: Tensor, depth: int) -> Tensor:
        hidden = lstm(hidden)[0]
        seen.append(in_segments(hidden))
        return hidden if depth == 0 else run(hidden, depth - 1)

    loss: Tensor = run(INPUTS, 2).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert seen == [True] * 3
    assert not in_segments(lstm(INPUTS)[0])


def test_of_nested_blocks_the_inner_one_counts() -> None:
    gru, seen = nn.GRU(3, 4), list[str]()
    both = oomguard.segmented(segments=4)
    with both, both, oomguard.segmented(segments=3, recompute=False):
        seen.append(type(gru(INPUTS)[0].grad_fn).__name__)
    assert seen == ["CatBackward0"]


def test_the_backward_pass_may_be_inside_the_block() -> None:
    model = Tagger()
    plain = gradients(model)
    with oomguard.segmented(segments=5):
        assert agree(gradients(model), plain)


def test_each_thread_has_blocks_of_its_own() -> None:
    lstm, seen, way = nn.LSTM(3, 4), dict[str, bool](), oomguard.segmented(segments=4)

    def plain() -> None:
        seen["plain"] = in_segments(lstm(INPUTS)[0])

    def own() -> None:
        with way:
            outputs = lstm(INPUTS)[0]
        seen["own"] = in_segments(outputs)
        outputs.sum().backward()

    with way:
        for target in (plain, own):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        seen["here"] = in_segments(lstm(INPUTS)[0])
    assert seen == {"plain": False, "own": True, "here": True}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "either segments= or budget=, but got neither"),
        ({"segments": 2, "budget": "1GiB"}, "either segments= or budget=, but got both"),
        ({"segments": 0}, "whole number"),
        ({"budget": "much"}, "positive number"),
        ({"budget": "1GiB", "recompute": False}, "recomputation"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(oomguard.MisuseError, match=message):
        oomguard.segmented(**given)
    with pytest.raises(oomguard.MisuseError, match=message):
        oomguard.segment(nn.LSTM(3, 4), **given)


# ---- a budget


def test_a_call_that_fits_runs_as_it_is_and_one_that_does_not_in_segments() -> None:
    lstm = nn.LSTM(16, 64)
    used_bytes = read_resident()
    with oomguard.segmented(budget=used_bytes + (40 << 20)):
        short, long = lstm(torch.randn(20, 2, 16))[0], lstm(torch.randn(8_000, 8, 16))[0]
    assert not in_segments(short)
    assert in_segments(long)


calls = st.builds(
    Call,
    cell=st.sampled_from(["lstm", "gru", "rnn"]),
    steps=st.integers(2, 20_000),
    rows=st.just(8),
    tokens=st.integers(20_000 * 8, 20_000 * 8),
    inputs=st.sampled_from([8, 200]),
    hidden=st.sampled_from([32, 128]),
    layers=st.integers(1, 3),
    directions=st.integers(1, 2),
    input_gradient=st.booleans(),
)


def request(call: Call) -> Request:
    call = Call(**{name: getattr(call, name) for name in call.__slots__} | {"tokens": call.steps * call.rows})
    engine = "onednn" if call.cell == "lstm" else "native"
    return Request(
        call=call, device="cpu", engine=engine, heap="system", half=False, batch_first=False, dropout=call.layers == 3
    )


@given(call=calls, left=st.integers(0, 1 << 32))
def test_segments_are_chosen_only_where_the_plain_call_does_not_fit_and_only_if_they_need_less(
    call: Call, left: int
) -> None:
    asked, used_bytes = request(call), read_resident()
    chosen, plain = choose_segments(asked, used_bytes + left), plain_bytes(asked)
    slack = 64 << 20  # the resident bytes of this process change between two readings
    if plain <= left - slack:
        assert chosen == 1
    if chosen > 1:
        assert plain > left - slack
        assert segmented_bytes(asked, np.array([chosen]))[0] < plain


def test_a_smaller_budget_gives_more_segments() -> None:
    asked = request(Call(cell="lstm", steps=20_000, rows=8, tokens=160_000, inputs=8, hidden=128))
    used_bytes, plain = read_resident(), plain_bytes(asked)
    chosen = [choose_segments(asked, used_bytes + int(plain * share)) for share in (0.9, 0.5, 0.3)]
    assert 1 < chosen[0] < chosen[1] < chosen[2]


UNDER_A_LIMIT = """
import contextlib, resource, sys, torch
import oomguard
from oomguard._device.proc import read_status

torch.manual_seed(0)
lstm, inputs = torch.nn.LSTM(8, 128), torch.randn(3_000, 8, 8)

def step(inputs):
    lstm(inputs)[0].square().mean().backward()

step(inputs[:10])
lstm.zero_grad()
now = read_status()
resource.setrlimit(resource.RLIMIT_DATA, (now.committed_bytes + (250 << 20), resource.RLIM_INFINITY))
budget = oomguard.segmented(budget=now.resident_bytes + (75 << 20))
with budget if sys.argv[1] == "budget" else contextlib.nullcontext():
    step(inputs)
print(*(float(weight.grad.norm()) for weight in lstm.parameters()))
"""


def test_within_a_hard_limit_in_which_the_plain_step_dies_a_budget_lets_it_finish() -> None:
    torch.manual_seed(0)
    lstm, inputs = nn.LSTM(8, 128), torch.randn(3_000, 8, 8)
    expected = [float(gradient.norm()) for gradient in gradients(lstm, inputs, mean=True)]
    found = {
        way: subprocess.run([sys.executable, "-c", UNDER_A_LIMIT, way], capture_output=True, text=True)
        for way in ("plain", "budget")
    }
    assert "Cannot allocate memory" in found["plain"].stderr
    assert found["budget"].returncode == 0, found["budget"].stderr
    assert [*map(float, found["budget"].stdout.split())] == pytest.approx(expected, rel=1e-5)


# ---- one model


def test_segment_reaches_the_recurrent_modules_of_a_model_and_unsegment_lets_go() -> None:
    model = Tagger()
    plain, names, text = gradients(model), [*model.state_dict()], repr(model)
    assert oomguard.segment(model, segments=4) is model
    assert in_segments(model.lstm(INPUTS)[0])
    assert agree(gradients(model), plain)
    assert isinstance(model.lstm, nn.LSTM)
    assert [*model.state_dict()] == names
    assert repr(model) == text
    assert oomguard.unsegment(model) is model
    assert type(model.lstm) is nn.LSTM
    assert not in_segments(model.lstm(INPUTS)[0])
    assert vars(model.lstm).keys() == vars(nn.LSTM(3, 4)).keys()


def test_segment_again_changes_the_segments() -> None:
    lstm = oomguard.segment(oomguard.segment(nn.LSTM(3, 4), segments=4), segments=1)
    assert not in_segments(lstm(INPUTS)[0])
    assert type(oomguard.unsegment(lstm)) is nn.LSTM


def test_a_copy_trains_its_own_weights() -> None:
    model = oomguard.segment(Tagger(), segments=4)
    twin = copy.deepcopy(model)
    found = gradients(twin)
    assert in_segments(twin.lstm(INPUTS)[0])
    assert all(weight.grad is None for weight in model.parameters())
    assert agree(found, gradients(model))
    assert type(oomguard.unsegment(twin).lstm) is nn.LSTM
    assert in_segments(model.lstm(INPUTS)[0])


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_a_pickle_runs_in_segments_too(protocol: int) -> None:
    model = oomguard.segment(nn.ModuleList([Own(5), nn.GRU(3, 4)]), segments=4)
    again = pickle.loads(pickle.dumps(model, protocol))
    assert in_segments(again[0](INPUTS)[0])
    assert again[0].width == 5
    assert type(oomguard.unsegment(again)[0]) is Own
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert in_segments(torch.load(buffer, weights_only=False)[1](INPUTS)[0])


def test_a_pickle_runs_in_segments_in_another_process(tmp_path: Path) -> None:
    torch.save(oomguard.segment(nn.Sequential(nn.LSTM(3, 4)), segments=4), tmp_path / "model.pt")
    code = "import torch; model = torch.load('model.pt', weights_only=False)\n"
    code += "print(model(torch.randn(9, 2, 3))[0].grad_fn)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "_Recomputed" in done.stdout, done.stderr


def test_functional_call_uses_the_weights_that_it_is_given() -> None:
    model = oomguard.segment(Tagger(), segments=4)
    zeros = {name: torch.zeros_like(weight, requires_grad=True) for name, weight in model.named_parameters()}
    outputs = torch.func.functional_call(model, zeros, (INPUTS,))
    assert not outputs.any()
    outputs.sum().backward()
    assert zeros["head.bias"].grad is not None
    assert all(weight.grad is None for weight in model.parameters())


def test_what_segment_cannot_reach_is_named_once() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.decoder = nn.GRU(3, 4), nn.LSTMCell(3, 4)

    with pytest.warns(UserWarning, match=r"do not run in segments: decoder\. .*oomguard\.scan") as caught:
        oomguard.segment(Mixed(), segments=4)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="no LSTM, GRU or RNN module"):
        oomguard.segment(nn.Linear(3, 4), segments=4)


def test_a_loop_over_cells_is_named_once_unless_it_is_a_scan() -> None:
    cell, inputs = nn.GRUCell(3, 4), torch.randn(6, 2, 3)
    _warn_of.cache_clear()
    with warnings.catch_warnings(record=True) as caught, oomguard.segmented(2):
        warnings.simplefilter("always")
        _, outputs = oomguard.scan(lambda state, x: (cell(x, state),) * 2, torch.zeros(2, 4), inputs, segments=3)
        outputs.sum().backward()
        assert not caught
        for x in inputs:
            cell(x)
    assert len(caught) == 1
    assert "A loop over torch.gru_cell does not run in segments." in str(caught[0].message)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_model_in_torchscript_is_named() -> None:
    model = nn.ModuleDict({"scripted": torch.jit.script(nn.Sequential(nn.Linear(3, 4))), "rnn": nn.GRU(3, 4)})
    with pytest.warns(UserWarning, match=r"do not run in segments: scripted\. "):
        oomguard.segment(model, segments=4)
