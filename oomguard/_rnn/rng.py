"""Random numbers: the states of all generators that a step may draw from, and how they are set back."""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def remember_random() -> Callable[[], None]:
    """Return a function that sets Python's and NumPy's global random numbers back to their present states."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)

    return restore


def remember_all(device: torch.device) -> Callable[[], None]:
    """Return a function that sets PyTorch's random numbers back too, on the CPU and on a device."""
    restore_others, states = remember_random(), rng_states(device)

    def restore() -> None:
        restore_others()
        set_rng_states(device, states)

    return restore


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the random number generators that a step uses: `cpu` and, on a card, `cuda`."""
    states = {"cpu": torch.get_rng_state()}
    return states if device.type == "cpu" else states | {"cuda": torch.cuda.get_rng_state(device)}


def set_rng_states(device: torch.device, states: Mapping[str, Tensor]) -> None:
    """Let random numbers continue from these states; a card keeps its own if they were taken without one."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def global_states() -> dict[str, Tensor]:
    """The states of Python's and NumPy's global generators as tensors of JSON."""
    kind, numbers, *others = np.random.get_state(legacy=True)
    states = {"python": random.getstate(), "numpy": [kind, np.asarray(numbers).tolist(), *others]}
    return {name: torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8) for name, state in states.items()}


def set_global_states(states: Mapping[str, Tensor]) -> None:
    """Let Python's and NumPy's random numbers continue from these states, as far as they are there."""
    read = {name: json.loads(bytes(states[name].tolist())) for name in ("python", "numpy") if name in states}
    if "python" in read:
        version, numbers, gauss = read["python"]
        random.setstate((version, tuple(numbers), gauss))
    if "numpy" in read:
        np.random.set_state(tuple(read["numpy"]))


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Let the random numbers of Python, NumPy and PyTorch on the CPU follow from these numbers for a while."""
    restore = remember_all(torch.device("cpu"))
    number = int(np.random.SeedSequence(numbers).generate_state(1, np.uint32)[0])
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)  # torch.manual_seed would seed the cards too
    try:
        yield
    finally:
        restore()
