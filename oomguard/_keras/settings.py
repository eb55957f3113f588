"""The settings of a layer with checks, and what is noted while a model is built."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from oomguard._core.errors import MisuseError, shown, visible
from oomguard._keras.graph import Layer

MOST = 1 << 40  # the largest whole number of a setting
Function = Callable[[Tensor], Tensor]


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


ACTIVATIONS: dict[str, Function] = {
    "linear": lambda x: x,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "softmax": _softmax,
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "gelu": F.gelu,
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "log_sigmoid": F.logsigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "mish": F.mish,
    "hard_sigmoid": F.hardsigmoid,
    "hard_silu": F.hardswish,
    "hard_swish": F.hardswish,
    "exponential": torch.exp,
}
"""Activations by the name that Keras gives them."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Reads the settings of one layer. A setting of the wrong form is refused with the name of the layer."""

    layer: Layer
    notes: list[str] = field(default_factory=list)  # what differs from Keras, for the user

    def whole(self, name: str, usual: int | None = None, low: int = 1) -> int:
        """A whole number."""
        value = self.layer.settings.get(name, usual)
        if type(value) is not int or not low <= value <= MOST:
            raise self.wrong(name, f"a whole number from {low}", value)
        return value

    def number(self, name: str, usual: float) -> float:
        """A number from 0 to 1, such as the rate of a dropout."""
        value = self.layer.settings.get(name, usual)
        value = usual if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self.wrong(name, "a number from 0 to 1", value)
        return float(value)

    def switch(self, name: str, usual: bool) -> bool:
        """True or false."""
        value = self.layer.settings.get(name, usual)
        if type(value) is not bool:
            raise self.wrong(name, "true or false", value)
        return value

    def choice(self, name: str, usual: str, choices: tuple[str, ...]) -> str:
        """One of some words."""
        value = self.layer.settings.get(name, usual)
        if value not in choices:
            raise self.wrong(name, f"one of {', '.join(choices)}", value)
        return str(value)

    def sizes(self, name: str, count: int, usual: Any = None, low: int = 1) -> tuple[int, ...]:
        """So many whole numbers; one number stands for all of them."""
        value = self.layer.settings.get(name, usual)
        value = usual if value is None else value
        listed = [value] * count if type(value) is int else value
        if not isinstance(listed, list | tuple) or len(listed) != count:
            raise self.wrong(name, f"{count} whole numbers", value)
        if not all(type(size) is int and low <= size <= MOST for size in listed):
            raise self.wrong(name, f"{count} whole numbers from {low}", value)
        return tuple(listed)

    def inner(self, name: str) -> Any:
        """The serialized layer inside of a layer such as TimeDistributed."""
        return self.layer.settings.get(name)

    def activation_name(self, name: str = "activation", usual: str = "linear") -> str:
        """The name of an activation, which Keras 3 writes as a word or as an object."""
        value = self.layer.settings.get(name, usual)
        if isinstance(value, dict):
            inner = value.get("config")
            value = inner if isinstance(inner, str) else value.get("class_name")
        value = usual if value is None else value
        return value.lower() if isinstance(value, str) else "unknown"

    def activation(self) -> Function:
        """The activation of a layer as a function. One that is not known is left out, by name."""
        name = self.activation_name()
        if name not in ACTIVATIONS:
            self.note(f"its activation {visible(shown(name))} is not known and is left out")
        return ACTIVATIONS.get(name, ACTIVATIONS["linear"])

    def note(self, what: str) -> None:
        """Note what differs from Keras."""
        self.notes.append(f"Layer {self.layer.label}: {what}.")

    def wrong(self, name: str, form: str, value: object) -> MisuseError:
        """The error for a setting of the wrong form."""
        return self.layer.wrong(f"its {name} must be {form}, not {visible(shown(value))}")
