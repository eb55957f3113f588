"""Adam and AdamW with their state in 8 bits, on any device: the numbers and the arithmetic of torchao, piece by piece.

torchao's own classes compile their update, which takes a C++ compiler and about a minute before the first step. Without
compiling, they need 13 copies of the largest weight at once. Here a weight is updated in pieces of `PIECE` elements,
with the same result, and the state is kept as plain tensors, so that checkpoints can hold it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oomguard._core.errors import MisuseError
from oomguard._estimate.terms import QUANTILE_BLOCK, UPDATED_PIECE, is_quantised

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""The entries of the state of a weight, and whether their numbers have a sign."""
_SCALE = "_scale"  # added to the name of a moment: the scales of its blocks


class TorchaoAdam8bit(Optimizer):
    """Adam with both moments of every large weight in 8 bits."""

    decoupled = False  # whether the weight decay is that of AdamW
    usual_decay = 0.0

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
    ) -> None:
        _torchao()  # an error comes now, and not in the first step
        decay = self.usual_decay if weight_decay is None else weight_decay
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay})

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first update."""
        state = {"step": torch.zeros(())}
        for name in MOMENTS:
            if is_quantised(parameter.numel()):
                state[name] = torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False)
                state[name + _SCALE] = parameter.new_zeros(parameter.numel() // QUANTILE_BLOCK)
            else:
                state[name] = torch.zeros_like(parameter, requires_grad=False)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "an update is made from the gradient"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if not self.state[parameter]:
                        self.state[parameter].update(self.new_state(parameter))
                    self._update(parameter, self.state[parameter], group)

    def _update(self, parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        _, update, _ = _torchao()
        state["step"] += 1
        weights, gradient = parameter.detach().view(-1), parameter.grad.reshape(-1)
        for start in range(0, len(weights), UPDATED_PIECE):
            piece = slice(start, start + UPDATED_PIECE)
            moments = [_moment(state, name, signed, piece) for name, signed in MOMENTS.items()]
            numbers = (torch.tensor(group["lr"]), *group["betas"], group["weight_decay"], group["eps"])
            update(weights[piece], gradient[piece], state["step"], *moments, None, *numbers, self.decoupled, False)


class TorchaoAdamW8bit(TorchaoAdam8bit):
    """AdamW with both moments of every large weight in 8 bits."""

    decoupled = True
    usual_decay = 1e-2


def _moment(state: dict[str, Tensor], name: str, signed: bool, piece: slice) -> Tensor:
    """Some elements of a moment, to be read and changed in place."""
    values, scales = state[name].view(-1)[piece], state.get(name + _SCALE)
    if scales is None:
        return values
    kept, _, _ = _torchao()
    first = piece.start // QUANTILE_BLOCK
    scales = scales[first : first + len(values) // QUANTILE_BLOCK]
    moment: Tensor = kept(values, scales, _levels(signed, values.device), signed, torch.float32)
    return moment


@cache
def _levels(signed: bool, device: torch.device) -> Tensor:
    """The 256 numbers that a byte can stand for, as shares of the scale of its block."""
    return torch.tensor(_torchao()[2](signed), dtype=torch.float32, device=device)


@cache
def _torchao() -> tuple[Any, Any, Any]:
    """torchao's tensor of 8 bits, its update of one weight, and the function that makes the 256 numbers."""
    try:
        with _without_warnings():
            from torchao.optim.adam import single_param_adam
            from torchao.optim.quant_utils import create_dynamic_map
            from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise MisuseError(
            rule="An optimizer state in 8 bits needs the package torchao",
            got=f"it could not be imported ({error})",
            advice='Run pip install "oomguard[torchao]", or leave --state-8bit and --optimizer adam8bit out.',
        ) from None
    return OptimState8bit, single_param_adam, create_dynamic_map


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide what torchao logs on import about kernels for cards, of which none is used here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
