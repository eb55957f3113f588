"""The step on a card: every way through a sequence runs there, and needs the memory that it is estimated to need.

Whether the gradients are right is tested on the CPU, with the same code.
"""

from typing import Any

import pytest
import torch

from oomguard._device.find import open_device
from oomguard._estimate.breakdown import estimate_step
from oomguard._estimate.target import on_card
from oomguard._rnn import Microbatch
from oomguard._rnn.model import trainable
from oomguard._spec.candidate import Candidate, make_candidate
from oomguard._spec.spec import Spec
from oomguard._step import Training, prepare, step

pytestmark = pytest.mark.gpu
STEPS, ROWS = 400, 32
BASE: dict[str, Any] = {"seq": STEPS, "features": 32, "hidden": 256, "layers": 2, "batch": ROWS}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "segments": {"segments": 8},
    "levels": {"segments": 16, "levels": 2},
    "host": {"segments": 8, "keep": "host"},
    "chunks": {"segments": 8, "recompute": False},
    "window": {"window": 50},
    "accumulated": {"microbatch": 12},
    "offloaded": {"offload": True},
}
MODELS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.2},
    "normalised": {"layer_norm": True},
    "tokens": {"features": None, "vocab": 500},
    "last step": {"head": "last-step"},
    "batch first": {"batch_first": True},
    "two directions": {"bidirectional": True},
    "two directions, padded": {"bidirectional": True, "lengths": {STEPS: 1, 10: 1}},
    "padded": {"lengths": {STEPS: 1, 10: 1}},
    "packed": {"packed": True, "lengths": {STEPS: 1, 10: 1}},
}


def spec_of(cell: str, **fields: Any) -> Spec:
    return Spec(**({"cell": cell} | BASE | fields))


def microbatches(spec: Spec, candidate: Candidate) -> list[Microbatch]:
    """The whole batch, where the candidate has it."""
    home = "cpu" if candidate.keep == "host" else "cuda"
    peaks = []
    for rows in torch.split(torch.arange(spec.batch), candidate.microbatch):
        shape = (len(rows), spec.steps) if spec.batch_first else (spec.steps, len(rows))
        inputs = torch.randn(*shape, spec.inputs) if spec.vocab is None else torch.randint(spec.vocab, shape)
        wanted = shape if spec.head == "per-step" else (len(rows),)
        if spec.loss == "mse":
            targets = torch.randn(*wanted, spec.classes)
        else:
            targets = torch.randint(spec.classes, wanted)
        lengths = None if spec.lengths is None else (rows % 2 * (spec.steps - 10) + 10)
        peaks.append(Microbatch(inputs.to(home), targets.to(home), lengths))
    return peaks


def run(spec: Spec, candidate: Candidate) -> Training:
    training = prepare(spec, candidate, "cuda")
    for _ in range(2):
        step(training, microbatches(spec, candidate), targets=spec.batch * spec.steps, clip=1.0)
    # Adam makes a state for what has had a gradient: every weight was reached
    assert len(training.optimizer.state) == len(trainable(training.model))
    assert all(parameter.grad is None for parameter in training.model.parameters())
    return training


def peak_bytes(spec: Spec, candidate: Candidate) -> int:
    """The peak of a step that finds the optimizer's state, with its data on the card one microbatch at a time."""
    training = run(spec, candidate)
    batches = iter(
        [
            microbatch._replace(inputs=microbatch.inputs.cpu(), targets=microbatch.targets.cpu())
            for microbatch in microbatches(spec, candidate)
        ]
    )
    home = "cpu" if candidate.keep == "host" else "cuda"
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step(
        training,
        (batch._replace(inputs=batch.inputs.to(home), targets=batch.targets.to(home)) for batch in batches),
        targets=spec.batch * spec.steps,
    )
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_every_way_runs_in_every_precision(cell: str, way: str, precision: str) -> None:
    if precision not in open_device("cuda").precisions():
        pytest.skip(f"this card has no {precision}")
    spec = spec_of(cell)
    run(spec, make_candidate(spec, precision=precision, **WAYS[way]))


@pytest.mark.parametrize("way", ["plain", "segments", "host"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_every_kind_of_model_runs(cell: str, model: str, way: str) -> None:
    spec = spec_of(cell, **MODELS[model])
    run(spec, make_candidate(spec, **WAYS[way]))


@pytest.mark.parametrize("way", ["plain", "segments", "host"])
def test_a_projected_lstm_runs(way: str) -> None:
    spec = spec_of("lstm", projection=64)
    run(spec, make_candidate(spec, **WAYS[way]))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_segments_and_the_host_save_memory_of_the_card(cell: str, bidirectional: bool) -> None:
    spec = spec_of(cell, bidirectional=bidirectional)
    peaks = [peak_bytes(spec, make_candidate(spec, **WAYS[way])) for way in ("plain", "segments", "host")]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "offloaded"])
@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_a_step_allocates_what_is_estimated(cell: str, way: str) -> None:
    """Not under-estimated by more than the margin, nor by much too high; a library's workspace can come and go."""
    spec = spec_of(cell, seq=1500)
    candidate = make_candidate(spec, **WAYS[way])
    estimate = estimate_step(spec, candidate, on_card(open_device("cuda").status().known))  # type: ignore[union-attr]
    assert estimate.allocated_bytes is not None
    real = peak_bytes(spec, candidate)
    assert 0.85 * real - (64 << 20) < estimate.allocated_bytes < 1.15 * real + (64 << 20)


def test_an_offloaded_state_is_in_host_memory_between_steps() -> None:
    spec = spec_of("lstm")
    training = run(spec, make_candidate(spec, offload=True))
    states = [value for state in training.optimizer.state.values() for value in state.values() if value.dim()]
    assert states
    assert {value.device.type for value in states} == {"cpu"}


def test_recomputation_leaves_the_random_numbers_of_the_card_where_chunks_leave_them() -> None:
    """Chunks draw as many numbers in the same order, and recompute nothing."""
    spec, states = spec_of("gru", dropout=0.3), []
    for way in ("chunks", "segments"):
        torch.cuda.manual_seed(0)
        run(spec, make_candidate(spec, **WAYS[way]))
        states.append(torch.cuda.get_rng_state())
    torch.cuda.manual_seed(0)
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], torch.cuda.get_rng_state())
