"""Random numbers: the states of all generators that a step may draw from, and how they are set back."""

import random
from collections.abc import Callable, Mapping

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
