"""Backward passes from any tensors with given gradients, without the modules that PyTorch imports for that."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Tensors = list[Tensor]
Gradients = list[Tensor | None]
Ends = list[tuple[Tensor, Tensor]]  # tensors that a backward pass starts from, each with its gradient


class _Seed(torch.autograd.Function):
    """A number whose backward pass hands given gradients to given tensors.

    If it is given gradients, torch.autograd imports sympy (35 MiB and 2 s, torch 2.13). For one number it needs none.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Tensors, *ends: Tensor) -> Tensor:
        ctx.gradients = gradients
        return ends[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, []  # let go of them as soon as they are used
        return None, *gradients


def seed(ends: Ends) -> Tensor:
    """Return a number whose backward pass starts from tensors with their gradients."""
    apply: Callable[..., Tensor] = _Seed.apply
    return apply([gradient.to(end.dtype) for end, gradient in ends], *(end for end, _ in ends))


def gradients_of(starts: Tensors, ends: Ends) -> Gradients:
    """Return the gradients of tensors, from those of the ends; None for tensors that need none or have none."""
    wanted = [tensor for tensor in starts if tensor.requires_grad]
    ends = [(end, gradient) for end, gradient in ends if end.requires_grad]
    if not wanted or not ends:
        return [None for _ in starts]
    found = iter(torch.autograd.grad(seed(ends), wanted, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in starts]
