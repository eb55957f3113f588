"""Adam with a state in 8 bits, with the real torchao: the same weights as its own class, and the estimated bytes."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainings import load_newest, state_bits

from oomguard._adam8bit import TorchaoAdam8bit, TorchaoAdamW8bit
from oomguard._core.errors import MisuseError
from oomguard._estimate import terms
from oomguard._rnn import Microbatch
from oomguard._rnn.model import build, trainable
from oomguard._spec.candidate import make_candidate
from oomguard._spec.spec import Spec
from oomguard._step import Training, make_optimizer, prepare, step
from oomguard._train.checkpoint import TrainState, restore, save
from oomguard._train.verify import faults

pytest.importorskip("torchao", reason="an optimizer state in 8 bits needs torchao on the CPU")
SPEC = Spec(cell="lstm", seq=5, features=16, hidden=64, layers=2, batch=4, optimizer="adam8bit")


def train(training: Training, first: int, last: int) -> None:
    for number in range(first, last):
        numbers = torch.Generator().manual_seed(number)
        inputs = torch.randn(5, 4, 16, generator=numbers)
        step(training, [Microbatch(inputs, inputs[..., :1])], 20)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_weights_are_bit_for_bit_those_of_torchaos_own_class(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.optim import Adam8bit, AdamW8bit

    monkeypatch.setattr("oomguard._adam8bit.UPDATED_PIECE", 4096)  # several pieces and a rest
    ours_class, their_class = {"adam": (TorchaoAdam8bit, Adam8bit), "adamw": (TorchaoAdamW8bit, AdamW8bit)}[name]
    ours, theirs = nn.Linear(100, 128), nn.Linear(100, 128)
    theirs.load_state_dict(ours.state_dict())
    optimizers = ours_class(ours.parameters(), lr=1e-2), their_class(theirs.parameters(), lr=1e-2)
    with torch.compiler.set_stance("force_eager"):  # theirs would be compiled, for a minute
        for number in range(4):
            inputs = torch.randn(8, 100, generator=torch.Generator().manual_seed(number))
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
    assert optimizers[0].state[ours.weight]["exp_avg"].dtype is torch.uint8
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "adam8bit"},
        {"optimizer": "adam8bit", "hidden": 50, "features": 41},  # no weight has whole blocks
        {"optimizer": "adamw", "cell": "gru", "hidden": 96, "bidirectional": True, "layer_norm": True},
        {"optimizer": "adam", "cell": "lstm", "projection": 32, "frozen": ("layer0",)},
        {"optimizer": "adam", "cell": "rnn", "vocab": 1000, "features": None, "embedding": 32},
    ],
    ids=str,
)
def test_the_state_has_exactly_the_estimated_bytes(fields: dict[str, Any]) -> None:
    given: dict[str, Any] = {"cell": "lstm", "seq": 5, "features": 30, "hidden": 64}
    spec = Spec(**given | fields)
    candidate = make_candidate(spec, state_8bit=True)
    model = build(spec)
    optimizer = make_optimizer(model, candidate)
    for parameter in trainable(model):
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert terms.optimizer_bytes(spec, candidate) == sum(value.nbytes for value in states if value.dim())


def test_an_update_needs_no_more_than_the_estimated_room() -> None:
    """Counted at the allocator: the largest sum of blocks that are alive in an update of two weights of many pieces."""
    spec = Spec(cell="rnn", seq=5, features=512, hidden=1024, layers=1, optimizer="adam8bit")
    model = build(spec)
    optimizer = make_optimizer(model, make_candidate(spec))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    room_bytes = terms.update_bytes(spec, make_candidate(spec))
    measured_bytes = most_allocated(optimizer.step)
    assert room_bytes < 4 * 1024 * 1024 * 4, "less than four copies of the largest weight"
    assert 0.8 * room_bytes < measured_bytes <= room_bytes


def most_allocated(call: Any) -> int:
    """The most bytes that the call has allocated at once."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    assert found.profiler is not None
    events = [(e.start_ns(), e.nbytes()) for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    total, most = 0, 0
    for _, size_bytes in sorted(events, key=lambda event: event[0]):
        total += size_bytes
        most = max(most, total)
    return most


def test_it_learns_as_adam_does() -> None:
    losses = {}
    for name in ("adam", "adam8bit"):
        spec = Spec(cell="gru", seq=5, features=16, hidden=64, batch=4, optimizer=name)
        torch.manual_seed(0)
        training = prepare(spec, make_candidate(spec), lr=1e-2)
        inputs = torch.randn(5, 4, 16)
        batch = Microbatch(inputs, inputs[..., :1])
        losses[name] = [float(step(training, [batch], 20).loss) for _ in range(30)]
    assert losses["adam8bit"][0] == losses["adam"][0]
    assert losses["adam8bit"][-1] < 0.1 * losses["adam8bit"][0]
    assert losses["adam8bit"][-1] == pytest.approx(losses["adam"][-1], abs=0.05)


def test_a_resumed_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, first, second = (prepare(SPEC, make_candidate(SPEC)) for _ in range(3))
    first.model.load_state_dict(whole.model.state_dict())
    torch.manual_seed(1)
    train(whole, 0, 6)
    torch.manual_seed(1)
    train(first, 0, 3)
    save(tmp_path, first, TrainState(step=3))
    restore(load_newest(tmp_path), second)
    train(second, 3, 6)
    assert state_bits(second) == state_bits(whole)


def test_a_checkpoint_with_another_state_is_damaged(tmp_path: Path) -> None:
    training = prepare(SPEC, make_candidate(SPEC))
    train(training, 0, 1)
    save(tmp_path, training, TrainState(step=1))
    checkpoint = load_newest(tmp_path)
    assert [*faults(training, checkpoint.optimizer, checkpoint.tensors())] == []
    kept = checkpoint.optimizer.kept["calls.0.weight_hh_l0"]
    del kept["exp_avg_scale"]
    found = [*faults(training, checkpoint.optimizer, checkpoint.tensors())]
    assert found == ["state.kept.calls.0.weight_hh_l0.exp_avg_scale is missing"]


@pytest.mark.parametrize("optimizer", ["sgd-momentum", "rmsprop", "adagrad"])
def test_an_optimizer_that_torchao_lacks_is_refused_on_the_cpu(optimizer: Any) -> None:
    spec = Spec(cell="gru", seq=5, hidden=8, optimizer=optimizer)
    with pytest.raises(MisuseError, match=f"In 8 bits there are adam, adamw here, but got --optimizer {optimizer}"):
        make_optimizer(build(spec), make_candidate(spec, state_8bit=True))


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from oomguard import _adam8bit

    _adam8bit._torchao.cache_clear()
    monkeypatch.setitem(sys.modules, "torchao.optim.adam", None)
    with pytest.raises(MisuseError, match=r'pip install "oomguard\[torchao\]"'):
        make_optimizer(build(SPEC), make_candidate(SPEC))
    _adam8bit._torchao.cache_clear()


def test_weights_that_are_not_of_whole_blocks_stay_in_32_bits() -> None:
    assert not terms.is_quantised(4096 + 1)
    assert not terms.is_quantised(2048)
    assert terms.is_quantised(4096)


def state_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in optimizer.state[parameter].items()}


def test_memory_that_runs_out_in_an_update_loses_nothing() -> None:
    """The guard sees which weights are done by how often they and their state have changed."""
    from oomguard._guard.update import Updates

    def make() -> tuple[nn.Linear, TorchaoAdam8bit]:
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        return model, TorchaoAdam8bit(model.parameters(), lr=1e-2)

    def gradient(model: nn.Linear) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)

    (plain, optimizer), (kept, guarded) = make(), make()
    updates = Updates(lambda: None)
    for number in range(3):
        gradient(plain)
        optimizer.step()
        gradient(kept)

        def some() -> None:
            """Update the weight, and run out of memory before the bias."""
            bias, kept.bias.grad = kept.bias.grad, None
            guarded.step()
            kept.bias.grad = bias
            raise MemoryError

        message = updates.run(guarded, some if number == 2 else None)
        assert (message is not None) == (number == 2)
    assert torch.equal(plain.weight, kept.weight)
    assert torch.equal(plain.bias, kept.bias)
    assert all(math.isfinite(float(value.float().sum())) for value in state_of(guarded, kept.weight).values())
