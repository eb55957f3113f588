"""Random numbers: the states of all generators that a step may draw from, and how they are set back."""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

Restore = Callable[[], None]  # sets random numbers back


def remember(*generators: torch.Generator) -> Restore:
    """Return a function that sets generators of PyTorch back to their present states."""
    return _all_of(*(partial(generator.set_state, generator.get_state()) for generator in generators))


def remember_random() -> Restore:
    """Return a function that sets Python's and NumPy's global random numbers back to their present states."""
    numpy = np.random.get_state(legacy=False)
    return _all_of(partial(random.setstate, random.getstate()), partial(np.random.set_state, numpy))


def remember_all(device: torch.device) -> Restore:
    """Return a function that sets PyTorch's random numbers back too, on the CPU and on a device."""
    return _all_of(remember_random(), remember(*generators_of(device)))


def _all_of(*marks: Callable[[], object]) -> Restore:
    def restore() -> None:
        for mark in marks:
            mark()

    return restore


def generators_of(device: torch.device) -> list[torch.Generator]:
    """PyTorch's generators that a step may draw from: that of the CPU and, on a card, the card's own."""
    if device.type == "cpu":
        return [torch.default_generator]
    present = torch.cuda.current_device()  # makes the generators if nothing has used a card yet
    return [torch.default_generator, torch.cuda.default_generators[present if device.index is None else device.index]]


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the random number generators that a step uses: `cpu` and, on a card, `cuda`."""
    return {generator.device.type: generator.get_state() for generator in generators_of(device)}


def set_rng_states(device: torch.device, states: Mapping[str, Tensor]) -> None:
    """Let random numbers continue from these states; a card keeps its own if they were taken without one."""
    for generator in generators_of(device):
        if generator.device.type in states:
            generator.set_state(states[generator.device.type])


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
