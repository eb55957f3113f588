"""Tiny deterministic trainings for the tests of checkpoints."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oomguard._rnn import Microbatch
from oomguard._spec.candidate import make_candidate
from oomguard._spec.spec import Spec
from oomguard._step import Training, prepare, step
from oomguard._train.checkpoint import Checkpoint, load

STEPS, ROWS = 5, 4


def spec_of(**more: Any) -> Spec:
    given: dict[str, Any] = {"cell": "gru", "seq": STEPS, "vocab": 7, "hidden": 4, "dropout": 0.3, "batch": ROWS}
    return Spec(**given | more)


PLAIN = spec_of()


def train(training: Training, first: int, last: int) -> None:
    """Make optimizer steps on data that depends only on the number of the step."""
    spec = training.model.spec
    for number in range(first, last):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 7, (STEPS, ROWS), generator=generator)
        inputs = tokens if spec.vocab else torch.randn(STEPS, ROWS, 3, generator=generator)
        targets = tokens if spec.vocab else inputs[..., :1]
        batch = Microbatch(inputs.to(training.model.device), targets.to(training.model.device))
        step(training, [batch], tokens.numel(), clip=1.0)


def new_training(spec: Spec = PLAIN, seed: int = 0, device: str = "cpu", **knobs: Any) -> Training:
    torch.manual_seed(seed)
    return prepare(spec, make_candidate(spec, **knobs), device, lr=1e-2)


def trained_for(steps: int, spec: Spec = PLAIN, **knobs: Any) -> Training:
    training = new_training(spec, **knobs)
    train(training, 0, steps)
    return training


def load_newest(directory: Path) -> Checkpoint:
    checkpoint = load(directory)
    assert checkpoint is not None
    return checkpoint


def state_bits(training: Training) -> dict[str, bytes]:
    """All state that a step changes, as bytes."""
    state: dict[str, Any] = {name: value.detach() for name, value in training.model.named_parameters()}
    for number, parameter in enumerate(training.model.parameters()):
        state |= {f"{number} {key}": value for key, value in training.optimizer.state.get(parameter, {}).items()}
    state["random"] = torch.get_rng_state()
    if training.model.device.type == "cuda":
        state["random of the card"] = torch.cuda.get_rng_state(training.model.device)
    dense = {k: v.to_dense() if isinstance(v, Tensor) else torch.tensor(v) for k, v in state.items()}
    return {key: str(value.dtype).encode() + value.cpu().numpy().tobytes() for key, value in dense.items()}
